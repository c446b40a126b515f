"""Keras models as streams: `to_stream`."""

import dataclasses
import functools
import math
import operator
from typing import Any

import keras
from keras import ops

from keras_streams._keras_internals import numpy_ops
from keras_streams.graph import (
    WITHOUT_INPUTS,
    Call,
    Computed,
    DoesNotStream,
    Graph,
    StreamOptions,
    from_axis,
    to_axis,
)
from keras_streams.parts import Delay, Part, Signal, Table, Window, select
from keras_streams.proof import Proof, prove
from keras_streams.protocol import (
    StreamingMixin,
    check_built,
    check_cache,
    check_causal,
    check_shape,
    check_start,
    flatten_inputs,
    keys_of,
    step_through,
    streams_itself,
)
from keras_streams.rules import leading_steps, make_parts, tables, unfolded
from keras_streams.trace import error_summary, raising_call
from keras_streams.types import Cache, Tensor


def to_stream(
    model: Any,
    *,
    time_axis: Any = None,
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
    that ends with step t. After layers that look ahead, such as those with `padding="same"`, it
    covers only their outputs that do not depend on the padding after the sequence.

    Dropout is inactive. A layer that is called several times has one state per call.

    Args:
        model: Built functional model, `keras.Sequential`, or layer, with Keras layers, operations
            of `keras.ops`, and layers that follow `StreamingMixin`. An object that already follows
            it is returned unchanged, and takes no options.
        time_axis: Integer, the time axis of the model's inputs; a stream has it on axis 1. Or a
            structure of integers like the model's inputs, with `None` for an input without a time
            axis, of which each step gets the same values. Defaults to `None`: axis 1, and inputs
            (batch, features) beside sequences have none. Integers (batch, n) are tokens if all
            sequences have `n` steps.
        window: Positive integer, the number of steps that the model was trained on. At each step
            the outputs are then those of the model for the last `window` steps; with strides, at
            each step that has an output. The model may end with a `Flatten` or any other layer that
            joins all steps; the layers before it may not pad. The cost of sums, means and maxima of
            a window grows with its logarithm; from the first other layer that joins steps on,
            everything is recomputed for each window. Defaults to `None`: outputs without a time
            axis cover all steps so far.
        ignore_masks: Boolean, whether to ignore `Masking` and `Embedding(mask_zero=True)`, because
            the stream never gets padding. Defaults to `False`: they are errors.
        max_context: Positive integer, the number of steps that causal attention
            (`MultiHeadAttention` called with `use_causal_mask=True`) keeps, and that embeddings of
            positions have. Later outputs are NaN, unless the layers have a sliding window. Defaults
            to `None`: the length of the model's inputs.
        example: Arrays (batch, time, channels) with the structure of the model's inputs, on which
            the stream is compared with the model, for a model that has no finite outputs for random
            numbers, such as one with a logarithm of counts. Defaults to `None`, random numbers.

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
    if streams_itself(model):
        given = {"time_axis": time_axis, "window": window, "max_context": max_context}
        given |= {"ignore_masks": ignore_masks or None, "example": example}
        names = ", ".join(name for name, value in given.items() if value is not None)
        if names:
            raise ValueError(
                "The options of `to_stream` are for a model that becomes a stream: wrap a layer in "
                f"keras.Sequential. Received: {names} with {model!r}, which streams "
                "already"
            )
        check_causal(model)
        return model
    if not isinstance(model, keras.Layer):
        raise ValueError(f"`model` must be a Keras model or layer. Received: {model!r}")
    check_built(model)
    window, max_context = _count("window", window), _count("max_context", max_context)
    if ignore_masks not in (True, False):
        raise ValueError(f"`ignore_masks` must be True or False. Received: {ignore_masks!r}")
    options = StreamOptions(time_axis, window, ignore_masks, max_context)
    try:
        return _proven(model, options, example)
    except ValueError as error:
        try:  # a layer may treat each step separately, though its operations do not
            return _proven(model, dataclasses.replace(options, traced=False), example)
        except ValueError:
            raise error from None


def _count(name, value):
    """Returns an option as an integer, if it is positive."""
    if value is None:
        return None
    is_count = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_count or operator.index(value) < 1:
        raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}")
    return operator.index(value)


