"""Jobs: what a failed start leaves, what a kill leaves, and one process at a time."""

import multiprocessing
import time

import pytest

from trellis_keras.jobs import Job, different_settings, folder_lock


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "job"


def rows_job(folder):
    return Job(folder, ["rows", "logs"], (folder / "rows").exists)


def test_failed_start_leaves_what_was_there(folder):
    for files in ([], ["notes.txt"]):
        if files:
            folder.mkdir()
            (folder / "notes.txt").write_text("mine")
        with pytest.raises(KeyError), rows_job(folder).open():
            (folder / "logs").mkdir()
            raise KeyError
        assert folder.exists() == bool(files)
        assert sorted(path.name for path in folder.glob("*")) == files


def test_failure_keeps_progress(folder):
    with pytest.raises(KeyboardInterrupt), rows_job(folder).open():
        (folder / "rows").write_text("1")
        raise KeyboardInterrupt
    (folder / ".writing-0123abcd-rows").write_text("half")
    with rows_job(folder).open():
        assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["rows"]


def test_finished_file_replaces_the_output_and_the_folder_goes(folder, tmp_path):
    (tmp_path / "output").write_text("old")
    for rest in (False, True):
        with rows_job(folder).open() as job:
            (folder / "rows").write_text("new")
            (folder / "logs").mkdir()
            job.finish(folder / "rows", tmp_path / "output")
            if rest:
                (folder / "notes.txt").write_text("mine")
        assert (tmp_path / "output").read_text() == "new"
        assert folder.exists() == rest


def test_different_settings_are_named():
    there, here = {"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": None, "e": 5}
    expected = "c 3 there, 4 here; e None there, 5 here; a 1 there, None here"
    assert different_settings(there, here) == expected
    assert different_settings(there, here, free="ace") == ""


def hold_lock(folder, locked):
    with folder_lock(folder):
        locked.set()
        time.sleep(600)


def test_a_folder_is_locked_until_its_process_is_killed(tmp_path):
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=hold_lock, args=(tmp_path, locked := fork.Event()))
    process.start()
    try:
        assert locked.wait(60)
        with pytest.raises(ValueError, match=f"^{tmp_path} is in use by another process"):
            with folder_lock(tmp_path):
                pass
    finally:
        process.kill()
        process.join()
    with folder_lock(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_failure_keeps_progress_that_cannot_be_read(folder):
    def fail():
        raise OSError("Input/output error")

    with pytest.raises(KeyError), Job(folder, ["rows"], fail).open():
        (folder / "rows").write_text("1")
        raise KeyError
    assert (folder / "rows").exists()


def test_links_are_refused(folder, tmp_path):
    folder.mkdir()
    (folder / "rows").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="job/rows is a symbolic link"), rows_job(folder).open():
        pass


def test_an_error_releases_the_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), folder_lock(tmp_path):
            raise KeyError
    assert not list(tmp_path.iterdir())
