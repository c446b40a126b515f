"""Batches of consecutive text for language models."""

import functools

import keras
import numpy as np

from trellis_keras.data.checks import checked_int
from trellis_keras.layers.base import check_tokens

HISTORIES = ("chop", "repackage")
PROTOCOLS = ("exact", "authors")


class TokenStream(keras.utils.PyDataset):
    """Cuts one long sequence of tokens into batches for a language model.

    Target t is token t + 1 and is read off at the position where token t comes in, so that
    N tokens have N - 1 targets. The text is laid out in `batch_size` rows, one after the
    other, and batch i takes the i-th segment of every row. It is `(x, y, weight)`:

    - `x`: int32 tokens of shape `(batch_size, segment)`;
    - `y`: int32 targets of the last `output_length` positions of `x`, of shape
      `(batch_size, output_length)`;
    - `weight`: float32 of the same shape, 1 where the target counts and 0 where it is padding.

    Batch i is a pure function of i and reads only its own tokens, so `tokens` may be a
    memory-mapped file.

    How a segment gets its history (TrellisNet paper, appendix B):

    - `"chop"`: segments overlap; the first `horizon` positions of a segment are read but do
      not count, so `output_length = segment - horizon`.
    - `"repackage"`: segments follow each other without overlap, `output_length = segment`.
      The model has to carry its state from batch to batch, and batches must come in order:
      **pass `shuffle=False` to `fit()`**, which shuffles the batches of a `PyDataset`
      otherwise (or use `to_tf_data()`, which it leaves alone).

    Which targets count:

    - `protocol="exact"`: every target exactly once. A row has L = ceil((N - 1) / batch_size)
      targets; what is missing at the end of a row's last segment and of the whole text is
      padded with weight 0, also where the text is shorter than one full batch. With `"chop"`
      the tokens before a target are those that stand before it in the text, also where a row
      begins; only before the very first token, where there are none, `start_token` is filled
      in. All batches have the same shape: XLA compiles anew for each new one.
    - `protocol="authors"`: as in the TrellisNet authors' program, for comparison. The text
      is cut to a multiple of `batch_size`. Skipped (`targets_skipped`
      in all) are the tokens cut off, the targets that cross from one row to the next and,
      with `"chop"`, the first `horizon` targets of every row. Their last segment is shorter
      than the others; here it is padded with weight 0.

    Args:
        tokens: Integer array of shape (N,), N >= 2.
        batch_size: Number of rows, at most N - 1.
        segment: Number of tokens of a row that one batch reads.
        history: `"chop"` or `"repackage"`.
        horizon: Number of positions at a segment's beginning that do not count; only with
            `"chop"`, and smaller than `segment`.
        protocol: `"exact"` or `"authors"`.
        start_token: The id that stands before the beginning of the text.
        vocabulary_size: If given, the ids are checked once to lie in [0, `vocabulary_size`).

    Raises:
        ValueError: If an argument is not as described.

    Example:

    >>> stream = TokenStream(np.arange(8), batch_size=2, segment=3, horizon=1)
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
        tokens,
        batch_size,
        segment,
        *,
        history="chop",
        horizon=0,
        protocol="exact",
        start_token=0,
        vocabulary_size=None,
    ):
        # Keras' `workers` are not offered: `fit` on JAX, which looks at a batch to build the model,
        # would see those that they had ready again, and the last ones never.
        super().__init__()
        self._tokens = _checked_tokens(tokens, vocabulary_size)
        self._batch_size = checked_int("batch_size", batch_size, 1)
        self._segment = checked_int("segment", segment, 1)
        self._horizon = checked_int("horizon", horizon, 0)
        self._start_token = checked_int("start_token", start_token, 0)
        self._history = history
        self._protocol = protocol
        self._check_arguments(vocabulary_size)
        # Targets of a row.
        if protocol == "exact":
            self._row_length = -(-(len(self._tokens) - 1) // self._batch_size)
            covered = self._row_length
        else:
            self._row_length = len(self._tokens) // self._batch_size
            covered = self._row_length - 1 - self._horizon
        self._steps = -(-covered // self.output_length)
        if self._steps < 1:
            raise ValueError(
                "With protocol='authors' each of the `batch_size` rows needs more than "
                f"horizon + 1 = {self._horizon + 1} tokens. "
                f"Received: {len(self._tokens)} tokens, batch_size={self._batch_size}, "
                f"which makes {self._row_length} a row"
            )

    @property
    def batch_size(self):
        """Number of rows."""
        return self._batch_size

    @property
    def segment(self):
        """Number of tokens of a row that one batch reads."""
        return self._segment

    @property
    def history(self):
        """`"chop"` or `"repackage"`."""
        return self._history

    @property
    def protocol(self):
        """`"exact"` or `"authors"`."""
        return self._protocol

    @functools.cached_property
    def token_range(self):
        """The smallest and the largest id, which a model checks against its vocabulary."""
        return int(self._tokens.min()), int(self._tokens.max())

    @property
    def horizon(self):
        """Number of positions at a segment's beginning that do not count."""
        return self._horizon

    @property
    def output_length(self):
        """Number of positions at a segment's end that count, `segment - horizon`."""
        return self._segment - self._horizon

    @property
    def steps(self):
        """Number of batches in one pass."""
        return self._steps

    @property
    def targets_counted(self):
        """Number of targets with weight 1 in one pass."""
        if self._protocol == "exact":
            return len(self._tokens) - 1
        return self._batch_size * (self._row_length - 1 - self._horizon)

    @property
    def targets_skipped(self):
        """Number of the text's targets that no batch counts."""
        return len(self._tokens) - 1 - self.targets_counted

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        if not 0 <= index < self._steps:
            raise IndexError(f"The stream has batches 0 to {self._steps - 1}. Received: {index}")
        if self._protocol == "exact":
            return self._exact_batch(index)
        return self._authors_batch(index)

    def to_tf_data(self):
        """The same batches, in order, as a `tf.data.Dataset`.

        Returns:
            A dataset of `(x, y, weight)` with static shapes and known cardinality.
        """
        import tensorflow as tf

        signature = tuple(tf.TensorSpec(array.shape, array.dtype) for array in self[0])
        dataset = tf.data.Dataset.from_generator(lambda: iter(self), output_signature=signature)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._steps))
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _exact_batch(self, index):
        last_input = len(self._tokens) - 2
        # Places in the text: the first target of each row, and of its part of this batch.
        row_start = np.arange(self._batch_size)[:, None] * self._row_length
        start = row_start + index * self.output_length
        inputs = start + np.arange(-self._horizon, self.output_length)
        targets = start + np.arange(self.output_length)
        row_end = np.minimum(row_start + self._row_length, last_input + 1)
        # Padding reads the last token again: any id of the text will do.
        x = self._tokens[np.clip(inputs, 0, last_input)].astype("int32")
        x[inputs < 0] = self._start_token
        y = self._tokens[np.minimum(targets, last_input) + 1].astype("int32")
        return x, y, (targets < row_end).astype("float32")

    def _authors_batch(self, index):
        row_start = np.arange(self._batch_size)[:, None] * self._row_length
        places = index * self.output_length + np.arange(self._segment)
        last_input = self._row_length - 2
        inputs = row_start + np.minimum(places, last_input)
        x = self._tokens[inputs].astype("int32")
        y = self._tokens[inputs[:, self._horizon :] + 1].astype("int32")
        counts = (places <= last_input)[self._horizon :]
        return x, y, np.broadcast_to(counts, y.shape).astype("float32")

    def _check_arguments(self, vocabulary_size):
        if self._history not in HISTORIES:
            raise ValueError(f"`history` must be one of {HISTORIES}. Received: {self._history!r}")
        if self._protocol not in PROTOCOLS:
            raise ValueError(f"`protocol` must be one of {PROTOCOLS}. Received: {self._protocol!r}")
        if self._history == "repackage" and self._horizon:
            raise ValueError(
                "With history='repackage' the state carries the past and `horizon` must be 0. "
                f"Received: horizon={self._horizon}"
            )
        if self._horizon >= self._segment:
            raise ValueError(
                "`horizon` must be smaller than `segment`, or no position counts. "
                f"Received: horizon={self._horizon}, segment={self._segment}"
            )
        if self._batch_size > len(self._tokens) - 1:
            raise ValueError(
                f"`batch_size` must be at most the number of targets, {len(self._tokens) - 1}. "
                f"The text of {len(self._tokens)} tokens is too short for one batch of "
                f"{self._batch_size} rows of {self._segment} tokens: take more text or fewer rows. "
                f"Received: batch_size={self._batch_size}"
            )
        if vocabulary_size is not None and self._start_token >= vocabulary_size:
            raise ValueError(
                f"`start_token` must lie in [0, {vocabulary_size}). Received: {self._start_token}"
            )


def _checked_tokens(tokens, vocabulary_size):
    # `asanyarray` keeps a memory map what it is.
    tokens = np.asanyarray(tokens)
    if tokens.ndim != 1:
        raise ValueError(f"`tokens` must have one axis, (N,). Received: shape {tokens.shape}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"`tokens` must be integers. Received: an array of type {tokens.dtype}")
    if len(tokens) < 2:
        raise ValueError(f"`tokens` needs at least 2 tokens. Received: {len(tokens)}")
    if vocabulary_size is not None:
        check_tokens(tokens, vocabulary_size)
    return tokens
