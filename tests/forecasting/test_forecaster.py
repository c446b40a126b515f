"""Forecasts of time series: units, quantiles, missing values, blocks, scores of anomalies."""

import keras
import numpy as np
import pytest

from tests.support.threads import in_threads
from trellis_keras.forecasting import (
    MASE,
    Coverage,
    Forecaster,
    MeanPinball,
    PinballLoss,
    anomaly_scores,
    mase_scale,
)
from trellis_keras.forecasting.losses import without_missing
from trellis_keras.layers import TCN

pytestmark = pytest.mark.both_backends(slow=True)

QUANTILES = (0.1, 0.5, 0.9)
WINDOW, HORIZON, SEASON = 16, 4, 8


def load(steps=240):
    """A target of thousands, one of millionths, and the phase, which is known in the future."""
    time = np.arange(steps)
    wave = np.sin(2 * np.pi * time / SEASON)
    noise = np.random.default_rng(0).normal(size=(2, steps))
    columns = [9e3 + 500 * wave + 20 * noise[0], 1e-6 * (5 + wave + 0.1 * noise[1]), np.cos(wave)]
    return np.stack(columns, axis=1).astype("float32")


SERIES = load()


def windows(series, horizon=HORIZON):
    """Inputs and targets; the last channel is read `horizon` steps ahead."""
    ends = range(WINDOW, len(series) - horizon)
    ahead = np.concatenate([series[:-horizon, :2], series[horizon:, 2:]], axis=1)
    x = np.stack([ahead[end - WINDOW : end] for end in ends])
    return x, np.stack([series[end : end + horizon, :2] for end in ends])


def forecaster(horizon=HORIZON, targets=2, per_step=False, adapted=True, **options):
    backbone = TCN(6, kernel_size=3, depth=2, return_sequences=per_step, seed=1)
    options = {"future_channels": 1, "normalize": True, "seed": 0} | options
    model = Forecaster(backbone, horizon, targets, per_step=per_step, **options)
    if adapted:
        model.adapt(SERIES)
    return model


@pytest.fixture(scope="module")
def trained():
    model = forecaster(quantiles=QUANTILES)
    model.compile(keras.optimizers.Adam(1e-2), jit_compile=False)
    history = model.fit(*windows(SERIES), batch_size=64, epochs=12, verbose=0).history
    return model, history


def test_training_takes_the_units_of_the_data(trained):
    _, history = trained
    assert set(history) == {"loss", "mae", "pinball", "coverage"}
    assert history["loss"][-1] < 0.3 * history["loss"][0]  # of standardized values
    assert 1 < history["mae"][-1] < 100  # the mean over both targets, in the data's units
    assert 0.5 < history["coverage"][-1] < 1


def test_quantiles_do_not_cross(trained):
    x, y = windows(SERIES)
    outputs = trained[0].predict(x, verbose=0)
    assert outputs.shape == (*y.shape, 3)
    assert np.all(np.diff(outputs, axis=-1) >= 0)
    small = forecaster(2, 1, quantiles=(0.2, 0.4, 0.6, 0.8), future_channels=0)
    assert small.middle == 1
    assert np.all(np.diff(small.predict(x[:4], verbose=0), axis=-1) > 0)


def test_the_figures_are_those_of_the_definitions(trained):
    model, (x, y) = trained[0], windows(SERIES)
    metrics = [MASE(mase_scale(SERIES[:, :2], SEASON), QUANTILES), "mse"]
    weighted = [MeanPinball(QUANTILES), Coverage(QUANTILES), "mae"]
    model.compile("sgd", metrics=metrics, weighted_metrics=weighted, jit_compile=False)
    results = model.evaluate(x, y, batch_size=50, verbose=0, return_dict=True)
    p = model.predict(x, verbose=0).astype("float64")
    error = y[..., None] - p
    naive = np.abs(SERIES[SEASON:, :2] - SERIES[:-SEASON, :2]).mean(axis=0)
    band = (p[..., 0] <= y) & (y <= p[..., 2])
    expected = {
        "loss": np.maximum(QUANTILES * error, (np.array(QUANTILES) - 1) * error)
        / SERIES[:, :2].std(axis=0)[:, None],
        "pinball": np.maximum(QUANTILES * error, (np.array(QUANTILES) - 1) * error),
        "coverage": band,
        "mae": np.abs(error[..., 1]),
        "mse": error[..., 1] ** 2,
        "mase": np.abs(error[..., 1]) / naive,
    }
    assert set(results) == set(expected)
    for name, values in expected.items():
        assert results[name] == pytest.approx(values.mean(), rel=1e-3), name


