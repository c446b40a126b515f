"""Saves forecasts to a folder, and reads them from one that anyone may have written."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from trellis_keras.files import atomic_folder, read_json, read_npz
from trellis_keras.models.saved_files import load_model
from trellis_series import ridge, smoothing
from trellis_series.ensemble import Ensemble, Filters, State, Transform

_ABOUT, _ARRAYS, _NETWORK = "forecasts.json", "series.npz", "network.keras"
_MOST_AXES, _NO_AXIS, _ABSENT = 3, -1, -2  # in the shapes of arrays


def check_folder(path: str | os.PathLike, overwrite: bool) -> pathlib.Path:
    """Returns the folder to save to.

    Raises:
        ValueError: If it exists without `overwrite`, or contains anything but saved forecasts.
        FileNotFoundError: If its parent does not exist.
    """
    path = pathlib.Path(path).expanduser()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for {path.name}.")
    if path.exists():
        if not overwrite:
            raise ValueError(f"{path} already exists. Choose another name, or pass overwrite=True.")
        others = {path.name} if not path.is_dir() else {file.name for file in path.iterdir()}
        others -= {_ABOUT, _ARRAYS, _NETWORK}
        if others:
            raise ValueError(
                f"{path} has other contents than saved forecasts, which would be lost: "
                f"{', '.join(sorted(others)[:5])}. Choose another folder."
            )
    return path


def save(
    path: str | os.PathLike,
    about: dict[str, Any],
    models: dict[Any, Ensemble],
    network: Any = None,
    overwrite: bool = False,
) -> None:
    """Writes a folder: all of it, or none.

    Args:
        path: The folder.
        about: What else there is to know, as JSON.
        models: The forecasts of the series.
        network: Keras model, or `None`.
        overwrite: Boolean, whether to replace an earlier save. Defaults to `False`.

    Raises:
        ValueError: As `check_folder`, or if names of series are neither strings nor numbers.
    """
    names = [name.item() if isinstance(name, np.generic) else name for name in models]
    wrong = [name for name in names if not isinstance(name, (str, int, float))]
    if wrong:
        raise ValueError(
            f"The names of saved series must be strings or numbers. Received: {wrong[0]!r}"
        )
    last = pd.Index([model.last for model in models.values()])
    times = {"kind": str(last.dtype), "last": last.astype(str).tolist()}
    rows = [_arrays(_parts(model)) for model in models.values()]
    stacked = {}
    for name in sorted(set().union(*rows)):
        parts = [row[name] for row in rows if name in row]
        stacked[name] = np.concatenate([np.ravel(part) for part in parts])
        shapes = np.full((len(rows), _MOST_AXES), _ABSENT)
        for shape, row in zip(shapes, rows, strict=True):
            if name in row:
                shape[:] = [*row[name].shape, *[_NO_AXIS] * (_MOST_AXES - row[name].ndim)]
        stacked[f"{name}.shape"] = shapes
    with atomic_folder(check_folder(path, overwrite)) as folder:
        text = json.dumps({**about, "names": names, **times}, indent=2, allow_nan=False)
        (folder / _ABOUT).write_text(text + "\n", encoding="utf-8")
        np.savez_compressed(folder / _ARRAYS, **stacked)  # type: ignore[arg-type]
        if network is not None:
            network.save(folder / _NETWORK)


def load(path: str | os.PathLike) -> tuple[dict[str, Any], dict[Any, Ensemble], Any]:
    """Returns what `save` was given: `about`, the models, and the network.

    Raises:
        ValueError: If the folder has anything else.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path).expanduser()
    about = read_json(path / _ABOUT, "forecasts of trellis_series")
    try:
        stacked = read_npz(path / _ARRAYS)
        rows: list[dict[str, np.ndarray]] = [{} for _ in about["names"]]
        for name in stacked:
            if name.endswith(".shape"):
                continue
            first = 0
            for row, shape in zip(rows, stacked[f"{name}.shape"].tolist(), strict=True):
                if _ABSENT not in shape:
                    shape = [size for size in shape if size != _NO_AXIS]
                    end = first + math.prod(shape)
                    row[name] = stacked[name][first:end].reshape(shape)
                    first = end
        last = pd.Index(pd.Series(about["last"]).astype(about["kind"]))
        if last.dtype.kind not in "iMm" and not isinstance(last, pd.PeriodIndex):
            raise ValueError(f"its times are of the kind {last.dtype}")
        restored = (_restored(row, time) for row, time in zip(rows, last, strict=True))
        models = dict(zip(about["names"], restored, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path / _ARRAYS} is damaged: {error!r}") from error
    reach = {model.reach for model in models.values() if model.net_share}
    network = load_model(path / _NETWORK) if reach else None
    if network is not None and reach != {network.linear.window}:
        raise ValueError(f"{path / _NETWORK} reads other windows than the forecasts.")
    return about, models, network


def _parts(model):
    """Returns the fields of a model by name, but the last time."""
    names = [field.name for field in dataclasses.fields(model) if field.name != "last"]
    return {name: getattr(model, name) for name in names}


def _arrays(value, name=""):
    """Returns the arrays in nested dicts, lists and tuples, named by their places."""
    if value is None:
        return {}
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {name: np.asarray(value)}
    return {
        place: array
        for key, each in pairs
        for place, array in _arrays(each, f"{name}.{key}" if name else str(key)).items()
    }


def _restored(arrays, last):
    """Returns the model whose `_parts` became these arrays."""
    tree: dict[str, Any] = {"last": last}
    for place, array in arrays.items():
        *path, leaf = place.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = array if array.ndim else array.item()

    def rows(node):
        return [node[key] for key in sorted(node, key=int)]

    tree["lags"] = ridge.Lags(*rows(tree["lags"]))
    tree["kernels"] = rows(tree["kernels"])
    tree["transform"] = Transform(*rows(tree["transform"]))
    filters = [rows(each) for each in rows(tree["filters"])]
    tree["filters"] = [
        Filters(Transform(*rows(transform)), season, smoothing.Bank(*rows(bank)))
        for transform, season, bank in filters
    ]
    values, local, states, *covariates = rows(tree["state"])
    states = tuple(smoothing.FilterState(*rows(each)) for each in rows(states))
    model = Ensemble(**{**tree, "state": State(values, local, states, *covariates)})
    if len(values) < model.length or any(k.shape[1] != model.horizon for k in model.kernels):
        raise ValueError("its arrays do not fit together")
    return model
