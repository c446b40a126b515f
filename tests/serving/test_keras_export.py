"""Keras' own `Model.export`: of language models, also as a part of another model, and of layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trellis_keras.layers import LRU, TCN, TrellisLayer
from trellis_keras.models import LanguageModel


def test_export(tmp_path):
    model = LanguageModel(9, 4, TrellisLayer(6, 3, output_units=4, seed=0), seed=0)
    model.build((None, None))
    inputs = keras.Input((None,), dtype="int32")
    tokens = np.random.default_rng(0).integers(0, 9, (2, 6)).astype("int32")
    for name, exported in {"itself": model, "around": keras.Model(inputs, model(inputs))}.items():
        exported.export(tmp_path / name, verbose=False)
        served = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_allclose(served.serve(tokens), model(tokens), atol=1e-6)


# Functional models, in the formats of the table in docs/serving.md

LAYERS = {"tcn": lambda: TCN(5, 3, depth=2, seed=0), "lru": lambda: LRU(4, seed=0)}


def _onnx(path):
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})[0]


def _openvino(path):
    core = pytest.importorskip("openvino").Core()
    compiled = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: compiled([x])[0]


def _litert(path):
    interpreter = tf.lite.Interpreter(path)
    (source,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(x):
        interpreter.resize_tensor_input(source["index"], x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(source["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(result["index"])

    return run


def _saved_model(path):
    loaded = tf.saved_model.load(path)
    return lambda x: loaded.serve(x)  # the function alone does not keep the variables


# Format: ending of the file, packages that write it, and how it is loaded.
FORMATS = {
    "tf_saved_model": ("", [], _saved_model),
    "onnx": (".onnx", ["tf2onnx", "onnxruntime"], _onnx),
    "openvino": (".xml", ["openvino"], _openvino),
    "litert": (".tflite", [], _litert),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("to", FORMATS)
def test_functional_models(to, name, tmp_path):
    ending, packages, load = FORMATS[to]
    for package in packages:
        pytest.importorskip(package, reason=f"needs {package}")
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, keras.layers.Dense(2)(LAYERS[name]()(inputs)))
    model(np.zeros((1, 4, 3), "float32"))  # Keras' export to ONNX wants a call first
    path = str(tmp_path / f"model{ending}")
    model.export(path, format=to, verbose=False)
    run = load(path)
    for batch, time in ((1, 9), (3, 17)):
        x = np.random.default_rng(time).normal(size=(batch, time, 3)).astype("float32")
        if (to, name) == ("litert", "lru"):
            with pytest.raises(RuntimeError, match="Flex"):
                run(x)
        else:
            np.testing.assert_allclose(run(x), model(x), atol=1e-6)
