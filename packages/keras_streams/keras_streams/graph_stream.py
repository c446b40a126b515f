"""Keras models as streams: `to_stream`, and its proof."""

import dataclasses
import math
import operator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.graph import Call, Graph, functional_of, graph_of
from keras_streams.parts import Delay, Part, Signal, at_each, make_part, select
from keras_streams.protocol import (
    StreamingMixin,
    check_built,
    check_cache,
    check_shape,
    check_streams,
    has_protocol,
    step_through,
    without_carried_states,
)
from keras_streams.types import Cache, Tensor
from keras_streams.xla import compile_xla


def to_stream(model: Any) -> Any:
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

    Outputs without a time axis, as of `GlobalAveragePooling1D` or `return_sequences=False`, cover
    the steps so far: y at step t is the output for the sequence that ends with step `t - delay`.

    Dropout is inactive. A layer that is called several times has one state per call.

    Args:
        model: Built functional model, `keras.Sequential`, or layer, with Keras layers, operations
            of `keras.ops`, and layers that follow `StreamingMixin`. An object that already follows
            it is returned unchanged.

    Returns:
        An object with `initial_cache`, `step`, `prefill`, and the attributes `delay` and `rate`.
        It always uses the model's current weights.

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
    stream = GraphStream(model)
    stream.prove()
    return stream


