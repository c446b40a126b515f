"""Forecasts of data frames: experts, seasons, covariates, panels, updates, backtests, files."""

import copy

import numpy as np
import pandas as pd
import pytest
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import mae

from trellis_series import Forecasts
from trellis_series.seasons import calendar_seasons, correlated_season, naive_season

RNG = np.random.default_rng(0)
DAY = 10 * np.sin(np.arange(24 * 60) * np.pi / 12)


def table(y, freq="h", name="a"):
    times = pd.date_range("2024-01-01", periods=len(y), freq=freq)
    return pd.DataFrame({"unique_id": name, "ds": times, "y": y})


def noisy(n=400, name="a", seed=0):
    noise = np.random.default_rng(seed).normal(size=n)
    return table(100 + DAY[:n] + noise, name=name)


def test_a_season_and_a_trend_are_continued():
    y = 50 + 0.1 * np.arange(300) + DAY[:300]
    found = Forecasts(24).fit(table(y[:-24])).predict(naive=True)
    np.testing.assert_allclose(found["ours"], y[-24:], atol=0.05)
    np.testing.assert_allclose(found["naive"], y[-48:-24])


def test_a_meter_keeps_its_precision():
    """It rises by ten an hour from a billion on, where float32 has steps of 64."""
    meter = 1e9 + (10 + DAY / 2 + RNG.normal(0, 0.3, len(DAY))).cumsum()
    found = Forecasts(6).fit(table(meter[:-6])).predict()["ours"]
    np.testing.assert_allclose(found, meter[-6:], atol=2, rtol=0)


def test_seasons_of_the_calendar():
    expected = {"h": [24, 168], "30min": [48, 336], "min": [1440], "s": [], "D": [7], "B": [5]}
    expected |= {"W-SUN": [52], "MS": [12], "ME": [12], "BME": [12], "2MS": [6], "QS": [4]}
    expected |= {"YS": [], 1: [], "7D": [52], "14D": [26], "30D": [], "bh": [8, 40]}
    assert {freq: calendar_seasons(freq) for freq in expected} == expected
    months = "MS", "BMS", "CBMS", "WOM-1MON", "LWOM-FRI"
    assert {freq: calendar_seasons(freq) for freq in months} == dict.fromkeys(months, [12])


def later_weeks(n=1_008):
    """Days, of which weekends differ in the last third."""
    is_quiet = (np.arange(n) >= 672) & (np.arange(n) % 168 >= 120)
    return np.where(is_quiet, 0, DAY[:n]) + np.random.default_rng(0).normal(size=n)


@pytest.mark.parametrize(
    ("y", "candidates", "horizon", "expected"),
    [
        (later_weeks(), [24, 168], 24, 168),
        (np.sin(np.arange(400) * 2 * np.pi / 7), [7, 28, 91], 14, 7),  # the shortest of equal ones
        (np.random.default_rng(1).normal(size=500).cumsum(), [24, 168], 24, 1),
    ],
)
def test_the_season_is_the_one_that_forecasts_the_recent_past(y, candidates, horizon, expected):
    assert naive_season(y, np.isfinite(y), candidates, horizon) == expected


def test_values_that_were_filled_in_are_no_evidence_for_a_season():
    y, known = later_weeks(), np.random.default_rng(1).uniform(size=1_008) < 0.4
    for t in np.flatnonzero(~known):
        y[t] = y[t - 24]
    assert naive_season(y, known, [24, 168], 24) == 168


def test_seasons_of_numbered_steps_are_found():
    y = np.sin(np.arange(300) * 2 * np.pi / 11) + 0.1 * np.random.default_rng(0).normal(size=300)
    assert correlated_season(y) == [11]


def test_short_series_of_weeks_are_forecast_by_their_weeks():
    """Five weeks of hours with quiet weekends: the second season is read before it is long."""
    hours = np.arange(24 * 37)
    y = 100 + np.where(hours % 168 >= 120, 1, 10) * np.sin(hours * np.pi / 12)
    y = y + np.random.default_rng(0).normal(size=len(y))
    error = np.abs(Forecasts(24).fit(table(y[:-24])).predict()["ours"] - y[-24:]).mean()
    assert error < 1.5


