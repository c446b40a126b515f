"""Times one step of small nets, batch 1, as a user calls it, in C, WebAssembly and Python.

    python -m benchmarks run edge

The ways run in alternation, so that all see the same load of the machine; each figure is the median
of the turns. A way is skipped if its program or package is missing.
"""

import dataclasses
import importlib.util
import json
import math
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from benchmarks import cases, cortex_m
from benchmarks.results import ROUNDS, heading
from keras_streams import compiled_step
from keras_streams.c_export import fixed_source, proven_source
from keras_streams.native_stream import write_source
from keras_streams.xla import compile_xla
from tools.markdown import table
from trellis_keras import zoo
from trellis_keras.export import export, native
from trellis_keras.layers import LRU, TCN, TrellisLayer
from trellis_keras.models import SequenceClassifier

HERE = pathlib.Path(__file__).resolve().parent
C_OPTIONS = ["-std=gnu11", "-O3", "-march=native"]

_MAIN_C = """
#include "model.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int count, char **arguments)
{
    static model_state state;
    static float x[MODEL_INPUTS], y[MODEL_OUTPUTS];
    int steps = atoi(arguments[count - 1]);
    struct timespec first, last;
    model_reset(&state);
    for (int t = 0; t < steps / 10; t++)
        model_step(&state, x, y);
    clock_gettime(CLOCK_MONOTONIC, &first);
    for (int t = 0; t < steps; t++) {
        x[0] = (float)t / (float)steps;
        model_step(&state, x, y);
    }
    clock_gettime(CLOCK_MONOTONIC, &last);
    double seconds = (double)(last.tv_sec - first.tv_sec) + 1e-9 * (last.tv_nsec - first.tv_nsec);
    printf("%g %g\\n", 1e6 * seconds / steps, (double)y[0]);
    return 0;
}
"""
_MAIN_CHIP = """
#include "model.h"

void put(int value);

int main(void)
{
    static model_state state;
    static int16_t x[MODEL_INPUTS], y[MODEL_OUTPUTS];
    model_reset(&state);
    for (int t = 0; t < 20; t++) {
        x[0] = (int16_t)(1000 * t);
        model_step(&state, x, y);
    }
    for (int k = 0; k < MODEL_OUTPUTS; k++)
        put(y[k]);
    return 0;
}
"""
_HOST = """
#include <stdio.h>
void put(int value) { printf("%d\\n", value); }
"""
_MAIN_JS = """
import { readFile, writeFile } from "node:fs/promises";
import { inputs, load } from "./model.mjs";
const steps = Number(process.argv[2]);
const stream = await load(await readFile("model.wasm"));
const rows = JSON.parse(await readFile("x.json"));
const y = rows.map((row) => Array.from(stream.step(new Float32Array(row))));
await writeFile("y.json", JSON.stringify(y));
const x = new Float32Array(inputs);
for (let t = 0; t < steps / 10; t++) stream.step(x);
const first = performance.now();
for (let t = 0; t < steps; t++) {
  x[0] = t / steps;
  stream.step(x);
}
console.log((1e3 * (performance.now() - first)) / steps);
"""


@dataclasses.dataclass
class Net:
    """A net to measure.

    Attributes:
        model: The model.
        folder: Folder for its files.
        x, expected: Random inputs and Keras' outputs for them, (steps, channels).
        size: For a TCN, filters, kernel size and depth.
    """

    model: Any
    folder: pathlib.Path
    x: np.ndarray
    expected: np.ndarray
    size: tuple | None = None

    def difference(self, found):
        """Returns the largest difference from Keras, relative to the largest output."""
        found = np.reshape(found, (-1, self.expected.shape[1]))
        expected = self.expected[: len(found)]
        return float(np.abs(found - expected).max() / np.abs(expected).max())


# Each way takes a net and returns a function that times a turn (in microseconds per step) and the
# largest difference from Keras, or `None` if the way does not apply to the net.


