"""StackedRNN: Keras' layers as one, carried states, masks, streaming, no draws in inference."""

import threading
import time

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import assert_close, check_streaming, compiled
from trellis_keras.layers import TrellisLayer, VariationalDropout
from trellis_keras.layers.base import tanh
from trellis_keras.layers.rnn import StackedRNN, _without_dropout

both = pytest.mark.both_backends
exact = pytest.mark.float64

STATES = {"return_sequences": True, "return_state": True}
# (Keras' own tanh leaves float64 on JAX.)
EXACT = {
    "activation": tanh,
    "bias_initializer": keras.initializers.RandomNormal(stddev=0.5, seed=7),
}


def lstm(units, **options):
    return keras.layers.LSTM(units, **{**EXACT, **STATES, **options})


def gru(units, **options):
    return keras.layers.GRU(units, **{**EXACT, **STATES, **options})


def simple(units, **options):
    return keras.layers.SimpleRNN(units, **{**EXACT, **STATES, **options})


def rnn_of_cells(**options):
    cells = [keras.layers.LSTMCell(4, **EXACT), keras.layers.GRUCell(3, **EXACT)]
    return keras.layers.RNN(cells, **{**STATES, **options})


@keras.saving.register_keras_serializable("test_stacked_rnn")
class Counter(keras.layers.Layer):
    """A cell that takes no `training`, and whose output is neither its state nor of its size."""

    state_size = 3
    output_size = 2

    def call(self, inputs, states):
        state = states[0] + ops.sum(inputs, axis=-1, keepdims=True)
        return state[:, :2] * ops.convert_to_tensor([1.0, 2.0], state.dtype), [state]


VARIANTS = {
    "lstm, gru": lambda: [lstm(4), gru(5)],
    "rnn, dropouts": lambda: [
        simple(4),
        keras.layers.Dropout(0.3, seed=1),
        lstm(3),
        VariationalDropout(0.2, seed=2),
    ],
    "cells": lambda: [rnn_of_cells(), keras.layers.RNN(keras.layers.GRUCell(2, **EXACT), **STATES)],
    "another cell": lambda: [gru(4), keras.layers.RNN(Counter(), **STATES)],
    "dropout in cells": lambda: [
        simple(4, dropout=0.3, recurrent_dropout=0.2, seed=3),
        gru(3, dropout=0.3, recurrent_dropout=0.2, seed=4),
        keras.layers.RNN(keras.layers.SimpleRNNCell(3, dropout=0.4, seed=5, **EXACT), **STATES),
    ],
}
SIZES = {
    "lstm, gru": [4, 4, 5],
    "rnn, dropouts": [4, 3, 3],
    "cells": [4, 4, 3, 2],
    "another cell": [4, 3],
    "dropout in cells": [4, 3, 3],
}
variants = pytest.mark.parametrize("name", VARIANTS)
# Keras' RNN takes a mask on JAX only if the cell's output is its one state, or the first of them.
MASKED = ["lstm, gru"]
if keras.backend.backend() != "jax":
    MASKED += ["cells", "another cell"]


def make(name="lstm, gru", channels=3, batch=None, **options):
    keras.utils.set_random_seed(1)
    layer = StackedRNN(VARIANTS[name](), **options)
    layer.build((batch, None, channels))
    return layer


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def states_for(layer, batch, seed=5):
    return [random(batch, size, seed=seed + i) for i, size in enumerate(layer.state_sizes)]


@pytest.mark.slow_elsewhere
@both
@exact
@variants
def test_equals_the_layers_in_sequence(name):
    stack = make(name, return_state=True)
    x = random(2, 6, 3)
    y, *states = stack(x)
    wanted, last = ops.convert_to_tensor(x), []
    for layer in stack.layers:
        if isinstance(layer, keras.layers.RNN):
            wanted, *new = layer(wanted)
            last += keras.tree.flatten(new)
    assert [state.shape[-1] for state in last] == stack.state_sizes == SIZES[name]
    for ours, reference in zip([y, *states], [wanted, *last], strict=True):
        assert_close(ours, reference)
    short = StackedRNN(stack.layers, return_sequences=False)
    assert_close(short(x), wanted[:, -1])


