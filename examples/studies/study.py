"""What the studies share: a table of cells that are measured once, options, figures."""

import csv
import functools
import json
import pathlib
import sys
from typing import Annotated

import keras
import matplotlib
import typer

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt  # noqa: E402

from keras_streams.files import atomic_write  # noqa: E402
from trellis_keras.files import make_writable  # noqa: E402
from trellis_keras.jobs import Job, different_settings  # noqa: E402
from trellis_keras.zoo.environment import accelerators, cores, processor  # noqa: E402

Quick = Annotated[bool, typer.Option("--quick", help="A small version that shows that it works.")]
Output = Annotated[str | None, typer.Option(help="Folder. Default: runs/studies/<study>.")]
Seeds = Annotated[list[int], typer.Option("--seed", min=0, help="May be given several times.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="In place of the study's.")]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of local copies of the data (or TRELLIS_KERAS_DATA).")
]


class Study:
    """Rows of measurements in `<name>.csv`, with the settings they belong to in `<name>.json`.

    A study is made of cells (a net, a task, a seed). `measure` skips the cells that have rows, so
    an interrupted study resumes, and more cells can be added later.

    Args:
        name: String, name of the study.
        folder: Folder of the files. Default: `runs/studies/<name>`.
        settings: JSON-able dict of everything else that the rows depend on.
        columns: List of the columns. The first ones, up to `"seed"`, tell cells apart.

    Raises:
        ValueError: The folder has rows of other settings.
    """

    def __init__(self, name, folder, settings, columns):
        suffix = "-quick" if settings["quick"] else ""
        self.folder = make_writable(folder or pathlib.Path("runs", "studies", name + suffix))
        self.name = name
        self.columns = [*columns, "hardware"]
        self.keys = columns[: columns.index("seed") + 1]
        self.settings = settings
        if self.path("json").exists():
            there = json.loads(self.path("json").read_text())
            if different := different_settings(there, settings):
                raise ValueError(
                    f"{self.folder} has a study with other settings: {different}. Choose another "
                    "--output."
                )
        else:
            with atomic_write(self.path("json")) as temporary:
                temporary.write_text(json.dumps(settings, indent=2) + "\n")

    def path(self, ending):
        """Returns `<folder>/<name>.<ending>`."""
        return self.folder / f"{self.name}.{ending}"

    def rows(self):
        """Returns all rows as dicts, with numbers where the text is one."""
        if not self.path("csv").exists():
            return []
        with open(self.path("csv"), newline="") as file:
            return [
                {key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)
            ]

    def measure(self, measure, **cell):
        """Adds a cell's rows unless they are there.

        Args:
            measure: Function of a folder for the run, which outlives an interruption, and of the
                cell. It returns a list of dicts with the other columns.
            **cell: The columns that tell cells apart.
        """
        label = "-".join(str(value) for value in cell.values())
        with Job(self.folder, (), self.path("csv").exists).open():
            rows = self.rows()
            if any(all(row[key] == cell[key] for key in self.keys) for row in rows):
                print(f"{label}: done before", flush=True)
                return
            new = measure(self.folder / "work" / label, **cell)
            devices = ", ".join(accelerators() or [f"{processor()}, {cores()}"])
            hardware = f"{devices}; {keras.backend.backend()}, Keras {keras.__version__}"
            rows += [{**cell, **row, "hardware": hardware} for row in new]
            with atomic_write(self.path("csv")) as path, open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, self.columns)
                writer.writeheader()
                writer.writerows(rows)
        print(f"{label}: {new[-1]}", flush=True)

    def save(self, figure):
        """Writes the study's PNG."""
        if self.settings["quick"]:
            figure.suptitle("--quick: not the result", fontsize="small", color="gray")
        with atomic_write(self.path("png")) as temporary:
            figure.savefig(temporary, dpi=150)
        plt.close(figure)
        print(f"Figure: {self.path('png')}")


def panels(number):
    """Returns a figure and the list of its panels, two in a row."""
    columns = min(number, 2)
    lines = -(-number // columns)
    size = (5.2 * columns, 4.2 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure, list(axes.flat)


def fitted_width(count_params, size):
    """Returns the width for which `count_params(width)` is closest to `size`."""
    high = 1
    while count_params(high) < size:
        high *= 2
    low = max(high // 2, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count_params(middle) < size else (low, middle)
    return min((low, high), key=lambda width: abs(count_params(width) - size))


def run(main):
    """Runs a script's `main` with the options of the command line."""

    @functools.wraps(main)  # typer reads the options from the signature
    def command(**options):
        try:
            main(**options)
        except (ValueError, OSError) as error:
            sys.exit(f"Error: {error}")
        except KeyboardInterrupt:  # typer would exit silently
            sys.exit("\nInterrupted. The same command resumes from here.")

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
