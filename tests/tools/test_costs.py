"""The measurement of what a training would cost."""

import json

import pytest

import tools.costs
from tests.support.processes import run_module
from trellis_keras import zoo
from trellis_keras.zoo.environment import environment


@pytest.mark.slow
def test_figures_of_a_model_are_added_to_those_that_are_there(tmp_path):
    file = tmp_path / "costs.json"
    for _ in range(2):  # the second measures nothing
        done = run_module("tools.costs", "tcn_copy_memory", "--output", file)
        assert done.returncode == 0, done.stderr
    assert not done.stdout
    found = json.loads(file.read_text())
    figures = found["models"]["tcn_copy_memory"]
    recipe = zoo.recipe("tcn_copy_memory")
    assert figures["steps_per_epoch"] == -(-10_000 // recipe.training.batch_size)
    assert figures["parameters"] == recipe.build().count_params()
    assert figures["step_core_s"] > 0 and figures["memory_gib"] > 0
    assert figures["commit"] == environment()["commit"]
    found["machine"]["hardware"] = "an abacus"
    file.write_text(json.dumps(found))
    done = run_module("tools.costs", "tcn_adding", "--output", file)
    assert done.returncode == 1 and "an abacus" in done.stderr


@pytest.mark.parametrize("name", ["tcn_wt103", "trellisnet_wt103"])
def test_of_large_texts_only_the_size_is_needed(name):
    recipe = zoo.recipe(name)
    _, batches, steps = tools.costs._batches(recipe)
    x, _, weight = batches[0]
    assert len(x) == recipe.training.batch_size and len(batches) == tools.costs.BATCHES
    # Each token is counted in one batch.
    tokens = tools.costs.TRAINING_TOKENS["wt103"]
    assert steps * weight.sum() == pytest.approx(tokens, rel=0.001)
    assert max(int(x.max()) for x, *_ in batches) < recipe.arguments["vocabulary_size"]
