"""Reads files of `torch.save(model.state_dict(), path)` without PyTorch, and without unpickling.

Such a file says what it holds as a program for Python's `pickle`, and to unpickle it would run
whatever it asks for. Here the program's instructions are read one by one. Only those are known that
a mapping from names to tensors needs; nothing is imported, and nothing is called by name. No more
memory is taken than the file has bytes, whatever sizes it claims.
"""

import dataclasses
import io
import math
import os
import pickletools
import zipfile

import numpy as np

from trellis_keras.files import open_archive

_TYPES = {
    "torch DoubleStorage": "<f8",
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
    "torch ShortStorage": "<i2",
    "torch CharStorage": "i1",
    "torch ByteStorage": "u1",
    "torch BoolStorage": "?",
}
# The first number of a file of PyTorch before 1.6, which is not a zip archive.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_ASTRAY = (
    zipfile.BadZipFile,
    OSError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
)
# More numbers than any file holds; their bytes are still an integer of 64 bits.
_MANY = 2**48


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Numbers that lie one after another in the file."""

    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A view of a storage, all in numbers, not bytes."""

    storage: _Storage
    offset: int
    shape: tuple
    strides: tuple


def read_state_dict(path):
    """Returns a state dict's tensors as NumPy arrays, by name.

    Args:
        path: A file that `torch.save` wrote, of any version of PyTorch.

    Raises:
        ValueError: It holds something else, or is damaged.
        OSError: It cannot be read.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            if zipfile.is_zipfile(file):
                with open_archive(file) as archive:
                    return _read_archive(archive, size)
            file.seek(0)
            # In memory: a file would set aside as much as an instruction claims to read.
            return _read_old(io.BytesIO(file.read()))
        # What zipfile and the reader of instructions raise where they are led astray.
        except _ASTRAY as error:
            raise ValueError(f"it makes no sense ({error!r})") from error


def _read_archive(archive, size):
    members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    if "data.pkl" not in members:
        raise ValueError("it is a zip archive without a file data.pkl")
    # As PyTorch writes it: what is inside is no larger than the file.
    if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
        raise ValueError("it is compressed, which PyTorch does not do")
    if sum(member.file_size for member in members.values()) > size:
        raise ValueError("it would unpack to more than it is")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise ValueError("its numbers are not in little-endian order")

    def content(key):
        if f"data/{key}" not in members:
            raise ValueError(f"it lacks the numbers data/{key}")
        return archive.read(members[f"data/{key}"])

    return _arrays(_run(archive.read(members["data.pkl"])), content)


def _read_old(file):
    """The form before PyTorch 1.6: programs for three notes, the mapping and the storages' keys,
    then for each of these keys how many numbers there are, and the numbers."""
    if _run(file) != _OLD_MAGIC:
        raise ValueError("it does not begin as a file of torch.save does")
    _version, _machine, mapping, keys = (_run(file) for _ in range(4))
    sizes = {storage.key: storage.size * storage.dtype.itemsize for storage in _storages(mapping)}
    contents = {}
    for key in keys:
        if not isinstance(key, str) or key not in sizes or len(file.read(8)) != 8:
            raise ValueError("its storages are not those of its tensors")
        contents[key] = file.read(sizes[key])
    return _arrays(mapping, lambda key: contents.get(key, b""))


def _storages(mapping):
    return [tensor.storage for tensor in _tensors(mapping).values()]


def _tensors(mapping):
    if not isinstance(mapping, dict) or not all(
        isinstance(name, str) and isinstance(value, _Tensor) for name, value in mapping.items()
    ):
        raise ValueError("it is no mapping of names to tensors")
    return mapping


def _arrays(mapping, content):
    storages = {}
    for storage in _storages(mapping):
        if storage not in storages:
            numbers = content(storage.key)
            if len(numbers) != storage.size * storage.dtype.itemsize:
                raise ValueError(
                    f"{storage.size:,} numbers of type {storage.dtype} are announced, but there "
                    f"are {len(numbers):,} bytes"
                )
            storages[storage] = np.frombuffer(numbers, storage.dtype)
    return {name: _view(tensor, storages[tensor.storage]) for name, tensor in mapping.items()}


def _view(tensor, numbers):
    # Where there is one number there is no next one, and torch leaves any stride there.
    shape = tensor.shape
    strides = [stride * (n > 1) for n, stride in zip(shape, tensor.strides, strict=True)]
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if math.prod(shape) > len(numbers) or (0 not in shape and tensor.offset + last >= len(numbers)):
        raise ValueError(
            f"a tensor of shape {shape}, strides {tensor.strides} and offset {tensor.offset} does "
            f"not fit into its {len(numbers):,} numbers"
        )
    strides = [stride * numbers.itemsize for stride in strides]
    start = numbers[min(tensor.offset, len(numbers)) :]
    return np.lib.stride_tricks.as_strided(start, shape, strides, writeable=False)


def _run(program):
    """Returns what a pickle program makes, out of dicts, tuples, lists, numbers and tensors.

    Args:
        program: Its bytes, or a file, which is read up to the program's end.
    """
    return _Machine().run(program)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL"}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack that the instructions work on. A global name stays the text it is."""

    def __init__(self):
        self.stack, self.marks, self.memo = [], [], {}

    def run(self, program):
        for instruction, argument, _ in pickletools.genops(program):
            name = instruction.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _VALUES:
                self.stack.append(argument)
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _TUPLES:
                self.stack.append(tuple(self.taken(len(self.stack) - _TUPLES[name])))
            elif name in ("BINPUT", "LONG_BINPUT"):
                self.memo[argument] = self.stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self.stack.append(self.memo[argument])
            elif name != "PROTO":
                self.change(name)

    def change(self, name):
        """Runs an instruction that takes values off the stack."""
        match name:
            case "MARK":
                self.marks.append(len(self.stack))
            case "TUPLE":
                self.stack.append(tuple(self.taken(self.marks.pop())))
            case "APPENDS":
                items = self.taken(self.marks.pop())
                self.stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                pairs = self.taken(len(self.stack) - 2 if name == "SETITEM" else self.marks.pop())
                if not all(isinstance(key, str) for key in pairs[::2]):
                    raise ValueError("no mapping of names to tensors has other keys than texts")
                self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
            case "BINPERSID":
                self.stack.append(_storage(*self.stack.pop()))
            case "REDUCE":
                function, arguments = self.taken(len(self.stack) - 2)
                self.stack.append(_made(function, arguments))
            case "BUILD":  # a dict's attributes: versions of the modules
                self.stack.pop()
            case _:
                raise ValueError(f"no mapping of names to tensors needs the instruction {name}")

    def taken(self, start):
        """Takes the values from a place on off the stack."""
        if not 0 <= start <= len(self.stack):
            raise ValueError("its instructions take more than there is")
        values = self.stack[start:]
        del self.stack[start:]
        return values


def _made(function, arguments):
    if function == "collections OrderedDict" and arguments == ():
        return {}
    if function == "torch._utils _rebuild_parameter":
        return arguments[0]
    if function == "torch._utils _rebuild_tensor_v2":
        storage, offset, shape, strides = arguments[:4]
        sizes = (offset, *shape, *strides)
        sound = all(type(n) is int and 0 <= n < _MANY for n in sizes)
        if isinstance(storage, _Storage) and sound and len(shape) == len(strides):
            return _Tensor(storage, offset, shape, strides)
    raise ValueError(f"no mapping of names to tensors calls {function!r}")


def _storage(kind, dtype, key, _location, size, *_view):
    if kind != "storage" or not isinstance(dtype, str) or dtype not in _TYPES:
        raise ValueError(f"it holds no numbers that NumPy knows, but {dtype!r}")
    if not isinstance(key, str) or type(size) is not int or not 0 <= size < _MANY:
        raise ValueError(f"the storage {key!r} cannot have {size!r} numbers")
    return _Storage(key, np.dtype(_TYPES[dtype]), size)
