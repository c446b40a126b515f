"""Exports one step of a stream as C, WebAssembly, LiteRT or ONNX."""

import math
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_streams.c_export import (
    FIXED_TOLERANCE,
    Quantization,
    check_finite,
    computing_layers,
    write_c,
)
from keras_streams.endpoints import Endpoint, add_endpoint, model_stream, step_endpoint
from keras_streams.exported_stream import exported_stream
from keras_streams.files import check_output, write_files
from keras_streams.trace import error_summary
from keras_streams.wasm import write_wasm

if keras.backend.backend() == "tensorflow":  # `export` rejects the other backends
    import tensorflow as tf

SUFFIXES = {"c": ".c", "wasm": ".wasm", "litert": ".tflite", "onnx": ".onnx"}
_OPSET = 18  # of ONNX, from 2022, for compatibility with older runtimes
_STEPS = 20  # of random inputs, after those without outputs
_TOLERANCE = 1e-4  # largest difference of LiteRT and ONNX from Keras, as of `prove`


def export(
    model: Any,
    path: str | os.PathLike,
    *,
    format: str | None = None,
    quantization: str | None = None,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
    weights: str = "code",
    overwrite: bool = False,
) -> pathlib.Path:
    """Exports one step of a model as C, WebAssembly, LiteRT or ONNX.

    The C code is C99 without allocation or global variables: `model.c` and `model.h`. If there is a
    C compiler, 200 random steps are compared with Keras before anything is written; otherwise
    `model_test.c` compares them on another machine. WebAssembly is the same code, compiled by
    ziglang, with an ES module `model.mjs`. LiteRT and ONNX take and return the cache beside the
    inputs and outputs, and are compared with Keras over 20 random steps.

    Args:
        model: Built Keras model that `to_stream` supports, its stream, or a layer that streams.
        path: Path of the file: `model.c`, `model.wasm`, `model.tflite` or `model.onnx`. The name of
            a C file is the prefix of its functions.
        format: `"c"`, `"wasm"`, or with the TensorFlow backend `"litert"` or `"onnx"`. Defaults to
            `None`: the suffix of `path` decides.
        quantization: `None`, or `"int8"` for C of integers only, with 8-bit weights and 16-bit
            activations; `"int8_rings"` also keeps the past inputs of convolutions in 8 bits. With
            `"int8"`, LiteRT stores matrices as 8-bit integers. Defaults to `None`.
        representative_data: Array (steps, channels) or (rows, steps, channels), without channels
            for tokens, used to choose the ranges of integers in C. Defaults to `None`.
        quantization_tolerance: Positive float, the largest difference of integers in C from Keras
            on `representative_data`, and of LiteRT's on random steps, in units of the output's
            largest value. Defaults to `0.05`.
        weights: `"code"`, or for C `"file"`, to write the weights to `model.bin`, whose content the
            program passes to `model_reset`: for millions of weights. Defaults to `"code"`.
        overwrite: Boolean, whether to replace existing files. Defaults to `False`.

    Returns:
        The path that was written.

    Raises:
        ValueError: If `path` exists and `overwrite` is False, or has the wrong suffix, an option
            does not apply, the model cannot be exported, or a quantized file differs from Keras by
            more than the tolerance.
        ImportError: If a package is missing: WebAssembly needs ziglang, integers a C compiler,
            LiteRT and ONNX TensorFlow, and ONNX tf2onnx and onnxruntime.
        RuntimeError: If what would be written differs from Keras.
    """
    integers = Quantization(quantization, representative_data, quantization_tolerance)
    return write_step(model, path, format or format_of(path, "c"), integers, weights, overwrite)


def format_of(path: str | os.PathLike, default: str) -> str:
    """Returns the format whose files have the suffix of a path, or `default` for other paths."""
    suffix = pathlib.Path(path).suffix
    return next((format for format, known in SUFFIXES.items() if known == suffix), default)


