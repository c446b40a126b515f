"""Forecasts a table in two calls.

fitted = forecasting.fit("load.csv", horizon=24, targets="load", time="time")
forecast = fitted.predict("load.csv")
"""

import json
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pyarrow as pa

from trellis_keras.data.streams import EpochOrder, check_integer
from trellis_keras.data.text import Shares, check_shares
from trellis_keras.files import atomic_folder, read_json
from trellis_keras.forecasting.calibration import recent_windows
from trellis_keras.forecasting.columns import Columns
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.linear import shortest_season
from trellis_keras.forecasting.losses import check_quantiles
from trellis_keras.forecasting.report import describe_report
from trellis_keras.forecasting.report import report as make_report
from trellis_keras.forecasting.series import DEFAULT_SPLIT, TimeSeries, Windows, WindowStream
from trellis_keras.forecasting.table import forecast_series, output_names
from trellis_keras.layers import TCN
from trellis_keras.models.saved_files import load_model
from trellis_keras.training import Adam, EarlyStopping, StopOnNaN

_MODEL, _ABOUT = "model.keras", "forecaster.json"
_SEASONS = 3  # per window
_LONGEST = 336  # rows in a window, and largest lag tried as a season
_SHORTEST = 16
_ROWS_OF_A_LAG = 30  # training rows per lag of a window
_MOST_SERIES, _MOST_ROWS = 20, 10_000  # used to find a season
# Default training of nets, here and in the zoo. The learning rate decays by `decay_factor` after
# `decay_window` epochs without a better validation loss; training stops after `stop_patience`.
TRAINING: dict[str, Any] = {
    "learning_rate": 2e-3,
    "clip_norm": 1.0,
    "batch_size": 64,
    "epochs": 30,
    "decay_factor": 0.3,
    "decay_window": 2,
    "stop_patience": 5,
}
QUANTILES = (0.1, 0.5, 0.9)


