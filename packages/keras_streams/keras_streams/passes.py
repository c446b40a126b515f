"""Transformations of a program: rings, merged sums, guards, fused maps, an order, and memory."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_streams.cells import Buffer, Op, Piece, Program, Ring, as_grid, pieces

Group = list[Op]  # operations that are printed as one: maps of equal size, or a single one
WIDTH = 96  # the widest block of sums that a product keeps in registers: 12 of AVX
_MOST_PIECES = 8  # of an operand that is read without a copy


def optimize(program: Program, contiguous: bool = False) -> list[Group]:
    """Applies all passes and returns the operations in groups, in the order of execution.

    With `contiguous`, products read only vectors outside of rings.
    """
    fold_states(program)
    remove_dead(program)
    find_integers(program)
    find_rings(program)
    remove_dead(program)
    merge_sums(program)
    remove_dead(program)
    find_guards(program)
    copy_scattered(program, contiguous)
    return schedule(program, fuse(program))


def remove_dead(program: Program) -> None:
    """Keeps the operations that the outputs and the next states depend on."""
    used = set(program.owners(program.output)) | program.reads(program.stores)
    used |= {program.owner(address) for store in program.stores for address in store.guard}
    kept = []
    for op in reversed(program.ops):
        if op.buffer in used:
            kept.append(op)
            used |= program.reads([op])
    program.ops = kept[::-1]


def fold_states(program: Program) -> None:
    """Makes constants of states that keep their initial value, such as the zeros below a level."""
    for store in list(program.stores):
        state, after = store.buffer, store.args[0]
        if state.data is None or not state.size or np.any(state.data != state.data.flat[0]):
            continue
        new = after[(after < state.base) | (after >= state.base + state.size)]
        values = program.values(new)
        if values is not None and np.all(values == state.data.flat[0]):
            state.kind = state.name = "constant"
            program.stores.remove(store)


def find_integers(program: Program) -> None:
    """Leaves out the conversion of integers, such as counters, that only maps read."""
    casts = [op for op in program.ops if op.name == "Cast"]
    whole = {
        op.buffer for op in casts if all(b.dtype == "int64" for b in program.owners(op.args[0]))
    }
    whole -= set(program.owners(program.output))
    for op in [*program.ops, *program.stores]:
        for cells in op.args:
            owners = program.owners(cells)
            if op.kind != "map" or not whole.issuperset(owners):  # no operand mixes both
                whole.difference_update(owners)
    for b in whole:
        b.dtype = "int64"


def condition(program: Program, op: Op) -> int | None:
    """Returns the address of the scalar condition of a "Where", or `None`."""
    if op.kind != "map" or op.name != "Where":
        return None
    address = int(op.args[0][0])
    owner = program.owner(address)
    is_scalar = np.all(op.args[0] == address) and owner.dtype == "bool"
    return address if is_scalar and owner.kind != "state" else None  # a state changes in the step


def find_rings(program: Program) -> None:
    """Finds the parts of states that shift by a row, conditionally or not, and makes them rings.

    Splits state buffers into rings and other parts, and sets what each is to store.
    """
    writers = {op.buffer: op for op in program.ops}
    heads: dict[tuple, int] = {}
    stores = []
    for store in program.stores:
        state, after, guard = store.buffer, store.args[0], frozenset[int]()
        while True:  # where(condition, new state, state)
            owners = program.owners(after)
            op = writers.get(owners[0]) if len(owners) == 1 else None
            address = None if op is None else condition(program, op)
            if op is None or address is None:
                break
            at = after - op.buffer.base
            if not np.array_equal(op.args[2][at], state.cells.reshape(-1)):
                break
            after, guard = op.args[1][at], guard | {address}
        parts = _parts(state, after)
        buffers = []
        for start, stop, rows in parts:
            data = None if state.data is None else state.data.reshape(-1)[start:stop]
            part = dataclasses.replace(
                state, base=state.base + start, shape=(stop - start,), data=data
            )
            new = after[start:stop]
            if rows:
                width = (stop - start) // rows
                head = heads.setdefault((rows, guard), len(heads))
                part.ring, new = Ring(rows, width, head), new[-width:]
            buffers.append(part)
            if not np.array_equal(new, part.cells):
                stores.append(Op("store", "", part, [new], scope=store.scope, guard=guard))
        program.divide(state, buffers)
    for store in stores:
        if any(b.kind == "state" for b in program.owners(store.args[0])):
            copied = _copy(program, store.args[0], store)  # read before another store
            program.ops.append(copied)
            store.args = [copied.buffer.cells.reshape(-1)]
    if {store.buffer for store in stores} & {*program.owners(program.output)}:
        buffer = program.buffer("work", program.output.shape, program.real)
        program.ops.append(Op("copy", "", buffer, [program.output]))
        program.output = buffer.cells  # read before a store
    program.stores = stores


def _parts(state: Buffer, after: np.ndarray) -> list[tuple[int, int, int]]:
    """Cuts a state into (start, stop, rows), with 0 rows for what is not a ring."""
    n = state.size
    inside = (after >= state.base) & (after < state.base + n)
    # The numbers after a state may be what it stores: they shift by a row too.
    shift = np.where(inside, after.astype("int64") - state.cells.reshape(-1), -1)
    if n == 0:
        return []
    ends = np.flatnonzero(np.diff(shift)) + 1
    parts, start = [], 0  # start: of the elements before the next ring
    for first, last in zip([0, *ends], [*ends, n], strict=True):
        width, length = int(shift[first]), int(last - first)
        if first < start or not 0 < width <= length or length % width or last + width > n:
            continue
        if start < first:
            parts.append((start, int(first), 0))
        start = int(last) + width
        parts.append((int(first), start, length // width + 1))
    return [*parts, (start, n, 0)] if start < n else parts


def _copy(program, cells, like):
    """Returns an operation that copies numbers, for an operation like `like`."""
    dtype = program.owner(int(cells.flat[0])).dtype
    buffer = program.buffer("work", cells.shape, dtype, scope=like.scope)
    return Op("copy", "", buffer, [cells.reshape(-1)], scope=like.scope, guard=like.guard)


def merge_sums(program: Program) -> None:
    """Merges sums of products, their biases and scales into one product."""
    readers: collections.Counter = collections.Counter()
    for cells in [program.output, *(a for op in [*program.ops, *program.stores] for a in op.args)]:
        readers.update(program.owners(cells))
    writers = {op.buffer: op for op in program.ops}

    def product(cells):
        """Returns the product that only `cells` read, or `None`."""
        op = writers.get(program.owner(int(cells[0])))
        if op is None or op.kind != "product" or readers[op.buffer] > 1:
            return None
        return op if np.array_equal(op.buffer.cells.reshape(-1), cells) else None

    for op in program.ops:
        if op.kind != "map" or op.name not in ("Add", "Multiply"):
            continue
        merged = [product(cells) for cells in op.args]
        factors = [p for p in merged if p is not None]
        others = [cells for cells, p in zip(op.args, merged, strict=True) if p is None]
        shapes = {p.args[0].shape for p in factors}
        if len(shapes) != 1:
            continue
        (shape,) = shapes
        if op.name == "Multiply":
            scale = None if len(factors) == 2 else program.values(others[0])
            start = program.values(factors[0].args[0])
            if scale is None or start is None:
                continue
            rows = scale.reshape(shape)
            if np.any(rows != rows[0]):
                continue
            args = [program.constant((start * rows).astype(op.buffer.dtype), op.scope, "bias")]
            matrices = [m * rows[0] for m in factors[0].matrices]
        else:
            starts = [*(p.args[0].reshape(-1) for p in factors), *others]
            values = [program.values(cells) for cells in starts]
            known = sum(v for v in values if v is not None)
            variable = [s for s, v in zip(starts, values, strict=True) if v is None]
            if len(variable) > 1 or (variable and np.any(known)):
                continue
            dtype = op.buffer.dtype
            bias = np.broadcast_to(np.asarray(known, dtype), op.size).reshape(shape)
            args = [
                variable[0].reshape(shape) if variable else program.constant(bias, op.scope, "bias")
            ]
            matrices = [m for p in factors for m in p.matrices]
        op.args = [*args, *(a for p in factors for a in p.args[1:])]
        op.kind, op.name, op.matrices = "product", "", matrices


def find_guards(program: Program) -> None:
    """Finds the conditions outside of which nothing reads an operation's results.

    These are the conditions of "Where": the layers after strides have samples only at some steps.
    """
    needs: dict[Buffer, frozenset[int]] = dict.fromkeys(
        program.owners(program.output), frozenset[int]()
    )

    def need(cells, guard):
        for b in program.owners(cells):
            needs[b] = needs.get(b, guard) & guard

    for store in program.stores:
        need(store.args[0], store.guard)
    for op in reversed(program.ops):
        op.guard = needs.get(op.buffer, frozenset())
        address = condition(program, op)
        for i, cells in enumerate(op.args):
            inner = op.guard | {address} if address is not None and i == 1 else op.guard
            need(cells, inner)
    # The conditions themselves come first, at every step.
    tested = {a for op in [*program.ops, *program.stores] for a in op.guard}
    wanted = {program.owner(address) for address in tested}
    first, rest = [], []
    for op in reversed(program.ops):
        if op.buffer in wanted:
            wanted |= program.reads([op])
            op.guard = frozenset()
            first.append(op)
        else:
            rest.append(op)
    program.ops = [*reversed(first), *reversed(rest)]


def copy_scattered(program: Program, contiguous: bool = False) -> None:
    """Copies operands that are too scattered to be read in place."""
    before, program.ops = program.ops, []
    for op in before:
        for i, cells in enumerate(op.args):
            if _is_readable(program, op, i, contiguous):
                continue
            values = program.values(cells)
            if values is not None:
                op.args[i] = program.constant(values, op.scope).reshape(cells.shape)
            else:
                program.ops.append(_copy(program, cells, op))
                op.args[i] = program.ops[-1].buffer.cells.reshape(cells.shape)
        program.ops.append(op)


def _is_readable(program, op, i, contiguous):
    cells = op.args[i]
    if op.kind in ("copy", "gather"):
        return True
    if op.kind == "dot" and not contiguous:
        return as_grid(program, cells) is not None or all(
            len(pieces(program, row)) == 1 for row in cells
        )
    if op.kind in ("dot", "reduce"):
        found = as_grid(program, cells)
        return found is not None and found.buffer.ring is None
    if op.kind == "product" and i > 0 and rows_of(program, cells) is None:
        return False
    if op.kind == "product" and contiguous and program.values(cells) is None:
        found = pieces(program, cells if i == 0 else cells[0])
        return len(found) == 1 and found[0].stride == 1 and found[0].buffer.ring is None
    if i > 0 and op.kind == "product":
        return True
    return len(pieces(program, cells)) <= _MOST_PIECES or uniform(program, cells) is not None


def uniform(program: Program, cells: np.ndarray) -> Any:
    """Returns the value of an operand that is one constant, or `None`."""
    values = program.values(cells)
    if values is None or not (np.all(values == values.flat[0]) or np.all(values != values)):
        return None
    return values.flat[0]


def rows_of(program: Program, cells: np.ndarray) -> tuple[list[Piece], int] | None:
    """Returns the pieces of the first row of a product's operand, and the step to the next row.

    `None` if the rows differ, or are too scattered.
    """
    first, last = pieces(program, cells[0]), pieces(program, cells[-1])
    if any(p.stride != 1 for p in first):
        return None
    if sum(p.buffer.ring is None for p in first) > 1 + cells.shape[1] // 4:
        return None
    step = int(cells[1, 0]) - int(cells[0, 0]) if len(cells) > 1 else 0
    if not np.array_equal(cells, cells[:1] + step * np.arange(len(cells))[:, None]):
        return None
    distance = step * (len(cells) - 1)
    moved = [dataclasses.replace(p, offset=p.offset + distance) for p in first]
    return (first, step) if moved == last else None


def fuse(program: Program) -> list[Group]:
    """Groups maps of one size that read each other's same elements: each group is one loop."""
    groups: list[Group] = []
    place: dict[Buffer, int] = {}
    candidates: dict[tuple, list[int]] = collections.defaultdict(list)
    for op in program.ops:
        reads = [(cells, b) for cells in op.args for b in program.owners(cells) if b in place]
        first = max((place[b] for _, b in reads), default=0)
        key = op.size, op.guard
        for k in candidates[key] if op.kind == "map" else ():
            if k >= first and all(
                place[b] != k or np.array_equal(cells, b.cells.reshape(-1)) for cells, b in reads
            ):
                groups[k].append(op)
                place[op.buffer] = k
                break
        else:
            place[op.buffer] = len(groups)
            if op.kind == "map":
                candidates[key].append(len(groups))
            groups.append([op])
    return groups