@pytest.mark.slow_elsewhere
@exact
@variants
def test_states_hand_on(name):
    layer = make(name, return_state=True)
    x, initial = random(2, 7, 3), states_for(make(name), 2)
    y, *last = layer(x, initial_state=initial)
    first, *middle = layer(x[:, :3], initial_state=initial)
    second, *end = layer(x[:, 3:], initial_state=middle)
    assert_close(ops.concatenate([first, second], axis=1), y)
    for a, b in zip(end, last, strict=True):
        assert_close(a, b)
    assert not np.allclose(first, layer(x[:, :3])[0])


@both
@exact
@pytest.mark.parametrize("name", ["lstm, gru", "cells"])
def test_stateful_carries_states_without_gradient(name):
    layer, plain = make(name, batch=2, stateful=True), make(name)
    plain.set_weights(layer.get_weights())
    x = random(2, 9, 3)
    pieces = [layer(x[:, i : i + 3]) for i in range(0, 9, 3)]
    assert_close(ops.concatenate(pieces, axis=1), plain(x))
    layer.reset_state()
    assert_close(layer(x[:, :3]), pieces[0])

    def loss(a, b):
        layer(a)
        return ops.sum(layer(b)), None

    _, _, (of_a, of_b) = value_and_gradients(loss, [], x[:, :3], x[:, 3:])
    assert not np.any(ops.convert_to_numpy(of_a)) and np.any(ops.convert_to_numpy(of_b))


@pytest.mark.slow_elsewhere
@both
def test_training_and_evaluation_have_states_of_their_own():
    layer, x = make(batch=2, stateful=True), random(2, 3, 3)
    layer(x, training=True)
    held = [np.asarray(s) for s in layer.state_cache.read(2, training=True)]
    assert all(np.any(s) for s in held)
    assert not any(np.any(s) for s in layer.state_cache.read(2, training=False))
    layer(x)
    layer.reset_state(5, training=False)
    layer(random(5, 3, 3))
    for before, after in zip(held, layer.state_cache.read(2, training=True), strict=True):
        np.testing.assert_array_equal(before, after)


def test_carried_states_are_no_weights():
    assert len(make(batch=2, stateful=True).weights) == len(make().weights) == 6


@pytest.mark.slow_elsewhere
@both
@exact
@pytest.mark.parametrize("side", ["pre", "post"])
@pytest.mark.parametrize("name", MASKED)
def test_masks_equal_unpadded_sequences(name, side):
    layer = make(name, return_state=True)
    last = StackedRNN(layer.layers, return_sequences=False)
    lengths, time = [3, 6, 1], 6
    x, mask = random(3, time, 3), np.zeros((3, time), bool)
    for row, n in enumerate(lengths):
        mask[row, time - n :] = side == "pre"
        mask[row, :n] |= side == "post"
    y, *states = layer(x, mask=ops.convert_to_tensor(mask))
    y, ends = ops.convert_to_numpy(y), last(x, mask=ops.convert_to_tensor(mask))
    for row in range(3):
        alone, *its_states = layer(x[row][mask[row]][None])
        assert_close(y[row][mask[row]], alone[0])
        assert_close(ends[row], alone[0, -1])
        for state, wanted in zip(states, its_states, strict=True):
            assert_close(state[row], wanted[0])


@pytest.mark.slow_elsewhere
@both
def test_a_row_without_a_valid_step():
    layer = make(return_sequences=False)
    y = ops.convert_to_numpy(layer(random(2, 4, 3), mask=np.arange(2)[:, None] == [1] * 4))
    assert not y[0].any() and y[1].any()


