"""Custom gradients, on the backends that support them."""

from collections.abc import Callable

import keras
from keras import ops


def custom_gradient(function: Callable) -> Callable:
    """Attaches a gradient to a function, as `keras.ops.custom_gradient` does.

    On the PyTorch backend, where Keras' decorator supports only functions with one output, PyTorch
    differentiates the forward pass instead: the same gradient, with more memory.

    Args:
        function: Function of tensors that returns its outputs, and a function of their gradients
            that returns those of the inputs.
    """
    if keras.backend.backend() == "torch":
        return lambda *inputs: function(*inputs)[0]

    def with_flat_upstream(*inputs):
        outputs, gradient = function(*inputs)

        def flat(*upstream, **_):
            # TensorFlow passes the gradients of several outputs one by one, JAX as one tuple.
            return gradient(*(upstream[0] if isinstance(upstream[0], (tuple, list)) else upstream))

        return outputs, flat

    return ops.custom_gradient(with_flat_upstream)
