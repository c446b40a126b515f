"""Series of a long data frame as arrays."""

import contextlib
import dataclasses
import difflib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from trellis_series.times import check_steps, day_order, infer_freq, parse_times, time_grid

UNNAMED = "series"  # the name of the series of a table without the column of names
_MOST_CATEGORIES = 50
_FAR = 20  # from the other values, in units of their range
_FEWEST_VALUES = 10  # different ones of a series, of which one can be far from the others
_RENUMBER = "If the rows are equal steps, renumber them with `reset_index(drop=True)`."
_TIME_INDEXES = (pd.DatetimeIndex, pd.PeriodIndex, pd.TimedeltaIndex)


@dataclasses.dataclass
class Columns:
    """The names of a table's columns, with the covariates grouped by when they are known."""

    id: str = "unique_id"
    time: str = "ds"
    target: str = "y"
    past: tuple[str, ...] = ()
    future: tuple[str, ...] = ()
    static: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, str]:
        """The names of the columns of series, times and values, as arguments of utilsforecast."""
        return {"id_col": self.id, "time_col": self.time, "target_col": self.target}

    @property
    def covariates(self) -> tuple[str, ...]:
        """All covariates, those known in the future first."""
        return (*self.future, *self.past, *self.static)


@dataclasses.dataclass
class History:
    """One series: values (time,) and covariates (time, channels) at evenly spaced times."""

    name: Any
    times: pd.Index
    y: np.ndarray
    future: np.ndarray
    past: np.ndarray

    def __getitem__(self, steps: slice) -> "History":
        """Returns some steps of the series."""
        parts = (self.times, self.y, self.future, self.past)
        return History(self.name, *(part[steps] for part in parts))


def to_frame(data: Any, columns: Columns) -> pd.DataFrame:
    """Returns a table as a data frame with the columns of a time and of a series.

    A time index stands for the column of times, as does the integer index of a series; others are
    equal steps. A table without the column of names has one series.
    """
    if hasattr(data, "to_pandas"):
        data = data.to_pandas()
    if not isinstance(data, pd.DataFrame):
        if pd.api.types.is_scalar(data):
            raise ValueError(f"Values must be a table or a series. Received: {data!r}")
        data = pd.Series(data).to_frame(columns.target)
        if data.index.nlevels == 1 and not isinstance(data.index, _TIME_INDEXES):
            is_time = pd.api.types.is_integer_dtype(data.index)
            data = (data if is_time else data.reset_index(drop=True)).rename_axis(columns.time)
    if columns.time not in data.columns and isinstance(data.index, _TIME_INDEXES):
        data = data.rename_axis(columns.time)
    if {columns.time, columns.id} & set(data.index.names) - set(data.columns):
        data = data.reset_index()
    if columns.id not in data.columns and columns.id == Columns.id:
        data = data.assign(**{columns.id: UNNAMED})
    return data


