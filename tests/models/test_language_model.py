"""LanguageModel: its loss, exact figures, carried states, files, precision, and bad input."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import nll_of
from tests.support.gradients import value_and_gradients
from tests.support.model_checks import COMPILED, JAX, OneBatch, Recorder, check_file
from trellis_keras.data import TokenStream, Vocabulary
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    DenseHead,
    RHNCell,
    StackedRNN,
    TrellisLayer,
)
from trellis_keras.models import (
    BitsPerCharacter,
    CrossEntropy,
    LanguageModel,
    Perplexity,
    PolyphonicModel,
    SequenceClassifier,
)
from trellis_keras.training import Checkpoint

both_backends = pytest.mark.both_backends

V = 11


def make(backbone=None, compiled=None, **options):
    """A model that compiles quickly, with random weights of order 1."""
    backbone = keras.layers.Conv1D(6, 3, padding="causal") if backbone is None else backbone
    normal = keras.initializers.RandomNormal(stddev=1.0, seed=3)
    model = LanguageModel(
        V, 6, backbone, **{"embeddings_initializer": normal, "seed": 7, **options}
    )
    model.build((None, None))
    for i, weight in enumerate(model.backbone.weights):
        weight.assign(keras.random.normal(weight.shape, stddev=0.5, dtype=weight.dtype, seed=i))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), **COMPILED, **(compiled or {})})
    return model


def trellis(**options):
    return TrellisLayer(8, 3, **{"output_units": 6, "seed": 3, **options})


def recurrent(**options):
    layer = keras.layers.SimpleRNN(6, return_sequences=True, return_state=True)
    return StackedRNN([layer], **options)


def random_tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape)


def nll_by(model, x, y):
    """-log p of the targets of the last positions, from `predict`."""
    return nll_of(model.predict(x, batch_size=len(x), verbose=0)[:, -y.shape[1] :], y)


def stateful_stream(tokens, rows=4, steps=10):
    return TokenStream(tokens, batch_size=rows, sequence_length=steps)


# The loss


@pytest.mark.float64
def test_training_loss(assert_close):
    """The formula of the class, with weights of tokens, a mask of none, and a regularizer."""
    model = make(
        trellis(aux_every=1, return_aux=True, kernel_regularizer="l2"),
        aux_weight=0.3,
        activation_reg=2.0,
        temporal_activation_reg=1.5,
    )
    x, y = random_tokens(3, 8), random_tokens(3, 5, seed=1)
    weight = np.random.default_rng(2).integers(0, 3, y.shape).astype("float64")
    weight[0] = [1, 1, 0, 1, 1]

    def computed(training):
        y_pred = model(model.loss_inputs(x, y, weight), training=training)
        return model.compute_loss(x, y, y_pred, weight, training=training)

    def mean(values, weight=weight):
        return np.sum(values * weight) / np.sum(weight)

    hidden, aux = (np.asarray(h)[..., -5:, :] for h in model.backbone(model.embedding(x)))
    entropy = mean(nll_of(model.head(hidden), y))
    assert_close(computed(False), entropy, "lm_output")
    total = entropy + 0.3 * sum(mean(nll_of(model.head(aux[:, a]), y)) for a in range(aux.shape[1]))
    total += 2.0 * mean(np.mean(hidden**2, axis=-1))
    change = np.mean((hidden[:, 1:] - hidden[:, :-1]) ** 2, axis=-1)
    total += 1.5 * mean(change, weight[:, 1:] * weight[:, :-1])
    penalty = sum(np.sum(np.asarray(loss)) for loss in model.losses)
    assert penalty > 0 and aux.shape[1] == 3
    assert_close(computed(True), total + penalty, "lm_output")


@both_backends
def test_weights_of_rows_and_tokens():
    model = make()
    x, y = random_tokens(4, 12), random_tokens(4, 5, seed=1)
    rows = np.array([1.0, 0.0, 2.0, 1.0])
    tokens = np.repeat(rows[:, None], 5, axis=1)
    expected = np.average(nll_by(model, x, y), weights=tokens)
    for weight in (rows, tokens):
        assert model.evaluate(x, y, sample_weight=weight, verbose=0) == pytest.approx(
            expected, rel=1e-5
        )


@both_backends
@pytest.mark.parametrize("jit_compile", [True] if JAX else [False, True])
def test_figures_are_exact_over_a_split(jit_compile):
    """Two rows of 105 targets in overlapping sequences: the last batch counts fewer of them."""
    metrics = [Perplexity(), BitsPerCharacter(), CrossEntropy()]
    compiled = {"metrics": metrics, "jit_compile": jit_compile, "run_eagerly": False}
    model = make(compiled=compiled)
    stream = TokenStream(random_tokens(211), batch_size=2, sequence_length=19, context_length=5)
    results = model.evaluate(stream, verbose=0, return_dict=True)
    batches = [stream[i] for i in range(len(stream))]
    nll = np.concatenate([nll_by(model, x, y)[weight > 0] for x, y, weight in batches])
    assert len(nll) == 210
    assert results["loss"] == pytest.approx(np.mean(nll, dtype="float64"), rel=1e-5)
    assert results["cross_entropy"] == pytest.approx(results["loss"], rel=1e-6)
    assert results["perplexity"] == pytest.approx(np.exp(results["loss"]), rel=1e-5)
    assert results["bpc"] == pytest.approx(results["loss"] / np.log(2), rel=1e-6)


@both_backends
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_step_is_gradient_descent_on_the_mean_over_tokens(is_adaptive):
    """In batches of 3 and 1 rows: on TensorFlow the batch size is unknown."""
    x, y = random_tokens(4, 7), random_tokens(4, 7, seed=1)
    if is_adaptive:  # its loop has a gradient under XLA too
        xla = {"jit_compile": True, "run_eagerly": False}
        model, by_hand = (make(head=AdaptiveSoftmax(V, (4,)), compiled=c) for c in (xla, {}))
    else:
        model, by_hand = make(), make()
    history = model.fit(x, y, batch_size=3, shuffle=False, verbose=0).history
    found = []
    for rows in (slice(0, 3), slice(3, 4)):
        found.append(by_hand.train_on_batch(x[rows], y[rows]))
        by_hand.reset_metrics()
    assert history["loss"][0] == pytest.approx(np.average(found, weights=[3, 1]), rel=1e-5)
    for a, b in zip(model.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_only_counted_positions_are_asked_for():
    model = make(Recorder(), compiled={"run_eagerly": True})
    x, y = random_tokens(2, 9), random_tokens(2, 4)
    model.train_on_batch(x, y)
    model.test_on_batch(x, y)
    model.predict(x, verbose=0)
    assert [length for _, length in model.backbone.calls] == [4, 4, None]


@pytest.mark.parametrize(("kind", "steps_differ"), [("variational", False), ("element", True)])
def test_kinds_of_input_dropout(kind, steps_differ):
    model = LanguageModel(
        V, 64, Recorder(), input_dropout=0.25, input_dropout_kind=kind,
        embeddings_initializer="ones", seed=2,
    )  # fmt: skip
    tokens = random_tokens(3, 50)
    model(tokens, training=True)
    model(tokens)
    dropped, kept = (np.asarray(x) for x, _ in model.backbone.calls)
    # Each row has a mask of its own, and kept numbers are scaled up.
    assert set(np.unique(dropped.round(6))) == {0.0, np.float32(4 / 3).round(6)}
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.02 if steps_differ else 0.1)
    assert np.any(dropped[0] != dropped[1])
    assert np.any(dropped[:, 0] != dropped[:, 1]) == steps_differ
    assert np.all(kept == 1)


def test_output_dropout_is_part_of_a_training_call():
    model, tokens = make(output_dropout=0.5), random_tokens(3, 8)
    np.testing.assert_array_equal(model(tokens), model(tokens))
    assert not np.allclose(model(tokens, training=True), model(tokens))


# Carried states


@both_backends(slow=True)
def test_carried_states_make_one_text_of_its_segments():
    """A recurrent net's loss over segments is that of one pass over the whole rows."""
    tokens = random_tokens(4, 31)
    stream = stateful_stream(tokens.ravel(), steps=6)
    stateful, plain = (make(recurrent(stateful=s)) for s in (True, False))
    whole = [
        np.concatenate(part, axis=1) for part in zip(*(stream[i] for i in range(6)), strict=True)
    ]
    expected = plain.evaluate(*whole[:2], sample_weight=whole[2], batch_size=4, verbose=0)
    assert stateful.evaluate(stream, verbose=0) == pytest.approx(expected, rel=1e-5)
    assert plain.evaluate(stream, verbose=0) != pytest.approx(expected, rel=1e-3)


