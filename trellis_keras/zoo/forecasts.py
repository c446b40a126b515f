"""Reports, pictures, forecasts and backtests of a trained run."""

import json
import os
import pathlib
import warnings
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv

from keras_streams.files import atomic_write
from trellis_keras.data.text import check_shares
from trellis_keras.export import export
from trellis_keras.files import read_json
from trellis_keras.forecasting import Columns, Forecaster, TimeSeries, Windows
from trellis_keras.forecasting.backtest import all_scores
from trellis_keras.forecasting.backtest import backtest as backtest_windows
from trellis_keras.forecasting.estimator import settle, train_forecaster
from trellis_keras.forecasting.picture import draw, draw_backtest
from trellis_keras.forecasting.report import report
from trellis_keras.forecasting.series import DEFAULT_SPLIT
from trellis_keras.forecasting.table import check_step, forecast_table
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
    """Returns the inputs and outputs of a served time series model, `None` for other models.

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

    The quantiles of the best model are calibrated on the end of the validation part. Writes
    `report.json`, `forecast.png` and, on TensorFlow, the SavedModel `serving` to the run's folder.
    Does nothing if they exist and the best model has not changed.

    Args:
        folder: Folder of a run of a forecaster.
        serve: Boolean, whether to export the model. Defaults to `True`.

    Returns:
        The contents of `report.json`.
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
    batch_size = recipe.training.batch_size
    share = settle(model, loaded.valid, batch_size)
    with atomic_write(folder / runs.BEST) as temporary:
        model.save(temporary)
    results = report(model, loaded.train, loaded.valid, loaded.test, batch_size)
    if share is not None:
        results["net_share"] = share
    results["model_sha256"] = checksum(folder / runs.BEST)
    try:
        with atomic_write(folder / PICTURE) as temporary:
            draw(model, loaded.test, temporary)
    except Exception as error:  # a failed plot must not lose the report
        warnings.warn(f"{folder / PICTURE} could not be drawn: {error!r}", stacklevel=2)
    if serve:
        export(model, folder / SERVING, series=describe_series(recipe))
    with atomic_write(folder / REPORT) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def _read_report(folder):
    path = folder / REPORT
    written = read_json(path, "a report") if path.exists() else {}
    for name, kind in (("names", list), ("test_start", str)):
        if not isinstance(written.get(name), (kind, type(None))):
            raise ValueError(f"{path} is not a report, or damaged. Received: {written[name]!r}")
    return written


def forecast(
    folder: str | os.PathLike,
    path: str | os.PathLike,
    output: str | os.PathLike,
    steps: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Forecasts the steps that follow a CSV file, in the units of the data.

    The file must have the columns that the run was trained on, in any order. The forecast starts
    after its last row. For a model with covariates known in the future, it starts after the last
    value of a target, and the rows that follow must have these covariates. Times with an offset
    from UTC are written in UTC.

    Args:
        folder: Folder of a run of a forecaster.
        path: CSV file. Series with fewer than `window` rows are skipped, and a warning names them.
        output: CSV file to write.
        steps: Positive integer. Defaults to `None`, the model's horizon.
        overwrite: Boolean, whether to replace an existing output. Defaults to `False`.

    Returns:
        A dict of `rows`, the number of rows written, `first` and `last`, their times or steps, and
        `left_out`, the number of skipped series.

    Raises:
        ValueError: If the run is not a forecaster, the file does not match it, all its series are
            too short, or a future value of a covariate is missing.
        OSError: If a file cannot be read or written.
    """
    output = runs.check_output(output, [path], overwrite)
    recipe, model, written = _read(folder)
    return forecast_table(
        model,
        path,
        output,
        _columns(recipe),
        recipe.arguments["window"],
        steps=steps,
        trained_step=written.get("step"),
        trained=written.get("names"),
        overwrite=overwrite,
    )


def _read(folder):
    """Returns the recipe, the best model and the report of a forecaster's run."""
    recipe = read_recipe(folder)
    if not is_forecaster(recipe):
        raise ValueError(f"{folder} is a run of {recipe.name}, which does not forecast series.")
    model = runs.load_best(folder, Forecaster)
    return recipe, model, _read_report(pathlib.Path(folder).expanduser())


