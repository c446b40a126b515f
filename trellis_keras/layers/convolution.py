"""Causal convolution as one matrix product over concatenated taps."""

from keras import ops

from trellis_keras.layers.cone import interleaved


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
    # Not `repeat`: its gradient does not compile in an XLA loop while the batch size is unknown.
    before = past[:, None, :] + ops.zeros((1, steps, 1), dtype=past.dtype)
    return ops.concatenate([before, x], axis=1)


def shift(x, steps, past=None):
    """Moves a (batch, time, channels) tensor `steps` steps into the future."""
    return pad_past(x, steps, past)[:, : ops.shape(x)[1]]


def apply_taps(seen, kernel):
    """Multiplies what the taps see, a list of (batch, time, in), with (taps * in, out)."""
    return product(ops.concatenate(seen, axis=-1), kernel)


def product(seen, kernel):
    """Multiplies what the taps see, side by side (batch, time, taps * in), with (taps * in, out).

    One product for all taps: faster than one per tap. It is an einsum because the gradient of
    `matmul` does not compile inside an XLA loop while the batch size is unknown. The axis u is
    there because without it Keras makes a `matmul` of the einsum, for whose gradient TensorFlow
    keeps one kernel for each row of the batch.
    """
    return ops.einsum("btuc,cd->btud", seen[:, :, None], kernel)[:, :, 0]


def gather(x, read, past=None):
    """Picks positions of a (batch, positions, channels) tensor, see `cone.Read`.

    Args:
        x: Tensor (batch, positions, channels).
        read: A `cone.Read`.
        past: Tensor (batch, channels) that stands before the sequence, or None for zeros.
    """
    if read.index is None:
        return shift(x, read.padding, past)
    slices = isinstance(read.index, slice)
    found = x[:, read.index] if slices else ops.take(x, read.index.astype("int32"), axis=1)
    return pad_past(found, read.padding, past)


def gather_taps(x, reads, past=None):
    """What several taps see, side by side: (batch, positions, taps * channels).

    Args:
        x: Tensor (batch, positions, channels).
        reads: A `cone.Read` per tap, the oldest first.
        past: As in `gather`.
    """
    padding = interleaved(reads, x.shape[1])
    if padding is None:
        return ops.concatenate([gather(x, read, past) for read in reads], axis=-1)
    # One after the other already, as with doubling dilations: nothing is copied.
    taps, (_, positions, channels) = len(reads), x.shape
    positions = (padding + positions) // taps
    return ops.reshape(pad_past(x, padding, past), (-1, positions, taps * channels))
