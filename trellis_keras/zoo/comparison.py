"""Compares runs: a table, and a plot of their validation losses."""

import json
import math
import os
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keras_streams.files import atomic_write
from trellis_keras.training.history import read_history
from trellis_keras.zoo import run as runs


def table(folders: Sequence[str | os.PathLike]) -> list[tuple[str, ...]]:
    """Returns a header, and one row per run.

    The columns are epochs, parameters, the metrics of the best epoch, and the settings in which the
    runs differ.

    Args:
        folders: Folders of runs.

    Raises:
        FileNotFoundError: A folder holds no run, or no epoch has finished.
        ValueError: A file is damaged.
    """
    found = []
    for folder in folders:
        settings, history = runs.flat_settings(folder), _history(folder)
        best = min(history, key=lambda row: (math.isnan(row["val_loss"]), row["val_loss"]))
        found.append((folder, settings, history, best))
    metrics = dict.fromkeys(
        key for *_, best in found for key in best if key.startswith("val_") and key != "val_loss"
    )
    names = dict.fromkeys(name for _, settings, *_ in found for name in settings)
    differing = [name for name in names if len({_text(one[1], name) for one in found}) > 1]
    shown = [name for name in differing if name not in ("model", "data_checksum")]
    header = ("run", "model", "parameters", "epochs", "best", "val_loss", *metrics, *shown)
    rows = [
        (
            str(folder),
            own["model"],
            f"{runs.load_best(folder).count_params():,}",
            str(len(history)),
            f"{best['epoch']:.0f}",
            *(f"{best[key]:.5g}" if key in best else "-" for key in ("val_loss", *metrics)),
            *(_text(own, name) for name in shown),
        )
        for folder, own, history, best in found
    ]
    return [header, *rows]


def _text(settings, name):
    return json.dumps(settings[name]).strip('"') if name in settings else "-"


def draw(
    folders: Sequence[str | os.PathLike], path: str | os.PathLike, overwrite: bool = False
) -> None:
    """Draws the validation losses of runs by epoch into a PNG file.

    Args:
        folders: Folders of runs.
        path: The file.
        overwrite: Boolean, whether to replace an existing file. Defaults to `False`.
    """
    path = runs.check_output(path, overwrite=overwrite)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for folder in folders:
        history = _history(folder)
        epochs = [row["epoch"] for row in history]
        marker = "o" if len(history) == 1 else None
        axes.plot(epochs, [row["val_loss"] for row in history], label=str(folder), marker=marker)
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)  # names of folders may contain $
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _history(folder):
    """Returns the rows of a run's history, with NaN for missing values."""
    path = runs.recipe_path(folder).with_name("history.csv")
    rows = read_history(path)
    if not rows:
        raise FileNotFoundError(
            f"{folder} has no history.csv: the run has not finished an epoch yet."
        )
    if "val_loss" not in rows[0]:
        raise ValueError(f"{path} has no column val_loss. Its columns: {', '.join(rows[0])}")
    return [{key: float(value or "nan") for key, value in row.items()} for row in rows]
