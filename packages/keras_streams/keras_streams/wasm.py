"""Exports one step of a model as WebAssembly, with an ES module that calls it."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import numpy as np

from keras_streams.c_export import check_equal, proven_source
from keras_streams.c_source import Source, comment_text
from keras_streams.exported_stream import exported_stream
from keras_streams.files import check_output, filled_template, write_files
from keras_streams.native_stream import OPTIONS, ZIG, build, has_zig


def write_wasm(model: Any, path: pathlib.Path, overwrite: bool = False) -> pathlib.Path:
    """Writes a model as WebAssembly and returns the path; see `export`."""
    if not has_zig():
        raise ImportError("format='wasm' needs a compiler: pip install ziglang")
    files = path, path.with_suffix(".mjs")
    for file in files:
        check_output(file, overwrite=overwrite, makes_folders=True)
    stream = exported_stream(model)
    source, x, expected = proven_source(stream, "model")
    contents = compile_wasm(source), es_module(source, path.stem).encode()
    if shutil.which("node") is not None:
        check_equal(stream.model.name, source, _run_in_node(contents, x), expected)
    write_files(dict(zip(files, contents, strict=True)))
    return path


def compile_wasm(source: Source) -> bytes:
    """Returns WebAssembly with the functions `inputs`, `outputs`, `reset` and `step`."""
    names = ["outputs", "reset", "step", *([] if source.takes_token else ["inputs"])]
    exports = [f"-Wl,--export={name}" for name in names]
    stack = 2**16 + -(-source.stack_bytes // 16) * 16
    command = [
        *ZIG,
        *("-target", "wasm32-wasi", "-mexec-model=reactor", "-mcpu=generic+simd128"),
        *OPTIONS,
        *("-Wl,--no-entry", "-Wl,--strip-all", f"-Wl,-z,stack-size={stack}", *exports),
    ]
    glue = filled_template("glue.c", {"REAL": source.real})
    return build(dataclasses.replace(source, code=f"{source.code}\n{glue}"), command)


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
        "TOKEN": "true" if source.takes_token else "false",
    }
    return filled_template("model.mjs", values)


_SCRIPT = """
import { readFile, writeFile } from "node:fs/promises";
import { load } from "./model.mjs";
const stream = await load(await readFile("model.wasm"));
const x = new Float64Array(new Uint8Array(await readFile("x")).buffer);
const width = Number(process.argv[2]);  // 0 for tokens
const y = [];
for (let i = 0; i < x.length; i += width || 1)
  y.push(...stream.step(width ? x.subarray(i, i + width) : x[i]));
await writeFile("y", new Float64Array(y));
"""


def _run_in_node(contents, x):
    """Returns the outputs that Node computes for the inputs x."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(("model.wasm", "model.mjs"), contents, strict=True):
            pathlib.Path(folder, name).write_bytes(content)
        x.astype("float64").tofile(pathlib.Path(folder, "x"))
        pathlib.Path(folder, "run.mjs").write_text(_SCRIPT)
        command = ["node", "run.mjs", str(x.shape[1] if x.ndim > 1 else 0)]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"Node failed to run the WebAssembly: {run.stderr[-2000:]}")
        return np.fromfile(pathlib.Path(folder, "y")).reshape(len(x), -1)
