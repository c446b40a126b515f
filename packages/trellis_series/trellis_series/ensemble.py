"""The fitted forecast of one series: experts, their weights, and a calibrated band."""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from trellis_series import bands, ridge, smoothing

_LARGEST = 1e30  # value, in units of the scale
RECENT = 1_000  # values, or five seasons, that the smoothing runs over
FEW = 3.0  # independent origins below which a band is also at least the naive forecast's


class State(NamedTuple):
    """What changes with each value of a series.

    `values` (..., lags) are the last values in units of the scale, the oldest first; `local`
    (..., 1) is their recent mean change over a season; `filters` are the states of the banks;
    `future` and `past` (lags, channels) are the last covariates, `None` in a stream.
    """

    values: Any
    local: Any
    filters: tuple[smoothing.State, ...]
    future: Any = None
    past: Any = None


class Filters(NamedTuple):
    """A bank of filters with a season, which reads values or their logarithms."""

    season: int
    is_log: bool
    bank: smoothing.Bank


@dataclasses.dataclass
class Ensemble:
    """Forecasts a series from its state. `fitting.Fitting` makes it.

    Attributes:
        horizon: Positive integer, number of steps to forecast.
        season, naive_season: Positive integers: the season that the experts read, and the one of
            the naive forecast.
        scale: Float, the mean change over a season. All that follows is in this unit.
        low: Float, the least forecast: 0 for series without negative values.
        limits: The least and the largest value of which logarithms are taken or returned.
        banks: `Filters`, one or more.
        is_log: Boolean, whether the ridge regressions read logarithms.
        unit: Float, the mean step of what the ridge regressions read.
        lags: What the ridge regressions read.
        kernels: Their weights, arrays (features, horizon).
        slopes: Array (covariates,), what covariates known in the future add, in `unit`.
        weights: Array (experts,).
        errors, origin_local: Arrays (origins, horizon) and (origins,): what the forecasts missed
            at past origins, and the state's `local` there.
        naive_errors: The same of the naive forecast.
        independent: Float, the number of origins that share no targets.
        naive_change: Float, the root mean square change over `naive_season`.
        state: `State` after the last value.
        net_share: Float, the weight of a network, see `network`.
        reach: Integer, number of last values that the network reads.
    """

    horizon: int
    season: int
    naive_season: int
    scale: float
    low: float
    limits: np.ndarray
    banks: list[Filters]
    is_log: bool
    unit: float
    lags: ridge.Lags
    kernels: list[np.ndarray]
    slopes: np.ndarray
    weights: np.ndarray
    errors: np.ndarray
    origin_local: np.ndarray
    naive_errors: np.ndarray
    independent: float
    naive_change: float
    state: State
    net_share: float = 0.0
    reach: int = 0

    def begin(self, y: np.ndarray, future: np.ndarray, past: np.ndarray) -> State:
        """Returns the state after a history.

        Args:
            y: Array (time,) in the units of the data. Missing values are NaN.
            future, past: Covariates (time, channels).

        Raises:
            ValueError: If the history is shorter than what the ridge regression reads.
        """
        if len(y) < self.length:
            raise ValueError(f"A series needs {self.length} values. Received: {len(y)}")
        filled, known = fill(y, self.season) / self.scale, ~np.isnan(y)
        longest = max(season for season, *_ in self.banks)
        values = smoothed(filled, known, longest, first_origin(len(y), self.season, self.horizon))
        states = [
            smoothing.rolling(bank, self._log(values) if is_log else values, season, 1, ())[1]
            for season, is_log, bank in self.banks
        ]
        local = bands.changes(filled, known, self.season, self.horizon)[-1:]
        values, *covariates = (last_rows(part, self.length) for part in (filled, future, past))
        return State(values, local, tuple(states), *covariates)

    @property
    def length(self) -> int:
        """The number of last values that a state holds."""
        seasons = (self.season + 1, self.naive_season, *(season for season, *_ in self.banks))
        return max(self.reach, self.lags.length, *seasons)

    def observe(
        self, state: State, y: Any, future: Any = None, past: Any = None, xp: Any = np
    ) -> State:
        """Returns the state after one more value.

        Args:
            state: `State`.
            y: Array (..., 1) in the units of the data, NaN where it is missing.
            future, past: Covariates (channels,) of this step. Default to `None`, in a stream.
            xp: `numpy`, or `keras.ops` for tensors.
        """
        y = y / self.scale
        known = xp.less(xp.abs(y), _LARGEST)  # neither NaN nor infinite
        seen = xp.where(known, y, np.nan)
        before = state.values[..., -self.season :][..., :1]
        rate = bands.rate_of(self.season, self.horizon)
        moved = state.local + rate * (xp.abs(y - before) - state.local)
        values = xp.concatenate([state.values[..., 1:], xp.where(known, y, before)], axis=-1)
        filters = tuple(
            smoothing.step(bank, old, self._log(seen, xp) if is_log else seen, xp)
            for (_, is_log, bank), old in zip(self.banks, state.filters, strict=True)
        )
        if future is not None:
            future = np.concatenate([state.future[1:], future[None]])
            past = np.concatenate([state.past[1:], past[None]])
        local = xp.where(known, moved, state.local)
        return State(values, local, filters, future, past)

    def outlook(self, state: State, ahead: Any = None, net: Any = None, xp: Any = np) -> Any:
        """Returns the forecast (..., horizon) after a state, in units of the scale.

        Args:
            state: `State`.
            ahead: Array (horizon, covariates) known in the future. Defaults to none.
            net: Forecast (..., horizon) of the network. Defaults to none.
            xp: `numpy`, or `keras.ops` for tensors.
        """
        experts = []
        for (_, is_log, bank), old in zip(self.banks, state.filters, strict=True):
            y = smoothing.forecast(bank, old, self.horizon, xp)
            experts.append(self._exp(y, xp) if is_log else y)
        z = state.values[..., -self.lags.length :]
        z = (self._log(z, xp) if self.is_log else z) / self.unit
        if len(self.slopes):
            z = z - state.future[-self.lags.length :] @ self.slopes
        x = z - xp.mean(z[..., -self.season :], axis=-1, keepdims=True)
        if state.past is not None:
            x = np.concatenate([x, changes_of(state.past[-1 - self.season :], self.season)[-1]])
        steps = self.lags.length - self.season + np.arange(self.horizon) % self.season
        base = xp.take(z, steps, axis=-1)
        if len(self.slopes):
            base = base + ahead @ self.slopes
        for kernel in self.kernels:
            y = (base + xp.matmul(x, kernel)) * self.unit
            experts.append(self._exp(y, xp) if self.is_log else y)
        mean = sum(weight * expert for weight, expert in zip(self.weights, experts, strict=True))
        if net is not None:
            mean = (1 - self.net_share) * mean + self.net_share * net
        return xp.maximum(mean, self.low)

    def _log(self, y, xp=np):
        return xp.log(xp.where(xp.isnan(y), np.nan, xp.maximum(y, self.limits[0])))

    def _exp(self, y, xp):
        return xp.exp(xp.minimum(y, math.log(self.limits[1])))

    def factors(self, levels: Sequence[float], naive: bool = False) -> np.ndarray:
        """Returns the factors of a band, (powers, levels, horizon), see `bands`."""
        errors = self.naive_errors if naive else self.errors
        if not len(errors):
            return np.zeros((len(bands.POWERS), len(levels), self.horizon))
        return bands.calibrate(errors, self.origin_local, self.independent, levels)

    def least_widths(self, levels: Sequence[float]) -> np.ndarray:
        """Returns the least half widths (levels, horizon): 0 unless there are few origins.

        Then they are those of the naive forecast if its errors were normal and independent.
        """
        if not self.has_few_origins:
            return np.zeros((len(levels), self.horizon))
        cycles = -(-np.arange(1, self.horizon + 1) // self.naive_season)
        normal = [NormalDist().inv_cdf(0.5 + p / 200) for p in levels]
        return np.outer(normal, self.naive_change * np.sqrt(cycles))

    @property
    def has_few_origins(self) -> bool:
        """Whether the past has too few origins to know how wide a band must be."""
        return self.independent < FEW

    def naive(self, state: State) -> np.ndarray:
        """Returns the seasonal naive forecast (horizon,) after a state, in units of the scale."""
        steps = np.arange(self.horizon) % self.naive_season
        return state.values[len(state.values) - self.naive_season + steps]


def widths(factors: Any, least: Any, local: Any, xp: Any = np) -> Any:
    """Returns half widths of a band, (..., levels, horizon), from `Ensemble.factors`.

    Args:
        factors: Array (powers, levels, horizon).
        least: Array (levels, horizon).
        local: Array (..., 1), the state's.
        xp: `numpy`, or `keras.ops` for tensors.
    """
    v = xp.maximum(local, bands.LEAST_LOCAL)[..., None]
    found = sum(v**power * f for f, power in zip(factors, bands.POWERS, strict=True))
    return xp.maximum(found, least)


def first_origin(length: int, season: int, horizon: int) -> int:
    """Returns the index of the first origin, or `length` if the series is too short for one."""
    first = max(length // 3, min(season + 4, length - horizon - 1), 2)
    return first if length - horizon > first else length


def smoothed(y: np.ndarray, known: np.ndarray, season: int, origin: int) -> np.ndarray:
    """Returns the values that the smoothing runs over, with missing ones after the first season.

    Args:
        y: Array (time,), filled.
        known: Boolean array (time,).
        season: Positive integer, the longest season.
        origin: The first origin.
    """
    cut = max(0, min(len(y) - max(RECENT, 5 * season), origin - 2 * season))
    values = np.where(known, y, np.nan)[cut:]
    values[:season] = y[cut : cut + season]
    return values


def last_rows(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the last rows, after the first one as often as they are too few."""
    missing = max(count - len(values), 0)
    return np.concatenate([values[:1]] * missing + [values[-count:]])


def changes_of(past: np.ndarray, season: int) -> np.ndarray:
    """Returns covariates and their changes over a season, (time, 2 channels)."""
    changes = np.zeros_like(past)
    changes[season:] = past[season:] - past[:-season]
    return np.concatenate([past, changes], axis=1)


def fill(y: np.ndarray, season: int) -> np.ndarray:
    """Returns a series whose missing values are those of a season before, or the first known."""
    y = y.copy()
    first = np.flatnonzero(~np.isnan(y))[0]
    y[:first] = y[first]
    for t in np.flatnonzero(np.isnan(y)):
        y[t] = y[t - season] if t >= season else y[t - 1]
    return y
