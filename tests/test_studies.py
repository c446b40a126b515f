"""Studies measure every cell once, refuse other settings, and fit models to a size."""

import csv
import math
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, child_environment

STUDIES = ROOT / "examples" / "studies"
sys.path.insert(0, str(STUDIES))

import lattice_comparison  # noqa: E402
import memory_horizon  # noqa: E402
import study  # noqa: E402

SETTINGS = {"quick": True, "train": 64}
COLUMNS = ["net", "seed", "value"]


def test_a_cell_is_measured_once(tmp_path):
    measured = []

    def measure(work, net, seed):
        measured.append(seed)
        return [{"value": 0.5}]

    for seed in (0, 1, 0):
        cells = study.Study("try", tmp_path, SETTINGS, COLUMNS)
        cells.measure(measure, net="tcn", seed=seed)
    assert measured == [0, 1]
    assert [(row["seed"], row["value"]) for row in cells.rows()] == [(0, 0.5), (1, 0.5)]


def test_rows_of_other_settings_are_refused(tmp_path):
    study.Study("try", tmp_path, SETTINGS, COLUMNS)
    with pytest.raises(ValueError, match="other settings: train 64 there, 65 here"):
        study.Study("try", tmp_path, SETTINGS | {"train": 65}, COLUMNS)


# Computed by hand from the layers' formulas: GRU and SimpleRNN on copy memory.
@pytest.mark.parametrize(("net", "width"), [("gru", 55), ("rnn", 94)])
def test_models_have_the_size_of_the_study(net, width):
    settings = {"size": 10_000, "train": 100, "epochs": 1}
    recipe = memory_horizon.recipe_of(settings, net, 100, 0)
    assert recipe.arguments["hidden_units"] == width


def test_differences_have_confidence_intervals():
    """Of the seeds that both nets have: differences 0.1 and 0.3, t = 12.71 of one degree."""
    low = {0: {"test": 1.0}, 1: {"test": 1.2}}
    high = {0: {"test": 1.1}, 1: {"test": 1.5}, 2: {"test": 9.0}}
    mean, half, seeds = lattice_comparison.difference(low, high)
    assert (mean, half, seeds) == (pytest.approx(0.2), pytest.approx(1.2706, abs=1e-4), 2)
    mean, half, seeds = lattice_comparison.difference(low, {0: {"test": 1.5}})
    assert (mean, seeds) == (0.5, 1) and math.isnan(half)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory_horizon", "lattice_comparison", "recipe_levers"])
def test_quick_studies_run_and_resume(tmp_path, name):
    command = [sys.executable, STUDIES / f"{name}.py", "--quick", "--output", tmp_path]
    for _ in range(2):
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "done before" in done.stdout
    with open(tmp_path / f"{name}.csv", newline="") as file:
        assert {row["seed"] for row in csv.DictReader(file)} == {"0"}
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
