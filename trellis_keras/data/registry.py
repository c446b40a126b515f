"""Data sets by name: `load("ptb")`, `load("adding", T=600)`, ..."""

import inspect

_REGISTRY = {}


def list_datasets():
    """The names that `load()` knows, sorted."""
    return sorted(_REGISTRY)


def load(name, data_dir=None, **options):
    """Loads a data set: three splits, `train`, `valid` and `test`, and a checksum.

    Published data sets are looked for in `data_dir` if it is given, else in the folder that
    the environment variable `TRELLIS_KERAS_DATA` names if it has them, else they are
    downloaded by tensorflow-datasets. Their sizes are checked against the published ones.
    Every file may also be there as `.gz`.

    Texts, returned as a `Corpus` of token ids:

    - `"ptb"`, `"char_ptb"`: Penn Treebank in Mikolov's preparation, from
      `ptb/ptb.train.txt`, `ptb/ptb.valid.txt` and `ptb/ptb.test.txt`.
    - `"wt2"`: WikiText-2 by words, from `wikitext2/wiki.train.tokens` and so on.
    - `"wt103"`: WikiText-103 by words, from `wikitext103/wiki.train.tokens` and so on. The
      first call counts and numbers its words, which takes minutes, and keeps the ids of the
      training part (413 MB) in tensorflow-datasets' folder: `~/tensorflow_datasets`, or what the
      environment variable `TFDS_DATA_DIR` names. There they are memory-mapped.
    - `"text8"`: text8 by characters, from `text8/text8`.
    - `"enwik8"`: enwik8 by bytes, from `enwik8/enwik8`.
    - `"war_and_peace"`: Tolstoy's novel by characters, from
      `war_and_peace/warpeace_input.txt`.
    - `"text"`: a file of your own. Options: `path` and `unit`, which is `"character"` (the
      default) or `"word"`, both UTF-8, or `"byte"`. A file that is not at `path` is looked for in
      `data_dir`; a byte-order mark is left out of the text. Of words also `unknown`, the word, such
      as `"<unk>"`, that stands for those which this text does not have; without it they are an
      error. A model learns it only from a text in which rare words are replaced with it.
    - `"pydoc"`: the English of Python's own `pydoc_data.topics`, character by character, on
      every machine. It differs between versions of Python; the checksum tells.

    Which part of the text is used for what: options of `"char_ptb"`, `"text8"`, `"enwik8"`,
    `"war_and_peace"`, `"text"` and `"pydoc"`, also together. Whatever they are, the vocabulary is
    that of the whole text; tokens other than without options have another checksum.

    - `split`: the shares of the training, validation and test part, which follow each other in
      the text. By default the published parts of `"char_ptb"`, and `(0.9, 0.05, 0.05)` of all
      others; with it, or with `first`, Penn Treebank's three files are one text.
    - `first`: how many tokens of the text are used, from its beginning; what follows is left out
      before the split. By default all.
    - `train_fraction`: how much of the training part is used, from its beginning, for instance
      0.2. Validation and test part do not change.

    All others, returned as `Splits`, whose `stream()` makes the batches:

    - `"adding"`, `"copy_memory"`: generated from a seed. Options: `T`, `seed` and the numbers
      of sequences `train`, `valid` and `test`. See `data.adding_examples` and
      `data.copy_memory_examples`.
    - `"seq_mnist"`, `"permuted_mnist"`, `"seq_cifar10"`: images as sequences of pixels, from
      `mnist/train-images-idx3-ubyte` and so on, and `cifar10/train_00.png` and so on. See
      `data.images`.
    - `"jsb"`, `"nottingham"`: polyphonic music as piano rolls, from
      `poly_music/JSB_Chorales.mat` and `poly_music/Nottingham.mat`. See `data.PianoRolls`.
    - `"lambada"`: passages whose last word is to be predicted, from
      `lambada/lambada_development_plain_text.txt` and `lambada/lambada_test_plain_text.txt`.
      See `data.Passages`.

    Args:
        name: One of `list_datasets()`.
        data_dir: Folder of local copies; data sets that need none do not look at it.
        **options: The data set's options; any other is refused.

    Returns:
        A `Corpus` or `Splits`.

    Raises:
        ValueError: If the name or an option is unknown, or a file is not what it should be.
        FileNotFoundError: If a local file is missing.

    Example:

    >>> corpus = load("pydoc")
    >>> corpus.unit
    'character'
    >>> x, y, weight = load("adding", T=100, train=64).stream("train", batch_size=32)[0]
    >>> x.shape, y.shape, weight.shape
    ((32, 100, 2), (32, 1), (32,))
    """
    if name not in _REGISTRY:
        raise ValueError(f"Unknown data set. Received: {name!r}; known: {list_datasets()}")
    reader = _REGISTRY[name]
    _check_options(name, reader, options)
    return reader(data_dir, **options)


def register(reader):
    """Makes a function `reader(data_dir, *, option=default, ...)` loadable.

    Its name is the data set's name, its keyword-only arguments are the options.
    """
    _REGISTRY[reader.__name__] = reader
    return reader


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
