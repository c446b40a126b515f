"""Exports one step of a model as C99, verified against Keras."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import GraphStream, to_stream
from keras_streams import c as floats
from keras_streams.c_fixed import print_fixed
from keras_streams.c_source import Source
from keras_streams.compiled import FixedStream, NativeStream, source_files
from keras_streams.files import check_output, write_files
from keras_streams.program import Program
from keras_streams.protocol import check_built
from keras_streams.xla import compile_xla
from trellis_keras.export.emit import emit_model
from trellis_keras.export.emit_graph import emit_graph
from trellis_keras.layers import DenseHead
from trellis_keras.layers.base import check_tokens
from trellis_keras.models import LanguageModel, PolyphonicModel, SequenceClassifier
from trellis_keras.models.base import BackboneModel
from trellis_keras.models.sequence_models import SequenceModel

_REAL = {"float32": "float", "float64": "double"}
# Largest difference of integers from Keras, relative to the largest output.
FIXED_TOLERANCE = 0.05


def write_c(
    model: keras.Layer,
    path: pathlib.Path,
    series: dict[str, Any] | None = None,
    overwrite: bool = False,
    quantization: str | None = None,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
) -> pathlib.Path:
    """Writes a model as C and returns the path; see `export`."""
    prefix = floats.checked_prefix(path)
    if path.parent.is_dir():
        for file in (path, path.with_suffix(".h")):
            check_output(file, overwrite=overwrite)
    if quantization is None:
        return floats.write_c(model, path, series, overwrite)
    assert representative_data is not None  # by `check_quantization`
    source = fixed_source(
        model, prefix, quantization, representative_data, series, quantization_tolerance
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_files(source_files(source, path.parent))
    return path


def check_quantization(quantization: str | None, data: np.ndarray | None, tolerance: float) -> None:
    """Raises ValueError unless the options for integer C are valid."""
    if quantization not in (None, "int8", "int8_rings"):
        raise ValueError(
            f"`quantization` must be None, 'int8' or 'int8_rings' for C. Received: {quantization!r}"
        )
    if (quantization is None) != (data is None):
        raise ValueError(
            "`quantization` and `representative_data` must be given together. Received: "
            f"quantization={quantization!r} and {'no data' if data is None else 'data'}"
        )
    if not tolerance > 0:
        raise ValueError(f"`quantization_tolerance` must be positive. Received: {tolerance}")
    if quantization is None and tolerance != FIXED_TOLERANCE:
        raise ValueError(
            "`quantization_tolerance` needs `quantization` and `representative_data`. Received: "
            f"quantization_tolerance={tolerance}"
        )


def native(
    model: keras.Layer,
    *,
    quantization: str | None = None,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
) -> NativeStream:
    """Compiles a model's step to machine code and returns a stream that runs without Keras.

    The model is exported as C (see `export`), compared with Keras, compiled, and cached by content
    in the user's cache folder. Later changes to its weights do not affect the stream.

    Args:
        model: Built model or layer that streams.
        quantization, representative_data, quantization_tolerance: As in `export`: with `"int8"`
            the stream computes with integers, as a microcontroller would. `quantization` defaults
            to `None`.

    Returns:
        A `NativeStream` with `step(x)`, `reset()` and `clone()`.

    Raises:
        ValueError: If the model cannot be exported as C.
        ImportError: If there is no C compiler.
        RuntimeError: If the C code differs from Keras.

    Example:

    >>> layer = trellis_keras.layers.TCN(4, kernel_size=3, depth=2)
    >>> layer.build((None, None, 2))
    >>> stream = native(layer)
    >>> stream.step([0.1, 0.2]).shape
    (4,)
    """
    check_quantization(quantization, representative_data, quantization_tolerance)
    if quantization is None:
        return floats.native(model)
    assert representative_data is not None
    source = fixed_source(
        model, "model", quantization, representative_data, tolerance=quantization_tolerance
    )
    return FixedStream(source)


def fixed_source(
    model: keras.Layer,
    prefix: str,
    quantization: str,
    data: np.ndarray,
    series: dict[str, Any] | None = None,
    tolerance: float = FIXED_TOLERANCE,
) -> Source:
    """Returns a model as integer-only C, compared with Keras on the data.

    Args:
        model: Built model or layer that streams.
        prefix: Prefix of the public names.
        quantization: `"int8"`, or `"int8_rings"` to also use 8 bits for ring buffers.
        data: Representative inputs (steps, inputs) or (rows, steps, inputs), or token ids (steps,)
            or (rows, steps).
        series: As in `export`.
        tolerance: As `quantization_tolerance` in `export`.

    Raises:
        ValueError: If the model cannot be exported as integer C, the data do not match it, or the
            C code differs from Keras by more than the tolerance.
        ImportError: If there is no C compiler to compare it.
    """
    model, _ = _checked(model)
    program = stream_program(model, prefix)
    data = _representative(model, program, data)
    small_rings = quantization == "int8_rings"
    source = print_fixed(program, prefix, data, small_rings)
    stream, total, count, most, largest = FixedStream(source), 0.0, 0, 0.0, 0.0
    for row, expected in zip(data, keras_outputs(model, data), strict=True):
        if np.any(np.isinf(expected)) or (program.counter is None and np.any(np.isnan(expected))):
            raise ValueError("Keras' outputs for `representative_data` are not finite.")
        stream.reset()
        found = np.stack([stream.step(x) for x in row])
        if not np.array_equal(np.isnan(found), np.isnan(expected)):
            raise RuntimeError(
                f"The integer C code of {model.name} has outputs at other steps than Keras. Export "
                "the model without `quantization`, and please report it."
            )
        difference = np.abs(found - expected)
        total, count = total + np.nansum(difference), count + np.sum(~np.isnan(difference))
        most = max(most, np.nanmax(difference))
        largest = max(largest, np.nanmax(np.abs(expected)))
    average, most = total / count / (largest or 1.0), most / (largest or 1.0)
    if not most <= tolerance:
        raise ValueError(
            f"The integer C code of {model.name} differs from Keras by up to {most:.1e} of the "
            f"largest output on `representative_data`, {average:.1e} on average; the tolerance is "
            f"{tolerance}. Export the model without `quantization`, or accept the difference with "
            "`quantization_tolerance`."
        )
    notes = [
        *_describe(model, program, source, series),
        "",
        f"Integers only: int8 weights, int16 values{', int8 rings' if small_rings else ''}. "
        "Differences from Keras on representative data, relative to the largest output:",
        f"{average:.1e} on average, {most:.1e} at most.",
    ]
    return dataclasses.replace(source, comment=floats.comment_of(notes))


def _representative(model, program, data):
    """Returns checked representative data: (rows, steps, inputs), or tokens (rows, steps)."""
    data = np.asarray(data)
    rank = 2 if program.takes_token else 3
    data = data[None] if data.ndim == rank - 1 else data
    if data.ndim != rank or 0 in data.shape or (rank == 3 and data.shape[-1] != program.inputs):
        inputs = "" if program.takes_token else f", {program.inputs}"
        raise ValueError(
            f"`representative_data` must have shape (steps{inputs}) or (rows, steps{inputs}). "
            f"Received: shape {data.shape}"
        )
    if program.takes_token:
        check_tokens(data, program.inputs)
        return data.astype("int32")
    with np.errstate(over="ignore"):
        data = data.astype(model.compute_dtype)
    # Standardization replaces missing values.
    is_wrong = np.isinf(data) if getattr(model, "normalize", False) else ~np.isfinite(data)
    if np.any(is_wrong):
        raise ValueError(
            "`representative_data` must be finite. Received: "
            f"{np.count_nonzero(is_wrong)} of {data.size} values are NaN or infinite"
        )
    return data


# Models


def stream_of(model: Any) -> Any:
    """Returns the stream of a model; for a model of this package, the stream of its backbone."""
    return model.stream() if isinstance(model, BackboneModel) else to_stream(model)


def stream_program(model: Any, name: str) -> Program:
    """Returns one step of a model, of a layer that streams, or of a stream, as a `Program`.

    Raises:
        ValueError: If a part does not stream, or has no C implementation.
    """
    stream = stream_of(model)
    if isinstance(stream, GraphStream) and not isinstance(model, BackboneModel):
        return _graph_program(stream, name)
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        program = Program(name, embedding.input_dim, takes_token=True)
    elif isinstance(model, SequenceModel):
        program = Program(name, model.input_spec.axes[-1])
    else:
        program = Program(name, model.get_build_config()["input_shape"][-1])
    program.delay, program.rate = stream.delay, stream.rate
    program.finish(emit_model(program, model, program.input))
    return program


def _graph_program(stream, name):
    graph, signals = stream.graph, stream.plan.inputs
    readers = [call.operation for call in graph.calls if 0 in call.inputs]
    is_embedded = {type(layer) for layer in readers} == {keras.layers.Embedding}
    is_output = 0 in keras.tree.flatten(graph.outputs)
    if is_embedded and not is_output and len(signals) == 1 and signals[0].shape == ():
        program = Program(name, min(layer.input_dim for layer in readers), takes_token=True)
    elif all(keras.backend.is_float_dtype(signal.dtype) for signal in signals):
        program = Program(name, sum(math.prod(signal.shape) for signal in signals))
    else:
        received = {x.name: (x.dtype, tuple(x.shape)) for x in keras.tree.flatten(graph.inputs)}
        raise ValueError(
            f"{stream.name} cannot be exported: a step in C takes floats, or one token that only "
            f"keras.layers.Embedding reads. Received: {received}"
        )
    program.delay, program.rate = map(_same, (stream.delay, stream.rate))
    program.finish(emit_graph(program, stream, program.input))
    return program


def _same(values):
    """Returns the common value of all outputs, or the value for each of them."""
    values = keras.tree.flatten(values)
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))


def _checked(model):
    """Returns a model (for a graph of Keras layers, its stream) and its C type.

    Raises:
        ValueError: If the model cannot be exported as C.
    """
    if not isinstance(model, (keras.Layer, GraphStream)):
        raise ValueError(f"`model` must be a layer or model that streams. Received: {model!r}")
    check_built(model)
    stream = stream_of(model)  # raises if it does not stream
    if isinstance(model, SequenceModel):
        model.check_adapted()
    model = model.model if isinstance(model, GraphStream) else model
    layers = [model, *model._flatten_layers()]
    layers = [layer for layer in layers if not isinstance(layer, keras.layers.InputLayer)]
    stateful = [layer.name for layer in layers if getattr(layer, "stateful", False)]
    # The streams of a language model start from empty states in Keras too.
    if stateful and not isinstance(model, LanguageModel):
        raise ValueError(
            "A layer with stateful=True carries its state from batch to batch, but a stream in C "
            "starts from zeros. Build the model with stateful=False and load its weights. "
            f"Received: stateful=True of {', '.join(stateful)}"
        )
    quantized = [layer.name for layer in layers if layer.quantization_mode is not None]
    if quantized:
        raise ValueError(
            "A model that Keras has quantized has no version in C. Export the model as it was "
            "before `quantize`, for integer C with `quantization` and `representative_data`. "
            f"Received: {', '.join(quantized)}, quantized"
        )
    dtypes = {layer.compute_dtype for layer in layers} | {w.dtype for w in model.weights}
    real = _REAL.get(dtypes.pop()) if len(dtypes) == 1 else None
    if real is None:
        raise ValueError(
            "C supports float and double. Build the model with dtype='float32' or 'float64' for "
            "all layers, and load its weights. Received: a model that computes in "
            f"{', '.join(sorted({layer.compute_dtype for layer in layers}))}"
        )
    is_graph = isinstance(stream, GraphStream) and not isinstance(model, BackboneModel)
    return stream if is_graph else model, real


def _describe(model, program, source, series):
    """Returns lines that describe a model."""
    takes = "a token" if program.takes_token else f"{program.inputs} inputs"
    lines = [
        f"{source.prefix}: one time step of the {_kind(model)} {model.name!r}, written by "
        "trellis_keras.",
        "",
        f"A step reads {takes} and writes {program.output.size} outputs. It allocates nothing, has "
        "no",
        "global variables, and takes the same time at every step."
        if program.counter is None
        else "global variables, and computes only the layers that are due at the step.",
        "",
    ]
    columns = (series or {}).get("inputs", [])
    if columns:
        lines += ["Inputs:", *(f"    {i}: {column}" for i, column in enumerate(columns))]
    lines += program.notes
    lines += [f"    {i}: {name}" for i, name in enumerate(program.names)]
    if (series or {}).get("targets"):
        lines.append(f"    targets: {', '.join(series['targets'])}")
    reach = getattr(stream_of(model), "receptive_field", None)
    lines.append(
        "Outputs depend on all past inputs."
        if reach is None
        else f"Outputs depend on the last {reach} inputs."
    )
    return lines


def _kind(model):
    return type(model.model if isinstance(model, GraphStream) else model).__name__


def keras_steps(model: keras.Layer, x: np.ndarray) -> np.ndarray:
    """Returns Keras' outputs for a stream, (steps, outputs), in one forward pass."""
    return next(keras_outputs(model, [x]))


