"""SequenceClassifier and SequenceRegressor: every backbone, training, masks, streams, bad input."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.layer_checks import check_streaming
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import SequenceClassifier, SequenceRegressor

pytestmark = pytest.mark.both_backends

CLASSES = 3
# Without compilation JAX is slow; on TensorFlow, compiling is what is slow.
COMPILED = {"jit_compile": keras.backend.backend() == "jax"}


def trellis(per_step, **options):
    return TrellisLayer(8, 4, output_units=6, return_sequences=per_step, seed=1, **options)


def lstm(per_step):
    return keras.layers.LSTM(6, return_sequences=per_step)


def stack(per_step):
    layers = keras.layers
    return keras.Sequential([layers.GRU(5, return_sequences=True), lstm(per_step)])


def tcn(per_step):
    from trellis_keras.layers import TCN

    return TCN(6, kernel_size=3, depth=2, return_sequences=per_step, seed=1)


BACKBONES = [trellis, lstm, stack, tcn]


def classifier(backbone=trellis, per_step=False, **options):
    return SequenceClassifier(
        backbone(per_step), CLASSES, per_step=per_step, **{"seed": 2} | options
    )


def data(per_step, rows=22, seed=0):
    """Inputs, and labels that a causal model can learn: which channel's last value is largest."""
    x = np.random.default_rng(seed).normal(size=(rows, 9, CLASSES)).astype("float32")
    y = np.argmax(x, axis=-1)
    return x, y if per_step else y[:, -1]


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_classifier_learns_with_any_backbone(backbone, per_step):
    model = classifier(backbone, per_step)
    model.build((None, None, CLASSES))
    model.compile(keras.optimizers.Adam(3e-2), jit_compile=True)
    x, y = data(per_step)
    history = model.fit(x, y, batch_size=8, epochs=25, verbose=0).history
    assert set(history) == {"loss", "accuracy"}
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert history["accuracy"][-1] > history["accuracy"][0]
    shape = (22, 9, CLASSES) if per_step else (22, CLASSES)
    assert tuple(ops.shape(model(x))) == model.compute_output_shape(x.shape) == shape


@pytest.mark.parametrize("per_step", [False, True])
def test_a_regressor_learns(per_step):
    model = SequenceRegressor(trellis(per_step), per_step=per_step, seed=2)
    model.compile(keras.optimizers.Adam(3e-2), **COMPILED)
    x, _ = data(per_step)
    y = x[..., 0] if per_step else x[:, -1, 0]
    history = model.fit(x, y, batch_size=8, epochs=25, verbose=0).history
    assert list(history) == ["loss"] and history["loss"][-1] < 0.5 * history["loss"][0]
    # Targets with an axis of their own for the unit are the same ones.
    expected = model.evaluate(x, y, verbose=0)
    model.compile("sgd", **COMPILED)
    assert model.evaluate(x, y[..., None], verbose=0) == expected


@pytest.mark.parametrize("per_step", [False, True])
def test_figures_are_means_over_what_counts_in_the_whole_split(per_step):
    model = classifier(per_step=per_step)
    model.compile("sgd", **COMPILED)
    x, y = data(per_step, rows=11)
    weight = np.random.default_rng(1).integers(0, 3, y.shape).astype("float32")
    weight.reshape(len(y), -1)[:, -1] = 1  # every row counts
    logits = np.asarray(model.predict(x, verbose=0), "float64")
    nll = np.log(np.sum(np.exp(logits), -1)) - np.take_along_axis(logits, y[..., None], -1)[..., 0]
    results = model.evaluate(x, y, sample_weight=weight, batch_size=4, verbose=0, return_dict=True)
    assert results["loss"] == pytest.approx(np.average(nll, weights=weight), rel=1e-5)
    right = np.argmax(logits, -1) == y
    assert results["accuracy"] == pytest.approx(np.average(right, weights=weight), rel=1e-5)


