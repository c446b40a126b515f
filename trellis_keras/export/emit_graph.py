"""Translates the graph of a Keras model to operations of a `Program`.

The graph is the one that `to_stream` plans. Operations on a tensor without a
sample at every step are in a part with a `Clock`.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
from keras import ops
from keras.src.models.functional import Functional
from keras.src.ops import numpy as numpy_ops

from keras_streams import parts
from keras_streams import program as p
from keras_streams.graph_stream import GraphStream, Planned
from keras_streams.parts import Part, Signal
from keras_streams.program import Clock, Counter, Expression, Program, Vector
from keras_streams.protocol import has_protocol
from trellis_keras.export import emit as e
from trellis_keras.layers.tcn import CenteredConv1D


@e.emits(keras.Sequential, Functional)
def _model(program, model, x):
    return emit_graph(program, GraphStream(model), x)


def emit_graph(program: Program, stream: GraphStream, x: Vector) -> Vector:
    """Adds one step of a model and returns its outputs, one after another.

    Args:
        program: The program.
        stream: The model's stream.
        x: The inputs, one after another.
    """
    return _Graph(program, stream).emit(x)


class _Graph:
    def __init__(self, program, stream):
        self.program, self.stream, self.plan = program, stream, stream.plan
        self.dtype = stream.model.compute_dtype  # for constants

    def emit(self, x):
        program, plan, values, start = self.program, self.plan, {}, 0
        if self.stream.is_clocked or plan.first_offset < 0:
            end = plan.last_offset + plan.cycle
            program.counter = Counter(plan.first_offset, end, plan.cycle)
        for n, signal in enumerate(plan.inputs):
            size = math.prod(signal.shape)
            values[n] = x if program.takes_token else x.part(start, size)
            start += size
        for planned in plan.parts:
            emitter = _PARTS.get(type(planned.part))
            if emitter is None:
                raise self.refusal(planned, "its class has no C implementation")
            signals = [plan.signals[n] for n in planned.inputs]
            if any(s.block > 1 for s in (*signals, *planned.part.outputs)):
                raise self.refusal(planned, "it has several samples per step")
            outputs = emitter(self, planned, [values[n] for n in planned.inputs])
            values.update(zip(planned.outputs, outputs, strict=True))
        numbers = keras.tree.flatten(self.stream.graph.outputs)
        outputs = [self._finished(n, values) for n in numbers]
        return outputs[0] if len(outputs) == 1 else program.concatenate(outputs, "outputs")

    def _finished(self, n, values):
        """Returns an output, which is NaN at steps without a sample."""
        x, clock = values[n], self.clock(self.plan.signals[n])
        if clock is None:
            return x
        y = self.program.fill(x.size, math.nan, "y")
        with self.program.part("output", "", clock):
            self.program.assign(y, x)
        return y

    def clock(self, signal: Signal) -> Clock | None:
        """Returns the clock of a signal, or None if it has a sample at every step."""
        if signal.pause == 1 and signal.offset <= self.plan.first_offset:
            return None
        return Clock(signal.offset, signal.pause)

    @contextlib.contextmanager
    def part(self, planned: Planned, signal: Signal) -> Iterator[None]:
        """Collects the operations of a call, which run when the signal has a sample."""
        name, comment = "delay", "aligns this branch with another"
        if planned.call is not None:
            operation = planned.call.operation
            name, comment = operation.name, type(operation).__name__
        with self.program.part(name, comment, self.clock(signal)):
            yield

    def refusal(self, planned, reason):
        return ValueError(
            f"{planned.call.place} cannot be exported: {reason}. Use `to_stream` and "
            "`compiled_step` instead."
        )


Emitter = Callable[[_Graph, Planned, list[Vector]], Sequence[Vector]]

_PARTS: dict[type[Part], Emitter] = {}


def _part(*kinds):
    def register(emitter):
        _PARTS.update(dict.fromkeys(kinds, emitter))
        return emitter

    return register


# Calls without a time dimension


@_part(parts.Recurrent)
def _recurrent(graph, planned, xs):
    program, part = graph.program, planned.part
    known = len(program.states)
    with graph.part(planned, part.outputs[0]):
        y = e.emit_inside(program, planned.call.operation, xs[0])
    states = program.states[known:]  # in the order in which the layer returns them
    return [y, *states[: len(part.outputs) - 1]]


@_part(parts.Pointwise, parts.Reshape, parts.Protocol)
def _call(graph, planned, xs):
    program, call = graph.program, planned.call
    operation = call.operation
    if isinstance(operation, keras.layers.TimeDistributed):
        operation = operation.layer
    kind = type(operation)
    is_merge = kind in _OPERATIONS or kind in (keras.layers.Concatenate, numpy_ops.Concatenate)
    has_options = isinstance(call.operation, keras.Layer) and len(call.given) > 1
    if not is_merge and (len(xs) > 1 or has_options):
        raise graph.refusal(planned, "only merges and arithmetic may have several inputs, or masks")
    if kind in _MOVES:
        return [_moved(graph, planned, xs[0])]
    with graph.part(planned, planned.part.outputs[0]):
        if kind in _OPERATIONS:
            return [_operation(graph, planned, xs)]
        if is_merge:
            return [_concatenated(graph, planned, xs)]
        if kind is keras.layers.Embedding:
            if not program.takes_token:
                raise graph.refusal(planned, "the model has other inputs than one token")
            return [program.lookup(e.embedding_table(program, operation))]
        if isinstance(planned.part, parts.Pointwise):
            return [_by_rows(graph, planned, operation, xs[0])]
        return [e.emit_inside(program, operation, xs[0])]


def _by_rows(graph, planned, layer, x):
    """Adds a layer for each of a step's rows, the last axes that the layer treats together."""
    if isinstance(layer, (keras.layers.RNN, keras.Model)) or has_protocol(layer):
        raise graph.refusal(planned, f"it applies {type(layer).__name__} to each step")
    if e.is_elementwise(layer):
        return e.emit_inside(graph.program, layer, x)
    shape = graph.plan.signals[planned.inputs[0]].shape
    rank = len(planned.call.specs[0].shape) - (layer is not planned.call.operation)
    axes = keras.tree.flatten(getattr(layer, "axis", ())) or [-1]
    axes = sorted(axis % rank for axis in axes)
    if len(axes) > len(shape) or axes != list(range(rank - len(axes), rank)):
        raise graph.refusal(planned, f"its axes {axes} are not the last of each step")
    rows = x.split(math.prod(shape[: len(shape) - len(axes)]))
    rows = [e.emit_inside(graph.program, layer, row) for row in rows]
    return rows[0] if len(rows) == 1 else graph.program.concatenate(rows, "rows")


