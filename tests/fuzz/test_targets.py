"""Every loader that is fuzzed takes a sound file, and damaged ones without another error."""

import pathlib
import random
import sys

import pytest

from tests.fuzz.targets import CANARY, TARGETS


@pytest.mark.skipif(sys.platform != "linux", reason="memory is only bounded on Linux")
@pytest.mark.parametrize("name", TARGETS)
def test_a_sound_file_and_some_damaged_ones(name, tmp_path, monkeypatch):
    from tests.fuzz.__main__ import attempt

    monkeypatch.chdir(tmp_path)
    generator, found = random.Random(0), []
    with TARGETS[name](tmp_path) as target:
        if target.path.exists():  # the sound file
            found.append(attempt(target))
            assert found == [True]
        while len(found) < 4 or (True not in found and len(found) < 40):
            target.put(target.inputs(generator))
            found.append(attempt(target))
    errors = [what for what in found if not isinstance(what, bool)]
    assert not errors
    assert any(found)
    assert not pathlib.Path(CANARY).exists()
