"""Exports one step of a model as an ONNX file."""

import keras

from keras_streams.endpoints import Endpoint

if keras.backend.backend() == "tensorflow":  # `export` rejects the other backends
    import tensorflow as tf

_OPSET = 18  # from 2022, for compatibility with older runtimes


def to_onnx(endpoint: Endpoint) -> bytes:
    """Returns an endpoint as the content of an ONNX file."""
    # `Model.export(format="onnx")` would export `call`.
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
