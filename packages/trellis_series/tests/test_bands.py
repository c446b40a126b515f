"""Bands hold on simulated series, and are finite whatever the series does."""

from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from trellis_series import Forecasts
from trellis_series.bands import (
    calibrate,
    moving_change,
    rate_of,
    student,
    unit,
    weighted_quantiles,
)
from trellis_series.ensemble import first_origin

HORIZON = 12


def autoregression(rng, n):
    y = np.zeros(n)
    for t in range(1, n):
        y[t] = 0.8 * y[t - 1] + rng.normal()
    return y


def random_walk(rng, n):
    return rng.normal(size=n).cumsum()


def growing_variance(rng, n):
    return 100 * np.exp(0.1 * random_walk(rng, n))


def seasonal(rng, n):
    return 100 + 10 * np.sin(np.arange(n) * np.pi / 6) + autoregression(rng, n)


def jumps(rng, n, hold=50):
    levels = rng.choice([0.0, 10, 20, 30], n // hold + 2)
    start = rng.integers(hold)
    return np.repeat(levels, hold)[start : start + n] + 0.01 * rng.normal(size=n)


@pytest.mark.parametrize("make", [autoregression, random_walk, growing_variance, seasonal, jumps])
def test_bands_hold_at_their_level(make):
    """80 % of the values after 40 independent series, all steps and origins alike."""
    rng, n = np.random.default_rng(0), 160
    y = np.stack([make(rng, n + HORIZON) for _ in range(40)])
    table = pd.DataFrame(y[:, :n].T).melt(var_name="unique_id", value_name="y", ignore_index=False)
    table = table.rename_axis("ds").reset_index()
    found = Forecasts(HORIZON, season=12, levels=(80, 95)).fit(table).predict()
    y = pd.Series(y[:, n:].ravel())
    inside = [y.between(found[f"ours-lo-{p}"], found[f"ours-hi-{p}"]).mean() for p in (80, 95)]
    assert 0.74 <= inside[0] <= 0.9
    assert inside[1] >= 0.9


def test_bands_of_logarithms_are_wider_above():
    y = np.exp(0.02 * np.arange(300) + 0.3 * np.random.default_rng(0).normal(size=300))
    found = Forecasts(HORIZON).fit(pd.Series(y)).predict()
    below, above = found["ours"] - found["ours-lo-80"], found["ours-hi-80"] - found["ours"]
    assert (above > 1.1 * below).all() and (found["ours-lo-80"] > 0).all()


@pytest.mark.parametrize("hold", [50, 100])
def test_bands_stay_near_the_values_of_series_that_jump(hold):
    y = jumps(np.random.default_rng(0), 1_500, hold)
    for end in (1_500, 1_460):
        found = Forecasts(24).fit(pd.Series(y[:end])).predict()
        ends = found[["ours-lo-80", "ours", "ours-hi-80"]].to_numpy()
        assert np.isfinite(ends).all()
        assert -40 < ends.min() and ends.max() < 70


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 17, 30])
def test_short_series_have_bands_that_say_how_little_is_known(n):
    """A band is at least that of a random walk as long as few origins were tried."""
    y = pd.Series(np.random.default_rng(n).normal(size=n).cumsum())
    found = Forecasts(HORIZON).fit(y).predict(naive=True)
    assert np.isfinite(found.drop(columns="unique_id").to_numpy("float64")).all()
    width = found["ours-hi-80"] - found["ours"]
    assert (width > 0).all()
    if n > 3:
        steps = np.sqrt(np.mean(np.diff(y) ** 2) * np.arange(1, HORIZON + 1))
        assert n > 20 or (width >= 1.2 * steps).all()


def test_an_outage_before_a_window_leaves_origins_without_values():
    y = pd.Series(np.sin(np.arange(210.0)) + 5)
    y[30:190] = np.nan
    found = Forecasts(5, network=None).cross_validation(y, 2)
    assert np.isfinite(found[["ours", "ours-lo-80", "ours-hi-80"]]).all(axis=None)


@pytest.mark.parametrize("y", [np.zeros(50), np.full(50, 3.0), np.arange(50.0), np.eye(50)[49]])
def test_series_without_noise(y):
    found = Forecasts(4).fit(pd.Series(y)).predict().drop(columns="unique_id")
    assert np.isfinite(found.to_numpy("float64")).all()


def test_counts_are_not_negative():
    y = pd.Series(np.random.default_rng(0).poisson(0.3, 300).astype(float))
    assert (Forecasts(8).fit(y).predict()[["ours", "ours-lo-80"]] >= 0).all(axis=None)


def test_the_floor_ends_where_values_are_negative():
    """As for temperatures that were fitted in summer."""
    y = np.linspace(20, -20, 200) + np.random.default_rng(0).normal(size=200)
    table = pd.DataFrame({"ds": pd.date_range("2024-07-01", periods=200), "y": y})
    forecasts = Forecasts(3, network=None).fit(table[:80])
    stream = forecasts.stream()
    cache = stream.initial_cache(1)
    for value in y[80:]:
        found, cache = stream.step(np.array([[value]]), cache)
    with pytest.warns(UserWarning, match="'series' was fitted to values of 0 and more"):
        forecasts.update(table)
    expected = forecasts.predict()[["ours", "ours-lo-80", "ours-hi-80"]]
    assert (expected["ours"] < -10).all() and (expected["ours-hi-80"] > -20).all()
    np.testing.assert_allclose(np.array(found)[0], expected)


