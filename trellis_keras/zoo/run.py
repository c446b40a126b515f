"""Run folders: a recipe trains a model there, and a killed run resumes from there.

recipe.json          all settings
paths.json           where the data are on this machine; omit it when you share the run
environment.json     hardware, versions, commit and precision of the processes that trained
history.csv          a row per epoch
best.keras           the model with the lowest validation loss, with its vocabulary
checkpoints/         where an interrupted run resumes
tensorboard/         logs for TensorBoard
"""

import json
import math
import os
import pathlib
import shlex
from collections.abc import Iterable
from typing import Any

import keras

from keras_streams import files
from keras_streams.files import atomic_write
from trellis_keras.files import read_json
from trellis_keras.models.base import BackboneModel
from trellis_keras.saved_files import load_model
from trellis_keras.training.checkpoint_files import is_complete, read_newest
from trellis_keras.training.history import read_history
from trellis_keras.zoo.registry import Recipe, recipe_from_dict

RECIPE = "recipe.json"
PATHS = "paths.json"
ENVIRONMENT = "environment.json"
HISTORY = "history.csv"
BEST = "best.keras"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
FILES = {RECIPE, PATHS, ENVIRONMENT, BEST, HISTORY, CHECKPOINTS, TENSORBOARD}


# The folder


def read_recipe(folder: str | os.PathLike) -> Recipe:
    """Returns the recipe of the run in a folder, or raises FileNotFoundError or ValueError."""
    path = _path(folder, RECIPE)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {RECIPE} is missing.")
    written = read_json(path, "a recipe of this version")
    paths = _path(folder, PATHS)
    places = read_json(paths, "a record of where the data are") if paths.exists() else {}
    if not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{paths} must hold paths. Received: {places}")
    try:
        if "path" in places:
            written["data_options"]["path"] = places["path"]
        return recipe_from_dict({**written, "data_dir": places.get("data_dir")})
    # Any error that a damaged file may cause: a missing key, a list for a dict, a huge number.
    except (OverflowError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recipe of this version: {error!r}") from error


def write_recipe(recipe: Recipe, folder: str | os.PathLike) -> None:
    """Writes the recipe of a run, and apart from it where the data are."""
    given = {"path": recipe.data_options.get("path"), "data_dir": recipe.data_dir}
    paths = {name: path for name, path in given.items() if path is not None}
    for name, content in ((PATHS, paths), (RECIPE, recipe.without_folders())):
        if not content and not _path(folder, name).exists():
            continue  # data without a path
        with atomic_write(_path(folder, name)) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def saved_state(folder: str | os.PathLike) -> dict[str, Any] | None:
    """Returns the state from which the run in `folder` resumes: its epoch, its batch and others."""
    found = read_newest(_path(folder, CHECKPOINTS))
    return None if found is None else found[1]


def epochs_done(folder: str | os.PathLike) -> int:
    """Returns the number of epochs after which the run in `folder` would resume."""
    return (saved_state(folder) or {"epoch": 0})["epoch"]


def is_finished(folder: str | os.PathLike) -> bool:
    """Returns whether the run has finished its last epoch, or was stopped early.

    Raises:
        FileNotFoundError: If there is no run.
        ValueError: If its recipe or its checkpoint cannot be read.
    """
    epochs = read_recipe(folder).training.epochs
    state = saved_state(folder)
    return state is not None and is_complete(state, epochs)


def resuming(folder: str | os.PathLike) -> str:
    """Returns the shell command that resumes the run in `folder`.

    Example:

    >>> resuming("runs/my first")
    "trellis-keras train --output 'runs/my first'"
    """
    return f"trellis-keras train --output {shlex.quote(str(folder))}"


def history(folder: str | os.PathLike) -> list[dict[str, float]]:
    """Returns the rows of a run's history, with NaN for missing values."""
    rows = read_history(_path(folder, HISTORY))
    return [{key: float(value or "nan") for key, value in row.items()} for row in rows]


def finished_epochs(folder: str | os.PathLike) -> list[dict[str, float]]:
    """Returns the rows of a run's history, of which there must be one or more with a `val_loss`."""
    read_recipe(folder)
    rows = history(folder)
    if not rows:
        raise FileNotFoundError(
            f"{folder} has no {HISTORY}: the run has not finished an epoch yet, or the file is "
            "lost. Resume the run, or restore the file."
        )
    if "val_loss" not in rows[0]:
        raise ValueError(f"{_path(folder, HISTORY)} has no column val_loss. Restore the file.")
    return rows


def best_epoch(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the row of a history with the lowest validation loss."""
    return min(rows, key=lambda row: (math.isnan(row["val_loss"]), row["val_loss"]))


def check_output(
    path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = (), overwrite: bool = False
) -> pathlib.Path:
    """As `keras_streams.files.check_output`, and raises ValueError for a file of a run."""
    check_no_file_of_a_run(path)
    return files.check_output(path, inputs, overwrite)


def check_no_file_of_a_run(path: str | os.PathLike) -> None:
    """Raises ValueError if a path belongs to the files of a run. Symbolic links are followed."""
    resolved = pathlib.Path(path).expanduser().resolve()
    for folder in resolved.parents:
        name = resolved.relative_to(folder).parts[0].casefold()  # some file systems ignore case
        if name in FILES and (folder / RECIPE).is_file():
            raise ValueError(f"{path} is a file of the run in {folder}. Choose another name.")


def _path(folder, name):
    return pathlib.Path(folder).expanduser() / name


# Its best model


def load_best(folder: str | os.PathLike, kind: type[keras.Model] = BackboneModel) -> keras.Model:
    """Returns the best model of the run in `folder`, uncompiled.

    Raises:
        FileNotFoundError: If there is no run, or it has not finished an epoch.
        ValueError: If the model's file is damaged, or does not hold a model of the class `kind`.
    """
    path = _path(folder, BEST)
    if not path.is_file():
        read_recipe(folder)
        raise FileNotFoundError(f"{folder} has no {BEST}: the run has not finished an epoch yet.")
    try:
        model = load_model(path)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. Restore a copy of it, or train in another folder."
        ) from error
    if not isinstance(model, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}. Received: {type(model).__name__}")
    return model
