"""Compiled inference: a loop of cached steps, or one pass over a window."""

import keras
import numpy as np
from keras import ops


def compiled_steps(model, tokens):
    """Returns a function that streams (batch, n) tokens and returns n, the steps it took."""
    cache = model.initial_cache(len(tokens))
    flat = keras.tree.flatten(cache)
    n = tokens.shape[1]

    def stream(tokens, *leaves):
        def turn(i, scores, *leaves):
            state = keras.tree.pack_sequence_as(cache, leaves)
            y, state = model.step(ops.take(tokens, i, axis=1), state)
            return i + 1, y, *keras.tree.flatten(state)

        scores = ops.zeros((tokens.shape[0], model.vocabulary_size))
        return ops.while_loop(lambda i, *_: i < n, turn, (0, scores, *leaves))[1]

    return _run(stream, tokens, flat, n, model)


def compiled_window(model, tokens):
    """Returns a function that scores the last position of a (batch, time) window: one token."""

    def window(tokens):
        return model(tokens, training=False)[:, -1]

    return _run(window, tokens, [], 1, model)


def _run(function, tokens, leaves, amount, model):
    tokens = ops.convert_to_tensor(tokens)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(function, jit_compile=True)
    else:
        import jax

        compiled = jax.jit(function)

    def step():
        np.asarray(compiled(tokens, *leaves))
        return amount

    return step
