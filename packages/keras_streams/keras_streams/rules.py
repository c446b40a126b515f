"""Which part streams which layer or operation of Keras."""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams._keras_internals import (
    all_layers,
    compute_conv_transpose_padding_args_for_jax,
    keras_mask,
    math_ops,
    nn_ops,
    numpy_ops,
    sliding_window,
)
from keras_streams.graph import CONCATENATIONS, Call, StreamOptions, is_in_keras, of_any_rank
from keras_streams.parts import (
    OR_WINDOW,
    CausalAttention,
    Cumulative,
    Each,
    Frames,
    Part,
    Pointwise,
    Protocol,
    Recurrent,
    RecurrentRows,
    RunningMax,
    RunningMean,
    Signal,
    Sliding,
    Split,
    Table,
    Window,
    output_of,
)
from keras_streams.protocol import has_protocol
from keras_streams.types import Tensor

_CAUSAL = (
    'a causal layer such as keras.layers.Conv1D(padding="causal"), keras.layers.LSTM, '
    "or one that follows keras_streams.StreamingMixin"
)
_MAKERS: dict[type, Callable[[Call, Signal], Part | list[Part]]] = {}


def _streams(*classes):
    """Registers a function (call, signal) that makes the parts for these classes."""

    def register(maker):
        _MAKERS.update(dict.fromkeys(classes, maker))
        return maker

    return register


# Layers that cannot stream over time, and why.
_OTHER_ATTENTION = (
    "this kind of attention has no stream, with or without a causal mask. Use "
    "keras.layers.MultiHeadAttention, called with use_causal_mask=True, or "
    f"{_CAUSAL}. {OR_WINDOW}"
)
_REFUSED = {
    keras.layers.Bidirectional: (
        "one of its layers reads the sequence from its end. Use a forward layer with the units of "
        f"both, such as keras.layers.LSTM. {OR_WINDOW}"
    ),
    keras.layers.Attention: _OTHER_ATTENTION,
    keras.layers.AdditiveAttention: _OTHER_ATTENTION,
    keras.layers.Flatten: (
        "it joins all steps. Use GlobalAveragePooling1D or a recurrent layer with "
        f"return_sequences=False. {OR_WINDOW}"
    ),
}


def make_parts(call: Call, signals: list[Signal], options: StreamOptions) -> Part | list[Part]:
    """Returns the part of a call, or several, one after another. Its inputs come together.

    Raises:
        ValueError: If the call is not supported.
    """
    operation, moving = call.operation, [s for s in signals if not s.is_static]
    signal = (moving or signals)[0]
    if call.arguments[1].get("training") and not isinstance(operation, _RESIZING):
        raise call.refusal("it is called with training=True, but streaming is inference.")
    masks = getattr(operation, "mask_zero", False) or isinstance(operation, keras.layers.Masking)
    if masks and not options.ignore_masks:
        raise call.refusal(
            "a stream has no masked steps. If it never gets padding, pass ignore_masks=True."
        )
    if not moving and _repeats_for_each(call, signal.length):
        output = output_of(call, signal, has_time=True, is_static=False, axis=1)
        return Each(signal, functools.partial(_repeated_for_each, call), output)
    if len({signal.has_time for signal in moving}) == 2:
        raise call.refusal(
            "it combines each step with a value computed from all steps, including later ones. "
            f"Use {_CAUSAL} for that value as well. {OR_WINDOW}"
        )
    parts = all_layers(operation) if isinstance(operation, keras.Layer) else []
    is_alone = not signal.has_time or type(operation) is keras.layers.TimeDistributed
    if is_alone and any(getattr(part, "stateful", False) for part in parts):
        raise call.refusal(
            "it would carry states from one step or window to the next. Build it with "
            "stateful=False."
        )
    if not signal.has_time:
        return Pointwise(call, signals)
    reduced = _reduced(call, signal, options)
    if reduced is not None:
        return reduced
    if isinstance(operation, _ATTENTION) and not signals[-1].is_static:
        return _attention(call, signal, options)
    kinds = type(operation).__mro__
    for kind in kinds:
        if kind in _REFUSED:
            raise call.refusal(_REFUSED[kind])
    if getattr(operation, "data_format", None) == "channels_first":
        raise call.refusal('its time axis is the last axis. Use data_format="channels_last".')
    if isinstance(operation, CONCATENATIONS):
        return _concatenate(call, signals)
    if type(operation) is keras.layers.TimeDistributed and len(call.given) == 1:
        return _time_distributed(call, signal)
    makers: list[Callable] = [Protocol] if has_protocol(operation) else []
    if not isinstance(operation, keras.Layer) or is_in_keras(type(operation).call):
        makers += [_MAKERS[kind] for kind in kinds if kind in _MAKERS]
    elif isinstance(operation, keras.layers.RNN) and not makers:
        raise call.refusal(
            "it overrides `call`, which a stream cannot repeat. Do that work in layers around it, "
            "or in a cell for keras.layers.RNN."
        )
    if not makers:
        return Pointwise(call, signals)
    has_mask = call.arguments[1].get("mask") is not None
    is_started = isinstance(operation, keras.layers.RNN) and len(moving) == 1 and not has_mask
    is_alone = len(signals) == 1 or is_started
    if not is_alone or (isinstance(operation, keras.Layer) and len(call.given) > len(signals)):
        raise call.refusal(_INPUTS_ONLY)
    return makers[0](call, signal)


