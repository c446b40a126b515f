"""TrellisLayer as a Keras layer: configs, shapes, masks, histories, cells, bad input."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from trellis_keras.layers import GatedActivation, TrellisLayer


@keras.saving.register_keras_serializable("tests")
class MinimalGate(GatedActivation):
    preactivation_blocks = 2

    def call(self, inputs, states):
        forget, candidate = ops.split(inputs, 2, axis=-1)
        forget = ops.sigmoid(forget)
        h = (1 - forget) * states[0] + forget * ops.sigmoid(candidate)
        return h, [h]


LIVELY = {
    f"{name}_initializer": keras.initializers.RandomNormal(stddev=0.6, seed=i)
    for i, name in enumerate(("kernel", "recurrent", "bias"))
}

SETTINGS = {
    "plain": {},
    "output": {"output_units": 3},
    "kernel_3": {"kernel_size": 3, "dilation_rate": [1, 2]},
    "kernel_1": {"kernel_size": 1},
    "gru": {"cell": "gru"},
    "rnn": {"cell": "rnn", "injection_every": 2},
    "mgu": {"cell": "mgu"},
    "own_cell": {"cell": MinimalGate(8)},
    "mixed_group": {
        "kernel_structure": "mixed_group",
        "groups": [3, 5],
        "group_starts": [1, 2],
        "output_units": 5,
    },
    "group_starts": {"groups": [2, 2, 4], "group_starts": [2, 4, 3], "output_units": 6},
    "weight_norm": {"weight_norm": True, "kernel_regularizer": "l2"},
    "aux": {"aux_every": 2, "return_aux": True},
    "aux_from_top": {"aux_every": 2, "aux_from": "top", "return_aux": True},
    "state": {"return_state": True},
    "last_step": {"return_sequences": False, "return_state": True},
    "last_step_aux": {"return_sequences": False, "aux_every": 2, "return_aux": True},
    "last_steps": {"output_length": 4, "aux_every": 2, "return_aux": True, "return_state": True},
    "dropout": {"dropout": 0.3, "weight_dropout": 0.4, "seed": 5},
}


def layer_of(name, **more):
    return TrellisLayer(8, 5, **LIVELY, **SETTINGS[name], **more)


def random_input(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def flat(outputs):
    return [np.asarray(t) for t in keras.tree.flatten(outputs)]


@pytest.mark.parametrize("name", SETTINGS)
def test_config_round_trip(name):
    layer = layer_of(name)
    x = random_input(2, 9, 4)
    expected = layer(x)
    config = layer.get_config()
    arguments = set(TrellisLayer.__init__.__kwdefaults__) | {"units", "depth"}
    assert arguments <= set(config)
    copy = TrellisLayer.from_config(config)
    copy.build(x.shape)
    copy.set_weights(layer.get_weights())
    assert copy.get_config() == config
    for a, b in zip(flat(expected), flat(copy(x)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", SETTINGS)
def test_shapes_are_those_computed(name):
    layer = layer_of(name)
    x = random_input(2, 9, 4)
    shapes = layer.compute_output_shape(x.shape)
    shapes = [shapes] if isinstance(shapes[0], int) else list(shapes)
    assert [t.shape for t in flat(layer(x))] == shapes
    symbolic = keras.tree.flatten(layer(keras.Input((9, 4), batch_size=2)))
    assert [tuple(t.shape) for t in symbolic] == shapes
    assert all(t.dtype == keras.config.floatx() for t in symbolic)
    unknown = keras.tree.flatten(layer(keras.Input((None, 4))))
    assert len(unknown) == len(shapes)


@pytest.mark.both_backends
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "dropout",
        "own_cell",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gru", "aux", "last_step")),
    ],
)
def test_a_model_trains_and_is_saved(name, tmp_path):
    inputs = keras.Input((None, 4))
    outputs = keras.tree.flatten(layer_of(name)(inputs))[0]
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=True)
    x = random_input(7, 9, 4)
    y = np.zeros((7, 1)) if name == "last_step" else np.zeros((7, 9, 1))
    losses = model.fit(x, y, batch_size=4, epochs=12, verbose=0).history["loss"]
    assert np.mean(losses[-4:]) < losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    predictions = [np.asarray(m.predict(x, verbose=0)) for m in (model, loaded)]
    np.testing.assert_array_equal(*predictions)


@pytest.mark.both_backends
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "kernel_1",
        "kernel_3",
        "gru",
        "own_cell",
        "weight_norm",
        "mixed_group",
        "group_starts",
    ],
)
def test_causality_and_receptive_field(name):
    layer = layer_of(name)
    steps, t = 20, 15
    layer.build((None, None, 4))

    def output(x):
        y = layer(x)[:, t]
        return ops.sum(ops.square(y)), y

    _, _, (gradient,) = value_and_gradients(output, [], random_input(1, steps, 4))
    seen = np.any(np.asarray(gradient)[0] != 0, axis=-1)
    expected = np.zeros(steps, bool)
    expected[max(0, t - layer.receptive_field + 1) : t + 1] = True
    assert np.array_equal(seen, expected)


@pytest.mark.float64
@pytest.mark.parametrize(
    "name", ["plain", "kernel_3", "gru", "mixed_group", "aux", "last_step", "last_step_aux"]
)
@pytest.mark.parametrize("side", ["pre", "post"])
@pytest.mark.parametrize("history", [False, True])
def test_masked_steps_are_as_if_not_there(name, side, history):
    layer = layer_of(name)
    n_states = 1 if name == "gru" else 2
    x, states = random_input(1, 9, 4), [random_input(1, 8, seed=i) for i in range(n_states)]
    states = states if history else None
    padding = random_input(1, 3, 4, seed=9)
    valid = np.ones((1, 12), bool)
    if side == "pre":
        padded, kept = np.concatenate([padding, x], 1), slice(3, None)
        valid[:, :3] = False
    else:
        padded, kept = np.concatenate([x, padding], 1), slice(0, 9)
        valid[:, 9:] = False
    expected = flat(layer(x, initial_state=states))
    actual = flat(layer(padded, initial_state=states, mask=valid))
    for a, b in zip(expected, actual, strict=True):
        b = b[..., kept, :] if layer.return_sequences and b.ndim >= 3 else b
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 if a.dtype == np.float32 else 1e-14)


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("history", [False, True])
def test_last_step_of_rows_of_different_lengths(history):
    layer = layer_of("last_step_aux", return_state=True)
    x, states = random_input(4, 9, 4), [random_input(4, 8, seed=i) for i in range(2)]
    states = states if history else [np.zeros_like(s) for s in states]
    valid = np.zeros((4, 9), bool)
    rows = [slice(0, 9), slice(0, 5), slice(3, 9), slice(0, 0)]  # full, post- and pre-padded, empty
    for row, steps in enumerate(rows):
        valid[row, steps] = True
    actual = flat(layer(x, mask=valid, initial_state=states if history else None))
    for row, steps in enumerate(rows[:3]):
        own = [s[row : row + 1] for s in states]
        expected = flat(layer(x[row : row + 1, steps], initial_state=own))
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a[row], b[0], atol=1e-6 if b.dtype == np.float32 else 1e-14)
    y, aux, h, c = (a[3] for a in actual)  # nothing is valid: the initial states
    np.testing.assert_array_equal([y, *aux, h], [states[0][3]] * 4)
    np.testing.assert_array_equal(c, states[1][3])


@pytest.mark.both_backends
def test_the_mask_of_an_embedding_arrives():
    model = keras.Sequential(
        [keras.layers.Embedding(5, 4, mask_zero=True), layer_of("plain"), keras.layers.LSTM(3)]
    )
    tokens = np.array([[1, 2, 3, 4, 1, 2]])
    padded = np.concatenate([tokens, np.zeros((1, 3), int)], axis=1)
    np.testing.assert_allclose(model(tokens), model(padded), rtol=1e-5, atol=1e-6)


@pytest.mark.both_backends
def test_dropout_is_one_mask_for_all_steps_and_off_in_inference():
    layer = layer_of("dropout")
    x = random_input(2, 9, 4)
    np.testing.assert_array_equal(layer(x), layer(x))
    assert np.any(np.asarray(layer(x, training=True)) != np.asarray(layer(x, training=True)))
    mask = np.asarray(layer.hidden_dropout.mask(random_input(2, 9, 8), training=True))
    assert mask.shape == (2, 1, 8)


@pytest.mark.both_backends
@pytest.mark.float64
def test_injection_every():
    """With x entering at level 1 only, a net of one-step memory forgets it by the last level."""
    layer = TrellisLayer(6, 3, cell="rnn", injection_every=3, **LIVELY)
    x = random_input(1, 8, 4)
    layer.build(x.shape)
    kernel, recurrent = (np.asarray(k.kernel) for k in (layer.kernel, layer.recurrent_kernel))
    bias = np.asarray(layer.bias)

    def convolve(a, w):
        past = np.concatenate([np.zeros_like(a[:, :1]), a[:, :-1]], axis=1)
        return past @ w[0] + a @ w[1]

    h = np.tanh(convolve(x, kernel) + bias)
    for _ in range(2):
        h = np.tanh(convolve(h, recurrent) + bias)
    np.testing.assert_allclose(layer(x), h, atol=1e-6 if x.dtype == np.float32 else 1e-13)


@pytest.mark.both_backends
@pytest.mark.float64
def test_one_gru_level_is_a_step_of_the_keras_cell():
    cell = keras.layers.GRUCell(5, bias_initializer="random_normal")
    x, h = random_input(3, 4), random_input(3, 5, seed=1)
    expected, _ = cell(x, [h])
    layer = TrellisLayer(5, 1, cell="gru")
    layer.build((None, None, 4))
    w, u, b = (np.asarray(v) for v in cell.weights)
    layer.kernel.kernel.assign(np.stack([np.zeros_like(w), w]))
    layer.recurrent_kernel.kernel.assign(np.stack([u, np.zeros_like(u)]))
    layer.bias.assign(np.concatenate([(b[0] + b[1])[:10], b[0][10:], b[1][10:]]))
    actual = layer(x[:, None], initial_state=h)[:, 0]
    np.testing.assert_allclose(actual, expected, atol=1e-6 if x.dtype == np.float32 else 1e-7)


@pytest.mark.both_backends
@pytest.mark.float64
def test_stateful_equals_initial_state():
    plain = layer_of("state")
    stateful = layer_of("plain", stateful=True)
    x = random_input(2, 14, 4)
    stateful.build((2, 7, 4))
    plain.build((2, 7, 4))
    stateful.set_weights(plain.get_weights())
    y, *states = plain(x[:, :7])
    close = {"rtol": 0, "atol": 1e-6 if x.dtype == np.float32 else 1e-14}
    np.testing.assert_allclose(stateful(x[:, :7]), y, **close)
    expected = plain(x[:, 7:], initial_state=states)[0]
    np.testing.assert_allclose(stateful(x[:, 7:]), expected, **close)
    stateful.reset_state()
    np.testing.assert_allclose(stateful(x[:, :7]), y, **close)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"units": 0}, "units=0"),
        ({"depth": -1}, "depth=-1"),
        ({"output_units": 9}, "output_units=9, units=8"),
        ({"kernel_size": 0}, "kernel_size=0"),
        ({"dilation_rate": [1, 0]}, "dilation_rate=0"),
        ({"dilation_rate": []}, "must not be empty"),
        ({"output_length": 0}, "output_length=0"),
        ({"output_length": 3, "return_sequences": False}, "returns one step"),
        ({"aux_every": 6}, "aux_every=6, depth=5"),
        ({"aux_every": 5, "aux_from": "top"}, "aux_every=5, depth=5"),
        ({"aux_from": "middle"}, "middle"),
        ({"return_aux": True}, "aux_every"),
        ({"cell": "lstn"}, "lstn"),
        ({"cell": MinimalGate(7)}, "units=8"),
        ({"cell": MinimalGate}, "a class: pass an instance"),
        ({"kernel_structure": "sparse"}, "mixed_group.*sparse"),
        ({"kernel_structure": "mixed_group"}, "need `groups`"),
        ({"group_starts": [1]}, "need `groups`"),
        ({"groups": [3, 5]}, "would change nothing"),
        ({"kernel_structure": "mixed_group", "groups": [3, 4]}, r"groups=\[3, 4\], units=8"),
        ({"kernel_structure": "mixed_group", "groups": [8, 0]}, r"groups=\[8, 0\]"),
        ({"kernel_structure": "mixed_group", "groups": 8}, "groups=8"),
        ({"kernel_structure": "mixed_group", "groups": [4, 4], "depth": 1}, "depth=1"),
        ({"groups": [3, 5], "group_starts": [1]}, r"group_starts=\[1\], groups=\[3, 5\]"),
        ({"groups": [3, 5], "group_starts": [1, 6]}, r"group_starts=\[1, 6\].*depth=5"),
        ({"groups": [3, 5], "group_starts": [0, 1]}, r"group_starts=\[0, 1\]"),
        ({"unroll": "yes"}, "yes"),
        ({"memory": "slow"}, "slow"),
        ({"dropout": 1.0}, "rate=1.0"),
        ({"weight_dropout": -0.1}, "rate=-0.1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrellisLayer(**({"units": 8, "depth": 5} | arguments))


def test_bad_calls():
    x = random_input(2, 5, 4)
    with pytest.raises(ValueError, match="5 steps, fewer than the dilation 8"):
        TrellisLayer(8, 2, dilation_rate=8)(x)
    with pytest.raises(ValueError, match="output_length=6, input length 5"):
        TrellisLayer(8, 2, output_length=6)(x)
    layer = TrellisLayer(8, 2)
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(2, 7\)"):
        layer(x, initial_state=[random_input(2, 8), random_input(2, 7)])
    with pytest.raises(ValueError, match="hold 2 tensors"):
        layer(x, initial_state=[random_input(2, 8)])
    with pytest.raises(ValueError, match=r"\(3, 8\)"):
        layer(x, initial_state=[random_input(3, 8)] * 2)
    with pytest.raises(ValueError, match="stateful=True"):
        layer.reset_state()
    stateful = TrellisLayer(8, 2, stateful=True)
    stateful.build((None, None, 4))
    with pytest.raises(ValueError, match="reset_state"):
        stateful(x)
    stateful.reset_state(batch_size=3)
    with pytest.raises(ValueError, match="3 rows. Received: 2 rows"):
        stateful(x)


def test_dilations_in_an_array_are_saved():
    layer = TrellisLayer(6, 3, dilation_rate=2 ** np.arange(3))
    assert TrellisLayer.from_config(layer.get_config()).dilation_rate == [1, 2, 4]
    json.dumps(layer.get_config()["dilation_rate"])
