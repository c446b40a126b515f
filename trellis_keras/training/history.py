"""The history of training as a CSV file."""

import csv
import io
from os import PathLike
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_streams.files import atomic_write
from trellis_keras.files import check_can_write, read_text
from trellis_keras.types import Logs


class HistoryCSV(keras.callbacks.Callback):
    """Writes exactly one CSV row per epoch, even if the run is killed and resumed.

    `keras.callbacks.CSVLogger` writes an epoch twice if the run is killed between its row and its
    checkpoint, and a killed process can leave half a row. This callback replaces the file
    atomically.

    Args:
        path: The CSV file, with the columns `epoch` (counted from 1) and the epoch's logs; a metric
            `f1` of each class has the columns `f1_0`, `f1_1`, ... Its folder is created when
            training begins.

    Example:

    >>> model.fit(x, y, callbacks=[HistoryCSV("run/history.csv")])
    """

    def __init__(self, path: str | PathLike) -> None:
        super().__init__()
        self.path = Path(path).expanduser()
        self._rows: Any = None  # read at the first epoch of a `fit`

    def on_train_begin(self, logs: Logs = None) -> None:
        check_can_write(self.path)
        self._rows = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._rows is None:
            self._rows = [row for row in read_history(self.path) if int(row["epoch"]) <= epoch]

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        row = {"epoch": epoch + 1}
        for name, value in (logs or {}).items():
            if np.ndim(value):  # a metric of each class
                row |= {f"{name}_{i}": each for i, each in enumerate(np.ravel(value))}
            else:
                row[name] = value
        self._rows.append(row)
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with (
            atomic_write(self.path) as temporary,
            open(temporary, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self._rows)


def read_history(path: str | PathLike) -> list[dict[str, str]]:
    """Returns the rows of a `HistoryCSV` file, or an empty list if there is no file."""
    path = Path(path).expanduser()
    if not path.exists():
        return []
    text = read_text(path)
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        if not rows or not text.endswith("\n"):
            raise ValueError("it is truncated")
        for row in rows:
            if int(row["epoch"]) < 1 or None in row.values():
                raise ValueError(f"the row of epoch {row['epoch']} is truncated")
            for value in row.values():
                float(value or 0)  # empty if only other epochs have this column
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise ValueError(f"{path} is not a history, or damaged: {error!r}") from error
    return rows