def read_panel(
    frame: pd.DataFrame,
    columns: Columns,
    freq: str | int | None = None,
    encoding: dict[str, list] | None = None,
    kind: Any = None,
    skip: bool = False,
    before: dict[Any, tuple[Any, Any]] | None = None,
) -> tuple[list[History], str | int, dict[str, list]]:
    """Returns the series of a table, with missing rows filled, the frequency and the encoding.

    Args:
        frame: Data frame, see `to_frame`.
        columns: `Columns`.
        freq: Frequency of the times. Defaults to `None`, inferred from the longest series.
            Periods have their own.
        encoding: How covariates, see `find_encoding`, and times, see `day_order`, are read.
            Defaults to `None`, found in the table.
        kind: The dtype that times must have. Defaults to `None`, any.
        skip: Boolean, whether to leave out series without values. Defaults to `False`, an error.
        before: The last known covariates of series before the table. Defaults to `None`, the means.
    """
    check_columns([columns.id, columns.time, columns.target, *columns.covariates], frame.columns)
    if frame.empty:
        raise ValueError("The table has no rows.")
    names = frame[columns.id]
    if names.isna().any():
        raise ValueError(f"The column {columns.id!r} has missing names.")
    if encoding is None:
        encoding = find_encoding(frame, columns.covariates)
        encoding[columns.time] = [day_order(frame[columns.time])]
    for name in columns.static:
        varies = frame.groupby(names, observed=True)[name].nunique() > 1
        if varies.any():
            raise ValueError(
                f"The column {name!r} must be constant for each series; if not, "
                "name it in `past` or `future`. Received: several values for the series "
                f"{varies.idxmax()!r}"
            )
    times = parse_times(frame[columns.time], *encoding[columns.time])
    if kind is not None and times.dtype != kind:
        raise ValueError(
            f"Times must have the dtype {kind}, as in the first table. Received: {times.dtype}"
        )
    if freq is not None and isinstance(freq, str) == pd.api.types.is_integer_dtype(times):
        raise ValueError(
            "`freq` must be an integer if times are integers, and a string otherwise. Received: "
            f"freq={freq!r}, times of dtype {times.dtype}"
        )
    groups = columns.future, (*columns.past, *columns.static)
    channels = [encode(frame, group, encoding, columns.static) for group in groups]
    split = 1 + channels[0].shape[1]
    rows = np.concatenate([numbers(frame[columns.target])[:, None], *channels], axis=1)
    values = pd.DataFrame(rows, pd.MultiIndex.from_arrays([names, times], names=["series", None]))
    _check_unique(values.index)
    if freq is None or isinstance(times.dtype, pd.PeriodDtype):
        freq = infer_freq(_longest(names, times))
    grid = time_grid(freq, pd.Index(times).unique().sort_values(), len(frame))
    found, missing, gaps = [], 0, 0
    for name, part in values.groupby("series", sort=False, observed=True):
        part = part.droplevel("series").sort_index()
        known = part.index[part[0].notna()]
        if not len(known):
            if skip:
                continue
            raise ValueError(f"The series {name!r} has no values. Leave it out.")
        # Covariates of rows without a value count, where they follow others.
        first = part.index[0] if name in (before or ()) else known[0]
        places = grid.get_indexer(part.loc[first : known[-1]].index)
        steps = grid[places[0] : places[-1] + 1]
        missing += len(steps) - len(places)
        gaps += int((np.diff(places) > 1).sum())
        check_steps(missing, len(frame), f"{missing:,} rows are missing at {freq!r}")
        part = part.reindex(steps)
        # Missing covariates are the last known ones, or the mean.
        y, *others = np.split(part.to_numpy(), [1, split], axis=1)
        filled = (pd.DataFrame(each).ffill().to_numpy() for each in others)
        starts = (before or {}).get(name, (0.0, 0.0))
        future, past = (
            np.where(np.isnan(each), start, each)
            for each, start in zip(filled, starts, strict=True)
        )
        found.append(History(name, steps, y[:, 0], future, past))
    # A long outage is one gap; with a wrong frequency, gaps follow most rows.
    if missing > len(frame) and 2 * gaps > len(frame):
        hint = "Pass another `freq` (--freq), aggregate the table, or add rows without values."
        if isinstance(freq, int):
            hint += f" {_RENUMBER}"
        with contextlib.suppress(ValueError):  # the times may have no frequency
            usual = infer_freq(_longest(names, times))
            if usual != freq:
                hint = (
                    f"Its times have the frequency {usual!r}: pass freq={usual!r} "
                    f"(--freq {usual}), or a table at {freq!r}."
                )
        raise ValueError(
            f"The table has {len(frame):,} rows, but {missing:,} more are missing at the frequency "
            f"{freq!r}. {hint}"
        )
    if missing:
        warnings.warn(f"{missing:,} missing rows were added to the table.", stacklevel=3)
    _warn_of_far_values(found)
    return found, freq, encoding


def _warn_of_far_values(found):
    """Warns if a value is so far from all others of its series that it may mean a missing one."""
    for series in found:
        values = np.unique(series.y[~np.isnan(series.y)])
        if len(values) < _FEWEST_VALUES:
            continue
        for far, others in ((values[0], values[1:]), (values[-1], values[:-1])):
            low, high = others[0], others[-1]
            if max(low - far, far - high) > _FAR * (high - low):
                time = series.times[np.argmax(series.y == far)]
                warnings.warn(
                    f"The series {series.name!r} has the value {far:.10g} at {time}, but all other "
                    f"values are between {low:.10g} and {high:.10g}. If it stands for a missing "
                    "value, leave the value out.",
                    stacklevel=4,
                )
                return


def _longest(names, times):
    """Returns the sorted times of the series with most rows."""
    return pd.Index(times[(names == names.value_counts().index[0]).to_numpy()]).sort_values()


def read_future(
    frame: pd.DataFrame,
    columns: Columns,
    encoding: dict[str, list],
    needed: dict[Any, pd.Index],
) -> dict[Any, np.ndarray]:
    """Returns the covariates (steps, channels) by series, at the times that each needs."""
    check_columns([columns.id, columns.time, *columns.future], frame.columns, "`X_df`")
    rows = encode(frame, columns.future, encoding)
    known = parse_times(frame[columns.time], *encoding[columns.time])
    values = pd.DataFrame(rows, [frame[columns.id], known])
    _check_unique(values.index)
    found = {}
    for name, times in needed.items():
        ahead = values.reindex(pd.MultiIndex.from_product([[name], times])).to_numpy()
        wrong = np.isnan(ahead).any(axis=1)
        if wrong.any():
            raise ValueError(
                f"The {len(times)} rows after the last value of the series {name!r} must have "
                f"{', '.join(map(repr, columns.future))}. Received: no value at {times[wrong][0]}. "
                "Add the rows that are missing, or pass a shorter `horizon` (--horizon)."
            )
        found[name] = ahead
    return found


