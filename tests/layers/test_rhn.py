"""RHNCell: the authors' highway cell, the paper's equations, and what a Keras cell must do."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from tests.support import cell_checks as cell_check
from tests.support.cell_checks import assert_same, numpy, random
from tests.support.golden import family, floats
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import RHNCell

JAX = keras.backend.backend() == "jax"
both = pytest.mark.both_backends
exact = pytest.mark.float64


def make(units=4, depth=3, **options):
    """A cell whose biases are not zero, so that all weights show."""
    noise = keras.initializers.RandomNormal(stddev=0.5)
    options = {"seed": 5, "bias_initializer": noise} | options
    return RHNCell(units, depth, **options)


# The authors of the LRU: parameters `lin.l` (h) and `gate.l` (t), the first ones act on [h1; h2].


def authors_layout(cell, arrays, prefix=""):
    """Arrays of the authors' names, laid out as the weights of `cell`, in their order."""

    def blocks(end):
        pairs = [
            [arrays[f"{prefix}{name}.{n}.{end}"] for name in ("lin", "gate")]
            for n in range(cell.transition_depth)
        ]
        return [np.concatenate([a.T for a in pair], axis=-1) for pair in pairs]

    first, *others = blocks("weight")
    width = len(first) - cell.units
    return [floats(a) for a in (first[:width], first[width:], *others, *blocks("bias"))]


def from_golden(arrays, depth, prefix=""):
    units = arrays["meta"]["config"]["H"]
    cell = RHNCell(units, depth)
    cell.build((None, units))
    cell.set_weights(authors_layout(cell, family(arrays, "param"), prefix))
    return cell


@both
@exact
@pytest.mark.parametrize("depth", [1, 2])
def test_cell_of_the_authors(depth, golden, assert_close):
    arrays = golden(f"lru_cell_highway{depth}")
    cell = from_golden(arrays, depth)

    def loss(x, s):
        y, (s,) = cell(x, [s])
        return ops.sum(y**2) + 0.5 * ops.sum(s**3), (y, s)

    x, s = floats(arrays["in.h1"]), floats(arrays["in.h2"])
    (value, (y, s_new)), by_weight, by_input = value_and_gradients(loss, cell.weights, x, s)
    assert_close(y, arrays["out.h1_f64"], "output", "y")
    assert_close(s_new, arrays["out.h2_f64"], "output", "state")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    assert_close(cell(x, [0 * s])[0], arrays["out.h1_single_f64"], "output", "from zero")
    reference = family(arrays, "grad")
    expected = authors_layout(cell, reference) + [reference["h1"], reference["h2"]]
    for found, wanted in zip([*by_weight, *by_input], expected, strict=True):
        assert_close(found, wanted, "gradient")


@both
@exact
@pytest.mark.parametrize("memory", ["", "_mem"])
def test_sequence_of_the_authors(memory, golden, assert_close):
    arrays = golden("lru_seq_highway_l2")
    cell = from_golden(arrays, 2, "layers.0.")
    rnn = keras.layers.RNN(cell, return_sequences=True, return_state=True)

    def loss(x, s):
        y, s = rnn(x, initial_state=s)
        return ops.sum(y**2) + ops.sum(s**2), (y, s)

    s = floats(arrays["in.mem_H1"][:, 0]) * bool(memory)
    x = floats(arrays["in.x"])
    (value, (y, s)), by_weight, (by_x, by_s) = value_and_gradients(loss, cell.weights, x, s)
    assert_close(y, arrays[f"out.y{memory}_f64"], "output", "y")
    assert_close(s, arrays[f"out.H1{memory}_f64"][:, 0], "output", "state")
    assert_close(value, arrays[f"out.loss{memory}_f64"], "output", "loss")
    reference = {
        k.removesuffix(memory): v
        for k, v in family(arrays, "grad").items()
        if k.endswith("_mem") == bool(memory)
    }
    assert_close(by_x, reference["x"], "gradient", "x")
    if memory:
        assert_close(by_s, arrays["grad.mem_H1_f64"][:, 0], "gradient", "initial state")
    expected = authors_layout(cell, reference, "layers.0.")
    for found, wanted in zip(by_weight, expected, strict=True):
        assert_close(found, wanted, "gradient")


