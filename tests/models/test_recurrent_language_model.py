"""LanguageModel and the sequence models around a StackedRNN: carried states, text, files."""

import keras
import numpy as np
import pytest
from keras import ops

from trellis_keras import zoo
from trellis_keras.data import TokenStream
from trellis_keras.layers.rnn import StackedRNN
from trellis_keras.models import LanguageModel, SequenceClassifier
from trellis_keras.training import SGD, Adam

both = pytest.mark.both_backends

V = 11
JAX = keras.backend.backend() == "jax"
STATES = {"return_sequences": True, "return_state": True}


def lstm_and_gru(**options):
    options = STATES | options
    return [keras.layers.LSTM(8, **options), keras.layers.GRU(6, **options)]


def cells():
    cells = [keras.layers.LSTMCell(5), keras.layers.GRUCell(6)]
    return [keras.layers.RNN(cells, **STATES)]


def small_model(layers=None, stateful=False, optimizer=None, jit_compile=None, **options):
    keras.utils.set_random_seed(2)
    backbone = StackedRNN(lstm_and_gru() if layers is None else layers, stateful=stateful)
    large = keras.initializers.RandomNormal(stddev=1.0, seed=3)
    options = {"embeddings_initializer": large, "seed": 7} | options
    model = LanguageModel(V, 6, backbone, **options)
    model.build((None, None))
    # Without compilation JAX is slow.
    jit_compile = JAX if jit_compile is None else jit_compile
    model.compile(optimizer or Adam(3e-2), jit_compile=jit_compile)
    return model


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape)


def states(model, training, rows=None):
    return [np.asarray(s) for s in model.backbone.state_cache.read(rows, training)]


@both
def test_carried_states_make_one_text_of_its_segments():
    """A recurrent net's loss over segments is that of one pass over the whole rows."""
    tokens = random_tokens(4, 31)
    stream = TokenStream(tokens.ravel(), batch_size=4, sequence_length=6, stateful=True)
    stateful, plain = small_model(stateful=True), small_model()
    rows = np.concatenate([stream[i][0] for i in range(len(stream))], axis=1)
    targets = np.concatenate([stream[i][1] for i in range(len(stream))], axis=1)
    weights = np.concatenate([stream[i][2] for i in range(len(stream))], axis=1)
    whole = plain.evaluate(rows, targets, sample_weight=weights, batch_size=4, verbose=0)
    found = stateful.evaluate(stream, verbose=0)
    assert found == pytest.approx(whole, rel=1e-5)
    without_states = plain.evaluate(stream, verbose=0)
    assert found != pytest.approx(without_states, rel=1e-3)


@pytest.mark.slow_elsewhere
@both
@pytest.mark.parametrize("jit_compile", [None, True])
def test_validation_neither_sees_nor_disturbs_the_training_states(jit_compile):
    tokens = random_tokens(200)
    stream = TokenStream(tokens, batch_size=4, sequence_length=10, stateful=True)
    other = TokenStream(tokens[:60], batch_size=2, sequence_length=10, stateful=True)
    carried, losses = [], []
    for validation in (None, other):  # with another batch size
        model = small_model(stateful=True, optimizer=SGD(0.1), jit_compile=jit_compile)
        history = model.fit(stream, epochs=2, validation_data=validation, verbose=0).history
        carried.append(states(model, training=True, rows=4))
        losses.append(history["loss"])
        if validation is not None:
            first = model.evaluate(other, verbose=0)
            assert model.evaluate(other, verbose=0) == first
            assert history["val_loss"][-1] == pytest.approx(first, rel=1e-5)
            assert len(states(model, training=False)[0]) == 2
    assert losses[0] == losses[1]
    for a, b in zip(*carried, strict=True):
        assert np.any(a) and np.array_equal(a, b)


