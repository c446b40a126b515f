"""Streaming versions of Keras layers and operations, with their states.

`rules.make_parts` makes the parts of each call of a layer or operation. The `Signal` of each tensor
describes when its samples come, and how many. `Part.advance` takes the samples of one step of the
model's input, (batch, samples, ...), usually one; `Part.run` takes those of many steps.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams._keras_internals import attention_layers
from keras_streams.graph import Call, to_axis
from keras_streams.protocol import (
    at_least_float32,
    cell_step,
    pack_states,
    two_sum,
    without_dropout,
)
from keras_streams.trace import Scoped, error_summary
from keras_streams.types import Tensor


@dataclasses.dataclass(frozen=True)
class Signal:
    """A tensor of a model as a stream: sample n comes with step `offset + n * period`.

    With a period of 1/2, two samples come with every step. The offset is below zero for padding
    before the first step. If the tensor has no time axis, sample n is that of a sequence that ends
    with sample n, or in a window of the stream, that of the window that starts with sample n.

    The model's last sample for a sequence comes `lag` steps after the sequence's last step: above
    zero if it looks ahead, below zero if the end of the sequence is cropped.
    """

    shape: tuple[int, ...]  # of a sample
    dtype: str
    period: Fraction = Fraction(1)
    offset: int = 0
    lag: Fraction = Fraction(0)
    back: Fraction | None = Fraction(0)  # earlier steps that a sample depends on, None for all
    length: int | None = None  # samples in the model's whole sequence, None if unknown
    has_time: bool = True
    axis: int = 1  # of time in the model; samples have it on axis 1
    is_static: bool = False  # depends on inputs without a time axis only: all samples are equal
    in_window: bool = False  # whether the sequence is a window of the stream

    @property
    def block(self) -> int:
        """Number of samples that come with a step, if any do."""
        return 1 if self.period >= 1 else int(1 / self.period)

    def earlier(self, steps: Any) -> Fraction | None:
        """Returns `back` of a tensor that depends on as many more steps."""
        return None if self.back is None else self.back + steps

    @property
    def pause(self) -> int:
        """Number of steps between two steps with samples."""
        return max(int(self.period), 1)

    def is_due(self, step: int) -> bool:
        """Returns whether samples come with a step."""
        return step >= self.offset and (step - self.offset) % self.pause == 0

    def before(self, step: Any) -> Any:
        """Returns the number of steps with samples before a step, an integer or a tensor."""
        steps = -((self.offset - step) // self.pause)
        return max(steps, 0) if isinstance(steps, int) else ops.maximum(steps, 0)

    def count(self, begin: int, end: Any) -> Any:
        """Returns the number of samples that come from step `begin` to before step `end`."""
        return (self.before(end) - self.before(begin)) * self.block


def output_of(call: Call, signal: Signal, n: int = 0, **changes: Any) -> Signal:
    """Returns an output of a call, at the steps of an input."""
    spec = call.specs[n]
    output = dataclasses.replace(signal, dtype=spec.dtype, **changes)
    shape = list(spec.shape[1:])
    if output.has_time:
        del shape[output.axis - 1]
    return dataclasses.replace(output, shape=tuple(shape))


_LARGEST_COUNT = 2**30  # of steps, in a running mean
OR_WINDOW = (
    "If the model was trained on windows, pass their length, as in to_stream(model, window=128)."
)
OTHER_ROWS = "it changes the batch axis. Keep it first, with its size."
Active = Callable[[Signal], Any]


def select(is_active: Any, new: Any, old: Any) -> Any:
    """Returns a structure of `new` where samples have come, of `old` elsewhere.

    `is_active` is a boolean, or a boolean tensor (batch, 1).
    """
    if isinstance(is_active, bool):
        return new if is_active else old

    def choose(a, b):
        return ops.where(ops.reshape(is_active, (-1,) + (1,) * (len(a.shape) - 1)), a, b)

    return keras.tree.map_structure(choose, new, old)


class Part(Scoped):
    """A call as a stream. Without a `call`, it only prepares inputs of others.

    All inputs come with the same steps, those of `signal`.
    """

    reads: list[int]  # numbers of the tensors that it takes
    writes: list[int]  # and of those that it returns
    keeps = False  # whether it has a state
    keeps_windows = False  # whether the outputs for a part of a sequence are a part of the outputs
    pads = False  # whether an output depends on padding before the first sample
    most: int | None = None  # samples after which it has no more outputs, None if it never ends
    _past: int
    _padding = 0.0
    difference = (  # between the stream and the model
        "its outputs differ when it is streamed. Use a layer of Keras, or one that follows "
        "keras_streams.StreamingMixin."
    )

    def __init__(self, signal: Signal, outputs: list[Signal]):
        self.signal, self.outputs = signal, outputs

    def initial_state(self, batch_size: int) -> Any:
        """Returns the state before the first sample, a structure of tensors (batch, ...).

        By default these are the past samples of the signal.
        """
        shape = (batch_size, self._past, *self.signal.shape)
        return ops.full(shape, self._padding, dtype=self.signal.dtype)

    def run(
        self, xs: list[Tensor], state: Any, begin: int = 0, end: Any = None
    ) -> tuple[list[Tensor], Any]:
        """Returns the outputs and the state of the steps from `begin` to before `end`.

        Args:
            xs: The samples of the inputs that come with these steps, (batch, samples, ...).
            state: The state before them, or `None`.
            begin, end: Integers. If samples come with every step, only their number matters, and
                `end` may be a tensor.

        Returns:
            The samples of the outputs that come with these steps, and the state after them.
        """
        raise NotImplementedError

    def run_any(self, xs: list[Tensor], state: Any, begin: int, end: Any) -> tuple[list, Any]:
        """Returns `run`, also for steps with which no samples come."""
        counts = [output.count(begin, end) for output in self.outputs]
        if any(x.shape[1] != 0 for x in xs) or any(not isinstance(n, int) or n for n in counts):
            return self.run(xs, state, begin, end)
        rows = ops.shape(xs[0])[0]
        return [ops.zeros((rows, 0, *y.shape), dtype=y.dtype) for y in self.outputs], state

    def advance(self, xs: list[Tensor], state: Any, active: Active) -> tuple[list[Tensor], Any]:
        """Returns the outputs and the next state of one step.

        Args:
            xs: Inputs (batch, samples, ...), arbitrary where no samples have come.
            state: The state, or `None`.
            active: Function that says whether samples of a `Signal` have come, as for `select`.
        """
        output = self.outputs[0]
        early = max(self.signal.offset - output.offset, 0)
        step = output.offset + -(-early // output.pause) * output.pause  # has both samples
        ys, new = self.run(xs, state, step, step + 1)
        return ys, select(active(self.signal), new, state) if self.keeps else state


class Pointwise(Part):
    """An operation that treats each step separately, which the stream's proof verifies."""

    keeps_windows = True
    difference = (
        "its output at one step depends on other steps, or on the position. Use a layer that "
        "treats each step equally and separately, or a causal one such as "
        'keras.layers.Conv1D(padding="causal"), keras.layers.LSTM, keras.layers.MultiHeadAttention '
        "called with use_causal_mask=True, or one that follows keras_streams.StreamingMixin. "
        f"{OR_WINDOW}"
    )

    def __init__(self, call: Call, signals: list[Signal]):
        rows = {None, 1, *(x.shape[0] for x in call.tensors)}
        if any(spec.shape[:1] and spec.shape[0] not in rows for spec in call.specs):
            raise call.refusal(OTHER_ROWS)
        moving = [s for s in signals if not s.is_static] or signals
        backs = [s.back for s in moving if s.back is not None]
        back = max(backs) if len(backs) == len(moving) else None
        signal = dataclasses.replace(moving[0], back=back, lag=max(s.lag for s in moving))
        if not signal.has_time and any(None in spec.shape[1:] for spec in call.specs):
            pairs = zip(call.tensors, signals, strict=True)  # with sizes that the model left open
            shapes = [(x.shape[0], *s.shape) for x, s in pairs]
            try:
                call = dataclasses.replace(call, specs=call.specs_for(shapes))
            except Exception as error:  # whatever an operation raises that needs more steps
                raise call.refusal(
                    f"for inputs of shape {', '.join(map(str, shapes))} it raised "
                    f"{error_summary(error)} Pass a longer `window`, such as that used in training."
                ) from error
        places = range(len(call.specs))
        axes = [_time_axis(call, signals, n) if signal.has_time else 1 for n in places]
        super().__init__(
            signal, [output_of(call, signal, n, axis=axis) for n, axis in enumerate(axes)]
        )
        self._call, self._is_static = call, [s.is_static for s in signals]
        if isinstance(call.operation, keras.Model):
            self.difference = (
                "its output at one step depends on other steps, and its `call` cannot be traced "
                "with symbolic tensors. Use operations of keras.ops in it, or build a functional "
                f"model: keras.Model(inputs, outputs). {OR_WINDOW}"
            )
        elif not call.is_of_keras:
            self.difference += (
                " If it has a position for each step, pass the largest number of steps, as in "
                "to_stream(model, max_context=64)."
            )

    def run(self, xs, state, begin=0, end=None):
        if self.signal.has_time:
            return self._call(xs), state
        samples = ops.shape(xs[self._is_static.index(self.signal.is_static)])[1]
        if not self.signal.is_static:
            pairs = zip(xs, self._is_static, strict=True)
            xs = [ops.repeat(x[:, :1], samples, axis=1) if same else x for x, same in pairs]
        ys = self._call.of_model([ops.reshape(x, (-1, *x.shape[2:])) for x in xs])
        rows = ops.shape(xs[0])[0]
        return [ops.reshape(y, (rows, samples, *y.shape[1:])) for y in ys], state


