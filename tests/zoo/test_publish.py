"""What a run leaves in the zoo."""

import json
import shlex
import shutil

import numpy as np
import pytest

from tests.support.small_runs import TINY, tiny_recipe, tiny_run
from trellis_keras import data, zoo
from trellis_keras.data.vocabulary import UNITS
from trellis_keras.files import folder_lock
from trellis_keras.training.records import read_history
from trellis_keras.zoo import runs
from trellis_keras.zoo.assets import WEIGHTS
from trellis_keras.zoo.publish import (
    _best,
    _changed,
    _check_name,
    _identity,
    is_the_zoos,
    publish,
)

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
        ("tcn_char_ptb", {}, True),
    ],
)
def test_which_weights_are_the_zoos(name, changes, wanted):
    assert is_the_zoos(zoo.recipe(name, **changes), None) == wanted


def test_weights_of_words_are_not_the_zoos():
    """Their vocabulary would be a part of the text."""
    units = {unit: data.Vocabulary(["a", "<eos>"][: 1 + (unit == "word")], unit) for unit in UNITS}
    recipe = zoo.recipe("tcn_ptb")
    wanted = {"word": False, "character": True, "byte": True}
    assert {unit: is_the_zoos(recipe, units[unit]) for unit in UNITS} == wanted


@pytest.fixture
def small_zoo(run, tmp_path, monkeypatch):
    """A zoo whose only entry is the run's model, as if it had been trained on the zoo's data."""
    monkeypatch.setattr("trellis_keras.zoo.publish.is_the_zoos", lambda *_: True)
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


def test_a_language_models_weights_come_with_their_vocabulary(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, epochs=1)
    monkeypatch.setattr("trellis_keras.zoo.publish.is_the_zoos", lambda *_: True)
    publish(run, tmp_path / "zoo" / "trellisnet_char_letters")
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path / "zoo"))
    (tmp_path / "zoo" / "README.md").touch()
    size = {name: TINY[name] for name in ("depth", "hidden_units", "embedding_dim")}
    model = zoo.trellisnet_char(weights="pretrained", **size)
    trained = runs.load_best(run)
    assert model.vocabulary == trained.vocabulary
    np.testing.assert_array_equal(model.get_weights()[0], trained.get_weights()[0])
    assert zoo.trellisnet_char(weights="pretrained", vocabulary=trained.vocabulary, **size)
    other = data.Vocabulary("abcdefg", unit="character")
    with pytest.raises(ValueError, match="weights are of another vocabulary, of 7 tokens"):
        zoo.trellisnet_char(weights="pretrained", vocabulary=other, **size)
    with pytest.raises(ValueError, match="of a vocabulary of 7 tokens. Received: .*=9"):
        zoo.trellisnet_char(weights="pretrained", vocabulary_size=9, **size)


def test_of_two_sizes_the_one_that_is_asked_for(run, small_zoo, tmp_path):
    wide = zoo.recipe("tcn_adding", **SETTINGS | {"filters": 5, "epochs": 1})
    runs.train(wide, tmp_path / "run", verbose=0)
    publish(tmp_path / "run", small_zoo.parent / "tcn_adding_wide")
    for filters in (4, 5):
        model = zoo.tcn_adding(T=8, depth=2, filters=filters, weights="pretrained")
        assert model.backbone.filters == filters


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


@pytest.fixture(scope="module")
def two_seeds(run, tmp_path_factory):
    """The folders of two runs with other seeds than `run`, all three by validation loss."""
    folders = [run]
    for seed in (1, 2):
        folders.append(tmp_path_factory.mktemp(f"seed_{seed}"))
        runs.train(zoo.recipe("tcn_adding", **SETTINGS, seed=seed), folders[-1], verbose=0)
    return sorted(folders, key=lambda folder: _best(folder)["val_loss"])


def test_other_seeds_are_beside_the_best(two_seeds, tmp_path):
    best, *others = two_seeds
    results = publish(best, tmp_path / "out", other_seeds=others)
    tests = [runs.evaluate(other)["mse"] for other in others]
    assert [other["test"] for other in results["other_seeds"]] == tests
    seeds = {results["seed"], *(other["seed"] for other in results["other_seeds"])}
    assert seeds == {0, 1, 2}
    assert "mean and standard" in " ".join((tmp_path / "out" / "card.md").read_text().split())


