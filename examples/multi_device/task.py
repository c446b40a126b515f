"""What is trained on several devices: a zoo model by its recipe, or its first steps as a check."""

import argparse
import json

from trellis_keras import zoo
from trellis_keras.data import EpochOrder
from trellis_keras.training import Checkpoint
from trellis_keras.training.checkpoint import has_memory


def arguments(description):
    """Returns a parser with the options that both scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="a model of the zoo, such as trellisnet_ptb")
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of its recipe")
    parser.add_argument("--checkpoints", default="runs/multi_device", help="folder of checkpoints")
    parser.add_argument(
        "--check", type=int, metavar="N", help="only print the losses of N steps without dropout"
    )
    return parser


def load(options, **settings):
    """Returns the recipe, and its data. `settings` are the script's own and win."""
    recipe = zoo.recipe(options.model, **{**options.settings, **settings})
    if options.check:
        # Devices draw masks of their own: without them the losses can be compared.
        rates = {
            name: 0.0
            for name, value in recipe.arguments.items()
            if "dropout" in name and isinstance(value, float)
        }
        recipe = recipe.replace(**rates)
    loaded = recipe.load_data()
    return recipe.with_data(loaded), loaded


def build(recipe, loaded):
    """Returns the compiled model. Each device begins with the same weights, by the seed."""
    return recipe.build(vocabulary=loaded.vocabulary if recipe.reads_text else None)


def train(model, recipe, loaded, options, folder, rows=lambda stream: stream, verbose="auto"):
    """Trains by the recipe, from the newest checkpoint in the folder on.

    Args:
        rows: What makes of a stream the part that this process reads.
    """
    stream = recipe.stream(loaded.train, shuffle=True)
    if options.check:
        # Epochs of one step: what is shown of each is its own loss, no running mean.
        history = model.fit(
            rows(stream), steps_per_epoch=1, epochs=options.check, shuffle=False, verbose=0
        )
        return history.history["loss"]
    order = [EpochOrder(stream)] if hasattr(stream, "epoch") else []
    rules = recipe.callbacks()
    model.fit(
        rows(stream),
        validation_data=rows(recipe.stream(loaded.valid)),
        epochs=recipe.training.epochs,
        callbacks=[
            *order,
            *rules,
            Checkpoint(
                folder,
                seed=recipe.seed or 0,
                callbacks=[rule for rule in rules if has_memory(rule)],
            ),
        ],
        shuffle=False,
        verbose=verbose,
    )
    return None
