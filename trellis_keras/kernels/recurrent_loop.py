"""All steps of Keras' LSTM, GRU or SimpleRNN, with one matrix product per step of the time loop.

`recurrent_loop` equals Keras' loop over the layer's cell. The product of the inputs is computed for
all steps at once, before the loop over the products with the state. As in `lattice_loop`, the loop
has a custom gradient: automatic differentiation would add up the recurrent kernel's gradient step
by step. The backward loop computes only the gradients of the pre-activations; one product over all
steps then gives the kernel's gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from trellis_keras.kernels.gradients import custom_gradient
from trellis_keras.kernels.products import matmul, on_rows, rows
from trellis_keras.kernels.scan import scan
from trellis_keras.types import Tensor


class _Cell(NamedTuple):
    """The equations of a cell, where x is the contribution of the inputs and m that of the state h.

    Attributes:
        advance: Function of x, m (batch, blocks * units) and the states. Returns the next states.
        linearize: Function of x, m, the states before and after the step, for all steps at once.
            Returns a list of the factors that `differentiate` needs.
        differentiate: Function of the gradients of the states after a step, and the step's factors.
            Returns a list with the gradient of m, and that of x if it is another, and a list of the
            gradients of the states before the step. That of h is without the path through m, or
            None.
    """

    advance: Callable[..., Any]
    linearize: Callable[..., Any]
    differentiate: Callable[..., Any]


def supports(layer: keras.Layer) -> bool:
    """Returns whether `recurrent_loop` computes a recurrent layer's outputs."""
    if type(layer) not in _CELLS or layer.dropout or layer.recurrent_dropout:
        return False
    if layer.activity_regularizer is not None or not _has_only_cpus():
        return False
    gates = getattr(layer, "recurrent_activation", keras.activations.sigmoid)
    return (
        layer.activation is keras.activations.tanh
        and gates is keras.activations.sigmoid
        and getattr(layer, "reset_after", True)
    )


