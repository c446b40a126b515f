"""Atomic writes, and the templates of what is written."""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

TEMPORARY = ".writing-"
# Only writing runs into these; the system reports them without a file name.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_output(
    path: str | os.PathLike,
    inputs: Iterable[str | os.PathLike] = (),
    overwrite: bool = False,
    makes_folders: bool = False,
) -> Path:
    """Returns a path with `~` expanded that may be written, before the work starts.

    Args:
        path: The file. A symbolic link is replaced, not what it points to.
        inputs: Input files, which it must not replace.
        overwrite: Boolean, whether it may replace an existing file. Defaults to `False`.
        makes_folders: Boolean, whether the writer makes missing folders. Defaults to `False`.

    Raises:
        ValueError: If it is one of the inputs, exists without `overwrite`, or is not a regular
            file.
        FileNotFoundError: If its folder does not exist.
    """
    path = Path(path).expanduser()
    folder = path.parent
    if makes_folders:
        folder = next(folder for folder in path.parents if folder.exists())
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} for {path.name}.")
    for file in map(Path, inputs):
        file = file.expanduser()
        if path.exists() and file.exists() and path.samefile(file):
            raise ValueError(f"{path} is an input file. Choose another name.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file. Choose another name.")
    if path.exists() and not overwrite:
        raise ValueError(
            f"{path} already exists. Choose another name, or replace it with --overwrite "
            "(`overwrite=True`)."
        )
    return path


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` when the block succeeds.

    Readers see the old file or the new one, never a partial one. If the block raises, the old file
    is kept. The folder must exist. The suffix is the same, because some writers choose their format
    by it.
    """
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    with annotate_error(path, temporary):
        try:
            temporary.touch(exist_ok=False)  # with the default permissions, unlike `tempfile`
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_files(contents: Mapping[Path, bytes], mode: int | None = None) -> None:
    """Writes files that belong together: if one cannot be written, all old ones are kept.

    They are renamed one by one at the end, so a power failure there may leave some of the old ones.

    Args:
        contents: The content of each file. Missing folders are made.
        mode: Integer, permissions of the files. Defaults to `None`, those of a new file.

    Raises:
        OSError: If a file cannot be written. The message names it.
    """
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(stack.enter_context(atomic_write(path)), "wb") as file:
                if mode is not None:
                    os.chmod(file.name, mode)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # before any of them is renamed


@contextlib.contextmanager
def annotate_error(path: str | os.PathLike, temporary: str | os.PathLike) -> Iterator[None]:
    """Names `path` in an `OSError` about one of its temporary files, or about a full disk.

    `temporary` is the prefix of the paths under which it is written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            concerns_path = error.errno in _NO_SPACE
        else:
            concerns_path = str(error.filename).startswith(str(temporary))
        if not concerns_path:
            raise
        raise OSError(f"{path} could not be written: {error.strerror}") from error


def filled_template(name: str, values: Mapping[str, str]) -> str:
    """Returns a file beside this one, with values in place of words such as `@NAME@`."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda match: values[match[1]], text)


def sync_folder(folder: str | os.PathLike) -> None:
    """Flushes a folder's entries to disk, so that a rename in it survives a power failure."""
    if os.name == "posix":  # other systems cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
