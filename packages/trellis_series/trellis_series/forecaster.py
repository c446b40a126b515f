"""A model for time series forecasting with any causal backbone."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import (
    at_least_float32,
    check_built,
    check_shape,
    check_start,
    shapes_match,
    step_through,
)
from trellis_keras.layers.checks import check_integer, check_positive
from trellis_keras.models.losses import SquaredError, expand_to_rank
from trellis_keras.models.normalization import LARGEST, Standardization, arrays_of
from trellis_keras.models.sequence_model import SequenceModel
from trellis_keras.types import Cache, Shape, Tensor
from trellis_series.ensemble import fill
from trellis_series.linear_map import LinearMap, fill_missing, fit_map
from trellis_series.quantiles import (
    Coverage,
    ForecastMetric,
    MeanPinball,
    PinballLoss,
    ValueMetric,
    check_quantiles,
    middle_quantile,
    without_missing,
)
from trellis_series.seasons import naive_season

_SCALES = ("data", "window")
_MOST_VALUES = 2**23  # in the windows used to fit a linear map
_LEAST_GAP = 1e-3  # between quantiles, in units of the windows' scale


@keras.saving.register_keras_serializable("trellis_keras")
class Forecaster(SequenceModel):
    """Forecasts the next steps of time series, with any causal backbone.

    With `quantiles` each forecast has a band. `compile` defaults to the mean squared error and the
    metrics `"mae"` and `"rmse"`, and with `quantiles` to the pinball loss and the metrics
    `"pinball"`, `"coverage"` and the `"mae"` of the middle quantile, which is also what Keras
    metrics passed to `compile` receive. Missing targets (NaN) do not count.

    With `normalize=True` inputs and outputs are in the units of the data: `adapt` computes the
    statistics of the training data, which are saved with the weights. The loss is computed on
    standardized values.

    With `linear_window` the forecast is a linear map of the last steps plus the output of the
    backbone, which is trained on the map's residuals. `adapt` fits the map in closed form, after
    which the model forecasts well without any training. The loss is then in units of the mean
    change of each window.

    With `scale="window"` the backbone also reads each window relative to its last value, in units
    of its standard deviation. One model then forecasts series of different levels and sizes, also
    ones that it was not trained on. A streaming step runs the backbone on the whole window.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`).
        horizon: Positive integer, number of steps to forecast.
        targets: Positive integer, number of channels to forecast, the first ones of the inputs.
            Defaults to 1.
        quantiles: Increasing floats between 0 and 1. Outputs get a last axis of quantiles, which do
            not cross. Defaults to `None`, one value per target and step.
        future_channels: Integer, number of input channels known in the future, the last ones, such
            as the hour of the day. At each step they have the value `horizon` steps ahead, so the
            backbone sees them up to the end of the forecast. Defaults to 0.
        normalize: Boolean, whether the model standardizes inputs and targets, see `adapt`. It then
            replaces missing inputs (NaN) of the backbone with the mean of their channel, or with
            the last known value if `scale="window"`. Defaults to `False`.
        linear_window: Integer of 2 or more, the number of last steps that a linear map reads.
            Requires `normalize=True`. The head's kernel is then initialized with zeros. Defaults to
            `None`, no map.
        scale: How the backbone reads the targets: `"data"`, standardized with the statistics of the
            training data; or `"window"`, relative to each window, which requires `linear_window`.
            Defaults to `"data"`.
        input_dropout, output_dropout, kernel_initializer, bias_initializer, seed: As in
            `SequenceModel`.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time), see `models.SequenceClassifier`.

    Returns:
        Tensor (batch, horizon, targets[, quantiles]), at least float32.

    Raises:
        ValueError: If arguments are out of range, the backbone has other outputs, or inputs or
            targets are of the wrong shape.

    Example: forecast six steps of one target from its past and another series.

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
    scale: str
    target_normalization: Standardization | None

    def __init__(
        self,
        backbone: keras.Layer,
        horizon: int,
        targets: int = 1,
        *,
        quantiles: Sequence[float] | None = None,
        future_channels: int = 0,
        linear_window: int | None = None,
        scale: str = "data",
        **kwargs: Any,
    ) -> None:
        horizon, targets = check_positive(horizon=horizon, targets=targets)
        quantiles = None if quantiles is None else check_quantiles(quantiles)
        future_channels = check_integer("future_channels", future_channels, minimum=0)
        if linear_window is not None:
            (linear_window,) = check_positive(linear_window=linear_window)
            if linear_window < 2 or not kwargs.get("normalize"):
                raise ValueError(
                    "`linear_window` must be 2 or more, and needs normalize=True. Received: "
                    f"linear_window={linear_window}, normalize={kwargs.get('normalize', False)}"
                )
            if kwargs.get("kernel_initializer") is None:
                kwargs["kernel_initializer"] = "zeros"
        if scale not in _SCALES:
            raise ValueError(f"`scale` must be one of {_SCALES}. Received: scale={scale!r}")
        if scale == "window" and linear_window is None:
            raise ValueError("scale='window' needs `linear_window`. Received: linear_window=None")
        units = horizon * targets * len(quantiles or (0,))
        super().__init__(backbone, units, per_step=False, **kwargs)
        self.horizon = horizon
        self.targets = targets
        self.quantiles = quantiles
        self.future_channels = future_channels
        self.scale = scale
        self.target_normalization = None
        if self.normalize:
            self.target_normalization = Standardization(
                dtype=at_least_float32(self.compute_dtype), name="target_normalization"
            )
        self.linear: LinearMap | None = None
        if linear_window is not None:
            self.linear = LinearMap(
                linear_window,
                horizon,
                targets,
                dtype=at_least_float32(self.compute_dtype),
                name="linear",
            )

    @property
    def middle(self) -> int | None:
        """Index of the quantile nearest to the median, or `None` without quantiles."""
        return None if self.quantiles is None else middle_quantile(self.quantiles)

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        assert input_shape[-1] is not None  # by `super().build`
        if self.future_channels and self.future_channels + self.targets > input_shape[-1]:
            raise ValueError(
                f"Inputs must start with {self.targets} targets and end with "
                f"{self.future_channels} known covariates. Received: {input_shape[-1]} channels"
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
        if self.linear is not None:
            self.linear.build(input_shape)
            self.offsets = self.add_weight(
                name="offsets",
                shape=self._forecast_shape,
                initializer="zeros",
                trainable=False,
                autocast=False,
            )

    def call(self, inputs: Tensor, training: bool = False, mask: Tensor = None) -> Tensor:
        if self.linear is None:
            return self._outputs(self._hidden(inputs, training, mask))
        if mask is not None:
            raise ValueError(
                "The linear map does not support masks, because it reads the last steps: remove "
                "the padding, or use linear_window=None. Received: a mask"
            )
        hidden = self._hidden(inputs, training, None)
        return self._outputs(hidden, self.linear(self._linear_inputs(inputs)))

    def _linear_inputs(self, inputs):
        """Returns inputs for the linear map, without limits on the range of targets."""
        assert self.input_normalization is not None  # by the constructor
        x = ops.cast(inputs, self.input_normalization.compute_dtype)
        x = self.input_normalization.standardize(x)
        is_target = np.arange(self.linear.kernel.shape[1]) < self.targets
        return ops.where(is_target, x, ops.clip(x, -LARGEST, LARGEST))

    def _features(self, inputs):
        if self.linear is None or self.scale == "data":
            return super()._features(inputs)
        return self._relative(self.linear.last_steps(self._linear_inputs(inputs)))

    def _relative(self, steps):
        """Returns windows (batch, window, channels) relative to their last values."""
        targets, others = steps[..., : self.targets], steps[..., self.targets :]
        deviation = ops.maximum(ops.std(targets, axis=1, keepdims=True), self.linear.least_scale)
        targets = ops.clip((targets - targets[:, -1:]) / deviation, -LARGEST, LARGEST)
        return ops.cast(ops.concatenate([targets, others], axis=-1), self.compute_dtype)

    def _outputs(self, hidden, linear=None):
        outputs = ops.reshape(self.head(hidden), (-1, *self._forecast_shape))
        if linear is not None:
            outputs = outputs + self.offsets
        if self.quantiles is not None:
            outputs = _increasing(outputs, self.gap_scale, self.middle)
        if linear is not None:
            base, scale = linear if self.quantiles is None else (x[..., None] for x in linear)
            outputs = base + scale * outputs
        if self.target_normalization is not None:
            outputs = self.target_normalization.invert(outputs, axis=self._target_axis)
        return outputs

    @property
    def _forecast_shape(self):
        """Returns the shape of one forecast."""
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
        train: np.ndarray | Sequence[np.ndarray],
        valid: np.ndarray | Sequence[np.ndarray] | None = None,
    ) -> None:
        """Computes the statistics of the training data, and fits the linear map, if any.

        Call it before `fit`. It requires `normalize=True`, with which the model clips the inputs of
        its backbone to 10 standard deviations from the mean (with `scale="window"`, targets to 10
        standard deviations of the window from its last value). Missing values (NaN) are ignored,
        and constant channels are only centered.

        Args:
            train: Rows of the training part: an array (time, channels), or a sequence of such
                arrays, one for each series. The future channels are at their own time.
            valid: The validation part, used to choose the map's penalty. Defaults to `None`.

        Raises:
            ValueError: If the model has normalize=False, a channel has no values, or there is no
                window for the linear map.
        """
        rows = arrays_of(train)
        super().adapt(rows)
        if self.target_normalization is not None:
            self.target_normalization.adapt([array[..., : self.targets] for array in rows])
        if self.linear is None:
            return
        held = () if valid is None else arrays_of(valid)
        (x, y), (x_valid, y_valid) = map(self._linear_windows, (rows, held))
        if not len(x):
            raise ValueError(
                f"The linear map needs windows of `linear_window` + `horizon` = "
                f"{self.linear.window} + {self.horizon} rows. Received: none in the training data"
            )
        longest = max(rows, key=len)
        kernel, least_scale, residuals = fit_map(
            x, y, x_valid, y_valid, [self._season(longest[:, j]) for j in range(self.targets)]
        )
        self.linear.kernel.assign(kernel.reshape(self.linear.kernel.shape))
        self.linear.least_scale.assign(least_scale)
        if self.quantiles is not None:
            self.offsets.assign(_starting_offsets(residuals, self.quantiles))

    def _season(self, y):
        """Returns the lag with the best naive forecasts of a series, at most the window."""
        y = np.asarray(y, "float64")
        y = fill(y, 1) if not np.isnan(y).all() else np.zeros(len(y))
        return naive_season(y, range(2, self.linear.window + 1), self.horizon)

    def _linear_windows(self, series):
        """Returns standardized inputs and targets of evenly spaced windows of series."""
        window, horizon, channels = self.linear.window, self.horizon, self.linear.kernel.shape[1]
        parts = [
            windows(np.asarray(rows), window, horizon, self.targets, self.future_channels)
            for rows in (*series, np.zeros((0, channels)))
        ]
        every = -(-sum(len(x) for x, _ in parts) * window * channels // _MOST_VALUES) or 1
        x, y = (
            np.concatenate([part[::every] for part in side]) for side in zip(*parts, strict=True)
        )
        x = ops.convert_to_numpy(fill_missing(self._linear_inputs(x)))
        return x.astype("float64"), ops.convert_to_numpy(self.target_normalization.standardize(y))

    def _scale(self, x):
        """Returns the scale of windows in the loss, relative to the targets' deviation."""
        if self.linear is None:
            return ops.ones((1, 1, self.targets))
        return self.linear(self._linear_inputs(x))[1]

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
                "A model with quantiles must use trellis_series.PinballLoss, the default. "
                f"Received: loss={loss!r}"
            )
        return loss

    def _own_metrics(self, metrics):
        """Returns Keras' metrics, wrapped to take single values with weights."""
        if metrics is None:
            return None
        kinds = (ForecastMetric, ValueMetric)
        return [
            metric if isinstance(metric, kinds) else ValueMetric(metric, self.middle)
            for metric in keras.tree.flatten(metrics)
        ]

    def _weights(self, y_pred, sample_weight):
        values = y_pred if self.quantiles is None else y_pred[..., 0]
        if sample_weight is None:
            return ops.ones_like(values)
        weight = expand_to_rank(ops.cast(sample_weight, values.dtype), len(values.shape))
        return ops.broadcast_to(weight, ops.shape(values))

    def _loss_terms(self, x, y, y_pred, weight):
        expected = tuple(y_pred.shape[:-1] if self.quantiles else y_pred.shape)
        if not shapes_match(y.shape, expected):
            raise ValueError(
                f"Targets must have shape {expected}. Received: shape {tuple(y.shape)}"
            )
        y, weight = without_missing(ops.cast(y, weight.dtype), weight)
        if self.target_normalization is not None:
            y = self.target_normalization.standardize(y)
            y_pred = self.target_normalization.standardize(y_pred, axis=self._target_axis)
        if self.linear is not None:
            scale = self._scale(x)
            y, y_pred = y / scale, y_pred / (scale if self.quantiles is None else scale[..., None])
        return y[..., None], y_pred if self.quantiles else y_pred[..., None], weight

    def _check_targets(self, y):
        if y.ndim != 3 or y.shape[1:] != (self.horizon, self.targets):
            raise ValueError(
                f"`y` must have shape (batch, {self.horizon}, {self.targets}), as the model's "
                f"horizon is {self.horizon}. Received: shape {y.shape}"
            )
        if y.size and np.all(np.isnan(y)):
            raise ValueError("All targets are missing: `y` has only NaN.")

    # Streaming: with a linear map, the cache also contains its last steps. With scale="window" it
    # contains nothing else.

    def initial_cache(self, batch_size: int) -> Cache:
        if self.linear is None:
            return super().initial_cache(batch_size)
        check_built(self)
        check_start(self.linear, batch_size)
        cache = {"linear": self.linear.initial_cache(batch_size)}
        if self.scale == "data":
            cache["backbone"] = super().initial_cache(batch_size)
        return cache

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        if self.linear is None:
            return super().step(x, cache)
        steps = cache["linear"]
        check_shape("x", x, (steps.shape[0], steps.shape[-1]))
        linear, steps = self.linear.step(self._linear_inputs(x), steps)
        if self.scale == "window":
            return self._outputs(self.backbone(self._relative(steps)), linear), {"linear": steps}
        hidden, backbone = self.stream().step(self._features(x), cache["backbone"])
        return self._outputs(hidden, linear), {"linear": steps, "backbone": backbone}

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        if self.linear is None:
            return super().prefill(x, cache)
        return step_through(self, x, cache)

    def _export_notes(self):
        axes = "[step][target][quantile]" if self.quantiles else "[step][target]"
        notes = [f"Outputs: y{axes} of shape {list(self._forecast_shape)}, in row-major order."]
        if self.quantiles:
            notes.append(f"Quantiles: {', '.join(map(str, self.quantiles))}.")
        return notes

    # Forecasts

    def forecast(
        self, history: np.ndarray, future_covariates: np.ndarray | None = None
    ) -> np.ndarray:
        """Forecasts the targets after the end of a series, in the units of the data.

        Args:
            history: Array (time, channels) or (batch, time, channels): the targets first, then
                other covariates, and last the `future_channels`, each at its own time. A model with
                `normalize` replaces NaN, see the class. A history shorter than the training windows
                is padded with zeros, which makes forecasts less accurate.
            future_covariates: Array (horizon, future_channels) or (batch, ...), of the steps after
                the history. Defaults to `None`.

        Returns:
            Array (horizon, targets) or (batch, horizon, targets), with quantiles (..., quantiles).

        Raises:
            ValueError: If arguments have the wrong shape, or a future covariate is NaN.
        """
        check_built(self)
        self.check_adapted()
        x, is_single = np.asarray(history, "float32"), np.ndim(history) == 2
        x = x[None] if is_single else x
        self._check_inputs(x)
        if self.future_channels:
            ahead = np.asarray(future_covariates, "float32")
            wanted = (len(x), self.horizon, self.future_channels)
            if ahead.shape not in (wanted, wanted[1:] if is_single else wanted):
                raise ValueError(
                    f"`future_covariates` must have shape {wanted}. Received: shape {ahead.shape}"
                )
            if np.isnan(ahead).any():
                raise ValueError("`future_covariates` must have no missing values. Received: NaN")
            x = with_lead(x, ahead.reshape(wanted))
        elif future_covariates is not None:
            raise ValueError("The model has future_channels=0. Received: future_covariates")
        y = ops.convert_to_numpy(self(ops.convert_to_tensor(x)))
        return y[0] if is_single else y

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "horizon": self.horizon,
            "targets": self.targets,
            "quantiles": self.quantiles,
            "future_channels": self.future_channels,
            "linear_window": None if self.linear is None else self.linear.window,
            "scale": self.scale,
        }

    @classmethod
    def from_config(cls, config: dict) -> "Forecaster":
        config = {name: value for name, value in config.items() if name != "per_step"}  # was one
        return super().from_config(config)


def with_lead(x: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Returns inputs whose last channels are those of `horizon` steps later.

    Args:
        x: Array (batch, time, channels), each channel at its own time.
        ahead: Array (batch, horizon, future_channels), the steps that follow.
    """
    count, horizon = ahead.shape[2], ahead.shape[1]
    known = np.concatenate([x[..., -count:], ahead], axis=1)[:, horizon:]
    return np.concatenate([x[..., :-count], known], axis=-1)


def windows(
    rows: np.ndarray, window: int, horizon: int, targets: int = 1, future_channels: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all windows of a series as inputs and targets of a `Forecaster`.

    Args:
        rows: Array (time, channels), the targets first and the `future_channels` last.
        window, horizon, targets, future_channels: Integers.

    Returns:
        Arrays (windows, window, channels) and (windows, horizon, targets), views of the rows unless
        there are future channels.
    """
    count = max(len(rows) - window - horizon + 1, 0)
    view = np.lib.stride_tricks.sliding_window_view
    if not count:
        return rows[:0].reshape(0, window, rows.shape[1]), rows[:0, None, :targets].repeat(
            horizon, 1
        )
    x = np.moveaxis(view(rows, window, axis=0), 1, 2)[:count]
    ahead = np.moveaxis(view(rows, horizon, axis=0), 1, 2)[window:]
    if future_channels:
        x = with_lead(x, ahead[..., -future_channels:])
    return x, ahead[..., :targets]


def _starting_offsets(residuals, quantiles):
    """Returns offsets (horizon, targets, quantiles) whose quantiles are those of residuals.

    Args:
        residuals: Array (windows, horizon, targets). Missing values are NaN.
        quantiles: Increasing floats between 0 and 1.
    """
    found = np.nan_to_num(np.moveaxis(np.nanquantile(residuals, quantiles, axis=0), 0, -1))
    middle = middle_quantile(quantiles)
    gaps = np.maximum(np.diff(found, axis=-1), _LEAST_GAP)
    offsets = gaps + np.log(-np.expm1(-gaps))  # inverts the softplus in `_increasing`
    return np.concatenate(
        [offsets[..., :middle], found[..., middle : middle + 1], offsets[..., middle:]], axis=-1
    )


def _increasing(values, scale, middle):
    """Makes the last axis increase: from the middle outwards, values become softplus gaps."""
    center = values[..., middle : middle + 1]
    differences = ops.softplus(values) * ops.cast(scale, values.dtype)
    above = center + ops.cumsum(differences[..., middle + 1 :], axis=-1)
    below = center - ops.cumsum(ops.flip(differences[..., :middle], axis=-1), axis=-1)
    return ops.concatenate([ops.flip(below, axis=-1), center, above], axis=-1)
