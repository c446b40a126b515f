"""RocketClassifier against plain formulas, bad input, and saved models of all classes."""

import inspect
import itertools
import pathlib

import keras
import numpy as np
import pytest

from keras_streams import compiled_step
from trellis_series.rocket import RocketClassifier, ridge_head

pytestmark = pytest.mark.both_backends


def sines(count=12, steps=40, channels=1, seed=0):
    """Noisy sines of two rates, and their classes."""
    generator = np.random.default_rng(seed)
    y = np.arange(count) % 2
    phase = generator.normal(size=(count, 1, channels))
    x = np.sin(np.where(y == 0, 0.2, 0.5)[:, None, None] * np.arange(steps)[:, None] + phase)
    return (x + 0.1 * generator.normal(size=x.shape)).astype("float32"), y


def fitted(x, y, **options):
    model = RocketClassifier(x.shape[1], x.shape[2], len(np.unique(y)), seed=3, **options)
    model.adapt(x, y)
    return model


def test_features_are_fractions_of_time_above_thresholds():
    """The plain formulation: MiniRocket's kernels, dilated, with zeros before the first step."""
    x, y = sines(channels=2)
    model = fitted(x, y)
    z = (x - x.mean(axis=(0, 1))) / x.std(axis=(0, 1))
    found, normalization = [], model.backbone.get_layer("normalization")
    kernels = [
        np.where(np.isin(np.arange(9), twos), 2, -1) for twos in itertools.combinations(range(9), 3)
    ]
    for dilation in (1, 2, 4):
        layer = model.backbone.get_layer(f"dilation_{dilation}")
        kernel, bias = (keras.ops.convert_to_numpy(v) / 30 for v in layer.weights)
        for j in range(layer.filters):
            reads = np.abs(kernel[0, :, j]) > 0
            assert reads.any()
            expected = kernels[j * 84 // layer.filters][:, None] * reads
            np.testing.assert_allclose(kernel[..., j], expected, atol=1e-6)
        padded = np.pad(z, ((0, 0), (8 * dilation, 0), (0, 0)))
        taps = np.stack([padded[:, tap * dilation :][:, :40] for tap in range(9)], axis=2)
        above = np.einsum("ntkc,kcj->ntj", taps, kernel) + bias
        found.append(np.clip(5 * above + 0.5, 0, 1).mean(axis=1))
        assert 0.1 < found[-1].mean() < 0.9
    found = np.concatenate(found, axis=-1)
    assert found.shape == (12, 84 * 3 * 13)
    mean, scale = (keras.ops.convert_to_numpy(v) for v in normalization.weights)
    np.testing.assert_allclose(mean, found.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(scale, np.maximum(found.std(axis=0), 0.01), atol=1e-4)
    head = [keras.ops.convert_to_numpy(v) for v in model.head.weights]
    logits = (found - mean) / scale @ head[0] + head[1]
    np.testing.assert_allclose(model.predict_on_batch(x), logits, atol=5e-3)
    kernel, _ = ridge_head((found - mean) / scale, y, 2)
    np.testing.assert_allclose(head[0], kernel, atol=0.02 * np.abs(kernel).max())


@pytest.mark.both_backends(slow=True)
def test_ridge_is_the_best_penalty_by_leaving_one_out():
    generator = np.random.default_rng(1)
    x, labels = generator.normal(size=(14, 9)), generator.integers(3, size=14)
    x -= x.mean(axis=0)
    targets = 2.0 * (np.arange(3) == labels[:, None]) - 1

    def solved(rows, penalty):
        """The ridge regression on some rows, with an intercept that is not penalized."""
        full = np.column_stack([x[rows], np.ones(len(rows))])
        penalties = penalty * np.diag([1.0] * 9 + [0.0])
        return np.linalg.solve(full.T @ full + penalties, full.T @ targets[rows])

    def left_out(penalty):
        rows = np.arange(14)
        scores = [np.append(x[i], 1) @ solved(rows[rows != i], penalty) for i in rows]
        return np.array(scores)

    penalties = 10.0 ** np.arange(-3, 3.5, 0.5)
    best = min(penalties, key=lambda penalty: np.mean((left_out(penalty) - targets) ** 2))
    expected = solved(np.arange(14), best)
    kernel, bias = ridge_head(x, labels, 3)
    scale = kernel[0, 0] / expected[0, 0]
    np.testing.assert_allclose(kernel, scale * expected[:9], atol=1e-8)
    np.testing.assert_allclose(bias, scale * expected[9], atol=1e-8)

    def cross_entropy(scale):
        logits = scale * left_out(best)
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(14), labels])

    near = [cross_entropy(scale * 10**step) for step in (-0.1, 0, 0.1)]
    assert near[1] == min(near) and 0.1 <= scale < 40


