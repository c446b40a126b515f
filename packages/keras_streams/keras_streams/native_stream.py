"""Streams of machine code: compiles C and calls it through `ctypes`."""

import ctypes
import functools
import hashlib
import importlib.util
import operator
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_streams.c_source import Source
from keras_streams.files import write_files

# These neither reorder nor fuse sums, nor ignore NaN, so results do not depend on the compiler.
OPTIONS = [
    *("-std=c99", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-Werror=incompatible-pointer-types",
]
ZIG = [sys.executable, "-m", "ziglang", "cc"]


def find_compiler() -> list[str] | None:
    """Returns the command of a C compiler: `$CC`, `cc`, or that of the ziglang package.

    Raises:
        FileNotFoundError: If `$CC` names no program.
    """
    chosen = os.environ.get("CC", "").strip()
    command = chosen or shutil.which("cc")
    if command:
        words = _split(command)
        if shutil.which(words[0]) is None:
            raise FileNotFoundError(
                "The environment variable CC must be the command of a C compiler, or unset. "
                f"Received: CC={chosen!r}, and there is no program {words[0]!r}"
            )
        return words
    return ZIG if has_zig() else None


def _split(command):
    """Returns the words of a command, whose program's path may have spaces."""
    words = command.split(" ")
    for end in range(len(words), 0, -1):
        if shutil.which(program := " ".join(words[:end])):
            return [program, *shlex.split(" ".join(words[end:]))]
    return shlex.split(command)


def has_zig() -> bool:
    """Returns whether ziglang is installed, a package with a C compiler for many targets."""
    return importlib.util.find_spec("ziglang") is not None


def compile_library(source: Source) -> pathlib.Path:
    """Compiles C to a shared library, cached in the user's cache folder.

    The cache is keyed by the code, the compiler with its version and options, and the features of
    the processor. A library is used again only if it is complete, and if nobody else could have
    written it. Where the folder cannot be used, a temporary one takes its place.

    Raises:
        ImportError: If there is no C compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ImportError("Found no C compiler: install one, or pip install ziglang")
    options, macros = _target(tuple(compiler))
    command = [*compiler, *OPTIONS, "-shared", "-fPIC", *options]
    key = "\n".join([source.header, source.code, *command, macros])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(home, "keras_streams").expanduser()
    for library in folder.glob(f"{name}-*"):
        if _is_own(folder) and _is_own(library):
            if library.name == _library_name(name, library.read_bytes()):
                return library
    content = build(source, command)
    try:
        return _store(folder, name, content)
    except OSError:  # no home, another user's, or no space
        return _store(pathlib.Path(_temporary_folder().name), name, content)


def _library_name(name, content):
    """Returns the name of a library's file, which has a checksum of its content."""
    suffix = ".dll" if sys.platform == "win32" else ".so"
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"


@functools.lru_cache
def _target(compiler):
    """Returns the options for this processor, and the macros: its features, and the version."""
    for options in (["-march=native"], []):  # some compilers do not know it
        command = [*compiler, *options, "-dM", "-E", "-x", "c", os.devnull]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode == 0:
            break
    return options, run.stdout


def build(source: Source, command: Sequence[str]) -> bytes:
    """Returns what the command of a compiler makes of a source, or raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        code = write_source(source, folder)
        built = code.with_suffix(".built")
        command = [*command, str(code), "-lm", "-o", str(built)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode == 0:
            return built.read_bytes()
    raise RuntimeError(
        f"{shlex.join(command)} failed with status {run.returncode}: {run.stderr[-2000:]}"
    )


def _store(folder, name, content):
    """Writes a library for the user alone, and returns its path."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    library = folder / _library_name(name, content)
    write_files({library: content}, mode=0o600)
    return library


def _is_own(path):
    """Returns whether a path exists and is the user's, and nobody else may write to it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


@functools.lru_cache
def _temporary_folder():
    return tempfile.TemporaryDirectory(prefix="keras_streams-", ignore_cleanup_errors=True)


def write_source(source: Source, folder: str | os.PathLike) -> pathlib.Path:
    """Writes `prefix.h` and `prefix.c` to a folder and returns the path of `prefix.c`."""
    code, *_ = files = source_files(source, folder)
    write_files(files)
    return code


def source_files(source: Source, folder: str | os.PathLike) -> dict[pathlib.Path, bytes]:
    """Returns the contents of `prefix.c` and `prefix.h` in a folder.

    `prefix.c` does not compile with the header of another export.
    """
    path, name = pathlib.Path(folder, f"{source.prefix}.c"), f"{source.prefix.upper()}_EXPORT"
    number = zlib.crc32(f"{source.header}{source.code}".encode())
    header = f"{source.comment}#define {name} {number}u\n\n{source.header}"
    message = f"{source.prefix}.h and {source.prefix}.c are from different exports."
    code = f'{source.code}\n#if {name} != {number}u\n#error "{message}"\n#endif\n'
    return {path: code.encode(), path.with_suffix(".h"): header.encode()}


_DTYPES = {"float": "float32", "double": "float64", "int16_t": "int16"}


def _pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


class NativeStream:
    """One stream through a model's compiled step.

    Streams share no mutable data, so each thread may step its own, but two threads must not step
    the same stream at once. A stream can be pickled with its state; another machine recompiles it.

    Attributes:
        inputs, outputs: Numbers of input channels (for tokens, the vocabulary size) and outputs.
        memory: The bytes of the state.
    """

    def __init__(
        self, source: Source, state: bytes | None = None, library: ctypes.CDLL | None = None
    ) -> None:
        self._source = source
        self.inputs, self.outputs = source.inputs, source.outputs
        self._library = library or ctypes.CDLL(str(compile_library(source)))
        self._reset, self._step = self._function("reset"), self._function("step")
        self.memory = np.zeros(source.state_bytes, "uint8")
        self._x = np.zeros(self.inputs, _DTYPES[source.real])
        self._y = np.zeros(self.outputs, _DTYPES[source.real])
        self._at = [_pointer(array) for array in (self.memory, self._x, self._y)]
        self._weights = np.frombuffer(source.weights or b"", "uint8")
        self.reset()
        if state is not None:
            self.memory[:] = np.frombuffer(state, "uint8")

    def _function(self, name):
        function = getattr(self._library, f"{self._source.prefix}_{name}")
        function.restype = None
        return function

    def step(self, x: Any) -> np.ndarray:
        """Reads one time step, an array (inputs,) or a token id, and returns the outputs.

        Raises:
            ValueError: If x has the wrong shape, or is not a token id in `[0, inputs)`.
        """
        state, inputs, outputs = self._at
        if self._source.takes_token:
            self._step(state, self._token(x), outputs)
        else:
            self._x[...] = self._numbers(x)
            self._step(state, inputs, outputs)
        return self._y.copy()

    def _token(self, x):
        try:
            token = operator.index(x)
        except TypeError:
            token = -1
        if not 0 <= token < self.inputs:
            raise ValueError(f"`x` must be a token id in [0, {self.inputs}). Received: {x!r}")
        return token

    def _numbers(self, x):
        x = np.asarray(x)
        if x.shape != self._x.shape or x.dtype.kind == "O":
            raise ValueError(
                f"`x` must be an array of numbers of shape ({self.inputs},). Received: shape "
                f"{x.shape}, dtype {x.dtype}"
            )
        return x

    def reset(self) -> None:
        """Resets the stream."""
        weights = [] if self._source.weights is None else [_pointer(self._weights)]
        self._reset(self._at[0], *weights)

    def clone(self) -> "NativeStream":
        """Returns another stream in the same state."""
        return type(self)(self._source, self.memory.tobytes(), self._library)

    def __reduce__(self):
        return type(self), (self._source, self.memory.tobytes())


class FixedStream(NativeStream):
    """A stream of integer-only C, whose `step` takes and returns floating-point values."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._dequantize = self._function("dequantize")
        if not self._source.takes_token:
            self._quantize = self._function("quantize")

    def step(self, x: Any) -> np.ndarray:
        if not self._source.takes_token:
            numbers, x = self._numbers(x).astype("float32"), np.zeros(self.inputs, "int16")
            self._quantize(_pointer(numbers), _pointer(x))
        q, y = super().step(x), np.zeros(self.outputs, "float32")
        self._dequantize(_pointer(q), _pointer(y))
        return y