def _proven(model, options, example):
    while True:
        stream = GraphStream(model, options, example)
        try:
            stream.proof = prove(stream, example)
            return stream
        except DoesNotStream as error:
            if options.window is None or error.call.outputs[0] in options.joined:
                raise
            # It joins steps, though its shapes do not show it.
            options = dataclasses.replace(options, joined=options.joined | {error.call.outputs[0]})


class GraphStream(StreamingMixin):
    """A model's graph as a stream, the result of `to_stream`."""

    built = True

    def __init__(
        self,
        model: keras.Layer,
        options: StreamOptions,
        example: Any = None,
        proof: Proof | None = None,
    ):
        self.model, self.name, self.options = model, model.name, options
        self.example, self.proof = example, proof
        self.compute_dtype, self.variables = model.compute_dtype, model.variables
        self.graph = Graph(model, options)
        self.inputs = self.graph.inputs  # a structure of symbolic tensors
        self.time_axes = _time_axes(self.graph, options.time_axis)
        self.length = _known_length(self.graph, self.time_axes, options.window)
        self.plan = self.plan_for(self.length)
        signals, outputs = self.plan.signals, self.plan.outputs
        self.output_signals = [signals[n] for n in keras.tree.flatten(outputs)]
        self.is_clocked = any(s.offset > 0 or s.period > 1 for s in signals.values())
        self.delay = keras.tree.map_structure(lambda n: signals[n].offset, outputs)
        self.rate = keras.tree.map_structure(lambda n: _number(signals[n].period), outputs)
        for signal in self.output_signals:
            if self.is_clocked and not keras.backend.is_float_dtype(signal.dtype):
                raise ValueError(
                    f"{self.name} has an output of {signal.dtype}, which has no NaN to mark steps "
                    "without an output. Remove the conversion to integers from the model."
                )
        try:
            cache = self.initial_cache(1)
        except Exception as error:  # whatever an operation raises for the padding
            call = raising_call(error)
            if call is None:
                raise
            steps = -self.plan.first_offset
            raise call.refusal(
                f"for the first {steps} steps it raised {error_summary(error)}"
            ) from error
        self._shapes = keras.tree.map_structure(lambda leaf: [None, *leaf.shape[1:]], cache)

    def __reduce__(self):
        return type(self), (self.model, self.options, self.example, self.proof)

    def plan_for(self, length: int | None) -> "Plan":
        """Returns the plan for a number of steps, `None` if it is unknown."""
        return Plan(self.graph, self.time_axes, length, self.options)

    def whole(self, xs: list[Tensor]) -> list[Tensor]:
        """Returns the model's outputs for inputs with time on axis 1, as a flat list."""
        xs = [to_axis(x, axis or 0) for x, axis in zip(xs, self.time_axes, strict=True)]
        ys = self.model(keras.tree.pack_sequence_as(self.inputs, xs))
        ys = zip(keras.tree.flatten(ys), self.output_signals, strict=True)
        return [from_axis(y, signal.axis if signal.has_time else None) for y, signal in ys]

    @property
    def receptive_field(self) -> int | None:
        """Number of inputs that an output depends on, `None` for all."""
        if any(signal.back is None for signal in self.output_signals):
            return None
        return max(math.ceil(s.back) + s.offset + 1 for s in self.output_signals)

    # The protocol

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first step: the states of the calls, in order.

        If some steps have no samples, the last item counts the steps, (batch, 1).
        """
        check_start(self, batch_size)
        states = [part.initial_state(batch_size) for part in self.plan.parts if part.keeps]
        if self.plan.first_offset < 0:  # the padding before the first step
            xs = [ops.zeros((batch_size, 0, *s.shape), dtype=s.dtype) for s in self.plan.inputs]
            _, states = self._run(xs, states, self.plan.first_offset, 0)
        if self.is_clocked:
            states.append(ops.zeros((batch_size, 1), dtype="int32"))
        return states

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Advances one step of the inputs; y is NaN where no output is due."""
        xs = self._read(x, steps=1)
        self._check_cache(cache, xs[0])
        *states, tick = cache if self.is_clocked else [*cache, None]
        active = self._active(tick)
        values, states = self._each(xs, states, lambda part, *given: part.advance(*given, active))
        if self.is_clocked:
            states.append(self._wrapped(tick + 1))

        def output(n):
            signal, y = self.plan.signals[n], values[n]
            if self.is_clocked:
                # Must be a constant: otherwise tf2onnx selects by multiplication, and 0 * NaN is
                # NaN.
                y = select(active(signal), y, ops.convert_to_tensor(math.nan, y.dtype))
            return y if signal.block > 1 else y[:, 0]

        return keras.tree.map_structure(output, self.plan.outputs), states

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Advances all steps of segments; y has the outputs of `step`, with time on axis 1."""
        xs = self._read(x, steps=None)
        if self.is_clocked and cache is not None:  # the rows may be at different steps
            return step_through(self, keras.tree.pack_sequence_as(self.inputs, xs), cache)
        rows, steps = ops.shape(xs[0])[:2]
        states = self.initial_cache(rows) if cache is None else cache
        self._check_cache(states, xs[0])
        states = states[:-1] if self.is_clocked else states
        values, states = self._run(xs, states, 0, steps)
        if self.is_clocked:
            states.append(ops.full((rows, 1), self._wrapped(steps), dtype="int32"))

        def output(n):
            """Returns the samples at each step, NaN where none are due."""
            signal, y = self.plan.signals[n], values[n]
            if signal.block > 1:
                rows, samples = ops.shape(y)[:2]
                y = ops.reshape(y, (rows, samples // signal.block, signal.block, *signal.shape))
            if not self.is_clocked:
                return y
            step = ops.arange(steps, dtype="int32") - signal.offset
            due = (step >= 0) & (step % signal.pause == 0)
            row = ops.where(due, step // signal.pause - signal.before(0) + 1, 0)
            nothing = ops.full([ops.shape(y)[0], 1, *y.shape[2:]], math.nan, dtype=y.dtype)
            return ops.take(ops.concatenate([nothing, y], axis=1), row, axis=1)

        return keras.tree.map_structure(output, self.plan.outputs), states

    def _run(self, xs, states, begin, end):
        """Returns the samples of all tensors from `begin` to before `end`, and the states."""
        return self._each(xs, states, lambda part, *given: part.run_any(*given, begin, end))

    def _each(self, xs, states, function):
        values, states, after = dict(enumerate(xs)), iter(states), []
        for part in self.plan.parts:
            state = next(states) if part.keeps else None
            # As within the model: at the outermost level TensorFlow takes fewer names of layers.
            with keras.name_scope("stream"):
                outputs, state = function(part, [values[n] for n in part.reads], state)
            values.update(zip(part.writes, outputs, strict=True))
            if part.keeps:
                after.append(state)
        return values, after

    def _active(self, tick):
        """Returns a function that says whether a signal has samples at a step (batch, 1)."""

        @functools.cache
        def is_active(offset, pause):
            return (tick >= offset) & ops.equal(ops.mod(tick - offset, pause), 0)

        def active(signal):
            always = signal.offset <= 0 and signal.pause == 1
            return always or is_active(signal.offset, signal.pause)

        return active

    def _wrapped(self, tick):
        """Returns a number of steps, which wraps in a cycle once all signals have begun."""
        start, cycle = self.plan.last_offset, self.plan.cycle
        return ops.where(tick < start + cycle, tick, start + ops.mod(tick - start, cycle))

    def _read(self, x, steps):
        """Returns the inputs as samples (batch, steps, ...), of one step or of several."""
        samples, signals = [], self.plan.inputs
        for value, signal in zip(flatten_inputs(x, self.inputs), signals, strict=True):
            value = ops.cast(value, signal.dtype)
            has_time = not (steps or signal.is_static)
            check_shape("x", value, (None, *([None] if has_time else []), *signal.shape))
            samples.append(value if has_time else value[:, None])
        if len({sample.shape[0] for sample in samples} - {None}) > 1:
            raise ValueError(
                "All inputs must have the same batch size. Received: "
                f"x of shapes {[tuple(sample.shape) for sample in samples]}"
            )
        if steps:
            return samples
        pairs = list(zip(samples, signals, strict=True))
        counts = {x.shape[1] for x, s in pairs if not s.is_static} - {None}
        if len(counts) > 1:
            raise ValueError(
                "All inputs of a segment must have the same number of steps. Received: "
                f"x of shapes {[tuple(x.shape) for x in samples]}"
            )
        steps = next(ops.shape(x)[1] for x, s in pairs if not s.is_static)
        return [ops.repeat(x, steps, axis=1) if s.is_static else x for x, s in pairs]

    def _check_cache(self, cache, x):
        def with_rows(shape):
            return [x.shape[0], *shape[1:]]

        shapes = [keras.tree.map_shape_structure(with_rows, state) for state in self._shapes]
        check_cache(self, cache, shapes)


class Plan:
    """The parts of a graph's stream for inputs of a length, and the timing of its samples."""

    def __init__(
        self, graph: Graph, axes: list[int | None], length: int | None, options: StreamOptions
    ):
        tensors = keras.tree.flatten(graph.inputs)
        self.inputs = [
            _input_signal(graph, tensor, axis, length, options.window is not None)
            for tensor, axis in zip(tensors, axes, strict=True)
        ]
        self.signals = dict(enumerate(self.inputs))  # of all tensors
        self.parts: list[Part] = []  # in order
        self.uneven: Call | None = None  # the first whose inputs have different lengths
        self._options = options
        # By tensor: its delays and window, the first steps that it slices to make zeros or ones of
        # them, and the constants themselves.
        self._derived: dict[tuple[int, Any], int] = {}
        self._slices: dict[int, tuple[int, int]] = {}
        self._constants: dict[int, Computed] = {}
        for call in graph.calls:
            call = call.with_sources(lambda n: self._constants.get(n, n))
            if options.window is not None or not self._is_start(graph, call):
                self._add_call(call)
        self.outputs = graph.outputs  # a structure of the numbers of the tensors
        if self._constants.keys() & {*keras.tree.flatten(self.outputs)}:
            raise ValueError(WITHOUT_INPUTS.format(graph.name))
        self.outputs = keras.tree.map_structure(self._current, self.outputs)
        needed = set(keras.tree.flatten(self.outputs))
        for part in self.parts[::-1]:
            if part.call is not None or needed & {*part.writes}:
                needed |= {*part.reads}
            else:  # a delay that no part needs after all
                self.parts.remove(part)
        signals = self.signals.values()
        # The earliest and the latest step at which the first sample of a tensor comes.
        self.first_offset = min(0, *(signal.offset for signal in signals))
        self.last_offset = max(0, *(signal.offset for signal in signals))
        self.cycle = math.lcm(*(signal.pause for signal in signals))
        # Steps that an output depends on, where it is known.
        self.reach = math.ceil(max(s.back for s in signals if s.back is not None))
        # Rows of the shortest table, and steps after which there are no more outputs.
        ending = [(part, part.most) for part in self.parts if part.most]
        self.rows = min((most for part, most in ending if isinstance(part, Table)), default=None)
        ends = (p.signal.offset + math.ceil(p.signal.period * most) for p, most in ending)
        self.longest = min(ends, default=None)

    def _add_call(self, call):
        """Adds the parts of a call."""
        if self._options.window is None:
            call = self._aligned(self._with_tables(call))
            *parts, last = self._parts(call)
        else:
            call, (*parts, last) = self._in_window(call)
        reads = call.inputs
        call.axes = [0 if self.signals[n].is_static else self.signals[n].axis for n in reads]
        call.output_axes = [signal.axis for signal in last.outputs]
        for part in parts:
            reads = [self._add(part, reads, call=call)]
        self._add(last, reads, call.outputs, call)

    def _is_start(self, graph, call):
        """Returns whether a call makes zeros or ones for the start of a shift, and records them.

        They are `zeros_like(x)[:, :n]` or `zeros_like(x[:, :n])`.
        """
        if not call.inputs:  # what is computed from them
            self._constants[call.outputs[0]] = Computed(
                lambda: call.of_model([])[0], call.is_constant
            )
            return True
        source, output, fill = call.inputs[0], call.outputs[0], call.operation
        place = self._slices.get(source)
        if place is None and isinstance(call.operation, numpy_ops.GetItem):
            place = leading_steps(call, self.signals[source])
            readers = [reader.operation for reader in graph.calls if output in reader.inputs]
            is_output = output in keras.tree.flatten(graph.outputs)
            is_only_filled = all(isinstance(reader, _FILLS) for reader in readers)
            if place and readers and is_only_filled and not is_output:
                self._slices[output] = place
                return True
            fill = next((c.operation for c in graph.calls if source in c.outputs), None)
        if place is None or not isinstance(fill, _FILLS):
            return False
        (axis, steps), spec = place, call.specs[0]
        shape = (1, *spec.shape[1:axis], steps, *spec.shape[axis + 1 :])
        make = ops.zeros if isinstance(fill, numpy_ops.ZerosLike) else ops.ones
        self._constants[output] = Computed(lambda: make(shape, spec.dtype))
        return True

    def _parts(self, call):
        made = make_parts(call, [self.signals[n] for n in call.inputs], self._options)
        return made if isinstance(made, list) else [made]

    def _with_tables(self, call):
        """Returns a call whose arguments with a row for each step are inputs."""
        inputs = call.inputs
        for leaf, tensor, table in tables(call, [self.signals[n] for n in inputs]):
            at = next(n for n in inputs if self.signals[n].has_time)
            call = call.with_input(leaf, self._add(table, [at]), tensor)
        return call

    def _in_window(self, call):
        """Returns a call in a window of the stream, and its parts.

        From the first that joins steps on, a call gets each window as a whole.
        """
        signals = [self.signals[n] for n in call.inputs]
        has_time = {signal.has_time for signal in signals if not signal.is_static}
        lengths = {signal.length for signal in signals if signal.has_time}
        is_joined = call.outputs[0] in self._options.joined or len(lengths) > 1
        if len(has_time) == 1 and not is_joined and not tables(call, signals):
            aligned = self._aligned(call)
            try:
                parts = self._parts(aligned)
            except DoesNotStream:
                if has_time == {False}:
                    raise
            else:
                keeps_windows = all(part.keeps_windows for part in parts)
                if keeps_windows or not parts[0].signal.has_time:
                    return aligned, parts
                if any(part.pads for part in parts):
                    raise call.refusal(
                        "its outputs for a window alone differ from those in a longer sequence, "
                        'whose past is not zero. Train the model with padding="valid".'
                    )

        def whole(n):
            signal = self.signals[n]
            return self._once(n, None, lambda: unfolded(call, signal)) if signal.has_time else n

        joined = self._aligned(call.with_sources(whole))
        return joined, self._parts(joined)

    def _once(self, n, what, make):
        """Returns the tensor that a part makes of a tensor; there is one part for each `what`."""
        if (n, what) not in self._derived:
            self._derived[n, what] = self._add(make(), [n])
        return self._derived[n, what]

    def _add(self, part, reads, writes=None, call=None):
        """Adds a part, which by default writes a tensor that it numbers, and returns the number."""
        part.call, part.reads, part.writes = call, reads, writes or [-1 - len(self.parts)]
        self.parts.append(part)
        self.signals.update(zip(part.writes, part.outputs, strict=True))
        return part.writes[0]

    def _thinned(self, n, period):
        """Returns a tensor of whole windows, of those that begin every `period` steps."""
        signal = self.signals[n]
        if signal.is_static or signal.pause == period:
            return n
        what, stride = ("every", period), period // signal.pause
        return self._once(n, what, lambda: Window(None, signal, stride=stride, like=signal))

    def _delayed(self, n, offset):
        """Returns a tensor that comes at an offset or later."""
        signal = self.signals[n]
        if signal.offset >= offset:
            return n
        return self._once(n, offset, lambda: Delay(signal, offset))

    def _later(self, n, lag, offset):
        """Returns a running value without the samples that are outdated at an offset."""
        signal = self.signals[n]
        left_out = (offset - _offset_with(signal, lag)) // signal.pause
        if left_out < 1:
            return n
        make = functools.partial(Window, None, signal, left=-left_out, like=signal)
        return self._once(n, ("without", left_out), make)

    def _current(self, n):
        """Returns an output, delayed to the end of the window, or of a sequence that is cropped."""
        signal = self.signals[n]
        if self._options.window is not None:
            return self._delayed(n, max(signal.offset, self._options.window - 1))
        if signal.has_time or signal.is_static:
            return n
        return self._delayed(n, _offset_with(signal, _running_lag([signal])))

    def _aligned(self, call):
        """Returns a call whose inputs are delayed so that they are aligned."""
        signals = [self.signals[n] for n in call.inputs if not self.signals[n].is_static]
        if all(s.in_window and not s.has_time and s.block == 1 for s in signals):
            period = math.lcm(*(signal.pause for signal in signals))
            call = call.with_sources(lambda n: self._thinned(n, period))
            signals = [self.signals[n] for n in call.inputs if not self.signals[n].is_static]
        if len({signal.period for signal in signals}) > 1:
            periods = ", ".join(str(signal.period) for signal in signals)
            raise call.refusal(
                f"its inputs come every {periods} steps. Give all branches the same strides."
            )
        if len({signal.length for signal in signals}) > 1:
            self.uneven = self.uneven or call
        is_running = not any(signal.has_time or signal.in_window for signal in signals)
        lag = _running_lag(signals) if is_running else None
        offset = max((_offset_with(signal, lag) for signal in signals), default=0)
        if offset < 0 and len(signals) < len(call.inputs):
            raise call.refusal(
                "it combines padding before the first step with an input without a time axis. Pad "
                "right before a convolution."
            )

        def aligned(n):
            if self.signals[n].is_static:
                return n
            return self._delayed(n if lag is None else self._later(n, lag, offset), offset)

        return call.with_sources(aligned)


