"""Theorem 1 on models: the recurrent layers are exchanged, everything else is kept."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.rnn_stacks import CHANNELS, assert_same, random_input, randomize
from trellis_keras.layers import StackedRNN
from trellis_keras.models import LanguageModel, SequenceClassifier
from trellis_keras.theorem1 import TruncatedRNN, to_dense, to_trellis

V, M = 7, 5
STATES = {"return_sequences": True, "return_state": True}


def random_tokens(*shape):
    return np.random.default_rng(0).integers(0, V, shape)


def lstms(**options):
    options = {"return_sequences": True} | options
    return [layers.LSTM(4, **options), layers.LSTM(6, **options)]


def sequential():
    lower, upper = lstms()
    below = [keras.Input((None,), dtype="int32"), layers.Embedding(V, 3), layers.Dropout(0.5)]
    return keras.Sequential([*below, lower, layers.Dropout(0.0), upper, layers.Dense(V)])


def functional():
    """A connection passes by the stack, and there are two outputs."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    embedded = layers.Embedding(V, 6)(tokens)
    lower, upper = lstms()
    hidden = upper(lower(embedded))
    scores = layers.Dense(V)(embedded + hidden)
    return keras.Model(tokens, {"scores": scores, "hidden": hidden}, name="two")


def stacked():
    backbone = StackedRNN(lstms(return_state=True))
    return keras.Sequential([keras.Input((None,)), layers.Embedding(V, 3), backbone])


def language_model(stateful=False, **options):
    backbone = StackedRNN(lstms(return_state=True), stateful=stateful)
    model = LanguageModel(V, 6, backbone, **options)
    model.build((None, None))
    return model


MODELS = {
    "sequential": sequential,
    "functional": functional,
    "stacked": stacked,
    "language_model": language_model,
    "untied": lambda: language_model(tie_embeddings=False, output_dropout=0.3),
}


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_kept_but_for_its_recurrent_layers(name, tmp_path):
    model = randomize(MODELS[name]())
    before = model.get_weights()
    new = to_trellis(model, M)
    assert type(new) is type(model) and new.name == model.name
    # All steps with a window that begins with the text, and the last step of a later window.
    tokens = random_tokens(2, M + 2)
    assert_all_same(new(tokens[:, :M]), model(tokens[:, :M]))
    ends = keras.tree.map_structure(lambda y: y[:, -1], (new(tokens), model(tokens[:, 2:])))
    assert_all_same(*ends)
    new.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_all_same(loaded(tokens), new(tokens), 1e-7)
    new.set_weights([np.zeros_like(w) for w in new.get_weights()])
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def assert_all_same(actual, expected, tolerance=None):
    keras.tree.assert_same_structure(actual, expected)
    pairs = zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True)
    for a, b in pairs:
        assert_same(a, b, tolerance)


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: layers.GRU(4),
        lambda: StackedRNN([layers.GRU(4, **STATES)], return_sequences=False),
        lambda: keras.Sequential([layers.GRU(4, return_sequences=True), layers.GRU(3)]),
    ],
)
def test_a_classifier_around(backbone):
    model = SequenceClassifier(backbone(), num_classes=3)
    model.build((None, None, CHANNELS))
    randomize(model)
    model.compile("adam")
    new = to_trellis(model, M)
    x = random_input(time=M)
    assert_same(new(x), model(x))
    # It is compiled too.
    history = new.fit(x, np.zeros(2), verbose=0).history
    assert sorted(history) == ["accuracy", "loss"]