def cut(program: Program, group: Group) -> Iterator[Group]:
    """Yields maps for each range of their elements in which all operands have one stride."""
    inside = {op.buffer for op in group}
    cuts = {0, len(group[0].args[-1])}
    for cells in (cells for op in group for cells in op.args if cells.ndim == 1):
        if uniform(program, cells) is None:
            cuts.update(p.start for p in pieces(program, cells) if p.buffer not in inside)
    for a, b in itertools.pairwise(sorted(cuts)):
        yield [
            dataclasses.replace(
                op,
                args=[cells[a:b] if cells.ndim == 1 else cells for cells in op.args],
                start=op.start + a,
            )
            for op in group
        ]


def schedule(program: Program, groups: list[Group]) -> list[Group]:
    """Inserts each store after the last group that reads its state or writes what it stores."""
    after: dict[int, list[Group]] = collections.defaultdict(list)
    last: dict[Buffer, int] = {}
    for k, group in enumerate(groups):
        last.update(dict.fromkeys(program.reads(group), k))
        last.update((op.buffer, k) for op in group)
    for store in program.stores:
        reached = [store.buffer, *program.owners(store.args[0])]
        after[max(last.get(b, -1) for b in reached)].append([store])
    ordered = list(after[-1])
    for k, group in enumerate(groups):
        ordered += [group, *after[k]]
    return ordered


