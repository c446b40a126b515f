"""The LRU paper's language models: sizes, published results, the recipe, and runs."""

import functools
import json
import sys

import numpy as np
import pytest

from tests.support.run_checks import assert_same_end
from tests.support.small_runs import write_text
from trellis_keras import cli, zoo
from trellis_keras.training.records import read_history
from trellis_keras.zoo import lattice_settings, runs

CORPORA = ("char_ptb", "war_and_peace", "enwik8", "text8")
TWICE = ("lstm_char_ptb", "gru_char_ptb", "lstm_text8", "gru_text8")  # in the TCN paper too
UNITS = ("lru", "lstm", "gru", "grid_lstm", "rhn")


def full_name(unit, corpus):
    name = f"{unit}_{corpus}"
    return f"{name}_lru" if name in TWICE else name


MODELS = [full_name(unit, corpus) for unit in UNITS for corpus in CORPORA]


# Sizes

# By TABLES section 8: units for 2 layers (10M of V=50 and 205, 24M of both), the same for 4 layers,
# and for 1M of V=50 with 2 and with 4 layers; parameters of the units with L layers.
UNITS_FOR_A_SIZE = {
    "LRU": (lambda L: (12 * L, 6 * L), "643 637 998 991 455 452 706 703 202 143"),
    "RG-LRU": (lambda L: (10 * L, 5 * L), "704 697 1093 1085 499 495 773 769 221 157"),
    "PS-LRU": (lambda L: (8 * L, 4 * L), "787 778 1221 1212 557 552 864 859 247 175"),
    "GRU": (lambda L: (6 * L, 6 * L), "908 895 1410 1397 643 637 997 991 284 202"),
    "GRU, reset before": (lambda L: (6 * L, 3 * L), "908 896 1410 1397 643 637 998 991 284 202"),
    "LSTM": (lambda L: (8 * L, 4 * L), "787 778 1221 1212 557 552 864 859 247 175"),
    "LSTM, two biases": (lambda L: (8 * L, 8 * L), "787 777 1221 1211 557 552 864 859 246 175"),
    "Grid-LSTM, own": (lambda L: (16 * L, 8 * L), "557 552 864 859 394 392 611 609 175 124"),
    "Grid-LSTM": (lambda L: (16, 8), "787 778 1221 1212 787 778 1221 1212 247 247"),
    "RHN": (lambda L: (12, 10), "908 896 1410 1397 908 896 1410 1397 284 284"),
}


@pytest.mark.parametrize("unit", UNITS_FOR_A_SIZE)
def test_units_for_a_size(unit):
    coefficients, expected = UNITS_FOR_A_SIZE[unit]
    cases = [(L, size, V) for L in (2, 4) for size in ("10m", "24m") for V in (50, 205)]
    cases += [(2, "1m", 50), (4, "1m", 50)]
    solved = [
        lattice_settings.solved_units(*coefficients(L), vocabulary_size=V, size=size)
        for L, size, V in cases
    ]
    assert solved == [int(units) for units in expected.split()]


KINDS = [
    ("lru_enwik8", {}, "LRU"),
    ("lru_enwik8", {"variant": "rg"}, "RG-LRU"),
    ("lru_enwik8", {"variant": "ps"}, "PS-LRU"),
    ("lstm_enwik8", {}, "LSTM"),
    ("gru_enwik8", {}, "GRU"),
    ("grid_lstm_enwik8", {"share_depth_weights": False}, "Grid-LSTM, own"),
    ("grid_lstm_enwik8", {}, "Grid-LSTM"),
]


@pytest.mark.parametrize(("name", "fields", "unit"), KINDS)
def test_parameters_of_layers(name, fields, unit):
    coefficients, expected = UNITS_FOR_A_SIZE[unit]
    for layers in (2, 4):
        config = zoo.recipe(name, layers=layers, **fields).model
        assert config.unit_parameters == coefficients(layers)
        assert config.units == int(expected.split()[2 * layers - 3])
        assert zoo.recipe(name, size="24m", layers=layers, **fields).model.units == int(
            expected.split()[2 * layers - 1]
        )
        small = config.replace(hidden_units=6, vocabulary_size=7)
        model = small.build()
        assert model.count_params() == small.parameters()
        assert model.embedding_dim == 6 and not model.tie_embeddings


