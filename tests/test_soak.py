"""The soak script: that it sees what differs, and, slowly, that nothing does."""

import zipfile

import h5py
import numpy as np
import pytest

from benchmarks import soak
from tests.support.checkpoints import small_state
from trellis_keras.training import checkpoint


def a_run(folder, weight=1.0, best=1.0, loss=0.5):
    """What `soak.differences` reads of a finished run."""
    (folder / "checkpoints").mkdir(parents=True)
    arrays = {"model.00000": np.array([weight])}
    state = small_state(soak.EPOCHS, logs={"loss": loss})
    state["variables"]["model"].append({"path": "w", "dtype": "float64"})
    name = f"epoch-{soak.EPOCHS:04d}.npz"
    checkpoint._make_durable(folder / "checkpoints" / name, arrays, state)
    (folder / "history.csv").write_text(f"epoch,loss\n1,{loss}\n")
    with h5py.File(folder / "weights.h5", "w") as file:
        file["layers/dense/vars/0"] = [best]
    with zipfile.ZipFile(folder / "best.keras", "w") as archive:
        archive.write(folder / "weights.h5", "model.weights.h5")
    return folder


def test_differences_are_seen(tmp_path):
    run = a_run(tmp_path / "run")
    assert soak.differences(run, a_run(tmp_path / "same")) == []
    assert soak.differences(run, a_run(tmp_path / "weight", weight=1 + 1e-15)) == [
        "weights and optimizer"
    ]
    assert soak.differences(run, a_run(tmp_path / "best", best=1 + 1e-15)) == ["best.keras"]
    assert soak.differences(run, a_run(tmp_path / "loss", loss=0.25)) == [
        "state",
        "history.csv",
    ]


@pytest.mark.slow
def test_killed_runs_end_as_others_do(tmp_path):
    results = soak.soak(tmp_path, kills=4, seed=1)
    assert len(results["kills"]) == 4
    assert results["lost"] == results["different"] == []
