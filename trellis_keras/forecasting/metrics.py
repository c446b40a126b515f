"""Metrics of forecasts, exact over a split for any batch size. Missing values are ignored."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.forecasting.losses import (
    check_quantiles,
    middle_quantile,
    pinball,
    without_missing,
)
from trellis_keras.models.metrics import ExactMean
from trellis_keras.types import Tensor


class ForecastMetric(ExactMean):
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
            y_true: Tensor (..., targets). Missing values (NaN) are ignored.
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
    """Computes the mean pinball loss of quantiles, see `PinballLoss`.

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

    For calibrated quantiles it is the difference of the two levels: 0.8 for (0.1, 0.5, 0.9).

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

    A value below 1 means that the model is better than a seasonal naive forecast.

    Args:
        scale: Float, or one for each target: the mean absolute error of the naive forecast in the
            training data, see `mase_scale`.
        quantiles: Quantiles of the forecasts; the middle one is evaluated. Defaults to `None`, one
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
        series: Array (time, targets), the training data. Missing values (NaN) are ignored.
        season: Positive integer, the number of steps after which the series repeats, such as 24
            for hours. Defaults to 1.
    """
    series = np.asarray(series, "float64")
    if not 0 < season < len(series):
        raise ValueError(
            f"`season` must be positive and less than the {len(series)} steps of the series. "
            f"Received: season={season}"
        )
    return mean_of_known(np.abs(series[season:] - series[:-season]))


def mean_of_known(values: np.ndarray) -> np.ndarray:
    """Returns the mean over the first axis, ignoring missing values; NaN if all are missing."""
    count = np.count_nonzero(~np.isnan(values), axis=0)
    return np.where(count, np.nansum(values, axis=0) / np.maximum(count, 1), np.nan)


@keras.saving.register_keras_serializable("trellis_keras")
class ValueMetric(keras.metrics.Metric):
    """Wraps a Keras metric so that it receives each forecast value with its weight.

    Args:
        metric: `keras.metrics.Metric`, the name of one, or a function of y_true and y_pred.
        quantile: Integer, index of the quantile to evaluate, or `None` without quantiles.
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
