"""Formats of a program's numbers as integers, from representative inputs.

A buffer is in fixed point: q stands for q / 2**bits, with as many fractional bits as the largest
value on representative inputs allows. Integers and conditions of the program are what they are.
Sums, squares of sums, and single numbers have 32 bits, other numbers 16, means over all steps 64.
"""

import copy
import dataclasses
import math
from typing import Any

import numpy as np

from keras_streams.cells import Buffer, Op, Program
from keras_streams.fixed_scales import scale_channels
from keras_streams.lower import MAPS
from keras_streams.passes import Group

HUGE = 1e30  # larger numbers stand for infinity, and saturate
WIDE_BITS = 30  # of a number with 32 bits
MEAN_BITS = 46  # of a mean over all steps: the share of one among 2^30 steps counts
_LIMITS = {"int8": 15, "int16": 15, "int32": WIDE_BITS, "fixed64": MEAN_BITS}
_FAR = 12  # below all finite values, stands for minus infinity: its exponential is 0 in 16 bits
_HEADROOM = 1.25  # for inputs larger than the representative ones


@dataclasses.dataclass
class FixedProgram:
    """A program whose buffers have the formats of integers.

    Attributes:
        program, groups: The program, and its operations in the order of execution.
        floats: A copy of both whose buffers have their floating-point formats.
        front: The maps of the inputs alone in the copy, such as a standardization.
        ranges: Dict from buffer to its smallest and largest scaled value on representative inputs.
    """

    program: Program
    groups: list[Group]
    floats: tuple[Program, list[Group]]
    front: list[Op]
    ranges: dict[Buffer, tuple[float, float]]


def calibrate(
    program: Program, groups: list[Group], x: np.ndarray, small_rings: bool
) -> FixedProgram:
    """Chooses the formats of a program's buffers.

    Args:
        program, groups: The program, and its operations by `passes.optimize(contiguous=True)`.
        x: Representative inputs (rows, steps, inputs), or tokens (rows, steps).
        small_rings: Boolean, whether the rings that only products read have 8 bits.

    Raises:
        ValueError: If a layer receives no samples, or integers do not fit into 16 bits.
    """
    # Wide buffers have 32 bits, or in means 64.
    means, wide = _means(program, groups), _before_logarithms(program, groups)
    groups = _read_in_16(program, groups, means | wide)
    limits, infinite = _limits(program, groups, x)
    whole = _whole_inputs(program, groups, x)
    front = _front(program, groups)
    if front and front[-1].buffer in means | wide:  # `quantize` returns 16 bits
        front = []
    groups = [rest for group in groups if (rest := [op for op in group if op not in front])]
    source: Buffer | None = front[-1].buffer if front else program.inputs[0]
    if len(program.inputs) > 1 or program.inputs[0].dtype != program.real:
        source = None
    scaling = scale_channels(program, groups, source, limits, small_rings)
    shared = _shared_formats(program, groups, means)
    ranges = _ranges(program, limits, infinite, shared)
    first = [*front, *scaling]  # the C function `quantize` computes them
    floats = copy.deepcopy((program, [[op] for op in first] + groups))
    if first:
        program.inputs = [first[-1].buffer]
        program.inputs[0].kind = "input"
        front = [op for (op,) in floats[1][: len(front)]]
    whole &= {*program.inputs}  # `quantize` reads the others as floats
    _choose_types(program, groups, means, wide, shared, small_rings)
    for b in program.buffers:
        if b.kind != "constant" and b.dtype in _LIMITS:
            low, high = ranges.get(b, (0.0, 0.0))
            largest = max(-low, high, 0.0)
            if b in whole and largest > 32767:
                raise ValueError(
                    "Integers above 32767 do not fit into 16 bits. Use smaller ids, or export "
                    f"without `quantization`. Received: {largest:.0f}"
                )
            b.bits = 0 if b in whole else fractional_bits(largest, _LIMITS[b.dtype])
    return FixedProgram(program, groups, floats, front, ranges)


def fractional_bits(largest: float, limit: int = 15) -> int:
    """Returns the most fractional bits with which values up to `largest` fit into 16 bits.

    With a `limit` of 30, into 32 bits.
    """
    if largest == 0:
        return 15
    return min(math.floor(math.log2((2**limit - 1) / (_HEADROOM * largest))), limit + 15)


def simulate(program: Program, groups: list[Group], x: np.ndarray, observe: Any) -> None:
    """Runs a program in NumPy. See `calibrate` for the other arguments.

    `observe(buffer, values)` is called for the initial states, the inputs and all results.
    """
    x = x[..., None] if x.ndim == 2 else x
    size = max(b.base + b.size for b in program.buffers)
    memory = np.zeros((size, len(x)))
    for b in program.buffers:
        if b.data is not None:
            data = b.data.reshape(-1, 1).astype("float64")
            memory[b.base : b.base + b.size] = data
            if b.kind == "state":
                observe(b, data)
    for t in range(x.shape[1]):
        start = 0
        for b in program.inputs:
            memory[b.base : b.base + b.size] = x[:, t, start : start + b.size].T
            observe(b, memory[b.base : b.base + b.size])
            start += b.size
        for op in (op for group in groups for op in group):
            due = np.all(memory[sorted(op.guard)] != 0, axis=0)  # which rows
            if due.all():
                _run(op, memory, observe)
            elif due.any():
                some = memory[:, due]
                _run(op, some, observe)
                memory[:, due] = some