def _check_unique(index):
    repeated = index.duplicated()
    if repeated.any():
        name, time = index[repeated][0]
        advice = "Keep one of them, or add them up"
        if name == UNNAMED:
            advice = "Name the column of series, `id_col` (--series COLUMN), if there are several"
        other = "Write times with their offset from UTC if clocks change."
        if pd.api.types.is_integer(time):
            other = _RENUMBER
        raise ValueError(f"The series {str(name)!r} has two rows of {time}. {advice}. {other}")


def find_encoding(frame: pd.DataFrame, names: Sequence[str]) -> dict[str, list]:
    """Returns how columns become channels: numbers by mean and deviation, others by categories."""
    found: dict[str, list] = {}
    for name in names:
        values = frame[name].dropna().infer_objects()
        if values.empty:
            raise ValueError(f"The column {name!r} has no values.")
        if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
            known = numbers(values)
            mean, deviation = float(known.mean()), float(known.std())
            found[name] = [mean, deviation if deviation > 1e-9 * abs(mean) else 1.0]  # rounding
        else:
            found[name] = sorted(map(str, values.unique()))
            if len(found[name]) > _MOST_CATEGORIES:
                raise ValueError(
                    f"A categorical covariate may have at most {_MOST_CATEGORIES} categories. "
                    f"Received: {len(found[name])} in {name!r}"
                )
    return found


def known_scales(
    frame: pd.DataFrame, columns: Columns, encoding: dict[str, list], ends: dict[Any, Any]
) -> dict[str, list]:
    """Returns the means and deviations of covariates in the rows up to a time of each series."""
    rows = frame[frame[columns.id].isin([*ends])]
    times = parse_times(rows[columns.time], *encoding[columns.time])
    known = rows[(times <= rows[columns.id].astype(object).map(ends)).to_numpy()]
    scaled = [name for name in columns.covariates if isinstance(encoding[name][0], float)]
    return find_encoding(known, [name for name in scaled if known[name].notna().any()])


def encode(
    frame: pd.DataFrame,
    names: Sequence[str],
    encoding: dict[str, list],
    static: Sequence[str] = (),
) -> np.ndarray:
    """Returns channels (rows, channels): standardized numbers, and indicators of categories.

    Missing numbers are NaN, and so are missing categories of `static` columns. The indicators of
    other missing categories are zero.
    """
    parts = [np.zeros((len(frame), 0))]
    for name in names:
        about = encoding[name]
        if isinstance(about[0], float):
            parts.append(((numbers(frame[name]) - about[0]) / about[1])[:, None])
        else:
            texts = frame[name].astype(object).map(str, na_action="ignore")
            unknown = sorted({*texts.dropna()} - {*about})
            if unknown:
                raise ValueError(
                    f"The column {name!r} must have only the categories seen when fitting, "
                    f"{', '.join(about)}. Received: {unknown[0]!r}"
                )
            is_kind = np.stack([texts == kind for kind in about], axis=1).astype(float)
            if name in static:
                is_kind[texts.isna()] = np.nan
            parts.append(is_kind)
    return np.concatenate(parts, axis=1)


def numbers(values: pd.Series) -> np.ndarray:
    """Returns a column as float64, with NaN where a value is missing."""
    # As numbers, times would be nanoseconds, and complex numbers their real parts.
    plain = values.astype(str) if values.dtype.kind in "mMc" else values
    found = pd.to_numeric(plain, errors="coerce").astype("float64")
    wrong = values[(found.isna() & values.notna()) | np.isinf(found)]
    if len(wrong):
        raise ValueError(
            f"The column {values.name!r} must have finite numbers. Received: {wrong.tolist()[0]!r}"
        )
    return found.to_numpy()


def check_columns(names: Iterable[Any], columns: Iterable[Any], where: str = "The table") -> None:
    """Raises ValueError unless a table has these columns, and names the nearest one."""
    columns = list(columns)
    for name in names:
        if name not in columns:
            near = {str(column).casefold(): column for column in columns}
            found = difflib.get_close_matches(str(name).casefold(), near, 1)
            hint = f" Did you mean {near[found[0]]!r}?" if found else ""
            some = ", ".join(repr(column) for column in columns[:20])
            raise ValueError(f"{where} has no column {name!r}.{hint} Its columns: {some}.")
        if columns.count(name) > 1:
            raise ValueError(f"{where} has several columns {name!r}.")
