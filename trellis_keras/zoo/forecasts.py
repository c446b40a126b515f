"""Forecasts by a run: its report on the test part, a picture, and forecasts of new data."""

import json
import os
import pathlib
import warnings
from typing import Any

import keras
import numpy as np

from trellis_keras.export import export
from trellis_keras.files import atomic_write, read_json
from trellis_keras.forecasting import Columns, Forecaster
from trellis_keras.forecasting.calibration import recent_windows
from trellis_keras.forecasting.picture import draw
from trellis_keras.forecasting.report import report
from trellis_keras.forecasting.table import forecast_table
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.pretrained import checksum
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import read_recipe

REPORT = "report.json"
PICTURE = "forecast.png"
SERVING = "serving"


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
    share = None
    if model.linear is not None:
        share = model.weigh_net(recipe.stream(loaded.valid))
        _save(model, folder)
    if model.has_band:
        recent = [recent_windows(loaded.valid, i) for i in range(len(loaded.valid.series.lengths))]
        model.calibrate(*loaded.valid.read(np.concatenate(recent)))
        _save(model, folder)
    batch_size = recipe.training.batch_size
    results = report(model, loaded.train, loaded.valid, loaded.test, batch_size)
    if share is not None:
        results["net_share"] = share
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


def _save(model, folder):
    with atomic_write(folder / runs.BEST) as temporary:
        model.save(temporary)


def _read_report(folder):
    path = folder / REPORT
    return read_json(path, "a report") if path.exists() else {}


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
    output = runs.check_output(output, [path], overwrite)
    recipe = read_recipe(folder)
    if not is_forecaster(recipe):
        raise ValueError(f"{folder} is a run of {recipe.name}, which does not forecast series.")
    model = runs.load_best(folder, Forecaster)
    return forecast_table(
        model,
        path,
        output,
        _columns(recipe),
        recipe.arguments["window"],
        steps=steps,
        trained_step=_read_report(pathlib.Path(folder).expanduser()).get("step"),
        overwrite=overwrite,
    )
