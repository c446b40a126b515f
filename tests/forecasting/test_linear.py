"""The linear map of a forecaster: its fit, its stream, its share of the forecasts."""

import shutil

import keras
import numpy as np
import pytest
from keras import ops

from trellis_keras.export import export
from trellis_keras.forecasting import Forecaster, TimeSeries, WindowStream, one_step_forecasts
from trellis_keras.forecasting.linear import (
    LinearMap,
    Ridge,
    best_season,
    fill,
    fit_map,
    is_gain,
)
from trellis_keras.layers import TCN

pytestmark = pytest.mark.both_backends(slow=True)

WINDOW, HORIZON, SEASON = 16, 4, 6
QUANTILES = (0.1, 0.5, 0.9)


def rows(steps=150, seed=0):
    """A season on a trend, and a level that follows a covariate which is known in the future."""
    rng = np.random.default_rng(seed)
    time = np.arange(steps)
    known = rng.normal(size=steps)
    season = 50 + 0.3 * time + np.tile(rng.normal(size=SEASON), steps)[:steps]
    return np.stack([season, 7 + 2 * known + 0.05 * rng.normal(size=steps), known], axis=1)


def windows(x, window=WINDOW, horizon=HORIZON):
    view = np.lib.stride_tricks.sliding_window_view(x, window + horizon, axis=0)
    view = np.moveaxis(view, -1, 1)
    return view[:, :window], view[:, window:]


def forecaster(quantiles=QUANTILES, per_step=False, **options):
    backbone = TCN(4, kernel_size=2, depth=2, return_sequences=per_step, seed=1)
    options = {"future_channels": 1, "targets": 2, "linear_window": WINDOW} | options
    return Forecaster(
        backbone,
        HORIZON,
        quantiles=quantiles,
        per_step=per_step,
        normalize=True,
        seed=0,
        **options,
    )


@pytest.fixture(scope="module")
def parts():
    return TimeSeries(rows(), targets=2, future_channels=1).split(WINDOW, HORIZON)


def trained(parts, **options):
    model = forecaster(**options)
    model.adapt(*parts[:2])
    model.head.kernel.assign(
        np.random.default_rng(0).normal(size=model.head.kernel.shape, scale=0.1)
    )
    return model


def test_the_map_finds_season_trend_and_covariate(parts):
    """Without training; the trend leaves the range of the training data."""
    model = forecaster()
    model.adapt(*parts[:2])
    x, y = parts[2].read(np.arange(len(parts[2])))
    found = model.predict(x, verbose=0)[..., 1]
    errors = np.abs(found - y).mean(axis=(0, 1))
    assert errors[0] < 0.02 and errors[1] < 0.1
    # Forecasts move with the level.
    kernel = np.asarray(model.linear.kernel).reshape(WINDOW, 3, HORIZON, 2).sum(axis=0)
    np.testing.assert_allclose(kernel[:2], np.eye(2)[:, None] * np.ones((HORIZON, 1)), atol=1e-5)


def test_bands_hold_before_training():
    values = np.random.default_rng(0).normal(size=(700, 1)).cumsum(axis=0)
    train, valid, test = TimeSeries(values).split(WINDOW, HORIZON)
    model = forecaster(targets=1, future_channels=0)
    model.adapt(train, valid)
    x, y = test.read(np.arange(len(test)))
    bands = model.predict(x, verbose=0)
    inside = (bands[..., 0] <= y) & (y <= bands[..., 2])
    assert 0.65 < inside.mean() < 0.9
    widths = (bands[..., 2] - bands[..., 0]).mean(axis=(0, 2))
    assert np.all(np.diff(widths) > 0)


@pytest.mark.parametrize("outputs", [2, 20])
def test_ridge_shrinks_towards_a_prior(outputs):
    """A missing value leaves its row out of its own output, and of few others."""
    rng = np.random.default_rng(0)
    x, y, prior = (rng.normal(size=shape) for shape in ((30, 4), (30, outputs), (4, outputs)))
    y[3, 0] = y[7] = np.nan
    ridge = Ridge(x, y)
    for output, missing in ((0, [3, 7]), (outputs - 1, [7])):
        known = np.delete(x, missing, axis=0), np.delete(y[:, output], missing, axis=0)
        penalty = 0.3 * np.trace(known[0].T @ known[0]) / 4
        features = np.r_[known[0], np.sqrt(penalty) * np.eye(4)]
        expected, *_ = np.linalg.lstsq(
            features, np.r_[known[1], np.sqrt(penalty) * prior[:, output]], rcond=None
        )
        np.testing.assert_allclose(ridge.shrunk(prior, 0.3)[:, output], expected)
    np.testing.assert_array_equal(ridge.shrunk(prior, np.inf), prior)


