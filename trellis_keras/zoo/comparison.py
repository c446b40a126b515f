"""Compares runs: a table, and a plot of their validation losses."""

import json
import os
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keras_streams.files import atomic_write
from trellis_keras.zoo import run as runs


def table(folders: Sequence[str | os.PathLike]) -> list[tuple[str, ...]]:
    """Returns a header, and one row per run.

    The columns are epochs, parameters, the metrics of the best epoch, and the settings in which the
    runs differ.
    """
    recipes = [runs.read_recipe(folder) for folder in folders]
    settings = [
        {name: json.dumps(value).strip('"') for name, value in recipe.options().items()}
        for recipe in recipes
    ]
    histories = [runs.finished_epochs(folder) for folder in folders]
    best = [runs.best_epoch(history) for history in histories]
    metrics = dict.fromkeys(key for row in best for key in row if key.startswith("val_"))
    names = dict.fromkeys(name for own in settings for name in own)
    for name in ("data_checksum", "epochs"):  # the latter is a column anyway
        names.pop(name, None)
    differing = [name for name in names if len({own.get(name, "-") for own in settings}) > 1]
    rows = [("run", "model", "parameters", "epochs", "best", *metrics, *differing)]
    for folder, recipe, own, history, row in zip(
        folders, recipes, settings, histories, best, strict=True
    ):
        parameters = f"{runs.load_best(folder).count_params():,}"
        values = (f"{row[key]:.5g}" if key in row else "-" for key in metrics)
        chosen = (own.get(name, "-") for name in differing)
        epochs = str(len(history)), f"{row['epoch']:.0f}"
        rows.append((str(folder), recipe.name, parameters, *epochs, *values, *chosen))
    return rows


def draw(
    folders: Sequence[str | os.PathLike], path: str | os.PathLike, overwrite: bool = False
) -> None:
    """Draws the validation losses of runs by epoch into a PNG file."""
    path = runs.check_output(path, overwrite=overwrite)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="validation loss")
    for folder in folders:
        history = runs.finished_epochs(folder)
        epochs = [row["epoch"] for row in history]
        marker = "o" if len(history) == 1 else None
        axes.plot(epochs, [row["val_loss"] for row in history], label=str(folder), marker=marker)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)  # names of folders may contain $
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
