"""Data sets, vocabularies and streams of batches."""

from trellis_keras.data.images import pixel_permutation, pixel_sequences
from trellis_keras.data.labelled_series import LabelledWindows
from trellis_keras.data.registry import Dataset, DatasetInfo, info, list_datasets, load
from trellis_keras.data.series import Columns, TimeSeries, Windows, WindowStream
from trellis_keras.data.streams import EpochOrder, PianoRollStream, SequenceStream, TokenStream
from trellis_keras.data.synthetic import adding_examples, copy_memory_examples
from trellis_keras.data.text import last_word_examples
from trellis_keras.data.vocabulary import Vocabulary

# Registers its loaders; it exports nothing.
import trellis_keras.data.music  # noqa: F401  isort: skip

__all__ = [
    "Columns",
    "Dataset",
    "DatasetInfo",
    "EpochOrder",
    "LabelledWindows",
    "PianoRollStream",
    "SequenceStream",
    "TimeSeries",
    "TokenStream",
    "Vocabulary",
    "WindowStream",
    "Windows",
    "adding_examples",
    "copy_memory_examples",
    "info",
    "last_word_examples",
    "list_datasets",
    "load",
    "pixel_permutation",
    "pixel_sequences",
]