@both_backends
def test_training_reads_the_states_resets_them_and_ignores_a_validation():
    """The learning rate is next to nothing, so that losses are those of an evaluation."""
    tokens = random_tokens(81)
    stream, other = stateful_stream(tokens, rows=2), stateful_stream(tokens[:61], rows=3)
    carried = []
    for validation in (None, other):  # with another batch size
        model = make(recurrent(stateful=True), compiled={"optimizer": keras.optimizers.SGD(1e-12)})
        history = model.fit(stream, epochs=2, validation_data=validation, verbose=0).history
        expected = model.evaluate(stream, verbose=0)
        assert history["loss"] == pytest.approx([expected] * 2, rel=1e-5)
        carried.append(
            [np.asarray(s) for s in model.backbone.carried_states(training=True).read(2)]
        )
        if validation is not None:
            values = [model.evaluate(other, verbose=0) for _ in range(2)]
            assert history["val_loss"] == pytest.approx([values[0]] * 2, rel=1e-5)
            assert values[0] == values[1]
            assert model.backbone.carried_states(training=False).rows == 3
    for a, b in zip(*carried, strict=True):
        assert np.any(a)
        np.testing.assert_array_equal(a, b)


def test_states_are_neither_counted_nor_saved(tmp_path):
    plain, stateful = make(trellis()), make(trellis(stateful=True))
    stateful.backbone.reset_state(batch_size=3)
    assert stateful.count_params() == plain.count_params()
    for weight in stateful.weights:
        weight.assign(2 * weight)
    stateful.save_weights(tmp_path / "w.weights.h5")
    plain.load_weights(tmp_path / "w.weights.h5")
    x = random_tokens(3, 8)
    np.testing.assert_allclose(stateful(x), plain(x), rtol=1e-5, atol=1e-7)


