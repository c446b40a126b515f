"""CSV files of any size, read by pyarrow in blocks, with line numbers for error messages."""

import contextlib
import csv
import gzip
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trellis_keras.files import check_gzip

_LONGEST = 2**20  # bytes, maximum length of a line and size of a block
_SCANNED = 10**7  # rows that are scanned to find the line of an error


class CSVFile:
    """A UTF-8 CSV file with `,`, `;` or tab as the separator.

    Reading takes constant memory: lines have at most 1 MiB, and a file whose name ends with `.gz`
    unpacks to at most 256 MiB, or 100 times its size.

    Args:
        path: The file.

    Attributes:
        header: List of the column names in the first row.

    Raises:
        ValueError: If the first row is not CSV in UTF-8.
        OSError: If the file does not exist or cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path).expanduser()
        if not self.path.is_file():  # opening a pipe would wait for its writer
            raise FileNotFoundError(f"There is no file {self.path}")
        if self.path.suffix == ".gz":
            check_gzip(self.path)
        with self._open() as text:
            lines = self._lines(text)
            first = next(lines, "")
            self._delimiter = max(",;\t", key=first.count)
            rows = csv.reader(itertools.chain([first], lines), delimiter=self._delimiter)
            try:
                self.header = [name.strip() for name in next(rows, [])]
            except csv.Error as error:
                raise ValueError(f"{self.path} is not CSV: {error}") from error
            self._has_rows = bool(text.read(1))
        self._is_column = len(self.header) == 1  # an empty line is a missing value
        if any("\ufffd" in name for name in self.header):  # bytes that could not be decoded
            raise ValueError(f"{self.path} is not CSV in UTF-8. Received: header {self.header}")

    def blocks(self, places: Mapping[str, int]) -> Iterator[dict[str, pa.StringArray]]:
        """Yields the texts of some rows at a time.

        Args:
            places: Dict from the names of the columns to read to their positions in the header.

        Yields:
            Dicts from names to arrays of the same length.

        Raises:
            ValueError: If a row has too few or too many fields, a line is too long, a column is
                not UTF-8, or the file is damaged. The message names the line.
        """
        if not self._has_rows:
            return
        columns = [str(place) for place in places.values()]
        rows = 0
        try:
            # A path, because pyarrow would read a Python file in threads that outlive an error.
            batches = pyarrow.csv.open_csv(
                str(self.path),
                pyarrow.csv.ReadOptions(
                    use_threads=False,  # threads are no faster, and errors lack row numbers
                    block_size=_LONGEST,
                    column_names=[str(place) for place in range(len(self.header))],
                    skip_rows_after_names=1,
                ),
                pyarrow.csv.ParseOptions(
                    delimiter=self._delimiter,
                    newlines_in_values=True,
                    ignore_empty_lines=not self._is_column,
                ),
                pyarrow.csv.ConvertOptions(
                    include_columns=columns,
                    column_types=dict.fromkeys(columns, pa.binary()),
                ),
            )
            empty = 0  # rows of a single column that no value has followed yet
            for batch in batches:
                block = {
                    name: self._decode(column, name, rows)
                    for name, column in zip(places, batch.columns, strict=True)
                }
                rows += len(batch)
                if self._is_column:
                    block, empty = _without_empty_end(block, empty)
                yield block
        except pa.ArrowInvalid as error:
            reason = self._explain(str(error), rows)
            raise ValueError(f"{self.path} is not CSV: {reason}") from error

    def place(self, row: int) -> str:
        """Returns where a row starts, such as `"line 7"`, for an error message.

        Args:
            row: Integer, number of the row after the header, from 0.
        """
        with contextlib.suppress(csv.Error), self._open() as text:
            reader = csv.reader(self._lines(text), delimiter=self._delimiter)
            filled, line = -1, 1  # rows above this line, without the header
            for fields in itertools.islice(reader, _SCANNED):
                is_row = bool(fields) or self._is_column
                if is_row and filled == row:
                    return f"line {line}"
                filled += is_row
                line = reader.line_num + 1
        return f"row {row + 1}"

    def _decode(self, column, name, row):
        texts = try_cast(column, pa.string())
        if texts is None:
            place = self.place(row + first_refused(column, pa.string()))
            raise ValueError(f"{self.path} is not CSV in UTF-8: column {name!r}, {place}")
        return texts

    def _explain(self, message, rows):
        """Returns pyarrow's message, converted from rows to lines."""
        if found := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", message):
            number, expected, count = map(int, found.groups())  # counted from 1, with the header
            return f"{self.place(number - 2)} has {count} fields, the header {expected}"
        if "straddling" in message:
            return f"a line after row {rows} is longer than {_LONGEST:,} bytes, or a quote is open"
        return message

    def _lines(self, text):
        for number in itertools.count(1):
            line = text.readline(_LONGEST)
            if len(line) == _LONGEST:
                raise ValueError(
                    f"{self.path}: line {number} has more than {_LONGEST:,} characters"
                )
            if not line:
                return
            yield line

    def _open(self) -> TextIO:
        open_file: Callable = gzip.open if self.path.suffix == ".gz" else open
        return open_file(self.path, "rt", encoding="utf-8-sig", errors="replace", newline="")


def _without_empty_end(block, empty):
    """Returns a block of one column after `empty` rows, and the number of empty rows at its end."""
    ((name, texts),) = block.items()
    texts = pa.concat_arrays([pa.array([""] * empty, pa.string()), texts])
    filled = np.flatnonzero(texts.to_numpy(zero_copy_only=False) != "")
    last = int(filled[-1]) + 1 if len(filled) else 0
    return {name: texts[:last]}, len(texts) - last


def try_cast(values: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    """Returns values cast to another type, or `None` if pyarrow cannot cast all of them."""
    try:
        return values.cast(dtype)
    except pa.ArrowInvalid:
        return None


def first_refused(values: pa.Array, dtype: pa.DataType) -> int:
    """Returns the index of the first value that cannot be cast to a type, which must exist."""
    first, last = 0, len(values)
    while last - first > 1:
        middle = (first + last) // 2
        if try_cast(values[first:middle], dtype) is None:
            last = middle
        else:
            first = middle
    return first
