"""Exports one step of a model as a LiteRT file."""

import tempfile

import keras

from keras_streams.endpoints import Endpoint, write_archive

if keras.backend.backend() == "tensorflow":  # `export` rejects the other backends
    import tensorflow as tf


def to_litert(endpoint: Endpoint, quantization: str | None) -> bytes:
    """Returns an endpoint as the content of a LiteRT file."""
    # `Model.export(format="litert")` would export `call`, and allow operations that need TensorFlow
    # at runtime.
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
