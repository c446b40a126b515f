"""Times, names of columns, and values of tables."""

import warnings

import numpy as np
import pandas as pd
import pytest

from trellis_series import Forecasts
from trellis_series.panel import Columns, find_encoding, read_panel
from trellis_series.times import infer_freq, parse_times

N = 120
Y = np.sin(np.arange(N) / 3)


def predicted(times, **options):
    found = Forecasts(3, **options).fit(pd.DataFrame({"ds": times, "y": Y})).predict()
    assert np.isfinite(found["ours"]).all()
    return found["ds"]


@pytest.mark.parametrize(
    "times",
    [
        *(pd.timedelta_range("0s", periods=N + 3, freq="h").as_unit(u) for u in ("s", "ns")),
        *(pd.date_range("2024-01-01 00:00:00.75", periods=N + 3, freq=f) for f in ("1s", "100ms")),
        pd.date_range("2024-10-24", periods=N + 3, freq="h", tz="Europe/Berlin"),  # clocks change
        pd.date_range("2024-01-01", periods=N + 3, freq="D", tz="Europe/Berlin"),
        pd.date_range("2024-01-01", periods=N + 3, freq="D", tz="UTC"),
        pd.date_range("2024-01-02", periods=N + 3, freq="B"),
        pd.RangeIndex(0, 5 * (N + 3), 5),
    ],
)
def test_times_of_any_kind_are_continued(times):
    assert predicted(times[:N]).tolist() == times[N:].tolist()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (range(20240101, 20240131), "2024-01-31"),
        (range(202401, 202413), "2025-01-01"),
        (range(202413, 202443), 202443),  # not all are months
        (range(20241, 20250), 20250),
    ],
)
def test_integers_are_dates_if_all_of_them_are(numbers, expected):
    table = pd.DataFrame({"ds": numbers, "y": np.arange(len(numbers)) % 5.0})
    forecasts = Forecasts(1, network=None).fit(table)
    found = forecasts.predict()["ds"][0]
    assert found == (expected if isinstance(expected, int) else pd.Timestamp(expected))
    following = pd.DataFrame({"ds": [found], "y": [1.0]})
    assert forecasts.update(following).predict()["ds"][0] > found


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_frequencies_are_found_beside_gaps(zone):
    for freq in ("h", "D", "B", "W-WED", "MS", "ME", "QS", "YS", "3h", "2W-MON"):
        times = pd.date_range("2001-01-31", periods=60, freq=freq, tz=zone)
        found = infer_freq(times.delete([20, 33, 34]))
        assert pd.date_range(times[0], times[-1], freq=found).equals(times)


@pytest.mark.parametrize(("first", "expected"), [(8, "h"), (9, "bh")])
def test_business_hours_are_those_of_pandas_or_hours(first, expected):
    times = pd.date_range("2024-01-01", periods=60 * 24, freq="h")
    is_open = (times.hour >= first) & (times.hour < first + 8) & (times.day_of_week < 5)
    assert infer_freq(times[is_open]) == expected


@pytest.mark.parametrize(("freq", "wrong"), [("h", "2024-01-03 02:07"), ("s", "1924-01-01")])
def test_a_time_between_or_far_from_the_steps_is_named(freq, wrong):
    times = pd.date_range("2024-01-01", periods=N, freq=freq).to_series().reset_index(drop=True)
    times[50] = pd.Timestamp(wrong)
    with pytest.raises(ValueError, match=wrong):
        predicted(times)


def test_a_frequency_at_which_most_rows_are_missing_is_refused():
    months = pd.date_range("2018-01-01", periods=60, freq="MS")
    stores = [pd.DataFrame({"unique_id": i, "ds": months, "y": Y[:60]}) for i in range(3)]
    named = r"180 rows, but 5,208 more .* 'D'\. .*freq='MS' \(--freq MS\)"
    with pytest.raises(ValueError, match=named):
        Forecasts(3, freq="D").fit(pd.concat(stores))
    steps = np.array([0, 7, 15, 21, 30, 36])
    for freq in (None, 1):  # the greatest common step
        with pytest.raises(ValueError, match="6 rows, but 31 more .* 1. .*aggregate"):
            Forecasts(3, freq=freq).fit(pd.DataFrame({"ds": steps, "y": Y[:6]}))


