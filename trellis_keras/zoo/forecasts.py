"""Forecasts by a run: its report on the test part, a picture, and forecasts of new data."""

import csv
import json
import os
import pathlib
from typing import Any

import keras
import numpy as np

from trellis_keras import data
from trellis_keras.export import export
from trellis_keras.files import atomic_write
from trellis_keras.models import SequenceRegressor, mase_scale
from trellis_keras.training import run as runs
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import read_recipe

REPORT = "report.json"
PICTURE = "forecast.png"
SERVING = "serving"

_DAY = 86_400
_SEASONS = (_DAY, 7 * _DAY)  # seconds
_PANELS = 4  # targets in the picture
_SHOWN = 7  # forecasts in the picture, one after the other


def is_forecaster(recipe: Recipe) -> bool:
    """Returns whether a recipe trains on windows of time series."""
    return recipe.data == "series"


def finish(folder: str | os.PathLike, serve: bool = True) -> dict[str, Any]:
    """Reports on a run's forecasts of the test part, draws them, and exports the best model.

    The run's folder gets `report.json`, `forecast.png`, and on TensorFlow `serving`, a SavedModel.

    Args:
        folder: Folder of a run of a forecaster.
        serve: Boolean, whether to export the model. Defaults to `True`.

    Returns:
        What report.json holds.
    """
    folder = pathlib.Path(folder).expanduser()
    recipe = read_recipe(folder)
    model = runs.load_best(folder)
    loaded = recipe.load_data()
    results = report(model, loaded.train, loaded.test, recipe.training.batch_size)
    with atomic_write(folder / REPORT) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    with atomic_write(folder / PICTURE) as temporary:
        draw(model, loaded.test, temporary)
    if serve and keras.backend.backend() == "tensorflow":
        export(model, folder / SERVING)
    return results


def report(
    model: SequenceRegressor, train: data.Windows, test: data.Windows, batch_size: int = 64
) -> dict[str, Any]:
    """Returns figures of the forecasts of test windows, and of the seasonal naive forecast.

    Args:
        model: `SequenceRegressor` of (horizon, targets).
        train: The windows of the training part, by which the season is chosen.
        test: The windows of the test part.
        batch_size: Positive integer. Defaults to 64.

    Returns:
        A dict of the number of windows, the season in steps, the step, and for each target `mae`,
        `rmse`, `mase`, `naive_mae`, and of a model with quantiles `coverage`.
    """
    count = test.series.targets
    absolute, squared, inside, number = np.zeros((4, count))
    for x, y, weight in data.WindowStream(test, batch_size):
        bands = model.predict_on_batch(x)
        counts = ~np.isnan(y) & (weight[:, None, None] > 0)
        errors = np.where(counts, y - _middle(model, bands), 0.0).astype("float64")
        absolute += np.abs(errors).sum(axis=(0, 1))
        squared += np.square(errors).sum(axis=(0, 1))
        number += counts.sum(axis=(0, 1))
        if model.quantiles is not None:
            within = (bands[..., 0] <= y) & (y <= bands[..., -1])
            inside += (within & counts).sum(axis=(0, 1))
    number = np.where(number, number, np.nan)
    season = choose_season(train)
    scale = np.stack(
        [mase_scale(rows[:, :count], season) for rows in train.rows() if len(rows) > season]
    )
    figures = {
        "mae": absolute / number,
        "rmse": np.sqrt(squared / number),
        "mase": absolute / number / _positive(np.nanmean(scale, axis=0)),
        "naive_mae": test.naive_error(season),
    }
    if model.quantiles is not None and len(model.quantiles) > 1:
        figures["coverage"] = inside / number
    results = {
        "test_windows": len(test),
        "season": season,
        "step": None if test.series.step is None else str(test.series.step),
        "quantiles": model.quantiles,
        "targets": {
            name: {key: _number(values[i]) for key, values in figures.items()}
            for i, name in enumerate(target_names(test.series))
        },
    }
    return json.loads(json.dumps(results))


def choose_season(train: data.Windows) -> int:
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
    for name, figures in results["targets"].items():
        line = (
            f"{name}: mean absolute error {_shown(figures['mae'])} on the test part, that of the "
            f"seasonal naive forecast ({results['season']} steps) {_shown(figures['naive_mae'])}"
        )
        if "coverage" in figures:
            low, high = results["quantiles"][0], results["quantiles"][-1]
            line += f"; {figures['coverage']:.1%} of the values in the {low:.0%} to {high:.0%} band"
        lines.append(line)
    return "\n".join(lines)


