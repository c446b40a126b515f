"""A loop of LSTM levels on TensorFlow, with three products instead of four and a custom gradient.

With kernel size 2 and dilation 1, positions come in pairs: an even one e, the odd one o after it,
and the odd one p before it (of the pair before). A level multiplies them by the kernels W_p (past
tap) and W_n (current tap):

    a_e = p W_p + e W_n,        a_o = e W_p + o W_n.

These four products reduce to three (Winograd's F(2, 2): Lavin & Gray 2016, Fast Algorithms for
Convolutional Neural Networks, section 4.1; the algebra is exact):

    m1 = (e - p) W_p,    m2 = e (W_p + W_n),    m3 = (e - o) W_n,
    a_e = m2 - m1,       a_o = m2 - m3,

and likewise in the gradients with respect to e, o, p and to W_p, W_n. Automatic differentiation
would lose the gain: it would transpose each product separately, materialize sums, and store every
intermediate result of every level. The gradient of a whole block is therefore written by hand. It
stores the states and pre-activations of each level, or recomputes the latter (`rematerialize`), and
sums the weight gradients of all levels in one accumulator.
"""

from collections.abc import Sequence

import tensorflow as tf

from trellis_keras.kernels.activations import lstm
from trellis_keras.kernels.scan_tf import array_of, while_loop


def lstm_levels(
    states: Sequence[tf.Tensor],
    injected: tf.Tensor,
    kernel: tf.Tensor,
    *,
    dropout: tf.Tensor | None,
    initial: Sequence[tf.Tensor] | None,
    turns: int,
    compute_dtype: str,
    training: bool,
    rematerialize: bool,
) -> list[tf.Tensor]:
    """Returns the states [h, c] after `turns` turns of `TrellisLayer._level` with `LSTMGates`.

    Args:
        states: [h, c], each (batch, positions, units), the number of positions static.
        injected: The contribution of x and the bias, (batch, positions, 4 * units).
        kernel: (2, units, 4 * units), past tap first, at least float32.
        dropout: Mask (batch, 1, units) of h in the convolution, or None.
        initial: [h, c] before the first step, each (batch, units), or None for zeros.
        turns: Number of levels.
        compute_dtype: Dtype of the products' operands.
        training: Boolean, whether a gradient is likely to follow. If False, nothing is stored for
            it, and automatic differentiation computes any gradient.
        rematerialize: Boolean, whether to recompute pre-activations in the backward pass.
    """
    width, size = states[0].shape[1], states[0].shape[2]
    initial = [tf.zeros_like(s[:, 0]) for s in states] if initial is None else initial
    kernel = tf.reshape(kernel, (-1, kernel.shape[-1]))
    block = _Block(dropout, turns, compute_dtype, rematerialize)
    pairs = [part for tensor in (*states, injected) for part in _split(tensor)]
    run = block if training else block.without_gradient
    h_even, h_odd, c_even, c_odd = run(*pairs, *initial, kernel)
    return [_join(h_even, h_odd, width, size), _join(c_even, c_odd, width, size)]


def _split(x):
    """Returns even and odd positions, padded by one at the end if their number is odd."""
    if x.shape[1] % 2:
        x = tf.pad(x, [[0, 0], [0, 1], [0, 0]])
    return x[:, 0::2], x[:, 1::2]


def _join(even, odd, width, size):
    pairs = tf.stack([even, odd], axis=2)
    return tf.reshape(pairs, (-1, 2 * even.shape[1], size))[:, :width]


def _shift_odd(odd, initial):
    """Returns the value one step before each even position."""
    return tf.concat([initial[:, None], odd[:, :-1]], axis=1)


def _shift_odd_gradient(gradient):
    """Transposes `_shift_odd`: the gradients of the odd positions and of the initial value."""
    return tf.concat([gradient[:, 1:], tf.zeros_like(gradient[:, :1])], axis=1), gradient[:, 0]


