"""What `tools.publish` makes of a run: results, weights, card; and the table of all."""

import json
import re
import shlex
import shutil

import h5py
import numpy as np
import pytest

from tests.support.small_runs import tiny_recipe, tiny_run
from tools import cards, publish, results_page, table
from trellis_keras import data, zoo
from trellis_keras.data.vocabulary import UNITS
from trellis_keras.files import folder_lock
from trellis_keras.training.monitors import read_history
from trellis_keras.zoo import registry
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.results import RESULTS, WEIGHTS, all_runs, assets_folder, published, read_run

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


def test_weights_stay_in_single_precision_if_half_changes_the_result(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "keeps_weights", lambda *_: True)
    monkeypatch.setattr(publish, "halve", _double)
    results = publish.publish(run, tmp_path / "tcn_adding" / "T=8")
    assert results["weights_dtype"] == "float32"
    card = (tmp_path / "tcn_adding" / "T=8" / "card.md").read_text()
    assert "in single precision: half would change" in card
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    model = zoo.tcn_adding(depth=2, filters=4, weights="pretrained")
    np.testing.assert_array_equal(model.get_weights()[0], runs.load_best(run).get_weights()[0])


def _double(path, output):
    """Damages weights, as half precision does if they are large."""
    shutil.copy(path, output)
    with h5py.File(output, "r+") as file:
        file["head/vars/0"][...] *= 2


@pytest.fixture(scope="module")
def two_seeds(run, tmp_path_factory):
    """The folders of `run` and of a run with another seed, by validation loss."""
    other = train(tmp_path_factory.mktemp("seed_1"), seed=1)
    return sorted([run, other], key=lambda folder: publish._best(folder)["val_loss"])


