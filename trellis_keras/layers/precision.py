"""Which precision states, softmaxes and losses are computed in."""

import contextlib

import keras
from keras import ops


def at_least_float32(dtype):
    """float32 for the half precisions, else `dtype` itself.

    `keras.backend.result_type(dtype, "float32")` will not do: except on TensorFlow it answers
    float32 for float64 too.
    """
    return "float32" if dtype in ("float16", "bfloat16") else dtype


@contextlib.contextmanager
def default_policy(name):
    """Layers made in this context compute in the dtype policy `name`. None: nothing changes."""
    before = keras.config.dtype_policy()
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def tanh(x):
    """Hyperbolic tangent that stays in float64 (`keras.ops.tanh` leaves it on JAX)."""
    if keras.backend.standardize_dtype(x.dtype) == "float64":
        return 2 * ops.sigmoid(2 * x) - 1
    return ops.tanh(x)
