"""Texts as token ids: Penn Treebank, WikiText-2, text8, a file of the user's own."""

import dataclasses
import math
import pathlib
import re

import numpy as np

from trellis_keras.data.registry import register
from trellis_keras.data.sources import (
    SPLITS,
    Source,
    check_count,
    checksum,
    decode,
    read_file,
    read_files,
)
from trellis_keras.data.vocabulary import UNITS, Vocabulary

PTB_FILES = {split: f"ptb/ptb.{split}.txt" for split in SPLITS}
# The published sizes of Mikolov's preparation of the Penn Treebank, in tokens.
PTB_WORDS = {"train": 929_589, "valid": 73_760, "test": 82_430, "vocabulary": 10_000}
PTB_CHARACTERS = {"train": 5_059_550, "valid": 396_412, "test": 446_184, "vocabulary": 50}

WIKITEXT2_FILES = {
    # The second name is for a copy that has the same articles in another order.
    "train": ("wikitext2/wiki.train.tokens", "wikitext2/wiki.train.articles_reordered.tokens"),
    "valid": "wikitext2/wiki.valid.tokens",
    "test": "wikitext2/wiki.test.tokens",
}
WIKITEXT2_WORDS = {"train": 2_088_628, "valid": 217_646, "test": 245_569, "vocabulary": 33_278}

TEXT8_FILES = {"whole": "text8/text8"}
TEXT8_CHARACTERS = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000, "vocabulary": 27}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as token ids, in three splits.

    Attributes:
        name: The name it was loaded by.
        train: Token ids, int32 of shape (tokens,), in the order of the text.
        valid: Like `train`.
        test: Like `train`.
        vocabulary: The `Vocabulary` of the ids.
        checksum: sha256 (hexadecimal) of the source's decompressed bytes; where there are
            several files, of train, valid and test one after the other.
    """

    name: str
    train: np.ndarray = dataclasses.field(repr=False)
    valid: np.ndarray = dataclasses.field(repr=False)
    test: np.ndarray = dataclasses.field(repr=False)
    vocabulary: Vocabulary
    checksum: str

    @property
    def unit(self):
        """What a token is: `"word"` or `"character"`."""
        return self.vocabulary.unit


@register
def ptb_word(data_dir):
    """Penn Treebank by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    sources = read_files(PTB_FILES, data_dir, "PtbText")
    texts = [decode(source) for source in sources]
    vocabulary = Vocabulary.from_text(texts[0], "word", unknown="<unk>")
    return _published_corpus("ptb_word", sources, texts, vocabulary, PTB_WORDS)


@register
def ptb_char(data_dir):
    """Penn Treebank by characters.

    The one space that begins each line in the files is dropped, the one that ends it is
    kept, and the line's end is the 50th symbol, `"\\n"`.
    """
    sources = read_files(PTB_FILES, data_dir, "PtbText")
    texts = [re.sub("^ ", "", decode(source), flags=re.MULTILINE) for source in sources]
    vocabulary = Vocabulary.from_text(texts[0], "character")
    return _published_corpus("ptb_char", sources, texts, vocabulary, PTB_CHARACTERS)


@register
def wikitext2(data_dir):
    """WikiText-2 by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    sources = read_files(WIKITEXT2_FILES, data_dir, "Wikitext2")
    texts = [decode(source) for source in sources]
    vocabulary = Vocabulary.from_text(texts[0], "word", unknown="<unk>")
    return _published_corpus("wikitext2", sources, texts, vocabulary, WIKITEXT2_WORDS)


@register
def text8(data_dir):
    """text8 by characters: its first 90, then 5 and 5 million."""
    (source,) = read_files(TEXT8_FILES, data_dir, "Text8")
    content = decode(source)
    sizes = [TEXT8_CHARACTERS[split] for split in SPLITS]
    check_count(source, "characters", sum(sizes), len(content))
    vocabulary = Vocabulary.from_text(content, "character")
    check_count(source, "distinct characters", TEXT8_CHARACTERS["vocabulary"], len(vocabulary))
    parts, start = {}, 0
    for split, size in zip(SPLITS, sizes, strict=True):
        parts[split] = vocabulary.encode(content[start : start + size])
        start += size
    return Corpus("text8", vocabulary=vocabulary, checksum=checksum([source.content]), **parts)


@register
def text(data_dir, *, path, unit="character", split=(0.9, 0.05, 0.05)):
    """A text file of the user's own, split by position."""
    del data_dir  # `path` says where the file is.
    if unit not in UNITS:
        raise ValueError(f"`unit` must be one of {UNITS}. Received: unit={unit!r}")
    source = read_file(pathlib.Path(path))
    return _split_corpus("text", source, unit, split)


@register
def pydoc(data_dir, *, split=(0.9, 0.05, 0.05)):
    """The help texts that come with Python, by characters, split by position."""
    del data_dir  # Part of every Python installation.
    from pydoc_data.topics import topics

    joined = "\n".join(topics[key] for key in sorted(topics))
    return _split_corpus("pydoc", Source("pydoc_data.topics", joined.encode()), "character", split)


def _published_corpus(name, sources, texts, vocabulary, published):
    """Encodes texts that come in three files and checks their sizes."""
    noun = f"{vocabulary.unit}s"
    check_count(sources[0], f"distinct {noun}", published["vocabulary"], len(vocabulary))
    parts = {}
    for split, source, content in zip(SPLITS, sources, texts, strict=True):
        parts[split] = vocabulary.encode(content)
        check_count(source, noun, published[split], len(parts[split]))
    digest = checksum(source.content for source in sources)
    return Corpus(name=name, vocabulary=vocabulary, checksum=digest, **parts)


def _split_corpus(name, source, unit, split):
    """Encodes one text and cuts it by position."""
    _check_split(split)
    content = decode(source)
    if unit == "word" and not content.strip():
        raise ValueError(f"{source.label} has no words")
    vocabulary = Vocabulary.from_text(content, unit)
    ids = vocabulary.encode(content)
    ends = [0, *(round(len(ids) * math.fsum(split[: i + 1])) for i in range(3))]
    parts = {key: ids[ends[i] : ends[i + 1]] for i, key in enumerate(SPLITS)}
    sizes = [len(part) for part in parts.values()]
    if min(sizes) < 2:
        raise ValueError(
            f"{source.label} is too short to split: each part needs at least 2 {unit}s, an input "
            f"and a target. Received: {len(ids)} {unit}s, split={tuple(split)}, which gives {sizes}"
        )
    return Corpus(name=name, vocabulary=vocabulary, checksum=checksum([source.content]), **parts)


def _check_split(split):
    if len(split) != 3 or min(split) <= 0 or not math.isclose(math.fsum(split), 1.0, rel_tol=1e-6):
        raise ValueError(
            "`split` must be three positive shares (train, valid, test) that add up to 1. "
            f"Received: split={tuple(split)}"
        )
