"""What a run shows in TensorBoard, and that to watch it changes nothing."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from tests.support.event_files import read_events
from tests.support.processes import run_script
from tests.support.run_checks import assert_same_end
from tests.support.small_runs import STATEFUL, tiny_recipe
from trellis_keras import zoo
from trellis_keras.training.history import read_history
from trellis_keras.training.tensorboard import write_graph
from trellis_keras.zoo.train_run import observers

EVERYTHING = {"gradient_norms": 1, "sample_length": 12, "graph": True, "profile": (2, 3)}
SETTINGS = STATEFUL | {"depth": 2, "aux_every": 1, "epochs": 2}


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A run of two epochs, with every source of randomness."""
    folder = tmp_path_factory.mktemp("observed")
    recipe = tiny_recipe(folder, **SETTINGS)
    zoo.train(recipe, folder / "run", verbose=0, **EVERYTHING)
    return folder / "run"


@pytest.mark.slow
def test_observation_changes_nothing(observed):
    whole = observed.parent / "whole"
    zoo.train(tiny_recipe(observed.parent, **SETTINGS), whole, verbose=0)
    assert_same_end(observed, whole, 2)


def test_one_row_of_hyperparameters_for_a_run(observed):
    logs = EventAccumulator(str(observed / "tensorboard")).Reload()
    content = logs.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    row = metadata.parse_session_start_info_plugin_data(content)
    assert re.fullmatch("run [0-9a-f]{8}", row.group_name)
    hparams = row.hparams
    assert hparams["model"].string_value == "trellisnet_char"
    assert hparams["hidden_units"].number_value == 4 and hparams["weight_norm"].bool_value
    assert hparams["data_options"].string_value.startswith('{"path": ')


def test_curves_norms_texts_and_graph(observed):
    from tensorflow import make_ndarray

    logs = observed / "tensorboard"
    values, texts, valid = (read_events(logs / n)[0] for n in ("train", "samples", "validation"))
    assert {"epoch_loss", "epoch_bpc", "epoch_learning_rate"} <= set(values)
    assert list(values["epoch_bpc"]) == list(valid["epoch_bpc"]) == [0, 1]
    assert read_events(logs / "graph")[1]
    assert list(texts) == ["sample"] and list(texts["sample"]) == [0, 1]
    table = read_history(observed / "history.csv")
    norms = [name for name in table[0] if "gradient" in name]
    assert norms == ["gradient_norm", "gradient_norm/1_trellis"]
    for name in norms:
        written = [float(row[name]) for row in table]
        assert min(written) > 0
        shown = [make_ndarray(value) for value in values[f"epoch_{name}"].values()]
        np.testing.assert_allclose(written, shown, rtol=1e-6)


# What is missing or wrong


def callbacks(folder, **options):
    """Those of a language model that is never trained."""
    model = SimpleNamespace(vocabulary="abc", backbone=None)
    return observers(folder, model, [], SimpleNamespace(valid=[1, 2]), batches=50, **options)


def test_without_tensorflow(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (norms,) = callbacks(tmp_path, gradient_norms=1, sample_length=3, graph=True)
    assert type(norms).__name__ == "GradientNorms"
    assert "no TensorBoard logs are written" in capsys.readouterr().out
    with pytest.raises(ValueError, match="Profiling requires TensorFlow"):
        callbacks(tmp_path, profile=(1, 2))


def test_a_profile_that_keras_would_leave_out(tmp_path, monkeypatch):
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    monkeypatch.setattr("trellis_keras.zoo.train_run.sys", SimpleNamespace(version_info=(3, 11)))
    with pytest.raises(ValueError, match="Python 3.12 or newer: omit `profile`"):
        callbacks(tmp_path, profile=(1, 2))


def test_a_graph_of_another_backend(tmp_path, monkeypatch):
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    with pytest.raises(ValueError, match="TensorFlow backend"):
        write_graph(None, [], tmp_path)


def test_wrong_settings(tmp_path, refused):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ValueError, match="length=-1"):
        zoo.train(recipe, tmp_path, sample_length=-1)
    for profile in ((0, 3), (3, 2), (40, 51)):
        with pytest.raises(ValueError, match="`profile` must be the first and .* of the 50 that"):
            callbacks(tmp_path, profile=profile)
    message = refused("train", "trellisnet_char", "--output", tmp_path, "--profile", "5")
    assert "--profile takes two batches, such as 10:15. Received: '5'" in message


@pytest.mark.slow
def test_on_jax(tmp_path):
    source = """
import pathlib, sys
from tests.support.small_runs import tiny_recipe
from trellis_keras import zoo
folder = pathlib.Path(sys.argv[1])
recipe = tiny_recipe(folder, epochs=2, jit_compile=True)
options = {"gradient_norms": 1, "sample_length": 12, "graph": True}
zoo.train(recipe, folder / "run", verbose=0, **options)
"""
    run_script(source, tmp_path, backend="jax")
    rows = read_history(tmp_path / "run" / "history.csv")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    logs = tmp_path / "run" / "tensorboard"
    assert "epoch_gradient_norm" in read_events(logs / "train")[0]
    assert list(read_events(logs / "samples")[0]) == ["sample"]
    assert not (logs / "graph").exists()
