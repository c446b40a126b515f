"""The files of data sets: local copies if they exist, otherwise downloads.

Libraries do the downloading: `keras.utils.get_file` fetches and verifies files, and
tensorflow-datasets prepares the sets that it has. This module adds three things. A download becomes
visible only when it is complete and verified, because `get_file` leaves a partial file under its
final name if the process is killed. A lock prevents two processes from writing the same file. And
zip archives are read member by member within limits, because `get_file(extract=True)` unpacks
whatever the server sent.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from filelock import FileLock

from keras_streams.files import atomic_write
from trellis_keras.files import (
    BYTE_ORDER_MARK,
    MAX_UNPACKED,
    existing,
    file_checksum,
    open_archive,
    remove_unfinished,
)

ENVIRONMENT_VARIABLE = "TRELLIS_KERAS_DATA"
LOCAL_COPY_HINT = (
    "To use a local copy, pass its folder as `data_dir` or set the environment variable "
    f"{ENVIRONMENT_VARIABLE} to it."
)

_BLOCK = 2**20  # bytes of a large file in memory at a time


@dataclasses.dataclass(frozen=True)
class Download:
    """A file or zip archive on the web.

    Attributes:
        url: Its URL.
        files: Dict from a path in the folder of local copies to the member of the archive that
            belongs there, or to None if the download is the file itself.
        checksum: Hexadecimal SHA-256 of the download, or None if its copies differ.
        file_checksum: Then, that of the file in the folder.
        convert: Function from the bytes of the download to those of the file, or None.
    """

    url: str
    files: Mapping[str, str | None]
    checksum: str | None = None
    file_checksum: str | None = None
    convert: Callable[[bytes], bytes] | None = None

    def fetch(self, folder: Path) -> None:
        """Downloads the files that `folder` lacks.

        Raises:
            OSError: If the download fails or cannot be stored.
            ValueError: If it is not the published file.
        """
        targets = {folder / path: member for path, member in self.files.items()}
        if all(target.is_file() for target in targets):
            return
        place = next(iter(targets)).parent
        with locked(place):
            if all(target.is_file() for target in targets):  # from another process
                return
            downloading = place / "downloading"
            try:
                download = self._get_file(downloading)
                with contextlib.ExitStack() as stack:  # all files, or none
                    for target, member in targets.items():
                        temporary = stack.enter_context(atomic_write(target))
                        self._unpack(download, member, temporary)
            finally:
                shutil.rmtree(downloading, ignore_errors=True)

    def _get_file(self, folder):
        folder.mkdir(exist_ok=True)
        try:
            # Keras reports progress on stdout, which may be a command's JSON output.
            with contextlib.redirect_stdout(sys.stderr):
                return keras.utils.get_file(
                    origin=self.url,
                    cache_dir=str(folder),
                    cache_subdir="",
                    file_hash=self.checksum,
                    hash_algorithm="sha256",
                    force_download=True,  # replaces leftovers of a killed process
                )
        except ValueError as error:
            raise self._not_published(error) from error
        except Exception as error:  # Keras raises this class itself
            raise OSError(f"Could not download {self.url} ({error}). {LOCAL_COPY_HINT}") from error

    def _unpack(self, download, member, path):
        try:
            with open(download, "rb") as file, open(path, "wb") as unpacked:
                if member is not None:
                    with open_archive(file) as archive, archive.open(member) as content:
                        shutil.copyfileobj(content, unpacked, _BLOCK)
                elif self.convert is not None:
                    unpacked.write(self.convert(file.read(MAX_UNPACKED)))
                else:
                    shutil.copyfileobj(file, unpacked, _BLOCK)
            if self.file_checksum is not None:
                _verify(path, self.file_checksum)
        except OSError:  # such as a full disk, which is not the archive's fault
            raise
        except Exception as error:  # zipfile and zlib raise many classes
            raise self._not_published(error) from error

    def _not_published(self, error):
        return ValueError(f"{self.url} is not the published file: {error}. {LOCAL_COPY_HINT}")


@dataclasses.dataclass(frozen=True)
class Source:
    """The locations of a data set's files.

    Attributes:
        paths: Paths of the files in the folder of local copies. A tuple lists alternatives, of
            which the first existing one is used. Files may be compressed (`.gz`).
        downloads: `Download`s that provide the files; empty if tensorflow-datasets has the set.
    """

    paths: tuple[str | tuple[str, ...], ...]
    downloads: tuple[Download, ...] = ()

    def find(self, data_dir: str | os.PathLike | None) -> list[Path]:
        """Finds the files, or download them if there is no local copy.

        Args:
            data_dir: Folder of local copies. `None` means the folder named by the environment
                variable, if it has a file of this data set.

        Returns:
            A list with the path of each file; empty if there is neither a local copy nor a
            download.

        Raises:
            FileNotFoundError: If the folder, or a file of a local copy, is missing.
            OSError, ValueError: As `Download.fetch`.
        """
        folder = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
        if folder:
            folder = Path(folder).expanduser()
            if not folder.is_dir():
                origin = "data_dir" if data_dir else ENVIRONMENT_VARIABLE
                raise FileNotFoundError(f"{origin} is not a folder. Received: {str(folder)!r}")
            found, missing = [], []
            for path in self.paths:
                places = self._alternatives(folder, path)
                existed = next(filter(None, map(existing, places)), None)
                if existed is None:
                    missing.append(places[0])
                else:
                    found.append(existed)
            # The environment's folder may be for other data sets; `data_dir` is for this one.
            if missing and (data_dir or found):
                raise FileNotFoundError(
                    f"Neither {missing[0]} nor {missing[0]}.gz is a file. {LOCAL_COPY_HINT}"
                )
            if found:
                return found
        for download in self.downloads:
            download.fetch(cache_folder())
        paths = self.paths if self.downloads else ()
        return [self._alternatives(cache_folder(), path)[0] for path in paths]

    def _alternatives(self, folder, path):
        return [folder / name for name in ([path] if isinstance(path, str) else path)]


def cache_folder() -> Path:
    """Returns the folder for downloads and token ids, `~/.keras/datasets/trellis_keras`.

    As for Keras' own data sets, the environment variable `KERAS_HOME` replaces `~/.keras`.
    """
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    return home / "datasets" / "trellis_keras"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits for other processes that write to a folder; a killed process releases its lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        remove_unfinished(folder)
        yield


def read_tfds(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns a data set of tensorflow-datasets: {"train" or "test": {feature: array}}.

    Raises:
        ImportError: If tensorflow-datasets or tensorflow is missing.
        OSError: If the download fails.
    """
    try:
        import tensorflow_datasets as tfds

        with locked(cache_folder() / name):
            builder = tfds.builder(name)
            if not os.path.isdir(builder.data_dir):
                _check_connection(name)
            builder.download_and_prepare()
        return {
            split: tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
            for split in ("train", "test")
        }
    except ImportError as error:
        raise ImportError(
            f"There is no local copy of {name}, and downloading it needs tensorflow and "
            f"tensorflow-datasets. {LOCAL_COPY_HINT}"
        ) from error
    except Exception as error:  # broken connections and full disks raise many classes
        raise OSError(
            f"Could not download tensorflow-datasets' {name!r} ({error}). {LOCAL_COPY_HINT}"
        ) from error


# The servers of tensorflow-datasets' files, which it tries for minutes without a connection.
_SERVERS = {
    "mnist": "https://storage.googleapis.com",
    "cifar10": "https://www.cs.toronto.edu",
    "lambada": "https://zenodo.org",
}


def _check_connection(name):
    """Raises OSError unless the server of a data set answers, whatever it says."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(_SERVERS[name], timeout=10).close()


def plain_lines(text: str) -> str:
    """Removes byte-order mark, carriage returns, blanks at line ends, and outer empty lines."""
    return re.sub(r"[ \t]*(\r\n|\r|\n)", "\n", text.removeprefix(BYTE_ORDER_MARK)).strip()


def check_count(path: Any, noun: str, expected: int, found: int, hint: str = "") -> None:
    """Raises ValueError if a file does not have the published size."""
    if found != expected:
        message = f"{path} is not the published file: expected {expected:,} {noun}, found {found:,}"
        raise ValueError(f"{message}. {hint}" if hint else message)


def _verify(path, expected):
    found = file_checksum(path)
    if found != expected:
        raise ValueError(f"expected sha256 {expected}, found {found}")
