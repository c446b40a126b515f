"""Names of strangers in generated code: real compilers read them as names, never as code."""

import shutil
import subprocess

import keras
import pytest

from tests.export.test_c import WARNINGS, ZIG
from trellis_keras.export import compiled
from trellis_keras.export.c import stream_program
from trellis_keras.export.c_source import print_c

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
    pytest.param(ZIG, marks=pytest.mark.skipif(not compiled.has_zig(), reason="needs ziglang")),
]


def dense(name="dense", outputs=2):
    net = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(outputs, name=name)])
    return net, stream_program(net, "model")


@pytest.mark.parametrize("trigraphs", ["-trigraphs", "-O1"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_names_of_outputs_are_strings(compiler, trigraphs, tmp_path):
    _, program = dense(outputs=len(HOSTILE))
    program.names = HOSTILE
    compiled.write_source(print_c(program, "model", "float"), tmp_path)
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
    command = [*compiler, *WARNINGS, trigraphs, "main.c", "model.c", "-lm"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    printed = subprocess.run(tmp_path / "a.out", capture_output=True, text=True).stdout
    wanted = [name.encode("utf-8", "surrogatepass").split(b"\0")[0].hex() for name in HOSTILE]
    assert printed.splitlines() == wanted
