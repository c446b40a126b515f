"""What `tools.publish` makes of runs: results, weights, card."""

import json
import shutil

import numpy as np
import pytest

from tools.publish import keeps_weights, publish, zoo_folder
from trellis_keras import data, zoo
from trellis_keras.data.vocabulary import UNITS
from trellis_keras.jobs import folder_lock
from trellis_keras.training.history import read_history
from trellis_keras.zoo import evaluation, registry
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.results import RESULTS, WEIGHTS

SETTINGS = {
    "T": 8,
    "depth": 1,
    "filters": 4,
    "epochs": 3,
    "jit_compile": False,
    "data_options": {"train": 64, "valid": 16, "test": 16},
}


def train(folder, **options):
    zoo.train(zoo.recipe("tcn_adding", **SETTINGS | options), folder, verbose=0)
    return folder


def evaluate(run):
    return evaluation.evaluate(zoo.read_recipe(run), run)["mse"]


def validation_loss(run):
    return min(float(row["val_loss"]) for row in read_history(run / "history.csv"))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Folders of runs with three seeds, by validation loss."""
    folders = [train(tmp_path_factory.mktemp(f"seed_{seed}"), seed=seed) for seed in range(3)]
    return sorted(folders, key=validation_loss)


@pytest.fixture
def run(seeds, tmp_path):
    """A copy of a run."""
    return shutil.copytree(seeds[0], tmp_path / "run")


@pytest.fixture
def shipped(monkeypatch):
    """Lets weights be published that are not of the zoo's data."""
    monkeypatch.setattr("tools.publish.keeps_weights", lambda *_: True)


