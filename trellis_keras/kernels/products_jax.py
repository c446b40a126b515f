"""bfloat16 products on a CPU with JAX, using the processor's bfloat16 units.

XLA converts the operands to float32 and computes at float32 speed, unless the result is float32
and the left operand is contracted over its last axis. All three products, the forward one and
those of both gradients, are therefore written in this form. The units accumulate in float32 anyway.
"""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def bfloat16_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies bfloat16 tensors x (..., in) and kernel (in, out); the result is float32."""
    return _product(x, kernel, 0)


def _forward(x, kernel):
    return bfloat16_matmul(x, kernel), (x, kernel)


def _backward(operands, d):
    x, kernel = operands
    d = d.astype(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    d_kernel = _product(_transposed(rows), d.reshape(-1, d.shape[-1]), 0)
    return _product(d, kernel, 1).astype(x.dtype), d_kernel.astype(kernel.dtype)


def _product(a, b, axis):
    """Contracts the last axis of a with this axis of b."""
    contracted = ((a.ndim - 1,), (axis,)), ((), ())
    return lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)


def _transposed(x):
    """x.T in memory. XLA would turn a plain transpose into a product over the first axis."""
    rows, columns = x.shape
    parts = 2 - columns % 2
    return x.reshape(rows, parts, -1).transpose(1, 2, 0).reshape(columns, rows)


bfloat16_matmul.defvjp(_forward, _backward)
