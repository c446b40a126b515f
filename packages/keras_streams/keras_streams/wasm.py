"""Exports one step of a model as WebAssembly, with an ES module that calls it."""

import json
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any

import keras
import numpy as np

from keras_streams.c import check_equal, proven_source
from keras_streams.c_source import Source, comment_text
from keras_streams.compiled import OPTIONS, ZIG, has_zig, write_source
from keras_streams.files import check_output, write_files

# An instance holds one stream: the state, x and y are in its memory.
_GLUE = """
#include "model.h"

static model_state state;
static float x[MODEL_INPUTS], y[MODEL_OUTPUTS];

float *inputs(void) { return x; }
float *outputs(void) { return y; }
void reset(void) { model_reset(&state); }
void step(void) { model_step(&state, x, y); }
"""
_GLUE_OF_TOKENS = """
#include "model.h"

static model_state state;
static float y[MODEL_OUTPUTS];

float *outputs(void) { return y; }
void reset(void) { model_reset(&state); }
void step(int token) { model_step(&state, token, y); }
"""

_MODULE = """\
@COMMENT@
// import { load } from "./@STEM@.mjs";
// const stream = await load("@STEM@.wasm");  // a URL, or the file's bytes
// const y = stream.step(x);                // @CALL@

export const inputs = @INPUTS@;
export const outputs = @OUTPUTS@;
export const names = @NAMES@; // of the outputs; may be empty

// Returns a new stream.
export async function load(source) {
  if (typeof source === "string" || source instanceof URL) {
    const response = await fetch(source);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}: ${source}`);
    source = await response.arrayBuffer();
  }
  return Stream.of(await WebAssembly.compile(source));
}

class Stream {
  static async of(module) {
    const stream = new Stream();
    stream.module = module;
    stream.engine = (await WebAssembly.instantiate(module)).exports;
    stream.engine._initialize();
    const memory = stream.engine.memory.buffer;
@BUFFER@    stream.y = new @ARRAY@(memory, stream.engine.outputs(), outputs);
    stream.reset();
    return stream;
  }

  // Reads one time step and returns the outputs.
  step(x) {
@READ@
    return this.y.slice();
  }

  // Resets the stream.
  reset() {
    this.engine.reset();
  }

  // Returns another stream in the same state.
  async clone() {
    const other = await Stream.of(this.module);
    new Uint8Array(other.engine.memory.buffer).set(new Uint8Array(this.engine.memory.buffer));
    return other;
  }
}
"""

_BUFFER = "    stream.x = new @ARRAY@(memory, stream.engine.inputs(), inputs);\n"
_READ_NUMBERS = """\
    if (x.length !== inputs) {
      throw new RangeError(`x must have ${inputs} numbers. Received: ${x.length}`);
    }
    this.x.set(x);
    this.engine.step();"""
_READ_TOKEN = """\
    if (!Number.isInteger(x) || x < 0 || x >= inputs) {
      throw new RangeError(`x must be a token id below ${inputs}. Received: ${x}`);
    }
    this.engine.step(x);"""


def write_wasm(
    model: keras.Layer,
    path: pathlib.Path,
    series: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes a model as WebAssembly and returns the path; see `export`."""
    if path.suffix != ".wasm":
        raise ValueError(f"`path` must end in .wasm with format='wasm'. Received: {path}")
    if not has_zig():
        raise ImportError("format='wasm' needs a compiler: pip install ziglang")
    files = path, path.with_suffix(".mjs")
    if path.parent.is_dir():
        for file in files:
            check_output(file, overwrite=overwrite)
    source, x, expected = proven_source(model, "model", series)
    contents = compile_wasm(source), es_module(source, path.stem).encode()
    if shutil.which("node") is not None:
        check_equal(model.name, source, _run_in_node(contents, x), expected)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_files(dict(zip(files, contents, strict=True)))
    return path


def compile_wasm(source: Source) -> bytes:
    """Returns WebAssembly with the functions `inputs`, `outputs`, `reset` and `step`.

    Raises:
        RuntimeError: If the compiler fails.
    """
    glue = _GLUE_OF_TOKENS if source.takes_token else _GLUE
    names = ["outputs", "reset", "step", *([] if source.takes_token else ["inputs"])]
    exports = [f"-Wl,--export={name}" for name in names]
    stack = 2**16 + -(-source.stack_bytes // 16) * 16
    with tempfile.TemporaryDirectory() as folder:
        code = write_source(source, folder)
        code.with_name("glue.c").write_text(glue.replace("float", source.real))
        command = [
            *ZIG,
            *("-target", "wasm32-wasi", "-mexec-model=reactor", "-mcpu=generic+simd128"),
            *OPTIONS,
            *("-Wl,--no-entry", "-Wl,--strip-all", f"-Wl,-z,stack-size={stack}", *exports),
            *(str(code), str(code.with_name("glue.c")), "-lm", "-o", f"{folder}/model.wasm"),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
        return pathlib.Path(folder, "model.wasm").read_bytes()


def es_module(source: Source, stem: str) -> str:
    """Returns an ES module that loads `stem.wasm` and calls its step."""
    array = "Float32Array" if source.real == "float" else "Float64Array"
    x = "token id" if source.takes_token else f"{array}({source.inputs})"
    values = {
        "COMMENT": source.comment.strip(),
        "STEM": comment_text(stem),
        "CALL": f"{x} -> {array}({source.outputs})",
        "INPUTS": str(source.inputs),
        "OUTPUTS": str(source.outputs),
        "NAMES": json.dumps(source.names),
        "ARRAY": array,
        "BUFFER": "" if source.takes_token else _BUFFER.replace("@ARRAY@", array),
        "READ": _READ_TOKEN if source.takes_token else _READ_NUMBERS,
    }
    return re.sub("@([A-Z]+)@", lambda match: values[match[1]], _MODULE)


_SCRIPT = """
import { readFile } from "node:fs/promises";
import { load } from "./model.mjs";
const stream = await load(await readFile("model.wasm"));
const x = JSON.parse(await readFile("x.json"));
const y = x.map((row) => Array.from(stream.step(row.map?.((v) => v ?? NaN) ?? row)));
console.log(JSON.stringify(y));
"""


def _run_in_node(contents, x):
    """Returns the outputs that Node computes for the inputs x."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(("model.wasm", "model.mjs"), contents, strict=True):
            pathlib.Path(folder, name).write_bytes(content)
        rows = json.dumps(x.tolist()).replace("NaN", "null")
        pathlib.Path(folder, "x.json").write_text(rows)
        pathlib.Path(folder, "run.mjs").write_text(_SCRIPT)
        command = ["node", "run.mjs"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"Node failed to run the WebAssembly: {run.stderr[-2000:]}")
        return np.array(json.loads(run.stdout), dtype="float64")