def c_by_hand(net):
    if net.size != (24, 8, 8):
        return None
    program = net.folder / "by_hand"
    source = HERE / "tcn_by_hand.c"
    _compile([*C_OPTIONS, "-ffast-math", str(source), "-o", str(program)], net.folder)
    return lambda: _printed([program, "20000"], net.folder), None


def generated_c(net):
    (net.folder / "main.c").write_text(_MAIN_C)
    options = [*C_OPTIONS, "-fno-math-errno"]
    _compile([*options, "model.c", "main.c", "-lm", "-o", "main"], net.folder)
    return lambda: _printed(["./main", "20000"], net.folder), None


def web_assembly(net):
    export(net.model, net.folder / "model.wasm", format="wasm", overwrite=True)
    (net.folder / "main.mjs").write_text(_MAIN_JS)
    (net.folder / "x.json").write_text(json.dumps(net.x.tolist()))
    _printed(["node", "main.mjs", "100"], net.folder)
    found = json.loads((net.folder / "y.json").read_text())
    return lambda: _printed(["node", "main.mjs", "20000"], net.folder), net.difference(found)


def native_from_python(net):
    stream = native(net.model)
    found = [stream.step(row) for row in net.x]
    return _in_python(stream.step, net.x[0], 5000), net.difference(found)


def litert(net):
    path = net.folder / "model.tflite"
    export(net.model, path, format="litert", overwrite=True)
    step = litert_step(path, "inputs")
    found = [step(row) for row in net.x]
    return _in_python(step, net.x[0], 500), net.difference(found)


def litert_step(path, inputs):
    """Returns a function from an input to the output of a LiteRT file, which carries its state."""
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner("step")
    tensors = runner.get_input_details().items()
    cache = {name: np.zeros(t["shape"], t["dtype"]) for name, t in tensors if name != inputs}

    def step(x):
        nonlocal cache
        cache = runner(**{inputs: x[None]}, **cache)
        return cache.pop(next(name for name in cache if not name.startswith("cache_")))

    return step


