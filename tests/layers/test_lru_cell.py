"""LRUCell: the paper's equations, what `keras.layers.RNN` does with it, dropout, arguments."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.layer_checks import compiled
from trellis_keras.layers import LRUCell
from trellis_keras.layers.rnn import RecurrentCell


def tolerance():
    return {"float64": 1e-12, "float32": 2e-6}[keras.config.floatx()]


VARIANTS = ("ug", "rg", "ps")
rarely = pytest.mark.slow_elsewhere


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def make(units=4, variant="ug", **options):
    options.setdefault("bias_initializer", keras.initializers.RandomNormal(stddev=0.5, seed=7))
    cell = LRUCell(units, variant, **({"seed": 3} | options))
    cell.build((None, units))
    return cell


def assert_same(actual, reference):
    actual, reference = ops.convert_to_numpy(actual), ops.convert_to_numpy(reference)
    assert actual.dtype == reference.dtype == keras.config.floatx()
    assert actual.shape == reference.shape
    assert np.abs(actual - reference).max() <= tolerance() * max(np.abs(reference).max(), 1e-30)


# The equations


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def paper(cell, n, h1, h2):
    """Eqs. 1, 2 and 7 to 18, one weight matrix [W U] and bias per block."""
    kernel, recurrent = (ops.convert_to_numpy(w[n]) for w in (cell.kernels, cell.recurrent_kernels))
    n_gates = {"ug": 4, "rg": 3, "ps": 2}[cell.variant]
    size, bias = cell.units, np.zeros((n_gates + 2) * cell.units)
    if cell.use_bias:
        given = ops.convert_to_numpy(cell.biases[n])
        bias[len(bias) - len(given) :] = given

    def block(i, a, b):
        part = slice(i * size, (i + 1) * size)
        matrix = np.concatenate([kernel[:, part], recurrent[:, part]])
        return np.concatenate([a, b], axis=1) @ matrix + bias[part]

    gates = [sigmoid(block(i, h1, h2)) for i in range(n_gates)]
    if cell.variant == "ug":
        z1, z2, r2, r1 = gates
    elif cell.variant == "rg":
        z1, r2, r1 = gates
        z2 = z1
    else:
        z1, r1 = gates
        z2, r2 = z1, r1
    p1 = np.tanh(block(n_gates, h1, r2 * h2))
    p2 = np.tanh(block(n_gates + 1, r1 * h1, h2))
    if cell.convention == "paper" and cell.variant != "ug":
        return z1 * h1 + (1 - z1) * p2, z2 * h2 + (1 - z2) * p1
    return z1 * p2 + (1 - z1) * h1, z2 * p1 + (1 - z2) * h2


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("convention", ["paper", "authors"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"use_bias": False}, id="no bias", marks=rarely),
        pytest.param({"use_gate_bias": False}, id="no gate bias", marks=rarely),
        pytest.param({"cells_per_node": 2}, id="two cells", marks=rarely),
    ],
)
def test_equations_of_the_paper(variant, convention, options):
    cell = make(5, variant, convention=convention, **options)
    h1, h2 = random((3, 5)), random((3, 5), 1)
    ours, (state,) = cell(h1, [h2])
    for n in range(cell.cells_per_node):
        h1, h2 = paper(cell, n, h1, h2)
    assert_same(ours, h1.astype(keras.config.floatx()))
    assert_same(state, h2.astype(keras.config.floatx()))


def test_the_conventions_differ_in_rg_and_ps_only():
    for variant in VARIANTS:
        a, b = (make(4, variant, convention=c) for c in ("paper", "authors"))
        b.set_weights(a.get_weights())
        x, h = random((2, 4)), random((2, 4), 1)
        same = np.allclose(a(x, [h])[0], b(x, [h])[0])
        assert same == (variant == "ug")


@pytest.mark.parametrize("variant,squares", [("ug", 12), ("rg", 10), ("ps", 8)])
def test_number_of_parameters(variant, squares):
    assert make(7, variant).count_params() == squares * 7**2 + squares // 2 * 7
    two = make(7, variant, cells_per_node=2, use_gate_bias=False)
    assert two.count_params() == 2 * (squares * 7**2 + 2 * 7)


# In keras.layers.RNN


def stacked(depth=2, units=4, cell_options=(), **options):
    cells = [make(units, seed=i, **dict(cell_options)) for i in range(depth)]
    return keras.layers.RNN(cells, **options)


def by_hand(layer, x, states, mask=None):
    """Outputs of all steps and the last states: a step of a row at a time."""
    outputs = np.zeros_like(x)
    last = [np.array(s) for s in states]
    for row in range(len(x)):
        h2, y = [s[row : row + 1] for s in last], np.zeros((1, x.shape[-1]), keras.config.floatx())
        for t in range(x.shape[1]):
            if mask is None or mask[row, t]:
                y = x[row : row + 1, t]
                for i, cell in enumerate(layer.cell.cells):
                    y, (h2[i],) = cell(y, [h2[i]])
            outputs[row, t] = ops.convert_to_numpy(y)[0]
        for i, h in enumerate(h2):
            last[i][row] = ops.convert_to_numpy(h)[0]
    return outputs, last


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_rnn_with_states_and_masks(masked):
    layer = stacked(return_sequences=True, return_state=True)
    x, states = random((3, 6, 4)), [random((3, 4), 1), random((3, 4), 2)]
    mask = None
    if masked:
        mask = np.array([[1] * 6, [0, 1, 1, 0, 1, 0], [0] * 6], bool)
    y, *last = layer(x, initial_state=states, mask=None if mask is None else ops.array(mask))
    wanted, wanted_last = by_hand(layer, x, states, mask)
    for ours, reference in zip(keras.tree.flatten(last), wanted_last, strict=True):
        assert_same(ours, reference)
    if masked and keras.backend.backend() == "jax":  # which repeats a state, see LRUCell
        y, wanted = (ops.convert_to_numpy(a) * mask[..., None] for a in (y, wanted))
    assert_same(y, wanted)


def test_rnn_backwards_bidirectional_and_stateful():
    x = random((2, 6, 4))
    forwards = stacked(return_sequences=True)
    backwards = keras.layers.RNN(forwards.cell.cells, return_sequences=True, go_backwards=True)
    assert_same(backwards(x), forwards(ops.flip(x, axis=1)))

    both = keras.layers.Bidirectional(stacked(return_sequences=True))
    y = both(x)
    assert y.shape == (2, 6, 8)
    assert_same(y[..., :4], both.forward_layer(x))
    assert_same(ops.flip(y[..., 4:], axis=1), both.backward_layer(x))

    carried = keras.layers.RNN(forwards.cell.cells, return_sequences=True, stateful=True)
    pieces = [carried(x[:, :2]), carried(x[:, 2:])]
    assert_same(ops.concatenate(pieces, axis=1), forwards(x))
    carried.reset_state()
    assert_same(carried(x), forwards(x))


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_file_and_compiled_fit(tmp_path):
    cells = [("dropout", 0.1), ("recurrent_dropout", 0.1)]
    model = keras.Sequential([keras.Input((5, 4)), stacked(cell_options=cells)])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=True)
    x = random((12, 5, 4))
    losses = model.fit(x, x[:, -1, :1], batch_size=6, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_mixed_precision():
    cells = [make(4, dtype="mixed_bfloat16") for _ in range(2)]
    stack = keras.layers.StackedRNNCells(cells, dtype="mixed_bfloat16")
    y = keras.layers.RNN(stack, dtype="mixed_bfloat16")(random((2, 5, 4)))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert all(v.dtype == "float32" for v in stack.trainable_variables)


def test_config():
    options = {
        "convention": "authors",
        "cells_per_node": 2,
        "use_gate_bias": False,
        "dropout": 0.1,
        "recurrent_dropout": 0.2,
        "kernel_regularizer": keras.regularizers.L2(0.1),
        "recurrent_constraint": keras.constraints.MaxNorm(1.0),
        "seed": 5,
    }
    cell = LRUCell(3, "rg", **options)
    again = LRUCell.from_config(cell.get_config())
    assert again.get_config() == cell.get_config()
    layer = keras.layers.RNN(again)
    layer(random((1, 2, 3)))
    assert len(layer.losses) == 2  # of two kernels
    assert again.recurrent_kernels[1].constraint is not None


def test_every_weight_has_numbers_of_its_own():
    for options in ({"seed": 3}, {"kernel_initializer": keras.initializers.GlorotUniform(3)}):
        cell = LRUCell(4, cells_per_node=2, **options)
        cell.build((None, 4))
        kernels = [*cell.kernels, *cell.recurrent_kernels]
        assert len({ops.convert_to_numpy(k).tobytes() for k in kernels}) == 4
    again = LRUCell(4, cells_per_node=2, seed=3)
    again.build((None, 4))
    first = make(4, cells_per_node=2, bias_initializer="zeros")
    for a, b in zip(again.weights, first.weights, strict=True):
        np.testing.assert_array_equal(a, b)


# Dropout


def probe(rate, recurrent_rate, units=16, depth=1):
    """An RNN whose output tells which channels were dropped.

    All weights are zero but one identity in projection 2: tanh of what it multiplies is half the
    output, and the other half is h1 (ones).
    """
    cells = []
    for i in range(depth):
        rates = {"dropout": rate, "recurrent_dropout": recurrent_rate}
        cell = LRUCell(units, kernel_initializer="zeros", seed=i, **rates)
        cell.build((None, units))
        cell.recurrent_kernels[0].assign(ops.zeros_like(cell.recurrent_kernels[0].value))
        matrix = cell.kernels[0] if rate else cell.recurrent_kernels[0]
        values = ops.convert_to_numpy(matrix).copy()
        values[:, 5 * units :] = np.eye(units)
        matrix.assign(values)
        cells.append(cell)
    return keras.layers.RNN(cells, return_sequences=True)


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
@pytest.mark.parametrize("compile", [False, True], ids=["", "XLA"])
@pytest.mark.parametrize("which", ["inputs", "state"])
def test_one_mask_for_all_steps(which, compile):
    layer = probe(0.5, 0.0) if which == "inputs" else probe(0.0, 0.5)
    x, state = np.ones((4, 6, 16), keras.config.floatx()), np.ones((4, 16), keras.config.floatx())

    def run(x, state):
        return layer(x, initial_state=[state], training=True)

    if compile:
        if keras.backend.backend() == "jax":
            run = stateless(layer)
        else:
            run = compiled(run)
    first, second = (ops.convert_to_numpy(run(x, state)) for _ in range(2))
    dropped = np.isclose(first, 0.5)
    assert 0.25 < dropped.mean() < 0.75
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1], dropped.shape))
    assert len({row.tobytes() for row in dropped[:, 0]}) == 4
    assert (np.isclose(second, 0.5) != dropped).any()
    np.testing.assert_array_equal(np.isclose(layer(x, initial_state=[state]), 0.5), False)


def stateless(layer):
    """A compiled training call on JAX, which carries the layer's random state."""
    import jax

    layer(np.ones((4, 6, 16), keras.config.floatx()))  # builds it

    @jax.jit
    def call(fixed, x, state):
        trained = [v.value for v in layer.trainable_variables]
        return layer.stateless_call(trained, fixed, x, initial_state=[state], training=True)

    def run(x, state):
        y, changed = call([v.value for v in layer.non_trainable_variables], x, state)
        for variable, value in zip(layer.non_trainable_variables, changed, strict=True):
            variable.assign(value)
        return y

    return run


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_each_cell_of_a_stack_has_masks_of_its_own():
    layer = probe(0.5, 0.0, depth=2)
    y = ops.convert_to_numpy(layer(np.ones((4, 6, 16), keras.config.floatx()), training=True))
    np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape))
    # Dropped in both cells, in either or in neither.
    assert len(np.unique(y.round(4))) == 4


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_a_cell_by_itself_drops_in_training_only():
    cell = probe(0.5, 0.0).cell.cells[0]
    x, h = np.ones((4, 16), keras.config.floatx()), np.zeros((4, 16), keras.config.floatx())
    dropped = [np.isclose(cell(x, [h], training=True)[0], 0.5) for _ in range(2)]
    assert 0.25 < dropped[0].mean() < 0.75 and (dropped[0] != dropped[1]).any()
    assert not np.isclose(cell(x, [h], training=False)[0], 0.5).any()


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_inference_advances_no_seed():
    layer = stacked(cell_options=[("dropout", 0.5), ("recurrent_dropout", 0.5)])
    model = keras.Sequential([keras.Input((5, 4)), layer])
    model.compile("sgd", "mse")
    x = random((4, 5, 4))

    def counters():
        return [int(ops.convert_to_numpy(v)[1]) for v in model.non_trainable_variables]

    assert len(counters()) == 4
    before = counters()
    model.predict(x, verbose=0)
    model.evaluate(x, x[:, 0], verbose=0)
    layer(x)
    assert counters() == before
    model.fit(x, x[:, 0], verbose=0)
    assert counters() == [n + 1 for n in before]
    assert not stacked().non_trainable_variables


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="looks into a TF graph")
def test_the_graph_of_inference_has_no_random_operations():
    import tensorflow as tf

    def operations(training):
        layer = stacked(cell_options=[("dropout", 0.5), ("recurrent_dropout", 0.5)])
        traced = tf.function(lambda x: layer(x, training=training)).get_concrete_function(
            tf.TensorSpec((None, None, 4), keras.config.floatx())
        )
        graph = traced.graph.as_graph_def()
        functions = [node for f in graph.library.function for node in f.node_def]
        return {node.op for node in [*graph.node, *functions] if "Random" in node.op}

    assert not operations(training=False)
    assert operations(training=True)


