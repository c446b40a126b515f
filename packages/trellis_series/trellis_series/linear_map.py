"""The linear map of a `Forecaster`: its fit in closed form, and the inputs that it reads."""

import numpy as np
from keras import ops

from trellis_keras.types import Tensor
from trellis_series import ridge

_MOST_FEATURES = 1_000  # above which fewer steps of other channels are read
_HELD_OUT = 0.2  # share of the training windows that choose the penalty
_QUIET = 0.05  # quantile of the windows' scales that serves as the smallest scale


def fill_missing(x: Tensor) -> Tensor:
    """Returns steps (batch, time, channels) with missing values filled.

    A missing value is replaced by the last known one, or before that by the first known one, and
    in a channel without any by 0.
    """
    first = ops.flip(_last_known(ops.flip(x, axis=1)), axis=1)
    known = _last_known(x)
    known = ops.where(ops.isnan(known), first, known)
    return ops.where(ops.isnan(known), ops.zeros_like(known), known)


def _last_known(x):
    steps = ops.arange(ops.shape(x)[1])
    doublings = 20 if x.shape[1] is None else (x.shape[1] - 1).bit_length()
    for n in range(doublings):  # looks back 1, 3, 7, ... steps
        earlier = ops.take(x, ops.maximum(steps - 2**n, 0), axis=1)
        x = ops.where(ops.isnan(x), earlier, x)
    return x


def fit_map(
    x: np.ndarray, y: np.ndarray, count: int, target: int, season: int
) -> tuple[np.ndarray, float, np.ndarray]:
    """Fits the map of one target by a ridge regression that shrinks to the seasonal naive forecast.

    The penalty is the one with the lowest error on the last fifth of the training windows and the
    validation windows, after a fit on the others.

    Args:
        x: Array (windows, window, channels) in chronological order, the targets first. Covariates
            are standardized, missing values filled.
        y: Array (windows, horizon, targets). Missing values are NaN.
        count: Integer, the number of training windows; validation windows follow.
        target: Integer, the index of the target.
        season: Integer, of the naive forecasts.

    Returns:
        The kernel (window, channels, horizon), the least scale, and the residuals of the
        targets in units of the scale of their windows, (windows, horizon).
    """
    (window, channels), (horizon, targets) = x.shape[1:], y.shape[1:]
    scale = np.abs(np.diff(x[..., target], axis=1)).mean(axis=1)
    least = float(np.quantile(scale[scale > 0], _QUIET)) if scale.any() else 1.0
    unit = np.maximum(scale, least)[:, None]
    x, y = x / unit[..., None], y[..., target] / unit
    naive = window - season + np.arange(horizon) % season
    # Each row of `reads` is a feature: a step of a channel, of targets less the mean of a season.
    reach = np.full(channels, min(window, max(horizon, _MOST_FEATURES // channels)))
    reach[target] = window
    is_read = np.arange(window)[:, None] >= window - reach
    reads = np.eye(window * channels)[is_read.ravel()].reshape(-1, window, channels)
    reads[:, -season:, :targets] -= reads[..., :targets].sum(axis=1, keepdims=True) / season
    reads = reads.reshape(len(reads), -1)
    f, left = x.reshape(len(x), -1) @ reads.T, y - x[:, naive, target]
    known = ~np.isnan(left).any(axis=1)

    def solve(first):
        rows = known & (np.arange(len(x)) < first)
        return ridge.kernels(f[rows].T @ f[rows], f[rows].T @ left[rows])

    fitted = count - int(_HELD_OUT * count)
    held = left[fitted:] - f[fitted:] @ solve(fitted)
    best = np.nanmean(np.abs(held), axis=(1, 2)).argmin() if held.size else -1
    kernel = (reads.T @ solve(count)[best]).reshape(window, channels, horizon)
    kernel[naive, target, np.arange(horizon)] += 1
    return kernel, least, held[best] if held.size else left
