"""Metrics over the tokens of a whole split, fed with each token's negative log-likelihood.

A published perplexity is exp of the mean over all tokens, not a mean over batches, and needs the
negative log-likelihoods only: the scores of a large vocabulary are never handed to a metric.
"""

import math

import keras
from keras import ops

from trellis_keras.models.losses import frame_nll

_ARGS = """name: name in logs and progress bar.
        dtype: dtype of the result. Sums are kept in float32 at least."""

_CALL_ARGS = """nll: negative log-likelihood of each token in nats, any shape.
        sample_weight: how much each token counts, such as 0 for padding. Its shape is that of
            `nll`, or a leading part of it, for example (batch,) for an `nll` of (batch, time);
            `None` counts every token once."""


class _TokenMean(keras.metrics.Metric):
    """Weighted mean over all tokens since the last reset.

    Sum and weight are each kept as a total and the digits that the total had no room for: a
    float32 alone cannot count beyond 2^24 tokens.
    """

    def __init__(self, name, dtype=None):
        super().__init__(name=name, dtype=dtype)
        # Not `keras.backend.result_type`: on JAX that makes float32 of float64.
        self._sum_dtype = "float64" if self.dtype == "float64" else "float32"
        names = ("nll", "nll_remainder", "weight", "weight_remainder")
        self._nll, self._nll_remainder, self._weight, self._weight_remainder = (
            self.add_variable((), "zeros", self._sum_dtype, name=part) for part in names
        )

    def update_state(self, nll, sample_weight=None):
        nll = ops.cast(nll, self._sum_dtype)
        weight = _broadcast(sample_weight, nll, self._sum_dtype)
        # A padded token does not count, not even if its likelihood is 0.
        counted = ops.where(ops.equal(weight, 0), ops.zeros_like(nll), nll)
        _add(self._nll, self._nll_remainder, ops.sum(ops.multiply(counted, weight)))
        _add(self._weight, self._weight_remainder, ops.sum(weight))

    def mean(self):
        """Returns the mean in nats, 0 before the first token."""
        nll = ops.add(self._nll, self._nll_remainder)
        return ops.divide_no_nan(nll, ops.add(self._weight, self._weight_remainder))

    def result(self):
        return ops.cast(self._from_nats(self.mean()), self.dtype)

    def _from_nats(self, mean):
        raise NotImplementedError


def _document(cls):
    """Fills in the parts of the docstring that the metrics share."""
    if cls.__doc__ is not None:  # None under `python -OO`
        cls.__doc__ = cls.__doc__.replace("{{args}}", _ARGS).replace("{{call}}", _CALL_ARGS)
    return cls


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class CrossEntropy(_TokenMean):
    """Mean negative log-likelihood of a token, in nats.

    Args:
        {{args}}

    Arguments of `update_state`:
        {{call}}

    Example:

    >>> metric = trellis_keras.training.CrossEntropy()
    >>> metric.update_state([1.0, 2.0, 6.0], sample_weight=[1.0, 1.0, 0.0])
    >>> float(metric.result())
    1.5
    """

    def __init__(self, name="cross_entropy", dtype=None):
        super().__init__(name, dtype)

    def _from_nats(self, mean):
        return mean


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class Perplexity(_TokenMean):
    """exp of the mean negative log-likelihood of a token.

    Args:
        {{args}}

    Arguments of `update_state`:
        {{call}}

    Example:

    >>> metric = trellis_keras.training.Perplexity()
    >>> metric.update_state([0.0, 0.0])
    >>> float(metric.result())
    1.0
    """

    def __init__(self, name="perplexity", dtype=None):
        super().__init__(name, dtype)

    def _from_nats(self, mean):
        return ops.exp(mean)


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class BitsPerCharacter(_TokenMean):
    """Mean negative log-likelihood of a character, in bits.

    Args:
        {{args}}

    Arguments of `update_state`:
        {{call}}

    Example:

    >>> metric = trellis_keras.training.BitsPerCharacter()
    >>> metric.update_state([math.log(2.0)])
    >>> float(metric.result())
    1.0
    """

    def __init__(self, name="bpc", dtype=None):
        super().__init__(name, dtype)

    def _from_nats(self, mean):
        return ops.divide(mean, math.log(2.0))


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class FrameNLL(_TokenMean):
    """Mean negative log-likelihood of a piano roll's frame, in nats, over all frames of a split.

    The figure of the TCN paper's music tables (Bai et al. 2018): the sum over keys of the binary
    cross-entropy. A Keras metric of targets and logits; give it to `compile` as one of the
    `weighted_metrics`, so that padded frames do not count.

    Args:
        {{args}}

    Arguments of `update_state`:
        y_true: targets (..., keys) of 0 and 1.
        y_pred: logits (..., keys).
        sample_weight: how much each frame counts, (...) or a leading part of it.

    Example: two frames of two keys, of which the second is padding.

    >>> metric = trellis_keras.training.FrameNLL()
    >>> metric.update_state(np.ones((1, 2, 2)), np.zeros((1, 2, 2)), sample_weight=[[1.0, 0.0]])
    >>> round(float(metric.result()), 4)
    1.3863
    """

    def __init__(self, name="frame_nll", dtype=None):
        super().__init__(name, dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        logits = ops.cast(y_pred, self._sum_dtype)
        super().update_state(frame_nll(y_true, logits), sample_weight)

    def _from_nats(self, mean):
        return mean


def _broadcast(weight, nll, dtype):
    if weight is None:
        return ops.ones_like(nll)
    weight = ops.cast(weight, dtype)
    for _ in range(len(nll.shape) - len(weight.shape)):
        weight = ops.expand_dims(weight, -1)
    return ops.broadcast_to(weight, ops.shape(nll))


def _add(total, remainder, value):
    """Adds so that total + remainder has twice a float's digits (Knuth's two-sum)."""
    old = ops.convert_to_tensor(total)
    value = ops.add(value, remainder)
    new = ops.add(old, value)
    seen = ops.subtract(new, old)
    lost = ops.add(ops.subtract(old, ops.subtract(new, seen)), ops.subtract(value, seen))
    total.assign(new)
    remainder.assign(lost)