def _repeats_for_each(call, length):
    """Returns whether an operation repeats a value without a time axis for each step."""
    is_of_steps = call.tensors[0].shape[1:2] == (1,) or call.specs[0].ndim > call.tensors[0].ndim
    return isinstance(call.operation, _REPEATS) and is_of_steps and call.specs[0].shape[1] == length


def _repeated_for_each(call, x):
    """Returns a value without a time axis at each step."""
    (y,) = call.of_model([x[:, 0]])
    return ops.repeat(y[:, :1], ops.shape(x)[1], axis=1)


_INPUTS_ONLY = (
    "a stream has no masked steps and starts from the layer's own initial state. Call it with its "
    "inputs only, without `mask`, `initial_state` or `condition`."
)
_RESIZING = keras.layers.Resizing, keras.layers.CenterCrop  # the same in training
_REPEATS = keras.layers.RepeatVector, numpy_ops.Repeat, numpy_ops.Tile, numpy_ops.BroadcastTo


# Tensors that depend on weights alone


_EACH_ELEMENT = (
    *(keras.layers.Add, keras.layers.Subtract, keras.layers.Multiply, keras.layers.Average),
    *(keras.layers.Maximum, keras.layers.Minimum, numpy_ops.Add, numpy_ops.Subtract),
    *(numpy_ops.Multiply, numpy_ops.Divide, numpy_ops.TrueDivide, numpy_ops.Maximum),
    *(numpy_ops.Minimum, numpy_ops.Where, *CONCATENATIONS),
)


def tables(call: Call, signals: list[Signal]) -> list[tuple]:
    """Returns the arguments of a call that have a row for each step, such as positions' embeddings.

    Each is a tuple of the argument, a symbolic tensor, and the part that makes it.
    """
    at = next((i for i, signal in enumerate(signals) if signal.has_time), None)
    if at is None or not isinstance(call.operation, _EACH_ELEMENT):
        return []
    axis, rank, found = signals[at].axis, call.tensors[at].ndim, []
    if isinstance(call.operation, CONCATENATIONS) and call.operation.axis % rank == axis:
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
            return ops.moveaxis(ops.reshape(call.computed(leaf), shape), axis, 1)[0]

        dtype = keras.backend.standardize_dtype(leaf.dtype)
        tensor = keras.KerasTensor((None, *shape[1:]), dtype)
        found.append((leaf, tensor, Table(signals[at], rows, tensor)))
    return found


