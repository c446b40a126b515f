"""The examples for time series run, as scripts and as notebooks."""

import subprocess
import sys

import pytest

from tests.support.processes import ROOT, child_environment

EXAMPLES = ROOT / "examples"
NAMES = ("forecasting", "sensor_classification", "anomaly_detection", "streaming_forecast")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_example_runs_from_any_folder(name, tmp_path):
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert source.count("\n") < 60
    environment = {**child_environment(), "MPLBACKEND": "Agg"}
    subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, env=environment, check=True
    )
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path, monkeypatch):
    for module in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(module)
    from tools import notebooks

    for key, value in child_environment().items():
        monkeypatch.setenv(key, value)
    notebook = notebooks.convert(EXAMPLES / f"{name}.py", tmp_path)
    notebooks.run(notebook, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_adapter_passes_the_checks_of_sktime(monkeypatch):
    checks = pytest.importorskip("sktime.utils.estimator_checks")
    monkeypatch.syspath_prepend(EXAMPLES)
    from sktime_forecaster import TrellisForecaster

    checks.check_estimator(TrellisForecaster, raise_exceptions=True)
