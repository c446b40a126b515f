"""Export models to SavedModel, LiteRT, ONNX, C and WebAssembly.

A SavedModel contains a model's `endpoints`. The other formats are those of `keras_streams`.
"""

import contextlib
import os
import pathlib
from typing import Any

import keras
import numpy as np

from keras_streams.c_export import FIXED_TOLERANCE, native
from keras_streams.exporter import SUFFIXES, write_step
from keras_streams.graph_stream import GraphStream, to_stream
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
    format: str = "saved_model",
    quantization: str | None = None,
    warmup: bool = False,
    series: dict[str, Any] | None = None,
    overwrite: bool = False,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
    weights: str = "code",
) -> pathlib.Path:
    """Exports a model to a SavedModel, LiteRT, ONNX, C or WebAssembly.

    A SavedModel has endpoints with named and typed inputs and outputs: `serving_default` for whole
    sequences; `initial_cache` and `step` for streams; `prefill` and `generate` for language models;
    and `score_text` and `generate_text` with a vocabulary. See docs/serving.md. The server keeps no
    state, and random numbers depend only on the request's seed. A stateful model starts each
    request with empty states. A model whose backbone does not stream gets only the endpoints for
    whole sequences, with a warning.

    The C code computes one step of a stream (docs/edge.md). If there is a C compiler, 200 random
    steps are compared with Keras before anything is written; otherwise `model_test.c` compares them
    on another machine. WebAssembly is the same code, compiled by ziglang, with an ES module.

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
            Defaults to `"saved_model"`.
        quantization: `None` or `"int8"`. With `"int8"`, LiteRT stores matrices as 8-bit integers,
            and C uses only integers, with 8-bit weights and 16-bit activations. `"int8_rings"`
            (only for C) also keeps the past inputs of convolutions in 8 bits. Defaults to `None`.
        warmup: Boolean, whether to add requests to a SavedModel that TensorFlow Serving runs before
            it serves the version. This needs tensorflow-serving-api (the extra `serving`). Defaults
            to `False`.
        series: JSON-serializable dict that describes the channels of a time series model; written
            to `assets.extra/series.json` in a SavedModel. Defaults to `None`.
        overwrite: Boolean, whether to replace existing files. A version of a SavedModel is never
            replaced. Defaults to `False`.
        representative_data: Array (steps, channels) or (rows, steps, channels), without channels
            for tokens, used to choose the integer ranges for quantized C. Defaults to `None`.
        quantization_tolerance: Positive float, the largest difference between quantized C and Keras
            on `representative_data`, or LiteRT and Keras on random steps, with which a file is
            written, in units of the largest output. Defaults to `0.05`.
        weights: `"code"`, or for C `"file"`, to write the weights to `model.bin` instead, as in
            `keras_streams.export`. Defaults to `"code"`.

    Returns:
        The path that was written: for a SavedModel, the folder of the version.

    Raises:
        ValueError: If `path` or the version exists; an option does not apply to the format; the
            model is not supported or not built; the format is not C or WebAssembly and Keras'
            backend is not TensorFlow; or a quantized file differs from Keras by more than the
            tolerance.
        ImportError: If the format or the warm-up needs a package that is not installed.
        RuntimeError: If what would be written differs from Keras.

    Example:

    >>> from trellis_keras.export import export
    >>> model = trellis_keras.zoo.trellisnet_char(depth=2, hidden_units=4, embedding_dim=4)
    >>> export(model, "serving/trellisnet_char").as_posix()
    'serving/trellisnet_char/1'
    """
    if format not in ("saved_model", *SUFFIXES):
        formats = ", ".join(map(repr, ("saved_model", *SUFFIXES)))
        raise ValueError(f"`format` must be one of {formats}. Received: {format!r}")
    if format != "saved_model" and (version is not None or warmup or series is not None):
        raise ValueError(
            "`version`, `warmup` and `series` are only for format='saved_model'. Received: "
            f"format={format!r}, version={version}, warmup={warmup}, series={series}"
        )
    if format != "saved_model":
        integers = quantization, representative_data, quantization_tolerance
        is_converted = format in ("litert", "onnx")
        # The converters do not support the kernels' loops.
        with kernels.disabled() if is_converted else contextlib.nullcontext():
            return write_step(model, path, format, integers, weights, overwrite, _step_of)
    if overwrite:
        raise ValueError(
            "`overwrite` is only for files. A version of a SavedModel may be in use by a server: "
            "export the next version."
        )
    is_fixed = quantization is not None or representative_data is not None
    if is_fixed or quantization_tolerance != FIXED_TOLERANCE or weights != "code":
        raise ValueError(
            "format='saved_model' takes no `quantization`, `quantization_tolerance`, "
            "`representative_data` and `weights`. "
            f"Received: quantization={quantization!r}, weights={weights!r}, format='saved_model'"
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Exporting a SavedModel requires the TensorFlow backend. Save the model as a .keras "
            "file and export it in a process with KERAS_BACKEND=tensorflow. "
            f"Received: backend {keras.backend.backend()!r}"
        )
    return write_saved_model(
        _served(model), pathlib.Path(path).expanduser(), version, warmup, series
    )


def _step_of(model):
    """Returns the endpoint of a model that LiteRT and ONNX files contain."""
    return next(e for e in endpoints_of(_served(model)) if e.name == "step")


def _served(model):
    """Returns a model whose endpoints are known, or the stream of another one."""
    if not isinstance(model, (LanguageModel, SequenceModel)):
        stream = to_stream(model)
        if not isinstance(stream, GraphStream):
            raise ValueError(
                f"`model` must be a model: wrap a layer in keras.Sequential. Received: {stream!r}"
            )
        return stream
    if not model.built:
        has_channels = isinstance(model, SequenceModel) and model.embedding is None
        shape = "None, None" + ", channels" * has_channels
        raise ValueError(f"Build the model before exporting it: model.build(({shape})).")
    return model