_LONG = 1009  # steps, a size that no other axis has


def _time_axis(call, signals, n):
    """Returns the time axis of an output of an operation that treats each step separately."""
    shape = call.specs[n].shape
    pairs = list(zip(call.tensors, signals, strict=True))
    sizes = {None, *(x.shape[s.axis] for x, s in pairs if not s.is_static)}
    found = [axis for axis in range(1, len(shape)) if shape[axis] in sizes]
    if not found:
        raise call.refusal(
            f"its output of shape {tuple(shape)} depends on other steps: it has another time axis "
            "than its input, or none. To pool all steps, use keras.layers.GlobalAveragePooling1D "
            "or GlobalMaxPooling1D, and to add them up ops.cumsum(x, axis=1)[:, -1]. "
            f"{OR_WINDOW}"
        )
    if len(found) == 1:
        return found[0]
    longer = [
        x.shape if s.is_static else (*x.shape[: s.axis], _LONG, *x.shape[s.axis + 1 :])
        for x, s in pairs
    ]
    try:
        return call.specs_for(longer)[n].shape.index(_LONG)
    except Exception:  # whatever an operation raises that takes no other length
        return next(s.axis for s in signals if not s.is_static)


class Each(Part):
    """A function of samples (batch, samples, ...) that returns those of one or several outputs."""

    keeps_windows = True

    def __init__(self, signal: Signal, function: Callable[[Tensor], Any], *outputs: Signal):
        super().__init__(signal, list(outputs))
        self.function = function

    def run(self, xs, state, begin=0, end=None):
        return keras.tree.flatten(self.function(xs[0])), state