def test_keras_rnn_asks_for_masks_before_its_loop():
    """What `RecurrentCell` relies on that Keras does not document."""
    calls = []

    class Spy(LRUCell):
        def get_dropout_mask(self, step_input):
            calls.append("inputs")
            return super().get_dropout_mask(step_input)

        def get_recurrent_dropout_mask(self, step_input):
            calls.append("state")
            return super().get_recurrent_dropout_mask(step_input)

        def advance(self, *arguments, **keywords):
            calls.append("step")
            return super().advance(*arguments, **keywords)

        def reset_dropout_mask(self):
            calls.append("reset")
            super().reset_dropout_mask()

    cell = Spy(3)
    calls.clear()
    keras.layers.RNN(cell, unroll=True)(random((1, 2, 3)), training=True)
    assert isinstance(cell, RecurrentCell)
    assert calls == ["inputs", "state", "step", "step", "reset"]


# Arguments

BAD = {
    "units.*positive": {"units": 0},
    "variant.*'ug', 'rg', 'ps'.*'gru'": {"variant": "gru"},
    "convention.*'keras'": {"convention": "keras"},
    "cells_per_node.*positive": {"cells_per_node": 0},
    "dropout.*0, 1.*dropout=1.0": {"dropout": 1.0},
    "recurrent_dropout.*0, 1": {"recurrent_dropout": -0.1},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        LRUCell(**({"units": 4} | BAD[message]))


def test_an_input_of_another_width_is_refused():
    with pytest.raises(ValueError, match="units=4.*input_shape=.*5.*Project"):
        keras.layers.RNN(LRUCell(4))(random((1, 2, 5)))


@pytest.mark.parametrize("states", [[], [(2, 4), (2, 4)], [(2, 5)], [(3, 4)]])
def test_states_that_do_not_fit_are_refused(states):
    states = [np.zeros(shape, keras.config.floatx()) for shape in states]
    with pytest.raises(ValueError, match="states"):
        make(4)(random((2, 4)), states)
    if states:
        with pytest.raises(ValueError, match="states"):
            keras.layers.RNN(make(4))(random((2, 3, 4)), initial_state=states)
