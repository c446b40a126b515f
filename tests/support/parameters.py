"""Parameters of tests."""

import pytest

SLOW = pytest.mark.slow
SLOW_ON_JAX = pytest.mark.both_backends(slow=True)


def slow_but(names, *quick, mark=SLOW):
    """Returns the names as parameters, all but the quick ones with a mark that says slow."""
    names = list(names)
    assert set(quick) <= set(names), f"{quick} are not all among {names}"
    return [pytest.param(n, marks=[] if n in quick else [mark]) for n in names]
