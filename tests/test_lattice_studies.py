"""The studies of the LRU paper: recipes of their cells, resuming, tables, figures."""

import dataclasses
import sys

import numpy as np
import pytest

from tests.support.processes import ROOT

STUDIES = ROOT / "examples" / "studies"
sys.path.insert(0, str(STUDIES))

import epochs_to_converge  # noqa: E402
import lattice_comparison  # noqa: E402
from study import cli, lattice, lattice_results  # noqa: E402
from study.table import Study  # noqa: E402

from trellis_keras import zoo  # noqa: E402
from trellis_keras.zoo import run as runs  # noqa: E402

SMALL = {
    "quick": True, "characters": 3000, "epochs": 3, "batch_size": 4, "layers": 2, "units": 8,
}  # fmt: skip
FULL = {"quick": False, **lattice.FULL}
CELL = {"corpus": "pydoc", "net": "lru", "size": "1m", "train_percent": 100, "seed": 3}


@pytest.fixture(autouse=True)
def no_xla(monkeypatch):
    """Compiling would be all of the time."""
    nets = {
        name: dataclasses.replace(net, options={**net.options, "jit_compile": False})
        for name, net in lattice.NETS.items()
    }
    monkeypatch.setattr(lattice, "NETS", nets)


def evaluate(folder, split="test"):
    return runs.evaluate(zoo.read_recipe(folder), folder, split)


# Recipes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"net": "lrv"}, "Unknown net 'lrv'.*rg_lru"),
        ({"corpus": "ptb"}, "Unknown corpus 'ptb'.*char_ptb"),
        ({"size": "11m"}, "Unknown size '11m'"),
    ],
)
def test_unknown_names_are_refused(tmp_path, changes, words):
    cell = {k: v for k, v in (CELL | changes).items() if k != "seed"}
    with pytest.raises(ValueError, match=words):
        lattice_comparison.run(tmp_path / "new", SMALL, [cell], [0])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("net", lattice.NETS)
@pytest.mark.parametrize("corpus", lattice.CORPORA)
def test_recipes_are_the_papers(net, corpus):
    for size in ("1m", "10m", "24m"):
        recipe = lattice.recipe(FULL, corpus, net, size, 100, seed=5)
        assert recipe.arguments["hidden_units"] == lattice.units(net, size, recipe)
        training = recipe.training
        assert (training.batch_size, training.sequence_length) == (250, 50)
        assert (training.decay_factor, training.learning_rate) == (0.9, 1e-3)
        assert recipe.seed == 5
        assert {"first", "train_fraction"}.isdisjoint(recipe.data_options)
        assert recipe.data == corpus


def test_nets_are_what_they_are_called():
    recipes = {net: lattice.recipe(FULL, "text8", net, "10m", 100, 0) for net in lattice.NETS}
    family = {
        net: (recipe.arguments["variant"], recipe.arguments["convention"])
        for net, recipe in recipes.items()
        if "lru" in net
    }
    assert family == {
        "lru": ("ug", "paper"),
        "rg_lru": ("rg", "paper"),
        "ps_lru": ("ps", "paper"),
        "rg_lru_authors": ("rg", "authors"),
        "ps_lru_authors": ("ps", "authors"),
    }
    others = {net: recipe.name for net, recipe in recipes.items() if "lru" not in net}
    names = {net: f"{net}_text8_lru_paper" for net in ("lstm", "gru")}
    assert others == names | {net: f"{net}_text8" for net in ("grid_lstm", "rhn")}


# By TABLES: 10M and 24M of two layers of enwik8's 205 symbols, 1M of 50.
@pytest.mark.parametrize(
    ("net", "units"),
    [
        ("lru", (637, 991, 202)),
        ("rg_lru", (697, 1085, 221)),
        ("ps_lru", (778, 1212, 247)),
        ("gru", (895, 1397, 284)),
        ("lstm", (778, 1212, 247)),
        ("grid_lstm", (778, 1212, 247)),
        ("rhn", (896, 1397, 284)),
    ],
)
def test_units_for_a_size(net, units):
    cases = [("enwik8", "10m"), ("enwik8", "24m"), ("char_ptb", "1m")]
    recipes = [lattice.recipe(FULL, corpus, net, size, 100, 0) for corpus, size in cases]
    assert tuple(recipe.arguments["hidden_units"] for recipe in recipes) == units


