"""The cache of compiled steps, which may be damaged, full, or somebody else's."""

import os
import pathlib
import shutil
import stat

import keras
import numpy as np
import pytest

from keras_streams import native_stream
from keras_streams.c_export import c_source
from keras_streams.exported_stream import exported_stream
from keras_streams.native_stream import NativeStream, compile_library, find_compiler

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
posix = pytest.mark.skipif(os.name != "posix", reason="owners and permissions")

KERNEL = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", os.path.join(home, "zig"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "keras_streams"


@pytest.fixture
def source():
    return dense(KERNEL, np.zeros(3))


def dense(kernel, bias):
    """A product as C."""
    layer = keras.layers.Dense(len(bias))
    model = keras.Sequential([keras.Input((None, len(kernel))), layer])
    layer.set_weights([kernel, bias])
    return c_source(exported_stream(model), "model")


def is_right(source):
    return np.array_equal(NativeStream(source).step([1, 2]), [1, 2] @ KERNEL)


def test_a_library_is_compiled_once(source, cache, monkeypatch):
    library = compile_library(source)
    assert library.parent == cache and is_right(source)
    monkeypatch.setattr(native_stream, "build", None)
    assert compile_library(source) == library
    stream = NativeStream(source)
    monkeypatch.setattr(native_stream, "compile_library", None)
    np.testing.assert_array_equal(stream.clone().step([1, 2]), stream.step([1, 2]))
    if os.name == "posix":
        assert {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()} == {0o600}


@pytest.mark.parametrize("content", [b"", b"\xff", None])
def test_a_damaged_library_is_compiled_again(source, cache, content):
    library = compile_library(source)
    whole = library.read_bytes()
    library.write_bytes(whole[:-5] if content is None else content)
    assert compile_library(source).read_bytes() == whole
    assert is_right(source)


NOT_OWN = [lambda path: path.chmod(0o720), lambda path: path.chmod(0o702)]
if os.name == "posix" and os.geteuid() == 0:
    NOT_OWN.append(lambda path: os.chown(path, 12345, -1))


@posix
@pytest.mark.parametrize("change", NOT_OWN)
def test_what_others_wrote_or_may_write_is_not_loaded(source, cache, change):
    library = compile_library(source)
    change(library)
    assert compile_library(source) == library
    status = library.stat()  # of a new file
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o600)
    change(cache)
    assert compile_library(source).parent != cache and is_right(source)


def test_without_a_cache_folder_a_private_one_is_used(source, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = compile_library(source).parent
    assert not folder.is_relative_to(tmp_path) and is_right(source)
    if os.name == "posix":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_processor_or_compiler_has_a_library_of_its_own(source, monkeypatch):
    library = compile_library(source)
    options, macros = native_stream._target(tuple(find_compiler()))
    assert "__VERSION__" in macros
    for change in ("#define __AVX9000__ 1\n", '#define __VERSION__ "99"\n'):
        monkeypatch.setattr(
            native_stream, "_target", lambda _, more=change: (options, macros + more)
        )
        assert compile_library(source) != library


@posix
def test_the_path_of_a_compiler_may_have_spaces(source, tmp_path, monkeypatch):
    folder = tmp_path / "my tools" / "my cc"
    folder.mkdir(parents=True)
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@"\n')
    path.chmod(0o755)
    found = {
        str(path): [str(path)],
        f"{path} -O1 -DA='b c'": [str(path), "-O1", "-DA=b c"],
        f"'{path}' -O1": [str(path), "-O1"],
        "cc -O1": ["cc", "-O1"],
        "": [shutil.which("cc")],
    }
    for command, words in found.items():
        monkeypatch.setenv("CC", command)
        assert find_compiler() == words
        assert is_right(source)


@pytest.mark.skipif(not native_stream.has_zig(), reason="needs ziglang")
def test_compilers_do_not_fuse_products_and_sums(monkeypatch):
    """Fused, x * y + z is rounded once."""
    rng = np.random.default_rng(0)
    source = dense(rng.normal(size=(64, 64)), rng.normal(size=64))
    x = rng.normal(size=64).astype("float32")
    wanted = NativeStream(source).step(x)
    monkeypatch.setenv("CC", " ".join(map(str, native_stream.ZIG)))
    assert pathlib.Path(find_compiler()[0]).exists()
    np.testing.assert_array_equal(NativeStream(source).step(x), wanted)
