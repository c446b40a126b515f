"""Runs that are killed again and again end as runs that nothing disturbed, to the bit."""

import numpy as np
import pytest

from tests.support.run_checks import check_killed_run
from tests.support.small_runs import STATEFUL, options, write_text

COMPILED = {"jit_compile": True, "stop_patience": 1000}


def language_model(folder):
    text = write_text(folder / "text.txt")
    settings = {name: value for name, value in STATEFUL.items() if name != "epochs"}
    return ["trellisnet_char", "--text", text, *options(settings | COMPILED)]


def forecaster(folder):
    values = np.sin(np.arange(400) / 3) + np.random.default_rng(0).normal(size=400, scale=0.1)
    path = folder / "load.csv"
    path.write_text("load\n" + "\n".join(f"{value:.4f}" for value in values))
    settings = {"window": 12, "horizon": 3, "filters": 4, "dropout": 0.2, "batch_size": 16}
    words = ["--csv", path, "--target", "load"]
    return ["tcn_forecaster", *words, *options(settings | COMPILED)]


def lattice(folder):
    text = write_text(folder / "text.txt")
    settings = {"hidden_units": 5, "batch_size": 4, "sequence_length": 12}
    return ["lru_char_ptb", "--text", text, *options(settings | COMPILED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "make", "kills"),
    [
        ("tensorflow", language_model, 10),
        ("tensorflow", forecaster, 10),
        ("tensorflow", lattice, 10),
        ("jax", language_model, 4),
        ("jax", forecaster, 3),
        ("jax", lattice, 3),
    ],
)
def test_a_run_killed_many_times(tmp_path, backend, make, kills):
    check_killed_run(tmp_path, backend, make(tmp_path), epochs=3 * kills, kills=kills)