# Each error comes early and late, with a weight that is the same for all.
ERRORS = np.concatenate([np.linspace(0, 100, 2001), np.linspace(100, 0, 2001)])[:, None]


@pytest.mark.parametrize(
    ("level", "independent", "expected"), [(80, 1e9, 80), (80, 9, 83.2), (50, 4, 54), (99, 4, 100)]
)
def test_bands_of_few_origins_hold_a_larger_share(level, independent, expected):
    """The finite-sample correction of conformal bands, on errors of 0 to 100."""
    found = calibrate(ERRORS, np.ones(len(ERRORS)), independent, [level])
    np.testing.assert_allclose(found, [[expected]], atol=0.05)


@pytest.mark.parametrize(
    ("horizon", "outage", "expected"),
    [
        (12, slice(0), 267 / 12),  # overlapping ones, from a third of the series on
        (1, slice(0), 60),
        (12, slice(200, 388), 67 / 12 + 1),
    ],
)
def test_origins_are_independent_if_they_share_no_targets(horizon, outage, expected):
    y = 10 + np.random.default_rng(0).normal(size=400)
    y[outage] = np.nan
    model = Forecasts(horizon, season=12).fit(pd.Series(y)).models["series"]
    assert model.independent == pytest.approx(expected)


def test_the_errors_of_later_origins_count_more():
    errors = np.repeat([1.0, 1, 3, np.nan], 50)[:, None]  # the ones have 5050 / 11325 of the weight
    for level, expected in ((44, 1), (46, 3)):
        np.testing.assert_allclose(calibrate(errors, np.ones(200), 1e9, [level]), [[expected]])
    mean = weighted_quantiles(np.array([5.0, 1, 3]), np.ones(3), np.array([0.25, 0.5, 1.0]))
    np.testing.assert_allclose(mean, [2, 3, 5])


def test_the_unit_is_a_mean_of_changes_over_a_season():
    z, season = np.tile([0.0, 1.0, 5.0, 2.0], 5), 4
    z[-1] += 3
    rate = rate_of(season, 1)
    kept = (1 - rate) ** np.arange(len(z) - season + 1)
    expected = [1.0] * (season - 1) + [*kept[:-1], kept[-1] + 3 * rate]
    found = moving_change(z, np.ones(len(z), bool), season, 1)
    np.testing.assert_allclose(found, expected)


def test_the_unit_of_a_quiet_time_has_a_minimum():
    for local, expected in ((0.0, 0.3), (0.2, 0.3), (0.31, 0.31), (4.0, 4.0)):
        np.testing.assert_allclose(unit(local), np.sqrt(expected))
        factor = calibrate(ERRORS, np.full(len(ERRORS), local), 1e9, [80])
        np.testing.assert_allclose(factor, [[80 / np.sqrt(expected)]], rtol=1e-3)


def test_bands_without_an_origin_are_those_of_a_random_walk():
    y = pd.Series(np.random.default_rng(0).normal(size=9).cumsum())
    model = Forecasts(HORIZON, season=1).fit(y).models["series"]
    found = model._replace(naive_season=4).band([80]) * model.scale
    change = np.sqrt(np.mean(np.diff(y) ** 2))
    expected = 1.6272 * change * np.sqrt(np.repeat([1, 2, 3], 4))  # one for each season
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("level", "freedom", "expected"), [(80, 2, 1.8856), (80, 1e9, 1.2816), (95, 3, 3.1824)]
)
def test_quantiles_are_those_of_student_s_t(level, freedom, expected):
    np.testing.assert_allclose(student([level], freedom), [expected], rtol=0.06)


def test_bands_of_fewer_than_three_origins_are_at_least_those_of_student_s_t():
    errors = np.random.default_rng(0).normal(size=(4_000, 1))
    for independent, factor in ((2.0, 1.843), (3.0, 0.88 / 0.8)):
        found = calibrate(errors, np.ones(len(errors)), independent, [80])
        expected = factor if independent < 3 else NormalDist().inv_cdf(0.5 + factor * 0.4)
        np.testing.assert_allclose(found, [[expected]], rtol=0.03)


@pytest.mark.parametrize("growth", [1, 15])
def test_bands_of_short_series_and_of_growing_noise_hold_at_their_level(growth):
    rng, inside = np.random.default_rng(0), []
    for n in (30, 72):
        for _ in range(40):
            y = 100 + rng.normal(size=n + HORIZON) * np.linspace(1, growth, n + HORIZON)
            found = Forecasts(HORIZON, season=12, levels=[50, 80]).fit(pd.Series(y[:n])).predict()
            ends = [found[[f"ours-lo-{p}", f"ours-hi-{p}"]].to_numpy().T for p in (50, 80)]
            inside.append([((low < y[n:]) & (y[n:] < high)).mean() for low, high in ends])
    found = np.mean(inside, axis=0)
    assert 0.38 <= found[0] <= 0.65 and 0.7 <= found[1] <= 0.92


@pytest.mark.parametrize(
    ("length", "first"), [(40, 13), (20, 11), (14, 9), (12, 7), (11, 11), (3, 3), (1, 1)]
)
def test_the_first_origin_is_a_third_into_the_series_or_after_a_season(length, first):
    assert first_origin(length, season=7, horizon=4) == first
