"""Statements of C, and loops in place of groups that differ only in numbers and places."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_LEAST_COUNT, _LEAST_SAVED = 3, 8  # groups in a row, and statements saved, that make a loop


@dataclasses.dataclass(frozen=True)
class Number:
    """An integer, and what it is, such as "rows"."""

    value: int
    name: str

    def __str__(self) -> str:
        return str(self.value)


@dataclasses.dataclass(frozen=True)
class Place:
    """A pointer into an array.

    Attributes:
        array: C expression of the array, or "" if `name` is its name.
        name: Name of an array or of a place in it; may be "".
        offset: Number of elements after it.
        kind: Type of the elements.
    """

    array: str
    name: str
    offset: int
    kind: str

    def __str__(self) -> str:
        return " + ".join(filter(None, (self.array, self.name, str(self.offset or ""))))

    def __add__(self, offset: int) -> "Place":
        return dataclasses.replace(self, offset=self.offset + offset)


@dataclasses.dataclass(frozen=True)
class Code:
    """C code: a text with %s for each part. A pointer begins with its `Place`."""

    text: str
    parts: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.text % self.parts

    def __add__(self, offset: int) -> "Code":
        return Code(self.text, (self.parts[0] + offset, *self.parts[1:]))


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement of C.

    Attributes:
        code: `Code`.
        scope: Path of the layer that it belongs to.
        guard: Addresses of the conditions under which it runs.
    """

    code: Code
    scope: str
    guard: frozenset[int]


@dataclasses.dataclass
class Loop:
    """A group of statements that runs for each row of a table.

    Attributes:
        members: Dict from the name of a column to its type.
        rows: List of the table's rows.
        body: List of statements.
    """

    members: dict[str, str]
    rows: list[tuple[str, ...]]
    body: list[Statement]


def rolled(statements: Sequence[Statement], variable: str) -> list[Statement | Loop]:
    """Returns statements with loops in place of equal groups in a row.

    Args:
        statements: Statements with the same guard.
        variable: Name of the pointer to a row of a loop's table.
    """
    forms: dict[Any, int] = {}
    ids = np.array([forms.setdefault(_form(s.code), len(forms)) for s in statements])
    begins = [i == 0 or s.scope != statements[i - 1].scope for i, s in enumerate(statements)]
    found: list[Statement | Loop] = []
    for first, size, count in _repeats(ids, begins):
        starts = range(first, first + size * count, size)
        groups = [statements[start : start + size] for start in starts]
        found += groups[0] if count == 1 else [_loop(groups, variable)]
    return found


def _repeats(ids, begins, offset=0) -> Iterator[tuple[int, int, int]]:
    """Yields (first, size, count): `count` equal groups of `size` statements in a row."""
    most, best = _LEAST_SAVED - 1, None
    for size in range(1, len(ids) // _LEAST_COUNT + 1):
        is_same = np.concatenate([[0], ids[size:] == ids[:-size], [0]])
        ends = np.flatnonzero(np.diff(is_same))
        lengths = ends[1::2] - ends[::2]
        saved = np.where(lengths // size + 1 >= _LEAST_COUNT, lengths // size * size, 0)
        if np.max(saved, initial=0) > most:
            most, run = np.max(saved), np.argmax(saved)
            best = int(ends[2 * run]), int(lengths[run]), size
    if best is None:
        if len(ids):
            yield offset, len(ids), 1
        return
    first, length, size = best
    shifts = range(first, first + length % size + 1)  # begin with a layer
    first = next((i for i in shifts if begins[offset + i]), first)
    end = first + most + size
    yield from _repeats(ids[:first], begins, offset)
    yield offset + first, size, int(most) // size + 1
    yield from _repeats(ids[end:], begins, offset + end)


def _form(value):
    """Returns what two values have in common that may stand in one loop."""
    if isinstance(value, Code):
        return value.text, *map(_form, value.parts)
    if isinstance(value, Place):
        return value.array, value.kind
    return value.name if isinstance(value, Number) else value


def _leaves(value):
    if isinstance(value, Code):
        return [leaf for part in value.parts for leaf in _leaves(part)]
    return [value]


def _with_leaves(value, leaves):
    if isinstance(value, Code):
        return Code(value.text, tuple(_with_leaves(part, leaves) for part in value.parts))
    return next(leaves)


def _loop(groups, variable):
    """Returns a loop over equal groups, with a column for each number or place that differs."""
    columns: dict[tuple, str] = {}
    members: dict[str, str] = {}
    replaced = []
    for leaves in zip(
        *([x for s in group for x in _leaves(s.code)] for group in groups), strict=True
    ):
        leaf = leaves[0]
        if all(other == leaf for other in leaves):
            replaced.append(leaf)
            continue
        is_table = isinstance(leaf, Place) and not leaf.array
        if leaves not in columns:
            word = (
                leaf.name.rstrip("_0123456789").rpartition("_")[2] or leaf.array.rpartition(">")[2]
            )
            name, number = word, 1
            while name in members:
                number += 1
                name = f"{word}_{number}"
            columns[leaves] = name
            members[name] = f"const {leaf.kind} *" if is_table else "int "
        row = f"{variable}->{columns[leaves]}"
        is_inside = isinstance(leaf, Place) and not is_table
        replaced.append(Place(leaf.array, row, 0, leaf.kind) if is_inside else row)
    members = dict(sorted(members.items(), key=lambda member: member[1] == "int "))
    columns = {name: leaves for leaves, name in columns.items()}
    rows = [
        tuple(
            str(dataclasses.replace(leaf, array="") if isinstance(leaf, Place) else leaf) or "0"
            for leaf in row
        )
        for row in zip(*(columns[name] for name in members), strict=True)
    ]
    scopes = [[s.scope for s in statements] for statements in zip(*groups, strict=True)]
    values = iter(replaced)
    body = [
        Statement(_with_leaves(s.code, values), _span(of), s.guard)
        for s, of in zip(groups[0], scopes, strict=True)
    ]
    return Loop(members, rows, body)


def _span(scopes):
    return scopes[0] if len(set(scopes)) == 1 else f"{scopes[0]} to {scopes[-1]}"
