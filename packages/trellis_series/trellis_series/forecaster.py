"""A model for time series forecasting with any causal backbone."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import check_built, check_shape, shapes_match, step_through
from trellis_keras.layers.checks import check_integer, check_positive
from trellis_keras.models.losses import SquaredError, expand_to_rank
from trellis_keras.models.normalization import LARGEST, arrays_of
from trellis_keras.models.sequence_model import SequenceModel
from trellis_keras.types import Cache, Shape, Tensor
from trellis_series.ensemble import fill
from trellis_series.linear_map import fill_missing, fit_map
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

_MOST_VALUES = 2**23  # in the windows used to fit a linear map
_LEAST_GAP = 1e-3  # between quantiles, in units of the windows' scale


@keras.saving.register_keras_serializable("trellis_keras")
class Forecaster(SequenceModel):
    """Forecasts the next steps of time series, with any causal backbone.

    With `quantiles` each forecast has a band. `compile` defaults to the mean squared error and the
    metrics `"mae"` and `"rmse"`, and with `quantiles` to the pinball loss and the metrics
    `"pinball"`, `"coverage"` and the `"mae"` of the middle quantile, which is also what Keras
    metrics passed to `compile` receive. Missing targets (NaN) do not count.

    With `normalize=True` inputs and outputs are in the units of the data, and the loss is computed
    on standardized values. With `linear_window` the forecast is a linear map of the last steps,

        base_t = sum_j z_{t-j} K[window - 1 - j]                    j = 0..window - 1
        scale_t = max(mean_j |z_{t-j} - z_{t-j-1}|, least scale)

    plus the backbone's output times the scale, in which the loss is then measured. `adapt` fits the
    map in closed form, after which the model forecasts well without any training.

    With `scale="window"` the backbone also reads each window relative to its last value, in units
    of its standard deviation. One model then forecasts series of different levels and sizes, also
    ones that it was not trained on. A streaming step runs the backbone on the whole window.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`).
        horizon: Positive integer, number of steps to forecast.
        targets: Positive integer, number of channels to forecast, the first ones of the inputs.
            Defaults to `1`.
        quantiles: Increasing floats between 0 and 1. Outputs get a last axis of quantiles, which do
            not cross. Defaults to `None`, one value per target and step.
        future_channels: Integer, number of input channels known in the future, the last ones, such
            as the hour of the day. At each step they have the value `horizon` steps ahead, so the
            backbone sees them up to the end of the forecast. Defaults to `0`.
        linear_window: Integer of 2 or more, the number of last steps that a linear map reads.
            Requires `normalize=True`. The head's kernel is then initialized with zeros. Defaults to
            `None`, no map.
        scale: How the backbone reads the targets: `"data"`, standardized with the statistics of the
            training data; or `"window"`, relative to each window, which requires `linear_window`.
            Defaults to `"data"`.
        **kwargs: `normalize`, `input_dropout`, `output_dropout`, `kernel_initializer`,
            `bias_initializer` and `seed`, as in `SequenceModel`. With `normalize=True` missing
            inputs (NaN) are replaced by the mean of their channel, or with `scale="window"` by the
            last known value.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        mask: Boolean (batch, time), see `models.SequenceClassifier`.

    Returns:
        Tensor (batch, horizon, targets[, quantiles]), at least float32.

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
        if linear_window is not None:
            linear_window = check_integer("linear_window", linear_window, minimum=2)
            if not kwargs.get("normalize"):
                raise ValueError("`linear_window` needs normalize=True. Received: normalize=False")
            if kwargs.get("kernel_initializer") is None:
                kwargs["kernel_initializer"] = "zeros"
        if scale not in ("data", "window") or (scale == "window" and linear_window is None):
            raise ValueError(
                "`scale` must be 'data', or 'window' with a `linear_window`. Received: "
                f"scale={scale!r}, linear_window={linear_window}"
            )
        units = horizon * targets * len(quantiles or (0,))
        super().__init__(backbone, units, per_step=False, **kwargs)
        self.horizon = horizon
        self.targets = targets
        self.quantiles = quantiles
        self.future_channels = check_integer("future_channels", future_channels, minimum=0)
        self.linear_window = linear_window
        self.scale = scale
        self.target_normalization = self._normalization("target_normalization")

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        channels = input_shape[-1]
        assert channels is not None  # by `super().build`
        if self.future_channels and self.future_channels + self.targets > channels:
            raise ValueError(
                f"Inputs must start with {self.targets} targets and end with "
                f"{self.future_channels} known covariates. Received: {channels} channels"
            )

        def weight(name, shape, initializer="zeros"):
            options = {"trainable": False, "autocast": False, "dtype": self.head.variable_dtype}
            return self.add_weight(shape, initializer, name=name, **options)

        if self.target_normalization is not None:
            self.target_normalization.build((None, self.targets))
        if self.quantiles is not None:
            self.gap_scale = weight("gap_scale", (self.targets, len(self.quantiles)), "ones")
        if self.linear_window is not None:
            one = (self.horizon, self.targets)
            self.offsets = weight("offsets", (*one, len(self.quantiles or (0,))))
            self.linear_kernel = weight("linear_kernel", (self.linear_window, channels, *one))
            self.least_scale = weight("least_scale", (self.targets,))

    def call(self, inputs: Tensor, training: bool = False, mask: Tensor = None) -> Tensor:
        if self.linear_window is None:
            return super().call(inputs, training, mask)
        if mask is not None:
            raise ValueError(
                "The linear map does not support masks, because it reads the last steps: remove "
                "the padding, or use linear_window=None. Received: a mask"
            )
        return self._outputs(self._hidden(inputs, training, None), self._last_steps(inputs))

    def _linear_inputs(self, inputs):
        """Returns inputs for the linear map, without limits on the range of targets."""
        x = ops.cast(inputs, self.input_normalization.compute_dtype)
        x = self.input_normalization.standardize(x)
        is_target = np.arange(self.linear_kernel.shape[1]) < self.targets
        return ops.where(is_target, x, ops.clip(x, -LARGEST, LARGEST))

    def _last_steps(self, inputs):
        """Returns the inputs of the linear map, (batch, window, channels), padded with zeros."""
        x = fill_missing(self._linear_inputs(inputs))
        before = self._no_steps(ops.shape(x)[0])
        return ops.concatenate([before, x], axis=1)[:, -self.linear_window :]

    def _no_steps(self, batch_size):
        shape = (batch_size, *self.linear_kernel.shape[:2])
        return ops.zeros(shape, self.linear_kernel.dtype)

    def _linear(self, steps):
        """Returns forecasts (batch, horizon, targets) and scales (batch, 1, targets)."""
        changes = ops.absolute(steps[:, 1:, : self.targets] - steps[:, :-1, : self.targets])
        scale = ops.maximum(ops.mean(changes, axis=1), self.least_scale)
        return ops.tensordot(steps, self.linear_kernel, [[1, 2], [0, 1]]), scale[:, None]

    def _features(self, inputs):
        if self.scale == "data":
            return super()._features(inputs)
        return self._relative(self._last_steps(inputs))

    def _relative(self, steps):
        """Returns windows (batch, window, channels) relative to their last values."""
        targets, others = steps[..., : self.targets], steps[..., self.targets :]
        deviation = ops.maximum(ops.std(targets, axis=1, keepdims=True), self.least_scale)
        targets = ops.clip((targets - targets[:, -1:]) / deviation, -LARGEST, LARGEST)
        return ops.cast(ops.concatenate([targets, others], axis=-1), self.compute_dtype)

    def _outputs(self, hidden, steps=None):
        outputs = ops.reshape(
            self.head(hidden), (-1, self.horizon, self.targets, len(self.quantiles or (0,)))
        )
        if steps is not None:
            outputs = outputs + self.offsets
        if self.quantiles is not None:
            outputs = _increasing(outputs, self.gap_scale, middle_quantile(self.quantiles))
        if steps is not None:
            base, scale = self._linear(steps)
            outputs = base[..., None] + scale[..., None] * outputs
        if self.target_normalization is not None:
            outputs = self.target_normalization.invert(outputs, axis=-2)
        return outputs[..., 0] if self.quantiles is None else outputs

    @property
    def _forecast_shape(self):
        """Returns the shape of one forecast."""
        return (self.horizon, self.targets, *([len(self.quantiles)] if self.quantiles else []))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*super().compute_output_shape(input_shape)[:-1], *self._forecast_shape)

    # Normalization

    def adapt(
        self,
        train: np.ndarray | Sequence[np.ndarray],
        valid: np.ndarray | Sequence[np.ndarray] = (),
    ) -> None:
        """Computes the statistics of the training data, and fits the linear map, if any.

        See `SequenceModel.adapt`. With `scale="window"` the model clips targets to 10 standard
        deviations of the window from its last value.

        Args:
            train: Rows of the training part: an array (time, channels), or a sequence of such
                arrays, one for each series. The future channels are at their own time.
            valid: The validation part, used to choose the map's penalty. Defaults to `()`.
        """
        rows = arrays_of(train)
        super().adapt(rows)
        self.target_normalization.adapt([array[..., : self.targets] for array in rows])
        if self.linear_window is None:
            return
        (x, y), (x_valid, y_valid) = map(self._linear_windows, (rows, arrays_of(valid)))
        if not len(x):
            raise ValueError(
                f"The linear map needs windows of `linear_window` + `horizon` = "
                f"{self.linear_window} + {self.horizon} rows. Received: none in the training data"
            )
        inputs, targets = np.concatenate([x, x_valid]), np.concatenate([y, y_valid])
        found = [
            fit_map(inputs, targets, len(x), j, self._season([each[:, j] for each in rows]))
            for j in range(self.targets)
        ]
        kernels, scales, residuals = (np.stack(each, axis=-1) for each in zip(*found, strict=True))
        self.linear_kernel.assign(kernels)
        self.least_scale.assign(scales)
        if self.quantiles is not None:
            self.offsets.assign(_starting_offsets(residuals, self.quantiles))

    def _season(self, series):
        """Returns the lag with the best naive forecasts of the longest of some series."""
        longest = max(series, key=lambda y: np.count_nonzero(~np.isnan(y))).astype("float64")
        known, candidates = ~np.isnan(longest), range(2, self.linear_window + 1)
        return naive_season(fill(longest, 1), known, candidates, self.horizon)

    def _linear_windows(self, series):
        """Returns standardized inputs and targets of evenly spaced windows of series."""
        window, channels = self.linear_kernel.shape[:2]
        parts = [
            windows(np.asarray(rows), window, self.horizon, self.targets, self.future_channels)
            for rows in (*series, np.zeros((0, channels)))
        ]
        every = -(-sum(len(x) for x, _ in parts) * window * channels // _MOST_VALUES) or 1
        x, y = (
            np.concatenate([part[::every] for part in side]) for side in zip(*parts, strict=True)
        )
        x = ops.convert_to_numpy(fill_missing(self._linear_inputs(x)))
        return x.astype("float64"), ops.convert_to_numpy(self.target_normalization.standardize(y))

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
        return [kind(self.quantiles, dtype=dtype) for kind in (MeanPinball, Coverage)] + [error]

    def _checked_loss(self, loss):
        if self.quantiles is not None and not isinstance(loss, PinballLoss):
            raise ValueError(
                "A model with quantiles must use trellis_series.PinballLoss, the default. "
                f"Received: loss={loss!r}"
            )
        return loss

    def _checked_metrics(self, metrics):
        """Returns Keras' metrics, wrapped to take single values with weights."""
        quantile = None if self.quantiles is None else middle_quantile(self.quantiles)
        kinds = (ForecastMetric, ValueMetric)
        return metrics and [
            metric if isinstance(metric, kinds) else ValueMetric(metric, quantile)
            for metric in keras.tree.flatten(metrics)
        ]

    def _weights(self, y_pred, sample_weight):
        values = y_pred if self.quantiles is None else y_pred[..., 0]
        if sample_weight is None:
            return ops.ones_like(values)
        weight = expand_to_rank(ops.cast(sample_weight, values.dtype), len(values.shape))
        return ops.broadcast_to(weight, ops.shape(values))

    def _loss_terms(self, x, y, y_pred, weight):
        y_pred = y_pred[..., None] if self.quantiles is None else y_pred
        if not shapes_match(y.shape, y_pred.shape[:-1]):
            raise ValueError(
                f"Targets must have shape {tuple(y_pred.shape[:-1])}. Received: shape "
                f"{tuple(y.shape)}"
            )
        y, weight = without_missing(ops.cast(y, weight.dtype), weight)
        if self.target_normalization is not None:
            y = self.target_normalization.standardize(y)
            y_pred = self.target_normalization.standardize(y_pred, axis=-2)
        if self.linear_window is not None:
            scale = self._linear(self._last_steps(x))[1]
            y, y_pred = y / scale, y_pred / scale[..., None]
        return y[..., None], y_pred, weight

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
        check_built(self)
        if self.scale == "window":
            return {"linear": self._no_steps(batch_size)}
        cache = super().initial_cache(batch_size)
        if self.linear_window is None:
            return cache
        return {"linear": self._no_steps(batch_size), "backbone": cache}

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        if self.linear_window is None:
            return super().step(x, cache)
        steps = cache["linear"]
        check_shape("x", x, (steps.shape[0], steps.shape[-1]))
        new = self._linear_inputs(x)
        new = ops.where(ops.isnan(new), steps[:, -1], new)
        steps = ops.concatenate([steps[:, 1:], new[:, None]], axis=1)
        if self.scale == "window":
            return self._outputs(self.backbone(self._relative(steps)), steps), {"linear": steps}
        hidden, backbone = self.stream().step(self._features(x), cache["backbone"])
        return self._outputs(hidden, steps), {"linear": steps, "backbone": backbone}

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        if self.linear_window is None:
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
                other covariates, and last the `future_channels`, each at its own time. A history
                shorter than the training windows is padded with zeros, which makes forecasts less
                accurate.
            future_covariates: Array (horizon, future_channels) or (batch, ...), of the steps after
                the history. Defaults to `None`.

        Returns:
            Array (horizon, targets) or (batch, horizon, targets), with quantiles (..., quantiles).
        """
        check_built(self)
        self.check_adapted()
        x, is_single = np.asarray(history, "float32"), np.ndim(history) == 2
        x = x[None] if is_single else x
        self._check_inputs(x)
        if self.future_channels or future_covariates is not None:
            ahead = np.asarray(future_covariates, "float32")
            wanted = (len(x), self.horizon, self.future_channels)
            shapes = (wanted, wanted[1:] if is_single else wanted)
            if ahead.shape not in shapes or np.isnan(ahead).any():
                raise ValueError(
                    f"`future_covariates` must have shape {wanted}, and no missing values. "
                    f"Received: shape {ahead.shape}, {np.isnan(ahead).sum()} missing values"
                )
            x = with_lead(x, ahead.reshape(wanted))
        y = ops.convert_to_numpy(self(ops.convert_to_tensor(x)))
        return y[0] if is_single else y

    def get_config(self) -> dict:
        names = ("horizon", "targets", "quantiles", "future_channels", "linear_window", "scale")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

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
    horizon, count = ahead.shape[1:]
    x = x.copy()
    if count:
        x[..., -count:] = np.concatenate([x[..., -count:], ahead], axis=1)[:, horizon:]
    return x


def windows(
    rows: np.ndarray, window: int, horizon: int, targets: int = 1, future_channels: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all windows of a series as inputs and targets of a `Forecaster`.

    Args:
        rows: Array (time, channels), the targets first and the `future_channels` last.
        window, horizon, targets, future_channels: Integers.

    Returns:
        Arrays (windows, window, channels) and (windows, horizon, targets), views of one copy of the
        rows.
    """
    if len(rows) < window + horizon:
        return np.zeros((0, window, rows.shape[1])), np.zeros((0, horizon, targets))
    own = rows.shape[1] - future_channels
    lead = np.concatenate([rows[:-horizon, :own], rows[horizon:, own:]], axis=1)
    x, ahead = (
        np.moveaxis(np.lib.stride_tricks.sliding_window_view(part, size, axis=0), 1, 2)
        for part, size in ((lead, window), (rows[window:], horizon))
    )
    return x, ahead[..., :targets]


def _starting_offsets(residuals, quantiles):
    """Returns offsets (horizon, targets, quantiles) for residuals (windows, horizon, targets)."""
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