class GraphStream(StreamingMixin):
    """A model's graph as a stream, the result of `to_stream`."""

    built = True

    def __init__(self, model: keras.Layer):
        self.model, self.name = model, model.name
        self.graph = graph_of(model)
        self.plan = Plan(self.graph, _known_length(self.graph))
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
        for tick in range(self.plan.first_offset, 0):  # the padding before the first step
            xs = [
                ops.zeros((batch_size, 1, *signal.shape), dtype=signal.dtype)
                for signal in self.plan.inputs
            ]
            _, states = self._run(xs, states, tick)
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
        if self.is_clocked or not all(p.part.in_blocks for p in self.plan.parts):
            return step_through(self, x, cache)
        xs = self._read(x, steps=None)
        cache = self.initial_cache(ops.shape(xs[0])[0]) if cache is None else cache
        self._check_cache(cache, xs[0])
        values, cache = self._run(xs, cache, None)

        def output(n):
            block, y = self.plan.signals[n].block, values[n]
            if block == 1:
                return y
            return ops.reshape(y, (-1, ops.shape(xs[0])[1], block, *y.shape[2:]))

        return keras.tree.map_structure(output, self.graph.outputs), cache

    def trace(self, x: Tensor, cache: Cache) -> tuple[dict[int, Tensor], Cache]:
        """Returns the samples of all tensors at a step, (batch, samples, ...), and the cache."""
        xs = self._read(x, steps=1)
        self._check_cache(cache, xs[0])
        *states, tick = cache if self.is_clocked else [*cache, None]
        values, states = self._run(xs, states, tick)
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

    def _run(self, xs, states, tick):
        """Returns the samples of all tensors, and the next states."""
        values, states, after = dict(enumerate(xs)), iter(states), []
        active = self._active(tick)
        for planned in self.plan.parts:
            part = planned.part
            state = next(states) if part.keeps else None
            inputs = [values[n] for n in planned.inputs]
            # As within the model: at the outermost level TensorFlow takes fewer names of layers.
            with keras.name_scope("stream"):
                outputs, state = part.advance(inputs, state, active)
            values.update(zip(planned.outputs, outputs, strict=True))
            if part.keeps:
                after.append(state)
        return values, after

    def _active(self, tick):
        """Returns a function that says whether a signal has samples at a step.

        Args:
            tick: Integer, tensor (batch, 1), or None for a step at which all signals do.
        """
        if tick is None:
            return lambda signal: True
        if isinstance(tick, int):
            return lambda signal: signal.is_due(tick)
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

    # The proof

    def prove(self) -> None:
        """Raises ValueError if the stream of a random sequence differs from the model's outputs."""
        graph, plan = self.graph, self.plan
        wanted = plan.last_offset - plan.first_offset + 3 * plan.cycle
        wanted += min(plan.reach, _LONGEST_REACH)
        length = _known_length(graph)
        if length is None:
            length = self._length_for_proof(wanted)
        steps = min(wanted, length)
        if steps <= plan.last_offset:
            raise ValueError(
                f"{self.name} was built for {length} steps, but the stream's first output comes "
                f"at step {plan.last_offset + 1}. Build it for longer sequences, or for any "
                "length: keras.Input((None, channels))."
            )
        xs = _random_inputs(graph, plan.inputs, length)
        with without_carried_states(self.model):
            expected = self._expected(xs, steps)
        found = self._found(xs, steps)
        whole = Plan(graph, length)
        for planned in plan.parts:
            for n in planned.outputs if planned.call else ():
                self._compare(planned, n, found, expected, whole)

    def _length_for_proof(self, wanted):
        """Returns a sequence length whose padding equals that of the stream."""
        signals, cycle = self.plan.signals, self.plan.cycle
        wanted = -(-wanted // cycle) * cycle
        for length in range(wanted, wanted + _LENGTHS):
            other = Plan(self.graph, length)
            differ = [n for n in signals if other.signals[n].offset != signals[n].offset]
            if not differ and other.uneven is None:
                return length
        calls = [p.call for p in self.plan.parts for n in p.outputs if n in differ]
        raise (calls[0] if calls else other.uneven).refusal(
            "its padding depends on the length of the sequence, which is unknown. Build the model "
            'with keras.Input((length, channels)), or use padding="causal" or "valid".'
        )

    def _expected(self, xs, steps):
        """Returns the values of all tensors: all samples, or a few if there is no time axis.

        Tensors without a time axis have the samples `self.plan.endings(signal, steps)`.
        """
        values = dict(enumerate(map(ops.convert_to_tensor, xs)))
        for planned in self.plan.parts:
            call, signals = planned.call, self.plan.signals
            if call is None:  # a delay
                values[planned.outputs[0]] = values[planned.inputs[0]]
                continue
            inputs = [values[n] for n in planned.inputs]
            outputs = [signals[n] for n in planned.outputs]
            if not signals[planned.inputs[0]].has_time:
                found = at_each(call, inputs)
            else:
                found = call(inputs)
                ends = [i for i, signal in enumerate(outputs) if not signal.has_time]
                if ends:
                    block = signals[planned.inputs[0]].block
                    shorter = [
                        call([x[:, : block * (n + 1)] for x in inputs])
                        for n in self.plan.endings(outputs[ends[0]], steps)
                    ]
                    for i in ends:
                        found[i] = ops.stack([of_end[i] for of_end in shorter], axis=1)
            values.update(zip(planned.outputs, found, strict=True))
        return values

    def _found(self, xs, steps):
        """Returns the samples of all tensors at each step, as dicts."""
        cache = self.initial_cache(len(xs[0]))
        numbers = sorted(self.plan.signals)

        def step(*arguments):
            x = keras.tree.pack_sequence_as(self.graph.inputs, arguments[: len(xs)])
            values, after = self.trace(x, keras.tree.pack_sequence_as(cache, arguments[len(xs) :]))
            return [*(values[n] for n in numbers), *keras.tree.flatten(after)]

        # For so few steps eager execution is faster on TensorFlow.
        compiled = compile_xla(step, self.variables) if _ON_JAX else step
        leaves, found = keras.tree.flatten(cache), []
        for t in range(steps):
            outputs = compiled(*(ops.convert_to_tensor(x[:, t]) for x in xs), *leaves)
            count = len(outputs) - len(leaves)
            leaves = outputs[count:]
            found.append([_to_numpy(y) for y in outputs[:count]])
        return dict(zip(numbers, zip(*found, strict=True), strict=True))

    def _compare(self, planned, n, found, expected, plan):
        """Compares a tensor at all steps, using the plan for the sequence's length."""
        signal, y = plan.signals[n], _to_numpy(expected[n])
        if signal.has_time:
            due = [t for t in range(len(found[n])) if signal.is_due(t)]
            first = [signal.block * ((t - signal.offset) // signal.pause) for t in due]
            if y.shape[1] != signal.length:
                raise planned.call.refusal(planned.part.difference)
        else:
            ends = self.plan.endings(signal, len(found[n]))
            due, first = [signal.offset + signal.pause * end for end in ends], range(len(ends))
        scale = max(_largest(y), *(_largest(_to_numpy(expected[i])) for i in planned.inputs))
        tolerance = _TOLERANCES.get(signal.dtype, 0) * scale
        for t, start in zip(due, first, strict=True):
            if t >= plan.ends[n]:
                continue
            other = y[:, start : start + signal.block]
            one = found[n][t][:, : other.shape[1]]  # the last block may be longer
            if one.shape != other.shape or not np.allclose(
                one, other, rtol=0, atol=tolerance, equal_nan=True
            ):
                raise planned.call.refusal(planned.part.difference)


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

    Attributes:
        inputs: List of the `Signal`s of the inputs.
        signals: Dict of the `Signal`s of all tensors.
        parts: List of `Planned` parts.
        first_offset, last_offset: Earliest (at most 0) and latest (at least 0) step at which the
            first sample of a tensor comes.
        cycle: Number of steps after which the pattern of samples repeats.
        reach: Number of steps that an output depends on, where it is known.
        ends: Dict of the first step at which a tensor differs from that of a finite sequence,
            because the stream has samples that the sequence does not have.
        uneven: The first call whose inputs have different numbers of samples, or None.
    """

    def __init__(self, graph: Graph, length: int | None):
        tensors = enumerate(keras.tree.flatten(graph.inputs))
        self.inputs = [_input_signal(graph, n, tensor, length) for n, tensor in tensors]
        self.signals = dict(enumerate(self.inputs))
        self.ends = dict.fromkeys(self.signals, math.inf if length is None else length)
        self.parts: list[Planned] = []
        self.uneven: Call | None = None
        for call in graph.calls:
            inputs = self._aligned(call)
            part = make_part(call, [self.signals[n] for n in inputs])
            self._add(part, call, inputs, call.outputs)
        signals = self.signals.values()
        self.first_offset = min(0, *(signal.offset for signal in signals))
        self.last_offset = max(0, *(signal.offset for signal in signals))
        self.cycle = math.lcm(*(signal.pause for signal in signals))
        self.reach = math.ceil(max(s.back for s in signals if s.back is not None))

    def _add(self, part, call, inputs, outputs):
        self.parts.append(Planned(part, call, inputs, outputs))
        self.signals.update(zip(outputs, part.outputs, strict=True))
        end = min(self.ends[n] for n in inputs)
        for n, signal in zip(outputs, part.outputs, strict=True):
            known = signal.length is not None
            self.ends[n] = min(end, signal.offset + signal.period * signal.length) if known else end

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
        offset, numbers = max(signal.offset for signal in signals), []
        for n, signal in zip(call.inputs, signals, strict=True):
            if signal.offset < offset:
                delayed = -1 - len(self.parts)
                self._add(Delay(signal, offset), None, [n], [delayed])
                n = delayed
            numbers.append(n)
        return numbers

    def endings(self, signal: Signal, steps: int) -> list[int]:
        """Returns the first, a middle and the last sample shared by all tensors of a period."""
        first = -(self.first_offset // signal.pause)
        last = (steps - 1 - self.last_offset) // signal.pause
        return sorted({first, (first + last) // 2, last})


def _input_signal(graph, n, tensor, length):
    shape = tensor.shape
    of_tokens = _takes_tokens(graph, n, tensor)
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


def _takes_tokens(graph, n, tensor):
    embeds = (isinstance(call.operation, keras.layers.Embedding) for call in graph.calls)
    reads = (n in call.inputs for call in graph.calls)
    return keras.backend.is_int_dtype(tensor.dtype) or any(map(operator.and_, embeds, reads))


def _known_length(graph):
    """Returns the number of steps of a model's inputs, None if it is unknown."""
    lengths = {x.shape[1] for x in keras.tree.flatten(graph.inputs) if len(x.shape) > 1} - {None}
    if len(lengths) > 1:
        raise ValueError(
            f"The inputs of {graph.name} must have the same number of steps. "
            f"Received: {sorted(lengths)}"
        )
    return lengths.pop() if lengths else None


def _random_inputs(graph, signals, length):
    """Returns random sequences for the inputs of a graph, of two rows if any number will do."""
    rng = np.random.default_rng(0)
    embeddings = [
        c.operation for c in graph.calls if isinstance(c.operation, keras.layers.Embedding)
    ]
    tokens = min((layer.input_dim for layer in embeddings), default=2)
    inputs = []
    for n, tensor in enumerate(keras.tree.flatten(graph.inputs)):
        shape = (tensor.shape[0] or 2, length, *signals[n].shape)
        is_tokens = _takes_tokens(graph, n, tensor)
        x = rng.integers(0, tokens, shape) if is_tokens else rng.normal(size=shape)
        inputs.append(ops.cast(x, tensor.dtype))
    return inputs


def _to_numpy(tensor):
    return np.asarray(ops.convert_to_numpy(tensor)).astype("float64")


def _largest(array):
    """Returns the largest absolute value of the finite ones."""
    return np.max(np.abs(array[np.isfinite(array)]), initial=0)


def _whole(period):
    return int(period) if period.denominator == 1 else period


_ON_JAX = keras.backend.backend() == "jax"
# Largest difference of a stream from its model, relative to the largest value.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 0.05, "bfloat16": 0.1}
# Largest number of past steps that the check covers, for outputs that depend on more.
_LONGEST_REACH = 200
# Number of lengths that the check tries to find one with the padding of a stream.
_LENGTHS = 256


# Checks
