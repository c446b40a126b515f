"""The best model of a run, and its metrics."""

import os
from typing import Any

import keras
import numpy as np

from trellis_keras.models.base import BackboneModel
from trellis_keras.models.saved_files import load_model
from trellis_keras.zoo.run.folder import best_path

SPLITS = ("train", "valid", "test")


def load_best(folder: str | os.PathLike, kind: type[keras.Model] = BackboneModel) -> keras.Model:
    """Returns the best model of the run in `folder`, uncompiled.

    Args:
        folder: The run's folder.
        kind: Required class of the model. Defaults to any model of the package.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
        ValueError: The model's file is damaged, or holds a model of another class.
    """
    path = best_path(folder)
    try:
        model = load_model(path)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. Restore a copy of it, or train in another folder."
        ) from error
    if not isinstance(model, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}. Received: {type(model).__name__}")
    return model


def evaluate(
    recipe: Any,
    folder: str | os.PathLike,
    split: str = "test",
    target_counting: str = "all",
    verbose: str | int = 0,
) -> dict[str, float]:
    """Evaluates the best model of a run.

    Args:
        recipe: The run's recipe, see `zoo.read_recipe`. `data_dir` may differ.
        folder: The run's folder.
        split: `"train"`, `"valid"` or `"test"`.
        target_counting: For text: `"all"` counts each target once, `"original"` follows the
            authors' code, see `data.TokenStream`.
        verbose: As in `keras.Model.evaluate`.

    Returns:
        A dict of the metrics, including the published one, and the number of items that they
        average over: `targets` for text, `frames` for music, otherwise `sequences`.

    Raises:
        ValueError: An unknown split or counting, changed data, or a damaged file.
        FileNotFoundError: There is no run, it has not finished an epoch, or the data are missing.
    """
    return evaluate_model(recipe, load_best(folder), split, target_counting, verbose)


def evaluate_model(
    recipe: Any,
    model: keras.Model,
    split: str = "test",
    target_counting: str = "all",
    verbose: str | int = 0,
) -> dict[str, float]:
    """Compiles a model by its recipe and evaluates it, see `evaluate`."""
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}. Received: {split!r}")
    recipe.compile(model)
    stream = recipe.stream(getattr(recipe.load_data(), split), target_counting)
    results = model.evaluate(stream, return_dict=True, verbose=verbose)
    # Some published figures are the loss, under another name.
    results.setdefault(recipe.metric, results["loss"])
    return {**results, **_counted(recipe, stream)}


def _counted(recipe, stream):
    if recipe.reads_text:
        return {"targets": stream.targets_counted}
    frames = getattr(stream, "frames_counted", None)
    return {"sequences": stream.sequences_counted} if frames is None else {"frames": frames}


def representative_data(recipe: Any, rows: int = 32) -> np.ndarray:
    """Returns inputs sampled from the whole training data, for quantization in `export`.

    Args:
        recipe: The run's recipe, see `zoo.read_recipe`.
        rows: Positive integer, maximum number of sequences. Defaults to 32.

    Returns:
        An array (rows, steps, channels), or tokens (rows, steps) for text.
    """
    stream = recipe.stream(recipe.load_data().train)
    places = np.unique(np.linspace(0, len(stream) - 1, rows, dtype="int64"))
    batches = [stream[int(place)][0] for place in places]
    steps = min(x.shape[1] for x in batches)
    return np.concatenate([_without_padding(x[:1, :steps]) for x in batches])


def _without_padding(x):
    """x (1, steps, ...), with trailing NaN replaced by x repeated from its start."""
    has_value = ~np.isnan(x[0]).reshape(len(x[0]), -1).all(axis=1)
    return np.resize(x[0, : np.flatnonzero(has_value)[-1] + 1], x.shape)