def _run(op, memory, observe):
    b = op.buffer
    args = [memory[cells] for cells in op.args]
    if op.kind == "map":
        with np.errstate(all="ignore"):
            y = MAPS[op.name].numpy(*args)
            y = np.trunc(y) if op.name == "Cast" and b.dtype == "int64" else y
    elif op.kind == "product":
        y = args[0]
        observe(b, y)
        for vector, matrix in zip(args[1:], op.matrices, strict=True):
            y = y + np.einsum("rib,io->rob", vector, matrix)
            observe(b, y)  # also of partial sums
    elif op.kind == "dot":
        y = np.sum(args[0] * args[1], axis=0)
    elif op.kind == "reduce":
        y = getattr(np, op.name)(args[0], axis=0)
    elif op.kind == "gather":
        index = args[0][0].astype(int)
        y = op.matrices[0][np.clip(index, 0, len(op.matrices[0]) - 1)].T
    else:  # copy and store
        y = args[0]
        if b.ring is not None:
            rest = memory[b.base + b.ring.width : b.base + b.size]
            memory[b.base : b.base + b.size] = np.concatenate([rest, y])
            return
    memory[b.base : b.base + b.size] = np.reshape(y, (b.size, -1))
    observe(b, y)


def _operations(groups):
    return [op for group in groups for op in group]


_LINEAR = {"Add", "Subtract", "Negative", "Where"}


def _means(program, groups):
    """Returns the buffers between a division by a count of steps and the state that it changes.

    They are those of a mean over all steps: a sample changes it by a small share.
    """
    following, divided = set(), set()
    for op in _operations(groups):
        by_count = op.name == "Divide" and all(
            b.dtype == "int64" and b.kind != "constant" for b in program.owners(op.args[1])
        )
        if by_count:
            divided.add(op.buffer)
        if by_count or op.name in _LINEAR or op.kind in ("copy", "store"):
            for b in program.reads([op]):
                if b.kind != "constant" and b.dtype == op.buffer.dtype == program.real:
                    following.add((b, op.buffer))

    def reached(edges):
        found, new = set(), divided
        while new:
            new = {b for a, b in edges if a in new} - found
            found |= new
        return found

    return reached(following) & reached({(b, a) for a, b in following})


_LOGARITHMS = {"Log", "Log1p"}
_WIDE_MAPS = {
    *("Add", "Subtract", "Multiply", "Square", "Negative", "Absolute"),
    *("Maximum", "Minimum", "Where", "Sqrt"),
}


def _before_logarithms(program, groups):
    """Returns the buffers from which logarithms are computed: powers and energies.

    Small values count as much as large ones there, so they have 32 bits, and the weights of their
    products 16.
    """
    writers, found = {op.buffer: op for op in _operations(groups)}, set()
    logarithms = [op for op in writers.values() if op.name in _LOGARITHMS]
    new = {b for op in logarithms for b in program.owners(op.args[0])}
    while new:
        b = new.pop()
        op = writers.get(b)
        if op is None or b in found or b.dtype != program.real:
            continue
        is_product = op.kind == "product" and program.values(op.args[0]) is not None
        if op.kind in ("reduce", "copy") or is_product or op.name in _WIDE_MAPS:
            found.add(b)
            new |= program.reads([op])
    narrow = None
    while narrow != set():  # a copy of both is narrow
        copies = {b: program.reads([writers[b]]) for b in found if writers[b].kind == "copy"}
        narrow = {b for b, of in copies.items() if any(a.kind != "constant" for a in of - found)}
        found -= narrow
    return found


def _read_in_16(program, groups, wide):
    """Casts numbers of more than 16 bits for the operations that read 16."""
    found = []

    def cast(cells, scope, guard):
        if not wide & set(program.owners(cells)):
            return cells
        buffer = program.buffer("work", cells.shape, program.real, scope=scope)
        found.append([Op("map", "Cast", buffer, [cells.reshape(-1)], scope=scope, guard=guard)])
        return buffer.cells

    for group in groups:
        (first, *_) = group
        if first.kind not in ("map", "reduce") and first.buffer not in wide:
            first.args = [cast(cells, first.scope, first.guard) for cells in first.args]
        found.append(group)
    program.output = cast(program.output, "", frozenset())
    return found


def _shared_formats(program, groups, means):
    """Returns {buffer: another} of the buffers that share their format, up to one in common."""
    parents: dict[Buffer, Buffer] = {}

    def join(buffers):
        roots = {
            _root(parents, b): None
            for b in buffers
            if b.kind != "constant" and b.dtype == program.real
        }
        for other in list(roots)[1:]:
            parents[other] = next(iter(roots))

    for op in _operations(groups):
        if op.kind in ("copy", "store"):
            join([op.buffer, *program.owners(op.args[0])])
        elif op.kind in ("product", "dot", "reduce"):
            for cells in op.args[op.kind == "product" :]:
                join(program.owners(cells))
    join(program.owners(program.output))
    join(means)
    return parents


