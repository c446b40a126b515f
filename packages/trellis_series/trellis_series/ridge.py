"""Direct forecasts by ridge regression on the last values of a series.

    y_{t+k} = y_{t+k-m'} + (x_t - mean of the last m values) W_k + c_t C_k        k = 1..horizon

x_t are the last `lags` values up to y_t, m is the season, m' the fewest whole seasons with which
the value is known at t, and c_t are covariates. The weights W shrink towards 0, the seasonal naive
forecast. Sums of squares and products are all that a fit needs, so series of a panel are pooled by
adding theirs.
"""

from typing import Any

import numpy as np

from trellis_series.seasons import naive

PENALTIES = np.logspace(-1, 5, 7)
_ROWS = 10_000  # most windows between one refit and the next


def centered(last: Any, season: int, xp: Any = np) -> Any:
    """Returns last values (..., lags), less the mean of a season."""
    return last - xp.mean(last[..., -season:], axis=-1, keepdims=True)


def before(z: np.ndarray, lags: int, at: np.ndarray) -> np.ndarray:
    """Returns the last values (origins, lags) of a series (time,) at origins, numbers of values."""
    return np.lib.stride_tricks.sliding_window_view(z, lags)[at - lags]


def moments(
    z: np.ndarray,
    known: np.ndarray,
    extra: np.ndarray,
    season: int,
    lags: int,
    horizon: int,
    bounds: np.ndarray,
) -> np.ndarray:
    """Returns the sums X'X and X'Y over the windows whose targets end before each bound.

    Args:
        z: Array (time,), a series without missing values.
        known: Boolean array (time,), whether a value was measured. Others are not targets.
        extra: Array (time, covariates), those known at each step.
        season, lags, horizon: As in the equation.
        bounds: Increasing integers (folds,), numbers of values.

    Returns:
        Array (folds, features, features + horizon).
    """
    size, done = lags + extra.shape[1], lags
    sums = np.zeros((len(bounds), size, size + horizon))
    for fold, bound in enumerate(bounds):
        at = np.arange(max(done, bound - horizon + 1 - _ROWS), bound - horizon + 1)
        if len(at):
            last, ahead = before(z, lags, at), at[:, None] + np.arange(horizon)
            x = np.hstack([centered(last, season), extra[at - 1]])
            targets = np.where(known[ahead], z[ahead] - naive(last, season, horizon), 0.0)
            sums[fold] = np.hstack([x.T @ x, x.T @ targets])
        done = max(done, bound - horizon + 1)
    return sums.cumsum(axis=0)


def kernels(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """Returns the weights for each penalty, (penalties, features, horizon)."""
    values, vectors = np.linalg.eigh(xx)
    turned = vectors.T @ xy
    return np.stack([vectors @ (turned / (values + p)[:, None]) for p in PENALTIES])