@pytest.mark.both_backends
def test_a_stateful_language_model_carries_on():
    """Over segments of at most M steps its evaluation is that of the RNN, not truncated."""
    model = randomize(language_model(stateful=True))
    new = to_trellis(model, M)
    assert isinstance(new.backbone, TruncatedRNN) and new.backbone.stateful
    tokens = random_tokens(2, 3 * M + 1)
    segments = np.concatenate(np.split(tokens[:, :-1], 3, axis=1))
    targets = np.concatenate(np.split(tokens[:, 1:], 3, axis=1))
    whole = model.predict(tokens[:, :-1], batch_size=2, verbose=0)
    pieces = new.predict(segments, batch_size=2, verbose=0)
    assert_same(np.concatenate(np.split(pieces, 3), axis=1), whole)
    new.compile("adam")
    new.fit(segments, targets, batch_size=2, verbose=0)
    with pytest.raises(ValueError, match="at most truncation=5 .* Received: 6 steps"):
        new.evaluate(tokens[:, :6], tokens[:, 1:7], verbose=0)


def between(layer):
    """A functional model with something between its recurrent layers."""
    x = keras.Input((None, CHANNELS))
    lower, upper = lstms()
    return keras.Model(x, upper(layer(lower(x))))


def test_a_dropout_of_rate_0_between():
    model = randomize(between(layers.Dropout(0.0)))
    x = random_input(time=M)
    assert_same(to_trellis(model, M)(x), model(x))


def residual():
    x = keras.Input((None, CHANNELS))
    lower, upper = layers.LSTM(4, return_sequences=True), layers.LSTM(4, return_sequences=True)
    low = lower(x)
    return keras.Model(x, layers.Add()([low, upper(low)]))


def beside():
    x = keras.Input((None, CHANNELS))
    return keras.Model(x, layers.Concatenate()([layer(x) for layer in lstms()]))


def second_output():
    x = keras.Input((None, CHANNELS))
    lower, upper = lstms()
    low = lower(x)
    return keras.Model(x, [low, upper(low)])


def from_two_inputs():
    x, z = keras.Input((None, CHANNELS)), keras.Input((None, 4))
    lower, upper = lstms()
    return keras.Model([x, z], upper(layers.Add()([lower(x), z])))


def twice():
    x = keras.Input((None, 4))
    lstm = layers.LSTM(4, return_sequences=True)
    return keras.Model(x, lstm(lstm(x)))


def with_initial_state():
    x, h, c = keras.Input((None, CHANNELS)), keras.Input((4,)), keras.Input((4,))
    return keras.Model([x, h, c], layers.LSTM(4)(x, initial_state=[h, c]))


def with_states():
    x = keras.Input((None, CHANNELS))
    return keras.Model(x, layers.LSTM(4, return_state=True)(x)[1])


def masked(layer, *shape, **options):
    return keras.Sequential([keras.Input(shape, **options), layer, *lstms()])


def no_graph():
    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own()
    model.build((None, 3))
    return model


REFUSED = {
    "between": (lambda: between(layers.Dense(4)), "below the top is read by dense"),
    "dropout": (lambda: between(layers.Dropout(0.5)), "below the top is read by dropout"),
    "residual": (residual, "below the top is read by add"),
    "beside": (beside, "does not read the one before"),
    "second_output": (second_output, "below the top is an output"),
    "from_two_inputs": (from_two_inputs, "below the top is read by add"),
    "twice": (twice, "called more than once"),
    "with_initial_state": (with_initial_state, "neither initial_state nor"),
    "with_states": (with_states, "neither initial_state nor"),
    "masking": (lambda: masked(layers.Masking(), None, CHANNELS), "Masks cannot be converted"),
    "mask_zero": (
        lambda: masked(layers.Embedding(V, 3, mask_zero=True), None, dtype="int32"),
        "Masks cannot be converted",
    ),
    "none": (lambda: keras.Sequential([keras.Input((None, 3)), layers.Dense(3)]), "must have rec"),
    "no_graph": (no_graph, "how their layers are connected"),
    "not_built": (lambda: keras.Sequential(lstms()), "is not built"),
    "no_recurrent_backbone": (
        lambda: built(SequenceClassifier(layers.GlobalMaxPooling1D(), 3)),
        "known to be of the form",
    ),
}


def built(model):
    model.build((None, None, CHANNELS))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        to_trellis(model(), M)


