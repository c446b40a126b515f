"""The memory horizon of models with 10,000 parameters: copy memory at increasing delays.

    python examples/studies/memory_horizon.py --quick

The TCN paper's Fig. 5 (Bai et al. 2018, section 5.4): accuracy on the ten digits that must be
recalled T steps later. Chance level is 1/8. A TCN has the smallest depth whose receptive field
covers the sequence, and the width of each model is chosen to match the size. Training stops once
every digit of the validation split is correct, or after the authors' 50 epochs of 10,000
sequences. The paper does not list its T; here they are spread over the figure's range.
"""

import math
import statistics
from typing import Annotated

import keras
import study
import typer

from trellis_keras import zoo
from trellis_keras.zoo import run
from trellis_keras.zoo.datasets.synthetic import COPIED

COLUMNS = ["net", "T", "seed", "parameters", "steps", "recall_accuracy"]
KERNEL = 8
LABELS = {"tcn": "TCN", "lstm": "LSTM", "gru": "GRU"}
STYLES = {"tcn": ("#0072B2", "o"), "lstm": ("#D55E00", "s"), "gru": ("#009E73", "^")}
DELAYS = (5, 10, 20, 30, 50, 75, 100, 150, 200, 250)


def main(
    quick: study.Quick = False,
    output: study.Output = None,
    seed: study.Seeds = (0,),
    delays: Annotated[list[int] | None, typer.Option("--delay", min=1, help="T, in steps.")] = None,
    epochs: study.Epochs = None,
):
    """Accuracy of recall against T, for TCN, LSTM and GRU of 10,000 parameters (Fig. 5)."""
    settings = {
        "quick": quick,
        "size": 10_000,
        "epochs": epochs or (3 if quick else 50),
        "train": 960 if quick else 10_000,
    }
    cells = study.Study("memory_horizon", output, settings, COLUMNS)
    for one in seed:
        for T in delays or ((1, 40) if quick else DELAYS):
            for net in LABELS:
                cells.measure(
                    lambda work, **cell: train(settings, work, **cell), net=net, T=T, seed=one
                )
    plot(cells)


def train(settings, work, net, T, seed):
    """Trains one net on one T and returns its row."""
    recipe = recipe_of(settings, net, T, seed)
    zoo.train(recipe, work, verbose=0, callbacks=[StopWhenAllIsRecalled()])
    model, data = run.load_best(work), recipe.load_data()
    x, y = data.test
    recalled = model.predict(x, verbose=0)[:, -COPIED:].argmax(axis=-1)
    return [
        {
            "parameters": model.count_params(),
            "steps": run.epochs_done(work) * len(recipe.batches(data.train)),
            "recall_accuracy": float((recalled == y[:, -COPIED:]).mean()),
        }
    ]


def recipe_of(settings, net, T, seed):
    """Returns the zoo's recipe with T, the size of the study and no dropout."""
    name = f"{net}_copy_memory"
    options = {"dropout": 0.0, "seed": seed}
    width = "hidden_units"
    if net == "tcn":
        options |= {"kernel_size": KERNEL, "depth": depth(T + 2 * COPIED)}
        width = "filters"

    def count_params(units):
        return getattr(zoo, name)(**{width: units}, **options).count_params()

    options[width] = study.fitted_width(count_params, settings["size"])
    tenth = settings["train"] // 10
    data = {"T": T, "train": settings["train"], "valid": tenth, "test": tenth}
    return zoo.recipe(name, epochs=settings["epochs"], **options).replace(data_options=data)


def depth(steps):
    """Returns the smallest number of TCN blocks whose receptive field covers that many steps."""
    return math.ceil(math.log2((steps - 1) / (2 * (KERNEL - 1)) + 1))


class StopWhenAllIsRecalled(keras.callbacks.Callback):
    """Stops once all ten digits of every validation sequence are right."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = logs["val_recalled"] == 1


def plot(cells):
    """Draws Fig. 5: the mean over the seeds, and each seed as a marker."""
    figure, (axis,) = study.panels(1)
    rows = cells.rows()
    for net in dict.fromkeys(row["net"] for row in rows):
        color, marker = STYLES[net]
        found = {}
        for row in rows:
            if row["net"] == net:
                found.setdefault(row["T"], []).append(100 * row["recall_accuracy"])
        for T, values in found.items():
            axis.plot([T] * len(values), values, marker, color=color, markersize=5)
        means = sorted((T, statistics.fmean(values)) for T, values in found.items())
        axis.plot(*zip(*means, strict=True), color=color, marker=marker, label=LABELS[net])
    axis.axhline(100 / 8, color="gray", linestyle=":", label="Guessing")
    axis.set(xlabel="Delay T in steps", ylabel="Accuracy of the ten digits in %", ylim=(0, 103))
    axis.set_title(f"Copy memory, nets of {cells.settings['size']:,} parameters")
    axis.legend()
    cells.save(figure)


if __name__ == "__main__":
    study.run(main)