def test_two_years_of_weeks_are_forecast_by_their_year():
    weeks = np.arange(52 * 2 + 20)
    y = 100 + 30 * np.sin(weeks * 2 * np.pi / 52) + np.random.default_rng(0).normal(size=len(weeks))
    found = Forecasts(13).fit(table(y[:-13], "W-SUN")).predict()
    assert np.abs(found["ours"] - y[-13:]).mean() < 5


def test_a_panel_shares_what_its_series_have_in_common():
    rng = np.random.default_rng(0)
    pattern = rng.normal(size=12)
    noise = rng.normal(size=(20, 60))
    y = pattern[np.arange(60) % 12] * rng.uniform(1, 100, 20)[:, None] + 0.3 * noise
    tables = [table(each[:48], "MS", f"s{i}") for i, each in enumerate(y)]
    found = Forecasts(12).fit(pd.concat(tables)).predict()
    assert found["unique_id"].tolist() == np.repeat([f"s{i}" for i in range(20)], 12).tolist()
    alone = pd.concat(Forecasts(12).fit(each).predict() for each in tables)
    together, apart = (np.abs(each["ours"] - y[:, 48:].ravel()).mean() for each in (found, alone))
    assert together < apart


def test_covariates_known_in_the_future_are_read():
    rng = np.random.default_rng(0)
    holiday = rng.uniform(size=424) < 0.1
    holiday[400:] = np.arange(24) % 5 == 0
    data = table(100 + DAY[:424] - 20 * holiday + rng.normal(size=424)).assign(holiday=holiday)
    known, ahead = data[:400], data[400:].drop(columns="y")
    forecasts = Forecasts(24, future=["holiday"], network=None).fit(known)
    found = forecasts.predict(X_df=ahead)
    assert np.abs(found["ours"] - data["y"][400:].to_numpy()).mean() < 2
    with pytest.raises(ValueError, match="holiday"):
        forecasts.predict()
    for rows, first in ((ahead.drop(index=404), "2024-01-17 20:00"), (ahead[:0], "2024-01-17 16")):
        with pytest.raises(ValueError, match=first):
            forecasts.predict(X_df=rows)
    assert len(forecasts.cross_validation(data, 2)) == 48


def test_a_missing_category_is_none_of_the_others():
    holiday = np.where(np.arange(424) % 7 == 3, "closed", None)
    data = table(100 + DAY[:424] - 20 * (holiday == "closed")).assign(holiday=holiday)
    forecasts = Forecasts(24, future=["holiday"], network=None).fit(data[:400])
    found = forecasts.predict(X_df=data[400:].drop(columns="y"))
    np.testing.assert_allclose(found["ours"], data["y"][400:], atol=1)


def test_series_too_short_for_a_season_or_for_windows_are_counted():
    data = pd.concat([table(DAY[:n]).assign(unique_id=f"{n}") for n in (30, 100)])
    forecasts = Forecasts(6, season=24, network=None)
    with pytest.warns(UserWarning, match="1 of 2 series are shorter than two seasons of 24"):
        forecasts.fit(data)
    with pytest.warns(UserWarning, match="1 of 2 series have at most 36 steps"):
        forecasts.cross_validation(data, 6)


def test_a_horizon_longer_than_the_series_is_warned_of():
    with pytest.warns(UserWarning, match="6 steps is longer than the longest series, of 5"):
        Forecasts(6, network=None).fit(table(DAY[:5]))


def test_covariates_known_up_to_the_present_are_read():
    rng = np.random.default_rng(0)
    lead = rng.normal(size=500)
    y = 10 * np.roll(lead, 1) + 0.1 * rng.normal(size=500)
    data = table(y).assign(lead=lead)[1:]
    found = Forecasts(1, past=["lead"], network=None).cross_validation(data, 50)
    assert np.abs(found["ours"] - found["y"]).mean() < 0.3 * y.std()


def test_static_strings_are_categories():
    rng = np.random.default_rng(0)
    panel = pd.concat(
        table(slope * np.arange(18) + rng.normal(size=18), "YS", i).assign(kind=kind)
        for i, (kind, slope) in enumerate([("up", 1), ("down", -1)] * 10)
    )
    found = Forecasts(4, static=["kind"], network=None).fit(panel).predict()["ours"]
    assert np.isfinite(found).all()
    assert not np.allclose(found, Forecasts(4, network=None).fit(panel).predict()["ours"])
    first = panel.assign(kind=panel["kind"].where(~panel["unique_id"].duplicated()))
    again = Forecasts(4, static=["kind"], network=None).fit(first).predict()["ours"]
    np.testing.assert_array_equal(again, found)
    for wrong in (panel.drop(columns="kind"), panel.assign(kind=["up", "down"] * 180)):
        with pytest.raises(ValueError, match="kind"):
            Forecasts(4, static=["kind"], network=None).fit(wrong)


