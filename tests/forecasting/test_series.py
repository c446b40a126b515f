"""Windows of time series: what a batch holds, splits without leakage, files and bad input."""

import gzip

import numpy as np
import pytest

from trellis_keras.forecasting import Columns, TimeSeries, WindowStream
from trellis_keras.zoo import datasets

CSV = """time,load,wind,holiday,site
2024-01-01 00:00,1,10,0,a
2024-01-01 01:00,2,,0,a
2024-01-01 02:00,NA,30,1,a
2024-01-01 03:00,4,40,1,a
"""
COLUMNS = Columns(["load"], past=["wind"], future=["holiday"], time="time")
DAYS = np.datetime64("2024-01-01") + np.arange(400)


def write(folder, text, name="load.csv"):
    path = folder / name
    path.write_text(text)
    return path


def ramp(rows, channels=1, **options):
    """A series whose value says its row and channel: row + channel / 10."""
    values = np.arange(rows)[:, None] + np.arange(channels) / 10
    return TimeSeries(values, **options)


# Windows


def test_a_batch_holds_windows_with_known_channels_ahead():
    series = ramp(20, channels=3, targets=1, future_channels=1)
    train, _, _ = series.split(4, 2, shares=(0.6, 0.2, 0.2))
    x, y = train.read(np.array([0, 3]))
    np.testing.assert_allclose(x[1, :, :2], [[3, 3.1], [4, 4.1], [5, 5.1], [6, 6.1]], rtol=1e-6)
    np.testing.assert_allclose(x[1, :, 2], [5.2, 6.2, 7.2, 8.2], rtol=1e-6)
    assert y[:, :, 0].tolist() == [[4, 5], [7, 8]]
    assert x.dtype == y.dtype == "float32"


@pytest.mark.parametrize("stride", [1, 3])
def test_each_part_has_its_own_targets(stride):
    parts = ramp(50).split(window=6, horizon=3, stride=stride)
    rows = [part.read(np.arange(len(part)))[1][..., 0] for part in parts]
    assert [r.min() for r in rows] == [6, 35, 42]  # later parts read the rows before them
    assert rows[0].max() < 35 and rows[1].max() < 42 and rows[2].max() < 50
    if stride == 1:
        assert sorted(set(np.concatenate([r.ravel() for r in rows]))) == list(range(6, 50))
    assert [one.ravel().tolist() for one in parts[1].rows()] == [list(range(35, 42))]
    starts = parts[0].starts(np.arange(len(parts[0])))
    assert set(np.diff(starts)) == {stride}


def test_windows_stay_within_their_series():
    series = ramp(60, lengths=[20, 5, 35])  # the second one is too short
    with pytest.warns(UserWarning, match="of train: '1'; of valid: '1'; of test: '1'"):
        parts = series.split(4, 2)
    for part in parts:
        x, y = part.read(np.arange(len(part)))
        whole = np.concatenate([x, y], axis=1)[..., 0]
        assert (np.diff(whole, axis=1) == 1).all()
        assert not ((whole >= 20) & (whole < 25)).any()
        assert ((whole >= 25).all(axis=1) == (whole >= 25).any(axis=1)).all()


def test_series_are_cut_at_the_same_time():
    hours = np.array("2024-01-01", "datetime64[h]") + np.r_[0:40, 30:70]
    train, valid, _ = ramp(80, lengths=[40, 40], times=hours).split(4, 2, shares=(0.6, 0.2, 0.2))
    assert (train.last, valid.last) == ([40, 52], [40, 66])
    assert len(valid) == 13


def test_a_stream_counts_each_window_once_and_shares_the_memory(tmp_path):
    np.save(tmp_path / "values.npy", np.arange(40, dtype="float32").reshape(20, 2))
    values = np.load(tmp_path / "values.npy", mmap_mode="r")
    series = TimeSeries(values)
    assert np.shares_memory(series.values, values)
    train, _, _ = series.split(3, 1)
    assert all(np.shares_memory(rows, values) for rows in train.rows())
    stream = WindowStream(train, batch_size=4, shuffle=True)
    batches = [stream[i] for i in range(len(stream))]
    assert {(x.shape, y.shape, w.shape) for x, y, w in batches} == {((4, 3, 2), (4, 1, 1), (4,))}
    counted = np.concatenate([y[w > 0, 0, 0] for _, y, w in batches])
    assert sorted(counted) == sorted(values[3:14, 0]) and stream.sequences_counted == 11
    assert counted.tolist() != sorted(counted)