def _running_lag(signals):
    """Returns the lag at which all values of sequences so far are known, 0 for the current one."""
    return max([0, *(math.ceil(signal.lag) for signal in signals)])


def _offset_with(signal, lag):
    """Returns the offset of a signal that is delayed to a lag, `None` for its own."""
    return signal.offset if lag is None else signal.offset + lag - math.ceil(signal.lag)


_FILLS = numpy_ops.ZerosLike, numpy_ops.OnesLike


def _time_axes(graph, given):
    """Returns the time axis of each input, `None` for those without one."""
    tensors = keras.tree.flatten(graph.inputs)
    if given is not None:
        axes = keras.tree.flatten(given) if keras.tree.is_nested(given) else [given] * len(tensors)
        ranks = [len(x.shape) for x in tensors]
        is_alike = len(axes) == len(ranks) and keys_of(given) in (None, keys_of(graph.inputs))
        if not is_alike or any(
            axis is not None
            and not (hasattr(axis, "__index__") and -rank < axis < rank and axis != 0)
            for axis, rank in zip(axes, ranks, strict=False)
        ):
            raise ValueError(
                "`time_axis` must be an axis of the inputs after the batch axis, or a structure "
                f"of such axes like the inputs. Received: time_axis={given!r} for inputs of shapes "
                f"{[tuple(x.shape) for x in tensors]}"
            )
        pairs = zip(axes, ranks, strict=True)
        return [None if a is None else operator.index(a) % rank for a, rank in pairs]
    is_sequence = [len(x.shape) > 2 or x.shape[1:2] == (None,) for x in tensors]
    lengths = {x.shape[1] for x, has_time in zip(tensors, is_sequence, strict=True) if has_time}
    for n, x in enumerate(tensors):  # integers are tokens, or features if their number differs
        if len(x.shape) == 2 and x.shape[1] not in (None, 1) and graph.takes_tokens(n):
            is_sequence[n] = lengths <= {x.shape[1]}
    axes = [1 if has_time else None for has_time in is_sequence]
    if not any(axes):
        raise ValueError(
            f"{graph.name} has no time axis to stream along: an input needs the shape (batch, "
            "time, channels), or (batch, None) without channels; or say where it is, as in "
            "to_stream(model, time_axis=1). A model of single steps becomes one of sequences in "
            "keras.layers.TimeDistributed: keras.Sequential([keras.Input((None, "
            f"{tensors[0].shape[-1]})), keras.layers.TimeDistributed(model)]). Received: "
            f"{tensors[0].name} of shape {tuple(tensors[0].shape)}"
        )
    return axes


