"""Seasons: those of the calendar, the one that a series shows, and its naive forecast."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

_NEAR = 1.03  # a season this close to the best one is as good, and the shortest such is taken
_CALENDAR = {"bh": [8, 40], "B": [5], "C": [5], "W": [52], "M": [12], "Q": [4], "Y": [], "A": []}
_LONGEST = 1_500


def calendar_seasons(freq: str | int) -> list[int]:
    """Returns the numbers of steps in a day, a week or a year, shortest first."""
    if isinstance(freq, int):
        return []
    offset = pd.tseries.frequencies.to_offset(freq)
    try:
        step = pd.Timedelta(offset).total_seconds()
    except ValueError:
        name = offset.freqstr.lstrip("0123456789").split("-")[0]
        kind = re.sub("^(C?B|L?WO)(?=[A-Z])", "", name)  # BMS, CBMS and WOM are months
        found = _CALENDAR.get(kind, _CALENDAR.get(kind[:1], []))
        return [s // offset.n for s in found if s % offset.n == 0 and s > offset.n]
    cycles = (86_400, 604_800) if step < 604_800 else (52 * 604_800,)
    return [int(s / step) for s in cycles if s % step == 0 and 1 < s / step <= _LONGEST]


def correlated_season(y: np.ndarray) -> list[int]:
    """Returns the lag at which the autocorrelation of a detrended series peaks, if it does."""
    longest = len(y) // 4
    x = y - pd.Series(y).rolling(25, center=True, min_periods=1).mean().to_numpy()
    spectrum = np.fft.rfft(x, 2 * len(x))
    r = np.fft.irfft(spectrum * spectrum.conj())[: longest + 2] / max(x @ x, 1e-12)
    lags = range(2, longest + 1)
    peaks = [k for k in lags if r[k] > 0.3 and r[k] > r[k - 1] and r[k] >= r[k + 1]]
    return [k for k in peaks if r[k] > 0.9 * max(r[peaks])][:1]


def naive(last: Any, season: int, horizon: int, xp: Any = np) -> Any:
    """Returns the seasonal naive forecasts (..., horizon): the values of the last season.

    `last` (..., values), at least a season, is an array, or a tensor with `keras.ops` as `xp`.
    """
    return xp.take(last, last.shape[-1] - season + np.arange(horizon) % season, axis=-1)


def mean_change(y: np.ndarray, season: int) -> float:
    """Returns the mean absolute change over one season, by which MASE divides errors."""
    changes = np.abs(y[season:] - y[:-season])
    return float(changes.mean()) if len(changes) else 0.0


def naive_season(y: np.ndarray, known: np.ndarray, candidates: Sequence[int], horizon: int) -> int:
    """Returns the season, 1 or a candidate, with the best naive forecasts of the later half of `y`.

    `y` (time,) is filled, and `known` says which of its values were measured: only these are
    forecast. Candidates that do not occur twice before the later half are left out.
    """
    half, measured = len(y) // 2, np.where(known, y, np.nan)
    ahead = np.arange(1, horizon + 1)
    errors = {}
    for season in [1, *candidates]:
        if season == 1 or season <= half:
            lags = -(-ahead // season) * season
            starts = [(k, max(half, k)) for k in np.unique(lags)]
            parts = [np.abs(measured[at:] - y[at - k : -k]) for k, at in starts]
            parts = [part[~np.isnan(part)] for part in parts]
            errors[season] = np.mean([part.mean() for part in parts if len(part)] or [0.0])
    most = _NEAR * min(errors.values()) + 1e-9 * np.abs(y).max()
    return min(season for season, error in errors.items() if error <= most)
