"""The adding problem and copy memory, generated from a seed (TCN paper, section 4)."""

import numpy as np

from trellis_keras.data.registry import register
from trellis_keras.data.sources import SPLITS, checksum
from trellis_keras.data.splits import Examples, Splits
from trellis_keras.data.streams import check_integer

COPIED = 10
DELIMITER = 9
# float32 holds these steps exactly; a float64 of [0, 1) can round up to 1.
_STEPS = 2**24


@register
def adding(data_dir, *, T, seed=0, train=50_000, valid=1_000, test=1_000):
    """The adding problem with sequences of `T` steps."""
    del data_dir
    return _generated("adding", adding_examples, T, seed, (train, valid, test))


@register
def copy_memory(data_dir, *, T, seed=0, train=10_000, valid=1_000, test=1_000):
    """Copy memory with sequences of `T + 20` steps."""
    del data_dir
    return _generated("copy_memory", copy_memory_examples, T, seed, (train, valid, test))


def adding_examples(T, count, seed):
    """Sequences of random numbers, two of which are to be added.

    As the paper says, the two marked places are any two different ones of the sequence; in the
    version of other papers one lies in each half. Always answering 1 has a mean squared error
    of 1/6 (the paper's 0.1767 is a misprint).

    Args:
        T: Number of steps, 2 or more.
        count: Number of sequences.
        seed: An integer, or a list of integers, as `numpy.random.RandomState` takes it. The
            same seed gives the same numbers in every version of NumPy.

    Returns:
        `x`, float32 of shape (count, T, 2): numbers of [0, 1) and, beside them, 1 at the two
        marked places and 0 elsewhere; `y`, float32 of shape (count, 1): the two numbers' sum.

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
    second += second >= first  # any place but the first one, all equally likely
    rows = np.arange(count)
    x[rows, first, 1] = x[rows, second, 1] = 1
    y = x[rows, first, 0] + x[rows, second, 0]
    return x, y[:, None]


def copy_memory_examples(T, count, seed):
    """Ten digits that are to be repeated `T` steps later.

    A sequence is ten digits of 1 to 8, then T - 1 zeros, then 11 nines, the first of which is
    the delimiter. The answer is zero but for the last ten steps, which repeat the digits. Sure
    zeros and a blind guess of the digits have a mean cross-entropy of 10 ln 8 / (T + 20).

    Args:
        T: Number of steps from the last digit to the delimiter, 1 or more.
        count: Number of sequences.
        seed: As in `adding_examples`.

    Returns:
        `x`, float32 of shape (count, T + 20, 1): the digits as they are; `y`, int32 of shape
        (count, T + 20).

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


def _generated(name, generate, T, seed, counts):
    seed = check_integer("seed", seed, 0)
    parts = {}
    for i, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
        # Each split has a generator of its own: a longer one leaves the others as they are.
        parts[split] = Examples(*generate(T, check_integer(split, count, 1), [seed, i]))
    arrays = [array for part in parts.values() for array in (part.x, part.y)]
    return Splits(name, checksum=checksum(arrays), **parts)
