"""Published weights on other test sets of a generated task."""

import pytest

from tools import fresh_test_sets
from trellis_keras.zoo.results import all_runs


def test_the_seed_of_the_data_makes_the_test_set():
    (run,) = (run for run in all_runs() if run.title == "tcn_adding (T=200)")
    own, other = fresh_test_sets.evaluate(run, seeds=(0, 1))
    assert own == pytest.approx(run.results["test"], rel=1e-3)
    assert other != pytest.approx(own, rel=1e-3)
