"""Batches of separate sequences: all of one length, or piano rolls of many lengths."""

import functools

import keras
import numpy as np

from trellis_keras.data.checks import checked_int

PIANO_KEYS = 88


class _ExampleStream(keras.utils.PyDataset):
    """Batches of examples; a subclass says in `_batch` what is in one.

    Examples of one group have one shape and come together in a batch. A group that does not
    fill its last batch fills it up with its own examples, again from the first, at weight 0.
    """

    def __init__(self, groups, batch_size, seed, shuffle):
        super().__init__()  # without `workers`, as `TokenStream`
        self._groups = groups
        self._batch_size = checked_int("batch_size", batch_size, 1)
        self._seed = checked_int("seed", seed, 0)
        self._shuffle = shuffle
        self._steps = sum(-(-len(group) // self._batch_size) for group in groups)
        # An epoch's order is worked out once, not for each of its batches.
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
        self.epoch = 0

    @property
    def batch_size(self):
        """Number of rows of a batch."""
        return self._batch_size

    @property
    def epoch(self):
        """The epoch whose batches `stream[i]` returns; `EpochOrder` sets it in `fit`."""
        return self._epoch

    @epoch.setter
    def epoch(self, value):
        self._epoch = checked_int("epoch", value, 0)

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        if not 0 <= index < self._steps:
            raise IndexError(f"The stream has batches 0 to {self._steps - 1}. Received: {index}")
        group, rows = self._plan(self._epoch)[index]
        counts = (np.arange(self._batch_size) < len(rows)).astype("float32")
        return self._batch(group, np.resize(rows, self._batch_size), counts)

    def __getstate__(self):
        # A cache cannot be pickled or copied.
        return {key: value for key, value in self.__dict__.items() if key != "_plan"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

    def _batch(self, group, rows, counts):
        """The batch of examples `rows`, where `counts` is 0 for those that only fill it up."""
        raise NotImplementedError

    def _make_plan(self, epoch):
        """The epoch's batches: a list of (number of the group, indices of examples)."""
        generator = np.random.default_rng([self._seed, epoch])
        plan = []
        for number, group in enumerate(self._groups):
            order = generator.permutation(group) if self._shuffle else group
            starts = range(0, len(order), self._batch_size)
            plan += [(number, order[i : i + self._batch_size]) for i in starts]
        if self._shuffle:
            plan = [plan[i] for i in generator.permutation(len(plan))]
        return _two_shapes_first(plan)


class SequenceStream(_ExampleStream):
    """Batches of sequences of one length, for `fit` and `evaluate`.

    A batch is `(x, y, weight)`, all batches have the same shape (XLA compiles anew for each new
    one), and every example comes once in an epoch: the last batch is filled up with examples of
    weight 0. Batch i of epoch e is a pure function of (seed, e, i). The epoch is `epoch`, which
    the callback `EpochOrder` sets; without it every epoch has the order of the first. **Pass
    `shuffle=False` to `fit()`**, which shuffles the batches otherwise, from no seed.

    Args:
        x: Array of shape (examples, ...).
        y: Array of shape (examples, ...).
        batch_size: Number of rows of a batch.
        weight: Array of shape (examples,) or (examples, time), or `None`: all ones. Each example
            has at least one weight that is not 0.
        seed: Where the order comes from, an integer of 0 or more.
        shuffle: Whether the examples are put in a new order for each epoch.

    Raises:
        ValueError: If an argument is not as described.

    Example:

    >>> stream = SequenceStream(np.zeros((5, 7, 1)), np.arange(5), batch_size=2)
    >>> [batch[1].tolist() for batch in stream]
    [[0, 1], [2, 3], [4, 4]]
    >>> stream[2][2]
    array([1., 0.], dtype=float32)
    """

    def __init__(self, x, y, batch_size, *, weight=None, seed=0, shuffle=False):
        self._x, self._y = np.asanyarray(x), np.asanyarray(y)
        _check_examples(self._x, self._y)
        if weight is not None:
            weight = np.asarray(weight, dtype="float32")
            _check_weight(weight, self._y)
        self._weight = weight
        super().__init__([np.arange(len(self._x))], batch_size, seed, shuffle)

    def _batch(self, group, rows, counts):
        if self._weight is not None:
            weight = self._weight[rows]
            counts = weight * counts.reshape(-1, *[1] * (weight.ndim - 1))
        return self._x[rows], self._y[rows], counts


class PianoRollStream(_ExampleStream):
    """Padded batches of piano rolls, for `fit` and `evaluate`.

    The model reads frame t and predicts frame t + 1. A batch is `(x, y, weight)`:

    - `x`: float32 of shape (batch_size, time, 88), the frames but the last;
    - `y`: the same shape, the frames but the first;
    - `weight`: float32 of shape (batch_size, time), 1 for real frames and 0 for padding.

    Padding stands behind the frames, so a causal model's outputs at real frames do not see it.
    A sum of losses times `weight`, divided by the sum of `weight`, is the mean over real frames,
    the same in any batches.

    Rolls of like length share a batch. A batch's time is the longest roll's, or half of it, or
    a quarter, ...: at most `buckets` different values, for each of which XLA compiles once.
    Order, epochs and `shuffle` are as in `SequenceStream`.

    Args:
        rolls: List of arrays of shape (frames, 88) with values 0 and 1, 2 frames or more each.
        batch_size: Number of rows of a batch.
        buckets: Number of different lengths, 1 or more.
        seed: Where the order comes from, an integer of 0 or more.
        shuffle: Whether the rolls are put in a new order for each epoch.

    Raises:
        ValueError: If an argument is not as described.

    Example:

    >>> rolls = [np.eye(frames, 88) for frames in (4, 9)]
    >>> x, y, weight = PianoRollStream(rolls, batch_size=2, buckets=1)[0]
    >>> x.shape, weight.sum(axis=1)
    ((2, 8, 88), array([3., 8.], dtype=float32))
    """

    def __init__(self, rolls, batch_size, *, buckets=4, seed=0, shuffle=False):
        if not len(rolls):
            raise ValueError("`rolls` needs at least one piano roll. Received: none")
        for i, roll in enumerate(rolls):
            check_piano_roll(roll, f"Piano roll {i}")
        self._rolls = rolls
        steps = np.array([len(roll) - 1 for roll in rolls])
        self._times, groups = _by_length(steps, checked_int("buckets", buckets, 1))
        self._frames_counted = int(steps.sum())
        super().__init__(groups, batch_size, seed, shuffle)

    @property
    def times(self):
        """The different lengths of batches, a tuple of rising integers."""
        return self._times

    @property
    def frames_counted(self):
        """Number of frames with weight 1 in one epoch."""
        return self._frames_counted

    def _batch(self, group, rows, counts):
        shape = (len(rows), self._times[group])
        x, y = np.zeros((2, *shape, PIANO_KEYS), dtype="float32")
        weight = np.zeros(shape, dtype="float32")
        for i, row in enumerate(rows):
            roll = self._rolls[row]
            steps = len(roll) - 1
            x[i, :steps], y[i, :steps], weight[i, :steps] = roll[:-1], roll[1:], counts[i]
        return x, y, weight


class EpochOrder(keras.callbacks.Callback):
    """Tells a stream which epoch it is, so that each has its own order, also after a resume.

    Args:
        stream: A `SequenceStream` or `PianoRollStream`.

    Example:

    >>> stream = SequenceStream(x, y, batch_size=32, shuffle=True)  # doctest: +SKIP
    >>> model.fit(stream, shuffle=False, callbacks=[EpochOrder(stream)])  # doctest: +SKIP
    """

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def on_epoch_begin(self, epoch, logs=None):
        """Sets the stream's epoch."""
        self.stream.epoch = epoch


def check_piano_roll(roll, label):
    """Refuses what is no piano roll with a frame to read and one to predict.

    Args:
        roll: Array.
        label: What error messages call it.

    Raises:
        ValueError: If the shape is not (frames, 88) with 2 frames or more, or a value is
            neither 0 nor 1.
    """
    roll = np.asarray(roll)
    if roll.ndim != 2 or roll.shape[1] != PIANO_KEYS:
        raise ValueError(
            f"{label} must have the shape (frames, {PIANO_KEYS}), one column a key. "
            f"Received: shape {roll.shape}"
        )
    if len(roll) < 2:
        raise ValueError(
            f"{label} has no step: it needs at least 2 frames, one to read and one to predict. "
            f"Received: {len(roll)}"
        )
    wrong = roll[(roll != 0) & (roll != 1)]
    if wrong.size:
        raise ValueError(f"{label} must hold only 0 and 1. Received: {wrong.flat[0]}")


def _two_shapes_first(plan):
    """Moves a batch of another shape to the second place.

    Keras on TensorFlow takes the first two batches' shapes for all: an axis that is the same in
    both must be so ever after.
    """
    other = next((i for i, (group, _) in enumerate(plan) if group != plan[0][0]), None)
    if other is not None:
        plan.insert(1, plan.pop(other))
    return plan


def _by_length(steps, buckets):
    """Lengths that halve from the longest on, and the examples that belong to each."""
    longest = int(steps.max())
    # From the length 1 on halves are the same.
    buckets = min(buckets, longest.bit_length() + 1)
    halves = sorted({-(-longest // 2**k) for k in range(buckets)})
    place = np.searchsorted(halves, steps)
    used = np.unique(place)
    return tuple(int(halves[i]) for i in used), [np.flatnonzero(place == i) for i in used]


def _check_examples(x, y):
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise ValueError(
            "`x` and `y` must have the same number of examples, their first axis. "
            f"Received: shapes {x.shape} and {y.shape}"
        )
    if not len(x):
        raise ValueError("A stream needs at least one example. Received: none")


def _check_weight(weight, y):
    if weight.ndim not in (1, 2) or weight.shape != y.shape[: weight.ndim]:
        raise ValueError(
            "`weight` must have the shape (examples,) or (examples, time) of `y`. "
            f"Received: shapes {weight.shape} for y {y.shape}"
        )
    empty = np.flatnonzero(~weight.reshape(len(weight), -1).any(axis=1))
    if empty.size:
        raise ValueError(
            "Each example needs a step that counts, with a weight other than 0. Received: none "
            f"in example {empty[0]} ({empty.size} such in all)"
        )