def leading_steps(call: Call, signal: Signal) -> tuple[int, int] | None:
    """Returns the axis and the number of steps of a slice such as x[:, :3], `None` for others."""
    key, places = _key(call, signal)
    time = key[places[signal.axis]]
    is_leading = isinstance(time, slice) and not time.start and time.step in (None, 1)
    return (signal.axis, time.stop) if is_leading and (time.stop or 0) > 0 else None


# Attention


_ATTENTION = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention


def _attention(call, signal, options):
    layer, (_, named) = call.operation, call.arguments
    axes = getattr(layer, "attention_axes", None)
    if len(signal.shape) > 1 and axes and signal.axis not in axes and len({*call.inputs}) == 1:
        return Pointwise(call, [signal] * len(call.inputs))  # within each step
    is_causal, window = _causality(call)
    if not options.ignore_masks and any(keras_mask(x) is not None for x in call.tensors):
        raise call.refusal(_INPUTS_ONLY)
    known = "query", "value", "key", "use_causal_mask", "attention_mask"
    others = [name for name in named if name not in known and named[name] not in (None, False)]
    if others:
        raise call.refusal(
            "it takes query, value, key, use_causal_mask and attention_mask only. Received: "
            f"{', '.join(others)}"
        )
    if not is_causal:
        raise call.refusal(
            "it attends to all steps. Train it with causal attention, layer(x, x, "
            f"use_causal_mask=True), or use {_CAUSAL}. {OR_WINDOW}"
        )
    if len(set(call.inputs)) > 1 or len(signal.shape) > 1 or signal.axis != 1:
        raise call.refusal("it attends to a sequence other than its own. Call it as layer(x, x).")
    is_grouped = isinstance(layer, keras.layers.GroupQueryAttention)
    sliding = layer.sliding_window if is_grouped else sliding_window(layer)
    window = min(filter(None, (sliding, window)), default=None)
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
    mask = call.constant(call.argument(len(call.arguments[0]), "attention_mask"))
    if isinstance(mask, keras.KerasTensor):
        return False, None
    mask = np.asarray(ops.convert_to_numpy(mask)).astype(bool)
    steps = mask.shape[-1]
    distance = np.arange(steps)[:, None] - np.arange(steps)
    if named.get("use_causal_mask"):
        mask = mask & (distance >= 0)
    window = int(np.sum(mask.reshape(-1, steps)[-1]))
    band = (distance >= 0) & (distance < window)
    is_band = mask.shape[-2] == steps and np.array_equal(mask, np.broadcast_to(band, mask.shape))
    return is_band, None if window == steps else window


# Reductions over time


_MEANS = *of_any_rank("GlobalAveragePooling{}D"), numpy_ops.Mean
_MAXIMA = *of_any_rank("GlobalMaxPooling{}D"), numpy_ops.Max, numpy_ops.Amax
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
    if kind is None or len(call.given) > 1:
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
    is_float = keras.backend.is_float_dtype(signal.dtype)
    if is_window and (signal.block > 1 or not is_float) or not is_window and running is None:
        return None
    if not is_float:
        raise call.refusal(f"it reduces {signal.dtype} over time: cast it to floats.")
    others = tuple(a + (a < signal.axis) for a in axes - {signal.axis})

    def values(x):
        x = of_sample(x, axis=others) if others else x
        return ops.reshape(x, (-1, ops.shape(x)[1], *call.specs[0].shape[1:]))

    if not is_window:
        return running(call, signal, values)
    scale = 1 / signal.length if of_sample is ops.mean else 1.0
    return Sliding(call, signal, values, of_two, scale)


def unfolded(call: Call, signal: Signal) -> Part:
    """Returns the part that makes each window of a signal, which a call takes, one sample."""
    if signal.length is None or signal.block > 1:
        raise call.refusal("it has several samples for each step of the window.")
    shape = list(signal.shape)
    shape.insert(signal.axis - 1, signal.length)
    like = dataclasses.replace(signal, shape=tuple(shape), has_time=False, axis=1)
    return Window(call, signal, taps=signal.length, like=like)


