"""Keras models as streams: `to_stream`."""

import dataclasses
import math
import operator
from typing import Any

import keras
from keras import ops

from keras_streams.graph import Call, Graph, functional_of, graph_of
from keras_streams.parts import Delay, Options, Part, Signal, make_part, run_part, select
from keras_streams.proof import Proof, prove
from keras_streams.protocol import (
    StreamingMixin,
    check_built,
    check_cache,
    check_shape,
    check_streams,
    has_protocol,
    step_through,
)
from keras_streams.types import Cache, Tensor

_NO_OPTIONS = Options()


def to_stream(
    model: Any,
    *,
    window: int | None = None,
    ignore_masks: bool = False,
    max_context: int | None = None,
    example: Any = None,
) -> Any:
    """Converts a model or layer to a stream, and checks that both are equal.

    The stream computes `model(x)` one step at a time:

        stream(x)[delay + rate * n] = model(x)[n]

    `stream.rate` is the number of input steps per output step: the product of the strides.
    `stream.delay` is the number of steps by which outputs are delayed because they depend on later
    steps: 2 for a convolution of five taps with `padding="same"`, 4 with `padding="valid"`. (After
    `ZeroPadding1D` it can be negative: the outputs for the padding alone are left out.) At steps
    without an output, y is NaN: in the first `delay` steps, and between outputs if `rate` is above
    1. With a rate of 1/2, y has shape (batch, 2, channels). With several outputs, `delay` and
    `rate` have the same structure as the outputs.

    A stream has no end, so it lacks the last outputs of `model(x)`, which depend on the padding
    after the sequence. With strides, `padding="same"` depends on the sequence length. The stream
    then uses the model's own length or, if it is unknown, assumes a multiple of the rate.

    Outputs without a time axis, such as those of `GlobalAveragePooling1D` or
    `return_sequences=False`, cover the steps so far: y at step t is the output for the sequence
    that ends with step `t - delay`.

    Dropout is inactive. A layer that is called several times has one state per call.

    Args:
        model: Built functional model, `keras.Sequential`, or layer, with Keras layers, operations
            of `keras.ops`, and layers that follow `StreamingMixin`. An object that already follows
            it is returned unchanged.
        window: Positive integer, the number of steps that the model was trained on. At each step
            the outputs are then those of the model for the last `window` steps; with strides, at
            each step that has an output. The model may end with a `Flatten` or any other layer that
            joins all steps; the layers before it may not pad. Defaults to `None`: outputs without a
            time axis cover all steps so far.
        ignore_masks: Boolean, whether to ignore `Masking` and `Embedding(mask_zero=True)`, because
            the stream never gets padding. Defaults to `False`: they are errors.
        max_context: Positive integer, the number of steps that causal attention keeps,
            `MultiHeadAttention` called with `use_causal_mask=True`. A longer stream has outputs of
            NaN after them, unless the layers have a sliding window. Defaults to `None`.
        example: Arrays (batch, time, channels) with the structure of the model's inputs, on which
            the stream is compared with the model. Defaults to `None`, random numbers. Give data
            where random numbers have no outputs: for a logarithm of counts, for instance.

    Returns:
        An object with `initial_cache`, `step`, `prefill`, and the attributes `delay`, `rate` and
        `proof`. It always uses the model's current weights.

    Raises:
        ValueError: If the model is not built, has no time axis, or has a layer that does not
            stream, or if an output differs from the model's. The message names the first layer.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((None, 3)),
    ...     keras.layers.Conv1D(8, 5, padding="same", activation="relu"),
    ...     keras.layers.GRU(4, return_sequences=True),
    ... ])
    >>> stream = to_stream(model)
    >>> stream.delay, stream.rate
    (2, 1)
    >>> y, cache = stream.step(np.zeros((1, 3)), stream.initial_cache(1))
    >>> tuple(y.shape)
    (1, 4)
    """
    if has_protocol(model) and functional_of(model) is None:
        check_streams(model)
        return model
    if not isinstance(model, keras.Layer):
        raise ValueError(f"`model` must be a Keras model or layer. Received: {model!r}")
    check_built(model)
    for name, value in (("window", window), ("max_context", max_context)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}")
    options = Options(window, ignore_masks, max_context)
    try:
        return _proven(GraphStream(model, options), example)
    except ValueError:
        whole = graph_of(model, traced=False)
        if len(whole.calls) == len(graph_of(model).calls):
            raise
        # A layer may treat each step separately, though its operations do not.
        stream = GraphStream(model, options, traced=False)
    return _proven(stream, example)


