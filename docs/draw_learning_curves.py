"""Draws the learning curves of the zoo's runs into docs/learning_curves.png.

    python docs/draw_learning_curves.py

One panel per data set, one color per kind of net: the metric on the validation split by epoch, our
result on the test split at the epoch that was chosen, and the published one. Runs of other settings
than a model's own have their curves on their cards.
"""

import math
import pathlib

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trellis_keras.training.history import read_history
from trellis_keras.zoo import registry
from trellis_keras.zoo.results import Run, all_runs

PICTURE = pathlib.Path(__file__).with_name("learning_curves.png")
COLUMNS = 4
RISING = {"accuracy"}
COLORS = {
    "tcn": "tab:blue",
    "trellisnet": "tab:purple",
    "lstm": "tab:orange",
    "gru": "tab:green",
    "rnn": "tab:red",
}
UNITS = {
    "mse": "mean squared error",
    "cross_entropy": "cross-entropy (nats)",
    "frame_nll": "frame NLL (nats)",
    "bpc": "bits per character",
}


def main() -> None:
    panels = by_data(all_runs())
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(3.6 * COLUMNS, 3.1 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, (name, runs) in zip(grid, panels.items(), strict=False):
        draw(axes, name, [(run, read_history(run.folder / "history.csv")) for run in runs])
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.legend(handles=_legend(), loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(PICTURE, dpi=100)


def by_data(runs: list[Run]) -> dict[str, list[Run]]:
    """Returns {data set: runs of the models' own settings}."""
    panels: dict[str, list[Run]] = {}
    for run in runs:
        if not run.variant:
            panels.setdefault(run.recipe["data"], []).append(run)
    return panels


def draw(axes, name: str, runs: list[tuple[Run, list[dict]]]) -> None:
    """Draws the runs (run, rows of history.csv) of one data set."""
    seen = []
    metric = runs[0][0].recipe["metric"]
    for run, history in runs:
        color = COLORS.get(run.model.split("_")[0], "0.3")
        column = f"val_{metric}" if f"val_{metric}" in history[0] else "val_loss"
        values = [float(row[column]) for row in history]
        axes.plot([int(row["epoch"]) for row in history], values, lw=1.4, color=color)
        axes.plot(run.results["epoch"], run.results["test"], "o", ms=6, color=color, mec="white")
        published = registry.published_value(registry.recipe_from_dict(run.recipe))
        if published is not None:
            axes.axhline(published.value, ls=":", lw=1.2, color=color)
        seen += values
    if metric in RISING:
        best = max(seen)
        axes.set_ylim(bottom=max(min(seen), 2 * best - 1.05))
    elif max(seen) > 20 * min(seen):
        axes.set_yscale("log")
    axes.set_title(name, fontsize=11)
    axes.set_xlabel("epoch")
    axes.set_ylabel(UNITS.get(metric, metric))
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _legend():
    names = {"tcn": "TCN", "trellisnet": "TrellisNet"}
    nets = [
        Line2D([], [], color=color, label=names.get(kind, kind.upper()))
        for kind, color in COLORS.items()
    ]
    return [
        *nets,
        Line2D([], [], color="0.3", lw=1.4, label="validation"),
        Line2D([], [], color="0.3", marker="o", ls="", label="test, ours"),
        Line2D([], [], color="0.3", ls=":", label="test, published"),
    ]


if __name__ == "__main__":
    main()
