"""Metrics over all the tokens, frames or sequences of a split, exact for any batch size.

The perplexity of a split is exp of the mean over all its tokens, not the mean of the batches'
perplexities. The metrics of language models take each token's negative log-likelihood, so the
scores of a large vocabulary never reach a metric.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.models.losses import (
    check_quantiles,
    expand_to_rank,
    frame_nll,
    middle_quantile,
    pinball,
    without_missing,
)
from trellis_keras.types import Tensor


class _ExactMean(keras.metrics.Metric):
    """A weighted mean whose sums have a second variable for the rounding error.

    Sums are float32, or float64 if `dtype` is. A float32 cannot count beyond 2^24 tokens.
    """

    def __init__(self, name: str, dtype: str | None = None) -> None:
        super().__init__(name=name, dtype=dtype)
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


@keras.saving.register_keras_serializable("trellis_keras")
class CrossEntropy(_ExactMean):
    """Computes the mean negative log-likelihood of a token, in nats.

    Args:
        name: String, the metric's name. Defaults to `"cross_entropy"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = CrossEntropy()
    >>> metric.update_state([1.0, 2.0, 6.0], sample_weight=[1.0, 1.0, 0.0])
    >>> float(metric.result())
    1.5
    """

    def __init__(self, name: str = "cross_entropy", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, nll: Tensor, *others: Any, sample_weight: Tensor = None) -> None:
        """Accumulates the negative log-likelihoods of tokens.

        Args:
            nll: Tensor of any shape, the negative log-likelihood of each token in nats.
            sample_weight: Tensor of the shape of `nll` or of its leading axes, such as (batch,)
                for an `nll` of (batch, time). Defaults to 1 for every token.

        Raises:
            ValueError: If it is given targets and outputs, as Keras' models do.
        """
        if others:
            raise ValueError(
                f"{type(self).__name__} is a metric of negative log-likelihoods, which a "
                "LanguageModel gives it; in other models use "
                "keras.metrics.SparseCategoricalCrossentropy. Received: targets and outputs"
            )
        self._accumulate(nll, sample_weight)


@keras.saving.register_keras_serializable("trellis_keras")
class Perplexity(CrossEntropy):
    """Computes exp of the mean negative log-likelihood of a token.

    Args:
        name: String, the metric's name. Defaults to `"perplexity"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = Perplexity()
    >>> metric.update_state([0.0, 0.0])
    >>> float(metric.result())
    1.0
    """

    def __init__(self, name: str = "perplexity", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def _of_mean(self, mean):
        return ops.exp(mean)


@keras.saving.register_keras_serializable("trellis_keras")
class BitsPerCharacter(CrossEntropy):
    """Computes the mean negative log-likelihood of a character, in bits.

    Args:
        name: String, the metric's name. Defaults to `"bpc"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = BitsPerCharacter()
    >>> metric.update_state([math.log(2.0)])
    >>> float(metric.result())
    1.0
    """

    def __init__(self, name: str = "bpc", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def _of_mean(self, mean):
        return ops.divide(mean, math.log(2.0))


@keras.saving.register_keras_serializable("trellis_keras")
class FrameNLL(_ExactMean):
    """Computes the mean negative log-likelihood of a piano roll's frame, in nats.

    The figure of the music tables of Bai et al. (2018): binary cross-entropy, summed over the keys.
    Pass it to `compile` among the `weighted_metrics`, so that padded frames do not count.

    Args:
        name: String, the metric's name. Defaults to `"frame_nll"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example: two frames of two keys, the second of them padding.

    >>> metric = FrameNLL()
    >>> metric.update_state(np.ones((1, 2, 2)), np.zeros((1, 2, 2)), sample_weight=[[1.0, 0.0]])
    >>> round(float(metric.result()), 4)
    1.3863
    """

    def __init__(self, name: str = "frame_nll", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the negative log-likelihoods of frames.

        Args:
            y_true: Tensor (..., keys) of 0 and 1.
            y_pred: Tensor (..., keys), logits.
            sample_weight: Tensor (...), or of some leading axes of it. Defaults to 1 for every
                frame.
        """
        logits = ops.cast(y_pred, self._sum_dtype)
        self._accumulate(frame_nll(y_true, logits), sample_weight)