def test_missing_targets_do_not_count():
    model = forecaster()
    model.compile("sgd", metrics=["mae"], weighted_metrics=["mse"], jit_compile=False)
    x, y = (array[:8] for array in windows(SERIES))
    missing = y.copy()
    missing[:4, 1:, 0] = missing[5] = np.nan
    weight = (~np.isnan(missing)).astype("float32")
    by_weight = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    results = model.evaluate(x, missing, verbose=0, return_dict=True)
    for name in ("loss", "mse"):
        assert results[name] == pytest.approx(by_weight[name], rel=1e-5)
    error = np.abs(model.predict(x, verbose=0) - missing)
    assert results["mae"] == pytest.approx(np.nanmean(error), rel=1e-4)
    # Weights of rows and of steps are weights of their values.
    weight = np.arange(8, dtype="float32")
    rows = model.evaluate(x, missing, sample_weight=weight, verbose=0)
    steps = np.repeat(weight[:, None], HORIZON, axis=1)
    assert rows == model.evaluate(x, missing, sample_weight=steps, verbose=0)


def test_missing_inputs_read_as_the_mean():
    model = forecaster()
    x = windows(SERIES)[0][:2]
    x[:, 3, 0] = np.nan
    mean = x.copy()
    mean[:, 3, 0] = SERIES[:, 0].mean(dtype="float64")
    np.testing.assert_allclose(*(model.predict(a, verbose=0) for a in (x, mean)), rtol=1e-5)


def test_statistics_leave_missing_values_out_and_constants_alone(tmp_path):
    series = SERIES.astype("float64")
    series[:, 2] = 7.0
    series[::3, 0] = np.nan
    model = forecaster(future_channels=0)
    model.adapt([series[:100], np.lib.format.open_memmap(_saved(tmp_path, series[100:]))])
    mean, scale = (np.asarray(w) for w in model.input_normalization.weights)
    np.testing.assert_allclose(mean, np.nanmean(series, axis=0), rtol=1e-5)
    np.testing.assert_allclose(scale, [*np.nanstd(series, axis=0)[:2], 1.0], rtol=1e-5)
    np.testing.assert_allclose(model.target_normalization.weights[0], mean[:2])
    series[:, 1] = np.nan
    with pytest.raises(ValueError, match=r"channels \[1\]"):
        model.adapt(series)


def test_inputs_are_clipped_to_ten_deviations():
    """A column that hardly changes in training is no reason for huge activations later."""
    model = forecaster(future_channels=0)
    series = SERIES.copy()
    series[:, 2] = 5 + 1e-5 * np.sin(np.arange(len(series)))
    model.adapt(series)
    x = np.stack([series[:WINDOW], series[:WINDOW]])
    x[:, -1, 2] = 6, 1e9
    first, second = model.predict(x, verbose=0)
    np.testing.assert_array_equal(first, second)
    clipped = np.asarray(model.input_normalization(x))[0, -1]
    assert clipped[2] == 10 and np.all(np.abs(clipped[:2]) < 3)


def _saved(folder, array):
    np.save(folder / "series.npy", array)
    return folder / "series.npy"