@pytest.mark.parametrize("jit_compile", [None, True])
def test_training_reads_the_states_and_resets_them_at_each_epoch(jit_compile):
    stream = TokenStream(random_tokens(81), batch_size=2, sequence_length=10, stateful=True)
    model = small_model(stateful=True, optimizer=SGD(1e-12), jit_compile=jit_compile)
    losses = model.fit(stream, epochs=2, verbose=0).history["loss"]
    assert losses == pytest.approx([model.evaluate(stream, verbose=0)] * 2, rel=1e-5)
    plain = small_model(optimizer=SGD(1e-12), jit_compile=jit_compile)
    assert losses[0] != pytest.approx(plain.evaluate(stream, verbose=0), rel=1e-3)


def test_another_batch_size_in_training():
    model = small_model(stateful=True)
    for rows in (4, 2):
        stream = TokenStream(random_tokens(81), batch_size=rows, sequence_length=10, stateful=True)
        assert np.isfinite(model.fit(stream, verbose=0).history["loss"][0])
        assert len(states(model, training=True)[0]) == rows


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("layers", [pytest.param(lstm_and_gru, marks=both), cells])
def test_generation_is_that_of_the_forward_pass(layers):
    pytest.importorskip("keras_nlp")
    model = small_model(layers(), stateful=True)
    prompt = random_tokens(2, 4)
    text = model.generate(prompt, max_length=9, sampler="greedy")
    for length in range(4, 9):
        plain = small_model(layers())
        plain.set_weights(model.get_weights())
        following = np.argmax(plain.predict(text[:, :length], verbose=0)[:, -1], axis=-1)
        np.testing.assert_array_equal(text[:, length], following)
    assert model.generate(prompt, max_length=12, sampler="beam").shape == (2, 12)


def test_keras_file_of_a_stateful_model(tmp_path):
    model = small_model(stateful=True)
    stream = TokenStream(random_tokens(81), batch_size=2, sequence_length=10, stateful=True)
    model.fit(stream, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(stream, verbose=0) == model.evaluate(stream, verbose=0)


def test_keras_own_stateful_layers_are_refused():
    lstm = keras.layers.LSTM(6, return_sequences=True, stateful=True)
    with pytest.raises(ValueError, match=r"StackedRNN\(..., stateful=True\)"):
        LanguageModel(V, 6, lstm)


def test_a_classifier_takes_it():
    x = np.random.default_rng(0).normal(size=(12, 7, 2)).astype("float32")
    y = (x[:, -1, 0] > 0).astype("int32")
    backbone = StackedRNN(lstm_and_gru(dropout=0.1), return_sequences=False)
    model = SequenceClassifier(backbone, 2)
    model.compile(Adam(0.05), jit_compile=JAX)
    losses = model.fit(x, y, batch_size=5, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    per_step = SequenceClassifier(StackedRNN(lstm_and_gru()), 2, per_step=True)
    per_step.build((None, None, 2))
    cache, outputs = per_step.initial_cache(12), []
    for t in range(3):
        output, cache = per_step.step(ops.convert_to_tensor(x[:, t]), cache)
        outputs.append(np.asarray(output))
    np.testing.assert_allclose(
        np.stack(outputs, axis=1), per_step.predict(x[:, :3], verbose=0), rtol=1e-4, atol=1e-6
    )
    with pytest.raises(ValueError, match="stateful=False"):
        SequenceClassifier(StackedRNN(lstm_and_gru(), stateful=True), 2)


@pytest.mark.parametrize("name", ["lstm_char_ptb", "gru_char_ptb", "rnn_char_ptb"])
def test_the_language_models_of_the_zoo_generate(name):
    pytest.importorskip("keras_nlp")
    model = getattr(zoo, name)(hidden_units=6, layers=2)
    prompt = random_tokens(2, 3)
    text = model.generate(prompt, max_length=6, sampler="greedy")
    log_p = model.predict(text[:, :-1], verbose=0)[:, 2:]
    np.testing.assert_array_equal(text[:, 3:], np.argmax(log_p, axis=-1))