def test_parameters_of_an_rhn():
    assert zoo.recipe("rhn_enwik8").model.units == 896
    for depth in (1, 5):
        small = zoo.recipe("rhn_enwik8", hidden_units=6, transition_depth=depth).model
        assert small.build().count_params() == small.parameters()
    assert small.unit_parameters == (12, 10)
    bias = zoo.rhn_enwik8(hidden_units=6, transform_bias=-3.0).backbone.get_weights()[-1]
    np.testing.assert_array_equal(bias, np.repeat([0.0, -3.0], 6))


@pytest.mark.parametrize("name", MODELS)
def test_the_size_is_met_to_one_percent(name):
    for size, wanted in (("1m", 1e6), ("10m", 1e7), ("24m", 2.4e7)):
        for vocabulary_size in (27, 82, 300):
            recipe = zoo.recipe(name, size=size).replace(vocabulary_size=vocabulary_size)
            assert recipe.model.parameters() == pytest.approx(wanted, rel=0.01)
            assert json.loads(recipe.to_json())["derived"]["units"] == recipe.model.units


def test_a_built_model_of_1m():
    model = zoo.lru_char_ptb(size="1m")
    assert model.backbone.units == 202
    assert model.count_params() == pytest.approx(1e6, rel=0.005)


def test_a_given_number_of_units_stays():
    recipe = zoo.recipe("gru_enwik8", hidden_units=30).replace(vocabulary_size=99, size="24m")
    assert recipe.model.units == 30
    assert recipe.replace(hidden_units=None).model.units > 1000


def test_a_vocabulary_too_large_for_the_size():
    with pytest.raises(ValueError, match='No number of units gives size="1m" to 1%.*270,000'):
        zoo.recipe("lru_text8", size="1m", vocabulary_size=270_000)
    assert zoo.recipe("lru_text8", vocabulary_size=270_000, hidden_units=4).model.units == 4


def test_published(name, fields, loss, epochs):
    training = zoo.recipe(name, **fields).training
    assert (training.published, training.published_epochs) == (loss, epochs)
    assert training.source == "LRU Table 1"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("lru_char_ptb", {"size": "1m"}),
        ("lru_char_ptb", {"layers": 10}),
        ("lru_char_ptb", {"hidden_units": 500}),
        ("lru_char_ptb", {"metric": "bpc"}),
        ("lru_char_ptb", {"data": "pydoc", "data_options": {}}),
        ("lru_char_ptb", {"data_options": {}}),  # the usual split of PTB
        ("lru_text8", {"data_options": {"train_fraction": 0.2}}),
        ("grid_lstm_text8", {"share_depth_weights": False}),
        ("rhn_text8", {"transition_depth": 3}),
    ],
)
def test_nothing_is_published(name, fields):
    for recipe in (zoo.recipe(name, **fields), zoo.recipe(name).replace(**fields)):
        training = recipe.training
        assert (training.published, training.published_epochs) == (None, None)
    data = {"data": "pydoc", "data_options": {}}
    assert zoo.recipe(name, **data).replace(**fields).training.published is None
    assert zoo.recipe(name, **fields, published=1.0).training.published == 1.0


def test_a_figure_comes_back_with_its_settings():
    recipe = zoo.recipe("lru_char_ptb", size="1m").replace(vocabulary_size=50)
    assert recipe.training.published is None
    assert recipe.replace(size="24m").training.published == 0.967
    assert recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("name", MODELS)
def test_docstrings_say_what_is_published_and_what_is_not_comparable(name):
    text = " ".join(getattr(zoo, name).__doc__.split())
    training = zoo.recipe(name).training
    large = zoo.recipe(name, size="24m").training
    assert f"published cross-entropy {training.published:.3f} nats" in text
    assert f"after {training.published_epochs} epochs" in text
    assert f"{large.published:.3f}, after {large.published_epochs}, is that of `size=" in text
    assert ("not the usual split" in text) == ("char_ptb" in name)
    assert ("3.2 million" in text) == ("war_and_peace" in name)
    assert ("is not published" in text) == (not name.startswith("rhn"))
    assert max(map(len, getattr(zoo, name).__doc__.splitlines())) <= 100
    assert "1 - beta" in text


