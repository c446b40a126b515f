"""The folder of a run.

recipe.json          all settings
paths.json           where the data are on this machine; omit it when you share the run
environment.json     hardware, versions, commit and precision of the processes that trained
history.csv          a row per epoch
best.keras           the model with the lowest validation loss, with its vocabulary
checkpoints/         where an interrupted run resumes
tensorboard/         logs for TensorBoard
"""

import os
import pathlib
import shlex
from collections.abc import Iterable
from typing import Any

from keras_streams import files
from trellis_keras.files import read_json
from trellis_keras.training.checkpoint_files import is_complete, latest, progress, read_state
from trellis_keras.zoo.training_settings import Training

RECIPE = "recipe.json"
PATHS = "paths.json"
ENVIRONMENT = "environment.json"
HISTORY = "history.csv"
BEST = "best.keras"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
# The files and folders that a run writes.
FILES = {RECIPE, PATHS, ENVIRONMENT, BEST, HISTORY, CHECKPOINTS, TENSORBOARD}
FILE_OPTIONS = ("path",)  # options of data sets that are paths if they are strings


def recipe_path(folder: str | os.PathLike) -> pathlib.Path:
    """Returns the path of a run's recipe.

    Raises:
        FileNotFoundError: There is no run.
    """
    path = pathlib.Path(folder).expanduser() / RECIPE
    if not path.is_file():
        within = sorted(path.parent.glob(f"*/{RECIPE}"))
        hint = f" There is one in {within[0].parent}." if within else ""
        raise FileNotFoundError(f"{folder} holds no run: {RECIPE} is missing.{hint}")
    return path


def read_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns the recipe of a run as the dict in its file.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: The file is damaged.
    """
    path = recipe_path(folder)
    settings = read_json(path, "a recipe of this version")
    try:
        flat(settings)["epochs"], settings["name"], settings["data_checksum"]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recipe of this version: {error!r}") from error
    return settings


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns {option: value} of a recipe's dict; the name of the model is `model`."""
    flat = {"model" if key == "name" else key: value for key, value in settings.items()}
    flat.pop("trellis_keras", None)
    arguments, training = flat.pop("arguments"), Training.from_config(flat.pop("training"))
    return {**flat, **arguments, **training.options()}


def flat_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns {name: value} of all settings of a run; its zoo model is `model`.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: The file is damaged.
    """
    return flat(read_settings(folder))


def without_paths(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a recipe's dict without the user's folders, and the paths of the data.

    The dict keeps the names of files. The paths are those of `FILE_OPTIONS` and `data_dir`, where
    given.
    """
    options = settings["data_options"]
    paths = files_of(options)
    names = {name: os.path.basename(path) for name, path in paths.items()}
    shared = {**settings, "data_options": {**options, **names}, "data_dir": None}
    if isinstance(settings["data_dir"], str):
        paths["data_dir"] = settings["data_dir"]
    return shared, paths


def files_of(data_options: dict[str, Any]) -> dict[str, str]:
    """Returns {option: path} of the files among the options of a data set."""
    found = {name: data_options.get(name) for name in FILE_OPTIONS}
    return {name: path for name, path in found.items() if isinstance(path, str)}


def read_paths(folder: str | os.PathLike) -> dict[str, str]:
    """Returns the paths of a run's data, or an empty dict if the file is missing (a shared run).

    Raises:
        ValueError: The file is damaged.
    """
    file = pathlib.Path(folder).expanduser() / PATHS
    if not file.exists():
        return {}
    paths = read_json(file, "a record of where the data are")
    if not all(isinstance(path, str) for path in paths.values()):
        raise ValueError(f"{file} must hold paths. Received: {paths}")
    return paths


def has_run(folder: str | os.PathLike) -> bool:
    """Returns whether there is a run in `folder` that can be resumed."""
    return latest(pathlib.Path(folder).expanduser() / CHECKPOINTS) is not None


def epochs_done(folder: str | os.PathLike) -> int:
    """Returns the number of epochs after which the run in `folder` would resume."""
    return progress(pathlib.Path(folder).expanduser() / CHECKPOINTS)[0]


def is_finished(folder: str | os.PathLike) -> bool:
    """Returns whether the run in `folder` has finished its last epoch or was stopped by its rule.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: Its recipe or its checkpoint cannot be read.
    """
    epochs = read_settings(folder)["training"]["epochs"]
    checkpoint = latest(pathlib.Path(folder).expanduser() / CHECKPOINTS)
    return checkpoint is not None and is_complete(read_state(checkpoint), epochs)


def best_path(folder: str | os.PathLike) -> pathlib.Path:
    """Returns the path of the best model of the run in `folder`.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
    """
    path = recipe_path(folder).with_name(BEST)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {BEST}: the run has not finished an epoch yet.")
    return path


def resuming(folder: str | os.PathLike) -> str:
    """Returns the shell command that resumes the run in `folder`.

    Example:

    >>> resuming("runs/my first")
    "trellis-keras train --output 'runs/my first'"
    """
    return f"trellis-keras train --output {shlex.quote(str(folder))}"


def check_output(
    path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = (), overwrite: bool = False
) -> pathlib.Path:
    """Returns the path of a file that may be written: see `keras_streams.files.check_output`.

    Raises:
        ValueError: If it is a file of a run, or as in `keras_streams.files.check_output`.
        FileNotFoundError: If its folder does not exist.
    """
    check_no_file_of_a_run(path)
    return files.check_output(path, inputs, overwrite)


def check_no_file_of_a_run(path: str | os.PathLike) -> None:
    """Raises ValueError if a path belongs to the files of a run. Symbolic links are followed."""
    resolved = pathlib.Path(path).expanduser().resolve()
    for folder in resolved.parents:
        if is_run_file(resolved.relative_to(folder)) and (folder / RECIPE).is_file():
            raise ValueError(f"{path} is a file of the run in {folder}. Choose another name.")


def is_run_file(name: pathlib.Path) -> bool:
    """Returns whether a path relative to a run's folder is one that the run writes."""
    return name.parts[0].casefold() in FILES  # some file systems ignore case
