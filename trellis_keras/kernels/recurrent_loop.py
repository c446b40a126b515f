"""All steps of an LSTM, GRU or Elman RNN, with one matrix product per step of the loop.

`recurrent_loop` computes what Keras' loop over its cell does, with the states in float32 at least.
The product of the inputs is computed for all steps at once, before the loop over the products with
the state. As in `lattice_loop`, the loop has a custom gradient in training: automatic
differentiation would add up the recurrent kernel's gradient step by step. The backward loop
computes only the gradients of the pre-activations; one product over all steps then gives the
kernel's gradient.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from keras import ops

from trellis_keras.kernels.activations import lstm, tanh
from trellis_keras.kernels.gradients import custom_gradient
from trellis_keras.kernels.products import flatten_rows, matmul, multiply_rows
from trellis_keras.kernels.scan import scan
from trellis_keras.types import Tensor


class Equations(NamedTuple):
    """A cell's equations, where x is the contribution of the inputs and m that of the state h.

    Attributes:
        advance: Function of x, m (batch, blocks * units) and the states. Returns the list of the
            next states, h first.
        linearize: Function of x, m, the states before and after the step, for all steps at once.
            Returns a list of the factors that `differentiate` needs.
        differentiate: Function of the gradients of the states after a step, and the step's factors.
            Returns a list of the gradient of m and, if it differs, that of x; and a list of the
            gradients of the states before the step. That of h is without the path through m, or
            None.
    """

    advance: Callable[..., list[Tensor]]
    linearize: Callable[..., list[Tensor]]
    differentiate: Callable[..., tuple[list[Tensor], list[Tensor | None]]]


def recurrent_loop(
    inputs: Tensor,
    states: Sequence[Tensor],
    kernel: Tensor,
    recurrent_kernel: Tensor,
    biases: Sequence[Tensor],
    *,
    equations: Equations,
    compute_dtype: str,
    mask: Tensor | None = None,
    training: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Computes all steps of a recurrent layer.

    Args:
        inputs: Tensor (batch, time, channels).
        states: List of the initial states, each (batch, units).
        kernel, recurrent_kernel: Tensors (channels, blocks * units) and (units, blocks * units).
        biases: The bias of x and that of m, which only a GRU has, each (blocks * units,) and of the
            states' dtype. Empty for no biases.
        equations: `LSTM`, `GRU` or `ELMAN`.
        compute_dtype: Dtype of the products' operands.
        mask: Boolean (batch, time). Other steps leave the states unchanged and repeat the output
            before them, the initial state at the start. Defaults to `None`, all steps.
        training: Boolean, whether gradients are computed by a loop of their own, not by automatic
            differentiation. Defaults to `False`.

    Returns:
        The outputs (batch, time, units), and the list of the last states, of the states' dtype.
    """
    product = functools.partial(matmul, compute_dtype=compute_dtype, dtype=states[0].dtype)
    x = multiply_rows(product, ops.transpose(inputs, (1, 0, 2)), kernel)
    if biases:
        x = x + biases[0]
    # Not a variable: TensorFlow's custom gradients treat those differently.
    recurrent_kernel = ops.cast(recurrent_kernel, states[0].dtype)
    valid = []
    if mask is not None:
        valid = [ops.cast(ops.transpose(mask)[..., None], states[0].dtype)]
    loop = _differentiable_loop if training else _loop
    y, *last = loop(
        x,
        recurrent_kernel,
        list(biases[1:]),
        list(states),
        valid,
        equations=equations,
        compute_dtype=compute_dtype,
    )
    return ops.transpose(y, (1, 0, 2)), last


def recurrent_step(
    x: Tensor,
    states: Sequence[Tensor],
    kernel: Tensor,
    recurrent_kernel: Tensor,
    biases: Sequence[Tensor],
    *,
    equations: Equations,
    compute_dtype: str,
) -> tuple[Tensor, list[Tensor]]:
    """Computes one step as `recurrent_loop` does, from x (batch, channels)."""
    product = functools.partial(matmul, compute_dtype=compute_dtype, dtype=states[0].dtype)
    x = product(x, kernel)
    if biases:
        x = x + biases[0]
    _, following = _step(equations, product, recurrent_kernel, biases[1:], states, [x])
    return following[0], following


def _step(equations, product, kernel, bias, states, inputs):
    """Returns m and the next states, from a list of x and at most one mask."""
    x, *valid = inputs
    m = product(states[0], kernel)
    if bias:
        m = m + bias[0]
    return m, _choose(valid, equations.advance(x, m, states), states)


def _loop(x, kernel, bias, states, valid, *, equations, compute_dtype):
    """Computes h at all steps (time, batch, units), and the last states.

    x (time, batch, blocks * units) is the contribution of the inputs. `bias` and `valid` are lists
    of at most one: the bias of m, and a mask (time, batch, 1), 1 at steps that count.
    """
    product = functools.partial(matmul, compute_dtype=compute_dtype, dtype=x.dtype)
    operand = ops.cast(kernel, compute_dtype)  # once, not in each step

    def step(states, inputs):
        _, following = _step(equations, product, operand, bias, states, inputs)
        return following, [following[0]]

    last, (y,) = scan(step, states, [x, *valid])
    return y, *last


