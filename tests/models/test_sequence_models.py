"""SequenceClassifier, SequenceRegressor and PolyphonicModel: figures, masks, files, bad input."""

import json
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import log_softmax, nll_of
from tests.support.model_checks import COMPILED, JAX, OneBatch, Recorder, check_file
from tests.support.parameters import SLOW_ON_JAX
from trellis_keras.layers import LRU, TCN, TrellisLayer
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.models.losses import FrameLoss, SquaredError, frame_nll

both_backends = pytest.mark.both_backends

CLASSES, KEYS = 3, 7
per_step_or_not = pytest.mark.parametrize("per_step", [False, True])


class Mix(keras.layers.Layer):
    """A causal backbone that compiles quickly: channels, and their mean so far."""

    def __init__(self, per_step, **kwargs):
        super().__init__(**kwargs)
        self.per_step = per_step

    def call(self, x):
        time = ops.cast(ops.arange(1, ops.shape(x)[1] + 1), x.dtype)
        y = ops.concatenate([x, ops.cumsum(x, axis=1) / time[:, None]], axis=-1)
        return y if self.per_step else y[:, -1]

    def compute_output_shape(self, shape):
        shape = (*shape[:-1], 2 * shape[-1])
        return shape if self.per_step else (shape[0], shape[2])


def trellis(per_step, **options):
    return TrellisLayer(8, 4, output_units=6, return_sequences=per_step, seed=1, **options)


def tcn(per_step):
    return TCN(6, kernel_size=3, depth=2, return_sequences=per_step, seed=1)


def lstm(per_step):
    return keras.layers.LSTM(6, return_sequences=per_step)


def classifier(backbone=Mix, per_step=False, **options):
    return SequenceClassifier(
        backbone(per_step), CLASSES, per_step=per_step, **{"seed": 2} | options
    )


def data(per_step, rows=22, seed=0):
    """Inputs, and labels that a causal model can learn: which channel's last value is largest."""
    x = np.random.default_rng(seed).normal(size=(rows, 9, CLASSES)).astype("float32")
    y = np.argmax(x, axis=-1)
    return x, y if per_step else y[:, -1]


# Training and figures


@both_backends(slow=True)
@per_step_or_not
def test_figures_are_means_over_what_counts_in_the_whole_split(per_step):
    model = classifier(per_step=per_step)
    model.compile("sgd", **COMPILED)
    x, y = data(per_step, rows=11)
    weight = np.random.default_rng(1).integers(0, 3, y.shape).astype("float32")
    weight.reshape(len(y), -1)[:, -1] = 1  # every row counts
    logits = np.asarray(model.predict(x, verbose=0), "float64")
    nll, right = nll_of(log_softmax(logits), y), np.argmax(logits, -1) == y

    def evaluate(weight):
        results = model.evaluate(
            x, y, sample_weight=weight, batch_size=4, verbose=0, return_dict=True
        )
        full = np.broadcast_to(weight.reshape(len(y), -1), y.reshape(len(y), -1).shape)
        full = full.reshape(y.shape)
        assert results["loss"] == pytest.approx(np.average(nll, weights=full), rel=1e-5)
        assert results["accuracy"] == pytest.approx(np.average(right, weights=full), rel=1e-5)

    evaluate(weight)
    evaluate(weight.reshape(len(y), -1)[:, 0] + 1)  # of rows
    # A step is gradient descent on the same mean.
    model.compile(keras.optimizers.SGD(1.0), **COMPILED)
    bias = np.asarray(model.head.bias)
    model.train_on_batch(x, y, sample_weight=weight)
    p = np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    gradient = ((p - np.eye(CLASSES)[y]) * weight[..., None]).reshape(-1, CLASSES).sum(0)
    expected = bias - gradient / weight.sum()
    np.testing.assert_allclose(model.head.bias, expected, rtol=1e-4, atol=1e-6)


@both_backends(slow=True)
@per_step_or_not
def test_a_regressor_has_the_mean_squared_error(per_step):
    assert SquaredError("sum").reduction == "sum"
    model = SequenceRegressor(Mix(per_step), np.int64(1), per_step=per_step, seed=2)
    model.compile("sgd", **COMPILED)
    x, _ = data(per_step)
    y = x[..., 0] if per_step else x[:, -1, 0]
    error = np.mean((model.predict(x, verbose=0)[..., 0] - y) ** 2)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(error, rel=1e-5)
    json.dumps(model.get_config())  # of a NumPy integer
    # Targets with an axis for the unit are the same ones.
    assert model.evaluate(x, y[..., None], verbose=0) == pytest.approx(error, rel=1e-5)


