"""The loss and the metrics of forecasts. Missing values (NaN) do not count."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.models.losses import WeightedMeanLoss
from trellis_keras.models.metrics import ExactMean
from trellis_keras.types import Tensor


@keras.saving.register_keras_serializable("trellis_keras")
class PinballLoss(WeightedMeanLoss):
    """Computes the pinball loss, which the true quantiles minimize.

        loss = mean_q max(q (y - y_q), (q - 1) (y - y_q))

    Args:
        quantiles: Increasing floats between 0 and 1.
        reduction, name, dtype: As in `keras.losses.Loss`.

    Call arguments:
        y_true: Tensor (...), or (..., 1).
        y_pred: Tensor (..., quantiles).
        sample_weight: Tensor (...).

    Example:

    >>> loss = PinballLoss([0.25, 0.5])(np.array([4.0]), np.array([[0.0, 2.0]]))
    >>> float(loss)
    1.0
    """

    def __init__(self, quantiles: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.quantiles = check_quantiles(quantiles)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        return pinball(y_true, y_pred, self.quantiles)

    def get_config(self) -> dict:
        return {**super().get_config(), "quantiles": self.quantiles}


def pinball(y_true: Tensor, y_pred: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Returns the mean pinball loss over the quantiles, (...). See `PinballLoss`."""
    if len(y_true.shape) < len(y_pred.shape):
        y_true = y_true[..., None]
    error = y_true - y_pred
    above = ops.convert_to_tensor(quantiles, dtype=error.dtype)
    return ops.mean(ops.maximum(above * error, (above - 1) * error), axis=-1)


def check_quantiles(quantiles: Any) -> tuple[float, ...]:
    """Returns quantiles as a tuple."""
    found = quantiles if np.ndim(quantiles) else ()
    bounds = np.array([0.0, *found, 1.0], "float64")
    if len(bounds) < 3 or not (np.diff(bounds) > 0).all():
        raise ValueError(
            "`quantiles` must be increasing numbers between 0 and 1, such as (0.1, 0.5, 0.9). "
            f"Received: quantiles={quantiles!r}"
        )
    return tuple(bounds[1:-1].tolist())


def middle_quantile(quantiles: Sequence[float]) -> int:
    """Returns the index of the quantile nearest to the median."""
    return int(np.abs(np.array(quantiles) - 0.5).argmin())


def without_missing(y_true: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns targets with 0 where they are missing (NaN), and weights that leave these out."""
    is_missing, zeros = ops.isnan(y_true), ops.zeros_like(y_true)
    weight = ops.ones_like(y_true) if weight is None else ops.cast(weight, y_true.dtype)
    return ops.where(is_missing, zeros, y_true), ops.where(is_missing, zeros, weight)


class ForecastMetric(ExactMean):
    """The base class of metrics of forecasts, which define `_values`.

    Args:
        quantiles: Those of the forecasts, or `None` for one value per target and step.
        name, dtype: As in `keras.metrics.Metric`.
    """

    _needs_quantiles = True

    def __init__(self, quantiles: Any, name: str | None = None, dtype: str | None = None) -> None:
        super().__init__(name, dtype)
        is_needed = self._needs_quantiles or quantiles is not None
        self.quantiles = check_quantiles(quantiles) if is_needed else None

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the forecasts of a batch.

        Args:
            y_true: Tensor (..., targets). Missing values (NaN) are ignored.
            y_pred: Tensor (..., targets), or (..., targets, quantiles).
            sample_weight: Tensor of the shape of `y_true`. Defaults to `1` for every value.
        """
        y_true, y_pred = (ops.cast(y, self._sum_dtype) for y in (y_true, y_pred))
        y_true, weight = without_missing(y_true, sample_weight)
        self._accumulate(self._values(y_true, y_pred), weight)

    def _values(self, y_true, y_pred):
        """Returns the metric of each value, (..., targets)."""
        raise NotImplementedError

    def get_config(self) -> dict:
        return {"quantiles": self.quantiles, "name": self.name, "dtype": self.dtype}


@keras.saving.register_keras_serializable("trellis_keras")
class MeanPinball(ForecastMetric):
    """Computes the mean pinball loss of quantiles, see `PinballLoss`."""

    default_name = "pinball"
    _direction = "down"

    def _values(self, y_true, y_pred):
        return pinball(y_true, y_pred, self.quantiles)


@keras.saving.register_keras_serializable("trellis_keras")
class Coverage(ForecastMetric):
    """Computes the share of values between the lowest and the highest quantile."""

    default_name = "coverage"

    def _values(self, y_true, y_pred):
        return (y_pred[..., 0] <= y_true) & (y_true <= y_pred[..., -1])


@keras.saving.register_keras_serializable("trellis_keras")
class MASE(ForecastMetric):
    """Computes the mean absolute scaled error (Hyndman and Koehler 2006).

    Args:
        scale: Float, or one for each target: the mean absolute error of the seasonal naive forecast
            in the training data.
        quantiles: As in `ForecastMetric`; the middle one is evaluated. Defaults to `None`.
        name, dtype: As in `keras.metrics.Metric`.
    """

    default_name = "mase"
    _direction = "down"
    _needs_quantiles = False

    def __init__(self, scale: Any, quantiles: Any = None, **kwargs: Any) -> None:
        super().__init__(quantiles, **kwargs)
        self.scale = np.asarray(scale, "float64").tolist()
        if not np.all(np.asarray(scale) > 0):
            raise ValueError(f"`scale` must be positive. Received: scale={scale}")

    def _values(self, y_true, y_pred):
        if self.quantiles is not None:
            y_pred = y_pred[..., middle_quantile(self.quantiles)]
        return ops.absolute(y_true - y_pred) / ops.convert_to_tensor(self.scale, self._sum_dtype)

    def get_config(self) -> dict:
        return {**super().get_config(), "scale": self.scale}


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
        if hasattr(found, "_direction"):
            self._direction = found._direction
        self.quantile = quantile

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        """Accumulates the forecasts of a batch, see `ForecastMetric`."""
        if self.quantile is not None:
            y_pred = y_pred[..., self.quantile]
        y_true, weight = without_missing(ops.cast(y_true, y_pred.dtype), sample_weight)
        self.metric.update_state(y_true[..., None], y_pred[..., None], weight)

    def result(self) -> Any:
        return self.metric.result()

    def reset_state(self) -> None:
        self.metric.reset_state()

    def get_config(self) -> dict:
        metric = keras.saving.serialize_keras_object(self.metric)
        return {"metric": metric, "quantile": self.quantile}

    @classmethod
    def from_config(cls, config: dict) -> "ValueMetric":
        return cls(keras.saving.deserialize_keras_object(config["metric"]), config["quantile"])
