"""What several tests of `to_stream` share."""

import keras
import numpy as np
from keras import ops

from keras_streams import to_stream


def check_equal(model, xs, **options):
    """Asserts that a model's stream equals it, in blocks and step by step, and returns the stream.

    Args:
        model: The model.
        xs: List of its inputs.
        options: Those of `to_stream`.
    """
    stream = to_stream(model, **options)
    pack = keras.tree.pack_sequence_as
    signals = zip(xs, stream.plan.inputs, strict=True)
    moved = [x if s.is_static else np.moveaxis(x, s.axis, 1) for x, s in signals]
    whole, _ = stream.prefill(pack(stream.inputs, moved))
    cache, steps = stream.initial_cache(len(xs[0])), []
    signals = stream.plan.inputs
    for t in range(next(x.shape[1] for x, s in zip(moved, signals, strict=True) if s.has_time)):
        x = [x if s.is_static else x[:, t] for x, s in zip(moved, signals, strict=True)]
        y, cache = stream.step(pack(stream.inputs, x), cache)
        steps.append([ops.convert_to_numpy(y) for y in keras.tree.flatten(y)])
    numbers = keras.tree.flatten(stream.graph.outputs)
    expected = keras.tree.flatten(model(pack(stream.inputs, xs)))
    found = zip(numbers, keras.tree.flatten(whole), zip(*steps, strict=True), expected, strict=True)
    for n, y, each, wanted in found:
        y, signal = ops.convert_to_numpy(y), stream.plan.signals[n]
        np.testing.assert_allclose(y, np.stack(each, axis=1), rtol=1e-4, atol=1e-5)
        wanted = np.moveaxis(ops.convert_to_numpy(wanted), signal.axis, 1)
        due = [t for t in range(y.shape[1]) if signal.is_due(t)]
        assert due and np.all(np.isnan(y[:, [t for t in range(y.shape[1]) if t not in due]]))
        y = y[:, due].reshape(len(y), -1, *signal.shape)
        first = signal.before(0) * signal.block
        count = min(y.shape[1], wanted.shape[1] - first)
        np.testing.assert_allclose(
            y[:, :count], wanted[:, first : first + count], rtol=1e-4, atol=1e-5
        )
    return stream
