"""How good forecasts of a test part are, beside the seasonal naive forecast."""

import json
from typing import Any

import numpy as np

from trellis_keras.forecasting import rollout
from trellis_keras.forecasting.calibration import (
    calibrate_on_known,
    predict_windows,
    recent_count,
    recent_windows,
    windows_ahead,
)
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.metrics import mase_scale
from trellis_keras.forecasting.series import FIRST_NAMES, TimeSeries, Windows

_DAY = 86_400
_SEASONS = (_DAY, 7 * _DAY)  # seconds
_BLOCK = 64  # horizons that a report predicts at once
_MOST_SERIES = 1000  # with figures of their own in a report


def report(
    model: Forecaster,
    train: Windows,
    valid: Windows,
    test: Windows,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Returns figures of the forecasts of test windows, and of the seasonal naive forecast.

    Each forecast has its quantiles calibrated on those before it, as by `forecast`.

    Args:
        model: `Forecaster`.
        train: The windows of the training part, by which the season is chosen.
        valid: The windows of the validation part, on which the first forecasts are calibrated.
        test: The windows of the test part.
        batch_size: Positive integer. Defaults to 64.

    Returns:
        A dict of the number of windows, the season in steps, the step, and for each target `mae`,
        `rmse`, `mase`, `naive_mae`, `stream_mae` (where the model reads the whole part as one
        stream, not window by window), and of a model with quantiles `coverage`. All are over the
        same `values`: those that the naive forecast has a forecast of. Of several series, up
        to 1,000, `series` has these figures of each, all but `mase`. `left_out` has the number of
        series without a window of a part, and their first names.
    """
    count, names = test.series.targets, target_names(test.series)
    season = choose_season(train)
    sums = np.zeros((len(test.series.lengths), 6, count))
    for i, index, bands, y in _walk(model, valid, test, batch_size):
        naive = test.naive_forecast(index, season)
        counts = ~np.isnan(y - naive)
        errors = np.where(counts, y - middle_values(model, bands), 0.0).astype("float64")
        naive_errors = np.where(counts, y - naive, 0.0).astype("float64")
        inside = counts & (bands[..., 0] <= y) & (y <= bands[..., -1]) if model.has_band else counts
        parts = (counts, np.abs(errors), np.square(errors), np.abs(naive_errors), inside)
        sums[i, :5] += [part.sum(axis=(0, 1)) for part in parts]
    for i in range(len(test.series.lengths)):
        sums[i, 5] = _stream_errors(model, test, i, season)
    scale = np.stack(
        [mase_scale(rows[:, :count], season) for rows in train.rows() if len(rows) > season]
    )
    figures = _figures(sums.sum(axis=0), model)
    figures["mase"] = figures["mae"] / _positive(np.nanmean(scale, axis=0))
    results: dict[str, Any] = {
        "test_windows": len(test),
        "season": season,
        "step": None if test.series.step is None else str(test.series.step),
        "quantiles": model.quantiles,
        "targets": _by_name(names, figures),
    }
    splits = {"train": train, "valid": valid, "test": test}
    left_out = {name: windows.left_out for name, windows in splits.items() if windows.left_out}
    if left_out:
        results["left_out"] = {
            name: {"number": len(series), "first": series[:FIRST_NAMES]}
            for name, series in left_out.items()
        }
    if 1 < len(sums) <= _MOST_SERIES:
        results["series"] = {
            series: _by_name(names, _figures(sums[i], model))
            for i, series in enumerate(test.series.names)
        }
    return json.loads(json.dumps(results))


def _figures(sums, model):
    """The figures that follow from the number of values and sums over them."""
    number, absolute, squared, naive, inside, stream = sums
    shared = _positive(number)
    figures = {
        "values": number,
        "mae": absolute / shared,
        "rmse": np.sqrt(squared / shared),
        "naive_mae": naive / shared,
        "stream_mae": stream / shared,
    }
    if model.has_band:
        figures["coverage"] = inside / shared
    return figures


def _by_name(names, figures):
    return {
        name: {
            key: int(values[i]) if key == "values" else _number(values[i])
            for key, values in figures.items()
        }
        for i, name in enumerate(names)
    }


def _walk(model, valid, test, batch_size):
    """Yields series, windows, outputs and targets, calibrated on the windows before them."""
    ahead = windows_ahead(test)
    for i in range(len(test.series.lengths)):
        outputs, y = predict_windows(model, valid, recent_windows(valid, i), batch_size)
        index = np.array(test.of_series(i), int)
        for rows in np.split(index, range(_BLOCK * ahead, len(index), _BLOCK * ahead)):
            old = len(y)
            new, new_y = predict_windows(model, test, rows, batch_size)
            outputs, y = np.concatenate([outputs, new]), np.concatenate([y, new_y])
            for first in range(old, len(y), ahead):
                known = slice(0, first - ahead + 1)
                block = slice(first, first + ahead)
                found = calibrate_on_known(model, outputs[block], outputs[known], y[known], test)
                yield i, rows[first - old :][:ahead], found, y[block]
            kept = -recent_count(test) - ahead
            outputs, y = outputs[kept:], y[kept:]


def _stream_errors(model, test, i, season):
    """Sums of absolute errors, (targets,), of a model that reads a series as one stream."""
    index = np.array(test.of_series(i), int)
    if not len(index):
        return np.zeros(test.series.targets)
    starts = test.starts(index)
    rows = slice(starts[0], starts[-1] + test.window)
    values = test.series.values[None, rows.start : rows.stop + test.horizon]
    history = values[:, : rows.stop - rows.start]
    x = rollout.with_lead(model, history, values[..., values.shape[-1] - model.future_channels :])
    ends = starts - starts[0] + test.window - 1
    blocks = rollout.read_blocks(model, x)
    found = [y[ends[(first <= ends) & (ends < first + len(y))] - first] for first, y in blocks]
    forecasts = np.concatenate(found)
    _, y = test.read(index)
    counts = ~np.isnan(y - test.naive_forecast(index, season))
    return np.where(counts, np.abs(y - middle_values(model, forecasts)), 0).sum(axis=(0, 1))


def choose_season(train: Windows) -> int:
    """Returns the season, in steps, whose naive forecast is the best in the training part.

    The candidates are a day and a week, of months a year; without times the horizon.
    """
    step = train.series.step
    candidates = {1}
    if step is None or step.dtype.kind != "m":
        candidates.add(train.horizon)
    elif np.datetime_data(step.dtype)[0] == "M":
        candidates.add(12 // int(step.astype(int)))
    else:
        seconds = int(step.astype("timedelta64[s]").astype(int))
        candidates |= {season // seconds for season in _SEASONS if season % seconds == 0}
    longest = max(len(rows) for rows in train.rows()) // 2
    candidates = {season for season in candidates if 0 < season <= longest} or {1}
    errors = {season: float(np.nanmean(train.naive_error(season))) for season in candidates}
    return min(errors, key=lambda season: (np.isnan(errors[season]), errors[season]))


def describe_report(results: dict[str, Any]) -> str:
    """Returns a report as a line for each target."""
    lines = []
    season = f"{results['season']} step{'s' * (results['season'] != 1)}"
    for name, figures in results["targets"].items():
        line = (
            f"{name}: mean absolute error {_shown(figures['mae'])} of {figures['values']:,} values "
            f"of the test part, of the seasonal naive forecast ({season}) "
            f"{_shown(figures['naive_mae'])}"
        )
        if "coverage" in figures:
            low, high = results["quantiles"][0], results["quantiles"][-1]
            line += f"; {figures['coverage']:.1%} of the values in the {low:.0%} to {high:.0%} band"
        lines.append(line)
    return "\n".join(lines)


def target_names(series: TimeSeries) -> list[str]:
    """Returns the names of the targets."""
    if series.columns is None:
        return [f"target {i}" for i in range(series.targets)]
    return list(series.columns.targets)


def middle_values(model, bands):
    return bands if model.middle is None else bands[..., model.middle]


def _positive(values):
    return np.where(values > 0, values, np.nan)


def _number(value):
    """A float that JSON has, or None."""
    return float(value) if np.isfinite(value) else None


def _shown(value):
    return "-" if value is None else f"{value:.4g}"
