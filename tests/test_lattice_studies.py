"""The studies of the LRU paper: recipes of their cells, resuming, tables, figures."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from tests.support.processes import ROOT, child_environment

STUDIES = ROOT / "examples" / "studies"
sys.path.insert(0, str(STUDIES))

import epochs_to_converge  # noqa: E402
import gradient_norms  # noqa: E402
import lattice_comparison  # noqa: E402
import statistical_efficiency  # noqa: E402
from study import cli, lattice, lattice_results  # noqa: E402
from study.table import Study  # noqa: E402

from trellis_keras import zoo  # noqa: E402
from trellis_keras.zoo import run as runs  # noqa: E402

SMALL = {
    "quick": True, "characters": 3000, "epochs": 3, "batch_size": 4, "layers": 2, "units": 8,
}  # fmt: skip
FULL = {"quick": False, **lattice.FULL}
CELL = {"corpus": "pydoc", "net": "lru", "size": "1m", "train_percent": 100, "seed": 3}
PNG = b"\x89PNG"


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"net": "lrv"}, "Unknown net 'lrv'.*rg_lru"),
        ({"corpus": "ptb"}, "Unknown corpus 'ptb'.*char_ptb"),
        ({"size": "11m"}, "Unknown size '11m'"),
    ],
)
def test_unknown_names_are_refused(tmp_path, changes, words):
    cell = {**CELL, **changes}
    del cell["seed"]
    with pytest.raises(ValueError, match=words):
        lattice_comparison.run(tmp_path / "new", SMALL, [cell], [0])
    assert not (tmp_path / "new").exists()


def test_a_missing_corpus_is_told_before_training(tmp_path):
    (tmp_path / "war_and_peace").mkdir()
    cells = lattice.product(["pydoc", "war_and_peace"], ["lru"])
    with pytest.raises(FileNotFoundError, match="war_and_peace"):
        lattice_comparison.run(tmp_path / "new", SMALL, cells, [0], str(tmp_path))
    assert not (tmp_path / "new").exists()


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


@pytest.mark.slow
def test_gradient_norms_by_layer_and_epoch(tmp_path):
    settings = {**SMALL, "corpus": "pydoc", "size": "1m", "layers": 3, "epochs": 2, "batches": 2}
    study = gradient_norms.run(tmp_path, settings, ["lru"], [0])
    rows = study.rows()
    places = [(row["epoch"], row["layer"]) for row in rows]
    assert places == [(epoch, layer) for epoch in (1, 2) for layer in (1, 2, 3)]
    assert all(row["gradient_norm"] > 0 for row in rows)
    assert (tmp_path / "gradient_norms.png").read_bytes().startswith(PNG)
    assert gradient_norms.run(tmp_path, settings, ["lru"], [0]).rows() == rows


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


def test_the_markdown_has_both_orders(tmp_path):
    losses = {("char_ptb", net, "1m", 100, 0): [(1, loss)] for net, loss in
              (("lru", 2.0), ("rg_lru_authors", 1.5), ("gru", 1.75))}  # fmt: skip
    text = lattice_results.write_table(made_up(tmp_path, losses))
    assert "## PTB, 1M parameters" in text
    assert "found: RG-LRU (program) < GRU < LRU." in text
    paper = "(Table 1, 10M, whole corpus): LRU < Grid-LSTM < PS-LRU = RG-LRU < "
    assert paper + "GRU = LSTM < RHN." in text
    assert "| 2 | GRU | 1 | 1.7500 | - | 1 | - | 1,000,000 | 5 | 0.972 | 9 |" in text


def test_figures_from_rows(tmp_path):
    losses = {
        ("text8", net, "10m", percent, seed): [(2, 2), (1, 1.5)] if seed else [(2, 2.1)]
        for net in ("gru", "rg_lru", "rg_lru_authors")
        for percent in (20, 100)
        for seed in (0, 1)
    }
    for name, draw in (
        ("lattice_comparison", lattice_comparison.report),
        ("statistical_efficiency", statistical_efficiency.report),
        ("epochs_to_converge", epochs_to_converge.plot),
    ):
        draw(made_up(tmp_path / name, losses, name=name))
        assert (tmp_path / name / f"{name}.png").read_bytes().startswith(PNG)


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


@pytest.mark.parametrize(
    ("script", "axes"),
    [(statistical_efficiency, (2, 1, 5)), (epochs_to_converge, (4, 2, 1))],
)
def test_the_papers_cells_and_others(monkeypatch, script, axes):
    names = ("corpus", "size", "train_percent")
    folder, settings, cells, seeds, _ = command_line(monkeypatch, script)
    assert folder == f"runs/studies/{script.__name__}" and settings == FULL
    assert tuple(len({cell[name] for cell in cells}) for name in names) == axes
    assert {cell["net"] for cell in cells} == set(lattice.PUBLISHED) and len(lattice.PUBLISHED) == 7

    given = ["--corpus", "pydoc", "--net", "rhn", "--net", "lru", "--size", "24m", "--seed", "4"]
    given += ["--percent", "30", "--epochs", "5", "--batch-size", "6", "--layers", "4"]
    given += ["--characters", "700"]
    _, settings, cells, seeds, _ = command_line(monkeypatch, script, *given)
    assert settings == {
        "quick": False, "characters": 700, "epochs": 5, "batch_size": 6, "layers": 4, "units": None,
    }  # fmt: skip
    assert [tuple(cell.values()) for cell in cells] == [
        ("pydoc", net, "24m", 30) for net in ("rhn", "lru")
    ]
    assert list(seeds) == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["lattice_comparison", "statistical_efficiency", "epochs_to_converge", "gradient_norms"],
)
def test_quick_runs(tmp_path, name):
    for _ in range(2):
        command = [sys.executable, STUDIES / f"{name}.py", "--quick", "--output", tmp_path]
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "done before" in done.stdout
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
