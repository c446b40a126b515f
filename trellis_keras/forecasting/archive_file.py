"""Files of the UCR and UEA archives: whole series with one class each.

- `.ts`, the format of sktime and aeon: `0.1,0.2:1.5,?:label`, channels between colons;
- `.arff`, Weka's: univariate, or multivariate by a relational attribute (which `scipy.io.arff`
  does not read);
- `.tsv` and `.txt`, the UCR archive: the label, then the values, separated by tabs, spaces or
  commas.

All may be compressed (`.gz`). Timestamps are not supported: steps are equal. Missing values (`?` or
`NaN`) are NaN. Missing values at the end of a series shorten it, which is how files with lines of
equal length store series of different lengths.
"""

import csv
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trellis_keras.files import decode, read_file
from trellis_keras.forecasting.precision import Float32

SUFFIXES = (".ts", ".arff", ".tsv", ".txt")
_LONGEST = 60  # characters of a value in an error message
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$", re.ASCII)
_WORDS = {"true": True, "false": False}
_HEADERS = {
    "problemname", "timestamps", "missing", "univariate", "dimension", "dimensions", "equallength",
    "serieslength", "classlabel", "targetlabel",
}  # fmt: skip


class ArchiveFile(NamedTuple):
    """The contents of an archive file.

    Attributes:
        series: List of float32 arrays (steps, channels), NaN where a value is missing.
        labels: List of their class names; empty if the file has none.
        classes: Names of the classes, in the order in which the file declares them, otherwise
            sorted, with numbers in numerical order.
    """

    series: list[np.ndarray]
    labels: list[str]
    classes: tuple[str, ...]


class _Refused(Exception):
    """The reason for rejecting a line."""


def has_archive_name(path: str | os.PathLike) -> bool:
    """Returns whether a file name has the suffix of an archive file, optionally with `.gz`."""
    return _suffix(path) in SUFFIXES


def read_archive_file(path: str | os.PathLike) -> ArchiveFile:
    """Reads a file of the UCR or UEA archive.

    Args:
        path: The file, `.ts`, `.arff`, `.tsv` or `.txt`, optionally compressed (`.gz`).

    Raises:
        ValueError: If the file is malformed or has regression targets instead of classes, or a
            series has no values, infinite values, or a different number of channels than the first.
            The message names the line.
        OSError: If the file cannot be read.
    """
    path = Path(path).expanduser()
    if not has_archive_name(path):
        raise ValueError(f"{path} must end with one of {', '.join(SUFFIXES)}, or .gz after it.")
    if not path.is_file():  # opening a pipe would wait for its writer
        raise FileNotFoundError(f"There is no file {path}")
    text = decode(read_file(path), path).removeprefix("\ufeff")
    lines = _Lines(path, text)
    read: Callable = {".ts": _read_ts, ".arff": _read_arff}.get(_suffix(path), _read_plain)
    try:
        found = read(lines)
    except _Refused as error:
        raise ValueError(f"{path}, line {lines.number}: {error}") from None
    if not found.series:
        raise ValueError(f"{path} has no series.")
    precision = Float32()
    series = [precision.cast(each) for each in found.series]
    precision.check([f"{path}: channel {i}" for i in range(series[0].shape[1])])
    return found._replace(series=series)


def _suffix(path):
    path = Path(path)
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


class _Lines:
    """The stripped lines of a file, without empty lines and comments.

    Attributes:
        number: Number of the line that was read last, from 1.
    """

    def __init__(self, path, text):
        self.path, self.number = path, 0
        self._lines = text.splitlines()

    def __iter__(self) -> Iterator[str]:
        while self.number < len(self._lines):
            self.number += 1
            line = self._lines[self.number - 1].strip()
            if line and line[0] not in "#%":
                yield line


class _Series:
    """Collects the series of a file, and checks that they match."""

    def __init__(self):
        self.series, self.labels = [], []

    def add(self, channels: list[list[str]], label: str | None) -> None:
        """Adds a series.

        Args:
            channels: The words of each channel.
            label: Class of the series, or None.
        """
        lengths = {len(words) for words in channels}
        if len(lengths) > 1:
            raise _Refused(
                "The channels of a series must be equally long. Received: "
                f"{', '.join(str(len(words)) for words in channels)} values"
            )
        if self.series and len(channels) != self.series[0].shape[1]:
            raise _Refused(
                f"All series must have the {self.series[0].shape[1]} channels of the first. "
                f"Received: {len(channels)}"
            )
        values = np.stack([_numbers(words) for words in channels], axis=-1)
        steps = np.flatnonzero(~np.isnan(values).all(axis=1))
        if not steps.size:
            raise _Refused("The series has no values.")
        self.series.append(values[: steps[-1] + 1])
        if label is not None:
            self.labels.append(label)

    def result(self, classes: list[str] | None = None) -> ArchiveFile:
        """Returns the collected series; `classes` are the declared classes."""
        if classes is None:
            classes = sorted(set(self.labels), key=_by_size)
        return ArchiveFile(self.series, self.labels, tuple(classes))


def _numbers(words):
    """Returns words as float64, with NaN for missing values."""
    values = np.empty(len(words))
    for i, word in enumerate(words):
        word = word.strip()
        if _NUMBER.match(word) and np.isfinite(float(word)):
            values[i] = float(word)
        elif word in ("?", "") or word.lower() == "nan":
            values[i] = np.nan
        else:
            raise _Refused(
                f"Values must be finite numbers, or ? if missing. Received: {_short(word)}"
            )
    return values


