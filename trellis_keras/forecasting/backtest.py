"""Backtests: forecasts from many origins in the past, and their errors, with simple baselines.

_, _, test = series.split(window=168, horizon=24)
rows = forecasting.backtest(model, test, origins=20)
forecasting.backtest_scores(rows, by=["step"])
"""

import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
from tqdm import tqdm

from keras_streams.files import atomic_write, check_output
from trellis_keras.data.streams import check_integer
from trellis_keras.files import folder_lock, read_json, remove_unfinished
from trellis_keras.forecasting.calibration import (
    calibrate_on_known,
    predict_windows,
    recent_count,
)
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.linear import mean_error
from trellis_keras.forecasting.report import choose_season, middle_values, target_names
from trellis_keras.forecasting.rivals import WindowRidge, drift, naive
from trellis_keras.forecasting.series import Windows
from trellis_keras.forecasting.table import output_names

FORECASTS = ("forecast", "naive", "drift", "seasonal_naive", "ridge")
METRICS = ("mae", "rmse", "mase", "smape", "wape", "pinball", "crps", "coverage", "width")
_QUANTILE = re.compile(r"q[0-9.]+")
_SHOWN = 12  # steps or series in a table
_SERIES_AT_ONCE = 32
_LEVELS = (np.arange(100) + 0.5) / 100  # at which the CRPS is evaluated
_SETTINGS = "settings.json"

Refit = Callable[[Windows], Forecaster]


def backtest(
    model: Forecaster,
    test: Windows,
    origins: int = 20,
    *,
    refit: Refit | None = None,
    every: int = 1,
    output: str | os.PathLike | None = None,
    overwrite: bool = False,
    verbose: int = 0,
) -> pa.Table:
    """Forecasts from origins spread evenly over a part of the time.

    From each origin the model forecasts its horizon, with quantiles calibrated on the data before
    the origin. The baselines are `naive`, the last value; `drift`, the line through the first and
    the last value; `seasonal_naive`, the last season, whose length is detected in the rows before
    the part; and `ridge`, a ridge regression on the window, fitted on these rows and again with
    each refit.

    Until the output is complete, the folder `<output>.unfinished` stores the rows of each origin.
    The same call resumes an interrupted backtest.

    Args:
        model: `Forecaster`.
        test: The windows to forecast, from a part that the model was not trained on.
        origins: Positive integer, number of origins; all of them if there are fewer. Defaults
            to 20.
        refit: Function that returns a model trained on the `Windows` before an origin. Defaults to
            `None`, the same model for all origins.
        every: Positive integer, number of origins between calls of `refit`. Defaults to 1.
        output: File to write, `.csv` or `.parquet`. Defaults to `None`, no file.
        overwrite: Boolean, whether to replace an existing output. Defaults to `False`.
        verbose: 1 shows a progress bar on the standard error stream. Defaults to 0.

    Returns:
        An Arrow table with a row for each origin, series, target and step: `origin` (the last known
        time, in UTC if times have an offset, or its row, from 1), `series`, `target`, `step` (from
        1), `actual`, `forecast` (the middle quantile of a model with quantiles), `q10`, ... (its
        quantiles), the baselines, and `scale`, the mean absolute error of the seasonal naive
        forecast in the rows before the part, for the MASE.

    Raises:
        ValueError: If the part has no window, the output is neither CSV nor Parquet or exists, or
            an unfinished backtest of another model or other data has the same output.
        OSError: If a file cannot be written.
    """
    if not len(test):
        raise ValueError("`test` must have at least one window. Received: none")
    job = _Job(model, test, origins, refit, every)
    if output is None:
        return pa.concat_tables(job.run({}, verbose))
    output = check_output(output, overwrite=overwrite)
    if output.suffix not in (".csv", ".parquet"):
        raise ValueError(f"`output` must end with .csv or .parquet. Received: {output}")
    folder = output.with_name(f"{output.name}.unfinished")
    folder.mkdir(exist_ok=True)
    with folder_lock(folder):
        remove_unfinished(folder)
        _check_settings(folder, job.settings)
        done = {
            int(path.stem): pa.feather.read_table(path, memory_map=False)
            for path in folder.glob("*.feather")
        }
        parts = []
        for k, table in enumerate(job.run(done, verbose)):
            if k not in done:
                with atomic_write(folder / f"{k}.feather") as temporary:
                    pa.feather.write_feather(table, temporary)
            parts.append(table)
        found = pa.concat_tables(parts)
        with atomic_write(output) as temporary:
            if output.suffix == ".csv":
                pa.csv.write_csv(found, temporary)
            else:
                pa.parquet.write_table(found, temporary)
    shutil.rmtree(folder)
    return found