def test_the_naive_forecast_repeats_the_last_known_season():
    values = np.random.default_rng(0).normal(size=40)
    values[17] = np.nan
    series = TimeSeries(values[:, None])
    for i, season, stride in ((0, 2, 1), (1, 5, 1), (0, 12, 1), (0, 10, 3)):
        part = series.split(8, 3, stride=stride)[i]
        errors = []
        for start in part.starts(np.arange(len(part))):
            for ahead in range(3):
                row = start + 8 + ahead
                lag = season * (ahead // season + 1)
                if row >= lag:
                    errors.append(abs(values[row] - values[row - lag]))
        expected = np.nanmean(errors)
        np.testing.assert_allclose(part.naive_error(season), [expected], rtol=1e-6)


# Files, frames and arrays


def test_a_csv_file(tmp_path):
    series = TimeSeries.from_csv(write(tmp_path, CSV), COLUMNS)
    expected = [[1, 10, 0], [2, np.nan, 0], [np.nan, 30, 1], [4, 40, 1]]
    np.testing.assert_array_equal(series.values, np.array(expected, "float32"))
    assert (series.targets, series.future_channels) == (1, 1)
    assert series.step == np.timedelta64(3600, "s")
    assert str(series.times[1]) == "2024-01-01T01:00:00"


def test_other_forms_of_a_csv_file(tmp_path):
    plain = TimeSeries.from_csv(write(tmp_path, CSV), COLUMNS)
    turned = "\n".join(";".join(line.split(",")[::-1]) for line in CSV.splitlines())
    packed = tmp_path / "load.csv.gz"
    packed.write_bytes(gzip.compress(("\ufeff" + turned).encode()))
    assert TimeSeries.from_csv(packed, COLUMNS).checksum == plain.checksum
    several = Columns(["load"], series="site", time="time")
    other = CSV + CSV.partition("\n")[2].replace(",a", ",b")
    series = TimeSeries.from_csv(write(tmp_path, other), several)
    assert (series.names, series.lengths) == (("a", "b"), (4, 4))
    months = "time,load\n" + "".join(f"2024-{m:02}-01,{m}\n" for m in range(1, 10))
    series = TimeSeries.from_csv(write(tmp_path, months), Columns("load", time="time"))
    assert series.step == np.timedelta64(1, "M")
    ends = "time,load\n" + "".join(
        f"{day},1\n" for day in DAYS[30:400] if str(day + 1)[-2:] == "01"
    )
    series = TimeSeries.from_csv(write(tmp_path, ends), Columns("load", time="time"))
    assert series.step == np.timedelta64(1, "M") and str(series.times[1]) == "2024-02-29T00:00:00"


def test_times_with_an_offset_are_converted_to_utc(tmp_path):
    autumn = ["01:00+02:00", "02:00+02:00", "02:00+01:00", "03:00+0100"]
    text = "time,load\n" + "".join(f"2024-10-27T{hour},1\n" for hour in autumn)
    series = TimeSeries.from_csv(write(tmp_path, text), Columns("load", time="time"))
    assert series.utc and series.step == np.timedelta64(1, "h")
    assert str(series.times[0]) == "2024-10-26T23:00:00"
    assert not TimeSeries.from_csv(write(tmp_path, CSV), COLUMNS).utc
    in_utc = write(tmp_path, CSV.replace(":00,", ":00Z,"))
    assert TimeSeries.from_csv(in_utc, COLUMNS).utc


def test_static_columns_are_constant_within_a_series(tmp_path):
    columns = Columns("load", static="area", series="site")
    text = "site,area,load\na,3,1\na,3,2\nb,5,3\nb,{},4\n"
    TimeSeries.from_csv(write(tmp_path, text.format(5)), columns)
    for last, name in (("6", "6"), ("", "nan")):
        path = write(tmp_path, text.format(last))
        match = f"load.csv: The static column 'area' .* Received: 5 and {name} in series 'b'"
        with pytest.raises(ValueError, match=match):
            TimeSeries.from_csv(path, columns)


def test_frames_and_arrays():
    rng = np.random.default_rng(0)
    table = {"wind": rng.normal(size=9), "load": rng.normal(size=9), "site": list("aaaabbbbb")}
    frame = TimeSeries.from_frame(table, Columns("load", past="wind", series="site"))
    arrays = TimeSeries.from_arrays(
        [table["load"][:4], table["load"][4:]],
        past=[table["wind"][:4], table["wind"][4:]],
        static=[[1.0], [2.0]],
    )
    np.testing.assert_array_equal(arrays.values[:, :2], frame.values)
    assert arrays.values[:, 2].tolist() == 4 * [1] + 5 * [2]
    assert arrays.lengths == frame.lengths == (4, 5) and arrays.future_channels == 1


@pytest.mark.parametrize(
    ("times", "first"),
    [
        (["20240130", "20240131", "20240201"], "2024-01-30T00:00:00"),
        (["202311", "202312", "202401"], "2023-11-01T00:00:00"),
        (["2023-11", "2023-12", "2024-01"], "2023-11-01T00:00:00"),
        (["2023 Q3", "2023 Q4", "2024 Q1"], "2023-07-01T00:00:00"),
        (["20240130", "20240131", "20240132"], "20240130"),  # no date
        (["202312", "202313", "202314"], "202312"),
    ],
)
def test_compact_dates_are_dates_if_all_rows_are(times, first):
    frame = {"time": times, "load": [1, 2, 3]}
    assert str(TimeSeries.from_frame(frame, Columns("load", time="time")).times[0]) == first


def test_values_that_float32_cannot_tell_apart_are_refused():
    """Else they would be constant, and so would the forecasts."""
    meter = 1e9 + 10 * np.sin(np.arange(100.0))
    match = "column 'meter': its values are too close to each other for float32"
    with pytest.raises(ValueError, match=match):
        TimeSeries.from_frame({"meter": meter}, Columns("meter"))
    with pytest.raises(ValueError, match="channel 0: its values are too close"):
        TimeSeries(meter[:, None])
    for constant in (np.full(9, 0.1), 0.3 + np.spacing(0.3) * np.arange(9)):
        TimeSeries(constant[:, None])
    TimeSeries(1e6 + 10 * meter[:, None] - 1e10)


def test_a_pandas_frame():
    pandas = pytest.importorskip("pandas")
    times = pandas.date_range("2024-01-01", periods=3, freq="h", tz="Europe/Rome")
    load = pandas.array([1, None, 3], dtype="Int64")
    names = pandas.Categorical(["a", "a", "b"])
    frame = pandas.DataFrame({"load": load, "time": times, "house": names})
    series = TimeSeries.from_frame(frame, Columns("load", time="time", series="house"))
    np.testing.assert_array_equal(series.values[:, 0], [1, np.nan, 3])
    assert series.step == np.timedelta64(3600, "s") and series.names == ("a", "b")
    assert series.utc
    assert str(series.times[0]) == "2023-12-31T23:00:00"  # in UTC


# Bad input


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("load,", "lod,", "has no column 'load'. Did you mean 'lod'"),
        ("wind,", "load,", "has 2 columns named 'load'"),
        (
            ",2,,",
            ",two,,",
            "column 'load' must hold numbers such as 12.5. Received: 'two' in line 3",
        ),
        (",2,,", ",inf,,", "column 'load' must hold finite numbers. Received: 'inf' in line 3"),
        ("01:00", "05:00", "must rise by one step, .* Received: 2024-01-01T05.* after .*T00"),
        ("02:00", "02:30", "must rise by one step, 1 hour here"),
        (
            "03:00",
            "04:00",
            "T04:00:00 after 2024.*missing rows with their time and empty.*Where clocks change",
        ),
        (
            "02:00",
            "01:00",
            "one row per time. Times are read to the second; .*shorter steps. Rows of several "
            "series need.*Where clocks chang",
        ),
        ("01:00", "01:00+01:00", "must hold one kind of times: .*Received: '2024.*' in line 3"),
        ("2024-01-01 01:00", "1.1.2024", "column 'time' must hold times such as 2024-01-31 13:00"),
        ("2024-01-01 01:00", "", "column 'time' must hold times.*Received: '' in line 3"),
        (",2,,0,a", ",2,,0", "line 3 has 4 fields, the header 5"),
        (CSV.partition("\n")[2], "", "has no rows"),
    ],
)
def test_a_csv_file_that_is_wrong(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message) as error:
        TimeSeries.from_csv(write(tmp_path, CSV.replace(old, new, 1)), COLUMNS)
    assert "load.csv" in str(error.value)


