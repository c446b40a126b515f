"""Tables as people have them, and tables that are not."""

import gzip
import os

import numpy as np
import pandas as pd
import pytest

from trellis_series import Forecasts, read_csv
from trellis_series.panel import check_columns

VALUES = 100 + 10 * np.sin(np.arange(120) * 2 * np.pi / 24)


def frame(freq="h", form=None, start="2024-01-01"):
    times = pd.date_range(start, periods=len(VALUES), freq=freq)
    return pd.DataFrame({"ds": times.strftime(form) if form else times, "y": VALUES.round(2)})


def written(tmp_path, table, **options):
    path = tmp_path / "table.csv"
    table.to_csv(path, index=False, **options)
    return path


def first_forecast(table):
    found = Forecasts(2, season=4).fit(table).predict()
    assert np.isfinite(found["ours"]).all()
    return found["ds"].iloc[0]


def test_semicolons_and_decimal_commas(tmp_path):
    path = written(tmp_path, frame(), sep=";", decimal=",")
    np.testing.assert_allclose(read_csv(path)["y"], frame()["y"])
    assert first_forecast(read_csv(path)) == pd.Timestamp("2024-01-06")


@pytest.mark.parametrize(
    "text",
    [
        "ds;y;n\n31.12.2023;1.234,5;2.000\n01.01.2024;12,25;-1\n",
        'ds,y,n\n31.12.2023,"1,234.5","2,000"\n01.01.2024,12.25,-1\n',
    ],
)
def test_thousands_are_read_beside_dates_with_dots(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    table = read_csv(path)
    assert table["ds"].tolist() == ["31.12.2023", "01.01.2024"]
    assert table["y"].tolist() == [1234.5, 12.25] and table["n"].tolist() == [2000, -1]


def test_months_first_with_hours(tmp_path):
    table = read_csv(written(tmp_path, frame("30min", "%m/%d/%Y %I:%M %p", "2013-01-08")))
    assert first_forecast(table) == pd.Timestamp("2013-01-10 12:00")


def test_days_first_with_dots(tmp_path):
    table = read_csv(written(tmp_path, frame("D", "%d.%m.%Y")))
    assert first_forecast(table) == pd.Timestamp("2024-04-30")


@pytest.mark.parametrize("form", ["%d/%m/%Y", "%m/%d/%Y"])
def test_the_order_of_day_and_month_is_the_even_one(tmp_path, form):
    table = read_csv(written(tmp_path, frame("MS", form, "2010-01-01")))
    assert first_forecast(table) == pd.Timestamp("2020-01-01")


def test_names_of_months(tmp_path):
    table = read_csv(written(tmp_path, frame("MS", "%b %Y", "2010-01-01")))
    assert first_forecast(table) == pd.Timestamp("2020-01-01")


def test_windows_encoding(tmp_path):
    path = written(tmp_path, frame().rename(columns={"y": "Größe"}), encoding="cp1252")
    assert list(read_csv(path)) == ["ds", "Größe"]


def test_missing_hours(tmp_path):
    table = read_csv(written(tmp_path, frame().drop(range(40, 47))))
    with pytest.warns(UserWarning, match="7 missing rows"):
        assert first_forecast(table) == pd.Timestamp("2024-01-06")


def test_business_days(tmp_path):
    table = frame("B").drop([20, 41])  # holidays
    with pytest.warns(UserWarning, match="2 missing rows"):
        found = Forecasts(6).fit(read_csv(written(tmp_path, table))).predict()
    assert (found["ds"].dt.dayofweek < 5).all()


def test_time_index():
    assert first_forecast(frame().set_index("ds")) == pd.Timestamp("2024-01-06")
    assert first_forecast(frame().set_index("ds")["y"]) == pd.Timestamp("2024-01-06")


def test_series_without_times_has_equal_steps():
    named = frame()["y"].rename_axis("row")
    assert first_forecast(named) == first_forecast(named.rename(str)) == len(VALUES)


def test_unsorted_rows(tmp_path):
    table = frame().sample(frac=1, random_state=0)
    expected = Forecasts(2).fit(frame()).predict()
    pd.testing.assert_frame_equal(Forecasts(2).fit(table).predict(), expected)


def test_weekly_periods(tmp_path):
    times = pd.period_range("2022-01-03", periods=len(VALUES), freq="W")
    table = pd.DataFrame({"ds": times, "y": VALUES})
    expected = times[-1] + 1
    assert first_forecast(table) == expected
    assert first_forecast(read_csv(written(tmp_path, table))) == expected


def test_quarters_and_dates_as_numbers(tmp_path):
    quarters = frame().assign(ds=pd.period_range("1990Q1", periods=len(VALUES), freq="Q"))
    assert first_forecast(read_csv(written(tmp_path, quarters))) == pd.Period("2020Q1")
    days = frame("D", "%Y%m%d")
    assert first_forecast(read_csv(written(tmp_path, days))) == pd.Timestamp("2024-04-30")


def test_compressed_files_and_tabs(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(frame().to_csv(index=False, sep="\t").encode()))
    np.testing.assert_allclose(read_csv(path)["y"], frame()["y"])


ROWS = [f"2024-01-{day:02d},{day},note {day}" for day in range(1, 29)]


@pytest.mark.parametrize("row", ['2024-01-10,10,"5"" pipe', '2024-01-10,"10,n'])
def test_open_quote_is_named_instead_of_swallowing_rows(tmp_path, row):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["t,v,c", *ROWS[:9], row, *ROWS[10:]]))
    with pytest.raises(ValueError, match="line 11"):
        read_csv(path)


def test_two_open_quotes_do_not_hide_the_rows_between_them(tmp_path):
    rows = [row.replace("note", '"note') if i in (4, 19) else row for i, row in enumerate(ROWS)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["t,v,c", *rows]))
    with pytest.raises(ValueError, match="line 6"):
        read_csv(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"a,b\n1,2,3\n", b"a\0b\n1\n", b"a" * 2**21, b"\x1f\x8b\x08broken"],
    ids=["empty", "blank", "long row", "zero", "long line", "gzip"],
)
def test_what_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="t.csv"):
        read_csv(path)


def test_decompression_bomb_is_refused(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 2**26, compresslevel=9))
    with pytest.raises(ValueError, match="unpack"):
        read_csv(path)


def test_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="regular file"):
        read_csv(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["Load", "laod", 0])
def test_missing_column_is_named_with_the_others(name):
    with pytest.raises(ValueError, match="'load'"):
        check_columns([name], ["time", "load"])
