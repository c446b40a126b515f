"""The measurement of what a training would cost."""

import pytest

import tools.costs
from trellis_keras import zoo


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
