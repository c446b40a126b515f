"""Texts as token ids: Penn Treebank, WikiText, text8, enwik8 and others, and a user's own."""

import contextlib
import dataclasses
import hashlib
import re

import numpy as np

from trellis_keras.data.cut import Cut
from trellis_keras.data.registry import register
from trellis_keras.data.sources import (
    BYTE_ORDER_MARK,
    SPLITS,
    LargeSource,
    Source,
    check_count,
    checksum,
    decode,
    find_files,
    plain_lines,
    read_file,
    read_files,
    read_own_file,
)
from trellis_keras.data.token_files import word_ids
from trellis_keras.data.vocabulary import Vocabulary, check_unit

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

WIKITEXT103_FILES = {
    # The second name is that of the unpacked archive.
    split: (f"wikitext103/wiki.{split}.tokens", f"wikitext-103/wiki.{split}.tokens")
    for split in SPLITS
}
WIKITEXT103_WORDS = {
    "train": 103_227_021,
    "valid": 217_646,
    "test": 245_569,
    "vocabulary": 267_735,
}

TEXT8_FILES = {"whole": "text8/text8"}
TEXT8_CHARACTERS = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000, "vocabulary": 27}

ENWIK8_FILES = {"whole": "enwik8/enwik8"}
ENWIK8_BYTES = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000, "vocabulary": 205}

WAR_AND_PEACE_FILES = {"whole": "war_and_peace/warpeace_input.txt"}
# Counted with line ends of one character and none after the last line. There is no published
# split; this is 90, 5 and 5 %.
WAR_AND_PEACE_CHARACTERS = {
    "train": 2_876_590,
    "valid": 159_810,
    "test": 159_811,
    "vocabulary": 82,
}


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared so
class Corpus:
    """A text as token ids, in three splits.

    Attributes:
        name: The name it was loaded by.
        train: Token ids, int32 of shape (tokens,), in the order of the text. Those of
            WikiText-103 are memory-mapped and cannot be written to.
        valid: Like `train`.
        test: Like `train`.
        vocabulary: The `Vocabulary` of the ids.
        checksum: sha256 (hexadecimal) of the source's decompressed bytes; where there are
            several files, of train, valid and test one after the other. Options that lead to
            other tokens lead to another checksum.
    """

    name: str
    train: np.ndarray = dataclasses.field(repr=False)
    valid: np.ndarray = dataclasses.field(repr=False)
    test: np.ndarray = dataclasses.field(repr=False)
    vocabulary: Vocabulary
    checksum: str

    @property
    def unit(self):
        """What a token is: `"word"`, `"character"` or `"byte"`."""
        return self.vocabulary.unit


@register
def ptb(data_dir):
    """Penn Treebank by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    sources = read_files(PTB_FILES, data_dir, "PtbText")
    texts = [decode(source) for source in sources]
    vocabulary = _vocabulary(sources[0], texts[0], "word", unknown="<unk>")
    return _published_corpus("ptb", sources, texts, vocabulary, PTB_WORDS)


@register
def char_ptb(data_dir, *, split=None, first=None, train_fraction=1.0):
    """Penn Treebank by characters.

    The one space that begins each line in the files is dropped, the one that ends it is
    kept, and the line's end is the 50th symbol, `"\\n"`.
    """
    cut = Cut(split, first, train_fraction)
    sources = read_files(PTB_FILES, data_dir, "PtbText")
    texts = [re.sub("^ ", "", decode(source), flags=re.MULTILINE) for source in sources]
    vocabulary = _vocabulary(sources[0], texts[0], "character")
    sizes = _check_published(sources, texts, vocabulary, PTB_CHARACTERS)
    for source, text in zip(sources, texts, strict=True):
        with _naming(source):
            vocabulary.encode(text)  # before they are one text
    return _cut_corpus("char_ptb", sources, "".join(texts), vocabulary, cut, sizes)


@register
def wt2(data_dir):
    """WikiText-2 by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    sources = read_files(WIKITEXT2_FILES, data_dir, "Wikitext2")
    texts = [decode(source) for source in sources]
    vocabulary = _vocabulary(sources[0], texts[0], "word", unknown="<unk>")
    return _published_corpus("wt2", sources, texts, vocabulary, WIKITEXT2_WORDS)