def _concatenated(graph, planned, xs):
    (spec,), (output,) = planned.call.specs, planned.part.outputs
    before = planned.call.operation.axis % len(spec.shape) - len(spec.shape) + len(output.shape)
    if before < 0:
        raise graph.refusal(planned, "it concatenates along the time axis")
    blocks = [x.split(math.prod(output.shape[:before])) for x in xs]
    ordered = [block for of_all in zip(*blocks, strict=True) for block in of_all]
    return graph.program.concatenate(ordered, "joined")


# Layers and operations that only rearrange elements.
_MOVES = (
    keras.layers.Flatten,
    keras.layers.Permute,
    keras.layers.Reshape,
    numpy_ops.ExpandDims,
    numpy_ops.Flip,
    numpy_ops.GetItem,
    numpy_ops.Reshape,
    numpy_ops.Squeeze,
    numpy_ops.Transpose,
)


def _moved(graph, planned, x):
    signal = graph.plan.signals[planned.inputs[0]]
    shape = (1, 1, *signal.shape) if signal.has_time else (1, *signal.shape)
    places = np.arange(x.size, dtype="float32").reshape(shape)
    (y,) = planned.call([ops.convert_to_tensor(places)])
    with graph.part(planned, signal):
        return _gathered(graph.program, x, e.array(y).astype(int).ravel())


