"""The recurrent cells in `keras.layers.RNN`, RHN and Grid-LSTM equations, and StackedRNN."""

import functools
import itertools
import re
import threading

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    check_cell,
    check_sequence,
    either,
    family,
    floats,
    gradients_of_run,
    grid_weights,
    highway_weights,
)
from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import (
    assert_all_close,
    check_config,
    check_layer,
    check_sizes,
    check_streaming,
    made,
    noise,
    randomize,
    sigmoid,
)
from tests.support.parameters import slow_but
from trellis_keras.layers import GridLSTMCell, LRUCell, RHNCell, StackedRNN, VariationalDropout

both = pytest.mark.both_backends
exact = pytest.mark.float64
ON_JAX = keras.backend.backend() == "jax"
STATES = {"return_sequences": True, "return_state": True}


def rnn(cells, **options):
    """A `keras.layers.RNN` of a cell or of cells of 4 units, with random weights."""
    layer = keras.layers.RNN(cells, **(STATES | options))
    layer.build((2, None, 4))
    return randomize(layer)


def built(cell, channels):
    cell.build((None, channels))
    return randomize(cell)


# Every cell

CELLS = {
    "rhn": functools.partial(RHNCell, 4, 2),
    "grid_lstm": functools.partial(GridLSTMCell, 4, 2),
    "lru": functools.partial(LRUCell, 4),
}
cells = pytest.mark.parametrize("name", CELLS)


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("name", slow_but(CELLS, "rhn"))
def test_cell(name):
    make = functools.partial(CELLS[name], dropout=0.1, recurrent_dropout=0.2, seed=1)
    check_config(make)
    check_sizes(make)

    def layer(dtype=None):
        return StackedRNN([keras.layers.RNN(make(dtype=dtype), dtype=dtype, **STATES)], dtype=dtype)

    check_layer(layer, (2, 5, 4))


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("name", slow_but(CELLS, "lru"))
def test_nothing_is_random_in_inference(name):
    make = functools.partial(CELLS[name], dropout=0.4, recurrent_dropout=0.4)
    layer = rnn([make(seed=1), make(seed=2)])
    x = noise(2, 3, 4)
    for training in (False, True):
        text = graph_of(lambda x, training=training: layer(x, training=training), x)
        assert bool(re.search("[Rr]andom|threefry", text)) == training

    def seeds():
        return [np.asarray(v) for v in layer.variables if "seed" in v.path]

    before = seeds()
    y, *_ = map(np.asarray, layer(x))
    keras.Sequential([layer]).predict(x, verbose=0)
    np.testing.assert_array_equal(seeds(), before)
    first, second = (np.asarray(layer(x, training=True)[0]) for _ in range(2))
    assert np.any(first != second) and np.any(first != y)
    np.testing.assert_array_equal(np.subtract(seeds(), before), [[0, 2]] * 4)
    assert not rnn(CELLS[name]()).non_trainable_variables  # no seeds without dropout


def graph_of(function, x):
    """The operations of `function(x)`, those of loop bodies too, as text."""
    if ON_JAX:
        import jax

        with keras.StatelessScope():
            return str(jax.make_jaxpr(function)(x))
    import tensorflow as tf

    graph = tf.function(function).get_concrete_function(tf.constant(x)).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return " ".join(node.op for node in nodes)


@both
@pytest.mark.parametrize("recurrent", [False, True], ids=["inputs", "state"])
def test_each_row_and_cell_has_one_mask_for_all_steps(recurrent):
    """With zero weights but an identity in p2, h1' is (h1 + tanh(1 or 2, or 0 if dropped)) / 2."""
    rates = {"recurrent_dropout" if recurrent else "dropout": 0.5}
    cell = LRUCell(16, seed=1, **rates)
    cell.build((None, 16))
    cell.set_weights([np.zeros(w.shape) for w in cell.weights])
    weight = cell.recurrent_kernels[0] if recurrent else cell.kernels[0]
    weight.assign(np.concatenate([np.zeros((16, 80)), np.eye(16)], axis=1))
    bias = np.repeat([0, -30, 0, 30, 0, 0], 16)  # z2 = 0 keeps h2, r1 = 1
    cell.biases[0].assign(bias)
    layer = keras.layers.RNN(cell, return_sequences=True)
    x, h = np.ones((4, 6, 16), "float32"), np.ones((4, 16), "float32")
    y, again = (np.asarray(layer(x, initial_state=h, training=True)) for _ in range(2))
    dropped = np.isclose(y, 0.5)
    np.testing.assert_allclose(y, np.where(dropped, 0.5, (1 + np.tanh(2)) / 2), rtol=1e-6)
    np.testing.assert_array_equal(dropped, np.repeat(dropped[:, :1], 6, axis=1))
    assert 0.25 < dropped.mean() < 0.75
    assert len({row.tobytes() for row in dropped[:, 0]}) == 4
    assert np.any(dropped != np.isclose(again, 0.5))
    np.testing.assert_allclose(layer(x, initial_state=h), (1 + np.tanh(1)) / 2, rtol=1e-6)
    # A cell that is called on its own draws new masks.
    alone = [np.asarray(cell(x[:, 0], [h], training=True)[0]) for _ in range(2)]
    assert np.isclose(alone[0], 0.5).any() and np.any(alone[0] != alone[1])


