"""Reads tables that anyone may have written, within bounds."""

import contextlib
import difflib
import gzip
import io
import os
import pathlib
import re
import secrets
import stat
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

MOST_BYTES = 2**30  # of a file
_MOST_UNPACKED, _MOST_EXPANSION = 2**28, 100  # of a compressed file: bytes, or times its size
_MOST_LINE = 2**20  # characters
_SEPARATORS = ";\t|,"
_SAMPLE = 200  # lines
_DECIMAL_COMMA = re.compile(r"-?\d{1,3}(\.?\d{3})*,\d+")


def read_csv(path: str | os.PathLike, **options: Any) -> pd.DataFrame:
    """Reads a CSV file by `pandas.read_csv`, after checks of its size and its quotes.

    The encoding (UTF-8, or else Windows-1252), the separator (a comma, semicolon, tab or bar) and
    the decimal sign are detected, unless they are given.

    Args:
        path: File, which may be compressed (`.gz`).
        options: Arguments of `pandas.read_csv`, such as `sep`, `decimal` and `encoding`.

    Returns:
        A data frame.

    Raises:
        ValueError: If it is not a regular file or not a table, or is larger than 1 GiB, unpacks to
            more than 256 MiB and 100 times its size, or has a line of more than 1 MiB or a quote
            that does not end on its line. Line breaks within quotes are not supported.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path).expanduser()
    text = _decode(path, _content(path), options.pop("encoding", None))
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if len(line) > _MOST_LINE:
            raise ValueError(f"{path}, line {number}: more than {_MOST_LINE:,} characters.")
        if '"' in line and line.count('"') % 2:
            raise ValueError(f"{path}, line {number}: a quote does not end on its line.")
    sample = [line for line in lines[:_SAMPLE] if line.strip()]
    if not sample:
        raise ValueError(f"{path} is empty.")
    options.setdefault("sep", _separator(sample))
    options.setdefault("decimal", _decimal(sample, options["sep"]))
    if options["decimal"] == ",":
        options.setdefault("thousands", ".")
    with warnings.catch_warnings():
        # Without this, pandas drops what is beyond the columns of the first line.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            return pd.read_csv(io.StringIO(text), skipinitialspace=True, index_col=False, **options)
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            raise ValueError(f"{path} is not a table: {error}") from error


def _content(path):
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file.")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, more than {MOST_BYTES:,}.")
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES)
    if content[:2] != b"\x1f\x8b":
        return content
    most = max(_MOST_UNPACKED, _MOST_EXPANSION * size)
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(most + 1)
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) > most:
        raise ValueError(f"{path} unpacks to more than {most:,} bytes.")
    return content


def _decode(path, content, encoding):
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


def _decimal(sample, separator):
    fields = [field.strip().strip('"') for line in sample[1:] for field in line.split(separator)]
    return "," if separator != "," and any(map(_DECIMAL_COMMA.fullmatch, fields)) else "."


def check_output(
    path: pathlib.Path, inputs: Iterable[pathlib.Path], overwrite: bool
) -> pathlib.Path:
    """Returns the path of a file to write, after checks that it can be written.

    Raises:
        ValueError: If it is an input file, not a file, or exists without `overwrite`.
        FileNotFoundError: If its folder does not exist.
    """
    path = path.expanduser()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for {path.name}.")
    if any(path.resolve() == file.expanduser().resolve() for file in inputs):
        raise ValueError(f"{path} is an input file. Choose another name.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file. Choose another name.")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} already exists. Choose another name, or pass --overwrite.")
    return path


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path that replaces `path` when the block succeeds."""
    temporary = path.with_name(f".writing-{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def printable(text: Any) -> str:
    """Returns text with escapes for what a terminal would interpret."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def check_columns(names: Iterable[Any], columns: Iterable[Any], where: str = "The table") -> None:
    """Raises ValueError unless a table has these columns, and names the nearest one.

    Args:
        names: The columns that are needed.
        columns: The columns of the table.
        where: String, the name of the table in the message.
    """
    columns = list(columns)
    for name in names:
        if name not in columns:
            near = {str(column).casefold(): column for column in columns}
            found = difflib.get_close_matches(str(name).casefold(), near, 1)
            hint = f" Did you mean {near[found[0]]!r}?" if found else ""
            some = ", ".join(repr(column) for column in columns[:20])
            raise ValueError(f"{where} has no column {name!r}.{hint} Its columns: {some}.")
