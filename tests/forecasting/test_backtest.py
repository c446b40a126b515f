"""Rows of a backtest, the figures from them, and how it is resumed."""

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from trellis_keras import zoo
from trellis_keras.forecasting import Columns, TimeSeries, backtest, backtest_scores
from trellis_keras.forecasting.backtest import _Job, backtest_tables
from trellis_keras.forecasting.picture import draw_backtest
from trellis_keras.forecasting.report import report
from trellis_keras.forecasting.rivals import drift
from trellis_keras.forecasting.series import Windows

WINDOW, HORIZON, SEASON = 14, 4, 7


def wave(rows, seed=0):
    noise = np.random.default_rng(seed).normal(size=rows)
    t = np.arange(rows)  # the trend makes one season the best lag, not two
    return 10 + np.sin(2 * np.pi * t / SEASON) + 0.05 * t + 0.01 * noise


def days(rows, first="2024-01-01"):
    return np.datetime64(first, "s") + np.arange(rows) * np.timedelta64(1, "D")


@pytest.fixture(scope="module")
def parts():
    series = TimeSeries(wave(200)[:, None], times=days(200), columns=Columns("load", time="day"))
    return series.split(WINDOW, HORIZON)


@pytest.fixture(scope="module")
def model(parts):
    model = zoo.tcn_forecaster(window=WINDOW, horizon=HORIZON, filters=2)
    model.adapt(*parts[:2])
    return model


def test_the_rows_of_an_origin(model, parts):
    test = parts[2]
    rows = backtest(model, test, origins=3)
    assert len(rows) == 3 * HORIZON and rows["target"].unique().to_pylist() == ["load"]
    last = rows.slice(2 * HORIZON)
    assert last["step"].to_pylist() == [1, 2, 3, 4]
    end = 200 - HORIZON  # the last origin ends with the data
    values, found = test.series.values[:, 0].astype("float64"), last.to_pydict()
    assert found["origin"] == [test.series.times[end - 1].item()] * HORIZON
    np.testing.assert_array_equal(found["actual"], test.series.values[end:, 0])
    forecast = model.forecast(test.series.values[end - WINDOW : end])[:, 0]
    np.testing.assert_allclose(found["forecast"], forecast[:, 1], rtol=1e-5)
    np.testing.assert_allclose(found["q50"], found["forecast"])
    assert np.all(np.less(found["q10"], found["q90"]))
    np.testing.assert_allclose(found["naive"], values[end - 1])
    slope = (values[end - 1] - values[0]) / (end - 1)
    np.testing.assert_allclose(found["drift"], values[end - 1] + slope * np.arange(1, 5))
    np.testing.assert_allclose(found["seasonal_naive"], values[end - SEASON :][:HORIZON])
    np.testing.assert_allclose(found["ridge"], values[end:], atol=0.1)
    first = int(test.first[0])
    scale = np.abs(values[SEASON:first] - values[: first - SEASON]).mean()
    np.testing.assert_allclose(found["scale"], scale)


def test_origins_in_utc(model, tmp_path):
    times = np.datetime64("2024-01-01", "h") + np.arange(200)
    series = TimeSeries(wave(200)[:, None], times=times, utc=True)
    rows = backtest(model, series.split(WINDOW, HORIZON)[2], origins=2, output=tmp_path / "b.csv")
    assert rows["origin"].type == pa.timestamp("s", "UTC")
    assert "2024-01-09 03:00:00Z" in (tmp_path / "b.csv").read_text()


def test_the_report_calibrates_as_a_backtest():
    """On two windows of rows before each forecast, however short the validation part is."""
    parts = TimeSeries(wave(120)[:, None]).split(WINDOW, 1, shares=(0.8, 0.05, 0.15))
    model = zoo.tcn_forecaster(window=WINDOW, horizon=1, filters=2)
    model.adapt(*parts[:2])
    rows = backtest(model, parts[2], origins=len(parts[2]))
    (figures,) = report(model, *parts)["targets"].values()
    found = backtest_scores(rows).to_pylist()[0]
    assert figures["values"] == found["values"] and figures["coverage"] == found["coverage"]


