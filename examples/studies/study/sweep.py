"""Training of several variants of a net on several tasks: the cells of most studies."""

import functools

from study import nets, tasks, training
from study.table import Study


def sweep(name, folder, settings, columns, measure, variants, seeds, data_dir=None):
    """Measures every variant on every task with every seed.

    Args:
        name, folder, settings, columns: As `Study` takes them. `settings` has `train`, the number
            of sequences where they are generated (None: the paper's).
        measure: Function of settings, task, splits (a function that loads the data), a folder for
            work in progress and the columns of the variant and `seed`; returns rows.
        variants: Dict from a task's name to a list of variants, dicts of columns.
        seeds: List of integers.
        data_dir: Folder of local copies of the data.

    Returns:
        The `Study`.
    """
    chosen = [tasks.get(task) for task in variants]  # raises an error for an unknown task
    study = Study(name, folder, settings, columns)
    for task in chosen:
        splits = functools.cache(functools.partial(tasks.load, task, settings["train"], data_dir))
        for seed in seeds:
            for variant in variants[task.name]:
                of = functools.partial(measure, settings, task, splits, **variant, seed=seed)
                study.run({"task": task.name, **variant, "seed": seed}, of)
    return study


def train(model, settings, task, splits, work, seed, label):
    """Trains for the settings' `epochs` (None: the task's) and number of `records`."""
    return training.train(
        model, task, splits(), work, seed=seed, epochs=settings["epochs"] or task.epochs,
        records=settings["records"], label=f"{task.name}, {label}",
    )  # fmt: skip


def tcn(settings, task, seed, **options):
    """A TCN with the paper's number of parameters, whatever `options` of `TCN` differ."""
    depth = settings["depth"] or task.depth
    size = nets.build("tcn", task, depth=depth).count_params()
    return nets.build("tcn", task, size=size, seed=seed, depth=depth, **options)