def _gathered(program, x, places):
    """Returns the elements of a vector at the given indices."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    runs = np.split(places, ends)
    pieces = [x.part(int(run[0]), len(run)) for run in runs]
    return pieces[0] if len(pieces) == 1 else program.concatenate(pieces, "moved")


def _add_all(*xs):
    return sum(xs[1:], xs[0])


def _fold(function):
    def apply(*xs):
        y = xs[0]
        for x in xs[1:]:
            y = function(y, x)
        return y

    return apply


def _times(a, b):
    return a * b


_OPERATIONS: dict[type, Callable[..., Expression]] = {
    keras.layers.Add: _fold(lambda a, b: a + b),
    keras.layers.Subtract: lambda a, b: a - b,
    keras.layers.Multiply: _fold(_times),
    keras.layers.Average: lambda *xs: _add_all(*xs) / len(xs),
    keras.layers.Maximum: _fold(p.maximum),
    keras.layers.Minimum: _fold(p.minimum),
    numpy_ops.Add: lambda a, b: a + b,
    numpy_ops.Subtract: lambda a, b: a - b,
    numpy_ops.Multiply: _times,
    numpy_ops.TrueDivide: lambda a, b: a / b,
    numpy_ops.Divide: lambda a, b: a / b,
    numpy_ops.Maximum: p.maximum,
    numpy_ops.Minimum: p.minimum,
    numpy_ops.Negative: lambda x: -x,
    numpy_ops.Abs: p.absolute,
    numpy_ops.Absolute: p.absolute,
    numpy_ops.Square: lambda x: x * x,
    numpy_ops.Sqrt: p.sqrt,
    numpy_ops.Exp: p.exp,
    numpy_ops.Log: p.log,
    numpy_ops.Log1p: p.log1p,
    numpy_ops.Tanh: p.tanh,
}


def _operation(graph, planned, xs):
    """Adds an elementwise operation on tensors, scalars and constants, and returns its output."""
    program, call = graph.program, planned.call
    arguments, named = call.arguments
    operands, vectors = [], iter(xs)
    for value in keras.tree.flatten([*arguments, *named.values()]):
        if isinstance(value, keras.KerasTensor):
            operands.append(next(vectors))
        elif np.ndim(e.array(value)) == 0:
            operands.append(float(e.array(value)))
        else:
            operands.append(program.weight("constant", e.array(value).astype(graph.dtype)))
    size = math.prod(planned.part.outputs[0].shape)
    if any(isinstance(x, Vector) and x.size not in (1, size) for x in operands):
        raise graph.refusal(planned, "it combines tensors of different shapes")
    function = _OPERATIONS[type(call.operation)]
    name = f"each_{type(call.operation).__name__.lower()}"  # a plain "log" would clash with C's
    return _elementwise(program, function, operands, name)


def _elementwise(program, function, xs, name):
    """Adds an elementwise function of any number of vectors and returns its output."""

    def apply(*xs):
        return {"y": function(*xs)}

    kind = inspect.Parameter.POSITIONAL_ONLY
    names = [inspect.Parameter(f"x{i}", kind) for i in range(len(xs))]
    apply.__signature__ = inspect.Signature(names)  # parameter names in C
    return program.elementwise(apply, *xs, name=name)[0]


# Windows


@_part(parts.Window, parts.AveragePool)
def _window(graph, planned, xs):
    program, part, (x,) = graph.program, planned.part, xs
    signal, (output,), layer = part.signal, part.outputs, planned.call.operation
    if isinstance(layer, keras.layers.ZeroPadding1D):
        y = program.fill(x.size, 0.0, "padded")
        with graph.part(planned, signal):
            program.assign(y, x)
        return [y]
    emitter = _WINDOWS.get(type(layer))
    if emitter is None and not isinstance(layer, (keras.layers.Cropping1D, numpy_ops.GetItem)):
        raise graph.refusal(planned, "its class has no C implementation")
    if emitter is None:
        places = np.arange(x.size, dtype="float32").reshape((1, 1, 1, *signal.shape))
        places = e.array(part.function(ops.convert_to_tensor(places)))
        with graph.part(planned, output):
            return [_gathered(program, x, places.astype(int).ravel())]
    return [emitter(graph, planned, layer, x)]


def _convolved(graph, planned, x, kernel, bias=None):
    """Adds a convolution with a kernel (tap, input, output), grouped if x has more channels."""
    program, part = graph.program, planned.part
    width, groups = kernel.shape[1], x.size // kernel.shape[1]
    inputs, rings = [x.part(g * width, width) for g in range(groups)], []
    if part.span > 1:
        with graph.part(planned, part.signal):
            rings = [program.ring("inputs", x, part.span) for x in inputs]
    outputs = []
    with graph.part(planned, part.outputs[0]):
        for g in range(groups):
            chosen = slice(g * kernel.shape[2] // groups, (g + 1) * kernel.shape[2] // groups)
            of_group = kernel[..., chosen]
            start = None if bias is None else program.weight("bias", bias[chosen])
            if rings:
                weight = program.weight(
                    "kernel", of_group, "[tap][input][output], the oldest tap first"
                )
                y = program.convolution(rings[g], weight, part.dilation, start)
            else:
                weight = program.weight("kernel", of_group[0], "[input][output]")
                y = program.dense(inputs[g], weight, start)
            outputs.append(y)
        return outputs[0] if groups == 1 else program.concatenate(outputs, "groups")


def _tapped(graph, planned, x):
    """Returns the samples of a window, oldest first, as vectors."""
    program, part = graph.program, planned.part
    if part.span == 1:
        return [x]
    with graph.part(planned, part.signal):
        ring = program.ring("inputs", x, part.span, part.padding)
    delays = [part.dilation * tap for tap in reversed(range(part.taps))]
    return [program.tap(ring, delay, "tap") for delay in delays]


def _bias(layer):
    return e.array(layer.bias) if layer.use_bias else None


def _activated(graph, planned, layer, y):
    with graph.part(planned, planned.part.outputs[0]):
        return e.activate(graph.program, layer, layer.activation, y)


def _conv(graph, planned, layer, x):
    y = _convolved(graph, planned, x, e.array(layer.kernel), _bias(layer))
    return _activated(graph, planned, layer, y)


def _transposed_conv(graph, planned, layer, x):
    kernel = e.array(layer.kernel)[::-1].transpose(0, 2, 1)
    return _activated(graph, planned, layer, _convolved(graph, planned, x, kernel, _bias(layer)))


def _depthwise(graph, planned, x, kernel, bias=None):
    taps, channels, multiplier = kernel.shape
    if multiplier > 1:  # as a mostly zero dense kernel
        dense = np.zeros((taps, channels, channels, multiplier), kernel.dtype)
        dense[:, range(channels), range(channels)] = kernel
        return _convolved(graph, planned, x, dense.reshape(taps, channels, -1), bias)
    program, tapped = graph.program, _tapped(graph, planned, x)
    with graph.part(planned, planned.part.outputs[0]):
        weights = program.weight("kernel", kernel[:, :, 0], "[tap][channel]").split(taps)
        more = [] if bias is None else [program.weight("bias", bias)]

        def convolve(*xs):
            products = [x * w for x, w in zip(xs[:taps], xs[taps : 2 * taps], strict=True)]
            return _add_all(*products, *xs[2 * taps :])

        return _elementwise(program, convolve, [*tapped, *weights, *more], "depthwise")


def _depthwise_conv(graph, planned, layer, x):
    y = _depthwise(graph, planned, x, e.array(layer.kernel), _bias(layer))
    return _activated(graph, planned, layer, y)


def _separable_conv(graph, planned, layer, x):
    program = graph.program
    between = _depthwise(graph, planned, x, e.array(layer.depthwise_kernel))
    with graph.part(planned, planned.part.outputs[0]):
        pointwise = program.weight("pointwise", e.array(layer.pointwise_kernel)[0])
        bias = program.weight("bias", e.array(layer.bias)) if layer.use_bias else None
        y = program.dense(between, pointwise, bias)
    return _activated(graph, planned, layer, y)


def _max_pooling(graph, planned, layer, x):
    tapped = _tapped(graph, planned, x)
    with graph.part(planned, planned.part.outputs[0]):
        return _elementwise(graph.program, _fold(p.maximum), tapped, "largest")


def _average_pooling(graph, planned, layer, x):
    program, part = graph.program, planned.part
    with graph.part(planned, part.signal):
        one = program.weight("one", np.ones(1, graph.dtype))
        counted = program.concatenate([x, one], "counted")
    tapped = _tapped(graph, planned, counted)
    with graph.part(planned, part.outputs[0]):
        total = _elementwise(program, _add_all, tapped, "sum")
        sums, count = total.part(0, x.size), total.part(x.size, 1)
        return _elementwise(program, lambda a, b: a / b, [sums, count], "mean")


_WINDOWS: dict[type, Callable] = {
    keras.layers.Conv1D: _conv,
    CenteredConv1D: _conv,
    keras.layers.Conv1DTranspose: _transposed_conv,
    keras.layers.DepthwiseConv1D: _depthwise_conv,
    keras.layers.SeparableConv1D: _separable_conv,
    keras.layers.MaxPooling1D: _max_pooling,
    keras.layers.AveragePooling1D: _average_pooling,
}


# Delays, upsampling, and reductions over time


@_part(parts.Delay)
def _delay(graph, planned, xs):
    program, part, (x,) = graph.program, planned.part, xs
    with graph.part(planned, part.signal):
        ring = program.ring("waiting", x, part.lag + 1)
    return [program.tap(ring, part.lag, "delayed")]


@_part(parts.UpSample)
def _up_sample(graph, planned, xs):
    program, part, (x,) = graph.program, planned.part, xs
    if part.zeros:
        y = program.fill(x.size, 0.0, "spread_out")
    elif part.keeps:
        y = program.state("held", x.size)
    else:
        return [x]
    with graph.part(planned, part.signal):
        program.assign(y, x)
    return [y]


@_part(parts.Chain)
def _chain(graph, planned, xs):
    for part in planned.part.parts:
        inner = Planned(part, planned.call, planned.inputs, planned.outputs)
        xs = _PARTS[type(part)](graph, inner, xs)
    return xs


@_part(parts.Last)
def _last(graph, planned, xs):
    (x,), part = xs, planned.part
    places = np.arange(x.size, dtype="float32").reshape((1, 1, *part.signal.shape))
    places = e.array(part.function(ops.convert_to_tensor(places)))
    with graph.part(planned, part.outputs[0]):
        return [_gathered(graph.program, x, places.astype(int).ravel())]


@_part(parts.RunningMean)
def _running_mean(graph, planned, xs):
    program, (x,) = graph.program, xs
    with graph.part(planned, planned.part.signal):
        mean, error = program.state("mean", x.size), program.state("mean_error", x.size)
        # An integer in two floats: the steps modulo 2^20, and the others.
        low, high = (program.state(name, 1, grows=True) for name in ("count", "count_high"))
        new = program.elementwise(_one_more, low, high, name="one_more")
        new += program.elementwise(_update_mean, mean, error, x, *new, name="update_mean")
        for state, y in zip((low, high, mean, error), new, strict=True):
            program.assign(state, y)
        return [mean]


def _one_more(low, high):
    carry = p.where(low < 2**20 - 1, 0.0, 2**20)
    return {"next_low": low + 1 - carry, "next_high": high + carry}


def _update_mean(mean, error, x, low, high):
    """The equations of `keras_streams.parts.RunningMean`."""
    change = error + ((x - mean) - error) / (low + high)
    total = mean + change
    seen = total - mean
    return {"next_mean": total, "next_error": (mean - (total - seen)) + (change - seen)}


@_part(parts.RunningMax)
def _running_max(graph, planned, xs):
    program, (x,) = graph.program, xs
    with graph.part(planned, planned.part.signal):
        largest = program.state("largest", x.size, fill=-math.inf)
        program.assign(largest, _elementwise(program, p.maximum, [largest, x], "running_max"))
        return [largest]
