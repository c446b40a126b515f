"""The command, from a file to a forecast, a picture and a verdict."""

import re

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from trellis_series import cli

RNG = np.random.default_rng(0)
N = 300
TIMES = pd.date_range("2024-01-01", periods=N, freq="h")
LOAD = 100 + 10 * np.sin(np.arange(N) * np.pi / 12) + RNG.normal(size=N)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"time": TIMES, "load": LOAD}).to_csv("load.csv", index=False)
    return tmp_path


def run(*arguments, fails=False):
    result = CliRunner().invoke(cli.app, ["forecast", *map(str, arguments)])
    assert (result.exception is not None) == fails, result.output
    return str(result.exception) if fails else result.output


FILE = ("load.csv", "--time", "time", "--target", "load", "--output", "f.csv")


def test_a_file_becomes_a_forecast_a_table_and_a_picture(folder):
    output = run(*FILE, "--level", 80, "--no-rivals", "--save", "kept")
    found = pd.read_csv("f.csv", parse_dates=["time"])
    assert list(found) == ["time", "ours", "ours-lo-80", "ours-hi-80"]
    assert found["time"].tolist() == list(pd.date_range(TIMES[-1], periods=25, freq="h")[1:])
    assert all(word in output for word in ("ours", "seasonal naive", "in 80 % band", "favors this"))
    assert (folder / "f.png").stat().st_size > 10_000
    run("load.csv", "--model", "kept", "--output", "g.csv")
    pd.testing.assert_frame_equal(pd.read_csv("f.csv"), pd.read_csv("g.csv"))
    pd.read_csv("load.csv")[:280].to_csv("old.csv", index=False)
    run("old.csv", "--model", "kept", "--level", 95, "--output", "h.csv")
    assert pd.read_csv("h.csv")["time"][0] == str(TIMES[280])
    assert list(pd.read_csv("h.csv"))[-1] == "ours-hi-95"
    for option in ("--horizon 12", "--season 24", "--no-network", "--target load", "--save k"):
        options = ["old.csv", "--model", "kept", *option.split(), "--output", "i.csv"]
        assert f"leave out {option.split()[0]}." in run(*options, fails=True)
    options = ["old.csv", "--model", "kept", *FILE[1:5], "--no-network", "--output", "i.csv"]
    assert "leave out --target, --time, --no-network." in run(*options, fails=True)


def test_rivals_are_in_the_table_if_they_are_installed(folder):
    pytest.importorskip("statsforecast")
    assert "AutoETS" in run(*FILE, "--horizon", 12, "--windows", 1)
    assert "AutoETS" not in run(*FILE, "--horizon", 12, "--no-rivals", "--overwrite")


def test_the_naive_forecast_is_written_where_it_is_better(folder):
    y = np.random.default_rng(5).normal(size=200).cumsum()
    days = pd.date_range("2024-01-01", periods=200)
    pd.DataFrame({"time": days, "load": y}).to_csv("load.csv", index=False)
    options = ["--horizon", 7, "--season", 1, "--no-rivals"]
    output = run(*FILE, *options)
    assert "favors the seasonal naive forecast" in output and "written instead" in output
    found = pd.read_csv("f.csv")
    assert list(found) == ["time", "naive", "naive-lo-80", "naive-hi-80"]
    np.testing.assert_allclose(found["naive"], y[-1])
    run(*FILE, *options, "--no-fallback", "--overwrite")
    assert "ours" in pd.read_csv("f.csv")


def test_names_of_series_stay_as_they_are_written(folder):
    names = ["007", "7", "NA"]
    parts = [pd.DataFrame({"store": name, "time": TIMES[:60], "load": LOAD[:60]}) for name in names]
    pd.concat(parts).to_csv("stores.csv", index=False)
    options = ["stores.csv", "--series", "store", *FILE[1:5], "--no-network", "--horizon", 2]
    run(*options, "--output", "s.csv", "--save", "kept")
    run("stores.csv", "--model", "kept", "--output", "t.csv")
    for file in ("s.csv", "t.csv"):
        found = pd.read_csv(file, dtype=str, keep_default_na=False)
        assert found["store"].unique().tolist() == names


def test_rows_without_times_are_numbered(folder):
    run("load.csv", "--target", "load", "--season", 24, "--no-rivals", "--output", "f.csv")
    assert pd.read_csv("f.csv")["step"].tolist() == list(range(N + 1, N + 25))


def test_covariates_of_the_future_follow_the_last_value(folder):
    holiday = np.arange(N) % 50 < 5
    table = pd.DataFrame({"time": TIMES, "load": LOAD - 20 * holiday, "holiday": holiday})
    table.loc[N - 12 :, "load"] = np.nan
    table.to_csv("load.csv", index=False)
    run(*FILE, "--horizon", 12, "--no-rivals", "--future", "holiday")
    assert pd.read_csv("f.csv")["time"][0] == str(TIMES[N - 12])


