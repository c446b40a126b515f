"""Prediction bands from the errors that a forecast made at past origins.

The half width of a band of level p at step k is

    w_k = q(p) s_k sqrt(v)

where v is how much the series changes now, s_k the mean of |e_k| / sqrt(v) over the past origins,
and q(p) a quantile of the errors in these units, pooled over the steps. The quantile is that of a
conformal band for the number of independent origins. Errors and widths of positive series whose
logarithms are forecast better are those of the logarithms, so their bands are wider above.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

_LEAST_CHANGE = 0.3  # of the mean change
_CORRECTION = 0.4  # of levels, divided by one more than the independent origins


class Band(NamedTuple):
    """The half widths (levels, horizon) at a mean change of 1, and the least ones."""

    factors: np.ndarray
    least: np.ndarray

    def half(self, local: Any, xp: Any = np) -> Any:
        """Returns the half widths (..., levels, horizon) at a mean change v, (..., 1)."""
        unit = xp.sqrt(xp.maximum(local, _LEAST_CHANGE))
        return xp.maximum(unit[..., None] * self.factors, self.least)


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
    u = np.abs(errors) / np.sqrt(np.maximum(local, _LEAST_CHANGE))[:, None]
    known = ~np.isnan(u)
    mean = np.where(known, u, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1) + 1e-9
    mean = np.where(known.any(axis=0), mean, mean.max())
    shape = np.convolve(np.pad(mean, 1, mode="edge"), [0.25, 0.5, 0.25], "valid")
    return np.outer(np.quantile((u / shape)[known], shares(levels, independent)), shape)


def shares(levels: Sequence[float], independent: float) -> np.ndarray:
    """Returns the shares of past errors that bands must hold."""
    return np.minimum(np.array(levels) / 100 * (1 + _CORRECTION / (independent + 1)), 1.0)


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
