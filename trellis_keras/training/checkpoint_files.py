"""The files of checkpoints.

A checkpoint is one file, `epoch-0007.npz` after seven epochs, with the arrays `model.00000`,
`optimizer.00000`, ... and `state`, a JSON text with the epoch, the callbacks' states and the names
of the variables. `epoch-0007-batch-00000120.npz` was written within the eighth epoch, after 120 of
its batches.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from keras_streams.files import atomic_write
from trellis_keras.files import check_archive, read_npz, reading

_FORMAT = 3
# "passing" variables live for one epoch: random generators, metrics and carried states.
KINDS = ("model", "optimizer", "passing")
_FILE_NAME = re.compile(r"epoch-(\d{4,})(?:-batch-(\d{8,}))?\.npz")
_FIELDS = {
    "epoch": int,
    "batch": int,
    "batches": int,
    "seed": int,
    "epochs": int,
    "stopped": bool,
    "logs": dict,
    "callbacks": list,
    "variables": dict,
}


def progress(directory: str | PathLike) -> tuple[int, int]:
    """Returns (epochs, batches): finished epochs, and batches done in the next."""
    path = latest(directory)
    return (0, 0) if path is None else _number(path)


def latest(directory: str | PathLike) -> Path | None:
    """Returns the newest undamaged checkpoint in a folder of `Checkpoint`, or `None` without any.

    A warning names newer ones that are damaged.
    """
    damaged = []
    for _, path in reversed(numbered(Path(directory).expanduser())):
        try:
            return _undamaged(path)
        except ValueError as error:
            warnings.warn(f"{error}. Trying an older one.", stacklevel=2)
            damaged.append(path.name)
    if damaged:
        raise ValueError(
            f"All checkpoints in {str(directory)!r} are damaged: {', '.join(damaged)}. Restore a "
            "copy of one, or remove them to train from the first epoch."
        )
    return None


def find(path: str | PathLike) -> Path:
    """Returns a checkpoint, or the newest undamaged one in a folder."""
    path = Path(path).expanduser()
    if path.is_file():
        return _undamaged(path)
    newest = latest(path)
    if newest is None:
        raise ValueError(f"There is no checkpoint in {str(path)!r}.")
    return newest


def _undamaged(path):
    try:
        with reading(path):
            check_archive(path)
    except ValueError as error:
        raise ValueError(f"Checkpoint {path} is damaged: {error}") from error
    return path


def numbered(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """Returns the checkpoints as ((epoch, batch), path), oldest first."""
    if not directory.is_dir():
        return []
    paths = (path for path in directory.iterdir() if _FILE_NAME.fullmatch(path.name))
    return sorted((_number(path), path) for path in paths)


def _number(path):
    """Returns (epoch, batch) of a checkpoint."""
    epoch, batch = _FILE_NAME.fullmatch(path.name).groups()
    return int(epoch), int(batch or 0)


def read_state(path: str | PathLike) -> dict[str, Any]:
    """Returns the state in a checkpoint (epoch, logs, callbacks) without reading its variables."""
    return read(path, ("state",))[0]


def is_complete(state: dict[str, Any], epochs: int) -> bool:
    """Returns whether a run of this number of epochs is complete in a checkpoint's state."""
    return state["epoch"] >= epochs or (state["stopped"] and epochs <= state["epochs"])


def write(path: str | PathLike, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Writes a checkpoint; a kill or a power failure leaves all of it or none."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, state=json.dumps({"format": _FORMAT, **state}), **arrays)


def read(
    path: str | PathLike, names: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the state and the arrays of an untrusted checkpoint.

    Args:
        path: A checkpoint.
        names: The arrays to read. Defaults to `None`, all of them.
    """
    try:
        arrays = read_npz(path, names)
        state = json.loads(str(arrays.pop("state")))
        _check_state(state)
        if names is None:
            _check_arrays(state, arrays)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a checkpoint of this version: {error!r}") from error
    return state, arrays


def _check_state(state):
    if state["format"] != _FORMAT:
        raise ValueError(f"it has format {state['format']!r}, this version reads {_FORMAT}")
    for name, kind in _FIELDS.items():
        if type(state[name]) is not kind:
            raise ValueError(f"{name} is {state[name]!r}")
    for entry in state["callbacks"]:
        if type(entry["class"]) is not str or type(entry["state"]) is not dict:
            raise ValueError(f"a callback is {entry!r}")


def _check_arrays(state, arrays):
    for kind in KINDS:
        for index, entry in enumerate(state["variables"][kind]):
            if type(entry["path"]) is not str or type(entry["dtype"]) is not str:
                raise ValueError(f"a variable is {entry!r}")
            stored = arrays[f"{kind}.{index:05d}"].dtype
            if stored != stored_dtype(np.dtype(entry["dtype"])):
                raise ValueError(f"{entry['path']!r} of {entry['dtype']} is stored as {stored}")


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in the file: integers for bfloat16 and float8, which NumPy cannot store."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"uint{8 * dtype.itemsize}")
