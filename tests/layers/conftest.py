"""Fixtures of the layers' tests."""

import pytest

from trellis_keras.layers import depth_loop


@pytest.fixture
def loops(monkeypatch):
    """Makes loops out of the few levels of a test, which would not be worth it."""
    monkeypatch.setattr(depth_loop, "_block_cost", lambda *_: 0.2)
    depth_loop._plan.cache_clear()
    yield
    depth_loop._plan.cache_clear()
