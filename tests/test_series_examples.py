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


# sktime's checks fit hundreds of models. TensorFlow 2.21 crashes in this one if it runs after the
# others, so it gets its own process.
_LONGEST = "test_update_predict_predicted_index"
_SKTIME_CHECKS = """
import sys
from sktime.utils.estimator_checks import check_estimator
from sktime_forecaster import TrellisForecaster
option, name = sys.argv[1:]
check_estimator(TrellisForecaster, raise_exceptions=True, **{option: [name]})
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["tests_to_run", "tests_to_exclude"])
def test_the_adapter_passes_the_checks_of_sktime(option):
    pytest.importorskip("sktime")
    command = [sys.executable, "-c", _SKTIME_CHECKS, option, _LONGEST]
    subprocess.run(command, cwd=EXAMPLES, env=child_environment(), check=True)


@pytest.mark.slow
def test_the_adapter_forecasts_from_updated_data(monkeypatch):
    pytest.importorskip("sktime")
    monkeypatch.syspath_prepend(EXAMPLES)
    from sktime.datasets import load_airline
    from sktime_forecaster import TrellisForecaster

    y = load_airline()
    forecaster = TrellisForecaster(window=12, epochs=0).fit(y[:120], fh=[1, 2, 3])
    forecaster.update(y[120:130], update_params=False)
    found = forecaster.predict()
    expected = forecaster.fitted_.predict({"y0": y[:130].to_numpy()}, 3)
    assert (found.index == y.index[130:133]).all()
    assert found.tolist() == expected["q50"].tolist()
