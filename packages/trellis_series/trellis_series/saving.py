"""Saves forecasts to a folder, and reads them from one that anyone may have written."""

import itertools
import json
import math
import os
import pathlib
from typing import Any

import keras
import numpy as np
import pandas as pd

from trellis_keras.files import atomic_folder, read_json, read_npz
from trellis_keras.models.saved_files import load_model
from trellis_series import ridge, smoothing
from trellis_series.ensemble import Ensemble, Filters, State, Transform

_ABOUT, _ARRAYS, _NETWORK = "forecasts.json", "series.npz", "network.keras"


def check_folder(path: str | os.PathLike, overwrite: bool) -> pathlib.Path:
    """Returns the folder to save to.

    Raises:
        ValueError: If it exists without `overwrite`, or contains anything but saved forecasts.
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
    """Writes a folder atomically. `about` are the JSON values that belong to the models.

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
    leaves = [
        np.asarray(leaf, "float64")
        for model in models.values()
        for leaf in keras.tree.flatten(model._replace(last=0))
    ]
    with atomic_folder(check_folder(path, overwrite)) as folder:
        text = json.dumps({**about, "names": names, **times}, indent=2, allow_nan=False)
        (folder / _ABOUT).write_text(text + "\n", encoding="utf-8")
        np.savez_compressed(
            folder / _ARRAYS,
            numbers=np.concatenate([leaf.ravel() for leaf in leaves]),
            shapes=np.concatenate([leaf.shape for leaf in leaves]).astype("int64"),
            counts=np.array([(len(m.filters), len(m.kernels)) for m in models.values()]),
        )
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
        numbers = np.asarray(stacked["numbers"], "float64")
        shapes, place = iter(stacked["shapes"].tolist()), 0

        def restored(like):
            nonlocal place
            shape = tuple(itertools.islice(shapes, np.ndim(like)))
            found = numbers[place : place + math.prod(shape)]
            place += len(found)
            return found.reshape(shape) if shape else type(like)(found.item())

        last = pd.Index(pd.Series(about["last"]).astype(about["kind"]))
        if last.dtype.kind not in "iMm" and not isinstance(last, pd.PeriodIndex):
            raise ValueError(f"its times are of the kind {last.dtype}")
        models = {}
        for name, time, counts in zip(about["names"], last, stacked["counts"], strict=True):
            model = keras.tree.map_structure(restored, _example(*counts.tolist()))
            models[name] = model._replace(last=time)
            if len(model.state.values) < model.length or any(
                kernel.shape[1] != model.horizon for kernel in model.kernels
            ):
                raise ValueError("its arrays do not fit together")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path / _ARRAYS} is damaged, or of another version: {error!r}"
        ) from error
    reach = {model.reach for model in models.values() if model.net_share}
    network = load_model(path / _NETWORK) if reach else None
    if network is not None and reach != {network.linear_window}:
        raise ValueError(f"{path / _NETWORK} reads other windows than the forecasts.")
    return about, models, network


def _example(filters, kernels):
    """Returns a model whose leaves have the types and the ranks of a saved one."""
    if not 1 <= filters <= 3 or not 1 <= kernels <= 2:
        raise ValueError(f"it has {filters} filters and {kernels} kernels")
    vector, matrix = np.zeros(1), np.zeros((1, 1))
    transform = Transform(False, 0.0, 0.0, 0.0)
    bank = Filters(transform, 0, smoothing.Bank(*[vector] * 5))
    filtered = smoothing.FilterState(vector, vector, matrix, vector, vector, vector)
    state = State(vector, vector, (filtered,) * filters, matrix, matrix)
    return Ensemble(
        horizon=0,
        season=0,
        naive_season=0,
        scale=0.0,
        low=0.0,
        transform=transform,
        filters=(bank,) * filters,
        lags=ridge.Lags(0, 0),
        kernels=(matrix,) * kernels,
        slopes=vector,
        weights=vector,
        errors=matrix,
        naive_errors=matrix,
        origin_local=vector,
        independent=0.0,
        naive_change=0.0,
        state=state,
        last=0,
    )
