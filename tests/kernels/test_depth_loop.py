"""The part of x, computed once for all levels. `tests/layers/test_trellisnet.py` compares nets."""

import numpy as np
import pytest
from keras import ops

from trellis_keras.kernels import cone, depth_loop


@pytest.mark.both_backends
def test_x_enters_once_for_all_levels_of_a_dilation():
    plan = cone.Cone(20, [cone.offsets(2, d) for d in (1, 2, 1, 2)], output_length=2)
    calls = []

    def inject(positions, d):
        calls.append((positions.tolist(), d))
        return ops.ones((1, len(positions), 1))

    def dilation(i):
        return (1, 2)[(i - 1) % 2]

    injection = depth_loop.SharedInjection(plan, inject, ops.zeros((1,)), dilation, lambda i: True)
    for i in range(1, 5):
        assert injection(i).shape == (1, len(plan.positions[i]), 1)
    assert calls == [(plan.positions[1].tolist(), 1), (plan.positions[2].tolist(), 2)]


@pytest.mark.both_backends
def test_scattered_positions_are_computed_by_themselves():
    plan = cone.Cone(30, [cone.offsets(2, d) for d in (1, 1, 8)], output_length=1)
    assert plan.positions[2].tolist() == [21, 29]
    calls = []

    def inject(positions, d):
        calls.append(positions.tolist())
        return ops.convert_to_tensor(np.asarray(positions, "float32")[None, :, None])

    injection = depth_loop.SharedInjection(
        plan, inject, ops.zeros((1,)), lambda i: 1, lambda i: True
    )
    np.testing.assert_array_equal(np.asarray(injection(2)).ravel(), [21, 29])
    assert calls == [[21, 29]]
