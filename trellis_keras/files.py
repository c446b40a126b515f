"""Atomic folders, and safe reading of untrusted files."""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm

from keras_streams.files import TEMPORARY, annotate_error, sync_folder

# An archive or a compressed file may unpack to this many bytes, or to this multiple of its own size
# if that is more.
MAX_UNPACKED = 2**28
_MAX_EXPANSION = 100
MAX_TEXT = 2**26  # bytes of a history or a vocabulary
_MAX_JSON = 2**23  # bytes of a recipe or a report: JSON takes up to 25 times as much memory

BYTE_ORDER_MARK = "\ufeff"
_BLOCK = 2**20  # bytes of a large file in memory at a time

_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder that replaces `path` when the block succeeds.

    If the block raises, or the new folder cannot be renamed, the old folder is kept. A kill never
    leaves a partial folder; a kill between the two renames leaves both complete folders beside
    `path`, and nothing at `path`. Of several processes that write the same folder, the last wins.
    """
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    old = temporary.with_name(f"{temporary.name}.old")
    with annotate_error(path, temporary):
        try:
            temporary.mkdir()
            yield temporary
            _replace_folder(path, temporary, old)
            sync_folder(path.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(path, new, old):
    """Renames `path`, if it exists, to `old`, and `new` to `path`."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            path.rename(old)
        try:
            new.rename(path)
            return
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # written by another process
                shutil.rmtree(old, ignore_errors=True)  # there may have been none
                continue
            with contextlib.suppress(FileNotFoundError):
                old.rename(path)
            raise


@contextlib.contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Adds `path` to an `OSError` in the block: that of a failing disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_file(path: str | os.PathLike) -> io.BufferedReader:
    """Opens a file for binary reading; raises `ValueError` if it is a pipe or a device.

    Every file that a user names, or that may come from a stranger, is opened here or checked with
    `Path.is_file` before: opening a named pipe would wait for its writer.
    """
    file = open(path, "rb", opener=_open_without_waiting)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file.")
    return file


def _open_without_waiting(path, flags):
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_text(path: str | os.PathLike, largest: int = MAX_TEXT) -> str:
    """Returns the text of a small UTF-8 file, with its newlines unchanged.

    Raises:
        ValueError: If it is not UTF-8, or has more than `largest` bytes. The message names it.
        OSError: If it cannot be read. The message names it.
    """
    with reading(path), open_file(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path} has more than {largest:,} bytes.")
    return decode(content, path)


def read_json(path: str | os.PathLike, meaning: str, largest: int = _MAX_JSON) -> dict[str, Any]:
    """Returns the JSON object in a small file; error messages name `meaning`, as "a report".

    Raises:
        ValueError: If the file contains anything else, or has more than `largest` bytes.
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
    """Converts TensorFlow's error for writing below a folder to an `OSError`, others to `None`.

    TensorFlow raises the same classes when memory runs out; only the message differs. It is not
    imported here.
    """
    found = re.search(
        rf"({re.escape(str(folder))}[^;\n]*); ([^\n\[]*\w)", getattr(error, "message", "")
    )
    return OSError(errno.EIO, found[2], found[1]) if found else None


def remove_unfinished(folder: str | os.PathLike) -> None:
    """Removes the temporary files that killed processes left in a folder."""
    for path in Path(folder).glob(f"{TEMPORARY}*"):
        if not path.is_dir():  # a folder may contain the old version
            path.unlink(missing_ok=True)


def make_writable(folder: str | os.PathLike) -> Path:
    """Creates a folder if needed and returns it, with `~` expanded."""
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"The folder {folder} cannot be written to: {error}") from error
    return folder


def check_can_write(path: Path) -> None:
    """Creates the folder of a file if needed; raises ValueError if the file cannot be written."""
    make_writable(path.parent)
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Pass the path of a file.")


def read_npz(path: str | os.PathLike | BinaryIO) -> dict[str, np.ndarray]:
    """Reads an untrusted `.npz` file: no pickle, and no array larger than its data.

    Args:
        path: A path or a binary file object.

    Raises:
        ValueError: If the content is not an `.npz` archive, is damaged, contains Python objects, or
            declares arrays larger than their data. The message does not name the file.
        OSError: If the file cannot be read.
    """
    if isinstance(path, (str, os.PathLike)):
        with open_file(path) as file:
            return read_npz(file)
    try:
        with open_archive(path) as archive:
            for member in archive.infolist():
                _check_npy(archive, member)
        path.seek(0)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy and zipfile raise many classes
        if _is_read_error(error):
            raise
        raise ValueError(f"Invalid .npz file: {error}") from error


@contextlib.contextmanager
def open_archive(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    """Yields the `ZipFile` of an untrusted binary file, unless it is a decompression bomb.

    Raises:
        ValueError: If the members would unpack to far more than the size of the file, the only
            reliable number: members may overlap and headers may be wrong.
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


