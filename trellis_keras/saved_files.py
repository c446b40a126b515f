"""Loads untrusted model and weights files.

Keras' safe mode runs no code from a file. Six checks come before it:

- Safe mode lets a configuration name any public function or class of Keras, some of which write
  files. Here every class must be on an allowlist, and functions are not allowed.
- Keras builds a model from its configuration before it reads the weights, so a few bytes such as
  `"filters": 1000000000000` could exhaust the memory. Here the configuration's length, its numbers,
  its parts and the weights it would create must be in proportion to the file's contents, and its
  compile configuration, whose metrics may have any size, is dropped.
- The HDF5 library opens whatever a file refers to: soft and external links may point anywhere on
  the machine, and the values of an array may be stored in other files. Keras rejects such arrays
  when it reads them, but looks up names through such links. Here nothing may refer to another file.
- Keras accepts arrays of up to 4 GiB that are tiny on disk, and any number of strings that share
  their bytes. Here arrays must be numeric, and at most as large as the file, because Keras never
  compresses them.
- The HDF5 library may hang on a truncated or extended file. Here the length must match the one that
  the file states.
- Keras chooses the format by the file's name, but a file may be valid in two formats. Here the name
  also decides what is checked, and the content must start as that format does.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import struct
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

import h5py
import keras

from trellis_keras.files import open_archive, open_file, reading

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
# The files of a preset, and the model card that may accompany it.
_PRESET = (_CONFIG, "metadata.json", _WEIGHTS, "assets")
README = "README.md"

# Numbers in a configuration may be as large as the file, or this large. Seeds are not limited.
_ANY_FILE = 100_000
# A configuration, including vocabularies, may be as long as the weights, or this long, in bytes.
_ANY_CONFIG = 2**20
# A model may have this many parts per array of weights, plus this many.
_PARTS_PER_ARRAY, _ANY_MODEL = 10, 500
# Arguments that multiply the number of a layer's weights.
_REPEATS = ("depth", "transition_depth", "cells_per_node", "gates")
# Layers whose levels share weights, and cost nothing until the layers are called.
_TIED = ("trellis_keras>TrellisLayer", "trellis_keras>TruncatedRNN")
# Models that call their layers as they are built.
_CALLING = ("Sequential", "Functional")
# Number of bytes at the start of an HDF5 file that contain its length.
_SUPERBLOCK = 52
# The allowlist: Keras classes that a model may contain, by module.
_KERAS = {
    "keras": "DTypePolicy Sequential",
    "keras.src.models.functional": "Functional",
    "keras.initializers": "Constant GlorotNormal GlorotUniform HeNormal HeUniform Identity "
    "LecunNormal LecunUniform Ones Orthogonal RandomNormal RandomUniform TruncatedNormal "
    "VarianceScaling Zeros",
    "keras.regularizers": "L1 L1L2 L2 OrthogonalRegularizer",
    "keras.constraints": "MaxNorm MinMaxNorm NonNeg UnitNorm",
    "keras.layers": "Activation Add Average AveragePooling1D BatchNormalization Bidirectional "
    "Concatenate Conv1D Dense DepthwiseConv1D Dropout ELU EinsumDense Embedding Flatten GRU "
    "GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalMaxPooling1D "
    "GroupNormalization GroupQueryAttention Identity InputLayer LSTM LSTMCell LayerNormalization "
    "LeakyReLU Masking MaxPooling1D Maximum Minimum MultiHeadAttention Multiply Normalization "
    "PReLU Permute RMSNormalization RNN ReLU Reshape SeparableConv1D SimpleRNN SimpleRNNCell "
    "Softmax SpatialDropout1D SpectralNormalization StackedRNNCells Subtract TimeDistributed "
    "UnitNormalization ZeroPadding1D",
}
_ALLOWED = {(module, name) for module, names in _KERAS.items() for name in names.split()}
_OURS = "trellis_keras>"
_VOCABULARY = f"{_OURS}Vocabulary"
# Levels of groups in an HDF5 file. Keras makes two or three for each layer within another.
_MAX_DEPTH = 100


def load_model(path: str | os.PathLike) -> keras.Model:
    """Loads an untrusted model of this package: a `.keras` file, or a folder with its parts.

    Like `keras.saving.load_model` in safe mode, this runs no code from the file. In addition, it
    builds only layers of this package and allowlisted Keras layers, reads no other file, and takes
    no more memory than a model with as many weights as the file has.

    Args:
        path: The file, or a folder with config.json and model.weights.h5, as written by
            `keras.saving.save_model(..., zipped=False)` and `save_to_preset`.

    Returns:
        The uncompiled model.

    Raises:
        ValueError: If the file is damaged, claims more weights than it has, contains a model that
            is not from this package, or names classes that are not allowed.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path)
    try:
        with reading(path):
            if path.is_dir():
                _check_model(*_open_folder(path))
            elif path.name.endswith(".keras"):
                with open_file(path) as file, _open_keras(file) as archive:
                    _check_model(_read_config(archive), _count_stored(archive))
            else:
                raise ValueError("its name does not end in .keras")
            return keras.saving.load_model(path, compile=False)
    # A configuration calls constructors, which may raise anything.
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk failed, not the file
        raise ValueError(f"{path} is damaged, or not a model of this version: {error}") from error


