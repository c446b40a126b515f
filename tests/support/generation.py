"""Small language models that write, and what they should have written."""

import contextlib

import keras
import numpy as np
from keras import ops

from tests.support.layer_checks import compiled
from trellis_keras.layers import StackedRNN, TrellisLayer
from trellis_keras.models import LanguageModel

SIZE = 11


def without_x64():
    """Context of a thread: Keras-NLP's samplers fail on JAX if Python's integers have 64 bits."""
    if keras.backend.backend() != "jax" or keras.config.floatx() == "float64":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(False)


def make(vocabulary=None, backbone=None, size=SIZE, **options):
    """A model whose next-token distributions are far from uniform and from one another."""
    size = size if vocabulary is None else len(vocabulary)
    options = {"tie_embeddings": False} | options
    glorot = keras.initializers.GlorotUniform
    if backbone is None:
        backbone = TrellisLayer(
            12,
            4,
            output_units=8,
            kernel_initializer=glorot(seed=1),
            recurrent_initializer=glorot(seed=2),
        )
    model = LanguageModel(
        size,
        8,
        backbone,
        vocabulary=vocabulary,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0, seed=3),
        **options,
    )
    model.build((None, None))
    if not options["tie_embeddings"]:
        model.head.kernel.assign(4 * keras.initializers.RandomNormal(seed=4, stddev=1.0)((8, size)))
    return model


def rerun_greedily(model, prompts, max_length):
    """Argmax of the whole model, run again over the whole window for every token.

    Args:
        prompts: Rows of ids, also of different lengths.
    """
    lengths = np.array([len(row) for row in prompts])
    ids = np.zeros((len(prompts), max_length), "int32")
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    forward = compiled(model)
    for t in range(lengths.min(), max_length):
        # What stands behind t is not seen: the model is causal.
        best = np.asarray(forward(ops.convert_to_tensor(ids)))[:, t - 1].argmax(axis=-1)
        ids[:, t] = np.where(t < lengths, ids[:, t], best)
    return ids


# Models of 7 tokens around backbones of 5 channels


def small(backbone, **options):
    """A built model with embeddings of order 1."""
    normal = keras.initializers.RandomNormal(stddev=1.0, seed=3)
    model = LanguageModel(7, 5, backbone, embeddings_initializer=normal, **options)
    model.build((None, None))
    return model


def recurrent():
    layer = keras.layers.SimpleRNN(5, return_sequences=True, return_state=True)
    return StackedRNN([layer])


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 7, shape)