def test_the_best_model_has_all_levels(run, tmp_path, monkeypatch):
    model = runs.load_best(run)
    model.backbone.depth = 2
    monkeypatch.setattr(runs, "load_best", lambda folder: model)
    with pytest.raises(ValueError, match="in epoch [123], with 2 of 1 levels"):
        publish([run], folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_card_and_results(seeds, tmp_path):
    run, folder = seeds[0], tmp_path / "out"
    results = publish([run], folder, note="One seed <b>alone</b>.")
    assert json.loads((folder / RESULTS).read_text()) == results
    assert registry.recipe_from_dict(results["recipe"]) == zoo.read_recipe(run)
    assert results["test"] == evaluate(run)
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
        publish([run])


def test_what_a_run_claims_of_itself_is_not_trusted(run, tmp_path):
    path = run / "environment.json"
    claims = json.loads(path.read_text())
    claims |= {"test": 0.0, "card": "mine", "hardware": "<script>`a`</script> ![x](http://a.b/c)"}
    path.write_text(json.dumps(claims))
    results = publish([run], tmp_path / "out")
    assert results["test"] == evaluate(run) and "card" not in results
    card = (tmp_path / "out" / "card.md").read_text()
    assert r"&lt;script&gt;\`a\`&lt;/script&gt; !\[x\](http://a.b/c)" in " ".join(card.split())
    for damaged in ([], {}, claims | {"commit": 3}, claims | {"processes": [{}]}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="environment.json is not a record of how"):
            publish([run], tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_seconds_of_a_training_without_tensorboard(run, tmp_path):
    shutil.rmtree(run / "tensorboard")
    assert publish([run], tmp_path / "unknown")["wall_time_s"] is None
    (run / "figures.json").write_text('{"training_s": 12.345}')
    assert publish([run], tmp_path / "known")["wall_time_s"] == 12.3


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
    assert zoo_folder(zoo.recipe(name, **options), tmp_path) == tmp_path / folder


def test_which_weights_are_kept():
    assert keeps_weights(zoo.recipe("tcn_jsb", dropout=0.1), None)
    assert not keeps_weights(zoo.recipe("tcn_adding", data_options={"train": 8}), None)
    assert not keeps_weights(zoo.recipe("tcn_char_ptb", data="pydoc"), None)
    # The vocabulary of words would be a part of the text.
    units = {unit: data.Vocabulary(["a", "<eos>"][: 1 + (unit == "word")], unit) for unit in UNITS}
    wanted = {"word": False, "character": True, "byte": True}
    recipe = zoo.recipe("tcn_ptb")
    assert {unit: keeps_weights(recipe, units[unit]) for unit in UNITS} == wanted


def test_the_seed_with_the_median_validation_loss_is_published(seeds, tmp_path):
    best, median, worst = seeds
    found = publish([worst, best, median], tmp_path / "out")
    assert found["recipe"]["arguments"]["seed"] == zoo.read_recipe(median).seed
    assert found["validation_loss"] == pytest.approx(validation_loss(median))
    assert [seed["test"] for seed in found["other_seeds"]] == [evaluate(worst), evaluate(best)]
    assert all(seed["backend"] == found["backend"] for seed in found["other_seeds"])
    assert found["test_runs"] == 3
    card = " ".join((tmp_path / "out" / "card.md").read_text().split())
    assert "This seed ranks 2 of 3 by validation loss." in card and "(3 seeds)" in card
    assert "Its weights are stored." not in card  # other data than the zoo's


def test_further_seeds_join_a_zoo_run(seeds, tmp_path, monkeypatch, shipped):
    folder = tmp_path / "tcn_adding" / "T=8"
    alone = publish([seeds[2]], folder, note="Kept.")
    found = publish([*seeds[:2], folder])
    assert found["validation_loss"] == pytest.approx(validation_loss(seeds[1]))
    assert (found["note"], found["test_runs"], found["replaced"]) == ("Kept.", 3, [])
    assert alone["test"] in [seed["test"] for seed in (found, *found["other_seeds"])]
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    model = zoo.tcn_adding(depth=1, filters=4, weights="pretrained")
    trained = runs.load_best(seeds[1]).get_weights()[0]
    np.testing.assert_array_equal(model.get_weights()[0], trained.astype("float16"))
    assert (folder / WEIGHTS).stat().st_size < 2 * model.count_params() + 100_000  # no optimizer's
    assert (folder / "history.csv").read_bytes() == (seeds[1] / "history.csv").read_bytes()


def test_seeds_that_do_not_belong_together(seeds, tmp_path):
    run, other, _ = seeds
    with pytest.raises(ValueError, match="repeats the seed"):
        publish([run, other, other], tmp_path / "no")
    wider = shutil.copytree(run, tmp_path / "wider")
    (wider / "recipe.json").write_text(zoo.read_recipe(run).replace(filters=5).to_json())
    with pytest.raises(ValueError, match="filters 4 there, 5 here"):
        publish([other, wider], tmp_path / "no")
    assert not (tmp_path / "no").exists()


def _write_history(run, rows):
    lines = [",".join(row) for row in (rows[0], *(row.values() for row in rows))]
    (run / "history.csv").write_text("\n".join(lines) + "\n")


def test_an_interrupted_run(run, tmp_path, monkeypatch):
    """After the third of nine epochs; in its history a value is missing."""
    (run / "recipe.json").write_text(zoo.read_recipe(run).replace(epochs=9).to_json())
    first, *others = read_history(run / "history.csv")
    _write_history(run, [first | {"loss": ""}, *others])
    monkeypatch.setenv("HOME", str(tmp_path))
    results = publish(["~/run"], "~/out")
    assert not results["finished"] and results["epochs"] == 3
    assert "3 so far (the recipe has 9)" in (tmp_path / "out" / "card.md").read_text()
    assert not list(run.glob(".*"))


def test_runs_that_cannot_be_published(run, seeds, tmp_path):
    with folder_lock(run), pytest.raises(ValueError, match="is in use by another process"):
        publish([run], tmp_path / "out")
    rows = read_history(run / "history.csv")
    _write_history(run, [*rows, rows[-1] | {"epoch": "4", "val_loss": "1e-9"}])
    with pytest.raises(ValueError, match="has 4 epochs .* 3 in its last .*: trellis-keras train"):
        publish([run], tmp_path / "out")
    (run / "best.keras").unlink()
    (run / "best.keras").symlink_to(seeds[1] / "best.keras")
    with pytest.raises(ValueError, match="run/best.keras is a symbolic link"):
        publish([run], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        publish([tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