def test_forecasts_continue_block_by_block(trained):
    model = trained[0]
    history, future = SERIES[:100], SERIES[100:, 2:]
    direct = model.forecast(history, future_covariates=future[:HORIZON])
    ahead = np.concatenate([history[:, :2], SERIES[HORIZON : 100 + HORIZON, 2:]], axis=1)
    np.testing.assert_allclose(
        direct, model.predict(ahead[None], verbose=0)[0], rtol=1e-5, atol=1e-6
    )
    # The second block is that of a history with the first one in it.
    both = model.forecast(history, steps=HORIZON + 2, future_covariates=future[: 2 * HORIZON])
    assert both.shape == (HORIZON + 2, 2, 3)
    np.testing.assert_allclose(both[:HORIZON], direct, rtol=1e-5)
    both = model.forecast(
        history, steps=HORIZON + 2, future_covariates=future[: 2 * HORIZON], samples=1
    )
    longer = np.concatenate([direct[..., 1], future[:HORIZON]], axis=1)
    longer = np.concatenate([history, longer])
    after = model.forecast(longer, future_covariates=future[HORIZON : 2 * HORIZON])
    # A single path is that of the medians.
    np.testing.assert_allclose(both[HORIZON:], after[:2, :, [1] * 3], rtol=1e-5)


@pytest.mark.both_backends
def test_threads_forecast_what_one_does():
    model = Forecaster(TCN(6, 3, 2, return_sequences=False, seed=1), 3, seed=0)
    model.build((None, None, 1))
    series = np.random.default_rng(0).normal(size=(16, 9, 1))

    def forecast(i):
        return [model.forecast(series[i], steps) for steps in (3, 5)]

    results = zip(in_threads(forecast, range(16)), map(forecast, range(16)), strict=True)
    for found, expected in results:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_calibrated_quantiles_hold():
    model = forecaster(quantiles=(0.1, 0.25, 0.5, 0.9))
    x, y = windows(SERIES)
    model.calibrate(x[:100], y[:100], batch_size=50)
    outputs = model.predict(x[:100], verbose=0)
    assert np.all(np.diff(outputs, axis=-1) >= 0)
    for i, quantile in [(0, 0.1), (1, 0.25), (3, 0.9)]:
        below = np.mean(y[:100] < outputs[..., i], axis=(0, 1))
        np.testing.assert_allclose(below, quantile, atol=0.01)
    again = forecaster(quantiles=model.quantiles)
    np.testing.assert_array_equal(
        again.predict(x, verbose=0)[..., 2], model.predict(x, verbose=0)[..., 2]
    )


def test_calibration_counts_what_training_counts():
    model = forecaster(quantiles=QUANTILES)
    x, y = (array[:60] for array in windows(SERIES))
    model.calibrate(x[:30], y[:30])
    expected = np.asarray(model.gap_scale)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            rows = slice(30 * index, 30 * index + 30)
            return x[rows], np.where(index, np.nan, y[rows]) if index else y[rows], np.ones(30)

    model.calibrate(Batches())
    np.testing.assert_allclose(np.asarray(model.gap_scale), expected, rtol=1e-5)
    assert all(weight is not model.gap_scale for weight in model.trainable_variables)
    with pytest.raises(ValueError, match="several quantiles. Received: None"):
        forecaster().calibrate(x, y)


def test_bands_beyond_the_horizon_are_those_of_paths():
    """Of a random walk: its variance grows with every step."""
    backbone = keras.Sequential([keras.layers.Dense(1)])
    model = Forecaster(backbone, 1, quantiles=QUANTILES, per_step=True)
    model.build((None, None, 1))
    low, high = np.log(np.expm1([1.0, 2.0]))  # by softplus
    model.head.set_weights([np.array([[0.0, 1.0, 0.0]]), np.array([low, 0.0, high])])
    model.backbone.set_weights([np.ones((1, 1)), np.zeros(1)])
    found = model.forecast(np.zeros((5, 1)), steps=50, samples=2000, seed=0)
    assert found.shape == (50, 1, 3)
    np.testing.assert_allclose(found[0, 0], [-1, 0, 2], atol=1e-4)
    # Each step is a half of N(0, 1 / 1.28) or one of N(0, 2 / 1.28).
    z = 1.2816
    mean = (2 - 1) / z / np.sqrt(2 * np.pi)
    deviation = np.sqrt((1 + 4) / 2 / z**2 - mean**2)
    expected = 50 * mean + z * deviation * np.sqrt(50) * np.array([-1, 0, 1])
    np.testing.assert_allclose(found[-1, 0], expected, atol=0.6)


