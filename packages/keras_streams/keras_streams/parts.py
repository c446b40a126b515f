"""Streaming versions of Keras layers and operations, with their states.

`to_stream` walks the graph of a model and creates a `Part` with `make_part` for each call of a
layer or operation. The `Signal` of each tensor describes when its samples come, and how many.
`Part.advance` takes the samples of one step of the model's input, (batch, samples, ...), usually
one; `Part.run` takes those of many steps.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.ops import math as math_ops  # the classes of the operations in a graph
from keras.src.ops import nn as nn_ops
from keras.src.ops import numpy as numpy_ops

from keras_streams.graph import Call
from keras_streams.protocol import at_least_float32, has_protocol
from keras_streams.types import Tensor


@dataclasses.dataclass(frozen=True)
class Signal:
    """A tensor of a model as a stream: sample n comes with step `offset + n * period`.

    Attributes:
        shape: Shape of a sample.
        dtype: Dtype of a sample.
        period: Number of steps from one sample to the next. With a period of 1/2, two samples come
            with every step.
        offset: The step that sample 0 comes with. Below zero for padding before the first step.
        back: Number of earlier steps that a sample depends on, `None` for all.
        length: Number of samples in the model's whole sequence, `None` if unknown.
        has_time: Whether the tensor has a time axis. If not, sample n is the tensor of a sequence
            that ends with it.
    """

    shape: tuple[int, ...]
    dtype: str
    period: Fraction = Fraction(1)
    offset: int = 0
    back: Fraction | None = Fraction(0)
    length: int | None = None
    has_time: bool = True

    @property
    def block(self) -> int:
        """Number of samples that come with a step, if any do."""
        return 1 if self.period >= 1 else int(1 / self.period)

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


def _sample(spec, has_time):
    return {"shape": tuple(spec.shape[1 + has_time :]), "dtype": spec.dtype}


def _output(call, signal, **changes):
    """Returns the first output of a call, at the steps of an input."""
    has_time = changes.get("has_time", signal.has_time)
    return dataclasses.replace(signal, **_sample(call.specs[0], has_time), **changes)


_LARGEST_COUNT = 2**30  # of steps, in a running mean
_CAUSAL = (
    'a causal layer such as keras.layers.Conv1D(padding="causal"), keras.layers.LSTM, '
    "or one that follows keras_streams.StreamingMixin"
)

Active = Callable[[Signal], Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `to_stream`.

    Attributes:
        window: Number of last steps of which each output is the model's output, or `None`.
        ignore_masks: Whether layers that mask steps are taken as if they masked none.
        max_context: Number of steps that causal attention keeps, or `None`.
    """

    window: int | None = None
    ignore_masks: bool = False
    max_context: int | None = None


def select(is_active: Any, new: Any, old: Any) -> Any:
    """Returns a structure of `new` where samples have come, of `old` elsewhere.

    Args:
        is_active: Boolean, or a boolean tensor (batch, 1).
        new, old: Structures of tensors (batch, ...).
    """
    if isinstance(is_active, bool):
        return new if is_active else old

    def choose(a, b):
        return ops.where(ops.reshape(is_active, (-1,) + (1,) * (len(a.shape) - 1)), a, b)

    return keras.tree.map_structure(choose, new, old)


class Part:
    """A call as a stream.

    Attributes:
        signal: The `Signal` of the first input; all inputs come with the same steps.
        outputs: List of the `Signal`s of the outputs.
        keeps: Whether it has a state.
        keeps_windows: Whether the outputs for a part of a sequence are a part of the outputs.
        difference: Error text for a stream that differs from the model.
    """

    keeps = False
    keeps_windows = False
    difference = (
        "its stream differs from it. Use a layer of Keras, or one that follows "
        "keras_streams.StreamingMixin."
    )

    def __init__(self, signal: Signal, outputs: list[Signal]):
        self.signal, self.outputs = signal, outputs

    def initial_state(self, batch_size: int) -> Any:
        """Returns the state before the first sample, a structure of tensors (batch, ...)."""
        raise NotImplementedError(f"{type(self).__name__} must define `initial_state(batch_size)`.")

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
        raise NotImplementedError(f"{type(self).__name__} must define `run(xs, state, ...)`.")

    def advance(self, xs: list[Tensor], state: Any, active: Active) -> tuple[list[Tensor], Any]:
        """Returns the outputs and the next state of one step.

        Args:
            xs: Inputs (batch, samples, ...), arbitrary where no samples have come.
            state: The state, or `None`.
            active: Function that says whether samples of a `Signal` have come, as for `select`.
        """
        ys, new = self.run(xs, state)
        return ys, select(active(self.signal), new, state) if self.keeps else state


def run_part(part: Part, xs: list[Tensor], state: Any, begin: int, end: Any) -> tuple[list, Any]:
    """Returns `part.run`, also for steps with which no samples come."""
    counts = [output.count(begin, end) for output in part.outputs]
    if any(x.shape[1] != 0 for x in xs) or any(count != 0 for count in map(_static, counts)):
        return part.run(xs, state, begin, end)
    rows = ops.shape(xs[0])[0]
    return [ops.zeros((rows, 0, *y.shape), dtype=y.dtype) for y in part.outputs], state


def _static(count):
    return count if isinstance(count, int) else None


class Pointwise(Part):
    """An operation that treats each step separately, which the stream's proof verifies."""

    keeps_windows = True

    def __init__(self, call: Call, signals: list[Signal]):
        signal = dataclasses.replace(signals[0], back=_largest([s.back for s in signals]))
        has_time = signal.has_time
        outputs = [dataclasses.replace(signal, **_sample(spec, has_time)) for spec in call.specs]
        super().__init__(signal, outputs)
        self._call, self._has_time = call, has_time
        if isinstance(call.operation, keras.Model):
            self.difference = (
                "its output at one step depends on other steps, and its `call` cannot be traced "
                "with symbolic tensors. Build a functional model: keras.Model(inputs, outputs)."
            )
        elif has_time:
            self._check_time()

    def _check_time(self):
        leaves = keras.tree.flatten(self._call.arguments)
        times = {x.shape[1] for x in leaves if isinstance(x, keras.KerasTensor)}
        for spec in self._call.specs:
            if len(spec.shape) < 2 or spec.shape[1] not in (None, *times):
                raise self._call.refusal(
                    f"its output of shape {tuple(spec.shape)} depends on other steps: it has "
                    "another time axis than its input, or none. To pool all steps, use "
                    "keras.layers.GlobalAveragePooling1D or GlobalMaxPooling1D."
                )

    difference = (
        "its output at one step depends on other steps. Use a layer that treats each step "
        f"separately, or {_CAUSAL}."
    )

    def run(self, xs, state, begin=0, end=None):
        if not self._has_time:
            return at_each(self._call, xs), state
        return self._call(xs), state