def test_rows_of_batches():
    model = make(trellis(stateful=True))
    assert model.predict(OneBatch(random_tokens(3, 8)), verbose=0).shape == (3, 8, V)
    x = random_tokens(10, 8)
    assert model.predict(x, 5, 0).shape == (10, 8, V)  # as in Keras
    assert np.isfinite(model.evaluate(x, x, 5, 0))
    assert model.backbone.carried_states(training=False).rows == 5
    model.fit(x, x, batch_size=4, validation_split=0.2, validation_batch_size=2, verbose=0)
    assert model.backbone.carried_states(training=True).rows == 4
    for rows in (5, 4):
        model.backbone.reset_state(batch_size=2, training=True)  # as a user may do
        model.fit(x[:rows], x[:rows], verbose=0, callbacks=keras.callbacks.Callback())
        states = model.backbone.carried_states(training=True).current
        assert all(state.shape[0] == rows and np.any(state) for state in states)
    with pytest.raises(ValueError, match="10 rows with batch_size=4"):
        model.fit(x, x, batch_size=4, verbose=0)
    for rows, held_out in ((5, {"validation_split": 0.5}), (6, {"validation_data": [x[:6]] * 2})):
        told = f"validation data of {rows} rows with batch_size=4"
        with pytest.raises(ValueError, match=told):
            model.fit(x, x, 5, verbose=0, validation_batch_size=4, **held_out)
    with pytest.raises(ValueError, match="shuffle=False"):
        model.fit(x, x, batch_size=5, shuffle=True, verbose=0)
    with pytest.raises(ValueError, match="known in advance.* Received: generator"):
        model.fit(((x, x) for _ in range(2)), steps_per_epoch=2)


@pytest.mark.skipif(JAX, reason="about tf.data")
def test_rows_of_a_tf_data_pipeline(capsys):
    import tensorflow as tf

    model, x = make(trellis(stateful=True)), random_tokens(10, 8)
    pipeline = tf.data.Dataset.from_tensor_slices((x, x))
    model.fit(pipeline.batch(3, drop_remainder=True), verbose=0)
    assert model.backbone.carried_states(training=True).rows == 3
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="batches of equal size.*drop_remainder=True"):
        model.fit(pipeline.batch(3), verbose=0)


# Files