def write_step(
    model: Any,
    path: str | os.PathLike,
    format: str,
    quantization: Quantization,
    weights: str,
    overwrite: bool,
    step_of: Callable[[Any], Endpoint] | None = None,
) -> pathlib.Path:
    """Exports one step of a model, with the arguments of `export`.

    The function `step_of` returns the step of a model for LiteRT or ONNX. It defaults to
    `step_endpoint` of the model's stream.
    """
    path = pathlib.Path(path).expanduser()
    if format not in list(SUFFIXES):  # what was received may not be hashable
        formats = ", ".join(map(repr, SUFFIXES))
        raise ValueError(f"`format` must be one of {formats}. Received: {format!r}")
    quantization.check(format, weights)
    if format == "c":
        return write_c(model, path, overwrite, quantization, weights)
    if path.suffix != SUFFIXES[format]:
        raise ValueError(
            f"`path` must end in {SUFFIXES[format]} with format={format!r}. Received: {path}"
        )
    if format == "wasm":
        return write_wasm(model, path, overwrite)
    check_backend(format)
    check_output(path, overwrite=overwrite, makes_folders=True)
    if step_of is None:
        model, step_of = model_stream(model), step_endpoint
    stream = exported_stream(model)
    _check_converted(stream, format)
    step, is_quantized = step_of(model), quantization.kind is not None
    try:
        content = _to_litert(step, is_quantized) if format == "litert" else _to_onnx(step)
    except ImportError:
        raise
    except Exception as error:  # whatever a converter raises
        raise ValueError(
            f"{stream.model.name} cannot be converted with format={format!r}. Replace the "
            f"operation that raised this, or export C: {error_summary(error)}"
        ) from error
    converted = _litert_step(content) if format == "litert" else _onnx_step(content, step)
    differences = _differences(converted, step, stream)
    largest = quantization.tolerance if is_quantized else _TOLERANCE
    for name, difference in differences.items():
        is_rounded_cache = is_quantized and name in step.inputs
        if not difference <= largest and not is_rounded_cache:
            message = (
                f"{format!r} differs from Keras in {name!r} by {difference:.1e} of its largest "
                f"value over {_STEPS} random steps; the tolerance is {largest}."
            )
            if not is_quantized:
                raise RuntimeError(message)
            raise ValueError(
                f"{message} Export the model without `quantization`, or accept the difference with "
                "`quantization_tolerance`."
            )
    write_files({path: content})
    return path


