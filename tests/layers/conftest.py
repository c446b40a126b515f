"""Fixtures of the layers' tests."""

import pytest

from trellis_keras.kernels import cone


@pytest.fixture
def loops(monkeypatch):
    """Makes loops out of the few levels of a test, which would not be worth it."""
    monkeypatch.setattr(cone, "_block_cost", lambda *_: 0.2)
    cone.plan_levels.cache_clear()
    yield
    cone.plan_levels.cache_clear()
