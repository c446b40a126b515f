"""An export answers through TensorFlow's C API, in a process without Python."""

import contextlib
import pathlib
import runpy
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from tests.support.processes import ROOT
from tests.support.served import inputs, scores

EXAMPLE = ROOT / "examples" / "serving" / "c"
TENSORFLOW = pathlib.Path(tf.__file__).parent
COMPILER = shutil.which("gcc")
TEXT = "a cab é"

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler: gcc is not installed"),
    pytest.mark.skipif(
        not (TENSORFLOW / "libtensorflow_cc.so.2").is_file(),
        reason="needs TensorFlow's C library, which this wheel lacks",
    ),
]


@pytest.fixture(scope="module")
def answers(exported, tmp_path_factory):
    """A model, the ids that it was asked for, and {endpoint: its answers}."""
    model, export = exported("trellisnet")
    folder = tmp_path_factory.mktemp("c")
    with open(folder / "endpoints.h", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLE / "endpoints.py"))["main"](export)
    libraries = ["-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"]
    subprocess.run(
        [COMPILER, "-Wall", "-Werror", f"-I{TENSORFLOW}/include", f"-I{folder}"]
        + [EXAMPLE / "run.c", "-o", folder / "run"]
        + [f"-L{TENSORFLOW}", *libraries, f"-Wl,-rpath,{TENSORFLOW}"]
        + ["-fuse-ld=gold"] * (shutil.which("ld.gold") is not None),  # five times faster
        check=True,
    )
    ids = inputs(model, 1, 20)[1]
    done = subprocess.run(
        [folder / "run", export, TEXT, *map(str, ids[0])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return model, ids, found


def numbers(lines):
    return np.array([line.split() for line in lines], "float64")


@pytest.mark.parametrize("endpoint", ["serving_default", "step"])
def test_scores_of_whole_rows_and_of_a_stream(answers, endpoint):
    model, ids, found = answers
    expected = scores(model, ids)[1][0]
    np.testing.assert_allclose(numbers(found[endpoint]), expected, rtol=0, atol=1e-5)


def test_the_score_of_a_text(answers):
    model, _, found = answers
    ids = model.vocabulary.encode(TEXT, final_eos=False)
    expected = scores(model, ids[None])[1][0, range(len(ids) - 1), ids[1:]].sum()
    np.testing.assert_allclose(numbers(found["score_text"]), [[expected]], rtol=0, atol=1e-5)


def test_a_wrong_request_is_refused(answers):
    (refused,) = answers[2]["refused"]
    assert refused.startswith("3 ")  # INVALID_ARGUMENT
    assert "Token ids must be in [0, 7)" in refused
