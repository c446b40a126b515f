"""The columns of a table of time series: their roles, and how to read their values."""

import array
import dataclasses
import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keras_streams.files import annotate_error
from trellis_keras.forecasting.csv_file import first_refused, try_cast
from trellis_keras.forecasting.precision import Float32

_SHOWN = 20  # columns in an error message
_LONGEST = 60  # characters of a value there
_MISSING = pa.array(["", "na", "n/a", "<na>", "nan", "null", "none"])
_KINDS = {"integers": pa.int64(), "dates": pa.timestamp("s"), "UTC": pa.timestamp("s", "UTC")}
_TIMES = "must hold times such as 2024-01-31 13:00, or integers"
_ONE_KIND = (
    "must hold one kind of times: all with an offset from UTC, all without one, or all integers"
)
_TOGETHER = "must keep the rows of a series together: sort them by series and time"
_YEARS = (1700, 2200)  # valid years in times such as 20240131


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a table of time series.

    Args:
        targets: Names of the columns to forecast, at least one.
        past: Names of covariates known up to the present only. Defaults to `()`.
        future: Names of covariates also known in the future. Defaults to `()`.
        static: Names of features that do not change within a series. Defaults to `()`.
        time: Name of the column of times: ISO 8601, `20240131`, `202401` or `2024 Q1`, or integers.
            Defaults to `None`, rows at equal steps.
        series: Name of the column that identifies the series. Defaults to `None`, one series.

    Raises:
        ValueError: If there is no target, a name occurs twice, or `series="step"` without `time`.
    """

    targets: Sequence[str]
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    static: Sequence[str] = ()
    time: str | None = None
    series: str | None = None

    def __post_init__(self):
        for field in ("targets", "past", "future", "static"):
            names = getattr(self, field)
            names = (names,) if isinstance(names, str) else tuple(names)
            object.__setattr__(self, field, names)
        if not self.targets:
            raise ValueError("`targets` must name at least one column. Received: none")
        repeated = sorted({name for name in self.all if self.all.count(name) > 1})
        if repeated:
            raise ValueError(f"Each column has one role. Received twice: {', '.join(repeated)}")
        if self.time is None and self.series == "step":
            raise ValueError(
                "Without `time`, forecasts have a column 'step' of their own. Rename the column "
                "that identifies the series. Received: series='step'"
            )

    @property
    def values(self) -> tuple[str, ...]:
        """The numeric columns, in the order of the channels."""
        return (*self.targets, *self.past, *self.future, *self.static)

    @property
    def all(self) -> tuple[str, ...]:
        """All columns."""
        others = (name for name in (self.time, self.series) if name is not None)
        return (*self.values, *others)

    @property
    def future_channels(self) -> int:
        """Number of channels known in the future, which come last."""
        return len(self.future) + len(self.static)

    def find(self, header: Sequence[str], where: str) -> dict[str, int]:
        """Returns {name: position} of all columns in a header.

        Args:
            header: The names of a table's columns, in any order.
            where: String, the table's name in the error message.

        Raises:
            ValueError: If a column is missing, or its name is not unique.
        """
        places = {}
        for name in self.all:
            if header.count(name) > 1:
                raise ValueError(f"{where} has {header.count(name)} columns named {name!r}.")
            if name not in header:
                close = difflib.get_close_matches(name, header, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                more = ", ..." if len(header) > _SHOWN else ""
                raise ValueError(
                    f"{where} has no column {name!r}.{hint} Its columns: "
                    f"{', '.join(header[:_SHOWN])}{more}"
                )
            places[name] = list(header).index(name)
        return places


class Table(NamedTuple):
    """The values of columns.

    Attributes:
        values: Array (rows, channels) of float32, memory-mapped from a temporary file.
        lengths: Dict from the name of each series to its rows, empty without a `series` column.
        times: Array (rows,) of datetime64 or integers, or `None`.
        utc: Boolean, whether the times have been converted to UTC.
        labels: Array (rows,) of int32, the classes of the rows, -1 where they are missing.
        classes: Names of the classes, sorted.
    """

    values: np.ndarray
    lengths: dict[str, int]
    times: np.ndarray | None
    utc: bool
    labels: np.ndarray
    classes: tuple[str, ...]


def read_table(
    columns: Columns,
    blocks: Iterable[Mapping[str, pa.Array]],
    where: str,
    place: Callable[[int], str],
    label: str | None = None,
) -> Table:
    """Reads a table block by block. The values go to a temporary file.

    Args:
        columns: `Columns`.
        blocks: Dicts from the name of a column to its values in some rows: numbers, times or texts.
        where: String, the table's name in error messages.
        place: Function from the number of a row, from 0, to its name in error messages.
        label: Name of a column of class names. Defaults to `None`.

    Raises:
        ValueError: If there are no rows, or a column does not hold what it should.
        OSError: If the disk of temporary files is full.
    """
    times, series, classes = _Times(), _Series(), _Classes()
    numbers: dict[str | None, _Numbers] = {name: _Numbers() for name in columns.values}
    readers: dict[str | None, Any] = {
        columns.time: times,
        columns.series: series,
        label: classes,
        **numbers,
    }
    rows = 0
    file: BinaryIO
    folder = tempfile.gettempdir()
    temporary = os.path.join(folder, tempfile.gettempprefix())
    with annotate_error(folder, temporary), tempfile.TemporaryFile() as file:
        for block in blocks:
            for name, column in block.items():
                try:
                    readers[name].read(column)
                except _Refused as error:
                    value = str(column[error.index].as_py())[:_LONGEST]
                    raise ValueError(
                        f"{where}: column {name!r} {error.rule}. "
                        f"Received: {value!r} in {place(rows + error.index)}"
                    ) from None
            values = np.stack([reader.block for reader in numbers.values()], axis=1)
            file.write(values.data)
            rows += len(values)
        if not rows:
            raise ValueError(f"{where} has no rows.")
        file.flush()
        values = np.memmap(file, "float32", "r", shape=(rows, len(numbers)))
    for name, reader in zip(columns.values, numbers.values(), strict=True):
        reader.precision.check([f"{where}: column {name!r}"])
    return Table(values, series.lengths, *times.result(), *classes.result())


class _Refused(Exception):
    """Raised for a value that breaks a rule, with its index in the block."""

    def __init__(self, index: int, rule: str):
        self.index, self.rule = index, rule


class _Numbers:
    """Reads a column of numbers, block by block."""

    def __init__(self):
        self.precision = Float32()

    def read(self, values: pa.Array) -> None:
        self.block = self.precision.cast(self._convert(values).to_numpy(zero_copy_only=False))
        is_infinite = np.isinf(self.block)
        if is_infinite.any():
            raise _Refused(int(is_infinite.argmax()), "must hold finite numbers")

    def _convert(self, values):
        try:
            return values.cast(pa.float64(), safe=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            words = pc.utf8_trim_whitespace(values.cast(pa.string()))
        words = pc.if_else(pc.is_in(pc.utf8_lower(words), _MISSING), None, words)
        numbers = try_cast(words, pa.float64())
        if numbers is None:
            raise _Refused(first_refused(words, pa.float64()), "must hold numbers such as 12.5")
        return numbers


class _Times:
    """Reads a column of times as seconds or integers."""

    def __init__(self):
        self._moments = array.array("q")
        self._kind = None

    def read(self, values: pa.Array) -> None:
        kind, moments = self._convert(values)
        if self._kind not in (None, kind):
            raise _Refused(0, _ONE_KIND)
        if moments.null_count:
            raise _Refused(pc.index(pc.is_null(moments), True).as_py(), _TIMES)
        self._kind = kind
        self._moments.frombytes(moments.cast(pa.int64()).to_numpy().tobytes())

    def result(self) -> tuple[np.ndarray | None, bool]:
        """Returns the times, and whether they are in UTC."""
        times = np.frombuffer(self._moments, "int64")
        if self._kind is None:
            return None, False
        if self._kind == "integers":
            return _compact_dates(times), False
        return times.view("datetime64[s]"), self._kind == "UTC"

    def _convert(self, values):
        dtype = values.type
        if pa.types.is_integer(dtype):
            return "integers", values
        if pa.types.is_timestamp(dtype) or pa.types.is_date(dtype):
            zone = getattr(dtype, "tz", None)
            seconds = values.cast(pa.timestamp("s", zone), safe=False)
            return "dates" if zone is None else "UTC", seconds
        for texts in _forms(values.cast(pa.string())):
            for kind, dtype in _KINDS.items():
                moments = try_cast(texts, dtype)
                if moments is not None:
                    return kind, moments
        dtypes = _types_of(texts[:1])
        if not dtypes:
            raise _Refused(0, _TIMES)
        i = first_refused(texts, dtypes[0])
        raise _Refused(i, _ONE_KIND if _types_of(texts[i : i + 1]) else _TIMES)


def _types_of(texts):
    """Returns the types of time that texts can be cast to."""
    return [dtype for dtype in _KINDS.values() if try_cast(texts, dtype) is not None]


def _forms(texts):
    """Yields the texts unchanged, then in ISO 8601 forms that pyarrow can read."""
    yield texts
    texts = pc.utf8_trim_whitespace(texts)
    texts = pc.replace_substring_regex(texts, r"(:[0-9][0-9])[.][0-9]*", r"\1")  # fractions
    for quarter in range(4):
        pattern = rf"^([0-9]{{4}})[ -]?Q{quarter + 1}$"
        texts = pc.replace_substring_regex(texts, pattern, rf"\1-{3 * quarter + 1:02}")
    yield pc.replace_substring_regex(texts, r"^([0-9]{4}-[0-9][0-9])$", r"\1-01")  # months


class _Series:
    """Reads a column of series names."""

    def __init__(self):
        self.lengths: dict[str, int] = {}
        self._last = None

    def read(self, values: pa.Array) -> None:
        encoded = values.cast(pa.string()).fill_null("").dictionary_encode()
        codes, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
        edges = np.flatnonzero(np.diff(codes)) + 1
        for first, last in zip([0, *edges], [*edges, len(codes)], strict=True):
            name = names[codes[first]]
            if name != self._last and name in self.lengths:
                raise _Refused(int(first), _TOGETHER)
            self.lengths[name] = self.lengths.get(name, 0) + int(last - first)
            self._last = name


class _Classes:
    """Reads a column of class names."""

    def __init__(self):
        self._codes: dict[str, int] = {}
        self._rows = array.array("i")

    def read(self, values: pa.Array) -> None:
        encoded = pc.utf8_trim_whitespace(values).dictionary_encode()
        names = encoded.dictionary.to_pylist()
        codes = [self._codes.setdefault(name, len(self._codes)) for name in names]
        self._rows.frombytes(np.array(codes, "int32")[encoded.indices.to_numpy()].tobytes())

    def result(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Returns the classes of the rows, and their names."""
        classes = sorted(name for name in self._codes if name)
        numbers = {name: number for number, name in enumerate(classes)}
        order = np.array([numbers.get(name, -1) for name in self._codes], "int32")
        return order[np.frombuffer(self._rows, "int32")], tuple(classes)


def _compact_dates(numbers):
    """Returns numbers as dates if all have the form 20240131 or 202401, otherwise unchanged."""
    is_month = numbers.max(initial=0) < 10**6
    years, rest = np.divmod(numbers, 100 if is_month else 10**4)
    months, days = (rest, 1) if is_month else np.divmod(rest, 100)
    if not (np.all((years >= _YEARS[0]) & (years < _YEARS[1]) & (months >= 1) & (months <= 12))):
        return numbers
    starts = (12 * (years - 1970) + months - 1).view("datetime64[M]")
    dates = starts.astype("datetime64[D]") + (days - 1)
    if not np.all(dates.astype("datetime64[M]") == starts):
        return numbers
    return dates.astype("datetime64[s]")


def as_arrow(values: np.ndarray | pa.ChunkedArray) -> pa.Array:
    """Returns a frame's array for `read_table`. Python objects of mixed types become strings."""
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    if values.dtype.kind == "M":
        values = values.astype("datetime64[s]")  # pyarrow has no hours
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])
