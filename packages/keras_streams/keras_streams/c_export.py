"""Exports one step of a model as C99, verified against Keras."""

import dataclasses
import math
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import lower, passes, trace
from keras_streams._keras_internals import all_layers
from keras_streams.c_source import TYPES, Printer, Source, comment_text, table_text
from keras_streams.exported_stream import ExportedStream, exported_stream
from keras_streams.files import check_output, filled_template, write_files
from keras_streams.fixed_point import print_fixed, quantize
from keras_streams.fixed_summary import layer_table
from keras_streams.graph import functional_of
from keras_streams.native_stream import FixedStream, NativeStream, find_compiler, source_files
from keras_streams.xla import compile_xla

_STEPS = 200  # of random inputs, or more for models with few outputs
# Largest difference from Keras, relative to the largest value of an output. (Some Keras operations
# round float64 to float32, such as TensorFlow's leaky_relu and JAX's tanh.)
_TOLERANCE = {"float": 1e-5, "double": 1e-6}
# Largest difference of integers from Keras, relative to the largest value of an output.
FIXED_TOLERANCE = 0.05
_THE_LARGEST = "the largest value of the same output"
_ONE_FORMAT = ", or scale the outputs, which share one format, to similar sizes"
_QUANTIZATIONS = {"c": (None, "int8", "int8_rings"), "litert": (None, "int8")}


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a step becomes integers: options of `export`."""

    kind: str | None = None  # `quantization`
    data: np.ndarray | None = None  # `representative_data`
    tolerance: float = FIXED_TOLERANCE  # `quantization_tolerance`

    def check(self, format: str, weights: str = "code") -> None:
        """Raises ValueError unless the options, with `weights`, apply to a format."""
        known = _QUANTIZATIONS.get(format, (None,))
        if self.kind not in known:
            choices = ", ".join(map(repr, known))
            wanted = f"one of {choices}" if len(known) > 1 else choices
            raise ValueError(
                f"`quantization` must be {wanted} with format={format!r}. Received: {self.kind!r}"
            )
        if not isinstance(self.tolerance, Real) or not self.tolerance > 0:
            raise ValueError(
                f"`quantization_tolerance` must be a positive number. Received: {self.tolerance!r}"
            )
        if (self.data is not None) != (format == "c" and self.kind is not None):
            data = "no data" if self.data is None else "data"
            raise ValueError(
                "With format='c', and only there, `quantization` and `representative_data` must be "
                f"given together. Received: quantization={self.kind!r} and {data} with "
                f"format={format!r}"
            )
        if self.tolerance != FIXED_TOLERANCE and self.kind is None:
            raise ValueError(
                "`quantization_tolerance` needs `quantization`. Received: "
                f"quantization_tolerance={self.tolerance}"
            )
        if weights != "code" and (weights != "file" or format != "c" or self.kind is not None):
            raise ValueError(
                "`weights` must be 'code', or for format='c' without `quantization` 'file'. "
                f"Received: weights={weights!r}, format={format!r}, quantization={self.kind!r}"
            )


def write_c(
    model: Any,
    path: pathlib.Path,
    overwrite: bool = False,
    quantization: Quantization = Quantization(),
    weights: str = "code",
) -> pathlib.Path:
    """Writes a model as C and returns the path; see `export`, which checks the options."""
    if path.suffix != ".c" or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", path.stem):
        raise ValueError(
            "`path` must end in .c, and its name must be a C identifier (the prefix of all "
            "functions), such as model.c. For another format, set `format`. "
            f"Received: {path}"
        )
    prefix, in_file = path.stem, weights == "file"
    test, binary = path.with_name(f"{prefix}_test.c"), path.with_suffix(".bin")
    is_unproven = find_compiler() is None and quantization.kind is None
    written = [path, path.with_suffix(".h"), *[test] * is_unproven, *[binary] * in_file]
    for file in written:
        check_output(file, overwrite=overwrite, makes_folders=True)
    kind, data, tolerance = quantization.kind, quantization.data, quantization.tolerance
    if kind is None or data is None:
        source, x, expected = proven_source(model, prefix, in_file)
    else:
        source = fixed_source(model, prefix, kind, data, tolerance, with_layers=True)
    files = source_files(source, path.parent)
    if source.weights is not None:
        files[binary] = source.weights
    if is_unproven:
        files[test] = _test_program(source, x, expected).encode()
        warnings.warn(
            f"Found no C compiler to compare {path} with Keras. On a machine with a compiler, run "
            f"cc {path.name} {test.name} -lm && ./a.out (or pip install ziglang and export again).",
            stacklevel=3,
        )
    write_files(files)
    return path


def fixed_source(
    model: Any,
    prefix: str,
    quantization: str,
    data: np.ndarray,
    tolerance: float = FIXED_TOLERANCE,
    with_layers: bool = False,
) -> Source:
    """Returns a model as integer-only C, compared with Keras on the data; see `export`.

    `prefix` is that of the public names. With `with_layers`, the comment has a table of the layers.
    """
    stream = exported_stream(model)
    program, data = step_program(stream), _representative(stream, data)
    small_rings = quantization == "int8_rings"
    fixed = quantize(program, passes.optimize(program, contiguous=True), data, small_rings)
    _, source = print_fixed(fixed, prefix, stream)
    native, differences, rows = FixedStream(source), [], []
    for row, expected in zip(data, keras_outputs(stream, data), strict=True):
        check_finite(stream, expected, "`representative_data`")
        native.reset()
        found = np.stack([native.step(x) for x in row])
        if not np.array_equal(np.isnan(found), np.isnan(expected)):
            raise RuntimeError(
                f"The integer C code of {stream.model.name} has outputs at other steps than Keras. "
                "Export the model without `quantization`, and please report it."
            )
        differences.append(np.abs(found - expected))
        rows.append(expected)
    differences = np.concatenate(differences) / largest_values(np.concatenate(rows), source)
    average, most = np.nanmean(differences), np.nanmax(differences)
    if not most <= tolerance:
        raise ValueError(
            f"The integer C code of {stream.model.name} differs from Keras by up to {most:.1e} of "
            f"{_THE_LARGEST} on `representative_data`, {average:.1e} on average; the tolerance is "
            f"{tolerance}. Export the model without `quantization`, or accept the difference with "
            f"`quantization_tolerance`{'' if len(source.output_sizes) == 1 else _ONE_FORMAT}. Its "
            "layers:\n" + "\n".join(layer_table(fixed, stream, data[0]))
        )
    notes = [
        *describe(stream, source),
        "",
        f"Integers only: int8 weights, int16 values{', int8 rings' if small_rings else ''}. "
        f"Differences from Keras on representative data, in units of {_THE_LARGEST}:",
        f"{average:.1e} on average, {most:.1e} at most.",
    ]
    if with_layers:
        notes += ["", *layer_table(fixed, stream, data[0])]
    return dataclasses.replace(source, comment=comment_of(notes))


def check_finite(stream: ExportedStream, outputs: np.ndarray, inputs: str) -> None:
    """Raises ValueError for outputs that are infinite, or NaN at steps that have outputs."""
    outputs, found = outputs[: stream.longest], False
    for delay, rate in zip(*map(keras.tree.flatten, (stream.delay, stream.rate)), strict=True):
        step, pause = np.arange(len(outputs)) - delay, max(int(rate), 1)
        is_due = (step >= 0) & (step % pause == 0)
        found |= np.all(np.isnan(outputs) != is_due[:, None], axis=0)  # the columns of the output
    if np.any(np.isinf(outputs)) or not np.all(found):
        raise ValueError(
            f"{stream.model.name} cannot be verified: Keras' outputs for {inputs} "
            "are not finite. Use data that it takes, as in to_stream(model, example=x)."
        )


def _representative(stream, data):
    """Returns checked representative data: (rows, steps, inputs), or tokens (rows, steps)."""
    try:
        data = np.asarray(data)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"`representative_data` must be an array of numbers: {error}") from error
    if data.dtype.kind in "OSUMmc":
        raise ValueError(
            f"`representative_data` must be an array of numbers. Received: dtype {data.dtype}"
        )
    symbols = keras.tree.flatten(stream.symbols)
    rank, shape = 2 if stream.takes_token else 3, symbols[0].shape[1:]  # of a step
    if len(symbols) == 1 and len(shape) > 1 and data.shape[-len(shape) :] == shape:
        data = data.reshape(*data.shape[: -len(shape)], stream.inputs)
    data = data[None] if data.ndim == rank - 1 else data
    if data.ndim != rank or 0 in data.shape or (rank == 3 and data.shape[-1] != stream.inputs):
        inputs = "" if stream.takes_token else f", {stream.inputs}"
        received = f"shape {data.shape}" if data.ndim else repr(data)
        raise ValueError(
            f"`representative_data` must be an array of shape (steps{inputs}) or "
            f"(rows, steps{inputs}). Received: {received}"
        )
    if stream.takes_token:
        if data.dtype.kind not in "iu" or np.any((data < 0) | (data >= stream.inputs)):
            raise ValueError(
                f"Token ids of `representative_data` must be integers in [0, {stream.inputs}). "
                f"Received: {data.dtype} in [{np.min(data)}, {np.max(data)}]"
            )
        return data.astype("int32")
    with np.errstate(over="ignore"):
        data = data.astype(stream.model.compute_dtype)
    is_wrong = np.isinf(data) if stream.fills_missing_values else ~np.isfinite(data)
    if np.any(is_wrong):
        raise ValueError(
            "`representative_data` must be finite. Received: "
            f"{np.count_nonzero(is_wrong)} of {data.size} values are NaN or infinite"
        )
    return data


def native(
    model: Any,
    *,
    quantization: str | None = None,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
) -> NativeStream:
    """Compiles a model's step to machine code and returns a stream that runs without Keras.

    The model is exported as C, compared with Keras, compiled, and cached by content in the user's
    cache folder. Later changes to its weights do not affect the stream.

    Args:
        model, quantization, representative_data, quantization_tolerance: As in `export`.

    Returns:
        A `NativeStream` with `step(x)`, `reset()` and `clone()`.

    Raises:
        ValueError: If the model cannot be exported as C.
        ImportError: If there is no C compiler.
        RuntimeError: If the C code differs from Keras.

    Example:

    >>> model = keras.Sequential([keras.Input((None, 2)), keras.layers.GRU(4)])
    >>> stream = native(model)
    >>> stream.step([0.1, 0.2]).shape
    (4,)
    """
    if find_compiler() is None:
        raise ImportError(
            "`native` needs a C compiler: pip install ziglang, or use "
            "keras_streams.compiled_step instead."
        )
    Quantization(quantization, representative_data, quantization_tolerance).check("c")
    if quantization is None or representative_data is None:
        return NativeStream(proven_source(model, "model")[0])
    source = fixed_source(model, "model", quantization, representative_data, quantization_tolerance)
    return FixedStream(source)


def proven_source(
    model: Any, prefix: str, in_file: bool = False
) -> tuple[Source, np.ndarray, np.ndarray]:
    """Returns a model as C, compared with Keras if there is a compiler; see `export`.

    With `in_file`, the weights are in a file of their own.

    Returns:
        The source, the inputs of random steps, and Keras' outputs for them, (steps, outputs).
    """
    stream = exported_stream(model)
    source = c_source(stream, prefix, in_file)
    delay, rate = (max(keras.tree.flatten(values)) for values in (stream.delay, stream.rate))
    steps = max(_STEPS, math.ceil(delay + 20 * rate))
    x = stream.random_inputs(min(steps, stream.longest or steps))
    expected = keras_steps(stream, x)
    check_finite(stream, expected, f"{len(x)} random steps")
    if find_compiler() is None:
        proof = f"Not yet compared with Keras: run {prefix}_test.c."
    else:
        native = NativeStream(source)
        found = np.stack([native.step(row) for row in x])
        difference = check_equal(stream.model.name, source, found, expected)
        proof = (
            f"Largest difference from Keras over {len(x)} random steps: below "
            f"{_round_up(difference)} of {_THE_LARGEST}."
        )
    notes = [*describe(stream, source), "", proof]
    return dataclasses.replace(source, comment=comment_of(notes)), x, expected


def c_source(stream: ExportedStream, prefix: str, in_file: bool = False) -> Source:
    """Returns a stream as C, not yet compared with Keras.

    Raises:
        ValueError: If an operation of the step has no C code.
    """
    program = step_program(stream)
    groups = passes.optimize(program)
    return Printer(program, groups, prefix, TYPES[program.real], stream, in_file).print()


def step_program(stream: ExportedStream) -> lower.Program:
    """Returns one step of a stream as a `Program`, before any pass."""
    return lower.lower(trace.trace(stream, stream.symbols), _real_type(stream))


def computing_layers(model: keras.Layer) -> list[keras.Layer]:
    """Returns the layers whose dtype matters: a graph of layers computes nothing itself."""
    return [
        layer
        for layer in all_layers(model)
        if not isinstance(layer, keras.layers.InputLayer) and functional_of(layer) is None
    ]


def _real_type(stream):
    model, layers = stream.model, computing_layers(stream.model)
    quantized = [layer.name for layer in layers if layer.quantization_mode is not None]
    if quantized:
        raise ValueError(
            "A model that Keras has quantized cannot be exported as C. Export the model as it was "
            "before `quantize`, for integer C with `quantization` and `representative_data`. "
            f"Received: {', '.join(quantized)}, quantized"
        )
    weights = {w.dtype for w in model.weights if keras.backend.is_float_dtype(w.dtype)}
    dtypes = {layer.compute_dtype for layer in layers} | weights
    dtypes = dtypes or {model.compute_dtype}  # a graph of operations alone
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
        raise ValueError(
            "C supports float and double. Build the model with dtype='float32' or 'float64' for "
            "all layers, and load its weights. Received: a model that computes in "
            f"{', '.join(sorted({layer.compute_dtype for layer in layers}))}"
        )
    return dtypes.pop()


def largest_values(y: np.ndarray, source: Source) -> np.ndarray:
    """Returns for each number of y (steps, outputs) the largest of its output, or 1 for zeros."""
    parts = np.split(np.abs(y), np.cumsum(source.output_sizes)[:-1], axis=-1)
    largest = [np.nanmax(part, initial=0.0) or 1.0 for part in parts]
    return np.repeat(largest, source.output_sizes).astype(y.dtype)


def check_equal(name: str, source: Source, found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference relative to the output's size, or raises RuntimeError."""
    same_steps = np.array_equal(np.isnan(found), np.isnan(expected))  # NaN where there is no output
    difference = math.inf
    if same_steps:
        difference = float(np.nanmax(np.abs(found - expected) / largest_values(expected, source)))
    if not difference <= _TOLERANCE[source.real]:
        raise RuntimeError(
            f"The C code of {name} differs from Keras by {difference:.1e} of {_THE_LARGEST} over "
            f"{len(found)} random steps; the tolerance is {_TOLERANCE[source.real]}. A "
            'model that amplifies rounding errors may need dtype="float64".'
        )
    return difference


