"""Writing files that never look whole while they are not, one process at a time."""

import contextlib
import errno
import os
import pathlib
import secrets

from filelock import FileLock, Timeout

_ASIDE = ".writing-"
_CLAIM = ".lock"
# What only writing meets. The system names no file there.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def replacing(path):
    """Yields a temporary path beside `path` that takes its place when the block ends well.

    Args:
        path: The file to write. Its folder must exist.

    Raises:
        OSError: If it cannot be written; `path` is named.

    Example:

    >>> with replacing("notes.txt") as temporary:
    ...     _ = temporary.write_text("whole or not at all")
    """
    path = pathlib.Path(path)
    # The name's end stays: some writers choose their format by it.
    temporary = path.with_name(f"{_ASIDE}{secrets.token_hex(4)}-{path.name}")
    with naming(path, temporary):
        try:
            temporary.touch(exist_ok=False)  # with the user's usual permissions, unlike `tempfile`
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path, temporary):
    """Names `path` in errors from writing it, where the system names a temporary file or none.

    Args:
        path: What is written.
        temporary: How the paths begin under which it is written.

    Example:

    >>> with naming("notes.txt", ".writing-notes.txt"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
        ...
    OSError: notes.txt could not be written: No space left on device
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            ours = error.errno in _NO_ROOM
        else:
            ours = str(error.filename).startswith(str(temporary))
        if not ours:
            raise
        raise OSError(f"{path} could not be written: {error.strerror}") from error


def remove_unfinished(folder):
    """Removes what killed processes left of `replacing` in a folder."""
    for path in pathlib.Path(folder).glob(f"{_ASIDE}*"):
        path.unlink(missing_ok=True)


def sync_folder(folder):
    """Has the names in a folder written to the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def claimed(folder):
    """Keeps other processes that do the same out of a folder; a killed one's claim ends with it.

    Args:
        folder: A folder that can be written to.

    Raises:
        ValueError: Another process has it.

    Example:

    >>> with claimed("."), replacing("notes.txt") as temporary:
    ...     _ = temporary.write_text("nobody else writes here")
    """
    path = pathlib.Path(folder) / _CLAIM
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{folder} is in use: another process{_holder(path)} writes there. Wait for its end, "
            "or choose another folder."
        ) from None
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere only after the release, which `filelock` does itself
            with contextlib.suppress(OSError):  # a file left behind claims nothing
                path.unlink()
        lock.release()


def _holder(path):
    """Returns the number of the process that holds a lock, in brackets, where Linux tells it."""
    try:
        inode = path.stat().st_ino
        table = pathlib.Path("/proc/locks").read_text()
    except OSError:  # no such table here, or not for us, or released by now
        return ""
    for line in table.splitlines():
        _, kind, _, _, process, file, *_ = line.split()
        if kind == "FLOCK" and file.endswith(f":{inode}"):
            return f" ({process})"
    return ""
