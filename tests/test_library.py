"""The library works without what is built on it: the zoo and the command line."""

import keras
import pytest

from tests.support.processes import run_script

USE = """
import pathlib, sys
import keras, numpy as np
import trellis_keras
from trellis_keras import export, layers, models, theorem1
from keras_streams import compiled_step

assert not hasattr(trellis_keras, "zoo")
x = np.random.RandomState(0).normal(size=(8, 12, 3)).astype("float32")
model = models.SequenceClassifier(layers.TCN(4, 2, 2, return_sequences=False), 2)
model.compile("adam")
model.fit(x, np.arange(8) % 2, verbose=0)
step, cache = compiled_step(model), model.initial_cache(8)
for t in range(12):
    logits, cache = step(x[:, t], cache)
np.testing.assert_allclose(logits, model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
served = pathlib.Path(sys.argv[1]) / "served"
export.export(model, served)
assert (served / "1" / "saved_model.pb").is_file()

lstm = keras.layers.LSTM(3)
expected = lstm(x)
np.testing.assert_allclose(theorem1.to_trellis(lstm, 12)(x), expected, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="exports a SavedModel")
def test_the_library_alone(tmp_path):
    run_script(USE, tmp_path, block=("trellis_keras.zoo", "trellis_keras_command"))
