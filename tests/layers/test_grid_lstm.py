"""GridLSTMCell: the authors' Grid-LSTM, the paper's equations, and what a Keras cell must do."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from tests.support import cell_checks as cell_check
from tests.support.cell_checks import assert_same, numpy, random
from tests.support.golden import family, floats
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import GridLSTMCell

both = pytest.mark.both_backends
exact = pytest.mark.float64
updates = pytest.mark.parametrize("update", ["parallel", "sequential"])


def make(units=4, depth=2, **options):
    """A cell whose biases are not zero, so that all weights show."""
    noise = keras.initializers.RandomNormal(stddev=0.5)
    return GridLSTMCell(units, depth, **{"seed": 5, "bias_initializer": noise} | options)


# The authors of the LRU: `layers.l.0` is the depth LSTM of node l, whose input (ih) is h2 and whose
# own state (hh) is h1; `layers.l.1` is the time LSTM, whose input is h1.


def authors_layout(arrays, depth):
    """Arrays of the authors' names, laid out as the weights of a cell, in their order."""
    weights = []
    for n, direction in itertools.product(range(depth), range(2)):
        prefix = f"layers.{n}.{direction}"
        kernel, recurrent = ("hh", "ih") if direction == 0 else ("ih", "hh")
        weights += [arrays[f"{prefix}.weight_{end}"].T for end in (kernel, recurrent)]
        weights.append(sum(floats(arrays[f"{prefix}.bias_{end}"]) for end in ("ih", "hh")))
    return [floats(w) for w in weights]


@both
@exact
@pytest.mark.parametrize("memory", ["", "_mem"])
def test_sequence_of_the_authors(memory, golden, assert_close):
    """The depth memory M0 goes in beside x and comes out beside y."""
    arrays = golden("lru_seq_gridlstm")
    depth, units = arrays["in.mem_H1"].shape[1:]
    cell = GridLSTMCell(
        units, depth, update="sequential", share_depth_weights=False, return_memory=True
    )
    cell.build((None, 2 * units))
    cell.set_weights(authors_layout(family(arrays, "param"), depth))
    rnn = keras.layers.RNN(cell, return_sequences=True, return_state=True)

    def loss(x, m0, h, m):
        initial = [s[:, n] for n in range(depth) for s in (h, m)]
        y, *states = rnn(ops.concatenate([x, m0], axis=-1), initial_state=initial)
        y, m0 = ops.split(y, 2, axis=-1)
        h, m = ops.stack(states[::2], axis=1), ops.stack(states[1::2], axis=1)
        return sum(ops.sum(a**2) for a in (y, h, m0, m)), (y, h, m0, m)

    before = [floats(arrays[f"in.mem_{name}"]) * bool(memory) for name in ("M0", "H1", "M1")]
    x = floats(arrays["in.x"])
    (value, found), by_weight, by_input = value_and_gradients(loss, cell.weights, x, *before)
    for name, array in zip(("y", "H1", "M0", "M1"), found, strict=True):
        assert_close(array, arrays[f"out.{name}{memory}_f64"], "output", name)
    assert_close(value, arrays[f"out.loss{memory}_f64"], "output", "loss")
    reference = {
        k.removesuffix(memory): v
        for k, v in family(arrays, "grad").items()
        if k.endswith("_mem") == bool(memory)
    }
    assert_close(by_input[0], reference["x"], "gradient", "x")
    if memory:
        assert_close(by_input[2], arrays["grad.mem_H1_f64"], "gradient", "initial h2")
    # Each of their two biases has the gradient of our one.
    reference |= {k: np.zeros_like(v) for k, v in reference.items() if k.endswith("bias_hh")}
    for gradient, wanted in zip(by_weight, authors_layout(reference, depth), strict=True):
        assert_close(gradient, wanted, "gradient")


