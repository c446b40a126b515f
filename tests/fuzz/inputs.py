"""Files that are almost right: bytes, and JSON by its structure, drawn by a `random.Random`."""

import copy
import json
import struct

# What a length, an offset or a count would do most harm as.
_SIZES = [0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
_FORMATS = ["<H", ">H", "<I", ">I", "<Q", ">Q"]
_CHANGES = ["flip", "size", "cut", "drop", "insert", "splice", "repeat"]
_TEXTS = [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\r", "\u2028\ufeff".encode(), b"9" * 500]


def either(*inputs):
    """One of several functions of a `random.Random`, each time."""
    return lambda random: random.choice(inputs)(random)


def damaged(contents):
    """Bytes of one of `contents` after some changes, of which most are small."""
    return lambda random: _damaged(random, contents)


def _damaged(random, contents):
    content = bytearray(random.choice(contents))
    for change in random.choices(_CHANGES, k=random.randint(0, 5)):
        # Headers, where the sizes stand, are hit as often as all the rest.
        end = min(random.choice([64, 512, len(content)]), len(content))
        place, length = random.randint(0, max(0, end - 1)), random.randint(1, 40)
        match change:
            case "flip" if content:
                content[place] ^= 1 << random.randint(0, 7)
            case "size":
                form = random.choice(_FORMATS)
                size = struct.calcsize(form)
                number = random.choice(_SIZES) % 256**size
                content[place : place + size] = struct.pack(form, number)
            case "cut":
                del content[place:]
            case "drop":
                del content[place : place + length]
            case "insert":
                content[place:place] = random.choice([random.randbytes(length), *_TEXTS])
            case "splice":
                other = random.choice(contents)
                begin = random.randint(0, len(other))
                content[place:place] = other[begin : begin + 20 * length]
            case "repeat":
                content[place:place] = content[place : place + length] * random.randint(1, 50)
    return bytes(content)


# Stands for a value nested so deeply that a recursive reader runs out of stack.
_DEEP = "stands for many brackets"
_VALUES = [
    *[None, True, 0, 1, -1, 3.5, 10**7, 10**12, -(10**12), 10**400, float("nan"), float("inf")],
    *["", "a", "\0", "\ud800", "../../../etc/passwd", "x" * 10000],
    *[[], {}, [[]], [None], [1, 2, 3], [10**12], {"": None}, {"a": 1}, _DEEP],
]


def damaged_json(documents, more=()):
    """JSON text, in bytes, of one of `documents` after some changes of its structure.

    Values that are likely to be wrong take the place of others; `more` are a format's own.
    """
    return lambda random: _damaged_json(random, documents, [*_VALUES, *more])


def _damaged_json(random, documents, values):
    root = [copy.deepcopy(random.choice(documents))]
    for _ in range(random.randint(0, 4)):
        nodes = list(_nodes(root))
        holder, key = random.choice(nodes)
        match random.choice(["value", "value", "delete", "copy", "number", "add"]):
            case "delete" if holder is not root:
                del holder[key]
            case "copy":
                other, place = random.choice(nodes)
                holder[key] = copy.deepcopy(other[place])
            case "number" if type(holder[key]) in (int, float):
                holder[key] = random.choice([-1, 0, 10, 1000, 10**6]) * holder[key]
            case "add" if isinstance(holder, dict):
                name = "".join(chr(random.choice([0, 10, 97, 0xD800, 0x1F600])) for _ in range(4))
                holder[name] = copy.deepcopy(random.choice(values))
            case _:
                holder[key] = copy.deepcopy(random.choice(values))
    text = json.dumps(root[0]).replace(f'"{_DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.encode("utf-8", "surrogatepass")


def _nodes(tree):
    """Yields (what holds it, its key) of every value in a tree of lists and dicts."""
    pairs = enumerate(tree) if isinstance(tree, list) else tree.items()
    for key, value in pairs:
        yield tree, key
        if isinstance(value, (list, dict)):
            yield from _nodes(value)