def kept_buffers(program: Program, groups: list[Group]) -> set[Buffer]:
    """Returns the work buffers that other groups, or the outputs, read."""
    found = set(program.owners(program.output))
    found |= {program.owner(address) for group in groups for op in group for address in op.guard}
    for group in groups:
        inside = {op.buffer for op in group}
        found |= program.reads(group) - inside
    return {b for b in found if b.kind in ("work", "output")}


def allocate(
    program: Program, groups: list[Group], apart: bool = False
) -> tuple[dict[Buffer, int], dict[str, int]]:
    """Places the work buffers in one array for each dtype, which they share over time.

    With `apart`, each has a place of its own. Returns a dict from buffer to offset, and a dict from
    dtype to the number of elements.
    """
    buffers = kept_buffers(program, groups)
    born: dict[Buffer, int] = {}
    last = dict.fromkeys(program.owners(program.output), len(groups))
    for k, group in enumerate(groups):
        for op in group:
            born.setdefault(op.buffer, k)
            for address in op.guard:
                last[program.owner(address)] = len(groups)  # read to the end
        for b in program.reads(group):
            last[b] = max(last.get(b, k), k)
    last |= dict.fromkeys(buffers, len(groups)) if apart else {}
    offsets: dict[Buffer, int] = {}
    sizes: dict[str, int] = {}
    live: dict[str, list[Buffer]] = collections.defaultdict(list)
    for b in (b for b in born if b in buffers):
        others = live[b.dtype] = [o for o in live[b.dtype] if last[o] >= born[b]]
        unit = 16 if b.size >= 16 else 4 if b.size >= 4 else 1
        offset = 0
        for other in sorted(others, key=lambda o: offsets[o]):
            if offset + b.size <= offsets[other]:
                break
            offset = max(offset, -(-(offsets[other] + other.size) // unit) * unit)
        offsets[b] = offset
        others.append(b)
        sizes[b.dtype] = max(sizes.get(b.dtype, 0), offset + b.size)
    return offsets, sizes
