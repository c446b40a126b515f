"""Custom gradients, on the backends that support them."""

from collections.abc import Callable

import keras
from keras import ops


def custom_gradient(function: Callable) -> Callable:
    """Attaches a gradient to a function, as `keras.ops.custom_gradient` does.

    On the PyTorch backend, where Keras' decorator supports only functions with one output, PyTorch
    differentiates the forward pass instead: the same gradient, with more memory.

    Args:
        function: Function of tensors that returns its outputs and the function of their gradient.
    """
    if keras.backend.backend() != "torch":
        return ops.custom_gradient(function)
    return lambda *inputs: function(*inputs)[0]
