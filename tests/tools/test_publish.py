"""What `tools.publish` makes of runs: results, weights, card."""

import json
import shutil

import numpy as np
import pytest

from tests.support.small_runs import tiny_run
from tools import publish
from trellis_keras import data, zoo
from trellis_keras.data.vocabulary import UNITS
from trellis_keras.jobs import folder_lock
from trellis_keras.training.history import read_history
from trellis_keras.zoo import registry
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.results import RESULTS, WEIGHTS

SETTINGS = {
    "T": 8,
    "depth": 2,
    "filters": 4,
    "epochs": 3,
    "jit_compile": False,
    "data_options": {"train": 64, "valid": 16, "test": 16},
}


def train(folder, **options):
    runs.train(zoo.recipe("tcn_adding", **SETTINGS | options), folder, verbose=0)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


def evaluate(run):
    return runs.evaluate(zoo.read_recipe(run), run)


def test_card_and_results(run, tmp_path):
    folder = tmp_path / "out"
    results = publish.publish(run, folder, note="One seed <b>alone</b>.")
    assert json.loads((folder / RESULTS).read_text()) == results
    assert registry.recipe_from_dict(results["recipe"]) == zoo.read_recipe(run)
    assert results["test"] == evaluate(run)["mse"]
    assert results["epochs"] == 3 and 1 <= results["epoch"] <= 3
    assert results["wall_time_s"] > 0 and results["finished"]
    assert (folder / "history.csv").read_bytes() == (run / "history.csv").read_bytes()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    card = (folder / "card.md").read_text()
    assert "`T=8`" in card and "One seed &lt;b&gt;alone&lt;/b&gt;." in card
    assert "none with these settings" in card
    # Other data than the zoo's: `pretrained` shall not mean these.
    assert not (folder / WEIGHTS).exists()
    with pytest.raises(ValueError, match="folders are for its own data, 'adding' with {'T'"):
        publish.publish(run)


def test_what_a_run_claims_of_itself_is_not_trusted(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "environment.json"
    claims = json.loads(path.read_text())
    claims |= {"test": 0.0, "card": "mine", "hardware": "<script>`a`</script> ![x](http://a.b/c)"}
    path.write_text(json.dumps(claims))
    results = publish.publish(copy, tmp_path / "out")
    assert results["test"] == evaluate(run)["mse"] and "card" not in results
    card = (tmp_path / "out" / "card.md").read_text()
    assert r"&lt;script&gt;\`a\`&lt;/script&gt; !\[x\](http://a.b/c)" in " ".join(card.split())
    for damaged in ([], {}, claims | {"commit": 3}, claims | {"processes": [{}]}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="environment.json is not a record of how"):
            publish.publish(copy, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_links_in_a_run_are_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "history.csv").unlink()
    (copy / "history.csv").symlink_to(run / "history.csv")
    with pytest.raises(ValueError, match="run/history.csv is a symbolic link"):
        publish.publish(copy, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "options", "folder"),
    [
        ("tcn_jsb", {"epochs": 3, "seed": 2, "jit_compile": False, "dropout": 0.1}, "tcn_jsb"),
        ("tcn_adding", {"T": 200}, "tcn_adding/T=200"),
        ("tcn_jsb", {"activation": "glu", "filters": 104}, "tcn_jsb/filters=104,activation=glu"),
        ("tcn_jsb", {"setting": "fast", "epochs": 3}, "tcn_jsb/fast"),
    ],
)
def test_the_place_of_a_run_in_the_zoo(name, options, folder, tmp_path):
    assert publish.zoo_folder(zoo.recipe(name, **options), tmp_path) == tmp_path / folder


def test_which_weights_are_kept():
    assert publish.keeps_weights(zoo.recipe("tcn_jsb", dropout=0.1), None)
    assert not publish.keeps_weights(zoo.recipe("tcn_adding", data_options={"train": 8}), None)
    assert not publish.keeps_weights(zoo.recipe("tcn_char_ptb", data="pydoc"), None)
    # The vocabulary of words would be a part of the text.
    units = {unit: data.Vocabulary(["a", "<eos>"][: 1 + (unit == "word")], unit) for unit in UNITS}
    wanted = {"word": False, "character": True, "byte": True}
    recipe = zoo.recipe("tcn_ptb")
    assert {unit: publish.keeps_weights(recipe, units[unit]) for unit in UNITS} == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Skipping variable")
def test_published_weights_are_loaded_again(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "keeps_weights", lambda *_: True)
    publish.publish(run, tmp_path / "tcn_adding" / "T=8")
    text_run = tiny_run(tmp_path, epochs=1)
    publish.publish(text_run, tmp_path / "trellisnet_char" / "small")
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    model = zoo.tcn_adding(depth=2, filters=4, weights="pretrained")
    for ours, theirs in zip(model.get_weights(), runs.load_best(run).get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype("float16"))
    file = tmp_path / "tcn_adding" / "T=8" / WEIGHTS
    assert file.stat().st_size < 2 * model.count_params() + 100_000  # no optimizer's beside them
    trained = runs.load_best(text_run)
    arguments = zoo.read_recipe(text_run).arguments
    sizes = {name: arguments[name] for name in ("depth", "hidden_units", "embedding_dim")}
    model = zoo.trellisnet_char(weights="pretrained", **sizes)
    assert model.vocabulary == trained.vocabulary
    ours, theirs = model.get_weights()[0], trained.get_weights()[0]
    np.testing.assert_array_equal(ours, theirs.astype("float16"))


