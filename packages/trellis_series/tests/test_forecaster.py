"""The Keras model of forecasts: units, quantiles, the linear map, covariates, streams, files."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import LRU, TCN, TrellisLayer
from trellis_series import MASE, Coverage, Forecaster, MeanPinball, PinballLoss, windows

pytestmark = pytest.mark.both_backends(slow=True)

WINDOW, HORIZON, SEASON = 24, 4, 8


# A target of thousands, one of millionths, and the phase, which is known in the future.
WAVE = np.sin(2 * np.pi * np.arange(400) / SEASON)
NOISE = np.random.default_rng(0).normal(size=(2, 400))
COLUMNS = [9e3 + 500 * WAVE + 20 * NOISE[0], 1e-6 * (5 + WAVE + 0.1 * NOISE[1]), np.cos(WAVE)]
SERIES = np.stack(COLUMNS, axis=1).astype("float32")
QUANTILES = (0.1, 0.5, 0.9)


def forecaster(backbone=None, adapted=True, **options):
    backbone = backbone or TCN(6, kernel_size=3, depth=2, return_sequences=False, seed=1)
    options = {"future_channels": 1, "normalize": True, "seed": 0} | options
    model = Forecaster(backbone, HORIZON, 2, **options)
    if adapted:
        model.adapt(SERIES[:300], SERIES[300:])
    return model


def examples(rows=SERIES):
    return windows(rows, WINDOW, HORIZON, targets=2, future_channels=1)


def test_windows_have_the_rows_before_and_after_an_origin():
    rows = np.arange(20.0)[:, None] + np.array([0, 100, 1000])
    x, y = windows(rows, 6, 3, targets=2, future_channels=1)
    assert x.shape == (12, 6, 3) and y.shape == (12, 3, 2)
    np.testing.assert_array_equal(x[4, :, 0], np.arange(4, 10))
    np.testing.assert_array_equal(x[4, :, 2], 1000 + np.arange(7, 13))  # three steps ahead
    np.testing.assert_array_equal(y[4, :, 1], 100 + np.arange(10, 13))
    assert np.shares_memory(x[0], x[5])  # copies of all would not fit into memory
    assert len(windows(rows[:8], 6, 3, targets=2, future_channels=1)[0]) == 0


def test_training_takes_the_units_of_the_data():
    model = forecaster(quantiles=QUANTILES)
    model.compile(keras.optimizers.Adam(1e-2), jit_compile=False)
    history = model.fit(*examples(), batch_size=64, epochs=12, verbose=0).history
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    outputs = model.predict(examples()[0], verbose=0)
    assert (np.diff(outputs, axis=-1) >= 0).all()
    error = np.abs(outputs[..., 1] - examples()[1]).mean(axis=(0, 1))
    assert (error < [150, 3e-7]).all()


@pytest.mark.parametrize("scale", ["data", "window"])
def test_the_map_forecasts_without_training(scale):
    model = forecaster(linear_window=WINDOW, scale=scale, quantiles=QUANTILES)
    x, y = examples(SERIES[300:])
    outputs = model.predict(x, verbose=0)
    error = np.abs(outputs[..., 1] - y).mean(axis=(0, 1))
    assert (error < [35, 1.5e-7]).all()
    inside = ((outputs[..., 0] <= y) & (y <= outputs[..., 2])).mean()
    assert 0.6 < inside < 0.95


def test_a_map_follows_the_level_of_each_window():
    """Weights of a target's own values sum to 1, so a level beyond the training data is kept."""
    model, (x, _) = forecaster(linear_window=WINDOW, scale="window"), examples()
    shift = np.array([5_000.0, 0, 0], "float32")
    np.testing.assert_allclose(model(x[:3] + shift) - shift[:2], model(x[:3]), rtol=1e-4)


