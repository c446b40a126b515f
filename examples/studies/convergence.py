"""Convergence of TCN, LSTM, GRU and RNN of equal size on adding, copy memory and pixels.

    python examples/studies/convergence.py --quick

The TCN paper's Figs. 2-4 (Bai et al. 2018, section 5.2), with the settings of its Tables 2 and 3;
`study/tasks.py` documents settings that the paper omits. The curves are for the validation split.
"""

import dataclasses
from typing import Annotated

import typer
from study import cli

COLUMNS = [
    "task", "net", "seed", "parameters", "step", "seconds", "train_loss", "metric", "valid",
]  # fmt: skip
NETS = ["tcn", "lstm", "gru", "rnn"]
TASKS = [
    "adding_200", "adding_600", "seq_mnist", "permuted_mnist", "copy_memory_500",
    "copy_memory_1000",
]  # fmt: skip
PIXEL_EPOCHS = 10  # the paper's, for this figure
# None is the paper's value.
FULL = {"epochs": None, "records": 100, "train": None, "size": None, "depth": None}
QUICK = {"epochs": 2, "records": 6, "train": 960, "size": 5000, "depth": 3}


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    task: cli.Tasks = None,
    net: Annotated[list[str] | None, typer.Option(help="tcn, lstm, gru or rnn.")] = None,
    epochs: cli.Epochs = None,
    data_dir: cli.DataDir = None,
):
    """Curves of training on adding, copy memory and pixels (Figs. 2-4)."""
    settings = cli.settings(quick, QUICK if quick else FULL, epochs)
    names = task or (["copy_memory_10"] if quick else TASKS)
    run(cli.folder(output, "convergence", quick), settings, names, net or NETS, seed, data_dir)


def run(folder, settings, task_names, nets, seeds, data_dir=None):
    """The study: every net on every task."""
    from study import tasks
    from study.sweep import sweep

    for name in task_names:
        if isinstance(tasks.get(name), tasks.Text):
            raise ValueError(f"This study has no {name}: its recurrent nets read numbers.")
    variants = {name: [{"net": net} for net in nets] for name in task_names}
    study = sweep("convergence", folder, settings, COLUMNS, measure, variants, seeds, data_dir)
    plot(study)
    return study


def measure(settings, task, splits, work, net, seed):
    """Trains one net on one task."""
    from study import nets, sweep, tasks, training

    if isinstance(task, tasks.Pixels):
        settings = {**settings, "epochs": settings["epochs"] or PIXEL_EPOCHS}
        task = dataclasses.replace(task, training=None)  # the rate falls after these epochs only
    depth = settings["depth"] or task.depth
    model = nets.build(net, task, size=settings["size"], seed=seed, depth=depth)
    records = sweep.train(model, settings, task, splits, work, seed, net)
    return training.rows(records, task, parameters=model.count_params())


def plot(study):
    """Draws a panel per task."""
    from study import figures
    from study.nets import LABELS

    style = {net: (LABELS[net], {"color": figures.COLORS[net]}) for net in NETS}
    figures.save(figures.curves(study.rows(), "task", "net", style), study)


if __name__ == "__main__":
    cli.run(main)
