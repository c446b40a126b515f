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
    if keras.backend.backend() == "jax":
        from trellis_keras.kernels import products_jax

        if products_jax.needs_float32_result(x):
            return products_jax.bfloat16_matmul(x, kernel).astype(dtype)
    return ops.cast(ops.matmul(x, kernel), dtype)