def test_update_equals_reading_everything():
    data = noisy(412).assign(lead=RNG.normal(size=412), load=RNG.normal(size=412))
    data.loc[310, "y"] = np.nan
    known = data[:400].drop([350, 351, 352])  # between two updates
    forecasts = Forecasts(12, season=12, past=["load"], future=["lead"], network=None)
    forecasts.fit(data[:300])
    assert len(forecasts.models["a"].errors) == 60  # past origins
    expected = forecasts.predict(known, data[400:], naive=True)
    updated = forecasts.update(data[280:350]).update(data[353:400])
    pd.testing.assert_frame_equal(updated.predict(X_df=data[400:], naive=True), expected)


def test_updates_of_single_rows_keep_the_last_covariates():
    data = noisy(310).assign(load=RNG.normal(size=310))
    data.loc[304:, "load"] = np.nan
    forecasts = Forecasts(12, season=12, past=["load"], network=None).fit(data[:300])
    expected = copy.deepcopy(forecasts).update(data[300:]).predict()
    for row in range(300, 310):
        forecasts.update(data[row : row + 1])
    pd.testing.assert_frame_equal(forecasts.predict(), expected)


def test_an_integer_index_is_the_time_of_a_series():
    y = pd.Series(DAY[:400])
    forecasts = Forecasts(6, season=24, network=None).fit(y[:300])
    assert forecasts.predict(y[300:])["ds"].iloc[0] == 400
    found = forecasts.update(y[300:]).predict()
    assert found["ds"].iloc[0] == 400
    np.testing.assert_allclose(found["ours"], DAY[400:406], atol=0.05)


def test_updates_within_an_outage_read_covariates():
    data = noisy(330).assign(lead=RNG.normal(size=330))
    data["y"] += 5 * data["lead"]
    data.loc[303:312, "y"] = np.nan
    forecasts = Forecasts(12, season=12, future=["lead"], network=None).fit(data[:300])
    expected = copy.deepcopy(forecasts).update(data[:318]).predict(X_df=data[318:])
    forecasts.update(data[300:310]).update(data[303:318])
    pd.testing.assert_frame_equal(forecasts.predict(X_df=data[318:]), expected)


def test_predicting_a_table_again_after_an_outage():
    data = table(np.random.default_rng(0).normal(size=3_000))
    data.loc[1_000:1_899, "y"] = np.nan
    forecasts = Forecasts(12, season=12, network=None).fit(data)
    pd.testing.assert_frame_equal(forecasts.predict(data), forecasts.predict())


def test_series_without_past_forecasts_do_not_count_in_the_weights():
    long = [table(np.arange(60) + RNG.normal(size=60), "D", f"long {i}") for i in range(3)]
    short = [table(RNG.normal(size=6), "D", f"short {i}") for i in range(20)]
    alone = Forecasts(6, network=None).fit(pd.concat(long))
    with_short = Forecasts(6, network=None).fit(pd.concat(long + short))
    for name, model in alone.models.items():
        np.testing.assert_allclose(with_short.models[name].weights, model.weights)


def test_update_without_values_changes_nothing(fitted, panel):
    expected, empty = fitted.predict(), panel[-5:].assign(y=np.nan)
    for read in (empty, panel[-5:]):
        with pytest.warns(UserWarning, match="no values after those"):
            pd.testing.assert_frame_equal(fitted.update(read).predict(), expected)
    with pytest.raises(ValueError, match="'.' has no values"):
        fitted.predict(pd.concat([panel, empty.assign(unique_id="z")]))


def test_update_fills_a_gap_and_fits_a_new_series():
    forecasts = Forecasts(12).fit(noisy()[:300])
    with pytest.warns(UserWarning, match="20 missing rows"):
        forecasts.update(noisy()[320:])
    with pytest.warns(UserWarning, match="'c' is new, and fitted to 3 steps only"):
        forecasts.update(noisy(3, "c"))
    del forecasts.models["c"]
    forecasts.update(noisy(name="b"))
    found = forecasts.predict()
    assert found["unique_id"].unique().tolist() == ["a", "b"]
    assert found["ds"].iloc[0] == noisy()["ds"].iloc[-1] + pd.Timedelta(hours=1)


