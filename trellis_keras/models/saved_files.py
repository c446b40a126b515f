"""Loading of model and weights files of any origin.

Keras' safe mode runs no code from a file and follows no links in it. Three checks stay ours:

- Keras builds what a configuration asks for before it looks at the weights, so a few bytes such as
  `"filters": 1000000000000` could exhaust the memory. Here the numbers in the configuration, and
  the weights that it would make, must be in proportion to the file.
- Keras accepts arrays of up to 4 GiB that are tiny on disk. Here arrays are at most as large as the
  file: Keras compresses none.
- The HDF5 library may hang on a file that was cut or extended. Here its length must be the one
  that it states.
"""

import io
import json
import math
import os
import pathlib
import struct
from concurrent.futures import ThreadPoolExecutor

import h5py
import keras

from trellis_keras.files import open_archive

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"

# A number in a configuration may be as large as the file, or this large. Seeds may be any.
_ANY_FILE = 100_000
# Some metrics have variables of the square of a number.
_ANY_METRIC = 10_000
# Bytes at the start of an HDF5 file, where it states its length.
_SUPERBLOCK = 52


def load_model(path: str | os.PathLike, compile: bool = True) -> keras.Model:
    """Loads the model of a `.keras` file of any origin.

    Like `keras.saving.load_model` in safe mode, it runs nothing in the file. Besides, it takes no
    more memory than a model takes whose weights the file has.

    Args:
        path: The file.
        compile: Boolean, whether to compile the model as it was. Defaults to `True`.

    Raises:
        ValueError: If the file is damaged, claims more weights than it has, or asks for classes
            that do not exist.
        OSError: If it cannot be read.
    """
    with open(path, "rb") as file:
        try:
            with open_archive(file) as archive:
                _check_model(archive)
            return keras.saving.load_model(path, compile=compile)
        # A configuration calls constructors, which may raise anything.
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk failed, not the file
            raise ValueError(
                f"{path} is damaged, or not a model of this version: {error}"
            ) from error


def check_file(path: str | os.PathLike) -> None:
    """Checks the arrays of a `.weights.h5` or `.keras` file; any other file passes.

    Raises:
        ValueError: If the file is damaged, or its arrays claim to be larger than it is.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path)
    with open(path, "rb") as file:
        try:
            if path.suffix == ".keras":
                with open_archive(file) as archive:
                    _read_config(archive)
                    _count_stored(archive)
            elif path.name.endswith(".weights.h5"):
                _count_numbers(file, path.stat().st_size)
        except Exception as error:  # zipfile and h5py have many kinds
            raise ValueError(f"{path} is damaged: {error}") from error


def saved_tokens(path: str | os.PathLike) -> tuple[int | None, list | None]:
    """Returns the number of tokens and the tokens of a saved language model, None if unknown.

    A `.keras` file has its model's vocabulary, a `.weights.h5` file only the number of tokens.

    Raises:
        ValueError: If the file does not hold a language model.
    """
    path = pathlib.Path(path)
    if path.suffix == ".keras":
        with open(path, "rb") as file, open_archive(file) as archive:
            config = _read_config(archive)["config"]
        try:
            vocabulary = config.get("vocabulary")
            tokens = None if vocabulary is None else list(vocabulary["config"]["tokens"])
            return int(config["vocabulary_size"]), tokens
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} does not hold a language model: {error!r}") from error
    if path.name.endswith(".weights.h5"):
        with h5py.File(path) as file:
            embedding = file.get("embedding/vars/0")
            return (embedding.shape[0] if isinstance(embedding, h5py.Dataset) else None), None
    return None, None


def _read_config(archive):
    config = json.loads(archive.read(_CONFIG))
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise ValueError(f"its {_CONFIG} holds no configuration")
    return config


def _check_model(archive):
    config = _read_config(archive)
    stored = _count_stored(archive)
    size = sum(member.file_size for member in archive.infolist())
    compiled = config.pop("compile_config", None) or {}
    metrics = [compiled.get("metrics"), compiled.get("weighted_metrics")]
    for part, largest in ((config, max(size, _ANY_FILE)), (metrics, _ANY_METRIC)):
        for name, number in _numbers(part):
            if number > largest:
                raise ValueError(
                    f"{name}={number} is too large: at most {largest:,} is taken from a file of "
                    f"{size:,} bytes"
                )
    # In a thread, with which what Keras notes on variables without values ends.
    with ThreadPoolExecutor(1) as thread:
        claimed = thread.submit(_count_weights, config).result()
    if claimed > stored:
        raise ValueError(f"its model would have {claimed:,} weights, but it holds {stored:,}")


def _numbers(config, name=""):
    """Yields (name, size) of the numbers in a configuration, except seeds and references."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key != "shared_object_id" and not key.endswith("seed"):
                yield from _numbers(value, key)
    elif isinstance(config, list):
        for value in config:
            yield from _numbers(value, name)
    elif isinstance(config, (int, float)):
        yield name, abs(config)


def _count_weights(config):
    """Returns how many numbers the weights of a configuration's model have."""
    with keras.StatelessScope(initialize_variables=False):
        model = keras.saving.deserialize_keras_object(config)
    return sum(math.prod(variable.shape) for variable in model.weights)


def _count_stored(archive):
    """Returns how many numbers the weights of a `.keras` file have."""
    # In memory: HDF5 seeks, for which a zip file starts again.
    content = archive.read(_WEIGHTS)
    return _count_numbers(io.BytesIO(content), len(content))


def _count_numbers(file, size):
    """Returns how many numbers an HDF5 file of `size` bytes has."""
    if (end := _stated_length(file.read(_SUPERBLOCK))) != size:
        raise ValueError(f"it says that it ends at {end}, but has {size:,} bytes")
    datasets = []

    def measure(_, item):
        if isinstance(item, h5py.Dataset):
            datasets.append((item.size or 0, item.dtype.itemsize))

    with h5py.File(file) as content:
        content.visititems(measure)  # without links
    claimed = sum(numbers * itemsize for numbers, itemsize in datasets)
    if claimed > size:
        raise ValueError(f"its arrays claim to have {claimed:,} bytes, but it has {size:,}")
    return sum(numbers for numbers, _ in datasets)


def _stated_length(superblock):
    """Returns the length that an HDF5 file states, None if it is not an HDF5 file."""
    if len(superblock) < _SUPERBLOCK or not superblock.startswith(b"\x89HDF\r\n\x1a\n"):
        return None
    # By the version of the format, of which h5py writes the oldest.
    place = {0: 40, 1: 44, 2: 28, 3: 28}.get(superblock[8])
    return None if place is None else struct.unpack_from("<Q", superblock, place)[0]