@pytest.mark.parametrize("horizon", [12, 13])
def test_missing_covariates_are_named_before_the_backtest(folder, monkeypatch, horizon):
    table = pd.read_csv("load.csv").assign(holiday=1.0)
    table.loc[N - 12 :, ["load", *["holiday"] * (horizon == 12)]] = np.nan
    table.to_csv("load.csv", index=False)
    monkeypatch.setattr(cli.Forecasts, "cross_validation", None)
    message = run(*FILE, "--horizon", horizon, "--future", "holiday", fails=True)
    assert f"The {horizon} rows after" in message and "'holiday'" in message
    assert "X_df" not in message


def test_the_worst_series_are_named(folder):
    table = pd.read_csv("load.csv")
    houses = [table.assign(house=f"h{i}") for i in range(2)]
    pd.concat([*houses, table.assign(house="dark", load=3.1)]).to_csv("load.csv", index=False)
    options = ("--series", "house", "--no-rivals", "--horizon", 12, "--windows", 2)
    output = run(*FILE, *options)
    assert "worst series" in output and "dark 1.00" in output
    assert list(pd.read_csv("f.csv"))[:2] == ["house", "time"]


@pytest.mark.parametrize(
    ("load", "kind", "verdict"),
    [
        (
            np.where(np.arange(N) < N - 150, RNG.normal(size=N), 0.0),
            "naive",
            "not 0, as its own are",
        ),
        (np.full(N, 3.1), "ours", "errors of both are equal"),
        (1e9 + ((LOAD - 90) / 40).cumsum(), "ours", "% below"),
    ],
    ids=["off", "constant", "meter"],
)
def test_rounding_does_not_count_as_an_error(folder, load, kind, verdict):
    pd.DataFrame({"time": TIMES, "load": load}).to_csv("load.csv", index=False)
    output = run(*FILE, "--no-rivals")
    assert verdict in output and "100% below" not in output
    assert kind in pd.read_csv("f.csv")


@pytest.mark.parametrize(
    ("large", "small", "verdict"),
    [
        (RNG.normal(size=N).cumsum(), LOAD, "series, are .* below .*, but the MAE.* is higher"),
        (LOAD - 100, RNG.normal(size=N).cumsum(), "series, are .* above .*, but .* is lower"),
        (LOAD, LOAD, r"its series, are \d+% below .* naive forecast\.$"),
    ],
)
def test_the_verdict_says_that_series_count_alike(folder, large, small, verdict):
    parts = [1_000 * large, *[small] * 3]
    tables = [pd.DataFrame({"time": TIMES, "load": y, "n": i}) for i, y in enumerate(parts)]
    pd.concat(tables).to_csv("load.csv", index=False)
    output = run(*FILE, "--series", "n", "--season", 24, "--no-rivals", "--no-network")
    assert re.search(verdict, output, re.MULTILINE)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "1 of 1 series is too short to calibrate its band, which is wider"),
        (2, "2 of 2 series are too short to calibrate their bands, which are wider"),
    ],
)
def test_short_series_say_so(folder, count, message):
    table = pd.DataFrame({"y": RNG.normal(size=20).cumsum()})
    pd.concat([table.assign(n=i) for i in range(count)]).to_csv("y.csv", index=False)
    options = ("--target", "y", "--series", "n", "--horizon", 12, "--output", "f.csv")
    output = run("y.csv", *options)
    assert "no backtest" in output and message in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv", "--target", "load"], "none.csv"),
        (["load.csv", "--target", "Load", "--time", "time"], "Did you mean 'load'"),
        (["load.csv", "--target", "load", "--time", "tim"], "Did you mean 'time'"),
        (["load.csv"], "--target"),
        (["step.csv", "--target", "load"], "--time step"),
        (["head.csv", "--target", "load", "--time", "time"], "no rows"),
        (["load.csv", "--target", "load", "--save", "."], "exists"),
    ],
)
def test_mistakes_are_named_and_write_nothing(folder, arguments, message):
    (folder / "head.csv").write_text("time,load\n")
    (folder / "step.csv").write_text("step,load\n5,1\n6,2\n")
    assert message in run(*arguments, "--output", "f.csv", fails=True)
    assert not (folder / "f.csv").exists()


def test_files_are_replaced_only_if_asked(folder):
    (folder / "f.csv").write_text("mine")
    options = ["load.csv", "--target", "load", "--output"]
    assert "--overwrite" in run(*options, "f.csv", fails=True)
    for name in ("f.png", "f.xlsx"):
        assert "name a .csv file" in run(*options, name, fails=True)
    assert "input" in run(*options, "load.csv", "--overwrite", fails=True)
    assert (folder / "f.csv").read_text() == "mine"


@pytest.fixture
def failed(folder, capsys, monkeypatch):
    def failed(*arguments):
        arguments = ["trellis-series", "forecast", *arguments, "--output", "f.csv"]
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().err

    return failed


def test_messages_escape_what_a_terminal_would_interpret(folder, failed):
    (folder / "x.csv").write_text("a\x1b]0;title\x07,b\n1,2\n")
    assert "\x1b" not in failed("x.csv", "--target", "c")


def test_missing_files_are_named_in_words(failed):
    assert failed("lod.csv", "--target", "load") == "Error: There is no file lod.csv.\n"
    found = failed("load.csv", "--model", "nosuch", "--target", "load")
    assert found == "Error: There is no file nosuch/forecasts.json.\n"
