"""Batches for `fit` and `evaluate` from a long text, sequences of equal length, or piano rolls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from trellis_keras.layers.checks import check_choice, check_integer, check_rates
from trellis_keras.types import Logs

PIANO_KEYS = 88
_LENGTHS = 4  # different lengths of batches of piano rolls

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]

# The streams do not support `workers` and `use_multiprocessing`: on JAX, `fit` reads a batch to
# build the model, and with prefetching threads it would read that batch twice and never the last.
# Keras waits forever for a worker process that has died.


class TokenStream(keras.utils.PyDataset):
    """Batches of one long token sequence, to train and evaluate a language model.

    The text is split into `batch_size` consecutive rows, and batch `i` is the `i`-th segment of
    every row. The target of a position is the next token, so N tokens have N - 1 targets. A batch
    is a tuple `(x, y, weight)`:

    - `x`: int32 tokens of shape (batch, sequence_length);
    - `y`: int32 targets of the last `output_length = sequence_length - context_length` positions
      of `x`, of shape (batch, output_length);
    - `weight`: float32 with the shape of `y`, 1 where the target counts and 0 for padding.

    `keras.utils.timeseries_dataset_from_array` neither continues a row in the next batch nor counts
    the targets at the end of the text.

    There are two ways to provide context (TrellisNet paper, appendix B). Either segments
    overlap, and the first `context_length` positions are read but not scored; those before the
    start of the text are 0. Or segments do not overlap (`context_length=0`) and a stateful model
    carries its state from batch to batch.

    All batches have the same shape, so XLA compiles once. A batch reads only its own tokens, so
    `tokens` may be memory-mapped. Batches must stay in order: `LanguageModel.fit` preserves it;
    other models need `fit(..., shuffle=False)`.

    Args:
        tokens: Integer array of shape (N,), N >= 2.
        batch_size: Positive integer, number of rows, at most N - 1.
        sequence_length: Positive integer, number of tokens per row of a batch.
        context_length: Integer, number of these tokens that are read but not scored. Defaults to
            `0`.
        target_counting: `"all"` or `"original"`. Defaults to `"all"`.
            `"all"` counts every target exactly once. A row has `ceil((N - 1) / batch_size)`
            targets; its last segment is padded. The context of a target is the preceding text, even
            at the start of a row.
            `"original"` follows the TrellisNet authors' code, for comparison. It omits the tokens
            that do not fill `batch_size` rows, the targets that lie in the next row, and the first
            `context_length` targets of every row.

    Example:

    >>> stream = TokenStream(np.arange(8), batch_size=2, sequence_length=3, context_length=1)
    >>> x, y, weight = stream[0]
    >>> x
    array([[0, 0, 1],
           [3, 4, 5]], dtype=int32)
    >>> y
    array([[1, 2],
           [5, 6]], dtype=int32)
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        sequence_length: int,
        context_length: int = 0,
        target_counting: str = "all",
    ) -> None:
        super().__init__()
        self._tokens = _check_tokens(tokens)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.sequence_length = check_integer("sequence_length", sequence_length, 1)
        self.context_length = check_integer("context_length", context_length, 0)
        self.target_counting = target_counting
        check_choice("target_counting", target_counting, ("all", "original"))
        self._check_sizes()
        # The tokens of a row, and its scored positions: [first, end).
        if target_counting == "all":
            self._row_length = -(-(len(self._tokens) - 1) // self.batch_size)
            self._first, self._end = 0, self._row_length
        else:
            self._row_length = len(self._tokens) // self.batch_size
            self._first, self._end = self.context_length, self._row_length - 1
        if self._first >= self._end:
            raise ValueError(
                "With target_counting='original' each row needs more than context_length + 1 = "
                f"{self.context_length + 1} tokens. Received: {len(self._tokens)} tokens in "
                f"batch_size={self.batch_size} rows, {self._row_length} in each"
            )

    @property
    def output_length(self) -> int:
        """Number of scored positions at the end of a segment."""
        return self.sequence_length - self.context_length

    @functools.cached_property
    def token_range(self) -> tuple[int, int]:
        """The smallest and the largest token, which a model checks against its vocabulary."""
        return int(self._tokens.min()), int(self._tokens.max())

    @property
    def targets_counted(self) -> int:
        """Number of targets with weight 1 in one epoch."""
        if self.target_counting == "all":
            return len(self._tokens) - 1
        return self.batch_size * (self._end - self._first)

    def __len__(self) -> int:
        return -(-(self._end - self._first) // self.output_length)

    def __getitem__(self, index: int) -> Batch:
        _check_index(index, len(self))
        start = self._first + index * self.output_length
        # Positions in the row, then in the text: (1, sequence_length), (batch_size, same).
        positions = np.arange(start - self.context_length, start + self.output_length)[None]
        places = positions + np.arange(self.batch_size)[:, None] * self._row_length
        last = len(self._tokens) - 2  # the last token that has a target
        inside = np.clip(places, 0, last)  # padding has weight 0: any token will do
        x = _as_int32(self._tokens[inside])
        x[places < 0] = 0  # read before the start of the text
        y = _as_int32(self._tokens[inside[:, self.context_length :] + 1])
        counts = (positions < self._end) & (places <= last)
        return x, y, counts[:, self.context_length :].astype("float32")

    def _check_sizes(self):
        if self.context_length >= self.sequence_length:
            raise ValueError(
                "`context_length` must be smaller than `sequence_length`, or nothing is scored. "
                f"Received: context_length={self.context_length}, "
                f"sequence_length={self.sequence_length}"
            )
        if self.batch_size > len(self._tokens) - 1:
            raise ValueError(
                f"`batch_size` must be at most the number of targets, {len(self._tokens) - 1}: "
                "use a longer text or fewer rows. "
                f"Received: batch_size={self.batch_size}"
            )


class ExampleStream(keras.utils.PyDataset):
    """Batches of separate examples, in an order determined by seed and epoch.

    Examples in a group have the same shape and share batches. The last batch of a group is padded
    with examples of weight 0. A subclass implements `_batch(group, rows, counts)`, which returns
    the batch of the examples `rows`; `counts` is 0 for padding examples.
    """

    def __init__(
        self, groups: Sequence[np.ndarray], batch_size: int, seed: int, shuffle: bool
    ) -> None:
        super().__init__()
        self._groups = groups
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self._seed = check_integer("seed", seed, 0)
        self._shuffle = shuffle
        self.epoch = 0  # whose batches `self[i]` returns
        self._planned: tuple[int | None, list] = (None, [])

    def on_epoch_end(self) -> None:
        # The next epoch has its own order. `EpochOrder` sets the epoch when training is resumed.
        self.epoch += 1

    def __len__(self) -> int:
        return sum(-(-len(group) // self.batch_size) for group in self._groups)

    def __getitem__(self, index: int) -> Batch:
        _check_index(index, len(self))
        epoch, plan = self._planned
        if epoch != self.epoch:
            epoch = self.epoch  # once: another thread may set it
            plan = self._plan(epoch)
            self._planned = epoch, plan
        group, rows = plan[index]
        counts = (np.arange(self.batch_size) < len(rows)).astype("float32")
        return self._batch(group, np.resize(rows, self.batch_size), counts)

    def _plan(self, epoch):
        """Returns the batches of an epoch as a list of (index of the group, its examples)."""
        generator = np.random.default_rng([self._seed, epoch])
        plan = []
        for number, group in enumerate(self._groups):
            order = generator.permutation(group) if self._shuffle else group
            starts = range(0, len(order), self.batch_size)
            plan += [(number, order[i : i + self.batch_size]) for i in starts]
        if self._shuffle:
            plan = [plan[i] for i in generator.permutation(len(plan))]
        # Keras on TensorFlow infers the varying axes from the first two batches, so a batch of a
        # different shape comes second.
        other = next((i for i, (group, _) in enumerate(plan) if group != plan[0][0]), None)
        if other is not None:
            plan.insert(1, plan.pop(other))
        return plan


class SequenceStream(ExampleStream):
    """Batches `(x, y, weight)` of sequences of equal length.

    Every example counts once per epoch: the last batch is padded with examples of weight 0. The
    losses of this package's models and Keras' `weighted_metrics` leave them out; Keras' `metrics`
    and `predict` do not, and its losses divide by the padded batch size.

    Batch `i` of an epoch is a pure function of `(seed, epoch, i)`, so resumed training sees the
    same batches. Pass the callback `EpochOrder` to `fit`, so that resumed training continues with
    the order of its epoch, and `shuffle=False`, or Keras shuffles the batches again. With
    `steps_per_epoch`, Keras would continue with the order of another epoch.

    Args:
        x: Array of shape (examples, ...).
        y: Array of shape (examples, ...).
        batch_size: Positive integer, number of examples in a batch.
        weight: Array of shape (examples,) or (examples, time); every example needs a nonzero
            weight. Defaults to `None`, all ones.
        seed: Nonnegative integer, determines the order. Defaults to `0`.
        shuffle: Boolean, whether each epoch has its own order. Defaults to `False`.
        augment: Function `(x, generator)` that returns augmented inputs of a batch, using a
            `numpy.random.Generator` seeded by seed, epoch and batch. Defaults to `None`.

    Example:

    >>> stream = SequenceStream(np.zeros((5, 7, 1)), np.arange(5), batch_size=2)
    >>> [y.tolist() for x, y, weight in stream]
    [[0, 1], [2, 3], [4, 4]]
    >>> stream[2][2]
    array([1., 0.], dtype=float32)
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        weight: np.ndarray | None = None,
        seed: int = 0,
        shuffle: bool = False,
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
    ) -> None:
        self._augment = augment
        self._x, self._y = np.asanyarray(x), np.asanyarray(y)
        self._weight = None if weight is None else np.asarray(weight, dtype="float32")
        _check_examples(self._x, self._y, self._weight)
        super().__init__([np.arange(len(self._x))], batch_size, seed, shuffle)

    @property
    def targets_counted(self) -> int:
        """Number of examples in one epoch."""
        return len(self._x)

    def _batch(self, group, rows, counts):
        if self._weight is not None:
            weight = self._weight[rows]
            counts = weight * counts.reshape(-1, *[1] * (weight.ndim - 1))
        x = self._x[rows]
        if self._augment is not None:
            # Each row is the first of at most one batch.
            x = self._augment(x, np.random.default_rng([self._seed, self.epoch, rows[0]]))
        return x, self._y[rows], counts


class PianoRollStream(ExampleStream):
    """Padded batches `(x, y, weight)` of piano rolls, where frame t predicts frame t + 1.

    - `x`: float32 of shape (batch, time, 88), all frames but the last;
    - `y`: float32 of the same shape, all frames but the first;
    - `weight`: float32 of shape (batch, time), 1 for frames and 0 for padding.

    Padding follows the frames, so the outputs of a causal model at real frames do not depend on it.

    Rolls of similar length share a batch. The length of a batch is that of the longest roll, or
    half of it, a quarter or an eighth: at most four lengths, each of which XLA compiles once.
    Order and epochs are as in `SequenceStream`. Likewise, transpositions and dropped
    notes are determined by seed, epoch and roll.

    Args:
        rolls: Sequence of arrays of shape (frames, 88) with values 0 and 1, at least 2 frames
            each.
        batch_size: Positive integer, number of rolls in a batch.
        seed: Nonnegative integer, determines the order. Defaults to `0`.
        shuffle: Boolean, whether each epoch has its own order. Defaults to `False`.
        transpose: Float in [0, 1], probability of transposing a roll by -6 to 5 semitones. Notes
            outside the keyboard are dropped. Defaults to `0`.
        note_dropout: Float in [0, 1), rate at which individual notes of `x` are dropped; `y` keeps
            them. Defaults to `0`.

    Example:

    >>> rolls = [np.eye(frames, 88) for frames in (8, 9)]
    >>> x, y, weight = PianoRollStream(rolls, batch_size=2)[0]
    >>> x.shape, weight.sum(axis=1)
    ((2, 8, 88), array([7., 8.], dtype=float32))
    """

    def __init__(
        self,
        rolls: Sequence[np.ndarray],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        transpose: float = 0.0,
        note_dropout: float = 0.0,
    ) -> None:
        _check_rolls(rolls)
        if not 0 <= transpose <= 1:
            raise ValueError(f"`transpose` must be in [0, 1]. Received: transpose={transpose}")
        check_rates(note_dropout=note_dropout)
        self._transpose, self._note_dropout = transpose, note_dropout
        self._rolls = rolls
        steps = np.array([len(roll) - 1 for roll in rolls])
        lengths = np.unique([-(-steps.max() // 2**k) for k in range(_LENGTHS)])
        bucket = np.searchsorted(lengths, steps)
        used = np.unique(bucket)
        self.lengths = tuple(lengths[used].tolist())
        self.targets_counted = int(steps.sum())
        super().__init__([np.flatnonzero(bucket == i) for i in used], batch_size, seed, shuffle)

    def _batch(self, group, rows, counts):
        shape = (len(rows), self.lengths[group])
        x, y = np.zeros((2, *shape, PIANO_KEYS), dtype="float32")
        weight = np.zeros(shape, dtype="float32")
        for i, row in enumerate(rows):
            heard, predicted = self._example(row)
            steps = len(heard)
            x[i, :steps], y[i, :steps], weight[i, :steps] = heard, predicted, counts[i]
        return x, y, weight

    def _example(self, row):
        """Returns the inputs and targets of a roll in this epoch."""
        roll = np.asarray(self._rolls[row])
        generator = np.random.default_rng([self._seed, self.epoch, row])
        if generator.random() < self._transpose:
            roll = _transposed(roll, generator.integers(-6, 6))
        heard, predicted = roll[:-1], roll[1:]
        if self._note_dropout:
            heard = heard * (generator.random(heard.shape) >= self._note_dropout)
        return heard, predicted


def _transposed(roll, semitones):
    """Transposes a piano roll up, or down if `semitones` is negative."""
    keys = np.arange(PIANO_KEYS) - semitones  # where each key's notes come from
    inside = (keys >= 0) & (keys < PIANO_KEYS)
    return roll[:, keys.clip(0, PIANO_KEYS - 1)] * inside


class EpochOrder(keras.callbacks.Callback):
    """Callback that sets the epoch of a stream, so that resumed training has the same order.

    Keras notifies a `PyDataset` when an epoch starts, but does not pass its number.

    Example:

    >>> stream = SequenceStream(x, y, batch_size=32, shuffle=True)
    >>> model.fit(stream, shuffle=False, callbacks=[EpochOrder(stream)])
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.stream.epoch = epoch


def _check_rolls(rolls):
    if not len(rolls):
        raise ValueError("`rolls` needs at least one piano roll. Received: none")
    for i, roll in enumerate(map(np.asarray, rolls)):
        if roll.ndim != 2 or roll.shape[1] != PIANO_KEYS or len(roll) < 2:
            raise ValueError(
                f"Piano roll {i} must have the shape (frames, {PIANO_KEYS}), one column per key, "
                "and at least 2 frames, one to read and one to predict. "
                f"Received: shape {roll.shape}"
            )
        wrong = roll[(roll != 0) & (roll != 1)]
        if wrong.size:
            raise ValueError(f"Piano roll {i} must contain only 0 and 1. Received: {wrong.flat[0]}")


def _check_index(index, length):
    if not 0 <= index < length:
        raise IndexError(f"The stream has batches 0 to {length - 1}. Received: {index}")


def _check_tokens(tokens):
    tokens = np.asanyarray(tokens)  # keeps a memory map
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or len(tokens) < 2:
        raise ValueError(
            "`tokens` must be an array (N,) of at least 2 integers. "
            f"Received: shape {tokens.shape}, dtype {tokens.dtype}"
        )
    return tokens


def _as_int32(tokens):
    found = tokens.astype("int32")
    if not np.array_equal(found, tokens):
        wrong = tokens[found != tokens].flat[0]
        raise ValueError(f"Tokens must be smaller than 2**31. Received: {wrong}")
    return found


def _check_examples(x, y, weight):
    if x.ndim < 1 or y.ndim < 1 or not len(x) == len(y) > 0:
        raise ValueError(
            "`x` and `y` must have the same number of examples, at least one, as their first axis. "
            f"Received: shapes {x.shape} and {y.shape}"
        )
    if weight is None:
        return
    if weight.ndim not in (1, 2) or weight.shape != y.shape[: weight.ndim]:
        raise ValueError(
            "`weight` must have the shape (examples,) or (examples, time) of `y`. "
            f"Received: shapes {weight.shape} for y {y.shape}"
        )
    empty = np.flatnonzero(~weight.reshape(len(weight), -1).any(axis=1))
    if empty.size:
        raise ValueError(
            "Every example needs a nonzero weight. Received: all zeros in example "
            f"{empty[0]} ({empty.size} in total)"
        )