def fit(
    data: Any,
    horizon: int,
    targets: str | Sequence[str],
    *,
    past: Sequence[str] = (),
    future: Sequence[str] = (),
    static: Sequence[str] = (),
    time: str | None = None,
    series: str | None = None,
    window: int | None = None,
    quantiles: Sequence[float] | None = QUANTILES,
    backbone: keras.Layer | None = None,
    scale: str | None = None,
    epochs: int = TRAINING["epochs"],
    shares: Shares = DEFAULT_SPLIT,
    seed: int = 0,
    verbose: int = 0,
) -> "FittedForecaster":
    """Fits a forecaster to a table: a linear map, and a network on its residuals.

    The series are split by time. The network is trained on the training part until the validation
    loss stops falling. The validation part also determines how much of the network is used and how
    wide the bands are. The report compares the forecasts of the test part with simple baselines.

    Args:
        data: Path of a CSV file, a pandas or polars data frame, an Arrow table, or a dict of
            arrays, with rows sorted by series and time.
        horizon: Positive integer, number of steps to forecast.
        targets, past, future, static, time, series: Names of columns, see `Columns`.
        window: Integer, at least `horizon`, number of rows that a forecast reads. Defaults to
            `None`: three seasons, which are detected in the data, more for long series, and fewer
            for short ones.
        quantiles: Increasing floats between 0 and 1, or `None` for one value per step. Defaults to
            `(0.1, 0.5, 0.9)`.
        backbone: The network, as in `Forecaster`, which must support streaming. Defaults to `None`,
            a TCN with 32 filters whose receptive field is the window.
        scale: As in `Forecaster`. Defaults to `None`: `"window"` for several series, otherwise
            `"data"`.
        epochs: Integer, maximum number of epochs; 0 fits the linear map alone. Defaults to 30.
        shares: As in `TimeSeries.split`. Defaults to `(0.7, 0.15, 0.15)`.
        seed: Integer seed of the weights and the order of windows. Defaults to 0.
        verbose: As in `keras.Model.fit`. Defaults to 0.

    Returns:
        A `FittedForecaster`.

    Raises:
        ValueError: If the table is not as described, or the series are too short.
        OSError: If the file cannot be read.

    Example:

    >>> load = 100 + np.sin(np.arange(200) * np.pi / 6)
    >>> fitted = trellis_keras.forecasting.fit({"load": load}, 6, "load", epochs=0)
    >>> fitted.window
    36
    >>> forecast = fitted.predict({"load": load[:180]})
    >>> bool(np.allclose(forecast["q50"], load[180:186], atol=0.05))
    True
    """
    columns = Columns(targets, past, future, static, time, series)
    horizon = check_integer("horizon", horizon, 1)
    shares = check_shares("shares", shares)
    quantiles = None if quantiles is None else check_quantiles(quantiles)
    own = {"target", *output_names(quantiles)}
    taken = own & {columns.time or "", columns.series or ""}
    if taken:
        raise ValueError(
            "The time and series columns keep their names in the forecast, which has columns of "
            f"its own with the same names. Rename them. Received: {', '.join(sorted(taken))}"
        )
    table = _read(data, columns)
    if window is None:
        window = choose_window(table, horizon, shares[0])
    train, valid, test = table.split(window, horizon, shares=shares)
    if backbone is None:
        dilations = dilations_within(window, kernel_size=3, convolutions=2)
        backbone = TCN(32, 3, dilations=dilations, return_sequences=False, seed=seed)
    model = Forecaster(
        backbone,
        horizon,
        table.targets,
        quantiles=quantiles,
        future_channels=table.future_channels,
        normalize=True,
        linear_window=window,
        scale=scale or default_scale(table),
        seed=seed,
    )
    model.build((None, window, table.values.shape[1]))
    model.compile(Adam(TRAINING["learning_rate"], clip_norm=TRAINING["clip_norm"]))
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(
            factor=TRAINING["decay_factor"], patience=TRAINING["decay_window"], min_delta=0
        ),
        EarlyStopping(patience=TRAINING["stop_patience"]),
    ]
    share = train_forecaster(
        model, train, valid, epochs=epochs, callbacks=callbacks, seed=seed, verbose=verbose
    )
    results = make_report(model, train, valid, test)
    results["net_share"] = share
    return FittedForecaster(model, columns, window, results)


def _read(data, columns):
    if isinstance(data, (str, os.PathLike)):
        return TimeSeries.from_csv(data, columns)
    return TimeSeries.from_frame(data, columns)


def default_scale(table: TimeSeries) -> str:
    """Returns `"window"` for several series, which may differ in level and size, or `"data"`."""
    return "window" if len(table.lengths) > 1 else "data"