@pytest.fixture(scope="module")
def panel():
    return pd.concat([noisy(), noisy(350, "b", 1)])


@pytest.fixture(scope="module")
def fitted(panel):
    return Forecasts(12, levels=(80, 95)).fit(panel)


def test_predict_may_have_another_table_and_other_levels(fitted, panel):
    pd.testing.assert_frame_equal(fitted.predict(panel), fitted.predict())
    with pytest.raises(ValueError, match="'a'"):
        fitted.predict(panel[:5])
    found = fitted.predict(levels=[50, 99.5])
    assert list(found)[2:] == ["ours", "ours-lo-50", "ours-hi-50", "ours-lo-99.5", "ours-hi-99.5"]
    assert (found["ours-hi-50"] < found["ours-hi-99.5"]).all()


@pytest.mark.parametrize("refit", [False, True])
def test_backtests_see_only_the_past(panel, refit):
    found = Forecasts(12).cross_validation(panel, 3, step_size=5, refit=refit)
    assert list(found)[:4] == ["unique_id", "ds", "cutoff", "y"]
    assert found["unique_id"].tolist() == ["a"] * 36 + ["b"] * 36
    actual = found.merge(panel, on=["unique_id", "ds"])
    np.testing.assert_array_equal(actual["y_x"], actual["y_y"])
    cutoffs = found["cutoff"]
    changed = panel.assign(y=panel["y"] + 1_000 * (panel["ds"] > cutoffs.max()))
    again = Forecasts(12).cross_validation(changed, 3, step_size=5, refit=refit)
    pd.testing.assert_series_equal(again["ours"], found["ours"])
    known = pd.concat([panel[panel["unique_id"] == name][:-22] for name in ("a", "b")])
    first = cutoffs == found.groupby("unique_id")["cutoff"].transform("min")
    expected = Forecasts(12).fit(known).predict()["ours"]
    np.testing.assert_allclose(found[first]["ours"], expected)
    scores = evaluate(found.drop(columns="cutoff"), [mae], models=["ours"])
    assert (scores["ours"] < 2).all()


@pytest.mark.parametrize("role", ["past", "future"])
def test_backtests_do_not_see_covariates_of_later_windows(role):
    table = noisy().assign(x=np.random.default_rng(1).normal(size=len(noisy())))
    later = np.arange(len(table)) >= len(table) - 12  # after the first of two windows
    changed = table.assign(x=table["x"] + 1_000 * later)
    first, second = (
        Forecasts(12, network=None, **{role: ["x"]}).cross_validation(each, 2)["ours"][:12]
        for each in (table, changed)
    )
    pd.testing.assert_series_equal(first, second)
    with pytest.raises(ValueError, match="windows need series of more than"):
        Forecasts(12, network=None, **{role: ["x"]}).cross_validation(table, 1_000)


def test_files_keep_everything(fitted, tmp_path):
    fitted.save(tmp_path / "kept")
    loaded, forecasts = Forecasts.load(tmp_path / "kept"), copy.deepcopy(fitted)
    pd.testing.assert_frame_equal(loaded.predict(naive=True), forecasts.predict(naive=True))
    more = noisy(420)[400:]
    assert loaded.network == forecasts.network
    pd.testing.assert_frame_equal(loaded.update(more).predict(), forecasts.update(more).predict())
    about = tmp_path / "kept" / "forecasts.json"
    about.write_text(about.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="version 1.*: 2"):
        Forecasts.load(tmp_path / "kept")


@pytest.mark.parametrize(
    "times",
    [
        pd.date_range("2024-01-01", periods=40, freq="h", tz="Europe/Berlin"),
        pd.period_range("2024-01", periods=40, freq="M"),
        pd.timedelta_range("1h", periods=40, freq="h"),
    ],
    ids=lambda times: str(times.dtype),
)
def test_files_keep_the_kind_of_the_times(times, tmp_path):
    forecasts = Forecasts(3).fit(pd.Series(DAY[:40], times))
    forecasts.save(tmp_path / "kept")
    pd.testing.assert_frame_equal(Forecasts.load(tmp_path / "kept").predict(), forecasts.predict())