@pytest.mark.slow_elsewhere
@both
def test_masks_come_from_keras_layers():
    x = random(2, 5, 3)
    x[0, 3:] = 0
    layer = make(return_sequences=False)
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.Masking(), layer])
    assert_close(model(x)[0], layer(x[:1, :3])[0])


@both
@exact
@pytest.mark.parametrize(
    ("name", "given"), [(name, False) for name in VARIANTS] + [("lstm, gru", True)]
)
def test_streaming_equals_forward(name, given):
    layer = make(name)
    initial = {"initial_state": states_for(layer, 2)} if given else {}
    check_streaming(layer, random(2, 6, 3), steps=3, **initial)


def test_step_compiles_once_for_many_steps():
    layer, x = make("cells"), random(2, 5, 3)
    traced = []

    def one(x, cache):
        traced.append(None)
        return layer.step(x, cache)

    step, cache, y = compiled(one), layer.initial_cache(2), []
    for t in range(5):
        out, cache = step(ops.convert_to_tensor(x[:, t]), cache)
        y.append(out)
    assert_close(ops.stack(y, axis=1), layer(x))
    assert len(traced) == 1


def seeds(layer):
    return [
        np.asarray(v)
        for v in layer.non_trainable_variables
        if "seed" in v.path or keras.backend.is_int_dtype(v.dtype)
    ]


@pytest.mark.slow_elsewhere
@both
def test_inference_draws_nothing():
    layer, x = make("dropout in cells"), random(2, 5, 3)
    before = seeds(layer)
    assert before
    first = ops.convert_to_numpy(layer(x))
    layer.step(x[:, 0], layer.initial_cache(2))
    layer.prefill(x)
    for a, b in zip(before, seeds(layer), strict=True):
        np.testing.assert_array_equal(a, b)
    # The rates are back: training drops, and differently each time.
    a, b = (ops.convert_to_numpy(layer(x, training=True)) for _ in range(2))
    assert not np.allclose(a, first) and not np.allclose(a, b)
    assert layer.layers[0].cell.dropout == 0.3 and layer.layers[1].cell.recurrent_dropout == 0.2


