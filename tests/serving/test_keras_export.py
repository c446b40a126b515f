"""Keras' own `Model.export` writes language models too, also as a part of another model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel

V = 9
TOKENS = np.random.default_rng(0).integers(0, V, (2, 6)).astype("int32")


def language_model():
    model = LanguageModel(V, 4, TrellisLayer(6, 3, output_units=4, seed=0), seed=0)
    model.build((None, None))
    return model


def around(model):
    tokens = keras.Input((None,), dtype="int32")
    return keras.Model(tokens, model(tokens))


def test_export(tmp_path):
    model = language_model()
    for name, exported in {"itself": model, "around": around(model)}.items():
        exported.export(tmp_path / name, verbose=False)
        served = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_allclose(served.serve(TOKENS), model(TOKENS), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_tokens_must_be_integers(dtype):
    model = LanguageModel(V, 4, TrellisLayer(4, 2, dtype=dtype), dtype=dtype)
    with pytest.raises(ValueError, match="Tokens must be integers"):
        model(TOKENS.astype("float32"))
