"""Statements of C, and a function in place of groups that differ only in numbers and places."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_LEAST_COUNT, _LEAST_SAVED = 3, 6  # groups in a row, and statements saved, of a function


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
class Function:
    """A function in place of equal groups of statements.

    Attributes:
        parameters: Dict from name to type.
        calls: List of the arguments of each call.
        body: List of statements.
    """

    parameters: dict[str, str]
    calls: list[tuple[str, ...]]
    body: list[Statement]


def grouped(statements: Sequence[Statement]) -> list[Statement | Function]:
    """Returns statements with functions in place of equal groups in a row.

    Args:
        statements: Statements with the same guard.
    """
    forms: dict[Any, int] = {}
    ids = np.array([forms.setdefault(_form(s.code), len(forms)) for s in statements])
    begins = [i > 0 and s.scope != statements[i - 1].scope for i, s in enumerate(statements)]
    found: list[Statement | Function] = []
    for first, size, count in _repeats(ids, begins):
        starts = range(first, first + size * count, size)
        groups = [statements[start : start + size] for start in starts]
        found += groups[0] if count == 1 else [_function(groups)]
    return found


def _repeats(ids, begins, offset=0) -> Iterator[tuple[int, int, int]]:
    """Yields (first, size, count): `count` equal groups of `size` statements in a row."""
    most, best = _LEAST_SAVED - 1, None
    for size in range(2, len(ids) // _LEAST_COUNT + 1):
        is_same = np.concatenate([[0], ids[size:] == ids[:-size], [0]])
        ends = np.flatnonzero(np.diff(is_same))
        lengths = ends[1::2] - ends[::2]
        more = np.where(lengths // size + 1 >= _LEAST_COUNT, lengths // size, 0)
        if np.max(more, initial=0) * (size - 1) > most:
            most, run = np.max(more) * (size - 1), np.argmax(more)
            best = int(ends[2 * run]), int(lengths[run]), size
    if best is None:
        if len(ids):
            yield offset, len(ids), 1
        return
    first, length, size = best
    shifts = range(first, first + length % size + 1)  # begin with a layer
    first = next((i for i in shifts if begins[offset + i]), first)
    count = length // size + 1
    end = first + size * count
    yield from _repeats(ids[:first], begins, offset)
    yield offset + first, size, count
    yield from _repeats(ids[end:], begins, offset + end)


def _form(value):
    """Returns what two values have in common that may stand in one function."""
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


def _function(groups):
    """Returns a function with a parameter for each number or place that differs."""
    columns: dict[tuple, str] = {}
    parameters: dict[str, str] = {}
    replaced = []
    leaves_of_groups = ([x for s in group for x in _leaves(s.code)] for group in groups)
    for leaves in zip(*leaves_of_groups, strict=True):
        leaf = leaves[0]
        is_place = isinstance(leaf, Place)
        is_inside = is_place and leaf.array.startswith("s->")
        if all(other == leaf for other in leaves) and (is_inside or not is_place or not leaf.array):
            replaced.append(leaf)
            continue
        if leaves not in columns:
            word = leaf.name.rstrip("_0123456789").rpartition("_")[2] if leaf.name else ""
            word = word or leaf.array.removeprefix("s->")
            columns[leaves] = _free(word, parameters)
            const = "" if is_place and leaf.array == "y" else "const "
            kind = f"{const}{leaf.kind} *" if is_place and not is_inside else "int "
            parameters[columns[leaves]] = kind
        name = columns[leaves]
        replaced.append(Place(leaf.array, name, 0, leaf.kind) if is_inside else name)
    parameters = dict(sorted(parameters.items(), key=lambda item: item[1] == "int "))
    columns_of = {name: leaves for leaves, name in columns.items()}
    calls = zip(*(map(_argument, columns_of[name]) for name in parameters), strict=True)
    values = iter(replaced)
    body = [
        Statement(_with_leaves(of[0].code, values), _span([s.scope for s in of]), of[0].guard)
        for of in zip(*groups, strict=True)
    ]
    return Function(parameters, list(calls), body)


def _argument(leaf):
    if isinstance(leaf, Place) and leaf.array.startswith("s->"):
        return str(dataclasses.replace(leaf, array="")) or "0"
    return str(leaf)


def _free(word, taken):
    name, number = word, 1
    while name in taken:
        number += 1
        name = f"{word}_{number}"
    return name


def _span(scopes):
    return scopes[0] if len(set(scopes)) == 1 else f"{scopes[0]} to {scopes[-1]}"
