"""File systems that are full or read-only. Tests that use them are skipped without the rights."""

import contextlib
import subprocess

import pytest

NO_SPACE = "could not be written: No space left on device"


@contextlib.contextmanager
def mounted(folder, *arguments):
    """Runs `mount` with these arguments on a new folder."""
    folder.mkdir()
    try:
        done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no command `mount`")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def small_disk(folder, size):
    """A new folder that is a file system of the given size, such as "64k"."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


@contextlib.contextmanager
def read_only(source, view):
    """A new folder `view` of the same files, where not even root can write."""
    with mounted(view, "--bind", source):
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        yield view


def fill(folder, leave=0):
    """Fills the disk up to this number of bytes."""
    with open(folder / "filler", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - leave)
