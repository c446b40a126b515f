"""From a table to forecasts in one call."""

import sys

import numpy as np
import pyarrow as pa
import pytest

from trellis_keras.forecasting import Columns, FittedForecaster, TimeSeries, fit
from trellis_keras.forecasting.estimator import choose_window
from trellis_keras.layers import LRU


def frame(lengths=(200,), season=12):
    rows = [np.arange(n) for n in lengths]
    noise = 0.02 * np.random.default_rng(0).normal(size=max(lengths))
    load = [
        (i + 1) * (100 + np.sin(2 * np.pi * t / season) + t / 10 + noise[: len(t)])
        for i, t in enumerate(rows)
    ]
    return {
        "house": np.concatenate([np.full(n, "ab"[i]) for i, n in enumerate(lengths)]),
        "day": np.datetime64("2024-01-01", "s") + np.concatenate(rows) * np.timedelta64(1, "D"),
        "load": np.concatenate(load),
        "gas": -np.concatenate(load),
    }


def first(data, rows):
    return {name: column[:rows] for name, column in data.items()}


def arrays(forecast):
    """The columns of a data frame, or of an Arrow table where pandas is not installed."""
    names = getattr(forecast, "column_names", None) or list(forecast)
    return {name: np.asarray(forecast[name]) for name in names}


@pytest.fixture(scope="module")
def fitted():
    data = first(frame(), 180)
    return fit(data, 6, ["load", "gas"], time="day", series="house", epochs=1)


def test_the_next_values_of_each_target(fitted):
    assert fitted.window == 36 and fitted.report["names"] == ["a"]
    data = frame()
    found = arrays(fitted.predict(first(data, 180)))
    assert list(found) == ["day", "house", "target", "q10", "q50", "q90"]
    assert found["target"].tolist() == ["load"] * 6 + ["gas"] * 6
    np.testing.assert_array_equal(found["day"], np.tile(data["day"][180:186], 2))
    expected = np.r_[data["load"][180:186], data["gas"][180:186]]
    np.testing.assert_allclose(found["q50"], expected, atol=0.5)
    assert (found["q10"] <= found["q50"]).all() and (found["q50"] <= found["q90"]).all()
    assert "load: mean absolute error" in str(fitted)
    assert len(fitted.predict(first(data, 180), steps=8)) == 16


def test_a_window_is_longer_where_data_are_long():
    noise = 0.1 * np.random.default_rng(0).normal(size=3000)
    week = (np.sin(np.arange(3000) * 2 * np.pi / 7) + noise)[:, None]
    windows = [choose_window(TimeSeries(week[:rows]), 2, 0.7) for rows in (60, 3000)]
    assert windows == [14, 70]  # a third, and a thirtieth, of the training part


def test_short_and_empty_series_do_not_choose_the_window():
    data = frame((120, 120), season=7)
    values = np.r_[data["load"], np.full(120, np.nan), np.ones(4)][:, None]
    series = TimeSeries(values, lengths=[120, 120, 120, 1, 3])
    assert choose_window(series, 2, 0.7) == 21


def test_tables_of_arrow_are_read_as_dicts(fitted):
    data = first(frame(), 180)
    expected = arrays(fitted.predict(data))
    found = arrays(fitted.predict(pa.table(data)))
    assert {name: values.tolist() for name, values in found.items()} == {
        name: values.tolist() for name, values in expected.items()
    }
    times = pa.array(data["day"]).cast(pa.timestamp("s", "UTC"))
    zoned = TimeSeries.from_frame(pa.table(data | {"day": times}), Columns("load", time="day"))
    assert zoned.utc
    with pytest.raises(ValueError, match="an Arrow table or a dict of arrays. Received: list"):
        fit([1, 2, 3], 1, "load")


@pytest.mark.parametrize(("lengths", "scale"), [((100,), "data"), ((100, 90), "window")])
def test_the_net_reads_several_series_relative_to_each_window(lengths, scale):
    data = frame(lengths)
    fitted = fit(data, 6, "load", series="house", epochs=0, window=12)
    assert fitted.model.scale == scale
    assert (
        fit(data, 6, "load", series="house", epochs=0, window=12, scale="data").model.scale
        == "data"
    )


def test_columns_of_the_forecast_are_not_overwritten():
    data = frame()
    with pytest.raises(ValueError, match="keep their names .*Rename them. Received: q10, target"):
        fit({"target": data["house"], "q10": data["day"], "load": data["load"]}, 6, "load",
            time="q10", series="target")  # fmt: skip


def test_a_column_in_the_index_is_named(fitted):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match="'day' is in the index of the frame.*reset_index"):
        fitted.predict(pandas.DataFrame(first(frame(), 180)).set_index("day"))


def test_a_target_without_a_known_value_has_no_forecast(fitted):
    data = first(frame(), 180)
    data["gas"] = np.where(np.arange(180) < 144, data["gas"], np.nan)
    with pytest.warns(UserWarning, match="none of the last 36 values of 'gas' is known"):
        found = arrays(fitted.predict(data))
    assert np.isnan(found["q50"]).tolist() == [False] * 6 + [True] * 6


