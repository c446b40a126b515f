"""Keras internals that the package uses, each with the public name that is missing.

Subclasses of Keras' classes also override or read private members of theirs.
"""

import keras

# Missing: a way to read a variable in its own dtype within the call of a mixed-precision layer, and
# `keras.get_mask(tensor)`: traced JAX arrays have no attribute `_keras_mask`.
from keras.src.backend import AutocastScope, get_keras_mask

# Missing: `keras.layers.DropoutRNNCell`. `keras.layers.RNN` requests dropout masks from no others.
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

# Missing: a loss that is not divided by the number of replicas.
from keras.src.losses.loss import unscale_loss_for_distribution

# Missing: `keras.saving.save_model` to a file in memory.
from keras.src.saving.saving_lib import save_model as save_to_file

# Missing: a name for what decorates `keras.Model.compile`.
from keras.src.utils.tracking import no_automatic_dependency_tracking

# Missing: `keras.Layer.flatten_layers`.
from keras_streams._keras_internals import all_layers

__all__ = [
    "AutocastScope",
    "DropoutRNNCell",
    "all_layers",
    "get_keras_mask",
    "no_automatic_dependency_tracking",
    "save_to_file",
    "unscale_loss_for_distribution",
]


def direct_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers directly within a layer. Missing: `keras.Layer.layers`."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the trainable variables of a layer without those of the layers within it.

    Missing: `keras.Layer.trainable_variables` without a recursion.
    """
    return layer._trainable_variables


def seed_generators(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """Returns a layer's seed generators. Missing: `keras.Layer.seed_generators`."""
    return layer._seed_generators


def mark_as_seeded(generator: keras.random.SeedGenerator, seed: int) -> None:
    """Notes that a generator has a seed, on which PyTorch's dropout depends.

    Missing: `keras.random.SeedGenerator.seed`, which can be set.
    """
    generator._initial_seed = seed


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the epoch with which `fit` starts. Missing: a way for callbacks to do so."""
    model._initial_epoch = epoch


def set_loss_dtype(model: keras.Model, dtype: str) -> None:
    """Sets the dtype of a compiled model's losses. Missing: an argument of `compile`."""
    model._compile_loss._dtype = dtype