def recurrent_loop(
    layer: keras.Layer, inputs: Tensor, states: Sequence[Tensor], mask: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Computes all steps of a layer that it supports, see `supports`.

    Args:
        layer: A built `keras.layers.LSTM`, `GRU` or `SimpleRNN`.
        inputs: Tensor (batch, time, channels) of the layer's compute dtype.
        states: List of the initial states, each (batch, units), of the dtype of the results.
        mask: Boolean (batch, time). Other steps leave the states unchanged. Defaults to all steps.

    Returns:
        The outputs (batch, time, units), and the list of the last states.
    """
    cell, state_dtype = layer.cell, states[0].dtype

    def product(x, kernel):
        operands = (ops.cast(each, layer.compute_dtype) for each in (x, kernel))
        return matmul(*operands, state_dtype)

    x = on_rows(product, ops.transpose(inputs, (1, 0, 2)), cell.kernel)
    biases = []
    if cell.use_bias:
        # A GRU has a second bias, of the state.
        biases = ops.unstack(ops.reshape(ops.cast(cell.bias, state_dtype), (-1, x.shape[-1])))
        x = x + biases.pop(0)
    kernel = ops.cast(cell.recurrent_kernel, state_dtype)
    equations, valid = _CELLS[type(layer)], None
    if mask is not None:
        valid = ops.cast(ops.transpose(mask)[..., None], state_dtype)
    y, *last = _time_loop(equations, layer.compute_dtype, product, x, kernel, biases, states, valid)
    return ops.transpose(y, (1, 0, 2)), last


def _time_loop(cell, compute_dtype, product, x, kernel, biases, states, valid):
    """Computes the states at all steps.

    Args:
        cell: The `_Cell`.
        compute_dtype: Dtype of the products' operands.
        product: Function that multiplies rows by a kernel.
        x: Contribution of the inputs, (time, batch, blocks * units).
        kernel: The kernel of the state h, (units, blocks * units).
        biases: List with its bias, or an empty one.
        states: List of the initial states, each (batch, units).
        valid: 1 at the steps that count and 0 at others, (time, batch, 1), or None.

    Returns:
        h after each step (time, batch, units), and all last states.
    """

    @custom_gradient
    def loop(x, kernel, *others):
        # Not closures: JAX differentiates functions of their arguments.
        biases, initial, steps = others[:n], others[n : n + len(states)], others[n + len(states) :]
        operand = ops.cast(kernel, compute_dtype)  # once, not in each step

        def step(states, inputs):
            x, *valid = inputs
            m = sum(biases, product(states[0], operand))
            following = _choose(valid, cell.advance(x, m, states), states)
            return following, [m, *following]

        last, (m, *after) = scan(step, list(initial), [x, *steps])

        def gradient(*upstream, **_):
            # TensorFlow passes the gradients of the outputs one by one, JAX as one tuple.
            dy, *d_last = upstream[0] if len(upstream) == 1 else upstream
            transposed = ops.transpose(operand)
            before = [
                ops.concatenate([first[None], states[:-1]])
                for first, states in zip(initial, after, strict=True)
            ]
            factors = cell.linearize(x, m, before, after)

            def step_back(d_states, inputs):
                dy, *factors = inputs[: len(inputs) - len(steps)]
                valid = inputs[len(inputs) - len(steps) :]
                d_after = [d_states[0] + dy, *d_states[1:]]
                gradients, (dh, *others) = cell.differentiate(d_after, factors)
                gradients = _choose(valid, gradients, [ops.zeros_like(g) for g in gradients])
                through = product(gradients[0], transposed)
                d_before = [through if dh is None else through + dh, *others]
                return _choose(valid, d_before, d_after), gradients

            inputs = [dy, *factors, *steps]
            d_states, gradients = scan(step_back, list(d_last), inputs, reverse=True)
            dm, dx = gradients[0], gradients[-1]
            d_kernel = product(ops.transpose(rows(before[0])), rows(dm))
            d_biases = [ops.sum(dm, axis=(0, 1)) for _ in biases]
            return dx, d_kernel, *d_biases, *d_states, *map(ops.zeros_like, steps)

        return (after[0], *last), gradient

    n = len(biases)
    return loop(x, kernel, *biases, *states, *([] if valid is None else [valid]))


def _choose(valid, new, old):
    """Returns the new tensors in the rows that `valid`, a list of at most one mask, selects."""
    for counted in valid:
        new = [ops.where(ops.cast(counted, "bool"), a, b) for a, b in zip(new, old, strict=True)]
    return new


def _lstm(x, m, states):
    i, f, g, o = _lstm_gates(x + m)
    c = f * states[1] + i * g
    return [o * ops.tanh(c), c]


def _lstm_gates(a):
    i, f, g, o = ops.split(a, 4, axis=-1)
    return ops.sigmoid(i), ops.sigmoid(f), ops.tanh(g), ops.sigmoid(o)


def _lstm_factors(x, m, before, after):
    i, f, g, o = _lstm_gates(x + m)
    c, squashed = before[1], ops.tanh(after[1])
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
    return z, r, ops.tanh(x_p + r * m_p)


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


def _simple(x, m, states):
    return [ops.tanh(x + m)]


def _simple_factors(x, m, before, after):
    return [1 - after[0] * after[0]]


def _simple_gradients(d_states, factors):
    da = d_states[0] * factors[0]
    return [da], [None]


_CELLS = {
    keras.layers.LSTM: _Cell(_lstm, _lstm_factors, _lstm_gradients),
    keras.layers.GRU: _Cell(_gru, _gru_factors, _gru_gradients),
    keras.layers.SimpleRNN: _Cell(_simple, _simple_factors, _simple_gradients),
}


def _has_only_cpus():
    """Returns whether there is no accelerator, for which Keras has cuDNN's loops."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_backend() == "cpu"
    if keras.backend.backend() == "tensorflow":
        from trellis_keras.kernels import runtime_tf

        return runtime_tf.has_only_cpus()
    return False
