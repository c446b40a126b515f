"""LRU: equal to the same cells in `keras.layers.RNN`, states, masks, streaming, arguments."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import check_streaming, compiled
from trellis_keras.layers import LRU


def exact():
    return {"float64": 1e-13, "float32": 2e-6}[keras.config.floatx()]


ON_JAX = keras.backend.backend() == "jax"


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def make(units=4, depth=2, channels=None, batch=None, **options):
    options.setdefault("bias_initializer", keras.initializers.RandomNormal(stddev=0.5, seed=7))
    options.setdefault("return_sequences", True)
    layer = LRU(units, depth, **({"seed": 3} | options))
    layer.build((batch, None, channels or units))
    return layer


def assert_same(actual, reference, tolerance=None):
    tolerance = exact() if tolerance is None else tolerance
    actual, reference = ops.convert_to_numpy(actual), ops.convert_to_numpy(reference)
    assert actual.dtype == reference.dtype == keras.config.floatx()
    assert actual.shape == reference.shape
    assert np.abs(actual - reference).max() <= tolerance * max(np.abs(reference).max(), 1e-30)


MASK = np.array([[1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 0], [0] * 6], bool)

# The cells in keras.layers.RNN

CASES = {
    "ug": {},
    "rg": {"variant": "rg"},
    "ps, authors": {"variant": "ps", "convention": "authors"},
    "ps, masked": {"variant": "ps", "masked": True},
    "ug, masked, dropout": {"masked": True, "dropout": 0.4, "recurrent_dropout": 0.4},
    "two cells a node, masked": {"cells_per_node": 2, "masked": True},
    "no gate bias, dropout": {"use_gate_bias": False, "dropout": 0.4},
    "last step": {"variant": "rg", "return_sequences": False},
    "last step, masked": {"return_sequences": False, "masked": True},
    "last step, two cells a node, no bias": {
        "return_sequences": False,
        "cells_per_node": 2,
        "use_bias": False,
    },
}
# Those that JAX and float64 repeat in each run.
OFTEN = ("ug", "ug, masked, dropout")


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in OFTEN else pytest.mark.slow_elsewhere)
        for case in CASES
    ],
)
def test_equals_an_rnn_of_its_cells(case):
    """Outputs, states, and gradients with respect to weights, input and first states."""
    options = dict(CASES[case])
    mask = MASK if options.pop("masked", False) else None
    if ON_JAX and mask is not None and not options.get("return_sequences", True):
        mask = MASK[:, ::-1] | True  # Keras repeats a state in the place of the output there
    layer = make(5, return_state=True, **options)
    rnn = keras.layers.RNN(layer.cells, return_sequences=layer.return_sequences, return_state=True)
    rnn.build((None, None, 5))
    tensor = None if mask is None else ops.convert_to_tensor(mask)
    counted = (
        np.ones((3, 6), keras.config.floatx())
        if mask is None or not ON_JAX
        else mask.astype(keras.config.floatx())
    )

    def results(layer):
        for seed in layer.non_trainable_variables:
            seed.assign(ops.ones_like(seed.value))

        def loss(x, *states):
            y, *last = layer(x, initial_state=list(states), mask=tensor, training=True)
            y = y * counted[..., None] if len(y.shape) == 3 else y
            last = keras.tree.flatten(last)
            return ops.sum(y**4) + sum(ops.sum(s * s) for s in last), (y, last)

        inputs = [random((3, 6, 5)), random((3, 5), 1), random((3, 5), 2)]
        (value, aux), by_weight, by_input = value_and_gradients(
            loss, layer.trainable_variables, *inputs
        )
        return keras.tree.flatten([value, aux, by_weight, by_input])

    for ours, reference in zip(results(layer), results(rnn), strict=True):
        assert_same(ours, reference)


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("cells_per_node", [1, 2])
def test_masked_steps_keep_the_state_and_repeat_the_output(cells_per_node):
    layer = make(return_state=True, cells_per_node=cells_per_node)
    ends = make(return_sequences=False, cells_per_node=cells_per_node)
    ends.set_weights(layer.get_weights())
    x, states = random((3, 6, 4)), [random((3, 4), 1), random((3, 4), 2)]
    mask = ops.convert_to_tensor(MASK)
    y, *last = layer(x, initial_state=states, mask=mask)
    end = ops.convert_to_numpy(ends(x, initial_state=states, mask=mask))
    y, last = ops.convert_to_numpy(y), [ops.convert_to_numpy(s) for s in last]
    for row in range(2):
        valid = x[row : row + 1, MASK[row]]
        alone, *states_alone = layer(valid, initial_state=[s[row : row + 1] for s in states])
        assert_same(y[row, MASK[row]], alone[0])
        assert_same(end[row], alone[0, -1])
        for ours, wanted in zip(last, states_alone, strict=True):
            assert_same(ours[row : row + 1], wanted)
    np.testing.assert_array_equal(y[0, 5], y[0, 4])
    np.testing.assert_array_equal(y[1, 0], 0)
    np.testing.assert_array_equal(y[1, 3], y[1, 2])
    np.testing.assert_array_equal(y[2], 0)
    np.testing.assert_array_equal(end[2], 0)
    for ours, first in zip(last, states, strict=True):
        np.testing.assert_array_equal(ours[2], first[2])


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_masks_come_from_keras_layers_and_go_on():
    layer = make(return_state=True)
    x = random((2, 6, 4))
    x[0, 3:] = 0
    model = keras.Sequential([keras.Input((None, 4)), keras.layers.Masking(), make()])
    model.layers[-1].set_weights(layer.get_weights())
    assert_same(model(x)[0, 5], layer(x[:1, :3])[0][0, 2])
    mask = ops.ones((2, 6), "bool")
    assert make().compute_mask(None, mask) is mask
    assert layer.compute_mask(None, mask) == (mask, None, None)
    assert make(return_sequences=False).compute_mask(None, mask) is None


# Work


@pytest.mark.skipif(ON_JAX, reason="looks into a TF graph")
def test_a_step_has_two_products_and_its_gradient_two():
    """So no weight's gradient is added up step by step."""
    import tensorflow as tf

    layer = make(8, 1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    graph = step.get_concrete_function(
        tf.TensorSpec((None, 6, 8), keras.config.floatx())
    ).graph.as_graph_def()
    bodies = [f for f in graph.library.function if "while_body" in f.signature.name]
    products = [sum(node.op == "MatMul" for node in f.node_def) for f in bodies]
    assert products == [2, 2]


# States


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_stateful_equals_one_long_sequence():
    layer = make(batch=2, stateful=True)
    whole = make()
    whole.set_weights(layer.get_weights())
    x = random((2, 8, 4))
    y = ops.convert_to_numpy(whole(x))
    for start in (0, 4):
        assert_same(layer(x[:, start : start + 4]), y[:, start : start + 4])
    layer.reset_state()
    assert_same(layer(x[:, :4]), y[:, :4])
    layer.reset_state(batch_size=1)
    assert_same(layer(x[:1, :4]), y[:1, :4])


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_training_and_evaluation_carry_states_of_their_own():
    layer = make(batch=2, stateful=True)
    model = keras.Sequential([keras.Input((3, 4), batch_size=2), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=True)
    x = random((2, 3, 4))
    model.evaluate(x, x, verbose=0)
    states = [ops.convert_to_numpy(s) for s in layer.state_cache.read(2, training=False)]
    assert np.abs(states[0]).max() > 0
    assert not any(np.abs(ops.convert_to_numpy(s)).max() for s in layer.state_cache.read(2, True))
    model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    for ours, before in zip(layer.state_cache.read(2, training=False), states, strict=True):
        np.testing.assert_array_equal(ours, before)
    for ours, evaluated in zip(layer.state_cache.read(2, True), states, strict=True):
        assert_same(ours, evaluated)


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("options", [{}, {"variant": "ps", "cells_per_node": 2}], ids=["ug", "ps"])
def test_streaming_equals_forward(options):
    layer = make(5, 2, channels=2, input_projection=True, **options)
    states = [random((2, 5), i) for i in range(2)]
    check_streaming(layer, random((2, 6, 2)), 3, initial_state=states)


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_prefill_returns_all_steps():
    layer = make(return_sequences=False)
    x = random((2, 6, 4))
    y, cache = layer.prefill(x)
    assert y.shape == (2, 6, 4)
    assert_same(y[:, -1], layer(x))
    assert [tuple(state.shape) for state in cache] == [(2, 4)] * 2


def test_bad_stream():
    layer = make()
    with pytest.raises(ValueError, match="not built"):
        LRU(3).initial_cache(1)
    with pytest.raises(ValueError, match="batch_size"):
        layer.initial_cache(0)
    with pytest.raises(ValueError, match="must hold 2 tensors"):
        layer.initial_cache(2, initial_state=[random((2, 4))])
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(random((3, 4)), layer.initial_cache(2))
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(random((2, 4)), make(depth=3).initial_cache(2))
    with pytest.raises(ValueError, match="must have shape"):
        layer.step(random((2, 5)), layer.initial_cache(2))


# Keras


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_input_projection():
    layer = make(4, channels=3, input_projection=True)
    x = random((2, 5, 3))
    plain = make(4)
    for ours, cell in zip(plain.cells, layer.cells, strict=True):
        ours.set_weights(cell.get_weights())
    assert_same(layer(x), plain(layer.projection(x)))


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
@pytest.mark.parametrize("options", [{}, {"cells_per_node": 2}], ids=["", "two cells a node"])
def test_fit_with_xla(options):
    """11 rows in batches of 6: the last batch is another shape."""
    layer = make(depth=1, dropout=0.05, recurrent_dropout=0.05, **options)
    model = keras.Sequential([keras.Input((6, 4)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=True)
    x = random((11, 6, 4))
    y = np.cumsum(x[..., :1], axis=1)
    losses = model.fit(x, y, batch_size=6, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    "jit_compile",
    [False, pytest.param(True, marks=pytest.mark.both_backends)],
    ids=["graph", "XLA"],
)
def test_fit_on_batches_of_different_lengths(jit_compile):
    """Keras gives the model neither a static length nor a batch size then."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            x = random((4, 4 + 2 * (i % 2), 4))
            x[0, 2:] = 0
            return x, x[:, -1, :1]

    layer = make(depth=1, return_sequences=False)
    layers = [keras.Input((None, 4)), keras.layers.Masking(), layer, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit_compile)
    losses = model.fit(Batches(), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_unknown_length():
    x = random((2, 7, 4))
    for options in ({}, {"cells_per_node": 2, "return_sequences": False}):
        layer = make(**options)
        model = keras.Sequential([keras.Input((None, 4)), layer])
        assert_same(model.predict(x, verbose=0), layer(x))


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_mixed_precision():
    layer = make(8, dtype="mixed_bfloat16", return_state=True)
    full = make(8, return_state=True)
    full.set_weights(layer.get_weights())
    x = random((3, 6, 8))
    y, *states = layer(x)
    wanted, *wanted_states = full(x)
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert all(keras.backend.standardize_dtype(s.dtype) == keras.config.floatx() for s in states)
    assert all(v.dtype == keras.config.floatx() for v in layer.trainable_variables)
    assert_same(ops.cast(y, keras.config.floatx()), wanted, tolerance=0.03)
    assert_same(states[0], wanted_states[0], tolerance=0.03)
    model = keras.Sequential([keras.Input((6, 8)), make(8, 1, dtype="mixed_bfloat16")])
    model.compile("adam", "mse", jit_compile=True)
    losses = model.fit(x, x, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_config_and_file(tmp_path):
    options = {
        "variant": "rg",
        "convention": "authors",
        "cells_per_node": 2,
        "use_gate_bias": False,
        "input_projection": True,
        "return_state": True,
        "kernel_initializer": keras.initializers.GlorotNormal(seed=2),
        "kernel_regularizer": keras.regularizers.L2(0.1),
        "recurrent_constraint": keras.constraints.MaxNorm(1.0),
        "dropout": 0.1,
        "recurrent_dropout": 0.2,
    }
    layer = make(4, 3, channels=5, **options)
    again = LRU.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert set(options) <= set(layer.get_config())
    x = keras.Input((None, 5))
    model = keras.Model(x, layer(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = random((2, 6, 5))
    for ours, wanted in zip(loaded(x), model(x), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_every_weight_has_numbers_of_its_own():
    for options in ({"seed": 3}, {"kernel_initializer": keras.initializers.GlorotUniform(3)}):
        layer = LRU(4, 3, cells_per_node=2, **options)
        layer.build((None, None, 4))
        weights = [ops.convert_to_numpy(w) for w in layer.weights if len(w.shape) > 1]
        assert len({w.tobytes() for w in weights}) == len(weights) == 12
    a, b = (make(seed=3), make(seed=3))
    for ours, same in zip(a.weights, b.weights, strict=True):
        np.testing.assert_array_equal(ours, same)


def test_shapes():
    layer = make(6, 3, return_state=True)
    y, *states = layer(keras.Input((None, 6)))
    assert y.shape == (None, None, 6)
    assert [s.shape for s in states] == [(None, 6)] * 3
    assert make(return_sequences=False)(keras.Input((9, 4))).shape == (None, 4)
    assert make().compute_output_shape((2, 9, 4)) == (2, 9, 4)
    assert LRU(4).return_sequences is False  # as in Keras' LSTM


def test_a_step_compiles_once_for_many_steps():
    layer = make()
    x = random((2, 5, 4))
    step = compiled(lambda x, cache: layer.step(x, cache))
    cache, y = layer.initial_cache(2), []
    for t in range(5):
        out, cache = step(ops.convert_to_tensor(x[:, t]), cache)
        y.append(ops.convert_to_numpy(out))
    assert_same(np.stack(y, axis=1), layer(x))


BAD = {
    "units.*positive": {"units": 0},
    "depth.*positive": {"depth": 0},
    "variant": {"variant": "full"},
    "convention": {"convention": "keras"},
    "cells_per_node.*positive": {"cells_per_node": 0},
    "dropout.*0, 1": {"dropout": 1.0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        LRU(**({"units": 4} | BAD[message]))


def test_bad_input():
    with pytest.raises(ValueError, match="units=4.*5.*input_projection"):
        LRU(4)(random((1, 3, 5)))
    layer = make()
    with pytest.raises(ValueError, match="expected axis -1"):
        layer(random((1, 3, 5)))
    for shapes in ([(2, 4)], [(2, 4)] * 3, [(2, 4), (2, 5)], [(2, 4), (3, 4)]):
        with pytest.raises(ValueError, match="must hold 2 tensors"):
            layer(
                random((2, 3, 4)),
                initial_state=[np.zeros(s, keras.config.floatx()) for s in shapes],
            )
    with pytest.raises(ValueError, match="stateful=True"):
        layer.reset_state()
    with pytest.raises(ValueError, match="fixed batch size"):
        make(stateful=True)(random((2, 3, 4)))
