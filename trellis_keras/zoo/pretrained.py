"""Weights for the zoo's models: a file, or those of a published run."""

import hashlib
import os
import pathlib
import warnings
from typing import Any

import keras

from trellis_keras.data import Vocabulary
from trellis_keras.files import reading
from trellis_keras.models.saved_files import check_file
from trellis_keras.zoo import results

# Which weights the repository keeps; `tools.publish` decides by it.
WEIGHTS_KEPT = "the zoo keeps weights under 5 MB, of language models only those of characters"

# Arguments that do not change what trained weights compute. So do all whose names end in "dropout"
# or "dropout_kind", or start with "initial_" or "aux_".
_OF_THE_TRAINING = {
    "activation_reg",
    "forget_bias",
    "rematerialize",
    "seed",
    "stateful",
    "temporal_activation_reg",
    "transform_bias",
    "vocabulary_size",  # the weights bring their vocabulary
}


def find(recipe: Any, weights: str | os.PathLike) -> tuple[pathlib.Path, Vocabulary | None]:
    """Returns the path of a weights file, and the vocabulary that was published with it or None.

    Args:
        recipe: A `Recipe`.
        weights: `"pretrained"`, or the path of a weights file.

    Raises:
        ValueError: There are no pretrained weights of this model, the file is missing, or it is
            not the one that was published.
    """
    if weights == "pretrained":
        run = _pretrained(recipe)
        vocabulary = run.results.get("vocabulary")
        return run.folder / results.WEIGHTS, vocabulary and Vocabulary.from_config(vocabulary)
    path = pathlib.Path(weights).expanduser()
    if not path.is_file():
        raise ValueError(
            f'{recipe.name}: `weights` must be None, "pretrained" or a file. Received: {path}, '
            "where there is no file"
        )
    return path, None


def load_weights(model: keras.Model, name: str, path: pathlib.Path) -> keras.Model:
    """Loads a file's weights into a model that is built, and returns the model.

    Raises:
        ValueError: The file does not hold the weights of this model.
    """
    try:
        check_file(path)
        with warnings.catch_warnings():
            # Published weights are those of a model without an optimizer.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(path)
    except Exception as error:  # each kind of damage raises another class
        raise ValueError(f"{path} does not hold the weights of this {name}: {error}") from error
    return model


def checksum(path: str | os.PathLike) -> str:
    """Returns a file's SHA-256, as hexadecimal digits."""
    with reading(path):
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def differences(recipe: Any, trained: dict[str, Any]) -> dict[str, tuple]:
    """Returns {argument: (trained with, asked for)} of what changes the computation.

    Args:
        recipe: A `Recipe`.
        trained: The recipe of a published run, a dict.
    """
    theirs = trained["arguments"]
    ours = recipe.to_dict()["arguments"]
    return {
        name: (theirs.get(name), value)
        for name, value in ours.items()
        if not is_of_the_training(name) and theirs.get(name) != value
    }


def is_of_the_training(name: str) -> bool:
    """Returns whether an argument only matters during training."""
    return (
        name in _OF_THE_TRAINING
        or name.endswith(("dropout", "dropout_kind"))
        or name.startswith(("initial_", "aux_"))
    )


def _pretrained(recipe):
    """The published run whose model computes what this recipe's does."""
    runs = [run for run in results.all_runs() if run.has_weights]
    own = [(run, differences(recipe, run.recipe)) for run in runs if run.model == recipe.name]
    # One net may have been trained by several settings.
    own.sort(key=lambda pair: pair[0].recipe.get("setting") != recipe.setting)
    if not own:
        names = sorted({run.model for run in runs})
        raise ValueError(
            f"There are no pretrained weights of {recipe.name}: {WEIGHTS_KEPT}. There are some of: "
            f"{', '.join(names) or 'no model yet'}"
        )
    run, differing = min(own, key=lambda pair: len(pair[1]))
    if differing:
        changes = ", ".join(f"{k}={old!r}, not {new!r}" for k, (old, new) in differing.items())
        raise ValueError(
            f"The pretrained weights of {recipe.name} in {run.folder} were trained with "
            f"{changes}: in another net they mean nothing. (A path in `weights` is loaded without "
            "this check.)"
        )
    path = run.folder / results.WEIGHTS
    expected = run.results.get("weights_sha256")
    if checksum(path) != expected:
        raise ValueError(
            f"{path} is not the file that was published: its checksum is {checksum(path)}, not "
            f"{expected}. Install the package again, or check the file out again."
        )
    return run
