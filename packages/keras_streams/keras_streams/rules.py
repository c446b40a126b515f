"""Which part streams which layer or operation of Keras."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import keras
import numpy as np
from keras import ops
from keras.src.ops import math as math_ops  # the classes of the operations in a graph
from keras.src.ops import nn as nn_ops
from keras.src.ops import numpy as numpy_ops

from keras_streams.graph import Call, from_axis, to_axis
from keras_streams.parts import (
    OR_WINDOW,
    CausalAttention,
    Chain,
    Constant,
    Each,
    Frames,
    Options,
    Part,
    Pointwise,
    Protocol,
    Recurrent,
    RunningMax,
    RunningMean,
    Signal,
    Sliding,
    Split,
    Window,
)
from keras_streams.protocol import has_protocol
from keras_streams.types import Tensor

_CAUSAL = (
    'a causal layer such as keras.layers.Conv1D(padding="causal"), keras.layers.LSTM, '
    "or one that follows keras_streams.StreamingMixin"
)
_MAKERS: dict[type, Callable[[Call, Signal], Part]] = {}


def _streams(*classes):
    """Registers a function (call, signal) that makes the parts for these classes."""

    def register(maker):
        _MAKERS.update(dict.fromkeys(classes, maker))
        return maker

    return register


# Layers that cannot stream over time, and why.
_TO_ALL = (
    "it attends to all steps. Use keras.layers.MultiHeadAttention, called with "
    f"use_causal_mask=True, or {_CAUSAL}. {OR_WINDOW}"
)
_REFUSED = {
    keras.layers.Bidirectional: (
        "one of its layers reads the sequence from its end. Use a forward layer with the units of "
        f"both, such as keras.layers.LSTM. {OR_WINDOW}"
    ),
    keras.layers.GroupQueryAttention: _TO_ALL,
    keras.layers.Attention: _TO_ALL,
    keras.layers.AdditiveAttention: _TO_ALL,
    keras.layers.Flatten: (
        "it joins all steps. Use GlobalAveragePooling1D or a recurrent layer with "
        f"return_sequences=False. {OR_WINDOW}"
    ),
}


def make_part(call: Call, signals: list[Signal], options: Options) -> Part:
    """Returns the part for a call of a Keras layer or operation.

    Args:
        call: The call.
        signals: Its inputs, at the same steps.
        options: Those of the stream.

    Raises:
        ValueError: If the call is not supported.
    """
    operation, moving = call.operation, [s for s in signals if not s.is_static]
    signal = (moving or signals)[0]
    if call.arguments[1].get("training"):
        raise call.refusal("it is called with training=True, but streaming is inference.")
    masks = getattr(operation, "mask_zero", False) or isinstance(operation, keras.layers.Masking)
    if masks and not options.ignore_masks:
        raise call.refusal(
            "a stream has no masked steps. If it never gets padding, pass ignore_masks=True."
        )
    if not moving and isinstance(operation, _REPEATS) and call.specs[0].shape[1] == signal.length:
        return Constant(call, signal)
    if len({signal.has_time for signal in moving}) == 2:
        raise call.refusal(
            "it combines each step with a value computed from all steps, including later ones. "
            f"Use {_CAUSAL} for that value as well. {OR_WINDOW}"
        )
    if not signal.has_time:
        return Pointwise(call, signals)
    reduced = _reduced(call, signal, options)
    if reduced is not None:
        return reduced
    if isinstance(operation, keras.layers.MultiHeadAttention) and not signals[-1].is_static:
        return _attention(call, signal, options)
    kinds = type(operation).__mro__
    for kind in kinds:
        if kind in _REFUSED:
            raise call.refusal(_REFUSED[kind])
    if getattr(operation, "data_format", None) == "channels_first":
        raise call.refusal('its time axis is the last axis. Use data_format="channels_last".')
    if isinstance(operation, _CONCATENATIONS):
        return _concatenate(call, signals)
    makers: list[Callable] = [Protocol] if has_protocol(operation) else []
    makers += [_MAKERS[kind] for kind in kinds if kind in _MAKERS]
    if not makers:
        return Pointwise(call, signals)
    is_started = isinstance(operation, keras.layers.RNN) and len(moving) == 1
    is_alone = len(signals) == 1 or is_started
    if not is_alone or (isinstance(operation, keras.Layer) and len(call.given) > len(signals)):
        raise call.refusal(_INPUTS_ONLY)
    return makers[0](call, signal)


_INPUTS_ONLY = (
    "a stream has no masked steps and starts from the layer's own initial state. Call it with its "
    "inputs only, without `mask`, `initial_state` or `condition`."
)
_REPEATS = (
    *(keras.layers.RepeatVector, numpy_ops.Repeat),
    *(numpy_ops.Tile, numpy_ops.BroadcastTo),
)


# Tensors that depend on weights alone


_CONCATENATIONS = keras.layers.Concatenate, numpy_ops.Concatenate
_EACH_ELEMENT = (
    *(keras.layers.Add, keras.layers.Subtract, keras.layers.Multiply, keras.layers.Average),
    *(keras.layers.Maximum, keras.layers.Minimum, numpy_ops.Add, numpy_ops.Subtract),
    *(numpy_ops.Multiply, numpy_ops.Divide, numpy_ops.TrueDivide, numpy_ops.Maximum),
    *(numpy_ops.Minimum, numpy_ops.Where, *_CONCATENATIONS),
)


def tables(call: Call, signals: list[Signal]) -> list[tuple]:
    """Returns the arguments of a call that have a row for each step, such as positions' embeddings.

    Each is a tuple of the argument, a function that returns its rows, and a symbolic tensor.
    """
    at = next((i for i, signal in enumerate(signals) if signal.has_time), None)
    if at is None or not isinstance(call.operation, _EACH_ELEMENT):
        return []
    axis, rank, found = signals[at].axis, call.tensors[at].ndim, []
    if isinstance(call.operation, _CONCATENATIONS) and call.operation.axis % rank == axis:
        return []
    for leaf in keras.tree.flatten(call.arguments):
        shape = getattr(leaf, "shape", None)
        if shape is None or any(leaf is x for x in call.tensors) or len(shape) > rank:
            continue
        shape = (*[1] * (rank - len(shape)), *shape)
        if shape[0] not in (None, 1) or shape[axis] == 1:
            continue
        shape = (1, *shape[1:])

        def rows(leaf=leaf, shape=shape):
            x = call.weights[id(leaf)]() if id(leaf) in call.weights else leaf
            return ops.moveaxis(ops.reshape(x, shape), axis, 1)[0]

        dtype = keras.backend.standardize_dtype(leaf.dtype)
        found.append((leaf, rows, keras.KerasTensor((None, *shape[1:]), dtype)))
    return found


def leading_steps(call: Call, signal: Signal) -> int | None:
    """Returns the number of steps of a slice such as x[:, :3], `None` for other calls."""
    if not isinstance(call.operation, numpy_ops.GetItem):
        return None
    key, places = _key(call, signal)
    time = key[places[signal.axis]]
    is_leading = isinstance(time, slice) and not time.start and time.step in (None, 1)
    return time.stop if is_leading and time.stop and time.stop > 0 else None


# Attention


def _attention(call, signal, options):
    layer, (_, named) = call.operation, call.arguments
    is_causal, window = _causality(call)
    known = "query", "value", "key", "use_causal_mask", "attention_mask"
    others = [x for name, x in named.items() if name not in known]
    if not is_causal or any(x not in (None, False) for x in others):
        raise call.refusal(
            "it attends to all steps. Train it with causal attention, layer(x, x, "
            f"use_causal_mask=True), or use {_CAUSAL}. {OR_WINDOW}"
        )
    if len(set(call.inputs)) > 1 or len(signal.shape) > 1 or signal.axis != 1:
        raise call.refusal("it attends to another sequence than its own: layer(x, x).")
    window = min(filter(None, (layer._sliding_window, window)), default=None)
    context = window or options.max_context or signal.length
    if context is None:
        raise call.refusal(
            "it attends to all past steps. Pass the largest number of steps of a stream, as in "
            "to_stream(model, max_context=512)."
        )
    return CausalAttention(call, signal, context, is_window=window is not None)


def _causality(call):
    """Returns whether attention is causal, and the window of its mask, if it has one."""
    _, named = call.arguments
    if named.get("attention_mask") is None:
        return bool(named.get("use_causal_mask")), None
    mask = call.argument(len(call.arguments[0]), "attention_mask")
    if named.get("use_causal_mask") or isinstance(mask, keras.KerasTensor):
        return False, None
    mask = np.asarray(ops.convert_to_numpy(mask)).astype(bool)
    steps = mask.shape[-1]
    distance = np.arange(steps)[:, None] - np.arange(steps)
    window = int(np.sum(mask.reshape(-1, steps)[-1]))
    band = (distance >= 0) & (distance < window)
    is_band = mask.shape[-2] == steps and np.array_equal(mask, np.broadcast_to(band, mask.shape))
    return is_band, None if window == steps else window


# Reductions over time


_MEANS = (
    *(keras.layers.GlobalAveragePooling1D, keras.layers.GlobalAveragePooling2D),
    *(keras.layers.GlobalAveragePooling3D, numpy_ops.Mean),
)
_MAXIMA = (
    *(keras.layers.GlobalMaxPooling1D, keras.layers.GlobalMaxPooling2D),
    *(keras.layers.GlobalMaxPooling3D, numpy_ops.Max, numpy_ops.Amax),
)
_REDUCTIONS: dict[type, tuple[Callable, Callable]] = {  # over a sample, and of two samples
    **dict.fromkeys(_MEANS, (ops.mean, ops.add)),
    **dict.fromkeys(_MAXIMA, (ops.max, ops.maximum)),
    **dict.fromkeys((numpy_ops.Min, numpy_ops.Amin), (ops.min, ops.minimum)),
    numpy_ops.Sum: (ops.sum, ops.add),
}


def _reduced(call, signal, options):
    """Returns the part of a mean, sum or extremum over time, `None` for another operation.

    It covers a window, or the steps so far.
    """
    operation = call.operation
    kind = next((k for k in type(operation).__mro__ if k in _REDUCTIONS), None)
    if kind is not None and isinstance(operation, keras.Layer) and len(call.given) > 1:
        raise call.refusal(_INPUTS_ONLY)
    if kind is None or len(call.given) > 1 or not keras.backend.is_float_dtype(signal.dtype):
        return None
    rank = 2 + len(signal.shape)
    is_last = getattr(operation, "data_format", "channels_last") == "channels_last"
    axes = getattr(operation, "axis", range(1, rank - 1) if is_last else range(2, rank))
    axes = range(rank) if axes is None else [axes] if isinstance(axes, int) else axes
    axes = {a % rank for a in axes}
    if signal.axis not in axes or 0 in axes or getattr(operation, "initial", None) is not None:
        return None
    of_sample, of_two = _REDUCTIONS[kind]
    running = {ops.mean: RunningMean, ops.max: RunningMax}.get(of_sample)
    is_window = options.window is not None
    if signal.block > 1 if is_window else running is None:
        return None
    others = tuple(a + (a < signal.axis) for a in axes - {signal.axis})
    shape = [size for i, size in enumerate(signal.shape, 2) if i not in others]
    each = Each(
        signal,
        lambda x: of_sample(x, axis=others) if others else x,
        dataclasses.replace(signal, shape=tuple(shape)),
    )
    if not is_window:
        return Chain([each, running(call, each.outputs[0])])
    scale = 1 / signal.length if of_sample is ops.mean else 1.0
    return Chain([each, Sliding(call, each.outputs[0], of_two, scale)])


def unfolded(call: Call, signal: Signal, tensor: keras.KerasTensor) -> Part:
    """Returns the part that makes each window of a signal one sample.

    Args:
        call: A call that takes it.
        signal: The signal.
        tensor: The symbolic tensor.
    """
    if signal.length is None or signal.block > 1:
        raise call.refusal("it has several samples for each step of the window.")
    axis, shape = signal.axis, list(tensor.shape[1:])
    shape[axis - 1] = signal.length

    def function(windows):
        return windows if axis == 1 else ops.moveaxis(windows, 2, axis + 1)

    output = dataclasses.replace(signal, shape=tuple(shape))
    return Window(call, signal, function, taps=signal.length, has_time=False, sample=output.shape)


# Windows of time, and of the axes between time and channels: the axes of an image, or none


def windowed_length(
    length: int | None, span: int, stride: int, padding: str
) -> tuple[int, int | None]:
    """Returns the padding before the first sample, and the number of outputs.

    With `padding="same"` and strides, Keras' padding depends on the length. An unknown length
    is assumed to be a multiple of the strides.
    """
    if padding == "valid":
        return 0, None if length is None else (length - span) // stride + 1
    outputs = None if length is None else -(-length // stride)
    if padding == "causal":
        return span - 1, outputs
    last = 0 if length is None else length % stride
    return max(span - (last or stride), 0) // 2, outputs


def _neighbors(size, taps, stride, dilation, padding):
    """Returns the places (outputs, taps) that a window reads on an axis, `size` for padding."""
    left, outputs = windowed_length(size, (taps - 1) * dilation + 1, stride, padding)
    at = stride * np.arange(outputs)[:, None] - left + dilation * np.arange(taps)
    return np.where((at >= 0) & (at < size), at, size)


def _patches(windows: Tensor, axes: Sequence[np.ndarray], padding: float = 0.0) -> Tensor:
    """Returns patches (batch, samples, *outputs, taps, channels) of windows.

    Args:
        windows: Tensor (batch, samples, taps, ..., channels).
        axes: The places that are read on each axis between taps and channels, as of `_neighbors`.
        padding: Value of the padding.
    """
    for n, places in enumerate(axes):
        axis = 3 + 2 * n  # each of those before has become two
        if np.any(places == windows.shape[axis]):
            widths = [(0, 0)] * windows.ndim
            widths[axis] = (0, 1)
            windows = ops.pad(windows, widths, constant_values=padding)
        windows = ops.take(windows, places, axis=axis)
    if not axes:
        return windows
    outputs, taps = range(3, 3 + 2 * len(axes), 2), range(4, 4 + 2 * len(axes), 2)
    patches = ops.transpose(windows, (0, 1, *outputs, 2, *taps, 3 + 2 * len(axes)))
    sizes = [patches.shape[2 + i] for i in range(len(axes))]
    taps = math.prod(patches.shape[2 + len(axes) : -1])
    return ops.reshape(patches, (-1, ops.shape(patches)[1], *sizes, taps, windows.shape[-1]))


def _time_first(numbers, signal):
    """Returns the numbers of the axes between batch and channels, that of time first."""
    time = signal.axis - 1
    return [numbers[time], *numbers[:time], *numbers[time + 1 :]]


def _sizes(numbers, signal):
    """Returns one number, or a number for each axis, as a list with that of time first."""
    numbers = keras.tree.flatten(numbers)
    rank = len(signal.shape)
    return _time_first(numbers if len(numbers) == rank else numbers * rank, signal)


def _check_axes(call, signal, rank):
    if len(signal.shape) != rank or signal.axis > rank:
        raise call.refusal(
            f"its time axis is axis {signal.axis}, which it takes for channels. Put time on axis "
            "1, as keras.layers.Permute does."
        )


def _window(call, signal, sizes, function, **options):
    """Returns the part of an operation with windows of `sizes` along time and other axes.

    Args:
        call, signal: See `make_part`.
        sizes: Number of taps of each axis, in the order of the operation.
        function: Function of windows and of what to read on each other axis.
        options: Those of `Window`.
    """
    operation = call.operation
    _check_axes(call, signal, len(sizes))
    taps = _sizes(list(sizes), signal)
    strides = _sizes(operation.strides or list(sizes), signal)
    dilations = _sizes(getattr(operation, "dilation_rate", 1), signal)
    padding = operation.padding.lower()
    others = zip(signal.shape[:-1], taps[1:], strides[1:], dilations[1:], strict=True)
    axes = [_neighbors(*numbers, padding) for numbers in others]
    span = (taps[0] - 1) * dilations[0] + 1
    left, length = windowed_length(signal.length, span, strides[0], padding)
    options |= {"taps": taps[0], "stride": strides[0], "dilation": dilations[0], "left": left}
    return Window(call, signal, lambda w: function(w, axes), length=length, **options)


# Convolutions, layers and operations


_SEPARABLE = keras.layers.SeparableConv1D, keras.layers.SeparableConv2D, nn_ops.SeparableConv
_DEPTHWISE = keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D, nn_ops.DepthwiseConv
_CONVOLUTIONS = keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, nn_ops.Conv


def _kernels(call):
    """Returns the kernels of a convolution."""
    operation = call.operation
    if isinstance(operation, nn_ops.SeparableConv):
        return call.argument(1, "depthwise_kernel"), call.argument(2, "pointwise_kernel")
    if not isinstance(operation, keras.Layer):
        return (call.argument(1, "kernel"),)
    if isinstance(operation, _SEPARABLE):
        return operation.depthwise_kernel, operation.pointwise_kernel
    return (operation.kernel,)


def _flat(kernel, signal, dtype):
    """Returns a kernel (taps, input, output), with the taps of all axes, those of time first."""
    kernel = ops.moveaxis(ops.cast(kernel, dtype), signal.axis - 1, 0)
    return ops.reshape(kernel, (-1, *kernel.shape[-2:]))


def _finished(operation, y):
    """Returns the output of a convolution with its bias and activation."""
    if not isinstance(operation, keras.Layer):
        return y
    if operation.use_bias:
        y = y + ops.cast(operation.bias, y.dtype)
    return operation.activation(y)


def _product(patches, kernel):
    """Returns the convolution of patches (batch, samples, ..., taps, channels)."""
    taps, width, filters = kernel.shape
    groups = patches.shape[-1] // width
    outer = (-1, *ops.shape(patches)[1:2], *patches.shape[2:-2])
    if groups == 1:
        rows = ops.reshape(patches, (*outer, taps * width))
        return ops.matmul(rows, ops.reshape(kernel, (taps * width, filters)))
    grouped = ops.reshape(patches, (*outer, taps, groups, width))
    kernel = ops.reshape(kernel, (taps, width, groups, filters // groups))
    axes = "xyz"[: len(outer) - 2]
    y = ops.einsum(f"bn{axes}kgc,kcgf->bn{axes}gf", grouped, kernel)
    return ops.reshape(y, (*outer, filters))


def _depthwise(patches, kernel):
    axes = "xyz"[: patches.ndim - 4]
    y = ops.einsum(f"bn{axes}kc,kcm->bn{axes}cm", patches, kernel)
    outer = (-1, *ops.shape(patches)[1:2], *patches.shape[2:-2])
    return ops.reshape(y, (*outer, kernel.shape[1] * kernel.shape[2]))


@_streams(*_CONVOLUTIONS, *_DEPTHWISE, *_SEPARABLE)
def _convolution(call, signal):
    operation = call.operation
    dtype = operation.compute_dtype if isinstance(operation, keras.Layer) else signal.dtype
    sizes = _kernels(call)[0].shape[:-2]

    def function(windows, axes):
        patches = _patches(windows, axes)
        kernel, *pointwise = [_flat(kernel, signal, dtype) for kernel in _kernels(call)]
        is_depthwise = isinstance(operation, (*_DEPTHWISE, *_SEPARABLE))
        y = (_depthwise if is_depthwise else _product)(patches, kernel)
        for kernel in pointwise:
            y = ops.matmul(y, kernel[0])
        return _finished(operation, y)

    return _window(call, signal, sizes, function, dtype=dtype)


def _transposed_size(size, taps, stride, dilation, padding, extra):
    """Returns the outputs that a transposed convolution crops at the start, and their number."""
    span = (taps - 1) * dilation + 1
    left = span - 1
    if padding == "same":
        width = stride + span - 2 if extra is None else span + span % 2 - 2 + extra
        left = min(-(-width // 2), span - 1)
    if size is not None and extra is None:
        size = size * stride + (max(span - stride, 0) if padding == "valid" else 0)
    elif size is not None:
        cropped = 2 * (span // 2) if padding == "same" else 0
        size = (size - 1) * stride + span - cropped + extra
    return span - 1 - left, size


def _sources(size, taps, stride, dilation, padding, extra):
    """Returns the places (outputs, taps) that a transposed convolution reads on an axis."""
    crop, outputs = _transposed_size(size, taps, stride, dilation, padding, extra)
    at = np.arange(outputs)[:, None] + crop - dilation * np.arange(taps)
    is_place = (at % stride == 0) & (at >= 0) & (at < size * stride)
    return np.where(is_place, at // stride, size)


@_streams(
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    nn_ops.ConvTranspose,
)
def _transposed_conv(call, signal):
    operation, (kernel,) = call.operation, _kernels(call)
    dtype = operation.compute_dtype if isinstance(operation, keras.Layer) else signal.dtype
    rank = len(kernel.shape) - 2
    _check_axes(call, signal, rank)
    extra = [None] if operation.output_padding is None else operation.output_padding
    numbers = list(kernel.shape[:-2]), operation.strides, operation.dilation_rate, extra
    taps, strides, dilations, extras = (_sizes(n, signal) for n in numbers)
    padding = operation.padding.lower()
    options = [
        (*each, padding, extra)
        for *each, extra in zip(taps, strides, dilations, extras, strict=True)
    ]
    crop, length = _transposed_size(signal.length, *options[0])
    axes = [_sources(n, *each) for n, each in zip(signal.shape[:-1], options[1:], strict=True)]

    def function(windows):
        (kernel,) = _kernels(call)
        kernel = ops.swapaxes(ops.flip(kernel, axis=signal.axis - 1), -1, -2)
        y = _product(_patches(windows, axes), _flat(kernel, signal, dtype))
        return _finished(operation, y)

    spread = _repeated(call, signal, strides[0], zeros=True)
    left = (taps[0] - 1) * dilations[0] - crop
    window = Window(
        call, spread.outputs[0], function, dtype=dtype, taps=taps[0], dilation=dilations[0],
        left=left, length=length,
    )  # fmt: skip
    return Chain([spread, window])


# Pooling


_AVERAGES = (
    *(keras.layers.AveragePooling1D, keras.layers.AveragePooling2D),
    *(keras.layers.AveragePooling3D, nn_ops.AveragePool),
)


@_streams(
    *(keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D),
    *(nn_ops.MaxPool, *_AVERAGES),
)
def _pooling(call, signal):
    operation, rank = call.operation, len(signal.shape)
    sizes = keras.tree.flatten(operation.pool_size)
    sizes = sizes * rank if len(sizes) == 1 else sizes

    def mean(windows, axes):
        total = ops.sum(_patches(windows, axes), axis=-2)
        return total[..., :-1] / total[..., -1:]

    def largest(windows, axes):
        return ops.max(_patches(windows, axes, -math.inf), axis=-2)

    if not isinstance(operation, _AVERAGES):
        padding = 0.0 if operation.padding.lower() == "valid" else -math.inf
        return _window(call, signal, sizes, largest, padding=padding)
    # Ones as another channel count the samples that are no padding.
    *others, channels = signal.shape
    counted = dataclasses.replace(signal, shape=(*others, channels + 1))
    each = Each(signal, lambda x: ops.concatenate([x, ops.ones_like(x[..., :1])], -1), counted)
    return Chain([each, _window(call, counted, sizes, mean)])


# Changes of the time axis


def _resized(call, signal):
    """Returns the output of a call at the steps of a signal, with its time axis."""
    shape = list(call.specs[0].shape[1:])
    del shape[signal.axis - 1]
    return dataclasses.replace(signal, shape=tuple(shape))


def _repeated(call, signal, size, zeros=False):
    """Returns the part that repeats each sample, or follows it with zeros."""

    def function(x):
        return ops.stack([x, *[ops.zeros_like(x) if zeros else x] * (size - 1)], axis=2)

    return Split(call, signal, signal, size, function)


@_streams(numpy_ops.Repeat)
def _repeat(call, signal):
    operation, rank = call.operation, 2 + len(signal.shape)
    if operation.axis is None or operation.axis % rank != signal.axis:
        return Pointwise(call, [signal])
    return _repeated(call, signal, int(operation.repeats))


def _only(windows):
    return windows[:, :, 0]


def _of_layout(signal, function, axis=None):
    """Returns a function of samples, of a function of the tensor in the model."""
    axis = signal.axis if axis is None else axis
    return lambda x: from_axis(function(to_axis(x, signal.axis)), axis)


@_streams(numpy_ops.Pad)
def _pad(call, signal):
    operation = call.operation
    widths = [tuple(pair) for pair in operation.pad_width]
    widths = widths * (2 + len(signal.shape)) if len(widths) == 1 else widths
    left, right = widths[signal.axis]
    if widths[0] != (0, 0) or (operation.mode != "constant" and (left or right)):
        raise call.refusal('it pads with other samples or rows. Use mode="constant" over time.')
    value = float(call.argument(1, "constant_values") or 0.0)
    length = None if signal.length is None else signal.length + left + right
    others = [*widths[: signal.axis], (0, 0), *widths[signal.axis + 1 :]]
    is_constant = operation.mode == "constant"
    options = {"constant_values": value} if is_constant else {"mode": operation.mode}
    of_sample = _of_layout(signal, lambda x: ops.pad(x, others, **options))
    is_wider = any(map(any, others))
    return Window(
        call,
        signal,
        lambda w: of_sample(_only(w)) if is_wider else _only(w),
        left=left,
        length=length,
        padding=value,
    )


def _concatenate(call, signals):
    """Concatenates channels; along time, only padding, which depends on weights alone."""
    signal, rank = signals[0], 2 + len(signals[0].shape)
    if call.operation.axis % rank != signal.axis:
        return Pointwise(call, signals)
    if len(signals) > 1:
        raise call.refusal("it joins sequences one after the other, but a stream has no end.")
    arguments = keras.tree.flatten(call.arguments[0][0])
    at = next(i for i, x in enumerate(arguments) if x is call.tensors[0])
    values = [call.weights[id(x)]() if id(x) in call.weights else x for x in arguments]
    sizes = [x.shape[signal.axis] for x in values]
    left, right = sum(sizes[:at]), sum(sizes[at + 1 :])
    length = None if signal.length is None else signal.length + left + right
    numbers = np.unique([ops.convert_to_numpy(x).ravel() for x in values[:at]]) if at else [0.0]
    if len(numbers) > 1:
        raise call.refusal(
            "it starts the sequence with several numbers. Start it with zeros, as "
            "keras.layers.ZeroPadding1D((n, 0)) does."
        )
    return Window(call, signal, _only, left=left, length=length, padding=float(numbers[0]))


@_streams(numpy_ops.Transpose, numpy_ops.Swapaxes, numpy_ops.Moveaxis)
def _transpose(call, signal):
    rank = 2 + len(signal.shape)
    probe = np.empty(range(2, 2 + rank))  # each axis has a size of its own
    moved = call.operation(ops.convert_to_tensor(probe))
    if moved.shape[0] != 2:
        raise call.refusal("it moves the axis of the batch.")
    axis = tuple(moved.shape).index(2 + signal.axis)

    def function(x):
        (y,) = call.of_model([x])
        return y

    output = _resized(call, dataclasses.replace(signal, axis=axis))
    return Each(signal, _of_layout(signal, function, axis), output)


@_streams(keras.layers.Reshape, numpy_ops.Reshape)
def _reshape(call, signal):
    before, after = call.tensors[0].shape, call.specs[0].shape
    outer, inner = math.prod(signal.shape[: signal.axis - 1]), signal.shape[signal.axis - 1 :]
    for axis in range(1, len(after)):
        sizes = after[1:axis], after[axis + 1 :]
        if None in (*sizes[0], *sizes[1]) or math.prod(sizes[0]) != outer:
            continue
        ratio = Fraction(math.prod(sizes[1]), math.prod(inner))
        steps = before[signal.axis]
        if after[axis] is not None and steps is not None and after[axis] * ratio != steps:
            continue
        if (after[axis] is None) != (steps is None) or 1 not in (
            ratio.numerator,
            ratio.denominator,
        ):
            continue
        return _of_ratio(call, signal, axis, ratio)
    raise call.refusal(
        "it mixes the time axis with other axes. Reshape each step separately: "
        f"keras.layers.Reshape((-1, ...)) of steps of shape {signal.shape}."
    )


def _of_ratio(call, signal, axis, ratio):
    """Returns a reshape that makes one step of `ratio` steps."""
    output = _resized(call, dataclasses.replace(signal, axis=axis))
    if ratio < 1:
        size, outer = ratio.denominator, signal.shape[: signal.axis - 1]

        def split(x):
            inner = math.prod(x.shape[1 + signal.axis :]) // size
            x = ops.reshape(x, (-1, ops.shape(x)[1], *outer, size, inner))
            x = ops.moveaxis(x, 1 + signal.axis, 2) if outer else x
            return ops.reshape(x, (-1, ops.shape(x)[1], size, *output.shape))

        return Split(call, signal, output, size, split)

    def function(windows):
        time = 1 + signal.axis
        windows = ops.moveaxis(windows, 2, time) if signal.axis > 1 else windows
        return ops.reshape(windows, (-1, ops.shape(windows)[1], *output.shape))

    if ratio == 1:
        return Each(signal, lambda x: function(x[:, :, None]), output)
    length = None if signal.length is None else signal.length // int(ratio)
    options = {"taps": int(ratio), "stride": int(ratio), "length": length, "axis": axis}
    return Window(call, signal, function, **options)


# Sound


@_streams(keras.layers.STFTSpectrogram)
def _spectrogram(call, signal):
    layer = call.operation
    if layer.padding != "valid":
        raise call.refusal('it pads at both ends. Use padding="valid".')
    taps, stride = layer.frame_length, layer._frame_step
    _, length = windowed_length(signal.length, taps, stride, "valid")

    def function(windows):
        samples = ops.shape(windows)[1]
        (y,) = call.of_model([ops.reshape(windows, (-1, taps, *signal.shape))])
        return ops.reshape(y, (-1, samples, *call.specs[0].shape[2:]))

    return Window(call, signal, function, taps=taps, stride=stride, length=length)


def _transforms(operation, dtype):
    """Returns the matrices (fft_length, bins) of a Fourier transform of frames."""
    size = operation.fft_length
    of_units = ops.stft(
        ops.eye(size, dtype=dtype), operation.sequence_length, size, size, operation.window, False
    )
    return [ops.convert_to_numpy(part)[:, 0] for part in of_units]


def _centered_frames(call, signal, function, shape, axis):
    """Returns the part of a function of frames (batch, samples, ..., fft_length)."""
    operation = call.operation
    size, stride = operation.fft_length, operation.sequence_stride
    pad = size // 2 if getattr(operation, "center", True) else 0
    length = None if signal.length is None else 1 + (signal.length + 2 * pad - size) // stride
    frames = Window(
        call,
        signal,
        lambda windows: ops.moveaxis(windows, 2, -1),
        taps=max(2 * pad + 1, size),
        stride=stride,
        left=pad,
        length=length,
        sample=(*signal.shape, max(2 * pad + 1, size)),
    )
    mirrored = Frames(frames.outputs[0], pad, stride, size)
    output = mirrored.outputs[0]
    outputs = [dataclasses.replace(output, shape=tuple(shape), axis=axis)] * len(call.specs)
    return Chain([frames, mirrored, Each(output, function, *outputs)])


@_streams(math_ops.STFT)
def _stft(call, signal):
    if signal.axis != 1 + len(signal.shape):
        raise call.refusal("its time axis must be the last axis.")
    matrices = _transforms(call.operation, signal.dtype)
    shape = (*signal.shape, matrices[0].shape[1])

    def function(frames):
        return [ops.matmul(frames, ops.convert_to_tensor(m, signal.dtype)) for m in matrices]

    return _centered_frames(call, signal, function, shape, signal.axis)


@_streams(keras.layers.MelSpectrogram)
def _mel_spectrogram(call, signal):
    layer = call.operation
    if layer.power_to_db:
        raise call.refusal(
            "with power_to_db=True its decibels depend on the loudest step of the sequence. Use "
            "power_to_db=False, and a logarithm after it: 10 * ops.log10(ops.maximum(x, 1e-10))."
        )
    real, imaginary = _transforms(layer, signal.dtype)
    mel = layer.linear_to_mel_weight_matrix(
        layer.num_mel_bins, real.shape[1], layer.sampling_rate, layer.min_freq, layer.max_freq
    )
    mel = ops.convert_to_numpy(mel)

    def function(frames):
        parts = [
            ops.matmul(frames, ops.convert_to_tensor(m, frames.dtype)) for m in (real, imaginary)
        ]
        power = ops.square(parts[0]) + ops.square(parts[1])
        if layer.mag_exp != 2.0:
            power = ops.power(power, layer.mag_exp / 2)
        return [ops.matmul(power, ops.convert_to_tensor(mel, power.dtype))]

    return _centered_frames(call, signal, function, (layer.num_mel_bins,), 2)


@_streams(math_ops.ExtractSequences)
def _frames(call, signal):
    if signal.axis != 1 + len(signal.shape):  # frames of another axis
        return Pointwise(call, [signal])
    taps, stride = call.operation.sequence_length, call.operation.sequence_stride
    _, length = windowed_length(signal.length, taps, stride, "valid")
    return Window(
        call, signal, lambda w: ops.moveaxis(w, 2, -1), taps=taps, stride=stride, length=length
    )


# Others


@_streams(keras.layers.RNN)
def _recurrent(call, signal):
    if call.operation.go_backwards:
        raise call.refusal("it reads the sequence from its end. Use go_backwards=False.")
    _check_axes(call, dataclasses.replace(signal, shape=signal.shape[:1]), 1)
    return Recurrent(call, signal)


@_streams(keras.layers.Embedding)
def _embedding(call, signal):
    return Pointwise(call, [signal])


@_streams(keras.layers.PReLU)
def _prelu(call, signal):
    if signal.axis not in (call.operation.shared_axes or ()):
        raise call.refusal(f"it has a slope for each step. Use shared_axes=[{signal.axis}].")
    return Pointwise(call, [signal])


def _key(call, signal):
    """Returns the indices of a slice, and their places for each axis of the input."""
    key = call.argument(1, "key")
    key = list(key) if isinstance(key, (list, tuple)) else [key]
    rank = 2 + len(signal.shape)
    given = sum(k is not None and k is not Ellipsis for k in key)
    at = key.index(Ellipsis) if Ellipsis in key else len(key)
    key[at : at + 1] = [slice(None)] * (rank - given)
    return key, [i for i, k in enumerate(key) if k is not None]


@_streams(numpy_ops.GetItem)
def _slice(call, signal):
    key, places = _key(call, signal)
    place = places[signal.axis]
    time, key[place] = key[place], slice(None)
    if key[places[0]] != slice(None) or places[0] != 0:
        raise call.refusal(f"it selects rows of a batch. Received: {key[0]}")
    axis = sum(not isinstance(k, int) for k in key[:place])
    of_sample = _of_layout(signal, lambda x: x[tuple(key)], axis)
    if isinstance(time, int) and signal.in_window:
        first = time % signal.length
        part = Window(call, signal, lambda w: of_sample(_only(w)), left=-first, has_time=False)
        part.keeps_windows = True
        return part
    if isinstance(time, int) and time == -1:
        return _last_steps(call, signal, lambda x: of_sample(x)[:, 0], 1, call.specs[0].shape[1:])
    if not isinstance(time, slice):
        raise call.refusal(
            f"it takes step {time} of the sequence. A stream supports only the last, x[:, -1]."
        )
    if time == slice(None):
        output = _resized(call, dataclasses.replace(signal, axis=axis))
        return Each(signal, of_sample, output)
    start, stop, stride = time.start or 0, time.stop, time.step or 1
    if signal.in_window and stride > 0:
        start, stop, stride = time.indices(signal.length)
    elif start < 0 and stop is None and stride == 1:
        shape = list(call.specs[0].shape[1:])
        shape[axis - 1] = -start
        return _last_steps(call, signal, lambda x: to_axis(of_sample(x), axis), -start, shape)
    is_early = stop is not None and stop >= 0 and stop != signal.length and not signal.in_window
    if start < 0 or stride < 1 or is_early:
        raise call.refusal(
            "its slice of the time axis depends on where the sequence ends. Use a start from the "
            f"first step, and a stop of None. Received: {start}:{stop}:{stride}"
        )
    length = None if signal.length is None else len(range(signal.length)[time])
    return Window(
        call,
        signal,
        lambda w: of_sample(_only(w)),
        left=-start,
        stride=stride,
        length=length,
        axis=axis,
    )


def _last_steps(call, signal, function, count, shape):
    """Returns a function (batch, ...) of the last steps (batch, count, ...), a running value."""

    def of_windows(windows):
        samples = ops.shape(windows)[1]
        y = function(ops.reshape(windows, (-1, count, *signal.shape)))
        return ops.reshape(y, (-1, samples, *shape))

    block = signal.block  # of which the last sample counts
    options = {"taps": count, "stride": block, "left": count - block, "sample": shape}
    part = Window(call, signal, of_windows, has_time=False, **options)
    part.fewest = count
    return part