def check_preset_folder(folder: pathlib.Path, model: keras.Model) -> None:
    """Checks that a preset of a model may be written to a folder.

    Raises:
        ValueError: If there is a file of this name, or the folder contains files other than those
            of a preset of the same class and a README.md.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file. A preset is a folder: choose another name.")
    others = sorted({path.name for path in folder.iterdir()} - {*_PRESET, README})
    if others:
        raise ValueError(
            f"{folder} contains files that are not part of a preset: {', '.join(others[:5])}. "
            "Choose another folder."
        )
    if (folder / _CONFIG).exists():
        with _name_damaged(folder):
            there = _open_folder(folder)[0].get("registered_name")
        own = keras.saving.get_registered_name(type(model))
        if there != own:
            raise ValueError(
                f"{folder} contains a preset of {there}, which a preset of {own} cannot replace. "
                "Choose another folder."
            )


def check_file(path: str | os.PathLike) -> None:
    """Checks the arrays of a file from which Keras loads weights.

    Args:
        path: A `.keras` or `.weights.h5` file.

    Raises:
        ValueError: If the file has another suffix, is damaged, contains links or external data, or
            its arrays claim to be larger than the file.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path)
    check_weights_name(path)
    with open_file(path) as file, _name_damaged(path):
        if path.name.endswith(".keras"):
            with _open_keras(file) as archive:
                _read_config(archive)
                _count_stored(archive)
        else:
            _measure_hdf5(file)


def check_weights_name(path: str | os.PathLike) -> None:
    """Raises ValueError unless a path has the suffix of a file that `check_file` takes."""
    if not os.fspath(path).endswith((".keras", ".weights.h5")):
        raise ValueError(f"A weights file must end in .keras or .weights.h5. Received: {path}")


def saved_tokens(path: str | os.PathLike) -> list | None:
    """Returns the tokens of the vocabulary in a `.keras` file, `None` in other files.

    Raises:
        ValueError: If the file is damaged.
    """
    path = pathlib.Path(path)
    if not path.name.endswith(".keras"):
        return None
    with open_file(path) as file, _name_damaged(path), _open_keras(file) as archive:
        vocabulary = _read_config(archive)["config"].get("vocabulary")
        return None if vocabulary is None else list(vocabulary["config"]["tokens"])


@contextlib.contextmanager
def _name_damaged(path):
    try:
        yield
    except Exception as error:  # zipfile and h5py raise many classes
        raise ValueError(f"{path} is damaged: {error}") from error


