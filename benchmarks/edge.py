"""One step of small nets, batch 1, as a user calls it: C, WebAssembly, Python, TensorFlow, LiteRT.

    python -m benchmarks.edge

Needs a C compiler, node, and ziglang (`pip install '.[edge]'`). Each way takes its steps in turns
with the others; the figure is that of its fastest turn.
"""

import json
import pathlib
import subprocess
import tempfile
import time
import warnings
from typing import Annotated

import numpy as np
import typer

from benchmarks.__main__ import machine, write

# Keras and the package are imported by the functions, so that --help is quick.

_MAIN_C = """
#include "model.h"
#include <stdio.h>
#include <time.h>

int main(void)
{
    static model_state state;
    static float x[MODEL_INPUTS], y[MODEL_OUTPUTS];
    struct timespec first, last;
    model_reset(&state);
    clock_gettime(CLOCK_MONOTONIC, &first);
    for (int t = 0; t < STEPS; t++) {
        x[0] = (float)t / STEPS;
        model_step(&state, x, y);
    }
    clock_gettime(CLOCK_MONOTONIC, &last);
    double seconds = (double)(last.tv_sec - first.tv_sec) + 1e-9 * (last.tv_nsec - first.tv_nsec);
    printf("%g %g\\n", 1e6 * seconds / STEPS, (double)y[0]);
    return 0;
}
"""
_MAIN_JS = """
import { readFile } from "node:fs/promises";
import { inputs, load } from "./model.mjs";
const stream = await load(await readFile("model.wasm"));
const x = new Float32Array(inputs);
for (let t = 0; t < STEPS / 10; t++) stream.step(x);
const first = performance.now();
for (let t = 0; t < STEPS; t++) {
  x[0] = t / STEPS;
  stream.step(x);
}
console.log((1e3 * (performance.now() - first)) / STEPS);
"""
_TURNS = 5


def main(
    steps: Annotated[int, typer.Option(help="Steps of a turn in C and WebAssembly.")] = 20_000,
    output: Annotated[str, typer.Option(help="Folder of the results.")] = "runs/benchmarks",
):
    """Time a step of small nets."""
    results = {"machine": machine(), "nets": {}}
    for name, model in _nets().items():
        with tempfile.TemporaryDirectory() as folder:
            results["nets"][name] = measure(model, pathlib.Path(folder), steps)
    table = markdown(results)
    typer.echo(table)
    stem = pathlib.Path(output) / "edge-tensorflow"
    stem.parent.mkdir(parents=True, exist_ok=True)
    write(stem.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    write(stem.with_suffix(".md"), table)


def _nets():
    from trellis_keras import zoo
    from trellis_keras.layers import LRU, TCN, TrellisLayer
    from trellis_keras.models import SequenceClassifier

    nets = {
        "tcn_adding": zoo.tcn_adding(),
        "tcn_jsb": zoo.tcn_jsb(),
        "LRU, 9 units": SequenceClassifier(LRU(9, return_sequences=False), 2),
        "TrellisLayer, 12 units, 5 levels": SequenceClassifier(
            TrellisLayer(12, 5, return_sequences=False), 2
        ),
        "exercises, TCN of 32 filters": SequenceClassifier(
            TCN(32, kernel_size=3, depth=4, return_sequences=False), 7
        ),
    }
    for net in nets.values():
        if not net.built:
            net.build((None, None, 6))
    return nets


def measure(model, folder, steps):
    """Returns the figures of a net: bytes, and microseconds of a step of each way."""
    from trellis_keras.export import export
    from trellis_keras.export.c import proven_source

    source, _, _ = proven_source(model, "model")
    export(model, folder / "model.c", format="c")
    export(model, folder / "model.wasm", format="wasm")
    (folder / "main.c").write_text(_MAIN_C.replace("STEPS", str(steps)))
    (folder / "main.mjs").write_text(_MAIN_JS.replace("STEPS", str(steps)))
    options = ["-std=gnu99", "-O3", "-march=native", "-fno-math-errno"]
    command = ["cc", *options, "model.c", "main.c", "-lm", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    ways = {
        "C": lambda: _run(["./main"], folder),
        "WebAssembly": lambda: _run(["node", "main.mjs"], folder),
        **_in_python(model, folder),
    }
    microseconds = {name: [] for name in ways}
    for _ in range(_TURNS):
        for name, turn in ways.items():
            microseconds[name].append(turn())
    return {
        "weight_bytes": source.weight_bytes,
        "state_bytes": source.state_bytes,
        "wasm_bytes": (folder / "model.wasm").stat().st_size,
        "microseconds": {name: min(found) for name, found in microseconds.items()},
    }


def _run(command, folder):
    run = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float(run.stdout.split()[0])


def _in_python(model, folder):
    """Returns {way: function that times a turn} of what is called from Python."""
    import tensorflow as tf

    from trellis_keras.export import export, native
    from trellis_keras.layers.streaming import compiled_step

    inputs = model.input_spec.axes[-1]
    x = np.zeros(inputs, "float32")
    stream = native(model)
    step, cache = compiled_step(model), model.initial_cache(1)
    export(model, folder / "model.tflite", format="litert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this interpreter will move to another package
        interpreter = tf.lite.Interpreter(str(folder / "model.tflite"))
    runner = interpreter.get_signature_runner("step")
    tensors = runner.get_input_details().items()
    tensors = {name: np.zeros(t["shape"], t["dtype"]) for name, t in tensors}

    def tensorflow():
        nonlocal cache
        _, cache = step(x[None], cache)

    def litert():
        answer = runner(**tensors)
        tensors.update({name: answer[name] for name in tensors if name != "inputs"})

    def timed(function, count):
        def turn():
            first = time.perf_counter()
            for _ in range(count):
                function()
            return 1e6 * (time.perf_counter() - first) / count

        turn()
        return turn

    return {
        "C from Python, `export.native`": timed(lambda: stream.step(x), 5000),
        "LiteRT from Python": timed(litert, 1000),
        "TensorFlow, `compiled_step`": timed(tensorflow, 300),
    }


def markdown(results):
    """Returns the results as Markdown."""
    nets = results["nets"]
    ways = list(next(iter(nets.values()))["microseconds"])
    machine_line = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    lines = [
        f"### edge: microseconds a step, batch 1\n\n{machine_line}\n",
        "| net | weights | state | wasm | " + " | ".join(ways) + " |",
        "|---" * (4 + len(ways)) + "|",
    ]
    for name, of in nets.items():
        sizes = [
            f"{of[size] / 1000:.1f} KB" for size in ("weight_bytes", "state_bytes", "wasm_bytes")
        ]
        figures = [f"{of['microseconds'][way]:.1f}" for way in ways]
        lines.append(f"| {' | '.join([name, *sizes, *figures])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