def test_one_weight_per_row_counts_for_all_its_steps():
    model = classifier(per_step=True)
    model.compile("sgd", **COMPILED)
    x, y = data(True, rows=5)
    rows = np.array([1.0, 0.5, 2.0, 1.0, 3.0], "float32")
    steps = np.repeat(rows[:, None], 9, axis=1)
    by_row, by_step = (
        model.evaluate(x, y, sample_weight=w, batch_size=3, verbose=0) for w in (rows, steps)
    )
    assert by_row == pytest.approx(by_step, rel=1e-6)


def test_a_loss_of_keras_is_the_mean_that_keras_has():
    """Its reduction divides by all steps, whatever their weights are."""
    model = SequenceRegressor(trellis(True), 2, per_step=True)
    model.compile("sgd", loss="mae")
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 9, 2)), rng.normal(size=(5, 9, 2))
    weight = rng.integers(0, 3, (5, 9)).astype("float32")
    weight[:, -1] = 1
    loss = model.evaluate(x, y, sample_weight=weight, batch_size=2, verbose=0)
    errors = np.abs(model.predict(x, verbose=0) - y).mean(-1)
    loss = loss[0] if isinstance(loss, list) else loss
    assert loss == pytest.approx((errors * weight).sum() / weight.size, rel=1e-5)


@pytest.mark.parametrize("side", ["pre", "post"])
@pytest.mark.parametrize("backbone", [trellis, lstm])
def test_masked_steps_change_nothing(backbone, side):
    """A Masking layer in the backbone: outputs, loss and accuracy are those of the short rows."""
    x, y = data(True, rows=4)
    real = np.zeros(x.shape[:2], bool)
    real[:, 3:] = True
    real = real if side == "pre" else real[:, ::-1]
    masked = classifier(
        lambda per_step: keras.Sequential([keras.layers.Masking(-9.0), backbone(per_step)]), True
    )
    masked.compile("sgd", **COMPILED)
    padded = np.where(real[..., None], x, np.float32(-9))
    results = masked.evaluate(padded, y, batch_size=3, verbose=0)

    plain = classifier(backbone, True)
    plain.build((None, None, CLASSES))
    plain.set_weights(masked.get_weights())
    plain.compile("sgd", **COMPILED)
    short_x, short_y = x[real].reshape(4, 6, -1), y[real].reshape(4, 6)
    expected = plain.evaluate(short_x, short_y, batch_size=3, verbose=0)
    np.testing.assert_allclose(results, expected, rtol=1e-5)
    outputs = plain(x, mask=ops.convert_to_tensor(real))
    np.testing.assert_allclose(
        np.asarray(outputs)[real].reshape(4, 6, -1), plain(short_x), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("backbone", [trellis, stack])
def test_keras_file_gives_identical_outputs_and_goes_on_training(backbone, per_step, tmp_path):
    model = classifier(backbone, per_step, input_dropout=0.1, output_dropout=0.2)
    model.compile(keras.optimizers.Adam(1e-2), **COMPILED)
    x, y = data(per_step)
    model.fit(x, y, verbose=0, validation_data=(x, y))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))
    assert loaded.evaluate(x, y, verbose=0, return_dict=True) == model.evaluate(
        x, y, verbose=0, return_dict=True
    )
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    # As JSON, which makes lists of the tuples in Keras' own configs.
    assert json.dumps(loaded.get_config()) == json.dumps(model.get_config())


