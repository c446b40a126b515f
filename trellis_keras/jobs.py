"""Resumable jobs: when a process is killed, the next one continues its work in the same folder."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from keras_streams.files import sync_folder
from trellis_keras.files import make_writable, remove_unfinished

_LOCK = ".lock"


class Job:
    """Work in a folder that survives a kill: one process at a time, with the same settings.

    Args:
        folder: The job's folder.
        files: Names of the files and folders that the job writes there.
        has_progress: Function without arguments that returns whether the folder holds work from
            which the job resumes.

    Example:

    >>> import pathlib
    >>> rows = pathlib.Path("squares.csv.unfinished/rows")
    >>> with Job(rows.parent, ["rows"], rows.exists).open() as job:
    ...     _ = rows.write_text("1\\n4\\n9\\n")
    ...     job.finish(rows, "squares.csv")
    >>> pathlib.Path("squares.csv").exists(), rows.parent.exists()
    (True, False)
    """

    def __init__(
        self, folder: str | os.PathLike, files: Collection[str], has_progress: Callable[[], bool]
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.files = set(files)
        self.has_progress = has_progress

    @contextlib.contextmanager
    def open(self) -> Iterator["Job"]:
        """Creates and locks the folder, and removes files that a killed process was writing.

        If the block raises before there is progress, what it has written is removed, and the folder
        if it is new.

        Raises:
            ValueError: If the folder cannot be written to, is in use by another process, or
                contains a symbolic link, through which files elsewhere would change.
        """
        self._is_disposable = not self.folder.exists()
        make_writable(self.folder)
        try:
            with folder_lock(self.folder):
                check_no_links(self.folder)
                remove_unfinished(self.folder)
                earlier = set(os.listdir(self.folder))
                try:
                    yield self
                except BaseException:
                    if not self._may_have_progress():
                        self._remove(self.files - earlier)
                    raise
        finally:
            if self._is_disposable:
                with contextlib.suppress(OSError):  # it is not empty: there is progress
                    self.folder.rmdir()

    def finish(self, file: Path, output: str | os.PathLike) -> None:
        """Moves a finished file out of the folder, atomically, and removes the rest.

        Args:
            file: A file of the job, flushed to the disk.
            output: Its final path, on the same file system.
        """
        os.replace(file, output)
        sync_folder(Path(output).parent)
        self._remove(self.files)
        self._is_disposable = True

    def _may_have_progress(self):
        try:
            return self.has_progress()
        except (OSError, ValueError):  # unreadable, perhaps for the same reason
            return True

    def _remove(self, names):
        for path in (self.folder / name for name in names):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def different_settings(
    there: Mapping[str, Any], here: Mapping[str, Any], free: Collection[str] = ()
) -> str:
    """Describes the settings, except `free`, that have changed since a job started.

    Example:

    >>> different_settings({"depth": 3, "epochs": 5}, {"depth": 4, "epochs": 9}, free=["epochs"])
    'depth 3 there, 4 here'
    """
    return "; ".join(
        f"{name} {there.get(name)!r} there, {here.get(name)!r} here"
        for name in {**here, **there}
        if name not in free and there.get(name) != here.get(name)
    )


@contextlib.contextmanager
def folder_lock(folder: str | os.PathLike) -> Iterator[None]:
    """Locks a folder against other processes. A killed process releases its lock.

    Raises:
        ValueError: If another process holds the lock.
    """
    path = Path(folder) / _LOCK
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another process. Wait until it exits, or choose another folder."
        ) from None
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere `filelock` removes the file after the release
            with contextlib.suppress(OSError):  # a leftover file locks nothing
                path.unlink()
        lock.release()


def check_no_links(folder: str | os.PathLike) -> None:
    """Raises ValueError if a folder contains a link, through which other files would change."""
    for path in Path(folder).rglob("*"):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link. A job's folder may not contain links: replace it with "
                "its target."
            )