def test_gaps_neither_hide_the_other_values_nor_count():
    rows = SERIES.copy()
    rows[100:110, 0] = np.nan
    model = forecaster(linear_window=WINDOW, adapted=False)
    model.adapt(rows)
    assert np.isfinite(model.forecast(rows[:115], rows[115:119, 2:])).all()
    model.compile("adam")
    x, y = examples()
    y = y.copy()
    y[:, 1, 0] = np.nan
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])


def test_offsets_of_large_and_small_gaps_are_finite():
    """A series that hardly changes, except for jumps of a thousand times its usual step."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.choice([0.0, 10, 20, 30], 40), 50) + 0.01 * rng.normal(size=2_000)
    x = x[:, None].astype("float32")
    backbone = TCN(4, 2, depth=2, return_sequences=False)
    model = Forecaster(backbone, 24, quantiles=QUANTILES, normalize=True, linear_window=24)
    model.adapt(x[:1_400])
    found = model.forecast(x[:1_700])
    assert np.isfinite(found).all() and -60 < found.min() and found.max() < 90
    model.compile("adam")
    history = model.fit(*windows(x[:200], 24, 24), verbose=0).history
    assert np.isfinite(history["loss"][0])


@pytest.mark.parametrize(("scale", "quantiles"), [("data", QUANTILES), ("window", None)])
def test_streams_equal_whole_series(scale, quantiles):
    model = forecaster(linear_window=WINDOW, scale=scale, quantiles=quantiles)
    model.head.kernel.assign(0.1 * np.random.default_rng(0).normal(size=model.head.kernel.shape))
    x = examples()[0][:2]
    cache = model.initial_cache(2)
    for t in range(WINDOW):
        found, cache = model.step(x[:, t], cache)
    np.testing.assert_allclose(found, model(x), rtol=1e-4)
    every, _ = model.prefill(x)
    np.testing.assert_allclose(every[:, -1], found, rtol=1e-4)


@pytest.mark.parametrize("kind", [LRU, TrellisLayer])
def test_any_backbone_is_saved(kind, tmp_path):
    backbone = kind(4, 2, return_sequences=False, seed=0)
    model = forecaster(backbone, linear_window=WINDOW, scale="window", kernel_initializer="ones")
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    history, ahead = SERIES[:300], SERIES[300:304, 2:]
    np.testing.assert_allclose(again.forecast(history, ahead), model.forecast(history, ahead))


def test_losses_and_metrics_by_hand():
    y_true, y_pred = np.array([[4.0], [np.nan]]), np.array([[[0.0, 2.0]], [[0.0, 2.0]]])
    assert float(PinballLoss([0.25, 0.5])(y_true[:1], y_pred[:1])) == 1.0
    for kind, expected in ((MeanPinball, 1.0), (Coverage, 0.0)):
        metric = kind([0.25, 0.5])
        metric.update_state(y_true, y_pred)
        assert float(metric.result()) == expected
        for wrong in (None, 0.5):
            with pytest.raises(ValueError, match="quantiles"):
                kind(wrong)
    metric = MASE(2.0)
    metric.update_state(y_true, y_pred[..., 0])
    assert float(metric.result()) == 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"quantiles": (0.5, 0.1)},
        {"future_channels": -1},
        {"linear_window": 1},
        {"linear_window": 8, "normalize": False},
        {"scale": "window"},
        {"scale": "series"},
    ],
)
def test_bad_arguments_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        forecaster(adapted=False, **options)


def test_data_that_do_not_fit_are_named():
    model = forecaster(linear_window=WINDOW)
    model.compile("adam")
    x, y = examples()
    for inputs, targets, message in (
        (x, y[:, :2], "`y` must have shape"),
        (x[..., :2], y, "built for inputs of 3 channels"),
        (x, np.full_like(y, np.nan), "only NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(inputs, targets)
    with pytest.raises(ValueError, match="future_covariates"):
        model.forecast(SERIES, np.zeros((2, 1)))
    with pytest.raises(ValueError, match="windows"):
        forecaster(adapted=False, linear_window=WINDOW).adapt(SERIES[:20])
    with pytest.raises(ValueError, match="adapt"):
        forecaster(adapted=False).fit(x, y)