@pytest.mark.parametrize("kept", [[*range(20), *range(90, 110)], range(0, 110, 2)])
def test_a_long_outage_and_every_second_row_are_filled(kept):
    times = pd.date_range("2024-01-01", periods=110, freq="h")[list(kept)]
    with pytest.warns(UserWarning, match="missing rows were added"):
        Forecasts(3, freq="h").fit(pd.DataFrame({"ds": times, "y": Y[: len(times)]}))


@pytest.mark.parametrize("value", [-999.0, 2.0**31 - 1])
def test_fill_values_are_named(value):
    y = 20 + np.random.default_rng(0).normal(size=100)
    y[[40, 41]] = value
    frame = pd.DataFrame({"ds": pd.date_range("2024", periods=100), "y": y, "unique_id": "a"})
    with pytest.warns(UserWarning, match=f"{value:.10g} at 2024-02-10"):
        read_panel(frame, Columns())
    y[[40, 41]] = 20 + 3 * np.ptp(np.delete(y, [40, 41]))  # unusual, but not absurd
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        read_panel(frame.assign(y=y), Columns())


@pytest.mark.parametrize("dayfirst", [None, True, False])
@pytest.mark.parametrize(
    ("form", "is_dayfirst"),
    [("%Y-%m-%d", None), ("%Y-%m-%d %H:%M", None), ("%d.%m.%Y", True)],
)
def test_the_order_of_day_and_month_does_not_concern_iso_dates(form, is_dayfirst, dayfirst):
    days = pd.Series(pd.date_range("2024-01-02", periods=9))
    written = days.dt.strftime(form)
    is_read = None in (dayfirst, is_dayfirst) or dayfirst == is_dayfirst
    assert (parse_times(written, dayfirst).tolist() == days.tolist()) == is_read


@pytest.mark.parametrize("freq", ["D", "MS", "h", "B"])
@pytest.mark.parametrize("form", ["%d/%m/%Y %H:%M", "%m-%d-%Y %H:%M", "%m.%d.%Y %H:%M"])
def test_the_order_of_day_and_month_is_the_more_even_one(freq, form):
    times = pd.Series(pd.date_range("2024-02-01", periods=40, freq=freq))
    assert parse_times(times.dt.strftime(form)).tolist() == times.tolist()


@pytest.mark.parametrize("freq", ["D", "MS", "12MS", "h"])
@pytest.mark.parametrize("form", ["%d/%m/%Y %H:%M", "%m-%d-%Y %H:%M"])
def test_an_order_that_cannot_be_known_is_asked_for(freq, form):
    times = pd.Series(pd.date_range("2024-02-01", periods=10, freq=freq))
    written = times.dt.strftime(form).rename("t")
    with pytest.raises(ValueError, match=f"'t' may have the day or .*'{written[0]}'.*--dayfirst"):
        parse_times(written)
    assert parse_times(written, form.startswith("%d")).tolist() == times.tolist()
    dotted = times.dt.strftime("%d.%m.%Y %H:%M")
    assert parse_times(dotted).tolist() == times.tolist()


def test_the_order_of_day_and_month_is_that_of_the_fitted_table():
    days = pd.date_range("2024-01-01", periods=62)
    table = pd.DataFrame({"ds": days.strftime("%d/%m/%Y"), "y": Y[:62]})
    found = Forecasts(3).fit(table[:60]).update(table[60:61]).predict()  # 01/03/2024
    assert found["ds"][0] == days[61]


@pytest.mark.parametrize("value", ["tomorrow", 3.5, True, None])
def test_values_other_than_times_are_named(value):
    with pytest.raises(ValueError, match="'t'"):
        parse_times(pd.Series([value], name="t"))


