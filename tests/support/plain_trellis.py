"""TrellisLayer in the plainest way: every level, one after the other, at every position.

What the dependency cone, the depth loop and the fast path are compared to. It shares the layer's
constructor, weights, kernels, masks and gated activation, and nothing of how levels are run.
"""

import numpy as np
from keras import ops

from trellis_keras.kernels.convolution import apply_taps, shift
from trellis_keras.layers import TrellisLayer


class PlainTrellisLayer(TrellisLayer):
    """A `TrellisLayer` that computes everything."""

    def call(self, inputs, initial_state=None, training=False, mask=None, output_length=None):
        x = ops.cast(inputs, self.compute_dtype)
        batch, time, _ = ops.shape(x)
        past = self._initial_states(inputs.shape[0], initial_state, training)
        if past is None:
            past = [ops.zeros((batch, n), self.state_dtype) for n in self.cell.state_size]
        valid = ops.ones((batch, time), "bool") if mask is None else ops.cast(mask, "bool")
        levels, states = self._all_levels(x, past, training, valid[..., None])
        states = _last_valid(states, past, valid)
        if self.stateful:
            self.state_cache.write(states, training)
        if self.return_sequences:
            kept = self._output_steps(output_length) or time
            y = ops.stack([h[:, time - kept :] for h in levels], axis=1)
        else:
            y = ops.stack(_last_valid(levels, past[:1] * self.depth, valid), axis=1)
        y = ops.cast(y[..., -self.output_units :], self.compute_dtype)
        result = [y[:, -1]]
        if self.return_aux:
            result.append(ops.stack([y[:, i - 1] for i in self.aux_levels], axis=1))
        if self.return_state:
            result.extend(states)
        return result[0] if len(result) == 1 else tuple(result)

    def _all_levels(self, x, past, training, valid):
        kernel = self.cell.arrange(self.kernel(training=training))
        recurrent_kernel = self.cell.arrange(self.recurrent_kernel(training=training))
        bias = ops.cast(self.bias, self.state_dtype)
        ones = ops.ones((*ops.shape(x)[:2], self.units), self.state_dtype)
        dropout = self.hidden_dropout.mask(ones, training)
        dropout = ones[:, :1] if dropout is None else dropout
        x = ops.where(valid, x, ops.zeros_like(x))

        def hold(states):
            return [ops.where(valid, s, p[:, None]) for s, p in zip(states, past, strict=True)]

        # The level from which on a channel is computed; below it is zero.
        starts = np.repeat(self.group_starts, self.groups) if self.group_starts else 1

        states = hold([ops.zeros_like(ones) for _ in past])
        levels = []
        for i in range(self.depth):
            d = self.dilation(i + 1)
            h = ops.cast(states[0] * dropout, self.compute_dtype)
            past_h = ops.cast(past[0] * dropout[:, 0], self.compute_dtype)
            a = ops.cast(causal_convolution(h, recurrent_kernel, d, past_h), self.state_dtype)
            if i % self.injection_every == 0:
                a = a + ops.cast(causal_convolution(x, kernel, d), self.state_dtype)
            shifted = [shift(s, d, p) for s, p in zip(states, past, strict=True)]
            states = self.cell(a + bias, shifted)[1]
            states = hold([ops.where(starts <= i + 1, s, ops.zeros_like(s)) for s in states])
            levels.append(states[0])
        return levels, states


def _last_valid(states, past, valid):
    """The states of each row's last valid step, by a 0/1 weight per step."""
    time = ops.shape(valid)[1]
    steps = ops.where(valid, ops.arange(1, time + 1), 0)
    last = ops.max(steps, axis=1)
    chosen = ops.equal(ops.arange(time + 1)[None], last[:, None])[..., None]
    with_past = [
        ops.concatenate([p[:, None], s], axis=1) for s, p in zip(states, past, strict=True)
    ]
    return [ops.sum(ops.where(chosen, s, ops.zeros_like(s)), axis=1) for s in with_past]


def causal_convolution(x, kernel, dilation_rate=1, past=None):
    """Convolves (batch, time, in) with (tap, in, out); output t sees x_{t-j*dilation}, j < taps.

    Args:
        x: Tensor (batch, time, in).
        kernel: Tensor (tap, in, out). The last tap acts on the current step.
        dilation_rate: Steps between two taps.
        past: Tensor (batch, in) that stands in every step before the first, or None for zeros.

    Returns:
        Tensor (batch, time, out).
    """
    taps, channels, filters = kernel.shape
    seen = [shift(x, j * dilation_rate, past) for j in reversed(range(taps))]
    return apply_taps(seen, ops.reshape(kernel, (taps * channels, filters)))
