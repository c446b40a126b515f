"""Turns time series in CSV files, arrays and data frames into batches for `fit`.

    series = TimeSeries.from_csv("load.csv", Columns(["load"], time="time"))
    train, valid, test = series.split(window=168, horizon=24)
    model.adapt(train.rows())
    model.fit(WindowStream(train, batch_size=64, shuffle=True), shuffle=False)

All values stay in the units of the data; models standardize them. Missing values are NaN, which
models exclude from the loss and the metrics.
"""

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trellis_keras.data.streams import Batch, ExampleStream, check_integer
from trellis_keras.data.text import Shares, check_shares
from trellis_keras.forecasting.columns import Columns, Table, as_arrow, read_table
from trellis_keras.forecasting.csv_file import CSVFile
from trellis_keras.forecasting.precision import Float32

DEFAULT_SPLIT = (0.7, 0.15, 0.15)
_ROWS_AT_ONCE = 2**14
_WINDOWS_AT_ONCE = 2**12
FIRST_NAMES = 5  # of skipped series, in a message
_USUAL = 0.25  # share of the time differences that must equal the usual step
_HOUR, _DAY = np.timedelta64(1, "h"), np.timedelta64(1, "D")


def first_names(names: Sequence[str]) -> str:
    """Returns the first names, and how many there are if several, for a message."""
    if len(names) == 1:
        return repr(names[0])
    shown = ", ".join(map(repr, names[:FIRST_NAMES]))
    return f"{len(names)} ({shown}{', ...' * (len(names) > FIRST_NAMES)})"


def warn_left_out(parts: Sequence[Any], rows: str, count: int) -> None:
    """Warns of series without a window in the training, validation or test part.

    Args:
        parts: The windows of the three parts, each with `left_out`, names of series.
        rows: What a window needs, for the message.
        count: Number of series.
    """
    names = zip(("train", "valid", "test"), (part.left_out for part in parts), strict=True)
    found = [f"of {part}: {first_names(left_out)}" for part, left_out in names if left_out]
    if found:
        warnings.warn(
            f"Of {count} series, those without a window of {rows} in a part are left out of it: "
            f"{'; '.join(found)}",
            stacklevel=3,
        )