# Fields


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("lru_char_ptb", {"variant": "full"}, r"`variant` must be one of \['ps', 'rg', 'ug'\]"),
        ("lru_char_ptb", {"convention": "mine"}, "`convention` must be one of"),
        ("lru_char_ptb", {"size": "5m"}, r"`size` must be one of \['10m', '1m', '24m'\]"),
        ("lru_char_ptb", {"layers": 0}, "`layers` must be positive"),
        ("lru_char_ptb", {"hidden_units": 0}, "`hidden_units` must be positive"),
        ("lru_char_ptb", {"embedding_dim": 20}, "unknown field 'embedding_dim'"),
        ("lru_char_ptb", {"initial_embedding": 0.1}, "unknown field 'initial_embedding'"),
        ("lru_char_ptb", {"share_depth_weights": True}, "unknown field 'share_depth_weights'"),
        ("lru_char_ptb", {"horizon": 3}, "`horizon` belongs to"),
        ("lstm_enwik8", {"variant": "ug"}, "unknown field 'variant'"),
        ("lstm_enwik8", {"convention": "paper"}, "unknown field 'convention'"),
        ("gru_enwik8", {"transition_depth": 5}, "unknown field 'transition_depth'"),
        ("rhn_enwik8", {"layers": 2}, "unknown field 'layers'"),
        ("rhn_enwik8", {"transition_depth": 0}, "`transition_depth` must be positive"),
        ("grid_lstm_text8", {"convention": "mine"}, "`convention` must be one of"),
        ("lru_text8", {"stop_patience": 0}, "`stop_...` make no rule: .*patience"),
        ("lru_text8", {"stop_against": "first"}, "`stop_...` make no rule: .*against"),
        ("lru_text8", {"decay_factor": 1.0}, "`decay_...` make no rule: .*factor"),
        ("lstm_char_ptb", {"size": "10m"}, "LRU paper's, whose models are lstm_char_ptb_lru"),
        ("gru_text8", {"size": "24m"}, "gru_text8_lru"),
    ],
)
def test_wrong_fields(name, fields, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe(name, **fields)


def test_conventions():
    for convention in ("paper", "authors"):
        lru = zoo.lru_text8(hidden_units=4, variant="rg", convention=convention)
        assert {cell.convention for cell in lru.backbone.cells} == {convention}
    grid = zoo.grid_lstm_text8(hidden_units=4, convention="authors", share_depth_weights=False)
    cell = grid.backbone.layers[0].cell
    assert (cell.update, cell.share_depth_weights) == ("sequential", False)
    cell = zoo.grid_lstm_text8(hidden_units=4).backbone.layers[0].cell
    assert (cell.update, cell.share_depth_weights) == ("parallel", True)


def test_the_recipe_is_the_papers():
    for name in MODELS:
        recipe = zoo.recipe(name)
        training = recipe.training
        assert (training.batch_size, recipe.segment, recipe.horizon) == (250, 50, 0)
        assert (training.epochs, recipe.model.reading) == (60, "repackage")
        assert (recipe.model.optimizer, recipe.model.learning_rate) == ("adam", 1e-3)
        decay, stopping = recipe.callbacks()
        assert (type(decay).__name__, decay.factor) == ("ExponentialDecay", 0.9)
        assert (stopping.patience, stopping.min_delta, stopping.against) == (3, 1e-4, "previous")
    options = zoo.recipe("lru_char_ptb").training.data_options
    assert options == {"split": [0.9, 0.05, 0.05]}


# Runs

TINY = {"hidden_units": 5, "batch_size": 4, "segment": 12, "epochs": 2, "jit_compile": False}


def tiny_run(folder, name, **overrides):
    """Trains in `folder / "run"` on a text beside it, and returns that folder."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    settings = TINY | {"data": "text", "data_options": {"path": text}} | overrides
    runs.train(zoo.recipe(name, **settings), folder / "run", verbose=0)
    return folder / "run"


KINDS_OF_RUNS = [
    ("lru_char_ptb", {"variant": "rg", "convention": "authors"}),
    ("gru_char_ptb_lru", {"layers": 1}),
    ("grid_lstm_text8", {"share_depth_weights": False}),
    ("rhn_war_and_peace", {"transition_depth": 2}),
]


@pytest.mark.parametrize(("name", "fields"), KINDS_OF_RUNS)
def test_a_run_in_half_precision(tmp_path, name, fields):
    run = tiny_run(tmp_path, name, **fields, epochs=1, dtype_policy="mixed_bfloat16")
    model = runs.load_best(run)
    assert model.compute_dtype == "bfloat16"
    tokens = runs.read_recipe(run).load_data().test[None, :20]
    assert np.all(np.isfinite(model.predict(tokens, verbose=0)))


@pytest.mark.parametrize(("name", "fields"), KINDS_OF_RUNS)
def test_a_run_carries_its_states_and_counts_every_target(tmp_path, name, fields):
    run = tiny_run(tmp_path, name, **fields, epochs=1)
    recipe, model = runs.read_recipe(run), runs.load_best(run)
    assert recipe.model.vocabulary_size == 7
    tokens = recipe.load_data().test
    # Each row of a batch reads its part of the text; here in one go.
    rows, length = 4, -(-(len(tokens) - 1) // 4)
    padded = np.pad(tokens, (0, rows * length + 1 - len(tokens)))
    scores = model.predict(padded[:-1].reshape(rows, length), verbose=0)
    targets = padded[1:].reshape(rows, length)
    nll = -np.take_along_axis(scores, targets[..., None], axis=-1).reshape(-1)
    results = runs.evaluate(run)
    assert results["targets"] == len(tokens) - 1 > rows * 12
    assert results["cross_entropy"] == pytest.approx(np.mean(nll[: len(tokens) - 1]), rel=1e-5)
    assert results["loss"] == pytest.approx(results["cross_entropy"], rel=1e-6)


def test_a_run_in_two_parts_ends_like_one(tmp_path):
    for folder in (tmp_path / "split", tmp_path / "whole"):
        folder.mkdir()
    run = functools.partial(tiny_run, name="lru_text8", layers=1)
    run(tmp_path / "split", epochs=1)
    split = run(tmp_path / "split", epochs=2)
    assert_same_end(split, run(tmp_path / "whole", epochs=2), 2)
    rates = [float(row["learning_rate"]) for row in read_history(split / "history.csv")]
    np.testing.assert_allclose(rates, [1e-3, 9e-4], rtol=1e-6)


def test_a_run_stops_and_stays_stopped(tmp_path, capsys):
    run = tiny_run(tmp_path, "gru_enwik8", layers=1, epochs=9, stop_min_delta=100.0)
    assert len(read_history(run / "history.csv")) == 4  # the first has none before it
    capsys.readouterr()
    runs.train(runs.read_recipe(run), run, verbose=2)
    shown = capsys.readouterr().out
    assert "training is complete after 4 epochs, when a callback stopped it" in shown
    assert "text: train 1,800, valid 100, test 100 characters, vocabulary 7" in shown
    assert "a uniform guess: cross_entropy 1.946" in shown


def test_the_command_line(tmp_path, monkeypatch, capsys):
    """recipe, train, evaluate, generate, export."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["trellis-keras", *map(str, words)])
        with pytest.raises(SystemExit, match="^0$"):
            cli.main()
        return capsys.readouterr().out

    shown = json.loads(command("recipe", "lru_war_and_peace", "--variant", "ps", "--size=24m"))
    assert shown["training"]["published"] == 1.152
    assert shown["derived"]["parameters"] == pytest.approx(2.4e7, rel=0.01)
    text, run = write_text(tmp_path / "text.txt"), tmp_path / "run"
    words = [f"--{key.replace('_', '-')}={json.dumps(value)}" for key, value in TINY.items()]
    command("train", "lru_char_ptb", "--text", text, "--output", run, *words, "--epochs=1")
    assert json.loads(command("evaluate", run))["cross_entropy"] > 0
    assert command("generate", run, "--prompt", "ab", "--length", 9).startswith("ab")
    assert "Written" in command("export", run, tmp_path / "saved")
    assert (tmp_path / "saved" / "1" / "saved_model.pb").exists()