def test_columns_may_have_any_names(tmp_path):
    table = pd.DataFrame({0: np.arange(N), 1: Y, 2: Y[::-1]})
    forecasts = Forecasts(3, past=[table.columns[2]], time_col=0, target_col=1).fit(table)
    found = forecasts.predict()
    forecasts.plot()
    assert list(found) == ["unique_id", 0, "ours", "ours-lo-80", "ours-hi-80"]
    forecasts.save(tmp_path / "kept")
    pd.testing.assert_frame_equal(Forecasts.load(tmp_path / "kept").predict(table), found)
    with pytest.raises(ValueError, match="'z'.*0, 1"):
        Forecasts(3, time_col=0, target_col="z").fit(table)
    two = pd.MultiIndex.from_product([["a"], ["ds", "y", "x"]])
    for names, message in ((["ds", "y", "y"], "several columns 'y'"), (two, "'a', 'ds'")):
        with pytest.raises(ValueError, match=message):
            Forecasts(3).fit(table.set_axis(names, axis=1))


DAYS = ["2024-01-03", "2024-01-04"]


@pytest.mark.parametrize(
    ("column", "values", "named"),
    [
        ("y", [1.0, np.inf, 2, 3], "'y'.*: inf"),
        ("y", [1.0, "many", 2, 3], "'y'"),
        ("y", pd.to_timedelta([1, None, 2, 3], "h"), "'y'.*: Timedelta"),
        ("y", [1.0, 2j, 3, 4], "'y'.*: .*j"),
        ("x", [1.0, np.inf, 2, 3], "'x'.*: inf"),
        ("ds", [0, 1, 1, 2], "'a' has two rows of 1. Keep one"),
        ("ds", ["2024-01-01", "2024-01-32", *DAYS], "1678 to 2261.*: '2024-01-32'"),
        ("ds", ["2024-01-01", "02.01.2024", *DAYS], "alike.*'2024-01-01' and '02.01.2024'"),
        ("ds", ["2024-01-01 10:00", "2024-01-01T11:00+01:00", *DAYS], "UTC.*11:00.01:00'"),
        ("unique_id", ["a", None, "a", "a"], "'unique_id'"),
        ("unique_id", ["a", "b", "a", "a"], "'b'"),  # a series without values
    ],
)
def test_tables_that_cannot_be_read_are_named(column, values, named):
    table = pd.DataFrame({"unique_id": "a", "ds": range(4), "y": [1.0, np.nan, 2, 3], "x": 1.0})
    table[column] = values
    with pytest.raises(ValueError, match=named):
        Forecasts(2, past=["x"]).fit(table)


def test_rows_between_steps_and_rows_of_the_same_time_are_named():
    times = pd.Timestamp("2024-01-01") + pd.to_timedelta([0, 24, 36, 48], "h")
    with pytest.raises(ValueError, match="steps of 'D' from 2024-01-01 .*02 12:00:00 is between"):
        Forecasts(2, freq="D").fit(pd.DataFrame({"ds": times, "y": Y[:4]}))
    with pytest.raises(ValueError, match="2024-01-01 .* is not a time of the frequency 'ME'"):
        Forecasts(2, freq="ME").fit(pd.DataFrame({"ds": times[:2], "y": Y[:2]}))
    with pytest.raises(ValueError, match="two rows of 2024.*offset from UTC"):
        Forecasts(2).fit(pd.DataFrame({"ds": times[[0, 0, 1]], "y": Y[:3]}))
    with pytest.raises(ValueError, match="two rows of 1. Name the .*--series COLUMN.*reset_index"):
        Forecasts(2).fit(pd.DataFrame({"ds": [1, 1, 2], "y": Y[:3]}))


