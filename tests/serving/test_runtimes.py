"""Exported steps in other runtimes: a stream of them says what Keras says of the sequence."""

import importlib.util
import sys

import keras
import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.served import KINDS, inputs, scores, small_model
from trellis_keras import serving
from trellis_keras.layers import TCN
from trellis_keras.models import LanguageModel

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
STREAMED = ["trellisnet_char", "tcn_char_ptb", "lru_char_ptb", "tcn_adding"]
LSTM = pytest.param("lstm_char_ptb", marks=pytest.mark.slow)
SUFFIX = {"litert": ".tflite", "onnx": ".onnx", "saved_model": ""}
STEPS = 60


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """`written(name, format)`: a model of `served.KINDS` and what `export` wrote of it."""
    folder = tmp_path_factory.mktemp("written")
    models, paths = {}, {}

    def export(name, format):
        if name not in models:
            models[name] = small_model(name, **KINDS[name])
        if (name, format) not in paths:
            path = folder / (name + SUFFIX[format])
            paths[name, format] = serving.export(models[name], path, format=format)
        return models[name], paths[name, format]

    return export


def interpreter(path):
    """Of the runtime's own package where it is installed, else of TensorFlow."""
    if importlib.util.find_spec("ai_edge_litert"):
        from ai_edge_litert.interpreter import Interpreter

        return Interpreter(str(path))
    return tf.lite.Interpreter(str(path))


def stream(step, state, name, array):
    """The outputs of a row's steps, (time, units); `step` is called as the signature is."""
    outputs = []
    for x in array[0]:
        answer = step(**{name: x[None]}, **state)
        state = {key: value for key, value in answer.items() if key.startswith("state_")}
        (output,) = answer.keys() - state.keys()
        outputs.append(answer[output][0])
    return np.stack(outputs)


def assert_streams(model, step, state, atol=1e-5):
    name, array = inputs(model, 1, STEPS)
    expected = scores(model, array)[1][0]
    found = stream(step, state, name, array)
    # Of a model with one output for a whole row, the last step's is that.
    found = found if expected.ndim == 2 else found[-1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def zero_state(tensors):
    """The state that all layers of this package begin with."""
    return {name: np.zeros(shape, "float32") for name, shape in tensors if name[:5] == "state"}


@pytest.mark.parametrize("name", [*STREAMED, LSTM])
def test_litert(written, name):
    model, path = written(name, "litert")
    runtime = interpreter(path)
    assert set(runtime.get_signature_list()) == {"initial_state", "step"}
    state = runtime.get_signature_runner("initial_state")()
    assert_streams(model, runtime.get_signature_runner("step"), state)


def test_int8_is_smaller_and_costs_little(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import int8

    model = small_model("trellisnet_char", hidden_units=60)
    for weight in model.trainable_weights:
        weight.assign(weight / 4)
    rows = int8.compare(model, inputs(model, 1, STEPS)[1][0])
    whole, quantized = (rows[name] for name in int8.FILES)
    assert rows["Keras"]["bpc"] == pytest.approx(whole["bpc"], abs=1e-5)
    assert 0 < abs(quantized["bpc"] - whole["bpc"]) < 0.05
    assert quantized["bytes"] < 2 * model.count_params() < 4 * model.count_params() < whole["bytes"]


def test_wrong_arguments_leave_nothing_behind(tmp_path):
    model = small_model("tcn_char_ptb")
    with pytest.raises(ValueError, match="`quantization` must be one of .*'int4'"):
        serving.export(model, tmp_path / "a.tflite", format="litert", quantization="int4")
    for format, suffix in (("litert", ".tflite"), ("onnx", ".onnx")):
        if format == "onnx" and not importlib.util.find_spec("tf2onnx"):
            continue
        with pytest.raises(ValueError, match=f"ends in {suffix}. Received: .*/a.bin"):
            serving.export(model, tmp_path / "a.bin", format=format)
    path = tmp_path / "taken.tflite"
    path.write_text("precious")
    with pytest.raises(ValueError, match="taken.tflite exists already"):
        serving.export(model, path, format="litert")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [
        ("taken.tflite", "precious")
    ]


def built(backbone):
    model = LanguageModel(11, 4, backbone)
    model.build((None, None))
    return model


def test_models_that_cannot_be_converted(tmp_path):
    with pytest.raises(ValueError, match="lacks .*'initial_cache', 'step', 'prefill'"):
        lstm = keras.layers.LSTM(4, return_sequences=True)
        serving.export(built(lstm), tmp_path / "a.tflite", format="litert")
    with pytest.raises(ValueError, match="computes in bfloat16, float32"):
        tcn = TCN(4, 2, 2, dtype="mixed_bfloat16")
        serving.export(built(tcn), tmp_path / "a.tflite", format="litert")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(tmp_path, monkeypatch):
    model = small_model("tcn_char_ptb")
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(ImportError, match="pip install tf2onnx onnx onnxruntime"):
        serving.export(model, tmp_path / "a.onnx", format="onnx")
    monkeypatch.delattr(tf, "lite")
    with pytest.raises(ImportError, match="pip install tensorflow=="):
        serving.export(model, tmp_path / "a.tflite", format="litert")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STREAMED, LSTM])
def test_onnx(written, name):
    pytest.importorskip("tf2onnx")
    runtime = pytest.importorskip("onnxruntime")
    model, path = written(name, "onnx")
    session = runtime.InferenceSession(str(path))
    names = [output.name.removeprefix("next_") for output in session.get_outputs()]

    def step(**inputs):
        return dict(zip(names, session.run(None, inputs), strict=True))

    state = zero_state((tensor.name, tensor.shape) for tensor in session.get_inputs())
    assert_streams(model, step, state)


@pytest.fixture
def openvino():
    """`openvino(path)`: a file or folder, read and compiled."""
    core = pytest.importorskip("openvino").Core()
    # Its own default is less than float32 on some processors.
    return lambda path: core.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STREAMED, LSTM])
def test_openvino_reads_saved_models(written, openvino, name):
    model, path = written(name, "saved_model")
    compiled = openvino(path)
    for shape in ((1, 9), (3, 17)):
        what, array = inputs(model, *shape)
        output, expected = scores(model, array)
        np.testing.assert_allclose(compiled({what: array})[output], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STREAMED[1:], LSTM])
def test_openvino_reads_onnx(written, openvino, name):
    pytest.importorskip("tf2onnx")
    model, path = written(name, "onnx")
    compiled = openvino(path)

    def step(**inputs):
        answer = compiled(inputs)
        return {
            output.any_name.removeprefix("next_"): answer[output].copy()
            for output in compiled.outputs
        }

    state = zero_state((tensor.any_name, list(tensor.shape)) for tensor in compiled.inputs)
    assert_streams(model, step, state)
