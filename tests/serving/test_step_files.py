"""Steps for LiteRT and ONNX: a stream of them gives Keras' scores of the sequence."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_streams import to_stream
from tests.support.parameters import slow_but
from tests.support.served import inputs, scores_so_far, small_model
from trellis_keras.export import export
from trellis_keras.layers import TCN
from trellis_keras.models import LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")

NAMES = ["trellisnet", "adaptive", "lru", "cells", "classifier", "regressor", "music"]
STEPS = 40
SOME = [1, 2, 7, STEPS]


def assert_streams(model, rows, step, shapes, prefix):
    """`step(**inputs)` returns a dict; `shapes` are those of its inputs, by name."""
    name, array = inputs(model, rows, STEPS)
    cache = {key: np.zeros(shape, "float32") for key, shape in shapes.items() if key != name}
    assert all(key.startswith("cache_") for key in cache)
    found = []
    for t in range(STEPS):
        answer = step(**{name: array[:, t]}, **cache)
        cache = {key: answer.pop(prefix + key) for key in cache}
        (output,) = answer.values()
        found.append(output)
    found = np.stack([found[time - 1] for time in SOME], axis=1)
    np.testing.assert_allclose(found, scores_so_far(model, array, SOME), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(NAMES, "trellisnet"))
def test_litert(name, tmp_path):
    model = small_model(name)
    path = export(model, tmp_path / "step.tflite", format="litert")
    runtime = tf.lite.Interpreter(str(path))
    assert list(runtime.get_signature_list()) == ["step"]
    step = runtime.get_signature_runner("step")
    shapes = {key: tensor["shape"] for key, tensor in step.get_input_details().items()}
    assert {shape[0] for shape in shapes.values()} == {1}
    assert_streams(model, 1, step, shapes, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_onnx(name, tmp_path):
    pytest.importorskip("tf2onnx", reason="needs tf2onnx: pip install tf2onnx onnx onnxruntime")
    runtime = pytest.importorskip("onnxruntime")
    model = small_model(name)
    session = runtime.InferenceSession(export(model, tmp_path / "step.onnx", format="onnx"))
    names = [output.name for output in session.get_outputs()]

    def step(**inputs):
        return dict(zip(names, session.run(None, inputs), strict=True))

    assert isinstance(session.get_inputs()[0].shape[0], str)  # any number of rows
    shapes = {tensor.name: [3, *tensor.shape[1:]] for tensor in session.get_inputs()}
    assert_streams(model, 3, step, shapes, "next_")


@pytest.mark.parametrize("format", slow_but(["saved_model", "litert", "onnx"], "litert"))
def test_a_keras_model_with_a_delay_and_a_rate(format, tmp_path):
    layers = keras.layers
    convolution = layers.Conv1D(4, 3, padding="same", activation="relu")
    parts = [convolution, layers.MaxPooling1D(2), layers.GRU(3, return_sequences=True)]
    model = keras.Sequential([keras.Input((None, 2)), *parts])
    stream = to_stream(model)
    x = np.random.default_rng(0).normal(size=(1, 9, 2)).astype("float32")
    suffix = {"saved_model": "", "litert": ".tflite", "onnx": ".onnx"}[format]
    path = str(export(model, tmp_path / f"step{suffix}", format=format))
    leaves = keras.tree.flatten_with_path(stream.initial_cache(1))
    cache = {"_".join(["cache", *map(str, path)]): np.array(leaf) for path, leaf in leaves}
    if format == "saved_model":
        step = tf.saved_model.load(path).signatures["step"]
    elif format == "litert":
        step = tf.lite.Interpreter(path).get_signature_runner("step")
    else:
        pytest.importorskip("tf2onnx", reason="needs tf2onnx: pip install tf2onnx onnx onnxruntime")
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        names = [output.name.removeprefix("next_") for output in session.get_outputs()]

        def step(**inputs):
            return dict(zip(names, session.run(None, inputs), strict=True))

    found = []
    for t in range(9):
        answer = step(inputs=tf.constant(x[:, t]) if format == "saved_model" else x[:, t], **cache)
        cache = {name: answer[name] for name in cache}
        found.append(np.array(answer["outputs"]))
    wanted = stream.prefill(x)[0][0]
    assert np.sum(np.isfinite(wanted[:, 0])) == 4  # steps 2, 4, 6 and 8
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-4, atol=1e-5)


def test_wrong_paths(tmp_path):
    model = small_model("adaptive")
    for format, suffix in (("litert", ".tflite"), ("onnx", ".onnx")):
        with pytest.raises(ValueError, match=f"must end in {suffix}"):
            export(model, tmp_path / "a.bin", format=format)
    path = tmp_path / "taken.tflite"
    path.write_text("precious")
    with pytest.raises(ValueError, match="taken.tflite already exists"):
        export(model, path, format="litert")
    assert path.read_text() == "precious" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (
            lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Softmax(axis=1)]),
            "softmax.* does not stream",
        ),
        (lambda: TCN(4, 2, 2, dtype="mixed_bfloat16"), "computes in bfloat16, float32"),
    ],
)
def test_models_that_cannot_be_converted(tmp_path, backbone, message):
    model = LanguageModel(11, 4, backbone())
    model.build((None, None))
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "a.tflite", format="litert")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(tmp_path, monkeypatch):
    model = small_model("adaptive")
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(ImportError, match="pip install tf2onnx onnx onnxruntime"):
        export(model, tmp_path / "a.onnx", format="onnx")
    monkeypatch.delattr(tf, "lite")
    with pytest.raises(ImportError, match="pip install tensorflow=="):
        export(model, tmp_path / "a.tflite", format="litert")
