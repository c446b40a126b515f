"""`export`: a model as a file or folder that another program serves."""

import keras

from trellis_keras.serving.endpoints import check

SAVED_MODEL = "saved_model"


def export(model, path, version=None, *, format=SAVED_MODEL, quantization=None, warmup=False):
    """Writes a model for a program that serves it.

    A SavedModel has the endpoints that docs/serving.md lists, with named and typed inputs and
    outputs: `serving_default` for whole sequences, any number of any length; for streams
    `initial_state` and `step`, and of a language model `prefill` and `generate`; where its
    vocabulary is known `score_text` and `generate_text`. No graph assigns a variable, and only the
    two that generate draw random numbers, from the request's seed alone. A model trained with a
    carried history (`stateful=True`) is exported as one that starts each request with an empty one.

    Args:
        model: A built model of this package: a `LanguageModel`, `SequenceClassifier`,
            `SequenceRegressor` or `PolyphonicModel`.
        path: Of a SavedModel the folder of all the model's versions, which TensorFlow Serving
            watches; of the other formats the file.
        version: Of a SavedModel, a whole number from 1 on. Default: one more than the highest
            there. The version's folder appears in one step.
        format: `"saved_model"`; `"litert"` (a `.tflite` file) or `"onnx"`, of `step` alone.
        quantization: Of LiteRT: None or `"int8"`, see docs/serving.md.
        warmup: Whether a SavedModel gets requests that TensorFlow Serving tries out before it
            offers the version. They need tensorflow-serving-api (extra `serving`).

    Returns:
        The path that was written: of a SavedModel, the version's folder.

    Raises:
        ValueError: `path` or the version exists or is of the wrong kind; an option that the format
            does not have; a model of another kind, or not built, or whose layers draw random
            numbers in inference; or Keras does not run on TensorFlow.
        ImportError: A package that the format or the warm-up needs is not installed.

    Example:

    >>> model = trellis_keras.zoo.trellisnet_char(depth=2, hidden_units=4, embedding_dim=4)
    >>> export(model, "serving/trellisnet_char").as_posix()
    'serving/trellisnet_char/1'
    """
    _check_backend()
    if format not in _FORMATS:
        raise ValueError(f"`format` must be one of {sorted(_FORMATS)}. Received: {format!r}")
    if format != SAVED_MODEL and (version is not None or warmup):
        raise ValueError(
            f"`version` and `warmup` belong to a SavedModel. Received: format={format!r}, "
            f"version={version}, warmup={warmup}"
        )
    if format != "litert" and quantization is not None:
        raise ValueError(
            f"`quantization` belongs to format='litert'. Received: format={format!r}, "
            f"quantization={quantization!r}"
        )
    check(model)
    return _FORMATS[format](without_history(model), path, version, quantization, warmup)


def without_history(model):
    """Returns the model itself, or a copy of a stateful one that carries no history."""
    if not getattr(getattr(model, "backbone", None), "stateful", False):
        return model
    config = model.get_config()
    config["backbone"]["config"]["stateful"] = False
    copy = type(model).from_config(config)
    copy.build((None, None))
    copy.set_weights(model.get_weights())
    return copy


def _saved_model(model, path, version, quantization, warmup):
    from trellis_keras.serving import saved_model

    return saved_model.write(model, path, version, warmup)


def _litert(model, path, version, quantization, warmup):
    from trellis_keras.serving import litert

    return litert.write(model, path, quantization)


def _onnx(model, path, version, quantization, warmup):
    from trellis_keras.serving import onnx

    return onnx.write(model, path)


_FORMATS = {SAVED_MODEL: _saved_model, "litert": _litert, "onnx": _onnx}


def _check_backend():
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Models are exported by TensorFlow, but Keras runs on "
            f"{keras.backend.backend()}. Save the model as a .keras file and export it in a "
            "process with KERAS_BACKEND=tensorflow (a run's folder: trellis-keras export)."
        )