def test_a_loss_and_metrics_of_ones_own(tmp_path):
    model = SequenceRegressor(trellis(False), units=2)
    model.compile("sgd", loss="mae", metrics=["mse"], **COMPILED)
    x, y = np.ones((4, 9, 3), "float32"), np.arange(8.0).reshape(4, 2)
    before = model.evaluate(x, y, verbose=0, return_dict=True)
    error = model.predict(x, verbose=0) - y
    assert before["loss"] == pytest.approx(np.mean(np.abs(error)), rel=1e-5)
    assert before["mse"] == pytest.approx(np.mean(error**2), rel=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(x, y, verbose=0, return_dict=True) == before
    classes = classifier()
    classes.compile("sgd", loss=keras.losses.CategoricalCrossentropy(from_logits=True))
    classes.evaluate(x, np.eye(CLASSES)[[0, 1, 2, 0]], verbose=0)  # labels of another kind


def test_regularisers_are_in_the_loss():
    model = classifier(lambda s: trellis(s, kernel_regularizer="l2"))
    model.compile("sgd", **COMPILED)
    x, y = data(False, rows=4)
    loss = model.evaluate(x, y, verbose=0)[0]
    plain = classifier()
    plain.compile("sgd", **COMPILED)
    plain.build(x.shape)
    plain.set_weights(model.get_weights())
    penalty = 0.01 * np.sum(np.square(model.backbone.kernel.kernel))
    assert penalty > 0
    assert loss == pytest.approx(plain.evaluate(x, y, verbose=0)[0] + penalty, rel=1e-6)


def test_dropouts_are_on_raw_inputs_and_on_the_input_of_the_head():
    class Spy(keras.layers.Layer):
        def call(self, x):
            self.seen = x
            return x

        def compute_output_shape(self, input_shape):
            return input_shape

    spy = Spy()
    model = SequenceClassifier(spy, 3, per_step=True, input_dropout=0.5, output_dropout=0.4, seed=1)
    x = np.ones((2, 50, 4), "float32")
    model(x)
    assert np.array_equal(spy.seen, x)
    head_inputs = []
    model.head.call = lambda x, **_: head_inputs.append(x) or x
    model(x, training=True)
    # Element-wise: neither whole steps nor whole channels.
    dropped = np.asarray(spy.seen)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    assert np.all(np.ptp(dropped, axis=1) > 0) and np.any(np.ptp(dropped, axis=2) > 0)
    scale = np.asarray(head_inputs[-1]) / np.where(dropped == 0, 1, dropped)
    assert np.allclose(np.unique(scale[dropped > 0]), [0, 1 / 0.6])


def test_half_precision_keeps_outputs_and_losses_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = classifier(per_step=True)
        model.compile("sgd", **COMPILED)
        x, y = data(True)
        assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])
        assert model.predict(x, verbose=0).dtype == np.float32
        assert all(w.dtype == "float32" for w in model.weights)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("backbone", [trellis, tcn])
def test_stream_equals_forward(backbone):
    model = classifier(backbone, per_step=True, input_dropout=0.3, output_dropout=0.3)
    model.build((None, None, CLASSES))
    check_streaming(model, data(True, rows=2)[0], steps=4)


# Bad input


def test_a_backbone_with_other_outputs_is_refused():
    shape = (None, None, 2)
    with pytest.raises(ValueError, match="each step.*return_sequences=True"):
        classifier(lambda _: trellis(False), per_step=True).build(shape)
    with pytest.raises(ValueError, match="last step only.*return_sequences=False"):
        SequenceRegressor(stack(True)).build(shape)
    with pytest.raises(ValueError, match="return_state=False"):
        SequenceClassifier(keras.layers.GRU(4, return_state=True), 3).build(shape)
    with pytest.raises(ValueError, match="return_aux=False"):
        classifier(lambda s: trellis(s, aux_every=2, return_aux=True)).build(shape)
    with pytest.raises(ValueError, match="stateful=False"):
        SequenceClassifier(keras.layers.GRU(4, stateful=True), 3)
    with pytest.raises(ValueError, match="num_classes=0"):
        SequenceClassifier(lstm(False), 0)


def test_inputs_of_the_wrong_shape_are_named():
    model = classifier()
    with pytest.raises(ValueError, match=r"\(batch, time, channels\).*\(4, 5\)"):
        model.build((4, 5))
    model.compile("sgd")
    with pytest.raises(ValueError, match=r"\(batch, time, channels\).*\(4, 5\)"):
        model.fit(np.zeros((4, 5)), np.zeros(4, int), verbose=0)
    model.build((None, None, 1))
    with pytest.raises(ValueError, match=r"1 channels.*\(4, 5, 3\)"):
        model.evaluate(np.zeros((4, 5, 3)), np.zeros(4, int), verbose=0)
    with pytest.raises(ValueError, match="axis -1.*value 1"):
        model(np.zeros((4, 5, 3), "float32"))
    with pytest.raises(ValueError, match="no y"):
        model.fit(np.zeros((4, 5, 1)), verbose=0)


