"""The proof that a stream equals its model."""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.graph import Call, DoesNotStream
from keras_streams.parts import (
    Constant,
    Delay,
    Part,
    Pointwise,
    Protocol,
    Recurrent,
    Table,
    run_part,
)
from keras_streams.protocol import without_carried_states
from keras_streams.trace import told
from keras_streams.xla import compile_xla

_ON_JAX = keras.backend.backend() == "jax"
# Largest difference of a stream from its model, relative to the largest value.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 0.05, "bfloat16": 0.1}
# Fewest steps of a proof, if the model takes any number, and the largest reach that it covers.
_STEPS = 256
_LONGEST_REACH = 1024
# Number of steps that a layer of unknown operations gets one by one, as a stream does.
_SINGLE_STEPS = 16
# Number of steps of all parts together, besides delays: each is compared over more.
_FEW_STEPS = 32
# Number of lengths that are tried to find one with the padding of a stream.
_LENGTHS = 256


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a stream was compared with when it was made.

    Attributes:
        steps: Number of steps.
        difference: Largest difference of a tensor of the model, relative to its largest value.
    """

    steps: int
    difference: float


def prove(stream: Any, example: Any = None) -> Proof:
    """Compares a stream with its model.

    Each part of the stream is compared with the layer's outputs for a whole sequence: over all
    steps at once, and at a single step. An operation that treats each step separately, or should,
    gets all steps of a sequence as a batch of sequences of one step; and so do numbers of its own,
    positive ones, and, if it is not one of Keras', missing ones. One that is not also gets some
    steps alone, and, as it could read any earlier step, longer sequences.

    Args:
        stream: `GraphStream`.
        example: Inputs, or `None` for random ones.

    Raises:
        ValueError: They differ, or there is no finite number to compare. The message names the
            first operation.
    """
    steps, length = _lengths(stream)
    known: dict[int, float] = {}
    examples = [] if example is None else [_inputs_of(stream, example, length)]
    for xs in (*examples, *_random_inputs(stream, length)):
        known = _compare(stream, xs, steps) | known
        missing = [p for p in stream.plan.parts if p.call and not known.keys() >= {*p.outputs}]
        if not missing:
            return Proof(steps, max(known.values(), default=0.0))
    raise missing[0].call.refusal(
        "no output of it is a finite number, so there is nothing to compare. Give data: "
        "to_stream(model, example=x)."
    )


def _lengths(stream):
    """Returns the number of steps to compare, and the length of the sequence."""
    plan, length = stream.plan, None if stream.options.window else stream.length
    wanted = plan.last_offset - plan.first_offset + 3 * plan.cycle
    # A layer of unknown operations could read any earlier step.
    is_unknown = any(isinstance(p.part, Pointwise) and _is_unknown(p.call) for p in plan.parts)
    reach = _LONGEST_REACH if is_unknown else min(plan.reach, _LONGEST_REACH)
    wanted = max(wanted + reach, _STEPS)
    wanted = min(wanted, plan.last_offset + (stream.options.max_context or wanted))
    if length is None and plan.rows:
        length = plan.rows
    elif length is None:
        length = _length_for_proof(stream, wanted)
    steps = min(wanted, length)
    if steps <= plan.last_offset:
        raise ValueError(
            f"{stream.name} was built for {length} steps, but the stream's first output comes at "
            f"step {plan.last_offset + 1}. Build it for longer sequences, or for any length: "
            "keras.Input((None, channels))."
        )
    return steps, length


def _is_unknown(call):
    """Whether a call's operations, and so the steps that they read, are unknown."""
    of_each_step = type(call.operation) is keras.layers.TimeDistributed
    return not (call.is_of_keras or of_each_step)


