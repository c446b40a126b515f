"""Reads tables that anyone may have written, within bounds."""

import io
import itertools
import os
import pathlib
import re
import warnings
from typing import Any

import pandas as pd

from trellis_keras.files import read_file

_MOST_BYTES = 2**30  # of a file
_MOST_LINE = 2**20  # characters
_SEPARATORS = ";\t|,"
_SAMPLE = 200  # lines
_DECIMAL_COMMA = re.compile(r"-?\d{1,3}(\.?\d{3})*,\d+")
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2},\d{3}")  # or a number below 1,000 with three decimals
# What shows that commas are groups beside such numbers: 987, 987.5 or 1,234,567.
_GROUPED = re.compile(r"-?[1-9]\d{0,2}|-?[\d,]*\.\d+|-?\d{1,3}(,\d{3}){2,}")
# The same with points for groups, where no number of the file has the point for its decimals.
_POINT = re.compile(r"-?\d*\.\d+")
_POINT_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}\.\d{3}")
_POINT_GROUPED = re.compile(r"-?[1-9]\d{0,2}|-?\d{1,3}(\.\d{3}){2,}")


def read_csv(
    path: str | os.PathLike, *, text_column: str | None = None, **options: Any
) -> pd.DataFrame:
    """Reads a CSV file by `pandas.read_csv`, after checks of its size and its quotes.

    The encoding (UTF-8, or else Windows-1252), the separator (a comma, semicolon, tab or bar), the
    decimal sign and groups of thousands are detected, unless they are given.

    Args:
        path: File, which may be compressed (`.gz`).
        text_column: The name of a column whose texts stay as they are written, such as `007` and
            `NA`. Defaults to `None`.
        options: Arguments of `pandas.read_csv`, such as `sep`, `decimal` and `encoding`.

    Raises:
        ValueError: If it is not a regular file or not a table, or is larger than 1 GiB, unpacks to
            more than 256 MiB and 100 times its size, or has two columns of one name, a line of
            more than 1 MiB or a quote that does not end on its line. Line breaks within quotes are
            not supported.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path).expanduser()
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, more than {_MOST_BYTES:,}.")
    text = _decode(path, read_file(path), options.pop("encoding", None))
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if len(line) > _MOST_LINE:
            raise ValueError(f"{path}, line {number}: more than {_MOST_LINE:,} characters.")
        if line.count('"') % 2:
            raise ValueError(f"{path}, line {number}: a quote does not end on its line.")
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty.")
    sep = options.setdefault("sep", _separator(lines[:_SAMPLE]))
    if "decimal" not in options:
        signs = {".": ",", ",": "."}
        options["decimal"] = signs.get(options.get("thousands", "")) or _decimal(lines, sep)
    decimal = options["decimal"]
    with warnings.catch_warnings():
        # Without this, pandas drops what is beyond the columns of the first line.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            options = {"skipinitialspace": True, "index_col": False, **options}
            table = pd.read_csv(io.StringIO(text), **options)
            _check_names(path, text, options)
            if text_column in table:
                options |= {"usecols": [text_column], "dtype": str, "keep_default_na": False}
                texts = pd.read_csv(io.StringIO(text), **options)[text_column].str.strip()
                table[text_column] = texts.where(texts != "")
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            raise ValueError(f"{path} is not a table: {error}") from error
    # pandas would also take the dots of dates for groups.
    if "thousands" in options:
        return table
    return table.apply(lambda x: x if x.name == text_column else _ungroup(x, decimal))


def _check_names(path, text, options):
    """Raises ValueError for columns of one name, all but one of which pandas would rename."""
    if {"header", "names", "usecols"} & options.keys():
        return
    options = options | {"header": None, "nrows": 1, "dtype": str}
    names = pd.read_csv(io.StringIO(text), **options).iloc[0].dropna()
    if not names.is_unique:
        name = names[names.duplicated()].iloc[0]
        raise ValueError(f"{path} has several columns {name!r}. Give each a name of its own.")


def _ungroup(column, decimal):
    """Returns numbers for a column of texts such as 1.234,5, or 1,234.5 with a decimal point."""
    point, group = re.escape(decimal), "." if decimal == "," else ","
    number = rf"-?\d{{1,3}}({re.escape(group)}\d{{3}})*({point}\d+)?"
    texts = column.dropna()
    is_text = len(texts) > 0 and pd.api.types.is_string_dtype(texts)
    if not is_text or not texts.str.fullmatch(number).all():
        return column
    return pd.to_numeric(column.str.replace(group, "").str.replace(decimal, "."))


def _decode(path, content, encoding):
    if content.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is compressed. Rename it, so that its name ends with .gz.")
    if encoding is None and b"\0" in content:
        raise ValueError(f"{path} is not a text file. Name its encoding if it is, such as utf-16.")
    for name in [encoding] if encoding else ["utf-8-sig", "cp1252", "latin-1"]:
        try:
            return content.decode(name)
        except UnicodeDecodeError as error:
            found = error
        except LookupError as error:
            raise ValueError(f"There is no encoding {encoding!r}.") from error
    raise ValueError(f"{path} is not text in {encoding}: {found}")


def _separator(sample):
    """Returns the separator that occurs equally often on most lines."""

    def rank(separator):
        counts = [line.count(separator) for line in sample]
        return counts[0] > 0, sum(count == counts[0] for count in counts), counts[0]

    best = max(_SEPARATORS, key=rank)
    return best if best in sample[0] else ","


def _columns(lines, separator):
    rows = [[field.strip().strip('"') for field in line.split(separator)] for line in lines]
    return list(itertools.zip_longest(*rows, fillvalue=""))


def _has_clear_decimals(field):
    """Returns whether a number has decimals which cannot be groups of thousands."""
    if _DECIMAL_COMMA.fullmatch(field):
        return not _THOUSANDS.fullmatch(field)
    return bool(_POINT.fullmatch(field)) and not _POINT_THOUSANDS.fullmatch(field)


def _decimal(lines, separator):
    """Returns the decimal sign, or raises ValueError if 1,234 or 1.234 may be either number."""
    if separator == ",":
        return "."
    columns = _columns(lines[:_SAMPLE], separator)
    if not any(_has_clear_decimals(field) for _, *column in columns for field in column):
        columns = _columns(lines, separator)
    unclear = []
    for name, *column in columns:
        found = [field for field in column if _DECIMAL_COMMA.fullmatch(field)]
        if not all(map(_THOUSANDS.fullmatch, found)):
            return ","
        if found and not any(map(_GROUPED.fullmatch, column)):
            unclear.append((name, found[0]))
    if unclear and separator != ";":
        name, number = unclear[0]
        raise ValueError(
            f"{number} in the column {name!r} may be {number.replace(',', '.')} or "
            f"{number.replace(',', '')}. Pass `decimal` (--decimal), the comma or the point."
        )
    points = [field for _, *column in columns for field in column if _POINT.fullmatch(field)]
    if unclear or not all(map(_POINT_THOUSANDS.fullmatch, points)):
        return "," if unclear else "."
    for _, *column in columns:
        is_number = any(map(_POINT_THOUSANDS.fullmatch, column))
        if is_number and any(map(_POINT_GROUPED.fullmatch, column)):
            return ","
    if points and separator == ";":
        raise ValueError(
            f"{points[0]} may be {points[0].replace('.', '')}, as in German, or have three "
            "decimals. Pass `decimal` (--decimal), the comma or the point."
        )
    return "."