class Table(Part):
    """The rows of a tensor that depends on weights alone, one for each sample of a signal.

    Samples after the last row are NaN. The function `rows` returns them (rows, ...); the symbolic
    tensor (1, ...) has them on the signal's time axis.
    """

    keeps = True

    def __init__(self, signal: Signal, rows: Callable[[], Tensor], tensor: keras.KerasTensor):
        shape = list(tensor.shape[1:])
        self._rows, self.most = rows, shape.pop(signal.axis - 1)
        output = dataclasses.replace(
            signal, shape=tuple(shape), dtype=tensor.dtype, back=Fraction(0)
        )
        super().__init__(signal, [output])

    def initial_state(self, batch_size: int) -> Any:
        return ops.zeros((batch_size, 1), dtype="int32")

    def run(self, xs, state, begin=0, end=None):
        rows, samples = self._rows(), ops.shape(xs[0])[1]
        at = state + ops.arange(samples, dtype="int32")
        y = ops.take(rows, ops.minimum(at, self.most - 1), axis=0)
        is_row = ops.reshape(at < self.most, (-1, samples, *[1] * (len(rows.shape) - 1)))
        y = ops.where(is_row, y, ops.convert_to_tensor(math.nan, y.dtype))
        return [y], ops.minimum(state + samples, self.most)


