"""Theorem 1: the TrellisNet of an RNN computes the truncated RNN, for layers and for models."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import TENSORFLOW, at_once, noise, randomize
from tests.support.parameters import SLOW_ON_JAX, slow_but
from trellis_keras.layers import RNNGates, StackedRNN, TrellisLayer
from trellis_keras.models import LanguageModel, SequenceClassifier, SequenceRegressor
from trellis_keras.theorem1 import TruncatedRNN, to_dense, to_rnn, to_trellis

LAYERS = {"rnn": layers.SimpleRNN, "lstm": layers.LSTM, "gru": layers.GRU}
CHANNELS = 3
VOCABULARY, M = 7, 5
STATES = {"return_sequences": True, "return_state": True}

each_cell = pytest.mark.parametrize("cell", LAYERS)
in_double = pytest.mark.parametrize("floatx", ["float64"], indirect=True)


def everywhere(function):
    return pytest.mark.both_backends(in_double(function))


@pytest.fixture(autouse=True)
def exact_tanh(monkeypatch):
    """Keeps Keras' own layers in float64 on JAX, where their tanh leaves it."""
    if not TENSORFLOW:
        import jax

        monkeypatch.setattr("keras.src.backend.jax.numpy.tanh", jax.numpy.tanh)


def built(layer, channels=CHANNELS):
    layer.build((None, None, channels))
    return layer


def random_stack(cell, widths, biased=None, seed=0, **options):
    """A list of built layers with random weights, the bottom one first."""
    stack, channels = [], CHANNELS
    for i, (units, use_bias) in enumerate(zip(widths, biased or [True] * len(widths), strict=True)):
        options = {"return_sequences": True} | options
        layer = built(LAYERS[cell](units, use_bias=use_bias, **options), channels)
        stack.append(randomize(layer, 0.6, seed + i))
        channels = units
    return stack


def run(stack, x):
    """The output of a layer, or of layers one above the other, as an array."""
    stack = stack if isinstance(stack, list) else [stack]

    def forward(x):
        return functools.reduce(lambda y, layer: layer(y), stack, x)

    return np.asarray(at_once(forward)(x))


def truncated(stack, x, truncation):
    """The outputs of all steps t, each of the RNN that begins at max(1, t - truncation + 1)."""
    y = run(stack, x[:, :truncation])  # these begin at the first step
    later = range(truncation, x.shape[1])
    if not later:
        return y
    windows = np.concatenate([x[:, t - truncation + 1 : t + 1] for t in later])
    last = np.split(run(stack, windows)[:, -1], len(later))
    return np.concatenate([y, np.stack(last, axis=1)], axis=1)


def assert_same(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == keras.config.floatx()
    assert actual.shape == expected.shape
    error = np.max(np.abs(actual - expected), initial=0.0)
    assert error <= (1e-12 if actual.dtype == np.float64 else 1e-5), f"error {error:.3g}"


# Layers


@st.composite
def networks(draw):
    widths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    biased = draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths)))
    return widths, biased, draw(st.integers(1, 10)), draw(st.integers(0, 99))


def check_network(cell, widths, biased, truncation, seed):
    stack = random_stack(cell, widths, biased, seed)
    x = noise(2, 8, CHANNELS, seed=seed)
    trellis = to_trellis(stack, truncation)
    assert (trellis.depth, trellis.output_units) == (truncation + len(widths) - 1, widths[-1])
    assert trellis.truncation == trellis.receptive_field == truncation
    assert_same(run(trellis, x), truncated(stack, x, truncation))
    assert_same(run(to_rnn(trellis), x), run(stack, x))


@pytest.mark.parametrize("cell", slow_but(LAYERS, "lstm", mark=SLOW_ON_JAX))
@everywhere
def test_exact_at_every_step(cell, floatx):
    """With the most layers and with biases, which the start levels of the groups are for."""
    check_network(cell, [2, 4, 1, 3], [True, False, True, True], truncation=3, seed=1)


@pytest.mark.slow
@everywhere
@each_cell
@settings(
    deadline=None,
    max_examples=40 if TENSORFLOW else 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # `floatx` stays the same
)
@given(networks())
def test_exact_at_every_step_of_many(cell, floatx, network):
    check_network(cell, *network)


