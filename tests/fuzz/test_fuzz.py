"""A few damaged files for every loader. `python -m tests.fuzz.fuzz` tries thousands."""

import pathlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.fuzz_limits import Finding, attempt
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


def test_what_counts_as_a_finding(tmp_path):
    path = tmp_path / "some.bin"

    def load(error):
        def raising():
            raise error

        return attempt(raising, path)

    assert attempt(lambda: None, path)
    assert not load(ValueError(f"{path} is damaged"))
    for error in (ValueError("is damaged"), KeyError("some.bin"), struct.error("some.bin")):
        with pytest.raises(Finding):
            load(error)


def test_memory_is_bounded(tmp_path):
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("memory is only bounded on Linux")
    with pytest.raises(Finding, match="MemoryError"):
        attempt(lambda: bytearray(2**31), tmp_path)