@pytest.mark.both_backends
@pytest.mark.parametrize("per_step", [False, True])
def test_targets_of_weight_0_may_be_missing(per_step):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 2))
    y = rng.normal(size=(6, 5, 2) if per_step else (6, 2))
    weight = np.ones(y.shape[:-1])
    weight[2] = 0
    losses = []
    for missing in (0.0, np.nan):
        y[2] = missing
        keras.utils.set_random_seed(0)
        backbone = keras.layers.GRU(3, return_sequences=per_step)
        model = SequenceRegressor(backbone, 2, per_step=per_step, seed=0)
        model.compile("adam", run_eagerly=True)
        fitted = model.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, verbose=0)
        losses += fitted.history["loss"]
    assert losses[:2] == losses[2:] and np.all(np.isfinite(losses))


def test_a_model_that_masks_padding_does_not_stream():
    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    model = SequenceClassifier(keras.layers.GRU(3), 3, embedding=embedding)
    model.build((None, None))
    for read in (lambda: model.initial_cache(1), lambda: model.step(np.array([3]), None)):
        with pytest.raises(ValueError, match="mask_zero=True"):
            read()
    model = SequenceRegressor(keras.Sequential([keras.layers.Masking(-9.0), keras.layers.GRU(3)]))
    model.build((None, None, 2))
    with pytest.raises(ValueError, match="has a `Masking` layer"):
        model.initial_cache(1)


def test_a_loss_of_keras_is_the_mean_that_keras_has():
    """Its reduction divides by all steps, whatever their weights are."""
    model = SequenceRegressor(Mix(True), 2, per_step=True)
    model.compile("sgd", loss="mae", metrics=["mse"], **COMPILED)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 9, 2)), rng.normal(size=(5, 9, 2))
    weight = rng.integers(0, 3, (5, 9)).astype("float32")
    weight[:, -1] = 1
    results = model.evaluate(x, y, sample_weight=weight, batch_size=2, verbose=0, return_dict=True)
    errors = model.predict(x, verbose=0) - y
    expected = (np.abs(errors).mean(-1) * weight).sum() / weight.size
    assert results["loss"] == pytest.approx(expected, rel=1e-5)
    assert results["mse"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    # Labels of another kind are not checked.
    classes = classifier(per_step=True)
    classes.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    )
    x, y = data(True, rows=4)
    y[:, 0] = -1
    assert np.isfinite(classes.evaluate(x, y, verbose=0))


@both_backends(slow=True)
@pytest.mark.parametrize("backbone", [trellis, lstm])
def test_masked_steps_change_nothing(backbone):
    """With a Masking layer in the backbone, figures are those of the unmasked steps."""
    x, y = data(True, rows=4)
    real = np.ones(x.shape[:2], bool)
    real[:2, :7] = False  # batches of 4 and 18 valid steps
    masking = [keras.layers.Masking(-9.0), backbone(True)]
    masked = SequenceClassifier(keras.Sequential(masking), CLASSES, per_step=True)
    masked.compile("sgd", **COMPILED)
    padded = np.where(real[..., None], x, np.float32(-9))
    results = masked.evaluate(padded, y, batch_size=2, verbose=0, return_dict=True)

    plain = classifier(backbone, True)
    plain.build((None, None, CLASSES))
    plain.set_weights(masked.get_weights())
    if backbone is lstm:
        short = plain(x[:2, 7:])
    else:
        short = plain(x[:2], mask=ops.convert_to_tensor(real[:2]))[:, 7:]
    logits = [np.asarray(part).reshape(-1, CLASSES) for part in (short, plain(x[2:]))]
    logits = np.concatenate(logits)
    np.testing.assert_allclose(np.asarray(masked(padded))[real], logits, rtol=1e-4, atol=1e-6)
    assert results["loss"] == pytest.approx(np.mean(nll_of(log_softmax(logits), y[real])), rel=1e-5)
    right = np.argmax(logits, axis=-1) == y[real]
    assert results["accuracy"] == pytest.approx(np.mean(right), rel=1e-6)


