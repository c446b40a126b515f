"""Atomic writes, folder locks, and files that cannot exhaust the memory."""

import contextlib
import errno
import gzip
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

_TEMPORARY = ".writing-"
_LOCK = ".lock"
# Only writing runs into these; the system reports them without a file name.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# An archive or a compressed file may unpack to this many bytes, or to this multiple of its own size
# if that is more.
MAX_UNPACKED = 2**28
_MAX_EXPANSION = 100
_MAX_TEXT = 2**26  # bytes of a history or a vocabulary
_MAX_JSON = 2**23  # bytes of a recipe or a report: JSON takes up to 25 times as much memory

BYTE_ORDER_MARK = "\ufeff"
_BLOCK = 2**20  # bytes of a large file in memory at a time

_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check_output(
    path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = (), overwrite: bool = False
) -> Path:
    """Check that a file may be written, before the work of making it starts.

    Args:
        path: The file. Symbolic links are followed.
        inputs: Files that are read, which it must not replace.
        overwrite: Boolean, whether it may replace another file. Defaults to `False`.

    Returns:
        The path, with `~` expanded.

    Raises:
        ValueError: If it is one of the inputs, exists and is not to be overwritten, or is not a
            regular file.
        FileNotFoundError: If its folder does not exist.
    """
    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for {path.name}.")
    for file in map(Path, inputs):
        file = file.expanduser()
        if path.exists() and file.exists() and path.samefile(file):
            raise ValueError(f"{path} is the file that is read. Choose another name.")
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
    """Yield a temporary path that replaces `path` when the block succeeds.

    Readers see the old file or the new one, never a part. If the block raises, the old file stays.

    Args:
        path: The file to write. Its folder must exist.

    Yields:
        A path in the same folder. Its name ends as `path` does, because some writers choose their
        format by the suffix.

    Raises:
        OSError: If the file cannot be written. The message names `path`.

    Example:

    >>> with atomic_write("notes.txt") as temporary:
    ...     _ = temporary.write_text("all or nothing")
    """
    path = Path(path)
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(4)}-{path.name}")
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


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the block succeeds.

    If the block raises, the old folder stays. A kill never leaves a part of the new one there; one
    between the two renames leaves both folders whole beside `path`, and nothing there.

    Args:
        path: The folder to write, which may exist. Its parent must exist.

    Yields:
        A new folder beside it.

    Raises:
        OSError: If the folder cannot be written. The message names `path`.
    """
    path = Path(path)
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    old = temporary.with_name(f"{temporary.name}.old")
    with annotate_error(path, temporary):
        try:
            temporary.mkdir()
            yield temporary
            if path.exists():
                path.rename(old)
            temporary.rename(path)
            sync_folder(path.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def annotate_error(path: str | os.PathLike, temporary: str | os.PathLike) -> Iterator[None]:
    """Name `path` in an `OSError` about one of its temporary files, or about a full disk.

    Args:
        path: The file or folder being written.
        temporary: The prefix of the paths under which it is written.

    Example:

    >>> with annotate_error("notes.txt", ".writing-notes.txt"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
        ...
    OSError: notes.txt could not be written: No space left on device
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


@contextlib.contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Name `path` in an `OSError` of reading it, which names no file where the disk fails."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_text(path: str | os.PathLike, largest: int = _MAX_TEXT) -> str:
    """Return the text of a small file in UTF-8, line ends as they are.

    Raises:
        ValueError: If it is not UTF-8, or has more than `largest` bytes. The message names it.
        OSError: If it cannot be read. The message names it.
    """
    with reading(path), open(path, "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path} has more than {largest:,} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error


def read_json(path: str | os.PathLike, meaning: str, largest: int = _MAX_JSON) -> dict[str, Any]:
    """Return the JSON object in a small file.

    Args:
        path: The file.
        meaning: What the object is, such as "a report", for the messages.
        largest: Positive integer, how many bytes the file may have. Defaults to 8 MiB.

    Raises:
        ValueError: If the file holds something else.
        OSError: If it cannot be read.
    """
    text = read_text(path, largest)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {meaning}, or damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not {meaning}. Received: a JSON {type(found).__name__}")
    return found


def write_error(error: Exception, folder: str | os.PathLike) -> OSError | None:
    """Return TensorFlow's error of writing below a folder as an `OSError`, any other as `None`.

    TensorFlow raises the same classes of error when memory runs out; the message tells them apart.
    """
    found = re.search(
        rf"({re.escape(str(folder))}[^;\n]*); ([^\n\[]*\w)", getattr(error, "message", "")
    )
    return OSError(errno.EIO, found[2], found[1]) if found else None


def remove_unfinished(folder: str | os.PathLike) -> None:
    """Remove the temporary files that killed processes left in a folder."""
    for path in Path(folder).glob(f"{_TEMPORARY}*"):
        if not path.is_dir():  # a folder may hold what was to be replaced
            path.unlink(missing_ok=True)


def sync_folder(folder: str | os.PathLike) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power failure."""
    if os.name == "posix":  # other systems cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def folder_lock(folder: str | os.PathLike) -> Iterator[None]:
    """Lock a folder against other processes. The lock of a killed process ends with it.

    Args:
        folder: A writable folder.

    Raises:
        ValueError: If another process holds the lock.

    Example:

    >>> with folder_lock("."), atomic_write("notes.txt") as temporary:
    ...     _ = temporary.write_text("no other process writes here")
    """
    path = Path(folder) / _LOCK
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another process. Wait until it ends, or choose another folder."
        ) from None
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere `filelock` removes the file after the release
            with contextlib.suppress(OSError):  # a leftover file locks nothing
                path.unlink()
        lock.release()


def check_no_links(folder: str | os.PathLike) -> None:
    """Check that a folder holds no symbolic link, at any depth.

    What is written through a link, or removed through it, lies elsewhere.

    Raises:
        ValueError: If there is a link.
    """
    for path in Path(folder).rglob("*"):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link. A run's folder may not contain links: replace it by "
                "what it leads to."
            )


def make_writable(folder: str | os.PathLike) -> Path:
    """Create a folder if needed and check that files can be written there.

    Returns:
        The folder, with `~` expanded.

    Raises:
        ValueError: If it cannot be created or written to.
    """
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be written to: {error}") from error
    return folder


def read_npz(
    path: str | os.PathLike | BinaryIO, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
    """Read an untrusted `.npz` file: no pickle, and no array larger than its data.

    Args:
        path: A path or a binary file object.
        names: The arrays to read. Defaults to `None`: all.

    Returns:
        The arrays by name.

    Raises:
        ValueError: If the content is not an `.npz` archive, is damaged, holds Python objects, or
            declares arrays larger than their data. The message does not name the file.
        OSError: If the file cannot be read.
    """
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as file:
            return read_npz(file, names)
    try:
        with open_archive(path) as archive:
            for member in archive.infolist():
                _check_npy(archive, member)
        path.seek(0)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in (arrays.files if names is None else names)}
    except Exception as error:  # NumPy and zipfile raise many kinds
        if _is_read_error(error):
            raise
        raise ValueError(f"Invalid .npz file: {error}") from error


@contextlib.contextmanager
def open_archive(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    """Yield the `ZipFile` of an untrusted binary file, unless it is a decompression bomb.

    Raises:
        ValueError: If the members would unpack to far more than the size of the file. That size
            is the only reliable number: members may overlap and headers may lie.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        # Python allocates the declared size of a member before it reads.
        if any(member.compress_size > size for member in members):
            raise ValueError("a member is declared larger than the file")
        if unpacked > max(MAX_UNPACKED, _MAX_EXPANSION * size):
            raise ValueError(f"{size:,} bytes would unpack to {unpacked:,}")
        yield archive


def check_archive(path: str | os.PathLike) -> None:
    """Compare the contents of a zip file with its checksums, in little memory.

    Raises:
        ValueError: If the file is damaged. The message does not name it.
        OSError: If the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            with open_archive(file) as archive:
                for member in archive.infolist():
                    with archive.open(member) as content:
                        # The last read compares the CRC-32.
                        size = sum(map(len, iter(lambda: content.read(2**20), b"")))  # noqa: B023
                    if size != member.file_size:
                        raise ValueError(f"{member.filename!r} has {size:,} bytes")
        except Exception as error:  # zipfile raises many kinds
            if _is_read_error(error):
                raise
            raise ValueError(str(error)) from error


def _is_read_error(error):
    # EINVAL is a seek to an offset before the file, which a damaged archive asks for.
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def _check_npy(archive, member):
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_HEADERS:
            raise ValueError(f"{member.filename!r} has the unknown format {version}")
        shape, _, dtype = _NPY_HEADERS[version](file)
        declared = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or declared != member.file_size:
        raise ValueError(
            f"{member.filename!r} declares shape {shape} and dtype {dtype}, but has "
            f"{member.file_size:,} bytes"
        )


# Files of the user's own


def existing(path: Path) -> Path | None:
    """Return `path` or its compressed form `path.gz`, whichever is a file, or `None`."""
    candidates = (path, path.with_name(path.name + ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def own_file(path: str | os.PathLike, data_dir: str | os.PathLike | None) -> Path:
    """Return the path of a user's file, which may also lie in `data_dir`.

    Raises:
        FileNotFoundError: If there is none.
    """
    places = [Path(path).expanduser()]
    if data_dir is not None:
        places.append(Path(data_dir).expanduser() / places[0].name)
    found = next(filter(None, map(existing, places)), None)
    if found is None:
        raise FileNotFoundError(
            f"There is no file {' or '.join(map(str, places))}. If it has moved, pass its folder "
            "as `data_dir` (--data-dir)."
        )
    return found


def read_file(path: Path) -> bytes:
    """Read a whole file, decompressed if its name ends with `.gz`.

    Raises:
        ValueError: If it is empty, damaged, or unpacks to far more than its size.
    """
    if path.suffix == ".gz":
        check_gzip(path)
        with gzip.open(path) as file:
            content = file.read()
    else:
        content = path.read_bytes()
    if not content:
        raise ValueError(f"{path} is empty")
    return content


def read_blocks(path: Path, description: str) -> Iterator[bytes]:
    """Yield a file in blocks, decompressed if its name ends with `.gz`.

    Args:
        path: The file.
        description: String, the title of the progress bar that terminals show.

    Raises:
        ValueError: If it is damaged.
    """
    bar = {"total": path.stat().st_size, "desc": description, "disable": None}
    with (
        open(path, "rb") as stored,
        tqdm.wrapattr(stored, "read", **bar) as file,
        _refuse_damage(path),
    ):
        content = gzip.open(file) if path.suffix == ".gz" else file
        while block := content.read(_BLOCK):
            yield block


def check_gzip(path: Path) -> None:
    """Unpack a gzip file in little memory, to check that it is sound.

    Raises:
        ValueError: If it is damaged, or unpacks to far more than its size.
    """
    limit, size = max(MAX_UNPACKED, _MAX_EXPANSION * path.stat().st_size), 0
    with _refuse_damage(path), gzip.open(path) as file:
        while block := file.read(_BLOCK):
            size += len(block)
            if size > limit:
                raise ValueError(
                    f"{path} would unpack to more than {limit:,} bytes, {_MAX_EXPANSION} times its "
                    "size. If it is sound, unpack it first"
                )


@contextlib.contextmanager
def _refuse_damage(path):
    try:
        yield
    except EOFError as error:
        raise ValueError(f"{path} is truncated: the compressed data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a sound gzip file: {error}") from error


def decode(content: bytes, path: Any, hint: str = "", start: int = 0) -> str:
    """Decode UTF-8.

    Args:
        content: Bytes.
        path: The file that they are from, for the error message.
        hint: String that ends the error message.
        start: Integer, where the content begins in the file.

    Raises:
        ValueError: If it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = (
            f"{path} is not UTF-8 text: the byte {content[error.start]:#04x} at offset "
            f"{start + error.start} cannot be decoded"
        )
        raise ValueError(f"{message}. {hint}" if hint else message) from error
