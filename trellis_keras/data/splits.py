"""Data sets of separate examples, in three splits."""

import dataclasses
from typing import Any

import numpy as np

from trellis_keras.data.sources import SPLITS
from trellis_keras.data.streams import SequenceStream


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared so
class Examples:
    """Inputs and targets as arrays.

    Attributes:
        x: Array of shape (examples, ...).
        y: Array of shape (examples, ...).
        weight: Array of shape (examples,) or (examples, time) that says which targets count, or
            `None`: all.
    """

    x: np.ndarray = dataclasses.field(repr=False)
    y: np.ndarray = dataclasses.field(repr=False)
    weight: np.ndarray | None = dataclasses.field(repr=False, default=None)

    def __len__(self):
        return len(self.x)

    def stream(self, batch_size, *, seed=0, shuffle=False):
        """The examples in batches, a `SequenceStream`."""
        return SequenceStream(
            self.x, self.y, batch_size, weight=self.weight, seed=seed, shuffle=shuffle
        )


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared so
class Splits:
    """A data set of separate examples.

    Attributes:
        name: The name it was loaded by.
        train: `Examples`, `PianoRolls` or `Passages`.
        valid: Like `train`.
        test: Like `train`.
        checksum: sha256 (hexadecimal) that tells whether the data are the same.
    """

    name: str
    train: Any = dataclasses.field(repr=False)
    valid: Any = dataclasses.field(repr=False)
    test: Any = dataclasses.field(repr=False)
    checksum: str

    def stream(self, split, batch_size, *, seed=0, shuffle=None, **options):
        """A split as batches for `fit` or `evaluate`.

        Args:
            split: `"train"`, `"valid"` or `"test"`.
            batch_size: Number of rows of a batch.
            seed: Where the order comes from.
            shuffle: Whether each epoch has an order of its own; by default only for `"train"`.
            **options: What the `stream()` of this kind of data takes beside: `buckets` of
                `PianoRolls`, `vocabulary` and `protocol` of `Passages`.

        Returns:
            A `keras.utils.PyDataset` of `(x, y, weight)`.

        Raises:
            ValueError: If `split` is another word or an argument is not as described.
        """
        if split not in SPLITS:
            raise ValueError(f"`split` must be one of {SPLITS}. Received: split={split!r}")
        shuffle = split == "train" if shuffle is None else shuffle
        examples = getattr(self, split)
        return examples.stream(batch_size, seed=seed, shuffle=shuffle, **options)
