"""Activations that keep float64."""

from collections.abc import Callable

import keras
from keras import ops

from trellis_keras.types import Tensor


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent that keeps float64 (`keras.ops.tanh` does not on JAX)."""
    if keras.backend.standardize_dtype(x.dtype) == "float64":
        return 2 * ops.sigmoid(2 * x) - 1
    return ops.tanh(x)


def activate(activation: Callable, x: Tensor) -> Tensor:
    """Returns `activation(x)`, using a `tanh` that keeps float64."""
    return tanh(x) if activation is keras.activations.tanh else activation(x)
