"""LAMBADA: passages whose last word is to be predicted from the words before it."""

import dataclasses

import numpy as np

from trellis_keras.data.registry import register
from trellis_keras.data.sources import (
    Source,
    check_count,
    checksum,
    decode,
    import_builders,
    local_sources,
)
from trellis_keras.data.splits import Examples, Splits

PASSAGES = {"valid": 4_869, "test": 5_153}
PROTOCOLS = ("words_before", "authors")

_FILES = {
    "valid": "lambada/lambada_development_plain_text.txt",
    "test": "lambada/lambada_test_plain_text.txt",
}
# tensorflow-datasets calls the development passages "train".
_TFDS_SPLITS = {"valid": "train", "test": "test"}


@dataclasses.dataclass(frozen=True)
class Passages:
    """Passages of some sentences each.

    Attributes:
        texts: Tuple of strings, words with single spaces between them.
    """

    texts: tuple = dataclasses.field(repr=False)

    def __len__(self):
        return len(self.texts)

    def stream(self, batch_size, *, vocabulary, protocol="words_before", seed=0, shuffle=False):
        """The last words in batches, a `SequenceStream`; see `last_word_examples`."""
        if not self.texts:
            raise ValueError(
                "LAMBADA has no passages for training. A text of yours is loaded by "
                'load("text", path=..., unit="word", unknown="<unk>")'
            )
        examples = last_word_examples(self.texts, vocabulary, protocol)
        return examples.stream(batch_size, seed=seed, shuffle=shuffle)


@register
def lambada(data_dir):
    """LAMBADA: 4,869 development passages as `valid` and 5,153 as `test`.

    `train` is empty: the training text, 2,662 novels, is no part of this data set. Load a copy of
    yours with `load("text", path=..., unit="word", unknown="<unk>")`.
    """
    sources = local_sources(_FILES, data_dir)
    if sources is None:
        sources = _downloaded()
    parts = {}
    for split, source in zip(_FILES, sources, strict=True):
        texts = [line.strip() for line in decode(source).splitlines()]
        parts[split] = Passages(tuple(text for text in texts if text))
        check_count(source, "passages", PASSAGES[split], len(parts[split]))
    # Sorted, because the sources keep them in different orders.
    contents = [text.encode() for split in _FILES for text in sorted(parts[split].texts)]
    return Splits("lambada", train=Passages(()), checksum=checksum(contents), **parts)


def last_word_examples(passages, vocabulary, protocol="words_before"):
    """Passages as inputs and targets of which one counts, the last word.

    - `"words_before"`: the model reads the words before the last one, and its output at the end
      of them is compared with the last. Words that the vocabulary does not know are its unknown
      token; passages whose last word it does not know are left out, because to foresee the
      unknown token is not to foresee the word (the number left out is `len(passages)` less
      `len(examples)`). Padding stands behind the words, so a causal model does not see it.
    - `"authors"`: as in the TCN authors' program, **for comparison only**: the model reads the
      whole passage, the last word too, and its output there is compared with that same word.
      Words that the vocabulary does not know are dropped, and padding, word 0, stands before
      the passage.

    Args:
        passages: Strings, words separated by white space, 2 or more each.
        vocabulary: A `Vocabulary` of words.
        protocol: `"words_before"` or `"authors"`.

    Returns:
        `Examples`: `x` and `y`, int32 of shape (examples, time), and `weight`, float32 of the
        same shape, 1 at the one step that counts.

    Raises:
        ValueError: If `protocol` is another word, the vocabulary is not one of words or has no
            unknown token for a word it does not know, or no passage is left to predict.

    Example:

    >>> from trellis_keras.data import Vocabulary
    >>> vocabulary = Vocabulary(["<eos>", "the", "cat", "sat"])
    >>> examples = last_word_examples(["the cat sat", "the cat"], vocabulary)
    >>> examples.x, examples.weight.argmax(axis=1)
    (array([[1, 2],
           [1, 0]], dtype=int32), array([1, 0]))
    >>> examples.y
    array([[0, 3],
           [2, 0]], dtype=int32)
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"`protocol` must be one of {PROTOCOLS}. Received: {protocol!r}")
    if vocabulary.unit != "word":
        raise ValueError(f"LAMBADA needs a vocabulary of words. Received: {vocabulary}")
    known = set(vocabulary.tokens)
    if protocol == "words_before":
        words = [text.split() for text in passages]
        rows = [_encode(row, vocabulary) for row in words if len(row) > 1 and row[-1] in known]
        return _last_targets(rows, [len(row) - 2 for row in rows], shift=1)
    words = [[word for word in text.split() if word in known] for text in passages]
    rows = [_encode(row, vocabulary) for row in words if row]
    time = max(map(len, rows), default=0)
    rows = [np.pad(row, (time - len(row), 0)) for row in rows]
    return _last_targets(rows, [time - 1] * len(rows), shift=0)


def _encode(words, vocabulary):
    return vocabulary.encode(" ".join(words), final_eos=False)


def _last_targets(rows, places, shift):
    """Examples whose target at step `place` is the word `shift` steps on."""
    if not rows:
        raise ValueError("No passage is left to predict: the vocabulary knows no last word of them")
    shape = (len(rows), max(map(len, rows)) - shift)
    x, y = np.zeros((2, *shape), dtype="int32")
    weight = np.zeros(shape, dtype="float32")
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        x[i, : place + 1] = row[: place + 1]
        y[i, place] = row[place + shift]
        weight[i, place] = 1
    return Examples(x, y, weight)


def _downloaded():
    arrays = import_builders().read_arrays("lambada")
    return [
        Source(f"lambada {split}", b"\n".join(arrays[_TFDS_SPLITS[split]]["passage"].tolist()))
        for split in _FILES
    ]
