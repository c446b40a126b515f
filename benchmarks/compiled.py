"""Compiled inference: a loop of streaming steps, or one pass over a window or sequence."""

import keras
import numpy as np
from keras import ops

from keras_streams.xla import compile_xla


def compiled_steps(layer, x, width):
    """Returns a function that streams inputs (batch, n, ...) and returns the number of steps n.

    Args:
        layer: Model or layer that streams.
        x: Array whose second axis is time.
        width: Channels of the layer's output.
    """
    cache = layer.initial_cache(len(x))
    flat = keras.tree.flatten(cache)
    n = x.shape[1]

    def stream(x, *leaves):
        def turn(i, y, *leaves):
            state = keras.tree.pack_sequence_as(cache, leaves)
            y, state = layer.step(ops.take(x, i, axis=1), state)
            return i + 1, y, *keras.tree.flatten(state)

        y = ops.zeros((x.shape[0], width))
        return ops.while_loop(lambda i, *_: i < n, turn, (0, y, *leaves))[1]

    return _run(stream, layer.variables, x, flat, n)


def compiled_window(model, x, jit_compile=True):
    """Returns a function that computes the last output of a window (batch, time, ...): one step."""

    def window(x):
        y = model(x, training=False)
        return y[:, -1] if len(y.shape) == 3 else y

    return _run(window, model.variables, x, [], 1, jit_compile)


def compiled_call(function, variables, x, jit_compile=True):
    """Returns a function that computes all outputs of inputs (batch, time, ...): one step."""
    return _run(lambda x: function(x, training=False), variables, x, [], 1, jit_compile)


def _run(function, variables, x, leaves, amount, jit_compile=True):
    x = ops.convert_to_tensor(x)
    if jit_compile:
        compiled = compile_xla(function, variables)
    else:
        import tensorflow as tf  # JAX has no graphs without XLA

        compiled = tf.function(function)

    def step():
        np.asarray(compiled(x, *leaves))
        return amount

    return step
