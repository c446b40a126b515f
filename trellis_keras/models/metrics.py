"""Metrics over all the tokens, frames or sequences of a split, exact for any batch size.

The perplexity of a split is exp of the mean over all its tokens, not the mean of the batches'
perplexities. The metrics of language models take each token's negative log-likelihood, so the
logits of a large vocabulary are never passed to a metric.
"""

import math
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import two_sum
from trellis_keras.layers.checks import check_integer
from trellis_keras.models.losses import expand_to_rank, frame_nll
from trellis_keras.types import Tensor


class ExactMean(keras.metrics.Metric):
    """A weighted mean with compensated sums: a second variable holds the rounding error.

    Sums are float32, or float64 if `dtype` is. A plain float32 cannot count beyond 2^24 tokens.

    Args:
        name, dtype: As in `keras.metrics.Metric`.
    """

    default_name: str | None = None

    def __init__(self, name: str | None = None, dtype: str | None = None) -> None:
        super().__init__(name=name or self.default_name, dtype=dtype)
        # Not `keras.backend.result_type`: on JAX it returns float32 for float64.
        self._sum_dtype = "float64" if self.dtype == "float64" else "float32"
        names = ("total", "total_remainder", "weight", "weight_remainder")
        self._total, self._total_remainder, self._weight, self._weight_remainder = (
            self.add_variable((), "zeros", self._sum_dtype, name=part) for part in names
        )

    def _accumulate(self, values, sample_weight):
        """Adds values, with weights of their shape or of its leading axes, or None."""
        values = ops.cast(values, self._sum_dtype)
        if sample_weight is None:
            weight = ops.ones_like(values)
        else:
            weight = ops.cast(sample_weight, self._sum_dtype)
            weight = ops.broadcast_to(expand_to_rank(weight, len(values.shape)), ops.shape(values))
        # The loss of padding may be infinite or NaN.
        values = ops.where(ops.equal(weight, 0), ops.zeros_like(values), values)
        _add(self._total, self._total_remainder, ops.sum(ops.multiply(values, weight)))
        _add(self._weight, self._weight_remainder, ops.sum(weight))

    def result(self) -> Tensor:
        """Returns the metric since the last reset."""
        total = ops.add(self._total, self._total_remainder)
        mean = ops.divide_no_nan(total, ops.add(self._weight, self._weight_remainder))
        return ops.cast(self._of_mean(mean), self.dtype)

    def _of_mean(self, mean):
        return mean


class MeanLoss(ExactMean):
    """Computes the mean loss of batches, weighted by their numbers of targets."""

    default_name = "loss"

    def update_state(self, loss: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the loss of a batch."""
        self._accumulate(loss, sample_weight)


@keras.saving.register_keras_serializable("trellis_keras")
class CrossEntropy(ExactMean):
    """Computes the mean negative log-likelihood of a token, in nats.

    Example:

    >>> metric = CrossEntropy()
    >>> metric.update_state([1.0, 2.0, 6.0], sample_weight=[1.0, 1.0, 0.0])
    >>> float(metric.result())
    1.5
    """

    default_name = "cross_entropy"
    _direction = "down"

    def update_state(self, nll: Tensor, *others: Any, sample_weight: Tensor = None) -> None:
        """Accumulates the negative log-likelihoods of tokens.

        Args:
            nll: Tensor of any shape, the negative log-likelihood of each token in nats.
            sample_weight: Tensor of the shape of `nll` or of its leading axes, such as (batch,)
                for an `nll` of (batch, time). Defaults to `None`, weight 1 for every token.
        """
        if others:  # as Keras' other models pass them
            raise ValueError(
                f"{type(self).__name__} takes negative log-likelihoods, as passed by a "
                "LanguageModel; in other models use keras.metrics.SparseCategoricalCrossentropy("
                "from_logits=True). Received: targets and outputs"
            )
        self._accumulate(nll, sample_weight)


@keras.saving.register_keras_serializable("trellis_keras")
class Perplexity(CrossEntropy):
    """Computes exp of the mean negative log-likelihood of a token, see `CrossEntropy`."""

    default_name = "perplexity"

    def _of_mean(self, mean):
        return ops.exp(mean)


@keras.saving.register_keras_serializable("trellis_keras")
class BitsPerCharacter(CrossEntropy):
    """Computes the mean negative log-likelihood of a character in bits, see `CrossEntropy`."""

    default_name = "bpc"

    def _of_mean(self, mean):
        return ops.divide(mean, math.log(2.0))


@keras.saving.register_keras_serializable("trellis_keras")
class FrameNLL(ExactMean):
    """Computes the mean negative log-likelihood of a piano roll's frame, in nats.

    This is the metric in the music tables of Bai et al. (2018): binary cross-entropy, summed over
    keys. Pass it to `compile` as one of the `weighted_metrics`, so that padded frames do not count.

    Example: two frames of two keys, the second of them padding.

    >>> metric = FrameNLL()
    >>> metric.update_state(np.ones((1, 2, 2)), np.zeros((1, 2, 2)), sample_weight=[[1.0, 0.0]])
    >>> round(float(metric.result()), 4)
    1.3863
    """

    default_name = "frame_nll"
    _direction = "down"

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the negative log-likelihoods of frames.

        Args:
            y_true: Tensor (..., keys) of 0 and 1.
            y_pred: Tensor (..., keys), logits.
            sample_weight: Tensor (...), or over some of its leading axes. Defaults to `None`,
                weight 1 for every frame.
        """
        logits = ops.cast(y_pred, self._sum_dtype)
        self._accumulate(frame_nll(y_true, logits), sample_weight)


@keras.saving.register_keras_serializable("trellis_keras")
class DigitsRecalled(ExactMean):
    """Computes the fraction of sequences whose last digits are all correct.

    The copy-memory task (Bai et al. 2018, section 5.4) requires ten digits at the end.

    Args:
        digits: Positive integer, the number of last steps to compare. Defaults to `10`.
        name, dtype: As in `keras.metrics.Metric`.

    Example:

    >>> metric = DigitsRecalled(digits=2)
    >>> metric.update_state([[0, 1, 1]], [[[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]]])
    >>> float(metric.result())
    1.0
    """

    default_name = "recalled"
    _direction = "up"

    def __init__(self, digits: int = 10, name: str | None = None, dtype: str | None = None) -> None:
        super().__init__(name, dtype)
        self.digits = check_integer("digits", digits, 1)

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the fraction for a batch.

        Args:
            y_true: Integer tensor (batch, time) or (batch, time, 1).
            y_pred: Tensor (batch, time, classes), logits.
            sample_weight: Tensor (batch,), or (batch, time), whose last step is the weight of the
                sequence. Defaults to `None`, weight 1 for every sequence.
        """
        y_pred = ops.convert_to_tensor(y_pred)
        y_true = ops.reshape(y_true, ops.shape(y_pred)[:-1])
        recalled = ops.argmax(y_pred[:, -self.digits :], axis=-1)
        wanted = ops.cast(y_true[:, -self.digits :], recalled.dtype)
        right = ops.all(ops.equal(recalled, wanted), axis=-1)
        if sample_weight is not None:
            sample_weight = ops.convert_to_tensor(sample_weight)
            if len(sample_weight.shape) > 1:
                sample_weight = sample_weight[:, -1]
        self._accumulate(right, sample_weight)

    def get_config(self) -> dict:
        return {**super().get_config(), "digits": self.digits}


def _add(total, remainder, value):
    """Compensated addition: total + remainder has twice a float's precision."""
    new, lost = two_sum(ops.convert_to_tensor(total), ops.add(value, remainder))
    total.assign(new)
    remainder.assign(lost)