def test_files_refuse_times_whose_zone_has_no_name(tmp_path):
    times = pd.date_range("2024-01-01", periods=40, tz="dateutil/Europe/Berlin")
    with pytest.raises(ValueError, match="zone.*tzfile"):
        Forecasts(3, network=None).fit(pd.Series(DAY[:40], times)).save(tmp_path / "kept")
    assert not [*tmp_path.iterdir()]


def test_days_begin_at_midnight_though_clocks_skip_it():
    days = pd.date_range("2024-07-01", periods=76)
    days = days.tz_localize("America/Santiago", nonexistent="shift_forward")
    table = pd.DataFrame({"ds": days, "y": np.arange(76.0)})
    forecasts = Forecasts(2, network=None).fit(table[:70])  # ends on the day without a midnight
    assert str(table["ds"][69]) == "2024-09-08 01:00:00-03:00"
    assert forecasts.fitted_freq == "D"
    assert forecasts.predict()["ds"].tolist() == days[70:72].tolist()
    assert forecasts.update(table[70:73]).predict()["ds"].tolist() == days[73:75].tolist()
    at_one = table[:70].assign(ds=pd.date_range("2024-07-01 01:00", periods=70, tz=days.tz))
    assert Forecasts(2, network=None).fit(at_one).fitted_freq == "D"


def test_saving_destroys_no_other_file(fitted, tmp_path):
    folder = tmp_path / "kept"
    fitted.save(folder)
    with pytest.raises(ValueError, match="exists"):
        fitted.save(folder)
    fitted.save(folder, overwrite=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt"):
        fitted.save(folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["forecasts.json", "series.npz"])
def test_damaged_files_are_named(fitted, tmp_path, name):
    fitted.save(tmp_path / "kept")
    path = tmp_path / "kept" / name
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="kept"):
            Forecasts.load(tmp_path / "kept")


@pytest.mark.parametrize(
    "options",
    [
        {"horizon": 0},
        {"horizon": 2.5},
        {"levels": (0.8,)},
        {"levels": (100,)},
        {"season": 0},
        {"season": []},
        {"levels": None},
        {"network": "tcn"},
        *({"freq": freq} for freq in (0, -1, 1.5, "0h", "-1h", "hourly")),
        {"past": "temperature"},
    ],
)
def test_wrong_arguments_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Forecasts(**options)


def test_columns_with_two_roles_or_the_name_of_a_forecast_are_refused():
    with pytest.raises(ValueError, match="one role"):
        Forecasts(past=["y"])
    for name in ("ours-lo-80", "naive", "cutoff"):
        with pytest.raises(ValueError, match=name):
            Forecasts(id_col=name)


def test_forecasts_need_a_fit():
    with pytest.raises(ValueError, match="5.0"):
        Forecasts(3).fit(5.0)
    for method in (Forecasts.predict, Forecasts.stream, lambda it: it.save("kept")):
        with pytest.raises(ValueError, match="fit"):
            method(Forecasts(12))


def test_pictures_have_history_forecast_and_band(fitted):
    figure = fitted.plot(max_insample_length=50)
    assert sum(bool(ax.lines) for ax in figure.axes) == 2
    assert all(ax.collections for ax in figure.axes)


@pytest.mark.parametrize("dtype", [object, str])
def test_pictures_show_numbers_of_any_dtype(dtype):
    written = noisy(60).astype({"y": dtype})
    assert Forecasts(6, network=None).fit(written).plot(written).axes


def test_pictures_mark_where_the_forecast_begins():
    load = noisy(60).set_index("ds")["y"].rename("load")
    forecasts = Forecasts(6, network=None, target_col="load").fit(load)
    backtest = forecasts.cross_validation(load, 2)
    together = pd.concat([backtest, forecasts.predict()])
    for found, marks in ((together, [load.index[-1]]), (backtest, [])):
        (ax,) = forecasts.plot(load, found).axes
        assert ax.get_title() == "load"
        lines = [line.get_xdata() for line in ax.lines]
        assert [x[0] for x in lines if len(x) == 2 and x[0] == x[1]] == marks


def test_the_frequency_of_periods():
    y = pd.Series(DAY[:48], pd.period_range("2020-01", periods=48, freq="M"))
    found = Forecasts(3, freq="M", network=None).fit(y).predict()["ds"]
    assert found.iloc[0] == pd.Period("2024-01", "M")
