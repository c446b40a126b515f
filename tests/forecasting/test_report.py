"""The season of a naive forecast, and what a report warns of."""

import numpy as np
import pytest

from trellis_keras import zoo
from trellis_keras.forecasting import TimeSeries
from trellis_keras.forecasting.report import choose_season, describe_report, report

WINDOW, HORIZON = 12, 4


def wave(season, rows=200):
    noise = np.random.default_rng(0).normal(size=rows)
    return np.sin(2 * np.pi * np.arange(rows) / season) + 0.05 * noise


def hours(rows):
    return np.datetime64("2024-01-01", "h") + np.arange(rows)


DAYS = np.datetime64("2024-01-01") + np.arange(200)


@pytest.mark.parametrize(("season", "times"), [(7, None), (24, hours(200))])
def test_seasons_are_sought_within_the_window_and_in_the_calendar(season, times):
    train, *_ = TimeSeries(wave(season)[:, None], times=times).split(WINDOW, HORIZON)
    assert choose_season(train) == season


@pytest.mark.parametrize(("times", "season"), [(None, 14), (DAYS, 7)])
def test_the_calendar_decides_between_seasons_that_are_nearly_equal(times, season):
    """A week, and a little of a fortnight."""
    values = wave(7) + 0.02 * (np.arange(200) % 14 < 7)
    train, *_ = TimeSeries(values[:, None], times=times).split(16, HORIZON)
    assert choose_season(train) == season


def test_the_window_that_a_report_advises_fits_the_data():
    parts = TimeSeries(wave(24, 80)[:, None], times=hours(80)).split(WINDOW, HORIZON)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    assert "train with --window 28." in " ".join(report(model, *parts)["warnings"])


def test_each_series_is_compared_with_its_own_naive_forecast():
    values = np.r_[wave(5), 100 * wave(9)][:, None]
    parts = TimeSeries(values, lengths=[200, 200]).split(WINDOW, HORIZON)
    assert [choose_season(parts[0], i) for i in (0, 1)] == [5, 9]
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    series = report(model, *parts)["series"]
    for name, unit in (("0", 1), ("1", 100)):
        assert series[name]["target 0"]["naive_mae"] < 0.2 * unit


def test_a_report_warns_in_the_last_lines():
    rows = 90
    moved = np.r_[np.random.default_rng(0).normal(size=75), 50 + np.arange(15.0) ** 2]
    empty = np.where(np.arange(rows) % 3, np.nan, wave(24, rows))
    stuck = np.r_[wave(24, rows)[:80], np.full(10, 0.5)]
    constant = np.full(rows, 7.0)
    names = ["moved", "empty", "stuck", "constant"]
    values = np.r_[moved, empty, stuck, constant][:, None]
    times = np.tile(hours(rows), 4)
    parts = TimeSeries(values, lengths=[rows] * 4, times=times, names=names).split(WINDOW, HORIZON)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2, quantiles=None)
    model.adapt(parts[0])
    model.head.bias.assign(np.full(HORIZON, 1e3))
    results = report(model, *parts)
    text = describe_report(results)
    for expected in (
        "More than half of the values of the training part are missing: 'empty: target 0'.",
        "outside the range of the training part in 'moved: target 0'",
        "there is nothing to learn, in 'constant: target 0'.",
        "The last 4 values are all the same in 'stuck: target 0'.",
        "The naive forecast is better in ",
    ):
        assert expected in text.split("\n", 1)[1]


def test_targets_are_named_where_there_are_too_many_series(monkeypatch):
    monkeypatch.setitem(report.__globals__, "_MOST_SERIES", 1)
    values = np.r_[wave(5), wave(9)][:, None]
    parts = TimeSeries(values, lengths=[200, 200]).split(WINDOW, HORIZON)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2, quantiles=None)
    model.adapt(*parts[:2])
    model.head.bias.assign(np.full(HORIZON, 1e3))
    results = report(model, *parts)
    assert results["warnings"][-1] == "The naive forecast is better in 'target 0'."


@pytest.mark.parametrize(("size", "warned"), [(1e3, False), (1e6, True)])
def test_series_that_are_too_small_beside_others_are_named(size, warned):
    values = np.r_[wave(7), size * wave(7)][:, None]
    series = TimeSeries(values, lengths=[200, 200], names=["small", "large"])
    parts = series.split(WINDOW, HORIZON)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    expected = "varies more than 100,000 times as much as 'small: target 0'. Train"
    assert warned == any(expected in text for text in report(model, *parts)["warnings"])


def test_a_test_part_without_known_values():
    parts = TimeSeries(np.r_[wave(5)[:170], np.full(30, np.nan)][:, None]).split(WINDOW, HORIZON)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    text = describe_report(report(model, *parts))
    assert "target 0: mean absolute error - on 0 values of the test part" in text


@pytest.mark.filterwarnings("ignore:Of 5 series", "error::RuntimeWarning")
def test_series_without_training_windows_do_not_choose_the_season():
    """A series that starts after the training part, one of a single row, one without values."""
    start, late = np.datetime64("2024-01-01"), np.datetime64("2024-06-25")
    times = np.r_[DAYS, DAYS, DAYS, start, late + np.arange(24)]
    values = np.r_[wave(7), wave(7), np.full(200, np.nan), 1.0, wave(7)[:24]][:, None]
    series = TimeSeries(values, lengths=[200, 200, 200, 1, 24], times=times, names=list("abcde"))
    parts = series.split(WINDOW, HORIZON)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    results = report(model, *parts)
    assert results["season"] == 7 and not any("'d: " in text for text in results["warnings"])


@pytest.mark.parametrize(("stride", "warned"), [(2, True), (5, False)])
def test_a_stride_that_skips_a_part_of_the_season(stride, warned):
    parts = TimeSeries(wave(8)[:, None]).split(WINDOW, HORIZON, stride=stride)
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    expected = "A stride of 2 has a common factor with the season of 8"
    assert warned == any(text.startswith(expected) for text in report(model, *parts)["warnings"])