class _Block:
    """The levels of a block as one function with a custom gradient.

    Its arguments are h and c at even and odd positions, the contribution of x and the bias at even
    and odd positions, h and c before the first step, and the kernel.
    """

    def __init__(self, dropout, turns, compute_dtype, rematerialize):
        self.dropout, self.turns, self.rematerialize = dropout, turns, rematerialize
        self.compute_dtype = compute_dtype

    def __call__(self, *arguments):
        @tf.custom_gradient
        def block(*arguments):
            states, injected, initial, kernel = _sort(arguments)
            states, kept = self._forward(states, injected, initial, kernel)

            def gradient(*upstream):
                return self._backward(upstream, kept, injected, initial, kernel)

            return states, gradient

        return block(*arguments)

    def without_gradient(self, *arguments):
        return self._forward(*_sort(arguments), keep=False)[0]

    def _kernels(self, kernel):
        """Returns W_p, W_p + W_n and W_n as operands."""
        past, now = tf.split(kernel, 2, axis=0)
        return [tf.cast(k, self.compute_dtype) for k in (past, past + now, now)]

    def _product(self, x, kernel, transpose=False):
        equation = "btd,cd->btc" if transpose else "btc,cd->btd"
        return tf.cast(tf.einsum(equation, tf.cast(x, self.compute_dtype), kernel), x.dtype)

    def _weight_gradient(self, x, upstream):
        x, d = (tf.cast(t, self.compute_dtype) for t in (x, upstream))
        return tf.cast(tf.einsum("btc,btd->cd", x, d), upstream.dtype)

    def _drop(self, h):
        return h if self.dropout is None else h * self.dropout

    def _operands(self, h_even, h_odd, h_0):
        """Returns e - p, e and e - o."""
        even, odd = self._drop(h_even), self._drop(h_odd)
        past = self._drop(h_0[:, None])[:, 0]
        return even - _shift_odd(odd, past), even, even - odd

    def _preactivations(self, h_even, h_odd, h_0, injected, kernels):
        operands = self._operands(h_even, h_odd, h_0)
        m1, m2, m3 = map(self._product, operands, kernels)
        # A sum of three TensorFlow may accumulate in a temporary variable when memory is short,
        # which fails in a loop (AlreadyExistsError). It leaves a difference and a sum alone.
        return m2 - m1 + injected[0], m2 - m3 + injected[1]

    def _forward(self, states, injected, initial, kernel, keep=True):
        """Returns the last level's states, and the arrays of all levels stored for the gradient."""
        kernels = self._kernels(kernel)
        kept = states if self.rematerialize else (*states, *injected)
        kept = [array_of(t, self.turns, t.shape) for t in kept] if keep else []

        def level(i, states, kept):
            h_even, h_odd, c_even, c_odd = states
            a_even, a_odd = self._preactivations(h_even, h_odd, initial[0], injected, kernels)
            new_even = lstm(a_even, _shift_odd(c_odd, initial[1]))
            new_odd = lstm(a_odd, c_even)
            values = (*states, a_even, a_odd)
            kept = [array.write(i, v) for array, v in zip(kept, values, strict=False)]
            return i + 1, [new_even[0], new_odd[0], new_even[1], new_odd[1]], kept

        _, states, kept = self._loop(level, (0, list(states), kept))
        return states, kept

    def _backward(self, upstream, kept, injected, initial, kernel):
        """Returns the gradients of the block's arguments."""
        kernels = self._kernels(kernel)

        def level(i, upstream, sums):
            h_even, h_odd, c_even, c_odd, *a = [a.read(self.turns - 1 - i) for a in kept]
            a = a or self._preactivations(h_even, h_odd, initial[0], injected, kernels)
            dh_even, dh_odd, dc_even, dc_odd = upstream
            da_even, dc_past = _lstm_gradient(a[0], _shift_odd(c_odd, initial[1]), dh_even, dc_even)
            da_odd, dc_even = _lstm_gradient(a[1], c_even, dh_odd, dc_odd)
            dc_odd, dc_past = _shift_odd_gradient(dc_past)
            da_sum = da_even + da_odd

            operands = self._operands(h_even, h_odd, initial[0])
            g1, g2, g3 = map(self._weight_gradient, operands, (da_even, da_sum, da_odd))
            n1, n2, n3 = (
                self._product(d, k, transpose=True)
                for d, k in zip((da_even, da_sum, da_odd), kernels, strict=True)
            )
            dh_odd, dh_0 = _shift_odd_gradient(n1)
            upstream = [self._drop(n2 - n1 - n3), self._drop(n3 + dh_odd), dc_even, dc_odd]
            dh_0 = self._drop(dh_0[:, None])[:, 0]
            dkernel = tf.concat([g2 - g1, g2 - g3], axis=0)
            new = (da_even, da_odd, dh_0, dc_past, dkernel)
            return i + 1, upstream, [s + n for s, n in zip(sums, new, strict=True)]

        sums = [tf.zeros_like(t) for t in (*injected, *initial, kernel)]
        _, upstream, sums = self._loop(level, (0, list(upstream), sums))
        return [*upstream, *sums]

    def _loop(self, level, variables):
        return while_loop(lambda i, *_: i < self.turns, level, variables, self.turns)


def _sort(arguments):
    return arguments[:4], arguments[4:6], arguments[6:8], arguments[8]


def _lstm_gradient(a, past_c, dh, dc):
    """Returns the gradients of `lstm` with respect to a and past_c."""
    i, f, g, o = tf.split(a, 4, axis=-1)
    i, f, g, o = tf.sigmoid(i), tf.sigmoid(f), tf.tanh(g), tf.sigmoid(o)
    tanh_c = tf.tanh(f * past_c + i * g)
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    parts = (
        dc * g * i * (1 - i),
        dc * past_c * f * (1 - f),
        dc * i * (1 - g * g),
        dh * tanh_c * o * (1 - o),
    )
    return tf.concat(parts, axis=-1), dc * f
