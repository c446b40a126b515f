"""One step of a stream as operations on buffers of numbers.

Every number of a step has an address, and a tensor is an array of addresses (`Cells`): operations
that only move numbers change the arrays, and leave nothing to compute.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Cells:
    """A tensor as the addresses of its numbers."""

    at: np.ndarray


@dataclasses.dataclass(frozen=True)
class Ring:
    """A state as a ring of rows: each step overwrites the oldest row and moves the head by one."""

    rows: int
    width: int  # numbers in a row
    head: int  # number of the counter of the oldest row; rings that move together share it


@dataclasses.dataclass(eq=False)
class Buffer:
    """Consecutive numbers."""

    kind: str  # "input", "state", "constant", "work" or "output"
    base: int  # address of the first number
    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray | None = None  # of a constant, and the initial values of a state
    scope: str = ""  # path of the layer that it belongs to
    name: str = ""  # what it holds, such as "kernel"
    ring: Ring | None = None  # of a state
    bits: int = 0  # fractional bits of integers: q stands for q / 2**bits
    exponents: Any = 0  # integers, one or an array: the numbers are scaled by 2**exponents

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def cells(self) -> np.ndarray:
        """The addresses of the elements, an array of the buffer's shape."""
        return np.arange(self.base, self.base + self.size, dtype="int32").reshape(self.shape)


Guard = frozenset[int]  # addresses of conditions that all hold where a result is needed


@dataclasses.dataclass(eq=False)
class Op:
    """An operation that writes a buffer.

    - "map": an element-by-element function `name`, of Keras or in C, of the vectors `args`, and of
      tables: args of shape (1, n);
    - "product": args[0] + sum_i args[i] matrices[i], with args[0] of shape (rows, n), the other
      args of shapes (rows, m_i), and matrices (m_i, n);
    - "dot": the sums over the first axis of args[0] * args[1], both of shape (terms, n);
    - "reduce": the sums, maxima, ... (`name`) over the first axis of args[0], of shape (terms, n);
    - "gather": the row args[0] of the table matrices[0];
    - "copy": args[0];
    - "store": args[0], written to a state; to a ring, as its newest row;
    - "call": the C function `name` of a row of the results, of the rows of `args` (an empty one is
      NULL), and of `numbers`.
    """

    kind: str
    name: str
    buffer: Buffer
    args: list[np.ndarray]  # addresses
    matrices: list[np.ndarray] = dataclasses.field(default_factory=list)
    scope: str = ""  # path of the layer that it belongs to
    guard: Guard = frozenset()  # outside of it nothing reads the result
    start: int = 0  # the first element of the buffer that it writes
    numbers: Sequence[int] = ()
    words: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a C function: replacements

    @property
    def size(self) -> int:
        """Number of results."""
        return self.buffer.size


