"""The benchmark command runs a case from end to end."""

import json

from backends import run_module


def benchmarks(*arguments):
    return run_module("benchmarks", *arguments)


def test_a_case_writes_its_figures(tmp_path):
    done = benchmarks("run", "time", "--variants", "110", "--rounds", "2", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "time-tensorflow.json").read_text())
    figures = results["variants"]["110 steps"]
    assert len(figures["steps_s"]) == 2 and figures["peak_gib"] > 0
    assert figures["first_call_s"] > 0 and figures["step_s"] > 0
    assert (tmp_path / "time-tensorflow.md").read_text() in done.stdout


def test_unknown_cases_are_named():
    done = benchmarks("run", "nothing")
    assert done.returncode == 2 and "nothing" in done.stderr