def _differentiable_loop(x, kernel, bias, states, valid, *, equations, compute_dtype):
    """Computes what `_loop` does, with a custom gradient.

    Nothing here refers to a layer: TensorFlow never frees the gradient of a loop.
    """
    product = functools.partial(matmul, compute_dtype=compute_dtype, dtype=x.dtype)
    biases, number, masks = len(bias), len(states), len(valid)

    @custom_gradient
    def loop(x, kernel, *others):
        # Not closures: JAX differentiates functions of their arguments.
        bias, valid = others[:biases], others[biases + number :]
        initial = others[biases : biases + number]
        operand = ops.cast(kernel, compute_dtype)

        def step(states, inputs):
            m, following = _step(equations, product, operand, bias, states, inputs)
            return following, [m, *following]

        last, (m, *after) = scan(step, list(initial), [x, *valid])

        def gradient(dy, *d_last):
            transposed = ops.transpose(operand)
            before = [
                ops.concatenate([first[None], following[:-1]])
                for first, following in zip(initial, after, strict=True)
            ]
            factors = equations.linearize(x, m, before, after)

            def step_back(d_states, inputs):
                dy, *inputs = inputs
                factors, valid = inputs[: len(inputs) - masks], inputs[len(inputs) - masks :]
                d_after = [d_states[0] + dy, *d_states[1:]]
                gradients, (dh, *others) = equations.differentiate(d_after, factors)
                gradients = _choose(valid, gradients, [ops.zeros_like(g) for g in gradients])
                through = product(gradients[0], transposed)
                d_before = [through if dh is None else through + dh, *others]
                return _choose(valid, d_before, d_after), gradients

            inputs = [dy, *factors, *valid]
            d_states, gradients = scan(step_back, list(d_last), inputs, reverse=True)
            dm, dx = gradients[0], gradients[-1]
            d_kernel = product(ops.transpose(flatten_rows(before[0])), flatten_rows(dm))
            d_bias = [ops.sum(dm, axis=(0, 1)) for _ in bias]
            return dx, d_kernel, *d_bias, *d_states, *map(ops.zeros_like, valid)

        return (after[0], *last), gradient

    return loop(x, kernel, *bias, *states, *valid)


def _choose(valid, new, old):
    """Returns the new tensors where the mask, if there is one, is 1, and the old ones elsewhere."""
    if not valid:
        return new
    counts = ops.cast(valid[0], "bool")
    return [ops.where(counts, a, b) for a, b in zip(new, old, strict=True)]


def _lstm(x, m, states):
    return list(lstm(x + m, states[1]))


def _lstm_gates(a):
    i, f, g, o = ops.split(a, 4, axis=-1)
    return ops.sigmoid(i), ops.sigmoid(f), tanh(g), ops.sigmoid(o)


def _lstm_factors(x, m, before, after):
    i, f, g, o = _lstm_gates(x + m)
    c, squashed = before[1], tanh(after[1])
    slopes = (g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), squashed * o * (1 - o))
    return [o * (1 - squashed * squashed), f, ops.concatenate(slopes, axis=-1)]


def _lstm_gradients(d_states, factors):
    (dh, dc), (dc_by_dh, f, slopes) = d_states, factors
    dc = dc + dh * dc_by_dh
    da = ops.concatenate([dc, dc, dc, dh], axis=-1) * slopes
    return [da], [None, dc * f]


def _gru(x, m, states):
    z, r, p = _gru_gates(x, m)
    return [z * states[0] + (1 - z) * p]


def _gru_gates(x, m):
    units = m.shape[-1] // 3
    x_gates, x_p = ops.split(x, [2 * units], axis=-1)
    m_gates, m_p = ops.split(m, [2 * units], axis=-1)
    z, r = ops.split(ops.sigmoid(x_gates + m_gates), 2, axis=-1)
    return z, r, tanh(x_p + r * m_p)


def _gru_factors(x, m, before, after):
    z, r, p = _gru_gates(x, m)
    p_by_h = (1 - z) * (1 - p * p)
    gates = (before[0] - p) * z * (1 - z), p_by_h * m[..., -p.shape[-1] :] * r * (1 - r)
    return [
        z,
        ops.concatenate([*gates, p_by_h * r], axis=-1),
        ops.concatenate([*gates, p_by_h], axis=-1),
    ]


def _gru_gradients(d_states, factors):
    (dh,), (z, m_slopes, x_slopes) = d_states, factors
    repeated = ops.concatenate([dh, dh, dh], axis=-1)
    return [repeated * m_slopes, repeated * x_slopes], [dh * z]


def _elman(x, m, states):
    return [tanh(x + m)]


def _elman_factors(x, m, before, after):
    return [1 - after[0] * after[0]]


def _elman_gradients(d_states, factors):
    da = d_states[0] * factors[0]
    return [da], [None]


LSTM = Equations(_lstm, _lstm_factors, _lstm_gradients)
GRU = Equations(_gru, _gru_factors, _gru_gradients)
ELMAN = Equations(_elman, _elman_factors, _elman_gradients)
