"""A model for time series forecasting with any causal backbone."""

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.masking import set_keras_mask

from keras_streams.protocol import (
    at_least_float32,
    check_built,
    check_shape,
    check_start,
    shapes_match,
)
from trellis_keras.forecasting import rollout
from trellis_keras.forecasting.calibration import conformal_scale
from trellis_keras.forecasting.linear import LinearMap, fit_map, is_gain
from trellis_keras.forecasting.losses import (
    PinballLoss,
    check_quantiles,
    middle_quantile,
    without_missing,
)
from trellis_keras.forecasting.metrics import Coverage, ForecastMetric, MeanPinball, ValueMetric
from trellis_keras.forecasting.series import Windows
from trellis_keras.layers.base import check_positive, resolve_mask
from trellis_keras.models.losses import SquaredError, expand_to_rank
from trellis_keras.models.normalization import LARGEST, Standardization, arrays_of
from trellis_keras.models.sequence_models import SequenceModel
from trellis_keras.types import Cache, Shape, Tensor

_SCALES = ("data", "window")
_SHARES = (0.25, 0.5, 0.75, 1.0)
_FEWEST_HORIZONS = 4  # of validation windows needed to keep a net
_MOST_VALUES = 2**23  # in the windows used to fit a linear map
_LEAST_GAP = 1e-3  # between quantiles, in units of the windows' scale


