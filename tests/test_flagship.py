"""Flagship runs: the work that they count, and a rehearsal of the command with a tiny model."""

import json

import keras
import numpy as np
import pytest

from benchmarks.gpu import flagship
from tests.support.processes import run_module
from tests.support.small_runs import TINY, write_text
from trellis_keras import zoo
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.evaluation import evaluate


def test_operations_are_those_of_the_equations():
    settings = {"depth": 6, "hidden_units": 5, "embedding_dim": 3, "vocabulary_size": 7}
    settings |= {"batch_size": 2, "sequence_length": 12, "context_length": 6}
    recipe = zoo.recipe("trellisnet_char", **settings, aux_every=4, aux_weight=0.1)
    model = recipe.build()
    batch = recipe.batches(np.arange(13) % 7)[0]
    # Two taps, four blocks of gates; level 1 has no hidden part; a head for level 6 and for 4.
    full = 2 * 12 * 2 * 4 * 8 * (5 * 8 + 3) + 2 * 6 * 2 * 3 * 7
    assert flagship.operations(model, batch, cone=False) == 6 * full
    # From the last 6 positions of level 6 down: 6, 7, ... of 12.
    assert 0.6 < flagship.operations(model, batch) / (6 * full) < 0.9


def test_planned_epochs_fill_the_time():
    recipe = zoo.recipe("trellisnet_ptb", setting="fast")
    figures = {"steps": 100, "deep": {"first_s": 10, "step_s": 0.1}}
    figures["shallow"] = {"first_s": 10, "step_s": 0.02}
    plan = flagship.planned(recipe, figures, 600)
    seconds = plan["growth_epochs"] * 2 + (plan["epochs"] - plan["growth_epochs"]) * 10
    assert 490 < seconds <= (1 - flagship.RESERVE) * 600 - 20
    assert recipe.replace(**plan).training.options()["warmup_steps"] == 265
    assert plan["decay_steps"] == 100 * plan["epochs"] - 265


def test_a_time_without_an_epoch_at_full_depth_is_refused():
    recipe = zoo.recipe("trellisnet_ptb", setting="fast")
    figures = {"steps": 100, "deep": {"first_s": 1, "step_s": 1}}
    figures["shallow"] = {"first_s": 1, "step_s": 0.02}
    with pytest.raises(ValueError, match="too few for an epoch of 100 s"):
        flagship.planned(recipe, figures, 60)
    with pytest.raises(ValueError, match="TrellisNet.*tcn_adding"):
        flagship.prepare("tcn_adding", "{}")


def test_the_best_epoch_is_one_at_full_depth_and_is_copied(tmp_path, monkeypatch):
    seconds = iter([0, 10, 20, 61, 70])
    monkeypatch.setattr(flagship.time, "monotonic", lambda: next(seconds))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    best = flagship.Best(tmp_path, first=1)
    best.set_model(model)
    for epoch, loss in enumerate([1.0, 3.0, 2.0, 4.0]):
        model.set_weights([np.full((1, 1), float(epoch))])
        if epoch == 0:
            best.on_epoch_end(epoch, {"loss": loss, "val_loss": loss})
            with pytest.raises(ValueError, match="full depth"):
                best.restore()
        else:
            best.on_epoch_end(epoch, {"loss": loss, "val_loss": loss})
    assert best.epoch == 3
    flagship.load(model, tmp_path)
    assert model.get_weights()[0].item() == 2.0


@pytest.mark.slow
def test_a_flagship_comes_home_as_a_finished_run(tmp_path):
    text = write_text(tmp_path / "text.txt")
    settings = TINY | {"output_units": 4, "aux_every": 2, "warmup_steps": 2, "decay_steps": 10}
    settings |= {"growth_depth": 2, "growth_epochs": 1, "dtype_policy": "float32"}
    settings |= {"data": "text", "data_options": {"path": str(text)}}
    given = ["--settings", json.dumps(settings)]

    def script(*arguments):
        done = run_module("benchmarks.gpu.flagship", *arguments, backend="jax", timeout=None)
        assert done.returncode == 0, done.stderr

    script("measure", "trellisnet_ptb", "--plan", tmp_path / "plan.json", *given)
    assert json.loads((tmp_path / "plan.json").read_text())["growth_epochs"] > 1
    script("train", "trellisnet_ptb", "--output", tmp_path / "out", "--rehearsal", *given)
    script("unpack", tmp_path / "out", "--output", tmp_path / "run")
    assert runs.is_finished(tmp_path / "run")
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    recipe = zoo.read_recipe(tmp_path / "out")
    test = evaluate(recipe, runs.load_best(tmp_path / "run"))
    assert test["perplexity"] == pytest.approx(figures["test"]["perplexity"], rel=1e-2)