def test_a_series_without_recent_values_does_not_stop_the_others(fitted):
    data = frame((180, 180))
    data["load"][60:180] = data["gas"][60:180] = np.nan
    with pytest.warns(UserWarning):
        found = arrays(fitted.predict(data))
    for name, is_known in (("a", False), ("b", True)):
        assert (np.isfinite(found["q50"][found["house"] == name]) == is_known).all()


def test_months_that_end_on_their_last_day():
    days = np.datetime64("2016-01", "M") + np.arange(1, 102) - np.timedelta64(1, "D")
    data = {"day": days, "load": np.arange(101) + 10 * np.sin(np.arange(101) * np.pi / 6)}
    fitted = fit(first(data, 98), 3, "load", time="day", epochs=0)
    found = arrays(fitted.predict(first(data, 98)))
    np.testing.assert_array_equal(found["day"].astype("M8[D]"), days[98:])
    np.testing.assert_allclose(found["q50"], data["load"][98:], atol=1)
    assert "The linear map is used alone.\n" in str(fitted)  # without epochs there is no net


def test_the_frame_is_of_pandas_where_it_is_installed(fitted, monkeypatch):
    pandas = pytest.importorskip("pandas")
    frame_of_pandas = fitted.predict(first(frame(), 180))
    assert isinstance(frame_of_pandas, pandas.DataFrame)
    expected = frame_of_pandas["q50"].to_numpy()
    monkeypatch.setitem(sys.modules, "pandas", None)
    found = fitted.predict(first(frame(), 180))
    np.testing.assert_array_equal(found["q50"].to_numpy(), expected)
    assert isinstance(found, pa.Table) and found["day"].type == pa.timestamp("s")


def test_a_saved_forecaster_forecasts_the_same(fitted, tmp_path):
    fitted.save(tmp_path / "load")
    fitted.save(tmp_path / "load")
    loaded = FittedForecaster.load(tmp_path / "load")
    data = first(frame(), 180)
    assert loaded.predict(data).equals(fitted.predict(data))
    assert loaded.columns == fitted.columns and loaded.report == fitted.report
    with pytest.raises(ValueError, match="is not only a saved forecaster"):
        fitted.save(tmp_path)
    (tmp_path / "load" / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not only a saved forecaster"):
        fitted.save(tmp_path / "load")
    (tmp_path / "load" / "notes.txt").unlink()
    (tmp_path / "load" / "forecaster.json").write_text("{}")
    with pytest.raises(ValueError, match="forecaster.json is damaged"):
        FittedForecaster.load(tmp_path / "load")


def test_a_file_and_a_net_of_ones_own(tmp_path):
    data = frame()
    path = tmp_path / "load.csv"
    lines = [f"{day},{load}" for day, load in zip(data["day"], data["load"], strict=True)]
    path.write_text("\n".join(["day,load", *lines]))
    net = LRU(4, input_projection=True, return_sequences=False)
    fitted = fit(path, 4, "load", window=12, quantiles=None, backbone=net, epochs=2)
    assert fitted.window == 12 and fitted.model.backbone is net
    assert fitted.report["net_share"] in (0, 0.25, 0.5, 0.75, 1)
    found = arrays(fitted.predict(path))
    assert list(found)[-2:] == ["target", "forecast"] and list(found)[0] == "step"
    np.testing.assert_allclose(found["forecast"], frame((204,))["load"][-4:], atol=2)


def test_series_that_the_training_did_not_have(fitted):
    data = frame((180, 100))
    with pytest.warns(UserWarning, match=r"not trained on the series 'b'. It forecasts"):
        found = arrays(fitted.predict(data))
    own = found["q50"][(found["house"] == "b") & (found["target"] == "load")]
    np.testing.assert_allclose(own, frame((180, 106))["load"][-6:], atol=2)


def test_a_meter_that_stands_still(fitted):
    data = first(frame(), 180)
    data["load"][-6:] = 5
    with pytest.warns(UserWarning, match="the last 6 values of 'load' are all 5. If nothing"):
        fitted.predict(data)


def test_a_validation_part_that_ends_with_missing_values():
    load = np.array(frame()["load"])
    load[150:170] = np.nan
    found = fit({"load": load}, 2, "load", window=6, epochs=0)
    assert np.isfinite(arrays(found.predict({"load": load}))["q90"]).all()


def test_data_that_are_too_short_say_what_fits():
    with pytest.raises(ValueError, match="Forecast at most 15 steps from 55 rows"):
        fit({"load": np.arange(100.0)}, 40, "load")
    with pytest.raises(ValueError, match="More rows are needed"):
        fit({"load": np.arange(5.0)}, 2, "load")
    with pytest.raises(ValueError, match="More rows are needed"):
        fit({"load": np.arange(1.0, 3)}, 1, "load")
