"""What a run leaves in the zoo."""

import json

import pytest

from trellis_keras import zoo
from trellis_keras.zoo import runs
from trellis_keras.zoo.assets import WEIGHTS
from trellis_keras.zoo.publish import publish

SETTINGS = {
    "T": 8,
    "depth": 2,
    "filters": 4,
    "epochs": 3,
    "jit_compile": False,
    "data_options": {"train": 64, "valid": 16, "test": 16},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    runs.train(zoo.recipe("tcn_adding", **SETTINGS), folder, verbose=0)
    return folder


def test_card_and_results(run, tmp_path):
    folder = tmp_path / "tcn_adding_8"
    results = publish(run, folder)
    assert json.loads((folder / "results.json").read_text()) == results
    assert results["test"] == runs.evaluate(run)["mse"]
    assert results["epochs"] == 3 and 1 <= results["epoch"] <= 3
    assert results["settings"]["T"] == 8 and results["settings"]["filters"] == 4
    assert results["published"] is None and results["wall_time_s"] > 0
    assert (folder / "history.csv").read_bytes() == (run / "history.csv").read_bytes()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    card = (folder / "card.md").read_text()
    assert "tcn_adding (T=8)" in card and "--filters 4" in card
    # Other settings than the zoo's: its weights would not load into `tcn_adding()`.
    assert not (folder / WEIGHTS).exists()


def test_weights_of_the_zoos_own_settings_load(tmp_path, monkeypatch):
    small = {"epochs": 1, "data_options": {"train": 32, "valid": 16, "test": 16}}
    runs.train(zoo.recipe("rnn_copy_memory", **small), tmp_path / "run", verbose=0)
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "README.md").write_text("")
    publish(tmp_path / "run", tmp_path / "zoo" / "rnn_copy_memory")
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path / "zoo"))
    loaded = zoo.get_model("rnn_copy_memory", weights="pretrained").get_weights()
    best = runs.load_best(tmp_path / "run").get_weights()
    assert all((a == b).all() for a, b in zip(loaded, best, strict=True))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        publish(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
