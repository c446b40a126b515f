"""The folder of a study: settings, rows that are written atomically, and work in progress."""

import csv
import json
import os
import pathlib
import shutil

from keras_streams.files import atomic_write
from trellis_keras.files import folder_lock, remove_unfinished
from trellis_keras.zoo.environment import accelerators, processor


class Study:
    """Rows of measurements in `<name>.csv`, with the settings they belong to in `<name>.json`.

    A study is made of cells (a net, a task, a seed). `run` measures a cell unless its rows are
    there, so that an interrupted study resumes, and can be extended by more cells.

    Args:
        name: Name of the study.
        folder: Where the files go. Created if need be.
        settings: JSON-able dict of all that changes what a cell's rows are.
        columns: Names of the columns. The first ones, up to "seed", tell cells apart.

    Raises:
        ValueError: The folder cannot be written to, has rows of other settings, or its files are
            damaged.
    """

    def __init__(self, name, folder, settings, columns):
        self.name = name
        self.folder = _writable(folder)
        self.columns = [*columns, "hardware"]
        self.keys = columns[: columns.index("seed") + 1]
        self.settings = json.loads(json.dumps(settings))
        self._check_settings(self.settings)
        self.rows()

    def path(self, ending):
        """`<folder>/<name>.<ending>`."""
        return self.folder / f"{self.name}.{ending}"

    def rows(self):
        """Returns all rows as dicts, with numeric strings as numbers."""
        if not self.path("csv").exists():
            return []
        with open(self.path("csv"), newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames
        damaged = any(None in row or None in row.values() for row in rows)
        if names != self.columns or damaged:
            raise ValueError(
                f"{self.path('csv')} is no whole table of this study. Expected columns: "
                f"{self.columns}. Move it away, or choose another --output."
            )
        return [{name: _number(text) for name, text in row.items()} for row in rows]

    def run(self, cell, measure):
        """Adds a cell's rows unless they are there.

        Args:
            cell: Dict of the columns that tell cells apart.
            measure: Function of a folder for work in progress, which outlives an interruption;
                returns a list of dicts with the other columns.

        Returns:
            Whether the cell was measured now.

        Raises:
            ValueError: Another process measures a cell of this folder.
        """
        with folder_lock(self.folder):
            remove_unfinished(self.folder)
            return self._run(cell, measure)

    def _run(self, cell, measure):
        label = "-".join(str(value) for value in cell.values())
        rows = self.rows()
        if any(all(str(row[key]) == str(cell[key]) for key in self.keys) for row in rows):
            print(f"{label}: done before", flush=True)
            return False
        work = self.folder / "work" / label
        # A cell that ran in another process reports its own machine.
        new = [{**cell, "hardware": row.get("hardware") or hardware(), **row}
               for row in measure(work)]  # fmt: skip
        with atomic_write(self.path("csv")) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows() + new)
        shutil.rmtree(work, ignore_errors=True)
        return True

    def _check_settings(self, settings):
        path = self.path("json")
        if not path.exists():
            if self.path("csv").exists():
                raise ValueError(
                    f"{self.path('csv')} has no settings beside it ({path.name}). Move it away, "
                    "or choose another --output."
                )
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(settings, indent=2) + "\n")
            return
        try:
            there = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Choose another --output.") from error
        if there != settings:
            changed = sorted(k for k in there | settings if there.get(k) != settings.get(k))
            differences = ", ".join(
                f"{k}={there.get(k)!r} there, {settings.get(k)!r} now" for k in changed
            )
            raise ValueError(
                f"{self.folder} holds a study with other settings: {differences}. "
                "Choose another --output, or the same settings."
            )


def hardware():
    """One line: processor or accelerator, number of cores, backend."""
    import keras

    devices = accelerators() or [f"{processor()}, {os.cpu_count()} cores"]
    backend = keras.backend.backend()
    return f"{', '.join(devices)}; {backend}, Keras {keras.__version__}"


def _writable(folder):
    folder = pathlib.Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "try"):
            pass
        (folder / "try").unlink()
    except OSError as error:
        raise ValueError(
            f"Cannot write to {str(folder)!r}: {error}. Choose another --output."
        ) from error
    return folder


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
