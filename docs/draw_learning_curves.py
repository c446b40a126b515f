"""Draws the learning curves of the zoo's published runs into docs/learning_curves.png.

    python docs/draw_learning_curves.py

One panel per run: the metric on the validation split by epoch, our result on the test split at the
epoch that was chosen, and the published one.
"""

import math
import pathlib

from matplotlib.figure import Figure

from trellis_keras.training.records import read_history
from trellis_keras.zoo.assets import all_results, assets_folder
from trellis_keras.zoo.card_sections import title

PICTURE = pathlib.Path(__file__).with_name("learning_curves.png")
COLUMNS = 4
RISING = {"accuracy"}


def main():
    runs = all_results(assets_folder())
    rows = math.ceil(len(runs) / COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for panel, (folder, results) in zip(panels, runs, strict=False):
        draw(panel, read_history(folder / "history.csv"), results)
    for panel in panels[len(runs) :]:
        panel.set_axis_off()
    figure.savefig(PICTURE, dpi=110)


def draw(axes, history, results):
    """One run's panel."""
    metric = results["metric"]
    column = f"val_{metric}" if f"val_{metric}" in history[0] else "val_loss"
    epochs = [int(row["epoch"]) for row in history]
    values = [float(row[column]) for row in history]
    axes.plot(epochs, values, lw=1.2, color="tab:blue", label="validation")
    axes.plot(results["epoch"], results["test"], "o", ms=5, color="tab:red", label="test, ours")
    if results["published"] is not None:
        axes.axhline(results["published"], ls=":", lw=1, color="0.3", label="test, published")
    if metric in RISING:
        axes.set_ylim(bottom=max(min(values), 2 * results["test"] - 1 - 0.05))
    elif max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_title(title(results), fontsize=9)
    axes.set_ylabel(metric.replace("_", " "), fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    main()
