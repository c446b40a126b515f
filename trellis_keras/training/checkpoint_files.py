"""Checkpoints as folders that are whole or not there: written aside, synced, then renamed.

A checkpoint is a folder `epoch-0007` (seven epochs finished) with

* `variables.npz`: arrays `model.00000`, `optimizer.00000`, ... without pickle;
* `state.json`: the epoch, the variables' names and the callbacks' states;
* `manifest.json`: the SHA-256 of the other two.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np

from trellis_keras.files import annotate_error, sync_folder

VARIABLES = "variables.npz"
STATE = "state.json"
MANIFEST = "manifest.json"

_FOLDER = re.compile(r"epoch-(\d{4,})")
_DAMAGE = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
)
_ASIDE = ".unfinished-"  # no reader takes such a folder for a checkpoint


def make_writable(directory):
    """Creates the directory and tries it out.

    Raises:
        ValueError: if nothing can be written there.
    """
    directory = Path(directory).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"Checkpoints cannot be written to {str(directory)!r}: {error}. Choose a directory "
            "that can be created and written to."
        ) from error
    return directory


def write(directory, epoch, arrays, state):
    """Writes one checkpoint so that a reader sees all of it or nothing.

    Args:
        directory: `pathlib.Path`, which exists.
        epoch: number of finished epochs.
        arrays: dict of NumPy arrays.
        state: JSON-able dict.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: if it cannot be written; the folder is named, and the older ones are untouched.
    """
    folder = directory / f"epoch-{epoch:04d}"
    with annotate_error(folder, directory / _ASIDE):
        _write(directory, folder, arrays, state)
    return folder


def _write(directory, folder, arrays, state):
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=directory))
    try:
        with open(aside / VARIABLES, "wb") as file:
            np.savez(file, **arrays)
            _sync(file)
        _write_json(aside / STATE, state)
        sums = {name: _sha256(aside / name) for name in (VARIABLES, STATE)}
        _write_json(aside / MANIFEST, {"sha256": sums})
        aside.chmod(0o755)  # mkdtemp's 0700 would lock out whoever evaluates the run
        sync_folder(aside)
        remove(folder)  # a damaged one, or one of a run that began again
        aside.rename(folder)
        sync_folder(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove(folder):
    """Removes a checkpoint; one that is half removed is no checkpoint any more."""
    if folder.exists():
        # By renaming alone: on a full disk no folder could be made for it.
        grave = folder.with_name(f"{_ASIDE}{secrets.token_hex(4)}")
        folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)  # `remove_unfinished` finds what is left


def remove_unfinished(directory):
    """Removes what killed processes left behind."""
    for folder in directory.glob(f"{_ASIDE}*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_older(directory, epoch, keep):
    """Removes all but the newest `keep` of the checkpoints up to `epoch`."""
    older = [folder for number, folder in _numbered(directory) if number <= epoch]
    for folder in older[:-keep]:
        remove(folder)


def latest(directory):
    """Finds the newest whole checkpoint.

    Args:
        directory: the directory given to `Checkpoint`.

    Returns:
        The `pathlib.Path` of its folder, or `None` if there is no checkpoint at all. A damaged
        one that is newer is named in a warning.

    Raises:
        ValueError: if there are checkpoints but none is whole.

    Example:

    >>> path = trellis_keras.training.latest("runs/first/checkpoints")
    """
    damaged = []
    for _, folder in reversed(_numbered(Path(directory).expanduser())):
        damage = find_damage(folder)
        if damage is None:
            return folder
        warnings.warn(
            f"Checkpoint {folder} is damaged ({damage}); looking for an earlier one.",
            stacklevel=2,
        )
        damaged.append(f"{folder.name} ({damage})")
    if damaged:
        raise ValueError(
            f"No checkpoint in {str(directory)!r} is whole: {', '.join(damaged)}. Put a copy of "
            "one back, or remove these folders to train from the first epoch."
        )
    return None


def find(path):
    """Returns the folder of a checkpoint, given that folder or the directory that holds several.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    path = Path(path).expanduser()
    if _FOLDER.fullmatch(path.name) or (path / MANIFEST).exists():
        damage = find_damage(path)
        if damage is not None:
            raise ValueError(f"Checkpoint {path} is damaged: {damage}")
        return path
    folder = latest(path)
    if folder is None:
        raise ValueError(f"There is no checkpoint in {str(path)!r}.")
    return folder


def find_damage(folder):
    """Returns what is wrong with a checkpoint's folder, or `None` if it is whole.

    Raises:
        OSError: if that cannot be told, because the disk or the network does not let it be read.
    """
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        for name in (VARIABLES, STATE):
            if _sha256(folder / name) != sums[name]:
                return f"{name} is not what was written"
    except _DAMAGE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _numbered(directory):
    found = []
    if directory.is_dir():
        for folder in directory.iterdir():
            match = _FOLDER.fullmatch(folder.name)
            if match:
                found.append((int(match[1]), folder))
    return sorted(found)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        _sync(file)


def _sync(file):
    file.flush()
    os.fsync(file.fileno())
