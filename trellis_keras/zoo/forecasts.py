"""Forecasts by a run: its report on the test part, a picture, and forecasts of new data."""

import csv
import json
import os
import pathlib
import warnings
from typing import Any

import keras
import numpy as np

from trellis_keras.export import export
from trellis_keras.files import atomic_write, check_output, read_json
from trellis_keras.forecasting import Columns, Forecaster, TimeSeries, Windows, mase_scale
from trellis_keras.forecasting.calibration import conformal_scale, rescale
from trellis_keras.forecasting.series import FIRST_NAMES, first_names
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.pretrained import checksum
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import read_recipe

REPORT = "report.json"
PICTURE = "forecast.png"
SERVING = "serving"

_DAY = 86_400
_SEASONS = (_DAY, 7 * _DAY)  # seconds
_PANELS = 4  # targets in the picture
_SHOWN = 7  # forecasts in the picture, one after the other
_BLOCK = 64  # horizons that a report predicts at once
_MANY_MISSING = 0.5  # of the targets that a forecast reads
_MOST_SERIES = 1000  # with figures of their own in a report


def is_forecaster(recipe: Recipe) -> bool:
    """Returns whether a recipe trains on windows of time series."""
    return recipe.data == "series"


def describe_series(recipe: Recipe) -> dict[str, Any] | None:
    """Returns what a served model of time series reads and returns, `None` for other models.

    A dict with the columns of the inputs, `inputs`, in the order of the channels; the `window` that
    the model was trained on; for a forecaster also `targets`, `future` (inputs that lie `horizon`
    steps ahead of the others), `horizon` and `quantiles`.
    """
    options, arguments = recipe.data_options, recipe.arguments
    if recipe.data == "labelled_series":
        return {"inputs": list(options["past"]), "window": arguments["window"]}
    if not is_forecaster(recipe):
        return None
    columns = _columns(recipe)
    return {
        "inputs": list(columns.values),
        "future": [*columns.future, *columns.static],
        "targets": list(columns.targets),
        **{name: arguments[name] for name in ("window", "horizon", "quantiles")},
    }


def _columns(recipe):
    roles = ("targets", "past", "future", "static", "time", "series")
    options = recipe.data_options
    return Columns(**{name: options[name] for name in roles if name in options})


