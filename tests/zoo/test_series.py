"""Models of time series: from a CSV file to a report, a picture, a SavedModel and a forecast."""

import csv
import json
import shutil

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from tests.support.processes import run_module
from trellis_keras import zoo
from trellis_keras.export import native
from trellis_keras.forecasting import Columns, LabelledSeries, SeriesStream, TimeSeries, Windows
from trellis_keras.forecasting.picture import draw
from trellis_keras.forecasting.report import choose_season, describe_report, report
from trellis_keras.zoo import comparison, forecasts
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.classes import classify

SMALL = {"window": 12, "horizon": 4, "filters": 4, "epochs": 1, "batch_size": 16, "seed": 0}


def write(path, rows, hidden=0, names="time,load,holiday"):
    """A load that repeats every 12 hours; the last `hidden` rows have no value yet."""
    rng = np.random.default_rng(0)
    moments = np.array("2024-01-01", "datetime64[h]") + np.arange(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names.split(","))
        writer.writeheader()
        for i, moment in enumerate(moments):
            load = 1000 + 300 * np.sin(i * np.pi / 6) + rng.normal()
            known = "" if i >= rows - hidden or i % 37 == 5 else f"{load:.3f}"
            writer.writerow({"time": str(moment), "load": known, "holiday": i % 24 // 12})
    return path


def options(path, **others):
    columns = {"targets": ["load"], "future": ["holiday"], "time": "time"}
    return SMALL | {"data_options": {"path": path, **columns}} | others


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, which no test may change."""
    folder = tmp_path_factory.mktemp("forecaster")
    recipe = zoo.recipe("tcn_forecaster", **options(write(folder / "load.csv", 300)))
    runs.train(recipe, folder / "run", verbose=0)
    forecasts.finish(folder / "run", serve=False)
    return folder / "run"


def forecast(trained, path, **options):
    output = path.with_name("forecast.csv")
    forecasts.forecast(trained, path, output, **options, overwrite=True)
    with open(output, newline="") as file:
        return list(csv.DictReader(file))


def test_sizes_follow_window_and_horizon():
    assert zoo.tcn_forecaster().backbone.depth == 6
    assert zoo.tcn_forecaster(window=5, horizon=1).backbone.depth == 1
    assert zoo.trellisnet_forecaster().backbone.depth == 8
    for name in ("tcn_forecaster", "trellisnet_forecaster"):
        model = zoo.recipe(name, window=100, horizon=3, channels=2).build()
        assert 96 < model.backbone.receptive_field <= 100
        assert (model.horizon, model.targets) == (3, 1) and model.normalize
    with pytest.raises(ValueError, match="`horizon` must be at most `window`"):
        zoo.lru_forecaster(window=3, horizon=4)
    for name in ("tcn_forecaster", "trellisnet_forecaster"):
        with pytest.raises(ValueError, match="`kernel_size` must be at least 2"):
            zoo.get_model(name, kernel_size=1)


@pytest.mark.parametrize("name", ["trellisnet_forecaster", "lru_forecaster"])
def test_other_nets_take_the_channels_of_the_data(name):
    model = zoo.get_model(name, window=6, horizon=2, hidden_units=3, channels=4, targets=2)
    model.adapt(np.random.rand(20, 4))
    assert model.predict_on_batch(np.zeros((5, 6, 4), "float32")).shape == (5, 2, 2, 3)


def test_a_run_takes_its_channels_from_the_data(trained):
    recipe = zoo.read_recipe(trained)
    taken = {name: recipe.arguments[name] for name in recipe.from_data}
    assert taken == {"channels": 2, "targets": 1, "future_channels": 1, "window": 12}
    assert not {"channels", "future_channels"} & recipe.changes().keys()
    model = runs.load_best(trained)
    x = next(iter(recipe.stream(recipe.load_data().test)))[0]
    assert 300 < np.median(model.predict_on_batch(x)) < 2000  # in the units of the data


def test_a_run_chooses_its_window_unless_it_is_given(tmp_path):
    path, folder = write(tmp_path / "load.csv", 300), tmp_path / "run"
    chosen = zoo.recipe("tcn_forecaster", **options(path) | {"window": None})
    runs.train(chosen, folder, verbose=0)
    recipe = zoo.read_recipe(folder)
    assert recipe.arguments["window"] == recipe.data_options["window"] == 36  # three seasons of 12
    runs.train(chosen, folder, verbose=0)
    with pytest.raises(ValueError, match="window 36 there, 30 here"):
        runs.train(chosen.replace(window=30), folder, verbose=0)


def test_a_run_on_several_series_scales_each_window(tmp_path):
    rows = [f"{who},{i % 5 + 10 * (who == 'b')}\n" for who in "ab" for i in range(60)]
    (tmp_path / "load.csv").write_text("who,load\n" + "".join(rows))
    data = {"path": str(tmp_path / "load.csv"), "targets": ["load"], "window": 8, "horizon": 4}

    def scale(series=None, **options):
        recipe = zoo.recipe("tcn_forecaster", data_options=data | {"series": series}, **options)
        recipe = recipe.with_data(recipe.load_data())
        return recipe.arguments["scale"], recipe.build().scale

    assert scale("who") == ("window", "window")
    assert scale() == scale("who", scale="data") == ("data", "data")
    assert scale("who", linear=False) == (None, "data")
    with pytest.raises(ValueError, match="`scale='window'` needs linear=True"):
        scale("who", linear=False, scale="window")


def test_the_report(trained):
    results = json.loads((trained / "report.json").read_text())
    assert results["season"] == 24 and results["step"] == "3600 seconds"
    figures = results["targets"]["load"]
    names = {"values", "mae", "rmse", "mase", "naive_mae", "stream_mae", "coverage"}
    assert set(figures) == names
    assert 0 < figures["naive_mae"] < 3 and figures["mae"] > 0
    line = describe_report(results)
    assert line.startswith("load: mean absolute error ") and "in the 10% to 90% band" in line
    assert f"the best naive forecast ({results['season_name']})" in line
    assert results["net_share"] in (0, 0.25, 0.5, 0.75, 1)
    assert (trained / "forecast.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in trained.iterdir()} <= runs.FILES
    evaluated = runs.evaluate(zoo.read_recipe(trained), trained)
    assert evaluated["coverage"] == pytest.approx(figures["coverage"], abs=0.3)
    assert evaluated["sequences"] == results["test_windows"]


def test_both_errors_are_of_the_same_values():
    """A gap, then a jump: the values after the jump have no naive forecast."""
    values = np.r_[np.zeros(92), np.full(4, np.nan), np.full(4, 100.0)][:, None]
    train, valid, test = TimeSeries(values).split(8, 4)
    model = zoo.tcn_forecaster(window=8, horizon=4, filters=2, quantiles=None)
    model.adapt(train.rows())
    (figures,) = report(model, train, valid, test)["targets"].values()
    x, y = test.read(np.arange(len(test)))
    rows = test.starts(np.arange(len(test)))[:, None] + 8 + np.arange(4)
    assert choose_season(train) == 1  # so all naive forecasts are the last known value
    shared = ~np.isnan(values[rows] - values[rows[:, :1] - 1])
    errors = np.abs(model.predict(x, verbose=0) - y)[shared]
    assert figures["values"] == shared.sum() < (~np.isnan(y)).sum()
    assert figures["mae"] == pytest.approx(errors.mean(), abs=1e-5) and figures["mae"] < 99
    assert figures["naive_mae"] == 0


def test_bands_are_calibrated_on_the_past():
    """The noise grows; the bands follow it."""
    rng = np.random.default_rng(0)
    deviation = np.where(np.arange(3000) < 2700, 1.0, 3.0)
    series = TimeSeries(rng.normal(size=(3000, 1)) * deviation[:, None])
    train, valid, test = series.split(40, 4, stride=2)
    model = zoo.tcn_forecaster(window=40, horizon=4, filters=2)
    model.adapt(train.rows())
    figures = report(model, train, valid, test)["targets"]["target 0"]
    assert 0.74 < figures["coverage"] < 0.84


def test_a_finished_run_is_not_reported_again(trained, monkeypatch):
    results = json.loads((trained / "report.json").read_text())
    for name in ("report", "draw", "export"):
        monkeypatch.delattr(forecasts, name)
    assert forecasts.finish(trained, serve=False) == results


def test_a_forecast_of_new_data(trained, tmp_path):
    path = write(tmp_path / "new.csv", 60, hidden=8)
    rows = forecast(trained, path)
    assert list(rows[0]) == ["time", "load_q10", "load_q50", "load_q90"]
    assert [row["time"] for row in rows] == [f"2024-01-03T{h:02}:00:00" for h in (4, 5, 6, 7)]
    values = [float(row["load_q50"]) for row in rows]
    series = TimeSeries.from_csv(path, Columns("load", future="holiday"))
    model = runs.load_best(trained)
    expected = model.forecast(series.values[40:52], 4, series.values[52:56, 1:])
    np.testing.assert_allclose(values, expected[:, 0, 1], rtol=1e-5)
    assert len(forecast(trained, path, steps=3)) == 3
    turned = write(tmp_path / "turned.csv", 60, hidden=8, names="holiday,time,load")
    assert forecast(trained, turned) == rows


def test_new_data_that_do_not_fit(trained, tmp_path):
    def refused(match, path, **options):
        with pytest.raises(ValueError, match=match) as error:
            forecast(trained, path, **options)
        assert path.name in str(error.value)

    path = tmp_path / "new.csv"
    refused("a forecast needs 12 rows of the past. Received: 5", write(path, 13, hidden=8))
    refused("of 4 steps needs 4 rows with holiday after the last.*: 3", write(path, 40, hidden=3))
    refused("of 9 steps needs 12 rows with holiday", write(path, 40, hidden=8), steps=9)
    path.write_text("time,laod,holiday\n2024-01-01,1,0\n")
    refused("has no column 'load'. Did you mean 'laod'", path)
    moments = np.array("2024-01-01", "datetime64[m]") + 30 * np.arange(60)
    path.write_text("\n".join(["time,load,holiday", *(f"{moment},1,0" for moment in moments)]))
    refused("has steps of 1800 seconds; the model was trained on steps of 3600", path)


def test_a_forecast_needs_its_future_covariates(trained, tmp_path):
    path = write(tmp_path / "new.csv", 60, hidden=8)
    lines = path.read_text().splitlines()
    lines[-6] = lines[-6][:-1]  # the third row after the last value
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="'holiday'.* no value in row 3 of them, at .*T06:00:00"):
        forecast(trained, path)
    model = runs.load_best(trained)
    future = np.zeros((4, 1))
    future[1] = np.nan
    with pytest.raises(ValueError, match="`future_covariates` must have no missing.*step 1, ch"):
        model.forecast(np.ones((12, 2)), 4, future)


def test_the_times_of_a_forecast(trained, tmp_path):
    path = write(tmp_path / "new.csv", 60, hidden=8)
    plain = write(tmp_path / "plain.csv", 60, hidden=8).read_text()
    dated = [line.replace(",", "+02:00,", 1) for line in plain.splitlines()]
    path.write_text("\n".join(["time,load,holiday", *dated[1:]]))
    written = forecasts.forecast(trained, path, tmp_path / "f.csv")
    assert (written["first"], written["last"]) == ("2024-01-03T02:00:00Z", "2024-01-03T05:00:00Z")


def test_a_forecast_from_missing_values_warns(trained, tmp_path):
    path = write(tmp_path / "new.csv", 60, hidden=8)
    lines = path.read_text().splitlines()
    for i in range(42, 52):
        lines[i] = f"{lines[i].split(',')[0]},,0"
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="of the last 12 values of 'load', 83% are missing"):
        forecast(trained, path)


def test_a_backtest_of_a_run(trained, tmp_path):
    """Its origins are in the part that the run was not trained on; refits follow its recipe."""
    path, output = write(tmp_path / "load.csv", 320), tmp_path / "b.csv"
    rows = forecasts.backtest(trained, path, output, origins=3, every=2)
    start = np.datetime64(json.loads((trained / "report.json").read_text())["test_start"])
    origins = [np.datetime64(origin) for origin in rows["origin"].unique().to_pylist()]
    hour = np.timedelta64(1, "h")
    assert origins[0] == start - hour and len(origins) == 3
    assert origins[-1] == np.datetime64("2024-01-01") + (319 - 4) * hour
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    scores = pa.csv.read_csv(tmp_path / "b_scores.csv").to_pylist()
    whole, *steps = [line for line in scores if line["method"] == "forecast"][:5]
    assert whole["step"] is None and [line["step"] for line in steps] == [1, 2, 3, 4]
    errors = np.abs(rows["actual"].to_numpy() - rows["forecast"].to_numpy())
    assert whole["mae"] == pytest.approx(errors.mean())
    assert np.mean([line["mae"] for line in steps]) == pytest.approx(errors.mean())
    with pytest.raises(ValueError, match="b.csv already exists"):
        forecasts.backtest(trained, path, output)
    old = write(tmp_path / "old.csv", 200)
    with pytest.raises(ValueError, match="no 4 rows from .* on, the start of the run's test part"):
        forecasts.backtest(trained, old, tmp_path / "old_b.csv")


def test_what_a_served_model_reads():
    columns = {"targets": ["load"], "past": ["wind"], "static": ["area"], "future": ["holiday"]}
    recipe = zoo.recipe("tcn_forecaster", window=168, data_options={"path": "f.csv", **columns})
    assert forecasts.describe_series(recipe) == {
        "inputs": ["load", "wind", "holiday", "area"],
        "future": ["holiday", "area"],
        "targets": ["load"],
        "window": 168,
        "horizon": 24,
        "quantiles": (0.1, 0.5, 0.9),
    }
    columns = {"targets": ["kind"], "past": ["ax", "ay"], "series": "who"}
    recipe = zoo.recipe("tcn_classifier", window=50, data_options={"path": "f.csv", **columns})
    assert forecasts.describe_series(recipe) == {"inputs": ["ax", "ay"], "window": 50}
    assert forecasts.describe_series(zoo.recipe("tcn_jsb")) is None


def test_figures_and_pictures_of_several_series(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    series = TimeSeries(rng.normal(size=(240, 1)), lengths=[120, 120], names=["north", "south"])
    train, valid, test = series.split(12, 4)
    model = zoo.tcn_forecaster(window=12, horizon=4, filters=2)
    model.adapt(train.rows())
    results = report(model, train, valid, test)
    each = [results["series"][name]["target 0"] for name in ("north", "south")]
    assert set(each[0]) == {"values", "mae", "rmse", "naive_mae", "stream_mae", "coverage"}
    pooled = results["targets"]["target 0"]
    for name in ("mae", "naive_mae"):  # the series are of the same length
        values = [figures[name] for figures in each]
        assert values[0] != values[1] and np.mean(values) == pytest.approx(pooled[name])
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    draw(model, test, tmp_path / "forecast.png")
    assert figures[0].axes[0].get_title(loc="left") == "series south"
    short = TimeSeries(rng.normal(size=(220, 1)), lengths=[200, 20])
    model = zoo.tcn_forecaster(window=12, horizon=8, filters=2)
    draw(model, Windows(short, 12, 8, 1, [200, 200], [200, 220]), tmp_path / "forecast.png")
    assert figures[1].axes[0].lines[0].get_xdata()[0] == 200  # nothing of the other series


def test_names_are_drawn_as_they_are(trained, tmp_path):
    columns = Columns(r"$\frac$")
    values = np.random.default_rng(0).normal(size=(200, 1))
    halves = {"lengths": [100, 100], "names": ["$a", r"$\b$"]}
    *_, test = TimeSeries(values, columns=columns, **halves).split(12, 4)
    model = zoo.tcn_forecaster(window=12, horizon=4, filters=2)
    draw(model, test, tmp_path / "forecast.png")
    run = shutil.copytree(trained, tmp_path / r"$\frac$")
    comparison.draw([run], tmp_path / "compare.png")


def test_a_picture_that_fails_does_not_cost_the_report(trained, tmp_path, monkeypatch):
    def draw(*arguments):
        raise RuntimeError("no font")

    monkeypatch.setattr(forecasts, "draw", draw)
    run = shutil.copytree(trained, tmp_path / "run")
    for name in ("report.json", "forecast.png"):
        (run / name).unlink()
    with pytest.warns(UserWarning, match=r"forecast.png could not be drawn: .*no font"):
        results = forecasts.finish(run, serve=False)
    assert json.loads((run / "report.json").read_text()) == results
    assert not (run / "forecast.png").exists()


def test_series_of_unequal_lengths(tmp_path):
    """What has windows is used, and the rest is named."""
    rng = np.random.default_rng(0)
    lengths = {"a": 300, "b": 120, **dict.fromkeys("cdefgh", 25)}
    rows = [f"{name},{rng.normal():.3f}" for name, n in lengths.items() for _ in range(n)]
    path, run = tmp_path / "load.csv", tmp_path / "run"
    path.write_text("\n".join(["site,load", *rows]))
    columns = {"path": path, "targets": ["load"], "series": "site"}
    sizes = SMALL | {"window": 24, "horizon": 24}
    left_out = r"of train: 6 \('c', 'd', 'e', 'f', 'g', ...\); of valid: 7 .*; of test: 7"
    with pytest.warns(UserWarning, match=left_out):
        runs.train(zoo.recipe("tcn_forecaster", **sizes, data_options=columns), run, verbose=0)
        results = forecasts.finish(run, serve=False)
    assert results["left_out"]["train"] == {"number": 6, "first": list("cdefg")}
    assert results["series"]["b"]["load"]["mae"] is None
    path.write_text("\n".join(["site,load", *rows[:300], *["b,0"] * 10, *rows[-25:]]))
    with pytest.warns(UserWarning, match=r"than 24 rows of the past are left out: 'b'"):
        found = forecasts.forecast(run, path, tmp_path / "forecast.csv")
    assert (found["rows"], found["left_out"]) == (48, 1)


@pytest.mark.slow
def test_a_forecast_from_covariates_of_the_past(tmp_path):
    path = write(tmp_path / "load.csv", 300)
    columns = {"targets": ["load"], "past": ["holiday"], "time": "time"}
    recipe = zoo.recipe("tcn_forecaster", **SMALL, data_options={"path": path, **columns})
    runs.train(recipe, tmp_path / "run", verbose=0)
    with pytest.raises(ValueError, match="which lacks holiday .--past.* steps=5. Forecast 4 ste"):
        forecast(tmp_path / "run", path, steps=5)
    path = write(tmp_path / "new.csv", 60, hidden=3)
    with pytest.warns(UserWarning, match="the last 3 rows have no value of load. The forecast st"):
        rows = forecast(tmp_path / "run", path)
    assert rows[0]["time"] == "2024-01-03T12:00:00"


def test_a_constant_series_has_finite_forecasts():
    train, valid, test = TimeSeries(np.full((60, 1), 7.0)).split(12, 4)
    model = zoo.tcn_forecaster(window=12, horizon=4, filters=4)
    model.adapt(train.rows())
    figures = report(model, train, valid, test)["targets"]["target 0"]
    assert figures["mase"] is None and figures["naive_mae"] == 0
    assert np.isfinite(figures["mae"])


def test_wrong_quantiles_and_other_data(tmp_path):
    path = write(tmp_path / "load.csv", 300)
    with pytest.raises(ValueError, match=r"a list such as \[0.1, 0.5, 0.9\] or none. Received: '0"):
        zoo.recipe("tcn_forecaster", quantiles="0.1,0.9")
    with pytest.raises(ValueError, match="quantiles"):
        zoo.recipe("tcn_forecaster", **options(path, quantiles=[0.9, 0.1])).build()
    with pytest.raises(ValueError, match="needs separate sequences, but the data set 'text'"):
        zoo.recipe("tcn_forecaster", data="text", data_options={"path": path}).load_data()


def test_runs_are_compared(trained, tmp_path):
    header, row = comparison.table([trained])
    assert header[:6] == ("run", "model", "parameters", "epochs", "best", "val_loss")
    assert row[1::2][:2] == ("tcn_forecaster", "1") and header[-1].startswith("val_")
    size = runs.load_best(trained).count_params()
    assert row[2] == f"{size:,}" and "val_coverage" in header
    comparison.draw([trained, trained], tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "runs" / "other"
    shutil.copytree(trained, other)
    text = (other / "recipe.json").read_text()
    (other / "recipe.json").write_text(text.replace('"batch_size": 16', '"batch_size": 32'))
    header, *rows = comparison.table([trained, other])
    assert header[-1] == "batch_size" and [row[-1] for row in rows] == ["16", "32"]
    with pytest.raises(FileNotFoundError, match="holds no run: .* There is one in .*other"):
        comparison.table([tmp_path / "runs"])


@pytest.mark.slow
def test_a_served_stream_of_rows_equals_predict(tmp_path):
    """From the command to a process that has TensorFlow alone."""
    served = pytest.importorskip("tests.support.served")
    path, folder = write(tmp_path / "load.csv", 300), tmp_path / "run"
    columns = ["--csv", path, "--target", "load", "--future", "holiday", "--time", "time"]
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    done = run_module(
        "trellis_keras", "train", "tcn_forecaster", *columns, *sizes, "--output", folder
    )
    assert done.returncode == 0 and "load: mean absolute error" in done.stdout, done.stderr
    recipe, model = zoo.read_recipe(folder), runs.load_best(folder)
    x, _ = recipe.load_data().test.read(np.arange(5))
    expected = model.predict(x, verbose=0)
    assert np.all(np.abs(expected) > 100)  # in the units of the file
    saved = folder / "serving" / "1"
    requests = [(saved, "stream", {"name": "inputs", "array": x})]
    requests += [(saved, "serving_default", {"inputs": x})]
    stream, whole = served.ask(requests, tmp_path)
    np.testing.assert_allclose(whole["predictions"], expected, rtol=1e-5)
    np.testing.assert_allclose(stream[:, -1], expected, rtol=1e-5)


# Classifiers


def write_signals(path, people="abcd", rows=60, text="{}"):
    """Everybody oscillates slowly, then fast, then has no label."""
    lines = ["x,who,y,motion"]
    for person in people:
        for i in range(rows):
            motion = ("slow", "fast", "")[3 * i // rows]
            x = np.sin(i * {"slow": 0.3, "fast": 1.5, "": 0.8}[motion])
            lines.append(f"{x:.3f},{person},{i % 7},{text.format(motion)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def labelled(path, **options):
    columns = {"targets": ["motion"], "past": ["x", "y"], "series": "who"}
    return zoo.datasets.load("labelled_series", path=path, **columns, **{"window": 8, **options})


def test_labelled_windows_have_one_class(tmp_path):
    loaded = labelled(write_signals(tmp_path / "motion.csv"), stride=5)
    assert loaded.sizes == {"train": 12, "valid": 6, "test": 6}
    assert loaded.model_arguments["class_names"] == ("fast", "slow")
    x, y = loaded.test.read(np.arange(6))
    assert x.shape == (6, 8, 2) and y.tolist() == [1, 1, 1, 0, 0, 0]
    assert loaded.test.starts.tolist() == [180, 185, 190, 200, 205, 210]
    np.testing.assert_array_equal(x[3], loaded.test.series.values[200:208])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"people": "ab"}, "so at least three. Received: 2 in the column 'who'"),
        ({"people": "abcda"}, "must keep the rows of a series together"),
        ({"text": "one"}, "`motion` must name two classes"),
        ({"rows": 12}, "split 'train' has no 8 consecutive rows of one class"),
    ],
)
def test_labelled_series_that_do_not_fit(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        labelled(write_signals(tmp_path / "motion.csv", **options))


def test_a_classifier_names_series_without_windows(tmp_path):
    path = write_signals(tmp_path / "motion.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(f"0,e{i},0,slow" for i in range(4)), *lines[1:]]))
    with pytest.warns(UserWarning, match="Of 8 series, those without a window of 8 .* train: 4"):
        labelled(path)


def test_columns_of_a_classifier(tmp_path):
    path = write_signals(tmp_path / "motion.csv")
    for targets, match in (
        (["motion", "y"], "must be a single column"),
        (["y"], "Received twice: y"),
    ):
        with pytest.raises(ValueError, match=match):
            zoo.datasets.load("labelled_series", path=path, targets=targets, past=["x", "y"],
                      series="who", window=8)  # fmt: skip


def write_archive(folder, name, count=12, channels=1, classes="slow fast", seed=0):
    """A .ts file of sines of two speeds and several lengths."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        steps = np.arange(rng.integers(14, 21))[:, None] * (0.4, 1.1)[i % 2]
        sines = np.sin(steps + rng.uniform(0, 6, channels))
        words = [",".join(f"{value:.3f}" for value in channel) for channel in sines.T]
        rows.append(":".join([*words, classes.split()[i % 2]]))
    header = f"@problemName own\n@univariate {channels == 1}\n@classLabel true {classes}\n@data\n"
    path = folder / name
    path.write_text(header.lower() + "\n".join(rows) + "\n")
    return path


def whole(folder, test=None, **options):
    path = write_archive(folder, "X_TRAIN.ts")
    test = test or write_archive(folder, "X_TEST.ts", 6, seed=1)
    return zoo.datasets.load("whole_series", path=path, test=test, **options)


def test_whole_series(tmp_path):
    loaded = whole(tmp_path)
    assert loaded.sizes == {"train": 12, "valid": 12, "test": 6}
    assert loaded.model_arguments["class_names"] == ("slow", "fast")
    assert loaded.model_arguments["window"] == max(map(len, loaded.train.series)) == 20
    x, y, weight = loaded.stream("test", 4)[1]
    assert x.shape == (4, 20, 1) and weight.tolist() == [1, 1, 0, 0]
    assert whole(tmp_path, valid=0.3).sizes == {"train": 8, "valid": 4, "test": 6}
    assert whole(tmp_path, window=20).checksum == loaded.checksum
    with pytest.warns(UserWarning, match="only the first 9 steps are read"):
        assert whole(tmp_path, window=9).stream("train", 2)[0][0].shape == (2, 9, 1)


def test_whole_series_that_do_not_fit(tmp_path):
    others = {
        "two.ts": ({"channels": 2}, "X_TEST.*|two.ts must have classes, and 1 channels .* 2 chan"),
        "other.ts": ({"classes": "slow still"}, "classes must be among slow, fast. .*: still"),
    }
    for name, (options, message) in others.items():
        with pytest.raises(ValueError, match=message):
            whole(tmp_path, write_archive(tmp_path, name, **options))
    for option in ({"valid": 1.0}, {"window": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(option))}` must be"):
            whole(tmp_path, **option)


def test_the_recipe_of_whole_series():
    """What differs there is the default, and what is given counts."""
    recipe = zoo.recipe("tcn_classifier", data="whole_series", epochs=7)
    assert recipe.arguments["pooling"] == "average_max" and recipe.training.schedule == "cosine"
    assert recipe.training.epochs == 7 and recipe.training.stop_patience is None
    assert recipe.arguments["normalization"] == "batch" and recipe.training.stretch == 0.1
    assert zoo.registry.recipe_from_dict(recipe.to_dict()).to_dict() == recipe.to_dict()
    given = zoo.recipe("tcn_classifier", data="whole_series", pooling="last", schedule=None)
    assert given.arguments["pooling"] == "last" and given.training.schedule is None
    assert zoo.recipe("tcn_classifier").arguments["pooling"] == "last"
    with pytest.raises(ValueError, match="`window` must be the number of steps"):
        zoo.trellisnet_classifier(window=None)
    with pytest.raises(ValueError, match="`pooling` must be one of average, average_max, last"):
        zoo.tcn_classifier(pooling="max")


@pytest.mark.both_backends
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tcn_classifier", {"pooling": "average_max", "normalization": "batch"}),
        ("trellisnet_classifier", {"pooling": "average"}),
        ("rocket_classifier", {}),
    ],
)
def test_a_classifier_of_whole_series_streams(name, options):
    """Steps after the end of a series do not count, and a stream knows the classes at any step."""
    model = zoo.get_model(name, window=20, channels=2, num_classes=3, **options)
    x = np.random.default_rng(0).normal(size=(2, 20, 2)).astype("float32")
    x[1, 4] = np.nan
    y = np.array([0, 2])
    model.adapt(x, *([y] if name == "rocket_classifier" else []))
    model.fit(x, y, verbose=0)  # so that moving statistics count
    padded = np.where(np.arange(20)[:, None] < 13, x, np.nan)
    expected = model.predict_on_batch(x[:, :13])
    np.testing.assert_allclose(model.predict_on_batch(padded), expected, atol=1e-5)
    cache = model.initial_cache(2)
    for step in range(13):
        y, cache = model.step(x[:, step], cache)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(y), expected, atol=1e-5)


def test_stretched_series():
    """A series at another speed has its values in their order, and the length that they take."""
    steps = [np.arange(n, dtype="float32")[:, None] for n in (20, 12)]
    series = LabelledSeries(steps, [0, 1], ("long", "short"))
    stream = SeriesStream(series, 2, seed=3, shuffle=True, times=8, stretch=0.3)
    assert len(stream) == 8
    lengths = {0: set(), 1: set()}
    for x, y, _ in stream:
        for row, label in zip(x[..., 0], y, strict=True):
            valid = row[: np.isfinite(row).sum()]
            assert np.isfinite(valid).all() and (np.diff(valid) > 0).all()
            assert valid[0] == 0 and valid[-1] == len(steps[label]) - 1
            lengths[int(label)].add(len(valid))
    assert max(lengths[0]) == 20 and min(lengths[0]) < 18 and max(lengths[1]) > 13
    np.testing.assert_array_equal(stream[2][0], stream[2][0])
    first = stream[0][0]
    stream.on_epoch_end()
    assert not np.array_equal(first, stream[0][0])
    with pytest.raises(ValueError, match="`stretch` must be non-negative. Received: stretch=-1"):
        SeriesStream(series, 2, stretch=-1)
    with pytest.raises(ValueError, match="`stretch` needs data='whole_series'. Received: data='l"):
        zoo.recipe("tcn_classifier", stretch=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["average", "average_max", "rocket"])
def test_a_classifier_of_whole_series_in_c(pooling):
    pytest.importorskip("ziglang")
    sizes = {"window": 20, "channels": 2, "num_classes": 3}
    x = np.random.default_rng(0).normal(size=(9, 20, 2)).astype("float32")
    if pooling == "rocket":
        model = zoo.rocket_classifier(**sizes)
        model.adapt(x, np.arange(9) % 3)
    else:
        model = zoo.tcn_classifier(**sizes, filters=4, pooling=pooling, normalization="batch")
        model.adapt(x)
    stream = native(model)
    for step in x[0]:
        probabilities = stream.step(step)
    np.testing.assert_allclose(probabilities, model.predict_proba(x[:1], verbose=0)[0], atol=1e-5)


@pytest.mark.slow
def test_whole_series_are_trained_on_and_classified(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "classes.csv"
    path, test = (write_archive(tmp_path, f"X_{n}.ts", seed=i) for i, n in enumerate(("A", "B")))
    words = ["train", "tcn_classifier", "--csv", path, "--test", test, "--output", folder]
    words += ["--filters", 6, "--epochs", 3]
    done = run_module("trellis_keras", *words)
    assert done.returncode == 0, done.stderr
    assert "of 12 test series are right" in done.stdout
    recipe = zoo.read_recipe(folder)
    assert recipe.arguments["window"] == 20 and recipe.data_options["test"] == str(test)
    assert str(tmp_path) not in (folder / "recipe.json").read_text()
    assert run_module("trellis_keras", *words).returncode == 0  # resumed
    written = classify(folder, test, output)
    assert written["accuracy"] == runs.evaluate(recipe, folder)["accuracy"] > 0.9
    header, *rows = output.read_text().splitlines()
    assert header == "series,label,class,p(slow),p(fast)" and len(rows) == 12
    assert not np.isnan(runs.representative_data(recipe)).any()
    with pytest.raises(ValueError, match="1 channels that the model reads. Received: 2"):
        classify(folder, write_archive(tmp_path, "two.ts", channels=2), output, overwrite=True)
    check_averaged(tmp_path, words, folder, test)


def test_a_run_without_epochs(tmp_path):
    """A classifier that is fitted in closed form has all that other runs have but a history."""
    folder = tmp_path / "run"
    path, test = (write_archive(tmp_path, f"X_{n}.ts", seed=i) for i, n in enumerate(("A", "B")))
    options = {"path": str(path), "test": str(test)}
    recipe = zoo.recipe("rocket_classifier", data_options=options)
    model = runs.train(recipe, folder, verbose=0)
    assert runs.is_finished(folder) and runs.epochs_done(folder) == 0
    assert not (folder / "history.csv").exists()
    stored = zoo.read_recipe(folder)
    assert stored.arguments["window"] == 20 and stored.training.epochs == 0
    assert runs.evaluate(stored, folder)["accuracy"] > 0.8
    before = (folder / "best.keras").stat().st_mtime_ns
    again = runs.train(recipe, folder, verbose=0)  # resumed
    assert (folder / "best.keras").stat().st_mtime_ns == before
    x = recipe.stream(recipe.load_data().test)[0][0]
    np.testing.assert_allclose(again.predict_on_batch(x), model.predict_on_batch(x), atol=1e-4)
    assert classify(folder, test, tmp_path / "classes.csv")["series"] == 12
    assert "no epochs: fitted in closed form" in runs.describe(stored, model, recipe.load_data())
    more = {"data": "whole_series", "data_options": options}
    other = zoo.recipe("tcn_classifier", **more, filters=2, epochs=1)
    runs.train(other, tmp_path / "other", verbose=0)
    header, *rows = comparison.table([folder, tmp_path / "other"])
    rocket, tcn = (dict(zip(header, row, strict=True)) for row in rows)
    assert [rocket[name] for name in ("epochs", "best", "val_loss")] == ["0", "-", "-"]
    assert tcn["epochs"] == "1" and float(tcn["val_loss"]) > 0
    comparison.draw([folder, tmp_path / "other"], tmp_path / "both.png")
    with pytest.raises(ValueError, match="None of these runs has epochs"):
        comparison.draw([folder], tmp_path / "none.png")
    longer = runs.train(recipe.replace(epochs=1), folder, verbose=0)
    assert runs.epochs_done(folder) == 1 and longer.optimizer.iterations > 0
    for name, options in (("tcn_classifier", {}), ("tcn_forecaster", {"linear": False})):
        with pytest.raises(ValueError, match=f"`epochs` must be 1 or more: .* epochs=0 for {name}"):
            zoo.recipe(name, epochs=0, **options)
    with pytest.raises(ValueError, match="`window` must be the number of steps to read"):
        zoo.rocket_classifier()


def test_a_forecaster_without_epochs(tmp_path):
    """Its linear map alone, which more epochs resume from."""
    rows = [f"{10 + np.sin(0.5 * step) + 0.01 * step:.4f}" for step in range(200)]
    path = tmp_path / "load.csv"
    path.write_text("load\n" + "\n".join(rows) + "\n")
    options = {"path": str(path), "targets": ["load"], "window": 24, "horizon": 4}
    recipe = zoo.recipe("tcn_forecaster", data_options=options, epochs=0)
    model = runs.train(recipe, tmp_path / "run", verbose=0)
    assert not np.any(keras.ops.convert_to_numpy(model.head.kernel))
    assert runs.evaluate(recipe, tmp_path / "run")["mae"] < 0.1
    runs.train(recipe.replace(epochs=1), tmp_path / "run", verbose=0)
    assert runs.epochs_done(tmp_path / "run") == 1


def check_averaged(tmp_path, words, folder, test):
    """Several runs: the mean of their probabilities."""
    other, both = tmp_path / "other", tmp_path / "both.csv"
    assert run_module("trellis_keras", *words, "--seed", 1, "--output", other).returncode == 0
    classify(other, test, tmp_path / "other.csv")
    done = run_module(
        "trellis_keras", "classify", folder, test, "--average-with", other, "--output", both
    )
    assert done.returncode == 0, done.stderr
    one, two, mean = (
        np.genfromtxt(path, delimiter=",", skip_header=1)[:, 3:]
        for path in (tmp_path / "classes.csv", tmp_path / "other.csv", both)
    )
    assert np.abs(one - two).max() > 1e-3
    np.testing.assert_allclose(mean, (one + two) / 2, atol=1e-5)
    named = tmp_path / "named.ts"
    named.write_text(test.read_text().replace("fast", "quick"))
    again = ["train", "tcn_classifier", "--csv", named, "--test", named, "--filters", 4]
    third = tmp_path / "third"
    assert run_module("trellis_keras", *again, "--epochs", 1, "--output", third).returncode == 0
    with pytest.raises(ValueError, match="the same classes. Received: slow, fast of .*slow, quick"):
        classify(folder, test, tmp_path / "no.csv", average_with=[third])


def test_sizes_of_classifiers():
    for name in ("tcn_classifier", "trellisnet_classifier"):
        model = zoo.get_model(name, window=20, channels=3, num_classes=4)
        model.adapt(np.random.rand(20, 3))
        assert 16 < model.backbone.receptive_field <= 20
        assert model.predict_on_batch(np.zeros((2, 20, 3), "float32")).shape == (2, 4)


@pytest.mark.slow
def test_a_classifier_is_trained_from_a_file(tmp_path):
    path, folder = write_signals(tmp_path / "motion.csv", "abcdefgh"), tmp_path / "run"
    columns = ["--csv", path, "--target", "motion", "--past", "x", "--past", "y", "--series", "who"]
    sizes = ["--window", 8, "--filters", 6, "--epochs", 20, "--batch-size", 8]
    words = ["train", "tcn_classifier", *columns, *sizes, "--output", folder]
    done = run_module("trellis_keras", *words)
    assert done.returncode == 0, done.stderr
    assert "% of " in done.stdout and "test windows are right" in done.stdout
    model = runs.load_best(folder)
    assert model.class_names == ["fast", "slow"] and 1 < model.backbone.receptive_field <= 8
    assert runs.evaluate(zoo.read_recipe(folder), folder)["accuracy"] > 0.9
    assert run_module("trellis_keras", *words).returncode == 0  # resumed


def test_a_stream_is_judged_beside_the_windows():
    values = np.random.default_rng(0).normal(size=(300, 2)).astype("float32")
    parts = TimeSeries(values, future_channels=1, lengths=[180, 120]).split(4, 4, stride=3)
    for name, is_same in (("trellisnet_forecaster", True), ("lru_forecaster", False)):
        sizes = {"window": 4, "horizon": 4, "channels": 2, "future_channels": 1}
        model = zoo.get_model(name, **sizes, linear=False)
        model.adapt(parts[0])
        (figures,) = report(model, *parts)["targets"].values()
        same = figures["stream_mae"] == pytest.approx(figures["mae"], rel=1e-5)
        assert same == is_same, name
