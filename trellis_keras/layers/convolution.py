"""Causal convolution as one matrix product over concatenated taps."""

from keras import ops


def pad_past(x, steps, past=None):
    """Puts `steps` steps before a (batch, time, channels) tensor.

    Args:
        x: Tensor (batch, time, channels).
        steps: Number of steps.
        past: Tensor (batch, channels) that stands in every step before the first, or None for 0.
    """
    if steps == 0:
        return x
    if past is None:
        return ops.pad(x, [[0, 0], [steps, 0], [0, 0]])
    return ops.concatenate([ops.repeat(past[:, None, :], steps, axis=1), x], axis=1)


def shift(x, steps, past=None):
    """Moves a (batch, time, channels) tensor `steps` steps into the future."""
    return pad_past(x, steps, past)[:, : ops.shape(x)[1]]


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
    time = ops.shape(x)[1]
    padded = pad_past(x, (taps - 1) * dilation_rate, past)
    seen = [padded[:, j * dilation_rate : j * dilation_rate + time] for j in range(taps)]
    stacked = ops.reshape(kernel, (taps * channels, filters))
    return ops.einsum("btc,cd->btd", ops.concatenate(seen, axis=-1), stacked)
