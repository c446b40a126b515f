"""The benchmark command runs a case from end to end."""

import functools
import json

import numpy as np
import pytest

from benchmarks import classification, rivals
from benchmarks.results import read_rows
from tests.support.processes import ROOT, run_module


@pytest.mark.slow
def test_a_case_writes_its_figures(tmp_path):
    run = functools.partial(run_module, "benchmarks", "run", "gemm")
    done = run("--rounds", "2", "--output", tmp_path / "all")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "all" / "gemm-tensorflow.json").read_text())
    figures = results["variants"]["float32"]
    assert len(figures["steps_s"]) == 2 and figures["peak_gib"] > 0
    assert figures["first_call_s"] > 0 and figures["step_s"] > 0
    assert (tmp_path / "all" / "gemm-tensorflow.md").read_text() in done.stdout
    done = run("--variants", "float32", "--rounds", "1", "--output", tmp_path / "some")
    assert done.returncode == 0 and "| float32 |" in done.stdout
    assert not (tmp_path / "some").exists()


def test_the_guide_has_the_table_of_classification():
    rows = read_rows(ROOT / "benchmarks" / "results" / "classification.csv")
    guide = (ROOT / "docs" / "classification.md").read_text(encoding="utf-8")
    assert classification.table_of(rows) in guide


def test_rivals_step_as_their_full_pass(monkeypatch):
    for size, small in {"TAPS": 2, "DEPTH": 2, "FILTERS": 3, "TIME": 6, "BATCH": 2}.items():
        monkeypatch.setattr(rivals, size, small)
    program = rivals.KerasGRU()
    program.train()
    program.reset()
    x = np.random.default_rng(0).normal(size=(12, rivals.CHANNELS)).astype("float32")
    found = [program.step(row) for row in x]
    np.testing.assert_allclose(found, program.full(x), rtol=1e-5, atol=1e-6)
    assert program.state_bytes > 0