def test_weights_are_those_of_equation_5():
    """Of a GRU of 2 layers: the sum of its biases except the candidates', nothing elsewhere."""
    lower, upper = random_stack("gru", [2, 1])
    trellis = to_trellis([lower, upper], 4)
    K1, U1, b1 = lower.get_weights()
    K2, U2, _ = upper.get_weights()
    kernel = np.asarray(trellis.kernel.kernel).reshape(2, CHANNELS, 3, 3)
    recurrent = np.asarray(trellis.recurrent_kernel.kernel).reshape(2, 3, 3, 3)
    np.testing.assert_array_equal(kernel[1, ..., :2].reshape(K1.shape), K1)
    np.testing.assert_array_equal(recurrent[0, :2, :, :2].reshape(U1.shape), U1)
    np.testing.assert_array_equal(recurrent[0, 2, :, 2:].reshape(U2.shape), U2)
    np.testing.assert_array_equal(recurrent[1, :2, :, 2:].reshape(K2.shape), K2)
    used = sum(w.size for w in (K1, U1, K2, U2))
    assert np.count_nonzero(kernel) + np.count_nonzero(recurrent) == used
    bias = np.asarray(trellis.bias).reshape(4, 3)[:, :2]
    (z, r, c), (z2, r2, c2) = b1.reshape(2, 3, 2)
    np.testing.assert_array_equal(bias, [z + z2, r + r2, c, c2])


def test_what_follows_from_a_conversion(tmp_path):
    """The last step alone, a stream, a file, other dtype policies."""
    lower, upper = random_stack("gru", [3, 2])
    x = noise(2, 6, CHANNELS)
    y = to_trellis([lower, upper], 4)(x)
    upper.return_sequences = False
    last = to_trellis([lower, upper], np.int64(4))
    assert_same(last(x), y[:, -1])
    assert not to_rnn(last)[-1].return_sequences
    found, cache = last.prefill(x[:, :5])
    assert_same(found, y[:, :5])
    assert_same(last.step(x[:, 5], cache)[0], y[:, 5])
    inputs = keras.Input((None, CHANNELS))
    keras.Model(inputs, last(inputs)).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[-1], TruncatedRNN)
    np.testing.assert_array_equal(loaded(x), last(x))
    half = to_trellis(built(layers.LSTM(3, return_sequences=True, dtype="mixed_bfloat16")), 3)
    assert half.dtype_policy.name == to_rnn(half)[0].dtype_policy.name == "mixed_bfloat16"


@pytest.mark.both_backends(slow=True)
@in_double
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_segments_carry_on_the_rnn_that_is_not_truncated(cell, floatx):
    """Appendix B.1: segments of at most M = 4 steps, carried by hand and by a stateful layer."""
    stack, x = random_stack(cell, [3, 2, 4], return_state=True), noise(2, 11, CHANNELS)
    rnn = StackedRNN(stack, return_state=True)
    whole, *last = rnn(x)
    trellis, stateful = (to_trellis(r, 4) for r in (rnn, StackedRNN(stack, stateful=True)))
    stateful.reset_state(len(x))
    pieces, states = [], None
    for segment in np.split(x, [4, 7], axis=1):
        y, *states = trellis(segment, initial_state=states)
        assert_same(stateful(segment), y)
        pieces.append(y)
    assert_same(np.concatenate(pieces, axis=1), whole)
    # Those of all layers side by side: h, and of LSTMs c.
    for i, state in enumerate(states):
        assert_same(state, np.concatenate(last[i :: len(states)], axis=-1))


def test_a_segment_longer_than_the_truncation_is_refused():
    stack = random_stack("rnn", [3, 2], return_state=True)
    trellis, stateful = (to_trellis(StackedRNN(stack, stateful=s), 4) for s in (False, True))
    x = noise(2, 5, CHANNELS)
    assert trellis(x).shape == (2, 5, 2)
    for refused in (
        lambda: trellis(x, initial_state=[np.zeros((2, 5))]),
        lambda: stateful(x),
        lambda: stateful(keras.Input((5, CHANNELS), batch_size=2)),
    ):
        with pytest.raises(ValueError, match="at most truncation=4 .* Received: 5 steps"):
            refused()


def test_layers_of_cells_and_a_dropout_of_rate_0():
    cells = [layers.LSTMCell(3), layers.LSTMCell(2)]
    several = randomize(built(layers.RNN(cells, return_sequences=True)))
    one = randomize(built(layers.RNN(layers.LSTMCell(4), return_sequences=True), 2))
    trellis = to_trellis([several, layers.Dropout(0.0), one], 3)
    assert trellis.groups == [3, 2, 4]
    x = noise(2, 8, CHANNELS)
    assert_same(trellis(x), truncated([several, one], x, 3))


# Dense kernels