@keras.saving.register_keras_serializable("trellis_keras")
class Forecaster(SequenceModel):
    """Forecasts the next steps of time series, with any causal backbone.

    With `quantiles` each forecast has a prediction interval. `compile` defaults to the mean squared
    error and the metrics `"mae"` and `"rmse"`, and with `quantiles` to the pinball loss and the
    metrics `"pinball"`, `"coverage"` and the `"mae"` of the middle quantile. Keras metrics passed
    to `compile` only receive known values, and only the middle quantile.

    With `normalize=True` inputs and outputs are in the units of the data: `adapt` computes the
    statistics of the training data, which are saved with the weights. The loss is computed on
    standardized values, so it does not depend on the targets' units; metrics are in the units of
    the data.

    With `linear_window` the forecast is a linear map of the last steps plus the output of the
    backbone, which is trained on the map's residuals. `adapt` fits the map in closed form, after
    which the model forecasts well without any training. The loss is then in units of the mean
    change of each window. After training, `weigh_net` keeps as much of the network as helps.

    With `scale="window"` the backbone also reads each window relative to its last value, in units
    of its standard deviation. One model then forecasts series of different levels and sizes, also
    ones that it was not trained on. (In float32 the largest may have up to 100,000 times the size
    of the smallest.) A streaming step runs the backbone on the whole window.

    After training, `calibrate` adjusts the quantiles on held-out data.

    Missing targets (NaN) are excluded from the loss and the metrics. `sample_weight`
    may have the shape of the targets, or of their leading axes.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden).
        horizon: Positive integer, number of steps to forecast.
        targets: Positive integer, number of channels to forecast, the first ones of the inputs.
            Defaults to 1.
        quantiles: Increasing floats between 0 and 1. Outputs get a last axis of quantiles, which do
            not cross. Defaults to `None`, one value per target and step.
        future_channels: Integer, number of input channels known in the future, the last ones, such
            as the hour of the day. At each step they have the value `horizon` steps ahead, so the
            backbone sees them up to the end of the forecast. Defaults to 0.
        per_step: Boolean, whether to forecast after each step. Defaults to `False`.
        normalize: Boolean, whether the model standardizes inputs and targets, see `adapt`. It then
            replaces missing inputs (NaN) of the backbone with the mean of their channel, or with
            the last known value if `scale="window"`. Defaults to `False`.
        linear_window: Integer of 2 or more, the number of last steps that a linear map reads, see
            `forecasting.linear`. Requires `normalize=True`. The head's kernel is then initialized
            with zeros. Defaults to `None`, no map.
        scale: How the backbone reads the targets: `"data"`, standardized with the statistics of the
            training data; or `"window"`, relative to each window, which requires `linear_window`
            and `per_step=False`. Defaults to `"data"`.
        input_dropout: Float in [0, 1), dropout rate of the inputs. Defaults to 0.
        output_dropout: Float in [0, 1), dropout rate of the backbone's outputs. Defaults to 0.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        seed: Integer seed of dropout and the default initializer. Defaults to `None`.

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

    A linear map needs no training.

    >>> backbone = TCN(8, kernel_size=3, depth=2, return_sequences=False)
    >>> model = Forecaster(backbone, horizon=6, normalize=True, linear_window=12)
    >>> rows = np.sin(np.arange(60.0))[:, None]
    >>> model.adapt(rows[:48])
    >>> forecast = model.forecast(rows[:48])
    >>> bool(np.allclose(forecast, rows[48:54], atol=0.05))
    True
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
        per_step: bool = False,
        linear_window: int | None = None,
        scale: str = "data",
        **kwargs: Any,
    ) -> None:
        horizon, targets = check_positive(horizon=horizon, targets=targets)
        quantiles = None if quantiles is None else check_quantiles(quantiles)
        if not isinstance(future_channels, numbers.Integral) or future_channels < 0:
            raise ValueError(
                "`future_channels` must be a non-negative integer. "
                f"Received: future_channels={future_channels!r}"
            )
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
        if scale == "window" and (linear_window is None or per_step):
            raise ValueError(
                "scale='window' needs `linear_window`, the steps of a window, and per_step=False. "
                f"Received: linear_window={linear_window}, per_step={per_step}"
            )
        units = horizon * targets * len(quantiles or (0,))
        super().__init__(backbone, units, per_step=per_step, **kwargs)
        self.horizon = horizon
        self.targets = targets
        self.quantiles = quantiles
        self.future_channels = int(future_channels)
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
                return_sequences=per_step,
                dtype=at_least_float32(self.compute_dtype),
                name="linear",
            )

    @property
    def middle(self) -> int | None:
        """Index of the quantile nearest to the median, or `None` without quantiles."""
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
        found = self.head(hidden)
        outputs = ops.reshape(found, (*ops.shape(found)[:-1], *self._forecast_shape))
        if linear is not None:
            outputs = outputs + self.offsets
        if self.quantiles is not None:
            outputs = _increasing(outputs, self.gap_scale, self.middle)
        if linear is not None:
            base, scale = linear if self.quantiles is None else (x[..., None] for x in linear)
            outputs = base + scale * outputs
        if self.target_normalization is not None:
            outputs = self.target_normalization.invert(outputs, axis=self._target_axis)
        if (mask := resolve_mask(found, None)) is not None:
            set_keras_mask(outputs, mask)
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
        train: Windows | np.ndarray | Sequence[np.ndarray],
        valid: Windows | np.ndarray | Sequence[np.ndarray] | None = None,
    ) -> None:
        """Computes the statistics of the training data, and fits the linear map, if any.

        Call it before `fit`. It requires `normalize=True`, with which the model clips the inputs of
        its backbone to 10 standard deviations from the mean (with `scale="window"`, targets to 10
        standard deviations of the window from its last value). Missing values (NaN) are ignored,
        and constant channels are only centered.

        Args:
            train: `Windows` of the training part, or its rows: an array (..., channels), or a
                sequence of such arrays, one for each series, which may be memory-mapped.
            valid: The validation part, used to select the linear map, or `None`. The statistics and
                the map are fitted on the training part.

        Raises:
            ValueError: If the model has normalize=False, a channel has no values, or there is no
                window for the linear map.
        """
        rows = train.rows() if isinstance(train, Windows) else arrays_of(train)
        super().adapt(rows)
        if self.target_normalization is not None:
            self.target_normalization.adapt([array[..., : self.targets] for array in rows])
        if self.linear is not None:
            self._fit_linear(train, valid)

    def _fit_linear(self, train, valid):
        (x, y), (x_valid, y_valid) = (self._linear_windows(part) for part in (train, valid))
        if not len(x):
            raise ValueError(
                f"The linear map needs windows of `linear_window` + `horizon` = "
                f"{self.linear.window} + {self.horizon} rows. Received: none in the training data"
            )
        kernel, least_scale, residuals = fit_map(x, y, x_valid, y_valid)
        self.linear.kernel.assign(kernel.reshape(self.linear.kernel.shape))
        self.linear.least_scale.assign(least_scale)
        if self.quantiles is not None:
            self.offsets.assign(_starting_offsets(residuals, self.quantiles))

    def _linear_windows(self, part):
        """Returns standardized inputs and targets of evenly spaced windows of a part."""
        window, horizon, channels = self.linear.window, self.horizon, self.linear.kernel.shape[1]
        if part is None:
            return np.zeros((0, window, channels)), np.zeros((0, horizon, self.targets))
        if not isinstance(part, Windows):
            part = Windows.of_arrays(
                arrays_of(part), window, horizon, self.targets, self.future_channels
            )
        if part.window < window or part.horizon != horizon:
            raise ValueError(
                f"The model needs windows of at least {window} rows, and a horizon of {horizon}. "
                f"Received: window={part.window}, horizon={part.horizon}"
            )
        count = min(len(part), max(_MOST_VALUES // (window * channels), 1))
        x, y = part.read(np.linspace(0, len(part) - 1, count).astype(int))
        x = ops.convert_to_numpy(self._linear_inputs(x[:, -window:]))
        return x, ops.convert_to_numpy(self.target_normalization.standardize(y))

    def weigh_net(self, x: Any, y: Any = None, batch_size: int | None = None) -> float:
        """Keeps as much of the network as helps on held-out data.

        The network's contribution to the middle quantile is multiplied by 0, 1/4, 1/2, 3/4 or 1:
        the factor with the lowest mean absolute error, or 0 unless the linear map alone is worse by
        more than one standard error and there are at least four horizons of windows. The factor is
        folded into the weights. Call it after `fit` and before `calibrate`.

        Args:
            x: Inputs, or a `PyDataset`, as in `calibrate`: windows in chronological order.
            y: Targets. Defaults to `None`, for a `PyDataset`.
            batch_size: As in `keras.Model.predict`.

        Returns:
            The factor.

        Raises:
            ValueError: If the model has no linear map, or inputs or targets do not match it.
        """
        if self.linear is None:
            raise ValueError("`weigh_net` requires a model with a linear map.")
        with_net, targets, scale = self._predict_known(x, y, batch_size)
        weights = [ops.convert_to_numpy(w) for w in (self.head.kernel, self.head.bias)]
        is_net = np.arange(weights[1].size) % len(self.quantiles or (0,)) == (self.middle or 0)

        def keep(share):
            for weight, value in zip((self.head.kernel, self.head.bias), weights, strict=True):
                weight.assign(np.where(is_net, share * value, value))

        keep(0.0)
        without, *_ = self._predict_known(x, y, batch_size)

        if self.middle is not None:
            without, with_net = without[..., self.middle], with_net[..., self.middle]
        counts = ~np.isnan(targets).all(axis=(-2, -1))

        def errors(share):  # per window
            found = np.abs(targets - without - share * (with_net - without)) / scale
            return np.nanmean(found[counts], axis=(-2, -1))

        share = min(_SHARES, key=lambda share: errors(share).mean())
        is_enough = counts.sum() >= _FEWEST_HORIZONS * self.horizon
        if not (is_enough and is_gain(errors(0.0) - errors(share), self.horizon)):
            share = 0.0
        keep(share)
        return share

    def calibrate(self, x: Any, y: Any = None, batch_size: int | None = None) -> None:
        """Calibrates the quantiles on held-out data.

        Quantiles learned from training data may be too narrow or too wide for later data. This is
        conformalized quantile regression (Romano et al. 2019): the middle quantile stays, and each
        gap to the next one is scaled so that the right share of the targets lies beyond it. The
        factors, one for each target and quantile, are saved with the model.

        Call it after `fit` with validation data, the most recent if the series changes over time.

        Args:
            x: Inputs, or a `PyDataset` of batches (x, y) or (x, y, weight). Rows with weight 0
                and missing targets (NaN) are ignored.
            y: Targets. Defaults to `None`, for a `PyDataset`.
            batch_size: As in `keras.Model.predict`.

        Raises:
            ValueError: If the model has fewer than two quantiles, or inputs or targets do not match
                it.
        """
        if self.quantiles is None or not self.has_band:
            raise ValueError(
                f"`calibrate` needs a model with several quantiles. Received: {self.quantiles}"
            )
        self.check_adapted()
        self._check_data(x, y)
        self.gap_scale.assign(np.ones(self.gap_scale.shape))
        outputs, targets, _ = self._predict_known(x, y, batch_size)
        self.gap_scale.assign(conformal_scale(outputs, targets, self.quantiles))

    def _predict_known(self, x, y, batch_size):
        """Returns outputs, targets (NaN if they do not count), and the windows' scale."""
        batches = x if isinstance(x, keras.utils.PyDataset) else [(x, y)]
        found = []
        for i in range(len(batches)):
            inputs, targets, weight = keras.utils.unpack_x_y_sample_weight(batches[i])
            outputs = self.predict(inputs, batch_size=batch_size, verbose=0)
            shape = outputs.shape if self.quantiles is None else outputs.shape[:-1]
            targets = np.array(ops.convert_to_numpy(targets), "float64").reshape(shape)
            if weight is not None:
                counts = expand_to_rank(ops.convert_to_tensor(weight), targets.ndim)
                targets[np.broadcast_to(ops.convert_to_numpy(counts) == 0, targets.shape)] = np.nan
            scale = ops.convert_to_numpy(self._scale(inputs))
            found.append((outputs, targets, np.broadcast_to(scale, targets.shape)))
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

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
                "A model with quantiles must use forecasting.PinballLoss, the default. "
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
        weight = ops.ones_like(values)
        for factor in (sample_weight, resolve_mask(y_pred, None)):
            if factor is not None:
                factor = ops.cast(factor, weight.dtype)
                weight = weight * expand_to_rank(factor, len(values.shape))
        return ops.reshape(weight, ops.shape(values))

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
        # A copy drops `_keras_mask`, which is in the weights already and must not apply twice.
        y_pred = ops.copy(y_pred) if self.quantiles else y_pred[..., None]
        return y[..., None], y_pred, weight

    def _check_targets(self, y):
        if y.ndim != 3 + self.per_step or y.shape[-2:] != (self.horizon, self.targets):
            leading = "batch, time" if self.per_step else "batch"
            raise ValueError(
                f"`y` must have shape ({leading}, {self.horizon}, {self.targets}), as the model's "
                f"horizon is {self.horizon}. Received: shape {y.shape}"
            )
        if y.size and np.all(np.isnan(y)):
            raise ValueError("All targets are missing: `y` has only NaN.")

    def _check_weights(self, weights):
        """Accepts all weights, because a gap in a series may cover a whole forecast."""

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

    def outputs_at_each_step(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        if self.linear is None:
            return super().outputs_at_each_step(x, cache)
        cache = self.initial_cache(ops.shape(x)[0]) if cache is None else cache
        inputs = self._linear_inputs(x)
        linear, steps = self.linear.prefill(inputs, cache["linear"])
        if self.scale == "window":
            hidden = self._hidden_at_each_step(inputs, cache["linear"])
            return self._outputs(hidden, linear), {"linear": steps}
        hidden, backbone = self.stream().prefill(self._features(x), cache["backbone"])
        return self._outputs(hidden, linear), {"linear": steps, "backbone": backbone}

    def _export_notes(self):
        axes = "[step][target][quantile]" if self.quantiles else "[step][target]"
        notes = [f"Outputs: y{axes} of shape {list(self._forecast_shape)}, in row-major order."]
        if self.quantiles:
            notes.append(f"Quantiles: {', '.join(map(str, self.quantiles))}.")
        if self.future_channels:
            notes.append(
                f"The last {self.future_channels} inputs are values from {self.horizon} steps "
                "ahead."
            )
        return notes

    def last_outputs(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Returns the outputs after the last step of a segment, and the cache after it."""
        if self.linear is None or self.scale == "data":
            y, cache = self.outputs_at_each_step(x, cache)
            return y[:, -1], cache
        cache = self.initial_cache(ops.shape(x)[0]) if cache is None else cache
        steps = self.linear.continued(self._linear_inputs(x), cache["linear"])
        steps = steps[:, -self.linear.window :]
        hidden = self.backbone(self._relative(steps))
        return self._outputs(hidden, self.linear.outputs(steps)), {"linear": steps}

    def _hidden_at_each_step(self, inputs, before):
        """Returns the backbone's outputs (batch, time, hidden) for the window of each step."""
        windows = self.linear.windows(inputs, before)
        batch, time = ops.shape(windows)[:2]
        hidden = self.backbone(self._relative(ops.reshape(windows, (-1, *windows.shape[2:]))))
        return ops.reshape(hidden, (batch, time, hidden.shape[-1]))

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

        Up to the model's horizon, the forecast is direct. Beyond it, the model forecasts block by
        block and reads each forecast as history with its exact streaming step, so the work for a
        block does not depend on the length of the history. A model with quantiles reads `samples`
        paths sampled from them, and the quantiles beyond the horizon are those of the paths.

        Args:
            history: Array (time, channels) or (batch, time, channels): the targets first, then
                other covariates, and last the `future_channels`, each at its own time. A model with
                `normalize` replaces NaN, see the class. A history shorter than the training windows
                is padded with zeros, which makes forecasts less accurate.
            steps: Positive integer, number of steps to forecast. Defaults to `None`, the model's
                horizon.
            future_covariates: Array (steps, future_channels) or (batch, steps, future_channels),
                the steps after the history, up to the end of the last block. Defaults to `None`.
            samples: Positive integer, number of paths beyond the horizon of a model with
                quantiles. Defaults to 100.
            seed: Integer seed of the paths. Defaults to `None`.

        Returns:
            Array (steps, targets) or (batch, steps, targets), with quantiles (..., quantiles).

        Raises:
            ValueError: If arguments have the wrong shape, a future covariate is NaN, or `steps`
                exceeds the horizon of a model with covariates that are not known in the future or
                with a backbone that cannot stream.
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
            "linear_window": None if self.linear is None else self.linear.window,
            "scale": self.scale,
        }


def _starting_offsets(residuals, quantiles):
    """Returns offsets (horizon, targets, quantiles) whose quantiles are those of residuals.

    Args:
        residuals: Array (windows, horizon, targets). Missing values are NaN.
        quantiles: Increasing floats between 0 and 1.
    """
    found = np.nan_to_num(np.moveaxis(np.nanquantile(residuals, quantiles, axis=0), 0, -1))
    middle = middle_quantile(quantiles)
    gaps = np.maximum(np.diff(found, axis=-1), _LEAST_GAP)
    offsets = np.log(np.expm1(gaps))  # inverts the softplus in `_increasing`
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