@pytest.mark.slow
def test_other_seeds(two_seeds, run, tmp_path):
    best, other = two_seeds
    found = publish.publish(best, tmp_path / "out", other_seeds=[other])
    assert [seed["test"] for seed in found["other_seeds"]] == [evaluate(other)["mse"]]
    assert found["test_runs"] == 2
    assert "Mean over" in " ".join((tmp_path / "out" / "card.md").read_text().split())
    with pytest.raises(ValueError, match="Publish .* instead: its validation loss is lower"):
        publish.publish(other, tmp_path / "no", other_seeds=[best])
    with pytest.raises(ValueError, match="repeats the seed [01]"):
        publish.publish(best, tmp_path / "no", other_seeds=[other, other])
    wider = train(tmp_path / "run", filters=5, epochs=1)
    with pytest.raises(ValueError, match="different recipes: filters is 5, not 4; epochs is 1"):
        publish.publish(best, tmp_path / "no", other_seeds=[wider])
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
        publish.publish(run, tmp_path / "out", other_seeds=[interrupted])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        publish.publish(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "recipe.json").write_bytes((run / "recipe.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="has not finished an epoch yet"):
        publish.publish(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Cards and tables


def test_the_commands_and_calls_of_every_card_are_ones():
    for found in all_runs(assets_folder()):
        card, recipe = cards.card(found), registry.recipe_from_dict(found.recipe)
        command = re.search(r"train (\S+) --as-published ?(\S*) --output", card)
        again = zoo.published_recipe(command[1], command[2])
        assert again.arguments == recipe.arguments
        if recipe.setting is not None:
            call = re.search(r"^recipe = (zoo\.recipe\(.*?\))$", card, re.MULTILINE | re.DOTALL)
            assert eval(call[1]).setting == recipe.setting
            continue
        call = re.search(r"^model = zoo\.(\w+)\((.*?)\)(  #|$)", card, re.MULTILINE)
        arguments = eval(f"dict({call[2]})")
        arguments.pop("weights", None)
        built = zoo.recipe(call[1], **arguments).arguments
        of_the_run = ("seed", "vocabulary_size")
        assert all(recipe.arguments[k] == built[k] for k in built if k not in of_the_run)


def test_a_card_tells_how_its_run_was_computed(tmp_path):
    (jsb,) = (found for found in all_runs(assets_folder()) if found.title == "tcn_jsb")
    card = " ".join(cards.card(jsb).split())
    assert (
        "8.188 ± 0.0023 (2 seeds) (+0.0884) | 269,938" in card
        and "published (TCN Table 1) | 8.1 | 300K" in card
    )
    assert "seed 1 8.19001. Mean over 2 seeds: 8.188, standard deviation" in card
    assert "changed from the zoo's default recipe: `decay_factor=0.5`" in card
    process = {"hardware": "X", "backend": "jax 1", "from_epoch": 1, "dtype_policy": "float32"}
    later = process | {"from_epoch": 3, "dtype_policy": "mixed_bfloat16"}
    changed = jsb.results | {"processes": [process, later], "backend": "jax 1", "commit": None}
    (tmp_path / RESULTS).write_text(json.dumps(changed))
    card = cards.card(read_run(tmp_path / RESULTS))
    assert "from epoch 3 in mixed_bfloat16 on X" in " ".join(card.split())
    assert "\nKERAS_BACKEND=jax trellis-keras train tcn_jsb" in card


def test_names_in_a_card_are_only_text(tmp_path):
    (jsb,) = (found for found in all_runs(assets_folder()) if found.title == "tcn_jsb")
    folder = tmp_path / "tcn_jsb" / "a b;c`d`<i>"
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text(json.dumps(jsb.results))
    card = cards.card(read_run(folder / RESULTS))
    assert r"# tcn_jsb (a b;c\`d\`&lt;i&gt;)" in card
    command = re.search("^trellis-keras .*", card, re.MULTILINE)[0]
    assert shlex.split(command)[-1] == "runs/tcn_jsb_a b;c`d`<i>"
    recipe = tiny_recipe(tmp_path)
    hostile = tmp_path / "`` <b> `.txt"
    assert "```` trellis_keras.data" not in cards._data(recipe)
    card = cards._data(recipe.replace(data_options={"path": hostile}))
    assert "``` trellis_keras.zoo.datasets.load('text', path='`` <b> `.txt') ```" in card


def test_cards_and_table_need_no_costs(tmp_path, monkeypatch):
    (jsb,) = (found for found in all_runs(assets_folder()) if found.title == "tcn_jsb")
    (tmp_path / "tcn_jsb").mkdir()
    (tmp_path / "tcn_jsb" / RESULTS).write_text(json.dumps(jsb.results))
    cards.main(tmp_path)
    assert (tmp_path / "tcn_jsb" / "card.md").read_text() == cards.card(jsb)
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    rows = table.table().splitlines()
    (row,) = (row for row in rows if "tcn_jsb" in row)
    assert row.startswith("| [tcn_jsb](tcn_jsb/card.md) | jsb | frame_nll | 8.1 | 300K | 8.1")
    assert "seeds) |" in row
    counts = "0 better, 1 within 2 %, 0 within 5 %, 0 apart, 0 at the floor"
    page = table.with_coverage("9 of the papers' 9 results: 9 better\n8 results by fast recipes: 8")
    none = counts.replace("1", "0")
    assert page == f"1 of the papers' 121 results: {counts}\n0 results by fast recipes: {none}"
    assert "| gru_text8_lru_paper | text8 | cross_entropy | 1.047 | 10M |" in "\n".join(rows)


def test_of_two_recipes_the_better_verdict_counts():
    paper, fast, either = table.coverage(None), table.coverage("fast"), table.coverage(None, "fast")
    assert either["trained"] <= paper["trained"] + fast["trained"]
    better = [int(found["verdicts"].split()[0]) for found in (paper, fast, either)]
    assert max(better) <= better[2] <= better[0] + better[1]
    counts = re.findall(r"(\d+) [a-z]", either["verdicts"])
    assert sum(map(int, counts)) == either["trained"]


def test_the_papers_tables_are_up_to_date():
    written = (assets_folder().parent / "docs" / "results.md").read_text()
    assert results_page.page() == written, "run `python -m tools.results_page`"
    papers = written.split("## At test time")[0]
    values = [line for line in papers.splitlines() if " | " in line and "published" not in line]
    assert len([line for line in values if "fast)]" not in line]) == len(published())
    (row,) = (line for line in values if line.startswith("| [tcn_jsb (fast)]"))
    assert row.endswith("| 7.983 ± 0.0066 (3 seeds) | 269,938 | -0.117 | better | 140 epochs | 5 |")
    (row,) = (line for line in values if line.startswith("| [tcn_ptb]"))
    assert row.endswith("| 101.5 | 14,659,600 | +12.8 | apart | 16 of 100 epochs | 2 |")


@pytest.mark.parametrize(
    ("name", "test", "expected"),
    [
        ("tcn_jsb", 8.0, "better"),
        ("tcn_jsb", 8.2, "within 2 %"),
        ("tcn_jsb", 8.4, "within 5 %"),
        ("tcn_jsb", 9.0, "apart"),
        ("tcn_seq_mnist", 0.9894, "apart"),  # 6 % more wrong answers
        ("lstm_adding", 0.167, "at the floor"),
    ],
)
def test_verdicts(name, test, expected):
    recipe = zoo.recipe(name)
    results = {"test": test, "other_seeds": []}
    assert cards.verdict(recipe, results, registry.published_value(recipe)) == expected


def test_a_verdict_on_a_generated_task_is_of_fresh_test_sets():
    sets = {"seeds": [1, 2], "mean": 8e-5, "deviation": 2e-5}
    results = {"test": 4e-5, "other_seeds": [], "test_sets": sets}
    recipe = zoo.recipe("tcn_adding")
    published_value = registry.published_value(recipe)  # 5.8e-5
    assert cards.verdict(recipe, results, published_value) == "apart"
    assert cards.difference(results, published_value) == "+2.2e-05"
    assert cards.ours(results) == "4e-05; 8e-05 ± 2e-05 on 2 other test sets"
