"""Matrix products in the compute dtype."""

import keras
from keras import ops

from trellis_keras.types import Tensor


def matmul(x: Tensor, kernel: Tensor, dtype: str) -> Tensor:
    """Multiplies x (..., in) by a kernel (in, out) of the same dtype.

    Args:
        x, kernel: Tensors of the compute dtype.
        dtype: Dtype of the result.
    """
    if needs_float32_result(x):
        from trellis_keras.kernels.products_jax import bfloat16_matmul

        return ops.cast(bfloat16_matmul(x, kernel), dtype)
    return ops.cast(ops.matmul(x, kernel), dtype)


def needs_float32_result(x: Tensor) -> bool:
    """Returns whether products of x are faster with a float32 result, see `products_jax`."""
    if keras.backend.backend() != "jax" or keras.backend.standardize_dtype(x.dtype) != "bfloat16":
        return False
    import jax

    return jax.default_backend() == "cpu"