def check_backend(format: str) -> None:
    """Raises ValueError unless TensorFlow is the backend, whose converters write a format."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Exporting {format!r} requires the TensorFlow backend. Save the model as a .keras "
            "file and export it in a process with KERAS_BACKEND=tensorflow. "
            f"Received: backend {keras.backend.backend()!r}"
        )


def _check_converted(stream, format):
    """Raises ValueError unless TensorFlow's converters can write a stream's step."""
    name, model = stream.model.name, stream.model
    dtypes = {layer.compute_dtype for layer in computing_layers(model)}
    if not dtypes <= {"float32"}:
        raise ValueError(
            f"format={format!r} computes in float32. Build the model with dtype='float32' and load "
            f"its weights. Received: a model that computes in {', '.join(sorted(dtypes))}"
        )
    if any(np.any(leaf) for leaf in keras.tree.flatten(stream.initial_cache(1))):
        raise ValueError(
            f"format={format!r} requires a cache that starts from zeros. Use format='c' or 'wasm'. "
            f"Received: {name}, whose initial cache is not zero"
        )


def _differences(function, endpoint, stream):
    """Compares a converted step with Keras over random steps, from a cache of zeros.

    Args:
        function: The converted step, a function of arrays.
        endpoint: The step in Keras.
        stream: Its `ExportedStream`.

    Returns:
        Dict from the name of each output to the largest difference, relative to its largest value,
        or for the cache, of which a tensor can be the rounding error of another, to that of all.
    """
    delay, rate = (max(keras.tree.flatten(values)) for values in (stream.delay, stream.rate))
    steps = _STEPS + max(delay, 0) + math.ceil(rate)
    x = stream.random_inputs(min(steps, stream.longest or steps))
    caches = [name for name in endpoint.inputs if name in endpoint.outputs]
    fields = {name: field for name, field in endpoint.inputs.items() if name not in caches}
    ends = np.cumsum([math.prod(field.shape[1:]) for field in fields.values()])
    parts = zip(fields.items(), np.split(x.reshape(len(x), -1), ends[:-1], axis=1), strict=True)
    inputs = {
        name: part.reshape(len(x), 1, *field.shape[1:]).astype(field.dtype)
        for (name, field), part in parts
    }
    runs = []
    for step in (tf.function(endpoint.checked, autograph=False), function):
        cache, answers = {name: endpoint.inputs[name].filled() for name in caches}, []
        for t in range(len(x)):
            answer = step(**{name: part[t] for name, part in inputs.items()}, **cache)
            answers.append({name: np.asarray(answer[name]) for name in endpoint.outputs})
            cache = {name: answers[-1][name] for name in caches}
        runs.append(answers)
    expected, found = (
        {name: np.stack([a[name] for a in answers]).astype("float64") for name in endpoint.outputs}
        for answers in runs
    )
    ys = [np.reshape(y, (len(x), -1)) for name, y in expected.items() if name not in caches]
    check_finite(stream, np.concatenate(ys, axis=-1), f"{len(x)} random steps")
    scales = {
        name: np.max(np.abs(y), initial=0, where=np.isfinite(y)) for name, y in expected.items()
    }
    scales |= dict.fromkeys(caches, max((scales[name] for name in caches), default=0))
    differences = {}
    for name, wanted in expected.items():
        y, scale = found[name], scales[name] or 1.0
        is_equal = (y == wanted) | (np.isnan(y) & np.isnan(wanted))
        with np.errstate(invalid="ignore"):
            distance = np.max(np.where(is_equal, 0.0, np.abs(y - wanted)), initial=0)
        differences[name] = distance / scale
    return differences


# TensorFlow's converters. `Model.export` would write `call`, and for LiteRT allow operations that
# need TensorFlow at runtime.


def _to_litert(endpoint, is_quantized):
    """Returns an endpoint as the content of a LiteRT file."""
    if not hasattr(tf, "lite"):
        raise ImportError(
            f"TensorFlow {tf.__version__} has no LiteRT converter: pip install tensorflow==2.21.*"
        )
    with tempfile.TemporaryDirectory() as folder:
        archive = keras.export.ExportArchive()
        add_endpoint(archive, "step", endpoint.checked, endpoint.input_specs(rows=1))
        archive.write_out(folder, verbose=False)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=["step"])
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if is_quantized:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        return converter.convert()


def _litert_step(content):
    """Returns the step of a LiteRT file as a function of arrays."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tf.lite.Interpreter is deprecated")
        return tf.lite.Interpreter(model_content=content).get_signature_runner("step")


def _to_onnx(endpoint):
    """Returns an endpoint as the content of an ONNX file."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import tf2onnx
    except ImportError as error:
        raise ImportError(
            "format='onnx' needs tf2onnx: pip install tf2onnx onnx onnxruntime"
        ) from error
    specs = endpoint.input_specs()

    def step(*tensors):
        outputs = endpoint.checked(**dict(zip(specs, tensors, strict=True)))
        return {_onnx_name(endpoint, name): y for name, y in outputs.items()}

    signature = list(specs.values())
    function = tf.function(step, input_signature=signature, autograph=False)
    model, _ = tf2onnx.convert.from_function(function, signature, opset=_OPSET)
    onnx.checker.check_model(model, full_check=True)  # tf2onnx skips operations unknown to it
    return model.SerializeToString()


def _onnx_name(endpoint, name):
    """Returns the name of an output: in ONNX, an input and an output cannot have the same name."""
    return f"next_{name}" if name in endpoint.inputs else name


def _onnx_step(content, endpoint):
    """Returns the step of an ONNX file as a function of arrays."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = {_onnx_name(endpoint, name): name for name in endpoint.outputs}
    return lambda **inputs: dict(zip(names.values(), session.run([*names], inputs), strict=True))