def test_bands_are_calibrated_from_scratch(model, parts):
    """A factor of 0 from the validation part does not make them narrow for ever."""
    expected = backtest(model, parts[2], origins=2)
    scale = keras.ops.convert_to_numpy(model.gap_scale).copy()
    model.gap_scale.assign(np.zeros_like(scale))
    found = backtest(model, parts[2], origins=2)
    kept = keras.ops.convert_to_numpy(model.gap_scale).copy()
    model.gap_scale.assign(scale)
    assert found.equals(expected) and not kept.any()


def test_all_origins_are_used_where_there_are_fewer(model, parts):
    test = parts[2]
    with pytest.warns(UserWarning, match=f"{len(test)} origins, .* Received: origins=1000"):
        rows = backtest(model, test, origins=1000)
    assert len(rows) == len(test) * HORIZON


def test_the_drift_is_the_line_through_known_values():
    history = np.array([np.nan, np.nan, 1, 2, np.nan])[:, None]
    np.testing.assert_allclose(drift(history, 2)[:, 0], [4, 5])
    assert drift(np.array([[3.0]]), 1) == 3 and np.isnan(drift(np.array([[np.nan]]), 1))


def test_nothing_after_an_origin_is_read(model, parts):
    series, first = parts[2].series, int(parts[2].first[0])
    changed = series.values.copy()
    changed[first:] = 1000
    other = TimeSeries(changed, times=series.times, columns=series.columns)
    expected = backtest(model, parts[2], origins=3)
    found = backtest(model, other.split(WINDOW, HORIZON)[2], origins=3)
    own = [name for name in expected.column_names if name != "actual"]
    assert found.select(own).slice(0, HORIZON).equals(expected.select(own).slice(0, HORIZON))


def test_refits_see_what_was_known(model, parts):
    seen = []

    def refit(before):
        seen.append(before.last[0])
        return model

    rows = backtest(model, parts[2], origins=5, refit=refit, every=2)
    origins = rows["origin"].unique().to_pylist()
    ends = [int(np.flatnonzero(parts[2].series.times == np.datetime64(o))[0]) + 1 for o in origins]
    assert seen == ends[2::2]


