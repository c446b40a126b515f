"""The file of scores: written in order, in parts, and there under its name only when whole.

The state of an unfinished one is replaced in one step, after the rows that it counts are on the
disk: whenever the process ends, what it says is true.
"""

import contextlib
import csv
import io
import json
import os
import shutil

import numpy as np

from trellis_keras.breakdown import METRICS
from trellis_keras.files import (
    annotate_error,
    atomic_write,
    folder_lock,
    read_npz,
    remove_unfinished,
    sync_folder,
)


class Rows:
    """Sums of log-probabilities of the rows that are not written yet.

    Attributes:
        first: Number of the first of them.
        sums, counts: Of each: log-probabilities, float64, and of how many tokens, int64.
    """

    def __init__(self, first=0, sums=(), counts=()):
        self.first = first
        self.sums, self.counts = np.array(sums, "float64"), np.array(counts, "int64")

    def reserve(self, end):
        """Makes room for the rows before `end`."""
        missing = max(0, end - self.first - len(self.sums))
        self.sums, self.counts = np.pad(self.sums, (0, missing)), np.pad(self.counts, (0, missing))

    def add(self, rows, sums, counts):
        """Adds to distinct rows, for which there is room."""
        self.sums[rows - self.first] += sums
        self.counts[rows - self.first] += counts

    def take(self, end):
        """Returns (first, sums, counts) of the rows before `end`, and drops them."""
        self.reserve(end)
        number = end - self.first
        taken = self.first, self.sums[:number], self.counts[:number]
        self.first, self.sums, self.counts = end, self.sums[number:], self.counts[number:]
        return taken


class Table:
    """Rows of figures as text, in the format that a file's name asks for.

    Raises:
        ValueError: There is no such format, or no such metric.
    """

    def __init__(self, path, metric):
        self._format = {".csv": self._csv, ".jsonl": self._jsonl}.get(path.suffix)
        if self._format is None:
            raise ValueError(f"`output` must be a .csv or a .jsonl file. Received: {path}")
        if metric not in METRICS:
            raise ValueError(f"`metric` must be one of {sorted(METRICS)}. Received: {metric!r}")
        self._metric = metric
        self._columns = ("line", "log_probability", "num_tokens", metric)
        self.header = ",".join(self._columns) + "\n" if path.suffix == ".csv" else ""

    def rows(self, first, sums, counts):
        """Returns lines of text; the figure of a row without tokens is empty."""
        values = figures(sums, counts, self._metric)
        values = [value if count else None for value, count in zip(values, counts, strict=True)]
        lines = range(first + 1, first + 1 + len(sums))
        sums = np.round(sums, 6).tolist()
        return self._format(zip(lines, sums, counts.tolist(), values, strict=True))

    def _csv(self, rows):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def _jsonl(self, rows):
        return "".join(
            json.dumps(dict(zip(self._columns, row, strict=True))) + "\n" for row in rows
        )


def figures(sums, counts, metric):
    """Metrics of sums of log-probabilities of so many tokens, rounded to 6 decimals, as a list."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.round(METRICS[metric](-sums / counts), 6).tolist()


class Unfinished:
    """The folder of an output file that is not whole yet, which goes when it is.

    It holds `rows`, the file so far, and `state.npz`: how many bytes of it and of the input are
    good, and where the model stands.

    Args:
        path: The whole file's path.
    """

    def __init__(self, path):
        self.path = path
        self.folder = path.with_name(f"{path.name}.unfinished")
        self.rows, self._state = self.folder / "rows", self.folder / "state.npz"

    @contextlib.contextmanager
    def alone(self):
        """Keeps other processes from writing the same file.

        Raises:
            ValueError: One does, or the file is there already.
        """
        self._check_new()
        self.folder.mkdir(exist_ok=True)
        with folder_lock(self.folder):
            self._check_new()  # another process may have ended in between
            remove_unfinished(self.folder)
            yield
        if self.path.exists():
            # Not before its lock is closed: some systems keep open files.
            shutil.rmtree(self.folder)

    def _check_new(self):
        if self.path.exists():
            raise ValueError(f"{self.path} exists already. Choose another name, or remove it.")

    def load(self):
        """Returns (progress, arrays) of the last `save`, or None if there was none.

        Raises:
            ValueError: The files are damaged.
        """
        if not (self.rows.exists() and self._state.exists()):
            return None
        with self.whole():
            arrays = read_npz(self._state)
            progress = json.loads(str(arrays.pop("progress")))
            written = progress["written"]
            if self.rows.stat().st_size < written:
                raise ValueError(f"rows of {written:,} bytes have become fewer")
            os.truncate(self.rows, written)
        return progress, arrays

    @contextlib.contextmanager
    def whole(self):
        """Names the folder where something is missing in the state that has been read."""
        try:
            yield
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{self.folder} is damaged: {error!r}. {self.afresh}") from error

    @property
    def afresh(self):
        """What the user can do."""
        return f"To begin anew, remove {self.folder}."

    def save(self, file, text, progress, arrays):
        """Adds text to the rows in `file`, which is open, then notes how far the job has come."""
        with annotate_error(self.rows, self.rows):
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        progress = json.dumps({**progress, "written": file.tell()})
        with atomic_write(self._state) as temporary, open(temporary, "wb") as state:
            np.savez(state, progress=progress, **arrays)

    def finish(self):
        """Gives the whole file its name."""
        os.replace(self.rows, self.path)
        sync_folder(self.path.parent)
