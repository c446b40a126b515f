"""WebAssembly and its ES module, in Node."""

import json
import shutil
import subprocess

import keras
import numpy as np
import pytest

from keras_streams import to_stream
from keras_streams.c_export import keras_steps
from tests.export.nets import CHANNELS, classifier, language_model
from trellis_keras.export import export

pytest.importorskip("ziglang")
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")

_MAIN = """
import { readFile } from "node:fs/promises";
import * as model from "./MODEL.mjs";

const stream = await model.load(await readFile("MODEL.wasm"));
const x = JSON.parse(await readFile("x.json")), half = x.length / 2;
const steps = (one, rows) => rows.map((row) => Array.from(one.step(row)));
const first = steps(stream, x.slice(0, half));
const clone = await stream.clone();
const rest = steps(stream, x.slice(half)), again = steps(clone, x.slice(half));
stream.reset();
const anew = steps(stream, x.slice(0, half));
let error = "";
try {
  stream.step([1]);
} catch (found) {
  error = found.message;
}
const { inputs, outputs, names } = model;
console.log(JSON.stringify({ first, rest, again, anew, error, inputs, outputs, names }));
"""


def run_node(folder, name, x):
    (folder / "x.json").write_text(json.dumps(x.tolist()))
    (folder / "main.mjs").write_text(_MAIN.replace("MODEL", name))
    run = subprocess.run(["node", "main.mjs"], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_stream_in_node_equals_keras(tmp_path):
    model = classifier()
    path = export(model, tmp_path / "gait.wasm", format="wasm")
    assert path.stat().st_size < 20_000
    x = np.random.default_rng(1).normal(size=(60, CHANNELS))
    found = run_node(tmp_path, "gait", x)
    wanted = keras_steps(model, x.astype("float32"))
    np.testing.assert_allclose(found["first"] + found["rest"], wanted, rtol=0, atol=1e-6)
    assert found["again"] == found["rest"] and found["anew"] == found["first"]
    assert found["error"] == "x must have 3 numbers. Received: 1"
    assert (found["inputs"], found["outputs"], found["names"]) == (3, 2, ["walk", "run"])


def test_tokens(tmp_path):
    model = language_model()
    export(model, tmp_path / "text.wasm", format="wasm")
    ids = np.random.default_rng(1).integers(0, 9, 40)
    found = run_node(tmp_path, "text", ids)
    np.testing.assert_allclose(found["first"] + found["rest"], keras_steps(model, ids), atol=1e-6)
    assert found["error"] == "x must be a token id below 9. Received: 1"


def test_infinite_inputs(tmp_path):
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.ReLU(max_value=6.0)])
    stream = to_stream(model, example=np.full((1, 8, 2), np.inf, "float32"))
    assert export(stream, tmp_path / "model.wasm", format="wasm").exists()


def test_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_streams.wasm.has_zig", lambda: False)
    with pytest.raises(ImportError, match="pip install ziglang"):
        export(classifier(), tmp_path / "model.wasm", format="wasm")
    assert not list(tmp_path.iterdir())
