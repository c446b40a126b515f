"""The model zoo: a function for each published benchmark, its recipe, results and weights."""

from trellis_keras.zoo import lru, tcn, trellisnet
from trellis_keras.zoo.lru import *  # noqa: F403
from trellis_keras.zoo.presets import from_preset
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import (
    get_model,
    list_models,
    recipe,
    register,
    run_recipe,
)
from trellis_keras.zoo.run import read_recipe, train
from trellis_keras.zoo.tcn import *  # noqa: F403
from trellis_keras.zoo.training_settings import Training
from trellis_keras.zoo.trellisnet import *  # noqa: F403

__all__ = [
    "Recipe",
    "Training",
    "from_preset",
    "get_model",
    "list_models",
    "run_recipe",
    "read_recipe",
    "recipe",
    "register",
    "train",
    *trellisnet.__all__,
    *tcn.__all__,
    *lru.__all__,
]
