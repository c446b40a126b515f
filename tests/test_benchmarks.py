"""The benchmark command runs a case from end to end."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from benchmarks import __main__ as main
from benchmarks import classification, compiled, edge, forecasts, rivals
from benchmarks.cases import CASES
from tests.support.processes import ROOT, child_environment, run_module
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
    """The half that did not choose counts, and the series that both forecasters have."""
    rows = []
    for series, errors in {"a": (4.0, 2.0, 4.0), "b": (2.0, 1.0, "")}.items():
        for kind, mae in zip(("seasonal naive", "ours", "AutoETS"), errors, strict=True):
            row = {"half": "held out", "series": series, "forecaster": kind, "mae": str(mae)}
            band = {"coverage": "0.5", "score": str(mae)} if kind == "ours" else {}
            row |= {"seconds": "1", "coverage": "", "score": ""} | band
            rows += [row, row | {"half": "choosing", "mae": "9"}] if mae else []
    table = forecasts.table(rows)
    assert "| ours | 2 | 0.500 | 1.000 | 0.000 | 1.000 | 0.50 | 0.50 | 2 | 2 |" in table
    assert "| AutoETS | 1 | 1.000 | 0.500 | 0.000 | - | - | - | - | 1 |" in table


@pytest.mark.parametrize("name", ["ours", "seasonal naive", "ridge", "without ridge"])
def test_forecasters_find_a_season(name):
    y = 100 + 10 * np.sin(np.arange(150) * np.pi / 6)
    y = y + np.random.default_rng(0).normal(size=150)
    mae, coverage, score, _ = forecasts.measure(y, "month", forecasts.FORECASTERS[name])
    assert float(mae) < 2
    assert bool(coverage and score) == (name in ("ours", "without ridge"))


def test_the_table_of_classification(tmp_path):
    """Equal accuracies share a rank; a set that lacks a classifier has none."""
    path = tmp_path / "own.csv"
    rows = [",".join(classification.FIELDS)]
    for half, name, kind, seed, accuracy in [
        ("reported", "b", "ours", 0, 0.8),
        ("reported", "b", "ours", 1, 0.9),
        ("reported", "b", "MiniRocket", 0, 0.85),
        ("reported", "a", "ours", 0, 1.0),
        ("reported", "a", "MiniRocket", 0, 0.5),
        ("reported", "c", "ours", 0, 0.3),
        ("choosing", "d", "ours", 0, 0.5),
    ]:
        rows.append(f"{half},{name},{kind},{seed},{accuracy},1.0")
    path.write_text("\n".join(rows) + "\n")
    table = classification.table(classification.read(path))
    assert "| b | 85.0 | 85.0 ± 7.1 |" in table and "| c | - | 30.0 |" in table
    assert "| **mean**, 2 sets | 67.5 | 92.5 |\n| **mean rank**, 2 sets | 1.75 | 1.25 |" in table
    assert table.index("| a |") < table.index("| b |") and "| d |" not in table
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