@register
def wt103(data_dir):
    """WikiText-103 by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    paths = find_files(WIKITEXT103_FILES, data_dir, "Wikitext103")
    train = LargeSource(paths[0])
    others = [read_file(path) for path in paths[1:]]

    def check(tokens, words):
        check_count(train, "distinct words", WIKITEXT103_WORDS["vocabulary"], words)
        check_count(train, "words", WIKITEXT103_WORDS["train"], tokens)

    digest = hashlib.sha256()
    for block, _ in train.blocks():
        digest.update(block)
    ids, words = word_ids(train, digest.hexdigest(), check)
    with _naming(train):
        vocabulary = Vocabulary(words, "word", unknown="<unk>")
    parts = {"train": ids}
    for split, source in zip(SPLITS[1:], others, strict=True):
        parts[split] = vocabulary.encode(decode(source))
        check_count(source, "words", WIKITEXT103_WORDS[split], len(parts[split]))
        digest.update(source.content)
    return Corpus(name="wt103", vocabulary=vocabulary, checksum=digest.hexdigest(), **parts)


@register
def text8(data_dir, *, split=None, first=None, train_fraction=1.0):
    """text8 by characters: its first 90, then 5 and 5 million."""
    cut = Cut(split, first, train_fraction)
    (source,) = read_files(TEXT8_FILES, data_dir, "Text8")
    return _whole_corpus("text8", source, decode(source), TEXT8_CHARACTERS, cut)


@register
def enwik8(data_dir, *, split=None, first=None, train_fraction=1.0):
    """enwik8 by bytes: its first 90, then 5 and 5 million."""
    cut = Cut(split, first, train_fraction)
    (source,) = read_files(ENWIK8_FILES, data_dir, "Enwik8")
    return _whole_corpus("enwik8", source, source.content, ENWIK8_BYTES, cut)


@register
def war_and_peace(data_dir, *, split=None, first=None, train_fraction=1.0):
    """War and Peace by characters.

    The file goes round with and without a byte-order mark, with both kinds of line ends and
    with spaces or empty lines at its end: all these copies give the same text.
    """
    cut = Cut(split, first, train_fraction)
    (source,) = read_files(WAR_AND_PEACE_FILES, data_dir, "WarAndPeace")
    content = plain_lines(decode(source))
    source = Source(source.label, content.encode())
    return _whole_corpus("war_and_peace", source, content, WAR_AND_PEACE_CHARACTERS, cut)


@register
def text(
    data_dir,
    *,
    path,
    unit="character",
    unknown=None,
    split=None,
    first=None,
    train_fraction=1.0,
):
    """A text file of the user's own, split by position.

    `path` says where the file is. Where it is no longer there, it is looked for in `data_dir`. A
    byte-order mark is no part of its text. `unknown` is the word for those of other texts.
    """
    check_unit(unit)
    if unknown is not None and unit != "word":
        raise ValueError(f'`unknown` is for unit="word". Received: {unknown!r}, unit={unit!r}')
    cut = Cut(split, first, train_fraction)
    source = read_own_file(path, data_dir)
    if unit == "byte":
        content = source.content
    else:
        content = decode(source, 'To read any file, byte by byte: unit="byte".')
        content = content.removeprefix(BYTE_ORDER_MARK)
    if unit == "word" and not content.strip():
        raise ValueError(f"{source.label} has no words")
    vocabulary = _vocabulary(source, content, unit)
    if unknown is not None:
        # Last, as the rarest, where it is no word of the text.
        words = dict.fromkeys((*vocabulary.tokens, unknown))
        vocabulary = Vocabulary(words, unit, unknown)
    return _cut_corpus("text", [source], content, vocabulary, cut, usual_unit="character")


@register
def pydoc(data_dir, *, split=None, first=None, train_fraction=1.0):
    """The help texts that come with Python, by characters, split by position."""
    del data_dir  # Part of every Python installation.
    from pydoc_data.topics import topics

    cut = Cut(split, first, train_fraction)
    content = "\n".join(topics[key] for key in sorted(topics))
    source = Source("pydoc_data.topics", content.encode())
    return _cut_corpus("pydoc", [source], content, Vocabulary.from_text(content, "character"), cut)


def _vocabulary(source, content, unit, unknown=None):
    """The vocabulary of a file's text."""
    with _naming(source):
        return Vocabulary.from_text(content, unit, unknown)


@contextlib.contextmanager
def _naming(source):
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source.label} has another text: {error}") from error


def _published_corpus(name, sources, texts, vocabulary, published):
    """Encodes texts that come in three files and checks their sizes."""
    parts = {}
    for split, source, content in zip(SPLITS, sources, texts, strict=True):
        with _naming(source):
            parts[split] = vocabulary.encode(content)
    _check_published(sources, list(parts.values()), vocabulary, published)
    digest = checksum(source.content for source in sources)
    return Corpus(name=name, vocabulary=vocabulary, checksum=digest, **parts)


def _check_published(sources, texts, vocabulary, published):
    """Checks three files' tokens, or characters as such, and returns their numbers."""
    noun = f"{vocabulary.unit}s"
    check_count(sources[0], f"distinct {noun}", published["vocabulary"], len(vocabulary))
    for split, source, content in zip(SPLITS, sources, texts, strict=True):
        check_count(source, noun, published[split], len(content))
    return [len(content) for content in texts]


def _whole_corpus(name, source, content, published, cut):
    """Checks and cuts a published text, characters or bytes, that comes in one file."""
    unit = "byte" if isinstance(content, bytes) else "character"
    sizes = [published[split] for split in SPLITS]
    hint = f'Another text, or a part of this one, is read by load("text", path=..., unit="{unit}").'
    check_count(source, f"{unit}s", sum(sizes), len(content), hint)
    vocabulary = _vocabulary(source, content, unit)
    check_count(source, f"distinct {unit}s", published["vocabulary"], len(vocabulary), hint)
    return _cut_corpus(name, [source], content, vocabulary, cut, sizes)


def _cut_corpus(name, sources, content, vocabulary, cut, published=None, usual_unit=None):
    """Cuts one text by position and encodes its parts.

    The vocabulary is that of the whole text, wherever it is cut: a symbol of the validation
    part need not be in the training part.
    """
    unit = vocabulary.unit
    tokens = vocabulary.encode(content) if unit == "word" else content
    label = sources[0].label if len(sources) == 1 else name
    places = cut.places(label, unit, len(tokens), published)
    parts = {split: tokens[place] for split, place in places.items()}
    if unit != "word":
        parts = {split: vocabulary.encode(part) for split, part in parts.items()}
    digest = checksum(source.content for source in sources)
    if unit != (usual_unit or unit) or cut.changes(len(tokens), published):
        digest = checksum([f"{digest} {unit} {places}".encode()])
    return Corpus(name=name, vocabulary=vocabulary, checksum=digest, **parts)
