"""Times, names of columns, and values of tables."""

import numpy as np
import pandas as pd
import pytest

from trellis_series import Forecasts
from trellis_series.times import infer_freq, parse_times

N = 120
Y = np.sin(np.arange(N) / 3)


def predicted(times, **options):
    found = Forecasts(3, **options).fit(pd.DataFrame({"ds": times, "y": Y})).predict()
    assert np.isfinite(found["ours"]).all()
    return found["ds"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_keep_their_unit(unit):
    times = pd.timedelta_range("0s", periods=N, freq="h").as_unit(unit)
    assert predicted(times).iloc[0] == pd.Timedelta(hours=N)


@pytest.mark.parametrize("step", ["1s", "1500ms", "100ms"])
def test_fractions_of_a_second_are_kept(step):
    times = pd.date_range("2024-01-01 00:00:00.75", periods=N + 1, freq=step)
    assert predicted(times[:-1]).iloc[0] == times[-1]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC"])
def test_times_keep_their_zone(zone):
    hours = pd.date_range("2024-10-24", periods=N + 3, freq="h", tz=zone)  # clocks change
    assert predicted(hours[:N]).tolist() == hours[N:].tolist()
    days = pd.date_range("2024-01-01", periods=N + 3, freq="D", tz=zone)
    assert predicted(days[:N]).tolist() == days[N:].tolist()


@pytest.mark.parametrize(
    "freq", ["h", "30min", "D", "B", "W-WED", "MS", "ME", "QS", "YS", "3h", "2W-MON"]
)
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_frequencies_are_found_beside_gaps(freq, zone):
    times = pd.date_range("2001-01-31", periods=60, freq=freq, tz=zone)
    gaps = times.delete([20, 33, 34])
    found = infer_freq(gaps)
    assert pd.date_range(times[0], times[-1], freq=found).equals(times)


def test_integers_may_rise_by_more_than_one():
    assert predicted(np.arange(N) * 5).tolist() == [5 * N, 5 * N + 5, 5 * N + 10]


def test_uneven_times_are_named():
    times = pd.date_range("2024-01-01", periods=N, freq="h").to_series().reset_index(drop=True)
    times[50] += pd.Timedelta(minutes=7)
    with pytest.raises(ValueError, match="02:07"):
        predicted(times)


def test_one_wrong_year_does_not_fill_the_memory():
    times = pd.date_range("2024-01-01", periods=N, freq="s").to_series().reset_index(drop=True)
    times[0] = pd.Timestamp("1924-01-01")
    with pytest.raises(ValueError, match="1924"):
        predicted(times)


def test_repeated_times_are_named():
    table = pd.DataFrame({"ds": [0, 1, 1, 2], "y": 1.0})
    with pytest.raises(ValueError, match="two rows"):
        Forecasts(2).fit(table)


@pytest.mark.parametrize("value", ["tomorrow", 3.5, None])
def test_what_is_no_time_is_named(value):
    with pytest.raises(ValueError, match="'t'"):
        parse_times(pd.Series([value], name="t"))


def test_columns_may_have_any_names():
    table = pd.DataFrame({0: np.arange(N), 1: Y})
    found = Forecasts(3, time_col=0, target_col=1).fit(table).predict()
    assert list(found) == ["unique_id", 0, "ours", "ours-lo-80", "ours-hi-80"]
    with pytest.raises(ValueError, match="'z'.*0, 1"):
        Forecasts(3, time_col=0, target_col="z").fit(table)
    table.columns = pd.MultiIndex.from_product([["a"], ["ds", "y"]])
    with pytest.raises(ValueError, match="'ds'"):
        Forecasts(3).fit(table)


@pytest.mark.parametrize("value", [np.inf, "many"])
def test_what_is_no_number_is_named(value):
    y = pd.Series(Y, dtype=object)
    y[7] = value
    with pytest.raises(ValueError, match="'y'"):
        Forecasts(3).fit(pd.DataFrame({"ds": np.arange(N), "y": y}))


def test_missing_values_are_no_evidence():
    """Filled values would look like steps without a change."""
    y = pd.Series(np.random.default_rng(0).normal(size=400).cumsum())
    y[100:200] = np.nan
    found = Forecasts(3).fit(y).predict(naive=True)
    assert np.isfinite(found.drop(columns="unique_id").to_numpy("float64")).all()
    whole = Forecasts(3).fit(y.dropna().reset_index(drop=True)).predict()
    width, expected = (each["ours-hi-80"] - each["ours"] for each in (found, whole))
    np.testing.assert_allclose(width, expected, rtol=0.25)


def test_series_without_values_is_named():
    table = pd.DataFrame({"unique_id": ["a", "b"] * 5, "ds": np.repeat(range(5), 2)})
    table["y"] = np.where(table["unique_id"] == "b", np.nan, 1.0)
    with pytest.raises(ValueError, match="'b'"):
        Forecasts(2).fit(table)
