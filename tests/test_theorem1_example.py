"""Theorem 1's example and its measurement of errors: they find what the page says."""

import csv
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


def test_the_pages_figures_are_the_examples():
    for row in rows(EXAMPLE / "results" / "bits.csv"):
        assert f"{float(row['bits_per_character']):.4f}" in PAGE


def test_the_example_found_what_it_must():
    """The TrellisNet has the truncated LSTM's bits; the dense net begins there, and improves."""
    _, truncated, trellis = rows(EXAMPLE / "results" / "bits.csv")
    assert abs(float(trellis["difference"])) <= 1e-4
    assert truncated["difference"] == "0.0e+00"
    points = rows(EXAMPLE / "results" / "curve.csv")
    dense = [float(p["bits_per_character"]) for p in points if p["net"] == "TrellisNet, dense"]
    assert dense[0] == pytest.approx(float(trellis["bits_per_character"]), abs=1e-4)
    assert dense[-1] < dense[0] - 0.01


def test_errors_with_and_without_start_levels(monkeypatch):
    monkeypatch.setattr(measure_error, "TIME", 34)
    error, without = measure_error.errors_of(keras.layers.GRU, 2, seed=0)
    assert error < 1e-5 and without > 1e-2
