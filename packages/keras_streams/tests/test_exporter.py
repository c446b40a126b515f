"""LiteRT and ONNX files of any stream."""

from unittest import mock

import keras
import pytest
from keras import layers

from keras_streams import export, exporter, graph_stream

pytestmark = pytest.mark.both_backends


def model():
    x = keras.Input((None, 2))
    y = layers.Conv1D(4, 3, padding="causal", activation="relu")(x)
    return keras.Model(x, layers.GRU(3, return_sequences=True)(y))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")
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


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")
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


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")
def test_8_bits_differ_by_no_more_than_the_tolerance(tmp_path):
    net = keras.Sequential([keras.Input((None, 32)), layers.GRU(48, return_sequences=True)])
    options = {"format": "litert", "quantization": "int8", "quantization_tolerance": 1e-5}
    with pytest.raises(ValueError, match="`quantization_tolerance`"):
        export(net, tmp_path / "net.tflite", **options)


def test_options_of_other_formats_are_errors(tmp_path):
    for format, suffix, options, message in (
        ("c", "c", {"weights": "bytes"}, "`weights` must be"),
        ("litert", "tflite", {"weights": "file"}, "`weights` must be"),
        ("onnx", "onnx", {"quantization": "int8"}, "`quantization` must be None with"),
        ("pb", "pb", {}, "`format` must be one of"),
        ("onnx", "tflite", {}, "must end in .onnx"),
    ):
        with pytest.raises(ValueError, match=message):
            export(model(), tmp_path / f"net.{suffix}", format=format, **options)
    if keras.backend.backend() == "tensorflow":
        half = keras.Sequential([keras.Input((None, 2)), layers.Dense(2, dtype="bfloat16")])
        with pytest.raises(ValueError, match="computes in bfloat16"):
            export(half, tmp_path / "net.onnx", format="onnx")
    else:
        with pytest.raises(ValueError, match="requires the TensorFlow backend"):
            export(model(), tmp_path / "net.onnx", format="onnx")
    assert not list(tmp_path.iterdir())
