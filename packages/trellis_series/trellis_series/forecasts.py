"""Forecasts of the series of a data frame, with bands."""

import copy
import os
import re
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np
import pandas as pd
from tqdm.auto import tqdm
from utilsforecast.plotting import plot_series

from trellis_keras.layers.checks import check_integer
from trellis_series import network_expert, saving, seasons
from trellis_series.ensemble import Ensemble, fill
from trellis_series.fitting import Fitting
from trellis_series.forecaster import Forecaster
from trellis_series.panel import (
    UNNAMED,
    Columns,
    History,
    known_scales,
    numbers,
    read_future,
    read_panel,
    to_frame,
)
from trellis_series.stream import ForecastStream, export
from trellis_series.times import check_freq, parse_times, time_grid, time_range


class Forecasts:
    """Forecasts every series of a data frame, with calibrated bands.

    A forecast is a weighted mean of experts: exponential smoothing of the values and of their
    logarithms, a ridge regression on the last values, in a panel another one that all series share,
    and for long or many series, or with covariates, a network. The experts forecast from past
    origins; their errors there determine their weights and the width of the bands.

    Tables are long data frames, a row for each series and time, in any order; without the column of
    series, all rows belong to one. A `DatetimeIndex` stands for the column of times, and a
    `pandas.Series` for a table of one series. Missing rows are added, and a warning says how many;
    missing values are NaN. Missing numbers of covariates, and all covariates of added rows, are
    filled with the last known value, or with the mean before the first one. A missing category
    counts as none of the known ones. Methods raise `ValueError` for other tables.

    Args:
        horizon: Positive integer, number of steps to forecast. Defaults to `24`.
        freq: String, the frequency of the times in pandas' notation, or an integer for times that
            are numbers. Defaults to `None`, inferred from the longest series.
        levels: Percentages of the bands, of 1 or more and below 100. Defaults to `(80,)`.
        past, future, static: Names of covariates: known up to the present, such as a measured
            temperature; also known in the future, such as a holiday; or constant for each series.
            Strings and booleans are categories. Default to `()`.
        season: Positive integer, number of steps after which series repeat, or a list. Defaults to
            `None`, the calendar's for `freq`, such as a day and a week for hours.
        network: `"auto"`, a network where there is enough to learn from: 15,000 values in the
            longest series or 100,000 in all (10,000 with covariates); a causal layer, as the
            backbone of a `Forecaster`; the `trained_network` of other forecasts, which is not
            trained again; or `None`. A network is used only if it reduces the error at past origins
            by more than one standard error. Defaults to `"auto"`.
        id_col, time_col, target_col: Names of columns. Default to `"unique_id"`, `"ds"` and `"y"`.
        seed: Integer seed of the network. Defaults to `0`.

    Attributes:
        trained_network: The network of the forecasts after `fit`, or `None`.
        backtest_network: The network of the last `cross_validation`, or `None`.
        beats_naive: Boolean, whether the command's backtest favored the forecasts over the seasonal
            naive ones; `None` if there was no backtest.

    Example:

    >>> times = pd.date_range("2024-01-01", periods=240, freq="h")
    >>> y = 100 + 10 * np.sin(np.arange(240) * np.pi / 12)
    >>> forecasts = Forecasts(horizon=6).fit(pd.DataFrame({"ds": times, "y": y}))
    >>> forecasts.predict().columns.tolist()
    ['unique_id', 'ds', 'ours', 'ours-lo-80', 'ours-hi-80']
    """

    def __init__(
        self,
        horizon: int = 24,
        freq: str | int | None = None,
        levels: Sequence[float] = (80,),
        past: Sequence[str] = (),
        future: Sequence[str] = (),
        static: Sequence[str] = (),
        season: int | Sequence[int] | None = None,
        network: Any = "auto",
        *,
        id_col: str = "unique_id",
        time_col: str = "ds",
        target_col: str = "y",
        seed: int = 0,
    ) -> None:
        self.horizon = check_integer("horizon", horizon, 1)
        self.levels = check_levels(levels)
        for name, names in {"past": past, "future": future, "static": static}.items():
            if isinstance(names, str):
                raise ValueError(f"`{name}` must be a sequence of names. Received: {names!r}")
        roles = (tuple(names) for names in (past, future, static))
        self.columns = Columns(id_col, time_col, target_col, *roles)
        used = [id_col, time_col, target_col, *self.columns.covariates]
        if len(set(used)) < len(used):
            raise ValueError(f"A column can have one role only. Received: {used}")
        for name in (id_col, time_col, target_col):
            if re.fullmatch("cutoff|(ours|naive)(-(lo|hi)-.*)?", str(name)):
                raise ValueError(
                    f"{name!r} is reserved for forecasts. Rename that column of the table."
                )
        if freq is not None:
            check_freq(freq)
        self.freq = freq
        self.season: list[int] | None = None
        if season is not None:
            given = np.atleast_1d(season).tolist()
            if not given:
                raise ValueError("`season` must be positive integers, or None. Received: []")
            self.season = sorted({check_integer("season", each, 1) for each in given})
        if not (network is None or isinstance(network, keras.Layer) or network == "auto"):
            raise ValueError(
                "`network` must be 'auto', a layer, a trained network or None. Received: "
                f"network={network!r}"
            )
        if isinstance(network, Forecaster):
            network_expert.check(network, self.horizon)
        self.network = network
        self.seed = seed
        self.models: dict[Any, Ensemble] = {}
        self.beats_naive: bool | None = None
        self.trained_network: Any = None
        self.backtest_network: Any = None

    # Fitting

    def fit(self, df: Any) -> "Forecasts":
        """Fits the forecasts to a table."""
        frame = to_frame(df, self.columns)
        panel, self.fitted_freq, self.encoding = read_panel(frame, self.columns, self.freq)
        longest = max(len(series.y) for series in panel)
        if self.horizon > longest:
            warnings.warn(
                f"The horizon of {self.horizon:,} steps is longer than the longest series, of "
                f"{longest:,}. Pass a shorter `horizon` (--horizon).",
                stacklevel=2,
            )
        self.models = self._fit(panel)
        return self

    def _fit(self, panel):
        """Returns a dict from the name of each series to its `Ensemble`."""
        self._candidates = self.candidate_seasons(panel, self.fitted_freq)
        fittings: list[Fitting] = []
        shared: dict[Any, list] = {}
        for series in tqdm(panel, delay=10, disable=None):
            fitting = self._fitting(series)
            group = shared.setdefault(fitting.group, [0, 0.0])
            group[0] += 1
            group[1] = group[1] + fitting.moments
            fitting.moments = None  # megabytes
            fittings.append(fitting)
        short = sum(fitting.season not in self._candidates for fitting in fittings)
        if self.season is not None and short:
            warnings.warn(
                f"{short:,} of {len(fittings):,} series are shorter than two seasons of "
                f"{self.season[0]} steps, and are forecast without a season.",
                stacklevel=3,
            )
        for fitting in fittings:
            count, sums = shared[fitting.group]
            if count > 1:
                fitting.add_ridge("ridge of all", sums)
        losses = [fitting.losses() for fitting in fittings]
        groups: dict[tuple, list] = {}
        for fitting, loss in zip(fittings, losses, strict=True):
            if len(fitting.actual):
                groups.setdefault(tuple(fitting.experts), []).append(loss)
        pooled = {kind: np.mean(each, axis=0) for kind, each in groups.items() if len(each) > 1}
        models = [
            fitting.combine(loss, pooled.get(tuple(fitting.experts), 0.0))
            for fitting, loss in zip(fittings, losses, strict=True)
        ]
        self.trained_network, models = network_expert.add(fittings, models, self.network, self.seed)
        pairs = zip(panel, models, strict=True)
        return {series.name: model._replace(last=series.times[-1]) for series, model in pairs}

    def candidate_seasons(self, panel: Sequence[History], freq: str | int) -> list[int]:
        """Returns the seasons that series may have, shortest first."""
        if self.season is not None:
            return self.season
        if isinstance(freq, str):
            return seasons.calendar_seasons(freq)
        longest = max(panel, key=lambda series: len(series.y))
        return seasons.correlated_season(fill(longest.y, 1))

    def _fitting(self, series):
        return Fitting(series.y, self._candidates, self.horizon, series.future, series.past)

    # Forecasts

    def predict(
        self,
        df: Any = None,
        X_df: Any = None,
        levels: Sequence[float] | None = None,
        naive: bool = False,
    ) -> pd.DataFrame:
        """Returns the forecasts of the steps after the last value of each series.

        Args:
            df: Table of values to forecast from: series that were fitted are not fitted again, new
                ones are fitted. Defaults to `None`, what was fitted or passed to `update`.
            X_df: Data frame of the steps to forecast, with the columns of series, times and
                covariates known in the future. Required with `future`.
            levels: Percentages of the bands. Defaults to `None`, those of the constructor.
            naive: Boolean, whether to add the seasonal naive forecast and its band. Defaults to
                `False`.

        Returns:
            A data frame with the columns of series and times, `ours`, and `ours-lo-80` and
            `ours-hi-80` for each level.
        """
        levels = self.levels if levels is None else check_levels(levels)
        models = dict(self._fitted())
        if df is not None:
            read = self._read(df)
            models = {each.name: self._started(each, models.get(each.name)) for each in read}
        times = {
            name: time_range(self.fitted_freq, each.last, periods=self.horizon + 1)[1:]
            for name, each in models.items()
        }
        return self._frame(models, times, self._ahead(X_df, times), levels, naive)

    def _started(self, series, model):
        """Returns the model at the end of a series. A series without a model gets its own."""
        if model is None:
            fitting = self._fitting(series)
            model = fitting.combine(fitting.losses())._replace(last=series.times[-1])
            if model.has_few_origins:
                warnings.warn(
                    f"The series {str(series.name)!r} is new, and fitted to {len(series.y):,} "
                    "steps only. `update` does not fit it again; `fit` does.",
                    stacklevel=3,
                )
            return model
        if len(series.y) < model.length:
            raise ValueError(
                f"The series {series.name!r} needs {model.length} steps. Received: {len(series.y)}"
            )
        _warn_of_negative(series.name, model, series.y)
        state = model.begin(series.y, series.future, series.past)
        return model._replace(state=state, last=series.times[-1])

    def _fitted(self):
        if not self.models:
            raise ValueError("Call `fit` first.")
        return self.models

    def _read(self, df, **options):
        frame = to_frame(df, self.columns)
        kind = pd.Index([model.last for model in self._fitted().values()]).dtype
        options |= {"encoding": self.encoding, "kind": kind}
        return read_panel(frame, self.columns, self.fitted_freq, **options)[0]

    def _ahead(self, X_df, times):
        """Returns the covariates of the steps to forecast by series."""
        if self.columns.future and X_df is not None:
            return read_future(to_frame(X_df, self.columns), self.columns, self.encoding, times)
        if self.columns.future or X_df is not None:
            raise ValueError(
                "`X_df` must have the covariates known in the future, if there are any. Received: "
                f"future={list(self.columns.future)}, X_df={type(X_df).__name__}"
            )
        return dict.fromkeys(times)

    def _frame(self, models, times, ahead, levels, naive):
        nets = self._net_forecasts(models, ahead)
        parts = []
        for name, model in models.items():
            found = {"ours": model.outlook(model.state, ahead[name], nets.get(name))}
            if naive:
                found["naive"] = model.naive(model.state)
            parts.append({})
            for kind, mean in found.items():
                parts[-1][kind] = mean * model.scale
                lower, upper = model.ends(mean, model.band(levels, kind == "naive"), model.state)
                for i, level in enumerate(levels):
                    parts[-1][f"{kind}-lo-{level}"] = lower[i] * model.scale
                    parts[-1][f"{kind}-hi-{level}"] = upper[i] * model.scale
        values = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
        names = pd.Series(list(models)).repeat(self.horizon).reset_index(drop=True)
        first, *others = times.values()
        return pd.DataFrame(
            {self.columns.id: names, self.columns.time: first.append(others), **values}
        )

    def _net_forecasts(self, models, ahead):
        """Returns the network's forecasts, by series."""
        names = [name for name, model in models.items() if model.net_share]
        if not names:
            return {}
        states = [models[name].state for name in names]
        y, past, future = (
            np.stack(
                [getattr(state, name)[-self.trained_network.linear_window :] for state in states]
            )
            for name in ("values", "past", "future")
        )
        steps = None if ahead[names[0]] is None else np.stack([ahead[name] for name in names])
        found = np.asarray(network_expert.forecast(self.trained_network, y, past, future, steps))
        return dict(zip(names, found, strict=True))

    def update(self, df: Any) -> "Forecasts":
        """Reads the rows that follow, without fitting again. The work is constant for each row.

        Rows that were read before are ignored. Rows after the last value of a series are not read
        yet: pass them again with its next value. A series that was not fitted is fitted.
        """
        before = {
            name: (model.state.future[-1], model.state.past[-1])
            for name, model in self._fitted().items()
        }
        is_old = True
        for series in self._read(df, skip=True, before=before):
            model = self.models.get(series.name)
            if model is not None and series.times[-1] <= model.last:
                continue
            following = self._started if model is None else self._after
            self.models[series.name] = following(series, model)
            is_old = False
        if is_old:
            warnings.warn(
                "The table has no values after those that were read before. Times come from the "
                f"column {self.columns.time!r} or from the index.",
                stacklevel=2,
            )
        return self

    def _after(self, series, model):
        """Returns the model after the steps of a series that it has not read."""
        start, state = int(series.times.searchsorted(model.last, "right")), model.state
        ends = pd.Index([model.last, *series.times[start:]])
        gap = len(time_grid(self.fitted_freq, ends, len(ends))) - len(ends)
        if gap:
            warnings.warn(f"{gap:,} missing rows were added to the table.", stacklevel=3)
        for _ in range(gap):
            state = model.observe(state, np.array([np.nan]), state.future[-1], state.past[-1])
        _warn_of_negative(series.name, model, series.y[start:])
        for t in range(start, len(series.y)):
            state = model.observe(state, series.y[t : t + 1], series.future[t], series.past[t])
        return model._replace(state=state, last=series.times[-1])

    def cross_validation(
        self,
        df: Any,
        n_windows: int = 1,
        step_size: int | None = None,
        refit: bool = False,
        naive: bool = False,
    ) -> pd.DataFrame:
        """Forecasts the last windows of a table, each from the rows before it.

        Args:
            df: Table.
            n_windows: Positive integer, number of windows. Defaults to `1`.
            step_size: Positive integer, steps from one window to the next. Defaults to `None`, the
                horizon.
            refit: Boolean, whether to fit again before each window. Otherwise the forecasts are
                fitted before the first window and updated. Defaults to `False`.
            naive: As in `predict`.

        Returns:
            A data frame as from `predict`, with the columns `cutoff`, the last time before a
            window, and the target.
        """
        step = self.horizon if step_size is None else check_integer("step_size", step_size, 1)
        n_windows = check_integer("n_windows", n_windows, 1)
        own = copy.copy(self)
        frame = to_frame(df, self.columns)
        panel, own.fitted_freq, own.encoding = read_panel(frame, self.columns, self.freq)
        first = self.horizon + (n_windows - 1) * step
        longer = [series for series in panel if len(series.y) > first]
        if not longer:
            raise ValueError(
                f"{n_windows} windows need series of more than {first} steps. Received: none"
            )
        if len(longer) < len(panel):
            warnings.warn(
                f"{len(panel) - len(longer):,} of {len(panel):,} series have at most {first} "
                "steps, too few for the windows, and are left out.",
                stacklevel=2,
            )
        if self.columns.covariates:  # scaled by what is known before the first window
            ends = {each.name: each.times[-first - 1] for each in longer}
            own.encoding |= known_scales(frame, self.columns, own.encoding, ends)
            panel, *_ = read_panel(frame, self.columns, own.fitted_freq, own.encoding)
            longer = [series for series in panel if series.name in ends]
        parts: list[pd.DataFrame] = []
        for before in range(first, self.horizon - 1, -step):  # steps from an origin to the end
            known = [series[: len(series.y) - before] for series in longer]
            if refit or not parts:
                own.models = own._fit(known)
            else:
                own.models = {each.name: own._after(each, own.models[each.name]) for each in known}
            ahead = [series[len(series.y) - before :][: self.horizon] for series in longer]
            found = own._frame(
                own.models,
                {each.name: each.times for each in ahead},
                {each.name: each.future for each in ahead},
                self.levels,
                naive,
            )
            cutoffs = pd.Index([model.last for model in own.models.values()])
            found.insert(2, "cutoff", cutoffs.repeat(self.horizon))
            found.insert(3, self.columns.target, np.concatenate([each.y for each in ahead]))
            parts.append(found)
        self.backtest_network = own.trained_network
        groups = pd.concat(parts).groupby(self.columns.id, sort=False)
        return pd.concat([rows for _, rows in groups], ignore_index=True)

    # Pictures, streams and files

    def plot(self, df: Any = None, forecasts: pd.DataFrame | None = None, **options: Any) -> Any:
        """Draws series with forecasts and bands, by `utilsforecast.plotting.plot_series`.

        Where forecasts continue after the last known value, a vertical line marks it.

        Args:
            df: Table. Defaults to `None`, the last values that the forecasts read.
            forecasts: Data frame from `predict` or `cross_validation`, or several concatenated.
                Defaults to `None`, the result of `predict()`.
            options: Other arguments of `plot_series`, such as `ids` and `max_insample_length`.

        Returns:
            A Matplotlib figure.
        """
        columns = self.columns
        roles = {role: str(name) for role, name in columns.roles.items()}
        series, time, target = roles.values()
        forecasts = self.predict() if forecasts is None else forecasts
        frame = self._recent() if df is None else to_frame(df, columns)
        known = self._drawable(frame[[columns.id, columns.time, columns.target]])
        known[target] = numbers(known[target])
        ahead = self._drawable(forecasts.drop(columns=["cutoff", columns.target], errors="ignore"))
        figure = plot_series(known, ahead, **{"level": list(self.levels), **options, **roles})
        last = known.dropna(subset=target).groupby(series, observed=True)[time].max()
        ends = ahead.groupby(series, observed=True)[time].max()
        begins = {
            f"{series}={name}": last[name]
            for name, end in ends.items()
            if end > last.get(name, end)
        }
        for ax in getattr(figure, "axes", ()):  # which plotly's figures lack
            title = ax.get_title()
            if title in begins:
                ax.axvline(begins[title], color="gray", linewidth=0.8)
            if title == f"{Columns.id}={UNNAMED}":
                ax.set_title(target)
        return figure

    def _drawable(self, table):
        """Returns a sorted table that can be drawn: with plain times, and strings as names."""
        times = parse_times(table[self.columns.time])
        if isinstance(times.dtype, pd.PeriodDtype):
            times = times.dt.to_timestamp()
        elif times.dtype.kind == "m":
            times = pd.Timestamp(0) + times
        series, time = str(self.columns.id), str(self.columns.time)
        table = table.rename(columns=str)
        table[time] = times
        return table.sort_values([series, time])

    def _recent(self):
        """Returns the values in the states as a table."""
        parts = []
        for name, model in self._fitted().items():
            y = model.state.values * model.scale
            times = time_range(self.fitted_freq, end=model.last, periods=len(y))
            row = {self.columns.id: name, self.columns.time: times, self.columns.target: y}
            parts.append(pd.DataFrame(row))
        return pd.concat(parts, ignore_index=True)

    def stream(self, unique_id: Any = None, dtype: str = "float64") -> ForecastStream:
        """Returns the forecast of a series, without covariates, as a stream.

        Args:
            unique_id: The name of the series. Defaults to `None`, the only one.
            dtype: String, the dtype of the computation. Defaults to `"float64"`, which JAX has only
                if the environment has `JAX_ENABLE_X64=1`.
        """
        if self.columns.covariates:
            raise ValueError(
                "A stream reads the values of one series, without covariates. Received: "
                f"{', '.join(map(repr, self.columns.covariates))}"
            )
        models = self._fitted()
        if unique_id is None and len(models) == 1:
            (unique_id,) = models
        if unique_id not in models:
            raise ValueError(
                f"`unique_id` must be one of the {len(models)} series. Received: {unique_id!r}"
            )
        model = models[unique_id]
        network = self.trained_network if model.net_share else None
        return ForecastStream(model, self.levels, network, dtype)

    def export(
        self,
        path: str | os.PathLike,
        unique_id: Any = None,
        dtype: str = "float32",
        overwrite: bool = False,
    ) -> None:
        """Writes the forecast of a series for programs without Python.

        A file `name.c` becomes C99 with a header: `name_reset` starts after the last value that was
        read, and `name_step` reads one value and writes the forecast and the ends of the bands. It
        is compared with Keras before it is written (docs/edge.md). Any other path becomes a
        SavedModel that takes the values after the last one that was read, (batch, time, 1), and
        returns the forecast after them, (batch, horizon, 1 + 2 levels).

        Args:
            path: The C file, or the folder of the SavedModel.
            unique_id, dtype: As in `stream`. `dtype` defaults to `"float32"`; values that are many
                times larger than their changes, such as meter readings, need `"float64"`.
            overwrite: Boolean, whether to replace an earlier export. Defaults to `False`.
        """
        export(self.stream(unique_id, dtype), path, overwrite)

    def save(self, path: str | os.PathLike, overwrite: bool = False) -> None:
        """Saves the forecasts to a folder, which `load` reads.

        Args:
            path: The folder. Its parent must exist.
            overwrite: Boolean, whether to replace an earlier save. A folder with any other content
                is never replaced. Defaults to `False`.
        """
        models = self._fitted()
        arguments = {name: getattr(self.columns, name) for name in ("past", "future", "static")}
        arguments |= self.columns.roles
        arguments |= {name: getattr(self, name) for name in _ARGUMENTS}
        arguments["network"] = None if self.network is None else "auto"
        about = {"arguments": arguments, **{name: getattr(self, name) for name in _FITTED}}
        about["encoding"] = list(self.encoding.items())  # names need not be strings
        saving.save(path, about, models, self.trained_network, overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Forecasts":
        """Returns saved forecasts.

        A later `fit` trains a network of its own, unless `network=None` was given.

        Raises:
            ValueError: If the folder has anything else, or is damaged.
            OSError: If it cannot be read.
        """
        about, models, network = saving.load(path)
        try:
            forecasts = cls(**about["arguments"])
            for name in _FITTED:
                setattr(forecasts, name, about[name])
            forecasts.encoding = dict(about["encoding"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from error
        if any(model.horizon != forecasts.horizon for model in models.values()):
            raise ValueError(f"{path} is damaged: its horizons differ")
        forecasts.trained_network, forecasts.models = network, models
        return forecasts


_ARGUMENTS = ("horizon", "freq", "levels", "season", "seed")
_FITTED = ("fitted_freq", "_candidates", "beats_naive")  # besides the encoding and the models


def _warn_of_negative(name, model, y):
    if model.low == 0 and np.nanmin(y, initial=0.0) < 0:
        warnings.warn(
            f"The series {str(name)!r} was fitted to values of 0 and more, and now has negative "
            "ones. Fit the forecasts again.",
            stacklevel=4,
        )


def check_levels(levels: Any) -> tuple[float, ...]:
    """Returns percentages, whole ones as integers, as the names of columns have them."""
    found: tuple = tuple(levels) if np.iterable(levels) else (levels,)
    if not all(isinstance(p, Real) and 1 <= float(p) < 100 for p in found):
        raise ValueError(
            "`levels` (--level) must be percentages of 1 or more and below 100, such as (80, 95). "
            f"Received: {levels!r}"
        )
    return tuple(int(p) if p == int(p) else float(p) for p in found)
