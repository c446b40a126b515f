"""Regression from sequences, or from each of their steps."""

from typing import Any

import keras
from keras import ops

from trellis_keras.layers.checks import check_integer
from trellis_keras.models.base import check_rank
from trellis_keras.models.losses import SquaredError
from trellis_keras.models.sequence_model import SequenceModel


@keras.saving.register_keras_serializable("trellis_keras")
class SequenceRegressor(SequenceModel):
    """Predicts real values for a sequence, or for each of its steps, with any causal backbone.

    With a last-step backbone and one unit, it is the adding-problem model of the TCN paper (Bai et
    al. 2018). To forecast time series, use `trellis_series`.

    `compile` defaults to the mean squared error, without metrics. See `SequenceModel` for the mean.

    Args:
        backbone, per_step: As in `SequenceClassifier`.
        units: Positive integer, number of outputs. Defaults to `1`.
        **kwargs: As in `SequenceModel`.

    The call arguments are those of `SequenceClassifier`.

    Returns:
        Tensor (batch, units), or (batch, time, units) with `per_step`, at least float32.

    Example:

    >>> model = SequenceRegressor(keras.layers.GRU(8))
    >>> model.compile("adam")
    >>> x = np.random.rand(8, 12, 2)
    >>> list(model.fit(x, x.sum(axis=(1, 2)), verbose=0).history)
    ['loss']
    >>> model.predict(x, verbose=0).shape
    (8, 1)
    """

    def __init__(
        self, backbone: keras.Layer, units: int = 1, *, per_step: bool = False, **kwargs: Any
    ) -> None:
        units = check_integer("units", units, 1)
        super().__init__(backbone, units, per_step=per_step, **kwargs)
        self.units = units

    def _default_loss(self):
        return SquaredError(dtype=self.head.compute_dtype)

    def _default_metrics(self):
        return []

    def _shaped_targets(self, y, y_pred):
        # With one unit, targets may lack the last axis.
        return ops.reshape(y, ops.shape(y_pred)) if self.units == 1 else y

    def _check_targets(self, y):
        if self.units == 1 and y.ndim == 1 + self.per_step:
            return
        check_rank("y", y, "(batch, time, units)" if self.per_step else "(batch, units)")
        if y.shape[-1] != self.units:
            raise ValueError(
                f"The last axis of `y` must have the model's units={self.units}. Received: shape "
                f"{y.shape}"
            )

    def get_config(self) -> dict:
        return {**super().get_config(), "units": self.units, "per_step": self.per_step}
