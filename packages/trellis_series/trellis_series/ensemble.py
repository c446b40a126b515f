"""The fitted forecast of one series: experts, their weights, and a calibrated band."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trellis_series import bands, ridge, seasons, smoothing

_LARGEST = 1e30  # value, in units of the scale
_RECENT = 1_000  # values, or five seasons, that the smoothing runs over
_WALK = 3.0  # degrees of freedom of a band without a past origin


class Transform(NamedTuple):
    """What an expert reads: values, or their logarithms in units of `scale`.

    `scale` is the mean change of the logarithms over a season, or 1. `least` and `largest` bound
    the values of which logarithms are taken or returned.
    """

    is_log: bool
    scale: float
    least: float
    largest: float

    def apply(self, y: Any, xp: Any = np) -> Any:
        """Returns values, perhaps NaN, as an expert reads them."""
        if not self.is_log:
            return y
        return xp.log(xp.where(xp.isnan(y), np.nan, xp.maximum(y, self.least))) / self.scale

    def invert(self, z: Any, xp: Any = np) -> Any:
        """Returns the values of what an expert has forecast."""
        if not self.is_log:
            return z
        return xp.exp(xp.minimum(z * self.scale, math.log(self.largest)))


class Filters(NamedTuple):
    """A bank of filters, its season, and what it reads."""

    transform: Transform
    season: int
    bank: smoothing.Bank


class State(NamedTuple):
    """What changes with each value of a series.

    `values` (..., lags) are the last values in units of the scale, the oldest first; `local`
    (..., 1) is their recent mean change over a season; `filters` are the states of the banks;
    `future` and `past` (lags, channels) are the last covariates, `None` in a stream.
    """

    values: Any
    local: Any
    filters: tuple[smoothing.FilterState, ...]
    future: Any = None
    past: Any = None


class Ensemble(NamedTuple):
    """Forecasts a series from its state. `fitting.Fitting` makes it.

    Methods take arrays of NumPy or, in a stream, tensors and `keras.ops` as `xp`. Values are in
    units of `scale`, the mean change over a season.

    Attributes:
        season, naive_season: Those that the experts, and the naive forecast, read.
        low: Float, the least forecast: 0 for series without negative values, as long as the recent
            values have none.
        transform: What the ridge regressions read, and of which errors and bands are.
        lags: Integer, the number of last values that they read.
        kernels: Their weights, arrays (features, horizon).
        slopes: Array (covariates,), what covariates known in the future add.
        weights: Array (experts,).
        errors, naive_errors: Arrays (origins, horizon): errors of the forecasts, and of the
            seasonal naive ones, at past origins.
        origin_local: Array (origins,), the state's `local` there.
        independent: Float, the number of origins that share no targets.
        root_mean_square_change: Float, the root mean square change over `naive_season`.
        state: After the last value.
        net_share, reach: The weight of a network, and the number of last values that it reads.
        last: The time of the last value, of the kind of the table's times.
    """

    horizon: int
    season: int
    naive_season: int
    scale: float
    low: float
    transform: Transform
    filters: tuple[Filters, ...]
    lags: int
    kernels: tuple[np.ndarray, ...]
    slopes: np.ndarray
    weights: Any
    errors: np.ndarray
    naive_errors: np.ndarray
    origin_local: np.ndarray
    independent: float
    root_mean_square_change: float
    state: State
    net_share: float = 0.0
    reach: int = 0
    last: Any = None

    def begin(self, y: np.ndarray, future: np.ndarray, past: np.ndarray) -> State:
        """Returns the state after a history (time,), NaN where a value is missing."""
        filled, known = fill(y, self.season) / self.scale, ~np.isnan(y)
        longest = max(each.season for each in self.filters)
        values = smoothed(filled, known, longest, first_origin(len(y), self.season, self.horizon))
        states = [
            smoothing.rolling(bank, transform.apply(values), season, 1, ())[1]
            for transform, season, bank in self.filters
        ]
        z = self.transform.apply(filled)
        local = bands.moving_change(z, known, self.season, self.horizon)[-1:]
        values, *covariates = (last_rows(part, self.length) for part in (filled, future, past))
        return State(values, local, tuple(states), *covariates)

    @property
    def length(self) -> int:
        """The number of last values that a state holds."""
        needed = [self.season + 1, self.naive_season, *(each.season for each in self.filters)]
        return max(self.reach, self.lags, *needed)

    def observe(
        self, state: State, y: Any, future: Any = None, past: Any = None, xp: Any = np
    ) -> State:
        """Returns the state after one more value (..., 1) in the units of the data, or NaN.

        The covariates (channels,) of its step are `None` in a stream.
        """
        y = y / self.scale
        known = xp.less(xp.abs(y), _LARGEST)  # neither NaN nor infinite
        seen = xp.where(known, y, np.nan)
        before = state.values[..., -self.season :][..., :1]
        y = xp.where(known, y, before)
        change = xp.abs(self.transform.apply(y, xp) - self.transform.apply(before, xp))
        rate = bands.rate_of(self.season, self.horizon)
        local = xp.where(known, state.local + rate * (change - state.local), state.local)
        values = xp.concatenate([state.values[..., 1:], y], axis=-1)
        filters = tuple(
            smoothing.step(bank, old, transform.apply(seen, xp), xp)
            for (transform, _, bank), old in zip(self.filters, state.filters, strict=True)
        )
        if future is not None:
            future = np.concatenate([state.future[1:], future[None]])
            past = np.concatenate([state.past[1:], past[None]])
        return State(values, local, filters, future, past)

    def outlook(self, state: State, ahead: Any = None, net: Any = None, xp: Any = np) -> Any:
        """Returns the forecast (..., horizon) after a state.

        `ahead` (horizon, channels) are the covariates known in the future, and `net` (..., horizon)
        is the forecast of the network, if there are any.
        """
        experts = [
            transform.invert(smoothing.forecast(bank, old, self.horizon, xp), xp)
            for (transform, _, bank), old in zip(self.filters, state.filters, strict=True)
        ]
        z = self.transform.apply(state.values[..., -self.lags :], xp)
        if len(self.slopes):
            z = z - state.future[-self.lags :] @ self.slopes
        x = ridge.centered(z, self.season, xp)
        base = seasons.naive(z, self.season, self.horizon, xp)
        if state.past is not None:
            x = np.concatenate([x, with_changes(state.past[-1 - self.season :], self.season)[-1]])
        if len(self.slopes):
            base = base + ahead @ self.slopes
        for kernel in self.kernels:
            experts.append(self.transform.invert(base + xp.matmul(x, kernel), xp))
        mean = sum(weight * expert for weight, expert in zip(self.weights, experts, strict=True))
        if net is not None:
            mean = (1 - self.net_share) * mean + self.net_share * net
        return self._floored(mean, state, xp)

    def _floored(self, x, state, xp):
        """Returns x, not below the least forecast if no recent value was."""
        recent = xp.min(state.values, axis=-1, keepdims=True)
        recent = recent if len(recent.shape) == len(x.shape) else recent[..., None]
        return xp.where(recent < self.low, x, xp.maximum(x, self.low))

    def naive(self, state: State) -> np.ndarray:
        """Returns the seasonal naive forecast (horizon,) after a state."""
        return seasons.naive(state.values, self.naive_season, self.horizon)

    def band(self, levels: Sequence[float], naive: bool = False) -> np.ndarray:
        """Returns the half widths (levels, horizon) of the forecast or the naive one, at v = 1.

        Without a past origin, they are those of a random walk over the seasons.
        """
        errors = self.naive_errors if naive else self.errors
        if len(errors):
            return bands.calibrate(errors, self.origin_local, self.independent, levels)
        cycles = -(-np.arange(1, self.horizon + 1) // self.naive_season)
        change = self.root_mean_square_change * np.sqrt(cycles)
        return np.outer(bands.student(levels, _WALK), change)

    @property
    def has_few_origins(self) -> bool:
        """Whether there are too few origins to know how wide a band must be."""
        return self.independent < bands.FEW

    def ends(self, mean: Any, band: Any, state: State, xp: Any = np) -> tuple[Any, Any]:
        """Returns the lower and upper ends (..., levels, horizon) of a forecast and its `band`."""
        z = self.transform.apply(mean, xp)[..., None, :]
        half = bands.unit(state.local, xp)[..., None] * band
        lower, upper = (self.transform.invert(end, xp) for end in (z - half, z + half))
        mean = mean[..., None, :]  # which may be beyond the values that logarithms return
        return self._floored(xp.minimum(lower, mean), state, xp), xp.maximum(upper, mean)


def first_origin(length: int, season: int, horizon: int) -> int:
    """Returns the index of the first origin, or `length` if the series is too short for one."""
    first = max(length // 3, min(season + 4, length - horizon - 1), season, 2)
    return first if length - horizon > first else length


def smoothed(y: np.ndarray, known: np.ndarray, season: int, origin: int) -> np.ndarray:
    """Returns the values that the smoothing runs over, with missing ones after the first season.

    `y` (time,) is filled, `known` says which of its values were measured, `season` is the longest
    one, and `origin` the first one.
    """
    cut = max(0, min(len(y) - max(_RECENT, 5 * season), origin - 2 * season))
    values = np.where(known, y, np.nan)[cut:]
    values[:season] = y[cut : cut + season]
    return values


def last_rows(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the last rows, after the first one as often as they are too few."""
    missing = max(count - len(values), 0)
    return np.concatenate([values[:1]] * missing + [values[-count:]])


def with_changes(past: np.ndarray, season: int) -> np.ndarray:
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
