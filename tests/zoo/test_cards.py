"""The zoo's cards: each is what its results, or its recipe and its cost, make of it."""

import json
import pathlib
import re
import shlex

import pytest

from trellis_keras import cli, data, zoo
from trellis_keras.zoo import assets, card_sections, cards, publish

COSTS = {
    "machine": {"hardware": "2 cores of X", "backend": "tensorflow 1"},
    "models": {
        "tcn_ptb": {
            "step_core_s": 0.9,
            "steps_per_epoch": 1000,
            "memory_gib": 1.25,
            "parameters": 14_659_600,
        }
    },
}
RESULTS = {
    "model": "tcn_adding",
    "settings": {"seed": 1, "T": 200},
    "metric": "mse",
    "test": 3e-4,
    "test_metrics": {"mse": 3e-4, "sequences": 1000},
    "published": None,
    "validation_loss": 2e-4,
    "epoch": 9,
    "epochs": 10,
    "seed": 1,
    "parameters": 58051,
    "wall_time_s": 240.0,
    "hardware": "2 cores of X",
    "backend": "tensorflow 1",
    "commit": "abc",
    "date": "2026-01-01",
    "data_checksum": "0123456789abcdef0123",
    "note": "One seed alone.",
    "weights_sha256": "0",
}


@pytest.fixture(scope="module")
def all_cards():
    return cards.all_cards(assets.assets_folder())


def test_every_folder_of_the_zoo_has_the_card_that_belongs_to_it(all_cards):
    folder = assets.assets_folder()
    there = {path.parent.name: path.read_text("utf-8") for path in folder.glob(f"*/{cards.CARD}")}
    assert there.keys() == all_cards.keys()
    for name, text in all_cards.items():
        assert there[name] == text, name
    trained = {results["model"] for _, results in assets.all_results(folder)}
    assert set(zoo.list_models()) == trained | all_cards.keys() & set(zoo.list_models())


def test_the_commands_of_every_card_are_ones(all_cards):
    for name, card in all_cards.items():
        commands = [line.removeprefix("KERAS_BACKEND=jax ") for line in card.splitlines()]
        words = next(shlex.split(c) for c in commands if c.startswith("trellis-keras train"))
        at = words.index("--output")
        assert words[at + 1] == f"runs/{name}"
        text = "--text" in words
        if text:
            words[words.index("--text") : words.index("--text") + 2] = []
            at -= 2
        model, settings = cli._parse(words[2:at])
        recipe = zoo.recipe(model, **settings)
        published = next(shlex.split(c) for c in commands if c.startswith("trellis-keras publish"))
        assert published[2] == f"runs/{name}"
        of_the_run = recipe.replace(data="text", data_options={"path": "x"}) if text else recipe
        publish._check_name(pathlib.Path(published[3]).name, of_the_run)
        call = re.search(r"^model = zoo\.(\w+)\((.*?)\)", card, re.MULTILINE)
        assert call[1] == model
        arguments = eval(f"dict({call[2]})")
        arguments.pop("weights", None)
        assert recipe.replace(**arguments) == recipe


def test_an_untrained_model_says_so_and_what_it_would_cost():
    card = cards.untrained("tcn_ptb", COSTS)
    assert "| ours | not trained here |" in card and "| 88.68 |" in card
    text = " ".join(card.split())
    assert "a training step takes 0.9 seconds of processor time and the process 1.2 GiB" in text
    assert "With 1,000 steps an epoch takes 15 minutes of one core" in text
    assert "the recipe's 100 epochs 25 hours" in text
    assert "may not be passed on" in text
    assert "learning rate 4, gradients clipped to the norm 0.4" in text


def test_a_trained_model_has_its_results_and_how_to_get_it():
    card = cards.trained(RESULTS, "tcn_adding_200")
    text = " ".join(card.split())
    assert card.startswith("# tcn_adding (T=200)\n")
    assert "| ours | 0.0003 |" in card and "none for these settings" in card
    assert "Epoch 9 of 10" in text and "4 minutes on 2 cores of X (tensorflow 1, commit abc" in text
    assert "One seed alone." in text and "`0123456789abcdef...`" in text
    assert 'zoo.tcn_adding(T=200, weights="pretrained")' in card
    assert "trellis-keras train tcn_adding --seed 1 --T 200 --output runs/tcn_adding_200" in card


