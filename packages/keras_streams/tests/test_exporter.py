"""LiteRT and ONNX files of any stream."""

from unittest import mock

import keras
import pytest
from keras import layers, ops

from keras_streams import export, exporter, graph_stream

pytestmark = pytest.mark.both_backends
needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="needs TensorFlow"
)


def model():
    x = keras.Input((None, 2))
    y = layers.Conv1D(4, 3, padding="causal", activation="relu")(x)
    return keras.Model(x, layers.GRU(3, return_sequences=True)(y))


@needs_tensorflow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_a_step_of_litert_takes_and_returns_the_cache(tmp_path, monkeypatch):
    prove = mock.Mock(wraps=graph_stream.prove)
    monkeypatch.setattr(graph_stream, "prove", prove)
    path = export(model(), tmp_path / "net.tflite", format="litert")
    prove.assert_called_once()
    lite = pytest.importorskip("tensorflow").lite
    step = lite.Interpreter(str(path)).get_signature_runner("step")
    cache = {name for name in step.get_input_details() if name.startswith("cache_")}
    assert len(cache) == 2 and set(step.get_input_details()) == {"inputs", *cache}
    assert set(step.get_output_details()) == {"outputs", *cache}


@needs_tensorflow
@pytest.mark.parametrize("format, suffix", [("litert", "tflite"), ("onnx", "onnx")])
def test_a_converted_step_that_differs_is_not_written(format, suffix, tmp_path, monkeypatch):
    if format == "onnx":
        pytest.importorskip("tf2onnx")
    net, convert = model(), getattr(exporter, f"_to_{format}")

    def then_changed(*arguments):
        content = convert(*arguments)
        net.set_weights([1.1 * weight for weight in net.get_weights()])
        return content

    monkeypatch.setattr(exporter, f"_to_{format}", then_changed)
    with pytest.raises(RuntimeError, match="differs from Keras in 'outputs'"):
        export(net, tmp_path / "folder" / f"net.{suffix}", format=format)
    assert not list(tmp_path.iterdir())


@needs_tensorflow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_names_that_tensorflow_does_not_take_are_changed(tmp_path):
    xs = [keras.Input((None, 2), name=name) for name in ("a-b", "a_b", "1", "cache_0")]
    outputs = {"a b": layers.Conv1D(2, 2, padding="causal")(xs[0]), "y": layers.Add()(xs)}
    path = export(keras.Model(xs, outputs), tmp_path / "net.tflite", format="litert")
    step = pytest.importorskip("tensorflow").lite.Interpreter(str(path)).get_signature_runner()
    inputs = {"a_b", "a_b_2", "inputs_1", "inputs_cache_0", "cache_0"}
    assert set(step.get_input_details()) == inputs
    assert set(step.get_output_details()) == {"outputs_a_b", "y", "cache_0"}


@needs_tensorflow
def test_the_rounding_error_of_a_running_mean_may_differ(tmp_path):
    parts = layers.Conv1D(3, 3, padding="same"), layers.GlobalAveragePooling1D()
    net = keras.Sequential([keras.Input((None, 3)), *parts])
    for seed in range(3):
        keras.utils.set_random_seed(seed)
        net.set_weights([keras.random.normal(weight.shape) for weight in net.weights])
        export(net, tmp_path / "net.tflite", format="litert", overwrite=True)


@needs_tensorflow
def test_what_a_converter_refuses_is_named(tmp_path):
    x = keras.Input((None, 2))
    with pytest.raises(ValueError, match="net cannot be converted.*'litert'.*BitwiseAnd"):
        net = keras.Model(x, ops.argmax(x, axis=-1), name="net")
        export(net, tmp_path / "net.tflite", format="litert")


@needs_tensorflow
def test_8_bits_differ_by_no_more_than_the_tolerance(tmp_path):
    net = keras.Sequential([keras.Input((None, 32)), layers.GRU(48, return_sequences=True)])
    options = {"format": "litert", "quantization": "int8", "quantization_tolerance": 1e-5}
    with pytest.raises(ValueError, match="`quantization_tolerance`"):
        export(net, tmp_path / "net.tflite", **options)


def test_options_of_other_formats_are_errors(tmp_path):
    for suffix, options, message in (
        ("c", {"weights": "bytes"}, "`weights` must be"),
        ("tflite", {"weights": "file"}, "`weights` must be"),
        ("onnx", {"quantization": "int8"}, "with format='onnx'"),
        ("pb", {"format": "pb"}, "`format` must be one of"),
        ("tflite", {"format": "onnx"}, "must end in .onnx"),
    ):
        with pytest.raises(ValueError, match=message):
            export(model(), tmp_path / f"net.{suffix}", **options)
    if keras.backend.backend() == "tensorflow":
        half = keras.Sequential([keras.Input((None, 2)), layers.Dense(2, dtype="bfloat16")])
        with pytest.raises(ValueError, match="computes in bfloat16"):
            export(half, tmp_path / "net.onnx")
    else:
        with pytest.raises(ValueError, match="requires the TensorFlow backend"):
            export(model(), tmp_path / "net.onnx", format="onnx")
    assert not list(tmp_path.iterdir())
