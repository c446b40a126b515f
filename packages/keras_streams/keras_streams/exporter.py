"""Exports one step of a stream as C or WebAssembly."""

import os
import pathlib
from typing import Any

import numpy as np

from keras_streams.c import FIXED_TOLERANCE, write_c
from keras_streams.wasm import write_wasm


def export(
    model: Any,
    path: str | os.PathLike,
    *,
    format: str = "c",
    quantization: str | None = None,
    representative_data: np.ndarray | None = None,
    quantization_tolerance: float = FIXED_TOLERANCE,
    weights: str = "code",
    overwrite: bool = False,
) -> pathlib.Path:
    """Exports one step of a model as C or WebAssembly, compared with Keras.

    The C code is C99 without allocation or global variables: `model.c` and `model.h`. If there is a
    C compiler, 200 random steps are compared with Keras before anything is written; otherwise
    `model_test.c` compares them on another machine. WebAssembly is the same code, compiled by
    ziglang, with an ES module `model.mjs`.

    Args:
        model: Built Keras model that `to_stream` supports, its stream, or a layer that streams.
        path: Path of the file, `model.c` or `model.wasm`. The name of a C file is the prefix of its
            functions.
        format: `"c"` or `"wasm"`. Defaults to `"c"`.
        quantization: `None`, or for C that uses only integers, with 8-bit weights and 16-bit
            activations, `"int8"`; `"int8_rings"` also keeps the past inputs of convolutions in 8
            bits. Defaults to `None`.
        representative_data: Array (steps, channels) or (rows, steps, channels), without channels
            for tokens, used to choose the ranges of integers. Defaults to `None`.
        quantization_tolerance: Positive float, the largest difference of integers from Keras on
            `representative_data`, in units of the largest output. Defaults to 0.05.
        weights: `"code"`, or for C `"file"`, to write the weights to `model.bin`, whose content the
            program passes to `model_reset`: for millions of weights. Defaults to `"code"`.
        overwrite: Boolean, whether to replace existing files. Defaults to `False`.

    Returns:
        The path that was written.

    Raises:
        ValueError: `path` exists or has the wrong type, an option does not apply, or the model
            cannot be exported.
        ImportError: WebAssembly needs ziglang, and integers a C compiler.
        RuntimeError: The C code differs from Keras.
    """
    if format not in ("c", "wasm"):
        raise ValueError(f"`format` must be 'c' or 'wasm'. Received: {format!r}")
    path = pathlib.Path(path).expanduser()
    if format == "c":
        options = quantization, representative_data, quantization_tolerance, weights
        return write_c(model, path, None, overwrite, *options)
    is_fixed = quantization is not None or representative_data is not None
    if is_fixed or quantization_tolerance != FIXED_TOLERANCE or weights != "code":
        raise ValueError(
            "`quantization`, `representative_data`, `quantization_tolerance` and `weights` are "
            f"only for format='c'. Received: quantization={quantization!r}, "
            f"quantization_tolerance={quantization_tolerance}, weights={weights!r} with "
            "format='wasm'"
        )
    return write_wasm(model, path, overwrite=overwrite)