@both_backends
@pytest.mark.slow_elsewhere
def test_keras_file(tmp_path):
    """Also settings of `compile`, what is frozen, and the vocabulary."""
    vocabulary = Vocabulary([chr(97 + i) for i in range(V)], "character")
    compiled = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "metrics": BitsPerCharacter(),  # one alone is a list of one
        "steps_per_execution": 3,
    }
    model = make(TCN(6, 2, 2, seed=0), vocabulary=vocabulary, output_dropout=0.3)
    model.embedding.trainable = model.backbone.blocks[0].trainable = False
    model.compile(**compiled, **COMPILED)
    tokens = random_tokens(8, 13)
    x, y = tokens[:, :-1], tokens[:, 1:]
    loaded, figures = check_file(model, x, y, tmp_path / "model.keras")
    assert figures == {"loss", "bpc"}
    assert loaded.get_config() == model.get_config() and loaded.vocabulary == vocabulary
    assert loaded.steps_per_execution == 3 and loaded.jit_compile is JAX
    names = [[w.path for w in m.trainable_weights] for m in (model, loaded)]
    assert len(names[0]) == len(names[1]) < len(model.weights)
    loaded.fit(x, y, verbose=0)
    np.testing.assert_array_equal(loaded.embedding.embeddings, model.embedding.embeddings)


