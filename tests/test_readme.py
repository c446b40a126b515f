"""The README's examples run, and its commands are those that CI and the command line have."""

import pathlib
import re

import pytest
from typer.testing import CliRunner

from tests.support.processes import run_script
from trellis_keras.cli import app

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


PYTHON = blocks("python")


@pytest.mark.slow
def test_the_first_lines_run():
    """The full-size model takes a training step in which all targets count."""
    run_script(PYTHON[0], timeout=3600)


def test_the_first_lines_run_at_a_smaller_size():
    source = PYTHON[0].replace("trellisnet_ptb()", "trellisnet_ptb(depth=4, hidden_units=8)")
    assert source != PYTHON[0]
    run_script(source)


# The first of these trains a model at the size that it has: most of a minute.
EXAMPLES = [pytest.param(1, marks=pytest.mark.slow), *range(2, len(PYTHON))]


@pytest.mark.parametrize("number", EXAMPLES)
def test_python_examples_run(number):
    run_script(PYTHON[number], XLA_FLAGS="")  # as a user has it


def test_ci_runs_the_test_command():
    command = next(line for line in blocks("sh")[1].splitlines() if "pytest" in line)
    pattern = re.search(r"grep -m1 '(.+?)' README.md", (ROOT / ".ci/run").read_text())[1]
    assert re.findall(pattern, README, flags=re.MULTILINE) == [command]


def test_the_commands_exist():
    used = set(re.findall(r"^trellis-keras (\w+)", README, flags=re.MULTILINE))
    assert used == {"list", "train", "evaluate", "generate", "score", "export"}
    for command in used:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