def backtest(
    folder: str | os.PathLike,
    path: str | os.PathLike,
    output: str | os.PathLike,
    origins: int = 20,
    every: int | None = None,
    overwrite: bool = False,
    verbose: int = 0,
) -> pa.Table:
    """Forecasts the rows of a CSV file from origins in the past: see `forecasting.backtest`.

    Origins are in rows that the run used neither for training nor for validation: from the start of
    its test part on or, for data without times, in the test part of the file. Next to the output
    are a picture of the errors by step ahead, with the suffix `.png`, and all scores by target,
    step and series, with the suffix `_scores.csv`.

    Args:
        folder: Folder of a run of a forecaster.
        path: CSV file with the columns that the run was trained on.
        output: CSV or Parquet file to write.
        origins: Positive integer, number of origins. Defaults to 20.
        every: Positive integer, number of origins after which the model is retrained with the run's
            recipe on all data known by then. Defaults to `None`, never.
        overwrite: Boolean, whether to replace existing outputs. Defaults to `False`.
        verbose: 1 shows a progress bar on the standard error stream. Defaults to 0.

    Returns:
        The table that `forecasting.backtest` returns.

    Raises:
        ValueError: If the run is not a forecaster, or the file does not match it or has no rows
            after the training and validation parts.
        OSError: If a file cannot be read or written.
    """
    output = runs.check_output(output, [path], overwrite)
    picture = runs.check_output(output.with_suffix(".png"), [path], overwrite)
    scores = output.with_name(f"{output.stem}_scores.csv")
    scores = runs.check_output(scores, [path], overwrite)
    recipe, model, written = _read(folder)
    series = TimeSeries.from_csv(path, _columns(recipe))
    check_step(str(path), series, written.get("step"))
    test = _unseen(recipe, series, written.get("test_start"), path)
    shares = check_shares("split", recipe.data_options.get("split", DEFAULT_SPLIT))

    def refit(before):
        return train_model(recipe, *before.cut(shares[0] / (shares[0] + shares[1])))

    rows = backtest_windows(
        model,
        test,
        origins,
        refit=None if every is None else refit,
        every=every or 1,
        output=output,
        overwrite=overwrite,
        verbose=verbose,
    )
    with atomic_write(picture) as temporary:
        draw_backtest(rows, temporary)
    with atomic_write(scores) as temporary:
        pa.csv.write_csv(all_scores(rows), temporary)
    return rows


def train_model(recipe: Recipe, train: Windows, valid: Windows) -> Forecaster:
    """Returns a model trained with a recipe, in memory, without a run or a report.

    Args:
        recipe: `Recipe` of a forecaster.
        train, valid: `Windows`.
    """
    model, training, callbacks = recipe.build(), recipe.training, recipe.callbacks()
    for callback in callbacks:
        callback.verbose = 0
    train_forecaster(
        model,
        train,
        valid,
        epochs=training.epochs,
        batch_size=training.batch_size,
        callbacks=callbacks,
        seed=recipe.seed or 0,
    )
    return model


def _unseen(recipe, series, start, path):
    """Returns the windows of rows used neither for training nor for validation."""
    window, horizon = recipe.arguments["window"], recipe.arguments["horizon"]
    if start is None or series.times is None:
        shares = recipe.data_options.get("split", DEFAULT_SPLIT)
        return series.split(window, horizon, shares=shares)[2]
    moment = np.array(start, series.times.dtype)
    slices = [series.rows(i) for i in range(len(series.lengths))]
    first = [r.start + int(np.searchsorted(series.times[r], moment)) for r in slices]
    test = Windows(series, window, horizon, 1, first, [r.stop for r in slices])
    if not len(test):
        raise ValueError(
            f"{path} has no {horizon} rows from {start} on, the start of the run's test part. The "
            f"run was trained on the rows before it. Received: rows up to {series.times.max()}"
        )
    return test