@contextlib.contextmanager
def _open_keras(file):
    """Yields the archive of a `.keras` file."""
    if file.read(4) != b"PK\x03\x04":  # `zipfile` also finds an archive behind other data
        raise ValueError("it does not start as a zip file")
    with open_archive(file) as archive:
        yield archive


def _read_config(archive):
    """Returns the configuration in a `.keras` file."""
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename!r} is compressed, which Keras never does")
    sizes = [archive.getinfo(name).file_size for name in (_CONFIG, _WEIGHTS)]
    return _parse_config(lambda: archive.read(_CONFIG), *sizes)


def _count_stored(archive):
    """Returns the `_Stored` of a `.keras` file."""
    # In memory, because HDF5 seeks, for which a zip file would start over.
    return _measure_hdf5(io.BytesIO(archive.read(_WEIGHTS)))


def _open_folder(folder):
    """Returns the configuration of a model in a folder, and its `_Stored`."""
    files = [folder / _CONFIG, folder / _WEIGHTS]
    for file in files:
        if not file.is_file():  # Keras would also open a pipe
            raise ValueError(f"it holds no file {file.name}")
    config = _parse_config(files[0].read_bytes, *(file.stat().st_size for file in files))
    with open_file(files[1]) as weights:
        return config, _measure_hdf5(weights)


def _parse_config(read, size, weights_size):
    if size > (largest := max(_ANY_CONFIG, weights_size)):
        raise ValueError(f"its {_CONFIG} has {size:,} bytes, more than {largest:,}")
    config = json.loads(read())
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise ValueError(f"its {_CONFIG} holds no configuration")
    return config


def _check_model(config, stored):
    config.pop("compile_config", None)  # Keras does not read it either
    _check_classes(config)
    largest = max(stored.size, _ANY_FILE)
    for name, number in _numbers(config):
        if number > largest:
            raise ValueError(
                f"{name}={number} is too large: the limit is {largest:,} with weights of "
                f"{stored.size:,} bytes"
            )
    steps = max((int(n) for name, n in _numbers(config) if "shape" in name), default=1)
    parts, largest = _count_parts(config, steps), _ANY_MODEL + _PARTS_PER_ARRAY * stored.arrays
    if parts > largest:
        raise ValueError(
            f"it has {parts:,} layers, levels and numbers in lists, more than the limit of "
            f"{largest:,} with {stored.arrays:,} arrays of weights"
        )
    _check_initial_weights(config, stored.numbers)
    # In a thread, so that Keras' thread-local notes on variables without values are discarded.
    with ThreadPoolExecutor(1) as thread:
        claimed = thread.submit(_count_weights, config).result()
    if claimed > stored.numbers:
        raise ValueError(
            f"its model would have {claimed:,} weights, but it holds {stored.numbers:,}"
        )


def _check_classes(config):
    """Raises ValueError unless this is one of our models, with only allowlisted classes."""
    kind = _our_class(config)
    if kind is None or not issubclass(kind, keras.Model):
        raise ValueError(
            f"it holds {_class_name(config)}, which is not a model of trellis_keras. If you trust "
            "the file, use `keras.saving.load_model`"
        )
    # The only dict in a configuration that may contain arbitrary strings.
    own = dict(config["config"])
    if _names(own.get("vocabulary"), _VOCABULARY):
        del own["vocabulary"]
    for part in _parts({**config, "config": own}):
        if isinstance(part, str):
            if keras.saving.get_registered_object(part) is not None:
                raise ValueError(f"{part!r} is a class, but a value is expected")
        elif part.get("compile_config"):
            raise ValueError(f"it contains a compiled model, {_class_name(part)}")
        elif "class_name" in part and _our_class(part) is None and not _is_allowed(part):
            raise ValueError(
                f"it contains {_class_name(part)}. From untrusted files, only layers of "
                "trellis_keras and computing layers of Keras are loaded. If you trust the file, "
                "use `keras.saving.load_model`"
            )