def test_threads_leave_the_rates_of_cells_as_they_are():
    layer = lstm(4, dropout=0.3)

    def infer():
        for _ in range(50):
            with _without_dropout([layer]):
                time.sleep(1e-4)  # others' turn

    threads = [threading.Thread(target=infer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layer.cell.dropout == 0.3


def test_inference_in_another_thread_leaves_the_rates_of_training():
    upper, seen, looked = lstm(4, dropout=0.3), [], threading.Event()

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

    layer = StackedRNN([lstm(4), Between(0.0), upper])
    layer.build((2, 5, 3))
    other = threading.Thread(target=layer, args=(random(2, 5, 3),))
    layer(random(2, 5, 3), training=True)
    other.join()
    assert seen == [0.3]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="looks into TensorFlow graphs")
@pytest.mark.parametrize("training", [False, True])
def test_no_random_op_in_graphs_of_inference(training):
    import tensorflow as tf

    layer = make("dropout in cells")

    @tf.function
    def outputs(x):
        y = layer(x, training=training)
        return y if training else (y, *layer.step(x[:, 0], layer.initial_cache(2)))

    graph = outputs.get_concrete_function(
        tf.zeros((2, 5, 3), keras.config.floatx())
    ).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    assert any("Random" in node.op for node in nodes) == training


@variants
def test_config_and_file(name, tmp_path):
    names = {"activation": "tanh", "bias_initializer": "random_normal"}
    again = {**EXACT, **names}
    with pytest.MonkeyPatch.context() as patch:
        for key in EXACT:
            patch.setitem(EXACT, key, again[key])
        layer = make(name, return_state=True)
    copy = StackedRNN.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    x = random(2, 5, 3)
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(model.predict(x, verbose=0), loaded.predict(x, verbose=0), strict=True):
        np.testing.assert_array_equal(a, b)


def test_shapes():
    layer = make(return_state=True)
    assert layer.compute_output_shape((7, None, 3)) == ((7, None, 5), (7, 4), (7, 4), (7, 5))
    y, *states = layer(keras.Input((None, 3)))
    assert y.shape == (None, None, 5) and [s.shape[-1] for s in states] == [4, 4, 5]
    assert make(return_sequences=False)(keras.Input((9, 3))).shape == (None, 5)
    assert make().compute_mask(None, ops.ones((2, 9))).shape == (2, 9)
    assert make(return_sequences=False).compute_mask(None, ops.ones((2, 9))) is None


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layer = make(return_state=True)
    finally:
        keras.config.set_dtype_policy(keras.config.floatx())
    y, *states = layer(random(2, 5, 3))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert {keras.backend.standardize_dtype(s.dtype) for s in states} == {"float32"}
    y, cache = layer.step(random(2, 3), layer.initial_cache(2))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert {keras.backend.standardize_dtype(s.dtype) for s in cache} == {"float32"}


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=both, id="all"), pytest.param({"return_sequences": False}, id="last")],
)
def test_fit_with_xla(options):
    """11 rows in batches of 4: the last batch is another shape."""
    layer = StackedRNN([gru(5, dropout=0.05, seed=1), keras.layers.Dropout(0.05)], **options)
    model = keras.Sequential([keras.Input((6, 3)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=True)
    x = random(11, 6, 3)
    y = x.sum(axis=-1, keepdims=True) if not options else x[:, -1].sum(axis=-1)[:, None]
    losses = model.fit(x, y, batch_size=4, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


BAD = {
    "at least one recurrent layer": lambda: [keras.layers.Dropout(0.1)],
    "`layers` must be a list": lambda: lstm(3),
    "must be keras.layers.LSTM": lambda: [lstm(3), keras.layers.Dense(3)],
    "return_sequences=True": lambda: [lstm(3, return_sequences=False), gru(3)],
    "return_state=True": lambda: [lstm(3), gru(3, return_state=False)],
    "stateful=False": lambda: [lstm(3, stateful=True)],
    "go_backwards=False": lambda: [gru(3, go_backwards=True)],
    "Received: .*Trellis": lambda: [gru(3), TrellisLayer(4, 2)],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_layers(message):
    with pytest.raises(ValueError, match=message):
        StackedRNN(BAD[message]())


def test_bad_states_and_streams():
    layer, x = make(), random(2, 5, 3)
    for wrong in (states_for(layer, 2)[:2], states_for(layer, 3), [random(2, 4)] * 3):
        with pytest.raises(ValueError, match=r"must hold 3 tensors of shapes \[\(2, 4\)"):
            layer(x, initial_state=wrong)
    with pytest.raises(ValueError, match="stateful=True"):
        layer.reset_state()
    with pytest.raises(ValueError, match="fixed batch size"):
        make(stateful=True)(x)
    with pytest.raises(ValueError, match="3 rows. Received: 2 rows"):
        make(batch=3, stateful=True)(x)
    with pytest.raises(ValueError, match="not built"):
        StackedRNN([gru(3)]).initial_cache(1)
    with pytest.raises(ValueError, match="batch_size"):
        layer.initial_cache(0)
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(random(3, 3), layer.initial_cache(2))
    with pytest.raises(ValueError, match="must have shape"):
        layer.step(random(2, 4), layer.initial_cache(2))


@both
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_cudnn_on_jax_is_for_float32_alone(policy):
    options = {"return_sequences": True, "return_state": True, "dtype": policy}
    layer = StackedRNN([keras.layers.LSTM(3, **options), keras.layers.GRU(3, **options)])
    on_jax = keras.backend.backend() == "jax"
    expected = False if on_jax and policy != "float32" else "auto"
    for stack in (layer, StackedRNN.from_config(layer.get_config())):
        assert stack.layers[0].use_cudnn == expected
