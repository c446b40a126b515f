"""Data sets by name: `load("ptb")`, `load("adding", T=600)`, ..."""

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.zoo.datasets.sources import Source

SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no truth value
class Dataset:
    """A data set in three splits.

    A split is an int32 array of token ids for text (`data.TokenStream` makes batches of it), a
    tuple `(x, y)` of arrays for sequences of equal length (`SequenceStream`), a list of piano rolls
    for music (`PianoRollStream`), and a list of passages for LAMBADA (`last_word_examples`).

    Attributes:
        name: The name under which it was loaded.
        train, valid, test: The splits.
        checksum: Hexadecimal SHA-256, equal for equal data.
        vocabulary: The `Vocabulary` of a text, else `None`.
    """

    name: str
    train: Any = dataclasses.field(repr=False)
    valid: Any = dataclasses.field(repr=False)
    test: Any = dataclasses.field(repr=False)
    checksum: str
    vocabulary: Vocabulary | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Number of tokens or examples of each split."""
        splits = {split: getattr(self, split) for split in SPLITS}
        return {k: len(held[0] if isinstance(held, tuple) else held) for k, held in splits.items()}


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Information about a data set, available without loading it.

    Attributes:
        name: String.
        loader: Function `(data_dir, **options)` that returns the `Dataset`.
        options: Dict of the options and their defaults, `inspect.Parameter.empty` if required.
        batch_options: Names of the options of its training batches, see `zoo.Training`.
        source: `Source` of its files, or `None` if it needs none.
        citation, license: Description and publisher, and the terms of use.
    """

    name: str
    loader: Callable
    options: dict[str, Any]
    batch_options: tuple[str, ...]
    source: Source | None
    citation: str
    license: str


_REGISTRY: dict[str, DatasetInfo] = {}

DataDir = str | os.PathLike | None


def register(
    citation: str,
    license: str,
    source: Source | None = None,
    options: Callable | None = None,
    batch_options: tuple[str, ...] = (),
) -> Callable:
    """Returns a decorator that makes a loader available to `load`.

    The name of the function is the name of the data set, its keyword-only arguments are the
    options. Its first argument is `data_dir`.

    Args:
        citation: String, description and publisher of the data set.
        license: String, the terms of use.
        source: `Source` of its files. Defaults to `None`, no files.
        options: Class whose arguments are more options, which the function takes as a dict,
            `**options`. Defaults to `None`, no more.
        batch_options: Names of the options of the batches: `"transpose"` and `"note_dropout"` for
            piano rolls, `"shift"` for MNIST, `"shift"` and `"flip"` for CIFAR-10. Defaults to `()`,
            none.

    Raises:
        ValueError: If there is a data set of this name.
    """

    def decorate(loader):
        known = {
            parameter.name: parameter.default
            for function in filter(None, (loader, options))
            for parameter in inspect.signature(function).parameters.values()
            if function is options or parameter.kind is parameter.KEYWORD_ONLY
        }
        name = loader.__name__
        if name in _REGISTRY:
            raise ValueError(f"There is already a data set {name!r}.")
        _REGISTRY[name] = DatasetInfo(name, loader, known, batch_options, source, citation, license)
        return loader

    return decorate


def list_datasets() -> list[str]:
    """Returns the names of all data sets, sorted."""
    return sorted(_REGISTRY)


def info(name: str) -> DatasetInfo:
    """Returns files, options, citation and license of a data set.

    Example:

    >>> info("adding").license
    'no license needed: generated from a seed'
    >>> sorted(info("adding").options)
    ['T', 'seed', 'test', 'train', 'valid']
    """
    if name not in _REGISTRY:
        raise ValueError(_unknown("data set", name, list_datasets()))
    return _REGISTRY[name]


def load(name: str, data_dir: DataDir = None, **options) -> Dataset:
    """Loads a data set.

    Files are read from `data_dir` if it is given; else from the folder named by the environment
    variable `TRELLIS_KERAS_DATA`, if it has files of this data set; else they are downloaded
    once to `~/.keras/datasets/trellis_keras` (`KERAS_HOME` replaces `~/.keras`), or by
    tensorflow-datasets to its own folder. Files of a local copy may be compressed (`.gz`). Data
    must have the published size.

    `list_datasets()` returns the names, and `info(name).source.paths` the files of each, such as
    `ptb/ptb.train.txt`.

    Options of `"char_ptb"`, `"text8"`, `"enwik8"`, `"war_and_peace"`, `"pydoc"` and `"text"`; they
    change the checksum, but never the vocabulary, which covers the whole text:

    - `split`: Three fractions of the text for training, validation and test, in this order.
      Defaults to the published split of `"char_ptb"`, else to `(0.9, 0.05, 0.05)`.
    - `first`: Integer, number of tokens to use from the start of the text. Defaults to all.
    - `train_fraction`: Float, fraction of the training split to use, from its start. Defaults
      to `1`.

    - `files` (only `"char_ptb"`): `"all"` to split the three files joined, 5.9 million characters,
      or `"train"` to split the training file alone, 5.06 million. Defaults to `"all"`.

    Options only for `"text"`:

    - `path`: The file. If it has moved, `data_dir` is searched for its name.
    - `unit`: `"character"`, `"word"` (both UTF-8) or `"byte"`. Defaults to `"character"`.
    - `unknown`: String, the token for words that do not occur in this text, such as `"<unk>"`.
      Defaults to `None`: such words raise an error.

    Options of `"adding"` and `"copy_memory"`: `T`, `seed`, and the numbers of sequences `train`,
    `valid` and `test`. See `adding_examples` and `copy_memory_examples`.

    Args:
        name: String, one of `list_datasets()`.
        data_dir: Folder of local copies. Defaults to `None`.
        **options: Options of the data set.

    Returns:
        A `Dataset`.

    Raises:
        ValueError: If the name or an option is unknown, or a file is not the published one.
        FileNotFoundError: If a file of a local copy is missing.
        ImportError: If a download needs tensorflow-datasets, which is not installed.
        OSError: If a download fails.

    Example:

    >>> dataset = load("adding", T=100, train=64)
    >>> x, y, weight = trellis_keras.data.SequenceStream(*dataset.train, batch_size=32)[0]
    >>> x.shape, y.shape, weight.shape
    ((32, 100, 2), (32, 1), (32,))
    """
    dataset = info(name)
    for option in options:
        if option not in dataset.options:
            known = sorted(dataset.options)
            raise ValueError(_unknown(f"option of the data set {name!r}", option, known))
    for option, default in dataset.options.items():
        if default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"The data set {name!r} needs the option `{option}`.")
    return dataset.loader(data_dir, **options)


def _unknown(what, name, known):
    return f"Unknown {what}. Received: {name!r}; known: {known}.{suggestion(str(name), known)}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" if a known name is close, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