def _parts(config):
    """Yields all dicts and strings in a configuration, except class names."""
    if isinstance(config, dict):
        yield config
        for key, value in config.items():
            if not (isinstance(value, str) and key in ("class_name", "registered_name")):
                yield from _parts(value)
    elif isinstance(config, list):
        for value in config:
            yield from _parts(value)
    elif isinstance(config, str):
        yield config


def _names(part, registered_name):
    """Returns whether a configuration belongs to one of our classes."""
    return isinstance(part, dict) and (
        part.get("registered_name") == registered_name == f"{_OURS}{part.get('class_name')}"
    )


def _our_class(part):
    """Returns our layer or initializer that a configuration names, or `None`."""
    name = part.get("registered_name")
    if not (isinstance(name, str) and _names(part, name)):
        return None
    found = keras.saving.get_registered_object(name)
    computes = (keras.Layer, keras.initializers.Initializer)
    return found if isinstance(found, type) and issubclass(found, computes) else None


def _is_allowed(part):
    name = part["class_name"]
    if name == "__keras_tensor__":  # connects the layers of a functional model
        return True
    has_own_name = part.get("registered_name") in (None, name)
    return has_own_name and (part.get("module"), name) in _ALLOWED


def _class_name(part):
    return f"{part.get('module')}.{part.get('class_name')}"


def _numbers(config, name=""):
    """Yields (name, value) of the numbers in a configuration, except seeds and references."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key != "shared_object_id" and not key.endswith("seed"):
                yield from _numbers(value, key)
    elif isinstance(config, list):
        for value in config:
            yield from _numbers(value, name)
    elif isinstance(config, (int, float)):
        yield name, abs(config)


def _count_parts(config, steps, key="", repeats=1, is_called=False):
    """Counts the layers, levels and numbers in lists of a configuration, without shapes.

    Args:
        config: The configuration, or a part of it.
        steps: Integer, what the layers that Keras unrolls over time count for each.
        key: The key of the part.
        repeats: Integer, how often the part is repeated by the unrolled layers that contain it.
        is_called: Boolean, whether a model calls the part as soon as it is built.
    """
    if isinstance(config, dict):
        own, name = config.get("config"), config.get("registered_name")
        if _is_unrolled(config):
            repeats *= steps
        is_keras = config.get("module") == "keras.layers"
        count = repeats if is_keras else int("class_name" in config)
        if isinstance(own, dict) and (is_called or name not in _TIED):
            count += math.prod(abs(own[key]) for key in _REPEATS if isinstance(own.get(key), int))
        is_called = is_called or config.get("class_name") in _CALLING
        parts = config.items()
        return count + sum(
            _count_parts(part, steps, key, repeats, is_called) for key, part in parts
        )
    if isinstance(config, list):
        numbers = 0 if "shape" in key else sum(type(value) in (int, float) for value in config)
        return numbers + sum(_count_parts(part, steps, key, repeats, is_called) for part in config)
    return 0


def _is_unrolled(config):
    """Returns whether Keras makes each operation of a layer once for each step."""
    own = config.get("config")
    is_rnn = isinstance(own, dict) and own.get("unroll")
    return is_rnn or config.get("class_name") == "TimeDistributed"


def _check_initial_weights(config, stored):
    """Raises ValueError if an initializer draws more numbers than are stored.

    Only a `GateInitializer` draws more numbers than weights: `fan_in` rows.
    """
    for part in _parts(config):
        for value in part.values() if isinstance(part, dict) else ():
            if isinstance(value, dict) and _names(value, f"{_OURS}GateInitializer"):
                rows, columns = value["config"].get("fan_in") or 0, part.get("units")
                if columns is None or rows * columns > stored:
                    raise ValueError(
                        f"a GateInitializer with fan_in={rows} for units={columns} draws more "
                        f"numbers than the {stored:,} stored ones"
                    )


def _count_weights(config):
    """Returns the number of weights of a configuration's model."""
    with keras.StatelessScope(initialize_variables=False):
        model = keras.saving.deserialize_keras_object(config)
    return sum(math.prod(variable.shape) for variable in model.weights)


