"""Weights for the zoo's models, from a file or a zoo run."""

import os
import pathlib
import warnings
from typing import Any

import keras

from trellis_keras.data import Vocabulary
from trellis_keras.files import file_checksum
from trellis_keras.zoo import results

# The weights that the repository keeps; `tools.publish` follows this rule.
WEIGHTS_KEPT = (
    "the zoo keeps weights under 5 MB, of language models only those of characters, and not those "
    "of a run that a better run of the same network has replaced"
)

# Arguments that do not affect the outputs of trained weights, besides those whose names end in
# "dropout" or "dropout_kind", or start with "initial_" or "aux_".
_OF_THE_TRAINING = {
    "activation_reg",
    "forget_bias",
    "rematerialize",
    "seed",
    "stateful",
    "temporal_activation_reg",
    "transform_bias",
    "vocabulary_size",  # the weights come with their vocabulary
}


def find(
    recipe: dict[str, Any], weights: str | os.PathLike
) -> tuple[pathlib.Path, Vocabulary | None]:
    """Returns the path of a weights file, and the vocabulary stored with it, or None.

    Args:
        recipe: The result of `Recipe.to_dict`.
        weights: `"pretrained"`, or the path of a weights file.

    Raises:
        ValueError: If there are no pretrained weights for this model, or the file is missing or
            differs from the zoo's.
    """
    if weights == "pretrained":
        run = _pretrained(recipe)
        vocabulary = run.results.get("vocabulary")
        return run.folder / results.WEIGHTS, vocabulary and Vocabulary.from_config(vocabulary)
    path = pathlib.Path(weights).expanduser()
    if not path.is_file():
        raise ValueError(
            f'{recipe["name"]}: `weights` must be None, "pretrained" or a file. Received: {path}, '
            "which does not exist"
        )
    return path, None


def load_weights(model: keras.Model, name: str, path: pathlib.Path) -> keras.Model:
    """Loads a file's weights into a built model, and returns the model."""
    try:
        with warnings.catch_warnings():
            # Stored weights are those of a model without an optimizer.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(path)
    except Exception as error:  # a damaged file may raise any class
        raise ValueError(f"{path} does not hold the weights of this {name}: {error}") from error
    return model


def differences(recipe: dict[str, Any], trained: dict[str, Any]) -> dict[str, tuple]:
    """Returns {argument: (trained with, requested)} for arguments that affect the outputs.

    Both recipes are results of `Recipe.to_dict`.
    """
    theirs = trained["arguments"]
    return {
        name: (theirs.get(name), value)
        for name, value in recipe["arguments"].items()
        if not is_of_the_training(name) and theirs.get(name) != value
    }


def is_of_the_training(name: str) -> bool:
    """Returns whether an argument matters only during training."""
    return (
        name in _OF_THE_TRAINING
        or name.endswith(("dropout", "dropout_kind"))
        or name.startswith(("initial_", "aux_"))
    )


def _pretrained(recipe):
    """Returns the zoo run whose model computes the same function as this recipe's."""
    name = recipe["name"]
    runs = [run for run in results.all_runs() if run.has_weights]
    own = [(run, differences(recipe, run.recipe)) for run in runs if run.model == name]
    # The same network may have been trained with several settings.
    own.sort(key=lambda pair: pair[0].recipe.get("setting") != recipe["setting"])
    if not own:
        names = sorted({run.model for run in runs})
        raise ValueError(
            f"There are no pretrained weights for {name}: {WEIGHTS_KEPT}. Available: "
            f"{', '.join(names) or 'none'}"
        )
    run, differing = min(own, key=lambda pair: len(pair[1]))
    if differing:
        changes = ", ".join(f"{k}={old!r}, not {new!r}" for k, (old, new) in differing.items())
        raise ValueError(
            f"The pretrained weights of {name} in {run.folder} were trained with "
            f"{changes}, so they do not fit this model. (A path in `weights` is loaded without "
            "this check.)"
        )
    path = run.folder / results.WEIGHTS
    found, expected = file_checksum(path), run.results.get("weights_sha256")
    if found != expected:
        raise ValueError(
            f"{path} is not the zoo's file: its checksum is {found}, not {expected}. Reinstall "
            "the package, or check out the file again."
        )
    return run
