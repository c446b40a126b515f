"""The library works without what is built on it: the zoo and the command line."""

import subprocess
import sys
import zipfile

import keras
import pytest

from tests.support.processes import ROOT, child_environment

APPLICATIONS = ("trellis_keras/zoo/", "trellis_keras_command.py")

USE = """
import pathlib, sys
# Without the finder of an editable install, which has the missing packages.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import keras, numpy as np
import trellis_keras
from trellis_keras import export, layers, models, theorem1
from keras_streams import compiled_step

folder = pathlib.Path(sys.argv[1])
assert folder in pathlib.Path(trellis_keras.__file__).parents
assert not hasattr(trellis_keras, "zoo")

x = np.random.RandomState(0).normal(size=(8, 12, 3)).astype("float32")
model = models.SequenceClassifier(layers.TCN(4, 2, 2, return_sequences=False), 2)
model.compile("adam")
model.fit(x, np.arange(8) % 2, verbose=0)
step, cache = compiled_step(model), model.initial_cache(8)
for t in range(12):
    logits, cache = step(x[:, t], cache)
np.testing.assert_allclose(logits, model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
export.export(model, folder / "served")
assert (folder / "served" / "1" / "saved_model.pb").is_file()

lstm = keras.layers.LSTM(3)
expected = lstm(x)
np.testing.assert_allclose(theorem1.to_trellis(lstm, 12)(x), expected, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="exports a SavedModel")
def test_a_wheel_of_the_library_alone(tmp_path):
    run("-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (built,) = tmp_path.glob("*.whl")
    alone = tmp_path / "alone" / built.name
    alone.parent.mkdir()
    with zipfile.ZipFile(built) as wheel, zipfile.ZipFile(alone, "w") as library:
        for name in wheel.namelist():
            content = wheel.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not line.startswith(APPLICATIONS))
            if not name.startswith(APPLICATIONS):
                library.writestr(name, content)
    installed = tmp_path / "installed"
    run("-m", "pip", "install", "-q", "--no-deps", "--target", installed, alone)
    run("-c", USE, installed, cwd=tmp_path, env=child_environment() | {"PYTHONPATH": installed})


def run(*arguments, **options):
    """Runs Python, and shows what it printed if it failed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)
    assert not done.returncode, done.stderr
