"""The memory of a training step of `trellisnet_wt103` at full size, as XLA plans it.

    python -m benchmarks.memory account

XLA assigns all buffers of a step when it compiles it, before it allocates them, so the step can be
measured on machines too small to run it.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Annotated

import typer

from benchmarks.results import machine, write_figures
from tools.process import begin_epoch, words

# Keras and the package are imported by the functions: each row runs in its own process.

BATCH, SEGMENT = 40, 70
ROWS = {"published": {}, "rematerialize=True": {"rematerialize": True}}
_TOTAL = re.compile(r"Total bytes used: (\d+)")

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def account(
    output: Annotated[str, typer.Option(help="Folder of the result.")] = "runs/benchmarks",
):
    """Print the GiB of each row and write them as JSON."""
    rows = {name: round(_planned(name) / 2**30, 2) for name in ROWS}
    results = {"case": "wt103_memory", "machine": machine(), "gib": rows}
    typer.echo(json.dumps(rows, indent=2))
    write_figures(pathlib.Path(output) / "wt103_memory-tensorflow.json", results)


def _planned(row):
    """Compiles the step of a row in a new process and returns the bytes in XLA's report."""
    with tempfile.TemporaryDirectory() as folder:
        # Without LLVM's optimizations, which take long and do not affect buffers.
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_backend_optimization_level=0"
        command = [sys.executable, "-m", "benchmarks.memory", "compile", row]
        subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=True)
        reports = pathlib.Path(folder).glob("*memory-usage-report.txt")
        return max(int(_TOTAL.search(report.read_text())[1]) for report in reports)


@app.command("compile")
def compile_step(row: str):
    """Compile the step of a row; XLA_FLAGS sets the folder of the report."""
    import numpy as np
    import tensorflow as tf

    from trellis_keras import zoo

    model = zoo.trellisnet_wt103(**ROWS[row])
    model.optimizer.build(model.trainable_variables)
    begin_epoch(model, BATCH)
    tokens = words(np.random.default_rng(0), model.vocabulary_size, (BATCH, SEGMENT + 1))
    function = tf.function(model.train_step, jit_compile=True)
    batch = (tf.constant(tokens[:, :-1]), tf.constant(tokens[:, 1:]))
    function.experimental_get_compiler_ir(batch)(stage="optimized_hlo")


if __name__ == "__main__":
    app()
