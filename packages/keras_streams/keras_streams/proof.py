"""The proof that a stream equals its model."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.graph import DoesNotStream
from keras_streams.parts import (
    OTHER_ROWS,
    Delay,
    Pointwise,
    Protocol,
    Recurrent,
    RecurrentRows,
    Table,
)
from keras_streams.protocol import check_shape, flatten_inputs, without_carried_states
from keras_streams.trace import error_summary
from keras_streams.types import Tensor
from keras_streams.xla import compile_xla

# Largest difference of a stream from its model, relative to the largest value.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 0.05, "bfloat16": 0.1}
# Values below this share of an operation's inputs are what remains where these cancel: a mean of
# numbers less their mean is rounding error.
_CANCELED = 1e-3
# In place of a tensor's number: the inputs were other random numbers, of about 1.
_NOISE = -1
# Fewest steps of a proof, if the model takes any number, and the largest reach that it covers.
_STEPS = 256
_LONGEST_REACH = 1024
# Number of steps that a layer of unknown operations gets one by one, as a stream does.
_SINGLE_STEPS = 16
# Number of steps of all parts together, besides delays, and of numbers that are not the inputs':
# each part is compared over more.
_FEW_STEPS = 32
# Number of steps of a loop from which on building a graph of it is faster than its steps.
_EAGER_STEPS = 64
# Number of lengths that are tried to find one with the padding of a stream.
_LENGTHS = 256


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a stream was compared with when it was made."""

    steps: int
    difference: float  # the largest of a tensor of the model, relative to its largest value


def prove(stream: Any, example: Any = None) -> Proof:
    """Compares a stream with its model.

    Each part of the stream is compared with the layer's outputs for a whole sequence: over all
    steps at once, and at a single step. An operation that treats each step separately, or should,
    gets all steps of a sequence as a batch of sequences of one step. It also gets a few steps of
    other random numbers and conditions, of positive ones, of other integers, and, if it has weights
    or is not one of Keras', of missing ones. An operation that is not one of Keras' could read any
    earlier step: it also gets single steps and longer sequences.

    Raises:
        ValueError: They differ, or there is no finite number to compare. The message names the
            first operation.
    """
    steps, length = _lengths(stream)
    known: dict[int, float] = {}
    given = [] if example is None else [example]
    randoms = random_examples(stream, length, np.random.default_rng(0))
    for xs in itertools.chain(given, randoms):
        known = _compare(stream, inputs_of(stream, xs, length), steps) | known
        missing = [p for p in stream.plan.parts if p.call and not known.keys() >= {*p.call.outputs}]
        if not missing:
            return Proof(steps, max(known.values(), default=0.0))
    raise missing[0].call.refusal(
        "none of its outputs is a finite number, so there is nothing to compare. Pass data: "
        "to_stream(model, example=x)."
    )


def _lengths(stream):
    """Returns the number of steps to compare, and the length of the sequence."""
    plan, length = stream.plan, None if stream.options.window else stream.length
    wanted = plan.last_offset - plan.first_offset + 3 * plan.cycle
    # A layer of unknown operations could read any earlier step of a sequence.
    sequences = (p for p in plan.parts if isinstance(p, Pointwise) and p.signal.has_time)
    is_known = all(part.call.is_of_keras for part in sequences)
    wanted += min(plan.reach, _LONGEST_REACH) if is_known else _LONGEST_REACH
    wanted = max(wanted, _STEPS)
    wanted = min(wanted, plan.longest or wanted)
    length = length or plan.rows or _length_for_proof(stream, wanted)
    steps = min(wanted, length)
    if steps <= plan.last_offset:
        raise ValueError(
            f"{stream.name} was built for {length} steps, but the stream's first output comes at "
            f"step {plan.last_offset + 1}. Build it for longer sequences, or for any length: "
            "keras.Input((None, channels))."
        )
    return steps, length


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
    calls = [p.call for p in stream.plan.parts for n in p.writes if n in differ]
    raise (calls[0] if calls else other.uneven).refusal(
        "its padding depends on the length of the sequence, which is unknown. Build the model "
        'with keras.Input((length, channels)), or use padding="causal" or "valid".'
    )


# The inputs