@pytest.mark.parametrize(
    ("cell", "argument", "value"),
    [(RHNCell, "transition_depth", 1.5), (GridLSTMCell, "update", "both")],
)
def test_bad_arguments(cell, argument, value):
    with pytest.raises(ValueError, match=argument):
        cell(4, **{argument: value})


def check_masks_are_possible(y, equations):
    """Each row of y is that of one of the masks of 0 and 2 that `equations(h1, h2)` can have."""
    masks = [2.0 * np.array(m) for m in itertools.product((0, 1), repeat=4)]
    possible = np.array([equations(m[:2], m[2:]) for m in masks])
    errors = np.abs(possible - np.asarray(y)).max(axis=(2, 3))
    assert np.all(errors.min(axis=0) < 1e-5)
    assert len(set(errors.argmin(axis=0))) > 1, "all rows have the same masks"


# RHN


def rhn_of_the_authors(arrays, depth, prefix=""):
    units = arrays["meta"]["config"]["H"]
    cell = RHNCell(units, depth)
    cell.build((None, units))
    cell.set_weights(highway_weights(family(arrays, "param"), prefix, depth))
    return cell


@both
@exact
@pytest.mark.parametrize("depth", [1, 2])
def test_rhn_cell_of_the_authors(depth, golden, assert_close):
    arrays = golden(f"lru_cell_highway{depth}")
    cell = rhn_of_the_authors(arrays, depth)
    by_weight = check_cell(cell, cell.weights, arrays, assert_close)
    expected = highway_weights(family(arrays, "grad"), "", depth)
    for found, wanted in zip(by_weight, expected, strict=True):
        assert_close(found, wanted, "gradient")


@both
@exact
@pytest.mark.parametrize("memory", ["", "_mem"])
def test_rhn_sequence_of_the_authors(memory, golden, assert_close):
    arrays = golden("lru_seq_highway_l2")
    cell = rhn_of_the_authors(arrays, 2, "layers.0.")
    layer = keras.layers.RNN(cell, **STATES)
    by_weight = check_sequence(layer, cell.weights, arrays, memory, assert_close)
    expected = highway_weights(gradients_of_run(arrays, memory), "layers.0.", 2)
    for found, wanted in zip(by_weight, expected, strict=True):
        assert_close(found, wanted, "gradient")


def test_rhn_weights():
    cell = RHNCell(7)
    cell.build((None, 7))
    assert cell.count_params() == 12 * 7**2 + 10 * 7
    for bias in cell.get_weights()[-5:]:
        np.testing.assert_array_equal(bias, [0] * 7 + [-2] * 7)


# Grid-LSTM


def column_weights(arrays, depth, merge):
    """The authors' arrays as the weights of a cell."""
    return [w for n in range(depth) for w in grid_weights(arrays, f"layers.{n}", merge)]


@both
@exact
@pytest.mark.parametrize("memory", ["", "_mem"])
def test_grid_lstm_of_the_authors(memory, golden, assert_close):
    """The depth memory M0 enters beside x and leaves beside y."""
    arrays = golden("lru_seq_gridlstm")
    depth, units = arrays["in.mem_H1"].shape[1:]
    cell = GridLSTMCell(
        units, depth, update="sequential", share_depth_weights=False, return_memory=True
    )
    cell.build((None, 2 * units))
    weights = {name: floats(array) for name, array in family(arrays, "param").items()}
    cell.set_weights(column_weights(weights, depth, np.add))
    layer = keras.layers.RNN(cell, **STATES)

    def loss(x, m0, h, m):
        initial = [s[:, n] for n in range(depth) for s in (h, m)]
        y, *states = layer(ops.concatenate([x, m0], axis=-1), initial_state=initial)
        y, m0 = ops.split(y, 2, axis=-1)
        h, m = ops.stack(states[::2], axis=1), ops.stack(states[1::2], axis=1)
        return sum(ops.sum(a**2) for a in (y, h, m0, m)), (y, h, m0, m)

    before = [floats(arrays[f"in.mem_{name}"]) * bool(memory) for name in ("M0", "H1", "M1")]
    (value, found), by_weight, by_input = value_and_gradients(
        loss, cell.weights, floats(arrays["in.x"]), *before
    )
    for name, array in zip(("y", "H1", "M0", "M1"), found, strict=True):
        assert_close(array, arrays[f"out.{name}{memory}_f64"], "output", name)
    assert_close(value, arrays[f"out.loss{memory}_f64"], "output", "loss")
    reference = gradients_of_run(arrays, memory)
    assert_close(by_input[0], reference["x"], "gradient", "x")
    if memory:
        assert_close(by_input[2], arrays["grad.mem_H1_f64"], "gradient", "initial h2")
    for gradient, wanted in zip(by_weight, column_weights(reference, depth, either), strict=True):
        assert_close(gradient, wanted, "gradient")


