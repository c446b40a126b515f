"""Direct forecasts by ridge regression on the last values of a series.

    y_{t+k} = y_{t+k-m'} + (x_t - mean of the last m values) W_k + c_t C_k        k = 1..horizon

x_t are the last `lags` values up to y_t, m is the season, m' the fewest whole seasons with which
the value is known at t, and c_t are covariates. The weights W shrink towards 0, the seasonal naive
forecast. Sums of squares and products are all that a fit needs, so series of a panel are pooled by
adding theirs.
"""

from typing import NamedTuple

import numpy as np

from trellis_series.seasons import naive

PENALTIES = np.logspace(-1, 5, 7)
_ROWS = 10_000  # most windows between one refit and the next


class Moments(NamedTuple):
    """Sums X'X and X'Y over windows, (folds, features, features) and (folds, features, horizon)."""

    xx: np.ndarray
    xy: np.ndarray

    def plus(self, other: "Moments") -> "Moments":
        """Returns the sums over the windows of both."""
        return Moments(self.xx + other.xx, self.xy + other.xy)


class Lags(NamedTuple):
    """What a ridge regression reads: the number of steps of a season, and of last values."""

    season: int
    length: int

    def features(self, z: np.ndarray, extra: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Returns the inputs (origins, features) at origins, numbers of known values.

        Args:
            z: Array (time,), the series.
            extra: Array (time, covariates), those known at each step.
            at: Integer array (origins,), each at least `length`.
        """
        x = np.lib.stride_tricks.sliding_window_view(z, self.length)[at - self.length]
        x = x - x[:, -self.season :].mean(axis=1, keepdims=True)
        return np.concatenate([x, extra[at - 1]], axis=1)


def moments(
    z: np.ndarray,
    known: np.ndarray,
    extra: np.ndarray,
    lags: Lags,
    horizon: int,
    bounds: np.ndarray,
) -> Moments:
    """Returns the sums over the windows whose targets end before each bound.

    Args:
        z: Array (time,), a series without missing values.
        known: Boolean array (time,), whether a value was measured. Others are no targets.
        extra: Array (time, covariates).
        lags, horizon: As in the equation.
        bounds: Increasing integers (folds,), numbers of values.
    """
    size = lags.length + extra.shape[1]
    xx, xy = np.zeros((len(bounds), size, size)), np.zeros((len(bounds), size, horizon))
    done = lags.length
    for fold, bound in enumerate(bounds):
        at = np.arange(max(done, bound - horizon + 1 - _ROWS), bound - horizon + 1)
        if len(at):
            x, ahead = lags.features(z, extra, at), at[:, None] + np.arange(horizon)
            targets = np.where(known[ahead], z[ahead] - naive(z, lags.season, horizon, at), 0.0)
            xx[fold], xy[fold] = x.T @ x, x.T @ targets
        done = max(done, bound - horizon + 1)
    return Moments(xx.cumsum(axis=0), xy.cumsum(axis=0))


def kernels(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """Returns the weights for each penalty, (penalties, features, horizon)."""
    values, vectors = np.linalg.eigh(xx)
    turned = vectors.T @ xy
    return np.stack([vectors @ (turned / (values + p)[:, None]) for p in PENALTIES])
