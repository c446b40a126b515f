"""Reports forecast errors on a test part, next to those of the best naive forecast."""

import json
import math
import statistics
from typing import Any

import numpy as np

from trellis_keras.forecasting import rollout
from trellis_keras.forecasting.calibration import (
    calibrate_on_known,
    predict_windows,
    recent_count,
    windows_ahead,
)
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.linear import NEAR
from trellis_keras.forecasting.metrics import mase_scale, mean_of_known
from trellis_keras.forecasting.series import FIRST_NAMES, TimeSeries, Windows, first_names

_DAY = 86_400
_YEAR = 365.2425 * _DAY
# Calendar seasons in seconds.
_SEASONS = {
    "an hour": 3600,
    "a day": _DAY,
    "a week": 7 * _DAY,
    "a month": _YEAR / 12,
    "a quarter": _YEAR / 4,
    "a year": _YEAR,
}
_SEASON_WINDOWS = 2000  # used to choose a season
_LARGEST_RATIO = 100_000  # of the ranges of series, above which small ones lose precision
_FEW_WINDOWS = 50
_BLOCK = 64  # horizons predicted at a time
_MANY_MISSING = 0.5
_MOST_SERIES = 1000  # for which a report has separate figures


def report(
    model: Forecaster,
    train: Windows,
    valid: Windows,
    test: Windows,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Returns figures for the forecasts of test windows and for the best naive forecast.

    A naive forecast repeats the last season. The season of each series is the one, of any length,
    with the best naive forecast in the training part.

    The quantiles of each forecast are calibrated on the forecasts before it, as in `forecast`.

    Args:
        model: `Forecaster`.
        train: The windows of the training part, which determine the season.
        valid: The windows of the validation part.
        test: The windows of the test part.
        batch_size: Positive integer. Defaults to 64.

    Returns:
        A dict of the number of windows, the most common season in steps, the step, `warnings`, and
        for each target `mae`, `rmse`, `mase`, `naive_mae`, `stream_mae` (when the model reads the
        whole part as one stream, not window by window) and, for a model with quantiles, `coverage`.
        All are over the same `values`: known values that have a naive forecast. For up to 1,000
        series, `series` has all of these figures except `mase` for each. `left_out` has the number
        of series without a window in each part, and the first of their names. `names` are the names
        of the series, and `test_start` is the first time of the test part, or `None` without times.
    """
    count, names = test.series.targets, target_names(test.series)
    seasons = [choose_season(train, i) for i in range(len(train.series.lengths))]
    train_rows = [series_rows(train, i)[:, :count] for i in range(len(seasons))]
    is_known = [not np.isnan(rows).all() for rows in train_rows]
    known = [lag for i, lag in enumerate(seasons) if is_known[i] and len(train.of_series(i))]
    season = statistics.mode(known or seasons)
    sums = np.zeros((len(test.series.lengths), 6, count))
    for i, index, bands, y in _walk(model, test, batch_size):
        naive = test.naive_forecast(index, seasons[i])
        counts = ~np.isnan(y - naive)
        errors = np.where(counts, y - middle_values(model, bands), 0.0).astype("float64")
        naive_errors = np.where(counts, y - naive, 0.0).astype("float64")
        inside = counts & (bands[..., 0] <= y) & (y <= bands[..., -1]) if model.has_band else counts
        parts = (counts, np.abs(errors), np.square(errors), np.abs(naive_errors), inside)
        sums[i, :5] += [part.sum(axis=(0, 1)) for part in parts]
    for i in range(len(test.series.lengths)):
        sums[i, 5] = _stream_errors(model, test, i, seasons[i])
    pairs = zip(train_rows, seasons, strict=True)
    scale = np.stack([mase_scale(part, lag) for part, lag in pairs if len(part) > lag])
    figures = _figures(sums.sum(axis=0), model)
    figures["mase"] = figures["mae"] / _positive(mean_of_known(scale))
    results: dict[str, Any] = {
        "train_windows": len(train),
        "test_windows": len(test),
        "season": season,
        "season_name": _season_name(season, test.series.step),
        "step": None if test.series.step is None else str(test.series.step),
        "quantiles": model.quantiles,
        "names": _names(test.series),
        "test_start": _start(test),
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
    results["warnings"] = _warnings(results, train_rows, test)
    return json.loads(json.dumps(results))


def _names(series):
    """Returns the names of the series, if a column has them and there are not too many."""
    has_names = series.columns is not None and series.columns.series is not None
    return list(series.names) if has_names and len(series.names) <= _MOST_SERIES else None


def _start(part):
    """Returns the first time of a part."""
    times, pairs = part.series.times, zip(part.first, part.last, strict=True)
    return None if times is None else str(min(times[a] for a, b in pairs if b > a))


def series_rows(part: Windows, i: int) -> np.ndarray:
    """Returns the part's rows of series `i`, (rows, channels)."""
    return part.series.values[part.first[i] : part.last[i]]


def _warnings(results, train_rows, test):
    """Returns warnings about reasons why forecasts or their figures may be unreliable."""
    found = []
    if results["season"] > test.window:
        longer = min(2 * results["season"], max(map(len, train_rows)) // 2)
        found.append(
            f"The window of {test.window} rows is shorter than the season of {results['season']}: "
            f"train with --window {longer}."
        )
    if math.gcd(test.stride, results["season"]) > 1:
        found.append(
            f"A stride of {test.stride} has a common factor with the season of "
            f"{results['season']}: the model has only learned to forecast from some of its rows. "
            "Choose a stride without a common factor."
        )
    few = results["train_windows"]
    if few < _FEW_WINDOWS:
        found.append(
            f"The training part has only {few} windows. A shorter --window or --horizon, or more "
            "data, would make forecasts and bands more reliable."
        )
    names = target_names(test.series)
    empty, moved, stuck, constant, ranges = [], [], [], [], {}
    for i, rows in enumerate(train_rows):
        tested = series_rows(test, i)[:, : len(names)]
        for j, name in enumerate(names):
            where = _place(test.series, i, name)
            last = tested[-test.horizon :, j]
            known = rows[~np.isnan(rows[:, j]), j]
            if len(known):
                ranges.setdefault(name, {})[where] = float(np.ptp(known))
            if len(known) > 1 and np.ptp(known) == 0:
                constant.append(where)
            elif len(last) > 1 and np.ptp(last) == 0:
                stuck.append(where)
            if len(known) < (1 - _MANY_MISSING) * len(rows):
                empty.append(where)
            elif not np.isnan(tested[:, j]).all() and not np.isnan(rows[:, j]).all():
                level = np.nanmean(tested[:, j])
                if not np.nanmin(rows[:, j]) <= level <= np.nanmax(rows[:, j]):
                    moved.append(where)
    if empty:
        found.append(
            f"More than half of the values of the training part are missing: {first_names(empty)}."
        )
    if constant:
        found.append(
            "All values of the training part are the same, so there is nothing to learn, in "
            f"{first_names(constant)}. The forecast repeats them: leave out what does not change."
        )
    small = [
        where
        for own in ranges.values()
        for where, size in own.items()
        if 0 < size * _LARGEST_RATIO < max(own.values())
    ]
    if small:
        found.append(
            f"The largest series varies more than {_LARGEST_RATIO:,} times as much as "
            f"{first_names(small)}. Train such small series apart, or rescale them: one model "
            "computes all in float32."
        )
    if moved:
        found.append(
            "The mean of the test part is outside the range of the training part in "
            f"{first_names(moved)}: the forecasts extrapolate, and bands may be too narrow."
        )
    if stuck:
        found.append(
            f"The last {test.horizon} values are all the same in {first_names(stuck)}. If nothing "
            "was measured there, leave them empty: the model learns from them, and forecasts them."
        )
    figures = results["targets"]
    if "series" in results:
        figures = {
            _place(test.series, i, name): own
            for i, series in enumerate(test.series.names)
            for name, own in results["series"][series].items()
        }
    lost = [
        where
        for where, own in figures.items()
        if None not in (own["mae"], own["naive_mae"]) and own["mae"] > own["naive_mae"]
    ]
    if lost:
        found.append(f"The naive forecast is better in {first_names(lost)}.")
    return found


def _place(series, i, name):
    return name if len(series.names) == 1 else f"{series.names[i]}: {name}"


def _figures(sums, model):
    """Returns the figures, from the number of values and sums over them."""
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


def _walk(model, test, batch_size):
    """Yields series, windows, outputs and targets, calibrated on the windows before them."""
    series, stride, ahead = test.series, test.stride, windows_ahead(test)
    starts = [series.rows(i).start for i in range(len(series.lengths))]
    rows_before = [first - a - test.window for first, a in zip(test.first, starts, strict=True)]
    before = [min(recent_count(test) + ahead, max(rows // stride, 0)) for rows in rows_before]
    first = [row - stride * count for row, count in zip(test.first, before, strict=True)]
    whole = Windows(series, test.window, test.horizon, stride, first, test.last)
    for i in range(len(starts)):
        index = np.array(whole.of_series(i), int)
        own = np.array(test.of_series(i), int)
        outputs, y = predict_windows(model, whole, index[: before[i]], batch_size)
        for block in np.split(own, range(_BLOCK * ahead, len(own), _BLOCK * ahead)):
            old = len(y)
            new, new_y = predict_windows(model, test, block, batch_size)
            outputs, y = np.concatenate([outputs, new]), np.concatenate([y, new_y])
            for row in range(old, len(y), ahead):
                known, now = slice(0, row - ahead + 1), slice(row, row + ahead)
                found = calibrate_on_known(model, outputs[now], outputs[known], y[known], test)
                yield i, block[row - old :][:ahead], found, y[now]
            kept = -recent_count(test) - ahead
            outputs, y = outputs[kept:], y[kept:]


def _stream_errors(model, test, i, season):
    """Returns sums of absolute errors (targets,) of a model that streams a series."""
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


def choose_season(train: Windows, i: int = 0) -> int:
    """Returns the season of a series: the lag whose naive forecast is best in its training part.

    The candidates are all lags within a window, and calendar seasons. A calendar season is
    preferred to others that are hardly better.

    Args:
        train: The windows of the training part.
        i: Integer, number of the series.
    """
    rows, index = series_rows(train, i), np.array(train.of_series(i), int)
    if not len(index):
        return 1
    longest = len(rows) // 2
    calendar = _calendar(train.series.step)
    candidates = {*range(1, train.window + 1), *calendar}
    lags = sorted(lag for lag in candidates if lag <= longest) or [1]
    # Windows with a naive forecast for every lag.
    index = index[train.starts(index) + train.window - lags[-1] >= train.first[i]]
    index = index[np.linspace(0, len(index) - 1, min(_SEASON_WINDOWS, len(index))).astype(int)]
    _, y = train.read(index)
    errors = [np.abs(y - train.naive_forecast(index, lag)) for lag in lags]
    means = np.array([[_mean(error[..., j]) for j in range(y.shape[-1])] for error in errors])
    known = np.isfinite(means).all(axis=1)
    if not known.any():
        return 1
    # Normalizes each target.
    units = np.maximum(means[known].mean(axis=0), np.finfo("float32").tiny)
    scores = np.where(known, (means / units).sum(axis=1), np.inf)
    score = dict(zip(lags, scores, strict=True))
    best = min(lags, key=score.__getitem__)
    named = min((m for m in calendar if 1 < m <= longest), key=score.__getitem__, default=best)
    return named if score[named] <= NEAR * score[best] else best


def _mean(values):
    """Returns the mean, ignoring missing values; infinity if all are missing."""
    known = values[~np.isnan(values)]
    return known.mean(dtype="float64") if known.size else np.inf


def _calendar(step):
    """Returns the calendar seasons in steps."""
    seconds = _seconds(step)
    return [] if seconds is None else [max(round(s / seconds), 1) for s in _SEASONS.values()]


def _seconds(step):
    """Returns the length of a step in seconds, or None without times."""
    if step is None or step.dtype.kind != "m":
        return None
    if np.datetime_data(step.dtype)[0] == "M":
        return float(step.astype(int)) * _YEAR / 12
    return float(step.astype("timedelta64[s]").astype(int))


def _season_name(season, step):
    """Describes a season in steps, with its calendar name if it has one."""
    steps = f"{season} step{'s' * (season != 1)}"
    seconds = _seconds(step)
    if season == 1:
        return "the last value"
    for name, length in _SEASONS.items():
        if seconds is not None and season == round(length / seconds):
            return f"{name}, {steps}"
    return steps


def describe_report(results: dict[str, Any]) -> str:
    """Returns a report as text: a line per target, and the warnings."""
    lines = []
    for name, figures in results["targets"].items():
        line = (
            f"{name}: mean absolute error {_shown(figures['mae'])} on {figures['values']:,} values "
            f"of the test part; the best naive forecast ({results['season_name']}) has "
            f"{_shown(figures['naive_mae'])}"
        )
        if figures.get("coverage") is not None:
            low, high = results["quantiles"][0], results["quantiles"][-1]
            line += f"; {figures['coverage']:.1%} of the values in the {low:.0%} to {high:.0%} band"
        lines.append(line)
    if "net_share" in results:
        share = results["net_share"]
        if share:
            lines.append(
                f"The forecast is the linear map plus {share:.0%} of the network's output."
            )
        else:
            reason = (
                ""
                if share is None
                else ": the network does not improve on it in the validation part"
            )
            lines.append(f"The linear map is used alone{reason}.")
    return "\n".join([*lines, *results["warnings"]])


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
    """Returns a float, or None if it is not finite, for JSON."""
    return float(value) if np.isfinite(value) else None


def _shown(value):
    return "-" if value is None else f"{value:.4g}"
