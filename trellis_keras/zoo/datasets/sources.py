"""The files of data sets: local copies if they exist, otherwise downloads.

`keras.utils.get_file` downloads and verifies files, and tensorflow-datasets prepares the sets that
it has. This module makes a download visible only when it is complete, because a killed `get_file`
leaves a partial file under its final name, and lets one process at a time download.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from filelock import FileLock

from keras_streams.files import atomic_write
from trellis_keras.files import checksum, existing, remove_unfinished

ENVIRONMENT_VARIABLE = "TRELLIS_KERAS_DATA"
LOCAL_COPY_HINT = (
    "To use a local copy, pass its folder as `data_dir` or set the environment variable "
    f"{ENVIRONMENT_VARIABLE} to it."
)


@dataclasses.dataclass(frozen=True)
class Download:
    """A file or zip archive on the web.

    Attributes:
        url: Its URL.
        files: Dict from a path in the folder of local copies to the member of the archive that
            belongs there, or to None if the download is the file itself.
        checksum: Hexadecimal SHA-256 of the download, or None.
        normalize: Function from the path of the download to the bytes that have this checksum, or
            None: those of the download.
    """

    url: str
    files: Mapping[str, str | None]
    checksum: str | None
    normalize: Callable[[Path], bytes] | None = None

    def fetch(self, folder: Path) -> None:
        """Downloads the files, unless `folder` has them.

        Raises:
            OSError: If the download fails or cannot be stored.
            ValueError: If it is not the published file.
        """
        targets = {folder / path: member for path, member in self.files.items()}
        place = next(iter(targets)).parent
        if all(target.is_file() for target in targets):  # perhaps in a folder that is read-only
            return
        with locked(place):
            if all(target.is_file() for target in targets):
                return
            downloading = place / "downloading"
            downloading.mkdir(exist_ok=True)
            try:
                download = self._get_file(downloading)
                for target, member in targets.items():
                    if member is None:
                        os.replace(download, target)
                        continue
                    archive = zipfile.ZipFile(download)
                    with archive, archive.open(member) as content, atomic_write(target) as path:
                        with open(path, "wb") as file:
                            shutil.copyfileobj(content, file)
            finally:
                shutil.rmtree(downloading)

    def _get_file(self, folder):
        try:
            # Keras reports progress on stdout, which may be a command's JSON output.
            with contextlib.redirect_stdout(sys.stderr):
                path = keras.utils.get_file(
                    origin=self.url,
                    cache_dir=str(folder),
                    cache_subdir="",
                    file_hash=None if self.normalize else self.checksum,
                    force_download=True,  # replaces leftovers of a killed process
                )
            if self.normalize and checksum([self.normalize(Path(path))]) != self.checksum:
                raise ValueError("its text has another checksum.")
            return path
        except ValueError as error:
            raise ValueError(
                f"{self.url} is not the published file: {error} {LOCAL_COPY_HINT}"
            ) from error
        except Exception as error:  # Keras raises this class itself
            raise OSError(f"Could not download {self.url} ({error}). {LOCAL_COPY_HINT}") from error


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
        """Returns the path of each file, see `load`.

        The list is empty if there is neither a local copy nor a download.
        """
        folder = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
        if folder:
            folder = Path(folder).expanduser()
            if not folder.is_dir():
                origin = "`data_dir`" if data_dir else ENVIRONMENT_VARIABLE
                raise FileNotFoundError(f"{origin} is not a folder. Received: {str(folder)!r}")
            found: list[Any] = [
                next(filter(None, map(existing, places)), None) for places in self._places(folder)
            ]
            # The environment's folder may be for other data sets; `data_dir` is for this one.
            if data_dir or any(found):
                if None in found:
                    missing = self._places(folder)[found.index(None)][0]
                    raise FileNotFoundError(
                        f"Neither {missing} nor {missing}.gz is a file. {LOCAL_COPY_HINT}"
                    )
                return found
        for download in self.downloads:
            download.fetch(cache_folder())
        return [places[0] for places in self._places(cache_folder())] if self.downloads else []

    def _places(self, folder):
        """Returns the alternative paths of each file."""
        paths = [(path,) if isinstance(path, str) else path for path in self.paths]
        return [[folder / name for name in names] for names in paths]


def cache_folder() -> Path:
    """Returns the folder for downloads, `~/.keras/datasets/trellis_keras`.

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
    """Returns a data set of tensorflow-datasets: {"train" or "test": {feature: array}}."""
    try:
        import tensorflow_datasets as tfds

        with locked(cache_folder() / name):
            builder = tfds.builder(name)
            if not os.path.isdir(builder.data_dir):
                with contextlib.suppress(urllib.error.HTTPError):  # which is an answer, too
                    urllib.request.urlopen(_SERVERS[name], timeout=10).close()
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


def check_count(path: Any, noun: str, expected: int, found: int, hint: str = "") -> None:
    """Raises ValueError if a file does not have the published size."""
    if found != expected:
        message = f"{path} is not the published file: expected {expected:,} {noun}, found {found:,}"
        raise ValueError(f"{message}. {hint}" if hint else message)