def choose_window(table: TimeSeries, horizon: int, share: float) -> int:
    """Returns the number of rows that a forecast of series reads by default.

    This is three seasons, or a thirtieth of the training part if that is longer, up to 336 rows,
    but at least two horizons, and at most a third of the training part.

    Args:
        table: `TimeSeries`, whose first target determines the season.
        horizon: Positive integer, number of steps to forecast.
        share: Float, the share of the training part.
    """
    train_rows = int(share * statistics.median(table.lengths))
    most = max(train_rows // 3, horizon, 2)
    seasons: list[int] = []
    for i, length in enumerate(table.lengths):
        if len(seasons) == _MOST_SERIES:
            break
        train = table.values[table.rows(i)][: int(share * length), 0]
        # Short and empty series do not show a season.
        if 2 * len(train) >= train_rows and not np.isnan(train).all():
            seasons.append(_season(train[-_MOST_ROWS:], horizon))
    season = statistics.mode(seasons or [1])
    rows = min(max(_SEASONS * season, train_rows // _ROWS_OF_A_LAG), _LONGEST)
    return min(max(rows, 2 * horizon, _SHORTEST), most)


def _season(values, horizon):
    """Returns the lag with the best naive forecast, after correcting for drift."""
    longest = min(len(values) // 2, _LONGEST)
    if not longest:
        return 1

    def error(distance):
        changes = values[distance:] - values[:-distance]
        changes = changes[~np.isnan(changes)]
        return np.abs(changes - np.median(changes)).mean() if len(changes) else np.inf

    errors = {distance: error(distance) for distance in range(1, longest + horizon)}
    steps = np.arange(1, horizon + 1)
    return shortest_season(
        {
            lag: float(np.mean([errors[k] for k in -(-steps // lag) * lag if k in errors]))
            for lag in range(1, longest + 1)
        }
    )


def dilations_within(window: int, kernel_size: int, convolutions: int = 1) -> list[int]:
    """Returns dilations 1, 2, 4, ... and a remainder whose receptive field fits the window.

    (There is always a dilation of 1, even if the window is too short for it.)

    Args:
        window: Positive integer, number of rows.
        kernel_size: Integer of 2 or more, taps of the convolutions.
        convolutions: Positive integer, number of convolutions of each dilation. Defaults to 1.
    """
    if kernel_size < 2:
        raise ValueError(f"`kernel_size` must be at least 2. Received: {kernel_size}")
    reach = (window - 1) // (convolutions * (kernel_size - 1))
    dilations = [1]
    while (rest := reach - sum(dilations)) > 0:
        dilations.append(min(2 * dilations[-1], rest))
    return dilations


def train_forecaster(
    model: Forecaster,
    train: Windows,
    valid: Windows,
    *,
    epochs: int,
    batch_size: int = TRAINING["batch_size"],
    callbacks: Sequence[keras.callbacks.Callback] = (),
    seed: int = 0,
    verbose: int = 0,
) -> float | None:
    """Adapts and trains a compiled model, and keeps the weights of its best epoch.

    Args:
        model: `Forecaster` with `normalize=True`.
        train, valid: `Windows`.
        epochs: Integer, maximum number of epochs; 0 fits the linear map alone.
        batch_size: Positive integer. Defaults to 64.
        callbacks: Callbacks for `fit`. Defaults to none.
        seed: Integer seed of the order of windows. Defaults to 0.
        verbose: As in `keras.Model.fit`. Defaults to 0.

    Returns:
        The share of the network that is used, see `settle`; `None` without epochs.
    """
    model.adapt(train, valid)
    if epochs:
        stream = WindowStream(train, batch_size, seed, shuffle=True)
        best = keras.callbacks.EarlyStopping(patience=epochs, restore_best_weights=True)
        model.fit(
            stream,
            validation_data=WindowStream(valid, batch_size),
            epochs=epochs,
            shuffle=False,  # the stream shuffles
            callbacks=[StopOnNaN(), EpochOrder(stream), *callbacks, best],
            verbose=verbose,
        )
    share = settle(model, valid, batch_size)
    return share if epochs else None  # an untrained net is zero


def settle(
    model: Forecaster, valid: Windows, batch_size: int = TRAINING["batch_size"]
) -> float | None:
    """Chooses how much of a trained model's network to use, and calibrates its bands.

    Args:
        model: `Forecaster`.
        valid: The windows of the validation part. The last ones calibrate the bands, if they have
            any known target.
        batch_size: Positive integer. Defaults to 64.

    Returns:
        The share of the network that is used, or `None` for a model without a linear map.
    """
    share = None
    if model.linear is not None:
        share = model.weigh_net(WindowStream(valid, batch_size))
    if model.has_band:
        recent = [recent_windows(valid, i) for i in range(len(valid.series.lengths))]
        x, y = valid.read(np.concatenate(recent))
        if not np.isnan(y).all():
            model.calibrate(x, y)
    return share


class FittedForecaster:
    """A forecaster and the columns that it reads, as returned by `forecasting.fit`.

    Args:
        model: `Forecaster`.
        columns: `Columns` of the tables.
        window: Positive integer, number of rows that a forecast reads.
        report: Dict of figures for the test part, see `forecasting.report`.
    """

    def __init__(self, model: Forecaster, columns: Columns, window: int, report: dict[str, Any]):
        self.model = model
        self.columns = columns
        self.window = window
        self.report = report

    def __str__(self) -> str:
        return describe_report(self.report)

    def predict(self, data: Any, steps: int | None = None) -> Any:
        """Returns the forecast of the steps that follow a table, in the units of the data.

        Bands are calibrated on the recent past of each series. With columns known in the future,
        the forecast starts after the last value of a target, and the rows that follow must have
        these columns.

        Args:
            data: As in `fit`, with the same columns.
            steps: Positive integer, number of steps. Defaults to `None`, the horizon.

        Returns:
            A table with a row for each series, target and step: the time column, or `step` (from 1)
            without one, and the series column, if any, under their own names; `target`; and `q10`,
            `q50`, ... for a model with quantiles, otherwise `forecast`. It is a pandas data frame
            if pandas is installed, otherwise an Arrow table.

        Raises:
            ValueError: If the table does not match the model, all its series are too short, or a
                column known in the future has missing values.
        """
        table = _read(data, self.columns)
        where = str(data) if isinstance(data, (str, os.PathLike)) else "The frame"
        found = forecast_series(
            self.model,
            table,
            self.window,
            where,
            steps=steps,
            trained_step=self.report.get("step"),
            trained=self.report.get("names"),
        )
        return _as_frame(self._long(table, found))

    def _long(self, table, found):
        names, columns = output_names(self.model.quantiles), self.columns
        targets = columns.targets
        times = np.concatenate([np.tile(times, len(targets)) for times, _ in found.values()])
        if times.dtype.kind == "M":
            times = pa.array(times).cast(pa.timestamp("s", "UTC" if table.utc else None))
        parts = [np.moveaxis(y.reshape(len(y), len(targets), -1), 0, 1) for _, y in found.values()]
        steps = parts[0].shape[1]
        values = np.concatenate([part.reshape(-1, len(names)) for part in parts])
        rows = {columns.time or "step": times}
        if columns.series:
            rows[columns.series] = np.repeat([table.names[i] for i in found], len(targets) * steps)
        rows["target"] = np.tile(np.repeat(targets, steps), len(found))
        return pa.table(rows | dict(zip(names, values.T, strict=True)))

    def save(self, path: str | os.PathLike) -> None:
        """Writes a folder that `FittedForecaster.load` reads.

        Args:
            path: The folder. A folder written by `save` is replaced.

        Raises:
            ValueError: If the folder has any other contents.
            OSError: If it cannot be written.
        """
        path = pathlib.Path(path).expanduser()
        if path.exists() and {_ABOUT} != {file.name for file in path.iterdir()} - {_MODEL}:
            raise ValueError(f"{path} is not only a saved forecaster. Choose another name.")
        columns = {
            name: getattr(self.columns, name)
            for name in ("targets", "past", "future", "static", "time", "series")
        }
        about = {"columns": columns, "window": self.window, "report": self.report}
        with atomic_folder(path) as folder:
            self.model.save(folder / _MODEL)
            (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "FittedForecaster":
        """Returns the forecaster that `save` wrote.

        Args:
            path: The folder.

        Raises:
            ValueError: If a file is damaged, or the model is not a `Forecaster`.
            OSError: If a file cannot be read.
        """
        folder = pathlib.Path(path).expanduser()
        about = read_json(folder / _ABOUT, "about a forecaster")
        model = load_model(folder / _MODEL)
        if not isinstance(model, Forecaster):
            raise ValueError(
                f"{folder / _MODEL} must hold a Forecaster. Received: {type(model).__name__}"
            )
        try:
            columns = Columns(**about["columns"])
            window, report = int(about["window"]), dict(about["report"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / _ABOUT} is damaged: {error!r}") from error
        return cls(model, columns, window, report)


def _as_frame(table):
    """Returns a pandas data frame if pandas is installed."""
    try:
        import pandas  # noqa: F401
    except ImportError:
        return table
    return table.to_pandas()
