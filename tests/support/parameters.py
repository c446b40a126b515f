"""Parameters of tests."""

import pytest


def slow_but(names, *quick):
    """Returns the names as parameters, all but the quick ones marked slow."""
    names = list(names)
    assert set(quick) <= set(names), f"{quick} are not all among {names}"
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in names]