def lstm(h1, h2, m, kernel, recurrent_kernel, bias=0.0):
    i, f, c, o = np.split(h1 @ kernel + h2 @ recurrent_kernel + bias, 4, axis=-1)
    m = sigmoid(f) * m + sigmoid(i) * np.tanh(c)
    return sigmoid(o) * np.tanh(m), m


def grid_equations(cell, x, states, h1_mask=1.0, h2_mask=1.0):
    """Outputs [h1', m1'] (batch, time, 2 units) and last states, by Eqs. 5 and 6."""
    weights = [np.asarray(w, "float64") for w in cell.get_weights()]
    lstms = [weights[i : i + 3] for i in range(0, len(weights), 3)]
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


@exact
@pytest.mark.parametrize("update", ["parallel", "sequential"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_grid_lstm_equations(update, share):
    """Shared weights with memories in and out, own weights without."""
    cell = GridLSTMCell(3, 2, update=update, share_depth_weights=share, return_memory=share)
    built(cell, 6 if share else 3)
    x, states = noise(3, 5, 6 if share else 3), [noise(3, 3, seed=i) for i in range(1, 5)]
    y, ends = grid_equations(cell, x, states)
    y = y if share else y[..., :3]
    found = keras.layers.RNN(cell, **STATES)(x, initial_state=states)
    assert_all_close(found, [a.astype(x.dtype) for a in (y, *ends)])


@pytest.mark.parametrize(("update", "width"), [("parallel", 2), ("sequential", 4)])
def test_grid_lstm_masks(update, width):
    cell = GridLSTMCell(2, 2, update=update, dropout=0.5, recurrent_dropout=0.5, seed=1)
    built(cell, width)
    x = noise(6, 4, width)
    y = keras.layers.RNN(cell, return_sequences=True)(x, training=True)
    zeros = [np.zeros((6, 2))] * 4
    check_masks_are_possible(y, lambda *m: grid_equations(cell, x, zeros, *m)[0][..., :2])


def test_grid_lstm_weights():
    for depth, share in ((1, True), (3, True), (3, False)):
        cell = GridLSTMCell(7, depth, share_depth_weights=share)
        cell.build((None, 7))
        assert cell.count_params() == (16 * 7**2 + 8 * 7) * (1 if share else depth)
    assert {"depth_kernel_1", "time_recurrent_kernel_3"} < {w.name for w in cell.weights}
    for bias in cell.get_weights()[2::3]:
        np.testing.assert_array_equal(bias, [0] * 7 + [1] * 7 + [0] * 14)


# StackedRNN


@keras.saving.register_keras_serializable("test_rnn")
class Counter(keras.layers.Layer):
    """A cell without `training`, whose output is neither its state nor of its size."""

    state_size = 3
    output_size = 2

    def call(self, inputs, states):
        state = states[0] + ops.sum(inputs, axis=-1, keepdims=True)
        return state[:, :2] * ops.convert_to_tensor([1.0, 2.0], state.dtype), [state]


def lstm_and_gru(dtype=None, **options):
    layers = [
        keras.layers.LSTM(4, dropout=0.3, seed=1, dtype=dtype, **STATES),
        VariationalDropout(0.2, seed=2, dtype=dtype),
        keras.layers.GRU(5, recurrent_dropout=0.3, seed=3, dtype=dtype, **STATES),
    ]
    return StackedRNN(layers, dtype=dtype, **options)


def simple_and_cells():
    cells = [keras.layers.LSTMCell(4), keras.layers.GRUCell(3, dropout=0.3, seed=3)]
    layers = [
        keras.layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.2, seed=1, **STATES),
        keras.layers.Dropout(0.3, seed=2),
        keras.layers.RNN(cells, **STATES),
        keras.layers.RNN(Counter(), **STATES),
    ]
    return StackedRNN(layers, return_state=True)


@pytest.mark.both_backends(slow=True)
def test_stacked_rnn():
    check_layer(functools.partial(lstm_and_gru, return_state=True), (2, 5, 3))


@pytest.mark.parametrize(
    ("make", "sizes"), [(lstm_and_gru, [4, 4, 5]), (simple_and_cells, [4, 4, 4, 3, 3])]
)
def test_stacked_rnn_equals_its_layers(make, sizes):
    stack = made(make, (1, 1, 3))
    assert stack.state_sizes == sizes
    stack.return_state = True
    x, states = noise(2, 6, 3), [noise(2, size, seed=size) for size in sizes]
    y, remaining, last = x, iter(states), []
    for layer in stack.layers:
        if isinstance(layer, keras.layers.RNN):
            initial = keras.tree.map_structure(lambda _: next(remaining), layer.state_size)
            y, *new = layer(y, initial_state=initial)
            last += keras.tree.flatten(new)
    assert_all_close(stack(x, initial_state=states), [y, *last])
    check_streaming(stack, x, initial_state=states)


@both
@exact
@pytest.mark.parametrize("training", [False, True])
def test_stacked_rnn_keeps_its_precision(training, floatx):
    layer = made(
        lambda: StackedRNN([keras.layers.SimpleRNN(4, **STATES), keras.layers.LSTM(3, **STATES)]),
        (2, 5, 3),
    )

    def lstm(x, h, c, kernel, recurrent_kernel, bias):
        i, f, g, o = np.split(x @ kernel + h @ recurrent_kernel + bias, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c

    x, expected = noise(2, 5, 3), []
    kernel, recurrent_kernel, bias, *weights = layer.get_weights()
    h, (s, c) = np.zeros((2, 4)), np.zeros((2, 2, 3))
    for t in range(5):
        h = np.tanh(x[:, t] @ kernel + h @ recurrent_kernel + bias)
        s, c = lstm(h, s, c, *weights)
        expected.append(s)
    y = layer(x, training=training)
    step, _ = layer.step(x[:, 0], layer.initial_cache(2))
    tolerance = 1e-14 if floatx == "float64" else 1e-6
    assert keras.backend.standardize_dtype(y.dtype) == floatx
    np.testing.assert_allclose(y, np.stack(expected, axis=1), atol=tolerance)
    np.testing.assert_allclose(step, expected[0], atol=tolerance)


@both
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_cudnn_on_jax_is_for_float32_only(policy):
    layer = lstm_and_gru(dtype=policy)
    expected = False if ON_JAX and policy != "float32" else "auto"
    for stack in (layer, StackedRNN.from_config(layer.get_config())):
        assert stack.layers[0].use_cudnn == expected


@pytest.mark.skipif(ON_JAX, reason="reads a TensorFlow graph")
def test_stacked_rnn_draws_nothing_in_inference():
    layer, x = made(lstm_and_gru, (1, 1, 3)), noise(2, 5, 3)
    calls = {
        "call": layer,
        "prefill": layer.prefill,
        "step": lambda x: layer.step(x[:, 0], layer.initial_cache(2)),
    }
    for call in calls.values():
        assert "Random" not in graph_of(call, x)
    assert "Random" in graph_of(lambda x: layer(x, training=True), x)
    assert layer.layers[0].cell.dropout == 0.3


def test_inference_in_another_thread_leaves_the_rates_of_training():
    upper, seen, looked = keras.layers.LSTM(4, dropout=0.3, **STATES), [], threading.Event()

    class Between(keras.layers.Dropout):
        def call(self, inputs, training=False):
            if training:
                other.start()
                other.join(0.5)  # long enough to come here, if nothing holds it
                seen.append(upper.cell.dropout)
                looked.set()
            else:
                looked.wait()
            return inputs

    layer = StackedRNN([keras.layers.LSTM(4, **STATES), Between(0.0), upper])
    layer.build((2, 5, 3))
    other = threading.Thread(target=layer, args=(noise(2, 5, 3),))
    layer(noise(2, 5, 3), training=True)
    other.join()
    assert seen == [0.3] and upper.cell.dropout == 0.3


def test_bad_layers():
    gru = functools.partial(keras.layers.GRU, 3, **STATES)
    for layers in ([keras.layers.Dropout(0.1)], gru(), [gru(), keras.layers.Dense(3)]):
        with pytest.raises(ValueError, match="layers"):
            StackedRNN(layers)
    with pytest.raises((TypeError, ValueError), match="runs forwards only"):
        keras.layers.Bidirectional(StackedRNN([gru()]))
    with pytest.raises(ValueError, match=r"different objects.*Received: \['twice', 'twice'\]"):
        StackedRNN([gru(name="twice")] * 2)
    for name in ("return_sequences", "return_state", "stateful", "go_backwards"):
        with pytest.raises(ValueError, match=name):
            StackedRNN([gru(), gru(**{name: name not in STATES})])
