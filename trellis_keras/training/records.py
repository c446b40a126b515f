"""What a run leaves behind beside its checkpoints: a table of its epochs and its best model."""

import csv
import math
import pathlib

import keras

from trellis_keras.files import atomic_write


class HistoryCSV(keras.callbacks.Callback):
    """Writes one CSV row per epoch, also through interruptions.

    Takes the place of `keras.callbacks.CSVLogger`, which writes an epoch twice if a run was killed
    between its row and its checkpoint. The file is always whole.

    Args:
        path: The CSV file; its columns are `epoch` (counted from 1) and the epoch's logs. Its
            folder is made when training begins.

    Example:

    >>> model.fit(x, y, callbacks=[HistoryCSV("run/history.csv")])
    """

    def __init__(self, path):
        super().__init__()
        self.path = pathlib.Path(path).expanduser()
        self._rows = None

    def on_train_begin(self, logs=None):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = None

    def on_epoch_begin(self, epoch, logs=None):
        if self._rows is None:  # the first epoch of this `fit`; a resumed one begins later
            self._rows = [row for row in read_history(self.path) if int(row["epoch"]) <= epoch]

    def on_epoch_end(self, epoch, logs=None):
        self._rows.append({"epoch": epoch + 1, **(logs or {})})
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with (
            atomic_write(self.path) as temporary,
            open(temporary, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self._rows)


def read_history(path):
    """Returns the rows of a `HistoryCSV` file as dicts of strings; none if there is no file.

    Raises:
        ValueError: It is damaged: a row without an epoch's number, or with values that are none.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
        for row in rows:
            if int(row["epoch"]) < 1:
                raise ValueError(f"epoch {row['epoch']}")
            for value in row.values():
                float(value or 0)  # empty: another epoch's logs had more
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise ValueError(f"{path} is no history of epochs, or damaged: {error!r}") from error
    return rows


class BestModel(keras.callbacks.Callback):
    """Saves the model whenever a value is the best so far.

    Unlike `keras.callbacks.ModelCheckpoint` it replaces the file in one step and keeps its memory
    in a `training.Checkpoint`. A model whose value is no number is not saved, also as the first.

    Args:
        path: The `.keras` file. Its folder is made when training begins.
        monitor: Name of a value in the logs that should fall.

    Raises:
        ValueError: After the first epoch, if the logs have no such value.

    Example:

    >>> model.fit(x, y, validation_split=0.1, callbacks=[BestModel("run/best.keras")])
    """

    def __init__(self, path, monitor="val_loss"):
        super().__init__()
        self.path = pathlib.Path(path).expanduser()
        self.monitor = monitor
        self.best = math.inf

    def get_state(self):
        return {"best": self.best}

    def set_state(self, state):
        self.best = state["best"]

    def on_train_begin(self, logs=None):
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, epoch, logs=None):
        if self.monitor not in (logs or {}):
            raise ValueError(
                f"BestModel watches {self.monitor!r}, which this epoch did not produce. "
                f"It has {sorted(logs or {})}."
            )
        value = float(logs[self.monitor])
        if value < self.best:
            self.best = value
            with atomic_write(self.path) as temporary:
                self.model.save(temporary)
