"""Steps for LiteRT and ONNX: a stream of them gives Keras' scores of the sequence."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parameters import slow_but
from tests.support.served import inputs, scores_so_far, small_model
from trellis_keras.export import export
from trellis_keras.layers import TCN
from trellis_keras.models import LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")

NAMES = ["trellisnet", "lru", "cells", "classifier", "regressor"]
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


def test_a_file_is_not_replaced(tmp_path):
    path = tmp_path / "taken.tflite"
    path.write_text("precious")
    with pytest.raises(ValueError, match="taken.tflite already exists"):
        export(small_model("adaptive"), path, format="litert")
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
