"""Texts by name: `load("ptb_word")`, `load("text", path="my.txt")`, ..."""

import dataclasses
import gzip
import hashlib
import inspect
import math
import os
import pathlib
import re
import zlib

import numpy as np

from trellis_keras.data.vocabulary import UNITS, Vocabulary

ENVIRONMENT_VARIABLE = "TRELLIS_KERAS_DATA"
SPLITS = ("train", "valid", "test")

PTB_FILES = {split: f"ptb/ptb.{split}.txt" for split in SPLITS}
# The published sizes of Mikolov's preparation of the Penn Treebank, in tokens.
PTB_WORDS = {"train": 929_589, "valid": 73_760, "test": 82_430, "vocabulary": 10_000}
PTB_CHARACTERS = {"train": 5_059_550, "valid": 396_412, "test": 446_184, "vocabulary": 50}

_REGISTRY = {}


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


@dataclasses.dataclass(frozen=True)
class _Source:
    """One file of a data set: its bytes, and the name that error messages give it."""

    label: str
    content: bytes


def list_datasets():
    """The names that `load()` knows, sorted."""
    return sorted(_REGISTRY)


def load(name, data_dir=None, **options):
    """Loads a corpus.

    Published data sets are looked for in `data_dir` if it is given, else in the folder that
    the environment variable `TRELLIS_KERAS_DATA` names if it has them, else they are
    downloaded by tensorflow-datasets. Their sizes are checked against the published ones.

    - `"ptb_word"`, `"ptb_char"`: Penn Treebank in Mikolov's preparation, from
      `ptb/ptb.train.txt`, `ptb/ptb.valid.txt` and `ptb/ptb.test.txt`, each also as `.gz`.
    - `"text"`: a file of your own, UTF-8, also as `.gz`. Options: `path`, `unit`
      (`"character"`, the default, or `"word"`) and `split`, the three parts' shares of the
      text by position, by default `(0.9, 0.05, 0.05)`. The vocabulary is that of the whole
      file.
    - `"pydoc"`: the English of Python's own `pydoc_data.topics`, character by character, on
      every machine. It differs between versions of Python; the checksum tells. Option: `split`.

    Args:
        name: One of `list_datasets()`.
        data_dir: Folder of local copies; data sets that need none do not look at it.
        **options: The data set's options; any other is refused.

    Returns:
        A `Corpus`.

    Raises:
        ValueError: If the name or an option is unknown, or a file is not what it should be.
        FileNotFoundError: If a local file is missing.

    Example:

    >>> corpus = load("pydoc")
    >>> corpus.unit
    'character'
    """
    if name not in _REGISTRY:
        raise ValueError(f"Unknown data set. Received: {name!r}; known: {list_datasets()}")
    reader = _REGISTRY[name]
    _check_options(name, reader, options)
    return reader(data_dir, **options)


def register(reader):
    """Makes a function `reader(data_dir, *, option=default, ...) -> Corpus` loadable.

    Its name is the data set's name, its keyword-only arguments are the options.
    """
    _REGISTRY[reader.__name__] = reader
    return reader


@register
def ptb_word(data_dir):
    """Penn Treebank by words; every line ends with `"<eos>"`, rare words are `"<unk>"`."""
    sources = _read_ptb(data_dir)
    texts = [_decode(source) for source in sources]
    vocabulary = Vocabulary.from_text(texts[0], "word", unknown="<unk>")
    return _published_corpus("ptb_word", sources, texts, vocabulary, PTB_WORDS)


@register
def ptb_char(data_dir):
    """Penn Treebank by characters.

    The one space that begins each line in the files is dropped, the one that ends it is
    kept, and the line's end is the 50th symbol, `"\\n"`.
    """
    sources = _read_ptb(data_dir)
    texts = [re.sub("^ ", "", _decode(source), flags=re.MULTILINE) for source in sources]
    vocabulary = Vocabulary.from_text(texts[0], "character")
    return _published_corpus("ptb_char", sources, texts, vocabulary, PTB_CHARACTERS)


@register
def text(data_dir, *, path, unit="character", split=(0.9, 0.05, 0.05)):
    """A text file of the user's own, split by position."""
    del data_dir  # `path` says where the file is.
    if unit not in UNITS:
        raise ValueError(f"`unit` must be one of {UNITS}. Received: unit={unit!r}")
    source = _read_file(pathlib.Path(path))
    return _split_corpus("text", source, unit, split)


