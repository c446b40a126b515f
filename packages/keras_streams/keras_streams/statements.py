"""Statements of C, and a function in place of groups that differ only in numbers and names."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

_LEAST_COUNT, _LEAST_SAVED = 3, 6  # groups in a row, and statements saved, of a function
_LOCAL = {"x", "y", "ids"}  # variables of the step, which functions take as arguments


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement of C, of the layer at the path `scope`, which runs under the guard's conditions.

    A guard has the addresses of the conditions.
    """

    text: str
    scope: str
    guard: frozenset[int]


@dataclasses.dataclass
class Function:
    """A function in place of equal groups of statements, with the arguments of each call."""

    parameters: dict[str, str]  # from name to type
    calls: list[tuple[str, ...]]
    body: list[Statement]


def grouped(
    statements: Sequence[Statement], names: Mapping[str, str]
) -> list[Statement | Function]:
    """Returns statements of one guard with functions in place of equal groups in a row.

    `names` has the names that may differ, and of variables, with the types of parameters.
    """
    forms: dict[tuple, int] = {}
    ids = np.array([forms.setdefault(_form(s.text, names), len(forms)) for s in statements])
    begins = [i > 0 and s.scope != statements[i - 1].scope for i, s in enumerate(statements)]
    found: list[Statement | Function] = []
    for first, size, count in _repeats(ids, begins):
        starts = range(first, first + size * count, size)
        groups = [statements[start : start + size] for start in starts]
        found += groups[0] if count == 1 else [_function(groups, names)]
    return found


def _form(text, names):
    """Returns the form of a statement. Statements of one form may share a function."""
    return tuple(
        (names.get(word, "int "),) if word.isdigit() or word in names else word
        for word in _words(text)
    )


def _words(text):
    return re.split(r"(\w+)", text)


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


def _function(groups, names):
    """Returns a function with a parameter for each number or name that differs."""
    arguments: dict[tuple, str] = {}  # what it is, and its values: name of the parameter
    body: list[str] = []
    texts = ["\0".join(s.text for s in group) for group in groups]
    places = list(zip(*map(_words, texts), strict=True))
    kept = {words[0] for words in places if len(set(words)) == 1} & names.keys() - _LOCAL
    for words in places:
        if len(set(words)) == 1 and words[0] not in _LOCAL:
            body.append(words[0])
            continue
        before = "".join(body[-2:-1]).rstrip("s") if body[-1] in ("[", " + ") else ""
        word = words[0] if words[0] in names else before
        word = word.rstrip("_0123456789").rpartition("_")[2] or "n"
        if (word, words) not in arguments:
            arguments[word, words] = free_name(word, kept.union(arguments.values()))
        body.append(arguments[word, words])
    statements = [
        Statement(text, _span([s.scope for s in of]), of[0].guard)
        for text, *of in zip("".join(body).split("\0"), *groups, strict=True)
    ]
    parameters = {name: names.get(words[0], "int ") for (_, words), name in arguments.items()}
    return Function(
        parameters, list(zip(*(words for _, words in arguments), strict=True)), statements
    )


def free_name(word: str, taken: Collection[str]) -> str:
    """Returns a word, with a number if it is taken."""
    name, number = word, 1
    while name in taken:
        number += 1
        name = f"{word}_{number}"
    return name


def _span(scopes):
    return scopes[0] if len(set(scopes)) == 1 else f"{scopes[0]} to {scopes[-1]}"
