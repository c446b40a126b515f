"""The time series of the examples, and the comparison of nets on them."""

import gzip
import sys

import numpy as np
import pytest

from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES / "studies"))

import series_comparison  # noqa: E402


def test_data_is_small_and_has_a_licence():
    files = list((EXAMPLES / "data").glob("*.csv.gz"))
    assert len(files) == 3 and sum(file.stat().st_size for file in files) < 1_000_000
    readme = (EXAMPLES / "data" / "README.md").read_text(encoding="utf-8")
    for file in files:
        (line,) = (line for line in readme.splitlines() if f"`{file.name}`" in line)
        assert "CC BY 4.0" in line or "BSD 3-Clause" in line


@pytest.mark.parametrize("name", ["traffic", "water"])
def test_hours_are_complete(name):
    """A gap is an empty value, not a row that is left out."""
    with gzip.open(EXAMPLES / "data" / f"{name}.csv.gz", "rt") as file:
        table = np.genfromtxt(file, delimiter=",", names=True, dtype=None, encoding="utf-8")
    hours = table["time"].astype("datetime64[h]").astype(int)
    assert np.all(np.diff(hours) == 1)


def test_the_docs_have_the_tables_of_the_comparison():
    results = EXAMPLES / "studies" / "results" / "series_comparison" / "series_comparison.md"
    tables = results.read_text(encoding="utf-8").replace("## ", "### ").strip()
    assert tables in (ROOT / "docs" / "forecasting.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_comparison_makes_its_table(tmp_path):
    nets = ["tcn", "lstm", "naive"]
    _, table = series_comparison.run(
        tmp_path, {"quick": True, **series_comparison.QUICK}, ["traffic", "exercises"], nets, [0, 1]
    )
    assert table.count("| TCN |") == table.count("| Keras LSTM |") == table.count("| naive |") == 2
    assert (tmp_path / "series_comparison.png").exists()
