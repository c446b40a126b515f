"""The tasks of the TCN paper (Bai et al. 2018), with the zoo's settings for its nets.

Data, TCN and training are those of the `tcn_*` recipes, layers, clip and optimizer of recurrent
nets those of `lstm_*`. GRU and RNN, of which the paper publishes no settings, take the TCN's
optimizer.
"""

import dataclasses
import re

from study.kinds import Adding, CopyMemory, Music, Pixels, Recurrent, Text
from trellis_keras import zoo
from trellis_keras.zoo.recipe import OPTIMIZERS

# Kind of task, and the parameters that Table 1 gives to every net.
_BENCHMARKS = {
    "adding": (Adding, 70_000),
    "copy_memory": (CopyMemory, 16_000),
    "seq_mnist": (Pixels, 70_000),
    "permuted_mnist": (Pixels, 70_000),
    "jsb": (Music, 300_000),
    "nottingham": (Music, 1_000_000),
    "ptb": (Text, 13_000_000),
    "char_ptb": (Text, 3_000_000),
}
# Rows of Tables 2 and 3 for other T than the zoo's: options of the TCN and of the LSTM.
_OTHER_T = {
    "adding": {
        200: (
            {"kernel_size": 6, "depth": 7, "filters": 27},
            {"layers": 2, "forget_bias": 5.0, "clip_norm": 50.0, "optimizer": "sgd",
             "learning_rate": 1e-3},
        ),
        400: (
            {"kernel_size": 7, "depth": 7, "filters": 27},
            {"layers": 2, "forget_bias": 10.0, "clip_norm": 50.0},
        ),
        600: ({}, {}),
    },
    "copy_memory": {
        500: ({"kernel_size": 6, "depth": 9}, {"clip_norm": 0.25}),
        1000: ({}, {}),
        2000: ({"depth": 9}, {"layers": 3}),
    },
}  # fmt: skip


def _task(name, benchmark, published=({}, {}), **changes):
    """A task with the zoo's settings, except for those `published` for TCN and LSTM."""
    tcn = zoo.recipe(f"tcn_{benchmark}", **published[0])
    lstm = zoo.recipe(f"lstm_{benchmark}", **published[1])
    kind, size = _BENCHMARKS[benchmark]
    model, training = tcn.arguments, tcn.training
    settings = {
        "name": name,
        "data": tcn.data,
        "size": size,
        "kernel_size": model["kernel_size"],
        "depth": model["depth"],
        "filters": model["filters"],
        "dropout": model["dropout"],
        "clip": training.clip_norm,
        "optimizer": _optimizer(training),
        "batch_size": training.batch_size,
        "epochs": training.epochs,
        "training": training,
        "recurrent": Recurrent(
            lstm.arguments["layers"],
            lstm.arguments["dropout"],
            lstm.training.clip_norm,
            lstm.arguments["forget_bias"],
            _optimizer(lstm.training),
        ),
    }
    if kind is Text:
        settings |= {
            "recipe": tcn,
            "segment": training.sequence_length,
            "counted": training.sequence_length - training.context_length,
        }
    return kind(**{**settings, **changes})


def _optimizer(training):
    return OPTIMIZERS[training.optimizer], training.learning_rate


def _generated(benchmark, T, changes):
    """A task of any T; between the published ones it has the next larger one's settings."""
    rows = _OTHER_T[benchmark]
    nearest = next((other for other in rows if T <= other), max(rows))
    options = {"T": T, **changes.pop("options", {})}
    return _task(f"{benchmark}_{T}", benchmark, rows[nearest], options=options, **changes)


def adding(T, **changes):
    """The adding problem with T steps."""
    return _generated("adding", T, changes)


def copy_memory(T, **changes):
    """Copy memory with a delay of T steps."""
    return _generated("copy_memory", T, changes)


NAMED = {
    "seq_mnist": "seq_mnist",
    "permuted_mnist": "permuted_mnist",
    "jsb": "jsb",
    "nottingham": "nottingham",
    "ptb": "ptb",
    "char_ptb": "char_ptb",
}
_GENERATED = {"adding": adding, "copy_memory": copy_memory}


def load(task, train=None, data_dir=None):
    """A task's data.

    Args:
        task: A `kinds.Task`.
        train: Number of training sequences where they are generated; the other splits get a tenth
            of it. None: as many as usual.
        data_dir: Folder of local copies.
    """
    if train is not None and isinstance(task, (Adding, CopyMemory)):
        counts = {"train": train, "valid": max(train // 10, 1), "test": max(train // 10, 1)}
        task = dataclasses.replace(task, options={**task.options, **counts})
    return task.load(data_dir)


def get(name, **changes):
    """A task by name: `adding_<T>`, `copy_memory_<T>`, or one of `NAMED`.

    Args:
        name: The name.
        **changes: Fields of the task that shall differ.

    Raises:
        ValueError: An unknown name, or one that the data do not allow (such as T = 1 of adding).
    """
    if name in NAMED:
        return _task(name, NAMED[name], **changes)
    match = re.fullmatch(r"(adding|copy_memory)_([1-9]\d*)", name)
    if match is None:
        known = ["adding_<T>", "copy_memory_<T>", *NAMED]
        raise ValueError(
            f"Unknown task {name!r}. Known: {', '.join(known)}; T is a number of steps."
        )
    return _GENERATED[match[1]](int(match[2]), **changes)
