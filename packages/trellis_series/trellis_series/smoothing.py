"""A bank of damped Holt-Winters filters, weighted by how well each has forecast so far.

Each filter is a recursion over the values y_t of a series with a season of m steps:

    e_t = y_t - (l + phi b + s_t)              the error of the forecast of one step
    l   = l + phi b + alpha e_t                level
    b   = phi b + alpha beta e_t               trend, or
    b   = b + (d (change of l) - b) / (t + 5)  the mean change of the level, times d
    s_t = s_t + g (1 - alpha) e_t              season, g = max(gamma, m / (t + m))

The forecast of a filter is l + (phi + ... + phi^k) b + s_{t+k}; that of the bank is the mean over
the filters with weights L_j^(-n/2) for a sum L_j of squared errors e_t over n steps, the likelihood
of normal errors.

Functions take arrays of NumPy or, in a stream, tensors and `keras.ops` as `xp`. (Constants come
second in products, because NumPy would not multiply a symbolic tensor.)
"""

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MEMORY = 1_000  # steps over which errors are summed
_LEVELS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.95)  # alpha
# beta, phi and d
_TRENDS = ((0, 1, 0), (0, 1, 0.5), (0, 1, 1), (0.05, 0.98, 0), (0.1, 0.9, 0), (0.3, 0.9, 0))
_SEASONS = (-1, 0, 0.1, 0.3)  # gamma; -1: no season
_LONG_SEASONS = (0.1, 0.2, 0.35, 0.6, 1)  # gamma without a level, the last one is naive
_LEAST_LOSS = 1e-9
_KEPT = 16  # filters after the fit


class Bank(NamedTuple):
    """The parameters of the filters, arrays (filters,)."""

    alpha: Any
    beta: Any
    phi: Any
    drift: Any
    gamma: Any


class FilterState(NamedTuple):
    """What the filters know, arrays (..., filters), (..., season, filters) and (..., 1).

    `seasons` starts with the terms of the next step. `steps` stops rising at `MEMORY`, or five
    seasons if that is more, and `seen` approaches `MEMORY`, so a stream may run forever.
    """

    level: Any
    trend: Any
    seasons: Any
    loss: Any
    seen: Any
    steps: Any


def all_filters(season: int) -> Bank:
    """Returns all filters for a season."""
    seasons = _SEASONS if season > 1 else _SEASONS[:1]
    grid = [(a, *trend, g) for a, trend, g in itertools.product(_LEVELS, _TRENDS, seasons)]
    return Bank(*np.array(grid, "float64").T)


def seasonal_filters() -> Bank:
    """Returns filters of a season alone, each step of which is a moving mean over cycles."""
    grid = [(0, *_TRENDS[0], g) for g in _LONG_SEASONS]
    return Bank(*np.array(grid, "float64").T)


def start(filters: Bank, first: np.ndarray) -> FilterState:
    """Returns the state after the first season of a series, (season,)."""
    level = np.full(len(filters.alpha), first.mean())
    seasons = np.where(filters.gamma >= 0, (first - first.mean())[:, None], 0.0)
    loss = np.full(len(level), _LEAST_LOSS)
    return FilterState(
        level, np.zeros(len(level)), seasons, loss, np.zeros(1), np.array([float(len(first))])
    )


def step(filters: Bank, state: FilterState, y: Any, xp: Any = np) -> FilterState:
    """Returns the state after one more value, NaN if it is missing, a scalar or (..., 1)."""
    seasons = state.seasons
    state, term = _advance(filters, state, seasons[..., 0, :], y, xp)
    seasons = xp.concatenate([seasons[..., 1:, :], term[..., None, :]], axis=-2)
    return state._replace(seasons=seasons)


def _advance(filters, state, term, y, xp=np):
    """Returns the state after one more value, with its seasons unchanged, and a new seasonal term.

    `term` is the old one of this step.
    """
    alpha, beta, phi, drift, gamma = filters
    level, trend, seasons, loss, seen, steps = state
    season = seasons.shape[-2]
    now = level + trend * phi
    error = y - now - term
    missing = xp.isnan(error)
    error = xp.where(missing, 0.0, error)
    new = now + error * alpha
    drifted = trend + ((new - level) * drift - trend) / (steps + 5)
    trend = xp.where(drift > 0, drifted, trend * phi + error * (alpha * beta))
    gain = xp.where(gamma < 0, 0.0, xp.maximum(gamma, season / (steps + season)))
    term = term + gain * error * (1 - alpha)
    loss = xp.maximum((1 - 1 / MEMORY) * loss + error**2, _LEAST_LOSS)
    counts = xp.where(missing[..., :1], xp.zeros_like(seen), xp.ones_like(seen))
    seen = (1 - 1 / MEMORY) * seen + counts
    steps = xp.minimum(steps + 1, max(MEMORY, 5 * season))
    return FilterState(new, trend, seasons, loss, seen, steps), term


def forecast(filters: Bank, state: FilterState, horizon: int, xp: Any = np) -> Any:
    """Returns the weighted forecasts of the next steps, (..., horizon)."""
    damping = np.cumsum(np.asarray(filters.phi) ** np.arange(1, horizon + 1)[:, None], axis=0)
    ahead = xp.take(state.seasons, np.arange(horizon) % state.seasons.shape[-2], axis=-2)
    paths = state.level[..., None, :] + state.trend[..., None, :] * damping + ahead
    return xp.sum(paths * likelihoods(state, xp)[..., None, :], axis=-1)


def likelihoods(state: FilterState, xp: Any = np) -> Any:
    """Returns the weights of the filters, (..., filters)."""
    evidence = xp.log(state.loss) * state.seen / 2
    weights = xp.exp(xp.min(evidence, axis=-1, keepdims=True) - evidence)
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def rolling(
    filters: Bank, y: np.ndarray, season: int, horizon: int, origins: Sequence[int]
) -> tuple[np.ndarray, FilterState]:
    """Returns forecasts (origins, horizon) from past origins, and the state at the end.

    `y` (time,) may have missing values (NaN) after the first season; `origins` are the numbers of
    values that are known at each.
    """
    state = start(filters, y[:season])
    terms = collections.deque(state.seasons)  # rolling a long array would take most of the time
    settled = min(2 * season, len(y) // 4)  # errors count from here on
    wanted, found = set(origins), []
    for t in range(season, len(y) + 1):
        if t in wanted:
            found.append(forecast(filters, state._replace(seasons=np.stack(terms)), horizon))
        if t < len(y):
            state, term = _advance(filters, state, terms.popleft(), y[t])
            terms.append(term)
            if t < settled:
                state = state._replace(loss=np.full_like(state.loss, _LEAST_LOSS), seen=np.zeros(1))
    return np.array(found), state._replace(seasons=np.stack(terms))


def largest(filters: Bank, state: FilterState) -> tuple[Bank, FilterState]:
    """Returns the filters with the largest weights, and their state."""
    kept = np.sort(np.argsort(-likelihoods(state), kind="stable")[:_KEPT])
    parts = {name: getattr(state, name)[..., kept] for name in FilterState._fields[:4]}
    return Bank(*(parameter[kept] for parameter in filters)), state._replace(**parts)
