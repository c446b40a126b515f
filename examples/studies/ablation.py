"""The effect of filter size and residual connections on a TCN of constant size and depth.

    python examples/studies/ablation.py --quick

The TCN paper's Fig. 6 (Bai et al. 2018, appendix C): copy memory, permuted MNIST, words of PTB.
The width of every variant is chosen to match the published size. The paper does not list its
filter sizes; for copy memory the receptive field must cover T steps, for which 2 is too small.
"""

from study import cli

COLUMNS = [
    "task", "kernel_size", "residual", "seed", "parameters", "step", "seconds", "train_loss",
    "metric", "valid",
]  # fmt: skip
TASKS = ["copy_memory_1000", "permuted_mnist", "ptb"]
KERNELS = {"copy_memory": (2, 3, 5, 8), "permuted_mnist": (2, 3, 5, 7), "ptb": (2, 3, 4, 5)}
QUICK_KERNELS = (2, 6)
# None is the paper's value.
FULL = {"epochs": None, "records": 100, "train": None, "depth": None}
QUICK = {"epochs": 2, "records": 6, "train": 960, "depth": 3}


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    task: cli.Tasks = None,
    epochs: cli.Epochs = None,
    data_dir: cli.DataDir = None,
):
    """Curves of TCNs with several filter sizes, with and without residual connections (Fig. 6)."""
    settings = cli.settings(quick, QUICK if quick else FULL, epochs)
    names = task or (["copy_memory_10"] if quick else TASKS)
    kernels = QUICK_KERNELS if quick else None
    run(cli.folder(output, "ablation", quick), settings, names, seed, kernels, data_dir)


def run(folder, settings, task_names, seeds, kernels=None, data_dir=None):
    """The study; `kernels` are the filter sizes of all tasks in place of their usual ones."""
    from study import tasks
    from study.sweep import sweep

    chosen = {name: variants(tasks.get(name), kernels) for name in task_names}
    study = sweep("ablation", folder, settings, COLUMNS, measure, chosen, seeds, data_dir)
    plot(study)
    return study


def variants(task, kernels=None):
    """Every filter size with residual connections, and the published one also without them."""
    kernels = kernels or KERNELS.get(task.data, (2, 3, 5, 7))
    published = task.kernel_size if task.kernel_size in kernels else max(kernels)
    chosen = [*((kernel, True) for kernel in kernels), (published, False)]
    return [{"kernel_size": kernel, "residual": residual} for kernel, residual in chosen]


def measure(settings, task, splits, work, kernel_size, residual, seed):
    """Trains one variant on one task."""
    from study import sweep, training

    model = sweep.tcn(settings, task, seed, kernel_size=kernel_size, residual=residual)
    label = f"k = {kernel_size}, residual {residual}"
    records = sweep.train(model, settings, task, splits, work, seed, label)
    return training.rows(records, task, parameters=model.count_params())


def plot(study):
    """Draws a panel per task: a color per filter size, dashes without residual connections."""
    from study import figures

    rows = [{**row, "variant": (row["kernel_size"], str(row["residual"]))} for row in study.rows()]
    kernels = sorted({row["kernel_size"] for row in rows})
    color = dict(zip(kernels, figures.SHADES, strict=False))
    style = {}
    for kernel in kernels:
        style[kernel, "True"] = (f"k = {kernel}", {"color": color[kernel]})
        label = f"k = {kernel}, no residual"
        style[kernel, "False"] = (label, {"color": color[kernel], "linestyle": "--"})
    figures.save(figures.curves(rows, "task", "variant", style), study)


if __name__ == "__main__":
    cli.run(main)