class TimeSeries:
    """One or more time series, one after the other in an array that may be memory-mapped.

    Args:
        values: Array (rows, channels): targets first, then past covariates, and last the covariates
            known in the future. Missing values are NaN. A float32 array in C order is not copied.
        targets: Positive integer, number of targets. Defaults to 1.
        future_channels: Integer, number of channels known in the future. Defaults to 0.
        lengths: Number of rows of each series. Defaults to `None`, one series.
        times: Array (rows,) of datetime64 or integers, rising by one step within each series.
            Defaults to `None`, rows at equal steps.
        names: Names of the series. Defaults to their numbers.
        columns: `Columns` of the table, or `None`.
        utc: Boolean, whether the times are in UTC. Defaults to `False`, local times.

    Raises:
        ValueError: If an argument is not as described, a target has no values, a value is
            infinite, float32 cannot tell the values of a channel apart, or a static column varies
            within a series.

    Example:

    >>> series = TimeSeries(np.arange(60.0).reshape(30, 2))
    >>> train, valid, test = series.split(window=4, horizon=2)
    >>> len(train), len(valid), len(test)
    (16, 4, 3)
    >>> x, y, weight = WindowStream(train, batch_size=8)[0]
    >>> x.shape, y.shape, weight.shape
    ((8, 4, 2), (8, 2, 1), (8,))
    """

    def __init__(
        self,
        values: np.ndarray,
        targets: int = 1,
        future_channels: int = 0,
        *,
        lengths: Sequence[int] | None = None,
        times: np.ndarray | None = None,
        names: Sequence[str] | None = None,
        columns: Columns | None = None,
        utc: bool = False,
    ):
        values = np.asanyarray(values)
        if values.ndim != 2 or not values.size:
            raise ValueError(
                f"`values` must be rank 2, (rows, channels). Received: shape {values.shape}"
            )
        if values.dtype.kind not in "biuf":
            raise ValueError(f"`values` must be numbers. Received: dtype {values.dtype}")
        self.targets = check_integer("targets", targets, 1)
        self.future_channels = check_integer("future_channels", future_channels, 0)
        if self.targets + self.future_channels > values.shape[1]:
            raise ValueError(
                f"`values` must have {self.targets} targets and {self.future_channels} future "
                f"channels. Received: {values.shape[1]} channels"
            )
        self.lengths = tuple([len(values)] if lengths is None else lengths)
        if sum(self.lengths) != len(values) or min(self.lengths) < 1:
            raise ValueError(
                f"`lengths` must be positive and add up to the {len(values)} rows. "
                f"Received: lengths={list(self.lengths)}"
            )
        self.ends = np.cumsum(self.lengths)
        self.names = tuple(map(str, range(len(self.lengths)) if names is None else names))
        self.columns = columns
        self.values = self._as_float32(values)
        self.times = None if times is None else np.asarray(times)
        self.utc = utc
        self.step = None if times is None else self._common_step()
        self._check_values()
        self._check_static()

    @classmethod
    def from_csv(cls, path: str | os.PathLike, columns: Columns) -> "TimeSeries":
        """Reads a CSV file, whose first line names the columns, in constant memory.

        The values are written to a temporary file and memory-mapped. Empty fields, `NA`, `N/A`,
        `NaN`, `null` and `none` are missing values. Rows must be sorted by series and time. Times
        with an offset from UTC are converted to UTC.

        Args:
            path: The file, with `,`, `;` or tab between fields. Its name may end with `.gz`.
            columns: `Columns`; the file may have others, in any order.

        Raises:
            ValueError: If a column is missing or holds text, times do not rise by one step, or the
                file is not CSV in UTF-8. The message names the line.
            OSError: If the file cannot be read.
        """
        series, _ = cls._from_csv(path, columns)
        return series

    @classmethod
    def from_labelled_csv(
        cls, path: str | os.PathLike, columns: Columns, label: str
    ) -> tuple["TimeSeries", np.ndarray, tuple[str, ...]]:
        """Reads a CSV file with a column of class names.

        Args:
            path, columns: As in `from_csv`.
            label: Name of the column.

        Returns:
            The series, the int32 array (rows,) of classes, -1 where the name is missing, and the
            names of the classes.
        """
        series, table = cls._from_csv(path, columns, label)
        return series, table.labels, table.classes

    @classmethod
    def _from_csv(cls, path, columns, label=None):
        file = CSVFile(path)
        where = str(file.path)
        used = columns if label is None else Columns((*columns.all, label))
        blocks = file.blocks(used.find(file.header, where))
        table = read_table(columns, blocks, where, file.place, label)
        return cls._from_table(table, columns, where), table

    @classmethod
    def _from_table(cls, table: Table, columns: Columns, where: str) -> "TimeSeries":
        try:
            return cls(
                table.values,
                len(columns.targets),
                columns.future_channels,
                lengths=list(table.lengths.values()) or None,
                times=table.times,
                names=list(table.lengths) or None,
                columns=columns,
                utc=table.utc,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @classmethod
    def from_frame(cls, frame: Any, columns: Columns) -> "TimeSeries":
        """Reads a pandas or polars data frame, an Arrow table or a dict of arrays.

        Args:
            frame: The table. The index of a pandas frame is not used.
            columns: `Columns`; the frame may have others, in any order.

        Raises:
            ValueError: As in `from_csv`, or if `frame` is not a table.
        """
        is_arrow = isinstance(frame, pa.Table)
        header = frame.column_names if is_arrow else getattr(frame, "columns", None)
        header = list(frame) if isinstance(frame, Mapping) else header
        if header is None:
            raise ValueError(
                "A table must be a CSV file, a data frame, an Arrow table or a dict of arrays. "
                f"Received: {type(frame).__name__}"
            )
        index = getattr(getattr(frame, "index", None), "names", ())
        for name in columns.all:
            if name in index and name not in header:
                raise ValueError(
                    f"The column {name!r} is in the index of the frame, which is ignored: pass "
                    "`frame.reset_index()`."
                )
        columns.find(list(header), "The frame")
        arrays = {n: frame[n] if is_arrow else np.asarray(frame[n]) for n in columns.all}
        rows = len(arrays[columns.targets[0]])
        blocks = (
            {name: as_arrow(array[i : i + _ROWS_AT_ONCE]) for name, array in arrays.items()}
            for i in range(0, rows, _ROWS_AT_ONCE)
        )
        table = read_table(columns, blocks, "The frame", lambda row: f"row {row}")
        return cls._from_table(table, columns, "The frame")

    @classmethod
    def from_arrays(
        cls,
        targets: np.ndarray | Sequence[np.ndarray],
        past: np.ndarray | Sequence[np.ndarray] | None = None,
        future: np.ndarray | Sequence[np.ndarray] | None = None,
        static: np.ndarray | Sequence[np.ndarray] | None = None,
    ) -> "TimeSeries":
        """Joins arrays by role. To share the memory of an array, call the constructor.

        Args:
            targets: Array (time,) or (time, targets), or a list with one for each series.
            past, future: Arrays (time, covariates) of the same length, or lists of them. Defaults
                to `None`.
            static: Array (features,), or (series, features) for several series. Defaults to `None`.

        Raises:
            ValueError: If lengths or numbers of series differ.
        """
        roles = {"targets": targets, "past": past, "future": future}
        lists = {name: _columns_of(name, given) for name, given in roles.items()}
        count = len(lists["targets"])
        lengths = [len(one) for one in lists["targets"]]
        if static is not None:
            features = np.atleast_2d(np.asarray(static, "float64"))
            if len(features) != count:
                raise ValueError(
                    f"`static` must have one row for each of the {count} series. "
                    f"Received: shape {np.shape(static)}"
                )
            pairs = zip(features, lengths, strict=True)
            lists["static"] = [np.broadcast_to(row, (n, len(row))) for row, n in pairs]
        given = {name: arrays for name, arrays in lists.items() if arrays}
        for name, arrays in given.items():
            if [len(one) for one in arrays] != lengths:
                raise ValueError(
                    f"`{name}` must be as long as `targets`, {lengths}. "
                    f"Received: {[len(one) for one in arrays]}"
                )
        values = np.concatenate(
            [np.concatenate(parts, axis=1) for parts in zip(*given.values(), strict=True)]
        )
        future_channels = sum(given[n][0].shape[1] for n in ("future", "static") if n in given)
        return cls(values, given["targets"][0].shape[1], future_channels, lengths=lengths)

    @property
    def checksum(self) -> str:
        """Hexadecimal SHA-256 of values, times and columns."""
        digest = hashlib.sha256(repr((self.lengths, self.names, self.columns)).encode())
        digest.update(self.values.data)
        if self.times is not None:
            digest.update(self.times.astype("int64").data)
        return digest.hexdigest()

    def rows(self, i: int) -> slice:
        """Returns the rows of series `i`."""
        return slice(int(self.ends[i]) - self.lengths[i], int(self.ends[i]))

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Returns a copy of `count` rows from each start, (batch, count, channels)."""
        channels = self.values.shape[1]
        # These are contiguous in the flat array.
        flat = self.values.reshape(-1)
        blocks = np.lib.stride_tricks.sliding_window_view(flat, count * channels)
        return blocks[starts * channels].reshape(-1, count, channels)

    def split(
        self, window: int, horizon: int, *, stride: int = 1, shares: Shares = DEFAULT_SPLIT
    ) -> tuple["Windows", "Windows", "Windows"]:
        """Splits by time into windows for training, validation and test.

        Each value is a target in one part only, and the training part precedes the validation part.
        Windows of a later part may read the rows before it. Several series with times are split at
        the same times. A part leaves out series without a window in it, and a warning names them.

        Args:
            window: Positive integer, number of rows that a model reads.
            horizon: Positive integer, number of rows that it forecasts.
            stride: Positive integer, rows from the start of a window to the next. Defaults to 1.
            shares: Three positive shares (train, valid, test) of the time. Defaults to
                `(0.7, 0.15, 0.15)`.

        Raises:
            ValueError: If an argument is not as described, a part is too short for a window, or all
                targets of the training or validation part are missing.
        """
        train, valid, _ = check_shares("shares", shares)
        ends = [int(end) for end in self.ends]
        starts = [end - length for end, length in zip(ends, self.lengths, strict=True)]
        cuts = [starts, *(self.cut(s, starts, ends) for s in (train, train + valid)), ends]
        parts = []
        for name, first, last in zip(("train", "valid", "test"), cuts, cuts[1:], strict=False):
            windows = Windows(self, window, horizon, stride, first, last)
            if not len(windows):
                spans = [_longest(*pair) for pair in zip(cuts, cuts[1:], strict=False)]
                needed = f"{horizon} rows" if name != "train" else f"{window} + {horizon} rows"
                raise ValueError(
                    f"The series are too short: the part {name!r} needs at least {needed} in a "
                    f"row for window={window}, horizon={horizon}. Received: "
                    f"{_longest(first, last)} at most, of series of {max(self.lengths)} rows. "
                    f"{_advice(spans)}"
                )
            rows = (part[:, : self.targets] for part in windows.rows())
            if name != "test" and all(np.isnan(part).all() for part in rows):
                raise ValueError(
                    f"All targets are missing in the part {name!r}. Change the shares of the parts "
                    f"so that it has known values. Received: shares={shares}"
                )
            parts.append(windows)
        warn_left_out(parts, f"{window} + {horizon} rows", len(self.names))
        return parts[0], parts[1], parts[2]

    def cut(self, share: float, first: Sequence[int], last: Sequence[int]) -> list[int]:
        """Returns, for each series, the row at a share of the time between two rows."""
        pairs = list(zip(first, last, strict=True))
        if self.times is None:
            return [a + round(share * (b - a)) for a, b in pairs]
        moments = self.times.astype("int64")
        start = min(moments[a] for a, b in pairs if b > a)
        end = max(moments[b - 1] for a, b in pairs if b > a)
        cut = start + share * (end - start + 1)
        return [a + int(np.searchsorted(moments[a:b], cut)) for a, b in pairs]

    def _as_float32(self, values):
        if values.dtype == "float32":
            return np.ascontiguousarray(values)
        precision = Float32()
        cast = np.empty(values.shape, "float32")
        for start in range(0, len(values), _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            cast[block] = precision.cast(values[block])
        precision.check([self._channel(i) for i in range(values.shape[1])])
        return cast

    def _check_values(self):
        has_value = np.zeros(self.values.shape[1], bool)
        for start in range(0, len(self.values), _ROWS_AT_ONCE):
            block = self.values[start : start + _ROWS_AT_ONCE]
            if np.isinf(block).any():
                row, channel = np.argwhere(np.isinf(block))[0]
                raise ValueError(
                    f"Values must be finite. Received: {block[row, channel]} in row {start + row} "
                    f"(counted from 0), {self._channel(channel)}"
                )
            has_value |= ~np.isnan(block).all(axis=0)
        if not has_value.all():
            empty = [self._channel(i) for i in np.flatnonzero(~has_value)]
            raise ValueError(f"All values are missing in {', '.join(empty)}.")

    def _channel(self, i):
        return f"channel {i}" if self.columns is None else f"column {self.columns.values[i]!r}"

    def _common_step(self):
        """Returns the common step of all series, or raises ValueError."""
        if self.times.shape != (len(self.values),):
            raise ValueError(
                f"`times` must have the shape ({len(self.values)},). "
                f"Received: shape {self.times.shape}"
            )
        is_time = self.times.dtype.kind == "M"
        candidates = [self.times]
        for shift in (0, _DAY) if is_time else ():  # starts or ends of months
            months = (self.times + shift).astype("datetime64[M]")
            if (months == self.times + shift).all():
                candidates.insert(0, months)
        for times in candidates:
            differences = [np.diff(times[self.rows(i)]) for i in range(len(self.lengths))]
            steps = {step for d in differences if len(d) for step in (d.min(), d.max())}
            if not steps:
                return None
            step = min(steps)
            if len(steps) == 1 and step > np.zeros((), step.dtype):
                return step
        raise ValueError(self._describe_steps())

    def _describe_steps(self):
        """Returns the message for times without a constant step: where, and what may help."""
        differences = [np.diff(self.times[self.rows(i)]) for i in range(len(self.lengths))]
        together = np.sort(np.concatenate(differences))
        step = together[len(together) // 2]  # the median
        zero = np.zeros((), step.dtype)
        wrong = [np.flatnonzero((each != step) | (each <= zero)) for each in differences]
        i = next(i for i, places in enumerate(wrong) if places.size)
        found = differences[i][wrong[i][0]]
        row = self.rows(i).start + int(wrong[i][0]) + 1
        is_usual = step > zero and np.mean(together == step) >= _USUAL
        usual = f", {_spoken(step)} here," if is_usual else ""
        within = f" of series {self.names[i]!r}" if len(self.names) > 1 else ""
        message = [
            f"Times must rise by one step{usual} in each series. Received: "
            f"{self.times[row]} after {self.times[row - 1]}{within}."
        ]
        if self.utc and step == _DAY and abs(found - step) == _HOUR:
            message.append("Days of 23 or 25 hours need dates without an offset from UTC.")
        elif found <= zero:
            message.append(
                "Sort the rows by series and time, and keep one row per time. Times are read to "
                "the second; leave out the column of times for shorter steps."
            )
        elif found > step and is_usual:
            message.append(
                "Add missing rows with their time and empty values. If rows are missing regularly, "
                "such as weekends, leave out the column of times."
            )
        else:
            message.append(
                "Resample the rows to equal steps, date months by their first or last day, or "
                "leave out the column of times."
            )
        if self.columns is not None and self.columns.series is None and found <= zero:
            message.append(
                "Rows of several series need a column that identifies the series: `series`."
            )
        if step.dtype.kind == "m" and not self.utc and abs(found - step) == _HOUR:
            message.append(
                "Where clocks change, write times in UTC or with their offset, such as "
                "2024-10-27T02:00+01:00."
            )
        return " ".join(message)

    def _check_static(self):
        names = () if self.columns is None else self.columns.static
        for channel, name in enumerate(names, self.values.shape[1] - len(names)):
            for i, series in enumerate(self.names):
                column = self.values[self.rows(i), channel]
                varies = (column != column[0]) & ~(np.isnan(column) & np.isnan(column[0]))
                if varies.any():
                    raise ValueError(
                        f"The static column {name!r} must be constant within a series. Received: "
                        f"{column[0]:g} and {column[varies][0]:g} in series {series!r}. For a "
                        "column that varies and is known in the future, use `future`."
                    )


class Windows:
    """Windows of series whose targets are in one part of the time, see `TimeSeries.split`.

    Args:
        series: `TimeSeries`.
        window: Positive integer, number of rows that a model reads.
        horizon: Positive integer, at most `window`, number of rows that it forecasts.
        stride: Positive integer, rows from the start of a window to the next.
        first, last: The rows of each series where the part starts and ends.
    """

    def __init__(
        self,
        series: TimeSeries,
        window: int,
        horizon: int,
        stride: int,
        first: Sequence[int],
        last: Sequence[int],
    ):
        self.series = series
        self.window = check_integer("window", window, 1)
        self.horizon = check_integer("horizon", horizon, 1)
        self.stride = check_integer("stride", stride, 1)
        if horizon > window:
            raise ValueError(
                "`horizon` must be at most `window`, since a window holds the covariates of the "
                f"whole horizon. Received: window={window}, horizon={horizon}"
            )
        self.first, self.last = list(first), list(last)
        beginnings = [series.rows(i).start for i in range(len(series.lengths))]
        self._starts = np.maximum(np.array(self.first) - window, beginnings)
        counts = (np.array(self.last) - window - horizon - self._starts) // stride + 1
        self._ends = np.cumsum(np.maximum(counts, 0))

    @classmethod
    def of_arrays(
        cls,
        arrays: Sequence[np.ndarray],
        window: int,
        horizon: int,
        targets: int = 1,
        future_channels: int = 0,
    ) -> "Windows":
        """Returns all windows of series.

        Args:
            arrays: Arrays (rows, channels), one for each series, as in `TimeSeries`.
            window, horizon: As above.
            targets, future_channels: As in `TimeSeries`.
        """
        lengths = [len(array) for array in arrays]
        series = TimeSeries(np.concatenate(arrays), targets, future_channels, lengths=lengths)
        ends = series.ends.tolist()
        return cls(series, window, horizon, 1, [0, *ends[:-1]], ends)

    def cut(self, share: float) -> tuple["Windows", "Windows"]:
        """Splits the windows of the part at a share of its time."""
        middle = self.series.cut(share, self.first, self.last)
        options = self.series, self.window, self.horizon, self.stride
        return Windows(*options, self.first, middle), Windows(*options, middle, self.last)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def of_series(self, i: int) -> range:
        """Returns the indices of the windows of series `i`, in order of time."""
        return range(0 if i == 0 else int(self._ends[i - 1]), int(self._ends[i]))

    @property
    def left_out(self) -> list[str]:
        """Names of the series without a window."""
        empty = np.flatnonzero(np.diff(self._ends, prepend=0) == 0)
        return [self.series.names[i] for i in empty]

    def starts(self, index: np.ndarray) -> np.ndarray:
        """Returns the first rows of the given windows."""
        which = np.searchsorted(self._ends, index, side="right")
        before = np.where(which > 0, self._ends[which - 1], 0)
        return self._starts[which] + (index - before) * self.stride

    def rows(self) -> list[np.ndarray]:
        """Returns the part's rows of each series, (rows, channels), whose statistics a model takes.

        They share the memory of the series.
        """
        pairs = zip(self.first, self.last, strict=True)
        return [self.series.values[a:b] for a, b in pairs if b > a]

    def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the inputs and targets of some windows.

        Args:
            index: Integer array (batch,).

        Returns:
            A tuple `(x, y)` of float32 arrays. `x`: (batch, window, channels); channels that are
            known in the future are `horizon` rows ahead. `y`: (batch, horizon, targets).
        """
        series, starts = self.series, self.starts(index)
        x = series.read(starts, self.window)
        y = series.read(starts + self.window, self.horizon)
        if known := series.future_channels:
            x[..., -known:] = series.read(starts + self.horizon, self.window)[..., -known:]
        return x, np.ascontiguousarray(y[..., : series.targets])

    def naive_forecast(self, index: np.ndarray, season: int) -> np.ndarray:
        """Returns the seasonal naive forecast of some windows, float32 (batch, horizon, targets).

        The forecast of a row is the last value within the window that is a whole number of seasons
        before it, or NaN if that value is missing.

        Args:
            index: Integer array (batch,).
            season: Positive integer, number of rows after which the series repeat.
        """
        season = check_integer("season", season, 1)
        steps = np.arange(self.horizon)
        rows = self.starts(index)[:, None] + self.window + steps
        earlier = rows - season * (steps // season + 1)
        which = np.searchsorted(self.series.ends, rows, side="right")
        is_inside = earlier >= self.series.ends[which] - np.array(self.series.lengths)[which]
        known = self.series.values[np.where(is_inside, earlier, 0), : self.series.targets]
        return np.where(is_inside[..., None], known, np.float32(np.nan))

    def naive_error(self, season: int) -> np.ndarray:
        """Returns the mean absolute error of the seasonal naive forecast, (targets,).

        Args:
            season: Positive integer, number of rows after which the series repeat.
        """
        total, count = np.zeros((2, self.series.targets))
        for first in range(0, len(self), _WINDOWS_AT_ONCE):
            index = np.arange(first, min(first + _WINDOWS_AT_ONCE, len(self)))
            rows = (self.starts(index) + self.window)[:, None] + np.arange(self.horizon)
            now = self.series.values[rows, : self.series.targets]
            errors = np.abs(now - self.naive_forecast(index, season))
            total += np.nansum(errors, axis=(0, 1), dtype="float64")
            count += np.count_nonzero(~np.isnan(errors), axis=(0, 1))
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


class WindowStream(ExampleStream):
    """Batches `(x, y, weight)` of windows of time series.

    - `x`: float32 (batch_size, window, channels);
    - `y`: float32 (batch_size, horizon, targets), NaN where a value is missing; for labelled
      windows int32 (batch_size,);
    - `weight`: float32 (batch_size,), 0 for windows that only pad the last batch.

    All batches have the same shape, so XLA compiles once. They are read from the series, which may
    be memory-mapped, as they are needed. Order and epochs are as in `SequenceStream`.

    Args:
        windows: `Windows` or `LabelledWindows`.
        batch_size: Positive integer, number of windows in a batch.
        seed: Nonnegative integer, determines the order. Defaults to 0.
        shuffle: Boolean, whether to shuffle the windows in each epoch. Defaults to `False`.
    """

    def __init__(self, windows: Any, batch_size: int, seed: int = 0, shuffle: bool = False):
        self.windows = windows
        dtype = "int32" if len(windows) < 2**31 else "int64"
        super().__init__([np.arange(len(windows), dtype=dtype)], batch_size, seed, shuffle)

    @property
    def sequences_counted(self) -> int:
        """Number of windows in one epoch."""
        return len(self.windows)

    def _batch(self, group, rows, counts) -> Batch:
        return *self.windows.read(rows.astype("int64")), counts


def _spoken(step):
    """Returns a step as text in its largest unit, such as 7 days."""
    if step.dtype.kind == "m" and step.dtype != np.dtype("m8[M]"):
        for unit in "Dhms":
            whole = step.astype(f"m8[{unit}]")
            if whole == step:
                return str(whole).removesuffix("s") if whole == 1 else str(whole)
    return str(step)


def _longest(first, last):
    return max(b - a for a, b in zip(first, last, strict=True))


def _advice(spans):
    """Returns advice on windows that fit parts of the given numbers of rows."""
    steps = min(spans[1:])
    if not 0 < steps <= spans[0] - steps:
        return "More rows are needed."
    return (
        f"Forecast at most {steps} steps from {spans[0] - steps} rows, or change the shares of the "
        "parts."
    )


def _columns_of(name, given):
    """Returns float64 arrays (time, columns), one per series."""
    if given is None:
        return []
    arrays = [given] if hasattr(given, "ndim") else list(given)
    arrays = [np.asarray(one, "float64") for one in arrays]
    arrays = [one[:, None] if one.ndim == 1 else one for one in arrays]
    if not arrays or any(one.ndim != 2 for one in arrays):
        raise ValueError(
            f"`{name}` must be an array (time, columns), or a list of them. "
            f"Received: shapes {[one.shape for one in arrays]}"
        )
    return arrays
