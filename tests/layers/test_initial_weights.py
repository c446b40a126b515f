"""Recurrent cells initialize every gate by itself, however many there are."""

import json

import keras
import numpy as np
import pytest

from trellis_keras.layers import GridLSTMCell, LRUCell, RHNCell
from trellis_keras.layers.recurrent_cell import ChronoBias, GateInitializer

UNITS = 64
GLOROT = np.sqrt(2 / (2 * UNITS + UNITS))  # standard deviation of a gate [W; U], (2H, H)


def gates(kernel):
    return np.split(np.asarray(kernel), kernel.shape[1] // UNITS, axis=1)


def kernels(layer):
    return [w for w in layer.weights if "kernel" in w.name]


CELLS = {
    "lru": lambda **options: LRUCell(UNITS, **options),
    "two cells per node": lambda **options: LRUCell(UNITS, "ps", cells_per_node=2, **options),
    "rhn": lambda **options: RHNCell(UNITS, 1, **options),
    "grid_lstm": lambda **options: GridLSTMCell(UNITS, depth=2, **options),
}


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_glorot_counts_one_gate(make):
    cell = make(seed=0)
    cell.build((None, UNITS))
    assert len(kernels(cell)) >= 2
    parts = [gate for kernel in kernels(cell) for gate in gates(kernel)]
    for gate in parts:
        assert abs(np.std(gate) / GLOROT - 1) < 0.05
    assert len({gate.tobytes() for gate in parts}) == len(parts)


def test_inner_layers_of_an_rhn_have_no_input():
    cell = RHNCell(UNITS, 3, seed=0)
    cell.build((None, 2 * UNITS))
    spreads = [np.std(w) * np.sqrt(UNITS) for w in kernels(cell)]
    # Rows that feed a gate: 3H in the first layer, of which 2H are the input's; then H.
    np.testing.assert_allclose(spreads, np.sqrt([2 / 4, 2 / 4, 1, 1]), rtol=0.05)


def test_other_initializers_see_one_gate():
    orthogonal = GateInitializer("orthogonal", gates=3, fan_in=2 * UNITS)((UNITS, 3 * UNITS))
    for gate in gates(orthogonal):
        np.testing.assert_allclose(gate.T @ gate, np.eye(UNITS), atol=1e-5)


def test_seeds_and_config():
    initializer = GateInitializer(keras.initializers.GlorotUniform(5), gates=2, fan_in=8)
    same = keras.initializers.deserialize(keras.initializers.serialize(initializer))
    np.testing.assert_array_equal(initializer((4, 8)), same((4, 8)))
    with pytest.raises(ValueError, match="`gates` must be a positive integer. Received: gates=0"):
        GateInitializer("glorot_uniform", gates=0)


def test_delays_are_integers():
    assert json.loads(json.dumps(ChronoBias(np.int64(784)).get_config()))["longest"] == 784
    for bad in ("784", 2):
        with pytest.raises(ValueError, match="longest"):
            ChronoBias(bad)