# Windows of time, and of the axes between time and channels: the axes of an image, or none


def padding_of(length: int | None, span: int, stride: int, padding: str) -> tuple[int, int]:
    """Returns the padding before the first sample and after the last one.

    With `padding="same"` and strides, Keras' padding depends on the length. An unknown length
    is assumed to be a multiple of the strides.
    """
    if padding in ("valid", "causal"):
        return (span - 1 if padding == "causal" else 0), 0
    last = 0 if length is None else length % stride
    total = max(span - (last or stride), 0)
    return total // 2, total - total // 2


def per_axis(numbers: Any, rank: int) -> tuple:
    """Returns one number, or a number for each axis, as a tuple."""
    numbers = tuple(keras.tree.flatten(numbers))
    return numbers if len(numbers) == rank else numbers * rank


def _check_axes(call, signal, rank):
    if len(signal.shape) != rank or signal.axis > rank:
        raise call.refusal(
            f"its time axis is axis {signal.axis}, which it takes for channels. Put time on axis "
            "1, as keras.layers.Permute does, or say which axis of the inputs it is: `time_axis`."
        )


def _window(call, signal, sizes, function, fill=0.0):
    """Returns the part of an operation with windows of `sizes` along time and other axes.

    `function` is the operation without padding, of x, strides and dilation rates.
    """
    operation, rank, time = call.operation, len(sizes), signal.axis - 1
    _check_axes(call, signal, rank)
    strides = per_axis(operation.strides or sizes, rank)
    rates = per_axis(getattr(operation, "dilation_rate", 1), rank)
    shape = [*signal.shape[:time], signal.length, *signal.shape[time:-1]]
    widths = [
        padding_of(size, (taps - 1) * rate + 1, stride, operation.padding.lower())
        for size, taps, stride, rate in zip(shape, sizes, strides, rates, strict=True)
    ]
    (left, right), widths[time] = widths[time], (0, 0)
    others = (*rates[:time], 1, *rates[time + 1 :])

    def of_window(x):
        if any(map(any, widths)):
            x = ops.pad(x, [(0, 0), *widths, (0, 0)], constant_values=fill)
        return function(x, strides, others)

    options = {"taps": sizes[time], "stride": strides[time], "dilation": rates[time]}
    return Window(call, signal, of_window, left=left, right=right, padding=fill, **options)


# Convolutions, layers and operations


def _conv(x, kernel, **options):
    """Returns a convolution, group by group: `ops.conv` takes no symbolic tensors with several."""
    groups = x.shape[-1] // kernel.shape[-2]
    pairs = zip(ops.split(x, groups, -1), ops.split(kernel, groups, -1), strict=True)
    return ops.concatenate([ops.conv(*pair, **options) for pair in pairs], -1)


_DEPTHWISE = *of_any_rank("DepthwiseConv{}D"), nn_ops.DepthwiseConv
_SEPARABLE = *of_any_rank("SeparableConv{}D"), nn_ops.SeparableConv


def _kernels(call):
    """Returns the kernels of a convolution."""
    is_separable = isinstance(call.operation, _SEPARABLE)
    names = ("depthwise_kernel", "pointwise_kernel") if is_separable else ("kernel",)
    if isinstance(call.operation, keras.Layer):
        return [getattr(call.operation, name) for name in names]
    return [call.computed(call.argument(i, name)) for i, name in enumerate(names, 1)]


def _convolved(call, function, x, **options):
    """Returns a convolution of x without padding, with its kernels, bias and activation."""
    operation, is_layer = call.operation, isinstance(call.operation, keras.Layer)
    x = ops.cast(x, operation.compute_dtype) if is_layer else x
    kernels = [ops.cast(kernel, x.dtype) for kernel in _kernels(call)]
    y = function(x, *kernels, padding="valid", data_format="channels_last", **options)
    if is_layer and operation.use_bias:
        y = y + ops.cast(operation.bias, y.dtype)
    return operation.activation(y) if is_layer else y


