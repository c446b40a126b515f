"""The README's examples run, and its commands are those that CI and the command line have."""

import pathlib
import re

from typer.testing import CliRunner

from tests.support.processes import run_script
from trellis_keras_command import app

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_examples_run(tmp_path):
    """One after the other, as a reader would paste them."""
    go = "import os, sys\nos.chdir(sys.argv[1])\n"
    run_script(go + "\n".join(blocks("python")), tmp_path, XLA_FLAGS="")


def test_ci_runs_the_test_command():
    command = next(line for line in blocks("sh")[1].splitlines() if "pytest" in line)
    pattern = re.search(r"grep -m1 '(.+?)' README.md", (ROOT / ".ci/run").read_text())[1]
    assert re.findall(pattern, README, flags=re.MULTILINE) == [command]


def test_the_commands_exist():
    used = set(re.findall(r"^trellis-keras (\w+)", README, flags=re.MULTILINE))
    assert used
    for command in used:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