def _length_for_proof(stream, wanted):
    """Returns a sequence length whose padding equals that of the stream."""
    signals, cycle = stream.plan.signals, stream.plan.cycle
    wanted = -(-wanted // cycle) * cycle
    if stream.options.window:
        return wanted
    for length in range(wanted, wanted + _LENGTHS):
        other = stream.plan_for(length)
        differ = [n for n in signals if other.signals[n].offset != signals[n].offset]
        if not differ and other.uneven is None:
            return length
    calls = [p.call for p in stream.plan.parts for n in p.outputs if n in differ]
    raise (calls[0] if calls else other.uneven).refusal(
        "its padding depends on the length of the sequence, which is unknown. Build the model "
        'with keras.Input((length, channels)), or use padding="causal" or "valid".'
    )


# The inputs


def _random_inputs(stream, length):
    """Yields random sequences for the inputs, of two rows if any number will do."""
    rng = np.random.default_rng(0)
    tokens = min((layer.input_dim for layer in stream.embeddings), default=2)
    first = int(any(layer.mask_zero for layer in stream.embeddings))  # no masked steps
    for change in (np.asarray, np.abs):
        inputs = []
        for tensor, signal, takes_tokens in stream.input_specs:
            shape = (tensor.shape[0] or 2, 1 if signal.is_static else length, *signal.shape)
            x = rng.integers(first, tokens, shape) if takes_tokens else rng.normal(size=shape)
            x = np.repeat(x, length, axis=1) if signal.is_static else x
            inputs.append(ops.cast(change(x), tensor.dtype))
        yield inputs


def _inputs_of(stream, example, length):
    """Returns the user's sequences, cut or repeated to a length."""
    xs = stream.flatten(example)
    inputs = []
    for x, (tensor, signal, _) in zip(xs, stream.input_specs, strict=True):
        x, axis = np.asarray(ops.convert_to_numpy(x)), signal.axis
        shape = list(tensor.shape)
        if not signal.is_static:
            shape[axis] = None
        fits = x.ndim == len(shape) and all(
            b in (None, a) for a, b in zip(x.shape[1:], shape[1:], strict=True)
        )
        if not fits or 0 in x.shape:
            raise ValueError(
                f"`example` must have the shape {tuple(shape)}, where None is any number. "
                f"Received: shape {x.shape}"
            )
        x = x[:, None] if signal.is_static else np.moveaxis(x, axis, 1)
        x = np.take(x, np.arange(length) % x.shape[1], axis=1)
        rows = np.arange(tensor.shape[0] or len(x)) % len(x)
        inputs.append(ops.cast(x[rows], tensor.dtype))
    return inputs


# The comparison


@dataclasses.dataclass
class _Pair:
    """Two tensors that must be equal: of a call, and the number of its output if it has one."""

    call: Call | None
    part: Part | None
    number: int | None
    dtype: str
    found: Any
    expected: Any


def _compare(stream, xs, steps):
    """Returns the largest difference of each tensor that has a finite number."""
    pairs: list[_Pair] = []

    def evidence(*xs):
        pairs[:] = _pairs(stream, list(xs), steps)
        return [tensor for pair in pairs for tensor in (pair.found, pair.expected)]

    # On TensorFlow eager execution is faster, on JAX it compiles every operation.
    compiled = compile_xla(evidence, stream.variables) if _ON_JAX else evidence
    with without_carried_states(stream.model):
        tensors = [_to_numpy(tensor) for tensor in compiled(*xs)]
    known: dict[int, float] = {}
    for pair, found, expected in zip(pairs, tensors[::2], tensors[1::2], strict=True):
        scale = max(_largest(expected), _largest(found)) or 1.0
        tolerance = _TOLERANCES.get(pair.dtype, 0)
        if found.shape != expected.shape or not np.allclose(
            found, expected, rtol=0, atol=tolerance * scale, equal_nan=True
        ):
            raise _refusal(stream, pair)
        finite = np.isfinite(expected)
        if pair.number is not None and np.any(finite):
            difference = float(np.max(np.abs(found - expected)[finite]) / scale)
            known[pair.number] = max(difference, known.get(pair.number, 0.0))
    return known


def _refusal(stream, pair):
    if pair.call is None:
        return ValueError(
            f"{stream.name} does not stream: its outputs differ from those of its layers, one "
            "after another. Do not change the outputs of a layer outside `call`."
        )
    return pair.call.refusal(pair.part.difference)


def _pairs(stream, xs, steps):
    """Returns the pairs of all parts in order, then those of the model's outputs."""
    plan, values, pairs = stream.plan, dict(enumerate(xs)), []
    ends = dict.fromkeys(values, steps)  # the first steps that lack a sample of a tensor
    for planned in plan.parts:
        try:
            pairs += _of_part(stream, planned, values, ends, steps)
        except DoesNotStream:
            raise
        except Exception as error:  # whatever an operation raises
            if planned.call is None:
                raise
            text = f"for {xs[0].shape[1]} steps it raised {told(error)}"
            if stream.length is None:
                text += (
                    " If it takes fewer, pass their number, as in to_stream(model, max_context=64)."
                )
            raise planned.call.refusal(text) from error
    return [*pairs, *_of_outputs(stream, values, xs, steps)]


def _of_part(stream, planned, values, ends, steps):
    """Yields the pairs of a part, and notes its outputs."""
    plan, part, call = stream.plan, planned.part, planned.call
    inputs = [values[n] for n in planned.inputs]
    signals = [plan.signals[n] for n in planned.inputs]
    rows, begin = inputs[0].shape[0], plan.first_offset
    end = min(ends[n] for n in planned.inputs)
    ends.update(dict.fromkeys(planned.outputs, end))
    state = part.initial_state(rows) if part.keeps else None
    if isinstance(part, (Delay, Table)) or part.signal.is_static:
        ys = inputs if isinstance(part, Delay) else part.run(inputs, state)[0]
        values.update(zip(planned.outputs, ys, strict=True))
        wanted = call.of_model([x[:, 0] for x in inputs]) if isinstance(part, Constant) else ys
        for n, y, expected in zip(planned.outputs, ys, wanted, strict=True):
            if call is not None:
                yield _Pair(call, part, n, plan.signals[n].dtype, y, expected)
        return

    def until(step):
        pairs = zip(inputs, signals, strict=True)
        return [x[:, : signal.count(begin, step)] for x, signal in pairs]

    found, _ = _fast(part, run_part, part, until(end), state, begin, end)
    values.update(zip(planned.outputs, found, strict=True))
    if call is None:  # whole windows
        return
    if not part.signal.has_time:  # each sample is a call of the operation
        for n, y in zip(planned.outputs, found, strict=True):
            yield _Pair(call, part, n, plan.signals[n].dtype, y, y)
    elif stream.options.window:
        yield from _of_windows(stream, planned, inputs, found, steps)
    else:
        wholes = _fast(part, call, inputs)
        for n, y, wanted in zip(planned.outputs, found, wholes, strict=True):
            signal = plan.signals[n]
            if signal.has_time:
                values[n] = wanted
                samples = wanted.shape[1] // signal.block
                ends[n] = min(end, signal.offset + signal.pause * samples)
                count = min(y.shape[1], wanted.shape[1])  # a stream has no end to crop
                y, wanted = y[:, :count], wanted[:, :count]
            else:
                y, wanted = _at_ends(call, inputs, part, n, y)
            yield _Pair(call, part, n, signal.dtype, y, wanted)
    if isinstance(part, Pointwise) and part.signal.has_time:
        length = part.signal.length if stream.options.window else None
        yield from _each_step_alone(stream, planned, [x[:, :length] for x in inputs], signals)
    yield from _one_step(planned, until, found, state, begin, end)


def _fast(part, function, *arguments):
    """Calls a function, on TensorFlow as a graph if the part has loops."""
    if keras.backend.backend() == "tensorflow" and isinstance(part, (Recurrent, Protocol)):
        # TensorFlow warns of functions that are traced often; it tells partials apart.
        return compile_xla(functools.partial(function, *arguments), [], any_shape=True)()
    return function(*arguments)


def _of_windows(stream, planned, inputs, found, steps):
    """Yields the pairs of a part, and of its operation on windows alone."""
    signals, cycle = stream.plan.signals, stream.plan.cycle
    last = (steps - stream.options.window) // cycle
    for start in sorted({0, last // 2 * cycle, last * cycle}):
        xs = []
        for n, x in zip(planned.inputs, inputs, strict=True):
            first = int(start / signals[n].period)
            xs.append(x[:, first : first + signals[n].length])
        for n, y, wanted in zip(planned.outputs, found, planned.call(xs), strict=True):
            first, signal = int(start / signals[n].period), signals[n]
            y = y[:, first : first + signal.length] if signal.has_time else y[:, first]
            yield _Pair(planned.call, planned.part, n, signal.dtype, y, wanted)


def _at_ends(call, inputs, part, n, found):
    """Returns three samples of an output without a time axis, of the stream and of the call."""
    count, index = found.shape[1], call.outputs.index(n)
    if count == 0:
        return found, found
    if count < part.fewest:
        return found, found
    ends = sorted({part.fewest - 1, max(part.fewest - 1, count // 2), count - 1})
    block = part.signal.block
    shorter = [[x[:, : block * (end + 1)] for x in inputs] for end in ends]
    wanted = [_fast(part, call, xs)[index] for xs in shorter]
    return ops.take(found, ends, axis=1), ops.stack(wanted, axis=1)


def _one_step(planned, until, found, state, begin, end):
    """Yields the pairs of the last step with outputs, as `advance` and `run` compute them."""
    part = planned.part
    last = part.outputs[0].before(end) - 1
    if last < 0:
        return
    step = part.outputs[0].offset + last * part.outputs[0].pause
    before, upto = until(step), until(step + 1)
    _, state = _fast(part, run_part, part, before, state, begin, step)
    xs = [
        b[:, a.shape[1] :] if a.shape[1] < b.shape[1] else ops.zeros_like(_block(part, b))
        for a, b in zip(before, upto, strict=True)
    ]
    ys, _ = part.advance(xs, state, lambda signal: signal.is_due(step))
    for n, output, y, of_run in zip(planned.outputs, part.outputs, ys, found, strict=True):
        expected = of_run[:, output.count(begin, step) : output.count(begin, step + 1)]
        yield _Pair(planned.call, part, n, output.dtype, y[:, : output.block], expected)


def _block(part, x):
    """Returns as many samples as come with a step."""
    return x[:, : part.signal.block]


def _each_step_alone(stream, planned, inputs, signals):
    """Yields the pairs of an operation that gets all steps together, and each of them alone."""
    call, part, rng = planned.call, planned.part, np.random.default_rng(1)
    steps = next(x.shape[1] for x, s in zip(inputs, signals, strict=True) if not s.is_static)

    def repeated(xs):
        """Repeats the inputs without a time axis for each step."""
        pairs = zip(xs, signals, strict=True)
        return [ops.repeat(x[:, :1], steps, axis=1) if s.is_static else x for x, s in pairs]

    inputs = repeated(inputs)
    changes = [lambda x: x]
    if not isinstance(call.operation, keras.layers.Embedding):
        noise = [rng.normal(size=x.shape) for x in inputs]
        changes += [np.asarray, np.abs]
    if not call.is_of_keras:
        missing = rng.random(size=(1, steps)) < 0.1
        missing[:, 0] = False  # the only step of inputs without a time axis
        changes.append(lambda x: np.where(missing.reshape(1, -1, *[1] * (x.ndim - 2)), np.nan, x))
    for change in changes:
        xs = inputs
        if change is not changes[0]:
            pairs = zip(inputs, noise, strict=True)
            is_float = keras.backend.is_float_dtype
            xs = [ops.cast(change(z), x.dtype) if is_float(x.dtype) else x for x, z in pairs]
            xs = repeated(xs)
        together = call(xs)
        try:
            alone = _alone(stream, call, xs)
        except Exception as error:  # whatever an operation raises that needs more than one step
            text = f"{part.difference} It raised {type(error).__name__} for a single step."
            raise call.refusal(text) from error
        for y, wanted in zip(alone, together, strict=True):
            dtype = keras.backend.standardize_dtype(wanted.dtype)
            yield _Pair(call, part, None, dtype, y, wanted)
        # Beside the other steps, a value of the whole batch would be the same as in the sequence.
        for t in () if call.is_of_keras else range(0, steps, -(-steps // _SINGLE_STEPS)):
            for y, wanted in zip(call([x[:, t : t + 1] for x in xs]), together, strict=True):
                dtype = keras.backend.standardize_dtype(wanted.dtype)
                yield _Pair(call, part, None, dtype, y, wanted[:, t : t + 1])


def _alone(stream, call, xs):
    """Returns the outputs of an operation that gets each step as a sequence of one step."""
    rows, steps = xs[0].shape[:2]
    if stream.has_fixed_rows:
        each = [call([x[:, t : t + 1] for x in xs]) for t in range(steps)]
        return [ops.concatenate(ys, axis=1) for ys in zip(*each, strict=True)]
    folded = [ops.reshape(x, (rows * steps, 1, *x.shape[2:])) for x in xs]
    ys = call(folded)
    return [ops.reshape(y, (rows, steps, *y.shape[2:])) for y in ys]


def _of_outputs(stream, values, xs, steps):
    """Yields the pairs of the model's outputs, of the stream and of the model."""
    pack, plan, window = keras.tree.pack_sequence_as, stream.plan, stream.options.window
    if stream.length is None and not plan.rows:  # fewer steps, with the same padding
        spare = xs[0].shape[1] - plan.last_offset - 2 * plan.cycle - _FEW_STEPS
        length = xs[0].shape[1] - max(spare // plan.cycle, 0) * plan.cycle
        xs, steps = [x[:, :length] for x in xs], min(steps, length)
    signals = zip(xs, plan.inputs, strict=True)
    some = [x[:, 0] if signal.is_static else x[:, :steps] for x, signal in signals]
    ys, _ = stream.prefill(pack(stream.inputs, some))
    whole = None if window else stream.whole(xs)
    numbers = keras.tree.flatten(stream.graph.outputs)
    for i, (n, y) in enumerate(zip(numbers, keras.tree.flatten(ys), strict=True)):
        signal = plan.signals[n]
        due = [t for t in range(steps) if signal.is_due(t)]
        if window:
            for t in sorted({due[0], due[-1]}):
                x = [x[:, t + 1 - window : t + 1] for x in xs]
                wanted = stream.whole(x)[i]
                yield _Pair(None, None, None, signal.dtype, y[:, t], wanted)
            continue
        y = ops.take(y, due, axis=1)
        if signal.block > 1:
            y = ops.reshape(y, (-1, len(due) * signal.block, *signal.shape))
        first = signal.before(0) * signal.block
        expected = (whole[i] if signal.has_time else values[n])[:, first:]
        count = min(y.shape[1], expected.shape[1])
        yield _Pair(None, None, None, signal.dtype, y[:, :count], expected[:, :count])


def _to_numpy(tensor):
    return np.asarray(ops.convert_to_numpy(tensor)).astype("float64")


def _largest(array):
    """Returns the largest absolute value of the finite ones."""
    return np.max(np.abs(array[np.isfinite(array)]), initial=0)