class _Stored(NamedTuple):
    """The contents of an HDF5 file: bytes, arrays, and numbers in them."""

    size: int
    arrays: int
    numbers: int


def _measure_hdf5(file: BinaryIO) -> _Stored:
    """Measures an untrusted HDF5 file, after checking that it refers to no other file.

    Raises:
        ValueError: If a link is not a hard link, an array has external data or variable-length
            elements, groups are nested too deeply, arrays claim more bytes than the file has, or
            the length differs from the stated one. The message does not name the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    end = _stated_length(file.read(_SUPERBLOCK))
    if end is None:
        raise ValueError("it does not start as an HDF5 file")
    if end != size:
        raise ValueError(f"its stated length is {end:,} bytes, but it has {size:,}")
    try:
        with h5py.File(file, "r") as content:
            arrays = list(_arrays(content.id, "", set()))
    except OSError as error:  # h5py's error for a damaged file may look like a disk error
        raise ValueError(str(error)) from error
    claimed = sum(numbers * itemsize for numbers, itemsize in arrays)
    if claimed > size:
        raise ValueError(f"its arrays claim {claimed:,} bytes, but it has {size:,}")
    return _Stored(size, len(arrays), sum(numbers for numbers, _ in arrays))


def _arrays(
    group: h5py.h5g.GroupID, path: str, seen: set[int], depth: int = 1
) -> Iterator[tuple[int, int]]:
    """Yields (number of elements, bytes of each) for the arrays in an HDF5 group and its groups."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its groups are nested more than {_MAX_DEPTH} levels deep")
    _check_attributes(group, path)
    names: list[bytes] = []
    # From the index used for looking up names. A file may have another one, by creation order.
    group.links.iterate(names.append)
    for name in names:
        place = f"{path}/{name.decode('utf-8', 'replace')}"
        # Before opening it, because a link may point to a pipe.
        if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{place!r} is a link to something else, which Keras never writes")
        item = h5py.h5o.open(group, name)
        address = h5py.h5o.get_info(item).addr
        if address in seen:  # groups may contain each other
            continue
        seen.add(address)
        if isinstance(item, h5py.h5g.GroupID):
            yield from _arrays(item, place, seen, depth + 1)
        elif isinstance(item, h5py.h5d.DatasetID):
            yield _measure(item, place)


def _measure(array, place):
    """Returns the number of elements in an HDF5 array, and the bytes of each."""
    properties = array.get_create_plist()
    # Before reading its shape, which depends on other files for a virtual array.
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ValueError(f"{place!r} stores its values in other files")
    if properties.get_layout() == h5py.h5d.CHUNKED:  # a chunk may be larger than the array
        raise ValueError(f"{place!r} is stored in chunks, which Keras never writes")
    _check_attributes(array, place)
    if array.dtype.hasobject:
        raise ValueError(f"{place!r} has elements of varying length")
    return h5py.Dataset(array).size or 0, array.dtype.itemsize


def _check_attributes(item, place):
    for index in range(h5py.h5a.get_num_attrs(item)):
        attribute = h5py.h5a.open(item, index=index)
        if attribute.dtype.hasobject and attribute.shape:
            raise ValueError(f"an attribute of {place or '/'!r} has elements of varying length")


def _stated_length(superblock):
    """Returns the length that an HDF5 file states, None if it is not an HDF5 file."""
    if len(superblock) < _SUPERBLOCK or not superblock.startswith(b"\x89HDF\r\n\x1a\n"):
        return None
    # Depends on the version of the format; h5py writes the oldest.
    place = {0: 40, 1: 44, 2: 28, 3: 28}.get(superblock[8])
    return None if place is None else struct.unpack_from("<Q", superblock, place)[0]