def mixed_group_layer(**options):
    arguments = {"kernel_structure": "mixed_group", "groups": [2, 1, 3], "seed": 1, **options}
    return randomize(built(TrellisLayer(6, 5, output_units=3, **arguments)))


@pytest.mark.both_backends(slow=True)
@in_double
@pytest.mark.parametrize("weight_norm", [False, True])
def test_to_dense(weight_norm, floatx):
    starts = [1, 2, 3] if weight_norm else None
    # Random weights stand in the places without a connection, too.
    layer = mixed_group_layer(weight_norm=weight_norm, group_starts=starts, dropout=0.1, name="rnn")
    dense = to_dense(layer)
    x = noise(2, 7, CHANNELS)
    assert_same(dense(x), layer(x))
    config = layer.get_config() | {"kernel_structure": "dense", "groups": starts and [2, 1, 3]}
    assert dense.get_config() == config

    def loss():
        return ops.sum(ops.square(dense(x))), None

    _, gradients, _ = value_and_gradients(loss, dense.trainable_variables)
    paths = [v.path for v in dense.trainable_variables]
    found = dict(zip(paths, map(np.asarray, gradients), strict=True))
    for name in ("kernel", "recurrent_kernel"):
        kernel, old = getattr(dense, name), getattr(layer, name)
        moved = found[kernel.kernel.path] != 0
        if weight_norm:
            moved |= found[kernel.gain.path] != 0
        connected = np.asarray(old.apply_connections(ops.ones(old.kernel.shape))) != 0
        assert np.any(moved & ~connected)
    for wrong in (dense, sequential()):
        with pytest.raises(ValueError, match="kernel_structure"):
            to_dense(wrong)


@pytest.mark.both_backends(slow=True)
def test_dense_layers_have_states_of_their_own():
    """In models that JAX computes with, which donates their arrays."""
    layer = mixed_group_layer(stateful=True)
    layer.reset_state(batch_size=2)
    x = noise(2, 5, CHANNELS)
    layer(x)
    inputs = keras.Input(batch_shape=x.shape)
    models = [keras.Model(inputs, each(inputs)) for each in (layer, to_dense(layer))]
    first, second = (model.predict(x, batch_size=2, verbose=0) for model in models)
    assert_same(second, first)
    layer.reset_state()
    assert np.max(np.abs(models[0].predict(x, batch_size=2, verbose=0) - first)) > 1e-3


def test_a_dense_kernel_is_an_rnn_only_where_all_else_is_zero():
    stack = random_stack("lstm", [3, 2])
    dense, x = to_dense(to_trellis(stack, 4)), noise(2, 6, CHANNELS)
    assert type(dense) is TrellisLayer
    assert_same(run(to_rnn(dense), x), run(stack, x))
    kernel = np.array(dense.recurrent_kernel.kernel)
    kernel[0, 0, 4] = 1e-9  # group 1 -> group 2, in the past
    dense.recurrent_kernel.kernel.assign(kernel)
    with pytest.raises(ValueError, match="Received: 1 nonzero weights elsewhere"):
        to_rnn(dense)


# Layers that are refused


def lstm(units=3, channels=CHANNELS, layer=layers.LSTM, **options):
    layer = layer(units, **({"return_sequences": True} | options))
    layer.build((2, None, channels))
    return layer


class OwnCell(layers.LSTMCell):
    pass


NOT_AN_RNN = [
    (lambda: built(layers.Bidirectional(layers.LSTM(3, return_sequences=True))), "Bidirectional"),
    (lambda: lstm(go_backwards=True), "go_backwards=True"),
    (lambda: lstm(stateful=True), "stateful=True"),
    (lambda: lstm(dropout=0.1), "'dropout': 0.1"),
    (lambda: lstm(activation="relu"), "activation='relu'"),
    (lambda: lstm(layer=layers.GRU, reset_after=False), "reset_after=False"),
    (lambda: layers.LSTM(3), "is not built"),
    (lambda: built(layers.RNN(OwnCell(3), return_sequences=True)), r"\(OwnCell\)"),
    (lambda: [], "an empty stack"),
    (lambda: [lstm(return_sequences=False), lstm(channels=3)], "return_sequences=False"),
    (lambda: [lstm(layer=layers.GRU), lstm(channels=3)], r"\['GRUCell', 'LSTMCell'\]"),
    (lambda: [lstm(), lstm(channels=3, dtype="mixed_bfloat16")], "same dtype policy"),
    (lambda: [lstm(), layers.Dropout(0.25), lstm(channels=3)], "rate=0.25"),
]


CONVERTED = {
    "kernel_structure": "mixed_group",
    "groups": [3, 2],
    "group_starts": [1, 2],
    "output_units": 2,
}


