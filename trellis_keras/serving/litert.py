"""LiteRT, formerly TensorFlow Lite: a stream's `step` as a file for phones and small computers.

The file has two signatures, `initial_state` (without inputs) and `step`, of one row: for any other
number of rows, TrellisNet's loop over its levels would need operations that only a runtime with
TensorFlow inside has.
"""

import dataclasses
import pathlib
import tempfile

from trellis_keras.files import atomic_write
from trellis_keras.layers.streaming import check_streams
from trellis_keras.serving import saved_model
from trellis_keras.serving.endpoint import Endpoint
from trellis_keras.serving.endpoints import endpoints_of

QUANTIZATIONS = (None, "int8")


def write(model, path, quantization=None):
    """Writes a `.tflite` file, see `export`."""
    path = check_path(path, ".tflite")
    return write_new(path, convert(model, quantization))


def convert(model, quantization=None, names=("initial_state", "step")):
    """Returns the content of a `.tflite` file.

    Args:
        model: Built model whose backbone streams and carries no history.
        quantization: None, or `"int8"` (dynamic range): matrices of at least 1024 weights are
            stored as 8-bit integers, with a scale for each output, and what they are multiplied
            with is rounded likewise as it comes. States, sums and all else stay float32.
        names: The endpoints that become signatures.

    Raises:
        ValueError: Another quantization, a backbone that does not stream, or a model that computes
            in another dtype than float32.
        ImportError: This TensorFlow comes without the converter.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"`quantization` must be one of {list(QUANTIZATIONS)}. Received: {quantization!r}"
        )
    endpoints = _endpoints_of_one_row(model)
    tf = _tensorflow()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: endpoints[name] for name in names}
        saved_model.save(chosen, pathlib.Path(folder))
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(names))
        # None of TensorFlow's own operations: most devices have a runtime without them.
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if quantization is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        return converter.convert()


def check_path(path, suffix):
    """Returns the path of a file to be written.

    Raises:
        ValueError: It exists, or has another suffix.
    """
    path = pathlib.Path(path).expanduser()
    if path.suffix != suffix:
        raise ValueError(f"`path` must be a file whose name ends in {suffix}. Received: {path}")
    if path.exists():
        raise ValueError(f"{path} exists already. Choose another name, or remove it first.")
    return path


def write_new(path, content):
    """Writes a file of bytes, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return path


def _endpoints_of_one_row(model):
    endpoints = endpoints_of(model)
    check_streams(model.backbone)
    _check_dtype(model)
    initial, step = endpoints["initial_state"], endpoints["step"]
    inputs = {
        name: dataclasses.replace(field, shape=(1, *field.shape[1:]))
        for name, field in step.inputs.items()
    }
    return {
        "initial_state": Endpoint(
            initial.name, initial.meaning, {}, initial.outputs, lambda: initial.function(1)
        ),
        # Without its `check`: LiteRT has no assertions.
        "step": Endpoint(step.name, step.meaning, inputs, step.outputs, step.function),
    }


def _check_dtype(model):
    dtypes = {model.compute_dtype, model.backbone.compute_dtype}
    if dtypes != {"float32"}:
        raise ValueError(
            "`step` is converted in float32. Make the model anew under the dtype policy 'float32' "
            f"and load its weights. Received: a model that computes in {', '.join(sorted(dtypes))}"
        )


def _tensorflow():
    import tensorflow as tf

    if not hasattr(tf, "lite"):
        raise ImportError(
            f"TensorFlow {tf.__version__} comes without `tf.lite`, which converts to LiteRT. "
            "TensorFlow 2.21 has it: pip install tensorflow==2.21.*"
        )
    return tf
