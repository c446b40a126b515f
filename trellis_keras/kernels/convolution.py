"""Causal dilated convolution as a matrix product, and between the positions of a cone.

All tensors are (batch, time, channels) or (batch, positions, channels), all kernels (tap, in, out)
with the last tap on the current step. The operand of a tap is the input some steps earlier.
`initial` is the value (batch, channels) of every step before the first, None for zeros.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from trellis_keras.kernels.cone import Read, interleaved_padding, locate, tap_offsets
from trellis_keras.kernels.products import matmul, needs_float32_result
from trellis_keras.types import Tensor


def pad_past(x: Tensor, steps: int, initial: Tensor | None = None) -> Tensor:
    """Prepends `steps` steps of the initial value to x."""
    if steps == 0:
        return x
    if initial is None:
        return ops.pad(x, [[0, 0], [steps, 0], [0, 0]])
    # Not `repeat`: its gradient does not compile in an XLA loop while the batch size is unknown.
    before = initial[:, None, :] + ops.zeros((1, steps, 1), dtype=initial.dtype)
    return ops.concatenate([before, x], axis=1)


def shift(x: Tensor, steps: int, initial: Tensor | None = None) -> Tensor:
    """Returns x `steps` steps earlier, at every position."""
    if isinstance(x.shape[1], int):
        steps = min(steps, x.shape[1])
    return pad_past(x, steps, initial)[:, : ops.shape(x)[1]]


def gather(x: Tensor, read: Read, initial: Tensor | None = None) -> Tensor:
    """Returns the values of x that a `cone.Read` finds, (batch, positions, channels)."""
    if read.index is None:
        return shift(x, read.padding, initial)
    if isinstance(read.index, slice):
        found = strided_slice(x, read.index)
    else:
        found = ops.take(x, read.index.astype("int32"), axis=1)
    return pad_past(found, read.padding, initial)


def strided_slice(x: Tensor, index: slice) -> Tensor:
    """Returns x[:, index], with a gradient that copies whole rows.

    TensorFlow computes the gradient of a strided slice value by value.

    Args:
        x: Tensor (batch, positions, channels), the number of positions known.
        index: Slice with a start, a stop after its last position, and a positive step.
    """
    step, count = index.step, len(range(index.start, index.stop, index.step))
    start = index.stop - count * step
    if count == 0 or start < 0:
        return x[:, index]
    if step == 1:
        return _between(x, start, index.stop)
    # The last of every `step` positions.
    channels = x.shape[-1]
    rows = ops.reshape(_between(x, start, index.stop), (-1, count, step * channels))
    return ops.split(rows, [(step - 1) * channels], axis=-1)[1]


def _between(x, start, stop):
    """x[:, start:stop]. The gradient of a split is a concatenation."""
    length = x.shape[1]
    cuts = [cut for cut in (start, stop) if 0 < cut < length]
    return ops.split(x, cuts, axis=1)[int(start > 0)] if cuts else x


def gather_taps(x: Tensor, reads: Sequence[Read], initial: Tensor | None = None) -> Tensor:
    """Returns the concatenated operands of several taps: (batch, positions, taps * channels).

    Args:
        x: Tensor (batch, positions, channels).
        reads: A `cone.Read` per tap, the oldest first.
        initial: Tensor (batch, channels), or None for zeros.
    """
    if len(reads) == 1:
        return gather(x, reads[0], initial)
    padding = interleaved_padding(reads, x.shape[1])
    if padding is None:
        return ops.concatenate([gather(x, read, initial) for read in reads], axis=-1)
    # With doubling dilations the values are already in this order: nothing is copied.
    taps, (_, positions, channels) = len(reads), x.shape
    positions = (padding + positions) // taps
    return ops.reshape(pad_past(x, padding, initial), (-1, positions, taps * channels))


def product(seen: Tensor, kernel: Tensor, dtype: str) -> Tensor:
    """Multiplies the taps' operands (batch, positions, taps * in) by a kernel (taps * in, out).

    One product for all taps is faster than one per tap. On TensorFlow it is an einsum because the
    gradient of `matmul` does not compile inside an XLA loop while the batch size is unknown. The
    axis u keeps Keras from turning the einsum into a `matmul`, for whose gradient TensorFlow holds
    one kernel per row of the batch.

    Args:
        seen, kernel: Tensors of the compute dtype.
        dtype: Dtype of the result.
    """
    if keras.backend.backend() != "tensorflow":
        return matmul(seen, kernel, seen.dtype, dtype)
    y = ops.einsum("btuc,cd->btud", seen[:, :, None], kernel)[:, :, 0]
    return ops.cast(y, dtype)


class ConvolutionGeometry(NamedTuple):
    """A convolution in units of the spacing of the positions that it reads.

    Attributes:
        start: Index of the oldest tap's first operand; if negative, the number of leading zeros.
        stride: Stride of the outputs.
        dilation: Dilation of the taps.
        length: Number of outputs, or None if unknown.
    """

    start: int
    stride: int
    dilation: int
    length: int | None


def convolve(
    x: Tensor,
    kernel: Tensor,
    dilation_rate: int,
    wanted: np.ndarray | None,
    available: np.ndarray | None,
) -> Tensor:
    """Convolves x, at the positions `available`, to the positions `wanted`.

    With doubling dilations and one output, the positions of a level are evenly spaced, by the
    dilation of the level above. In units of that spacing the taps are adjacent, and the
    convolution is an ordinary dense one with a stride, which is fast on all backends. Otherwise it
    is a dilated convolution; if the positions are not evenly spaced, each tap gathers its operands
    for a matrix product, as it does where only products use the processor's bfloat16 units
    (`products_jax`).

    Args:
        x: Tensor (batch, positions available, in).
        kernel: Tensor (tap, in, out).
        dilation_rate: Steps between two taps.
        wanted, available: Ascending arrays of positions, or both None: all, of an unknown number.

    Returns:
        Tensor (batch, positions wanted, out).
    """
    taps = _taps_that_read(x, wanted, available, kernel.shape[0], dilation_rate)
    kernel = kernel[-taps:]
    dilation_rate = 1 if taps == 1 else dilation_rate
    geometry = find_geometry(wanted, available, taps, dilation_rate)
    if geometry is None or needs_float32_result(x):
        reads = [locate(wanted, available, o) for o in tap_offsets(taps, dilation_rate)]
        seen = ops.concatenate([gather(x, r) for r in reversed(reads)], axis=-1)
        return product(seen, ops.reshape(kernel, (-1, kernel.shape[-1])), x.dtype)
    if geometry.start > 0:
        x = _between(x, geometry.start, x.shape[1])
    else:
        x = pad_past(x, -geometry.start)
    y = _convolution(x, kernel, geometry)
    return y if geometry.length is None else _between(y, 0, geometry.length)


def _taps_that_read(x, wanted, available, taps, dilation_rate):
    """Returns the number of last taps of which the first reads at least one step of x.

    The other taps read only the zeros before a sequence that is shorter than the receptive field.
    """
    if wanted is not None and available is not None:
        span = int(wanted[-1] - available[0])
    elif isinstance(x.shape[1], int):
        span = x.shape[1] - 1
    else:
        return taps
    return min(taps, 1 + span // dilation_rate)


def find_geometry(
    wanted: np.ndarray | None, available: np.ndarray | None, taps: int, dilation_rate: int
) -> ConvolutionGeometry | None:
    """Returns the geometry of a convolution between positions, or None if no convolution fits.

    Arguments as in `convolve`.
    """
    if wanted is None or available is None:
        return ConvolutionGeometry(-(taps - 1) * dilation_rate, 1, dilation_rate, None)
    spacing, stride = _spacing(available), _spacing(wanted)
    spacing = dilation_rate if spacing is None else spacing
    stride = spacing if stride is None else stride
    first = wanted[0] - (taps - 1) * dilation_rate - available[0]
    if 0 in (spacing, stride) or any(n % spacing for n in (stride, dilation_rate, first)):
        return None
    geometry = ConvolutionGeometry(
        int(first // spacing), int(stride // spacing), int(dilation_rate // spacing), len(wanted)
    )
    # Backends have no convolution with both.
    return None if geometry.dilation > 1 and geometry.stride > 1 else geometry


def _spacing(positions):
    """Returns the distance of evenly spaced positions, None for a single one, 0 if uneven."""
    steps = np.unique(np.diff(positions))
    if len(steps) == 0:
        return None
    return int(steps[0]) if len(steps) == 1 else 0


def _convolution(x, kernel, geometry):
    # In two dimensions, the first of size 1: XLA is slower in one.
    y = ops.conv(
        ops.expand_dims(x, 1),
        ops.expand_dims(kernel, 0),
        strides=(1, geometry.stride),
        dilation_rate=(1, geometry.dilation),
        padding="valid",
        data_format="channels_last",
    )
    # Not `squeeze`: TensorFlow loses the size 1 if the length of the sequence is unknown.
    return ops.reshape(y, (-1, ops.shape(y)[2], kernel.shape[-1]))
