"""LanguageModel as a Keras model: fit, evaluate, predict, saving, histories, bad input."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.processes import run_script
from trellis_keras.data import TokenStream, Vocabulary
from trellis_keras.layers import LRU, TCN, DenseHead, TrellisLayer, streaming
from trellis_keras.models import BitsPerCharacter, CrossEntropy, LanguageModel, Perplexity
from trellis_keras.training import SGD, Adam

pytestmark = pytest.mark.both_backends

V = 11


def small_model(jit_compile=None, optimizer=None, metrics=(), vocabulary=None, **options):
    # Without compilation JAX is slow: there, both settings of the tests compile.
    jit_compile = keras.backend.backend() == "jax" if jit_compile is None else jit_compile
    settings = {"output_units": 6, "aux_every": 2, "return_aux": True, "seed": 3}
    settings |= options.pop("backbone", {})
    model = LanguageModel(
        V,
        6,
        TrellisLayer(10, 5, **settings),
        aux_weight=0.1 if settings["return_aux"] else 0.0,
        vocabulary=vocabulary,
        seed=7,
        **options,
    )
    model.build((None, None))
    model.compile(optimizer or Adam(1e-2), metrics=list(metrics), jit_compile=jit_compile)
    return model


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape)


def counted_nll(model, stream):
    """-log p of every counted target, from `predict`."""
    values = []
    for i in range(len(stream)):
        x, y, weight = stream[i]
        log_p = np.asarray(model.predict(x, verbose=0, batch_size=len(x)))[:, -y.shape[1] :]
        nll = -np.take_along_axis(log_p, y[..., None], axis=-1)[..., 0]
        values.append(nll[weight > 0])
    return np.concatenate(values)


@pytest.mark.parametrize("jit_compile", [None, True])
def test_fit_on_arrays_that_the_batch_does_not_divide(jit_compile):
    model = small_model(jit_compile)
    tokens = np.tile(np.arange(V), 40)[: 19 * 21].reshape(19, 21)
    history = model.fit(
        tokens[:, :-1],
        tokens[:, 1:],
        batch_size=8,
        epochs=25,
        verbose=0,
        validation_data=(tokens[:, :-1], tokens[:, 1:]),
    )
    losses = history.history["val_loss"]
    assert losses[0] > 2 and losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_evaluation_is_the_mean_over_all_targets(stateful, jit_compile):
    metrics = [Perplexity(), BitsPerCharacter(), CrossEntropy()]
    model = small_model(jit_compile, metrics=metrics, backbone={"stateful": stateful})
    tokens = random_tokens(211)
    stream = TokenStream(
        tokens,
        batch_size=4,
        sequence_length=9,
        context_length=0 if stateful else 5,
        stateful=stateful,
    )
    results = model.evaluate(stream, verbose=0, return_dict=True)
    assert stream.targets_counted == 210
    if not stateful:
        nll = counted_nll(model, stream)
        assert len(nll) == 210
        mean = np.mean(nll, dtype="float64")
        assert results["loss"] == pytest.approx(mean, rel=1e-5)
    assert results["cross_entropy"] == pytest.approx(results["loss"], rel=1e-5)
    assert results["perplexity"] == pytest.approx(np.exp(results["loss"]), rel=1e-5)
    assert results["bpc"] == pytest.approx(results["loss"] / np.log(2), rel=1e-5)


def test_stateful_evaluation_hands_the_state_on():
    options = {"backbone": {"stateful": True, "aux_every": None, "return_aux": False}}
    model = small_model(**options)
    tokens = random_tokens(41)
    stream = TokenStream(tokens, batch_size=1, sequence_length=8, stateful=True)
    results = model.evaluate(stream, verbose=0, return_dict=True)
    # By hand: the state of each segment's end pads the next.
    embedded = model.embedding(tokens[None, :40])
    state, nll = [np.zeros((1, 10), "float32")] * 2, []
    reference = TrellisLayer(10, 5, output_units=6, return_state=True)
    reference.build((None, None, 6))
    reference.set_weights(model.backbone.get_weights())
    for start in range(0, 40, 8):
        hidden, *state = reference(embedded[:, start : start + 8], initial_state=list(state))
        y = tokens[None, start + 1 : start + 9]
        nll.append(np.asarray(model.head.loss(hidden, y)))
    assert results["loss"] == pytest.approx(np.mean(nll), rel=1e-5)


def test_validation_neither_sees_nor_disturbs_the_training_history():
    tokens = random_tokens(400)
    stream = TokenStream(tokens, batch_size=4, sequence_length=10, stateful=True)
    states = []
    for validate in (False, True):
        model = small_model(optimizer=SGD(0.1), backbone={"stateful": True})
        model.fit(stream, epochs=1, verbose=0)
        if validate:  # with another batch size
            other = TokenStream(tokens[:100], batch_size=2, sequence_length=10, stateful=True)
            first = model.evaluate(other, verbose=0)
            assert model.evaluate(other, verbose=0) == first
        states.append([np.asarray(v) for v in model.backbone.state_cache.read(4, training=True)])
    for a, b in zip(*states, strict=True):
        assert np.any(a) and np.array_equal(a, b)


def test_history_is_reset_at_each_epoch():
    stream = TokenStream(random_tokens(81), batch_size=2, sequence_length=10, stateful=True)
    model = small_model(optimizer=SGD(1e-12), backbone={"stateful": True})
    history = model.fit(stream, epochs=2, verbose=0).history["loss"]
    assert history[0] == pytest.approx(history[1], rel=1e-6)


def test_history_is_neither_counted_nor_saved(tmp_path):
    plain, stateful = small_model(), small_model(backbone={"stateful": True})
    stateful.backbone.reset_state(batch_size=3)
    assert stateful.count_params() == plain.count_params()
    stateful.save_weights(tmp_path / "w.weights.h5")
    plain.load_weights(tmp_path / "w.weights.h5")
    x = random_tokens(3, 8)
    stateful.backbone.reset_state(batch_size=3)
    np.testing.assert_allclose(stateful(x), plain(x), rtol=1e-6)


def test_only_counted_positions_enter_the_loss():
    model = small_model()
    x, y = random_tokens(4, 12), random_tokens(4, 5, seed=1)
    log_p = np.asarray(model.predict(x, verbose=0))[:, -5:]
    expected = -np.mean(np.take_along_axis(log_p, y[..., None], axis=-1))
    assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_weights_of_rows_and_tokens():
    model = small_model()
    x, y = random_tokens(4, 12), random_tokens(4, 12, seed=1)
    per_row = np.array([1.0, 0.0, 2.0, 1.0])
    per_token = np.repeat(per_row[:, None], 12, axis=1)
    assert model.evaluate(x, y, sample_weight=per_row, verbose=0) == pytest.approx(
        model.evaluate(x, y, sample_weight=per_token, verbose=0), rel=1e-6
    )


def test_keras_file_gives_identical_outputs(tmp_path):
    vocabulary = Vocabulary([chr(97 + i) for i in range(V)], "character")
    model = small_model(metrics=[BitsPerCharacter()], vocabulary=vocabulary, output_dropout=0.3)
    tokens = random_tokens(8, 13)
    model.fit(tokens[:, :-1], tokens[:, 1:], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(model.predict(tokens, verbose=0), loaded.predict(tokens, verbose=0))
    assert loaded.vocabulary == vocabulary
    before = model.evaluate(tokens[:, :-1], tokens[:, 1:], verbose=0, return_dict=True)
    after = loaded.evaluate(tokens[:, :-1], tokens[:, 1:], verbose=0, return_dict=True)
    assert before == after and set(after) == {"loss", "bpc"}
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_any_keras_backbone(tie_embeddings):
    lstm = keras.layers.LSTM(6, return_sequences=True)
    model = LanguageModel(V, 6, lstm, tie_embeddings=tie_embeddings)
    model.compile(Adam(3e-2))
    tokens = np.tile(np.arange(V), 20)[:192].reshape(8, 24)
    losses = model.fit(tokens[:, :-1], tokens[:, 2:], epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    assert len(model.head.weights) == (1 if tie_embeddings else 2) + 1 * tie_embeddings


def test_half_precision_keeps_states_and_losses_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = small_model()
        assert model.backbone.state_dtype == "float32"
        assert model.predict(random_tokens(2, 6), verbose=0).dtype == np.float32
        tokens = random_tokens(8, 13)
        assert np.isfinite(model.fit(tokens[:, :-1], tokens[:, 1:], verbose=0).history["loss"][0])
        assert all(w.dtype == "float32" for w in model.weights)
    finally:
        keras.config.set_dtype_policy("float32")


def test_penalties_and_auxiliary_losses_are_in_the_training_loss_only():
    x, y = random_tokens(4, 12), random_tokens(4, 12, seed=1)
    plain = small_model(optimizer=SGD(1e-12))
    full = small_model(optimizer=SGD(1e-12), activation_reg=2e3, temporal_activation_reg=1e3)
    assert plain.evaluate(x, y, verbose=0) == pytest.approx(full.evaluate(x, y, verbose=0))
    raw, aux = (np.asarray(t) for t in full.backbone(full.embedding(x)))
    penalties = 2e3 * np.mean(raw**2) + 1e3 * np.mean((raw[:, 1:] - raw[:, :-1]) ** 2)
    losses = [m.fit(x, y, batch_size=4, verbose=0).history["loss"][0] for m in (plain, full)]
    assert losses[1] - losses[0] == pytest.approx(penalties, rel=1e-3)
    aux_nll = np.asarray(plain.head.loss(ops.convert_to_tensor(aux), np.repeat(y[:, None], 2, 1)))
    expected = plain.evaluate(x, y, verbose=0) + 0.1 * aux_nll.mean(axis=(0, 2)).sum()
    assert losses[0] == pytest.approx(expected, rel=1e-4)


class Recorder(keras.layers.Layer):
    """A backbone that shows what it is given and hands it on."""

    def call(self, inputs):
        self.seen = inputs
        return inputs

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize(("kind", "steps_differ"), [("variational", False), ("element", True)])
def test_kinds_of_input_dropout(kind, steps_differ):
    model = LanguageModel(
        V,
        64,
        Recorder(),
        input_dropout=0.25,
        input_dropout_kind=kind,
        embeddings_initializer="ones",
        seed=2,
    )
    model.build((None, None))
    tokens = random_tokens(3, 50)
    model(tokens, training=True)
    seen = np.asarray(model.backbone.seen)
    # Kept numbers are scaled up, and each row has a mask of its own.
    assert set(np.unique(seen.round(6))) == {0.0, np.round(4 / 3, 6).astype(seen.dtype)}
    assert np.mean(seen == 0) == pytest.approx(0.25, abs=0.02 if steps_differ else 0.1)
    assert np.any(seen[0] != seen[1])
    assert np.any(seen[:, 0] != seen[:, 1]) == steps_differ
    model(tokens)
    assert np.all(np.asarray(model.backbone.seen) == 1)
    assert model.get_config()["input_dropout_kind"] == kind


# Bad input


def test_bad_tokens_are_named():
    model = small_model()
    with pytest.raises(ValueError, match=rf"\[0, {V}\).*{V}"):
        model.fit(np.full((2, 4), V), np.zeros((2, 4), int), verbose=0)
    with pytest.raises(ValueError, match="float64"):
        model.evaluate(np.zeros((2, 4)), np.zeros((2, 4), int), verbose=0)
    with pytest.raises(ValueError, match="-1"):
        model.predict(np.full((2, 4), -1), verbose=0)
    with pytest.raises(ValueError, match="integers"):
        model(np.zeros((2, 4), "float32"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_another_vocabulary(tied):
    backbone = keras.layers.Dense(8)
    with pytest.raises(ValueError, match="40.*vocabulary_size=50"):
        LanguageModel(50, 8, backbone, head=DenseHead(40), tie_embeddings=tied)
    with pytest.raises(ValueError, match="embedding has 50 tokens, but vocabulary_size=40"):
        DenseHead(40).tie(keras.layers.Embedding(50, 8))
    with pytest.raises(ValueError, match="positive integer. Received: vocabulary_size=0"):
        DenseHead(0)


def test_bad_tokens_of_streams_and_validation_data_are_named_at_once():
    model, good = small_model(), random_tokens(50)
    bad = TokenStream(np.append(good, V), batch_size=2, sequence_length=9, context_length=5)
    with pytest.raises(ValueError, match=f"Received: {V}"):
        model.fit(bad, verbose=0)
    stream = TokenStream(good, batch_size=2, sequence_length=9, context_length=5)
    with pytest.raises(ValueError, match=f"Received: {V}"):
        model.fit(stream, validation_data=bad, verbose=0)
    with pytest.raises(ValueError, match=f"Received: {V}"):
        model.fit(stream, validation_data=(np.full((2, 9), V), np.zeros((2, 9), int)), verbose=0)


def test_metrics_are_named():
    model = small_model(metrics=[Perplexity()])
    x = random_tokens(4, 9)
    values = dict(zip(model.metrics_names, model.evaluate(x, x, verbose=0), strict=True))
    assert values["perplexity"] == pytest.approx(np.exp(values["loss"]), rel=1e-4)


def test_compile_settings_are_saved(tmp_path):
    model = small_model()
    model.compile(Adam(1e-2), steps_per_execution=3, jit_compile=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.steps_per_execution == 3 and loaded.jit_compile is False


def test_a_stateful_model_takes_fewer_rows_than_a_batch():
    model = small_model(backbone={"stateful": True})
    x = random_tokens(5, 9)
    model.fit(x, x, epochs=1, verbose=0, callbacks=keras.callbacks.Callback())
    assert model.predict(x, verbose=0).shape == (5, 9, V)
    assert model.compute_output_shape((5, 9)) == (5, 9, V)


def test_weights_of_another_vocabulary_are_refused(tmp_path):
    tokens = [chr(97 + i) for i in range(V)]
    model = small_model(vocabulary=Vocabulary(tokens, "character"))
    model.save_weights(tmp_path / "a.weights.h5")
    model.save(tmp_path / "a.keras")
    swapped = small_model(vocabulary=Vocabulary([*tokens[:-2], "k", "j"], "character"))
    with pytest.raises(ValueError, match="another vocabulary: token 9 is 'j' there, 'k' in the"):
        swapped.load_weights(tmp_path / "a.keras")
    larger = LanguageModel(V + 1, 6, TrellisLayer(10, 5, output_units=6), seed=0)
    larger.build((None, None))
    before = larger.get_weights()
    for name in ("a.keras", "a.weights.h5"):
        with pytest.raises(ValueError, match=rf"{name} holds .* 11 tokens, .*vocabulary_size=12"):
            larger.load_weights(tmp_path / name)
        small_model().load_weights(tmp_path / name)
    for ours, unchanged in zip(larger.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, unchanged)


def test_targets_are_needed():
    with pytest.raises(ValueError, match="no targets"):
        small_model().fit(random_tokens(4, 8), verbose=0)


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="return_aux=True"):
        LanguageModel(V, 6, TrellisLayer(6, 2), aux_weight=0.1)
    with pytest.raises(ValueError, match="return_state=False"):
        LanguageModel(V, 6, TrellisLayer(6, 2, return_state=True))
    with pytest.raises(ValueError, match="return_sequences=True"):
        LanguageModel(V, 6, keras.layers.LSTM(6))
    with pytest.raises(ValueError, match="output_length=None.*Received: output_length=3"):
        LanguageModel(V, 6, TrellisLayer(6, 2, output_length=3))
    with pytest.raises(ValueError, match="stateful"):
        LanguageModel(V, 6, keras.layers.LSTM(6, return_sequences=True, stateful=True))
    with pytest.raises(ValueError, match="embedding_dim=5.*8 channels"):
        LanguageModel(V, 5, TrellisLayer(8, 2)).build((None, None))
    with pytest.raises(ValueError, match=r"\['element', 'variational'\]. Received: 'word'"):
        LanguageModel(V, 6, TrellisLayer(6, 2), input_dropout_kind="word")
    with pytest.raises(ValueError, match="2 tokens"):
        LanguageModel(V, 6, TrellisLayer(6, 2), vocabulary=Vocabulary(["a", "b"], "character"))
    with pytest.raises(ValueError, match="perplexity"):
        LanguageModel(V, 6, TrellisLayer(6, 2)).compile("adam", metrics=["perplexity"])


def test_stateful_batches_must_have_one_size_and_stay_in_order():
    model = small_model(backbone={"stateful": True})
    x = random_tokens(6, 8)
    with pytest.raises(ValueError, match="6 rows with batch_size=4"):
        model.fit(x, x, batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="shuffle=False"):
        model.fit(x, x, batch_size=3, shuffle=True, verbose=0)


def test_fit_without_tensorflow():
    """A machine may have JAX only."""
    source = """