@pytest.mark.parametrize(
    "options",
    [
        {"dilation_rate": 2},
        {"group_starts": None},
        {"output_units": 5},
        {"weight_dropout": 0.1},
        {"return_aux": True, "aux_every": 2},
        {"output_length": 3},
    ],
)
def test_a_trellisnet_that_is_not_an_rnn(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"is an RNN only with {name}="):
        to_rnn(built(TrellisLayer(5, 6, **CONVERTED | options)))


def test_other_things_that_are_not_an_rnn():
    class OwnGates(RNNGates):
        pass

    with pytest.raises(ValueError, match="`truncation`"):
        to_trellis(lstm(), 2.0)
    with pytest.raises(ValueError, match="no recurrent layer for this gated activation"):
        to_rnn(built(TrellisLayer(5, 6, cell=OwnGates(5), **CONVERTED)))
    for wrong in (TrellisLayer(5, 6, **CONVERTED), lstm()):
        with pytest.raises(ValueError, match="needs a built TrellisLayer"):
            to_rnn(wrong)
    for name, wrong in (("kernel_structure", "dense"), ("group_starts", [1, 1])):
        with pytest.raises(ValueError, match=name):
            TruncatedRNN(5, 6, **CONVERTED | {name: wrong})


# Models


def lstms(**options):
    options = {"return_sequences": True} | options
    return [layers.LSTM(4, **options), layers.LSTM(6, **options)]


def sequential():
    lower, upper = lstms()
    below = [keras.Input((None,), dtype="int32"), layers.Embedding(VOCABULARY, 3)]
    above = [upper, layers.Dense(VOCABULARY)]
    return keras.Sequential([*below, layers.Dropout(0.5), lower, layers.Dropout(0.0), *above])


