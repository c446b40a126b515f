"""Series of a long data frame as arrays."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from trellis_series.calendars import Calendar, parse_times
from trellis_series.files import check_columns

_MOST_CATEGORIES = 50
_MOST_MISSING = 1_000_000  # rows, or twenty times the table's


@dataclasses.dataclass
class Columns:
    """The names of a table's columns, and of the covariates by what is known of them when."""

    id: str = "unique_id"
    time: str = "ds"
    target: str = "y"
    past: tuple[str, ...] = ()
    future: tuple[str, ...] = ()
    static: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """The covariates that are known up to the present."""
        return (*self.past, *self.static)


@dataclasses.dataclass
class History:
    """One series: values (time,) and covariates (time, channels) that rise by one step."""

    name: Any
    y: np.ndarray
    future: np.ndarray
    past: np.ndarray
    times: pd.Index  # plain

    def before(self, end: int) -> "History":
        """Returns the first steps of the series."""
        y, future, past = self.y[:end], self.future[:end], self.past[:end]
        return History(self.name, y, future, past, self.times[:end])


class Encoder:
    """Turns columns into channels: numbers are standardized, others become indicators."""

    def __init__(self, frame: pd.DataFrame, names: Sequence[str]) -> None:
        self.columns: dict[str, list] = {}
        for name in names:
            values = frame[name]
            if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
                values = values.astype("float64")
                known = values[np.isfinite(values)]
                if known.empty:
                    raise ValueError(f"The column {name!r} has no values.")
                deviation = float(known.std(ddof=0))
                self.columns[name] = ["number", float(known.mean()), deviation or 1.0]
            else:
                kinds = sorted(map(str, values.dropna().unique()))
                if not 0 < len(kinds) <= _MOST_CATEGORIES:
                    raise ValueError(
                        f"A column of names may have at most {_MOST_CATEGORIES} different ones. "
                        f"Received: {len(kinds)} in {name!r}"
                    )
                self.columns[name] = ["names", *kinds]

    @classmethod
    def restored(cls, columns: dict[str, list]) -> "Encoder":
        """Returns the encoder with these `columns`."""
        encoder = cls(pd.DataFrame(), ())
        encoder.columns = dict(columns)
        return encoder

    def __call__(self, frame: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
        """Returns channels (rows, channels), NaN where a value is missing."""
        parts = [np.zeros((len(frame), 0))]
        for name in names:
            kind, *about = self.columns[name]
            if kind == "number":
                values = pd.to_numeric(frame[name], errors="coerce").to_numpy("float64")
                parts.append(((values - about[0]) / about[1])[:, None])
            else:
                values = frame[name].astype(object)
                found = values.map(str).to_numpy()[:, None] == np.array(about)
                parts.append(np.where(values.isna().to_numpy()[:, None], np.nan, found))
        return np.concatenate(parts, axis=1)


def to_frame(data: Any, columns: Columns) -> pd.DataFrame:
    """Returns a table as a data frame with the columns of a time and of a series.

    Args:
        data: pandas data frame, or one that converts to it, or a series. A time index stands for
            the column of times, and a series without one for equal steps.
        columns: `Columns`. A table without the column of names has one series.
    """
    if not isinstance(data, (pd.DataFrame, pd.Series)) and hasattr(data, "to_pandas"):
        data = data.to_pandas()
    if isinstance(data, (pd.Series, np.ndarray, list, tuple)):
        data = pd.Series(data) if not isinstance(data, pd.Series) else data
        if not isinstance(data.index, (pd.DatetimeIndex, pd.PeriodIndex, pd.TimedeltaIndex)):
            data = data.reset_index(drop=True)
        data = data.rename_axis(columns.time).rename(columns.target).reset_index()
    if not isinstance(data, pd.DataFrame):
        raise ValueError(
            f"Data must be a data frame or a series of pandas. Received: {type(data).__name__}"
        )
    frame = data
    if columns.time not in frame.columns:
        in_index = columns.time in frame.index.names
        kinds = (pd.DatetimeIndex, pd.PeriodIndex, pd.TimedeltaIndex)
        if in_index or columns.id in frame.index.names:
            frame = frame.reset_index()
        elif isinstance(frame.index, kinds):
            frame = frame.rename_axis(columns.time).reset_index()
    if columns.id not in frame.columns and columns.id == Columns.id:
        frame = frame.assign(**{columns.id: "series"})
    return frame


def read_panel(
    frame: pd.DataFrame,
    columns: Columns,
    freq: str | int | None = None,
    calendar: Calendar | None = None,
    encoder: Encoder | None = None,
    dayfirst: bool | None = None,
) -> tuple[list[History], Calendar, Encoder]:
    """Returns the series of a table, with missing rows filled.

    Args:
        frame: Data frame, see `to_frame`.
        columns: `Columns`.
        freq: Frequency of the times. Defaults to `None`, inferred from the longest series.
        calendar, encoder: Those of an earlier table. Default to `None`.
        dayfirst: See `parse_times`.

    Raises:
        ValueError: If columns are missing or not as described, times are repeated or do not rise by
            one step, or a series has no values.
    """
    covariates = [*columns.future, *columns.known]
    check_columns([columns.id, columns.time, columns.target, *covariates], frame.columns)
    if frame.empty:
        raise ValueError("The table has no rows.")
    if frame[columns.id].isna().any():
        raise ValueError(f"The column {columns.id!r} has missing names.")
    y = numbers(frame[columns.target])
    times = parse_times(frame[columns.time], dayfirst)
    codes, names = pd.factorize(frame[columns.id])
    if calendar is None:
        longest = times[codes == np.bincount(codes).argmax()]
        calendar = Calendar.of(times, longest, freq)
    place, grid = _places(calendar, calendar.plain(times))
    encoder = Encoder(frame, covariates) if encoder is None else encoder
    future, past = (encoder(frame, group) for group in (columns.future, columns.known))
    order = np.lexsort((place, codes))
    repeated = (np.diff(codes[order]) == 0) & (np.diff(place[order]) == 0)
    if repeated.any():
        row = order[np.flatnonzero(repeated)[0]]
        raise ValueError(
            f"The series {names[codes[row]]!r} has two rows of {times.iloc[row]}. Name the column "
            "of series if the table has several."
        )
    found, missing = [], 0
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        has_value = np.flatnonzero(~np.isnan(y[rows]))
        if not len(has_value):
            raise ValueError(f"The series {names[codes[rows[0]]]!r} has no values.")
        rows = rows[has_value[0] : has_value[-1] + 1]
        at = place[rows] - place[rows[0]]
        missing += at[-1] + 1 - len(at)
        if missing > max(_MOST_MISSING, 20 * len(frame)):
            raise ValueError(
                f"The times rise by {calendar.freq!r}, at which more than {missing:,} rows are "
                "missing. Pass another `freq`."
            )
        steps = grid[place[rows[0]] : place[rows[-1]] + 1]
        ahead, known = (_carried(_spread(part[rows], at)) for part in (future, past))
        found.append(History(names[codes[rows[0]]], _spread(y[rows], at), ahead, known, steps))
    if missing:
        warnings.warn(f"{missing:,} missing rows were added to the table.", stacklevel=3)
    return found, calendar, encoder


def read_future(
    frame: pd.DataFrame,
    columns: Columns,
    calendar: Calendar,
    encoder: Encoder,
    needed: dict[Any, pd.Index],
) -> dict[Any, np.ndarray]:
    """Returns the covariates (steps, channels) of the steps to forecast, by series.

    Args:
        frame: Data frame with the columns of series, times and covariates known in the future.
        columns, calendar, encoder: Those of the fitted table.
        needed: The plain times of the steps of each series.

    Raises:
        ValueError: If a value is missing.
    """
    check_columns([columns.id, columns.time, *columns.future], frame.columns, "`X_df`")
    channels = encoder(frame, columns.future)
    plain = calendar.plain(parse_times(frame[columns.time]))
    rows = pd.Series(np.arange(len(frame)), [frame[columns.id], plain])
    rows = rows[~rows.index.duplicated()]
    found = {}
    for name, times in needed.items():
        at = rows.reindex(pd.MultiIndex.from_product([[name], times]))
        wrong = at.isna().to_numpy()
        if not wrong.any():
            found[name] = channels[at.to_numpy(int)]
            wrong = np.isnan(found[name]).any(axis=1)
        if wrong.any():
            raise ValueError(
                f"`X_df` must have {', '.join(map(repr, columns.future))} of all {len(times)} "
                f"steps of the series {name!r}. Received: no value at "
                f"{calendar.written(times[wrong])[0]}"
            )
    return found


def numbers(values: pd.Series) -> np.ndarray:
    """Returns a column as float64, with NaN where a value is missing.

    Raises:
        ValueError: If a value is not a finite number.
    """
    try:
        found = pd.to_numeric(values).to_numpy("float64", na_value=np.nan)
    except (ValueError, TypeError):
        wrong = values[pd.to_numeric(values, errors="coerce").isna() & values.notna()]
        raise ValueError(
            f"The column {values.name!r} must have numbers. Received: {wrong.iloc[0]!r}"
        ) from None
    if np.isinf(found).any():
        raise ValueError(f"The column {values.name!r} has infinite values.")
    return found


def _places(calendar, plain):
    """Returns the place of each time on the grid of all times, and the grid."""
    times, inverse = np.unique(plain, return_inverse=True)
    size = calendar.size(times[0], times[-1])
    if size > max(_MOST_MISSING, 20 * len(plain)):
        raise ValueError(
            f"The times rise by {calendar.freq!r}, at which there are {size:,} steps between "
            f"{times[0]} and {times[-1]}. Received: {len(times):,} times. Is one of them wrong?"
        )
    grid = calendar.grid(times[0], times[-1])
    places = grid.get_indexer(times)
    if (places < 0).any():
        raise ValueError(
            f"The times rise by {calendar.freq!r}, but {times[places < 0][0]} is between two "
            "steps. Pass another `freq`, or aggregate the table."
        )
    return places[inverse], grid


def _spread(values, at):
    """Returns values at these rows of an array, NaN at the others."""
    found = np.full((at[-1] + 1, *values.shape[1:]), np.nan)
    found[at] = values
    return found


def _carried(values):
    """Returns covariates whose missing values are the last known ones, or the mean."""
    return pd.DataFrame(values).ffill().fillna(0.0).to_numpy("float64")