@pytest.mark.parametrize(("season", "window"), [(7, 24), (13, 16)])
def test_seasons_are_found_at_every_lag(season, window):
    time = np.arange(200)
    drift = 0.1 * np.random.default_rng(0).normal(size=200).cumsum()
    for values, found in ((np.sin(2 * np.pi * time / season) + drift, season), (drift, 1)):
        x, y = windows(values[:, None], window)
        assert best_season(x[..., 0], y[..., 0]) == found


def test_a_short_series_gets_a_smoothing():
    """Fewer windows than steps in one."""
    values = np.arange(30.0)[:, None] ** 1.1
    x, y = windows(values, 12, 3)
    kernel, scale, residuals = fit_map(x[:8], y[:8], x[8:8], y[8:8])
    found = np.einsum("nwc,wchj->nhj", x[8:], kernel)
    assert np.abs(found - y[8:]).mean() < 0.2 < scale[0]
    assert residuals.shape == (8, 3, 1)


def test_gaps_do_not_hide_the_other_values_of_a_window():
    """A tenth of the values is missing, so almost no window is complete."""
    time = np.arange(600)
    season = np.sin(time) + 0.5 * np.sin(2.3 * time)
    values = np.where(np.random.default_rng(0).random(600) < 0.1, np.nan, season)
    x, y = windows(values[:, None], 24, 24)
    kernel, *_ = fit_map(x[:400], y[:400], x[400:], y[400:])
    found = np.einsum("nwc,wchj->nhj", fill(x[400:]), kernel)
    assert np.abs(found - windows(season[:, None], 24, 24)[1][400:]).mean() < 0.115