def functional():
    """A connection passes by the stack, a layer is called twice, and there are two outputs."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedded = layers.Embedding(VOCABULARY, 6)(tokens)
    lower, upper = lstms()
    hidden = upper(lower(embedded))
    dense = layers.Dense(VOCABULARY)
    outputs = {"scores": dense(embedded + hidden), "others": dense(embedded), "hidden": hidden}
    return keras.Model(tokens, outputs, name="two")


def stacked():
    backbone = StackedRNN(lstms(return_state=True))
    return keras.Sequential([keras.Input((None,)), layers.Embedding(VOCABULARY, 3), backbone])


def language_model(stateful=False, **options):
    backbone = StackedRNN(lstms(return_state=True), stateful=stateful)
    model = LanguageModel(VOCABULARY, 6, backbone, **options)
    model.build((None, None))
    return model


MODELS = {
    "sequential": sequential,
    "functional": functional,
    "stacked": stacked,
    "language_model": lambda: language_model(output_dropout=0.3),
}


def tokens(*shape):
    return np.random.default_rng(0).integers(0, VOCABULARY, shape)


def assert_all_same(actual, expected):
    keras.tree.assert_same_structure(actual, expected)
    keras.tree.map_structure(assert_same, actual, expected)


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_kept_but_for_its_recurrent_layers(name, tmp_path):
    model = randomize(MODELS[name]())
    before = model.get_weights()
    new = to_trellis(model, M)
    dense = to_dense(new)
    assert type(dense) is type(new) is type(model) and new.name == model.name
    # All steps with a window that begins with the text, and the last step of a later window.
    x = tokens(2, M + 2)
    assert_all_same(new(x[:, :M]), model(x[:, :M]))
    ends = keras.tree.map_structure(lambda y: y[:, -1], (new(x), model(x[:, 2:])))
    assert_all_same(*ends)
    assert_all_same(dense(x), new(x))
    new.save(tmp_path / "model.keras")
    assert_all_same(keras.saving.load_model(tmp_path / "model.keras")(x), new(x))
    for changed in (new, dense):
        changed.set_weights([np.zeros_like(w) for w in changed.get_weights()])
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_a_compiled_classifier():
    backbone = StackedRNN([layers.GRU(4, **STATES)], return_sequences=False)
    model = randomize(built(SequenceClassifier(backbone, num_classes=3)))
    model.compile("adam", jit_compile=False)
    new, x = to_trellis(model, M), noise(2, M, CHANNELS)
    assert_same(new(x), model(x))
    assert_same(to_dense(new)(x), model(x))
    assert sorted(new.fit(x, np.zeros(2), verbose=0).history) == ["accuracy", "loss"]


@pytest.mark.both_backends(slow=True)
def test_a_stateful_language_model():
    """Over segments of at most M steps its evaluation is that of the RNN, not truncated."""
    model = randomize(language_model(stateful=True))
    new = to_trellis(model, M)
    assert isinstance(new.backbone, TruncatedRNN) and new.backbone.stateful
    text = tokens(2, 3 * M + 1)
    segments = np.concatenate(np.split(text[:, :-1], 3, axis=1))
    whole = model.predict(text[:, :-1], batch_size=2, verbose=0)
    pieces = new.predict(segments, batch_size=2, verbose=0)
    assert_same(np.concatenate(np.split(pieces, 3), axis=1), whole)
    # Refused also where a graph for any length is compiled.
    for length in (2, 3):
        new.predict(text[:, :length], batch_size=2, verbose=0)
    with pytest.raises(Exception, match="at most truncation=5|longer_than_the_truncation"):
        new.predict(text, batch_size=2, verbose=0)


@pytest.mark.parametrize("kind", ["functional", "backbone", "normalize"])
def test_what_was_adapted_to_data_is_copied(kind):
    normalization = layers.Normalization()
    normalization.adapt(noise(2, 6, CHANNELS) * 4 + 50)
    inputs, x = keras.Input((None, CHANNELS)), noise(2, M, CHANNELS) * 4 + 50
    if kind == "functional":
        model = keras.Model(inputs, layers.LSTM(4)(normalization(inputs)))
    elif kind == "backbone":
        backbone = keras.Sequential([inputs, normalization, layers.LSTM(4)])
        model = built(SequenceClassifier(backbone, 3))
    else:
        model = SequenceRegressor(layers.LSTM(4), normalize=True)
        model.adapt(x)
    trellis = to_trellis(model, M)
    assert_same(trellis(x), model(x))
    assert_same(to_dense(trellis)(x), model(x))


def test_what_is_frozen_stays_frozen():
    for frozen, other in (("embedding", "head"), ("head", "embedding")):
        model = language_model(tie_embeddings=False)
        getattr(model, frozen).trainable = False
        new = to_trellis(model, M)
        assert not getattr(new, frozen).trainable
        parts = getattr(new, other)._flatten_layers(), new.backbone._flatten_layers()
        assert all(part.trainable for each in parts for part in each)
    model = sequential()
    model.layers[0].trainable = False
    assert [x.trainable for x in to_trellis(model, M).layers] == [False, True, True, True]


# Models that are refused


def between(layer):
    """A functional model with something between its recurrent layers."""
    x = keras.Input((None, CHANNELS))
    lower, upper = lstms()
    return keras.Model(x, upper(layer(lower(x))))


def residual():
    x = keras.Input((None, CHANNELS))
    lower, upper = lstms()
    low = lower(x)
    return keras.Model(x, layers.Concatenate()([low, upper(low)]))


def twice():
    x = keras.Input((None, 4))
    layer = layers.LSTM(4, return_sequences=True)
    return keras.Model(x, layer(layer(x)))


def with_initial_state():
    x, h, c = keras.Input((None, CHANNELS)), keras.Input((4,)), keras.Input((4,))
    return keras.Model([x, h, c], layers.LSTM(4)(x, initial_state=[h, c]))


def sequence(*parts):
    return keras.Sequential([keras.Input((None, CHANNELS)), *parts])


def masked(**options):
    """The mask is not among the arguments of the layer's call."""
    inputs = keras.Input((None, CHANNELS))
    lower, upper = lstms(dtype="float64")
    return keras.Model(inputs, upper(lower(layers.Masking()(inputs), **options)))


class Own(keras.Model):
    def call(self, x):
        return x


NOT_ONE_STACK = [
    (lambda: between(layers.Dropout(0.5)), "read by dropout"),
    (residual, "read by concatenate"),
    (twice, "called more than once"),
    (with_initial_state, "initial_state"),
    (lambda: sequence(layers.Masking(), *lstms()), "Masks cannot be converted"),
    (masked, "Masks cannot be converted"),
    (lambda: masked(training=False), "Masks cannot be converted"),
    (lambda: sequence(layers.Dense(3)), "must have recurrent layers"),
    (lambda: built(Own()), "can be converted"),
    (lambda: built(SequenceClassifier(layers.GlobalMaxPooling1D(), 3)), "are supported"),
]


@pytest.mark.parametrize(("make", "message"), [*NOT_AN_RNN, *NOT_ONE_STACK])
def test_what_is_not_a_stack_of_rnns_of_equation_4(make, message):
    with pytest.raises(ValueError, match=message):
        to_trellis(make(), M)
