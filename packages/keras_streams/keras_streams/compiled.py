"""Compiles C and calls it through `ctypes`."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from keras_streams.c_source import Source
from keras_streams.files import atomic_write, write_files

# These neither reorder sums nor ignore NaN, so results do not depend on the compiler.
_OPTIONS = ["-std=c99", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
ZIG = [sys.executable, "-m", "ziglang", "cc"]


def find_compiler() -> list[str] | None:
    """Returns the command of a C compiler: `$CC`, `cc`, or that of the ziglang package."""
    name = os.environ.get("CC") or shutil.which("cc")
    if name:
        return name.split()
    return ZIG if has_zig() else None


def has_zig() -> bool:
    """Returns whether ziglang is installed, a package with a C compiler for many targets."""
    return importlib.util.find_spec("ziglang") is not None


def compile_library(source: Source) -> pathlib.Path:
    """Compiles C to a shared library, cached by content in the user's cache folder.

    Raises:
        ImportError: If there is no C compiler.
        RuntimeError: If the compiler fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ImportError("Found no C compiler: install one, or pip install ziglang")
    content = "\n".join([source.header, source.code, *compiler, *_OPTIONS])
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    library = _cache_folder() / f"{name}{'.dll' if sys.platform == 'win32' else '.so'}"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = pathlib.Path(folder, "built")
            code = write_source(source, folder)
            # Some compilers do not support -march=native.
            for options in ([*_OPTIONS, "-march=native"], _OPTIONS):
                command = [*compiler, *options, str(code), "-o", str(built), "-lm"]
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode == 0:
                    break
            else:
                raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
            library.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(library) as temporary:
                temporary.write_bytes(built.read_bytes())
    return library


def _cache_folder():
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(home, "trellis_keras").expanduser()


def write_source(source: Source, folder: str | os.PathLike) -> pathlib.Path:
    """Writes `prefix.h` and `prefix.c` to a folder and returns the path of `prefix.c`."""
    write_files(source_files(source, folder))
    return pathlib.Path(folder, f"{source.prefix}.c")


def source_files(source: Source, folder: str | os.PathLike) -> dict[pathlib.Path, bytes]:
    """Returns the contents of `prefix.h` and `prefix.c` in a folder."""
    texts = {"h": source.comment + source.header, "c": source.code}
    return {
        pathlib.Path(folder, f"{source.prefix}.{suffix}"): text.encode()
        for suffix, text in texts.items()
    }


_DTYPES = {"float": "float32", "double": "float64", "int16_t": "int16"}


def _pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


@functools.lru_cache(maxsize=64)
def _functions(library, prefix):
    loaded = ctypes.CDLL(str(library))
    names = ("reset", "step", "quantize", "dequantize")
    found = {name: getattr(loaded, f"{prefix}_{name}", None) for name in names}
    for function in filter(None, found.values()):
        function.restype = None
    return found


class NativeStream:
    """One stream through a model's compiled step.

    Streams share no mutable data, so each thread may step its own, but two threads must not step
    the same stream at once. A stream can be pickled with its state; another machine recompiles it.

    Attributes:
        inputs, outputs: Numbers of input channels (for tokens, the vocabulary size) and outputs.
    """

    def __init__(self, source: Source, state: bytes | None = None) -> None:
        self._source = source
        self.inputs, self.outputs = source.inputs, source.outputs
        functions = _functions(compile_library(source), source.prefix)
        self._reset, self._step = functions["reset"], functions["step"]
        self._state = np.zeros(source.state_bytes, "uint8")
        self._x = np.zeros(self.inputs, _DTYPES[source.real])
        self._y = np.zeros(self.outputs, _DTYPES[source.real])
        self._at = [_pointer(array) for array in (self._state, self._x, self._y)]
        if state is None:
            self.reset()
        else:
            self._state[:] = np.frombuffer(state, "uint8")

    def step(self, x: Any) -> np.ndarray:
        """Reads one time step and returns the outputs.

        Args:
            x: Array (inputs,), or a token id.

        Raises:
            ValueError: If x has the wrong shape.
        """
        state, inputs, outputs = self._at
        if self._source.takes_token:
            self._step(state, int(x), outputs)
        else:
            x = np.asarray(x)
            if x.shape != self._x.shape:
                raise ValueError(f"`x` must have shape ({self.inputs},). Received: shape {x.shape}")
            self._x[...] = x
            self._step(state, inputs, outputs)
        return self._y.copy()

    def reset(self) -> None:
        """Resets the stream."""
        self._reset(self._at[0])

    def clone(self) -> "NativeStream":
        """Returns another stream in the same state."""
        return type(self)(self._source, self._state.tobytes())

    def __reduce__(self):
        return type(self), (self._source, self._state.tobytes())


class FixedStream(NativeStream):
    """A stream of integer-only C, whose `step` takes and returns floating-point values."""

    def __init__(self, source: Source, state: bytes | None = None) -> None:
        super().__init__(source, state)
        functions = _functions(compile_library(source), source.prefix)
        self._quantize, self._dequantize = functions["quantize"], functions["dequantize"]

    def step(self, x: Any) -> np.ndarray:
        if not self._source.takes_token:
            numbers, x = np.array(x, "float32"), np.zeros(self.inputs, "int16")
            self._quantize(_pointer(numbers), _pointer(x))
        q, y = super().step(x), np.zeros(self.outputs, "float32")
        self._dequantize(_pointer(q), _pointer(y))
        return y
