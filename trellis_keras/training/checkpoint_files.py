"""The files of checkpoints.

A checkpoint is one file, `epoch-0007.npz` after seven epochs, with the arrays `model.00000`,
`optimizer.00000`, ... and `state`, a JSON text with the epoch, the callbacks' states and the names
of the variables. `epoch-0007-batch-00000120.npz` was written within the eighth epoch, after 120 of
its batches.
"""

import json
import re
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from keras_streams.files import atomic_write
from trellis_keras.files import read_npz, reading

State = dict[str, Any]
Arrays = dict[str, np.ndarray]

_FORMAT = 3
TRANSIENT = "passing"  # variables of one epoch: random generators, metrics and carried states
KINDS = ("model", "optimizer", TRANSIENT)
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


def checkpoint_progress(directory: str | PathLike) -> tuple[int, int]:
    """Returns (epochs, batches): finished epochs, and batches done in the next.

    Args:
        directory: Folder of `Checkpoint`.
    """
    found = read_newest(directory)
    return (0, 0) if found is None else (found[1]["epoch"], found[1]["batch"])


def latest_checkpoint(directory: str | PathLike) -> Path | None:
    """Returns the newest undamaged checkpoint, or `None` without any.

    A warning names newer ones that are damaged.

    Args:
        directory: Folder of `Checkpoint`.
    """
    found = read_newest(directory)
    return None if found is None else found[0]


def read_newest(directory: str | PathLike) -> tuple[Path, State, Arrays] | None:
    """Returns path and contents of the newest undamaged checkpoint, or `None` without any."""
    errors = []
    for _, path in reversed(numbered(Path(directory).expanduser())):
        try:
            return path, *read(path)
        except ValueError as error:
            warnings.warn(f"{error}. Trying an older one.", stacklevel=3)
            errors.append(error)
    if errors:
        raise ValueError(
            f"No checkpoint in {str(directory)!r} can be read: {'; '.join(map(str, errors))}. "
            "Restore a copy of one, or remove them to train from the first epoch."
        )
    return None


def numbered(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """Returns the checkpoints as ((epoch, batch), path), oldest first."""
    if not directory.is_dir():
        return []
    paths = (p for p in directory.iterdir() if _FILE_NAME.fullmatch(p.name) and p.is_file())
    return sorted((_number(path), path) for path in paths)


def _number(path):
    """Returns (epoch, batch) of a checkpoint."""
    epoch, batch = _FILE_NAME.fullmatch(path.name).groups()
    return int(epoch), int(batch or 0)


def is_complete(state: State, epochs: int) -> bool:
    """Returns whether a run of this number of epochs is complete in a checkpoint's state."""
    return state["epoch"] >= epochs or (state["stopped"] and epochs <= state["epochs"])


def write(path: str | PathLike, arrays: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Writes a checkpoint; a kill or a power failure leaves all of it or none."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        # A callback may remember NumPy's numbers.
        text = json.dumps({"format": _FORMAT, **state}, default=np.generic.item)
        np.savez(file, state=text, **arrays)


def read(path: str | PathLike) -> tuple[State, Arrays]:
    """Returns the state and the arrays of an untrusted checkpoint."""
    try:
        with reading(path):
            arrays = read_npz(path)
        state = json.loads(str(arrays.pop("state")))
        _check_state(state)
        _check_arrays(state, arrays)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of this version, or damaged: {error!r}"
        ) from error
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