def _is_read_error(error):
    # EINVAL is a seek to an offset before the file, which a damaged archive may request.
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


# User files


def existing(path: Path) -> Path | None:
    """Returns `path` or its compressed form `path.gz`, whichever is a file, or `None`."""
    candidates = (path, path.with_name(path.name + ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def own_file(path: str | os.PathLike, data_dir: str | os.PathLike | None) -> Path:
    """Returns the path of a user's file, which is also searched in `data_dir`."""
    places = [Path(path).expanduser()]
    if data_dir is not None:
        places.append(Path(data_dir).expanduser() / places[0].name)
    found = next(filter(None, map(existing, places)), None)
    if found is None:
        raise FileNotFoundError(
            f"There is no file {' or '.join(map(str, places))}. Check its name; if it has moved, "
            "pass its folder as `data_dir`."
        )
    return found


def read_file(path: Path) -> bytes:
    """Reads a whole file, decompressed if its name ends with `.gz`."""
    if path.suffix == ".gz":
        for _ in read_blocks(path):  # checks its size in little memory
            pass
    with open_file(path) as file:
        content = (gzip.open(file) if path.suffix == ".gz" else file).read()
    if not content:
        raise ValueError(f"{path} is empty")
    return content


def read_blocks(path: Path, description: str | None = None) -> Iterator[bytes]:
    """Yields a file in blocks, decompressed if its name ends with `.gz`.

    Args:
        path: The file.
        description: String, the title of the progress bar on a terminal. Defaults to `None`, no
            bar.
    """
    stored_size, size = path.stat().st_size, 0
    limit = max(MAX_UNPACKED, _MAX_EXPANSION * stored_size)
    hidden = True if description is None else None  # None: on a terminal only
    bar = {"total": stored_size, "desc": description, "disable": hidden}
    with open_file(path) as stored, tqdm.wrapattr(stored, "read", **bar) as file:
        content = gzip.open(file) if path.suffix == ".gz" else file
        try:
            while block := content.read(_BLOCK):
                size += len(block)
                if content is not file and size > limit:
                    raise ValueError(
                        f"{path} would unpack to more than {limit:,} bytes. If you trust "
                        "it, unpack it first"
                    )
                yield block
        except EOFError as error:
            raise ValueError(f"{path} is truncated: the compressed data end early") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a valid gzip file: {error}") from error


def checksum(contents: Iterable[Any]) -> str:
    """Returns the hexadecimal SHA-256 of bytes or contiguous arrays, one after the other."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def file_checksum(path: str | os.PathLike) -> str:
    """Returns the `checksum` of a file as it is stored."""
    with reading(path), open_file(path) as file:
        return checksum(iter(lambda: file.read(_BLOCK), b""))


def decode(content: bytes, path: Any, hint: str = "") -> str:
    """Decodes UTF-8. An error names the file `path` and ends with `hint`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = (
            f"{path} is not UTF-8 text: the byte {content[error.start]:#04x} at offset "
            f"{error.start} cannot be decoded"
        )
        raise ValueError(f"{message}. {hint}" if hint else message) from error
