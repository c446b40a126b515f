"""What a run leaves in the zoo."""

import json
import shlex

import numpy as np
import pytest

from trellis_keras import zoo
from trellis_keras.zoo import runs
from trellis_keras.zoo.assets import WEIGHTS
from trellis_keras.zoo.publish import _changed, is_the_zoos, publish

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
    # Other data than the zoo's: `pretrained` shall not mean these.
    assert not (folder / WEIGHTS).exists()


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("tcn_jsb", {}, True),
        ("tcn_jsb", {"epochs": 3, "seed": 2, "jit_compile": False}, True),
        ("tcn_jsb", {"dropout": 0.1}, True),
        ("tcn_adding", {"T": 200}, True),
        ("tcn_adding", {"data_options": {"train": 8}}, False),
        ("tcn_char_ptb", {"data": "pydoc"}, False),
        ("tcn_char_ptb", {}, False),
    ],
)
def test_which_weights_are_the_zoos(name, changes, wanted):
    assert is_the_zoos(zoo.recipe(name, **changes)) == wanted


@pytest.fixture
def small_zoo(run, tmp_path, monkeypatch):
    """A zoo whose only entry is the run's model, as if it had been trained on the zoo's data."""
    monkeypatch.setattr("trellis_keras.zoo.publish.is_the_zoos", lambda recipe: True)
    publish(run, tmp_path / "zoo" / "tcn_adding_8")
    (tmp_path / "zoo" / "README.md").touch()
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path / "zoo"))
    return tmp_path / "zoo" / "tcn_adding_8"


@pytest.mark.filterwarnings("error:Skipping variable")
def test_published_weights_are_found_by_what_they_solve(run, small_zoo):
    model = zoo.tcn_adding(T=8, depth=2, filters=4, weights="pretrained", learning_rate=0.1)
    for ours, theirs in zip(model.get_weights(), runs.load_best(run).get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "zoo.tcn_adding(" in (small_zoo / "card.md").read_text()
    numbers = 4 * model.count_params()
    assert (small_zoo / WEIGHTS).stat().st_size < numbers + 100_000  # no optimizer's beside them
    for name, settings in (("tcn_adding", {"T": 9, "depth": 2}), ("tcn_jsb", {})):
        with pytest.raises(ValueError, match=f"no pretrained weights of {name}.*tcn_adding_8"):
            zoo.get_model(name, **settings, weights="pretrained")
    with pytest.raises(ValueError, match="does not hold the weights of this tcn_adding"):
        zoo.tcn_adding(T=8, depth=2, filters=5, weights="pretrained")


def test_weights_that_are_not_the_published_ones_are_refused(small_zoo):
    with open(small_zoo / WEIGHTS, "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="not the file that was published"):
        zoo.tcn_adding(T=8, depth=2, filters=4, weights="pretrained")


def test_settings_that_follow_from_others_are_left_out():
    recipe = zoo.recipe("tcn_adding", T=200, epochs=3)
    assert _changed(recipe) == {"T": 200, "epochs": 3}
    recipe = zoo.recipe("tcn_adding", T=200, filters=30)
    assert _changed(recipe) == {"T": 200, "filters": 30}


def test_the_cards_command_is_one_for_the_shell(run, tmp_path):
    publish(run, tmp_path / "out")
    card = (tmp_path / "out" / "card.md").read_text()
    command = next(line for line in card.splitlines() if line.startswith("trellis-keras train"))
    words = shlex.split(command)
    assert json.loads(words[words.index("--data-options") + 1]) == SETTINGS["data_options"]
    assert "--published" not in words


def test_a_note_is_on_the_card(run, tmp_path):
    note = "Three seeds were compared on the validation split."
    assert publish(run, tmp_path / "out", note=note)["note"] == note
    assert f"\n\n{note}\n\n" in (tmp_path / "out" / "card.md").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        publish(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
