"""Reading a checkpoint of any origin: its files' checksums only say that they belong together."""

import json

from trellis_keras.files import read_npz
from trellis_keras.training.checkpoint_files import STATE, VARIABLES

FORMAT = 1
KINDS = ("model", "optimizer")

_FIELDS = {
    "epoch": int,
    "seed": int,
    "epochs": int,
    "stopped": bool,
    "logs": dict,
    "callbacks": list,
    "variables": dict,
}


def read(folder):
    """Returns `(state, arrays)` of a checkpoint's folder.

    Args:
        folder: the `pathlib.Path` of a whole checkpoint, see `checkpoint_files.find`.

    Returns:
        The dict of `state.json`, with all that `Checkpoint` writes, and a dict of the arrays that
        it names: `model.00000`, `optimizer.00000`, ...

    Raises:
        ValueError: if the files hold something else, or are of another version.
    """
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = read_npz(folder / VARIABLES)
        _check(state, arrays)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is no checkpoint of this version: {error!r}") from error
    return state, arrays


def _check(state, arrays):
    if state["format"] != FORMAT:
        raise ValueError(f"it has format {state['format']!r}, this version reads {FORMAT}")
    for name, kind in _FIELDS.items():
        if type(state[name]) is not kind:
            raise ValueError(f"{name} is {state[name]!r}")
    for entry in state["callbacks"]:
        if type(entry["class"]) is not str or type(entry["state"]) is not dict:
            raise ValueError(f"a callback is {entry!r}")
    for kind in KINDS:
        for index, entry in enumerate(state["variables"][kind]):
            if type(entry["path"]) is not str or type(entry["dtype"]) is not str:
                raise ValueError(f"a variable is {entry!r}")
            if f"{kind}.{index:05d}" not in arrays:
                raise ValueError(f"the variable {entry['path']!r} has no value")