@pytest.mark.parametrize("per_step", [False, True])
def test_one_step_models_forecast_by_streaming(per_step):
    backbone = TCN(4, kernel_size=2, depth=2, return_sequences=per_step, seed=0)
    model = Forecaster(backbone, 1, 3, per_step=per_step, normalize=True, seed=0)
    model.adapt(SERIES)
    histories = extended = np.stack([SERIES[:30], SERIES[30:60]])
    found = model.forecast(histories, steps=3)
    for step in range(3):
        y = model.predict(extended, verbose=0)
        y = y[:, -1] if per_step else y
        np.testing.assert_allclose(found[:, step], y[:, 0], rtol=1e-5)
        extended = np.concatenate([extended, y], axis=1)


def test_the_file_keeps_units_and_metrics(trained, tmp_path):
    model, (x, y) = trained[0], windows(SERIES)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert (loaded.horizon, loaded.targets, loaded.quantiles) == (HORIZON, 2, QUANTILES)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    results = [m.evaluate(x, y, verbose=0, return_dict=True) for m in (model, loaded)]
    assert results[0] == results[1]


def test_anomalies_score_highest(trained):
    series = SERIES.copy()
    series[150, 0] += 400
    series[60, 1] = np.nan
    point = forecaster()
    point.set_weights(_median_weights(trained[0], point))
    for model in (trained[0], point):
        scores = anomaly_scores(model, series)
        assert scores.shape == (240, 2)
        assert np.nanargmax(scores[WINDOW:, 0]) + WINDOW == 150  # the model knows the past by then
        assert np.isnan(scores[0]).all() and np.isnan(scores[60, 1])
    np.testing.assert_allclose(
        anomaly_scores(point, series, scale=[2.0, 1.0])[1:100, 0],
        np.abs(_one_step(point, series)[:99, 0] - series[1:100, 0]) / 2,
        rtol=1e-3,
        atol=2e-3,
    )


def _median_weights(model, point):
    """The weights of a model with quantiles for one without: the middle ones."""
    *backbone, kernel, bias = map(np.asarray, model.trainable_weights)
    parts = {
        id(point.head.kernel): np.reshape(kernel, (len(kernel), -1, 3))[..., 1],
        id(point.head.bias): np.reshape(bias, (-1, 3))[..., 1],
    }
    others = {id(b): a for a, b in zip(backbone, point.trainable_weights, strict=False)}
    fixed = {id(w): np.asarray(w) for w in point.weights}
    return [(fixed | others | parts)[id(w)] for w in point.weights]


def _one_step(model, series):
    """The first steps of direct forecasts at each time."""
    outputs, _ = model.outputs_at_each_step(
        np.concatenate([series[:-HORIZON, :2], series[HORIZON:, 2:]], axis=1)[None]
    )
    return np.asarray(outputs)[0, :, 0]


def test_losses_and_metrics_by_hand():
    y, p = np.array([[1.0, np.nan]]), np.array([[[0.0, 2.0], [0.0, 1.0]]])
    cleaned, weight = without_missing(y, None)
    loss = PinballLoss((0.25, 0.5))(cleaned, p, sample_weight=weight)
    assert float(loss) == pytest.approx((0.25 + 0.5) / 2)
    metric = Coverage((0.25, 0.5))
    metric.update_state(y, p)
    assert float(metric.result()) == 1.0
    for made in (PinballLoss((0.1, 0.9)), MASE([1.0, 2.0], (0.1, 0.9)), Coverage((0.1, 0.9))):
        assert type(made).from_config(made.get_config()).get_config() == made.get_config()