def _root(parents, b):
    while b in parents:
        b = parents[b]
    return b


def _limits(program, groups, x):
    """Returns the finite limits of all numbers on representative inputs.

    Returns:
        Dict from buffer to the smallest and largest values, (2, size), and the buffers with minus
        infinity.
    """
    limits: dict[Buffer, np.ndarray] = {}
    infinite = set()

    def observe(b, value):
        value = np.reshape(value, (b.size, -1))
        with np.errstate(invalid="ignore"):
            within = np.abs(value) < HUGE
        low, high = limits.get(b, np.multiply.outer([np.inf, -np.inf], np.ones(b.size)))
        low = np.minimum(low, np.min(value, axis=1, initial=np.inf, where=within))
        high = np.maximum(high, np.max(value, axis=1, initial=-np.inf, where=within))
        limits[b] = np.stack([low, high])
        if np.any(value <= -HUGE):
            infinite.add(b)

    simulate(program, groups, x, observe)
    if any(op.buffer not in limits for op in _operations(groups) if op.kind != "store"):
        raise ValueError(
            "`representative_data` must have more steps, so that all layers receive samples. "
            f"Received: shape {x.shape}"
        )
    return limits, infinite


def _ranges(program, limits, infinite, shared):
    """Returns {buffer: (smallest, largest)} of the numbers with exponents."""
    ranges: dict[Buffer, tuple[float, float]] = {}
    for b, ends in limits.items():
        key = _root(shared, b)
        low, high = ranges.get(key, (math.inf, -math.inf))
        lows, highs = ends * 2.0**b.exponents
        ranges[key] = float(np.min(lows, initial=low)), float(np.max(highs, initial=high))
    for key in {_root(shared, b) for b in infinite}:
        low, high = ranges[key]
        ranges[key] = low - _FAR, high
    roots = {b: _root(shared, b) for b in program.buffers}
    return {b: ranges[root] for b, root in roots.items() if root in ranges}


def _whole_inputs(program, groups, x):
    """Returns the inputs of whole numbers that are only read as such: tokens beside floats."""
    ends = np.cumsum([b.size for b in program.inputs])[:-1]
    parts = np.split(x.reshape(-1, x.shape[-1]), ends, axis=1)
    pairs = zip(program.inputs, parts, strict=True)
    whole = {b for b, values in pairs if np.array_equal(values, np.rint(values))}
    others = [op for op in _operations(groups) if op.name != "Cast" or op.buffer.dtype != "int64"]
    return whole - program.reads(others) - set(program.owners(program.output))


def _front(program, groups):
    """Returns the maps of the inputs alone, the last of which writes what all others read."""
    if len(program.inputs) > 1 or program.inputs[0].dtype == "int64":  # a token
        return []
    inside, found, rest = set(program.inputs), [], []
    for op in _operations(groups):
        variable = [cells for cells in op.args if program.values(cells) is None]
        owners = {b for cells in variable for b in program.owners(cells)}
        is_whole = all(
            np.array_equal(cells, program.owners(cells)[0].cells.reshape(-1)) for cells in variable
        )
        if op.kind == "map" and owners and owners <= inside and is_whole:
            inside.add(op.buffer)
            found.append(op)
        else:
            rest.append(op)
    read = inside & (program.reads(rest) | set(program.owners(program.output)))
    is_real = all(b.dtype == program.real for b in read)
    return found if len(read) == 1 and is_real and read <= {op.buffer for op in found} else []


def _choose_types(program, groups, means, wide, shared, small_rings):
    readers: dict[Buffer, list[Op]] = {}
    for op in _operations(groups):
        for b in program.reads([op]):
            readers.setdefault(b, []).append(op)
    tied = {*shared, *shared.values()}
    kept = means.union(program.owners(program.output))
    for b in wide:
        b.dtype = "int32"
    for op in _operations(groups):
        b, of = op.buffer, readers.get(op.buffer, [])
        if b.dtype != program.real or b in kept or op.kind not in ("map", "reduce"):
            continue
        if any(reader.kind in ("product", "dot") for reader in of):  # they read 16 bits
            continue
        squares = op.name in ("Square", "Multiply") and all(r.kind == "reduce" for r in of)
        is_sum = op.kind == "reduce" and op.name == "sum"
        if (b not in tied and (is_sum or (op.kind == "map" and b.size == 1))) or squares:
            b.dtype = "int32"
    for b in program.buffers:
        if b.kind != "constant" and b.dtype == program.real:
            b.dtype = "fixed64" if b in means else "int16"
    for b in program.states if small_rings else ():
        is_copied = all(op.kind == "copy" for op in readers.get(b, []))
        if b.ring is not None and b.dtype == "int16" and is_copied:
            b.dtype = "int8"
