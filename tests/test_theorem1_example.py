"""Theorem 1's page, example, error table and benchmark: they run, and say what they found."""

import csv
import re
import sys

import keras
import pytest

from tests.support.processes import ROOT

EXAMPLE = ROOT / "examples" / "theorem1"
sys.path[:0] = [str(ROOT), str(EXAMPLE)]

import measure_error  # noqa: E402

PAGE = (ROOT / "docs" / "theorem1.md").read_text(encoding="utf-8")


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def check_bits(folder):
    """A row per net; the TrellisNet has the truncated LSTM's bits."""
    lstm, truncated, trellis = rows(folder / "bits.csv")
    assert abs(float(trellis["difference"])) <= 1e-4
    assert truncated["difference"] == "0.0e+00"
    return lstm, truncated, trellis


def check_curve(folder):
    """The dense net begins where the converted one was. Returns its held-out bits."""
    points = rows(folder / "curve.csv")
    dense = [float(p["bits_per_character"]) for p in points if p["net"] == "TrellisNet, dense"]
    *_, trellis = rows(folder / "bits.csv")
    assert dense[0] == pytest.approx(float(trellis["bits_per_character"]), abs=1e-4)
    return dense


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "docs/theorem1.md", "exec"), names)


def test_the_pages_figures_are_the_examples():
    for row in rows(EXAMPLE / "results" / "bits.csv"):
        assert f"{float(row['bits_per_character']):.4f}" in PAGE


def test_the_example_found_what_it_must():
    check_bits(EXAMPLE / "results")
    dense = check_curve(EXAMPLE / "results")
    assert dense[-1] < dense[0] - 0.01


def test_errors_with_and_without_start_levels(monkeypatch):
    monkeypatch.setattr(measure_error, "TIME", 34)
    error, without = measure_error.errors_of(keras.layers.GRU, 2, seed=0)
    assert error < 1e-5 and without > 1e-2
