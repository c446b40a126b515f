from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import get_model, list_models, recipe
from trellis_keras.zoo.trellisnet import trellisnet_char, trellisnet_char_ptb, trellisnet_ptb

__all__ = [
    "Recipe",
    "get_model",
    "list_models",
    "recipe",
    "trellisnet_char",
    "trellisnet_char_ptb",
    "trellisnet_ptb",
]