import numpy as np
from trellis_keras.zoo import trellisnet_char
model = trellisnet_char(vocabulary_size=9, hidden_units=4, embedding_dim=3, depth=3)
tokens = np.random.randint(0, 9, (8, 11))
print(model.fit(tokens[:, :-1], tokens[:, 1:], epochs=2, verbose=0).history["loss"][-1])
"""
    blocked = ("tensorflow", "tensorflow_datasets", "keras_nlp", "keras_hub")
    assert float(run_script(source, backend="jax", block=blocked).split()[-1]) < 3


def test_training_and_evaluation_compute_the_cone_only(monkeypatch):
    from trellis_keras.layers import trellis

    kept = []
    plan_levels = trellis.plan_levels
    monkeypatch.setattr(
        trellis, "plan_levels", lambda *args: kept.append(args[2]) or plan_levels(*args)
    )
    stream = TokenStream(random_tokens(100), batch_size=2, sequence_length=9, context_length=5)
    model = small_model()
    model.fit(stream, epochs=1, verbose=0)
    model.evaluate(stream, verbose=0)
    assert set(kept) == {4}
    kept.clear()
    model.predict(stream[0][0], verbose=0)
    assert set(kept) == {None}


def test_a_head_that_cannot_be_tied():
    old = LanguageModel(V, 6, TrellisLayer(6, 2), tie_embeddings=False)
    old.build((None, None))
    with pytest.raises(ValueError, match="before it is built.* which is built already"):
        LanguageModel(V, 6, TrellisLayer(6, 2), head=old.head)
    with pytest.raises(ValueError, match="has no method `tie`"):
        LanguageModel(V, 6, TrellisLayer(6, 2), head=keras.layers.Identity())
    new = LanguageModel(V, 6, TrellisLayer(6, 2), head=old.head, tie_embeddings=False)
    new.build((None, None))
    assert new.head.kernel is old.head.kernel


def test_a_generator_of_batches_cannot_carry_a_history():
    model = small_model(backbone={"stateful": True})
    x = random_tokens(2, 5)
    with pytest.raises(ValueError, match="known beforehand.* Received: generator"):
        model.fit((batch for batch in [(x, x)] * 2), steps_per_epoch=2)


def test_what_would_be_taken_for_something_else_is_refused():
    model = small_model()
    x = random_tokens(4, 8)
    with pytest.raises(ValueError, match="class_weight.* sample_weight="):
        model.fit(x, x, class_weight={0: 2.0})
    with pytest.raises(ValueError, match='format="litert", quantization="int8"'):
        model.quantize("int8")
    with pytest.raises(ValueError, match="loss is its head's.* Received: 'mse'"):
        model.compile("adam", "mse")
    for wrong in (x[0], x[..., None]):
        with pytest.raises(ValueError, match=r"must have axes \(batch, time\)"):
            model.fit(wrong, wrong)
    with pytest.raises(ValueError, match=r"axes \(batch, time\)"):
        LanguageModel(V, 6, TrellisLayer(6, 2))(x[..., None])
    with pytest.raises(ValueError, match="own `train_step` and `test_step`"):
        model.compute_loss(x, x, model(x))


def test_one_metric_alone_is_a_list_of_one():
    model = small_model()
    model.compile("sgd", Perplexity())
    assert "perplexity" in model.evaluate(*[random_tokens(2, 8)] * 2, return_dict=True, verbose=0)


def test_a_tied_embedding_that_was_quantized():
    model = small_model()
    model.embedding.quantize("int8")
    with pytest.raises(ValueError, match="cannot be quantized"):
        model(random_tokens(2, 8))


def test_a_history_is_for_the_rows_that_are_trained_on():
    model = small_model(backbone={"stateful": True})
    x = random_tokens(10, 8)
    model.fit(x, x, batch_size=4, validation_split=0.2, validation_batch_size=2, verbose=0)
    assert model.backbone.state_cache.batch_size(True) == 4


def test_a_compiled_step_reads_the_weights_of_the_moment():
    model = small_model(optimizer=SGD(1.0))
    step, tokens = streaming.compiled_step(model), np.array([1, 2])
    before = None
    for _ in range(2):
        found, expected = (s(tokens, model.initial_cache(2))[0] for s in (step, model.step))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert before is None or np.max(np.abs(np.subtract(found, before))) > 1e-3
        before = np.asarray(found)
        model.fit(*[random_tokens(4, 8)] * 2, verbose=0)


def test_tensors_and_data_sets_of_tokens_are_checked_too():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return good, bad

    model = small_model()
    good, bad = random_tokens(2, 8), np.full((2, 8), V)
    tensors = [ops.convert_to_tensor(tokens) for tokens in (good, bad)]
    for data in ([good, bad], tensors, [Data()]):
        for run in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match=r"must lie in \[0, 11\)"):
                run(*data, verbose=0)


def test_what_is_frozen_stays_so_in_a_file(tmp_path):
    backbone = TCN(6, 2, 2, seed=0)
    model = LanguageModel(V, 6, backbone, seed=0)
    model.build((None, None))
    model.embedding.trainable = backbone.blocks[0].trainable = False
    model.compile(SGD(0.1))
    x = random_tokens(4, 8)
    model.fit(x, x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    paths = [[w.name for w in m.trainable_weights] for m in (model, loaded)]
    assert paths[0] == paths[1] and len(paths[0]) < len(model.weights)
    before = np.asarray(loaded.embedding.embeddings)
    loaded.fit(x, x, verbose=0)
    np.testing.assert_array_equal(loaded.embedding.embeddings, before)


@pytest.mark.parametrize("layer", [TCN(4, 2, 2, seed=0), LRU(3, depth=2, input_projection=True)])
def test_parts_of_a_layer_stay_frozen_in_a_file(layer, tmp_path):
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, layer(inputs))
    part = layer.blocks[1] if isinstance(layer, TCN) else layer.projection
    part.trainable = False
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_weights) == len(model.trainable_weights) < len(model.weights)
