"""Export models to SavedModel, LiteRT, ONNX, C and WebAssembly.

C and WebAssembly are those of `keras_streams`. The other formats contain a model's `endpoints`.
"""

import os
import pathlib
from typing import Any

import keras
import numpy as np

from keras_streams.c import FIXED_TOLERANCE, native, write_c
from keras_streams.exported import exported_stream
from keras_streams.files import atomic_write, check_output
from keras_streams.graph_stream import GraphStream, to_stream
from keras_streams.litert import to_litert
from keras_streams.onnx import to_onnx
from keras_streams.wasm import write_wasm
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

    The C code computes one step of a stream: `model.c` and `model.h`, C99 without allocation or
    global variables (docs/edge.md). If there is a C compiler, 200 random steps are compared with
    Keras before anything is written; otherwise `model_test.c` compares them on another machine.
    WebAssembly is the same code, compiled by ziglang, with an ES module `model.mjs`.

    Args:
        model: Built `LanguageModel`, `SequenceClassifier`, `SequenceRegressor` or
            `PolyphonicModel`, or a Keras model supported by `to_stream`, or its stream; for
            C also a built layer that streams.
        path: For a SavedModel, the folder of all versions of the model, which TensorFlow Serving
            watches; for other formats, the file.
        version: Positive integer, the version of a SavedModel. Its folder is renamed into place
            once it is complete. Defaults to one more than the highest version in `path`.
        format: `"saved_model"`, or, for a single step, `"litert"` (a `.tflite` file), `"onnx"`,
            `"c"` or `"wasm"`. The name of a C file is the prefix of its functions. Defaults to
            `"saved_model"`.
        quantization: `None` or `"int8"`. With `"int8"`, LiteRT stores matrices as 8-bit integers,
            and C uses only integers, with 8-bit weights and 16-bit activations. `"int8_rings"`
            (only for C) also keeps the past inputs of convolutions in 8 bits. Defaults to `None`.
        warmup: Boolean, whether to add requests to a SavedModel that TensorFlow Serving runs before
            it serves the version. This needs tensorflow-serving-api (the extra `serving`). Defaults
            to `False`.
        series: JSON-serializable dict that describes the channels of a time series model; written
            to `assets.extra/series.json` in a SavedModel, and as a comment in C. Defaults to
            `None`.
        overwrite: Boolean, whether to replace existing files. A version of a SavedModel is never
            replaced. Defaults to `False`.
        representative_data: Array (steps, channels) or (rows, steps, channels), without channels
            for tokens, used to choose the integer ranges for quantized C. Defaults to `None`.
        quantization_tolerance: Positive float, the largest difference between quantized C and Keras
            on `representative_data` with which a file is written, in units of the largest output.
            Defaults to 0.05.
        weights: `"code"`, or for C `"file"`, to write the weights to `model.bin` instead, as in
            `keras_streams.export`. Defaults to `"code"`.

    Returns:
        The path that was written: for a SavedModel, the folder of the version.

    Raises:
        ValueError: `path` or the version exists or has the wrong type; an option does not apply
            to the format; the model's class is not supported, the model is not built, or it draws
            random numbers at inference; the format is not C or WebAssembly and Keras' backend
            is not TensorFlow; or quantized C differs from Keras by more than the tolerance.
        ImportError: The format or the warm-up needs a package that is not installed.
        RuntimeError: The C code differs from Keras.

    Example:

    >>> from trellis_keras.export import export
    >>> model = trellis_keras.zoo.trellisnet_char(depth=2, hidden_units=4, embedding_dim=4)
    >>> export(model, "serving/trellisnet_char").as_posix()
    'serving/trellisnet_char/1'
    """
    if format not in ("saved_model", "litert", "onnx", "c", "wasm"):
        raise ValueError(
            f"`format` must be 'saved_model', 'litert', 'onnx', 'c' or 'wasm'. Received: {format!r}"
        )
    if format != "saved_model" and (version is not None or warmup):
        raise ValueError(
            "`version` and `warmup` are only for format='saved_model'. Received: "
            f"format={format!r}, version={version}, warmup={warmup}"
        )
    if format == "saved_model" and overwrite:
        raise ValueError(
            "`overwrite` is only for files. A version of a SavedModel may be in use by a server: "
            "export the next version."
        )
    if format in ("litert", "onnx") and series is not None:
        raise ValueError(f"format={format!r} does not support `series`. Received: {series}")
    if format != "c" and (
        quantization not in (None, "int8") or (quantization and format != "litert")
    ):
        raise ValueError(
            "`quantization` must be None, or 'int8' with format='litert' or 'c'. "
            f"Received: quantization={quantization!r}, format={format!r}"
        )
    if format != "c" and (
        representative_data is not None
        or quantization_tolerance != FIXED_TOLERANCE
        or weights != "code"
    ):
        raise ValueError(
            "`representative_data`, `quantization_tolerance` and `weights` are only for "
            f"format='c'. Received: format={format!r}"
        )
    path = pathlib.Path(path).expanduser()
    if format == "c":
        return write_c(
            model,
            path,
            series,
            overwrite,
            quantization,
            representative_data,
            quantization_tolerance,
            weights,
        )
    if format == "wasm":
        return write_wasm(model, path, series, overwrite)
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Exporting {format!r} requires the TensorFlow backend. Save the model as a "
            ".keras file and export it in a process with KERAS_BACKEND=tensorflow. "
            f"Received: backend {keras.backend.backend()!r}"
        )
    if not isinstance(model, (LanguageModel, SequenceModel)):
        received, model = model, to_stream(model)
        if not isinstance(model, GraphStream):
            raise ValueError(
                f"`model` must be a model: wrap a layer in keras.Sequential. Received: {received!r}"
            )
    elif not model.built:
        has_channels = isinstance(model, SequenceModel) and model.embedding is None
        shape = "None, None" + ", channels" * has_channels
        raise ValueError(f"Build the model before exporting it: model.build(({shape})).")
    if format == "saved_model":
        return write_saved_model(model, path, version, warmup, series)
    return _write_step(model, path, format, quantization, overwrite)


def _write_step(model, path, format, quantization, overwrite):
    suffix = ".tflite" if format == "litert" else ".onnx"
    if path.suffix != suffix:
        raise ValueError(f"`path` must end in {suffix} with format={format!r}. Received: {path}")
    exported_stream(model)  # raises if the model does not stream
    dtypes = {model.compute_dtype, getattr(model, "backbone", model).compute_dtype}
    if dtypes != {"float32"}:
        raise ValueError(
            f"format={format!r} computes in float32. Build the model with dtype='float32' and load "
            f"its weights. Received: a model that computes in {', '.join(sorted(dtypes))}"
        )
    if any(np.any(leaf) for leaf in keras.tree.flatten(model.initial_cache(1))):
        raise ValueError(
            f"format={format!r} requires a cache that starts from zeros. Use format='saved_model', "
            f"'c' or 'wasm'. Received: {model.name}, whose initial cache is not zero"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output(path, overwrite=overwrite)
    endpoint = next(endpoint for endpoint in endpoints_of(model) if endpoint.name == "step")
    with kernels.disabled():  # the converters do not support the kernels' loops
        content = to_litert(endpoint, quantization) if format == "litert" else to_onnx(endpoint)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return path