def test_an_unfinished_run_says_so_and_how_it_was_computed():
    process = {"hardware": "X", "backend": "jax 1", "from_epoch": 1, "dtype_policy": "float32"}
    later = process | {"from_epoch": 3, "dtype_policy": "mixed_bfloat16"}
    results = RESULTS | {"finished": False, "recipe_epochs": 40, "processes": [process, later]}
    card = " ".join(cards.trained(results, "x").split())
    assert "Epoch 9 of 10 so far (the recipe has 40)" in card
    assert "from epoch 1 in float32 on X (jax 1); from epoch 3 in mixed_bfloat16 on X" in card
    assert "in parts" not in cards.trained(RESULTS | {"processes": [process]}, "x")


def test_what_was_trained_on_jax_says_so():
    card = cards.trained(RESULTS | {"backend": "jax 1"}, "x")
    assert "\nKERAS_BACKEND=jax trellis-keras train tcn_adding" in card
    assert "KERAS_BACKEND" not in cards.trained(RESULTS, "x")


def test_settings_that_are_not_the_zoos_are_named():
    results = RESULTS | {"settings": {"seed": 1, "T": 200, "epochs": 30, "jit_compile": False}}
    card = cards.trained(results, "x")
    assert "- differs from the zoo's recipe of that name in `T=200`, `epochs=30`, `jit_comp" in card
    assert "`trellis-keras recipe tcn_adding --seed 1 --T 200 --epochs 30" in card


def test_the_gap_to_the_published_result_is_shown():
    results = RESULTS | {"settings": {"seed": 1}, "published": 5.8e-5}
    assert "| ours | 0.0003 (+0.000242) |" in cards.trained(results, "tcn_adding")


def test_other_seeds_are_told():
    others = [{"seed": 2, "test": 1e-4}, {"seed": 3, "test": 2e-4}]
    results = RESULTS | {"other_seeds": others}
    assert card_sections.spread(results) == pytest.approx((2e-4, 1e-4, 3))
    text = " ".join(cards.trained(results, "x").split())
    assert "seed 2 0.0001, seed 3 0.0002; mean and standard deviation of all 3: 0.0002" in text
    command = "trellis-keras train tcn_adding --seed 3 --T 200 --output runs/x_seed_3"
    assert command in text
    assert "publish runs/x runs/published/x --other-seed runs/x_seed_2 --other-seed" in text
    assert "others" not in cards.trained(RESULTS, "x")


def test_a_text_is_named_without_the_folder_it_was_in():
    recipe = zoo.recipe("trellisnet_char", data="text", data_options={"path": "a/novels.txt"})
    assert "load('text', path='novels.txt')`" in card_sections.data(recipe)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0061, "0.0061 seconds"),
        (100.0, "100 seconds"),
        (180.0, "3 minutes"),
        (7 * 3600.0, "7 hours"),
        (86_400 * 1234.0, "1,234 days"),
    ],
)
def test_times_are_in_a_unit_that_can_be_read(seconds, words):
    assert card_sections.time(seconds) == words


def test_all_cards_are_written(tmp_path):
    models = {name: COSTS["models"]["tcn_ptb"] for name in zoo.list_models()}
    (tmp_path / "costs.json").write_text(json.dumps(COSTS | {"models": models}))
    (tmp_path / "tcn_adding_200").mkdir()
    (tmp_path / "tcn_adding_200" / "results.json").write_text(json.dumps(RESULTS))
    cards.write_all(tmp_path)
    names = {path.parent.name for path in tmp_path.glob("*/card.md")}
    assert names == {"tcn_adding_200", *zoo.list_models()}


def test_a_model_whose_cost_was_not_measured():
    with pytest.raises(ValueError, match="costs.json does not have tcn_jsb. Measure it: python -m"):
        cards.untrained("tcn_jsb", COSTS)


def test_every_data_set_says_what_it_is():
    assert all(data.info(name).licence for name in data.list_datasets())
