"""The adding problem and copy memory, generated from a seed (TCN paper, section 4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trellis_keras.files import checksum
from trellis_keras.layers.checks import check_integer
from trellis_keras.zoo.datasets.registry import SPLITS, DataDir, Dataset, register

COPIED = 10
DELIMITER = 9
# float32 represents these steps exactly; a float64 in [0, 1) can round up to 1.
_STEPS = 2**24
_TERMS: dict[str, Any] = {
    "citation": "TCN paper (Bai et al. 2018), section 4",
    "license": "no license needed: generated from a seed",
}


@register(**_TERMS)
def adding(
    data_dir: DataDir,
    *,
    T: int,
    seed: int = 0,
    train: int = 50_000,
    valid: int = 1_000,
    test: int = 1_000,
) -> Dataset:
    """The adding problem with sequences of `T` steps."""
    return _generate("adding", adding_examples, T, seed, (train, valid, test))


@register(**_TERMS)
def copy_memory(
    data_dir: DataDir,
    *,
    T: int,
    seed: int = 0,
    train: int = 10_000,
    valid: int = 1_000,
    test: int = 1_000,
) -> Dataset:
    """Copy memory with sequences of `T + 20` steps."""
    return _generate("copy_memory", copy_memory_examples, T, seed, (train, valid, test))


def adding_examples(T: int, count: int, seed: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Generates sequences for the adding problem: the target is the sum of two marked numbers.

    As in the paper, the two marked steps are any two of the sequence; in other papers' version
    there is one in each half. The constant prediction 1 has a mean squared error of 1/6 (the
    paper's 0.1767 is a misprint).

    Args:
        T: Integer, number of steps, at least 2.
        count: Positive integer, number of sequences.
        seed: Integer or sequence of integers, as for `numpy.random.RandomState`. The same seed
            gives the same numbers in every version of NumPy.

    Returns:
        A tuple `(x, y)`. `x`: float32 of shape (count, T, 2), numbers in [0, 1), and a channel that
        is 1 at the two marked steps and 0 elsewhere. `y`: float32 of shape (count, 1), the sum of
        the two numbers.

    Raises:
        ValueError: If `T` or `count` is too small.

    Example:

    >>> x, y = adding_examples(T=10, count=3, seed=0)
    >>> bool(np.allclose((x[:, :, 0] * x[:, :, 1]).sum(axis=1), y[:, 0]))
    True
    """
    T, count = check_integer("T", T, 2), check_integer("count", count, 1)
    generator = np.random.RandomState(seed)
    x = np.zeros((count, T, 2), dtype="float32")
    x[:, :, 0] = generator.randint(_STEPS, size=(count, T), dtype="uint32") / np.float32(_STEPS)
    first = generator.randint(T, size=count, dtype="int64")
    second = generator.randint(T - 1, size=count, dtype="int64")
    second += second >= first  # any step but the first one, all equally likely
    rows = np.arange(count)
    x[rows, first, 1] = x[rows, second, 1] = 1
    y = x[rows, first, 0] + x[rows, second, 0]
    return x, y[:, None]


def copy_memory_examples(
    T: int, count: int, seed: int | Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Generates sequences of ten digits that must be repeated `T + 10` steps later.

    A sequence is ten digits from 1 to 8, then T - 1 zeros, then 11 nines, the first of which is the
    delimiter. The target is zero except for the last ten steps, which repeat the digits. Predicting
    zeros with certainty and the digits uniformly gives a mean cross-entropy of 10 ln 8 / (T + 20).

    Args:
        T: Positive integer, number of steps from the last digit to the delimiter.
        count: Positive integer, number of sequences.
        seed: As in `adding_examples`.

    Returns:
        A tuple `(x, y)`. `x`: float32 of shape (count, T + 20, 1), the digits as numbers. `y`:
        int32 of shape (count, T + 20).

    Raises:
        ValueError: If `T` or `count` is too small.

    Example:

    >>> x, y = copy_memory_examples(T=2, count=1, seed=0)
    >>> x[0, 10:, 0].astype(int).tolist()
    [0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]
    >>> bool((y[0, -10:] == x[0, :10, 0]).all())
    True
    """
    T, count = check_integer("T", T, 1), check_integer("count", count, 1)
    generator = np.random.RandomState(seed)
    digits = generator.randint(1, DELIMITER, size=(count, COPIED), dtype="int64")
    x = np.zeros((count, T + 2 * COPIED, 1), dtype="float32")
    x[:, :COPIED, 0] = digits
    x[:, -COPIED - 1 :] = DELIMITER
    y = np.zeros((count, T + 2 * COPIED), dtype="int32")
    y[:, -COPIED:] = digits
    return x, y


def _generate(name, generate, T, seed, counts):
    seed = check_integer("seed", seed, 0)
    # Each split has its own generator: its numbers do not depend on the size of the others.
    splits = {
        split: generate(T, check_integer(split, count, 1), [seed, i])
        for i, (split, count) in enumerate(zip(SPLITS, counts, strict=True))
    }
    digest = checksum(array for split in splits.values() for array in split)
    return Dataset(name, **splits, checksum=digest)
