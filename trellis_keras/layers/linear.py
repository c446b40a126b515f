"""The product of a `keras.layers.Dense`."""

import functools

import keras
from keras import ops

from trellis_keras.kernels.products import matmul, multiply_rows
from trellis_keras.types import Tensor


def linear(layer: keras.layers.Dense, x: Tensor) -> Tensor:
    """Returns the output of a `keras.layers.Dense` without an activation.

    TensorFlow sums the bfloat16 bias gradient of `layer(x)` in bfloat16, of `y + b` in float32.

    Args:
        layer: The built layer. It is called if it is quantized, because its scales are its own, and
            while a stream is made, because a matrix of all rows has no time axis.
        x: Tensor (..., in) of the compute dtype.
    """
    if layer.quantization_mode is not None or isinstance(x, keras.KerasTensor):
        return layer(x)
    product = functools.partial(matmul, compute_dtype=x.dtype, dtype=x.dtype)
    return multiply_rows(product, x, layer.kernel) + ops.cast(layer.bias, x.dtype)
