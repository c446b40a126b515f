"""Prediction bands from the errors that a forecast made at past origins.

The half width of a band of level p at step k is

    w_k = sum_r c_r  q_r(p) s_{r,k} v^r        r in 0, 1/2, 1

where v is how much the series changes now, s_{r,k} the mean of |e_k| / v^r over the past origins,
and q_r(p) a quantile of the errors in these units, pooled over the steps. The quantile is that of a
conformal band for the number of independent origins. The weights c_r fall with the interval score
of each band over the past.
"""

from collections.abc import Sequence

import numpy as np

POWERS = np.array([0.0, 0.5, 1.0])
LEAST_LOCAL = 0.3  # of the mean change
_SHARPNESS = 4.0
_FEW = 3.0  # independent origins below which a band is also at least the naive forecast's


def calibrate(
    errors: np.ndarray, local: np.ndarray, independent: float, levels: Sequence[float]
) -> np.ndarray:
    """Returns the factors of the powers of v, (powers, levels, horizon).

    Args:
        errors: Array (origins, horizon), forecasts minus values, NaN where these are missing.
        local: Array (origins,), v at each origin.
        independent: Float, the number of origins that share no targets.
        levels: Percentages.
    """
    tried = [_band(np.abs(errors), local**power, independent, levels) for power in POWERS]
    evidence = np.log([score for score, _ in tried]) * _SHARPNESS * independent
    weights = np.exp(evidence.min() - evidence)
    return (weights / weights.sum())[:, None, None] * np.array([factors for _, factors in tried])


def _band(errors, unit, independent, levels):
    """Returns the interval score over the past, and half widths (levels, horizon) in the unit."""
    u = errors / unit[:, None]
    known = ~np.isnan(u)
    mean = np.where(known, u, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1) + 1e-9
    mean = np.where(known.any(axis=0), mean, mean.max())
    shape = np.convolve(np.pad(mean, 1, mode="edge"), [0.25, 0.5, 0.25], "valid")
    score, factors = 1e-9, []
    for p in levels:
        q = np.quantile((u / shape)[known], min(p / 100 * (1 + 0.8 / (independent + 1)), 1.0))
        factors.append(q * shape)
        width = (q * shape * unit[:, None])[known]
        score += (width + np.maximum(errors[known] - width, 0) / (1 - p / 100)).mean()
    return score, np.array(factors)


def changes(y: np.ndarray, known: np.ndarray, season: int, horizon: int) -> np.ndarray:
    """Returns v after each step, (time,): a moving mean of the changes over one season.

    Args:
        y: Array (time,), in units of the mean change.
        known: Boolean array (time,).
        season, horizon: Positive integers.
    """
    local, rate = np.ones(len(y)), rate_of(season, horizon)
    for t in range(season, len(y)):
        change = np.abs(y[t] - y[t - season]) if known[t] else local[t - 1]
        local[t] = local[t - 1] + rate * (change - local[t - 1])
    return local


def rate_of(season: int, horizon: int) -> float:
    """Returns the rate of the moving mean: it averages over about three seasons or horizons."""
    return 2 / (3 * max(season, horizon, 10) + 1)