def onnx_runtime(net):
    import onnxruntime

    path = net.folder / "model.onnx"
    export(net.model, path, format="onnx", overwrite=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # more threads would busy-wait on the cores of the others
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    cache = {
        tensor.name: np.zeros([1, *tensor.shape[1:]], "float32") for tensor in session.get_inputs()
    }
    del cache["inputs"]
    outputs = [tensor.name for tensor in session.get_outputs()]
    first = next(name for name in outputs if not name.startswith("next_"))
    names = [first, *(f"next_{name}" for name in cache)]

    def step(x):
        y, *after = session.run(names, {"inputs": x[None], **cache})
        cache.update(zip(cache, after, strict=True))
        return y

    found = [step(row) for row in net.x]
    return _in_python(step, net.x[0], 500), net.difference(found)


def tensorflow(frozen):
    def way(net):
        compiled = compiled_step(net.model, frozen=frozen)
        return _stepped(net, compiled)

    return way


def tensorflow_unpacked(net):
    """A call of a `tf.function` of `step`, with the cache as separate tensors."""
    return _stepped(net, compile_xla(net.model.step, net.model.variables))


def _stepped(net, compiled):
    cache = net.model.initial_cache(1)

    def step(x):
        nonlocal cache
        y, cache = compiled(x[None], cache)
        return y

    rows = net.x[:20]
    found, again = [np.asarray(step(row)) for row in rows], net.model.initial_cache(1)
    differences = []
    for row, y in zip(rows, found, strict=True):  # returns logits, unlike the other ways
        expected, again = net.model.step(row[None], again)
        differences.append(np.abs(y - expected).max() / np.abs(expected).max())
    return _in_python(step, net.x[0], 200, np.asarray), float(max(differences))


def keras_tcn(net):
    if net.size is None:
        return None
    window = np.zeros((1, TCN(*net.size).receptive_field, net.x.shape[1]), "float32")
    run = cases.inference(cases.whole(cases.keras_tcn(*net.size)), lambda: window)()
    return _in_python(lambda x: run(), None, 20), None


VARIANTS: dict[str, Callable] = {
    "Hand-written C, `-ffast-math`": c_by_hand,
    "C": generated_c,
    "WebAssembly in Node": web_assembly,
    "`export.native` from Python": native_from_python,
    "LiteRT from Python": litert,
    "ONNX Runtime from Python": onnx_runtime,
    "TensorFlow, `compiled_step(frozen=True)`": tensorflow(frozen=True),
    "TensorFlow, `compiled_step`": tensorflow(frozen=False),
    "TensorFlow, a `tf.function` of `step`": tensorflow_unpacked,
    "keras-tcn over its receptive field, XLA": keras_tcn,
}
# The programs and packages that a way needs; it is left out where one is missing.
NEEDS = {
    "Hand-written C, `-ffast-math`": ["cc"],
    "C": ["cc"],
    "WebAssembly in Node": ["node", "ziglang"],
    "LiteRT from Python": ["ai_edge_litert"],
    "ONNX Runtime from Python": ["onnxruntime", "tf2onnx"],
    "keras-tcn over its receptive field, XLA": ["tcn"],
}


def _missing(name):
    return [n for n in NEEDS.get(name, ()) if not (shutil.which(n) or importlib.util.find_spec(n))]


def _compile(arguments, folder):
    subprocess.run(["cc", *arguments], cwd=folder, check=True)


def _printed(command, folder):
    run = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float((run.stdout.split() or ["nan"])[0])


def _in_python(step, x, count, finish=lambda y: y):
    """Returns a function that times `count` steps; `finish` waits for the last one."""

    def turn():
        started = time.perf_counter()
        for _ in range(count):
            y = step(x)
        finish(y)
        return 1e6 * (time.perf_counter() - started) / count

    turn()
    return turn


def measure():
    """Returns the figures of all nets."""
    if keras.backend.backend() != "tensorflow":
        raise SystemExit("edge measures the calls of TensorFlow: set KERAS_BACKEND=tensorflow.")
    nets = {}
    for name, (model, size) in _nets().items():
        with tempfile.TemporaryDirectory() as files:
            nets[name] = _figures(model, pathlib.Path(files), size)
    return {"nets": nets}


def _nets():
    """Returns {name: (model, size of a TCN or `None`)}."""

    def classifier(backbone, classes):
        model = SequenceClassifier(backbone, classes)
        model.build((None, None, 6))
        return model

    exercises = TCN(32, kernel_size=3, depth=4, return_sequences=False)
    trellis = TrellisLayer(12, 5, return_sequences=False)
    nets = {
        "`tcn_adding`": (zoo.tcn_adding(), (24, 8, 8)),
        "`tcn_jsb`": (zoo.tcn_jsb(), (150, 3, 2)),
        "LRU, 9 units": (classifier(LRU(9, return_sequences=False), 2), None),
        "TrellisLayer, 12 units, 5 levels": (classifier(trellis, 2), None),
        "exercises, TCN of 32 filters": (classifier(exercises, 7), (32, 3, 4)),
    }
    rng = np.random.default_rng(0)
    for model, *_ in nets.values():  # no zeros, which C leaves out: as trained
        model.set_weights([w + rng.normal(0, 0.01, w.shape) for w in model.get_weights()])
    return nets


def _figures(model, folder, size):
    """Returns the figures of a net."""
    source, x, expected = proven_source(model, "model")
    export(model, folder / "model.c", format="c")
    net = Net(model, folder, x, expected, size)
    ways, differences, left_out = {}, {}, {}
    for name, way in VARIANTS.items():
        if missing := _missing(name):
            left_out[name] = ", ".join(missing)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the converters
            found = way(net)
        if found is not None:
            ways[name], differences[name] = found
    microseconds: dict[str, list] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, turn in ways.items():
            microseconds[name].append(turn())
    return {
        "microseconds": {name: statistics.median(found) for name, found in microseconds.items()},
        "turns": microseconds,
        "differences": {name: d for name, d in differences.items() if d is not None},
        "left_out": left_out,
        "bytes": {
            "code": _code_bytes(folder),
            "weights": source.weight_bytes,
            "state": source.state_bytes,
        },
        "integers": _integers(net),
    }


def _integers(net):
    """Returns {quantization: bytes of integer-only C, and instructions per Cortex-M4 step}."""
    found = {}
    for quantization in ("int8", "int8_rings"):
        source = fixed_source(net.model, "model", quantization, net.x, tolerance=math.inf)
        write_source(source, net.folder)
        found[quantization] = {
            "instructions": _on_chip(net.folder),
            "weights": source.weight_bytes,
            "state": source.state_bytes,
        }
    return found


def _on_chip(folder):
    """Returns the instructions of a Cortex-M4 step of `model.c`, whose outputs are the host's."""
    if not cortex_m.is_installed():
        return None
    (folder / "main.c").write_text(_MAIN_CHIP)
    (folder / "host.c").write_text(_HOST)
    _compile([*C_OPTIONS, "model.c", "main.c", "host.c", "-lm", "-o", "host"], folder)
    host = subprocess.run(["./host"], cwd=folder, check=True, capture_output=True, text=True)
    printed, instructions = cortex_m.run_main(folder, "cortex-m4")
    assert printed == host.stdout.split()
    return instructions // 20


def _code_bytes(folder):
    """Returns the size of `model.c` as machine code in bytes, or `None` without binutils."""
    if shutil.which("size") is None or shutil.which("cc") is None:
        return None
    _compile(["-std=c99", "-Os", "-c", "model.c", "-o", "model.o"], folder)
    listed = subprocess.run(
        ["size", "-A", "model.o"], cwd=folder, check=True, capture_output=True, text=True
    )
    return sum(map(int, re.findall(r"^\.text\S*\s+(\d+)", listed.stdout, re.MULTILINE)))


def markdown(results):
    """Returns the results as Markdown."""
    nets = results["nets"]
    title = "edge: microseconds a step, batch 1, as called (in brackets: times those of C)"
    text, rows = heading(title, results["machine"]), []

    def add_counts(title, counts):
        rows.append([title, *("" if count is None else f"{count:,}" for count in counts)])

    for way in VARIANTS:
        figures = [net["microseconds"] for net in nets.values()]
        if any(way in found for found in figures):
            rows.append([way, *(_cell(found, way) for found in figures)])
    for kind, title in (("code", "code, `-Os`"), ("weights", "weights"), ("state", "state")):
        add_counts(f"bytes of {title}", [net["bytes"][kind] for net in nets.values()])
    titles = {"weights": "bytes of weights", "state": "bytes of state"}
    titles["instructions"] = "instructions of a Cortex-M4"
    for quantization in ("int8", "int8_rings"):
        found = [net["integers"][quantization] for net in nets.values()]
        for kind, title in titles.items():
            add_counts(f"`{quantization}`: {title}", [net[kind] for net in found])
    largest = [f"{max(net['differences'].values()):.0e}" for net in nets.values()]
    rows.append(["largest difference of a way from Keras", *largest])
    text += table(["way", *nets], rows)
    left_out = {way: word for net in nets.values() for way, word in net["left_out"].items()}
    if left_out:
        missing = "; ".join(f"{way} (needs: {word})" for way, word in left_out.items())
        text += f"\nLeft out: {missing}.\n"
    return text


def _cell(microseconds, way):
    if way not in microseconds:
        return ""
    found, c = microseconds[way], microseconds.get("C")
    figure = f"{found:.1f}" if found < 100 else f"{found:,.0f}"
    if c is None or way == "C":
        return figure
    return f"{figure} ({found / c:,.0f})" if found > 10 * c else f"{figure} ({found / c:.1f})"
