"""The memory of a training step of `trellisnet_wt103` at full size, by part.

    python -m benchmarks.memory account

XLA plans all buffers of a step when it compiles it, before it allocates them. So the step of the
published model can be measured on machines too small to run it, from XLA's report. The memory of a
part is the difference between two reports. As a check of the reports, this also runs one step of
fewer levels, with the full width, vocabulary and batch, and measures the process.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Annotated

import typer

from benchmarks.__main__ import machine, write
from tools.process import begin_epoch, peak_memory, words

# Keras and the package are imported by the functions: each row runs in its own process.

BATCH, SEGMENT, UNITS, LEVELS, SHALLOW = 40, 70, 2000, 70, 6
NO_AUX = {"aux_weight": 0.0}
# {name: changes to the published model, or None for no levels}
ROWS = {
    "no levels": None,
    f"{SHALLOW} levels": {"depth": SHALLOW, **NO_AUX},
    f"{LEVELS} levels": NO_AUX,
    f"{LEVELS} levels, auxiliary losses": {},
    f"{LEVELS} levels, auxiliary losses, rematerialized": {"rematerialize": True},
}
_TOTAL = re.compile(r"Total bytes used: (\d+)")

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def account(
    output: Annotated[str, typer.Option(help="Folder of the results.")] = "runs/benchmarks",
):
    """Print the memory of all parts and write it as JSON and Markdown."""
    rows = {name: _in_a_process(name) for name in ROWS}
    taken = _in_a_process(f"{SHALLOW} levels", "--take")
    results = {"machine": machine(), "rows": rows, "taken": taken, "parts": parts(rows)}
    table = markdown(results)
    typer.echo(table)
    stem = pathlib.Path(output) / "wt103_memory-tensorflow"
    stem.parent.mkdir(parents=True, exist_ok=True)
    write(stem.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    write(stem.with_suffix(".md"), table)


@app.command()
def step(row: str, take: Annotated[bool, typer.Option(help="Also run it.")] = False):
    """Compile the step of a row and print bytes as JSON; XLA_FLAGS sets the folder of reports."""
    model = _model(ROWS[row])
    model.optimizer.build(model.trainable_variables)
    x, y = _batch(model)
    before = peak_memory()
    if take:
        model.train_on_batch(x, y)
    else:
        _compile(model, x, y)
    figures = {
        "parameters": _bytes(model.trainable_variables),
        "moments": _bytes(model.optimizer.variables),
        "process_before": before,
        "process_peak": peak_memory(),
    }
    typer.echo(json.dumps(figures))


def _in_a_process(row, *options):
    """Returns the figures of `step`, and the bytes in XLA's report."""
    with tempfile.TemporaryDirectory() as folder:
        # Without LLVM's optimizations, which take long and do not affect buffers.
        flags = (
            f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_backend_optimization_level=0 "
            + os.environ.get("XLA_FLAGS", "")
        )
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", "step", row, *options],
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        reports = pathlib.Path(folder).glob("*memory-usage-report.txt")
        totals = [int(_TOTAL.search(report.read_text())[1]) for report in reports]
    return {**json.loads(done.stdout.splitlines()[-1]), "total": max(totals)}


def _model(settings):
    from keras.layers import Identity

    from trellis_keras import zoo
    from trellis_keras.layers import AdaptiveSoftmax
    from trellis_keras.models import LanguageModel

    if settings is not None:
        return zoo.trellisnet_wt103(**settings)
    recipe = zoo.recipe("trellisnet_wt103")
    words, width, cutoffs = map(
        recipe.arguments.get, ("vocabulary_size", "embedding_dim", "cutoffs")
    )
    head = AdaptiveSoftmax(words, cutoffs, div_value=1.0)
    model = LanguageModel(words, width, Identity(), head=head)
    model.build((None, None))
    model.compile(recipe.training.make_optimizer(), jit_compile=True)
    return model


def _batch(model):
    """Returns a batch of words with probability 1 / rank, after initializing the carried states."""
    import numpy as np

    begin_epoch(model, BATCH)
    tokens = words(np.random.default_rng(0), model.vocabulary_size, (BATCH, SEGMENT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _compile(model, x, y):
    import tensorflow as tf

    function = tf.function(model.train_step, jit_compile=True)
    function.experimental_get_compiler_ir((tf.constant(x), tf.constant(y)))(stage="optimized_hlo")


def _bytes(variables):
    return sum(4 * math.prod(variable.shape) for variable in variables)


def parts(rows):
    """Returns the bytes of each part of the published model's step, from differences of rows."""
    none, shallow, plain, published, _ = rows.values()
    level = (plain["total"] - shallow["total"]) / (LEVELS - SHALLOW)
    # Without the head's parameters and gradients, which count as the model's.
    head = none["total"] - 2 * none["parameters"] - none["moments"]
    known = {
        "parameters": published["parameters"],
        "moments of Adam": published["moments"],
        "gradients": published["parameters"],
        f"{LEVELS} levels": LEVELS * level,
        "buffers of embedding and softmax": head,
        "auxiliary losses": published["total"] - plain["total"],
    }
    return known | {"all else": published["total"] - sum(known.values())}


def markdown(results):
    """Returns the results as Markdown."""

    def gib(number):
        return f"{number / 2**30:.2f}"

    machine_line = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    lines = [
        "### wt103_memory: a training step of trellisnet_wt103, float32, XLA, "
        f"{BATCH} x {SEGMENT} tokens",
        "",
        machine_line,
        "",
        "| compiled | parameters, GiB | moments, GiB | total in XLA's report, GiB |",
        "|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        lines.append(
            f"| {name} | {gib(row['parameters'])} | {gib(row['moments'])} | {gib(row['total'])} |"
        )
    lines += ["", "| part of the published model's step | GiB |", "|---|---|"]
    lines += [f"| {name} | {gib(number)} |" for name, number in results["parts"].items()]
    state = 4 * BATCH * SEGMENT * UNITS
    taken = results["taken"]
    lines += [
        "",
        f"Counted, a level stores h and c ({2 * state / 2**20:.0f} MiB) and, unless "
        f"rematerialized, its pre-activations ({4 * state / 2**20:.0f} MiB).",
        "",
        f"Check with a step of {SHALLOW} levels: the peak memory of the process was "
        f"{gib(taken['process_before'])} GiB before the step and {gib(taken['process_peak'])} GiB "
        f"after it; XLA reports {gib(taken['total'])} GiB.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
