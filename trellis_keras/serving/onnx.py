"""ONNX: a stream's `step` as a file for ONNX Runtime and its like.

The way leads over LiteRT. tf2onnx fails on the loop over TrellisNet's levels as TensorFlow writes
it, with lists of tensors; LiteRT's converter has replaced these by tensors.
"""

import pathlib
import tempfile
import warnings

from trellis_keras.serving import litert

OPSET = 18  # of 2022: what runs it need not be the newest
# A name stands for one tensor in ONNX, so the state that goes out needs another.
NEXT = "next_"


def write(model, path):
    """Writes an `.onnx` file, see `export`."""
    onnx, tf2onnx = _packages()
    path = litert.check_path(path, ".onnx")
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "step.tflite"
        source.write_bytes(litert.convert(model, names=("step",)))
        converted, _ = tf2onnx.convert.from_tflite(str(source), opset=OPSET)
        _rename(converted.graph, _names(source))
    # tf2onnx goes on after an operation that it does not know.
    onnx.checker.check_model(converted, full_check=True)
    return litert.write_new(path, converted.SerializeToString())


def _packages():
    try:
        import onnx
        import tf2onnx
    except ImportError as error:
        raise ImportError(
            "ONNX files are written with tf2onnx: pip install tf2onnx onnx onnxruntime"
        ) from error
    return onnx, tf2onnx


def _names(path):
    """From the names of a LiteRT file's tensors to those of its signature."""
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this interpreter will move to another package
        step = tf.lite.Interpreter(str(path)).get_signature_runner("step")
    inputs = {tensor["name"]: name for name, tensor in step.get_input_details().items()}
    outputs = {
        tensor["name"]: NEXT + name if name in inputs.values() else name
        for name, tensor in step.get_output_details().items()
    }
    return inputs | outputs


def _rename(graph, names):
    """Renames tensors in a graph, and in the graphs of its loops."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)
