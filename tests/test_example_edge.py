"""examples/edge: from training to a program in C."""

import shutil
import subprocess
import sys

import keras
import pytest

from tests.support.processes import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="one backend"),
]


@pytest.mark.skipif(
    None in (shutil.which("make"), shutil.which("cc")), reason="needs make and a C compiler"
)
def test_from_training_to_c(tmp_path):
    shutil.copytree(
        ROOT / "examples" / "edge", tmp_path / "edge", ignore=shutil.ignore_patterns("build")
    )
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    script = tmp_path / "edge" / "exercises.py"
    script.write_text(script.read_text().replace("epochs=10", "epochs=2"))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("C with integers only") == 2
    assert (tmp_path / "edge" / "build" / "exercises.wasm").exists()
    command = ["make", "-s", "-C", tmp_path / "edge"]
    seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert " s  " in seen