def test_weights_of_another_vocabulary_are_refused(tmp_path):
    tokens = [chr(97 + i) for i in range(V)]
    model = make(vocabulary=Vocabulary(tokens, "character"))
    model.save_weights(tmp_path / "a.weights.h5")
    model.save(tmp_path / "a.keras")
    swapped = make(vocabulary=Vocabulary([*tokens[:-2], "k", "j"], "character"))
    with pytest.raises(ValueError, match="token 9 is 'j' in the file and 'k' in the"):
        swapped.load_weights(tmp_path / "a.keras")
    larger = LanguageModel(V + 1, 6, keras.layers.Conv1D(6, 3, padding="causal"))
    larger.build((None, None))
    for name in ("a.keras", "a.weights.h5"):
        with pytest.raises(ValueError, match=f"{name} does not fit this model"):
            larger.load_weights(tmp_path / name)
        other = make()
        other.load_weights(tmp_path / name)
        np.testing.assert_array_equal(other.embedding.embeddings, model.embedding.embeddings)
    larger.load_weights(tmp_path / "a.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(larger.backbone.bias, model.backbone.bias)


# Precision and devices


def dropouts(dtype, **options):
    rates = {"embedding_dropout": 0.1, "input_dropout": 0.1, "output_dropout": 0.1}
    return LanguageModel(V, 6, trellis(dtype=dtype), seed=1, dtype=dtype, **rates, **options)


def test_half_precision_keeps_states_outputs_and_losses_in_float32():
    model = dropouts("mixed_bfloat16")
    x = random_tokens(2, 8)
    symbolic, real = model(keras.Input((8,), dtype="int32")), model(x)
    assert symbolic.dtype == keras.backend.standardize_dtype(real.dtype) == "float32"
    assert symbolic.shape == (None, 8, V) and tuple(real.shape) == (2, 8, V)
    assert model.backbone.state_dtype == "float32"
    assert {w.dtype for w in model.weights} == {"float32"}
    loss = model.compute_loss(x, x, model((x, x), training=True))
    assert keras.backend.standardize_dtype(loss.dtype) == "float32" and np.isfinite(loss)


@both_backends
def test_half_precision_adds_up_the_gradients_of_a_frequent_token_in_float32():
    tokens, weight = np.zeros((2, 500), "int32"), np.ones((2, 500, 6), "float32")

    def gradient(dtype):
        model = make(dtype=dtype)

        def total():
            return ops.sum(ops.cast(model.embed(tokens), "float32") * weight), ()

        return np.asarray(value_and_gradients(total, [model.embedding.embeddings])[1][0])

    np.testing.assert_array_equal(gradient("mixed_bfloat16"), gradient("float32"))
    embedded = make(dtype="mixed_bfloat16").embed(tokens)
    assert keras.backend.standardize_dtype(embedded.dtype) == "bfloat16"


@pytest.mark.skipif(JAX, reason="about TensorFlow on a CPU")
def test_xla_where_the_backbone_is_faster_with_it():
    def choice(backbone, dtype=None, **options):
        model = LanguageModel(V, 6, backbone, dtype=dtype)
        model.compile("sgd", **options)
        new = LanguageModel.from_config(model.get_config())
        new.compile_from_config(model.get_compile_config())
        assert new.get_compile_config()["jit_compile"] == options.get("jit_compile", "auto")
        assert new.jit_compile == model.jit_compile
        return model.jit_compile

    def cells():
        return keras.layers.RNN(RHNCell(6, 2), return_sequences=True, return_state=True)

    def lstm(units=6, **options):
        return keras.layers.LSTM(units, return_sequences=True, return_state=True, **options)

    assert choice(trellis()) is choice(StackedRNN([cells()])) is choice(LRU(512)) is True
    assert choice(LRU(513)) is choice(trellis(dtype="float64")) is False
    assert choice(StackedRNN([lstm(), keras.layers.Dropout(0.1), lstm(512)])) is True
    assert choice(StackedRNN([lstm(), lstm(513)])) is choice(TCN(6, 2, 2)) is False
    assert choice(StackedRNN([lstm(dropout=0.1)])) is False  # in Keras' loop
    assert choice(trellis(dtype="mixed_bfloat16")) is choice(trellis(), run_eagerly=True) is False
    assert choice(trellis(), jit_compile=False) is False
    assert choice(TCN(6, 2, 2), jit_compile=True) is True
    music = PolyphonicModel(trellis(), keys=3)  # of pieces of different lengths
    music.compile("sgd")
    assert music.jit_compile is False


# Bad input


@both_backends
@pytest.mark.parametrize(
    ("head", "jit_compile"), [(DenseHead, JAX), (lambda size: AdaptiveSoftmax(size, (3, 6)), True)]
)
def test_ids_outside_the_vocabulary_give_nan_in_the_graph(head, jit_compile):
    """Batches of a generator are not checked before they are used."""
    model = make(head=head(V), compiled={"jit_compile": jit_compile, "run_eagerly": False})
    x, y = random_tokens(2, 5), random_tokens(2, 5, seed=1)
    for bad in (V, -1, 99):
        wrong = x.copy()
        wrong[1, 2] = bad
        for batch in ((wrong, y), (x, wrong)):
            assert np.isnan(model.test_on_batch(*batch)), (bad, batch)
        log_p = ops.convert_to_numpy(model(wrong))
        assert np.isnan(log_p[1, 2]).all() and np.isfinite(log_p[0]).all()
    # Padding may have any id.
    wrong = y.copy()
    wrong[1, 3:] = -1
    weight = (wrong >= 0) * 1.0
    padded = model.test_on_batch(x, wrong, sample_weight=weight)
    assert padded == model.test_on_batch(x, y, sample_weight=weight)


@both_backends
def test_tokens_and_sizes_of_any_integer_type():
    tokens = random_tokens(2, 6).astype("uint8")
    size = np.int64(tokens.max() + 1)
    backbone = keras.layers.Conv1D(6, 3, padding="causal")
    model = LanguageModel(size, np.int32(6), backbone, embedding_dropout=0.2, head=DenseHead(size))
    model.compile("sgd", **COMPILED)
    history = model.fit(tokens[:, :-1], tokens[:, 1:], verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert type(model.get_config()["vocabulary_size"]) is int


def test_a_model_that_fit_builds_reads_tokens_of_any_length(tmp_path):
    model = LanguageModel(V, 4, TCN(4, depth=1))
    model.compile("sgd", **COMPILED)
    stream = TokenStream(random_tokens(50), 4, 6)
    model.fit(stream, verbose=0, callbacks=[Checkpoint(tmp_path)])
    assert tuple(model.get_build_config()["input_shape"]) == (None, None)
    assert SequenceClassifier.from_model(model, 2).predict(X, verbose=0).shape == (4, 2)


# Errors

X = random_tokens(4, 8)


def lstm(**options):
    return keras.layers.LSTM(6, **{"return_sequences": True, **options})


def inside(*layers):
    return LanguageModel(V, 4, keras.Sequential([*layers]))


WRONG_MODELS = [
    (lambda: LanguageModel(V, 6, None), "`backbone` must be a layer"),
    (lambda: LanguageModel(V, 6, trellis(), activation_reg=-1.0), "activation_reg=-1.0"),
    (lambda: LanguageModel(V, 6, trellis(), aux_weight=0.1), "return_aux"),
    (lambda: LanguageModel(V, 6, trellis(return_state=True)), "return_state"),
    (lambda: LanguageModel(V, 6, keras.layers.LSTM(6)), "return_sequences"),
    (lambda: LanguageModel(V, 6, TCN(6, 2, 2, padding="same")), "later tokens"),
    (lambda: inside(keras.layers.Bidirectional(TCN(4, 3, 2))), "later tokens"),
    (lambda: inside(lstm(go_backwards=True)), "later tokens"),
    (lambda: inside(keras.layers.Conv1D(4, 3, padding="same")), "later tokens"),
    (lambda: inside(recurrent(stateful=True)), "stateful"),
    (lambda: LanguageModel(V, 6, trellis(output_length=3)), "output_length"),
    (lambda: LanguageModel(V, 6, lstm(stateful=True)), "StackedRNN"),
    (lambda: LanguageModel(V, 5, trellis()).build((None, None)), "embedding_dim"),
    (lambda: make().build((None, None, 1)), "axes"),
    (lambda: LanguageModel(V, 6, trellis(), input_dropout_kind="word"), "input_dropout_kind"),
    (
        lambda: LanguageModel(V, 6, trellis(), input_dropout=1, input_dropout_kind="element"),
        "input_dropout",
    ),
    (lambda: make(vocabulary=Vocabulary(["a", "b"], "character")), "vocabulary_size"),
    (lambda: LanguageModel(V, 6, trellis(), head=DenseHead(7)), "vocabulary_size"),
    (lambda: LanguageModel(V, 6, trellis(), head=make(tie_embeddings=False).head), "is built"),
    (lambda: make().compile("adam", "mse"), "metrics"),
    (lambda: make().quantize("int8"), "quantization"),
    (lambda: make().fit(X, X, class_weight={0: 2.0}), "class_weight"),
    (lambda: make().train_on_batch(X, X, class_weight={0: 2.0}), "class_weight"),
    (lambda: make().fit(X, verbose=0), "targets"),
    (lambda: make().predict(np.full((2, 9), -1), verbose=0), "-1"),
    (lambda: make()(np.zeros((2, 4), "float32")), "float32"),
]


@pytest.mark.parametrize(("make_model", "message"), WRONG_MODELS)
def test_wrong_models_and_calls(make_model, message):
    with pytest.raises(ValueError, match=message):
        make_model()


GOOD, BAD = random_tokens(2, 9), np.full((2, 9), V)
TEXT, BAD_TEXT = (TokenStream([*random_tokens(49), last], 2, 9, 5) for last in (0, V))
OUTSIDE = rf"must lie in \[0, {V}\). Received: {V}"
WRONG_DATA = [
    ((BAD, GOOD), {}, OUTSIDE),
    ((GOOD, BAD), {}, OUTSIDE),
    ((GOOD[:, 1:], GOOD), {}, "last positions of x"),
    ((GOOD, ops.convert_to_tensor(BAD)), {}, OUTSIDE),
    ((OneBatch(GOOD, BAD),), {}, OUTSIDE),
    ((TEXT,), {"validation_data": BAD_TEXT}, OUTSIDE),
    ((GOOD, GOOD), {"validation_data": (BAD, GOOD)}, OUTSIDE),
    ((GOOD, GOOD), {"sample_weight": np.ones((2, 3))}, r"\(batch,\), or that of y"),
    ((GOOD, GOOD[:, :4]), {"sample_weight": np.ones((2, 9))}, r"\(batch,\), or that of y"),
    ((GOOD, GOOD[:, :0]), {}, "at least one target"),
    ((GOOD, GOOD.tolist()), {}, "`y` must be an array"),
    ((GOOD * 1.0, GOOD), {}, "type float64"),
    ((GOOD[..., None], GOOD[..., None]), {}, r"must have axes \(batch, time\)"),
]


def test_a_backbone_that_looks_ahead():
    model = inside(keras.layers.ZeroPadding1D((0, 1)), keras.layers.Conv1D(4, 2))
    model.compile("sgd")
    for use in (lambda: model.fit(X, X), lambda: model.generate(X[:, :2], 4)):
        with pytest.raises(ValueError, match="does not depend on later.*delay=1"):
            use()


@pytest.mark.parametrize(("arguments", "options", "message"), WRONG_DATA)
def test_wrong_data(arguments, options, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        model.fit(*arguments, verbose=0, **options)
    if "validation_data" not in options:
        with pytest.raises(ValueError, match=message):
            model.evaluate(*arguments, verbose=0, **options)
