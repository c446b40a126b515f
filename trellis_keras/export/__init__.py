"""Export models to SavedModel, LiteRT, ONNX, C and WebAssembly.

A SavedModel contains a model's `endpoints`. The other formats are those of `keras_streams`.
"""

import contextlib
import os
import pathlib

import keras
import numpy as np

from keras_streams.c_export import FIXED_TOLERANCE, Quantization, native
from keras_streams.endpoints import model_stream
from keras_streams.exporter import SUFFIXES, check_backend, write_step
from keras_streams.exporter import format_of as _format_of
from keras_streams.graph_stream import GraphStream
from keras_streams.protocol import check_built
from trellis_keras import kernels
from trellis_keras.export.endpoints import endpoints_of
from trellis_keras.export.saved_model import write_saved_model
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel

__all__ = ["export", "native"]


def export(
    model: LanguageModel | SequenceModel | keras.Layer | GraphStream,
    path: str | os.PathLike,
    version: int | None = None,
    *,
    format: str | None = None,
    quantization: str | None = None,
    warmup: bool = False,
    overwrite: bool = False,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
    weights: str = "code",
) -> pathlib.Path:
    """Exports a model to a SavedModel, LiteRT, ONNX, C or WebAssembly.

    A SavedModel has endpoints with named and typed inputs and outputs: `serving_default` for whole
    sequences; `initial_cache` and `step` for streams; `prefill` and `generate` for language models;
    and `score_text` and `generate_text` with a vocabulary. See docs/serving.md. A stateful model
    starts each request with empty states. A model whose backbone does not stream gets only the
    endpoints for whole sequences, with a warning.

    The other formats contain one step of a stream, see `keras_streams.export` and docs/edge.md.

    Args:
        model: Built `LanguageModel`, `SequenceClassifier`, `SequenceRegressor` or
            `PolyphonicModel`, or a Keras model supported by `to_stream`, or its stream; for
            C also a built layer that streams.
        path: For a SavedModel, the folder of all versions of the model, which TensorFlow Serving
            watches; for other formats, the file.
        version: Positive integer, the version of a SavedModel. Its folder is renamed into place
            once it is complete. Defaults to one more than the highest version in `path`.
        format: The export format: `"saved_model"`, or, for a single step, `"litert"` (a `.tflite`
            file), `"onnx"`, `"c"` or `"wasm"`. The name of a C file is the prefix of its functions.
            Defaults to `None`: the suffix of `path` decides; without one, `"saved_model"`.
        warmup: Boolean, whether a SavedModel gets requests that TensorFlow Serving runs before it
            serves the version. This needs tensorflow-serving-api (the extra `serving`). Defaults
            to `False`.
        overwrite: Boolean, whether to replace existing files. A version of a SavedModel is never
            replaced. Defaults to `False`.
        quantization, representative_data, quantization_tolerance, weights: See
            `keras_streams.export`.

    Returns:
        The path that was written: for a SavedModel, the folder of the version.

    Raises:
        ValueError: If the version exists, or `path` does and `overwrite` is False, an option does
            not apply to the format, the model is not supported or not built, the backend is not
            TensorFlow (except for C and WebAssembly), or a quantized file differs from Keras by
            more than the tolerance.
        ImportError: If the format or the warm-up needs a package that is not installed.
        RuntimeError: If what would be written differs from Keras.

    Example:

    >>> from trellis_keras.export import export
    >>> model = trellis_keras.zoo.trellisnet_char(depth=2, hidden_units=4, embedding_dim=4)
    >>> export(model, "serving/trellisnet_char").as_posix()
    'serving/trellisnet_char/1'
    """
    format = format or format_of(path)
    if format not in ("saved_model", *SUFFIXES):
        formats = ", ".join(map(repr, ("saved_model", *SUFFIXES)))
        raise ValueError(f"`format` must be one of {formats}. Received: {format!r}")
    if format != "saved_model" and (version is not None or warmup):
        raise ValueError(
            "`version` and `warmup` are only for format='saved_model'. Received: "
            f"format={format!r}, version={version}, warmup={warmup}"
        )
    integers = Quantization(quantization, representative_data, quantization_tolerance)
    is_known = isinstance(model, (LanguageModel, SequenceModel))
    if format != "saved_model":
        is_converted, step_of = format in ("litert", "onnx"), _step_of if is_known else None
        # The converters do not support the kernels' loops.
        with kernels.disabled() if is_converted else contextlib.nullcontext():
            return write_step(model, path, format, integers, weights, overwrite, step_of)
    integers.check(format, weights)
    if overwrite:
        raise ValueError(
            "`overwrite` is only for files. A version of a SavedModel may be in use by a server: "
            "export the next version."
        )
    check_backend(format)
    if is_known:
        check_built(model)
    else:
        model = model_stream(model)
    return write_saved_model(model, pathlib.Path(path).expanduser(), version, warmup)


def format_of(path: str | os.PathLike) -> str:
    """Returns the format of a path: that of its suffix, or a SavedModel without a suffix."""
    suffix = pathlib.Path(path).suffix
    if suffix[1:].isalpha() and suffix not in SUFFIXES.values():
        raise ValueError(
            f"{path} has an unknown suffix. Pass a file that ends in one of "
            f"{', '.join(SUFFIXES.values())}, or a folder without a suffix for a SavedModel. "
            "(For a Keras file, use `model.save`; a run has one, best.keras.)"
        )
    return _format_of(path, "saved_model")


def _step_of(model):
    """Returns the endpoint of a model that LiteRT and ONNX files contain."""
    return next(e for e in endpoints_of(model) if e.name == "step")