def test_windows_that_no_fold_leaves_out_are_not_fitted():
    """Four windows of noise: a regression would go through all of them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 12, 1)), rng.normal(size=(4, 3, 1))
    kernel, *_ = fit_map(x, y, x[:0], y[:0])
    assert np.abs(np.einsum("nwc,wchj->nhj", x, kernel) - y).mean() > 0.3


def test_a_map_that_gains_no_more_than_noise_moves_towards_the_simple_forecast():
    walk = np.random.default_rng(2).normal(size=(90, 1)).cumsum(axis=0)
    x, y = windows(walk, 24, 4)
    kernel, *_ = fit_map(x[:40], y[:40], x[40:], y[40:])
    last = kernel[-1, 0, :, 0]
    assert np.all(last > 0.7) and np.abs(kernel[:-1, 0]).sum(axis=0).max() < 0.5


@pytest.mark.parametrize(
    ("gains", "horizon", "expected"),
    [([1.0, 2.0, 3.0], 1, True), ([1.0, -1.0, 1.0], 1, False), ([1.0, 2.0, -1.0], 3, False)],
)
def test_gains_of_less_than_a_standard_error_are_none(gains, horizon, expected):
    assert is_gain(np.array([*gains, np.nan]), horizon) == expected


def test_missing_values_keep_the_last_one():
    layer = LinearMap(3, 1, 1)
    layer.build((None, None, 2))
    layer.kernel.assign(np.arange(6.0).reshape(3, 2, 1))
    x = np.array([[[np.nan, 1], [2, np.nan], [np.nan, 3], [4, np.nan]]], "float32")
    filled = np.array([[[0, 1], [2, 1], [2, 3], [4, 3]]], "float32")
    for layer.return_sequences in (False, True):
        (base, scale), (expected, _) = layer(x), layer(filled)
        np.testing.assert_allclose(base, expected)
        assert float(np.ravel(scale)[-1]) == 1  # the mean of 0 and 2


def test_a_window_starts_from_its_first_known_value():
    x = np.array([[np.nan, np.nan, 5.0, np.nan, 7.0]]).T[None]
    filled = np.array([5.0, 5.0, 5.0, 5.0, 7.0])
    np.testing.assert_array_equal(fill(x)[0, :, 0], filled)
    layer = LinearMap(5, 1, 1)
    layer.build((None, None, 1))
    np.testing.assert_array_equal(
        np.asarray(layer.last_steps(x.astype("float32")))[0, :, 0], filled
    )


@pytest.mark.parametrize("scale", ["data", "window"])
def test_streams_that_cannot_start_are_refused(parts, scale):
    with pytest.raises(ValueError, match="is not built"):
        forecaster(scale=scale).initial_cache(1)
    model = trained(parts, scale=scale)
    with pytest.raises(ValueError, match="`batch_size` must be a positive integer"):
        model.initial_cache(0)
    with pytest.raises(ValueError, match=r"`x` must have shape \(3, 3\). Received: shape \(1, 3\)"):
        model.step(np.zeros((1, 3), "float32"), model.initial_cache(3))


@pytest.mark.parametrize(
    ("per_step", "quantiles", "scale"),
    [(False, QUANTILES, "data"), (True, None, "data"), (False, QUANTILES, "window")],
)
def test_streams_equal_whole_series(parts, per_step, quantiles, scale):
    model = trained(parts, quantiles=quantiles, per_step=per_step, scale=scale)
    x = rows(2 * WINDOW + 5).astype("float32")[None]
    x[:, 5:8, 0] = x[:, 9, 2] = np.nan
    outputs, cache = model.outputs_at_each_step(x[:, :20])
    whole, _ = model.outputs_at_each_step(x)
    steps = [np.asarray(outputs)[:, -1]]
    for t in range(20, x.shape[1]):
        y, cache = model.step(x[:, t], cache)
        steps.append(np.asarray(y))
    np.testing.assert_allclose(np.stack(steps, axis=1), whole[:, 19:], rtol=1e-4, atol=1e-4)
    called = np.asarray(model(x))
    np.testing.assert_allclose(called[:, -1] if per_step else called, whole[:, -1], rtol=1e-4)
    first = one_step_forecasts(model, x[0], x[0, :HORIZON, 2:])
    assert first.shape[0] == x.shape[1]


@pytest.mark.parametrize("scale", ["data", "window"])
def test_forecasts_beyond_the_horizon_continue(parts, scale):
    model = trained(parts, quantiles=None, scale=scale)
    known = rows(60)
    found = model.forecast(known[:40], 2 * HORIZON, known[40 : 40 + 2 * HORIZON, 2:])
    longer = np.concatenate([found[:HORIZON], known[40 : 40 + HORIZON, 2:]], axis=1)
    after = model.forecast(
        np.concatenate([known[:40], longer]), future_covariates=known[40 + HORIZON :, 2:][:HORIZON]
    )
    np.testing.assert_allclose(found[HORIZON:], after, rtol=1e-4)


@pytest.mark.parametrize("scale", ["data", "window"])
def test_training_starts_from_the_map_and_files_keep_it(parts, scale, tmp_path):
    model = forecaster(scale=scale)
    model.adapt(*parts[:2])
    before = model.predict(parts[2].read(np.arange(3))[0], verbose=0)
    model.compile("adam", jit_compile=False)
    stream = WindowStream(parts[0], batch_size=32)
    start = model.evaluate(stream, verbose=0)[0]
    loss = model.fit(stream, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert loss[-1] < start
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = parts[2].read(np.arange(3))[0]
    after = model.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), after)
    assert 0 < np.abs(after - before).max()


def test_the_loss_is_in_units_of_each_window(parts):
    """The same for a series of a hundredth."""
    model = trained(parts, quantiles=None)
    model.compile("sgd", loss="mae", metrics=[], jit_compile=False)
    x, y = parts[0].read(np.arange(9))
    base, scale = (np.asarray(part) for part in model.linear(model._linear_inputs(x)))
    outputs = (model.predict(x, verbose=0) - y) / np.asarray(model.target_normalization.scale)
    expected = np.abs(outputs / scale).mean()
    assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=1e-4)


def test_the_net_sees_each_window_relative_to_its_last_value():
    """Forecasts of a model with scale="window" move and stretch with a series."""
    values = np.random.default_rng(0).normal(size=(200, 1)).cumsum(axis=0)
    for scale in ("window", "data"):
        model = forecaster(targets=1, future_channels=0, scale=scale)
        model.adapt(values)
        rng = np.random.default_rng(1)
        model.head.kernel.assign(rng.normal(size=model.head.kernel.shape))
        model.linear.least_scale.assign([1e-6])
        x = windows(values)[0][:9].astype("float32")
        found = model.predict(x, verbose=0)
        moved = (model.predict(3 * x + 50, verbose=0) - 50) / 3
        assert np.allclose(found, moved, rtol=1e-3, atol=1e-3) == (scale == "window")


def test_a_small_series_beside_a_large_one_keeps_its_precision():
    season = np.sin(np.arange(120) * 2 * np.pi / SEASON) + 0.1 * np.arange(120)
    both = np.r_[season, 1e5 * season][:, None]
    parts = TimeSeries(both, lengths=[120, 120]).split(WINDOW, HORIZON)
    model = forecaster(targets=1, future_channels=0, scale="window")
    model.adapt(*parts[:2])
    x, y = parts[2].read(np.array(parts[2].of_series(0)))
    assert np.abs(model.predict(x, verbose=0)[..., 1] - y).mean() < 0.05


@pytest.mark.parametrize(("error", "share"), [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5), (-1.0, 0.0)])
def test_the_net_is_used_as_far_as_it_helps(error, share):
    """The net adds 1; the map is `error` too low."""
    values = np.random.default_rng(0).normal(size=(200, 1)).cumsum(axis=0)
    model = forecaster(targets=1, future_channels=0)
    model.adapt(values)
    x, y = windows(values)
    base, scale = model.linear(model._linear_inputs(x.astype("float32")))
    deviation = np.asarray(model.target_normalization.scale)
    model.head.bias.assign(np.tile([0.1, 1.0, 0.1], HORIZON))
    model.offsets.assign(np.zeros(model.offsets.shape))
    before = model.predict(x, verbose=0)
    y = before[..., 1] + (error - 1) * np.asarray(scale) * deviation
    assert model.weigh_net(x, y) == share
    after = model.predict(x, verbose=0)
    expected = (share - 1) * np.asarray(scale)[..., None] * deviation
    np.testing.assert_allclose(after - before, expected + 0 * after, atol=2e-4)
    model.head.bias.assign(np.tile([0.1, 1.0, 0.1], HORIZON))
    few = 4 * HORIZON - 1
    assert model.weigh_net(x[:few], y[:few]) == 0


def test_what_does_not_fit_is_named(parts):
    for options in ({"linear_window": 1}, {"linear_window": 0}):
        with pytest.raises(ValueError, match="`linear_window` must be .*Received: linear_window="):
            forecaster(**options)
    with pytest.raises(ValueError, match="`scale` must be one of .*Received: scale='series'"):
        forecaster(scale="series")
    for options in ({"linear_window": None}, {"per_step": True}):
        with pytest.raises(ValueError, match="scale='window' needs .*Received: linear_window="):
            forecaster(scale="window", **options)
    with pytest.raises(ValueError, match=r"windows of .* = 16 \+ 4 rows"):
        forecaster(targets=1, future_channels=0).adapt(np.arange(19.0)[:, None])
    with pytest.raises(ValueError, match="needs windows of at least 20 rows.*window=16, horizon=4"):
        forecaster(linear_window=20).adapt(*parts[:2])
    model = trained(parts)
    with pytest.raises(ValueError, match="does not support masks"):
        model(np.zeros((1, WINDOW, 3)), mask=ops.ones((1, WINDOW), "bool"))
    with pytest.raises(ValueError, match="a model with a linear map"):
        forecaster(linear_window=None).weigh_net(np.zeros((1, 4, 3)), np.zeros((1, 4, 2)))


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
def test_a_step_in_c_equals_keras(parts, tmp_path):
    """`export` compares 200 steps, and raises if they differ."""
    export(trained(parts, scale="window"), tmp_path / "window.c", format="c")
    export(trained(parts), tmp_path / "model.c", format="c")
    assert "Largest difference from Keras" in (tmp_path / "model.h").read_text()
