"""Atomic writes, and archives that declare more than they hold."""

import contextlib
import errno
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from keras_streams.files import atomic_write, write_files
from tests.support.disks import NO_SPACE, fill, read_only, small_disk
from trellis_keras import files
from trellis_keras.files import atomic_folder, open_archive, read_npz, remove_unfinished
from trellis_keras.jobs import folder_lock

# Atomic writes


def test_the_new_file_replaces_the_old_one(tmp_path):
    path = tmp_path / "a.weights.h5"
    path.write_text("old")
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path and temporary.name.endswith(".weights.h5")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stays_after_a_failure(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    path, calls = tmp_path / "a.txt", []
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(("sync", path.exists())))
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    expected = [("sync", False), ("sync", True)]
    assert calls == (expected if os.name == "posix" else expected[:1])


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    left = atomic_write(tmp_path / "a.txt").__enter__()
    (tmp_path / "other.txt").touch()
    remove_unfinished(tmp_path)
    assert not left.exists()
    assert (tmp_path / "other.txt").exists()


def test_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as folder:
        with atomic_write(folder / "a.txt") as temporary:
            temporary.write_text("old")
        with (
            pytest.raises(OSError, match=f"a.txt {NO_SPACE}$"),
            atomic_write(folder / "a.txt") as t,
        ):
            t.write_bytes(bytes(100_000))
        assert [path.name for path in folder.iterdir()] == ["a.txt"]
        assert (folder / "a.txt").read_text() == "old"
        fill(folder)
        with pytest.raises(OSError, match=NO_SPACE), folder_lock(folder):
            with atomic_write(folder / "b.txt") as temporary:
                temporary.write_text("new")


def test_files_that_belong_together_are_all_replaced_or_none(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as folder:
        header, code = folder / "model.h", folder / "model.c"
        write_files({header: b"old", code: b"old"})
        fill(folder, leave=8192)
        with pytest.raises(OSError, match=f"model.c {NO_SPACE}$"):
            write_files({header: b"new", code: bytes(10_000)})
        assert header.read_text() == code.read_text() == "old"
        assert {path.name for path in folder.iterdir()} == {"model.h", "model.c", "filler"}
        write_files({header: b"new", code: b"new"})
        assert header.read_text() == code.read_text() == "new"


def write_folder(path, text):
    with atomic_folder(path) as folder:
        (folder / "a.txt").write_text(text)


def test_a_folder_that_cannot_be_renamed_keeps_the_old_one(tmp_path, monkeypatch):
    write_folder(tmp_path / "a", "old")
    rename = Path.rename

    def fail(self, target):
        if (self / "a.txt").read_text() == "new":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="a could not be written: Input/output error"):
        write_folder(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "a.txt").read_text() == "old"


def test_the_last_of_several_writers_of_a_folder_wins(tmp_path, monkeypatch):
    write_folder(tmp_path / "a", "old")
    rename, others = Path.rename, ["second", "first"]

    def interfere(self, target):
        """Writes the folder between the two renames of another writer."""
        if others and (self / "a.txt").read_text() == "new":
            monkeypatch.undo()
            write_folder(tmp_path / "a", others.pop())
            monkeypatch.setattr(Path, "rename", interfere)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interfere)
    write_folder(tmp_path / "a", "new")
    assert not others and [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "a.txt").read_text() == "new"


def test_a_read_only_folder_names_the_file(tmp_path):
    (tmp_path / "source").mkdir()
    with read_only(tmp_path / "source", tmp_path / "view") as folder:
        with pytest.raises(OSError, match="a.txt could not be written: Read-only file system$"):
            with atomic_write(folder / "a.txt"):
                pass


# Archives


def test_arrays_of_all_kinds(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.array(3), "c": np.zeros((0, 2), "int8")}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        for file in (tmp_path / "a.npz", io.BytesIO((tmp_path / "a.npz").read_bytes())):
            read = read_npz(file)
            assert list(read) == list(arrays)
            for name, array in arrays.items():
                assert read[name].dtype == array.dtype
                np.testing.assert_array_equal(read[name], array)


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file


def declaring(shape, content=b"", descr="<f8"):
    """An array's file with this header and content."""
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (declaring((10**12,)), "'a.npy' declares"),
        (declaring((2,), bytes(17)), "declares"),
        (declaring((1,), bytes(8), "|O"), "declares"),
        (declaring((1,)).replace(b"\x93NUMPY\x01", b"\x93NUMPY\x03"), "unknown format"),
        (declaring((1,)).replace(b"{", b"("), "Invalid .npz file"),
        (b"no array", "Invalid .npz file"),
    ],
)
def test_headers_are_checked_before_memory_is_allocated(member, message):
    with pytest.raises(ValueError, match=message):
        read_npz(zipped(("a.npy", member)))


def test_an_archive_that_would_unpack_to_far_more_than_its_size(monkeypatch):
    file = zipped(*((f"{i}.npy", declaring((1000,), bytes(8000))) for i in range(10)))
    size = file.getbuffer().nbytes
    for least, expansion, accepted in (
        (81_279, 81_279 // size, False),
        (81_280, 1, True),
        (0, 81_280 // size + 1, True),
    ):
        monkeypatch.setattr(files, "MAX_UNPACKED", least)
        monkeypatch.setattr(files, "_MAX_EXPANSION", expansion)
        with contextlib.nullcontext() if accepted else pytest.raises(ValueError, match="81,280"):
            assert len(read_npz(file)) == 10


def test_overlapping_members_count_each_time(monkeypatch):
    file = zipped(("a.npy", declaring((1000,), bytes(8000))))
    with zipfile.ZipFile(file, "a") as archive:
        archive.filelist *= 100
        archive._didModify = True  # writes the list of members again
    monkeypatch.setattr(files, "MAX_UNPACKED", 80_000)
    with pytest.raises(ValueError, match="would unpack to 812,800"):
        read_npz(file)


def test_a_member_declared_larger_than_the_file():
    file = zipped(("a", bytes(100)))
    with zipfile.ZipFile(file, "a") as archive:
        archive.getinfo("a").compress_size = 2**31
        archive._didModify = True
    with pytest.raises(ValueError, match="declared larger than the file"), open_archive(file):
        pass