def test_a_series_column_named_as_one_of_the_forecast():
    with pytest.raises(ValueError, match="Rename the column that identifies .*series='step'"):
        Columns("load", series="step")
    assert Columns("load", series="step", time="day").series == "step"


def test_times_of_more_than_64_bits(tmp_path):
    path = tmp_path / "load.csv"
    path.write_text(f"time,load\n{10**30},1\n")
    with pytest.raises(ValueError, match="load.csv.*column 'time' must hold times"):
        TimeSeries.from_csv(path, Columns("load", time="time"))


def test_files_that_are_not_tables(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"load,time\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match="binary.csv is not CSV in UTF-8"):
        TimeSeries.from_csv(tmp_path / "binary.csv", Columns("load"))
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(CSV.encode())[:40])
    with pytest.raises(ValueError, match="cut.csv.gz is truncated"):
        TimeSeries.from_csv(tmp_path / "cut.csv.gz", COLUMNS)
    with pytest.raises(FileNotFoundError, match="There is no file .*missing.csv"):
        options = {"targets": ["load"], "window": 4, "horizon": 2}
        datasets.load("series", path=tmp_path / "missing.csv", **options)


def test_series_that_are_interleaved(tmp_path):
    text = "site,load\na,1\nb,2\na,3\n"
    with pytest.raises(ValueError, match="must keep the rows of a series together.*'a' in line 4"):
        TimeSeries.from_csv(write(tmp_path, text), Columns("load", series="site"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 40, "horizon": 2}, "part 'train' needs at least 40 . 2 rows.*Received: 21 at"),
        ({"window": 4, "horizon": 4, "shares": (0.8, 0.1, 0.1)}, "part 'valid' needs at least 4"),
        ({"window": 4, "horizon": 5}, "`horizon` must be at most `window`"),
        ({"window": 0, "horizon": 1}, "`window` must be an integer >= 1"),
        ({"window": 4, "horizon": 2, "stride": 0}, "`stride` must be an integer >= 1"),
        ({"window": 4, "horizon": 2, "shares": (0.5, 0.5)}, "`shares` must be three positive"),
    ],
)
def test_splits_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        ramp(30).split(**arguments)


