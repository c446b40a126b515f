"""The pinball loss for quantiles."""

from collections.abc import Sequence

import keras
from keras import ops

from trellis_keras.models.losses import WeightedMean
from trellis_keras.types import Tensor


@keras.saving.register_keras_serializable("trellis_keras")
class PinballLoss(WeightedMean):
    """Computes the pinball loss, which the true quantiles minimize.

        loss = mean_q max(q (y - y_q), (q - 1) (y - y_q))

    Args:
        quantiles: Increasing floats between 0 and 1.
        name: String, the loss's name. Defaults to `None`.
        reduction: As in `keras.losses.Loss`. Defaults to `"mean_with_sample_weight"`.
        dtype: The dtype of the computation. Defaults to `keras.config.floatx()`.

    Call arguments:
        y_true: Tensor (...), or (..., 1).
        y_pred: Tensor (..., quantiles).
        sample_weight: Tensor (...).

    Example:

    >>> loss = PinballLoss([0.25, 0.5])(np.array([4.0]), np.array([[0.0, 2.0]]))
    >>> float(loss)
    1.0
    """

    def __init__(
        self,
        quantiles: Sequence[float],
        name: str | None = None,
        reduction: str = "mean_with_sample_weight",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
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
    return ops.sum(ops.maximum(above * error, (above - 1) * error), axis=-1) / len(quantiles)


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """Returns quantiles as a tuple.

    Raises:
        ValueError: Unless they are increasing numbers between 0 and 1, at least one.
    """
    try:
        found = tuple(float(q) for q in quantiles)
    except (TypeError, ValueError):
        found = ()
    bounds = (0.0, *found, 1.0)
    if not found or not all(a < b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(
            "`quantiles` must be increasing numbers between 0 and 1, such as (0.1, 0.5, 0.9). "
            f"Received: quantiles={quantiles!r}"
        )
    return found


def middle_quantile(quantiles: Sequence[float]) -> int:
    """Returns the index of the quantile nearest to the median."""
    return min(range(len(quantiles)), key=lambda i: abs(quantiles[i] - 0.5))


def without_missing(y_true: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns targets with 0 where they are missing (NaN), and weights that leave these out.

    Args:
        y_true: Tensor of targets.
        weight: Tensor of the shape of `y_true`, or None for 1.
    """
    is_missing, zeros = ops.isnan(y_true), ops.zeros_like(y_true)
    weight = ops.ones_like(y_true) if weight is None else ops.cast(weight, y_true.dtype)
    return ops.where(is_missing, zeros, y_true), ops.where(is_missing, zeros, weight)