def test_series_of_different_lengths_stream():
    """Padding does not count, and a stream has the classes of the steps so far."""
    x, y = sines(20, channels=3)
    x[1::3, 25:] = np.nan
    x[2, 4, 1] = np.nan
    model = fitted(x, y, class_names=["slow", "fast"])
    expected = model.predict_on_batch(x[1:2, :25])
    np.testing.assert_allclose(model.predict_on_batch(x[1:2]), expected, atol=1e-4)
    step, cache = compiled_step(model), model.initial_cache(1)
    for t in range(25):
        logits, cache = step(x[1:2, t], cache)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(logits), expected, atol=1e-4)
    lists = RocketClassifier(40, 3, 2, seed=3)
    lists.adapt([each[~np.isnan(each).all(axis=-1)] for each in x], y)
    np.testing.assert_allclose(lists.predict_on_batch(x), model.predict_on_batch(x), atol=1e-4)
    unseen, classes = sines(30, channels=3, seed=1)
    assert np.mean(model.predict_proba(unseen, verbose=0).argmax(axis=-1) == classes) > 0.9


@pytest.mark.both_backends(slow=True)
def test_it_is_saved_and_reproducible(tmp_path):
    x, y = sines()
    names = np.array(["slow", "fast"])
    model = fitted(x, names[y], class_names=names)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict_on_batch(x), model.predict_on_batch(x))
    assert loaded.get_config() == model.get_config() and loaded.class_names == ["slow", "fast"]
    np.testing.assert_array_equal(fitted(x, y).predict_on_batch(x), model.predict_on_batch(x))
    assert [v.path.split("/")[-2] for v in model.trainable_variables] == ["head", "head"]


@pytest.mark.both_backends(slow=True)
def test_dilations_fit_the_window():
    for window, dilations in ((5, [1]), (20, [1, 2]), (400, [1, 3, 5, 9, 16, 28, 49])):
        model = RocketClassifier(window, 1, 2)
        names = [layer.name for layer in model.backbone.layers if "dilation" in layer.name]
        assert names == [f"dilation_{dilation}" for dilation in dilations]
        assert 2900 < model.backbone.output_shape[-1] <= 3360


@pytest.mark.both_backends(slow=True)
def test_the_config_has_every_argument():
    given = {"features": 168, "activation": "softmax", "class_names": ["a", "b"], "seed": 5}
    config = RocketClassifier(40, 1, 2, name="rocket", trainable=False, **given).get_config()
    assert set(config) == set(inspect.signature(RocketClassifier).parameters)
    again = RocketClassifier.from_config(config).get_config()
    assert again == config == {**config, **given, "name": "rocket", "trainable": False}


@pytest.mark.both_backends(slow=True)
def test_bad_input_is_named():
    x, y = sines()
    for arguments, message in (((40, 1, 2, 50), "features"), ((0, 1, 2, 84), "window")):
        with pytest.raises(ValueError, match=message):
            RocketClassifier(*arguments[:3], features=arguments[3])
    model = RocketClassifier(40, 1, 2, class_names=["a", "b"])
    with pytest.raises(ValueError, match="adapt"):
        model.fit(x, y, verbose=0)
    for labels in (None, y[:-1], y + 1, np.zeros(12, int), np.array(["a", "c"] * 6)):
        with pytest.raises(ValueError, match="(?i)labels"):
            model.adapt(x, labels)
    with pytest.raises(ValueError, match="inputs"):
        model.adapt(sines(channels=2)[0], y)
    with pytest.raises(ValueError, match="x.*None.*Received: series of shapes .*40,"):
        model.adapt(x[..., 0], y)
    with pytest.raises(ValueError, match=r"only NaN in series \[0\]"):
        model.adapt([np.full((40, 1), np.nan), *x[1:]], y)


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("kind", ["float64", "str"])
def test_labels_of_any_type_are_classes(kind):
    x, y = sines()
    names = {"class_names": ["0", "1"]} if kind == "str" else {}
    model = fitted(x, y.astype(kind), **names)
    np.testing.assert_array_equal(model.predict_proba(x, verbose=0).argmax(axis=-1), y)


@pytest.mark.parametrize("name", ["forecaster", "point_forecaster", "rocket"])
def test_an_earlier_file_computes_what_it_did(name):
    path = pathlib.Path(__file__).parent / "saved" / f"{name}.keras"
    x = np.random.RandomState(0).normal(size=(2, 7, 3)).astype("float32")
    expected = np.load(path.with_suffix(".npy"))
    np.testing.assert_allclose(keras.saving.load_model(path)(x), expected, rtol=1e-4, atol=1e-5)


def test_series_that_float32_cannot_tell_apart_are_named():
    x = 1e9 + np.random.default_rng(0).normal(size=(6, 30, 1))
    with pytest.warns(UserWarning, match="Channel 0"):
        RocketClassifier(30, 1, 2, features=84, seed=0).adapt(x, [0, 1] * 3)