def _by_size(label):
    return (0, float(label), label) if _NUMBER.match(label) else (1, 0.0, label)


def _short(word):
    return repr(word[:_LONGEST])


def _check_label(label, classes):
    if label not in classes:
        raise _Refused(
            f"The class must be one of those declared in the header: {', '.join(classes[:20])}. "
            f"Received: {_short(label)}"
        )
    return label


# .ts


def _read_ts(lines):
    found, header, classes, in_data = _Series(), {}, None, False
    for line in lines:
        if in_data:
            *channels, last = line.split(":")
            if classes is None:
                channels.append(last)
            elif not channels:
                raise _Refused(f"The line must end with a colon and a class: {_short(line)}")
            label = None if classes is None else _check_label(last.strip(), classes)
            found.add([words.split(",") for words in channels], label)
        elif not line.startswith("@"):
            raise _Refused(f"Expected @data before the series. Received: {_short(line)}")
        elif line.lower() == "@data":
            classes, in_data = _ts_classes(header), True
        else:
            name, *words = line[1:].split()
            if name.lower() not in _HEADERS:
                raise _Refused(f"Unknown header. Received: {_short(line)}")
            header[name.lower()] = words
            if name.lower() == "timestamps" and _flag(words):
                raise _Refused("Series with timestamps (@timeStamps true) are not supported.")
            if name.lower() == "targetlabel" and _flag(words):
                raise _Refused("Regression targets (@targetLabel) are not supported, only classes.")
    return found.result(classes)


def _ts_classes(header):
    """Returns the declared classes, or None if the series have none."""
    words = header.get("classlabel", ["false"])
    if not _flag(words):
        return None
    if len(words) == 1:
        raise _Refused("@classLabel true must be followed by the class names.")
    return words[1:]


def _flag(words):
    if not words or words[0].lower() not in _WORDS:
        raise _Refused(f"Expected true or false. Received: {_short(' '.join(words))}")
    return _WORDS[words[0].lower()]


# .arff


def _read_arff(lines):
    found, columns, within = _Series(), [], None
    rows = iter(lines)
    for line in rows:
        word, *rest = line.split(None, 1)
        word = word.lower()
        if word == "@data":
            break
        if word == "@end":
            within = None
        elif word == "@attribute":
            name, kind = _attribute(rest)
            if within is None:
                columns.append((name, kind))
            if kind == "relational":
                within = name
        elif word != "@relation":
            raise _Refused(f"Expected @attribute or @data. Received: {_short(line)}")
    kinds = [kind for _, kind in columns]
    classes = kinds.pop() if kinds and isinstance(kinds[-1], list) else None
    relational = kinds == ["relational"]
    if not relational and set(kinds) != {"numeric"}:
        raise _Refused(
            "Expected numeric attributes or one relational attribute, then the classes, such as "
            f"{{a, b}}. Received: {', '.join(map(str, dict.fromkeys(map(_kind, kinds))))}"
        )
    for line in rows:
        words = _arff_words(line)
        if len(words) != len(columns):
            raise _Refused(
                f"The header has {len(columns)} attributes. Received: {len(words)} values"
            )
        label = None if classes is None else _check_label(words.pop(), classes)
        if relational:
            found.add([row.split(",") for row in words[0].replace("\\n", "\n").split("\n")], label)
        else:
            found.add([words], label)
    return found.result(classes)


def _attribute(rest):
    """Returns the name and kind of an attribute: "numeric", "relational", or a list of names."""
    quoted = re.match(r"""(?:'([^']*)'|"([^"]*)"|(\S+))\s+(.+)$""", rest[0] if rest else "")
    if quoted is None:
        raise _Refused("An attribute must have a name and a type.")
    *names, kind = quoted.groups()
    name = next(name for name in names if name is not None)
    if kind.startswith("{"):
        if not kind.endswith("}"):
            raise _Refused(f"The classes must end with a brace. Received: {_short(kind)}")
        return name, [word.strip() for word in _arff_words(kind[1:-1])]
    known = {"numeric": "numeric", "real": "numeric", "integer": "numeric"}
    kind = kind.split()[0].lower()
    return name, known.get(kind, kind)


def _kind(kind):
    return "classes" if isinstance(kind, list) else kind


def _arff_words(line):
    """Splits a line at commas that are not inside single or double quotes."""
    quote = '"' if '"' in line and ("'" not in line or line.index('"') < line.index("'")) else "'"
    try:
        words = next(csv.reader([line], quotechar=quote, skipinitialspace=True), [])
    except csv.Error as error:
        raise _Refused(f"Invalid ARFF line: {error}") from None
    return [word.strip().strip("'\"") for word in words]


# .tsv and .txt


def _read_plain(lines):
    found = _Series()
    for line in lines:
        words = line.split("," if "," in line else None)
        if len(words) < 2:
            raise _Refused(f"Expected a class and values. Received: {_short(line)}")
        found.add([words[1:]], _plain_label(words[0].strip()))
    return found.result()


def _plain_label(word):
    """Returns a label, with numbers in their shortest form: 1.0000000e+00 is 1."""
    if _NUMBER.match(word) and np.isfinite(float(word)):
        number = float(word)
        return str(int(number)) if number.is_integer() else str(number)
    return word