def test_dropouts_are_on_raw_inputs_and_on_the_input_of_the_head():
    rates = {"input_dropout": 0.5, "output_dropout": 0.4}
    model = SequenceClassifier(Recorder(), 3, per_step=True, seed=1, **rates)
    x = np.ones((2, 50, 4), "float32")
    model(x)
    head_inputs = []
    model.head.call = lambda x, **_: head_inputs.append(x) or x
    model(x, training=True)
    kept, dropped = (np.asarray(seen) for seen, _ in model.backbone.calls)
    assert np.array_equal(kept, x)
    # Element-wise: neither whole steps nor whole channels.
    assert set(np.unique(dropped)) == {0.0, 2.0}
    assert np.all(np.ptp(dropped, axis=1) > 0) and np.any(np.ptp(dropped, axis=2) > 0)
    scale = np.asarray(head_inputs[-1]) / np.where(dropped == 0, 1, dropped)
    assert np.allclose(np.unique(scale[dropped > 0]), [0, 1 / 0.6])


# Files and precision


@pytest.mark.parametrize(
    ("kind", "per_step"),
    [(SequenceClassifier, False), (SequenceRegressor, True), (PolyphonicModel, True)],
)
def test_keras_file(kind, per_step, tmp_path):
    """Also a loss that is not scaled, and what is frozen."""
    options = {"kernel_initializer": "ones", "input_dropout": 0.1, "output_dropout": 0.2, "seed": 3}
    backbone = keras.Sequential([keras.layers.Dense(4), Mix(per_step)])
    if kind is not PolyphonicModel:
        options["per_step"] = per_step
    model = kind(backbone, 3, **options)
    x, y = data(per_step)
    y = {SequenceClassifier: y, SequenceRegressor: np.eye(3)[y]}.get(kind, (x > 0) * 1.0)
    x = (x > 0) * 1.0 if kind is PolyphonicModel else x
    model.build(x.shape)
    model.head.trainable = False
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), **COMPILED)
    loaded, figures = check_file(model, x, y, tmp_path / "model.keras", Mix=Mix)
    extra = {SequenceClassifier: {"accuracy"}, PolyphonicModel: {"frame_nll"}}.get(kind, set())
    assert figures == {"loss"} | extra
    assert not loaded.head.trainable


def test_a_regressor_keeps_its_embedding_and_activation(tmp_path):
    embedding = keras.layers.Embedding(CLASSES, 4)
    model = SequenceRegressor(Mix(False), embedding=embedding, activation="softplus")
    tokens = np.arange(10).reshape(2, 5) % CLASSES
    expected = model.predict(tokens, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Mix": Mix})
    np.testing.assert_array_equal(loaded.predict(tokens, verbose=0), expected)


def test_half_precision_keeps_outputs_and_losses_in_float32():
    model = classifier(lambda s: Mix(s, dtype="mixed_bfloat16"), dtype="mixed_bfloat16")
    x, y = data(False)
    symbolic, real = model(keras.Input((9, CLASSES))), model(x)
    assert symbolic.dtype == keras.backend.standardize_dtype(real.dtype) == "float32"
    assert symbolic.shape == (None, CLASSES)
    model.compile("sgd")
    assert model.loss.dtype == "float32"
    loss = model.compute_loss(x, y, real)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    assert {w.dtype for w in model.weights} == {"float32"}


# Streaming


def test_a_last_step_model_streams_as_if_each_step_were_the_last():
    model = classifier(tcn)
    x, _ = data(False, rows=3)
    model.build(x.shape)
    cache = model.initial_cache(3)
    for end in range(1, x.shape[1] + 1):
        y, cache = model.step(x[:, end - 1], cache)
        np.testing.assert_allclose(y, model(x[:, :end]), atol=1e-5)
    np.testing.assert_allclose(model.prefill(x)[0][:, -1], model(x), atol=1e-5)
    with pytest.raises(ValueError, match="not built"):
        classifier(tcn, per_step=True).initial_cache(1)
    both = classifier(lambda per_step: keras.layers.Bidirectional(lstm(per_step)))
    both.build(x.shape)
    with pytest.raises(ValueError, match="Bidirectional.* does not stream"):
        both.initial_cache(1)


# Polyphonic music


def piano_rolls(lengths=(12, 5, 9, 3, 7), seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.random((n, KEYS)) < 0.3).astype("float32") for n in lengths]


