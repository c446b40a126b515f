"""Matrix products in the compute dtype."""

from collections.abc import Callable

import keras
from keras import ops

from trellis_keras.types import Tensor


def matmul(x: Tensor, kernel: Tensor, compute_dtype: str, dtype: str) -> Tensor:
    """Multiplies x (..., in) by a kernel (in, out).

    Args:
        x, kernel: Tensors.
        compute_dtype: Dtype of the operands.
        dtype: Dtype of the result.
    """
    x, kernel = ops.cast(x, compute_dtype), ops.cast(kernel, compute_dtype)
    if needs_float32_result(x):
        from trellis_keras.kernels.products_jax import bfloat16_matmul

        return ops.cast(bfloat16_matmul(x, kernel), dtype)
    return ops.cast(ops.matmul(x, kernel), dtype)


def flatten_rows(x: Tensor) -> Tensor:
    """Returns x (..., channels) as a matrix with a row per position."""
    return ops.reshape(x, (-1, x.shape[-1]))


def multiply_rows(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, kernel: Tensor) -> Tensor:
    """Multiplies x (..., in) by a kernel (in, out) with a function that multiplies matrices."""
    y = product(flatten_rows(x), kernel)
    return ops.reshape(y, (*ops.shape(x)[:-1], kernel.shape[-1]))


def needs_float32_result(x: Tensor) -> bool:
    """Returns whether products of x are faster with a float32 result, see `products_jax`."""
    if keras.backend.backend() != "jax" or keras.backend.standardize_dtype(x.dtype) != "bfloat16":
        return False
    import jax

    return jax.default_backend() == "cpu"