def _proven(stream, example):
    stream.proof = prove(stream, example)
    return stream


class GraphStream(StreamingMixin):
    """A model's graph as a stream, the result of `to_stream`."""

    built = True
    proof: Proof | None = None

    def __init__(self, model: keras.Layer, options: Options = _NO_OPTIONS, traced: bool = True):
        self.model, self.name, self.options = model, model.name, options
        self.graph = graph_of(model, traced)
        if options.ignore_masks:
            self.graph.calls = [call.without_mask() for call in self.graph.calls]
        self.length = known_length(self.graph)
        if options.window is not None and self.length not in (None, options.window):
            raise ValueError(
                f"`window` must be the length of the model's inputs, {self.length}, if they have "
                f"one. Received: window={options.window}"
            )
        self.length = options.window or self.length
        self.plan = self.plan_for(self.length)
        self.graph = dataclasses.replace(self.graph, outputs=self.plan.outputs)
        signals = self.plan.signals
        outputs = self.graph.outputs
        self.is_clocked = any(s.offset > 0 or s.period > 1 for s in signals.values())
        self.delay = keras.tree.map_structure(lambda n: signals[n].offset, outputs)
        self.rate = keras.tree.map_structure(lambda n: _whole(signals[n].period), outputs)
        for n in keras.tree.flatten(outputs):
            if self.is_clocked and not keras.backend.is_float_dtype(signals[n].dtype):
                raise ValueError(
                    f"{self.name} has an output of {signals[n].dtype}, which has no NaN to mark "
                    "steps without an output. Remove the conversion to integers from the model."
                )
        self._shapes = keras.tree.map_structure(
            lambda leaf: [None, *leaf.shape[1:]], self.initial_cache(1)
        )

    def plan_for(self, length: int | None) -> "Plan":
        """Returns the plan for a number of steps."""
        return Plan(self.graph, length, self.options)

    @property
    def embeddings(self) -> list[keras.layers.Embedding]:
        """The embeddings of the model."""
        operations = [call.operation for call in self.graph.calls]
        return [layer for layer in operations if isinstance(layer, keras.layers.Embedding)]

    @property
    def input_specs(self) -> list[tuple[keras.KerasTensor, Signal, bool]]:
        """The symbolic inputs, their signals, and whether they are tokens."""
        tensors = enumerate(keras.tree.flatten(self.graph.inputs))
        return [(x, self.plan.inputs[n], takes_tokens(self.graph, n, x)) for n, x in tensors]

    @property
    def has_fixed_rows(self) -> bool:
        """Whether the model takes a fixed number of rows."""
        return any(x.shape[0] is not None for x in keras.tree.flatten(self.graph.inputs))

    def flatten(self, x: Any) -> list[Tensor]:
        """Returns the tensors of x, which must have the structure of the inputs."""
        return flatten_inputs(x, self.graph.inputs)

    @property
    def compute_dtype(self) -> str:
        """The dtype of the model's computations."""
        return self.model.compute_dtype

    @property
    def inputs(self) -> Any:
        """Structure of the symbolic inputs."""
        return self.graph.inputs

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the model."""
        return self.model.variables

    @property
    def receptive_field(self) -> int | None:
        """Number of inputs that an output depends on, None for all."""
        signals = [self.plan.signals[n] for n in keras.tree.flatten(self.graph.outputs)]
        if any(signal.back is None for signal in signals):
            return None
        return max(math.ceil(signal.back) + signal.offset + 1 for signal in signals)

    # The protocol

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first step: the states of the calls, in order.

        If some steps have no samples, the last item counts the steps, (batch, 1).
        """
        if batch_size is None or (isinstance(batch_size, int) and batch_size < 1):
            raise ValueError(
                f"`batch_size` must be a positive integer. Received: batch_size={batch_size}"
            )
        states = [p.part.initial_state(batch_size) for p in self.plan.parts if p.part.keeps]
        if self.plan.first_offset < 0:  # the padding before the first step
            xs = [
                ops.zeros((batch_size, 0, *signal.shape), dtype=signal.dtype)
                for signal in self.plan.inputs
            ]
            _, states = self._run(xs, states, self.plan.first_offset, 0)
        if self.is_clocked:
            # Of the states' usual dtype: one tensor of a `PackedCache` holds both.
            states.append(ops.zeros((batch_size, 1), dtype="float32"))
        return states

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        values, cache = self.trace(x, cache)
        return keras.tree.map_structure(lambda n: self._step_of(n, values), self.graph.outputs), (
            cache
        )

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        if self.is_clocked and cache is not None:  # the rows may be at different steps
            return step_through(self, x, cache)
        xs = self._read(x, steps=None)
        rows, steps = ops.shape(xs[0])[:2]
        states = self.initial_cache(rows) if cache is None else cache
        self._check_cache(states, xs[0])
        states = states[:-1] if self.is_clocked else states
        values, states = self._run(xs, states, 0, steps)
        if self.is_clocked:
            states.append(self._counter(rows, steps))
        return keras.tree.map_structure(
            lambda n: self._at_steps(n, values[n], steps), self.graph.outputs
        ), states

    def _at_steps(self, n, y, steps):
        """Returns the samples of an output at each step, NaN where none are due."""
        signal = self.plan.signals[n]
        if signal.block > 1:
            y = ops.reshape(y, (-1, ops.shape(y)[1] // signal.block, signal.block, *signal.shape))
        if not self.is_clocked:
            return y
        step = ops.arange(steps) - signal.offset
        due = (step >= 0) & (step % signal.pause == 0)
        first = signal.before(0)
        row = ops.where(due, step // signal.pause - first + 1, 0)
        shape = [ops.shape(y)[0], 1, *y.shape[2:]]
        nothing = ops.full(shape, math.nan, dtype=y.dtype)
        return ops.take(ops.concatenate([nothing, y], axis=1), row, axis=1)

    def trace(self, x: Tensor, cache: Cache) -> tuple[dict[int, Tensor], Cache]:
        """Returns the samples of all tensors at a step, (batch, samples, ...), and the cache."""
        xs = self._read(x, steps=1)
        self._check_cache(cache, xs[0])
        *states, tick = cache if self.is_clocked else [*cache, None]
        values, states = self._advance(xs, states, tick)
        outputs = set(keras.tree.flatten(self.graph.outputs))
        for n in outputs if self.is_clocked else ():
            is_active = self._active(tick)(self.plan.signals[n])
            # Must be a constant: otherwise tf2onnx selects by multiplication, and 0 * NaN is NaN.
            nothing = ops.convert_to_tensor(math.nan, values[n].dtype)
            values[n] = select(is_active, values[n], nothing)
        if self.is_clocked:
            states.append(self._next(tick))
        return values, states

    def _step_of(self, n, values):
        return values[n] if self.plan.signals[n].block > 1 else values[n][:, 0]

    def _advance(self, xs, states, tick):
        """Returns the samples of all tensors at a step, and the next states."""
        active = self._active(tick)
        return self._each(xs, states, lambda part, xs, state: part.advance(xs, state, active))

    def _run(self, xs, states, begin, end):
        """Returns the samples of all tensors from `begin` to before `end`, and the states."""
        return self._each(xs, states, lambda part, xs, state: run_part(part, xs, state, begin, end))

    def _each(self, xs, states, function):
        values, states, after = dict(enumerate(xs)), iter(states), []
        for planned in self.plan.parts:
            state = next(states) if planned.part.keeps else None
            inputs = [values[n] for n in planned.inputs]
            # As within the model: at the outermost level TensorFlow takes fewer names of layers.
            with keras.name_scope("stream"):
                outputs, state = function(planned.part, inputs, state)
            values.update(zip(planned.outputs, outputs, strict=True))
            if planned.part.keeps:
                after.append(state)
        return values, after

    def _active(self, tick):
        """Returns a function that says whether a signal has samples at a step.

        Args:
            tick: Tensor (batch, 1), or None for a step at which all signals do.
        """
        if tick is None:
            return lambda signal: True
        known = {}

        def active(signal):
            offset, pause = signal.offset, signal.pause
            if offset <= 0 and pause == 1:
                return True
            if (offset, pause) not in known:
                is_due = ops.equal(ops.mod(tick - offset, pause), 0)
                known[offset, pause] = (tick >= offset) & is_due
            return known[offset, pause]

        return active

    def _next(self, tick):
        """Advances the step counter, which becomes cyclic once all signals have started."""
        end = self.plan.last_offset + self.plan.cycle
        return ops.where(tick + 1 < end, tick + 1, tick + 1 - self.plan.cycle)

    def _counter(self, rows, steps):
        """Returns the step counter after a number of steps."""
        start, cycle = self.plan.last_offset, self.plan.cycle
        tick = ops.where(steps < start, steps, start + (steps - start) % cycle)
        return ops.full((rows, 1), ops.cast(tick, "float32"), dtype="float32")

    def _read(self, x, steps):
        """Returns the inputs as samples (batch, steps, ...), of one step or of several."""
        xs = flatten_inputs(x, self.graph.inputs)
        samples = []
        for value, signal in zip(xs, self.plan.inputs, strict=True):
            value = ops.cast(value, signal.dtype)
            check_shape("x", value, (None, *([] if steps else [None]), *signal.shape))
            samples.append(value[:, None] if steps else value)
        return samples

    def _check_cache(self, cache, x):
        if self._shapes:
            shapes = keras.tree.map_shape_structure(
                lambda shape: [x.shape[0], *shape[1:]], self._shapes
            )
            check_cache(self, cache, shapes)


@dataclasses.dataclass
class Planned:
    """A part, its inputs and outputs in the graph, and its call, None for a delay."""

    part: Part
    call: Call | None
    inputs: list[int]
    outputs: list[int]


class Plan:
    """The parts of a graph's stream, and the timing of its samples.

    Args:
        graph: The graph.
        length: Number of steps of the model's inputs, None if unknown.
        options: Those of the stream.

    Attributes:
        inputs: List of the `Signal`s of the inputs.
        signals: Dict of the `Signal`s of all tensors.
        parts: List of `Planned` parts.
        first_offset, last_offset: Earliest (at most 0) and latest (at least 0) step at which the
            first sample of a tensor comes.
        cycle: Number of steps after which the pattern of samples repeats.
        reach: Number of steps that an output depends on, where it is known.
        outputs: Structure of the numbers of the outputs.
        uneven: The first call whose inputs have different numbers of samples, or None.
    """

    def __init__(self, graph: Graph, length: int | None, options: Options):
        tensors = enumerate(keras.tree.flatten(graph.inputs))
        self.inputs = [_input_signal(graph, n, tensor, length) for n, tensor in tensors]
        self.signals = dict(enumerate(self.inputs))
        self.parts: list[Planned] = []
        self.uneven: Call | None = None
        for call in graph.calls:
            inputs = self._aligned(call)
            part = make_part(call, [self.signals[n] for n in inputs], options)
            self._add(part, call, inputs, call.outputs)
        self.outputs = graph.outputs
        if options.window is not None:
            last = options.window - 1
            self.outputs = keras.tree.map_structure(
                lambda n: self._at_the_end(graph, n, last), self.outputs
            )
        signals = self.signals.values()
        self.first_offset = min(0, *(signal.offset for signal in signals))
        self.last_offset = max(0, *(signal.offset for signal in signals))
        self.cycle = math.lcm(*(signal.pause for signal in signals))
        self.reach = math.ceil(max(s.back for s in signals if s.back is not None))

    def _add(self, part, call, inputs, outputs):
        self.parts.append(Planned(part, call, inputs, outputs))
        self.signals.update(zip(outputs, part.outputs, strict=True))

    def _at_the_end(self, graph, n, last):
        """Returns an output, delayed to the last step of the window, of which it is a function."""
        signal = self.signals[n]
        if signal.has_time:
            raise ValueError(
                f"{graph.name} has an output with a time axis, of shape (batch, time, "
                f"{', '.join(map(str, signal.shape))}), and needs no `window`: pass window=None."
            )
        return self._delayed(n, max(signal.offset, last))

    def _delayed(self, n, offset):
        """Returns a tensor that comes at an offset or later."""
        signal = self.signals[n]
        if signal.offset >= offset:
            return n
        delayed = -1 - len(self.parts)
        self._add(Delay(signal, offset), None, [n], [delayed])
        return delayed

    def _aligned(self, call):
        """Returns the inputs of a call, delayed so that they are aligned."""
        signals = [self.signals[n] for n in call.inputs]
        if len({signal.period for signal in signals}) > 1:
            periods = ", ".join(str(signal.period) for signal in signals)
            raise call.refusal(
                f"its inputs come every {periods} steps. Give all branches the same strides."
            )
        if len({signal.length for signal in signals}) > 1:
            self.uneven = self.uneven or call
        offset = max(signal.offset for signal in signals)
        return [self._delayed(n, offset) for n in call.inputs]


def _input_signal(graph, n, tensor, length):
    shape = tensor.shape
    of_tokens = takes_tokens(graph, n, tensor)
    if len(shape) < 2 or (len(shape) == 2 and shape[1] is not None and not of_tokens):
        raise ValueError(
            f"{graph.name} has no time axis to stream along: an input needs the shape (batch, "
            "time, channels), or (batch, None) without channels. "
            f"Received: {tensor.name} of shape {tuple(shape)}"
        )
    return Signal(tuple(shape[2:]), tensor.dtype, length=length)


def flatten_inputs(x, inputs):
    """Returns the tensors of x, which must have the structure of a model's inputs.

    The tensors of a dict come in the order of its sorted keys, so it must not stand for a list.
    """
    if not keras.tree.is_nested(inputs):
        return [x]
    keys = [value.keys() if isinstance(value, dict) else None for value in (x, inputs)]
    xs = keras.tree.flatten(x)
    if keys[0] != keys[1] or len(xs) != len(keras.tree.flatten(inputs)):
        expected = keras.tree.map_structure(lambda tensor: tensor.name, inputs)
        received = keras.tree.map_structure(lambda tensor: tuple(ops.shape(tensor)), x)
        raise ValueError(
            f"`x` must have one tensor per input of the model, with the structure {expected}. "
            f"Received: tensors of shapes {received}"
        )
    return xs


def takes_tokens(graph, n, tensor):
    embeds = (isinstance(call.operation, keras.layers.Embedding) for call in graph.calls)
    reads = (n in call.inputs for call in graph.calls)
    return keras.backend.is_int_dtype(tensor.dtype) or any(map(operator.and_, embeds, reads))


def known_length(graph):
    """Returns the number of steps of a model's inputs, None if it is unknown."""
    lengths = {x.shape[1] for x in keras.tree.flatten(graph.inputs) if len(x.shape) > 1} - {None}
    if len(lengths) > 1:
        raise ValueError(
            f"The inputs of {graph.name} must have the same number of steps. "
            f"Received: {sorted(lengths)}"
        )
    return lengths.pop() if lengths else None


def _whole(period):
    return int(period) if period.denominator == 1 else period
