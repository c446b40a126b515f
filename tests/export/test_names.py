"""Names of strangers in generated code: real compilers read them as names, never as code."""

import ctypes
import dataclasses
import json
import shutil
import subprocess

import keras
import pytest

from keras_streams import passes
from keras_streams.c_export import c_source, proven_source, step_program, write_c
from keras_streams.c_source import Printer
from keras_streams.exported_stream import exported_stream
from keras_streams.native_stream import ZIG, has_zig, write_source
from keras_streams.wasm import es_module
from tests.export.test_c import WARNINGS

# Each would declare `injected` if a part of it were read as code.
CODE = "int injected(void) { return 42; }"
HOSTILE = [
    *(f"a{end}{CODE}//" for end in ("\n", "\r", "\r\n", "\u2028", "\x85", "\v", "\f", '"', "\0")),
    *(f"a{end}\n{CODE}//" for end in ("\\", "??/", "?\\\n?/", "\\ ", "\\\\")),
    *(f"{end}{CODE}/*" for end in ("*/", "*\\\n/", "*??/\n/", "*\n/", "/*/", "**/")),
    *("??/", "\\", "*", "/", "\ud800", "\u202eüñ\U0001f600", "%s%n", "a\\x41", "a\\101", "1??/1"),
]

COMPILERS = [
    pytest.param(["gcc"], marks=pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")),
    pytest.param(ZIG, marks=pytest.mark.skipif(not has_zig(), reason="needs ziglang")),
]


def dense(outputs=2):
    return keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(outputs)])


def run(*command, cwd):
    found = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("compiler", COMPILERS)
def test_names_of_outputs_are_strings(compiler, tmp_path):
    stream = exported_stream(dense(outputs=len(HOSTILE)))
    stream = dataclasses.replace(stream, names=HOSTILE)
    write_source(c_source(stream, "model"), tmp_path)
    (tmp_path / "main.c").write_text("""
#include "model.h"
#include <stdio.h>
int main(void)
{
    static const char *names[] = {MODEL_NAMES};
    for (unsigned k = 0; k < sizeof names / sizeof *names; k++) {
        for (const char *c = names[k]; *c; c++)
            printf("%02x", (unsigned char)*c);
        putchar('\\n');
    }
    return 0;
}
""")
    run(*compiler, *WARNINGS, "-trigraphs", "main.c", "model.c", "-lm", cwd=tmp_path)
    wanted = [name.encode("utf-8", "backslashreplace").split(b"\0")[0].hex() for name in HOSTILE]
    assert run(tmp_path / "a.out", cwd=tmp_path).splitlines() == wanted


@pytest.mark.parametrize("compiler", COMPILERS)
def test_names_in_comments_stay_there(compiler, tmp_path):
    stream = exported_stream(dense())
    write_c(dataclasses.replace(stream, names=HOSTILE), tmp_path / "names.c")
    for number, name in enumerate(HOSTILE):
        program = step_program(stream)
        for op in program.ops:
            op.scope = op.buffer.scope = name
        groups = passes.optimize(program)
        source = Printer(program, groups, f"layer_{number}", "float", stream).print()
        write_source(source, tmp_path)
    files = [path.name for path in tmp_path.glob("*.c")]
    options = [*WARNINGS, "-trigraphs", "-shared", "-fPIC", "-lm", "-o", "model.so"]
    run(*compiler, *files, *options, cwd=tmp_path)
    assert not hasattr(ctypes.CDLL(str(tmp_path / "model.so")), "injected")
    assert all(path.read_bytes().isascii() for path in tmp_path.glob("*.[ch]"))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_names_in_an_es_module_stay_names(tmp_path):
    code = "globalThis.injected = true;"
    hostile = [name.replace(CODE, code) for name in HOSTILE]
    stream = exported_stream(dense(outputs=len(hostile)))
    source, *_ = proven_source(dataclasses.replace(stream, names=hostile), "model")
    (tmp_path / "model.mjs").write_text(es_module(source, f"a\u2028{code}\n{code}//"))
    script = """
import { names } from "./model.mjs";
console.log(JSON.stringify([names, "injected" in globalThis]));
"""
    (tmp_path / "main.mjs").write_text(script)
    assert json.loads(run("node", "main.mjs", cwd=tmp_path)) == [hostile, False]
