"""The benchmark command runs a case from end to end."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from benchmarks import __main__ as main
from benchmarks import classification, compiled, edge, forecast_parts, forecasts, rivals
from benchmarks.cases import CASES
from tests.support.processes import ROOT, child_environment, run_module
from trellis_keras.forecasting import linear
from trellis_keras.layers import TCN


def benchmarks(*arguments):
    return run_module("benchmarks", *arguments)


@pytest.mark.slow
def test_a_case_writes_its_figures(tmp_path):
    done = benchmarks("run", "time", "--variants", "110", "--rounds", "2", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "time-tensorflow.json").read_text())
    figures = results["variants"]["110 steps"]
    assert len(figures["steps_s"]) == 2 and figures["peak_gib"] > 0
    assert figures["first_call_s"] > 0 and figures["step_s"] > 0
    assert (tmp_path / "time-tensorflow.md").read_text() in done.stdout


def test_variants_without_xla_are_left_out_on_jax():
    assert CASES["pixels"].left_out("jax") == ["all positions, graph", "cone, graph"]
    assert CASES["xla_lstm_adding"].left_out("jax") == ["without XLA"]
    assert CASES["time"].left_out("jax") == CASES["pixels"].left_out("tensorflow") == []
    figures = {"steps_s": [1.0], "step_s": 1.0, "first_call_s": 2.0, "amount": 0}
    figures |= {"device": "cpu", "peak_gib": 1.0}
    results = {"machine": {}, "variants": {"cone, XLA": figures}, "left_out": ["cone, graph"]}
    assert main.markdown("pixels", results).endswith("no graphs without XLA: cone, graph.\n")


def test_weights_are_arguments_of_what_xla_compiles(monkeypatch):
    given = []

    def compile_xla(function, variables):
        given.append(variables)
        return function

    monkeypatch.setattr(compiled, "compile_xla", compile_xla)
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.Dense(2)])
    x = np.zeros((1, 4, 3), "float32")
    assert compiled.compiled_window(model, x)() == 1
    assert compiled.compiled_call(model, model.variables, x)() == 1
    assert given == [model.variables] * 2


def test_workers_end_with_who_started_them():
    command = [sys.executable, "-m", "benchmarks.worker", "gemm", "float32"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == 0 and not done.stdout


def test_one_variant_that_fails_ends_the_others(monkeypatch):
    workers = []

    def start(name, variant, checkout):
        code = "input(); print('{}')" if variant == "fine" else "raise SystemExit(3)"
        worker = subprocess.Popen(
            [sys.executable, "-c", code + "; input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        if variant != "fine":
            worker.wait()
        workers.append(worker)
        return worker

    monkeypatch.setattr(main, "_start", start)
    with pytest.raises((RuntimeError, BrokenPipeError)):
        main.measure("gemm", ["broken", "fine"], 1)
    assert [worker.poll() is None for worker in workers] == [False, False]


def test_the_edge_table_says_what_is_left_out(monkeypatch, tmp_path):
    def missing(net):
        raise edge.Missing("node")

    ways = {"C": edge.generated_c, "native": edge.native_from_python, "WebAssembly": missing}
    monkeypatch.setattr(edge, "WAYS", ways)
    layer = TCN(2, 2, depth=1)
    layer.build((None, None, 3))
    figures = edge.measure(layer, tmp_path, turns=1)
    assert figures["microseconds"].keys() == {"C", "native"}
    assert figures["bytes"]["weights"] > 0 and figures["differences"]["native"] < 1e-5
    table = edge.markdown({"machine": {}, "nets": {"small": figures}})
    assert "| C | " in table and table.endswith("Left out: WebAssembly (needs: node).\n")


def test_the_table_of_forecasts():
    """The half that did not choose counts; a series on which a simple forecast is better stands."""
    rows = []
    for series, maes in {"a": (2.0, 4.0, 3.0, 1.0), "b": (2.0, 1.0, 3.0, 1.5)}.items():
        kinds = ("seasonal naive", "last value", "drift", "ours")
        for kind, mae in zip(kinds, maes, strict=True):
            row = {"half": "held out", "series": series, "forecaster": kind, "seconds": "1"}
            row |= {"step": "year", "rows": "40", "spread": "0.485"}
            row |= {"mae": str(mae), "ratio": str(mae / 2), "coverage": "0.7" * (kind == "ours")}
            rows += [row, row | {"half": "choosing", "mae": "9", "series": "c"}]
    for series, mae in (("a", 2.0), ("b", 1.6)):
        row = {"half": "held out", "series": series, "forecaster": "ETS", "seconds": "1"}
        row |= {"step": "year", "rows": "40", "mae": str(mae), "ratio": "1", "coverage": ""}
        rows.append(row)
    table = forecasts.table(rows)
    assert "| ETS | 2 | 0.685 | 0.215 | 2 |" in table  # of 1 / 2 and 1.5 / 1.6
    assert "| ours | 2 | 1.50 | 1 | 0.612 | 0.75 | 0.70 | 0.70 | 1.0 |" in table
    assert table.endswith("| b | 1.50 | last value |")
    # Two forecasts each. Steps that hold or fail together: a probability of 0.36.
    assert "below 0.60 on 0 series" in table and "correlated by 1.00" in table
    assert "expected number would be 0.7." in table


def test_ratio_of_errors_over_windows():
    """Two blocks of two windows; equal ratios have no error."""
    map_, net = np.array([2.0, 2.0, 4.0, 4.0]), np.array([1.0, 1.0, 3.0, 3.0])
    assert forecasts.ratio_of_means(net, map_, 2) == (2 / 3, pytest.approx(1 / 9), 2)
    assert forecasts.ratio_of_means(map_ / 2, map_, 2) == (0.5, 0, 2)


def test_parts_of_forecasters_that_are_left_out(monkeypatch):
    monkeypatch.setitem(forecast_parts.estimator.TRAINING, "epochs", 1)
    values = np.sin(np.arange(200)) + 0.3 * np.random.default_rng(0).normal(size=200)
    errors = forecast_parts._out_of_fold(values, 4, seed=0)
    assert errors.shape == (27,) and np.isfinite(errors).all()
    maps = len(linear._smoothings(30, 4, 4))
    with forecast_parts._two_seasons(4):
        assert len(linear._smoothings(30, 4, 4)) == 2 * maps
        assert len(linear._smoothings(28, 4, 4)) == maps  # a week is not within the window
    waves = forecast_parts._calendar(8, 4)
    assert list(waves) == ["day_sin", "day_cos", "week_sin", "week_cos"]
    np.testing.assert_allclose(waves["day_sin"], [0, 1, 0, -1] * 2, atol=1e-9)


def test_nets_read_no_row_of_the_test_part():
    values = np.arange(200.0)
    task = forecasts.Task(values, "month")
    assert task.valid_rows == 30 and task.ends[0] == 170
    assert task.standards() == (pytest.approx(69.5), pytest.approx(values[:140].std()))


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [("tcn", "keras-tcn"), ("neuralforecast", "N-HiTS")])
def test_nets_of_other_packages_find_a_season(package, name):
    pytest.importorskip(package)
    time = np.arange(150)
    noise = np.random.default_rng(0).normal(size=150)
    task = forecasts.Task(500 + 100 * np.sin(2 * np.pi * time / 12) + noise, "month")
    found, inside = forecasts.FORECASTERS[name](task)
    assert found.shape == task.actual.shape and inside is None
    assert forecasts._error(task, found) < 50  # the mean is wrong by 64


def test_the_chance_of_a_low_coverage():
    """Correlated steps leave the mean of the share inside, and widen it."""
    rows = [{"step": "month", "rows": "144", "coverage": "0.75", "spread": s} for s in ("0.2", "")]
    # 0.04 = 0.1915 (1 + 11 r) / 12, of the first row
    assert forecasts._correlation(rows) == pytest.approx(0.137, abs=1e-3)
    for correlation in (0, 0.137, 0.5, 1):
        inside = forecasts._inside(12, 0.8, correlation)
        steps = np.arange(13)
        mean, square = inside @ steps, inside @ steps**2
        assert inside.sum() == pytest.approx(1) and mean == pytest.approx(0.8 * 12)
        variance = 12 * 0.16 * (1 + 11 * correlation)
        assert square - mean**2 == pytest.approx(variance)


def test_the_table_of_classification(tmp_path):
    """Halves stand apart; equal accuracies share a rank; a set that lacks a classifier has none."""
    path = tmp_path / "own.csv"
    rows = [",".join(classification.FIELDS)]
    for half, name, kind, seed, accuracy in [
        ("reported", "b", "TCN", 0, 0.8),
        ("reported", "b", "TCN", 1, 0.9),
        ("reported", "b", "MiniRocket", 0, 0.85),
        ("reported", "a", "TCN", 0, 1.0),
        ("reported", "a", "MiniRocket", 0, 0.5),
        ("reported", "c", "TCN", 0, 0.3),
        ("choosing", "d", "TCN", 0, 0.5),
        ("choosing", "d", "three blocks only", 0, 0.4),
        ("reported", "b", "three blocks only", 0, 0.2),
    ]:
        rows.append(f"{half},{name},{kind},{seed},{accuracy},1.0")
    path.write_text("\n".join(rows) + "\n")
    table = classification.table(classification.read(path))
    assert "| b | 85.0 | 85.0 ± 7.1 |" in table and "| c | - | 30.0 |" in table
    assert "| **mean**, 2 sets | 67.5 | 92.5 |\n| **mean rank**, 2 sets | 1.75 | 1.25 |" in table
    assert table.index("| a |") < table.index("| b |") < table.index("| choosing |")
    assert "| choosing | TCN | three blocks only |" in table and "| d | 50.0 | 40.0 |" in table
    assert table.endswith(
        "| **mean**, 1 sets | 85.0 | 20.0 |\n| **mean rank**, 1 sets | 1.00 | 2.00 |"
    )
    assert not set(classification.CHOOSING) & set(classification.REPORTED)


def test_the_guide_has_the_table_of_classification():
    rows = classification.read(ROOT / "benchmarks" / "results" / "classification.csv")
    guide = (ROOT / "docs" / "classification.md").read_text(encoding="utf-8")
    assert classification.table(rows) in guide


def test_features_and_gaps_of_series():
    series = np.array([[1.0], [np.nan], [3.0], [4.0]])
    filled = classification._filled(series)
    assert filled[:, 0].tolist() == [1, 2, 3, 4]
    assert classification._stretched(filled, 7)[:, 0].tolist() == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    features = classification._features(filled)
    assert len(features) == 1 + 10 + 16 and features[:2] == [4, 2.5] and np.isfinite(features).all()


def test_the_guide_has_the_tables_of_the_last_comparison():
    written = (ROOT / "benchmarks/results/forecasts.md").read_text()
    lines = set((ROOT / "docs/forecasting.md").read_text().splitlines())
    assert {line for line in written.splitlines() if line.startswith("|")} <= lines


@pytest.mark.parametrize("name", ["OursTensorFlow", "KerasGRU"])
def test_rivals_step_as_their_full_pass(name, monkeypatch):
    for size, small in {"TAPS": 2, "DEPTH": 2, "FILTERS": 3, "TIME": 6, "BATCH": 2}.items():
        monkeypatch.setattr(rivals, size, small)
    program = getattr(rivals, name)()
    program.train()
    program.reset()
    x = np.random.default_rng(0).normal(size=(12, rivals.CHANNELS)).astype("float32")
    found = [program.step(row) for row in x]
    np.testing.assert_allclose(found, program.full(x), rtol=1e-5, atol=1e-6)
    assert program.state_bytes > 0