def test_series_share_their_origins(model):
    """The second series starts later, and has its last value a day before."""
    times = np.concatenate([days(200), days(99, "2024-04-10")])
    names = {"lengths": [200, 99], "names": ["a", "b"]}
    series = TimeSeries(np.r_[wave(200), 50 * wave(99)][:, None], times=times, **names)
    rows = backtest(model, series.split(WINDOW, HORIZON)[2], origins=4)
    origins = {name: [] for name in "ab"}
    for row in rows.to_pylist():
        if row["step"] == 1:
            origins[row["series"]].append(row["origin"])
    assert len(origins["a"]) == 4 and origins["b"] == origins["a"][:3]
    header, *lines = backtest_tables(rows)[-1]
    assert header[1] == "series" and sorted(line[1] for line in lines) == ["a", "b"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_interrupted_backtest_is_resumed(model, parts, tmp_path, monkeypatch, suffix):
    test, output, forecast = parts[2], tmp_path / f"b.{suffix}", _Job._forecast
    expected = backtest(model, test, origins=4)
    done = []

    def interrupted(job, *arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return forecast(job, *arguments)

    monkeypatch.setattr(_Job, "_forecast", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backtest(model, test, origins=4, output=output)
    assert not output.exists()
    with pytest.raises(ValueError, match="unfinished backtest with another model"):
        backtest(model, test, origins=5, output=output)
    shorter = Windows(test.series, WINDOW - 1, HORIZON, 1, test.first, test.last)
    with pytest.raises(ValueError, match="unfinished backtest with another model"):
        backtest(model, shorter, origins=4, output=output)
    done.clear()
    found = backtest(model, test, origins=4, output=output)  # forecasts from two more origins
    assert len(done) == 2 and found.equals(expected)
    read = pa.csv.read_csv if suffix == "csv" else pa.parquet.read_table
    assert backtest_scores(read(output)).equals(backtest_scores(found))
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    with pytest.raises(ValueError, match="already exists"):
        backtest(model, test, origins=4, output=output)


def test_the_figures():
    rows = pa.table(
        {
            "origin": [1, 1, 2, 2],
            "series": ["0"] * 4,
            "target": ["load"] * 4,
            "step": [1, 2, 1, 2],
            "actual": [1.0, 3.0, None, -2.0],
            "forecast": [2.0, 3.0, 5.0, 0.0],
            "q10": [0.0, 2.0, 1.0, -1.0],
            "q50": [2.0, 3.0, 5.0, 0.0],
            "q90": [4.0, 4.0, 9.0, 1.0],
            "naive": [1.0, 1.0, 1.0, 1.0],
            **{name: [0.0] * 4 for name in ("drift", "seasonal_naive", "ridge")},
            "scale": [0.5] * 4,
        }
    )
    whole, naive, *_ = backtest_scores(rows).to_pylist()
    assert (whole["target"], whole["method"], whole["values"]) == ("load", "forecast", 3)
    expected = {
        "mae": 1.0,
        "rmse": np.sqrt(5 / 3),
        "mase": 2.0,
        "smape": (2 / 3 + 0 + 2) / 3,
        "wape": 0.5,
        # Of each value the mean of the losses of 10 %, 50 % and 90 %.
        "pinball": ((0.1 + 0.5 + 0.3) + (0.1 + 0 + 0.1) + (0.9 + 1 + 0.3)) / 9,
        "coverage": 2 / 3,
        "width": 8 / 3,
    }
    assert {name: whole[name] for name in expected} == pytest.approx(expected)
    assert naive["mae"] == pytest.approx(5 / 3) and naive["coverage"] is None
    by_step = backtest_scores(rows, ["step"]).to_pylist()
    forecasts = {row["step"]: row["mae"] for row in by_step if row["method"] == "forecast"}
    assert forecasts == {1: 1.0, 2: 1.0}


def test_figures_of_whole_numbers_in_a_csv_file(tmp_path):
    """Which are read as integers, and an empty column without a type."""
    keys = {"origin": [1, 1], "series": ["0", "0"], "target": ["load", "load"], "step": [1, 2]}
    values = {name: [2.0, 3.0] for name in ("actual", "forecast", "naive", "drift", "scale")}
    values |= {"seasonal_naive": [3.0, 1.0], "ridge": [None, None]}
    rows = pa.table(keys | {name: pa.array(v, pa.float64()) for name, v in values.items()})
    pa.csv.write_csv(rows, tmp_path / "b.csv")
    scores = backtest_scores(pa.csv.read_csv(tmp_path / "b.csv"))
    assert scores.equals(backtest_scores(rows))
    assert scores["smape"].to_pylist() == [0.0, 0.0, 0.0, pytest.approx((2 / 5 + 1) / 2), None]


def test_the_crps_is_that_of_the_quantile_function():
    """Of a uniform distribution on [0, 1], at 0.5, it is 1 / 12."""
    levels = np.arange(0.01, 1, 0.01)
    quantiles = {f"q{100 * q:g}": [q] for q in levels}
    keys = {"origin": [1], "series": ["0"], "target": ["y"], "step": [1], "actual": [0.5]}
    simple = {name: [0.0] for name in ("naive", "drift", "seasonal_naive", "ridge")}
    rows = pa.table(keys | {"forecast": [0.5]} | quantiles | simple | {"scale": [1.0]})
    assert backtest_scores(rows)["crps"][0].as_py() == pytest.approx(1 / 12, rel=1e-3)


def test_a_picture_by_step(model, parts, tmp_path):
    draw_backtest(backtest(model, parts[2], origins=2), tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
