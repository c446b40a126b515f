"""The files of data sets: local copies, and downloads where there are none."""

import contextlib
import dataclasses
import gzip
import hashlib
import os
import pathlib
import re
import zlib

BYTE_ORDER_MARK = "\ufeff"
ENVIRONMENT_VARIABLE = "TRELLIS_KERAS_DATA"
SPLITS = ("train", "valid", "test")
# Bytes of a large file in memory at a time.
_BLOCK = 2**20
# What a compressed file may unpack to in memory: so many bytes, or if it is large itself so many
# times its size.
_UNPACKED = 2**28
_EXPANSION = 100


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of a data set: its bytes, and the name that error messages give it."""

    label: str
    content: bytes


@dataclasses.dataclass(frozen=True)
class LargeSource:
    """Like `Source`, but of a file that is too large for memory and is read in blocks."""

    path: pathlib.Path

    @property
    def label(self):
        """The name that error messages give it."""
        return str(self.path)

    @property
    def size(self):
        """Bytes of the file as it is stored."""
        return self.path.stat().st_size

    def blocks(self):
        """Yields the decompressed bytes in blocks, each as `(block, bytes of the file read)`."""
        with open(self.path, "rb") as file, _naming_damage(self.path):
            content = gzip.open(file) if self.path.suffix == ".gz" else file
            while block := content.read(_BLOCK):
                yield block, file.tell()


def read_files(files, data_dir, builder_name):
    """Reads a data set's files from a local copy, else downloads them.

    Args:
        files: Dict from part to path, as in `local_sources`.
        data_dir: As in `load`.
        builder_name: Class in `builders.py` whose `FILES` has the same parts.

    Returns:
        A list with the `Source` of each part.
    """
    sources = local_sources(files, data_dir)
    if sources is None:
        builders = import_builders()
        contents = builders.read_files(getattr(builders, builder_name))
        sources = [Source(f"{builder_name} {part}", contents[part]) for part in files]
    return sources


def find_files(files, data_dir, builder_name):
    """Finds a data set's large files in a local copy, else downloads them.

    Args:
        files: As in `local_sources`.
        data_dir: As in `load`.
        builder_name: Class in `builders.py`, a `LargeFiles`, whose `FILES` has the same parts.

    Returns:
        A list with the path of each part, which may be that of its compressed form.
    """
    paths = _local_paths(files, data_dir)
    if paths is None:
        builders = import_builders()
        unpacked = builders.unpack_files(getattr(builders, builder_name))
        paths = [unpacked[part] for part in files]
    return [_existing(path) for path in paths]


def local_sources(files, data_dir):
    """Reads the local copy of a data set's files.

    Args:
        files: Dict from part to the file's path inside the folder of local copies, or to a
            tuple of paths of which the first that exists is taken.
        data_dir: That folder; `None` means the environment variable's.

    Returns:
        A list with the `Source` of each part, or `None` if there is no local copy.

    Raises:
        FileNotFoundError: If the folder or a file is missing.
        ValueError: If a file is empty or not sound.
    """
    paths = _local_paths(files, data_dir)
    return None if paths is None else [read_file(path) for path in paths]


def _local_paths(files, data_dir):
    folder = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if not folder:
        return None
    folder = pathlib.Path(folder).expanduser()
    if not folder.is_dir():
        origin = "data_dir" if data_dir else ENVIRONMENT_VARIABLE
        raise FileNotFoundError(f"{origin} is not a folder. Received: {os.fspath(folder)!r}")
    paths = [_first_existing(folder, names) for names in files.values()]
    # The environment's folder may hold other data sets only; an argument means this one.
    if not data_dir and not any(_variants(path) for path in paths):
        return None
    return paths


def import_builders():
    """The module that downloads, imported late: it needs tensorflow and tensorflow-datasets."""
    try:
        from trellis_keras.data import builders
    except ImportError as error:
        raise ImportError(
            "There is no local copy of the data set, and to download it needs tensorflow and "
            f"tensorflow-datasets. {local_copy_hint()}"
        ) from error
    return builders


def local_copy_hint():
    """The sentence that tells a user how to point to local copies."""
    return (
        "To use a local copy pass its folder as `data_dir` or set the environment variable "
        f"{ENVIRONMENT_VARIABLE} to it."
    )


def _first_existing(folder, names):
    paths = [folder / name for name in ([names] if isinstance(names, str) else names)]
    return next((path for path in paths if _variants(path)), paths[0])


def _variants(path):
    """The file and its compressed form, as far as they exist."""
    candidates = (path, path.with_name(path.name + ".gz"))
    return [candidate for candidate in candidates if candidate.is_file()]


def _existing(path):
    found = _variants(path)
    if not found:
        raise FileNotFoundError(f"Neither {path} nor {path}.gz is a file. {local_copy_hint()}")
    return found[0]


def read_file(path):
    """Reads `path` or its compressed form `path.gz` as a `Source`."""
    path = _existing(path)
    content = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    if not content:
        raise ValueError(f"{path} is empty")
    return Source(str(path), content)


def read_own_file(path, data_dir=None):
    """Reads a user's own file: from `path`, or else by its name from the folder `data_dir`.

    Raises:
        FileNotFoundError: It is not there.
    """
    path = pathlib.Path(path).expanduser()
    places = [path] if data_dir is None else [path, pathlib.Path(data_dir).expanduser() / path.name]
    for place in places:
        if _variants(place):
            return read_file(place)
    raise FileNotFoundError(
        f"There is no file {' or '.join(map(str, places))}. If it has moved, `data_dir` "
        "(--data-dir) takes the folder where it is now."
    )


def _unpacked(path):
    limit = max(_UNPACKED, _EXPANSION * path.stat().st_size)
    with _naming_damage(path), gzip.open(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(
            f"{path} would unpack to more than {limit:,} bytes, {_EXPANSION} times its own: that "
            "is no text. If it is one, unpack it first"
        )
    return content


@contextlib.contextmanager
def _naming_damage(path):
    try:
        yield
    except EOFError as error:
        raise ValueError(f"{path} is truncated: the compressed data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a sound gzip file: {error}") from error


def decode(source, hint="", start=0):
    """The UTF-8 text of a `Source`.

    Args:
        source: The `Source`.
        hint: Ends the error message where it is no such text.
        start: Where the content begins in the file, for that message.
    """
    try:
        return source.content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = (
            f"{source.label} is not UTF-8 text: the byte {source.content[error.start]:#04x} at "
            f"offset {start + error.start} cannot be decoded"
        )
        raise ValueError(f"{message}. {hint}" if hint else message) from error


def plain_lines(text):
    """A text without byte-order mark and carriage returns, and without blanks that end a line.

    There are no empty lines at its beginning and end either.
    """
    return re.sub(r"[ \t]*(\r\n|\r|\n)", "\n", text.removeprefix(BYTE_ORDER_MARK)).strip()


def checksum(contents):
    """sha256 (hexadecimal) of bytes or contiguous arrays, one after the other."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def check_count(source, noun, expected, found, hint=""):
    """Refuses a file whose size is not the published one; `hint` ends the message."""
    if found != expected:
        message = (
            f"{source.label} is not the published file: expected {expected:,} {noun}, "
            f"found {found:,}"
        )
        raise ValueError(f"{message}. {hint}" if hint else message)
