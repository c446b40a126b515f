"""Model and weights files of any origin: what they claim is checked before Keras makes it."""

import io
import json
import math
import struct
from concurrent.futures import ThreadPoolExecutor

import h5py
import keras

from trellis_keras.files import open_archive

CONFIG, WEIGHTS = "config.json", "model.weights.h5"

# The largest number in a configuration, but for seeds, that needs no file of that many bytes.
_SMALL = 100_000
# The largest one in a metric's, of which some keep a square of it.
_SMALL_METRIC = 10_000
# Bytes at the beginning of an HDF5 file, where it says how long it is.
_SUPERBLOCK = 52


def load_model(path, compile=True):
    """Returns the model of a `.keras` file, like `keras.saving.load_model`.

    Nothing in the file is run (Keras' safe mode), and it takes no more memory than a model takes
    whose weights the file has.

    Args:
        path: The file.
        compile: Whether the model can be trained on.

    Raises:
        ValueError: The file is damaged, or claims to be a model that it has not the weights of, or
            asks for classes that are not there.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        try:
            _check_claims(file)
            return keras.saving.load_model(path, compile=compile)
        # A configuration calls constructors, each of which may raise what it likes.
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's fault, not the file's
            raise ValueError(f"{path} is damaged, or no model of this version: {error}") from error


def check_claims(path):
    """Refuses a weights file of Keras whose arrays claim to be larger than it is.

    Args:
        path: The `pathlib.Path` of a `.weights.h5` or `.keras` file. Of any other nothing is said.

    Raises:
        ValueError: Its arrays claim so, or it is damaged.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        try:
            if path.suffix == ".keras":
                with open_archive(file) as archive:
                    read_config(archive)
                    _stored_numbers(archive)
            elif path.name.endswith(".weights.h5"):
                _count_numbers(file, path.stat().st_size)
        except Exception as error:  # zipfile and h5py have another one for each kind of damage
            raise ValueError(f"{path} is damaged: {error}") from error


def read_config(archive):
    """Returns the configuration in a `.keras` file, a dict, of the opened archive."""
    config = json.loads(archive.read(CONFIG))
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise ValueError(f"its {CONFIG} holds no configuration")
    return config


def _check_claims(file):
    with open_archive(file) as archive:
        config = read_config(archive)
        if damaged := archive.testzip():
            raise ValueError(f"its {damaged} is not what was written")
        stored = _stored_numbers(archive)
        size = sum(member.file_size for member in archive.infolist())
    compiled = config.pop("compile_config", None) or {}
    metrics = [compiled.get("metrics"), compiled.get("weighted_metrics")]
    for part, largest in ((config, max(size, _SMALL)), (metrics, _SMALL_METRIC)):
        for name, number in _numbers(part):
            if number > largest:
                raise ValueError(
                    f"{name}={number} is too large: at most {largest:,} is taken from a file of "
                    f"{size:,} bytes"
                )
    claimed = _count_weights(config)
    if claimed > stored:
        raise ValueError(f"its model would have {claimed:,} weights, but it holds {stored:,}")


def _stored_numbers(archive):
    """Returns how many numbers the weights of a `.keras` file are."""
    content = archive.read(WEIGHTS)  # HDF5 goes to and fro, for which a zip file begins anew
    return _count_numbers(io.BytesIO(content), len(content))


def _count_numbers(file, size):
    """Returns how many numbers an HDF5 file of so many bytes holds; Keras compresses none."""
    # HDF5's library reads a file that others were pushed into, and may not come back from it.
    if (end := _stated_end(file.read(_SUPERBLOCK))) != size:
        raise ValueError(f"it says that it ends at {end}, but has {size:,} bytes")
    datasets = []
    with h5py.File(file) as content:
        # Links to other places are not followed.
        content.visititems(lambda _, item: datasets.append(_measured(item)))
    claimed = sum(numbers * itemsize for numbers, itemsize in datasets)
    if claimed > size:
        raise ValueError(f"its arrays claim to have {claimed:,} bytes, but it has {size:,}")
    return sum(numbers for numbers, _ in datasets)


def _stated_end(superblock):
    """Where an HDF5 file ends by its own account, or None if it is no such file."""
    if len(superblock) < _SUPERBLOCK or not superblock.startswith(b"\x89HDF\r\n\x1a\n"):
        return None
    # By the version of the format, of which h5py writes the oldest.
    place = {0: 40, 1: 44, 2: 28, 3: 28}.get(superblock[8])
    return None if place is None else struct.unpack_from("<Q", superblock, place)[0]


def _measured(item):
    return (item.size or 0, item.dtype.itemsize) if isinstance(item, h5py.Dataset) else (0, 0)


def _numbers(config, name=""):
    """Yields (name, size) of the numbers in a configuration, but for seeds and references."""
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
    """Returns how many weights' numbers a configuration makes.

    The model is made without values. That is done in a thread: what Keras notes on variables
    without values ends with it.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_count_without_values, config).result()


def _count_without_values(config):
    with keras.StatelessScope(initialize_variables=False):
        model = keras.saving.deserialize_keras_object(config)
    return sum(math.prod(variable.shape) for variable in model.weights)