class Batches(keras.utils.PyDataset):
    def __init__(self, *batch):
        super().__init__()
        self.batch = batch

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.batch


def test_bad_labels_are_named_before_training():
    x, good = np.zeros((4, 5, 1)), np.zeros(4, int)
    model = classifier()
    model.compile("sgd")
    for bad in (good + CLASSES, good - 1, good + 0.5):
        with pytest.raises(ValueError, match=r"\[0, 3\).*values from"):
            model.fit(x, bad, verbose=0)
        with pytest.raises(ValueError, match=r"\[0, 3\)"):
            model.fit(x, good, verbose=0, validation_data=(x, bad))
        with pytest.raises(ValueError, match=r"\[0, 3\)"):
            model.fit(Batches(x, bad), verbose=0)
        with pytest.raises(ValueError, match=r"\[0, 3\)"):
            model.evaluate(x, bad, verbose=0)
    with pytest.raises(ValueError, match=r"\[0, 3\)"):
        model.evaluate(x, ops.convert_to_tensor(good + CLASSES), verbose=0)
    with pytest.raises(ValueError, match=r"axes \(batch\)"):
        model.fit(x, np.zeros((4, 5), int), verbose=0)
    per_step = classifier(per_step=True)
    per_step.compile("sgd")
    with pytest.raises(ValueError, match=r"axes \(batch, time\)"):
        per_step.fit(x, good, verbose=0)
    regressor = SequenceRegressor(lstm(False), units=2)
    regressor.compile("sgd")
    with pytest.raises(ValueError, match=r"2 units.*\(4, 3\)"):
        regressor.fit(x, np.zeros((4, 3)), verbose=0)


def test_a_loss_of_ones_own_may_have_other_labels():
    model = classifier(per_step=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model.compile("sgd", loss=loss)
    x, y = data(True, rows=4)
    y[:, 0] = -1
    assert np.isfinite(model.evaluate(x, y, verbose=0))


def test_a_row_without_a_step_that_counts_is_named():
    model = classifier(per_step=True)
    model.compile("sgd")
    x, y = data(True, rows=4)
    weight = np.ones(y.shape)
    weight[2] = 0
    for run in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="Row 2"):
            run(x, y, sample_weight=weight, verbose=0)


@pytest.mark.parametrize("backbone", [trellis, tcn])
def test_a_last_step_model_streams_as_if_each_step_were_the_last(backbone):
    model = classifier(backbone)
    x, _ = data(False, rows=3)
    cache = model.build(x.shape) or model.initial_cache(3)
    for end in range(1, x.shape[1] + 1):
        y, cache = model.step(x[:, end - 1], cache)
        if end > 2:  # shorter ones are shorter than a dilation
            np.testing.assert_allclose(y, model(x[:, :end]), atol=1e-5)
    with pytest.raises(ValueError, match="no output for each step of a piece: call `step`"):
        model.prefill(x)


def test_what_does_not_stream():
    with pytest.raises(ValueError, match="not built"):
        classifier(per_step=True).initial_cache(1)
    with pytest.raises(ValueError, match="prefill"):
        model = classifier(lstm, per_step=True)
        model.build((None, None, 2))
        model.step(np.zeros((1, 2)), None)


def test_class_weights_are_for_one_label_per_row():
    x, y = data(True, rows=4)
    model = classifier(per_step=True)
    model.compile("sgd")
    with pytest.raises(ValueError, match="class_weight.* sample_weight="):
        model.fit(x, y, class_weight={0: 2.0, 1: 1.0, 2: 1.0}, verbose=0)
    model.build((None, None, 2))
    with pytest.raises(ValueError, match='quantization="int8"'):
        model.quantize("int8")
    x, y = data(False, rows=6)
    weights = np.array([0.5, 1.0, 3.0], "float32")
    losses = []
    for options in ({"class_weight": dict(enumerate(weights))}, {"sample_weight": weights[y]}):
        model = classifier(seed=1)
        model.compile(keras.optimizers.SGD(0.0))
        losses += model.fit(x, y, verbose=0, **options).history["loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
