"""Tables as people have them, and tables that are not."""

import gzip
import os

import numpy as np
import pandas as pd
import pytest

import trellis_keras.files
from trellis_series import Forecasts, read_csv
from trellis_series.panel import check_columns

VALUES = 100 + 10 * np.sin(np.arange(120) * 2 * np.pi / 24)


def frame(freq="h", form=None, start="2024-01-01"):
    times = pd.date_range(start, periods=len(VALUES), freq=freq)
    return pd.DataFrame({"ds": times.strftime(form) if form else times, "y": VALUES.round(2)})


@pytest.fixture
def read(tmp_path):
    def read(content, name="t.csv", **options):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_csv(tmp_path / name, **options)

    return read


def first_forecast(table):
    found = Forecasts(2, season=4).fit(table).predict()
    assert np.isfinite(found["ours"]).all()
    return found["ds"].iloc[0]


@pytest.mark.parametrize("options", [{"sep": ";", "decimal": ","}, {"sep": "\t"}, {"sep": "|"}])
def test_separators_and_decimal_signs_are_detected(read, options):
    text = frame().to_csv(index=False, **options)
    np.testing.assert_allclose(read(text)["y"], frame()["y"])
    packed = gzip.compress(text.encode())
    pd.testing.assert_frame_equal(read(packed, "t.csv.gz"), read(text))


def test_options_are_those_of_pandas(read):
    table = read("1,2.5\n2,3.5\n", header=None, names=["ds", "y"])
    assert table["y"].tolist() == [2.5, 3.5]
    assert read("ds,y\n1,2.5\n2,3.5\n", index_col=0).index.tolist() == [1, 2]


def test_two_columns_of_one_name_are_named(read):
    with pytest.raises(ValueError, match="several columns 'y'"):
        read("ds; y;x;y\n1;2,5;3;4\n")
    assert [*read("ds,,y,y.1,\n1,2,3,4,5\n")][2:4] == ["y", "y.1"]


def test_a_group_of_thousands_is_not_a_decimal_comma(read):
    text = "d\tload\n1\t1,234\n2\t987\n3\t1,001\n"
    assert read(text)["load"].tolist() == [1234, 987, 1001]
    assert read(text.replace("987", "98,7"))["load"].tolist() == [1.234, 98.7, 1.001]
    unclear = text.replace("987", "1,987")
    with pytest.raises(ValueError, match="1,234 in the column 'load' may be 1.234 or 1234"):
        read(unclear)
    assert read(unclear, decimal=",")["load"].tolist() == [1.234, 1.987, 1.001]
    assert read(unclear, decimal=".")["load"].tolist() == [1234, 1987, 1001]
    assert read(unclear, thousands=".")["load"].tolist() == [1.234, 1.987, 1.001]
    assert read(unclear.replace("\t", ";"))["load"].tolist() == [1.234, 1.987, 1.001]
    assert read(text.replace("987", "0").replace("\t", ";"))["load"].tolist() == [1.234, 0, 1.001]
    for shown, number in (("987.5", 987.5), ("1,002,003", 1_002_003)):
        assert read(text.replace("987", shown))["load"].tolist() == [1234, number, 1001]
    beside = unclear.replace("\n", "\t0,5\n").replace("load\t0,5", "load\tb")
    assert read(beside)["load"].tolist() == [1.234, 1.987, 1.001]


def test_a_decimal_sign_is_found_in_later_lines(read):
    rows = [f"{day};{load}" for day, load in enumerate(["900"] * 300 + ["1.644"])]
    assert read("\n".join(["d;y", *rows]))["y"].iloc[-1] == 1644
    rows = [f"{day};{load}" for day, load in enumerate(["0"] * 300 + ["0,250"])]
    assert read("\n".join(["d;y", *rows]))["y"].iloc[-1] == 0.25


@pytest.mark.parametrize("sep", [";", "\t"])
def test_a_group_of_thousands_is_not_a_decimal_point(read, sep):
    text = f"d{sep}load\n01.01.2024{sep}1.204\n02.01.2024{sep}987\n03.01.2024{sep}1.012\n"
    assert read(text)["load"].tolist() == [1204, 987, 1012]
    assert read(text.replace("987", "98.7"))["load"].tolist() == [1.204, 98.7, 1.012]
    unclear = text.replace("987", "1.987")
    if sep == "\t":
        assert read(unclear)["load"].tolist() == [1.204, 1.987, 1.012]
        return
    with pytest.raises(ValueError, match="1.204 may be 1204"):
        read(unclear)
    assert read(unclear, decimal=",")["load"].tolist() == [1204, 1987, 1012]
    assert read(unclear, decimal=".")["load"].tolist() == [1.204, 1.987, 1.012]