def test_other_seeds_that_do_not_belong_to_it(two_seeds, run, tmp_path):
    best, second, third = two_seeds
    with pytest.raises(ValueError, match="lower validation loss than .*: publish that one"):
        publish(third, tmp_path / "out", other_seeds=[best])
    with pytest.raises(ValueError, match="has the seed [012], which is there already"):
        publish(best, tmp_path / "out", other_seeds=[second, second])
    runs.train(zoo.recipe("tcn_adding", **SETTINGS | {"filters": 5}), tmp_path / "run", verbose=0)
    with pytest.raises(ValueError, match="was trained by another recipe"):
        publish(best, tmp_path / "out", other_seeds=[tmp_path / "run"])
    assert not (tmp_path / "out").exists()


def test_two_models_with_the_same_fields_are_no_seeds():
    same = {"hidden_units": 4, "layers": 2, "epochs": 3}
    lstm, gru = (zoo.recipe(f"{unit}_war_and_peace", **same) for unit in ("lstm", "gru"))
    assert lstm.fields().keys() == gru.fields().keys()
    assert _identity(lstm) != _identity(gru)
    assert _identity(lstm) == _identity(lstm.replace(seed=5, jit_compile=True))
    assert _identity(lstm) != _identity(lstm.replace(data_checksum="1"))


def test_a_models_own_folder_is_for_its_benchmark(run, tmp_path):
    for name, message in (("tcn_jsb", "another model's"), ("tcn_adding", "is kept for the")):
        with pytest.raises(ValueError, match=message):
            publish(run, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_models_own_folder_also_where_nothing_or_the_same_is_published(tmp_path):
    _check_name("trellisnet_char", zoo.recipe("trellisnet_char", epochs=3))
    _check_name("trellisnet_char_mine", tiny_recipe(tmp_path))
    with pytest.raises(ValueError, match="kept for the benchmark of trellisnet_char.*text.txt"):
        _check_name("trellisnet_char", tiny_recipe(tmp_path))
    gated = zoo.recipe("tcn_seq_mnist", activation="glu", filters=18)
    assert gated.training.published == zoo.recipe("tcn_seq_mnist").training.published
    with pytest.raises(ValueError, match="kept for the benchmark of tcn_seq_mnist.*'glu'"):
        _check_name("tcn_seq_mnist", gated)


@pytest.fixture
def interrupted(run, tmp_path):
    """A run that was ended after the third of nine epochs."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "recipe.json").write_text(runs.read_recipe(run).replace(epochs=9).to_json())
    return folder


def _write_history(run, rows):
    lines = [",".join(row) for row in (rows[0], *(row.values() for row in rows))]
    (run / "history.csv").write_text("\n".join(lines) + "\n")


def test_an_interrupted_run(interrupted, tmp_path, monkeypatch):
    """In whose history a value is missing."""
    first, *others = read_history(interrupted / "history.csv")
    _write_history(interrupted, [first | {"loss": ""}, *others])
    monkeypatch.setenv("HOME", str(tmp_path))
    results = publish("~/run", "~/out")
    assert not results["finished"] and results["epochs"] == 3
    assert (tmp_path / "out" / "curve.png").exists()
    assert not list(interrupted.glob(".*"))


def test_a_run_killed_at_the_end_of_an_epoch(interrupted, run, tmp_path):
    rows = read_history(interrupted / "history.csv")
    _write_history(interrupted, [*rows, rows[-1] | {"epoch": "4", "val_loss": "1e-9"}])
    wanted = f"{interrupted} has 4 epochs .* 3 in its last .*: trellis-keras train --output"
    for runs_ in ((interrupted,), (run, interrupted)):
        with pytest.raises(ValueError, match=wanted):
            publish(runs_[0], tmp_path / "out", other_seeds=runs_[1:])
    assert not (tmp_path / "out").exists()


def test_a_run_in_which_another_process_trains(interrupted, run, tmp_path):
    with folder_lock(interrupted):
        for runs_ in ((interrupted,), (run, interrupted)):
            with pytest.raises(ValueError, match=f"{interrupted} is in use by another process"):
                publish(runs_[0], tmp_path / "out", other_seeds=runs_[1:])
    assert not (tmp_path / "out").exists()


def test_a_run_without_an_epoch(run, tmp_path):
    (tmp_path / "recipe.json").write_bytes((run / "recipe.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="has not finished an epoch yet"):
        publish(tmp_path, tmp_path / "out")


def test_results_that_are_no_numbers_leave_what_is_there(run, tmp_path, monkeypatch):
    publish(run, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="not JSON compliant"):
        publish(run, tmp_path / "out", wall_time_s=float("nan"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        publish(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
