"""Exports one step of a model as C99, verified against Keras."""

import dataclasses
import math
import pathlib
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import lower, passes, trace
from keras_streams.c_code import Source, comment_text, print_c
from keras_streams.compiled import NativeStream, find_compiler, source_files
from keras_streams.exported import ExportedStream, exported_stream
from keras_streams.files import check_output, write_files
from keras_streams.graph import functional_of
from keras_streams.xla import compile_xla

_STEPS = 200  # of random inputs, or more for models with few outputs
_REAL = {"float32": "float", "float64": "double"}
# Largest difference from Keras, relative to the largest output. (Some Keras operations round
# float64 to float32, such as TensorFlow's leaky_relu and JAX's tanh.)
_TOLERANCE = {"float": 1e-5, "double": 1e-6}


def write_c(
    model: Any,
    path: pathlib.Path,
    series: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes a model as C and returns the path.

    Without a compiler, `prefix_test.c` compares the code with Keras on another machine.

    Args:
        model: Built model or layer that streams.
        path: Path of the C file, whose name is the prefix of all functions.
        series: Dict with the names of the columns `"inputs"` and `"targets"`. Defaults to `None`.
        overwrite: Boolean, whether to replace existing files. Defaults to `False`.

    Raises:
        ValueError: If the model cannot be exported as C, or a file exists.
        RuntimeError: If its C code differs from Keras.
    """
    prefix = checked_prefix(path)
    test_path = path.with_name(f"{prefix}_test.c")
    if path.parent.is_dir():
        for file in (path, path.with_suffix(".h"), *([] if find_compiler() else [test_path])):
            check_output(file, overwrite=overwrite)
    source, x, expected = proven_source(model, prefix, series)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = source_files(source, path.parent)
    is_unproven = find_compiler() is None
    if is_unproven:
        files[test_path] = _test_program(source, x, expected).encode()
    write_files(files)
    if is_unproven:
        warnings.warn(
            f"Found no C compiler to compare {path} with Keras. On a machine with a compiler, run "
            f"cc {path.name} {prefix}_test.c -lm && ./a.out (or pip install ziglang and export "
            "again).",
            stacklevel=3,
        )
    return path


def checked_prefix(path: pathlib.Path) -> str:
    """Returns the prefix of the functions in a C file, or raises ValueError."""
    if path.suffix != ".c" or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", path.stem):
        raise ValueError(
            "`path` must end in .c, and its name must be a C identifier (the prefix of all "
            f"functions), such as model.c. Received: {path}"
        )
    return path.stem


def native(model: Any) -> NativeStream:
    """Compiles a model's step to machine code and returns a stream that runs without Keras.

    The model is exported as C, compared with Keras, compiled, and cached by content in the user's
    cache folder. Later changes to its weights do not affect the stream.

    Args:
        model: Built model or layer that streams.

    Returns:
        A `NativeStream` with `step(x)`, `reset()` and `clone()`.

    Raises:
        ValueError: If the model cannot be exported as C.
        ImportError: If there is no C compiler.
        RuntimeError: If the C code differs from Keras.
    """
    if find_compiler() is None:
        raise ImportError(
            "`native` needs a C compiler: pip install ziglang, or use "
            "keras_streams.compiled_step instead."
        )
    return NativeStream(proven_source(model, "model")[0])


def proven_source(
    model: Any, prefix: str, series: dict[str, Any] | None = None
) -> tuple[Source, np.ndarray, np.ndarray]:
    """Returns a model as C, compared with Keras if there is a compiler.

    Returns:
        The source, the inputs of random steps, and Keras' outputs for them, (steps, outputs).

    Raises:
        ValueError: If the model cannot be exported as C.
        RuntimeError: If its C code differs from Keras.
    """
    stream = exported_stream(model)
    source = c_source(stream, prefix)
    delay, rate = (max(keras.tree.flatten(values)) for values in (stream.delay, stream.rate))
    x = stream.random_inputs(max(_STEPS, math.ceil(delay + 20 * rate)))
    expected = keras_steps(stream, x)
    is_clocked = delay > 0 or rate > 1
    if np.any(np.isinf(expected)) or (not is_clocked and np.any(np.isnan(expected))):
        raise ValueError(
            f"The C code of {stream.model.name} cannot be verified: Keras' outputs for {len(x)} "
            "random steps are not finite."
        )
    if find_compiler() is None:
        proof = f"Not yet compared with Keras: run {prefix}_test.c."
    else:
        native = NativeStream(source)
        found = np.stack([native.step(row) for row in x])
        difference = check_equal(stream.model.name, source, found, expected)
        proof = (
            f"Largest difference from Keras over {len(x)} random steps: below "
            f"{_round_up(difference)} of the largest output."
        )
    notes = [*describe(stream, source, series), "", proof]
    return dataclasses.replace(source, comment=comment_of(notes)), x, expected


def c_source(stream: ExportedStream, prefix: str) -> Source:
    """Returns a stream as C, not yet compared with Keras.

    Raises:
        ValueError: If an operation of the step has no C code.
    """
    program = step_program(stream)
    return print_c(program, passes.optimize(program), prefix, _REAL[program.real], stream)


def step_program(stream: ExportedStream) -> lower.Program:
    """Returns one step of a stream as a `Program`, before any pass."""
    return lower.lower(trace.trace(stream, stream.symbols), _real_type(stream))


def _real_type(stream):
    model = stream.model
    layers = [model, *model._flatten_layers()]
    # A graph of layers computes nothing itself, so its own dtype does not matter.
    layers = [
        layer
        for layer in layers
        if not isinstance(layer, keras.layers.InputLayer) and functional_of(layer) is None
    ]
    quantized = [layer.name for layer in layers if layer.quantization_mode is not None]
    if quantized:
        raise ValueError(
            "A model that Keras has quantized has no version in C. Export the model as it was "
            "before `quantize`, for integer C with `quantization` and `representative_data`. "
            f"Received: {', '.join(quantized)}, quantized"
        )
    dtypes = {layer.compute_dtype for layer in layers} | {w.dtype for w in model.weights}
    if len(dtypes) > 1 or not dtypes <= set(_REAL):
        raise ValueError(
            "C supports float and double. Build the model with dtype='float32' or 'float64' for "
            "all layers, and load its weights. Received: a model that computes in "
            f"{', '.join(sorted({layer.compute_dtype for layer in layers}))}"
        )
    return dtypes.pop()


def check_equal(name: str, source: Source, found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference between outputs, relative to the largest output.

    Raises:
        RuntimeError: If it is too large.
    """
    same_steps = np.array_equal(np.isnan(found), np.isnan(expected))  # NaN where there is no output
    difference = math.inf
    if same_steps:
        difference = float(np.nanmax(np.abs(found - expected)) / largest_output(expected))
    if not difference <= _TOLERANCE[source.real]:
        raise RuntimeError(
            f"The C code of {name} differs from Keras by {difference:.1e} of the "
            f"largest output over {len(found)} random steps; the tolerance is "
            f"{_TOLERANCE[source.real]}. A model that amplifies rounding errors may need "
            'dtype="float64".'
        )
    return difference


def largest_output(outputs: np.ndarray) -> float:
    """Returns the unit of differences: the largest output, or 1 if all are 0."""
    return float(np.nanmax(np.abs(outputs))) or 1.0


def _round_up(number):
    """Returns a number as text, rounded up to one significant digit."""
    exponent = np.floor(np.log10(max(number, 1e-30)))
    return f"{(np.floor(number / 10**exponent) + 1) * 10**exponent:.0e}"


def comment_of(lines: Sequence[str]) -> str:
    """Returns lines as a comment of C."""
    body = "\n".join(f" * {comment_text(line)}".rstrip() for line in lines)
    return f"/*\n{body}\n */\n"


def describe(stream: ExportedStream, source: Source, series: dict[str, Any] | None) -> list[str]:
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
    series = series or {}
    if series.get("inputs"):
        lines += ["Inputs:", *(f"    {i}: {name}" for i, name in enumerate(series["inputs"]))]
    lines += stream.notes
    lines += [f"    {i}: {name}" for i, name in enumerate(stream.names)]
    if series.get("targets"):
        lines.append(f"    targets: {', '.join(series['targets'])}")
    lines.append(
        "Outputs depend on all past inputs."
        if stream.receptive_field is None
        else f"Outputs depend on the last {stream.receptive_field} inputs."
    )
    return lines


def keras_steps(model: Any, x: np.ndarray) -> np.ndarray:
    """Returns Keras' outputs for a stream, (steps, outputs), in one forward pass."""
    stream = exported_stream(model)

    def read(x):
        ys = keras.tree.flatten(stream.whole(x))
        ys = [ops.reshape(y, (ops.shape(x)[1], -1)) for y in ys]
        return ops.concatenate([ops.cast(y, ys[0].dtype) for y in ys], axis=-1)

    compiled = compile_xla(read, stream.model.variables, any_shape=True)
    return ops.convert_to_numpy(compiled(ops.convert_to_tensor(x[None])))


def _test_program(source, x, expected):
    """Returns a C program that compares the steps with Keras' outputs."""
    real, prefix, upper = source.real, source.prefix, source.prefix.upper()
    f = "f" if real == "float" else ""
    suffix = "" if source.takes_token else f
    read = "x[t]" if source.takes_token else f"x + t * {source.inputs}"

    def numbers(name, kind, values, suffix):
        values = ", ".join(
            "NAN" if value != value else f"{value}{suffix}" for value in values.reshape(-1)
        )
        text = textwrap.fill(values, 98, initial_indent="    ", subsequent_indent="    ")
        return f"static const {kind} {name}[] = {{\n{text}\n}};\n"

    return f"""\
/* Compares {prefix} with Keras: cc {prefix}.c {prefix}_test.c -lm && ./a.out */
#include "{prefix}.h"

#include <math.h>
#include <stdio.h>

{numbers("x", "int" if source.takes_token else real, x, suffix)}
{numbers("expected", real, expected, f)}
int main(void)
{{
    static {prefix}_state state;
    {real} y[{upper}_OUTPUTS], largest = 0, difference = 0;
    {prefix}_reset(&state);
    for (int t = 0; t < {len(x)}; t++) {{
        {prefix}_step(&state, {read}, y);
        for (int k = 0; k < {upper}_OUTPUTS; k++) {{
            {real} wanted = expected[t * {upper}_OUTPUTS + k];
            largest = fabs{f}(wanted) > largest ? fabs{f}(wanted) : largest;
            if (!(fabs{f}(y[k] - wanted) <= difference) && !(wanted != wanted && y[k] != y[k]))
                difference = fabs{f}(y[k] - wanted);
        }}
    }}
    difference /= largest > 0 ? largest : 1;
    printf("largest difference from Keras: %.1e of the largest output\\n", (double)difference);
    return difference <= {_TOLERANCE[real]}{f} ? 0 : 1;
}}
"""