def test_missing_targets_do_not_count_in_the_loss_of_an_epoch():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 9, 4)), rng.normal(size=(6, 3, 2))
    y[3:] = np.nan
    model = Forecaster(TCN(6, 3, 2, return_sequences=False), 3, 2)
    model.compile("sgd", jit_compile=False)
    losses = [model.evaluate(x, y, batch_size=rows, verbose=0)[0] for rows in (6, 2)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_forecast_follows_lora():
    model = Forecaster(TCN(6, 3, 2, return_sequences=False), 2)
    model.build((None, None, 1))
    history = np.random.default_rng(0).normal(size=(9, 1))
    before = model.forecast(history, 4)
    model.head.enable_lora(2)
    model.head.lora_kernel_b.assign(np.ones(model.head.lora_kernel_b.shape, "float32"))
    assert np.abs(before - model.forecast(history, 4)).max() > 1e-3


def test_quantiles_of_masked_steps():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 9, 3)), rng.normal(size=(5, 9, 2, 1))
    x[0, 6:] = 0
    backbone = keras.Sequential([keras.layers.Masking(), TCN(4, 2, 2)])
    model = Forecaster(backbone, 2, quantiles=(0.1, 0.9), per_step=True)
    model.compile("sgd", jit_compile=False)
    before = model.evaluate(x, y, verbose=0)[0]
    y[0, 6:] += 100
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0)[0], before, rtol=1e-5)


# Bad input


@pytest.mark.parametrize("quantiles", [(), (0.5, 0.1), (0.0, 0.5), (0.1, 1.0), (0.5, 0.5), "ab", 3])
def test_wrong_quantiles_are_refused(quantiles):
    with pytest.raises(ValueError, match="`quantiles` must be increasing.*Received: quantiles="):
        forecaster(quantiles=quantiles, adapted=False)


def test_bad_arguments_are_named(trained):
    with pytest.raises(ValueError, match="`horizon` must be a positive integer"):
        forecaster(0, adapted=False)
    with pytest.raises(ValueError, match="2 targets and end with 2 known .*3 channels"):
        forecaster(future_channels=2)
    with pytest.raises(ValueError, match="must use forecasting.PinballLoss.*'mse'"):
        trained[0].compile("sgd", loss="mse")
    with pytest.raises(ValueError, match="of a constant series"):
        MASE(mase_scale(np.ones((9, 1))))
    with pytest.raises(ValueError, match="less than the 5 steps"):
        mase_scale(np.ones((5, 1)), season=5)


def test_data_that_do_not_fit_are_named_before_training():
    x, y = (array[:4] for array in windows(SERIES))
    model = forecaster(adapted=False)
    model.compile("sgd")
    with pytest.raises(ValueError, match="call model.adapt"):
        model.fit(x, y, verbose=0)
    model.adapt(SERIES)
    with pytest.raises(ValueError, match=r"\(batch, 4, 2\).*horizon is 4. Received: shape \(4, 3"):
        model.fit(x, y[:, :3], verbose=0)
    with pytest.raises(ValueError, match="All targets are missing"):
        model.fit(x, np.full_like(y, np.nan), verbose=0)
    with pytest.raises(ValueError, match=r"Targets must have shape \(4, 4, 2\).*\(4, 3, 2\)"):
        model.compute_loss(x, y[:, :3], model(x))


def test_forecasts_that_do_not_fit_are_named(trained):
    model, future = trained[0], SERIES[100:, 2:]
    for covariates in (None, future[:7], future[:8, :0]):
        with pytest.raises(ValueError, match=r"`future_covariates` must have shape \(1, 8, 1\)"):
            model.forecast(SERIES[:100], 5, covariates)
    with pytest.raises(ValueError, match=r"`history` must have shape \(time, 3\).*\(1, 100, 2\)"):
        model.forecast(SERIES[:100, :2], 4, future)
    with pytest.raises(ValueError, match="`steps` must be a positive integer"):
        model.forecast(SERIES[:100], 0, future)
    other = forecaster(future_channels=0)
    with pytest.raises(ValueError, match="horizon of 4 steps.*1 other channels, steps=8"):
        other.forecast(SERIES[:100], 5)
    with pytest.raises(ValueError, match="has no future covariates"):
        other.forecast(SERIES[:100], 4, future)
    with pytest.raises(ValueError, match="scores values by its band"):
        anomaly_scores(model, SERIES, scale=1.0)