class Window(Part):
    """A function of windows of samples: convolutions, pooling, padding, cropping and slices.

    Window n consists of the samples `n * stride - left + tap * dilation`. Samples before the first
    are `padding`.

    Args:
        call: The call, or `None` with `like`.
        signal: The input.
        function: Function from windows, each a row of a batch with time on the axis of the model,
            to outputs. Defaults to the windows themselves.
        taps, dilation, stride: Positive integers.
        left, right: Integers, numbers of padding samples before the first and after the last
            sample. A negative number crops samples.
        padding: Value of the samples before the first one.
        like: The output as if it came with the input, `None` for that of the call.
    """

    def __init__(
        self,
        call: Call,
        signal: Signal,
        function: Callable[[Tensor], Tensor] | None = None,
        *,
        taps: int = 1,
        dilation: int = 1,
        stride: int = 1,
        left: int = 0,
        right: int = 0,
        padding: float = 0.0,
        like: Signal | None = None,
    ):
        # TensorFlow does not subtract NumPy's integers from others.
        taps, dilation, stride, left, right = map(int, (taps, dilation, stride, left, right))
        self._function = function
        self._taps, self._dilation, self._stride, self._padding = taps, dilation, stride, padding
        span, block = (taps - 1) * dilation + 1, signal.block
        newest = span - 1 - left  # of the first window
        if block % stride == 0:  # as many steps later as the last window of a block needs
            steps = -((stride - 1 - newest) // block)
        elif stride % block == 0:
            steps = newest // block
        else:
            raise call.refusal(
                f"it takes one in {stride} of the {block} samples of each step. Choose "
                "strides that divide, or are divided by, the size of the preceding UpSampling1D."
            )
        first = newest - block * steps  # in the block, the newest sample of the first window
        self._past = max(span - 1 - first, 0)
        self._start = max(first - (span - 1), 0)
        self.keeps = self._past > 0
        like, length = like or output_of(call, signal), None
        if signal.length is not None and like.has_time:
            length = (signal.length + left + right - span) // stride + 1
            reads = (length - 1) * stride + span - left
            self.keeps_windows = left <= 0 and reads <= signal.length
        output = dataclasses.replace(
            like,
            period=signal.period * stride,
            offset=signal.offset + steps * signal.pause,
            # Below zero, `first` is the number of samples that wait for the next step's.
            lag=signal.lag + (right - first) * signal.period,
            back=signal.earlier(signal.period * left),
            length=length,
        )
        super().__init__(signal, [output])
        self.pads = left > 0

    def run(self, xs, state, begin=0, end=None):
        (x,), (output,) = xs, self.outputs
        come = self.signal
        if max(begin, output.offset) < come.offset:  # padding comes before the first sample
            come = dataclasses.replace(come, offset=output.offset)
            padding = come.count(begin, max(begin, self.signal.offset))
            shape = (ops.shape(x)[0], padding, *self.signal.shape)
            before = ops.full(shape, self._padding, dtype=self.signal.dtype)
            x = ops.concatenate([before, x], axis=1)[:, : come.count(begin, end)]
        first = output.offset + output.before(begin) * output.pause
        seen = ops.concatenate([state, x], axis=1) if self.keeps else x
        start = self._start + come.count(begin, first)
        y = self._of_windows(seen, start, output.count(begin, end))
        return [y], seen[:, ops.shape(seen)[1] - self._past :] if self.keeps else state

    def _of_windows(self, seen, start, count):
        """Returns the function of `count` windows, the first of which begins at sample `start`."""
        shape = self.outputs[0].shape
        if isinstance(count, int) and count == 0:
            return ops.zeros((ops.shape(seen)[0], 0, *shape), self.outputs[0].dtype)
        if isinstance(count, int) and count == 1:
            stop = start + (self._taps - 1) * self._dilation + 1
            windows = seen[:, None, start : stop : self._dilation]
        elif self._taps == self._stride == 1:
            windows = seen[:, start : start + count, None]
        else:
            starts = start + self._stride * ops.arange(count, dtype="int32")
            taps = self._dilation * ops.arange(self._taps, dtype="int32")
            windows = ops.take(seen, starts[:, None] + taps, axis=1)
        x = to_axis(ops.reshape(windows, (-1, *windows.shape[2:])), self.signal.axis)
        y = x if self._function is None else self._function(x)
        return ops.reshape(y, (-1, ops.shape(windows)[1], *shape))

    def advance(self, xs, state, active):
        if self.outputs[0].offset < self.signal.offset:  # padding comes before the first sample
            xs = [select(active(self.signal), x, ops.full_like(x, self._padding)) for x in xs]
        return super().advance(xs, state, active)


class Delay(Part):
    """Delays the samples of a signal, to align them with another signal."""

    keeps = True

    def __init__(self, signal: Signal, offset: int):
        samples, between = divmod(offset - signal.offset, signal.pause)
        lag = signal.lag + samples * signal.pause
        super().__init__(signal, [dataclasses.replace(signal, offset=offset, lag=lag)])
        self._holds = between > 0  # the newest sample came some steps ago
        self._past = (samples + self._holds) * signal.block

    def run(self, xs, state, begin=0, end=None):
        seen, (output,) = ops.concatenate([state, xs[0]], axis=1), self.outputs
        earlier = self.signal.before(begin) - output.before(begin)
        start = self._past - earlier * self.signal.block
        y = seen[:, start : start + output.count(begin, end)]
        return [y], seen[:, ops.shape(seen)[1] - self._past :]

    def advance(self, xs, state, active):
        (x,) = xs
        samples = x.shape[1]
        seen = ops.concatenate([state, x], axis=1)
        past = select(active(self.signal), seen[:, samples:], state)
        return [past[:, :1] if self._holds else seen[:, :samples]], past


class Split(Part):
    """Makes `size` samples of each, which follow one another.

    The function takes samples (batch, samples, ...) and returns (batch, samples, size, ...).
    """

    def __init__(
        self,
        call: Call,
        signal: Signal,
        output: Signal,
        size: int,
        function: Callable[[Tensor], Tensor],
    ):
        period = signal.period / size
        if 1 not in (period.numerator, period.denominator):
            raise call.refusal(
                f"it makes {size} samples from one that comes every {signal.period} steps. Choose "
                "a size that divides the preceding strides, or is divided by them."
            )
        length = None if signal.length is None else signal.length * size
        back = signal.earlier(signal.pause - 1)
        output = dataclasses.replace(output, period=period, back=back, length=length)
        super().__init__(signal, [output])
        self._size, self._function = size, function
        turns = signal.pause // output.pause  # steps with outputs for each with inputs
        self._waiting = size - size // turns  # samples after the first turn
        self.keeps = turns > 1

    def initial_state(self, batch_size: int) -> Any:
        (output,) = self.outputs
        return ops.zeros((batch_size, self._waiting, *output.shape), dtype=output.dtype)

    def run(self, xs, state, begin=0, end=None):
        y, (output,) = self._function(xs[0]), self.outputs
        y = ops.reshape(y, (-1, ops.shape(xs[0])[1] * self._size, *output.shape))
        if not self.keeps:
            return [y], state
        waiting = self.signal.before(begin) * self._size - output.before(begin) * output.block
        seen = ops.concatenate([state[:, :waiting], y, ops.zeros_like(state)], axis=1)
        count = output.count(begin, end)
        return [seen[:, :count]], seen[:, count : count + self._waiting]

    def advance(self, xs, state, active):
        if not self.keeps:
            return self.run(xs, state)
        new, now = self._function(xs[0])[:, 0], self._size - self._waiting
        seen = ops.concatenate([state, ops.zeros_like(new[:, :now])], axis=1)
        seen = select(active(self.signal), new, seen)
        return [seen[:, :now]], select(active(self.outputs[0]), seen[:, now:], state)


class Frames(Part):
    """Frames of a sequence that is mirrored before its first sample.

    Args:
        signal: Windows (..., taps) of `2 * pad + 1` samples or more, the first of which has `pad`
            samples of padding.
        pad: Number of mirrored samples.
        stride: Number of samples from one window to the next.
        size: Number of samples of a frame.
    """

    def __init__(self, signal: Signal, pad: int, stride: int, size: int):
        output = dataclasses.replace(signal, shape=(*signal.shape[:-1], size))
        super().__init__(signal, [output])
        starts = range(-pad, 0, stride)  # of the frames with mirrored samples
        self._places = [np.abs(start + np.arange(size)) - start for start in starts]
        self._size, self.keeps = size, bool(self._places)

    def initial_state(self, batch_size: int) -> Any:
        return ops.zeros((batch_size, 1), dtype="int32")

    def run(self, xs, state, begin=0, end=None):
        (x,), ones = xs, [1] * len(self.signal.shape)
        y = x[..., : self._size]
        if not self.keeps:
            return [y], state
        number = state + ops.arange(ops.shape(x)[1], dtype="int32")
        for n, places in enumerate(self._places):
            is_mirrored = ops.reshape(ops.equal(number, n), (-1, ops.shape(x)[1], *ones))
            y = ops.where(is_mirrored, ops.take(x, places, axis=-1), y)
        return [y], ops.minimum(number[:, -1:] + 1, len(self._places))


class Ending(Part):
    """Base class of parts whose output has no time axis: a running value of the steps so far.

    For a reduction, `values` is the function from samples (batch, samples, ...) to those of the
    output's shape, which are reduced over time.
    """

    keeps = True

    def __init__(self, call: Call, signal: Signal, values: Callable | None = None, **changes: Any):
        period = Fraction(signal.pause)  # the last of the samples that come with a step
        changes = {"period": period, "back": None, **changes}
        output = output_of(call, signal, length=None, has_time=False, axis=1, **changes)
        super().__init__(signal, [output])
        self.values = values

    def last(self, y: Tensor, n: int = 0) -> Tensor:
        """Returns the last sample of each step, of an output."""
        block, output = self.signal.block, self.outputs[n]
        y = y[:, block - 1 :: block] if block > 1 else y
        return ops.cast(ops.reshape(y, (-1, ops.shape(y)[1], *output.shape)), output.dtype)


class RunningMean(Ending):
    """`GlobalAveragePooling1D` of the steps so far.

    A float32 mean would stop moving when a sample's share falls below its rounding error, after
    some 30,000 steps at 1000 +- 1, and a float32 count at 2^24. The state is the mean, its
    rounding error (together they have twice a float's precision), and an integer count. From 2^30
    steps on the count stays, and older samples lose weight.
    """

    def initial_state(self, batch_size: int) -> Any:
        dtype = at_least_float32(self.signal.dtype)
        mean = ops.zeros((batch_size, *self.outputs[0].shape), dtype=dtype)
        return [mean, ops.zeros_like(mean), ops.zeros((batch_size, 1), dtype="int32")]

    def run(self, xs, state, begin=0, end=None):
        (mean, error), count = (ops.expand_dims(part, 1) for part in state[:2]), state[2]
        x, count = ops.cast(self.values(xs[0]), mean.dtype), ops.minimum(count, _LARGEST_COUNT)
        samples = ops.shape(x)[1]
        counts = ops.cast(count + ops.arange(1, samples + 1, dtype="int32"), mean.dtype)
        counts = ops.reshape(counts, (-1, samples, *[1] * (len(x.shape) - 2)))
        change = error + _cumsum((x - mean) - error) / counts
        means, errors = two_sum(mean, change)
        return [self.last(means)], [means[:, -1], errors[:, -1], count + samples]


def _cumsum(x):
    """Cumulative sum over axis 1, not added up one by one in float32."""
    if x.shape[1] == 1:
        return x
    if keras.backend.backend() == "jax":  # which adds pairs, pairs of pairs, and so on
        return ops.cumsum(x, axis=1)
    return ops.cast(ops.cumsum(ops.cast(x, "float64"), axis=1), x.dtype)


class RunningMax(Ending):
    """`GlobalMaxPooling1D` of the steps so far."""

    def initial_state(self, batch_size: int) -> Any:
        # Zeros, because all export formats start from zeros, and whether there was a sample.
        largest = ops.zeros((batch_size, *self.outputs[0].shape), dtype=self.signal.dtype)
        return [largest, ops.zeros((batch_size, 1), dtype="int32")]

    def run(self, xs, state, begin=0, end=None):
        x, (largest, seen) = self.values(xs[0]), state
        if x.shape[1] != 1:  # the scan forgets sizes
            scanned = ops.associative_scan(ops.maximum, x, axis=1)
            x = ops.reshape(scanned, (-1, ops.shape(x)[1], *largest.shape[1:]))
        has_seen = ops.reshape(seen > 0, (-1,) + (1,) * len(largest.shape))
        largest = ops.where(has_seen, ops.maximum(x, largest[:, None]), x)
        return [self.last(largest)], [largest[:, -1], ops.ones_like(seen)]


class Cumulative(Part):
    """The sum of all samples so far, as `ops.cumsum` computes it.

    As in the model, float32 loses samples that are small beside the sum; a count ends at 2^24. Half
    precision is summed in float32.
    """

    keeps = True

    def __init__(self, call: Call, signal: Signal):
        super().__init__(signal, [output_of(call, signal, back=None)])

    def initial_state(self, batch_size: int) -> Any:
        dtype = at_least_float32(self.outputs[0].dtype)
        return ops.zeros((batch_size, 1, *self.signal.shape), dtype)

    def run(self, xs, state, begin=0, end=None):
        sums = state + ops.cumsum(ops.cast(xs[0], state.dtype), axis=1)
        return [ops.cast(sums, self.outputs[0].dtype)], sums[:, -1:]


class Sliding(Ending):
    """The sum or extremum of the last `signal.length` samples, by a function of two tensors.

    Each step takes the sums of 2, 4, 8, ... samples, the sum of 2 n being that of the last n plus
    that of the n before. The sum of the window is made of those in its number's binary digits. It
    has no running difference, whose rounding errors would add up.
    """

    keeps_windows = True

    def __init__(
        self, call: Call, signal: Signal, values: Callable, function: Callable, scale: float
    ):
        assert signal.length is not None
        self._function, self._count, self._scale = function, signal.length, scale
        offset = signal.offset + (signal.length - 1) * signal.pause
        back = signal.earlier(signal.period * (signal.length - 1))
        super().__init__(call, signal, values, period=signal.period, offset=offset, back=back)
        self.keeps = self._count > 1
        largest = self._count.bit_length() - 1
        self._rows = [2**k for k in range(largest)] + [self._count - 2**largest]

    def initial_state(self, batch_size: int) -> Any:
        shape, dtype = self.outputs[0].shape, at_least_float32(self.signal.dtype)
        return [ops.zeros((batch_size, n, *shape), dtype) for n in self._rows if n]

    def run(self, xs, state, begin=0, end=None):
        x = self.values(ops.cast(xs[0], at_least_float32(self.signal.dtype)))
        states, after, total, lag = iter(state or []), [], None, 0
        samples = ops.shape(x)[1]
        for k, rows in enumerate(self._rows):
            seen = ops.concatenate([next(states), x], axis=1) if rows else x
            if self._count >> k & 1:
                part = seen[:, rows - lag : rows - lag + samples]
                total = part if total is None else self._function(part, total)
                lag += 2**k
            if rows:
                after.append(seen[:, samples:])
            if k + 1 < len(self._rows):
                x = self._function(seen[:, :samples], x)
        # Those of the windows that end with each sample, without the windows that begin too early.
        y = total[:, samples - self.outputs[0].count(begin, end) :]
        y = y if self._scale == 1.0 else y * self._scale
        return [ops.cast(y, self.outputs[0].dtype)], after


class Recurrent(Ending):
    """A recurrent layer of Keras."""

    def __init__(self, call: Call, signal: Signal):
        super().__init__(call, signal)
        self._layer, ending = call.operation, self.outputs[0]
        if self._layer.return_sequences:
            self.outputs = [output_of(call, signal, back=None)]
        self.outputs += [output_of(call, ending, n) for n in range(1, len(call.specs))]
        self._is_given = len(call.inputs) > 1  # the initial state

    def initial_state(self, batch_size: int) -> Any:
        states = keras.tree.flatten(self._layer.get_initial_state(batch_size))
        return [*states, ops.zeros((batch_size, 1), "int32")] if self._is_given else states

    def run(self, xs, state, begin=0, end=None):
        x, *given = xs
        if given:
            *state, is_started = state
            given = [ops.cast(s[:, 0], own.dtype) for s, own in zip(given, state, strict=True)]
            state = select(is_started > 0, state, given)
        with without_dropout([self._layer.cell]):
            if x.shape[1] == 1:
                (_, *new), ys = self._step([None, *state], x[:, 0])
                ys = [y[:, None] for y in ys]
            else:  # on TensorFlow `scan` returns outputs in the structure of the states
                y = ops.zeros((ops.shape(x)[0], *self.outputs[0].shape), self._layer.compute_dtype)
                (_, *new), ys = ops.scan(self._step, [y, *state], ops.moveaxis(x, 1, 0))
                ys = [ops.moveaxis(y, 0, 1) for y in ys]
        ys = [
            ops.cast(y, output.dtype) if output.has_time else self.last(y, n)
            for n, (y, output) in enumerate(zip(ys, self.outputs, strict=False))
        ]
        return ys, [*new, ops.ones_like(is_started)] if given else new

    def _step(self, before, x):
        """Returns what `ops.scan` carries and what it collects: the output and states of a step."""
        _, *state = before
        # Keras' convolutional cell does not say that it has two states.
        sizes = [-1, -1] if self._layer.state_size == [-1] else self._layer.state_size
        y, new = cell_step(self._layer.cell, x, pack_states(sizes, iter(state)))
        new = [ops.cast(a, b.dtype) for a, b in zip(keras.tree.flatten(new), state, strict=True)]
        after = [ops.cast(y, self._layer.compute_dtype), *new]
        return after, after


class RecurrentRows(Part):
    """A recurrent layer that `TimeDistributed` applies to each row of the axis before time."""

    keeps = True

    def __init__(self, call: Call, signal: Signal):
        super().__init__(signal, [output_of(call, signal, back=None)])
        spec, (self._rows, *shape) = call.specs[0], signal.shape
        spec = keras.KerasTensor((spec.shape[0], *spec.shape[2:]), spec.dtype)
        one = dataclasses.replace(call, operation=call.operation.layer, specs=[spec])
        self._one = Recurrent(one, dataclasses.replace(signal, shape=tuple(shape), axis=1))

    def initial_state(self, batch_size: int) -> Any:
        return self._apart(self._one.initial_state(batch_size * self._rows))

    def run(self, xs, state, begin=0, end=None):
        x = ops.moveaxis(xs[0], 1, 2)
        (y,), state = self._one.run([self._together(x)], self._together(state), begin, end)
        return [ops.moveaxis(self._apart(y), 2, 1)], self._apart(state)

    def _together(self, tensors):
        return keras.tree.map_structure(lambda x: ops.reshape(x, (-1, *ops.shape(x)[2:])), tensors)

    def _apart(self, tensors):
        return keras.tree.map_structure(
            lambda x: ops.reshape(x, (-1, self._rows, *ops.shape(x)[1:])), tensors
        )


class CausalAttention(Part):
    """Attention with a causal mask, which keeps `context` steps.

    If it does not attend to a sliding window of them, it attends to all past steps, and has no more
    outputs once there are more of them than it keeps.
    """

    keeps = True

    def __init__(self, call: Call, signal: Signal, context: int, is_window: bool):
        super().__init__(signal, [output_of(call, signal, back=None)])
        self._layer, self._context = call.operation, context
        self.most = None if is_window else context

    def initial_state(self, batch_size: int) -> Any:
        layer, kept = self._layer, []
        for dense in attention_layers(layer)[1:3]:  # of keys and values
            _, _, *shape = dense.compute_output_shape((1, 1, *self.signal.shape))
            kept.append(ops.zeros((batch_size, self._context, *shape), layer.compute_dtype))
        return [*kept, ops.zeros((batch_size, 1), "int32")]

    def run(self, xs, state, begin=0, end=None):
        layer, context, x = self._layer, self._context, ops.cast(xs[0], self._layer.compute_dtype)
        query, key, value, output, gate = attention_layers(layer)
        keys = ops.concatenate([state[0], key(x)], axis=1)
        values = ops.concatenate([state[1], value(x)], axis=1)
        steps, count = ops.shape(x)[1], state[2]
        at = count + ops.arange(steps, dtype="int32")  # of the queries, (batch, steps)
        kept = count - context + ops.arange(context + steps, dtype="int32")
        distance = at[:, :, None] - kept[:, None, :]
        mask = (distance >= 0) & (distance < context) & (kept >= 0)[:, None, :]
        queries = query(x)
        queries = queries * queries.shape[-1] ** -0.5
        heads = queries.shape[2] // keys.shape[2]  # for each of the keys
        every = [x if heads == 1 else ops.repeat(x, heads, axis=2) for x in (keys, values)]
        scores = ops.einsum("bthd,bshd->bhts", queries, every[0])
        scores = ops.where(mask[:, None], scores, ops.convert_to_tensor(-math.inf, scores.dtype))
        weights = ops.softmax(scores)
        y = ops.einsum("bhts,bshd->bthd", weights, every[1])
        y = output(y if gate is None else y * gate(x))
        if self.most is not None:
            y = ops.where((at < context)[:, :, None], y, ops.convert_to_tensor(math.nan, y.dtype))
        return [y], [keys[:, steps:], values[:, steps:], ops.minimum(count + steps, context)]


class Protocol(Ending):
    """A layer that follows `StreamingMixin`."""

    def __init__(self, call: Call, signal: Signal):
        layer = call.operation
        if not getattr(layer, "is_causal", True):
            raise call.refusal(
                'it reads later steps. Use go_backwards=False and, for a TCN, padding="causal".'
            )
        delay, rate = getattr(layer, "delay", 0), getattr(layer, "rate", 1)
        if (delay, rate) != (0, 1):
            raise call.refusal(
                "its outputs come later than its inputs, or not at each step. Stream it by itself. "
                f"Received: delay={delay}, rate={rate}"
            )
        if len(call.specs) > 1:
            raise call.refusal("its stream has only the main output. Use return_state=False.")
        if getattr(layer, "output_length", None) is not None:
            raise call.refusal(
                "with `output_length` it returns the last steps of a sequence, but a stream has no "
                f"end. Use output_length=None. Received: output_length={layer.output_length}"
            )
        reach = getattr(layer, "receptive_field", None)
        back = None if reach is None else signal.earlier(signal.period * (reach - 1))
        super().__init__(call, signal, back=back)
        if getattr(layer, "return_sequences", True):
            self.outputs = [output_of(call, signal, back=back)]
        self._layer = layer

    def initial_state(self, batch_size: int) -> Any:
        return self._layer.initial_cache(batch_size)

    def run(self, xs, state, begin=0, end=None):
        (x,) = xs
        if x.shape[1] == 1:
            y, new = self._layer.step(x[:, 0], state)
            y = y[:, None]
        else:
            y, new = self._layer.prefill(x, state)
        y = y if self.outputs[0].has_time else self.last(y)
        return [y], new