def finish(folder: str | os.PathLike, serve: bool = True) -> dict[str, Any]:
    """Reports on a run's forecasts of the test part, draws them, and exports the best model.

    The quantiles of the best model are calibrated on the end of the validation part. The run's
    folder gets `report.json`, `forecast.png`, and on TensorFlow `serving`, a SavedModel. If they
    are there and the best model is still the same, nothing is done.

    Args:
        folder: Folder of a run of a forecaster.
        serve: Boolean, whether to export the model. Defaults to `True`.

    Returns:
        What report.json holds.
    """
    folder = pathlib.Path(folder).expanduser()
    serve = serve and keras.backend.backend() == "tensorflow"
    written = _read_report(folder)
    if written and (not serve or (folder / SERVING).is_dir()):
        if written.get("model_sha256") == checksum(runs.best_path(folder)):
            return written
    recipe = read_recipe(folder)
    model = runs.load_best(folder, Forecaster)
    recipe.compile(model)
    loaded = recipe.load_data()
    if model.has_band:
        recent = [_recent(loaded.valid, i) for i in range(len(loaded.valid.series.lengths))]
        model.calibrate(*loaded.valid.read(np.concatenate(recent)))
        with atomic_write(folder / runs.BEST) as temporary:
            model.save(temporary)
    batch_size = recipe.training.batch_size
    results = report(model, loaded.train, loaded.valid, loaded.test, batch_size)
    results["model_sha256"] = checksum(folder / runs.BEST)
    try:
        with atomic_write(folder / PICTURE) as temporary:
            draw(model, loaded.test, temporary)
    except Exception as error:  # the report and the model are worth more than a picture
        warnings.warn(f"{folder / PICTURE} could not be drawn: {error!r}", stacklevel=2)
    if serve:
        export(model, folder / SERVING, series=describe_series(recipe))
    with atomic_write(folder / REPORT) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def _read_report(folder):
    path = folder / REPORT
    return read_json(path, "a report") if path.exists() else {}


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
        `rmse`, `mase`, `naive_mae`, and of a model with quantiles `coverage`. All of them are over
        the same `values`: those that the naive forecast has a forecast of. Of several series, up
        to 1,000, `series` has these figures of each, all but `mase`. `left_out` has the number of
        series without a window of a part, and their first names.
    """
    count, names = test.series.targets, target_names(test.series)
    season = choose_season(train)
    sums = np.zeros((len(test.series.lengths), 5, count))
    for i, index, bands, y in _walk(model, valid, test, batch_size):
        naive = test.naive_forecast(index, season)
        counts = ~np.isnan(y - naive)
        errors = np.where(counts, y - _middle(model, bands), 0.0).astype("float64")
        naive_errors = np.where(counts, y - naive, 0.0).astype("float64")
        inside = counts & (bands[..., 0] <= y) & (y <= bands[..., -1]) if model.has_band else counts
        parts = (counts, np.abs(errors), np.square(errors), np.abs(naive_errors), inside)
        sums[i] += [part.sum(axis=(0, 1)) for part in parts]
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
    number, absolute, squared, naive, inside = sums
    shared = _positive(number)
    figures = {
        "values": number,
        "mae": absolute / shared,
        "rmse": np.sqrt(squared / shared),
        "naive_mae": naive / shared,
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


# Calibration on the recent past


def _walk(model, valid, test, batch_size):
    """Yields series, windows, outputs and targets, calibrated on the windows before them."""
    ahead = _ahead(test)
    for i in range(len(test.series.lengths)):
        outputs, y = _outputs(model, valid, _recent(valid, i), batch_size)
        index = np.array(test.of_series(i), int)
        for rows in np.split(index, range(_BLOCK * ahead, len(index), _BLOCK * ahead)):
            old = len(y)
            new, new_y = _outputs(model, test, rows, batch_size)
            outputs, y = np.concatenate([outputs, new]), np.concatenate([y, new_y])
            for first in range(old, len(y), ahead):
                known = slice(0, first - ahead + 1)
                block = slice(first, first + ahead)
                found = _calibrated(model, outputs[block], outputs[known], y[known], test)
                yield i, rows[first - old :][:ahead], found, y[block]
            kept = -_recent_count(test) - ahead
            outputs, y = outputs[kept:], y[kept:]


def _calibrated(model, outputs, known, known_y, windows):
    """Outputs whose quantiles are calibrated on the last of the known ones."""
    count = _recent_count(windows)
    if not model.has_band or not len(known_y):
        return outputs
    scale = conformal_scale(known[-count:], known_y[-count:], model.quantiles)
    return rescale(outputs, scale, model.quantiles)


def _outputs(model, windows, index, batch_size=64):
    """Outputs and targets of some windows."""
    x, y = windows.read(np.asarray(index, int))
    if not len(x):
        return np.zeros(model.compute_output_shape(x.shape)), y
    return model.predict(x, batch_size=batch_size, verbose=0), y


def _recent_count(windows):
    """How many windows a calibration reads: those that start in two windows of rows."""
    return -(-2 * windows.window // windows.stride)


def _recent(windows, i):
    """The last windows of series `i`, on which what comes after is calibrated."""
    own = np.array(windows.of_series(i), int)
    return own[max(len(own) - _recent_count(windows), 0) :]


def _ahead(windows):
    """Number of windows from one to the first that starts behind its targets."""
    return -(-windows.horizon // windows.stride)


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


def describe(results: dict[str, Any]) -> str:
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


def draw(model: Forecaster, test: Windows, path: str | os.PathLike) -> None:
    """Draws the last forecasts of the test part, one after the other, with their bands.

    Args:
        model: `Forecaster`.
        test: `Windows`.
        path: The PNG file to write.
    """
    series, horizon = test.series, test.horizon
    apart = _ahead(test)
    # Of several series the last one that has any.
    numbers = range(len(series.lengths) - 1, -1, -1)
    number = next(i for i in numbers if len(test.of_series(i)))
    own = test.of_series(number)
    shown = own[::-apart][:_SHOWN][::-1]
    known = own[: max(own.index(shown[0]) - apart + 1, 0)][-_recent_count(test) :]
    bands, y = _outputs(model, test, shown)
    known_bands, known_y = _outputs(model, test, known)
    bands = _calibrated(model, bands, known_bands, known_y, test)
    rows = test.starts(np.array(shown))[:, None] + test.window + np.arange(horizon)
    middle = _middle(model, bands)
    names = target_names(series)[:_PANELS]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 + 2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    axis = rows if series.times is None else series.times[rows]
    before = np.arange(max(int(rows[0, 0]) - 2 * horizon, 0), int(rows[0, 0]) + 1)
    for i, (panel, name) in enumerate(zip(panels, names, strict=True)):
        past = before if series.times is None else series.times[before]
        panel.plot(past, series.values[before, i], color="0.2", lw=1)
        for k in range(len(rows)):
            label = {"label": "measured"} if not k else {}
            panel.plot(axis[k], y[k, :, i], color="0.2", lw=1, **label)
            label = {"label": "forecast"} if not k else {}
            panel.plot(axis[k], middle[k, :, i], color="tab:blue", lw=1.4, **label)
            if model.quantiles is not None and model.has_band:
                band = f"{model.quantiles[0]:.0%} to {model.quantiles[-1]:.0%}"
                label = {"label": band} if not k else {}
                low, high = bands[k, :, i, 0], bands[k, :, i, -1]
                panel.fill_between(axis[k], low, high, color="tab:blue", alpha=0.2, lw=0, **label)
            panel.axvline(axis[k, 0], color="0.85", lw=0.8, zorder=0)
        panel.set_ylabel(name, parse_math=False)
        panel.spines[["top", "right"]].set_visible(False)
    if len(series.names) > 1:
        title = {"loc": "left", "fontsize": "medium", "parse_math": False}
        panels[0].set_title(f"series {series.names[number]}", **title)
    panels[0].legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    panels[-1].set_xlabel("step" if series.times is None else "time")
    if series.times is not None and series.times.dtype.kind == "M":
        figure.autofmt_xdate()
    figure.savefig(path, dpi=120, format="png")


def forecast(
    folder: str | os.PathLike,
    path: str | os.PathLike,
    output: str | os.PathLike,
    steps: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the forecast of what follows a CSV file, in the units of the data.

    The file has the columns that the run was trained on, in any order. The forecast starts after
    its last row; of a model with covariates that are known in the future, after the last value of a
    target, and the rows from there on hold these covariates. Times with an offset from UTC are
    written in UTC.

    Args:
        folder: Folder of a run of a forecaster.
        path: CSV file. Series with fewer than `window` rows are left out, and a warning names them.
        output: CSV file to write.
        steps: Positive integer. Defaults to `None`, the model's horizon.
        overwrite: Boolean, whether to replace an output that exists. Defaults to `False`.

    Returns:
        A dict of `rows`, the number of rows written, `first` and `last`, their times or steps, and
        `left_out`, the number of series that are too short.

    Raises:
        ValueError: If the run is not one of a forecaster, the file does not fit it, all its series
            are too short, or a covariate that is known in the future is missing there.
        OSError: If a file cannot be read or written.
    """
    output = check_output(output, [path], overwrite)
    recipe = read_recipe(folder)
    if not is_forecaster(recipe):
        raise ValueError(f"{folder} is a run of {recipe.name}, which does not forecast series.")
    model = runs.load_best(folder, Forecaster)
    columns = _columns(recipe)
    series = TimeSeries.from_csv(path, columns)
    _check_step(folder, path, series)
    horizon, window = recipe.arguments["horizon"], recipe.arguments["window"]
    steps = horizon if steps is None else steps
    if steps > horizon and columns.past:
        raise ValueError(
            f"Beyond the horizon of {horizon} steps the model reads its own forecast as the past, "
            f"which has no values of {', '.join(columns.past)} (--past). Received: steps={steps}. "
            f"Forecast {horizon} steps, or train with these columns as --future."
        )
    rows, moments = [], []
    ends = [_end(series, i, path) for i in range(len(series.names))]
    left_out = [name for name, end in zip(series.names, ends, strict=True) if end < window]
    if len(left_out) == len(ends):
        raise ValueError(
            f"{path}: a forecast needs {window} rows of the past. Received: {max(ends)}"
        )
    if left_out:
        warnings.warn(
            f"{path}: of {len(ends)} series, those with fewer than {window} rows of the past are "
            f"left out: {first_names(left_out)}",
            stacklevel=2,
        )
    scale = np.array(model.gap_scale) if model.has_band else None
    for i, name in enumerate(series.names):
        if ends[i] < window:
            continue
        if model.has_band:
            model.gap_scale.assign(scale)
        found, end = _forecast_one(model, series, i, ends[i], window, horizon, steps, path)
        label = [name] if columns.series else []
        for k, values in enumerate(found):
            moments.append(_time(series, end, k))
            rows.append([*label, moments[-1], *(f"{v:.7g}" for v in values.ravel())])
    header = [columns.series] if columns.series else []
    header += [columns.time or "step", *_output_names(columns.targets, model.quantiles)]
    with atomic_write(output) as temporary, open(temporary, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    spans = {"first": min(moments), "last": max(moments)}
    return {"rows": len(rows), **spans, "left_out": len(left_out)}


def target_names(series: TimeSeries) -> list[str]:
    """Returns the names of the targets."""
    if series.columns is None:
        return [f"target {i}" for i in range(series.targets)]
    return list(series.columns.targets)


def _end(series, i, path):
    """Returns how many rows of a series are before its forecast."""
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
    """Returns the forecast of a series after its row `end`, and the row of the table there."""
    rows, where = series.rows(i), _where(series, i, path)
    values = series.values[rows]
    future = None
    if series.future_channels:
        future = _future(series, rows.start + end, rows.stop, steps, horizon, where)
    missing = np.isnan(values[end - window : end, : series.targets]).mean(axis=0)
    for name, share in zip(series.columns.targets, missing, strict=True):
        if share > _MANY_MISSING:
            warnings.warn(
                f"{where}: of the last {window} values of {name!r}, {share:.0%} are missing. The "
                "model reads the mean in their place.",
                stacklevel=3,
            )
    _calibrate_on_past(model, series, i, end, window, horizon)
    found = model.forecast(values[end - window : end], steps, future, seed=0)
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
    """Calibrates quantiles on the forecasts before row `end` of a series, if they are enough."""
    starts = [series.rows(k).start for k in range(len(series.lengths))]
    last = starts[:i] + [starts[i] + end] + starts[i + 1 :]
    count = 2 * window
    if model.has_band and end >= count + window + horizon - 1:
        first = [row if k != i else row - horizon - count + 1 for k, row in enumerate(last)]
        windows = Windows(series, window, horizon, 1, first, last)
        model.calibrate(*windows.read(np.arange(len(windows))))


def _time(series, end, k):
    """The time of step `k` of a forecast that starts at row `end`."""
    if series.times is None or series.step is None:
        return k + 1
    if series.times.dtype.kind != "M":
        return int(series.times[end - 1] + (k + 1) * series.step)
    unit = "datetime64[M]" if series.step.dtype == np.dtype("m8[M]") else series.times.dtype
    moment = series.times[end - 1].astype(unit) + (k + 1) * series.step
    return str(moment.astype(series.times.dtype)) + ("Z" if series.utc else "")


def _output_names(targets, quantiles):
    if quantiles is None:
        return list(targets)
    return [f"{name}_q{100 * q:g}" for name in targets for q in quantiles]


def _check_step(folder, path, series):
    step = _read_report(pathlib.Path(folder).expanduser()).get("step")
    if None not in (step, series.step) and step != str(series.step):
        raise ValueError(
            f"{path} has steps of {series.step}; the model was trained on steps of {step}."
        )


def _middle(model, bands):
    return bands if model.middle is None else bands[..., model.middle]


def _positive(values):
    return np.where(values > 0, values, np.nan)


def _number(value):
    """A float that JSON has, or None."""
    return float(value) if np.isfinite(value) else None


def _shown(value):
    return "-" if value is None else f"{value:.4g}"
