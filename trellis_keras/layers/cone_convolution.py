"""A dilated causal convolution between positions of a cone, as a dense one where it can be.

Where dilations double and only the last output counts, the positions of a level are evenly spaced,
by as much as the dilation of the level above. Counted in that spacing, the taps are neighbours:
the convolution is an ordinary dense one with a stride, which backends do well. Otherwise it is a
dilated one, and where the positions are not evenly spaced they are gathered tap by tap.
"""

from typing import NamedTuple

import numpy as np
from keras import ops

from trellis_keras.layers import cone
from trellis_keras.layers.convolution import apply_taps, gather, pad_past


class Window(NamedTuple):
    """A convolution in units of the spacing of the positions that it reads.

    Attributes:
        start: Index of what the oldest tap sees first. Negative: so many zeros come first.
        stride: Of the outputs.
        dilation: Of the taps.
        length: Number of outputs, or None if unknown.
    """

    start: int
    stride: int
    dilation: int
    length: int | None


def convolve(x, kernel, dilation_rate, wanted, available):
    """Convolves what stands at the positions `available` to the positions `wanted`.

    Args:
        x: Tensor (batch, positions available, in).
        kernel: Tensor (tap, in, out). The last tap acts on the current step.
        dilation_rate: Steps between two taps.
        wanted, available: Ascending arrays of positions, or both None: all, of an unknown number.

    Returns:
        Tensor (batch, positions wanted, out).
    """
    taps = kernel.shape[0]
    window = find_window(wanted, available, taps, dilation_rate)
    if window is None:
        reads = [cone.read(wanted, available, o) for o in cone.offsets(taps, dilation_rate)]
        seen = [gather(x, read) for read in reversed(reads)]
        return apply_taps(seen, ops.reshape(kernel, (-1, kernel.shape[-1])))
    if window.start > 0:
        x = x[:, window.start :]
    else:
        x = pad_past(x, -window.start)
    return _first(_convolution(x, kernel, window), window.length)


def find_window(wanted, available, taps, dilation_rate):
    """Returns the `Window` of a convolution, or None if there is none. Arguments as `convolve`."""
    if wanted is None:
        return Window(-(taps - 1) * dilation_rate, 1, dilation_rate, None)
    spacing = _spacing(available) or dilation_rate
    stride = _spacing(wanted) or spacing
    first = wanted[0] - (taps - 1) * dilation_rate - available[0]
    if spacing < 0 or stride < 0 or any(n % spacing for n in (stride, dilation_rate, first)):
        return None
    window = Window(
        int(first // spacing), int(stride // spacing), int(dilation_rate // spacing), len(wanted)
    )
    # Backends have no convolution with both.
    return None if window.dilation > 1 and window.stride > 1 else window


def _spacing(positions):
    """The distance of evenly spaced positions, 0 if there is but one, -1 if they are not even."""
    steps = np.unique(np.diff(positions))
    return int(steps[0]) if len(steps) == 1 else -min(len(steps), 1)


def _convolution(x, kernel, window):
    # In two dimensions, of which the first is 1: XLA is slower in one.
    y = ops.conv(
        ops.expand_dims(x, 1),
        ops.expand_dims(kernel, 0),
        strides=(1, window.stride),
        dilation_rate=(1, window.dilation),
        padding="valid",
        data_format="channels_last",
    )
    # Not `squeeze`: TensorFlow forgets the 1 if it does not know the length of the sequence.
    return ops.reshape(y, (-1, ops.shape(y)[2], kernel.shape[-1]))


def _first(x, length):
    """The first positions of x, which may have no more (the gradient of a slice is no view)."""
    return x if length in (None, x.shape[1]) else x[:, :length]