@pytest.mark.parametrize(
    "text",
    [
        "ds;y;n\n31.12.2023;1.234,5;2.000\n01.01.2024;12,25;-1\n",
        'ds,y,n\n31.12.2023,"1,234.5","2,000"\n01.01.2024,12.25,-1\n',
    ],
)
def test_thousands_are_read_beside_dates_with_dots(read, text):
    table = read(text)
    assert table["ds"].tolist() == ["31.12.2023", "01.01.2024"]
    assert table["y"].tolist() == [1234.5, 12.25] and table["n"].tolist() == [2000, -1]


@pytest.mark.parametrize(
    ("form", "freq", "start"),
    [
        (None, "h", "2024-01-01"),
        ("%m/%d/%Y %I:%M %p", "30min", "2013-01-08"),
        ("%d.%m.%Y", "D", "2024-01-01"),
        ("%d/%m/%Y", "MS", "2010-01-01"),  # the order of day and month is the even one
        ("%m/%d/%Y", "MS", "2010-01-01"),
        ("%b %Y", "MS", "2010-01-01"),
        ("%Y%m%d", "D", "2024-01-01"),
        ("%Y-%m-%dT%H:%M:%SZ", "h", "2024-01-01"),
    ],
)
def test_times_are_read_as_people_write_them(read, form, freq, start):
    found = first_forecast(read(frame(freq, form, start).to_csv(index=False)))
    assert found.tz_localize(None) == pd.date_range(start, periods=121, freq=freq)[-1]


@pytest.mark.parametrize("freq", ["W", "Q"])
def test_periods_are_continued(read, freq):
    times = pd.period_range("2022-01-03", periods=len(VALUES), freq=freq)
    table = pd.DataFrame({"ds": times, "y": VALUES})
    assert first_forecast(table) == times[-1] + 1
    assert first_forecast(read(table.to_csv(index=False))) == times[-1] + 1


def test_windows_encoding(read):
    assert list(read("ds,Größe\n1,2\n".encode("cp1252"))) == ["ds", "Größe"]


def test_an_index_stands_for_the_times():
    assert first_forecast(frame().set_index("ds")) == pd.Timestamp("2024-01-06")
    assert first_forecast(frame().set_index("ds")["y"]) == pd.Timestamp("2024-01-06")
    two = pd.concat([frame().assign(unique_id=name) for name in "ab"])
    for index in ("unique_id", ["unique_id", "ds"]):
        found = Forecasts(1, network=None).fit(two.set_index(index)).predict()
        assert found["unique_id"].tolist() == ["a", "b"]
    named = frame()["y"].rename_axis("row")
    assert first_forecast(named) == first_forecast(named.rename(str)) == len(VALUES)


ROWS = [f"2024-01-{day:02d},{day},note {day}" for day in range(1, 29)]


@pytest.mark.parametrize("row", ['2024-01-10,10,"5"" pipe', '2024-01-10,"10,n'])
def test_open_quote_is_named_instead_of_swallowing_rows(read, row):
    with pytest.raises(ValueError, match="line 11"):
        read("\n".join(["t,v,c", *ROWS[:9], row, *ROWS[10:]]))


def test_two_open_quotes_do_not_hide_the_rows_between_them(read):
    rows = [row.replace("note", '"note') if i in (4, 19) else row for i, row in enumerate(ROWS)]
    with pytest.raises(ValueError, match="line 6"):
        read("\n".join(["t,v,c", *rows]))


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"a,b\n1,2,3\n", b"a\0b\n1\n", b"a" * 2**21, b"\x1f\x8b\x08broken"],
    ids=["empty", "blank", "long row", "zero", "long line", "gzip"],
)
def test_files_other_than_tables_are_refused(read, content):
    with pytest.raises(ValueError, match="t.csv"):
        read(content)


def test_decompression_bomb_is_refused(read, monkeypatch):
    monkeypatch.setattr(trellis_keras.files, "MAX_UNPACKED", 2**18)
    with pytest.raises(ValueError, match="unpack"):
        read(gzip.compress(b"a,b\n" + b"1,2\n" * 2**17), "t.csv.gz")


def test_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="regular file"):
        read_csv(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["Load", "laod", 0])
def test_missing_column_is_named_with_the_others(name):
    with pytest.raises(ValueError, match="'load'"):
        check_columns([name], ["time", "load"])
