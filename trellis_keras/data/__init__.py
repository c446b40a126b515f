"""Data sets, vocabularies and streams of batches."""

from trellis_keras.data.corpora import Corpus
from trellis_keras.data.images import pixel_permutation, pixel_sequences
from trellis_keras.data.lambada import Passages, last_word_examples
from trellis_keras.data.music import PianoRolls
from trellis_keras.data.registry import list_datasets, load
from trellis_keras.data.splits import Examples, Splits
from trellis_keras.data.streams import (
    EpochOrder,
    PianoRollStream,
    SequenceStream,
    TokenStream,
)
from trellis_keras.data.synthetic import adding_examples, copy_memory_examples
from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.layers.base import check_tokens

__all__ = [
    "Corpus",
    "EpochOrder",
    "Examples",
    "Passages",
    "PianoRollStream",
    "PianoRolls",
    "SequenceStream",
    "Splits",
    "TokenStream",
    "Vocabulary",
    "adding_examples",
    "check_tokens",
    "copy_memory_examples",
    "last_word_examples",
    "list_datasets",
    "load",
    "pixel_permutation",
    "pixel_sequences",
]
