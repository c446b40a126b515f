"""Matrix products in the compute dtype, against NumPy."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from trellis_keras.kernels.products import matmul

pytestmark = pytest.mark.both_backends
RANDOM = np.random.default_rng(0)
# Small whole numbers: bfloat16 holds them and their products exactly.
X, KERNEL, UPSTREAM = (RANDOM.integers(-4, 5, s) for s in ((2, 3, 5), (5, 4), (2, 3, 4)))


def tensor(array, dtype):
    return ops.convert_to_tensor(array.astype("float32"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("result", ["float32", "bfloat16"])
def test_matmul(dtype, result):
    y = matmul(tensor(X, dtype), tensor(KERNEL, dtype), dtype, result)
    assert keras.backend.standardize_dtype(y.dtype) == result
    np.testing.assert_array_equal(ops.convert_to_numpy(ops.cast(y, "float32")), X @ KERNEL)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="the gradient is written for JAX")
@pytest.mark.parametrize("width", [5, 6])
def test_gradients_of_bfloat16_products(width):
    import jax

    x = np.concatenate([X, X], axis=-1)[..., :width]
    kernel = np.concatenate([KERNEL, KERNEL], axis=0)[:width]
    operands = tensor(x, "bfloat16"), tensor(kernel, "bfloat16")
    y, gradient = jax.vjp(lambda *o: matmul(*o, "bfloat16", "float32"), *operands)
    dx, dkernel = gradient(tensor(UPSTREAM, "float32"))
    assert {dx.dtype.name, dkernel.dtype.name} == {"bfloat16"}
    np.testing.assert_array_equal(y, x @ kernel)
    np.testing.assert_array_equal(dx.astype("float32"), UPSTREAM @ kernel.T)
    np.testing.assert_array_equal(dkernel.astype("float32"), np.einsum("btc,btd->cd", x, UPSTREAM))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="XLA's products on JAX")
def test_no_bfloat16_product_is_computed_in_float32():
    """Products of bfloat16 tensors, forward and backward, are left to the bfloat16 units."""
    import jax

    operands = [ops.ones(shape, "bfloat16") for shape in ((64, 128), (128, 256))]

    def loss(x, kernel):
        return ops.sum(matmul(x, kernel, "bfloat16", "float32") ** 2)

    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    compiled = function.lower(*operands).compile().as_text()
    assert " dot(" in compiled
    assert not re.search(r"= f32\S* convert\(", compiled)