def _round_up(number):
    """Returns a number as text, rounded up to one significant digit."""
    exponent = np.floor(np.log10(max(number, 1e-30)))
    return f"{(np.floor(number / 10**exponent) + 1) * 10**exponent:.0e}"


def comment_of(lines: Sequence[str]) -> str:
    """Returns lines as a comment of C."""
    body = "\n".join(f" * {comment_text(line)}".rstrip() for line in lines)
    return f"/*\n{body}\n */\n"


def describe(stream: ExportedStream, source: Source) -> list[str]:
    """Returns lines that describe a model."""
    model = stream.model
    takes = "a token" if stream.takes_token else f"{stream.inputs} inputs"
    lines = [
        f"{source.prefix}: one time step of the {type(model).__name__} {model.name!r}, written by "
        "keras_streams.",
        "",
        f"A step reads {takes} and writes {source.outputs} outputs. It allocates nothing, has no",
        "global variables, and takes the same time at every step."
        if source.is_unconditional
        else "global variables, and computes only the layers that are due at the step.",
        "",
    ]
    sizes = [math.prod(symbol.shape[1:]) for symbol in keras.tree.flatten(stream.symbols)]
    lines += [*_places("x", "input", stream.symbols, sizes), *stream.notes]
    # Outputs of one delay may be several.
    outputs = stream.delay if keras.tree.is_nested(stream.delay) else list(source.output_sizes)
    lines += _places("y", "output", outputs, source.output_sizes)
    lines += [f"    {i}: {name}" for i, name in enumerate(stream.names)]
    lines.append(
        "Outputs depend on all past inputs."
        if stream.receptive_field is None
        else f"Outputs depend on the last {stream.receptive_field} inputs."
    )
    return lines


