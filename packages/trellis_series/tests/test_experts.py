"""The smoothing filters and the sums of the ridge, from their equations."""

import numpy as np

from trellis_series import ridge, smoothing

SEASON, HORIZON = 3, 7


def test_filters_follow_their_equations():
    y = np.random.default_rng(0).normal(size=30).cumsum()
    filters = smoothing.all_filters(SEASON)
    state = smoothing.start(filters, y[:SEASON])
    for value in y[SEASON:]:
        state = smoothing.step(filters, state, value)
    for i, (alpha, beta, phi, drift, gamma) in enumerate(zip(*filters, strict=True)):
        level, trend, loss = y[:SEASON].mean(), 0.0, 1e-9
        terms = list(y[:SEASON] - level) if gamma >= 0 else [0.0] * SEASON
        for t in range(SEASON, len(y)):
            error = y[t] - (level + phi * trend + terms[t - SEASON])
            before, level = level, level + phi * trend + alpha * error
            if drift:
                trend += (drift * (level - before) - trend) / (t + 5)
            else:
                trend = phi * trend + alpha * beta * error
            gain = max(gamma, SEASON / (t + SEASON)) if gamma >= 0 else 0.0
            terms.append(terms[t - SEASON] + gain * error * (1 - alpha))
            loss = (1 - 1 / smoothing.MEMORY) * loss + error**2
        found = [state.level[i], state.trend[i], *state.seasons[:, i], state.loss[i]]
        np.testing.assert_allclose(found, [level, trend, *terms[-SEASON:], loss], rtol=1e-9)
        alone = smoothing.Bank(*(np.array([p]) for p in (alpha, beta, phi, drift, gamma)))
        kept = state._replace(
            level=state.level[[i]],
            trend=state.trend[[i]],
            seasons=state.seasons[:, [i]],
            loss=state.loss[[i]],
        )
        steps = range(1, HORIZON + 1)
        expected = [
            level
            + sum(phi**j for j in range(1, k + 1)) * trend
            + terms[len(y) - SEASON + (k - 1) % SEASON]
            for k in steps
        ]
        np.testing.assert_allclose(smoothing.forecast(alone, kept, HORIZON), expected, rtol=1e-9)


def test_a_ridge_learns_from_each_window_that_ends_before_its_bound():
    rng = np.random.default_rng(1)
    z, extra, known = rng.normal(size=40), rng.normal(size=(40, 2)), rng.random(40) > 0.2
    lags, bounds = 6, np.array([15, 28, 40])
    found = ridge.moments(z, known, extra, SEASON, lags, HORIZON, bounds)
    for fold, bound in enumerate(bounds):
        xx, xy = 0.0, 0.0
        for at in range(lags, bound - HORIZON + 1):
            last = z[at - lags : at]
            x = np.concatenate([last - last[-SEASON:].mean(), extra[at - 1]])
            ahead = np.arange(HORIZON)
            y = z[at + ahead] - z[at - SEASON + ahead % SEASON]
            xx, xy = xx + np.outer(x, x), xy + np.outer(x, np.where(known[at + ahead], y, 0))
        np.testing.assert_allclose(found[fold], np.hstack([xx, xy]), atol=1e-9)
