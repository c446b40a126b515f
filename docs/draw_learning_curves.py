"""Draws the learning curves of the zoo's published runs into docs/learning_curves.png.

    python docs/draw_learning_curves.py

One panel per run: the metric on the validation split by epoch, our result on the test split at the
epoch that was chosen, and the published one.
"""

import math
import pathlib

from matplotlib.figure import Figure

from trellis_keras.training.monitors import read_history
from trellis_keras.zoo import registry
from trellis_keras.zoo.results import all_runs

PICTURE = pathlib.Path(__file__).with_name("learning_curves.png")
COLUMNS = 4
RISING = {"accuracy"}


def main():
    runs = all_runs()
    rows = math.ceil(len(runs) / COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for panel, run in zip(panels, runs, strict=False):
        draw(panel, read_history(run.folder / "history.csv"), run)
    for panel in panels[len(runs) :]:
        panel.set_axis_off()
    figure.savefig(PICTURE, dpi=110)


def draw(axes, history, run):
    """One run's panel."""
    results, metric = run.results, run.recipe["metric"]
    published = registry.published_value(registry.recipe_from_dict(run.recipe))
    column = f"val_{metric}" if f"val_{metric}" in history[0] else "val_loss"
    epochs = [int(row["epoch"]) for row in history]
    values = [float(row[column]) for row in history]
    axes.plot(epochs, values, lw=1.2, color="tab:blue", label="validation")
    axes.plot(results["epoch"], results["test"], "o", ms=5, color="tab:red", label="test, ours")
    if published is not None:
        axes.axhline(published.value, ls=":", lw=1, color="0.3", label="test, published")
    if metric in RISING:
        axes.set_ylim(bottom=max(min(values), 2 * results["test"] - 1 - 0.05))
    elif max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_title(run.title, fontsize=9)
    axes.set_ylabel(metric.replace("_", " "), fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    main()