@pytest.fixture(scope="module")
def two_seeds(run, tmp_path_factory):
    """The folders of `run` and of a run with another seed, by validation loss."""
    other = train(tmp_path_factory.mktemp("seed_1"), seed=1)
    return sorted([run, other], key=validation_loss)


def validation_loss(run):
    return min(float(row["val_loss"]) for row in read_history(run / "history.csv"))


@pytest.fixture(scope="module")
def three_seeds(two_seeds, tmp_path_factory):
    """Folders of runs with three seeds, by validation loss."""
    third = train(tmp_path_factory.mktemp("seed_2"), seed=2)
    return sorted([*two_seeds, third], key=validation_loss)


def test_the_seed_with_the_median_validation_loss_is_published(three_seeds, tmp_path):
    best, median, worst = three_seeds
    found = publish.publish(worst, tmp_path / "out", other_seeds=[best, median])
    assert found["recipe"]["arguments"]["seed"] == zoo.read_recipe(median).seed
    assert found["validation_loss"] == pytest.approx(validation_loss(median))
    tests = [evaluate(run)["mse"] for run in (worst, best)]
    assert [seed["test"] for seed in found["other_seeds"]] == tests
    assert found["test_runs"] == 3
    card = " ".join((tmp_path / "out" / "card.md").read_text().split())
    assert "it is number 2 of 3 by validation loss" in card and "(3 seeds)" in card


def test_further_seeds_join_a_published_run(three_seeds, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "keeps_weights", lambda *_: True)
    for published_one in three_seeds[1:]:
        folder = tmp_path / published_one.name / "tcn_adding" / "T=8"
        alone = publish.publish(published_one, folder, note="Kept.")
        others = [run for run in three_seeds if run != published_one]
        found = publish.publish(others[0], folder, other_seeds=[others[1], folder])
        assert found["validation_loss"] == pytest.approx(validation_loss(three_seeds[1]))
        assert (found["note"], found["test_runs"], found["replaced"]) == ("Kept.", 3, [])
        assert alone["test"] in [seed["test"] for seed in (found, *found["other_seeds"])]
        monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(folder.parent.parent))
        model = zoo.tcn_adding(depth=2, filters=4, weights="pretrained")
        trained = runs.load_best(three_seeds[1]).get_weights()[0]
        np.testing.assert_array_equal(model.get_weights()[0], trained.astype("float16"))
        rows = (folder / "history.csv").read_bytes()
        assert rows == (three_seeds[1] / "history.csv").read_bytes()


def test_seeds_that_do_not_belong_together(two_seeds, tmp_path):
    run, other = two_seeds
    with pytest.raises(ValueError, match="repeats the seed [01]"):
        publish.publish(run, tmp_path / "no", other_seeds=[other, other])
    wider = train(tmp_path / "run", filters=5, epochs=1)
    with pytest.raises(ValueError, match="filters 4 there, 5 here; epochs 3 there, 1 here"):
        publish.publish(run, tmp_path / "no", other_seeds=[wider])
    assert not (tmp_path / "no").exists()


@pytest.fixture
def interrupted(run, tmp_path):
    """A run that was ended after the third of nine epochs."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "recipe.json").write_text(zoo.read_recipe(run).replace(epochs=9).to_json())
    return folder


def _write_history(run, rows):
    lines = [",".join(row) for row in (rows[0], *(row.values() for row in rows))]
    (run / "history.csv").write_text("\n".join(lines) + "\n")


def test_an_interrupted_run(interrupted, tmp_path, monkeypatch):
    """In whose history a value is missing."""
    first, *others = read_history(interrupted / "history.csv")
    _write_history(interrupted, [first | {"loss": ""}, *others])
    monkeypatch.setenv("HOME", str(tmp_path))
    results = publish.publish("~/run", "~/out")
    assert not results["finished"] and results["epochs"] == 3
    assert "3 so far (the recipe has 9)" in (tmp_path / "out" / "card.md").read_text()
    assert not list(interrupted.glob(".*"))


def test_runs_that_cannot_be_published(interrupted, run, tmp_path):
    with folder_lock(interrupted), pytest.raises(ValueError, match="is in use by another process"):
        publish.publish(interrupted, tmp_path / "out")
    rows = read_history(interrupted / "history.csv")
    _write_history(interrupted, [*rows, rows[-1] | {"epoch": "4", "val_loss": "1e-9"}])
    with pytest.raises(ValueError, match="has 4 epochs .* 3 in its last .*: trellis-keras train"):
        publish.publish(interrupted, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        publish.publish(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "recipe.json").write_bytes((run / "recipe.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="has not finished an epoch yet"):
        publish.publish(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()