def _places(array, kind, structure, sizes):
    """Returns lines that say where in an array a step's inputs or outputs are, if several."""
    pairs = zip(keras.tree.flatten_with_path(structure), sizes, strict=True)
    lines, start = [], 0
    for (path, _), size in pairs:
        last = f"..{start + size - 1}" if size > 1 else ""
        lines.append(f"    {array}[{start}{last}]: {kind} {'.'.join(map(str, path))}")
        start += size
    return lines if len(lines) > 1 else []


def keras_steps(model: Any, x: np.ndarray) -> np.ndarray:
    """Returns Keras' outputs for a stream, (steps, outputs), in one forward pass."""
    return next(keras_outputs(model, [x]))


def keras_outputs(model: Any, rows: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields Keras' outputs for the stream of each row, (steps, outputs)."""
    stream = exported_stream(model)

    def read(x):
        ys = keras.tree.flatten(stream.whole(x))
        ys = [ops.reshape(y, (ops.shape(x)[1], -1)) for y in ys]
        dtype = keras.backend.result_type(*(y.dtype for y in ys), float)
        return ops.concatenate([ops.cast(y, dtype) for y in ys], axis=-1)

    compiled = compile_xla(read, stream.model.variables, any_shape=True)
    for x in rows:
        yield ops.convert_to_numpy(compiled(ops.convert_to_tensor(x[None])))


def _test_program(source, x, expected):
    """Returns a C program that compares the steps with Keras' outputs."""
    real, prefix, is_token = source.real, source.prefix, source.takes_token
    reset = f"{prefix}_reset(&state);"
    if source.weights is not None:
        reset = f"""\
static {real} weights[{source.weight_bytes} / sizeof({real})];
    FILE *file = fopen("{prefix}.bin", "rb");
    if (!file || fread(weights, sizeof weights, 1, file) != 1)
        return 1;
    fclose(file);
    {prefix}_reset(&state, weights);"""
    f = "f" if real == "float" else ""
    values = {
        "PREFIX": prefix,
        "UPPER": prefix.upper(),
        "REAL": real,
        "F": f,
        "LARGEST": table_text("largest", real, largest_values(expected, source)),
        "X": table_text("x", "int" if is_token else real, x),
        "EXPECTED": table_text("expected", real, expected),
        "RESET": reset,
        "STEPS": str(len(x)),
        "READ": "x[t]" if is_token else f"x + t * {source.inputs}",
        "TOLERANCE": f"{_TOLERANCE[real]}{f}",
    }
    return filled_template("model_test.c", values)