def _check_settings(folder, settings):
    path = folder / _SETTINGS
    if path.exists() and read_json(path, "the settings of a backtest") != settings:
        raise ValueError(
            f"{folder} has an unfinished backtest with another model, other data or other options. "
            "Remove it, or choose another output."
        )
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(settings), encoding="utf-8")


def _fingerprint(model):
    """Returns the SHA-256 of a model's weights."""
    digest = hashlib.sha256()
    for weight in model.weights:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()


class _Job:
    """Computes the forecasts of all origins, one after another."""

    def __init__(self, model, test, origins, refit, every):
        self.model, self.refit, self.every = model, refit, every
        series = self.series = test.series
        self.starts = [series.rows(i).start for i in range(len(series.lengths))]
        ends = [int(end) for end in series.ends]
        self.whole = Windows(series, test.window, test.horizon, 1, self.starts, ends)
        self.origins = _origins(test, check_integer("origins", origins, 1))
        self.before = self._windows_before(test.first)
        self.seasons = [choose_season(self.before, i) for i in range(len(ends))]
        self.scales = [self._scale(i, season) for i, season in enumerate(self.seasons)]
        self.settings = {
            "model": _fingerprint(model),
            "data": series.checksum,
            "window": test.window,
            "origins": [list(rows.values()) for rows, _ in self.origins],
            "every": check_integer("every", every, 1) if refit else None,
        }

    def run(self, done, verbose):
        """Yields the rows of each origin that is not in `done`."""
        model = ridge = fitted = None
        bar = tqdm(
            self.origins,
            unit="origin",
            disable=not verbose,
            mininterval=0.5 if sys.stderr.isatty() else 60,
        )
        for k, (rows, _) in enumerate(bar):
            if k in done:
                yield done[k]
                continue
            first = k - k % self.every if self.refit else 0
            if fitted != first:
                model, ridge = self._fit(first)
                fitted = first
            yield self._forecast(model, ridge, rows)

    def _fit(self, k):
        """Returns the model and the ridge regression for origin `k` and later ones."""
        before = self._windows_before(self.origins[k][1]) if k else self.before
        model = self.refit(before) if k else self.model
        return model, WindowRidge(before) if len(before) else None

    def _windows_before(self, last):
        """Returns the windows whose targets are before the given row of each series."""
        return Windows(self.series, self.whole.window, self.whole.horizon, 1, self.starts, last)

    def _scale(self, i, season):
        """Returns the seasonal naive forecast's error on known rows, (targets,), 0 if unknown."""
        known = self.series.values[self.starts[i] : self.before.last[i], : self.series.targets]
        columns = known.T.astype("float64")
        return [mean_error(values[season:] - values[:-season]) for values in columns]

    def _forecast(self, model, ridge, rows):
        items, tables = list(rows.items()), []
        for first in range(0, len(items), _SERIES_AT_ONCE):
            some = items[first : first + _SERIES_AT_ONCE]
            index = [self._index(i, row) for i, row in some]
            outputs, y = predict_windows(model, self.whole, np.concatenate(index))
            cuts = np.cumsum([len(own) for own in index])[:-1]
            parts = zip(some, index, np.split(outputs, cuts), np.split(y, cuts), strict=True)
            for (i, row), own, found, actual in parts:
                known = slice(0, len(own) - 1)
                found = calibrate_on_known(
                    model, found[-1:], found[known], actual[known], self.whole
                )
                columns = {
                    "actual": actual[-1],
                    "forecast": middle_values(model, found[0]),
                    **self._quantiles(model, found[0]),
                    **self._simple(i, row),
                    "ridge": self._ridge(ridge, own[-1]),
                }
                tables.append(self._table(i, row, columns))
        return pa.concat_tables(tables)

    def _index(self, i, row):
        """Returns the indices of the calibration windows, and of the window that ends at `row`."""
        last = self.whole.of_series(i).start + row - self.whole.window - self.starts[i]
        known = last - self.whole.horizon
        first = max(known - recent_count(self.whole) + 1, self.whole.of_series(i).start)
        return np.array([*range(first, known + 1), last])

    def _quantiles(self, model, found):
        if model.quantiles is None:
            return {}
        return {name: found[..., j] for j, name in enumerate(output_names(model.quantiles))}

    def _simple(self, i, row):
        horizon, season = self.whole.horizon, self.seasons[i]
        history = self.series.values[self.starts[i] : row, : self.series.targets]
        return {
            "naive": naive(history, horizon),
            "drift": drift(history, horizon),
            "seasonal_naive": naive(history, horizon, season),
        }

    def _ridge(self, ridge, number):
        if ridge is None:
            return np.full((self.whole.horizon, self.series.targets), np.nan)
        x, _ = self.whole.read(np.array([number]))
        return ridge(x)[0]

    def _table(self, i, row, columns):
        horizon, names = self.whole.horizon, target_names(self.series)
        times = self.series.times
        origin = row - self.starts[i] if times is None else times[row - 1]
        if times is not None and times.dtype.kind == "M":
            origin = origin.astype("datetime64[s]")  # pyarrow has no hours
        values = {
            name: pa.array(v.T.ravel().astype("float64"), from_pandas=True)
            for name, v in columns.items()
        }
        rows = horizon * len(names)
        origins = pa.array(np.repeat(origin, rows))
        return pa.table(
            {
                "origin": origins.cast(pa.timestamp("s", "UTC")) if self.series.utc else origins,
                "series": pa.array([self.series.names[i]] * rows),
                "target": pa.array(np.repeat(names, horizon)),
                "step": pa.array(np.tile(np.arange(1, horizon + 1), len(names))),
                **values,
                "scale": pa.array(np.repeat(self.scales[i], horizon)),
            }
        )


