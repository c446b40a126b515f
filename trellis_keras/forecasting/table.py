"""Forecasts a CSV file and writes the forecast as a CSV file."""

import csv
import os
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from keras_streams.files import atomic_write, check_output
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.series import Columns, TimeSeries, Windows, first_names

_DAY = np.timedelta64(1, "D")
_MANY_MISSING = 0.5  # share of the targets that a forecast reads


def forecast_table(
    model: Forecaster,
    path: str | os.PathLike,
    output: str | os.PathLike,
    columns: Columns,
    window: int,
    *,
    steps: int | None = None,
    trained_step: str | None = None,
    trained: Collection[str] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Forecasts the steps that follow a CSV file, in the units of the data.

    The forecast starts after the last row. For a model with covariates known in the future, it
    starts after the last value of a target, and the rows that follow must have these covariates.
    The quantiles are calibrated on the recent past of each series. Times with an offset from UTC
    are written in UTC.

    Args:
        model: `Forecaster`.
        path: CSV file. Series with fewer than `window` rows are skipped, and a warning names them.
        output: CSV file to write.
        columns: `Columns` of the file, the ones that the model was trained on.
        window: Positive integer, number of rows that the model was trained on.
        steps: Positive integer. Defaults to `None`, the model's horizon.
        trained_step: Time step of the training data, which the file must have too. Defaults to
            `None`, no check.
        trained: Names of the series of the training data; a warning names any other series.
            Defaults to `None`, no check.
        overwrite: Boolean, whether to replace an existing output. Defaults to `False`.

    Returns:
        A dict of `rows`, the number of rows written, `first` and `last`, their times or steps, and
        `left_out`, the number of skipped series.

    Raises:
        ValueError: If the file does not match the model, all its series are too short, or a future
            value of a covariate is missing.
        OSError: If a file cannot be read or written.
    """
    output = check_output(output, [path], overwrite)
    series = TimeSeries.from_csv(path, columns)
    found = forecast_series(
        model, series, window, str(path), steps=steps, trained_step=trained_step, trained=trained
    )
    rows, moments = [], []
    for i, (times, values) in found.items():
        label = [series.names[i]] if columns.series else []
        for time, row in zip(times, values, strict=True):
            moments.append(_written(time, series.utc))
            rows.append(
                [*label, moments[-1], *("" if np.isnan(v) else f"{v:.7g}" for v in row.ravel())]
            )
    header = [columns.series] if columns.series else []
    header += [columns.time or "step", *_column_names(columns.targets, model.quantiles)]
    with atomic_write(output) as temporary, open(temporary, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    spans = {"first": min(moments), "last": max(moments)}
    return {"rows": len(rows), **spans, "left_out": len(series.names) - len(found)}


def forecast_series(
    model: Forecaster,
    series: TimeSeries,
    window: int,
    where: str,
    *,
    steps: int | None = None,
    trained_step: str | None = None,
    trained: Collection[str] | None = None,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns the forecast of the steps that follow each series, with calibrated quantiles.

    Args:
        model: `Forecaster`.
        series: `TimeSeries` with columns.
        window: Positive integer, number of rows that the model was trained on.
        where: String, the name of the table in messages.
        steps, trained_step, trained: As in `forecast_table`.

    Returns:
        A dict from the number of each series that is long enough to the times of the steps, or
        their numbers from 1, and the forecast (steps, targets[, quantiles]), NaN for a target
        without a known value in the window.

    Raises:
        ValueError: As in `forecast_table`.
    """
    columns = series.columns
    assert columns is not None
    check_step(where, series, trained_step)
    horizon = model.horizon
    steps = horizon if steps is None else steps
    if steps > horizon and columns.past:
        raise ValueError(
            f"Beyond the horizon of {horizon} steps, the model reads its own forecast as the past, "
            f"which lacks {', '.join(columns.past)} (--past). Received: steps={steps}. "
            f"Forecast {horizon} steps, or train with these columns as --future."
        )
    ends = [_end(series, i, where) for i in range(len(series.names))]
    left_out = [name for name, end in zip(series.names, ends, strict=True) if end < window]
    if len(left_out) == len(ends):
        raise ValueError(
            f"{where}: a forecast needs {window} rows of the past. Received: {max(ends)}"
        )
    if left_out:
        warnings.warn(
            f"{where}: of {len(ends)} series, those with fewer than {window} rows of the past are "
            f"left out: {first_names(left_out)}",
            stacklevel=3,
        )
    new = [] if trained is None else [name for name in series.names if name not in trained]
    if new and columns.series:
        warnings.warn(
            f"{where}: the model was not trained on the series {first_names(new)}. It forecasts "
            "them with what it learned from others: compare with their last values, or train again "
            "with them.",
            stacklevel=3,
        )
    scale = np.array(model.gap_scale) if model.has_band else None
    found = {}
    try:
        for i, end in enumerate(ends):
            if end >= window:
                if model.has_band:
                    model.gap_scale.assign(scale)
                values, row = _forecast_one(model, series, i, end, window, horizon, steps, where)
                found[i] = _times(series, row, steps), values
    finally:
        if model.has_band:
            model.gap_scale.assign(scale)
    return found


def check_step(where: str, series: TimeSeries, trained_step: str | None) -> None:
    """Raises ValueError if the step of the series is not the one a model was trained on."""
    if None not in (trained_step, series.step) and trained_step != str(series.step):
        raise ValueError(
            f"{where} has steps of {series.step}; the model was trained on steps of {trained_step}."
        )


def _end(series, i, path):
    """Returns the number of rows of a series before its forecast."""
    values = series.values[series.rows(i)]
    has_target = ~np.isnan(values[:, : series.targets]).all(axis=1)
    end = int(np.flatnonzero(has_target)[-1]) + 1 if has_target.any() else 0
    if not series.future_channels and end < len(values):
        warnings.warn(
            f"{_where(series, i, path)}: the last {len(values) - end} rows have no value of "
            f"{', '.join(series.columns.targets)}. The forecast starts after these rows.",
            stacklevel=3,
        )
        end = len(values)
    return end


def _where(series, i, path):
    return f"{path}, series {series.names[i]!r}" if len(series.names) > 1 else str(path)


def _forecast_one(model, series, i, end, window, horizon, steps, path):
    """Returns the forecast of a series after row `end`, and the index of that row in the table."""
    rows, where = series.rows(i), _where(series, i, path)
    values = series.values[rows]
    future = None
    if series.future_channels:
        future = _future(series, rows.start + end, rows.stop, steps, horizon, where)
    recent = values[end - window : end, : series.targets]
    for name, column in zip(series.columns.targets, recent.T, strict=True):
        if horizon > 1 and np.ptp(column[-horizon:]) == 0 < np.ptp(column[~np.isnan(column)]):
            warnings.warn(
                f"{where}: the last {horizon} values of {name!r} are all {column[-1]:g}. If "
                "nothing was measured there, leave them empty: the forecast follows them.",
                stacklevel=4,
            )
    missing = np.isnan(recent).mean(axis=0)
    for name, share in zip(series.columns.targets, missing, strict=True):
        if share == 1:
            warnings.warn(
                f"{where}: none of the last {window} values of {name!r} is known, so its forecast "
                "is left empty. End the table with known values, and forecast more steps.",
                stacklevel=4,
            )
        elif share > _MANY_MISSING:
            warnings.warn(
                f"{where}: of the last {window} values of {name!r}, {share:.0%} are missing, "
                "which makes the forecast less reliable.",
                stacklevel=4,
            )
    _calibrate_on_past(model, series, i, end, window, horizon)
    found = model.forecast(values[end - window : end], steps, future, seed=0)
    found[:, missing == 1] = np.nan
    return found, rows.start + end


def _future(series, start, stop, steps, horizon, where):
    """Returns the future covariates from row `start` on, and checks that they are complete."""
    needed = -(-steps // horizon) * horizon
    names = series.columns.future + series.columns.static
    future = series.values[start : min(start + needed, stop), -series.future_channels :]
    if len(future) < needed:
        raise ValueError(
            f"{where}: a forecast of {steps} steps needs {needed} rows with {', '.join(names)} "
            f"after the last value of {', '.join(series.columns.targets)}. Received: {len(future)}"
        )
    missing = np.argwhere(np.isnan(future))
    if len(missing):
        row, channel = missing[0]
        time = "" if series.times is None else f", at {series.times[start + row]}"
        raise ValueError(
            f"{where}: a forecast needs all values of {names[channel]!r} in its {needed} rows. "
            f"Received: no value in row {row + 1} of them{time}"
        )
    return future


def _calibrate_on_past(model, series, i, end, window, horizon):
    """Calibrates quantiles on forecasts before row `end` of a series, if enough are known."""
    starts = [series.rows(k).start for k in range(len(series.lengths))]
    last = starts[:i] + [starts[i] + end] + starts[i + 1 :]
    count = 2 * window
    if model.has_band and end >= count + window + horizon - 1:
        first = [row if k != i else row - horizon - count + 1 for k, row in enumerate(last)]
        windows = Windows(series, window, horizon, 1, first, last)
        x, y = windows.read(np.arange(len(windows)))
        if not np.isnan(y).all():
            model.calibrate(x, y)


def _times(series, end, steps):
    """Returns the times of the steps after row `end`, or the step numbers from 1."""
    ahead = np.arange(1, steps + 1)
    if series.times is None or series.step is None:
        return ahead
    last = series.times[end - 1]
    if series.step.dtype != np.dtype("m8[M]"):
        return last + ahead * series.step
    is_end = last.astype("datetime64[M]") != last  # the last day of a month
    months = (last + is_end * _DAY).astype("datetime64[M]") + ahead * series.step
    return months.astype(series.times.dtype) - is_end * _DAY


def _written(time, utc):
    return str(time) + "Z" * utc if time.dtype.kind == "M" else int(time)


def output_names(quantiles: Sequence[float] | None) -> list[str]:
    """Returns the output names of a model: `q10`, `q50`, ..., or `forecast` without quantiles."""
    return ["forecast"] if quantiles is None else [f"q{100 * q:g}" for q in quantiles]


def _column_names(targets, quantiles):
    if quantiles is None:
        return list(targets)
    return [f"{name}_{output}" for name in targets for output in output_names(quantiles)]