@pytest.mark.parametrize("name", ["sequential", "functional", "untied"])
def test_the_sparsity_of_a_model_is_lifted(name):
    trellis = to_trellis(randomize(MODELS[name]()), M)
    if name == "sequential":
        trellis.compile("sgd", "sparse_categorical_crossentropy")
    dense = to_dense(trellis)
    assert type(dense) is type(trellis) and dense.compiled == trellis.compiled
    tokens = random_tokens(2, 9)
    keras.tree.map_structure(assert_same, dense(tokens), trellis(tokens))
    layers_of = [dense.backbone] if name == "untied" else dense.layers
    structures = [x.kernel_structure for x in layers_of if hasattr(x, "kernel_structure")]
    assert structures == ["dense"]
    own = {id(v) for v in dense.variables}
    assert not own.intersection(id(v) for v in trellis.variables)


def test_a_model_without_sparsity():
    with pytest.raises(ValueError, match="must have a TrellisLayer with kernel_structure"):
        to_dense(sequential())


def test_the_sparsity_within_a_backbone_is_lifted():
    inner = keras.Sequential([layers.GRU(4, return_sequences=True), layers.GRU(3)])
    trellis = to_trellis(randomize(built(SequenceClassifier(inner, 3))), M)
    dense = to_dense(trellis)
    assert dense.backbone.layers[0].kernel_structure == "dense"
    x = random_input(time=9)
    assert_same(dense(x), trellis(x))


def adapted_sequential():
    lower = layers.Normalization()
    lower.adapt(random_input(time=6) * 4 + 50)
    return keras.Sequential([keras.Input((None, CHANNELS)), lower, layers.LSTM(4)])


def adapted_functional():
    x = keras.Input((None, CHANNELS))
    normal = layers.Normalization()
    normal.adapt(random_input(time=6) * 4 + 50)
    return keras.Model(x, layers.LSTM(4)(normal(x)))


def adapted_backbone():
    return built(SequenceClassifier(adapted_sequential(), 3))


@pytest.mark.parametrize("make", [adapted_sequential, adapted_functional, adapted_backbone])
def test_what_was_adapted_to_data_is_copied(make):
    model = make()
    x = random_input(time=M) * 4 + 50
    trellis = to_trellis(model, M)
    assert_same(trellis(x), model(x))
    assert_same(to_dense(trellis)(x), model(x))


def test_an_adapted_vocabulary_is_copied():
    import tensorflow as tf

    words = layers.TextVectorization(output_sequence_length=M)
    words.adapt(["a b c", "b d"])
    embedding = layers.Embedding(words.vocabulary_size(), 3)
    inputs = keras.Input((), dtype="string")
    model = keras.Model(inputs, layers.LSTM(4)(embedding(words(inputs))))
    text = tf.constant(["b a", "d d x"])
    assert_same(to_trellis(model, M)(text), model(text))


def test_what_is_frozen_stays_frozen():
    for frozen, other in (("embedding", "head"), ("head", "embedding")):
        model = language_model(tie_embeddings=False)
        getattr(model, frozen).trainable = False
        new = to_trellis(model, M)
        assert not getattr(new, frozen).trainable
        parts = getattr(new, other)._flatten_layers(), new.backbone._flatten_layers()
        assert all(part.trainable for each in parts for part in each)


def test_the_rows_of_a_stateful_stack_are_kept():
    backbone = StackedRNN(lstms(return_state=True), stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(2, M, CHANNELS)), backbone])
    new = to_trellis(model, M)
    x = random_input(time=2 * M)
    for piece in np.split(x, 2, axis=1):
        assert_same(new(piece), model(piece))


def test_a_long_segment_is_refused_also_where_any_length_was_compiled():
    model = to_trellis(randomize(language_model(stateful=True)), M)
    tokens = random_tokens(2, 2 * M)
    for length in (2, 3, M):
        model.predict(tokens[:, :length], batch_size=2, verbose=0)
    with pytest.raises(Exception, match="at most truncation=5|segment_longer_than_the_truncation"):
        model.predict(tokens, batch_size=2, verbose=0)
