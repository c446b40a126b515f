"""Saves forecasts to a folder, and reads them from one that anyone may have written."""

import collections
import json
import math
import os
import pathlib
import typing
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pandas as pd

from keras_streams.files import check_output
from trellis_keras.files import atomic_folder, read_json, read_npz
from trellis_keras.saved_files import load_model
from trellis_series.ensemble import Ensemble

_FILES = _ABOUT, _ARRAYS, _NETWORK = "forecasts.json", "series.npz", "network.keras"
_VERSION = 1  # stored by position: raise it when a field of an Ensemble or its parts changes


def check_folder(
    path: str | os.PathLike, overwrite: bool, files: Collection[str] = _FILES
) -> pathlib.Path:
    """Returns a folder to write to. If it exists, it may contain only `files`."""
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        return check_output(path)
    if not overwrite:
        raise ValueError(
            f"{path} already exists. Choose another name, or replace it with --overwrite "
            "(`overwrite=True`)."
        )
    others = {file.name for file in path.iterdir()} - set(files) if path.is_dir() else {path.name}
    if others:
        raise ValueError(
            f"{path} has contents that would be lost: {', '.join(sorted(others)[:5])}. Choose "
            "another name."
        )
    return path


def save(
    path: str | os.PathLike,
    about: dict[str, Any],
    models: dict[Any, Ensemble],
    network: Any = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder atomically. `about` are the JSON values that belong to the models."""
    names = [name.item() if isinstance(name, np.generic) else name for name in models]
    wrong = [name for name in names if not isinstance(name, (str, int, float))]
    if wrong:
        raise ValueError(
            f"The names of saved series must be strings or numbers. Received: {wrong[0]!r}"
        )
    last = pd.Index([model.last for model in models.values()])
    try:
        pd.api.types.pandas_dtype(str(last.dtype))
    except TypeError as error:  # the zones of dateutil have no names
        raise ValueError(
            "The time zone of saved times must have a name, as after "
            f"`dt.tz_convert('Europe/Berlin')`. Received: {last.dtype}"
        ) from error
    times = {"kind": str(last.dtype), "last": last.astype(str).tolist()}
    leaves = [leaf for model in models.values() for leaf in _leaves(model._replace(last=0))]
    with atomic_folder(check_folder(path, overwrite)) as folder:
        about = {"version": _VERSION, **about, "names": names, **times}
        # Names from an index are NumPy's.
        text = json.dumps(about, indent=2, allow_nan=False, default=lambda name: name.item())
        (folder / _ABOUT).write_text(text + "\n", encoding="utf-8")
        np.savez_compressed(
            folder / _ARRAYS,
            numbers=np.concatenate([leaf.ravel() for leaf in leaves]),
            ranks=np.array([leaf.ndim for leaf in leaves]),
            shapes=np.concatenate([leaf.shape for leaf in leaves]).astype("int64"),
        )
        if network is not None:
            network.save(folder / _NETWORK)


def load(path: str | os.PathLike) -> tuple[dict[str, Any], dict[Any, Ensemble], Any]:
    """Returns what `save` was given: `about`, the models, and the network."""
    path = pathlib.Path(path).expanduser()
    about = read_json(path / _ABOUT, "forecasts of trellis_series")
    if about.get("version") != _VERSION:
        raise ValueError(
            f"{path} must have version {_VERSION} of saved forecasts. Received: "
            f"{about.get('version')!r}"
        )
    try:
        leaves = _stored_leaves(**read_npz(path / _ARRAYS))
        last = pd.Index(pd.Series(about["last"]).astype(about["kind"]))
        if last.dtype.kind not in "iMm" and not isinstance(last, pd.PeriodIndex):
            raise ValueError(f"its times have the dtype {last.dtype}")
        models = {}
        for name, time in zip(about["names"], last, strict=True):
            model = models[name] = _restored(Ensemble, leaves)._replace(last=time)
            if len(model.state.values) < model.length or any(
                kernel.shape[1] != model.horizon for kernel in model.kernels
            ):
                raise ValueError("its arrays do not fit together")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path / _ARRAYS} is damaged: {error!r}") from error
    reach = {model.reach for model in models.values() if model.net_share}
    network = load_model(path / _NETWORK) if reach else None
    if network is not None and reach != {network.linear_window}:
        raise ValueError(f"{path / _NETWORK} reads other windows than the forecasts.")
    return about, models, network


def _leaves(part: Any) -> Iterator[np.ndarray]:
    """Yields the numbers and arrays of a model. A tuple starts with the number of its items."""
    if isinstance(part, tuple):
        if not hasattr(part, "_fields"):
            yield np.array(float(len(part)))
        for each in part:
            yield from _leaves(each)
    else:
        yield np.asarray(part, "float64")


def _stored_leaves(numbers, ranks, shapes):
    """Returns what `_leaves` yielded."""
    each = [shape.tolist() for shape in np.split(shapes, ranks.cumsum()[:-1])]
    parts = np.split(np.asarray(numbers, "float64"), np.cumsum([*map(math.prod, each)])[:-1])
    return collections.deque(part.reshape(shape) for part, shape in zip(parts, each, strict=True))


def _restored(kind: Any, leaves: collections.deque[np.ndarray]) -> Any:
    """Returns a model, or another value of a type, from its leaves."""
    if typing.get_origin(kind) is tuple:
        items = int(leaves.popleft().item())
        return tuple([_restored(typing.get_args(kind)[0], leaves) for _ in range(items)])
    if hasattr(kind, "_fields"):
        kinds = typing.get_type_hints(kind).values()
        return kind._make([_restored(each, leaves) for each in kinds])
    leaf = leaves.popleft()
    return kind(leaf.item()) if kind in (bool, int, float) else leaf
