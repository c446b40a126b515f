"""Runs that are killed again and again end as runs that nothing disturbed, to the bit."""

import pytest

from tests.support.run_checks import check_killed_run
from tests.support.small_runs import STATEFUL, options, write_text

COMPILED = {"jit_compile": True, "stopping_patience": 1000}


def language_model(folder):
    text = write_text(folder / "text.txt")
    settings = {name: value for name, value in STATEFUL.items() if name != "epochs"}
    return ["trellisnet_char", "--text", text, *options(settings | COMPILED)]


def lattice(folder):
    text = write_text(folder / "text.txt")
    settings = {"hidden_units": 5, "batch_size": 4, "sequence_length": 12}
    return ["lru_char_ptb", "--text", text, *options(settings | COMPILED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "make", "kills"),
    [
        ("tensorflow", language_model, 10),
        ("tensorflow", lattice, 10),
        ("jax", language_model, 4),
        ("jax", lattice, 3),
    ],
)
def test_a_run_killed_many_times(tmp_path, backend, make, kills):
    check_killed_run(tmp_path, backend, make(tmp_path), epochs=3 * kills, kills=kills)