# The equations of the paper


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def equations(cell, x, s, input_mask=1.0, state_mask=1.0):
    """Outputs (batch, time, units) by Eqs. 6 to 9 of the paper."""
    depth, weights = cell.transition_depth, [numpy(w.value).astype("float64") for w in cell.weights]
    kernel, recurrent, biases = weights[0], weights[1 : depth + 1], weights[depth + 1 :]
    outputs = []
    for t in range(x.shape[1]):
        for layer in range(depth):
            a = (s * state_mask) @ recurrent[layer]
            a = a + (x[:, t] * input_mask) @ kernel if layer == 0 else a
            a = a + biases[layer] if biases else a
            h, gate, *carry = np.split(a, len(kernel[0]) // cell.units, axis=-1)
            carry = sigmoid(carry[0]) if carry else 1 - sigmoid(gate)
            s = np.tanh(h) * sigmoid(gate) + s * carry
        outputs.append(s)
    return np.stack(outputs, 1)


@both
@exact
@pytest.mark.parametrize("carry", ["coupled", "independent"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_equations(carry, use_bias):
    cell = make(carry=carry, use_bias=use_bias)
    x, s = random((3, 6, 7)), random((3, 4), 1)
    rnn = keras.layers.RNN(cell, return_sequences=True, return_state=True)
    y, last = rnn(x, initial_state=s)
    wanted = equations(cell, x, s).astype(x.dtype)
    assert_same([y, last], [wanted, wanted[:, -1]])


@pytest.mark.parametrize("carry", ["coupled", "independent"])
def test_one_mask_for_all_steps_and_layers(carry):
    """The results are those of one of the 2^channels * 2^units possible masks of each row."""
    cell = make(units=3, carry=carry, dropout=0.5, recurrent_dropout=0.5)
    x = random((4, 5, 2))
    y = numpy(keras.layers.RNN(cell, return_sequences=True)(x, training=True))
    possible = [
        equations(cell, x, np.zeros((4, 3)), 2.0 * np.array(m[:2]), 2.0 * np.array(m[2:]))
        for m in itertools.product((0, 1), repeat=5)
    ]
    error = np.abs(np.array(possible) - y).max(axis=(2, 3))
    assert (error.min(axis=0) < 1e-5).all()
    assert len(set(error.argmin(axis=0))) > 1, "all rows have the same masks"


def test_gates_begin_mostly_closed():
    cell = RHNCell(3, 2)
    cell.build((None, 5))
    for bias in cell.weights[-2:]:
        np.testing.assert_array_equal(numpy(bias.value), [0] * 3 + [-2] * 3)
    cell = RHNCell(3, 1, carry="independent", transform_bias_initializer="ones")
    cell.build((None, 5))
    np.testing.assert_array_equal(numpy(cell.weights[-1].value), [0] * 3 + [1] * 3 + [-1] * 3)


def test_seed_decides_all_weights():
    first, again, other = make(), make(), make(seed=6)
    for cell in (first, again, other):
        cell.build((None, 4))
    assert_same(first.get_weights(), again.get_weights(), 0)
    kernels = [w for w in first.get_weights() if w.shape == (4, 8)]
    kernels += [w for w in other.get_weights() if w.shape == (4, 8)]
    assert all((a != b).any() for a, b in itertools.combinations(kernels, 2))


def test_number_of_parameters():
    for units, depth, wanted in ((7, 5, 12 * 7**2 + 10 * 7), (4, 1, 4 * 4**2 + 2 * 4)):
        cell = RHNCell(units, depth)
        cell.build((None, units))
        assert cell.count_params() == wanted
    cell = RHNCell(5, 2, carry="independent", use_bias=False)
    cell.build((None, 3))
    assert [w.shape for w in cell.weights] == [(3, 15), (5, 15), (5, 15)]
    assert [w.name for w in cell.weights] == ["kernel", "recurrent_kernel_1", "recurrent_kernel_2"]


def test_regularizers_and_constraints():
    cell = make(
        kernel_regularizer="l2",
        recurrent_regularizer="l2",
        bias_regularizer="l2",
        kernel_constraint="non_neg",
        recurrent_constraint="non_neg",
        bias_constraint="non_neg",
    )
    cell.build((None, 4))
    assert len(cell.losses) == 1 + 2 * cell.transition_depth
    assert all(w.constraint is not None for w in cell.weights)


@pytest.mark.slow_elsewhere
@both
@pytest.mark.parametrize("check", cell_check.CHECKS, ids=lambda check: check.__name__)
def test_is_a_keras_cell(check):
    check(make, random((3, 7, 4)))


@pytest.mark.parametrize("options", [{}, {"carry": "independent", "use_bias": False}])
def test_config_and_file(options, tmp_path):
    cell_check.check_file(
        lambda **more: make(**options, **more), random((3, 7, 4)), tmp_path / "model.keras"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"units": 0}, "units=0"),
        ({"depth": 0}, "transition_depth=0"),
        ({"depth": 1.5}, "transition_depth=1.5"),
        ({"carry": "none"}, "carry='none'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"recurrent_dropout": -0.1}, "recurrent_dropout=-0.1"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.slow_elsewhere
@both
def test_wrong_calls():
    rnn = keras.layers.RNN(make())
    x, s = random((2, 5, 3)), random((2, 4))
    rnn(x, initial_state=s)
    with pytest.raises(ValueError, match="list of states.*sizes \\[4\\].*Received: 2"):
        rnn(x, initial_state=[s, s])
    with pytest.raises(ValueError, match="states\\[0\\]. must have shape .*4.*Received: .*5"):
        rnn(x, initial_state=random((2, 5)))
    with pytest.raises(ValueError, match="shape \\(batch, 3\\)"):
        rnn(random((2, 5, 4)))
