"""The memory horizon of models with 10,000 parameters: copy memory at increasing delays.

    python examples/studies/memory_horizon.py --quick

The TCN paper's Fig. 5 (Bai et al. 2018, section 5.4): accuracy on the ten digits that must be
recalled T steps later. Chance level is 1/8. A TCN has the smallest depth whose receptive field
covers the sequence, and the width of each model is chosen to match the size. Training stops once
every digit of the validation split is correct, or after the authors' 50 passes over 10,000
sequences. The paper does not list its T; here they are spread over the figure's range.
"""

from typing import Annotated

import typer
from study import cli

COLUMNS = ["net", "T", "seed", "parameters", "steps", "seconds", "recall_accuracy"]
KERNEL = 8
FULL = {"size": 10_000, "epochs": 50, "train": 10_000, "records": 50}
QUICK = {"size": 10_000, "epochs": 3, "train": 960, "records": 6}
DELAYS = [5, 10, 20, 30, 50, 75, 100, 150, 200, 250]
QUICK_DELAYS = [1, 40]


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    T: Annotated[list[int] | None, typer.Option("--delay", min=1, help="T, in steps.")] = None,
    epochs: cli.Epochs = None,
):
    """Accuracy of recall against T, for TCN, LSTM and GRU of 10,000 parameters (Fig. 5)."""
    settings = cli.settings(quick, QUICK if quick else FULL, epochs)
    delays = T or (QUICK_DELAYS if quick else DELAYS)
    run(cli.folder(output, "memory_horizon", quick), settings, delays, seed)


def run(folder, settings, delays, seeds, nets=("tcn", "lstm", "gru")):
    """The study: every net at every delay."""
    from study.table import Study

    study = Study("memory_horizon", folder, settings, COLUMNS)
    for seed in seeds:
        for T in delays:
            for net in nets:
                cell = {"net": net, "T": T, "seed": seed}
                study.run(cell, lambda work, cell=cell: measure(settings, work, **cell))
    plot(study)
    return study


def measure(settings, work, net, T, seed):
    """Trains one net on one T."""
    from study import nets, tasks, training

    from trellis_keras.zoo.datasets.synthetic import COPIED

    task = tasks.copy_memory(
        T,
        kernel_size=KERNEL,
        depth=nets.depth(T + 2 * COPIED, KERNEL),
        dropout=0.0,
        recurrent=tasks.Recurrent(clip=1.0),
    )
    splits = tasks.load(task, settings["train"])
    model = nets.build(net, task, size=settings["size"], seed=seed)
    records = training.train(
        model, task, splits, work, seed=seed, epochs=settings["epochs"],
        records=settings["records"],
        stop=lambda record: record["valid_recall"] == 1, label=f"{net}, T = {T}",
    )  # fmt: skip
    test = model.evaluate(task.stream(splits, "test", 0), verbose=0, return_dict=True)
    last = records[-1]
    return [
        {
            "parameters": model.count_params(),
            "steps": last["step"],
            "seconds": last["seconds"],
            "recall_accuracy": test["recall"],
        }
    ]


def plot(study):
    """Draws Fig. 5: mean over the seeds, and each seed as a marker."""
    from study import figures
    from study.nets import LABELS

    rows = study.rows()
    figure, (axis,) = figures.panels(1)
    for net in dict.fromkeys(row["net"] for row in rows):
        points = [(row["T"], 100 * row["recall_accuracy"]) for row in rows if row["net"] == net]
        delays = sorted({T for T, _ in points})
        of = {T: [value for t, value in points if t == T] for T in delays}
        style = {"color": figures.COLORS[net]}
        axis.plot(*zip(*points, strict=True), figures.MARKERS[net], markersize=5, **style)
        axis.plot(
            delays,
            [sum(of[T]) / len(of[T]) for T in delays],
            label=LABELS[net],
            marker=figures.MARKERS[net],
            markersize=5,
            **style,
        )
    axis.axhline(100 / 8, color="gray", linestyle=":", label="Guessing")
    axis.set(xlabel="Delay T in steps", ylabel="Accuracy of the ten digits in %", ylim=(0, 103))
    size = study.settings["size"]
    axis.set_title(f"Copy memory, nets of {size:,} parameters")
    axis.legend()
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
