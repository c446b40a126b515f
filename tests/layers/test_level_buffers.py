"""The states that streaming keeps, against lists of all states so far."""

import numpy as np
import pytest

from trellis_keras.layers.trellisnet import LevelBuffers

pytestmark = pytest.mark.both_backends

BATCH, UNITS, REACH = 2, 3, 2


@pytest.mark.parametrize("dilations", [[1, 1, 1], [2, 1, 2, 4], [3, 1]])
def test_reads_what_was_appended(dilations):
    layout = LevelBuffers(dilations)
    shapes = layout.shapes(BATCH, REACH, UNITS)
    assert shapes == [[BATCH, dilations.count(d), REACH * d, UNITS] for d in sorted(set(dilations))]
    buffers = [np.zeros(shape, "float32") for shape in shapes]
    depth = len(dilations)
    states = np.random.default_rng(0).normal(size=(9, BATCH, depth, UNITS)).astype("float32")
    for newest in states:
        buffers = layout.append(buffers, newest)
    assert [list(buffer.shape) for buffer in buffers] == shapes
    for n in range(1, REACH + 1):
        expected = [states[len(states) - n * d, :, i] for i, d in enumerate(dilations)]
        np.testing.assert_array_equal(layout.earlier(buffers, n), np.stack(expected, axis=1))

    stacked = np.asarray(layout.stack(buffers))
    assert stacked.shape == (depth, BATCH, REACH * max(dilations), UNITS)
    for i, d in enumerate(dilations):
        kept = REACH * d
        np.testing.assert_array_equal(
            stacked[i, :, -kept:], np.moveaxis(states[-kept:, :, i], 0, 1)
        )
    for buffer, again in zip(buffers, layout.unstack(stacked, buffers), strict=True):
        np.testing.assert_array_equal(buffer, again)