# The equations of the paper


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def lstm(h1, h2, m, kernel, recurrent_kernel, bias=0.0):
    i, f, c, o = np.split(h1 @ kernel + h2 @ recurrent_kernel + bias, 4, axis=-1)
    m = sigmoid(f) * m + sigmoid(i) * np.tanh(c)
    return sigmoid(o) * np.tanh(m), m


def equations(cell, x, states, h1_mask=1.0, h2_mask=1.0):
    """Outputs [h1', m1'] (batch, time, 2 units) and final states by Eqs. 5 and 6."""
    weights = [numpy(w.value).astype("float64") for w in cell.weights]
    size = 3 if cell.use_bias else 2
    lstms = [weights[i : i + size] for i in range(0, len(weights), size)]
    nodes = list(zip(lstms[::2], lstms[1::2], strict=True))
    nodes = nodes * (cell.depth // len(nodes))
    states, outputs = list(states), []
    for t in range(x.shape[1]):
        h1, m1 = x[:, t, : cell.units], x[:, t, cell.units :]
        m1 = m1 if m1.size else np.zeros_like(h1)
        for n, (depth_weights, time_weights) in enumerate(nodes):
            h2, m2 = states[2 * n : 2 * n + 2]
            new_h1, m1 = lstm(h1 * h1_mask, h2 * h2_mask, m1, *depth_weights)
            read = h1 if cell.update == "parallel" else new_h1
            states[2 * n : 2 * n + 2] = lstm(read * h1_mask, h2 * h2_mask, m2, *time_weights)
            h1 = new_h1
        outputs.append(np.concatenate([h1, m1], axis=-1))
    return np.stack(outputs, 1), states


@both
@exact
@updates
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("memory", [True, False])
def test_equations(update, share, memory):
    cell = make(
        3, 2, update=update, share_depth_weights=share, return_memory=memory, use_bias=not memory
    )
    x = random((3, 6, 6 if memory else 3))
    states = [random((3, 3), i) for i in range(1, 5)]
    rnn = keras.layers.RNN(cell, return_sequences=True, return_state=True)
    y, *last = rnn(x, initial_state=states)
    wanted, ends = equations(cell, x, states)
    wanted = wanted if memory else wanted[..., :3]
    assert_same([y, *last], [a.astype(x.dtype) for a in (wanted, *ends)])


@pytest.mark.slow_elsewhere
@both
@updates
def test_shared_weights_are_equal_weights(update):
    shared = make(update=update)
    own = make(update=update, share_depth_weights=False)
    x = random((3, 5, 4))
    y = keras.layers.RNN(shared, return_sequences=True)(x)
    own.build((None, 4))
    own.set_weights(shared.get_weights() * 2)
    assert_same(keras.layers.RNN(own, return_sequences=True)(x), y)


@pytest.mark.slow_elsewhere
@both
@updates
def test_a_column_is_a_stack_of_nodes_that_hand_on_their_memory(update):
    column = make(update=update, share_depth_weights=False)
    nodes = [make(depth=1, update=update, return_memory=n == 0) for n in range(2)]
    stack, rnn = keras.layers.RNN(nodes), keras.layers.RNN(column)
    x = random((3, 5, 4))
    stack.build(x.shape), rnn.build(x.shape)
    stack.set_weights(rnn.get_weights())
    assert_same(stack(x), rnn(x))


@updates
def test_one_mask_for_all_steps_and_nodes(update):
    """The results are those of one of the 2^units * 2^units possible masks of each row."""
    cell = make(2, update=update, dropout=0.5, recurrent_dropout=0.5)
    for width in (2, 4):
        x = random((6, 5, width))
        y = numpy(keras.layers.RNN(cell, return_sequences=True)(x, training=True))
        possible = [
            equations(cell, x, [np.zeros((6, 2))] * 4, 2.0 * np.array(m[:2]), 2.0 * np.array(m[2:]))
            for m in itertools.product((0, 1), repeat=4)
        ]
        error = np.abs(np.array([p[0][..., :2] for p in possible]) - y).max(axis=(2, 3))
        assert (error.min(axis=0) < 1e-5).all()
        assert len(set(error.argmin(axis=0))) > 1, "all rows have the same masks"


def test_forget_bias():
    for share, use in itertools.product((True, False), repeat=2):
        cell = GridLSTMCell(3, 2, share_depth_weights=share, unit_forget_bias=use)
        cell.build((None, 3))
        for bias in [w for w in cell.weights if "bias" in w.name]:
            np.testing.assert_array_equal(numpy(bias.value), [0] * 3 + [int(use)] * 3 + [0] * 6)


def test_seed_decides_all_weights():
    first, again, other = (make(seed=s, share_depth_weights=False) for s in (5, 5, 6))
    for cell in (first, again, other):
        cell.build((None, 4))
    assert_same(first.get_weights(), again.get_weights(), 0)
    kernels = [w for w in first.get_weights() + other.get_weights() if w.ndim == 2]
    assert all((a != b).any() for a, b in itertools.combinations(kernels, 2))


def test_number_of_parameters_and_names():
    for depth, share in ((1, True), (3, True), (3, False)):
        cell = GridLSTMCell(7, depth, share_depth_weights=share)
        cell.build((None, 7))
        assert cell.count_params() == (16 * 7**2 + 8 * 7) * (1 if share else depth)
    names = {w.name for w in cell.weights}
    assert {"depth_kernel_1", "time_recurrent_kernel_3", "time_bias_2"} < names
    cell = GridLSTMCell(7, 2, use_bias=False)
    cell.build((None, 7))
    assert [w.name for w in cell.weights] == [
        "depth_kernel",
        "depth_recurrent_kernel",
        "time_kernel",
        "time_recurrent_kernel",
    ]


def test_regularizers_and_constraints():
    kinds = ("kernel", "recurrent", "bias")
    options = {f"{kind}_regularizer": "l2" for kind in kinds}
    options |= {f"{kind}_constraint": "non_neg" for kind in kinds}
    cell = make(**options)
    cell.build((None, 4))
    assert len(cell.losses) == len(cell.weights) == 6
    assert all(w.constraint is not None for w in cell.weights)


@pytest.mark.slow_elsewhere
@both
@pytest.mark.parametrize("check", cell_check.CHECKS, ids=lambda check: check.__name__)
def test_is_a_keras_cell(check):
    check(make, random((3, 7, 4)))


@pytest.mark.slow_elsewhere
@both
def test_masks_with_memory_output():
    def with_memory(**options):
        return make(return_memory=True, **options)

    cell_check.check_masks(with_memory, random((3, 7, 8)), zero_output_for_mask=True)


OPTIONS = [
    {},
    {"update": "sequential", "share_depth_weights": False, "use_bias": False},
    {"return_memory": True, "unit_forget_bias": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_config_and_file(options, tmp_path):
    cell_check.check_file(
        lambda **more: make(**options, **more), random((3, 7, 4)), tmp_path / "model.keras"
    )


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    "options, message",
    [
        ({"units": 0}, "units=0"),
        ({"depth": 0}, "depth=0"),
        ({"update": "both"}, "update='both'"),
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
    x, states = random((2, 5, 4)), [random((2, 4))] * 4
    with pytest.raises(ValueError, match="units=4 channels, or 8.*Dense.*\\(2, 5\\)"):
        keras.layers.RNN(make())(random((2, 6, 5)))
    rnn = keras.layers.RNN(make())
    rnn(x, initial_state=states)
    rnn(random((2, 5, 8)))
    with pytest.raises(ValueError, match="list of states.*sizes \\[4, 4, 4, 4\\].*Received: 2"):
        rnn(x, initial_state=states[:2])
    with pytest.raises(ValueError, match="states\\[3\\]. must have shape .*4.*Received: .*5"):
        rnn(x, initial_state=[*states[:3], random((2, 5))])
    with pytest.raises(ValueError, match="shape \\(batch, 4\\) or \\(batch, 8\\)"):
        rnn(random((2, 5, 6)))