@_streams(*of_any_rank("Conv{}D"), nn_ops.Conv, *_DEPTHWISE, *_SEPARABLE)
def _convolution(call, signal):
    time, function = signal.axis - 1, _conv
    if isinstance(call.operation, (*_DEPTHWISE, *_SEPARABLE)):
        is_separable = isinstance(call.operation, _SEPARABLE)
        function = ops.separable_conv if is_separable else ops.depthwise_conv

    def of_windows(x, strides, rates):
        if function is _conv:
            # A window has one output. TensorFlow 2.21 has computed wrong ones of a single channel
            # for strides that are longer than the window.
            strides = (*strides[:time], 1, *strides[time + 1 :])
        return _convolved(call, function, x, strides=strides, dilation_rate=rates)

    return _window(call, signal, _kernels(call)[0].shape[:-2], of_windows)


def spread(x: Tensor, axis: int, stride: int, widths: tuple[int, int]) -> Tensor:
    """Returns x with zeros between its elements along an axis, padded or cropped at both ends."""
    (left, right), size = widths, x.shape[axis]
    at = np.arange(-left, (size - 1) * stride + 1 + right)
    is_place = (at % stride == 0) & (at >= 0) & (at < size * stride)
    x = ops.pad(x, [(0, int(i == axis)) for i in range(len(x.shape))])
    return ops.take(x, np.where(is_place, at // stride, size), axis)


def reversed_conv(x: Tensor, kernel: Tensor, **options: Any) -> Tensor:
    """Returns the convolution of spread samples that equals a transposed one."""
    taps = tuple(range(len(kernel.shape) - 2))
    return ops.conv(x, ops.swapaxes(ops.flip(kernel, axis=taps), -1, -2), **options)


@_streams(*of_any_rank("Conv{}DTranspose"), nn_ops.ConvTranspose)
def _transposed_conv(call, signal):
    """A convolution, with the taps in reverse, of samples with zeros between them."""
    operation, (kernel,), time = call.operation, _kernels(call), signal.axis - 1
    rank = len(kernel.shape) - 2
    _check_axes(call, signal, rank)
    strides, rates = per_axis(operation.strides, rank), per_axis(operation.dilation_rate, rank)
    options = operation.padding, operation.output_padding, rates
    sides = compute_conv_transpose_padding_args_for_jax(
        kernel.shape, kernel.shape, strides, *options
    )
    others = (*rates[:time], 1, *rates[time + 1 :])

    def of_window(x):
        for axis, (stride, widths) in enumerate(zip(strides, sides, strict=True), 1):
            x = x if axis == signal.axis else spread(x, axis, stride, widths)
        return _convolved(call, reversed_conv, x, dilation_rate=others)

    split, (left, right) = _repeated(call, signal, strides[time], zeros=True), sides[time]
    taps, right = kernel.shape[time], right + 1 - strides[time]
    options = {"taps": taps, "dilation": rates[time], "left": left, "right": right}
    return [split, Window(call, split.outputs[0], of_window, **options)]


# Pooling


_AVERAGES = *of_any_rank("AveragePooling{}D"), nn_ops.AveragePool


@_streams(*of_any_rank("MaxPooling{}D"), nn_ops.MaxPool, *_AVERAGES)
def _pooling(call, signal):
    operation = call.operation
    sizes = per_axis(operation.pool_size, len(signal.shape))

    def largest(x, strides, rates):
        y = ops.max_pool(x, sizes, strides, data_format="channels_last")
        return ops.cast(y, call.specs[0].dtype)  # of integers Keras returns integers

    def mean(x, strides, rates):
        total = ops.average_pool(x, sizes, strides, data_format="channels_last")
        return total[..., :-1] / total[..., -1:]

    if not isinstance(operation, _AVERAGES):
        fill = 0.0 if operation.padding.lower() == "valid" else -math.inf
        return _window(call, signal, sizes, largest, fill)
    # Ones as another channel count the samples that are not padding.
    *others, channels = signal.shape
    counted = dataclasses.replace(signal, shape=(*others, channels + 1))
    each = Each(signal, lambda x: ops.concatenate([x, ops.ones_like(x[..., :1])], -1), counted)
    return [each, _window(call, counted, sizes, mean)]


# Changes of the time axis


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
    repeats = np.unique(operation.repeats)
    if len(repeats) > 1:
        raise call.refusal("it repeats steps different numbers of times. Repeat all equally often.")
    return _repeated(call, signal, int(repeats[0]))


@_streams(numpy_ops.Pad)
def _pad(call, signal):
    operation = call.operation
    widths = [tuple(pair) for pair in operation.pad_width]
    widths = widths * (2 + len(signal.shape)) if len(widths) == 1 else widths
    (left, right), widths[signal.axis] = widths[signal.axis], (0, 0)
    is_constant = operation.mode == "constant"
    if widths[0] != (0, 0) or (not is_constant and (left or right)):
        raise call.refusal('it pads with other samples or rows. Use mode="constant" over time.')
    kind = int if keras.backend.is_int_dtype(signal.dtype) else float
    value = kind(call.constant(call.argument(1, "constant_values")) or 0)
    options = {"constant_values": value} if is_constant else {"mode": operation.mode}
    pad = functools.partial(ops.pad, pad_width=widths, **options)
    return Window(call, signal, pad, left=left, right=right, padding=value)


def _concatenate(call, signals):
    """Concatenates channels; along time, only padding by a constant."""
    signal, rank = signals[0], 2 + len(signals[0].shape)
    if call.operation.axis % rank != signal.axis:
        return Pointwise(call, signals)
    if len(signals) > 1:
        raise call.refusal("it joins sequences one after the other, but a stream has no end.")
    arguments = keras.tree.flatten(call.arguments[0][0])
    at = next(i for i, x in enumerate(arguments) if x is call.tensors[0])
    values = [*map(call.constant, arguments[:at]), *map(call.computed, arguments[at:])]
    sizes = [x.shape[signal.axis] for x in values]
    left, right = sum(sizes[:at]), sum(sizes[at + 1 :])
    numbers = np.unique([ops.convert_to_numpy(x).ravel() for x in values[:at]]) if at else [0.0]
    if len(numbers) > 1:
        raise call.refusal(
            "it starts the sequence with several numbers. Start it with zeros, as "
            "keras.layers.ZeroPadding1D((n, 0)) does."
        )
    return Window(call, signal, left=left, right=right, padding=float(numbers[0]))


@_streams(keras.layers.Reshape, numpy_ops.Reshape)
def _reshape(call, signal):
    after = call.specs[0].shape
    outer, inner = math.prod(signal.shape[: signal.axis - 1]), signal.shape[signal.axis - 1 :]
    for axis in range(1, len(after)):
        sizes = after[1:axis], after[axis + 1 :]
        if None in (*sizes[0], *sizes[1]) or math.prod(sizes[0]) != outer:
            continue
        ratio = Fraction(math.prod(sizes[1]), math.prod(inner))
        steps = None if after[axis] is None else after[axis] * ratio
        if steps == call.tensors[0].shape[signal.axis] and 1 in ratio.as_integer_ratio():
            break
    else:
        raise call.refusal(
            "it mixes the time axis with other axes. Reshape each step separately: "
            f"keras.layers.Reshape((-1, ...)) of steps of shape {signal.shape}."
        )
    output = output_of(call, signal, axis=axis)
    if ratio >= 1:  # one step of several
        return Window(call, signal, taps=int(ratio), stride=int(ratio), like=output)
    size, before = ratio.denominator, signal.shape[: signal.axis - 1]

    def split(x):
        inner = math.prod(x.shape[1 + signal.axis :]) // size
        x = ops.reshape(x, (-1, ops.shape(x)[1], *before, size, inner))
        x = ops.moveaxis(x, 1 + signal.axis, 2) if before else x
        return ops.reshape(x, (-1, ops.shape(x)[1], size, *output.shape))

    return Split(call, signal, output, size, split)


# Categories


@_streams(
    *(keras.layers.CategoryEncoding, keras.layers.Discretization),
    *(keras.layers.IntegerLookup, keras.layers.StringLookup),
)
def _categories(call, signal):
    if signal.shape or call.operation.output_mode != "one_hot":
        return Pointwise(call, [signal])
    # Along another axis: Keras would drop an axis of a single step.
    return Each(signal, lambda x: call.of_model([x[..., None]]), output_of(call, signal))


# Sound


@_streams(math_ops.ExtractSequences)
def _frames(call, signal):
    if signal.axis != 1 + len(signal.shape):  # frames of another axis
        return Pointwise(call, [signal])
    taps, stride = call.operation.sequence_length, call.operation.sequence_stride
    return Window(call, signal, taps=taps, stride=stride)


def _transform(operation, dtype):
    """Returns the Fourier transform of frames (..., fft_length), by products with matrices."""
    size = operation.fft_length
    of_units = ops.stft(
        ops.eye(size, dtype=dtype), operation.sequence_length, size, size, operation.window, False
    )
    matrices = [ops.convert_to_numpy(part)[:, 0] for part in of_units]
    return lambda frames: [ops.matmul(frames, ops.convert_to_tensor(m, dtype)) for m in matrices]


def _centered_frames(call, signal, function, shape, axis):
    """Returns the part of a function of frames (batch, samples, ..., fft_length)."""
    operation = call.operation
    if signal.axis != 1 + len(signal.shape):
        raise call.refusal("its time axis must be the last axis.")
    size, stride = operation.fft_length, operation.sequence_stride
    pad = size // 2 if getattr(operation, "center", True) else 0
    taps = max(2 * pad + 1, size)
    like = dataclasses.replace(signal, shape=(*signal.shape, taps))
    options = {"taps": taps, "stride": stride, "left": pad, "right": pad + taps - size}
    frames = Window(call, signal, like=like, **options)
    mirrored = Frames(frames.outputs[0], pad, stride, size)
    output = mirrored.outputs[0]
    outputs = [dataclasses.replace(output, shape=tuple(shape), axis=axis)] * len(call.specs)
    return [frames, mirrored, Each(output, function, *outputs)]


@_streams(math_ops.STFT)
def _stft(call, signal):
    shape = (*signal.shape, call.operation.fft_length // 2 + 1)
    transform = _transform(call.operation, signal.dtype)
    return _centered_frames(call, signal, transform, shape, signal.axis)


@_streams(keras.layers.MelSpectrogram)
def _mel_spectrogram(call, signal):
    layer = call.operation
    if layer.power_to_db:
        raise call.refusal(
            "with power_to_db=True its decibels depend on the loudest step of the sequence. Use "
            "power_to_db=False, and a logarithm after it: 10 * ops.log10(ops.maximum(x, 1e-10))."
        )
    bins, transform = layer.fft_length // 2 + 1, _transform(layer, signal.dtype)
    mel = layer.linear_to_mel_weight_matrix(
        layer.num_mel_bins, bins, layer.sampling_rate, layer.min_freq, layer.max_freq
    )
    mel = ops.convert_to_numpy(mel)

    def function(frames):
        real, imaginary = transform(frames)
        power = ops.square(real) + ops.square(imaginary)
        if layer.mag_exp != 2.0:
            power = ops.power(power, layer.mag_exp / 2)
        return ops.matmul(power, ops.convert_to_tensor(mel, power.dtype))

    return _centered_frames(call, signal, function, (layer.num_mel_bins,), 2)


# Others


@_streams(numpy_ops.Cumsum)
def _cumulative_sum(call, signal):
    axis, rank = call.operation.axis, 2 + len(signal.shape)
    is_of_time = axis is not None and axis % rank == signal.axis
    return Cumulative(call, signal) if is_of_time else Pointwise(call, [signal])


@_streams(keras.layers.RNN)
def _recurrent(call, signal):
    if call.operation.go_backwards:
        raise call.refusal("it reads the sequence from its end. Use go_backwards=False.")
    _check_axes(call, dataclasses.replace(signal, shape=signal.shape[:1]), 1)
    return Recurrent(call, signal)


def _time_distributed(call, signal):
    layer, output = call.operation.layer, output_of(call, signal)
    if signal.axis == 1:

        def function(x):
            y = layer(ops.reshape(x, (-1, *signal.shape)))
            return ops.reshape(y, (-1, ops.shape(x)[1], *output.shape))

        return Each(signal, function, output)
    if signal.axis != 2 or not isinstance(layer, keras.layers.RNN) or len(signal.shape) != 2:
        return Pointwise(call, [signal])
    if not layer.return_sequences or layer.return_state or layer.go_backwards:
        raise call.refusal("its layer must return the outputs of all steps, from the first on.")
    return RecurrentRows(call, signal)


@_streams(keras.layers.PReLU)
def _prelu(call, signal):
    if signal.axis not in (call.operation.shared_axes or ()):
        raise call.refusal(f"it has a slope for each step. Use shared_axes=[{signal.axis}].")
    return Pointwise(call, [signal])


def _key(call, signal):
    """Returns the indices of a slice, and their places for each axis of the input."""
    key = call.constant(call.argument(1, "key"))
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
        raise call.refusal(
            "it selects along the first axis, which is that of the batch. State a recurrence over "
            f"time as a cell of keras.layers.RNN. Received: {key[0]}"
        )
    axis = sum(not isinstance(k, int) for k in key[:place])
    has_time = isinstance(time, slice)
    like = output_of(call, signal, has_time=has_time, axis=axis if has_time else 1)

    def of_sample(x):
        return x[tuple(key)]

    if isinstance(time, int) and signal.in_window:
        part = Window(call, signal, of_sample, left=-(time % signal.length), like=like)
        part.keeps_windows = True
        return part
    is_last = has_time and not signal.in_window and time.stop is None
    if is_last and (time.start or 0) < 0 and time.step in (None, 1):
        return _last_steps(call, signal, axis, -time.start)
    if time == -1:
        return _last_steps(call, signal, None, 1)
    if not has_time:
        raise call.refusal(
            f"it takes step {time} of the sequence. A stream supports only the last, x[:, -1]."
        )
    if time == slice(None):
        return Pointwise(call, [signal])
    start, stop, stride = time.start or 0, time.stop, time.step or 1
    if signal.in_window and stride > 0:
        start, stop, stride = time.indices(signal.length)
    is_early = stop is not None and stop >= 0 and stop != signal.length and not signal.in_window
    if is_early:
        raise call.refusal(
            "its slice of the time axis ends at a fixed step, but a stream has no end. Use a stop "
            f"of None. Received: {start}:{stop}:{stride}"
        )
    if start < 0 or stride < 1:
        raise call.refusal(
            "its slice of the time axis depends on where the sequence ends. Use a start of 0 or "
            f"more, a stop of None and a positive step. Received: {start}:{stop}:{stride}"
        )
    right = stop or 0  # a stop counts from the end
    if signal.length is not None:
        right = time.indices(signal.length)[1] - signal.length
    return Window(call, signal, of_sample, left=-start, right=right, stride=stride, like=like)


def _last_steps(call, signal, axis, count):
    """Returns the part of the last `count` steps, on an axis of the output (`None`: without it)."""
    shape, block = list(call.specs[0].shape[1:]), signal.block  # of which the last sample counts
    if axis is not None:
        shape[axis - 1] = count
    like = dataclasses.replace(signal, shape=tuple(shape), has_time=False, axis=1)
    options = {"taps": count, "stride": block, "left": -(-count % block), "like": like}
    return Window(call, signal, lambda x: call.of_model([x])[0], **options)
