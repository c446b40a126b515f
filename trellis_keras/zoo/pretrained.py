"""Weights of the zoo's models: of a file, or those that were published with results."""

import hashlib
import pathlib
import warnings

from trellis_keras import data
from trellis_keras.models.saved_files import check_claims
from trellis_keras.zoo.assets import RESULTS, WEIGHTS, WEIGHTS_KEPT, all_results, assets_folder


def find(recipe, config, weights):
    """Returns the path of a weights file, and the vocabulary that was published with it or None.

    Args:
        recipe: The zoo's recipe of the model's name.
        config: The configuration of the model.
        weights: `"pretrained"`, or the path of a weights file.

    Raises:
        ValueError: There are no pretrained weights of this model, the file is missing, or it is
            not the one that was published.
    """
    if weights == "pretrained":
        folder, results = _pretrained(recipe, config)
        vocabulary = results.get("vocabulary")
        return folder / WEIGHTS, vocabulary and data.Vocabulary.from_config(vocabulary)
    path = pathlib.Path(weights).expanduser()
    if not path.is_file():
        raise ValueError(
            f'{recipe.name}: `weights` must be None, "pretrained" or a file. There is none at '
            f"{path}"
        )
    return path, None


def load_weights(model, recipe, path):
    """Loads a file's weights into a zoo model that is built, and returns it.

    Raises:
        ValueError: The file does not hold the weights of this model.
    """
    try:
        check_claims(path)
        with warnings.catch_warnings():
            # Published weights are those of a model without an optimizer.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(path)
    except Exception as error:  # Keras has another one for each kind of damage
        raise ValueError(
            f"{path} does not hold the weights of this {recipe.name}: {error}"
        ) from error
    return model


def checksum(path):
    """Returns a weights file's SHA-256, as hexadecimal digits."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def published():
    """Returns [(folder, results)] of everything that was published with its weights."""
    return [found for found in all_results(assets_folder()) if (found[0] / WEIGHTS).is_file()]


def _pretrained(recipe, config):
    """(folder, results) of the weights that solve the same benchmark, such as one T of several.

    Among several, such as two sizes, those of the model that is most like this one.
    """
    there, alike = published(), {}
    for folder, results in there:
        if results["model"] == recipe.name:
            theirs = _trained(recipe, folder, results).model
            if config.has_result_of(theirs):
                same = [value == getattr(theirs, name) for name, value in vars(config).items()]
                others = config.computed_otherwise(theirs)
                alike[folder] = (not others, sum(same)), others, results
    if not alike:
        names = ", ".join(folder.name for folder, _ in there) or "no model yet"
        raise ValueError(
            f"There are no pretrained weights of {recipe.name} with these settings; "
            f"{WEIGHTS_KEPT}. There are some of: {names}"
        )
    folder = max(alike, key=lambda folder: alike[folder][0])
    _, others, results = alike[folder]
    _check_function(recipe, config, others)
    _check_untouched(folder / WEIGHTS, results)
    return folder, results


def _check_function(recipe, config, others):
    """Refuses what Keras would load without a word."""
    if others:
        theirs = ", ".join(f"{name}={value!r}" for name, value in others.items())
        ours = ", ".join(f"{name}={getattr(config, name)!r}" for name in others)
        raise ValueError(
            f"The pretrained weights of {recipe.name} are of a model with {theirs}; in another one "
            f"they mean nothing. Received: {ours}. (`weights=` with a path does not look at that.)"
        )


def _trained(recipe, folder, results):
    """The recipe that published weights were trained by."""
    try:
        return recipe.replace(**results["settings"])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{folder / RESULTS} is of no recipe of this version: {error!r}"
        ) from error


def _check_untouched(path, results):
    expected = results.get("weights_sha256")
    if checksum(path) != expected:
        raise ValueError(
            f"{path} is not the file that was published: its checksum is {checksum(path)}, not "
            f"{expected}. Install the package again, or check the file out again."
        )
