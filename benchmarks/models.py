"""The memory of a process that builds, trains and deletes many models.

    python -m benchmarks.models

Prints, as JSON, the resident MiB after certain numbers of models. Each is trained for one step, in
graph mode or with XLA, and deleted, followed by `keras.utils.clear_session()`.
"""

import gc
import json
import multiprocessing
from typing import Annotated

import typer

# Keras and the package are imported by the functions, so that --help is quick.

_TEXT = ("lru_char_ptb", "gru_char_ptb_lru_paper")


def main(
    models: Annotated[int, typer.Option(min=10, help="Number of models.")] = 100,
    output: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
):
    """Measure processes with many models of TrellisNet, TCN, LRU and GRU."""
    from benchmarks.__main__ import machine, write

    rows = {
        f"{name}, {'XLA' if jit_compile else 'graph'}": _in_a_process(name, models, jit_compile)
        for name in ("trellisnet_seq_mnist", "tcn_seq_mnist", *_TEXT)
        for jit_compile in (False, True)
    }
    text = json.dumps({"models": models, "machine": machine(), "resident_mib": rows}, indent=2)
    typer.echo(text)
    if output is not None:
        write(output, text + "\n")


def _in_a_process(*arguments):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def measure(name, models, jit_compile):
    """Returns {number of models: resident MiB afterwards} for this process."""
    import keras

    sizes = {}
    for number in range(1, models + 1):
        model, batch = _model(name, jit_compile)
        model.train_on_batch(*batch)
        del model, batch
        keras.utils.clear_session()
        gc.collect()
        if number in (1, 10, models // 2, models):
            sizes[number] = _resident()
    return sizes


def _model(name, jit_compile):
    """Returns a small model of the zoo and a batch for it."""
    import numpy as np

    from trellis_keras import zoo

    sizes = {
        "trellisnet_seq_mnist": {"hidden_units": 16},
        "tcn_seq_mnist": {"filters": 8},
        **dict.fromkeys(_TEXT, {"hidden_units": 16, "vocabulary_size": 50, "stateful": False}),
    }
    model = zoo.get_model(name, **sizes[name], jit_compile=jit_compile)
    rng = np.random.default_rng(0)
    if name in _TEXT:
        tokens = rng.integers(0, 50, (4, 17)).astype("int32")
        return model, (tokens[:, :-1], tokens[:, 1:])
    images = rng.normal(size=(4, 784, 1)).astype("float32")
    return model, (images, rng.integers(0, 10, 4))


def _resident():
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return round(int(line.split()[1]) / 1024)


if __name__ == "__main__":
    typer.run(main)
