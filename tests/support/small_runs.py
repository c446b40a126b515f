"""Runs of a few hundred parameters, for the tests of runs, of the command line and of exports."""

import random

from trellis_keras import zoo

TINY = {
    "depth": 2,
    "hidden_units": 4,
    "embedding_dim": 4,
    "batch_size": 4,
    "sequence_length": 12,
    "context_length": 3,
    "epochs": 2,
    "jit_compile": False,
}
# Every source of randomness and every kind of state.
STATEFUL = TINY | {
    "depth": 4,
    "stateful": True,
    "context_length": 0,
    "aux_every": 2,
    "aux_weight": 0.1,
    "embedding_dropout": 0.1,
    "input_dropout": 0.1,
    "hidden_dropout": 0.2,
    "output_dropout": 0.1,
    "weight_dropout": 0.3,
    "weight_norm": True,
}


def write_text(path, length=2000):
    """Writes a text whose characters are not equally likely."""
    rng = random.Random(0)
    path.write_text("".join(rng.choices("abc de\n", [9, 5, 3, 4, 2, 2, 1], k=length)))
    return path


def tiny_recipe(folder, **overrides):
    """A recipe for a text in `folder`, which is written if need be."""
    path = folder / "text.txt"
    if not path.exists():
        write_text(path)
    overrides = TINY | {"data": "text", "data_options": {"path": path}} | overrides
    return zoo.recipe("trellisnet_char", **overrides)


def tiny_run(folder, **overrides):
    """Trains in `folder / "run"` and returns that folder."""
    zoo.train(tiny_recipe(folder, **overrides), folder / "run", verbose=0)
    return folder / "run"


def options(settings):
    """Settings as options of the command line."""
    return [
        word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