def random_examples(stream: Any, length: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yields random sequences for the inputs, of two rows if any number will do."""
    operations = [call.operation for call in stream.graph.calls]
    embeddings = [layer for layer in operations if isinstance(layer, keras.layers.Embedding)]
    encodings = [o for o in operations if isinstance(o, keras.layers.CategoryEncoding)]
    sizes = [layer.input_dim for layer in embeddings] + [layer.num_tokens for layer in encodings]
    tokens = min(sizes, default=2)
    first = int(any(layer.mask_zero for layer in embeddings))  # no masked steps
    for change in (np.asarray, np.abs):
        xs = []
        for n, tensor in enumerate(keras.tree.flatten(stream.inputs)):
            if tensor.dtype == "string":
                raise ValueError(
                    f"{stream.name} takes strings ({tensor.name}), which cannot be drawn at "
                    "random. Pass data: to_stream(model, example=x)."
                )
            axis = stream.time_axes[n]
            shape = [length if i == axis else size for i, size in enumerate(tensor.shape)]
            shape[0] = shape[0] or 2
            is_tokens = stream.graph.takes_tokens(n)
            x = rng.integers(first, tokens, shape) if is_tokens else rng.normal(size=shape)
            is_condition = tensor.dtype == "bool" and not stream.options.ignore_masks
            xs.append(x > 0 if is_condition else change(x))
        yield keras.tree.pack_sequence_as(stream.inputs, xs)


def inputs_of(stream: Any, example: Any, length: int) -> list[Tensor]:
    """Returns an example as inputs with time on axis 1, cut or repeated to a length."""
    xs, tensors = flatten_inputs(example, stream.inputs), keras.tree.flatten(stream.inputs)
    inputs = []
    for x, tensor, signal in zip(xs, tensors, stream.plan.inputs, strict=True):
        axis = None if signal.is_static else signal.axis
        shape = [None if i == axis else size for i, size in enumerate(tensor.shape)]
        x = np.asarray(ops.convert_to_numpy(x))
        check_shape("example", x, [None, *shape[1:]])
        if not x.size:
            raise ValueError(f"`example` must not be empty. Received: shape {x.shape}")
        x = x[:, None] if axis is None else np.moveaxis(x, axis, 1)
        x = np.take(x, np.arange(length) % x.shape[1], axis=1)
        rows = np.arange(tensor.shape[0] or len(x)) % len(x)
        inputs.append(ops.cast(x[rows], tensor.dtype))
    return inputs


# The comparison


def _compare(stream, xs, steps):
    """Returns the largest difference of each tensor that has a finite number."""
    pairs: list[tuple] = []

    def evidence(*xs):
        pairs[:] = _pairs(stream, list(xs), steps)
        return [tensor for _, _, *tensors in pairs for tensor in tensors]

    # On TensorFlow eager execution is faster, on JAX it compiles every operation.
    on_jax = keras.backend.backend() == "jax"
    compiled = compile_xla(evidence, stream.variables) if on_jax else evidence
    with without_carried_states(stream.model):
        arrays = [np.asarray(ops.convert_to_numpy(tensor)) for tensor in compiled(*xs)]
    known: dict[int, float] = {}
    sizes: dict[int | None, float] = {}  # largest values of tensors
    for n, x in enumerate(xs):
        if keras.backend.is_float_dtype(x.dtype) and not stream.graph.takes_tokens(n):
            sizes[n] = _largest(np.asarray(ops.convert_to_numpy(x)))
    for (error, n, *_), y, wanted in zip(pairs, arrays[::2], arrays[1::2], strict=True):
        tolerance = _TOLERANCES.get(wanted.dtype.name, 0)
        reads = error.call.inputs if isinstance(error, DoesNotStream) else list(sizes)
        size = 1.0 if n == _NOISE else max((sizes.get(m, 0.0) for m in reads), default=0.0)
        scale = max(_largest(y), _largest(wanted), sizes.get(n, 0.0), _CANCELED * size) or 1.0
        y, wanted = y.astype("float64"), wanted.astype("float64")
        if y.shape != wanted.shape or not np.allclose(
            y, wanted, rtol=0, atol=tolerance * scale, equal_nan=True
        ):
            raise error
        finite = np.isfinite(wanted)
        if n not in (None, _NOISE) and np.any(finite):
            sizes[n] = scale
            difference = float(np.max(np.abs(y - wanted)[finite]) / scale)
            known[n] = max(difference, known.get(n, 0.0))
    return known


def _largest(x):
    """Returns the largest finite absolute value."""
    x = x.astype("float64")
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))


def _pairs(stream, xs, steps):
    """Yields the pairs of tensors that must be equal: those of each part, then the outputs.

    Each is a tuple of the error if they differ, the number of the tensor or `None`, the tensor of
    the stream, and that of the model.
    """
    values = dict(enumerate(xs))
    ends = dict.fromkeys(values, steps)  # the first steps that lack a sample of a tensor
    for part in stream.plan.parts:
        try:
            yield from _of_part(stream, part, values, ends, steps)
        except DoesNotStream:
            raise
        except Exception as error:  # whatever an operation raises
            if part.call is None:
                raise
            text = f"for {xs[0].shape[1]} steps it raised {error_summary(error)}"
            if isinstance(part.call.operation, keras.Model):
                text = part.difference
            elif (
                stream.length is None
                and part.signal.has_time
                and _takes_few_steps(part.call, values)
            ):
                text += " Pass how many steps it takes, as in to_stream(model, max_context=64)."
            raise part.call.refusal(text) from error
    yield from _of_outputs(stream, values, xs, steps)


def _takes_few_steps(call, values):
    try:
        call([values[n][:, :_FEW_STEPS] for n in call.inputs])
    except Exception:  # whatever an operation raises
        return False
    return True


def _of_part(stream, part, values, ends, steps):
    """Yields the pairs of a part, and notes its outputs."""
    plan, call, window = stream.plan, part.call, stream.options.window
    inputs, signals = [values[n] for n in part.reads], [plan.signals[n] for n in part.reads]
    begin, end = plan.first_offset, min(ends[n] for n in part.reads)
    if isinstance(part, Delay):
        end = min(end + part.outputs[0].offset - part.signal.offset, steps)
    ends.update(dict.fromkeys(part.writes, end))
    state = part.initial_state(inputs[0].shape[0]) if part.keeps else None

    def until(step):
        pairs = zip(inputs, signals, strict=True)
        return [x[:, : signal.count(begin, step)] for x, signal in pairs]

    is_pointwise = isinstance(part, Pointwise) and part.signal.has_time
    if isinstance(part, Delay):
        found = inputs
    elif is_pointwise and not window:
        found = call(inputs)
    elif isinstance(part, Table) or part.signal.is_static:
        found, _ = part.run(inputs, state)
    else:
        found, _ = _fast(part, part.run_any, until(end), state, begin, end)
    values.update(zip(part.writes, found, strict=True))
    if call is None:  # delays, tables, whole windows
        return
    if any(y.shape[0] != inputs[0].shape[0] for y in found):
        raise call.refusal(OTHER_ROWS)
    error, given = call.refusal(part.difference), [values[n] for n in call.inputs]
    numbered = list(zip(part.writes, found, part.outputs, strict=True))
    if part.writes != call.outputs:  # the next part takes them
        pass
    elif part.signal.is_static and part.outputs[0].has_time:
        (wanted,) = call.of_model([x[:, 0] for x in inputs])
        yield error, part.writes[0], found[0], wanted
    elif not part.signal.has_time:  # each sample is a call of the operation
        yield from ((error, n, y, y) for n, y, _ in numbered)
    elif window:
        last = (steps - window) // plan.cycle
        for start in sorted({0, last // 2 * plan.cycle, last * plan.cycle}):
            xs = [_in_window(values[n], plan.signals[n], start) for n in call.inputs]
            for (n, y, signal), wanted in zip(numbered, call(xs), strict=True):
                yield error, n, _in_window(y, signal, start), wanted
    else:
        whole = found if is_pointwise else _fast(part, call, given)
        for (n, y, signal), wanted in zip(numbered, whole, strict=True):
            if signal.has_time:
                values[n] = wanted
                samples = wanted.shape[1] // signal.block
                ends[n] = min(end, signal.offset + signal.pause * samples)
                count = min(y.shape[1], wanted.shape[1])  # a stream has no end to crop
                yield error, n, y[:, :count], wanted[:, :count]
                continue
            last = y.shape[1] - 1
            for at in sorted({0, (last + 1) // 2, last}) if last >= 0 else ():
                stop = signal.offset + at * signal.pause + 1
                xs = [x[:, : part.signal.count(begin, stop)] for x in given]
                yield error, n, y[:, at], _fast(part, call, xs)[part.writes.index(n)]
    if part.signal.is_static:
        return
    if is_pointwise:
        xs = [x[:, : part.signal.length] if window else x for x in inputs]
        together = call(xs) if window else found
        for n, y, wanted in _each_step_alone(stream, part, xs, signals, together):
            yield error, n, y, wanted
    # The last step with outputs, as `advance` and `run` compute them.
    output = part.outputs[0]
    last = output.before(end) - 1
    if last < 0:
        return
    step = output.offset + last * output.pause
    _, state = _fast(part, part.run_any, until(step), state, begin, step)
    xs = [x[:, y.shape[1] :] for x, y in zip(until(step + 1), until(step), strict=True)]
    nothing = [ops.zeros_like(x[:, : part.signal.block]) for x in inputs]
    xs = [x if x.shape[1] else zeros for x, zeros in zip(xs, nothing, strict=True)]
    ys, _ = part.advance(xs, state, lambda signal: signal.is_due(step))
    for (n, of_run, signal), y in zip(numbered, ys, strict=True):
        wanted = of_run[:, signal.count(begin, step) : signal.count(begin, step + 1)]
        yield error, n, y[:, : signal.block], wanted


def _in_window(x, signal, start):
    """Returns the samples of the window that begins with a step, or the sample that covers it.

    An input without a time axis is the same for all windows.
    """
    if signal.is_static:
        return x
    first = int(start / signal.period)
    return x[:, first : first + signal.length] if signal.has_time else x[:, first]


def _fast(part, function, xs, *arguments):
    """Calls a function of inputs, on TensorFlow as a graph if the part has a long loop."""
    has_loop = (
        isinstance(part, (Recurrent, RecurrentRows, Protocol)) and xs[0].shape[1] > _EAGER_STEPS
    )
    if keras.backend.backend() == "tensorflow" and has_loop:
        # TensorFlow warns of functions that are traced often; it tells partials apart.
        return compile_xla(functools.partial(function, xs, *arguments), [], any_shape=True)()
    return function(xs, *arguments)


def _each_step_alone(stream, part, inputs, signals, together):
    """Yields what an operation returns for each step alone, and for all steps together.

    The first of the three is `_NOISE`, or `None` for the stream's own inputs.
    """
    call, rng = part.call, np.random.default_rng(1)
    steps = next(x.shape[1] for x, s in zip(inputs, signals, strict=True) if not s.is_static)
    noises = [rng.normal(size=(x.shape[0], steps, *x.shape[2:])) for x in inputs]
    # Not at the first step, the only one of inputs without a time axis.
    missing = np.where(np.arange(steps) % 4 == 1, np.nan, 0.0)

    def changed(change):
        count = min(steps, _FEW_STEPS) if change else steps
        for x, noise, signal in zip(inputs, noises, signals, strict=True):
            x = change(x, noise) if change else x
            x = ops.repeat(x[:, :1], count, axis=1) if signal.is_static else x
            yield x[:, :count]

    def with_missing(x, noise):
        return _with_noise(x, noise + missing.reshape(1, -1, *[1] * (noise.ndim - 2)))

    changes = [None]
    if not isinstance(call.operation, keras.layers.Embedding):
        changes += [_with_noise, lambda x, noise: _with_noise(x, np.abs(noise)), _with_integers]
        # Also with weights of Keras' own: a scale of 0 hides what a layer adds.
        if not call.is_of_keras or getattr(call.operation, "weights", None):
            changes.append(with_missing)
        if not call.is_of_keras:  # which may have thresholds
            changes.append(lambda x, noise: _with_noise(x, noise**5))
    for change in changes:
        xs = list(changed(change))
        try:
            together = call(xs) if change else together
        except Exception:  # whatever an operation raises for other divisors or indices
            if change is _with_integers:
                continue
            raise
        try:
            alone = _alone(stream, call, xs)
        except Exception as error:  # whatever an operation raises that needs more than one step
            text = f"{part.difference} It raised {type(error).__name__} for a single step."
            raise call.refusal(text) from error
        n = None if change in (None, _with_integers) else _NOISE
        yield from ((n, y, wanted) for y, wanted in zip(alone, together, strict=True))
        # Also single steps: with all steps as rows, a sum over the batch equals one over time.
        count = together[0].shape[1]
        for t in () if call.is_of_keras else range(0, count, -(-count // _SINGLE_STEPS)):
            for y, wanted in zip(call([x[:, t : t + 1] for x in xs]), together, strict=True):
                yield n, y, wanted[:, t : t + 1]


def _with_noise(x, noise):
    """Returns random numbers or conditions; integers and strings stay."""
    if keras.backend.is_float_dtype(x.dtype):
        return ops.cast(noise, x.dtype)
    is_condition = keras.backend.standardize_dtype(x.dtype) == "bool"
    return ops.convert_to_tensor(noise > 0) if is_condition else x


def _with_integers(x, noise):
    """Returns integers that differ between steps; other tensors stay."""
    if not keras.backend.is_int_dtype(x.dtype):
        return x
    is_constant = ops.all(ops.equal(x, x[:1, :1]))
    return x + ops.cast(ops.logical_and(is_constant, noise > 0), x.dtype)


def _alone(stream, call, xs):
    """Returns the outputs of an operation that gets each step as a sequence of one step."""
    rows, steps = xs[0].shape[:2]
    if any(x.shape[0] is not None for x in keras.tree.flatten(stream.inputs)):  # fixed rows
        each = [call([x[:, t : t + 1] for x in xs]) for t in range(steps)]
        return [ops.concatenate(ys, axis=1) for ys in zip(*each, strict=True)]
    ys = call([ops.reshape(x, (rows * steps, 1, *x.shape[2:])) for x in xs])
    return [ops.reshape(y, (rows, steps, *y.shape[2:])) for y in ys]


def _of_outputs(stream, values, xs, steps):
    """Yields the pairs of the model's outputs."""
    error = ValueError(
        f"{stream.name} does not stream: its outputs differ from those of its layers "
        "applied in turn: a layer changes its outputs outside of `call`, or counts all steps. "
        "Compute outputs in `call`, from the steps so far."
    )
    plan, window = stream.plan, stream.options.window
    if stream.length is None:  # fewer steps, with the same padding
        spare = min(xs[0].shape[1] - plan.last_offset - 2 * plan.cycle, xs[0].shape[1] - 1)
        spare = max(spare - _FEW_STEPS, spare // 2, 0)
        length = xs[0].shape[1] - spare // plan.cycle * plan.cycle
        xs, steps = [x[:, :length] for x in xs], min(steps, length)
    signals = zip(xs, plan.inputs, strict=True)
    some = [x[:, 0] if signal.is_static else x[:, :steps] for x, signal in signals]
    ys, _ = stream.prefill(keras.tree.pack_sequence_as(stream.inputs, some))
    whole = None if window else stream.whole(xs)
    numbers = keras.tree.flatten(stream.plan.outputs)
    for i, (n, y) in enumerate(zip(numbers, keras.tree.flatten(ys), strict=True)):
        signal = plan.signals[n]
        due = [t for t in range(steps) if signal.is_due(t)]
        if window:
            if signal.has_time:  # though no layer joins steps
                error = ValueError(
                    f"{stream.name} has an output with a time axis, of shape (batch, time, "
                    f"{', '.join(map(str, signal.shape))}), and needs no `window`: pass "
                    "window=None."
                )
            for t in sorted({due[0], due[-1]}):
                wanted = stream.whole([x[:, t + 1 - window : t + 1] for x in xs])[i]
                yield error, n, y[:, t], wanted
            continue
        y = ops.take(y, due, axis=1)
        if signal.block > 1:
            y = ops.reshape(y, (-1, len(due) * signal.block, *signal.shape))
        wanted = (whole[i] if signal.has_time else values[n])[:, signal.before(0) * signal.block :]
        count = min(y.shape[1], wanted.shape[1])
        yield error, n, y[:, :count], wanted[:, :count]
        if signal.has_time or signal.is_static:
            continue
        error = ValueError(
            f"{stream.name} does not stream: its output without a time axis differs from that for "
            "a sequence that ends with the current step. Do not crop the end of a sequence."
        )
        for t in _whole_lengths(stream, due):
            wanted = stream.whole([x[:, : t + 1] for x in xs])[i]
            yield error, n, y[:, due.index(t)], wanted


def _whole_lengths(stream, due):
    """Returns last steps of shorter sequences, whose outputs the stream must have at these steps.

    If a layer looks ahead, the model pads the end of each sequence, so there is no such step.
    """
    plan = stream.plan
    if any(signal.lag > 0 for signal in plan.signals.values()):
        return []
    if stream.length is not None:
        return [t for t in due if t == stream.length - 1]
    ends = [t for t in due if t > plan.last_offset and (t + 1) % plan.cycle == 0]
    return sorted({ends[len(ends) // 2], ends[-1]}) if ends else []
