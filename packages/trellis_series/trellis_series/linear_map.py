"""The linear map of a `Forecaster`: a layer, and its fit in closed form."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_streams import StreamingMixin
from trellis_keras.types import Cache, Shape, Tensor
from trellis_series import ridge

_MOST_FEATURES = 1_000  # above which fewer steps of other channels are read
_HELD_OUT = 0.2  # share of the training windows that choose the penalty
_QUIET = 0.05  # quantile of the windows' scales that serves as the smallest scale


@keras.saving.register_keras_serializable("trellis_keras")
class LinearMap(StreamingMixin, keras.layers.Layer):
    """Applies a linear map to the last `window` steps, and measures how much they change.

        base_t = sum_j z_{t-j} K[window - 1 - j]
        scale_t = max(mean_j |z_{t-j} - z_{t-j-1}|, s)

    for j = 0..window - 1, with the scale of each target from its own channel. A missing value (NaN)
    is replaced by the last known one; at the start of a window, by the first known one. There are
    zeros before the first step. `fit_map` finds the weights K and s.

    Args:
        window: Positive integer, at least 2, number of steps to read.
        horizon: Positive integer, number of steps to forecast.
        targets: Positive integer, number of targets, the first channels.

    Call arguments:
        inputs: Tensor (batch, time, channels).

    Returns:
        Tuple of `base` (batch, horizon, targets) and `scale` (batch, 1, targets).
    """

    def __init__(self, window, horizon, targets, **kwargs):
        super().__init__(**kwargs)
        self.window = window
        self.horizon = horizon
        self.targets = targets

    def build(self, input_shape: Shape) -> None:
        options = {"initializer": "zeros", "trainable": False, "autocast": False}
        shape = (self.window, input_shape[-1], self.horizon * self.targets)
        self.kernel = self.add_weight(name="kernel", shape=shape, **options)
        self.least_scale = self.add_weight(name="least_scale", shape=(self.targets,), **options)

    def call(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.outputs(self.last_steps(inputs))

    def last_steps(self, inputs: Tensor) -> Tensor:
        """Returns the last steps (batch, window, channels), with missing values filled."""
        before = self.initial_cache(ops.shape(inputs)[0])
        return ops.concatenate([before, fill_missing(inputs)], axis=1)[:, -self.window :]

    def compute_output_shape(self, input_shape: Shape) -> tuple[Shape, Shape]:
        return (input_shape[0], self.horizon, self.targets), (input_shape[0], 1, self.targets)

    # Streaming: the cache contains the last steps, with missing values filled.

    def initial_cache(self, batch_size: int) -> Cache:
        return ops.zeros((batch_size, self.window, self.kernel.shape[1]), self.compute_dtype)

    def step(self, x: Tensor, cache: Cache) -> tuple[tuple[Tensor, Tensor], Cache]:
        x = ops.where(ops.isnan(x), cache[:, -1], x)
        rows = ops.concatenate([cache[:, 1:], x[:, None]], axis=1)
        return self.outputs(rows), rows

    def outputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs after `window` rows."""
        base = ops.tensordot(rows, self.kernel, [[1, 2], [0, 1]])
        changes = ops.absolute(rows[:, 1:, : self.targets] - rows[:, :-1, : self.targets])
        base = ops.reshape(base, (-1, self.horizon, self.targets))
        return base, ops.maximum(ops.mean(changes, axis=1), self.least_scale)[:, None]

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "window": self.window,
            "horizon": self.horizon,
            "targets": self.targets,
        }


def _last_known(x):
    """Returns steps (batch, time, channels) with missing values replaced by the last known one."""
    steps = ops.arange(ops.shape(x)[1])
    doublings = 20 if x.shape[1] is None else (x.shape[1] - 1).bit_length()
    for n in range(doublings):  # looks back 1, 3, 7, ... steps
        earlier = ops.take(x, ops.maximum(steps - 2**n, 0), axis=1)
        x = ops.where(ops.isnan(x), earlier, x)
    return x


def fill_missing(x: Tensor) -> Tensor:
    """Returns steps (batch, time, channels) with missing values filled.

    A missing value is replaced by the last known one, or before that by the first known one, and
    in a channel without any by 0.
    """
    first = ops.flip(_last_known(ops.flip(x, axis=1)), axis=1)
    known = _last_known(x)
    known = ops.where(ops.isnan(known), first, known)
    return ops.where(ops.isnan(known), ops.zeros_like(known), known)


def fit_map(
    x: np.ndarray,
    y: np.ndarray,
    x_valid: np.ndarray,
    y_valid: np.ndarray,
    seasons: Sequence[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the weights of a `LinearMap`: a ridge regression that shrinks to the seasonal naive.

    The penalty is the one with the lowest error on the last training windows and the validation
    windows, after a fit on the other training windows.

    Args:
        x, x_valid: Arrays (windows, W, channels) in chronological order, the targets first.
            Covariates are standardized, missing values filled.
        y, y_valid: Arrays (windows, H, targets). Missing values are NaN.
        seasons: Integers (targets,), of the naive forecasts.

    Returns:
        The kernel (W, channels, H, targets), the least scales (targets,), and what is left of
        targets in units of the scale of their windows, (windows, H, targets).
    """
    inputs, targets = np.concatenate([x, x_valid]), np.concatenate([y, y_valid])
    found = [_fit_target(inputs, targets, len(x), j, m) for j, m in enumerate(seasons)]
    kernels, scales, residuals = zip(*found, strict=True)
    return np.stack(kernels, axis=-1), np.array(scales), np.stack(residuals, axis=-1)


def _fit_target(x, y, count, target, m):
    """Returns kernel, least scale and residuals of one target, from `count` training windows."""
    (window, channels), (horizon, targets) = x.shape[1:], y.shape[1:]
    scale = np.abs(np.diff(x[..., target], axis=1)).mean(axis=1)
    least = float(np.quantile(scale[scale > 0], _QUIET)) if scale.any() else 1.0
    unit = np.maximum(scale, least)[:, None]
    x, y = x / unit[..., None], y[..., target] / unit
    naive = window - m + np.arange(horizon) % m
    # Each row of `reads` is a feature: a step of a channel, of targets less the mean of a season.
    reach = min(window, max(horizon, _MOST_FEATURES // channels))
    reads = np.eye(window * channels).reshape(-1, window, channels)
    reads[:, -m:, :targets] -= 1 / m * reads[..., :targets].sum(axis=1, keepdims=True)
    is_read = np.arange(window)[:, None] >= window - np.where(
        np.arange(channels) == target, window, reach
    )
    reads = reads[is_read.ravel()].reshape(is_read.sum(), -1)
    f, left = x.reshape(len(x), -1) @ reads.T, y - x[:, naive, target]
    known = ~np.isnan(left).any(axis=1)
    fitted = np.arange(len(x)) < (count - int(_HELD_OUT * count) if count > 4 else count)

    def solve(rows):
        return ridge.kernels(f[rows].T @ f[rows], f[rows].T @ left[rows])

    held = left[~fitted] - f[~fitted] @ solve(known & fitted)
    best = np.nanmean(np.abs(held), axis=(1, 2)).argmin() if held.size else -1
    kernel = solve(known & (np.arange(len(x)) < count))[best]
    whole = (reads.T @ kernel).reshape(window, channels, horizon)
    whole[naive, target, np.arange(horizon)] += 1
    return whole, least, held[best] if held.size else left