@register
def pydoc(data_dir, *, split=(0.9, 0.05, 0.05)):
    """The help texts that come with Python, by characters, split by position."""
    del data_dir  # Part of every Python installation.
    from pydoc_data.topics import topics

    joined = "\n".join(topics[key] for key in sorted(topics))
    return _split_corpus("pydoc", _Source("pydoc_data.topics", joined.encode()), "character", split)


def _read_ptb(data_dir):
    sources = _local_sources(PTB_FILES, data_dir)
    if sources is None:
        sources = _downloaded_sources("PtbText")
    return sources


def _local_sources(files, data_dir):
    """Reads a data set's files in the order of `SPLITS`; None if there is no local copy."""
    folder = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if not folder:
        return None
    if not os.path.isdir(folder):
        origin = "data_dir" if data_dir else ENVIRONMENT_VARIABLE
        raise FileNotFoundError(f"{origin} is not a folder. Received: {os.fspath(folder)!r}")
    paths = [pathlib.Path(folder) / files[split] for split in SPLITS]
    # The environment's folder may hold other data sets only; an argument means this one.
    if not data_dir and not any(_variants(path) for path in paths):
        return None
    return [_read_file(path) for path in paths]


def _downloaded_sources(builder_name):
    try:
        # Imported here because it needs tensorflow and tensorflow-datasets.
        from trellis_keras.data import builders
    except ImportError as error:
        raise ImportError(
            "There is no local copy of the data set, and to download it needs tensorflow and "
            f"tensorflow-datasets. {local_copy_hint()}"
        ) from error
    contents = builders.read_files(getattr(builders, builder_name))
    return [_Source(f"{builder_name} {split}", contents[split]) for split in SPLITS]


def local_copy_hint():
    """The sentence that tells a user how to point to local copies."""
    return (
        "To use a local copy pass its folder as `data_dir` or set the environment variable "
        f"{ENVIRONMENT_VARIABLE} to it."
    )


def _variants(path):
    """The file and its compressed form, as far as they exist."""
    candidates = (path, path.with_name(path.name + ".gz"))
    return [candidate for candidate in candidates if candidate.is_file()]


def _read_file(path):
    found = _variants(path)
    if not found:
        raise FileNotFoundError(f"Neither {path} nor {path}.gz is a file. {local_copy_hint()}")
    path = found[0]
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = _decompress(path, content)
    if not content:
        raise ValueError(f"{path} is empty")
    return _Source(str(path), content)


def _decompress(path, content):
    try:
        return gzip.decompress(content)
    except EOFError as error:
        raise ValueError(f"{path} is truncated: the compressed data end too early") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a sound gzip file: {error}") from error


def _decode(source):
    try:
        return source.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source.label} is not UTF-8 text: the byte {source.content[error.start]:#04x} at "
            f"offset {error.start} cannot be decoded"
        ) from error


def _checksum(sources):
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.content)
    return digest.hexdigest()


def _published_corpus(name, sources, texts, vocabulary, published):
    """Encodes texts that come in three files and checks their sizes."""
    noun = f"{vocabulary.unit}s"
    _check_count(sources[0], f"distinct {noun}", published["vocabulary"], len(vocabulary))
    parts = {}
    for split, source, content in zip(SPLITS, sources, texts, strict=True):
        parts[split] = vocabulary.encode(content)
        _check_count(source, noun, published[split], len(parts[split]))
    return Corpus(name=name, vocabulary=vocabulary, checksum=_checksum(sources), **parts)


def _check_count(source, noun, expected, found):
    if found != expected:
        raise ValueError(
            f"{source.label} is not the published file: expected {expected:,} {noun}, "
            f"found {found:,}"
        )


def _split_corpus(name, source, unit, split):
    """Encodes one text and cuts it by position."""
    _check_split(split)
    content = _decode(source)
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
    return Corpus(name=name, vocabulary=vocabulary, checksum=_checksum([source]), **parts)


def _check_split(split):
    if len(split) != 3 or min(split) <= 0 or not math.isclose(math.fsum(split), 1.0, rel_tol=1e-6):
        raise ValueError(
            "`split` must be three positive shares (train, valid, test) that add up to 1. "
            f"Received: split={tuple(split)}"
        )


def _check_options(name, reader, options):
    parameters = inspect.signature(reader).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"Unknown options for data set {name!r}. Received: {unknown}; known: {sorted(known)}"
        )
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"Data set {name!r} needs the options {missing}")