def test_settings_reach_the_recipe():
    recipe = lattice.recipe(SMALL, "pydoc", "gru", "1m", 40, seed=0)
    assert (recipe.training.epochs, recipe.training.batch_size) == (3, 4)
    assert (recipe.arguments["layers"], recipe.arguments["hidden_units"]) == (2, 8)
    whole = lattice.recipe(SMALL, "pydoc", "gru", "1m", 100, seed=0).load_data()
    part = recipe.load_data()
    assert (len(whole.train), len(whole.test)) == (2700, 150)
    np.testing.assert_array_equal(part.train, whole.train[:1080])
    np.testing.assert_array_equal(part.test, whole.test)


# Training


def values(rows):
    """Rows without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "compiles")} for row in rows]


@pytest.mark.slow
def test_an_interrupted_cell_ends_with_the_same_rows(tmp_path, monkeypatch):
    whole = lattice.train(SMALL, tmp_path / "whole", **CELL)

    class Interrupted(lattice.Curve):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt
            super().on_epoch_begin(epoch, logs)

    Interrupted.__name__ = "Curve"  # a checkpoint tells callbacks apart by it
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lattice, "Curve", Interrupted)
        lattice.train(SMALL, tmp_path / "resumed", **CELL)
    resumed = lattice.train(SMALL, tmp_path / "resumed", **CELL)
    assert values(resumed) == values(whole)
    assert [row["epoch"] for row in whole] == [1, 2, 3]
    assert [row["compiles"] for row in whole] == [1, 0, 0]
    assert [row["compiles"] for row in resumed] == [1, 0, 1]
    # Trained and measured to the end, but killed before its rows were written.
    assert values(lattice.train(SMALL, tmp_path / "resumed", **CELL)) == values(whole)
    # Each epoch's test loss is that of its model.
    best = min(whole, key=lambda row: row["valid"])
    assert evaluate(tmp_path / "whole")["loss"] == pytest.approx(best["test"], rel=1e-5)
    assert evaluate(tmp_path / "whole", "valid")["loss"] == pytest.approx(best["valid"])


# Tables and figures, from made-up rows


def made_up(folder, losses, settings=FULL, name="lattice_comparison"):
    """A study with rows: `losses` is {cell: a list of (valid, test) of the epochs}."""
    study = Study(name, folder, settings, lattice.COLUMNS)
    for (corpus, net, size, percent, seed), epochs in losses.items():
        cell = dict(zip(lattice.COLUMNS, (corpus, net, size, percent, seed), strict=False))
        rows = [
            {
                "parameters": 1_000_000, "epoch": i, "seconds": 100 if i == 1 else 2 * i,
                "compiles": int(i == 1), "train_loss": 1, "valid": valid, "test": test,
            }
            for i, (valid, test) in enumerate(epochs, start=1)
        ]  # fmt: skip
        study.run(cell, lambda work, rows=rows: rows)
    return study


def test_the_table_is_of_the_best_epochs(tmp_path):
    nan = float("nan")
    losses = {
        ("char_ptb", "rhn", "10m", 100, 0): [(3, 2.0), (2, 1.625), (2.5, 1.0)],
        ("char_ptb", "lru", "10m", 100, 0): [(nan, 0.1), (3, 1.25), (4, 1)],
        ("char_ptb", "lru", "10m", 100, 1): [(5, 1), (4, 1), (3, 1.75)],
        ("char_ptb", "gru", "10m", 100, 0): [(1, 1.0)],
        ("char_ptb", "gru", "10m", 50, 0): [(1, 1.0)],
    }
    rows = lattice_results.table(made_up(tmp_path, losses))
    order = [(row["train_percent"], row["place"], row["net"]) for row in rows]
    assert order == [(100, 1, "gru"), (100, 2, "lru"), (100, 3, "rhn"), (50, 1, "gru")]
    of = {row["net"]: row for row in rows[:3]}
    lru, rhn, gru = of["lru"], of["rhn"], of["gru"]
    assert (lru["test"], lru["best_epoch"], lru["seeds"]) == (1.5, 2.5, 2)
    assert lru["test_sd"] == pytest.approx(0.25 * 2**0.5)
    assert lru["seconds_per_epoch"] == 5  # of 4, 6, 4, 6
    assert (lru["published"], lru["published_place"], lru["published_epoch"]) == (0.965, 1, 8)
    assert (rhn["test"], rhn["test_sd"], rhn["best_epoch"]) == (1.625, "", 2)
    assert rhn["published_place"] == 7 and gru["published_place"] == 5
    assert gru["seconds_per_epoch"] == ""  # its only epoch compiled
    assert rows[-1]["train_percent"] == 50 and rows[-1]["published"] == ""


def test_epochs_to_converge(tmp_path):
    losses = {
        ("char_ptb", "lru", "10m", 100, 0): [(3, 1), (1, 1), (2, 1)],
        ("text8", "lru", "10m", 100, 0): [(4, 1), (3, 1), (2, 1), (1, 1)],
        ("text8", "rhn", "10m", 100, 0): [(1, 1), (1, 1)],
    }
    study = made_up(tmp_path, losses, name="epochs_to_converge")
    cut = {
        net: [c["cut"] for c in cells] for net, cells in epochs_to_converge.by_net(study).items()
    }
    assert cut == {"lru": [False, True], "rhn": [False]}
    text = epochs_to_converge.summary(study)
    assert "LRU: 3.0 ± 1.4, 2 cells (about 12)" in text
    assert "RHN: 1.0, 1 cells (about 22)" in text


def test_differences_have_confidence_intervals(tmp_path):
    """Of the seeds that both nets have: differences 0.1 and 0.3, t = 12.71 of one degree."""
    losses = {
        ("char_ptb", "lru", "1m", 100, 0): [(1, 1.0)],
        ("char_ptb", "lru", "1m", 100, 1): [(1, 1.2)],
        ("char_ptb", "gru", "1m", 100, 0): [(1, 1.1)],
        ("char_ptb", "gru", "1m", 100, 1): [(1, 1.5)],
        ("char_ptb", "gru", "1m", 100, 2): [(1, 9.0)],
        ("char_ptb", "lstm", "1m", 100, 0): [(1, 1.5)],
    }
    study = made_up(tmp_path, losses)
    ((place, found),) = lattice_results.differences(study).items()
    assert place == ("char_ptb", "1m", 100)
    assert list(found) == [("lstm", "lru"), ("gru", "lru"), ("gru", "lstm")]
    mean, half, seeds = found["gru", "lru"]
    assert (mean, half, seeds) == (pytest.approx(0.2), pytest.approx(1.2706, abs=1e-4), 2)
    text = lattice_results.write_table(study)
    assert "| GRU minus LRU | +0.2000 | -1.0706 to +1.4706 | 2 |" in text
    assert "| LSTM minus LRU | +0.5000 | - | 1 |" in text


# Command lines


def command_line(monkeypatch, script, *arguments):
    """What a script hands on to its `run`."""
    calls = []

    def record(*given):
        calls.append(given)
        raise ValueError("as far as this")

    monkeypatch.setattr(script, "run", record)
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.run(script.main)
    return calls[0] if calls else None


def test_the_usual_comparison_and_the_papers(monkeypatch):
    folder, settings, cells, seeds, _ = command_line(monkeypatch, lattice_comparison)
    assert folder == "runs/studies/lattice_comparison"
    assert (settings["characters"], settings["epochs"]) == (1_000_000, 4)
    assert {(cell["corpus"], cell["size"]) for cell in cells} == {("char_ptb", "1m")}
    assert [cell["net"] for cell in cells] == list(lattice.NETS) and tuple(seeds) == (0, 1, 2)

    folder, settings, cells, seeds, _ = command_line(monkeypatch, lattice_comparison, "--paper")
    assert folder == "runs/studies/lattice_comparison-paper"
    assert settings == FULL and len(cells) == 4 * 9 and tuple(seeds) == (0,)
    assert command_line(monkeypatch, lattice_comparison, "--paper", "--quick") is None
