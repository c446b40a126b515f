"""Prediction bands from the errors that a forecast made at past origins.

The half width of a band of level p at step k is

    w_k = q(p) s_k sqrt(v)

where v is how much the series changes now, s_k the mean of |e_k| / sqrt(v) over the past origins,
and q(p) a quantile of the errors in these units, pooled over the steps. The n-th past origin counts
n times in both, because forecasts improve with the rows that they are fitted to. With few
independent origins the level of the quantile is raised, up to that of the largest error; with fewer
than three, the quantile is at least that of Student's t. Errors and widths of positive series whose
logarithms are forecast better are those of the logarithms, so their bands are wider above.
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

_LEAST_CHANGE = 0.3  # of the mean change
_CORRECTION = 0.4  # of levels, divided by one more than the independent origins
FEW = 3.0  # independent origins, below which no quantile of the errors is wide enough


def unit(local: Any, xp: Any = np) -> Any:
    """Returns sqrt(v), in which errors are measured, of a mean change v."""
    return xp.sqrt(xp.maximum(local, _LEAST_CHANGE))


def calibrate(
    errors: np.ndarray, local: np.ndarray, independent: float, levels: Sequence[float]
) -> np.ndarray:
    """Returns the half widths at v = 1, (levels, horizon).

    Args:
        errors: Array (origins, horizon), forecasts minus values, NaN where these are missing.
        local: Array (origins,), v at each origin.
        independent: Float, the number of origins that share no targets.
        levels: Percentages.
    """
    u = np.abs(errors) / unit(local)[:, None]
    known = ~np.isnan(u)
    weights = known * np.arange(1, len(u) + 1)[:, None]
    mean = np.nansum(weights * u, axis=0) / np.maximum(weights.sum(axis=0), 1) + 1e-9
    mean = np.where(known.any(axis=0), mean, mean.max())
    shape = np.convolve(np.pad(mean, 1, mode="edge"), [0.25, 0.5, 0.25], "valid")
    u, weights = (u / shape)[known], weights[known]
    shares = np.array(levels) / 100 * (1 + _CORRECTION / (independent + 1))
    quantiles = weighted_quantiles(u, weights, shares)
    if independent < FEW:
        deviation = np.sqrt(np.average(u**2, weights=weights))
        quantiles = np.maximum(quantiles, student(levels, independent) * deviation)
    return np.outer(quantiles, shape)


def weighted_quantiles(u: np.ndarray, weights: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Returns quantiles of u (values,), with equal weights those of `numpy.quantile`."""
    order = np.argsort(u)
    below = weights[order].cumsum() - weights[order] / 2
    below = below - below[0]
    return np.interp(shares, below / max(below[-1], 1e-9), u[order])


def student(levels: Sequence[float], freedom: float) -> np.ndarray:
    """Returns quantiles of |t|, by the first terms of their expansion around the normal ones."""
    z = np.array([NormalDist().inv_cdf(0.5 + level / 200) for level in levels])
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def moving_change(z: np.ndarray, known: np.ndarray, season: int, horizon: int) -> np.ndarray:
    """Returns v after each step, (time,): a moving mean of the changes over one season.

    `z` (time,) is in units of the mean change; `known` (time,) says which values were measured.
    """
    seen = np.where(known[season:], np.abs(z[season:] - z[:-season]), np.nan)
    mean = (
        pd.Series([1.0, *seen])
        .ewm(alpha=rate_of(season, horizon), adjust=False, ignore_na=True)
        .mean()
    )
    return np.concatenate([np.ones(len(z)), mean])[-len(z) :]


def rate_of(season: int, horizon: int) -> float:
    """Returns the rate of the moving mean: it averages over about three seasons or horizons."""
    return 2 / (3 * max(season, horizon, 10) + 1)
