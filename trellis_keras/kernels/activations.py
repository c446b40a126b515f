"""Activations that keep float64, the gates of an LSTM, and dropout masks."""

from collections.abc import Callable

import keras
from keras import ops

from trellis_keras.types import Tensor


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent that keeps float64 (`keras.ops.tanh` does not on JAX)."""
    if keras.backend.standardize_dtype(x.dtype) == "float64":
        return 2 * ops.sigmoid(2 * x) - 1
    return ops.tanh(x)


def lstm(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the next h and c of an LSTM.

    Args:
        a: Pre-activations (..., 4 * units), blocks in Keras' order i, f, g, o.
        c: Cell state (..., units).
    """
    i, f, g, o = ops.split(a, 4, axis=-1)
    c = ops.sigmoid(f) * c + ops.sigmoid(i) * tanh(g)
    return ops.sigmoid(o) * tanh(c), c


def activate(activation: Callable, x: Tensor) -> Tensor:
    """Returns `activation(x)`, using a `tanh` that keeps float64."""
    return tanh(x) if activation is keras.activations.tanh else activation(x)


def drop(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x times a dropout mask, or x if the mask is None."""
    return x if mask is None else x * ops.cast(mask, x.dtype)