def keras_outputs(model: keras.Layer, rows: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields Keras' outputs for the stream of each row, (steps, outputs)."""
    stream = stream_of(model)

    def read(x):
        if isinstance(model, LanguageModel):
            hidden, _ = model.stream().prefill(model.embed(x))
            has_logits = type(model.head) is DenseHead
            return model.head.logits(hidden) if has_logits else model.head(hidden)
        if isinstance(stream, GraphStream) and not isinstance(model, SequenceModel):
            return _outputs_of(stream, x)
        if not isinstance(model, SequenceModel):
            return stream.prefill(x)[0]
        y, _ = model.outputs_at_each_step(x)
        if isinstance(model, PolyphonicModel):
            return ops.sigmoid(y)
        if isinstance(model, SequenceClassifier) and model.activation is None:
            return ops.softmax(y)
        return y

    compiled = compile_xla(read, model.variables, any_shape=True)
    for x in rows:
        y = compiled(ops.convert_to_tensor(x[None]))
        yield ops.convert_to_numpy(y).reshape(len(x), -1)


def _outputs_of(stream, x):
    """Returns all outputs of a graph's stream, concatenated along the last axis."""
    signals, start, xs = stream.plan.inputs, 0, []
    for signal in signals:
        size = math.prod(signal.shape)
        part = x if x.ndim == 2 else x[..., start : start + size]
        xs.append(ops.reshape(part, (*ops.shape(x)[:2], *signal.shape)))
        start += size
    y, _ = stream.prefill(keras.tree.pack_sequence_as(stream.inputs, xs))
    ys = [ops.reshape(y, (ops.shape(x)[1], -1)) for y in keras.tree.flatten(y)]
    return ops.concatenate([ops.cast(y, ys[0].dtype) for y in ys], axis=-1)