def draw(model: SequenceRegressor, test: data.Windows, path: str | os.PathLike) -> None:
    """Draws the last forecasts of the test part, one after the other, with their bands.

    Args:
        model: `SequenceRegressor` of (horizon, targets).
        test: `Windows`.
        path: The PNG file to write.
    """
    series, horizon = test.series, test.horizon
    apart = -(-horizon // test.stride)
    last = len(test) - 1
    shown = np.arange(last, max(last - _SHOWN * apart, -1), -apart)[::-1]
    starts = test.starts(shown)
    # Of several series the last one alone.
    shown = shown[starts >= series.rows(len(series.lengths) - 1).start]
    x, y = test.read(shown)
    rows = test.starts(shown)[:, None] + test.window + np.arange(horizon)
    bands = model.predict_on_batch(x)
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
            if model.quantiles is not None and len(model.quantiles) > 1:
                band = f"{model.quantiles[0]:.0%} to {model.quantiles[-1]:.0%}"
                label = {"label": band} if not k else {}
                low, high = bands[k, :, i, 0], bands[k, :, i, -1]
                panel.fill_between(axis[k], low, high, color="tab:blue", alpha=0.2, lw=0, **label)
            panel.axvline(axis[k, 0], color="0.85", lw=0.8, zorder=0)
        panel.set_ylabel(name)
        panel.spines[["top", "right"]].set_visible(False)
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
) -> int:
    """Writes the forecast of what follows a CSV file, in the units of the data.

    The file has the columns that the run was trained on, in any order. Of a model with covariates
    that are known in the future, the rows after the last value of a target hold these covariates.

    Args:
        folder: Folder of a run of a forecaster.
        path: CSV file, with at least `window` rows of each series.
        output: CSV file to write.
        steps: Positive integer. Defaults to `None`, the model's horizon.

    Returns:
        The number of rows written.

    Raises:
        ValueError: If the run is not one of a forecaster, or the file does not fit it.
        OSError: If a file cannot be read or written.
    """
    recipe = read_recipe(folder)
    if not is_forecaster(recipe):
        raise ValueError(f"{folder} is a run of {recipe.name}, which does not forecast series.")
    model = runs.load_best(folder, compile=False)
    roles = ("targets", "past", "future", "static", "time", "series")
    options = recipe.data_options
    columns = data.Columns(**{name: options[name] for name in roles if name in options})
    series = data.TimeSeries.from_csv(path, columns)
    _check_step(folder, path, series)
    horizon, window = recipe.arguments["horizon"], recipe.arguments["window"]
    steps = horizon if steps is None else steps
    rows = []
    for i, name in enumerate(series.names):
        found, end = _forecast_one(model, series, i, window, horizon, steps, path)
        label = [name] if columns.series else []
        for k, values in enumerate(found):
            rows.append([*label, _time(series, end, k), *(f"{v:.7g}" for v in values.ravel())])
    header = [columns.series] if columns.series else []
    header += [columns.time or "step", *_output_names(columns.targets, model.quantiles)]
    with atomic_write(output) as temporary, open(temporary, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return len(rows)


def target_names(series: data.TimeSeries) -> list[str]:
    """Returns the names of the targets."""
    if series.columns is None:
        return [f"target {i}" for i in range(series.targets)]
    return list(series.columns.targets)


def _forecast_one(model, series, i, window, horizon, steps, path):
    """Returns the forecast of a series, and the row where it starts."""
    rows = series.rows(i)
    values = series.values[rows]
    end = len(values)
    known = series.future_channels
    if known:
        has_target = ~np.isnan(values[:, : series.targets]).all(axis=1)
        end = int(np.flatnonzero(has_target)[-1]) + 1 if has_target.any() else 0
    where = f"{path}, series {series.names[i]!r}" if len(series.names) > 1 else str(path)
    if end < window:
        raise ValueError(f"{where}: a forecast needs {window} rows of the past. Received: {end}")
    needed = -(-steps // horizon) * horizon
    future = values[end : end + needed, len(values[0]) - known :] if known else None
    if future is not None and len(future) < needed:
        names = ", ".join(series.columns.future + series.columns.static)
        raise ValueError(
            f"{where}: a forecast of {steps} steps needs {needed} rows with {names} after the last "
            f"value of {', '.join(series.columns.targets)}. Received: {len(future)}"
        )
    found = model.forecast(values[end - window : end], steps, future)
    return found, rows.start + end


def _time(series, end, k):
    """The time of step `k` of a forecast that starts at row `end`."""
    if series.times is None or series.step is None:
        return k + 1
    unit = "datetime64[M]" if series.step.dtype == np.dtype("m8[M]") else series.times.dtype
    moment = series.times[end - 1].astype(unit) + (k + 1) * series.step
    return str(moment.astype(series.times.dtype))


def _output_names(targets, quantiles):
    if quantiles is None:
        return list(targets)
    return [f"{name}_q{100 * q:g}" for name in targets for q in quantiles]


def _check_step(folder, path, series):
    report_path = pathlib.Path(folder).expanduser() / REPORT
    if series.step is None or not report_path.is_file():
        return
    step = json.loads(report_path.read_text(encoding="utf-8")).get("step")
    if step is not None and step != str(series.step):
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