def padded(rolls):
    """Inputs, next frames and the weights of frames, padded at the end with frames of ones."""
    length = max(map(len, rolls)) - 1
    x, y = np.ones((2, len(rolls), length, KEYS), "float32")
    weight = np.zeros((len(rolls), length), "float32")
    for i, roll in enumerate(rolls):
        n = len(roll) - 1
        x[i, :n], y[i, :n], weight[i, :n] = roll[:-1], roll[1:], 1
    return x, y, weight


def polyphonic(**options):
    model = PolyphonicModel(Mix(True), keys=KEYS, seed=2)
    model.compile(keras.optimizers.SGD(1.0), **{**COMPILED, **options})
    return model


def test_metrics_of_probabilities_at_a_threshold_of_logits():
    metrics = [keras.metrics.AUC(from_logits=True), keras.metrics.Precision(thresholds=0)]
    model = polyphonic(loss="ce", metrics=metrics)
    assert isinstance(model.loss, keras.losses.BinaryCrossentropy) and model.loss.from_logits
    x, y, _ = padded(piano_rolls())
    results = model.evaluate(x, y, verbose=0, return_dict=True)
    on = model.predict(x, verbose=0) > 0
    assert results["precision"] == pytest.approx(y[on].mean(), rel=1e-5)
    model = polyphonic(metrics=["accuracy"])
    results = model.evaluate(x, y, verbose=0, return_dict=True)
    assert results["accuracy"] == pytest.approx(np.mean(on == (y == 1)), rel=1e-5)


@pytest.mark.skipif(JAX, reason="about TensorFlow")
def test_xla_in_float64_warns():
    model = SequenceRegressor(TCN(8, depth=2, activation="glu", dtype="float64"), 1)
    with pytest.warns(UserWarning, match="wrong gradients.*float64"):
        model.compile("adam", jit_compile=True)


def test_padded_batches_give_the_figure_of_the_pieces_one_by_one():
    model = polyphonic()
    x, y, weight = padded(piano_rolls())
    plateau = keras.callbacks.ReduceLROnPlateau("frame_nll")  # it knows the direction
    model.fit(x, y, sample_weight=weight, batch_size=2, verbose=0, callbacks=[plateau])
    results = model.evaluate(x, y, sample_weight=weight, batch_size=2, verbose=0, return_dict=True)
    frames = []
    for roll in piano_rolls():
        logits = np.asarray(model(roll[None, :-1])[0], "float64")
        p = 1 / (1 + np.exp(-logits))
        frames.append(-np.sum(np.log(np.where(roll[1:] == 1, p, 1 - p)), axis=-1))
    mean = np.mean(np.concatenate(frames))
    assert results["frame_nll"] == pytest.approx(mean, rel=1e-5)
    assert results["loss"] == pytest.approx(mean, rel=1e-5)
    # The mean of the means of the batches, which have 15, 10 and 6 frames, is another number.
    batches = [np.concatenate(frames[i : i + 2]).mean() for i in (0, 2, 4)]
    assert abs(np.mean(batches) - mean) > 1e-4


def test_the_frame_loss_stays_exact_where_a_sigmoid_is_0_or_1():
    logits = ops.convert_to_tensor([[200.0, -200.0]])
    assert float(frame_nll(np.array([[1.0, 0.0]]), logits)[0]) == 0
    assert float(frame_nll(np.array([[0.0, 1.0]]), logits)[0]) == 400
    assert FrameLoss.from_config(FrameLoss(dtype="float64").get_config()).dtype == "float64"


# Labels