@keras.saving.register_keras_serializable("trellis_keras")
class DigitsRecalled(keras.metrics.Mean):
    """Computes the share of sequences whose last digits are all right.

    The copy-memory task (Bai et al. 2018, section 5.4) asks for ten digits at the end.

    Args:
        digits: Positive integer, the number of last steps to compare. Defaults to 10.
        name: String, the metric's name. Defaults to `"recalled"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = DigitsRecalled(digits=2)
    >>> metric.update_state([[0, 1, 1]], [[[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]]])
    >>> float(metric.result())
    1.0
    """

    def __init__(self, digits: int = 10, name: str = "recalled", dtype: str | None = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.digits = digits

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the share of a batch.

        Args:
            y_true: Integer tensor (batch, time).
            y_pred: Tensor (batch, time, classes), logits.
            sample_weight: Tensor (batch,), or (batch, time), of which the last step counts for its
                sequence. Defaults to 1 for every sequence.
        """
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        recalled = ops.argmax(y_pred[:, -self.digits :], axis=-1)
        wanted = ops.cast(y_true[:, -self.digits :], recalled.dtype)
        right = ops.all(ops.equal(recalled, wanted), axis=-1)
        if sample_weight is not None and len(sample_weight.shape) > 1:
            sample_weight = sample_weight[:, -1]
        super().update_state(ops.cast(right, self.dtype), sample_weight=sample_weight)

    def get_config(self) -> dict:
        return {"digits": self.digits, "name": self.name, "dtype": self.dtype}


# Metrics of forecasts


class ForecastMetric(_ExactMean):
    """The base class of metrics of forecasts (..., targets), or (..., targets, quantiles).

    Args:
        quantiles: Increasing floats between 0 and 1, or `None` for one value per target.
        name: String, the metric's name.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.
    """

    def __init__(
        self, quantiles: Sequence[float] | None, name: str, dtype: str | None = None
    ) -> None:
        super().__init__(name, dtype)
        self.quantiles = None if quantiles is None else check_quantiles(quantiles)

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the forecasts of a batch.

        Args:
            y_true: Tensor (..., targets). Missing values (NaN) do not count.
            y_pred: Tensor (..., targets), or (..., targets, quantiles).
            sample_weight: Tensor of the shape of `y_true`. Defaults to 1 for every value.
        """
        y_true, y_pred = (ops.cast(y, self._sum_dtype) for y in (y_true, y_pred))
        y_true, weight = without_missing(y_true, sample_weight)
        self._accumulate(self._values(y_true, y_pred), weight)

    def _values(self, y_true, y_pred):
        """Returns the metric of each value, (..., targets)."""
        raise NotImplementedError(f"{type(self).__name__} must define `_values(y_true, y_pred)`.")

    def get_config(self) -> dict:
        return {"quantiles": self.quantiles, "name": self.name, "dtype": self.dtype}


@keras.saving.register_keras_serializable("trellis_keras")
class MeanPinball(ForecastMetric):
    """Computes the mean pinball loss of quantiles, see `models.PinballLoss`.

    Args:
        quantiles: Increasing floats between 0 and 1.
        name: String, the metric's name. Defaults to `"pinball"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = MeanPinball([0.25, 0.5])
    >>> metric.update_state([[4.0]], [[[0.0, 2.0]]])
    >>> float(metric.result())
    1.0
    """

    def __init__(
        self, quantiles: Sequence[float], name: str = "pinball", dtype: str | None = None
    ) -> None:
        super().__init__(check_quantiles(quantiles), name, dtype)

    def _values(self, y_true, y_pred):
        return pinball(y_true, y_pred, self.quantiles)


@keras.saving.register_keras_serializable("trellis_keras")
class Coverage(ForecastMetric):
    """Computes the share of values between the lowest and the highest quantile.

    That of calibrated quantiles is the difference of the two: 0.8 for (0.1, 0.5, 0.9).

    Args:
        quantiles: Increasing floats between 0 and 1, at least two.
        name: String, the metric's name. Defaults to `"coverage"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = Coverage([0.1, 0.9])
    >>> metric.update_state([[4.0], [1.0]], [[[0.0, 2.0]], [[0.0, 2.0]]])
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self, quantiles: Sequence[float], name: str = "coverage", dtype: str | None = None
    ) -> None:
        super().__init__(check_quantiles(quantiles), name, dtype)

    def _values(self, y_true, y_pred):
        return (y_pred[..., 0] <= y_true) & (y_true <= y_pred[..., -1])


@keras.saving.register_keras_serializable("trellis_keras")
class MASE(ForecastMetric):
    """Computes the mean absolute scaled error (Hyndman and Koehler 2006).

    It compares the error with that of a seasonal naive forecast: below 1 the model is better.

    Args:
        scale: Float, or one for each target: the mean absolute error of the naive forecast in the
            training data, see `mase_scale`.
        quantiles: Those of the forecasts, of which the middle one counts. Defaults to `None`, one
            value per target.
        name: String, the metric's name. Defaults to `"mase"`.
        dtype: The dtype of the result. Defaults to `keras.config.floatx()`.

    Example:

    >>> metric = MASE(scale=mase_scale(np.array([[0.0], [2.0], [4.0]])))
    >>> metric.update_state([[6.0]], [[5.0]])
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self,
        scale: float | Sequence[float],
        quantiles: Sequence[float] | None = None,
        name: str = "mase",
        dtype: str | None = None,
    ) -> None:
        super().__init__(quantiles, name, dtype)
        self.scale = np.asarray(scale, "float64").tolist()
        if not np.all(np.asarray(self.scale) > 0):
            raise ValueError(
                "`scale` must be positive: the naive forecast of a constant series has no error. "
                f"Received: scale={scale}"
            )

    def _values(self, y_true, y_pred):
        if self.quantiles is not None:
            y_pred = y_pred[..., middle_quantile(self.quantiles)]
        scale = ops.convert_to_tensor(self.scale, dtype=self._sum_dtype)
        return ops.absolute(y_true - y_pred) / scale

    def get_config(self) -> dict:
        return {**super().get_config(), "scale": self.scale}


