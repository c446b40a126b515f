"""The model zoo: a function for each published benchmark, its recipe, results and weights."""

from trellis_keras.zoo import lru, recurrent_baselines, tcn, trellisnet
from trellis_keras.zoo.lru import *  # noqa: F403
from trellis_keras.zoo.presets import from_preset
from trellis_keras.zoo.recurrent_baselines import *  # noqa: F403
from trellis_keras.zoo.registry import (
    Recipe,
    list_models,
    recipe,
    register,
    run_recipe,
)
from trellis_keras.zoo.run import read_recipe
from trellis_keras.zoo.tcn import *  # noqa: F403
from trellis_keras.zoo.train_run import train
from trellis_keras.zoo.training_settings import Training
from trellis_keras.zoo.trellisnet import *  # noqa: F403

__all__ = [
    "Recipe",
    "Training",
    "from_preset",
    "list_models",
    "read_recipe",
    "recipe",
    "register",
    "run_recipe",
    "train",
    *trellisnet.__all__,
    *tcn.__all__,
    *recurrent_baselines.__all__,
    *lru.__all__,
]
