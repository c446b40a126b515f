"""A few damaged files for every loader. `python -m tests.fuzz.fuzz` tries thousands."""

import pathlib

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.fuzz_limits import attempt
from tests.fuzz.fuzz_targets import CANARY, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_accepted_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with TARGETS[name](tmp_path) as target:
        if target.path.exists():
            assert attempt(target.load, target.path), "it is not damaged yet"

        @settings(
            max_examples=10 if name.startswith("keras") else 30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def run(content):
            target.put(content)
            attempt(target.load, target.path)

        run()
    assert not pathlib.Path(CANARY).exists()