def mase_scale(series: np.ndarray, season: int = 1) -> np.ndarray:
    """Returns the mean absolute error of the seasonal naive forecast, (targets,).

    Args:
        series: Array (time, targets), the training data. Missing values (NaN) are left out.
        season: Positive integer, the number of steps after which the series repeats, such as 24
            for hours. Defaults to 1.
    """
    series = np.asarray(series, "float64")
    if not 0 < season < len(series):
        raise ValueError(
            f"`season` must be positive and less than the {len(series)} steps of the series. "
            f"Received: season={season}"
        )
    return np.nanmean(np.abs(series[season:] - series[:-season]), axis=0)


@keras.saving.register_keras_serializable("trellis_keras")
class ValueMetric(keras.metrics.Metric):
    """Gives a metric of Keras the single values of forecasts, each with its weight.

    Args:
        metric: `keras.metrics.Metric`, the name of one, or a function of y_true and y_pred.
        quantile: Integer, index of the quantile that counts, or `None` without quantiles.
    """

    def __init__(self, metric: Any, quantile: int | None = None) -> None:
        found = keras.metrics.get(metric)
        if not isinstance(found, keras.metrics.Metric):
            found = keras.metrics.MeanMetricWrapper(found, name=found.__name__)
        if isinstance(metric, str):
            found.name = metric
        super().__init__(name=found.name, dtype=found.dtype)
        self.metric = found
        self.quantile = quantile

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the forecasts of a batch, see `ForecastMetric`."""
        if self.quantile is not None:
            y_pred = y_pred[..., self.quantile]
        y_true, weight = without_missing(ops.cast(y_true, y_pred.dtype), sample_weight)
        self.metric.update_state(y_true[..., None], y_pred[..., None], weight)

    def result(self) -> Any:
        """Returns the result of the metric."""
        return self.metric.result()

    def reset_state(self) -> None:
        self.metric.reset_state()

    def get_config(self) -> dict:
        metric = keras.saving.serialize_keras_object(self.metric)
        return {"metric": metric, "quantile": self.quantile}

    @classmethod
    def from_config(cls, config: dict) -> "ValueMetric":
        return cls(keras.saving.deserialize_keras_object(config["metric"]), config["quantile"])


def _add(total, remainder, value):
    """Adds so that total + remainder has twice a float's digits (Knuth's two-sum)."""
    old = ops.convert_to_tensor(total)
    value = ops.add(value, remainder)
    new = ops.add(old, value)
    seen = ops.subtract(new, old)
    lost = ops.add(ops.subtract(old, ops.subtract(new, seen)), ops.subtract(value, seen))
    total.assign(new)
    remainder.assign(lost)
