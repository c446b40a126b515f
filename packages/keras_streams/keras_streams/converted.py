"""One step of a model as a LiteRT or ONNX file, written by TensorFlow's converters.

`Model.export` would write `call`, and for LiteRT allow operations that need TensorFlow at runtime.
"""

import tempfile

import keras

from keras_streams.endpoints import Endpoint, write_archive

if keras.backend.backend() == "tensorflow":  # `export` rejects the other backends
    import tensorflow as tf

_OPSET = 18  # from 2022, for compatibility with older runtimes


def to_litert(endpoint: Endpoint, quantization: str | None) -> bytes:
    """Returns an endpoint as the content of a LiteRT file."""
    if not hasattr(tf, "lite"):
        raise ImportError(
            f"TensorFlow {tf.__version__} has no LiteRT converter: pip install tensorflow==2.21.*"
        )
    with tempfile.TemporaryDirectory() as folder:
        write_archive([endpoint], folder, rows=1)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=["step"])
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if quantization is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        return converter.convert()


def to_onnx(endpoint: Endpoint) -> bytes:
    """Returns an endpoint as the content of an ONNX file."""
    try:
        import onnx
        import tf2onnx
    except ImportError as error:
        raise ImportError(
            "format='onnx' needs tf2onnx: pip install tf2onnx onnx onnxruntime"
        ) from error
    specs = endpoint.input_specs()

    def step(*tensors):
        outputs = endpoint.checked(**dict(zip(specs, tensors, strict=True)))
        # In ONNX, an input and an output cannot have the same name.
        return {f"next_{name}" if name in specs else name: outputs[name] for name in outputs}

    signature = list(specs.values())
    function = tf.function(step, input_signature=signature, autograph=False)
    model, _ = tf2onnx.convert.from_function(function, signature, opset=_OPSET)
    onnx.checker.check_model(model, full_check=True)  # tf2onnx skips operations unknown to it
    return model.SerializeToString()
