"""Saves forecasts to a folder, and reads them from one that anyone may have written."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from trellis_keras.files import atomic_folder, read_json, read_npz
from trellis_keras.models.saved_files import load_model
from trellis_series import ridge, smoothing
from trellis_series.ensemble import Ensemble, Filters, State

ABOUT, ARRAYS, NETWORK = "forecasts.json", "series.npz", "network.keras"
_NUMBERS = {
    "season": int,
    "naive_season": int,
    "scale": float,
    "low": float,
    "is_log": bool,
    "unit": float,
    "independent": float,
    "naive_change": float,
    "net_share": float,
    "reach": int,
}
_PLAIN = ("limits", "slopes", "weights", "errors", "origin_local", "naive_errors")
_STATE = ("values", "local", "future", "past")


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
        others -= {ABOUT, ARRAYS, NETWORK}
        if others:
            raise ValueError(
                f"{path} has other contents than saved forecasts, which would be lost: "
                f"{', '.join(sorted(others)[:5])}. Choose another folder."
            )
    return path


def save(
    path: str | os.PathLike,
    about: dict[str, Any],
    models: list[Ensemble],
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
    """
    rows = [_arrays(model) for model in models]
    stacked = {}
    for name in sorted(set().union(*rows)):
        parts = [row.get(name, np.zeros(0)) for row in rows]
        shapes = np.full((len(parts), 3), -1)
        for shape, part in zip(shapes, parts, strict=True):
            shape[: part.ndim] = part.shape
        stacked[name] = np.concatenate([np.ravel(part) for part in parts]).astype("float64")
        stacked[f"{name}.shape"] = shapes
    with atomic_folder(check_folder(path, overwrite)) as folder:
        text = json.dumps(about, indent=2, allow_nan=False)
        (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
        np.savez_compressed(folder / ARRAYS, **stacked)  # type: ignore[arg-type]
        if network is not None:
            network.save(folder / NETWORK)


def load(path: str | os.PathLike) -> tuple[dict[str, Any], list[dict[str, np.ndarray]]]:
    """Returns what `save` was given: `about`, and the arrays of each series for `restored`.

    Raises:
        ValueError: If the folder has anything else.
        OSError: If it cannot be read.
    """
    path = pathlib.Path(path).expanduser()
    about = read_json(path / ABOUT, "forecasts of trellis_series")
    try:
        stacked = read_npz(path / ARRAYS)
        rows: list[dict[str, np.ndarray]] = [{} for _ in about["names"]]
        for name in stacked:
            if name.endswith(".shape"):
                continue
            first = 0
            for row, shape in zip(rows, stacked[f"{name}.shape"], strict=True):
                shape = shape[shape >= 0]
                end = first + int(np.prod(shape))
                row[name] = stacked[name][first:end].reshape(shape)
                first = end
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / ARRAYS} is damaged: {error}") from error
    return about, rows


def _arrays(model):
    """Returns a model as arrays."""
    state = model.state
    found = {name: getattr(model, name) for name in _PLAIN}
    found |= {name: getattr(state, name) for name in _STATE}
    found["numbers"] = np.array([getattr(model, name) for name in _NUMBERS], "float64")
    found["lags"] = np.array(model.lags, "float64")
    found["kernels"] = np.stack(model.kernels)
    for i, (filters, known) in enumerate(zip(model.banks, state.filters, strict=True)):
        found[f"bank{i}"] = np.stack(filters.bank)
        found[f"bank{i}.about"] = np.array([filters.season, filters.is_log], "float64")
        found |= {f"bank{i}.{name}": value for name, value in known._asdict().items()}
    return found


def restored(arrays: dict[str, np.ndarray], horizon: int) -> Ensemble:
    """Returns the model that `load` has read.

    Raises:
        ValueError, KeyError, TypeError: If the arrays are not those of a model.
    """
    numbers = dict(zip(_NUMBERS, arrays["numbers"].tolist(), strict=True))
    banks: list[Filters] = []
    states: list[smoothing.State] = []
    while len(arrays.get(f"bank{len(banks)}", ())):
        name = f"bank{len(banks)}"
        season, is_log = arrays[f"{name}.about"].tolist()
        bank = smoothing.Bank(*arrays[name])
        banks.append(Filters(int(season), bool(is_log), bank))
        states.append(smoothing.State(*(arrays[f"{name}.{of}"] for of in smoothing.State._fields)))
    values, local, *covariates = (arrays[name] for name in _STATE)
    fields: dict[str, Any] = {name: kind(numbers[name]) for name, kind in _NUMBERS.items()}
    fields |= {name: arrays[name] for name in _PLAIN}
    model = Ensemble(
        horizon=horizon,
        banks=banks,
        lags=ridge.Lags(*(int(n) for n in arrays["lags"])),
        kernels=list(arrays["kernels"]),
        state=State(values, local, tuple(states), *covariates),
        **fields,
    )
    if len(values) < model.length or arrays["kernels"].shape[-1] != horizon:
        raise ValueError("its arrays do not fit together")
    return model


def load_network(path: str | os.PathLike, models: list[Ensemble]) -> Any:
    """Returns the network that the models use, or `None`.

    Raises:
        ValueError: If it is missing, damaged, or not one of them.
    """
    if not any(model.net_share for model in models):
        return None
    from trellis_series.network import Network

    network = Network(load_model(pathlib.Path(path).expanduser() / NETWORK))
    if any(model.reach != network.window for model in models if model.net_share):
        raise ValueError("its network reads other windows")
    return network


def written_time(plain: Any) -> int | str:
    """Returns a plain time as JSON has it."""
    return int(plain) if isinstance(plain, (int, np.integer)) else pd.Timestamp(plain).isoformat()


def read_time(written: int | str) -> Any:
    """Returns the plain time that `written_time` has written."""
    return written if isinstance(written, int) else pd.Timestamp(written)


def written_names(names: list[Any]) -> list[Any]:
    """Returns names of series as JSON has them.

    Raises:
        ValueError: If they are neither strings nor numbers.
    """
    plain = [name.item() if isinstance(name, np.generic) else name for name in names]
    wrong = [name for name in plain if not isinstance(name, (str, int, float))]
    if wrong:
        raise ValueError(
            f"The names of saved series must be strings or numbers. Received: {wrong[0]!r}"
        )
    return plain