@pytest.mark.parametrize(
    ("known", "ahead", "named"),
    [
        ([1.0, 2.0, 3.0, 4.0], [5.0, np.inf], "'x'.*: inf"),
        ([1.0, 2.0, 3.0, 4.0], [5.0, "many"], "'x'.*: 'many'"),
        (["a", "b", "a", "b"], ["a", "c"], "'x'.*a, b.*: 'c'"),
        (["a", "b", "a", "b"], ["a", "b", "b"], "two rows of 5"),
    ],
)
def test_covariates_that_the_fit_cannot_read_are_named(known, ahead, named):
    forecasts = Forecasts(2, future=["x"], network=None)
    forecasts.fit(pd.DataFrame({"ds": range(4), "y": [1.0, 3.0, 2.0, 4.0], "x": known}))
    times = [4, 5, 5][: len(ahead)]
    with pytest.raises(ValueError, match=named):
        forecasts.predict(X_df=pd.DataFrame({"ds": times, "x": ahead}))


def test_missing_values_do_not_count_as_evidence():
    """Filled values would look like steps without a change."""
    y = pd.Series(np.random.default_rng(0).normal(size=400).cumsum())
    y[100:200] = np.nan
    found = Forecasts(3).fit(y).predict(naive=True)
    assert np.isfinite(found.drop(columns="unique_id").to_numpy("float64")).all()
    whole = Forecasts(3).fit(y.dropna().reset_index(drop=True)).predict()
    width, expected = (each["ours-hi-80"] - each["ours"] for each in (found, whole))
    np.testing.assert_allclose(width, expected, rtol=0.25)


def test_missing_rows_of_a_panel_are_filled_within_their_series():
    ds = pd.date_range("2024-01-01", periods=6, freq="D")
    parts = [
        pd.DataFrame({"unique_id": name, "ds": ds, "y": first + np.arange(6.0), "x": np.arange(6)})
        for name, first in (("a", 0), ("b", 100), ("c", 200))
    ]
    parts[1] = parts[1].drop([2, 3])
    parts[2] = parts[2][1:-1]
    with pytest.warns(UserWarning, match="2 missing rows"):
        panel, freq, _ = read_panel(pd.concat(parts)[::-1], Columns(future=("x",)))
    assert freq == "D" and [series.name for series in panel] == ["c", "b", "a"]
    found = {series.name: series for series in panel}
    np.testing.assert_array_equal(found["a"].y, np.arange(6.0))
    np.testing.assert_array_equal(found["b"].y, [100, 101, np.nan, np.nan, 104, 105])
    np.testing.assert_array_equal(found["c"].y, [201, 202, 203, 204])
    assert found["b"].times.equals(ds) and found["c"].times.equals(ds[1:-1])
    known = found["a"].future
    np.testing.assert_array_equal(found["b"].future, known[[0, 1, 1, 1, 4, 5]])


def test_numbers_are_scaled_by_the_mean_and_deviation_of_the_known_ones():
    frame = pd.DataFrame({"load": [1.0, 3.0, np.nan, 8.0]})
    ((mean, deviation),) = find_encoding(frame, ["load"]).values()
    np.testing.assert_allclose([mean, deviation], [4, np.sqrt(26 / 3)])


def test_numbers_of_dtype_object_are_numbers():
    frame = pd.DataFrame({"x": [1.5, None, 4.5]}, dtype=object)
    assert find_encoding(frame, ["x"])["x"] == [3.0, 1.5]


def test_a_constant_number_is_not_scaled_by_its_rounding():
    assert np.full(3, 0.1).std() > 0
    ((_, deviation),) = find_encoding(pd.DataFrame({"x": np.full(3, 0.1)}), ["x"]).values()
    assert deviation == 1


def test_local_times_with_offsets_across_a_change_of_clocks():
    days = pd.Series(pd.date_range("2024-03-01", periods=40, tz="Europe/Berlin"))
    written = days.dt.strftime("%d/%m/%Y %H:%M%z")
    for order in (None, True):
        assert (parse_times(written, order) == days).all()