def _largest(backs):
    known = [back for back in backs if back is not None]
    return max(known) if len(known) == len(backs) else None


def at_each(call: Call, xs: list[Tensor]) -> list[Tensor]:
    """Returns the outputs (batch, samples, ...) of an operation without a time axis."""
    if xs[0].shape[1] == 1:
        return [y[:, None] for y in call([x[:, 0] for x in xs])]
    samples = ops.shape(xs[0])[1]
    folded = [ops.reshape(x, (-1, *x.shape[2:])) for x in xs]
    return [ops.reshape(y, (-1, samples, *y.shape[1:])) for y in call(folded)]


class Reshape(Part):
    """`Reshape` of each step."""

    keeps_windows = True

    def __init__(self, call: Call, signal: Signal):
        super().__init__(signal, [_output(call, signal)])
        if math.prod(signal.shape) != math.prod(self.outputs[0].shape):
            raise call.refusal(
                "it mixes the time axis with other axes. Reshape each step separately: "
                f"keras.layers.Reshape((-1, ...)) of steps of shape {signal.shape}."
            )

    def run(self, xs, state, begin=0, end=None):
        return [ops.reshape(xs[0], (-1, ops.shape(xs[0])[1], *self.outputs[0].shape))], state


class Window(Part):
    """A function of windows of samples: convolutions, pooling, padding, cropping and slices.

    Window n consists of the samples `n * stride - left + tap * dilation`. Samples before the first
    are `padding`.

    Args:
        call: The call.
        signal: The input.
        function: Function from windows (batch, samples, taps, ...) to outputs (batch, samples,
            ...).
        taps, dilation, stride: Positive integers.
        left: Integer, number of padding samples before the first sample. A negative number crops
            samples.
        length: Number of outputs for the whole sequence, `None` if unknown.
        padding: Value of the samples before the first one.
        dtype: Dtype of the windows.
        has_time: Whether the output has a time axis.
    """

    def __init__(
        self,
        call: Call,
        signal: Signal,
        function: Callable[[Tensor], Tensor],
        *,
        taps: int = 1,
        dilation: int = 1,
        stride: int = 1,
        left: int = 0,
        length: int | None = None,
        padding: float = 0.0,
        dtype: str | None = None,
        has_time: bool = True,
    ):
        self.function = function
        self.taps, self.dilation, self._stride = taps, dilation, stride
        self.padding, self._dtype = padding, dtype or signal.dtype
        span, block = (taps - 1) * dilation + 1, signal.block
        newest = span - 1 - left  # of the first window
        if block % stride == 0:  # as many steps later as the last window of a block needs
            steps = -((stride - 1 - newest) // block)
        elif stride % block == 0:
            steps = newest // block
        else:
            raise call.refusal(
                f"it takes every {stride}th of the {block} samples of each step. Choose "
                "strides that divide, or are divided by, the size of the preceding UpSampling1D."
            )
        first = newest - block * steps  # in the block, the newest sample of the first window
        self.span = span
        self._past = max(span - 1 - first, 0)
        self._start = max(first - (span - 1), 0)
        self.keeps = self._past > 0
        output = _output(
            call,
            signal,
            period=signal.period * stride,
            offset=signal.offset + steps * signal.pause,
            back=None if signal.back is None else signal.back + signal.period * left,
            length=length,
            has_time=has_time,
        )
        super().__init__(signal, [output])
        if length is not None and signal.length is not None:
            reads = (length - 1) * stride + span - left
            self.keeps_windows = left <= 0 and reads <= signal.length

    def initial_state(self, batch_size: int) -> Any:
        shape = (batch_size, self._past, *self.signal.shape)
        return ops.full(shape, self.padding, dtype=self._dtype)

    def run(self, xs, state, begin=0, end=None):
        x, (output,) = ops.cast(xs[0], self._dtype), self.outputs
        come = self.signal
        if output.offset < come.offset:  # padding comes before the first sample
            come = dataclasses.replace(come, offset=output.offset)
            padding = come.count(begin, self.signal.offset)
            shape = (ops.shape(x)[0], padding, *self.signal.shape)
            x = ops.concatenate([ops.full(shape, self.padding, dtype=self._dtype), x], axis=1)
            x = x[:, : come.count(begin, end)]
        first = output.offset + output.before(begin) * output.pause
        seen = ops.concatenate([state, x], axis=1) if self.keeps else x
        start = self._start + come.count(begin, first)
        y = self._of_windows(seen, start, output.count(begin, end))
        return [y], seen[:, ops.shape(seen)[1] - self._past :] if self.keeps else state

    def _of_windows(self, seen, start, count):
        """Returns the function of `count` windows, the first of which begins at sample `start`."""
        if isinstance(count, int) and count == 0:
            return ops.zeros((ops.shape(seen)[0], 0, *self.outputs[0].shape), self.outputs[0].dtype)
        if self.taps == self._stride == 1:
            return self.function(seen[:, start : start + count, None])
        starts = start + self._stride * ops.arange(count)
        taps = self.dilation * ops.arange(self.taps)
        return self.function(ops.take(seen, starts[:, None] + taps, axis=1))

    def advance(self, xs, state, active):
        x, is_active = ops.cast(xs[0], self._dtype), active(self.signal)
        if self.outputs[0].offset < self.signal.offset:  # padding comes before the first sample
            x = select(is_active, x, ops.full_like(x, self.padding))
        samples = x.shape[1]
        seen = ops.concatenate([state, x], axis=1) if self.keeps else x
        if samples == 1:
            y = self.function(seen[:, None, self._start :: self.dilation])
        else:
            y = self._of_windows(seen, self._start, -(-samples // self._stride))
        return [y], select(is_active, seen[:, samples:], state) if self.keeps else state


class AveragePool(Window):
    """Average pooling, which does not count padding."""

    def __init__(
        self, call: Call, signal: Signal, sums: Callable[[Tensor], Tensor], **options: Any
    ):
        *space, channels = signal.shape
        counted = dataclasses.replace(signal, shape=(*space, channels + 1))

        def mean(windows):
            total = sums(windows)
            return total[..., :channels] / total[..., channels:]

        super().__init__(call, counted, mean, **options)

    def run(self, xs, state, begin=0, end=None):
        return super().run(_counted(xs), state, begin, end)

    def advance(self, xs, state, active):
        return super().advance(_counted(xs), state, active)


def _counted(xs):
    return [ops.concatenate([xs[0], ops.ones_like(xs[0][..., :1])], axis=-1)]


class Delay(Part):
    """Delays the samples of a signal, to align them with another signal."""

    keeps = True

    def __init__(self, signal: Signal, offset: int):
        super().__init__(signal, [dataclasses.replace(signal, offset=offset)])
        self.lag, between = divmod(offset - signal.offset, signal.pause)
        self._holds = between > 0  # the newest sample came some steps ago
        self._past = (self.lag + self._holds) * signal.block

    def initial_state(self, batch_size: int) -> Any:
        shape = (batch_size, self._past, *self.signal.shape)
        return ops.zeros(shape, dtype=self.signal.dtype)

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


class UpSample(Part):
    """Repeats each sample `size` times, or follows it with zeros."""

    def __init__(self, call: Call, signal: Signal, size: int, *, zeros: bool = False):
        period = signal.period / size
        if 1 not in (period.numerator, period.denominator):
            raise call.refusal(
                f"it makes {size} samples from one that comes every {signal.period} steps. Choose "
                "a size that divides the preceding strides, or is divided by them."
            )
        length = None if signal.length is None else signal.length * size
        back = None if signal.back is None else signal.back + signal.pause - 1
        output = dataclasses.replace(signal, period=period, back=back, length=length)
        super().__init__(signal, [output])
        self.zeros = zeros
        # Number of samples that each sample becomes per step.
        self._times = size if signal.period < 1 else self.outputs[0].block
        # Number of steps with outputs for each step with inputs.
        self._turns = signal.pause // output.pause
        self.keeps = self._turns > 1 and not zeros

    def initial_state(self, batch_size: int) -> Any:
        return ops.zeros((batch_size, 1, *self.signal.shape), dtype=self.signal.dtype)

    def run(self, xs, state, begin=0, end=None):
        (x,), (output,) = xs, self.outputs
        turns = self._turns
        if turns > 1:
            at = output.before(begin) + ops.arange(output.count(begin, end) // output.block)
            nothing = ops.zeros((ops.shape(x)[0], 1, *self.signal.shape), x.dtype)
            seen = ops.concatenate([nothing if self.zeros else state, x], axis=1)
            source = at // turns - self.signal.before(begin) + 1
            if self.zeros:
                source = ops.where(at % turns == 0, source, 0)
            x, last = ops.take(seen, source, axis=1), seen[:, ops.shape(seen)[1] - 1 :]
        return [self._spread(x)], last if self.keeps else state

    def advance(self, xs, state, active):
        (x,), is_active = xs, active(self.signal)
        if self.zeros:
            return [self._spread(select(is_active, x, ops.zeros_like(x)))], state
        x = select(is_active, x, state) if self.keeps else x
        return [self._spread(x)], x if self.keeps else state

    def _spread(self, x):
        """Returns the samples of each step, made of one for each input."""
        if self._times == 1:
            return x
        if not self.zeros:
            return ops.repeat(x, self._times, axis=1)
        y = ops.stack([x, *[ops.zeros_like(x)] * (self._times - 1)], axis=2)
        return ops.reshape(y, (-1, ops.shape(x)[1] * self._times, *self.signal.shape))


class Chain(Part):
    """A sequence of parts that make up one layer."""

    def __init__(self, parts: list[Part]):
        super().__init__(parts[0].signal, parts[-1].outputs)
        self.parts = parts
        self.keeps = any(part.keeps for part in parts)

    def initial_state(self, batch_size: int) -> Any:
        return [part.initial_state(batch_size) for part in self.parts if part.keeps]

    def run(self, xs, state, begin=0, end=None):
        return self._each(xs, state, lambda part, xs, state: run_part(part, xs, state, begin, end))

    def advance(self, xs, state, active):
        return self._each(xs, state, lambda part, xs, state: part.advance(xs, state, active))

    def _each(self, xs, state, function):
        states, after = iter(state or []), []
        for part in self.parts:
            xs, new = function(part, xs, next(states) if part.keeps else None)
            if part.keeps:
                after.append(new)
        return xs, after


class Ending(Part):
    """Base class of parts whose output has no time axis: a running value of the steps so far."""

    def __init__(self, call: Call, signal: Signal, back: Fraction | None = None):
        # The last of the samples that come with a step.
        output = _output(
            call, signal, period=Fraction(signal.pause), back=back, length=None, has_time=False
        )
        super().__init__(signal, [output])

    def last(self, y: Tensor) -> Tensor:
        """Returns the last sample of each step."""
        block = self.signal.block
        return y[:, block - 1 :: block] if block > 1 else y


class Last(Ending):
    """`x[:, -1]`."""

    def __init__(self, call: Call, signal: Signal, function: Callable[[Tensor], Tensor]):
        super().__init__(call, signal, signal.back)
        self.function = function

    def run(self, xs, state, begin=0, end=None):
        return [self.function(self.last(xs[0]))], state


class RunningMean(Ending):
    """`GlobalAveragePooling1D` of the steps so far.

    A float32 mean would stop moving when a sample's share falls below its rounding error, after
    some 30,000 steps at 1000 +- 1, and a float32 count at 2^24. The state is the mean, its
    rounding error (together they have twice a float's precision), and an integer count. From 2^30
    steps on the count stays, and older samples lose weight.
    """

    keeps = True

    def initial_state(self, batch_size: int) -> Any:
        dtype = at_least_float32(self.signal.dtype)
        mean = ops.zeros((batch_size, *self.signal.shape), dtype=dtype)
        return [mean, ops.zeros_like(mean), ops.zeros((batch_size, 1), dtype="int32")]

    def run(self, xs, state, begin=0, end=None):
        mean, error, count = (ops.expand_dims(part, 1) for part in state)
        x = ops.cast(xs[0], mean.dtype)
        counts = ops.cumsum(ops.ones_like(x[..., :1], dtype="int32"), axis=1)
        counts = counts + ops.minimum(count, _LARGEST_COUNT)
        change = error + _cumsum((x - mean) - error) / ops.cast(counts, mean.dtype)
        means, errors = two_sum(mean, change)
        new = [part[:, -1] for part in (means, errors, counts)]
        y = ops.cast(self.last(means), self.outputs[0].dtype)
        y = ops.reshape(y, (-1, ops.shape(y)[1], *self.outputs[0].shape))
        return [y], new


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a + b and its rounding error (Knuth)."""
    total = a + b
    seen = total - a
    return total, (a - (total - seen)) + (b - seen)


def _cumsum(x):
    """Cumulative sum over axis 1, not added up one by one in float32."""
    if x.shape[1] == 1:
        return x
    if keras.backend.backend() == "jax":  # which adds pairs, pairs of pairs, and so on
        return ops.cumsum(x, axis=1)
    return ops.cast(ops.cumsum(ops.cast(x, "float64"), axis=1), x.dtype)


class RunningMax(Ending):
    """`GlobalMaxPooling1D` of the steps so far."""

    keeps = True

    def initial_state(self, batch_size: int) -> Any:
        # Zeros, because all export formats start from zeros, and whether there was a sample.
        dtype = self.signal.dtype
        largest = ops.zeros((batch_size, *self.signal.shape), dtype=dtype)
        return [largest, ops.zeros((batch_size, 1), dtype=dtype)]

    def run(self, xs, state, begin=0, end=None):
        (x,), (largest, seen) = xs, state
        if x.shape[1] != 1:  # the scan forgets sizes
            scanned = ops.associative_scan(ops.maximum, x, axis=1)
            x = ops.reshape(scanned, (-1, ops.shape(x)[1], *self.signal.shape))
        has_seen = ops.reshape(seen > 0, (-1,) + (1,) * (len(self.signal.shape) + 1))
        largest = ops.where(has_seen, ops.maximum(x, largest[:, None]), x)
        y = self.last(largest)
        y = ops.reshape(y, (-1, ops.shape(y)[1], *self.outputs[0].shape))
        return [y], [largest[:, -1], ops.ones_like(seen)]


class Recurrent(Ending):
    """A recurrent layer of Keras."""

    keeps = True

    def __init__(self, call: Call, signal: Signal):
        super().__init__(call, signal)
        layer = call.operation
        if layer.return_sequences:
            self.outputs = [_output(call, signal, back=None)]
        ending = dataclasses.replace(
            signal, period=Fraction(signal.pause), back=None, length=None, has_time=False
        )
        for spec in call.specs[1:]:
            self.outputs.append(dataclasses.replace(ending, **_sample(spec, has_time=False)))
        self._layer = layer

    @functools.cached_property
    def _whole(self):
        """The layer applied to several steps, with the states of each."""
        layer = self._layer
        whole = keras.layers.RNN(
            _WithStates(layer.cell, dtype=layer.dtype_policy),
            return_sequences=True,
            return_state=True,
            dtype=layer.dtype_policy,
        )
        whole.build((None, None, *self.signal.shape))
        return whole

    def initial_state(self, batch_size: int) -> Any:
        return keras.tree.flatten(self._layer.get_initial_state(batch_size))

    def run(self, xs, state, begin=0, end=None):
        # Keras' convolutional cell does not say that it has two states.
        sizes = [-1, -1] if self._layer.state_size == [-1] else self._layer.state_size
        (x,), states = xs, take(sizes, iter(state))
        with without_dropout([self._layer.cell]):
            if x.shape[1] == 1:
                y, new = cell_step(self._layer.cell, x[:, 0], states)
                y, after = y[:, None], [s[:, None] for s in keras.tree.flatten(new)]
            else:
                y, *new = self._whole(x, initial_state=states)
                widths = [s.shape[-1] for s in state]
                ends = np.cumsum([y.shape[-1] - sum(widths), *widths])
                y, *after = ops.split(y, ends[:-1], axis=-1)
        new = [ops.cast(a, b.dtype) for a, b in zip(keras.tree.flatten(new), state, strict=True)]
        if not self._layer.return_sequences:
            y = self.last(y)
        ys = [y, *map(self.last, after[: len(self.outputs) - 1])]
        ys = [ops.cast(y, output.dtype) for y, output in zip(ys, self.outputs, strict=True)]
        return ys, new


class _WithStates(keras.layers.Layer):
    """A cell whose outputs are followed by its next states."""

    def __init__(self, cell, **kwargs):
        super().__init__(**kwargs)
        self.cell, self.state_size = cell, cell.state_size
        self.built = True

    def call(self, inputs, states):
        y, new = cell_step(self.cell, inputs, states)
        return ops.concatenate([y, *keras.tree.flatten(new)], axis=-1), new


class CausalAttention(Part):
    """`MultiHeadAttention` with a causal mask.

    Without a sliding window it attends to all past steps, and has no more outputs once there are
    more of them than it keeps.
    """

    keeps = True

    def __init__(self, call: Call, signal: Signal, context: int):
        super().__init__(signal, [_output(call, signal, back=None)])
        self._layer, self._context = call.operation, context

    def initial_state(self, batch_size: int) -> Any:
        layer, dtype = self._layer, self._layer.compute_dtype
        shape = batch_size, self._context, layer._num_heads
        keys, values = (ops.zeros((*shape, n), dtype) for n in (layer._key_dim, layer._value_dim))
        return [keys, values, ops.zeros((batch_size, 1), "float32")]

    def run(self, xs, state, begin=0, end=None):
        layer, context, x = self._layer, self._context, ops.cast(xs[0], self._layer.compute_dtype)
        keys = ops.concatenate([state[0], layer._key_dense(x)], axis=1)
        values = ops.concatenate([state[1], layer._value_dense(x)], axis=1)
        steps, count = ops.shape(x)[1], state[2]
        at = count + ops.cast(ops.arange(steps), count.dtype)  # of the queries, (batch, steps)
        kept = count - context + ops.cast(ops.arange(context + steps), count.dtype)
        distance = at[:, :, None] - kept[:, None, :]
        mask = (distance >= 0) & (distance < context) & (kept >= 0)[:, None, :]
        queries = layer._query_dense(x) * layer._inverse_sqrt_key_dim
        scores = ops.einsum("bthd,bshd->bhts", queries, keys)
        scores = ops.where(mask[:, None], scores, ops.convert_to_tensor(-math.inf, scores.dtype))
        y = ops.einsum("bhts,bshd->bthd", ops.softmax(scores), values)
        if layer._use_gate:
            y = y * layer._gate_dense(x)
        y = layer._output_dense(y)
        if layer._sliding_window is None:
            y = ops.where((at < context)[:, :, None], y, ops.convert_to_tensor(math.nan, y.dtype))
        return [y], [
            keys[:, steps:],
            values[:, steps:],
            ops.minimum(count + ops.cast(steps, count.dtype), float(context)),
        ]


class Protocol(Ending):
    """A layer that follows `StreamingMixin`."""

    keeps = True

    def __init__(self, call: Call, signal: Signal):
        layer = call.operation
        if not getattr(layer, "is_causal", True):
            raise call.refusal(
                'it reads later steps. Use go_backwards=False and, for a TCN, padding="causal".'
            )
        if len(call.specs) > 1:
            raise call.refusal("its stream has only the main output. Use return_state=False.")
        if getattr(layer, "output_length", None) is not None:
            raise call.refusal(
                "with `output_length` it returns the last steps of a sequence, but a stream has no "
                f"end. Use output_length=None. Received: output_length={layer.output_length}"
            )
        reach = getattr(layer, "receptive_field", None)
        back = None
        if signal.back is not None and reach is not None:
            back = signal.back + signal.period * (reach - 1)
        super().__init__(call, signal, back)
        if getattr(layer, "return_sequences", True):
            self.outputs = [_output(call, signal, back=back)]
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


# Keras' cells


# Held while the dropout rates of cells are set to 0 or used in training, because layers and threads
# may share the cells.
RATES_LOCK = threading.RLock()


def take(state_size: Any, states: Iterator[Tensor]) -> Any:
    """Returns the next states of an iterator, in the structure of a layer's `state_size`."""
    if isinstance(state_size, (list, tuple)):
        # A plain list: JAX does not support Keras' own list type.
        return [take(size, states) for size in state_size]
    return next(states)


def cell_step(cell: Any, x: Tensor, states: Any) -> tuple[Tensor, Any]:
    """Calls a cell as `keras.layers.RNN` does in inference."""
    states = keras.tree.map_structure(lambda state: ops.cast(state, cell.compute_dtype), states)
    takes_training = "training" in inspect.signature(cell.call).parameters
    return cell(x, states, **({"training": False} if takes_training else {}))


@contextlib.contextmanager
def without_dropout(cells: Sequence[Any]) -> Iterator[None]:
    """Context in which Keras' cells draw no dropout masks, which inference would not use."""
    cells = [part for cell in cells for part in _dropout_cells(cell)]
    with RATES_LOCK:
        rates = [(cell, cell.dropout, cell.recurrent_dropout) for cell in cells]
        for cell in cells:
            cell.dropout = cell.recurrent_dropout = 0.0
        try:
            yield
        finally:
            for cell, dropout, recurrent_dropout in rates:
                cell.dropout, cell.recurrent_dropout = dropout, recurrent_dropout


def _dropout_cells(cell):
    """Keras' own cells with dropout rates in a cell. Others may draw no masks in inference."""
    if isinstance(cell, keras.layers.StackedRNNCells):
        return [part for inner in cell.cells for part in _dropout_cells(inner)]
    return [cell] if isinstance(cell, _DROPOUT_CELLS) else []


_DROPOUT_CELLS = keras.layers.SimpleRNNCell, keras.layers.LSTMCell, keras.layers.GRUCell


# From calls to parts


_MAKERS: dict[type, Callable[[Call, Signal], Part]] = {}


def _streams(*classes):
    """Registers a function (call, signal) that makes the parts for these classes."""

    def register(maker):
        _MAKERS.update(dict.fromkeys(classes, maker))
        return maker

    return register


# Layers that cannot stream over time, and why.
_REFUSED = {
    keras.layers.Bidirectional: (
        "one of its layers reads the sequence from its end. Use a forward layer with the units of "
        "both, such as keras.layers.LSTM."
    ),
    keras.layers.GroupQueryAttention: f"it attends to all steps. Use {_CAUSAL}.",
    keras.layers.Attention: f"it attends to all steps. Use {_CAUSAL}.",
    keras.layers.AdditiveAttention: f"it attends to all steps. Use {_CAUSAL}.",
    keras.layers.Flatten: (
        "it joins all steps. If the model was trained on windows, pass their length, as in "
        "to_stream(model, window=128); or use GlobalAveragePooling1D or a recurrent layer with "
        "return_sequences=False."
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
    operation, (signal, *others) = call.operation, signals
    if call.arguments[1].get("training"):
        raise call.refusal("it is called with training=True, but streaming is inference.")
    masks = getattr(operation, "mask_zero", False) or isinstance(operation, keras.layers.Masking)
    if masks and not options.ignore_masks:
        raise call.refusal(
            "a stream has no masked steps. If it never gets padding, pass ignore_masks=True."
        )
    if options.window and signal.has_time:
        if not others and _ends_time(call, signal):
            return whole_window(call, signal)
        part = make_part(call, signals, dataclasses.replace(options, window=None))
        if not part.keeps_windows:
            raise call.refusal(
                "its outputs for a window alone differ from those in a longer sequence, whose past "
                'is not zero. Train the model with padding="valid", and with layers before the '
                "pooling that start from no state."
            )
        return part
    if signal.has_time:
        if isinstance(operation, keras.layers.MultiHeadAttention):
            return _attention(call, signal, options)
        kinds = type(operation).__mro__
        for kind in kinds:
            if kind in _REFUSED:
                raise call.refusal(_REFUSED[kind])
        if getattr(operation, "data_format", None) == "channels_first":
            raise call.refusal('its time axis is the last axis. Use data_format="channels_last".')
        makers: list[Callable] = [Protocol] if has_protocol(operation) else []
        makers += [_MAKERS[kind] for kind in kinds if kind in _MAKERS]
        if makers and (others or (isinstance(operation, keras.Layer) and len(call.given) > 1)):
            raise call.refusal(
                "a stream has no masked steps and starts from the layer's own initial state. Call "
                "it with its inputs only, without `mask`, `initial_state` or `condition`."
            )
        if makers:
            return makers[0](call, signal)
    if len({signal.has_time for signal in signals}) == 2:
        raise call.refusal(
            "it combines each step with a value computed from all steps, including later ones. "
            f"Use {_CAUSAL} for that value as well."
        )
    return Pointwise(call, signals)


def _attention(call, signal, options):
    layer, (_, named) = call.operation, call.arguments
    others = {**named, "use_causal_mask": None}
    if not named.get("use_causal_mask") or any(x not in (None, False) for x in others.values()):
        raise call.refusal(
            "it attends to all steps. Train it with causal attention, layer(x, x, "
            f"use_causal_mask=True), or use {_CAUSAL}."
        )
    if len(set(call.inputs)) > 1 or len(signal.shape) > 1:
        raise call.refusal("it attends to another sequence than its own: layer(x, x).")
    context = layer._sliding_window or options.max_context
    if context is None:
        raise call.refusal(
            "it attends to all past steps. Pass the largest number of steps of a stream, as in "
            "to_stream(model, max_context=512)."
        )
    return CausalAttention(call, signal, context)


def _ends_time(call, signal):
    """Returns whether an operation makes one output of a whole sequence."""
    operation, layers = call.operation, keras.layers
    if isinstance(operation, (layers.RNN, layers.Bidirectional)):
        return not operation.return_sequences
    if isinstance(operation, numpy_ops.GetItem):
        key = _key(call, signal)
        return len(key) > 1 and isinstance(key[1], int)
    if isinstance(operation, (layers.Flatten, *_GLOBAL_POOLING)):
        return True
    shape = call.specs[0].shape
    is_known = has_protocol(operation) or any(kind in _MAKERS for kind in type(operation).__mro__)
    return not is_known and (len(shape) < 2 or shape[1] not in (None, signal.length))


_GLOBAL_POOLING = (
    *(keras.layers.GlobalAveragePooling1D, keras.layers.GlobalMaxPooling1D),
    *(keras.layers.GlobalAveragePooling2D, keras.layers.GlobalMaxPooling2D),
)


def whole_window(call: Call, signal: Signal) -> "Window":
    """Returns the part of an operation that gets all samples of a window."""
    if signal.length is None or signal.block > 1:
        raise call.refusal("it has several samples for each step of the window.")
    function = _of_each_window(call, signal, signal.length, call.specs[0].shape[1:])
    return Window(call, signal, function, taps=signal.length, has_time=False)


def _of_each_window(call, signal, taps, shape):
    """Returns the function that calls an operation for each window."""

    def function(windows):
        samples = ops.shape(windows)[1]
        (y,) = call([ops.reshape(windows, (-1, taps, *signal.shape))])
        return ops.reshape(y, (-1, samples, *shape))

    return function


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


# Windows of time, and of the axes between time and channels: the axes of an image, or none


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
            shape = [
                ops.shape(windows)[i] if i < 2 else windows.shape[i] for i in range(windows.ndim)
            ]
            shape[axis] = 1
            edge = ops.full(shape, padding, dtype=windows.dtype)
            windows = ops.concatenate([windows, edge], axis=axis)
        windows = ops.take(windows, places, axis=axis)
    if not axes:
        return windows
    outputs, taps = range(3, 3 + 2 * len(axes), 2), range(4, 4 + 2 * len(axes), 2)
    patches = ops.transpose(windows, (0, 1, *outputs, 2, *taps, 3 + 2 * len(axes)))
    sizes = [len(places) for places in axes]
    return ops.reshape(
        patches, (-1, ops.shape(patches)[1], *sizes, _size(patches), windows.shape[-1])
    )


def _size(patches):
    return math.prod(patches.shape[2 + (patches.ndim - 4) // 2 : -1])


def _axes(layer, signal, sizes):
    """Returns what a layer reads on the axes between time and channels."""
    strides, dilations = _strides(layer, sizes)
    options = zip(signal.shape[:-1], sizes[1:], strides[1:], dilations[1:], strict=True)
    return [_neighbors(*numbers, layer.padding) for numbers in options]


def _strides(layer, sizes):
    """Returns the strides and the dilation rates of each axis."""
    numbers = [layer.strides or sizes, getattr(layer, "dilation_rate", 1)]
    lists = [keras.tree.flatten(each) for each in numbers]
    return [each * len(sizes) if len(each) == 1 else each for each in lists]


def _window(call, signal, function, sizes, kind=Window, **options):
    """Returns the part of a layer with windows of `sizes`, the first of them along time."""
    layer = call.operation
    if len(sizes) != len(signal.shape):
        raise call.refusal(
            f"its time axis is not the first axis after the batch: its steps have the shape "
            f"{signal.shape}."
        )
    strides, (dilation, *_) = _strides(layer, sizes)
    span = (sizes[0] - 1) * dilation + 1
    left, length = windowed_length(signal.length, span, strides[0], layer.padding)
    options |= {"taps": sizes[0], "stride": strides[0], "dilation": dilation, "left": left}
    return kind(call, signal, function, length=length, **options)


def _convolution(call, signal, function):
    """Returns a convolution; `function` takes patches, and a cast to the compute dtype."""
    layer = call.operation
    sizes = keras.tree.flatten(layer.kernel_size)
    axes = _axes(layer, signal, sizes)

    def output(windows):
        y = function(_patches(windows, axes), lambda kernel: _flat(kernel, layer))
        return _activated(layer, y)

    return _window(call, signal, output, sizes, dtype=layer.compute_dtype)


def _flat(kernel, layer):
    """Returns a kernel (taps, input, output) in the compute dtype, with the taps of all axes."""
    kernel = ops.cast(kernel, layer.compute_dtype)
    return ops.reshape(kernel, (-1, *kernel.shape[-2:])) if kernel.ndim > 3 else kernel


def _activated(layer, y):
    if layer.use_bias:
        y = y + ops.cast(layer.bias, y.dtype)
    return layer.activation(y)


def _product(patches, kernel, groups=1):
    """Returns the convolution of patches (batch, samples, ..., taps, channels)."""
    taps, width, filters = kernel.shape
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


@_streams(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
def _conv(call, signal):
    layer = call.operation
    return _convolution(
        call, signal, lambda patches, flat: _product(patches, flat(layer.kernel), layer.groups)
    )


@_streams(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
def _depthwise_conv(call, signal):
    layer = call.operation
    return _convolution(call, signal, lambda patches, flat: _depthwise(patches, flat(layer.kernel)))


@_streams(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
def _separable_conv(call, signal):
    layer = call.operation

    def function(patches, flat):
        between = _depthwise(patches, flat(layer.depthwise_kernel))
        return ops.matmul(between, flat(layer.pointwise_kernel)[0])

    return _convolution(call, signal, function)


@_streams(nn_ops.Conv, nn_ops.DepthwiseConv)
def _conv_operation(call, signal):
    arguments, named = call.arguments
    kernel = named["kernel"] if "kernel" in named else arguments[1]
    sizes = list(kernel.shape[:-2])
    axes = _axes(call.operation, signal, sizes)
    groups = signal.shape[-1] // kernel.shape[-2]
    is_depthwise = isinstance(call.operation, nn_ops.DepthwiseConv)

    def function(windows):
        flat = ops.reshape(ops.cast(kernel, signal.dtype), (-1, *kernel.shape[-2:]))
        patches = _patches(windows, axes)
        return _depthwise(patches, flat) if is_depthwise else _product(patches, flat, groups)

    return _window(call, signal, function, sizes)


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


@_streams(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose)
def _transposed_conv(call, signal):
    layer = call.operation
    names = layer.kernel_size, layer.strides, layer.dilation_rate
    extra = layer.output_padding or [None] * len(layer.kernel_size)
    numbers = zip(*names, [layer.padding] * len(extra), extra, strict=True)
    (taps, stride, dilation, *rest), *others = numbers
    crop, length = _transposed_size(signal.length, taps, stride, dilation, *rest)
    axes = [_sources(n, *options) for n, options in zip(signal.shape[:-1], others, strict=True)]

    def function(windows):
        kernel = ops.cast(layer.kernel, layer.compute_dtype)
        kernel = ops.swapaxes(kernel[::-1], -1, -2)
        y = _product(_patches(windows, axes), ops.reshape(kernel, (-1, *kernel.shape[-2:])))
        return _activated(layer, y)

    spread = UpSample(call, signal, stride, zeros=True)
    left = (taps - 1) * dilation - crop
    options = {"taps": taps, "dilation": dilation, "left": left, "length": length}
    window = Window(call, spread.outputs[0], function, dtype=layer.compute_dtype, **options)
    return Chain([spread, window])


def _sources(size, taps, stride, dilation, padding, extra):
    """Returns the places (outputs, taps) that a transposed convolution reads on an axis."""
    crop, outputs = _transposed_size(size, taps, stride, dilation, padding, extra)
    at = np.arange(outputs)[:, None] + crop - dilation * np.arange(taps)
    is_place = (at % stride == 0) & (at >= 0) & (at < size * stride)
    return np.where(is_place, at // stride, size)


@_streams(
    *(keras.layers.MaxPooling1D, keras.layers.AveragePooling1D),
    *(keras.layers.MaxPooling2D, keras.layers.AveragePooling2D),
)
def _pooling(call, signal):
    layer = call.operation
    sizes = keras.tree.flatten(layer.pool_size)
    axes = _axes(layer, signal, sizes)
    if isinstance(layer, (keras.layers.AveragePooling1D, keras.layers.AveragePooling2D)):
        sums = lambda windows: ops.sum(_patches(windows, axes), axis=-2)  # noqa: E731
        return _window(call, signal, sums, sizes, AveragePool)
    largest = lambda windows: ops.max(_patches(windows, axes, -math.inf), axis=-2)  # noqa: E731
    padding = 0.0 if layer.padding == "valid" else -math.inf
    return _window(call, signal, largest, sizes, padding=padding)


class Each(Part):
    """A function of each sample, of samples (batch, samples, ...)."""

    keeps_windows = True

    def __init__(self, signal: Signal, shape: Sequence[int], function: Callable[[Tensor], Tensor]):
        super().__init__(signal, [dataclasses.replace(signal, shape=tuple(shape))])
        self.function = function

    def run(self, xs, state, begin=0, end=None):
        return [self.function(xs[0])], state


@_streams(keras.layers.UpSampling1D)
def _up_sampling(call, signal):
    return UpSample(call, signal, call.operation.size)


@_streams(keras.layers.UpSampling2D)
def _up_sampling_2d(call, signal):
    layer = call.operation
    if layer.interpolation != "nearest":
        raise call.refusal('its samples depend on later steps. Use interpolation="nearest".')
    times, (size, channels) = UpSample(call, signal, layer.size[0]), signal.shape
    of_sample = lambda x: ops.repeat(x, layer.size[1], axis=2)  # noqa: E731
    return Chain([times, Each(times.outputs[0], (size * layer.size[1], channels), of_sample)])


def _only(windows):
    return windows[:, :, 0]


@_streams(keras.layers.ZeroPadding1D, keras.layers.ZeroPadding2D)
def _zero_padding(call, signal):
    (left, right), *others = _pairs(call.operation.padding, signal)
    length = None if signal.length is None else signal.length + left + right
    widths = [(0, 0), (0, 0), *others, (0, 0)]
    function = (lambda windows: ops.pad(_only(windows), widths)) if others else _only
    return Window(call, signal, function, left=left, length=length)


@_streams(numpy_ops.Pad)
def _pad(call, signal):
    widths = [tuple(pair) for pair in call.operation.pad_width]
    widths = widths * (2 + len(signal.shape)) if len(widths) == 1 else widths
    rows, (left, right), *others = widths
    if rows != (0, 0) or (call.operation.mode != "constant" and (left or right)):
        raise call.refusal('it pads with other samples or rows. Use mode="constant" over time.')
    (_, *value), named = call.arguments
    padding = float(next(iter([*value, named.get("constant_values")])) or 0.0)
    length = None if signal.length is None else signal.length + left + right
    of_sample = [(0, 0), (0, 0), *others]
    mode = {"mode": call.operation.mode, **({"constant_values": padding} if padding else {})}
    function = (lambda w: ops.pad(_only(w), of_sample, **mode)) if any(map(any, others)) else _only
    return Window(call, signal, function, left=left, length=length, padding=padding)


@_streams(keras.layers.Cropping1D, keras.layers.Cropping2D)
def _cropping(call, signal):
    (left, right), *others = _pairs(call.operation.cropping, signal)
    length = None if signal.length is None else signal.length - left - right
    sizes = zip(signal.shape[:-1], others, strict=True)
    kept = tuple(slice(a, size - b) for size, (a, b) in sizes)
    return Window(
        call,
        signal,
        lambda w: _only(w)[(slice(None), slice(None), *kept)],
        left=-left,
        length=length,
    )


def _pairs(pairs, signal):
    """Returns the numbers before and after each axis but the channels."""
    return pairs if len(signal.shape) > 1 else [pairs]


@_streams(keras.layers.GlobalAveragePooling2D, keras.layers.GlobalMaxPooling2D)
def _global_pooling_2d(call, signal):
    kinds = {keras.layers.GlobalAveragePooling2D: (ops.mean, RunningMean)}
    function, kind = next(
        (v for k, v in kinds.items() if isinstance(call.operation, k)), (ops.max, RunningMax)
    )
    each = Each(signal, signal.shape[-1:], lambda x: function(x, axis=2))
    return Chain([each, kind(call, each.outputs[0])])


@_streams(keras.layers.GlobalAveragePooling1D)
def _running_mean(call, signal):
    return RunningMean(call, signal)


@_streams(keras.layers.GlobalMaxPooling1D)
def _running_max(call, signal):
    return RunningMax(call, signal)


@_streams(keras.layers.RNN)
def _recurrent(call, signal):
    layer = call.operation
    if layer.go_backwards:
        raise call.refusal("it reads the sequence from its end. Use go_backwards=False.")
    return Recurrent(call, signal)


@_streams(keras.layers.Embedding)
def _embedding(call, signal):
    return Pointwise(call, [signal])


@_streams(keras.layers.Reshape, numpy_ops.Reshape)
def _reshape(call, signal):
    _, time, *shape = call.specs[0].shape
    ratio, rest = divmod(math.prod(shape), math.prod(signal.shape))
    if ratio < 2 or rest or (signal.length and time and time * ratio != signal.length):
        return Reshape(call, signal)

    def function(frames):
        return ops.reshape(frames, (-1, ops.shape(frames)[1], *shape))

    length = None if signal.length is None else signal.length // ratio
    return Window(call, signal, function, taps=ratio, stride=ratio, length=length)


@_streams(keras.layers.STFTSpectrogram)
def _spectrogram(call, signal):
    layer = call.operation
    if layer.padding != "valid":
        raise call.refusal('it pads at both ends. Use padding="valid".')
    taps, stride = layer.frame_length, layer._frame_step
    _, length = windowed_length(signal.length, taps, stride, "valid")
    function = _of_each_window(call, signal, taps, call.specs[0].shape[2:])
    return Window(call, signal, function, taps=taps, stride=stride, length=length)


@_streams(keras.layers.MelSpectrogram)
def _mel_spectrogram(call, signal):
    raise call.refusal(
        "it mirrors the sequence at its ends, and its time axis is the last. Use "
        'keras.layers.STFTSpectrogram(mode="magnitude", padding="valid") and a Dense layer with '
        "the mel filters."
    )


@_streams(math_ops.ExtractSequences)
def _frames(call, signal):
    if signal.shape:  # frames of the last axis
        return Pointwise(call, [signal])
    taps, stride = call.operation.sequence_length, call.operation.sequence_stride
    _, length = windowed_length(signal.length, taps, stride, "valid")
    whole = lambda windows: windows  # noqa: E731
    return Window(call, signal, whole, taps=taps, stride=stride, length=length)


@_streams(keras.layers.PReLU)
def _prelu(call, signal):
    if 1 not in (call.operation.shared_axes or ()):
        raise call.refusal("it has a slope for each step. Use shared_axes=[1].")
    return Pointwise(call, [signal])


def _key(call, signal):
    """Returns the indices of a slice, one for each axis but the last ones."""
    arguments, named = call.arguments
    key = named["key"] if "key" in named else arguments[1]
    key = list(key) if isinstance(key, (list, tuple)) else [key]
    if Ellipsis in key:
        at = key.index(Ellipsis)
        missing = 2 + len(signal.shape) - sum(k is not None for k in key) + 1
        key[at : at + 1] = [slice(None)] * missing
    return key


@_streams(numpy_ops.GetItem)
def _slice(call, signal):
    key = _key(call, signal)
    batch, time, *rest = [*key, slice(None), slice(None)][: max(len(key), 2)]
    if batch != slice(None):
        raise call.refusal(f"it selects rows of a batch. Received: {key[0]}")
    of_sample = (slice(None), slice(None), *rest)
    if isinstance(time, int) and time == -1:
        return Last(call, signal, lambda y: y[of_sample])
    if time is None:
        raise call.refusal(
            "it inserts an axis before the time axis. Insert it later: x[:, :, None]."
        )
    if not isinstance(time, slice):
        raise call.refusal(
            f"it takes step {time} of the sequence. A stream supports only the last, x[:, -1]."
        )
    if time == slice(None):
        return Pointwise(call, [signal])
    start, stop, stride = time.start or 0, time.stop, time.step or 1
    if start < 0 or stride < 1 or (stop is not None and stop >= 0 and stop != signal.length):
        raise call.refusal(
            "its slice of the time axis depends on where the sequence ends. Use a start from the "
            f"first step, and a stop of None. Received: {start}:{stop}:{stride}"
        )
    length = None
    if signal.length is not None:
        length = len(range(signal.length)[time])
    return Window(
        call, signal, lambda w: _only(w)[of_sample], left=-start, stride=stride, length=length
    )
