"""Whole recipes in bfloat16: as good as in float32, to what another seed changes."""

import statistics

import pytest

from trellis_keras import zoo
from trellis_keras.zoo import run as runs

RECIPES = {"tcn_jsb": {"epochs": 8}, "trellisnet_char": {"epochs": 1}}
SEEDS = (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_bfloat16_is_within_the_spread_of_seeds(name, tmp_path):
    losses = {}
    for policy in ("float32", "mixed_bfloat16"):
        for seed in SEEDS:
            recipe = zoo.recipe(name, seed=seed, dtype_policy=policy, **RECIPES[name])
            model = runs.train(recipe, tmp_path / f"{policy}-{seed}", verbose=0)
            losses.setdefault(policy, []).append(min(model.history.history["val_loss"]))
    print(losses)
    spread = max(map(statistics.stdev, losses.values()))
    full, half = map(statistics.mean, losses.values())
    assert abs(half - full) < 2 * spread, losses