def test_a_part_without_known_targets():
    values = np.r_[np.arange(14.0), np.full(6, np.nan)][:, None]
    with pytest.raises(ValueError, match="All targets are missing in the part 'valid'"):
        TimeSeries(values).split(4, 1)
    assert len(TimeSeries(values).split(4, 1, shares=(0.5, 0.2, 0.3))[2]) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TimeSeries(np.zeros(5)), "`values` must be rank 2"),
        (lambda: TimeSeries(np.full((5, 1), "a")), "`values` must be numbers"),
        (lambda: TimeSeries(np.full((5, 2), np.nan)), "All values are missing in channel 0, ch"),
        (lambda: TimeSeries(np.zeros((5, 2)), 2, 1), "must have 2 targets and 1 future channels"),
        (lambda: ramp(5, lengths=[2, 2]), "`lengths` must be positive and add up to the 5 rows"),
        (lambda: ramp(3, times=np.array([1, 3, 3])), "Times must rise by one step, 2 here"),
        (lambda: ramp(3, times=np.array([3, 2, 1])), "Times must rise by one step"),
        (lambda: ramp(6, times=np.array([9, 1, 5, 3, 40, 20])), "step in each series.*Sort"),
        (lambda: ramp(6, times=DAYS[[0, 1, 2, 3, 4, 7]]), "1 day here.*weekends, leave out"),
        (lambda: ramp(6, times=np.array([0, 5, 11, 12, 20, 23])), "11 after 5. Resample the rows"),
        (
            lambda: ramp(4, times=np.array([0, 24, 47, 71], "M8[h]"), utc=True),
            "Received: 1970-01-02T23 after .*Days of 23 or 25 hours need dates without an offset",
        ),
        (lambda: Columns([]), "`targets` must name at least one column"),
        (lambda: Columns(["a"], past=["a"]), "Each column has one role. Received twice: a"),
        (
            lambda: TimeSeries.from_arrays(np.zeros(5), past=np.zeros((4, 1))),
            r"`past` must be as long as `targets`, \[5\]. Received: \[4\]",
        ),
    ],
)
def test_series_that_are_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_series_of_windows_is_a_dataset(tmp_path):
    text = "load\n" + "".join(f"{i % 5}\n" for i in range(60))
    path = write(tmp_path, text)
    loaded = datasets.load("series", path=path, targets=["load"], window=8, horizon=4)
    assert loaded.sizes == {"train": 31, "valid": 6, "test": 6}
    expected = {"channels": 1, "targets": 1, "future_channels": 0, "window": 8, "scale": "data"}
    assert loaded.model_arguments == expected
    chosen = datasets.load("series", path=path, targets=["load"], horizon=4)
    assert chosen.model_arguments["window"] == 14  # a third of the training part
    x, y, weight = loaded.stream("test", batch_size=4)[0]
    assert (x.shape, y.shape) == ((4, 8, 1), (4, 4, 1)) and weight.tolist() == [1, 1, 1, 1]
