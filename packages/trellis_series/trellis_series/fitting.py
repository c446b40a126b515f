"""Fits the forecast of one series, from the errors of experts at past origins.

No expert has seen what followed an origin in the series itself. The ridge regression that a panel
shares sums over folds rather than times: where series end at different times, it has seen later
times of the others. The weights of the experts, the penalty of the ridge regressions and the width
of the band come from those errors.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from trellis_series import bands, ridge, seasons, smoothing
from trellis_series.ensemble import (
    Ensemble,
    Filters,
    State,
    Transform,
    fill,
    first_origin,
    last_rows,
    smoothed,
    with_changes,
)

_ORIGINS, _MOST_ORIGINS, _APART = 60, 200, 80  # past origins; more in series that are long
_FOLDS = 4  # refits of the ridge regression among them
_SHARPNESS = 4.0  # of the weights
_POOLED = 10.0  # independent origins that the mean error of a panel counts for
_PARTS = 8  # weights are multiples of 1/8
_MARGIN = np.exp(3.0)  # forecasts of logarithms leave the range of the data by this factor
_SLOPE_PENALTY = 1.0


class Fitting:
    """The experts' forecasts of one series from past origins.

    Args:
        y: Array (time,) of float64. Missing values are NaN; the first and the last are known.
        candidates: Integers, the seasons that the series may have, shortest first.
        horizon: Positive integer, number of steps to forecast.
        future: Array (time, covariates) that are also known in the future.
        past: Array (time, covariates) that are known up to each step.

    Attributes:
        origins: Array of the past origins, numbers of known values, and the length of the series.
        actual: Array (past origins, horizon), what followed.
        experts: Dict of forecasts (origins, horizon), in units of `scale`.
        moments: The sums of the ridge regression at each refit, which a panel adds up and drops.
        group: The shape of the ridge regression, which it shares with others of a panel.
        combined: Array (origins, horizon), the weighted mean, after `combine`.
    """

    def __init__(
        self,
        y: np.ndarray,
        candidates: Sequence[int],
        horizon: int,
        future: np.ndarray,
        past: np.ndarray,
    ) -> None:
        self.horizon = horizon
        self.season = next((s for s in candidates if len(y) >= 2 * s), 1)
        self.known = ~np.isnan(y)
        y = fill(y, self.season)
        self.scale = seasons.mean_change(y, self.season) or float(np.abs(y).max()) or 1.0
        self.y = y = y / self.scale
        self.low = 0.0 if y.min() >= 0 else -np.inf
        self.future, self.past = future, past
        self.experts: dict[str, np.ndarray] = {}
        self.kernels: list[np.ndarray] = []
        self._choose_origins()
        longest = self.origins[0] if len(self.actual) else len(y) // 2
        candidates = [s for s in candidates if s <= longest or s == self.season]
        self.naive_season = seasons.naive_season(y, self.known, candidates, horizon)
        self._smooth()
        self._prepare_ridge(candidates)
        self.moments: np.ndarray | None = self._moments()
        self.add_ridge("ridge", self.moments)

    def _choose_origins(self):
        n, h = len(self.y), self.horizon
        first, past = first_origin(n, self.season, h), np.empty(0, int)
        if first < n:
            count = int(np.clip(n // _APART, _ORIGINS, _MOST_ORIGINS))
            past = np.unique(np.linspace(first, n - h, count).astype(int))
            past = past[self.known[past[:, None] + np.arange(h)].any(axis=1)]
        self.origins = np.append(past, n)
        ahead = past[:, None] + np.arange(h)
        self.actual = np.where(self.known[ahead], self.y[ahead], np.nan)
        self.independent = self.independent_of(past)
        parts = [part for part in np.array_split(np.arange(len(past)), _FOLDS) if len(part)]
        self._folds = [*parts, np.array([len(past)])]
        self.bounds = self.origins[[part[0] for part in self._folds]]

    def independent_of(self, past: np.ndarray) -> float:
        """Returns the number of horizons that the measured targets of these origins fill."""
        ahead = past[:, None] + np.arange(self.horizon)
        return len(np.unique(ahead[self.known[ahead]])) / self.horizon

    def _smooth(self):
        y, m = self.y, self.season
        least, largest = float(y.min() / _MARGIN), float(y.max() * _MARGIN)
        self.transform = Transform(False, 1.0, least, largest)
        first = first_origin(len(y), m, self.horizon)  # as in `Ensemble.begin`
        values = smoothed(y, self.known, max(m, self.naive_season), first)
        origins = (self.origins - (len(y) - len(values))).tolist()
        self.filters: list[Filters] = []
        self.states: list[smoothing.FilterState] = []

        def add(name, transform, season, bank):
            z = transform.apply(values)
            found, state = smoothing.rolling(bank, z, season, self.horizon, origins)
            self.experts[name] = transform.invert(found)
            bank, state = smoothing.largest(bank, state)
            self.filters.append(Filters(transform, season, bank))
            self.states.append(state)

        add("smoothing", self.transform, m, smoothing.all_filters(m))
        if y.min() > 0:
            logs = Transform(True, seasons.mean_change(np.log(y), m) or 1.0, least, largest)
            add("log smoothing", logs, m, smoothing.all_filters(m))
            plain, log = map(self._miss, self.experts.values())
            self.transform = logs if log < plain else self.transform
        if self.naive_season > m:
            add("long season", self.transform, self.naive_season, smoothing.seasonal_filters())

    def _miss(self, forecasts):
        """Returns the mean absolute error (...) of forecasts (..., origins, horizon)."""
        known = ~np.isnan(self.actual)
        errors = np.abs(forecasts[..., :-1, :] - self.actual)[..., known]
        return errors.sum(axis=-1) / max(known.sum(), 1)

    def _prepare_ridge(self, candidates):
        n, m = len(self.y), self.season
        least = {s: (4 if s == self.naive_season else 8) * s for s in candidates}
        longest = max((s for s in candidates if n >= least[s]), default=m)
        wide = longest + m if longest > m else max(2 * m, self.horizon, 8)
        self.lags = max(min(wide, n // 4), m)
        self.group = m, self.lags, len(self.bounds)
        self.z = self.transform.apply(self.y)
        self.extra = with_changes(self.past, m)
        self.slopes = [self._slope(bound) for bound in self.bounds]

    def _slope(self, bound):
        """Returns what covariates add (covariates,), from changes over a season before a bound."""
        m = self.season
        known = (self.known[m:] & self.known[:-m])[: max(bound - m, 0)]
        x, dz = (((v[m:] - v[:-m])[: len(known)])[known] for v in (self.future, self.z))
        return np.linalg.solve(x.T @ x + _SLOPE_PENALTY * np.eye(x.shape[1]), x.T @ dz)

    def _moments(self):
        options = (self.known, self.extra, self.season, self.lags, self.horizon)
        if not self.future.shape[1]:
            return ridge.moments(self.z, *options, self.bounds)
        folds = [
            ridge.moments(self.z - self.future @ slope, *options, self.bounds[i : i + 1])
            for i, slope in enumerate(self.slopes)
        ]
        return np.concatenate(folds)

    def add_ridge(self, name: str, sums: np.ndarray) -> None:
        """Adds a ridge regression, with the penalty that forecast best, to the experts.

        Each fold of origins is forecast by the sums before it.
        """
        out = np.empty((len(ridge.PENALTIES), len(self.origins), self.horizon))
        # The covariates of the steps after the end are added by `Ensemble.outlook`.
        ahead = np.minimum(self.origins[:, None] + np.arange(self.horizon), len(self.y) - 1)
        for fold, slope, both in zip(self._folds, self.slopes, sums, strict=True):
            at, added = self.origins[fold], self.future @ slope
            last = ridge.before(self.z - added, self.lags, at)
            base = seasons.naive(last, self.season, self.horizon)
            x = np.hstack([ridge.centered(last, self.season), self.extra[at - 1]])
            kernels = ridge.kernels(both[:, : -self.horizon], both[:, -self.horizon :])
            out[:, fold] = base + added[ahead[fold]] + x @ kernels
        out = self.transform.invert(out)
        best = self._miss(out).argmin()
        self.experts[name] = out[best]
        self.kernels.append(kernels[best])

    def losses(self) -> np.ndarray:
        """Returns the logarithm of the error of each combination of the experts."""
        known = ~np.isnan(self.actual)
        if not known.any():
            return np.zeros(len(simplex(len(self.experts))))
        found = np.array([each[:-1][known] for each in self.experts.values()])
        errors = simplex(len(self.experts)) @ found - self.actual[known]
        return np.log(np.abs(errors).mean(axis=1) + 1e-9)

    def combine(self, losses: np.ndarray, pooled: Any = 0.0) -> Ensemble:
        """Returns the fitted forecast, from `losses`, and their mean over the panel, if any."""
        evidence = losses * self.independent + pooled * _POOLED
        weights = np.exp(_SHARPNESS * (evidence.min() - evidence))
        weights = weights / weights.sum() @ simplex(len(self.experts))
        self.combined = np.tensordot(weights, np.array(list(self.experts.values())), 1)
        self.combined = np.maximum(self.combined, self.low)
        past = self.origins[:-1]
        last = ridge.before(self.y, self.naive_season, past)
        naive = seasons.naive(last, self.naive_season, self.horizon)
        actual, *forecasts = map(self.transform.apply, (self.actual, self.combined[:-1], naive))
        changes = self.z[self.naive_season :] - self.z[: -self.naive_season]
        self.local = bands.moving_change(self.z, self.known, self.season, self.horizon)
        ensemble = Ensemble(
            horizon=self.horizon,
            season=self.season,
            naive_season=self.naive_season,
            scale=self.scale,
            low=self.low,
            transform=self.transform,
            filters=tuple(self.filters),
            lags=self.lags,
            kernels=tuple(self.kernels),
            slopes=self.slopes[-1],
            weights=weights,
            errors=forecasts[0] - actual,
            naive_errors=forecasts[1] - actual,
            origin_local=self.local[past - 1],
            independent=self.independent,
            root_mean_square_change=float(np.sqrt(np.mean(changes**2))) if len(changes) else 1.0,
            state=self.state(0),
        )
        return ensemble._replace(state=self.state(ensemble.length))

    def state(self, length: int) -> State:
        """Returns the state at the end of the series, with this many last values."""
        values, *covariates = (last_rows(each, length) for each in (self.y, self.future, self.past))
        return State(values, self.local[-1:], tuple(self.states), *covariates)


@functools.cache
def simplex(experts: int) -> np.ndarray:
    """Returns all weights in steps of 1/8, (combinations, experts)."""
    rows = [r for r in np.ndindex(*(_PARTS + 1,) * (experts - 1)) if sum(r) <= _PARTS]
    return np.array([(*r, _PARTS - sum(r)) for r in rows], "float64") / _PARTS