@both_backends(slow=True)
def test_steps_after_the_last_value_are_padding(tmp_path):
    """They are masked. A value that is missing before them is read as the mean."""
    model = classifier(lambda _: keras.layers.GRU(3), normalize=True, nan_padding=True)
    x = np.random.default_rng(0).normal(size=(2, 9, 3)).astype("float32")
    x[0, 2] = np.nan
    model.adapt(x)
    padded = np.where(np.arange(9)[:, None] < 6, x, np.nan)
    expected = model.predict_on_batch(x[:, :6])
    np.testing.assert_allclose(model.predict_on_batch(padded), expected, rtol=1e-5)
    model.save(tmp_path / "own.keras")
    loaded = keras.saving.load_model(tmp_path / "own.keras")
    np.testing.assert_allclose(loaded.predict_on_batch(padded), expected, rtol=1e-5)
    plain = classifier(lambda _: keras.layers.GRU(3), nan_padding=True)
    plain.compile("sgd", jit_compile=False)
    plain.fit(np.where(np.arange(9)[:, None] < 6, 1.0, padded), np.zeros(2, int), verbose=0)
    assert all(np.all(np.isfinite(weight)) for weight in plain.get_weights())
    plain.fit(np.ones((2, 9, 3), "int64"), np.zeros(2, int), verbose=0)
    with pytest.raises(ValueError, match="`embedding` needs nan_padding=False"):
        classifier(embedding=keras.layers.Embedding(5, 2), nan_padding=True)


