"""Cards, tables and pages of the zoo's runs."""

import json
import re
import shlex

import pytest

from tests.support.small_runs import tiny_recipe
from tools import cards, pages
from tools.description import Description, best, described
from trellis_keras import zoo
from trellis_keras.zoo import registry
from trellis_keras.zoo.results import RESULTS, Run, assets_folder, published, read_run


@pytest.fixture(scope="module")
def found():
    return described()


@pytest.fixture(autouse=True)
def once(found, monkeypatch):
    """A card looks at all others: their files are read once."""
    monkeypatch.setattr(cards, "described", lambda: found)


def named(title):
    (one,) = (one for one in cards.described() if one.run.title == title)
    return one


def test_each_seed_is_repeated_on_its_backend():
    card = cards.card(named("lstm_jsb"))
    pattern = r"^(.*)trellis-keras train lstm_jsb --repeat(.*) --output"
    found = {seed: prefix for prefix, seed in re.findall(pattern, card, re.MULTILINE)}
    jax = "KERAS_BACKEND=jax "
    assert found == {"": jax, " --seed 1": "", " --seed 2": jax}


def test_the_commands_and_calls_of_every_card_are_ones(found):
    for one in found:
        card, recipe = cards.card(one), one.recipe
        command = re.search(r"train (\S+) ?(\S*) --repeat --output", card)
        again = zoo.run_recipe(command[1], command[2])
        assert again.arguments == recipe.arguments
        call = re.search(r"^recipe = (zoo\.recipe\(.*?\))$", card, re.MULTILINE | re.DOTALL)
        built = eval(call[1])
        assert built.setting == recipe.setting and built.data_options == recipe.data_options
        of_the_run = {"seed": None, "vocabulary_size": None}
        assert recipe.arguments | of_the_run == built.arguments | of_the_run


def test_names_in_a_card_are_only_text(tmp_path):
    folder = tmp_path / "tcn_jsb" / "a b;c`d`<i>"
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text(json.dumps(named("tcn_jsb").results))
    one = Description.of(read_run(folder / RESULTS))
    card = cards.card(one)
    assert r"# tcn_jsb (a b;c\`d\`&lt;i&gt;)" in card
    command = re.search("^trellis-keras .*", card, re.MULTILINE)[0]
    assert shlex.split(command)[-1] == "runs/tcn_jsb_a b;c`d`<i>"
    recipe = tiny_recipe(tmp_path).replace(data_options={"path": tmp_path / "`` <b> `.txt"})
    card = cards._data(Description(one.run, recipe, None))
    assert "``` trellis_keras.data" not in card
    assert "``` trellis_keras.zoo.datasets.load('text', path='`` <b> `.txt') ```" in card


def test_pages_are_up_to_date(found):
    zoo_folder = assets_folder()
    root = zoo_folder.parent
    written = (root / "docs" / "results.md").read_text()
    assert pages.results_page(found) == written, "run `python -m tools.pages`"
    for page, text in (
        (root / "README.md", pages.front(found)),
        (zoo_folder / "README.md", pages.runs_table(found)),
        *((one.run.folder / "card.md", cards.card(one)) for one in found),
    ):
        assert text in page.read_text(), "run `python -m tools.pages`"
    # Each value has one row that is not "fast".
    rows = [line for line in written.split("## At test time")[0].splitlines() if " | " in line]
    values = [row for row in rows if re.match(r"\| \[?(\w+_\w+)", row)]
    assert len([row for row in values if "fast)]" not in row]) == len(published())


# Verdicts


def described_as(name, tests, parameters=70_000, **options):
    recipe = zoo.recipe(name, **options)
    first, *others = tests
    results = {
        "recipe": recipe.to_dict(),
        "test": first,
        "other_seeds": [{"test": test} for test in others],
        "parameters": parameters,
    }
    return Description(Run(None, "", results), recipe, registry.published_value(recipe))


@pytest.mark.parametrize(
    ("name", "tests", "expected"),
    [
        ("tcn_jsb", [7.9], "better"),  # published: 8.10
        ("tcn_jsb", [8.0], "level"),
        ("tcn_jsb", [8.0, 8.01], "level"),  # of two seeds the deviation is unknown
        ("tcn_jsb", [7.99, 8.0, 8.01], "better"),
        ("tcn_jsb", [7.9, 8.0, 8.2], "level"),
        ("tcn_jsb", [7.2, 7.3, 8.9], "level"),  # lower by 4 %, but by less than its noise
        ("tcn_jsb", [8.2], "level"),
        ("tcn_jsb", [8.4], "within 5 %"),
        ("tcn_jsb", [9.0], "behind"),
        ("tcn_seq_mnist", [0.9894], "behind"),  # 6 % more wrong answers than with 0.99
        ("tcn_seq_mnist", [0.9901], "level"),
        ("tcn_seq_mnist", [0.9903], "better"),
        ("lstm_adding", [0.16], "at the floor"),
        ("rnn_seq_mnist", [0.243], "at the floor"),  # published: 0.215
        ("tcn_adding", [0.166], "behind"),  # published: 5.8e-5
        ("lru_war_and_peace", [1.0], "other text"),
        ("lru_char_ptb", [0.9], "other text"),
    ],
)
def test_verdicts(name, tests, expected):
    assert described_as(name, tests).verdict == expected


def test_a_larger_network_is_not_better():
    assert described_as("lstm_jsb", [8.0], parameters=320_000).verdict == "better"
    assert described_as("lstm_jsb", [8.0], parameters=570_000).verdict == "larger net"
    assert described_as("lstm_jsb", [9.0], parameters=570_000).verdict == "behind"


def test_a_verdict_on_a_generated_task_is_of_other_test_sets():
    one = described_as("tcn_adding", [4e-5])  # published: 5.8e-5
    one.results["test_sets"] = {"mean": 8e-5, "deviation": 2e-5}
    assert (one.verdict, one.difference) == ("behind", "+2.2e-05")
    assert one.ours == "8e-05 ± 2e-05 (ten test sets)"


def test_of_several_runs_the_best_verdict_counts():
    level, better = described_as("tcn_jsb", [8.1]), described_as("tcn_jsb", [7.8], setting="fast")
    assert [one.verdict for one in best([level, better]).values()] == ["better"]
    behind, less = (described_as("trellisnet_seq_cifar10", [value]) for value in (0.54, 0.71))
    assert behind.verdict == less.verdict == "behind"
    assert list(best([behind, less]).values()) == [less]
