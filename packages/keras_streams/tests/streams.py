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

    Args:
        stream: The stream.
        xs: List of the model's inputs, with the time axis of the stream.
    """
    # On TensorFlow a graph: for so few steps XLA takes longer to compile.
    step = compile_xla(stream.step, stream.variables, any_shape=True)
    cache, found, signals = stream.initial_cache(len(xs[0])), [], stream.plan.inputs
    for t in range(next(x.shape[1] for x, s in zip(xs, signals, strict=True) if s.has_time)):
        pairs = zip(xs, signals, strict=True)
        x = [ops.convert_to_tensor(x if s.is_static else x[:, t]) for x, s in pairs]
        y, cache = step(keras.tree.pack_sequence_as(stream.inputs, x), cache)
        found.append([ops.convert_to_numpy(y) for y in keras.tree.flatten(y)])
    return [np.stack(ys, axis=1) for ys in zip(*found, strict=True)]


def assert_streams(stream, found, expected):
    """Asserts that stream(x)[delay + rate * n] = model(x)[n], with nothing in between.

    Args:
        stream: The stream.
        found: The outputs of all steps, as of `outputs_of`.
        expected: Those of the model, which have a time axis.
    """
    numbers = keras.tree.flatten(stream.graph.outputs)
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
    """Asserts that a model's stream equals it, in blocks and step by step, and returns the stream.

    Args:
        model: The model.
        xs: List of its inputs.
        options: Those of `to_stream`.
    """
    stream = to_stream(model, **options)
    pack, signals = keras.tree.pack_sequence_as, stream.plan.inputs
    moved = zip(xs, signals, strict=True)
    moved = [x if s.is_static else np.moveaxis(x, s.axis, 1) for x, s in moved]
    found = outputs_of(stream, moved)
    whole, _ = stream.prefill(pack(stream.inputs, moved))
    for y, of_block in zip(found, keras.tree.flatten(whole), strict=True):
        assert_equal(ops.convert_to_numpy(of_block), y)
    assert_streams(stream, found, keras.tree.flatten(model(pack(stream.inputs, xs))))
    return stream
