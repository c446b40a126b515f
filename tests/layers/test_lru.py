"""LRUCell and LRU: the authors' results, the paper's equations, the shared check, states, masks."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    check_cell,
    check_gradients,
    check_sequence,
    family,
    gradients_of_run,
    matched_variables,
)
from tests.support.layer_checks import (
    assert_all_close,
    assert_close,
    check_backwards,
    check_kernels,
    check_layer,
    check_streaming,
    made,
    noise,
    randomize,
    sigmoid,
)
from tests.support.parameters import SLOW_ON_JAX
from trellis_keras.layers import LRU, LRUCell
from trellis_keras.torch_weights import load_torch_state_dict

both = pytest.mark.both_backends
exact = pytest.mark.float64

# The authors' results

CELLS = {
    "lru": {},
    "lru_nobias": {"use_gate_bias": False},
    "lrux3": {"cells_per_node": 3},
    "pslru": {"variant": "ps"},
    "rglru": {"variant": "rg"},
}
SEQUENCES = {
    "lru_l1": {},
    "lru_l2": {"cells_per_node": 2},
    "pslru_l1": {"variant": "ps"},
    "rglru_l1": {"variant": "rg"},
}


@both
@exact
@pytest.mark.parametrize("case", CELLS)
def test_cell_of_the_authors(case, golden, assert_close):
    arrays = golden(f"lru_cell_{case}")
    size = arrays["meta"]["config"]["H"]
    cell = LRUCell(size, convention="authors", **CELLS[case])
    cell.build((None, size))
    load_torch_state_dict(cell, family(arrays, "param"))
    by_weight = check_cell(cell, matched_variables(cell), arrays, assert_close)
    check_gradients(cell, by_weight, gradients_of_run(arrays), assert_close)


@both
@exact
@pytest.mark.parametrize(
    "memory", [pytest.param("", marks=SLOW_ON_JAX), "_mem"], ids=["zeros", "memory"]
)
@pytest.mark.parametrize("case", SEQUENCES)
def test_sequence_of_the_authors(case, memory, golden, assert_close):
    arrays = golden(f"lru_seq_{case}")
    config = arrays["meta"]["config"]
    options = SEQUENCES[case] | {"return_sequences": True, "return_state": True}
    layer = LRU(config["H"], config["num_layers"], convention="authors", **options)
    layer.build((None, None, config["H"]))
    load_torch_state_dict(layer, family(arrays, "param"))
    by_weight = check_sequence(layer, matched_variables(layer), arrays, memory, assert_close)
    check_gradients(layer, by_weight, gradients_of_run(arrays, memory), assert_close)


# The paper's equations


def paper(cell, n, h1, h2):
    """Eqs. 1, 2 and 7 to 18, with one matrix [W U] and bias per block."""
    kernel, recurrent, bias = (np.asarray(w, "float64") for w in cell.weights_of(n, h1.dtype))
    size = cell.units

    def block(i, a, b):
        part = slice(i * size, (i + 1) * size)
        return np.hstack([a, b]) @ np.vstack([kernel[:, part], recurrent[:, part]]) + bias[part]

    gates = [sigmoid(block(i, h1, h2)) for i in range({"ug": 4, "rg": 3, "ps": 2}[cell.variant])]
    if cell.variant == "ug":
        z1, z2, r2, r1 = gates
    elif cell.variant == "rg":
        z1, r2, r1 = gates
        z2 = z1
    else:
        z1, r1 = gates
        z2, r2 = z1, r1
    p1 = np.tanh(block(len(gates), h1, r2 * h2))
    p2 = np.tanh(block(len(gates) + 1, r1 * h1, h2))
    if cell.convention == "paper" and cell.variant != "ug":
        return z1 * h1 + (1 - z1) * p2, z2 * h2 + (1 - z2) * p1
    return z1 * p2 + (1 - z1) * h1, z2 * p1 + (1 - z2) * h2


@exact
@pytest.mark.parametrize("convention", ["paper", "authors"])
@pytest.mark.parametrize("variant", ["ug", "rg", "ps"])
@pytest.mark.parametrize("options", [{}, {"cells_per_node": 2, "use_gate_bias": False}])
def test_equations_of_the_paper(variant, convention, options):
    cell = LRUCell(5, variant, convention=convention, **options)
    cell.build((None, 5))
    randomize(cell)
    h1, h2 = noise(3, 5), noise(3, 5, seed=1)
    found = cell(h1, [h2])
    for n in range(cell.cells_per_node):
        h1, h2 = (np.asarray(h, keras.config.floatx()) for h in paper(cell, n, h1, h2))
    assert_all_close(found, (h1, h2))


# The layer

make_layer = functools.partial(
    LRU, 4, return_state=True, dropout=0.3, recurrent_dropout=0.3, seed=1
)


@pytest.mark.both_backends(slow=True)
def test_layer():
    check_layer(make_layer, (3, 6, 3))


def test_backwards():
    check_backwards(functools.partial(LRU, 4, return_state=True, seed=1), (2, 5, 3))
    check_backwards(functools.partial(LRU, 4, return_sequences=False, seed=1), (2, 5, 4))


@pytest.mark.both_backends(slow=True)
def test_kernels_with_masks_and_states():
    mask = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [0] * 5], bool)
    states = [noise(3, 4, seed=seed) for seed in (2, 3)]
    make = functools.partial(make_layer, variant="ps")
    check_kernels(make, (3, 5, 4), mask=ops.convert_to_tensor(mask), initial_state=states)
    check_streaming(made(make, (1, 1, 4)), noise(3, 5, 4), initial_state=states)


@both(slow=True)
def test_equals_keras_rnn_of_its_cells():
    layer = made(make_layer, (1, 1, 4))
    rnn = keras.layers.RNN(layer.cells, return_sequences=True, return_state=True)
    rnn.build((None, None, 4))
    x, states = noise(3, 6, 4), [noise(3, 4, seed=seed) for seed in (1, 2)]
    found = layer(x, initial_state=states, training=True)
    for seed in layer.non_trainable_variables:  # so that the same dropout masks are drawn again
        seed.assign(seed.value - ops.convert_to_tensor([0, 1], seed.dtype))
    assert_all_close(found, rnn(x, initial_state=states, training=True))


@pytest.mark.both_backends(slow=True)
def test_masked_steps_keep_the_state_and_repeat_the_output():
    make = functools.partial(LRU, 4, cells_per_node=2, return_state=True)
    layer, last = (made(make, (1, 1, 4), return_sequences=s) for s in (True, False))
    x, states = noise(3, 6, 4), [noise(3, 4, seed=seed) for seed in (1, 2)]
    mask = np.array([[1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 0], [0] * 6], bool)
    x[~mask] = np.nan
    y, *ends = map(np.asarray, layer(x, initial_state=states, mask=ops.convert_to_tensor(mask)))
    final, *_ = map(np.asarray, last(x, initial_state=states, mask=ops.convert_to_tensor(mask)))
    for row in range(2):
        own = [state[row : row + 1] for state in states]
        alone, *own_ends = layer(x[row, mask[row]][None], initial_state=own)
        assert_close(y[row, mask[row]], alone[0])
        assert_all_close([end[row] for end in ends], [end[0] for end in own_ends])
    np.testing.assert_array_equal(y[0, 5], y[0, 4])
    np.testing.assert_array_equal(y[1, [0, 3, 5]], [np.zeros(4), y[1, 2], y[1, 4]])
    np.testing.assert_array_equal(y[2], 0)
    np.testing.assert_array_equal(final, y[:, -1])
    for end, state in zip(ends, states, strict=True):
        np.testing.assert_array_equal(end[2], state[2])


def test_bad_arguments():
    for wrong in ({"variant": "full"}, {"convention": "keras"}, {"recurrent_dropout": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LRU(4, **wrong)
    with pytest.raises(ValueError, match="units=4"):
        keras.layers.RNN(LRUCell(4))(noise(1, 3, 5))
    assert LRU(4)(noise(1, 3, 5)).shape == (1, 3, 4)


def test_quantized_weights_keep_their_scale():
    model = keras.Sequential([keras.Input((None, 3)), LRU(4, seed=1)])
    x = noise(2, 6, 3)
    before = np.asarray(model(x))
    model.quantize("int8")
    np.testing.assert_allclose(model(x), before, atol=0.02)


def test_regularizers_of_the_projection():
    layer = made(
        functools.partial(LRU, 4, kernel_regularizer="l2", bias_regularizer="l2"), (1, 1, 3)
    )
    assert len(layer.projection.losses) == 2