class Column:
    """As those of data frames."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values


@both_backends
def test_class_names_are_labels_and_saved(tmp_path):
    names = ["walk", "run", "sit"]
    model = classifier(tcn, activation="softmax", class_names=names, normalize=True)
    x, y = data(False)
    model.adapt(x)
    model.build(x.shape)  # again
    model.compile("sgd", **COMPILED)
    model.fit(x, np.take(names, y), validation_data=(x, np.take(names, y)), verbose=0)
    by_name = model.evaluate(x, np.take(names, y), verbose=0)
    for labels in (y, list(np.take(names, y)), Column(np.take(names, y))):
        assert by_name == model.evaluate(x, labels, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.class_names == names
    p = loaded.predict_proba(x, verbose=0)
    np.testing.assert_array_equal(p, model.predict(x, verbose=0))
    np.testing.assert_allclose(p.sum(axis=-1), 1, rtol=1e-5)
    assert by_name[0] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), rel=1e-4)


def evaluated(model, *batch):
    """Evaluates a batch of a generator, which is not checked before it is used."""
    return model.evaluate((batch for _ in range(1)), steps=1, verbose=0)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "crossentropy"])
def test_a_loss_by_its_name_takes_logits(loss):
    model, (x, y) = classifier(), data(False)
    model.compile("sgd", run_eagerly=True)
    expected = model.evaluate(x, y, verbose=0)[0]
    metric = "sparse_categorical_crossentropy"
    options = {"metrics": ["accuracy", metric], "weighted_metrics": {"outputs": metric}}
    model.compile("sgd", loss=[loss], run_eagerly=True, **options)
    results = np.delete(model.evaluate(x, y, verbose=0), 1)
    assert len(results) >= 3
    np.testing.assert_allclose(results, expected, rtol=1e-5)


@both_backends
@pytest.mark.parametrize("per_step", [False, pytest.param(True, marks=SLOW_ON_JAX)])
def test_labels_outside_the_classes_give_nan_in_the_graph(per_step):
    model, (x, y) = classifier(per_step=per_step), data(per_step)
    model.compile("sgd", jit_compile=False)
    assert np.isfinite(model.test_on_batch(x, y)).all()
    for bad in (CLASSES, -1):
        wrong = y.copy()
        wrong.flat[3] = bad
        assert np.isnan(evaluated(model, x, wrong)[0])
        weight = np.ones(y.shape, "float32")
        weight.flat[3] = 0
        assert np.isfinite(evaluated(model, x, wrong, weight)[0])


@both_backends
def test_outputs_are_nan_until_the_inputs_are_adapted():
    model = SequenceRegressor(Mix(False), normalize=True)
    x = X + np.arange(5)[:, None]
    assert np.isnan(model(x)).all()
    model.compile("sgd", run_eagerly=True)
    for run in (
        lambda x: model.evaluate(x, LABELS, verbose=0),
        lambda x: model.predict(x, verbose=0),
        model.predict_on_batch,
    ):
        with pytest.raises(ValueError, match="adapt"):
            run(x)
    with pytest.raises(ValueError, match="an array, or a list of arrays"):
        model.adapt([[1.0, 2.0], [3.0, 4.0]])
    model.adapt(array for array in x)
    with pytest.raises(ValueError, match="channels, as before. Received: "):
        model.adapt(np.concatenate([x, x], axis=-1))
    np.testing.assert_allclose(model.input_normalization.scale, x.std(axis=(0, 1)), rtol=1e-5)
    assert np.isfinite(model.predict(x, verbose=0)).all()


@pytest.mark.parametrize(
    ("offset", "dtype", "named"), [(1e9, "float32", 1), (1e4, "float32", 0), (1e9, "float64", 0)]
)
def test_values_that_float32_cannot_tell_apart_are_named(offset, dtype, named):
    x = offset + np.random.default_rng(0).normal(size=(20, 3, 2)) * [0, 1]
    backbone = TCN(2, 2, 1, return_sequences=False, dtype=dtype)
    model = SequenceRegressor(backbone, 1, normalize=True, dtype=dtype)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.adapt(x)
    assert sum("Channel 1" in str(warning.message) for warning in found) == named


def test_inputs_are_standardized_before_they_are_rounded():
    x = (1000 + np.random.default_rng(0).normal(size=(16, 20, 2))).astype("float32")
    backbone = TCN(8, 3, 2, return_sequences=False, dtype="mixed_bfloat16")
    model = SequenceRegressor(backbone, 1, normalize=True, dtype="mixed_bfloat16")
    model.adapt(x)
    features = np.asarray(ops.cast(model._features(x), "float32"))
    assert abs(features.std() - 1) < 0.01


def test_class_weights():
    """By number or by name, they are the weights of the sequences with these labels."""
    x, y = data(False, rows=6)
    names, weights = np.array(["a", "b", "c"]), np.array([0.5, 1.0, 3.0], "float32")
    losses = []
    for labels, options in (
        (y, {"class_weight": dict(enumerate(weights))}),
        (names[y], {"class_weight": dict(zip(names, weights, strict=True))}),
        (y, {"sample_weight": weights[y]}),
    ):
        model = classifier(class_names=names)
        model.compile(keras.optimizers.SGD(0.0), **COMPILED)
        losses += model.fit(x, labels, verbose=0, **options).history["loss"]
        losses.append(model.train_on_batch(x, labels, **options)[0])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_class_without_a_weight_has_weight_one():
    """Also in a data set."""
    import tensorflow as tf

    x, y = data(False, rows=6)
    model = classifier()
    model.compile(keras.optimizers.SGD(0.0), **COMPILED)
    expected = model.evaluate(x, y, sample_weight=np.where(y == 0, 2.0, 1.0), verbose=0)[0]
    for batches in ((x, y), [tf.data.Dataset.from_tensors((x, y))]):
        history = model.fit(*batches, class_weight={0: 2.0}, verbose=0).history
        assert history["loss"] == pytest.approx([expected], rel=1e-5)


# Errors


def compiled(model, **options):
    model.compile("sgd", run_eagerly=True, **options)
    return model


def named():
    return compiled(classifier(class_names=["a", "b", "c"]))


def regressor():
    return compiled(SequenceRegressor(lstm(False), 2))


def masking(**options):
    backbone = keras.Sequential([keras.layers.Masking(), LRU(4, return_sequences=False)])
    return SequenceClassifier(backbone, 2, **options)


def from_language_model(**options):
    return SequenceClassifier.from_model(LanguageModel(7, 4, TCN(4, 2, 1)), 3, **options)


def stateful_inside():
    layers = [keras.Input((9, 4), batch_size=3), LRU(5, stateful=True, return_sequences=False)]
    return keras.Sequential(layers)


STEPS = (None, None, 2)
LOSS_OF_PROBABILITIES = keras.losses.SparseCategoricalCrossentropy()
BINARY_LOSS = keras.losses.BinaryCrossentropy()
WRONG_MODELS = [
    (lambda: PolyphonicModel(Mix(True), 3, activation="sigmoid"), "activation"),
    (lambda: classifier(lambda _: trellis(False), True).build(STEPS), "return_sequences"),
    (lambda: SequenceRegressor(lstm(True)).build(STEPS), "return_sequences"),
    (
        lambda: classifier(lambda s: trellis(s, aux_every=2, return_aux=True)).build(STEPS),
        "return_aux",
    ),
    (lambda: SequenceClassifier(stateful_inside(), 2), "stateful"),
    (lambda: SequenceClassifier(TCN, 2), "`backbone` must be a layer"),
    *(
        (lambda loss=loss: classifier().compile("sgd", loss), "are logits")
        for loss in ("kl_divergence", "poisson", keras.losses.dice, keras.losses.Tversky())
    ),
    (lambda: classifier().compile("sgd", metrics=["kl_divergence"]), "are logits"),
    (lambda: SequenceClassifier(lstm(False), 1), "num_classes"),
    (lambda: SequenceRegressor(lstm(False), 0), "units"),
    (lambda: SequenceRegressor(lstm(False), activation=ops.tanh), "activation"),
    (lambda: classifier(input_dropout=1), "input_dropout"),
    (lambda: masking(normalize=True), "Masking"),
    (lambda: classifier().build((4, 5)), "batch, time, channels"),
    (lambda: classifier(class_names=["a", "a", "b"]), "class_names"),
    (lambda: classifier(activation="relu"), "activation"),
    (from_language_model, "is not built"),
    (lambda: from_language_model(embedding=None), "`embedding`"),
    (lambda: from_language_model(normalize=False), "Received: .'normalize'"),
    (lambda: classifier().compile("sgd", []), "one loss"),
    (lambda: classifier().compile("sgd", ["mse", "mae"]), "one loss"),
    (lambda: classifier().compile("sgd", LOSS_OF_PROBABILITIES), "from_logits"),
    (lambda: classifier().compile("sgd", "bce"), "SequenceRegressor"),
    (lambda: classifier(activation="softmax").compile("sgd", BINARY_LOSS), "SequenceRegressor"),
    (lambda: polyphonic(loss=keras.losses.BinaryCrossentropy()), "logits"),
    (lambda: polyphonic(metrics=[keras.losses.binary_crossentropy]), "from_logits"),
    (lambda: polyphonic(weighted_metrics=[keras.metrics.AUC()]), "from_logits"),
    (lambda: polyphonic(metrics={"a": keras.metrics.Precision()}), "threshold"),
    (lambda: polyphonic(metrics=[keras.metrics.BinaryAccuracy()]), "threshold"),
    (lambda: classifier().compile("sgd", metrics=["binary_accuracy"]), "threshold"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_MODELS)
def test_wrong_models(make, message):
    with pytest.raises(ValueError, match=message):
        make()


X, LABELS = np.zeros((4, 5, 3), "float32"), np.zeros(4, int)
NO_CLASSES = [LABELS + CLASSES, LABELS - 1, LABELS + 0.5]
# (model, arguments of `fit` and `evaluate`, message)
WRONG_DATA = [
    (classifier, (np.zeros((4, 5)), LABELS), "batch, time, channels"),
    (classifier, (X,), "no y"),
    *((classifier, (X, y), "Labels") for y in NO_CLASSES),
    (classifier, (OneBatch(X, ops.convert_to_tensor(NO_CLASSES[0])),), "Labels"),
    (classifier, (X, np.zeros((4, 5), int)), "axes"),
    (lambda: classifier(per_step=True), (X, LABELS), "axes"),
    (classifier, (X, np.array(["a"] * 4)), "Labels"),
    *((classifier, (X, Column(y)), "Labels") for y in NO_CLASSES),
    (named, (X, np.array(["a", "d"] * 2)), "class_names"),
    (regressor, (X, np.zeros((4, 3))), "units"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), WRONG_DATA)
def test_wrong_data(make, arguments, message):
    """Named before anything is compiled."""
    model = make()
    compiled(model)
    for run in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=message):
            run(*arguments, verbose=0)


def test_other_wrong_data(tmp_path):
    with pytest.raises(ValueError, match="axes"):
        compiled(classifier()).test_on_batch(X, np.zeros((4, 5), int))
    with pytest.raises(ValueError, match="must end in .keras or .weights.h5"):
        classifier().save_weights(tmp_path / "model.weights.json", max_shard_size=1)
    model = compiled(classifier())
    model.build((None, None, 1))
    with pytest.raises(ValueError, match="axis -1.*value 1"):
        model(X)
    for call in (
        model.predict,
        model.predict_on_batch,
        lambda x: model.evaluate(x, LABELS, verbose=0),
    ):
        with pytest.raises(ValueError, match=r"built for inputs of 1 channels.*\(4, 5, 3\)"):
            call(X)
    with pytest.raises(ValueError, match='quantization="int8"'):
        model.quantize("int8")
    with pytest.raises(ValueError, match="class_weight"):
        model.fit(X[..., :1], LABELS, class_weight={"c": 2}, verbose=0)
    with pytest.raises(ValueError, match="a dict from classes to weights. Received: 'balanced'"):
        model.fit(X[..., :1], LABELS, class_weight="balanced", verbose=0)
    per_step = compiled(classifier(per_step=True))
    for train in (per_step.fit, per_step.train_on_batch):
        with pytest.raises(ValueError, match="class_weight.* sample_weight="):
            train(X, X[..., 0], class_weight={0: 2.0})


@both_backends
@pytest.mark.parametrize("units", [(1,), (1, 2)])
def test_targets_are_not_broadcast_to_the_outputs(units):
    with pytest.raises(ValueError, match="shape of the outputs"):
        evaluated(regressor(), X, np.zeros((4, *units)))
    with pytest.raises(ValueError, match="shape of the outputs"):
        evaluated(polyphonic(), np.zeros((4, 5, KEYS)), np.zeros((4, 5, *units)))


@both_backends
@pytest.mark.parametrize(("per_step", "shape"), [(False, (4, 5)), (True, (4, 3))])
def test_weights_of_other_shapes(per_step, shape):
    model, y = compiled(classifier(per_step=per_step)), np.zeros((4, 5) if per_step else 4, int)
    for run in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=r"`sample_weight` must have shape \(batch,\)"):
            run(X, y, sample_weight=np.ones(shape), verbose=0)


@pytest.mark.parametrize("per_step", [False, True])
def test_one_hot_labels_of_a_generator(per_step):
    """On JAX, Keras computes the metrics first, whose error names the shapes."""
    y = np.eye(CLASSES)[np.zeros((4, 5) if per_step else 4, int)]
    with pytest.raises(ValueError, match="one-hot"):
        evaluated(compiled(classifier(per_step=per_step)), X, y)


def test_names_of_classes_in_a_dataset():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors((X, np.array(["a", "b", "a", "b"])))
    with pytest.raises(ValueError, match="must be class numbers.*StringLookup"):
        compiled(named()).fit(data, verbose=0)


def test_keras_warns_of_a_backbone_that_drops_the_mask():
    conv = keras.layers.Conv1D(4, 3, padding="causal", name="conv")
    backbone = keras.Sequential([conv, keras.layers.GRU(4)])
    with pytest.warns(UserWarning, match="'conv'.*does not support masking"):
        SequenceClassifier(backbone, 2, nan_padding=True)(X)


@both_backends
@pytest.mark.parametrize("make", [SequenceClassifier, SequenceRegressor, PolyphonicModel])
def test_per_step_targets_of_other_lengths_are_refused(make):
    model = compiled(make(Mix(True), 2, **({} if make is PolyphonicModel else {"per_step": True})))
    x, y = np.zeros((4, 5, 2)), np.zeros((4, 7, 2))
    y = y[..., 0] if make is SequenceClassifier else y
    for time in (1, 7):  # one target would be that of all steps
        told = f"as many steps as the outputs. Received: {time} steps of targets, 5 of outputs"
        with pytest.raises(ValueError, match=told):
            model.fit(x, y[:, :time], verbose=0)


def test_predictions_for_soft_piano_rolls():
    """Only training needs rolls of 0 and 1."""
    model, soft = compiled(polyphonic()), np.full((2, 5, KEYS), 0.5, "float32")
    np.testing.assert_allclose(model.predict(soft, verbose=0), model(soft), atol=1e-6)
    with pytest.raises(ValueError, match="only 0"):
        model.evaluate(soft, soft, verbose=0)


def test_wrong_piano_rolls():
    model = polyphonic()
    x, y, weight = padded(piano_rolls())
    half, nan = x.copy(), y.copy()
    half[1, 2, 3], nan[0, 1, 2] = 0.5, np.nan
    for arguments, options, message in (
        ((half, y), {}, "`x`.*row 1, frame 2, key 3"),
        ((x, y), {"validation_data": (x, nan, weight)}, "`y`.*row 0, frame 1, key 2"),
        ((x[..., 1:], y), {}, "keys"),
        ((x, y[:, -1]), {}, "keys"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(*arguments, verbose=0, **options)
