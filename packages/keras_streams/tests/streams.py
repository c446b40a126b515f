"""What several tests of `to_stream` share."""

import keras
import numpy as np
from keras import ops

from keras_streams import to_stream
from keras_streams.xla import compile_xla

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
if keras.backend.backend() == "jax":  # whose tanh and mean leave float64
    TOLERANCE["float64"] = 1e-6


def assert_equal(found, expected):
    scale = max(1.0, np.max(np.abs(expected), initial=0, where=np.isfinite(expected)))
    tolerance = TOLERANCE[keras.config.floatx()] * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def outputs_of(stream, xs):
    """Returns the outputs of all steps, a list of arrays (batch, steps, ...).

    They are those of a block. The first steps, until all outputs have begun, and the last ones,
    over a cycle of the stream, are asserted to be the same one by one; on JAX, which compiles a
    step and a block, all steps. The model's inputs have the time axis of the stream.
    """
    signals = stream.plan.inputs
    steps = next(x.shape[1] for x, s in zip(xs, signals, strict=True) if s.has_time)

    def inputs(part):
        pairs = zip(xs, signals, strict=True)
        parts = [ops.convert_to_tensor(x if s.is_static else x[:, part]) for x, s in pairs]
        return keras.tree.pack_sequence_as(stream.inputs, parts)

    def arrays(y):
        return [ops.convert_to_numpy(y) for y in keras.tree.flatten(y)]

    step, first = stream.step, min(stream.plan.last_offset + 2, steps)
    if keras.backend.backend() == "jax":
        step, first = compile_xla(step, stream.variables), steps
    later = max(steps - stream.plan.cycle - 1, first)
    found = arrays(stream.prefill(inputs(slice(None)))[0])
    cache = stream.initial_cache(len(xs[0]))
    for t in (*range(first), *range(later, steps)):
        if t == later > first:
            _, cache = stream.prefill(inputs(slice(t)))
        y, cache = step(inputs(t), cache)
        for all_steps, one in zip(found, arrays(y), strict=True):
            assert_equal(one, all_steps[:, t])
    return found


def assert_streams(stream, found, expected):
    """Asserts that stream(x)[delay + rate * n] = model(x)[n], with nothing in between."""
    numbers = keras.tree.flatten(stream.plan.outputs)
    for n, y, wanted in zip(numbers, found, expected, strict=False):
        signal = stream.plan.signals[n]
        due = [t for t in range(y.shape[1]) if signal.is_due(t)]
        assert due or signal.offset >= y.shape[1]
        assert np.all(np.isnan(y[:, [t for t in range(y.shape[1]) if t not in due]]))
        y = y[:, due].reshape(len(y), -1, *signal.shape)
        wanted = np.moveaxis(ops.convert_to_numpy(wanted), signal.axis, 1)
        wanted = wanted[:, signal.before(0) * signal.block :]
        count = min(y.shape[1], wanted.shape[1])
        assert_equal(y[:, :count], wanted[:, :count])


def check_equal(model, xs, **options):
    """Asserts that a stream, which it returns, equals its model in blocks and step by step."""
    stream = to_stream(model, **options)
    moved = zip(xs, stream.plan.inputs, strict=True)
    moved = [x if s.is_static else np.moveaxis(x, s.axis, 1) for x, s in moved]
    expected = model(keras.tree.pack_sequence_as(stream.inputs, xs))
    assert_streams(stream, outputs_of(stream, moved), keras.tree.flatten(expected))
    return stream
