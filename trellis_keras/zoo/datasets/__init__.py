"""The papers' data sets by name: `load("ptb")`, `load("adding", T=600)`, ..."""

from trellis_keras.zoo.datasets.images import augment_images, pixel_permutation
from trellis_keras.zoo.datasets.registry import (
    Dataset,
    DatasetInfo,
    info,
    list_datasets,
    load,
    register,
)
from trellis_keras.zoo.datasets.synthetic import adding_examples, copy_memory_examples
from trellis_keras.zoo.datasets.texts import last_word_examples

# It registers its loaders and exports nothing.
import trellis_keras.zoo.datasets.music  # noqa: F401  isort: skip

__all__ = [
    "Dataset",
    "DatasetInfo",
    "adding_examples",
    "augment_images",
    "copy_memory_examples",
    "info",
    "last_word_examples",
    "list_datasets",
    "load",
    "pixel_permutation",
    "register",
]