def _input_signal(graph, tensor, axis, length, in_window):
    shape = tensor.shape[1:] if axis is None else (*tensor.shape[1:axis], *tensor.shape[axis + 1 :])
    if None in shape:
        raise ValueError(
            f"{graph.name} has an input whose steps have an unknown size: {tensor.name} of shape "
            f"{tuple(tensor.shape)}. Build the model with the size of all axes but time, or say "
            "which axis is time: `time_axis`."
        )
    return Signal(
        tuple(shape),
        tensor.dtype,
        length=length,
        has_time=axis is not None,
        axis=axis or 1,
        is_static=axis is None,
        in_window=in_window,
    )


def _known_length(graph, axes, window):
    """Returns the number of steps of the window or of a model's inputs, or `None` if unknown."""
    tensors = zip(keras.tree.flatten(graph.inputs), axes, strict=True)
    lengths = {x.shape[axis] for x, axis in tensors if axis is not None} - {None}
    if len(lengths) > 1:
        raise ValueError(
            f"The inputs of {graph.name} must have the same number of steps. "
            f"Received: {sorted(lengths)}"
        )
    if window is not None and lengths - {window}:
        raise ValueError(
            f"`window` must be the length of the model's inputs, {lengths.pop()}, if they have "
            f"one. Received: window={window}"
        )
    return window or next(iter(lengths), None)


def _number(period):
    return int(period) if period.denominator == 1 else period