class Program:
    """Buffers, and the operations on them in order."""

    def __init__(self, real: str = "float32") -> None:
        self.real = real  # the dtype of all floating-point numbers, "float32" or "float64"
        self.ops: list[Op] = []
        self.stores: list[Op] = []  # write the states at the end of a step
        self.inputs: list[Buffer] = []
        self.output = np.zeros(0, "int32")  # addresses
        self.output_sizes: list[int] = []  # of the parts of `output`
        self.buffers: list[Buffer] = []  # by address
        self._bases: np.ndarray | None = None  # of `buffers`, unless outdated
        self._constants: dict[tuple, Buffer] = {}
        self.constant(np.zeros(1, "float32"))  # address 0 is the number 0, as `ops.pad` writes it

    @property
    def states(self) -> list[Buffer]:
        """The state buffers."""
        return [b for b in self.buffers if b.kind == "state"]

    def buffer(self, kind: str, shape: Sequence[int], dtype: str, **options: object) -> Buffer:
        """Adds a buffer and returns it."""
        base = self.buffers[-1].base + self.buffers[-1].size if self.buffers else 0
        dtype = self.element_type(dtype)
        self.buffers.append(Buffer(kind, base, tuple(shape), dtype, **options))  # type: ignore
        self._bases = None
        return self.buffers[-1]

    def element_type(self, dtype: str) -> str:
        """Returns the dtype in which numbers of a Keras dtype are kept.

        Integers have 64 bits, so that counters have no end.
        """
        return self.real if "float" in dtype else "bool" if dtype == "bool" else "int64"

    def constant(self, value: object, scope: str = "", name: str = "constant") -> np.ndarray:
        """Returns the addresses of constants, which are stored once."""
        value = np.asarray(value)
        value = value.astype(self.element_type(value.dtype.name))
        key = value.shape, value.dtype.str, value.tobytes()
        if key not in self._constants:
            self._constants[key] = self.buffer(
                "constant", value.shape, value.dtype.name, data=value, scope=scope, name=name
            )
        return self._constants[key].cells

    def divide(self, buffer: Buffer, parts: list[Buffer]) -> None:
        """Replaces a buffer by buffers of consecutive parts of it."""
        i = self.buffers.index(buffer)
        self.buffers[i : i + 1] = parts
        self._bases = None

    def owner(self, address: int) -> Buffer:
        """Returns the buffer with an address."""
        return self.buffers[bisect.bisect_right(self.buffers, address, key=lambda b: b.base) - 1]

    def owners(self, cells: np.ndarray) -> list[Buffer]:
        """Returns the buffers with addresses of an array, in order."""
        if cells.size <= 1:
            return [self.owner(int(address)) for address in cells.flat]
        low, high = int(cells.min()), int(cells.max())
        first = self.owner(low)
        if high < first.base + first.size:
            return [first]
        if self._bases is None:
            self._bases = np.array([b.base for b in self.buffers])
        found = np.searchsorted(self._bases, cells.reshape(-1), "right") - 1
        return [self.buffers[i] for i in np.unique(found)]

    def values(self, cells: np.ndarray) -> np.ndarray | None:
        """Returns the numbers at addresses, or `None` if not all are constant."""
        owners = self.owners(cells)
        if not all(b.kind == "constant" for b in owners):
            return None
        if not owners:
            return np.zeros(cells.shape, "float32")
        out = np.zeros(cells.shape, np.result_type(*(b.dtype for b in owners)))
        for b in owners:
            assert b.data is not None  # a constant
            inside = (cells >= b.base) & (cells < b.base + b.size)
            out[inside] = b.data.reshape(-1)[cells[inside] - b.base]
        return out

    def reads(self, ops: Iterable[Op]) -> set[Buffer]:
        """Returns the buffers that operations read."""
        return {b for op in ops for cells in op.args for b in self.owners(cells)}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements start to stop of a vector: offset + i stride of a buffer, in one row of a ring."""

    start: int
    stop: int
    buffer: Buffer
    offset: int
    stride: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def pieces(program: Program, cells: np.ndarray) -> list[Piece]:
    """Cuts a vector of addresses into pieces."""
    cells = np.asarray(cells, "int64").reshape(-1)
    n = len(cells)
    steps = np.diff(cells)
    owners = program.owners(cells)
    is_cut = np.zeros(n + 1, bool)  # whether a piece must end before element i
    if len(owners) > 1:
        bases = np.array([b.base for b in owners])
        is_cut[1:n] |= np.diff(np.searchsorted(bases, cells, "right")) != 0
    for b in owners:
        if b.ring is not None:
            rows = np.where((cells >= b.base) & (cells < b.base + b.size), cells - b.base, -1)
            is_cut[1:n] |= np.diff(rows // b.ring.width) != 0
    is_turn = np.zeros(n + 1, bool)  # whether the stride changes at element i
    is_turn[2:n] = steps[1:] != steps[:-1]
    cuts, turns = np.append(np.flatnonzero(is_cut), n), np.append(np.flatnonzero(is_turn), n)
    found, start = [], 0
    while start < n:
        stop = int(cuts[np.searchsorted(cuts, start + 1)])
        if stop > start + 1:  # the stride is that of the first two elements
            stop = min(stop, int(turns[np.searchsorted(turns, start + 2)]))
        b = owners[0] if len(owners) == 1 else program.owner(int(cells[start]))
        stride = int(steps[start]) if stop > start + 1 else 1
        found.append(Piece(start, stop, b, int(cells[start] - b.base), stride))
        start = stop
    return found


@dataclasses.dataclass(frozen=True)
class Grid:
    """A matrix of addresses: offset + i strides[0] + k strides[1] of a buffer."""

    buffer: Buffer
    offset: int
    strides: tuple[int, int]


def as_grid(program: Program, cells: np.ndarray) -> Grid | None:
    """Returns a matrix of addresses as a `Grid`, or `None` if they do not form one."""
    rows, columns = cells.shape
    first = int(cells[0, 0])
    strides = (
        int(cells[1, 0]) - first if rows > 1 else 0,
        int(cells[0, 1]) - first if columns > 1 else 0,
    )
    regular = first + strides[0] * np.arange(rows)[:, None] + strides[1] * np.arange(columns)
    if not np.array_equal(regular, cells):
        return None
    owners = program.owners(cells)
    if len(owners) > 1:
        return None
    (b,) = owners
    if b.ring is not None:
        in_row = (cells[[0, -1]][:, [0, -1]] - b.base) // b.ring.width
        if np.any(in_row != in_row[0, 0]):
            return None
    return Grid(b, first - b.base, strides)


def taps(parts: list[Piece]) -> Iterator[tuple[int, int]]:
    """Yields runs (first, count) of pieces in equally distant rows of one ring."""
    i = 0
    while i < len(parts):
        count, p = 1, parts[i]
        if p.buffer.ring is not None and i + 1 < len(parts):
            step = parts[i + 1].offset - p.offset
            if step > 0 and step % p.buffer.ring.width == 0:
                while i + count < len(parts):
                    other = parts[i + count]
                    if other.buffer is not p.buffer or other.size != p.size:
                        break
                    if other.offset != p.offset + count * step:
                        break
                    count += 1
        yield i, count
        i += count
