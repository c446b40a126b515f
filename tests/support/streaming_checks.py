"""The check of every layer that streams: stream equals forward."""

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import streaming

# Largest error divided by max|reference|.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def compiled(function):
    """`function` of tensors, compiled by XLA on whichever backend is running."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True)


def assert_close(actual, reference, tolerance=None):
    """Arrays agree to the tolerance of this process' floatx, or to another."""
    actual, reference = np.asarray(actual), np.asarray(reference)
    assert actual.dtype == reference.dtype == keras.config.floatx()
    assert actual.shape == reference.shape, f"{actual.shape} != {reference.shape}"
    scale = max(np.max(np.abs(reference), initial=0.0), 1e-30)
    error = np.max(np.abs(actual - reference), initial=0.0) / scale
    limit = tolerance or TOLERANCE[keras.config.floatx()]
    assert error <= limit, f"error {error:.3g} > {limit:.3g}"


def check_streaming(layer, x, steps, **initial):
    """Asserts that a causal layer follows the protocol of `layers.streaming`.

    Prefill equals forward; steps and then, from their cache, a prefill equal forward; both leave
    the same cache; each tensor of the cache has the batch as its first axis.

    Args:
        layer: Built layer from (batch, time, channels) to (batch, time, filters).
        x: Array (batch, time, channels).
        steps: Number of steps, in 0 < steps < time, before the prefill.
        **initial: Arguments of both the call and `initial_cache`, such as `initial_state`.
    """
    x = ops.convert_to_tensor(np.asarray(x, keras.config.floatx()))
    start = layer.initial_cache(x.shape[0], **initial)
    for leaf in keras.tree.flatten(start):
        assert leaf.shape[0] == x.shape[0], "the batch is not the first axis of the cache"

    @compiled
    def stream(x, start):
        whole, filled = layer.prefill(x, start)
        stepped, cache = streaming.step_through(layer, x[:, :steps], start)
        rest, cache = layer.prefill(x[:, steps:], cache)
        pieces = ops.concatenate([stepped, rest], axis=1)
        return layer(x, **initial), whole, filled, pieces, cache

    forward, whole, filled, pieces, cache = stream(x, start)
    assert_close(whole, forward)
    assert_close(pieces, forward)
    keras.tree.assert_same_structure(filled, cache)
    for a, b in zip(keras.tree.flatten(filled), keras.tree.flatten(cache), strict=True):
        assert_close(a, b)
