"""Files that are whole or not there."""

import os

import pytest

from trellis_keras.files import remove_unfinished, replacing


def test_the_new_file_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "a.weights.h5"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.name.endswith(".weights.h5")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_a_failure_the_old_file_stays(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions as on POSIX")
def test_permissions_are_the_usual_ones(tmp_path):
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "ours"):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_a_killed_process_left_is_removed(tmp_path):
    writing = replacing(tmp_path / "a.txt")
    left = writing.__enter__()
    (tmp_path / "other.txt").touch()
    remove_unfinished(tmp_path)
    assert not left.exists()
    assert (tmp_path / "other.txt").exists()
