"""The effect of gated activations on a TCN of the same size.

    python examples/studies/gating.py --quick

The TCN paper's Table 5 (Bai et al. 2018, appendix D). The width of the gated network is chosen to
match the size of the plain one. Results are for the test split, at the best validation loss.
"""

from study import cli

COLUMNS = [
    "task", "activation", "seed", "parameters", "steps", "seconds", "metric", "test", "published",
]  # fmt: skip
PUBLISHED = {
    "seq_mnist": (99.0, 99.0),
    "permuted_mnist": (97.2, 96.9),
    "adding_600": (5.8e-5, 5.6e-5),
    "copy_memory_1000": (3.5e-5, 0.00508),
    "jsb": (8.10, 8.13),
    "nottingham": (3.07, 3.12),
    "ptb": (88.68, 87.94),
    "char_ptb": (1.31, 1.306),
}
ACTIVATIONS = ("relu", "glu")
# None is the paper's value.
FULL = {"epochs": None, "records": 20, "train": None, "depth": None}
QUICK = {"epochs": 2, "records": 6, "train": 960, "depth": 3}


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    task: cli.Tasks = None,
    epochs: cli.Epochs = None,
    data_dir: cli.DataDir = None,
):
    """Plain against gated TCNs of equal size (Table 5)."""
    settings = cli.settings(quick, QUICK if quick else FULL, epochs)
    names = task or (["adding_30", "copy_memory_10"] if quick else list(PUBLISHED))
    run(cli.folder(output, "gating", quick), settings, names, seed, data_dir)


def run(folder, settings, task_names, seeds, data_dir=None):
    """The study: both activations on every task."""
    from study.sweep import sweep

    variants = {name: [{"activation": each} for each in ACTIVATIONS] for name in task_names}
    study = sweep("gating", folder, settings, COLUMNS, measure, variants, seeds, data_dir)
    plot(study)
    return study


def measure(settings, task, splits, work, activation, seed):
    """Trains one net on one task."""
    from study import sweep, training

    model = sweep.tcn(settings, task, seed, activation=activation)
    records = sweep.train(model, settings, task, splits, work, seed, activation)
    published = PUBLISHED.get(task.name, ("", ""))[ACTIVATIONS.index(activation)]
    row = {"parameters": model.count_params(), "steps": records[-1]["step"]}
    row |= {"seconds": records[-1]["seconds"], "metric": task.metric, "published": published}
    return [{**row, "test": training.test_value(model, task, splits(), work)}]


def plot(study):
    """Draws a panel per task: both nets, and the paper's values."""
    from study import figures, tasks

    rows = study.rows()
    names = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = figures.panels(len(names), columns=4)
    for axis, name in zip(axes, names, strict=True):
        here = [row for row in rows if row["task"] == name]
        places = [ACTIVATIONS.index(row["activation"]) for row in here]
        style = {"color": figures.COLORS["tcn"], "markersize": 7, "label": "Measured"}
        axis.plot(places, [row["test"] for row in here], "o", **style)
        published = [(p, r["published"]) for p, r in zip(places, here, strict=True)
                     if r["published"] != ""]  # fmt: skip
        if published:
            style = {"color": "black", "markersize": 9, "label": "Published"}
            axis.plot(*zip(*published, strict=True), "x", **style)
        task = tasks.get(name)
        axis.set(xticks=(0, 1), xticklabels=("ReLU", "Gated (GLU)"), xlim=(-0.5, 1.5))
        axis.set(ylabel=f"{task.metric_label} (test)", title=figures.title(name))
        if task.log_scale:
            axis.set_yscale("log")
        axis.legend()
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
