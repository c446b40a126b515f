"""Checkpoints that are half written or damaged do no harm."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import assert_same, fit, make_model, truncate, two_epochs, values
from tests.support.small_runs import checkpoint_state as state
from trellis_keras.training import Checkpoint, checkpoint_files, checkpoint_state, latest


class Crash(BaseException):
    """Stands for the end of the process: nothing is cleaned up after it."""


def crash_at(monkeypatch, number):
    """Ends the "process" at the number-th operation on files, and returns a reset function."""
    counter = itertools.count()
    dead = False

    def wrap(function):
        def wrapped(*args, **kwargs):
            nonlocal dead
            dead = dead or next(counter) >= number
            if dead:
                raise Crash
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "fsync", wrap(os.fsync))
    monkeypatch.setattr(Path, "rename", wrap(Path.rename))
    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", wrap(checkpoint_files.shutil.rmtree))
    monkeypatch.setattr(
        checkpoint_files.tempfile, "mkdtemp", wrap(checkpoint_files.tempfile.mkdtemp)
    )


def test_a_crash_at_any_operation_leaves_a_whole_checkpoint(tmp_path):
    def write(epoch):
        checkpoint_files.write(tmp_path, epoch, {"x": np.full(3, epoch)}, state(epoch))
        checkpoint_files.remove_older(tmp_path, epoch, keep=2)

    write(1)
    write(2)
    crashes = 0
    for number in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                write(3)
                break
            except Crash:
                crashes += 1
        found, arrays = checkpoint_state.read(latest(tmp_path))
        assert found["epoch"] in (2, 3) and (arrays["x"] == found["epoch"]).all()
    assert crashes >= 8
    checkpoint_files.remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch-0002", "epoch-0003"]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("file", ["variables.npz", "state.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_costs_an_epoch(tmp_path, file, damage):
    arrays = {"model.00000": np.arange(100.0)}
    for epoch in (1, 2):
        checkpoint_files.write(tmp_path, epoch, arrays, {"epoch": epoch, "logs": {"loss": 0.5}})
    damage(tmp_path / "epoch-0002" / file)
    with pytest.warns(UserWarning, match="epoch-0002 is damaged"):
        assert latest(tmp_path) == tmp_path / "epoch-0001"


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    """Whoever is told of damage removes the folder."""
    checkpoint_files.write(tmp_path, 1, {"a": np.zeros(2)}, {})

    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint_files, "_sha256", fail)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint_files.latest(tmp_path)


def test_training_falls_back_and_replaces_the_damaged_one(tmp_path):
    expected = values(two_epochs(tmp_path))
    truncate(tmp_path / "epoch-0002" / "variables.npz")
    with pytest.warns(UserWarning, match="epoch-0002"):
        assert_same(values(two_epochs(tmp_path)), expected)
    assert checkpoint_files.find_damage(tmp_path / "epoch-0002") is None


def test_no_whole_checkpoint_is_an_error_that_names_them(tmp_path):
    two_epochs(tmp_path)
    for folder in tmp_path.iterdir():
        truncate(folder / "variables.npz")
    model = make_model()
    before = values(model)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="epoch-0002.*epoch-0001.*copy"):
        fit(model, 3, Checkpoint(tmp_path))
    assert_same(values(model)[: len(before)], before)


def test_unfinished_folders_are_ignored_and_removed(tmp_path):
    unfinished = tmp_path / ".unfinished-abc"
    unfinished.mkdir()
    (unfinished / "variables.npz").write_bytes(b"half")
    assert latest(tmp_path) is None
    two_epochs(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch-0001", "epoch-0002"]


def test_unwritable_directory_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Checkpoint(tmp_path / "file" / "checkpoints")
