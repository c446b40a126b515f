"""The examples of README.md and CONTRIBUTING.md run; the commands are those that there are."""

import re

from typer.testing import CliRunner

from tests.support.processes import ROOT, run_script
from trellis_keras_command import app

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language, page=README):
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_python_examples_run(tmp_path):
    """One after the other, as a reader would paste them."""
    of_ones_own = blocks("python", CONTRIBUTING)  # a data set and a model
    for block in of_ones_own:
        lines = [line for line in block.splitlines() if line and "import" not in line]
        assert len(lines) <= 10
    go = "import os, sys\nos.chdir(sys.argv[1])\n"
    shown = run_script(go + "\n".join([*blocks("python"), *of_ones_own]), tmp_path)
    assert re.search(r"gru_recall: \d+ parameters \(units=8\)", shown)
    assert (tmp_path / "runs" / "recall" / "best.keras").is_file()


def test_ci_runs_the_test_command():
    command = next(line for line in blocks("sh")[1].splitlines() if "pytest" in line)
    pattern = re.search(r"grep -m1 '(.+?)' README.md", (ROOT / ".ci/run").read_text())[1]
    assert re.findall(pattern, README, flags=re.MULTILINE) == [command]


def test_the_commands_exist():
    used = set(re.findall(r"^trellis-keras (\w+)", README, flags=re.MULTILINE))
    assert used
    for command in used:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
