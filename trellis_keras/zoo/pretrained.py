"""Weights of the zoo's models: of a file, or those that were published with results."""

import hashlib
import pathlib
import warnings

from trellis_keras.models.saved_files import check_claims
from trellis_keras.zoo.assets import RESULTS, WEIGHTS, assets_folder, read_results


def load_weights(model, recipe, config, weights):
    """Loads weights into a zoo model and returns it.

    Args:
        model: A built model.
        recipe: The zoo's recipe of its name.
        config: The configuration that the model was built from.
        weights: None (leave as it is), `"pretrained"`, or the path of a weights file.

    Raises:
        ValueError: There are no pretrained weights of this model, the file is missing, or it is
            not the one that was published.
    """
    if weights is None:
        return model
    if weights == "pretrained":
        path = _pretrained(recipe, config)
    else:
        path = pathlib.Path(weights).expanduser()
        if not path.is_file():
            raise ValueError(
                f'{recipe.name}: `weights` must be None, "pretrained" or a file. There is none at '
                f"{path}"
            )
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
    """Yields (folder, results) of everything that was published with its weights."""
    for path in sorted(assets_folder().glob(f"*/{RESULTS}")):
        if (path.parent / WEIGHTS).is_file():
            yield path.parent, read_results(path)


def _pretrained(recipe, config):
    """The weights of the model's name that solve the same benchmark, such as one T of several."""
    there = []
    for folder, results in published():
        there.append(folder.name)
        if results["model"] != recipe.name:
            continue
        if config.has_result_of(_trained(recipe, folder, results).model):
            _check_untouched(folder / WEIGHTS, results)
            return folder / WEIGHTS
    raise ValueError(
        f"There are no pretrained weights of {recipe.name} with these settings. There are some "
        f"of: {', '.join(there) or 'no model yet'}"
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
