"""The tasks of the TCN paper (Bai et al. 2018), with its settings (Tables 2 and 3).

What the paper leaves open is decided here: GRU and RNN, of which it publishes no settings, take
the TCN's optimizer and the LSTM's layers and clip; numbers of epochs, and the rules that lower a
learning rate, are those of the authors' programs.
"""

import dataclasses
import re

from study.kinds import Adding, CopyMemory, Music, Pixels, Recurrent, Text
from trellis_keras.training import SGD, Adam, RMSprop


def adding(T, **changes):
    """The adding problem with T steps; between the published T the next larger one's settings."""
    if T <= 400:
        tcn = {"kernel_size": 6 if T <= 200 else 7, "depth": 7, "filters": 27}
        lstm = (SGD, 1e-3) if T <= 200 else None
        recurrent = Recurrent(2, clip=50, forget_bias=5 if T <= 200 else 10, optimizer=lstm)
    else:
        tcn = {"kernel_size": 8, "depth": 8, "filters": 24}
        recurrent = Recurrent(1, clip=5)
    settings = {"size": 70_000, "epochs": 10, "recurrent": recurrent, **tcn, **changes}
    options = {"T": T, **settings.pop("options", {})}
    return Adding(name=f"adding_{T}", data="adding", options=options, **settings)


def copy_memory(T, **changes):
    """Copy memory with a delay of T steps; between the published T as in `adding`."""
    tcn = {"kernel_size": 6 if T <= 500 else 8, "depth": 8 if 500 < T <= 1000 else 9, "filters": 10}
    recurrent = Recurrent(1 if T <= 1000 else 3, 0.05, clip=0.25 if T <= 500 else 1)
    settings = {"size": 16_000, "epochs": 50, "recurrent": recurrent, **tcn}
    settings |= {"dropout": 0.05, "clip": 1.0, "optimizer": (RMSprop, 5e-4), **changes}
    options = {"T": T, **settings.pop("options", {})}
    return CopyMemory(name=f"copy_memory_{T}", data="copy_memory", options=options, **settings)


def _pixels(name, data_set, forget_bias):
    recurrent = Recurrent(1, clip=1, forget_bias=forget_bias, optimizer=(RMSprop, 1e-3))
    tcn = {"kernel_size": 7, "depth": 8, "filters": 25}
    sizes = {"size": 70_000, "batch_size": 64, "epochs": 20}
    return Pixels(name=name, data=data_set, recurrent=recurrent, **tcn, **sizes)


NAMED = {
    "seq_mnist": _pixels("seq_mnist", "mnist", 1.0),
    "permuted_mnist": _pixels("permuted_mnist", "permuted_mnist", 10.0),
    "jsb": Music(
        name="jsb", data="jsb", size=300_000, kernel_size=3, depth=2, filters=150, dropout=0.5,
        clip=0.4, optimizer=(Adam, 1e-3), batch_size=1, epochs=100,
        recurrent=Recurrent(2, 0.2, 1, 10.0),
    ),
    "nottingham": Music(
        name="nottingham", data="nottingham", size=1_000_000, kernel_size=6, depth=4, filters=150,
        dropout=0.2, clip=0.4, optimizer=(Adam, 1e-3), batch_size=1, epochs=100,
        recurrent=Recurrent(3, 0.1, 0.5, optimizer=(Adam, 4e-3)),
    ),
    "ptb_word": Text(
        name="ptb_word", data="ptb_word", size=13_000_000, kernel_size=3, depth=4, filters=600,
        dropout=0.5, clip=0.4, optimizer=(SGD, 4.0), batch_size=16, epochs=100, embedding_dim=600,
        embedding_dropout=0.25, vocabulary_size=10_000, segment=80, counted=40,
    ),
    "ptb_char": Text(
        name="ptb_char", data="ptb_char", size=3_000_000, kernel_size=3, depth=3, filters=450,
        dropout=0.1, clip=0.15, batch_size=32, epochs=100, embedding_dim=100,
        embedding_dropout=0.1, vocabulary_size=50, segment=400, counted=320,
    ),
}  # fmt: skip
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
        return dataclasses.replace(NAMED[name], **changes)
    match = re.fullmatch(r"(adding|copy_memory)_([1-9]\d*)", name)
    if match is None:
        known = ["adding_<T>", "copy_memory_<T>", *NAMED]
        raise ValueError(
            f"Unknown task {name!r}. Known: {', '.join(known)}; T is a number of steps."
        )
    return _GENERATED[match[1]](int(match[2]), **changes)