def _origins(test, count):
    """Returns the origins and the known rows.

    An origin is {index of a series: first row to forecast}. The known rows of each series end with
    the last one that is not later than the origin.
    """
    series = test.series
    if series.times is None:  # counted from the ends of the series
        clock = np.concatenate([np.arange(-length, 0) for length in series.lengths])
    else:
        clock = series.times
    rows = [
        test.starts(np.array(test.of_series(i), int)) + test.window
        for i in range(len(series.lengths))
    ]
    moments = np.unique(np.concatenate([clock[own - 1] for own in rows]))
    if len(moments) < count:
        warnings.warn(
            f"The rows have only {len(moments)} origins, all of which are used. Received: "
            f"origins={count}",
            stacklevel=4,
        )
    chosen = np.linspace(len(moments) - 1, 0, min(count, len(moments))).round().astype(int)[::-1]
    slices = [series.rows(i) for i in range(len(series.lengths))]
    found = []
    for moment in moments[chosen]:
        known = [r.start + int(np.searchsorted(clock[r], moment, "right")) for r in slices]
        origin = {i: row for i, row in enumerate(known) if row in rows[i]}
        found.append((origin, known))
    return found


# Figures


def backtest_scores(rows: pa.Table, by: Sequence[str] = ("target",)) -> pa.Table:
    """Returns the scores of the forecasts of a backtest and of its baselines.

    All figures are over known values. `smape` and `wape` are shares, not percent;
    `pinball` is the mean over the quantiles; `crps` is that of the quantile function which is
    linear between the quantiles; `coverage` and `width` are of the band between the outer ones.

    Args:
        rows: Table returned by `backtest`.
        by: Names of the columns to group by, such as `["target", "series"]` or `["step"]`.
            Defaults to `("target",)`.

    Returns:
        An Arrow table with a row for each combination and forecast: the columns of `by`, `method`
        (`forecast`, `naive`, ...), `values` (their number), and the figures, which are missing
        where they are not defined.
    """
    levels = quantile_levels(rows.column_names)
    names = ["actual", *FORECASTS, *(output_names(levels) if levels else ()), "scale"]
    # In a CSV file, whole numbers are integers, and an empty column has no type.
    columns = {name: rows[name].cast(pa.float64()).to_numpy() for name in names}
    found: dict[str, list] = {name: [] for name in (*by, "method", "values", *METRICS)}
    for places in _groups(rows, by):
        own = {name: values[places] for name, values in columns.items()}
        for method in FORECASTS:
            keys = {name: rows[name][int(places[0])].as_py() for name in by}
            for name, value in (keys | {"method": method} | _figures(own, method)).items():
                found[name].append(value)
    return pa.table(found)


def _groups(rows, by):
    """Returns the row indices of each combination of values, in the order of the table."""
    codes = np.zeros(len(rows), int)
    for name in by:
        encoded = rows[name].combine_chunks().dictionary_encode()
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
    _, counts = np.unique(codes, return_counts=True)
    groups = np.split(np.argsort(codes, kind="stable"), np.cumsum(counts)[:-1])
    return sorted(groups, key=lambda places: places[0])


def _figures(columns, method):
    """Returns {name: figure} for a forecasting method."""
    actual, forecast, scale = columns["actual"], columns[method], columns["scale"]
    known = ~np.isnan(actual) & ~np.isnan(forecast)
    found: dict[str, float | int | None] = {"values": int(known.sum()), **dict.fromkeys(METRICS)}
    if not known.any():
        return found
    actual, forecast, scale = actual[known], forecast[known], scale[known]
    errors = np.abs(actual - forecast)
    sizes = np.abs(actual) + np.abs(forecast)
    found["mae"] = float(errors.mean())
    found["rmse"] = float(np.sqrt(np.square(errors).mean()))
    found["smape"] = float(np.divide(2 * errors, sizes, where=sizes > 0, out=0 * errors).mean())
    if (scale > 0).any():
        found["mase"] = float((errors[scale > 0] / scale[scale > 0]).mean())
    if actual.any():
        found["wape"] = float(errors.sum() / np.abs(actual).sum())
    levels = quantile_levels(columns)
    if method == "forecast" and levels:
        bands = np.stack([columns[name][known] for name in output_names(levels)], axis=-1)
        found["pinball"] = float(_pinball(actual, bands, levels).mean())
        found["crps"] = _crps(actual, bands, levels)
        if len(levels) > 1:
            inside = (bands[:, 0] <= actual) & (actual <= bands[:, -1])
            found["coverage"] = float(inside.mean())
            found["width"] = float((bands[:, -1] - bands[:, 0]).mean())
    return found


