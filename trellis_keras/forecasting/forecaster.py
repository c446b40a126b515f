"""The model that forecasts time series, over any causal backbone."""

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.masking import set_keras_mask

from trellis_keras.forecasting import rollout
from trellis_keras.forecasting.calibration import conformal_scale
from trellis_keras.forecasting.losses import (
    PinballLoss,
    check_quantiles,
    middle_quantile,
    without_missing,
)
from trellis_keras.forecasting.metrics import Coverage, ForecastMetric, MeanPinball, ValueMetric
from trellis_keras.layers.base import (
    at_least_float32,
    check_positive,
    resolve_mask,
    shapes_match,
)
from trellis_keras.models.losses import SquaredError, expand_to_rank
from trellis_keras.models.normalization import Standardization, arrays_of
from trellis_keras.models.sequence_models import SequenceModel
from trellis_keras.types import Shape


@keras.saving.register_keras_serializable("trellis_keras")
class Forecaster(SequenceModel):
    """Forecasts the next steps of time series, with any causal backbone.

    With `quantiles` there is a band around each forecast. `compile` defaults to the mean squared
    error and the metrics `"mae"` and `"rmse"`; with `quantiles` to the pinball loss and
    `"pinball"`, `"coverage"` and the `"mae"` of the middle quantile. Keras metrics passed to
    `compile` receive only the values that are not missing, and only the middle quantile.

    With `normalize=True` the model takes inputs and gives outputs in the units of the data: `adapt`
    takes the statistics from the training data, and they are saved with the weights. The loss is
    that of standardized values, so that it does not depend on the targets' units; metrics are in
    the units of the data.

    After training, `calibrate` adjusts the quantiles to data that the model has not seen.

    Targets may be missing (NaN): they count neither in the loss nor in the metrics. `sample_weight`
    may have the shape of the targets, or of their leading axes.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden).
        horizon: Positive integer, number of steps to forecast.
        targets: Positive integer, number of series that are forecast, the first channels of the
            inputs. Defaults to 1.
        quantiles: Increasing floats between 0 and 1. Outputs get a last axis of quantiles, which do
            not cross. Defaults to `None`, one value per target and step.
        future_channels: Integer, how many of the last input channels are known in the future, such
            as the hour of the day. At each step they hold the value `horizon` steps ahead, so that
            the backbone has seen them up to the end of the forecast. Defaults to 0.
        per_step: Boolean, whether there is a forecast after each step. Defaults to `False`.
        normalize: Boolean, whether the model standardizes inputs and targets, see `adapt`. Missing
            inputs (NaN) read as the mean of their channel then. Defaults to `False`.
        input_dropout: Float in [0, 1), rate of dropped inputs, each by itself. Defaults to 0.
        output_dropout: Float in [0, 1), rate of dropped outputs of the backbone, each by itself.
            Defaults to 0.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        seed: Integer seed of the dropouts and the default initializer. Defaults to `None`.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time), see `models.SequenceClassifier`.

    Returns:
        Tensor (batch, horizon, targets), with `per_step` (batch, time, horizon, targets), and with
        `quantiles` (..., quantiles), at least float32.

    Raises:
        ValueError: If arguments are out of range, the backbone has other outputs, or inputs or
            targets are of the wrong shape.

    Example: a forecast of six steps of one target, from its past and another series.

    >>> x = np.random.rand(8, 12, 2)
    >>> backbone = TCN(8, kernel_size=3, depth=2, return_sequences=False)
    >>> model = Forecaster(backbone, horizon=6, quantiles=(0.1, 0.5, 0.9), normalize=True)
    >>> model.adapt(x)
    >>> model.compile("adam")
    >>> sorted(model.fit(x, np.random.rand(8, 6, 1), verbose=0).history)
    ['coverage', 'loss', 'mae', 'pinball']
    >>> model.forecast(x[0]).shape
    (6, 1, 3)
    """

    horizon: int
    targets: int
    quantiles: tuple[float, ...] | None
    future_channels: int
    target_normalization: Standardization | None

    def __init__(
        self,
        backbone: keras.Layer,
        horizon: int,
        targets: int = 1,
        *,
        quantiles: Sequence[float] | None = None,
        future_channels: int = 0,
        per_step: bool = False,
        **kwargs: Any,
    ) -> None:
        horizon, targets = check_positive(horizon=horizon, targets=targets)
        quantiles = None if quantiles is None else check_quantiles(quantiles)
        if not isinstance(future_channels, numbers.Integral) or future_channels < 0:
            raise ValueError(
                "`future_channels` must be a non-negative integer. "
                f"Received: future_channels={future_channels!r}"
            )
        units = horizon * targets * len(quantiles or (0,))
        super().__init__(backbone, units, per_step=per_step, **kwargs)
        self.horizon = horizon
        self.targets = targets
        self.quantiles = quantiles
        self.future_channels = int(future_channels)
        self.target_normalization = None
        if self.normalize:
            self.target_normalization = Standardization(
                dtype=at_least_float32(self.compute_dtype), name="target_normalization"
            )

    @property
    def middle(self) -> int | None:
        """Index of the quantile nearest to the median, `None` without quantiles."""
        return None if self.quantiles is None else middle_quantile(self.quantiles)

    @property
    def has_band(self) -> bool:
        """Whether there are several quantiles."""
        return self.quantiles is not None and len(self.quantiles) > 1

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        assert input_shape[-1] is not None  # by `super().build`
        if self.future_channels and self.future_channels + self.targets > input_shape[-1]:
            raise ValueError(
                f"Inputs must have {self.targets} targets first and {self.future_channels} known "
                f"covariates last. Received: {input_shape[-1]} channels"
            )
        if self.target_normalization is not None and not self.target_normalization.built:
            self.target_normalization.build((None, self.targets))
        if self.quantiles is not None:
            self.gap_scale = self.add_weight(
                name="gap_scale",
                shape=(self.targets, len(self.quantiles)),
                initializer="ones",
                trainable=False,
                autocast=False,
            )

    def _outputs(self, hidden):
        found = self.head(hidden)
        outputs = ops.reshape(found, (*ops.shape(found)[:-1], *self._forecast_shape))
        if self.quantiles is not None:
            outputs = _increasing(outputs, self.gap_scale, self.middle)
        if self.target_normalization is not None:
            outputs = self.target_normalization.invert(outputs, axis=self._target_axis)
        if (mask := resolve_mask(found, None)) is not None:
            set_keras_mask(outputs, mask)
        return outputs

    @property
    def _forecast_shape(self):
        """The shape of one forecast."""
        quantiles = () if self.quantiles is None else (len(self.quantiles),)
        return (self.horizon, self.targets, *quantiles)

    @property
    def _target_axis(self):
        return -1 if self.quantiles is None else -2

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*super().compute_output_shape(input_shape)[:-1], *self._forecast_shape)

    # Normalization

    def adapt(
        self,
        inputs: np.ndarray | Sequence[np.ndarray],
        targets: np.ndarray | Sequence[np.ndarray] | None = None,
    ) -> None:
        """Takes the statistics of inputs and targets, for a model with `normalize=True`.

        Call it before `fit`, with training data only. Missing values (NaN) are ignored. A constant
        channel is only centered. The model clips inputs to 10 standard deviations from the mean.

        Args:
            inputs: Array (..., channels), or a sequence of such arrays. Arrays are read in blocks,
                so they may be memory-mapped.
            targets: Array (..., targets), or a sequence of such arrays. Defaults to `None`: the
                targets are the first channels of the inputs.

        Raises:
            ValueError: If the model has normalize=False, or a channel has no values.
        """
        super().adapt(inputs)
        if targets is None:
            targets = [array[..., : self.targets] for array in arrays_of(inputs)]
        arrays = arrays_of(targets)
        if any(array.shape[-1] != self.targets for array in arrays):
            raise ValueError(
                f"`targets` must have {self.targets} channels. "
                f"Received: shapes {[array.shape for array in arrays]}"
            )
        if self.target_normalization is not None:
            self.target_normalization.adapt(arrays)

    def calibrate(self, x: Any, y: Any = None, batch_size: int | None = None) -> None:
        """Calibrates the quantiles on data that the model was not trained on.

        Quantiles learned from training data may be too narrow or too wide for later data. This is
        conformalized quantile regression (Romano et al. 2019): the middle quantile stays, and each
        gap to the next one is scaled so that the right share of the targets lies beyond it. The
        factors, one for each target and quantile, are saved with the model.

        Call it after `fit`, with validation data: those that come last, if the series changes.

        Args:
            x: Inputs, or a `PyDataset` of batches (x, y) or (x, y, weight). Rows with weight 0 and
                missing targets (NaN) do not count.
            y: Targets. Defaults to `None`, for a `PyDataset`.
            batch_size: As in `keras.Model.predict`.

        Raises:
            ValueError: If the model has no quantiles beside the middle one, or inputs or targets do
                not fit it.
        """
        if self.quantiles is None or not self.has_band:
            raise ValueError(
                f"`calibrate` needs a model with several quantiles. Received: {self.quantiles}"
            )
        self.check_adapted()
        self._check_data(x, y)
        self.gap_scale.assign(np.ones(self.gap_scale.shape))
        batches = x if isinstance(x, keras.utils.PyDataset) else [(x, y)]
        found = []
        for i in range(len(batches)):
            inputs, targets, weight = keras.utils.unpack_x_y_sample_weight(batches[i])
            outputs = self.predict(inputs, batch_size=batch_size, verbose=0)
            targets = np.array(ops.convert_to_numpy(targets), "float64").reshape(outputs.shape[:-1])
            if weight is not None:
                counts = expand_to_rank(ops.convert_to_tensor(weight), targets.ndim)
                targets[np.broadcast_to(ops.convert_to_numpy(counts) == 0, targets.shape)] = np.nan
            found.append((outputs, targets))
        outputs, targets = (np.concatenate(parts) for parts in zip(*found, strict=True))
        self.gap_scale.assign(conformal_scale(outputs, targets, self.quantiles))

    # Loss and metrics

    def _default_loss(self):
        dtype = self.head.compute_dtype
        if self.quantiles is not None:
            return PinballLoss(self.quantiles, dtype=dtype)
        return SquaredError(dtype=dtype)

    def _default_metrics(self):
        dtype = self.head.compute_dtype
        error = keras.metrics.MeanAbsoluteError(name="mae", dtype=dtype)
        if self.quantiles is None:
            return [error, keras.metrics.RootMeanSquaredError(name="rmse", dtype=dtype)]
        kinds = (MeanPinball, Coverage)
        return [*(kind(self.quantiles, dtype=dtype) for kind in kinds), error]

    def _own_loss(self, loss):
        if self.quantiles is not None and not isinstance(loss, PinballLoss):
            raise ValueError(
                "A model with quantiles is trained by forecasting.PinballLoss, the default. "
                f"Received: loss={loss!r}"
            )
        return loss

    def _own_metrics(self, metrics):
        """Returns Keras' metrics as those of single values, each with its weight."""
        if metrics is None:
            return None
        kinds = (ForecastMetric, ValueMetric)
        return [
            metric if isinstance(metric, kinds) else ValueMetric(metric, self.middle)
            for metric in keras.tree.flatten(metrics)
        ]

    def _weights(self, y_pred, sample_weight):
        values = y_pred if self.quantiles is None else y_pred[..., 0]
        weight = ops.ones_like(values)
        for factor in (sample_weight, resolve_mask(y_pred, None)):
            if factor is not None:
                factor = ops.cast(factor, weight.dtype)
                weight = weight * expand_to_rank(factor, len(values.shape))
        return ops.reshape(weight, ops.shape(values))

    def _loss_terms(self, y, y_pred, weight):
        expected = tuple(y_pred.shape[:-1] if self.quantiles else y_pred.shape)
        if not shapes_match(y.shape, expected):
            raise ValueError(
                f"Targets must have shape {expected}. Received: shape {tuple(y.shape)}"
            )
        y, weight = without_missing(ops.cast(y, weight.dtype), weight)
        if self.target_normalization is not None:
            y = self.target_normalization.standardize(y)
            y_pred = self.target_normalization.standardize(y_pred, axis=self._target_axis)
        # A copy has no `_keras_mask`, which Keras would apply again: the weight has it.
        y_pred = ops.copy(y_pred) if self.quantiles else y_pred[..., None]
        return y[..., None], y_pred, weight

    def _check_targets(self, y):
        if y.ndim != 3 + self.per_step or y.shape[-2:] != (self.horizon, self.targets):
            leading = "batch, time" if self.per_step else "batch"
            raise ValueError(
                f"`y` must have shape ({leading}, {self.horizon}, {self.targets}): the model's "
                f"horizon is {self.horizon}. Received: shape {y.shape}"
            )
        if y.size and np.all(np.isnan(y)):
            raise ValueError("All targets are missing: `y` has NaN only.")

    def _check_weights(self, weights):
        """Takes any weights: a gap in a series may fill all of a forecast."""

    # Forecasts

    def forecast(
        self,
        history: np.ndarray,
        steps: int | None = None,
        future_covariates: np.ndarray | None = None,
        *,
        samples: int = 100,
        seed: int | None = None,
    ) -> np.ndarray:
        """Forecasts the targets after the end of a series, in the units of the data.

        Up to the model's horizon the forecast is direct. Beyond it the model forecasts block after
        block: it reads each forecast as history, by its exact streaming step, so that the work for
        a block does not depend on the history. A model with quantiles reads `samples` paths that
        are drawn from them, and the quantiles beyond the horizon are those of the paths.

        Args:
            history: Array (time, channels) or (batch, time, channels): the targets first, then
                other covariates, and last the `future_channels`, each at its own time. A model with
                `normalize` reads NaN as the mean of the channel. A history shorter than the
                training windows is padded with zeros, which makes forecasts worse.
            steps: Positive integer, number of steps to forecast. Defaults to `None`, the model's
                horizon.
            future_covariates: Array (steps, future_channels) or (batch, steps, future_channels),
                the steps after the history, up to the end of the last block. Defaults to `None`.
            samples: Positive integer, number of paths of a model with quantiles beyond its
                horizon. Defaults to 100.
            seed: Integer seed of the paths. Defaults to `None`.

        Returns:
            Array (steps, targets) or (batch, steps, targets), with quantiles (..., quantiles).

        Raises:
            ValueError: If arguments have the wrong shape, a future covariate is NaN, or `steps`
                exceeds the horizon of a model with covariates that are not known in the future, or
                with a backbone that does not stream.
        """
        return rollout.forecast(self, history, steps, future_covariates, samples, seed)

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "horizon": self.horizon,
            "targets": self.targets,
            "quantiles": self.quantiles,
            "future_channels": self.future_channels,
            "per_step": self.per_step,
        }


def _increasing(values, scale, middle):
    """Makes the last axis increase: gaps by softplus, each next to the one nearer to the middle."""
    center = values[..., middle : middle + 1]
    differences = ops.softplus(values) * ops.cast(scale, values.dtype)
    above = center + ops.cumsum(differences[..., middle + 1 :], axis=-1)
    below = center - ops.cumsum(ops.flip(differences[..., :middle], axis=-1), axis=-1)
    return ops.concatenate([ops.flip(below, axis=-1), center, above], axis=-1)
