"""Arrays from `.npz` files of any origin: no pickle, and no more memory than they hold."""

import contextlib
import math
import os
import zipfile

import numpy as np

# What an archive may unpack to: so much, or if it is large itself so many times its size.
_UNPACKED = 2**28  # bytes
_EXPANSION = 100

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npz(path):
    """Returns the arrays of a `.npz` file as a dict.

    Args:
        path: The file, or its content as a binary file object.

    Raises:
        ValueError: It is no such file, is damaged, has arrays of Python objects, or claims arrays
            that are larger than it is. The message says what is wrong, not with which file.
        OSError: It cannot be read.
    """
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as file:
            return read_npz(file)
    try:
        with opened_archive(path) as archive:
            for member in archive.infolist():
                _check_array(archive, member)
        path.seek(0)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy and zipfile have one of their own for each kind of damage
        raise ValueError(f"it is no sound .npz file: {error}") from error


@contextlib.contextmanager
def opened_archive(file):
    """Yields the `zipfile.ZipFile` of a binary file, unless it would unpack to far more than it is.

    Its members may lie over each other: only the whole file's size is beyond doubt.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
        # Python sets aside what a member claims to be, before it reads.
        if any(member.compress_size > size for member in archive.infolist()):
            raise ValueError("it claims to have more than it is")
        if unpacked > max(_UNPACKED, _EXPANSION * size):
            raise ValueError(f"{size:,} bytes would unpack to {unpacked:,}: no honest archive does")
        yield archive


def _check_array(archive, member):
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{member.filename!r} has the unknown format {version}")
        shape, _, dtype = _HEADERS[version](file)
        promised = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or promised != member.file_size:
        raise ValueError(
            f"{member.filename!r} claims {shape} numbers of type {dtype}, but has "
            f"{member.file_size:,} bytes"
        )