def _crps(actual, bands, levels):
    """Returns the mean CRPS of quantile functions, piecewise linear and constant at the ends."""
    total = 0.0
    for level in _LEVELS:
        place = np.interp(level, levels, np.arange(len(levels)))
        low, high = int(np.floor(place)), int(np.ceil(place))
        between = bands[:, [low]] + (place - low) * (bands[:, [high]] - bands[:, [low]])
        total += 2 * _pinball(actual, between, [level]).mean()
    return float(total / len(_LEVELS))


def quantile_levels(names: Iterable[str]) -> list[float]:
    """Returns the levels of the quantiles among the names of a backtest's columns."""
    return [float(name[1:]) / 100 for name in names if _QUANTILE.fullmatch(name)]


def _pinball(actual, bands, levels):
    errors, levels = actual[:, None] - bands, np.array(levels)
    return np.maximum(levels * errors, (levels - 1) * errors)


def all_scores(rows: pa.Table) -> pa.Table:
    """Returns the scores by target, by target and step, and by target and series, in one table.

    Its columns are those of `backtest_scores`, of which `step` and `series` are missing where the
    scores are over all of them.

    Args:
        rows: Table returned by `backtest`.
    """
    by = [("target",), ("target", "step"), ("target", "series")]
    tables = [backtest_scores(rows, names) for names in by]
    joined = pa.concat_tables(tables, promote_options="default")
    names = [name for name in tables[0].column_names if name != "target"]
    return joined.select(["target", "step", "series", *names])


def backtest_tables(rows: pa.Table) -> list[list[tuple[str, ...]]]:
    """Returns the scores of a backtest as tables of strings, each a header and its rows.

    The first table has all scores for each target. The others have the mean absolute errors and the
    coverage and width of the band, by step ahead and, with several series, by series. If there are
    many, only evenly spaced steps are shown, and only the series on which the model is worst
    relative to the best baseline.

    Args:
        rows: Table returned by `backtest`.
    """
    whole = backtest_scores(rows).to_pylist()
    tables: list[list[tuple[str, ...]]] = [[("target", "forecast", *METRICS)]]
    for row in whole:
        shown = (_shown(row[metric]) for metric in METRICS)
        tables[0].append((row["target"], row["method"].replace("_", " "), *shown))
    for key in ("step", "series"):
        lines = _lines(backtest_scores(rows, ("target", key)).to_pylist(), key)
        if len(lines) < 2 * len({line["target"] for line in lines}):
            continue  # a single step or series
        if key == "step":
            steps = sorted({line["step"] for line in lines})
            at = np.linspace(0, len(steps) - 1, min(len(steps), _SHOWN)).round().astype(int)
            lines = [line for line in lines if line["step"] in {steps[i] for i in at}]
        elif len(lines) > _SHOWN:
            lines = sorted(lines, key=_loss, reverse=True)[:_SHOWN]
        header = ("target", key, *(f"MAE: {name.replace('_', ' ')}" for name in FORECASTS))
        tables.append([(*header, "coverage", "width")])
        for line in lines:
            figures = (*(line[name] for name in FORECASTS), line["coverage"], line["width"])
            tables[-1].append((line["target"], str(line[key]), *map(_shown, figures)))
    return tables


def _lines(scores, key):
    """Returns, for each target and key, the errors of all methods, coverage and width."""
    lines: dict[tuple, dict] = {}
    for row in scores:
        line = lines.setdefault((row["target"], row[key]), {"target": row["target"], key: row[key]})
        line[row["method"]] = row["mae"]
        if row["method"] == "forecast":
            line |= {"coverage": row["coverage"], "width": row["width"]}
    return list(lines.values())


def _loss(line):
    """Returns the ratio of the model's error to that of the best simple forecast."""
    others = [line[name] for name in FORECASTS[1:] if line[name] is not None]
    if line["forecast"] is None or not others:
        return 0.0
    return line["forecast"] / max(min(others), np.finfo("float32").tiny)


def _shown(value):
    return "-" if value is None else f"{value:.4g}"
