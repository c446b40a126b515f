"""Simple forecasting baselines."""

import numpy as np

from trellis_keras.forecasting.linear import PENALTIES, Ridge, fill, folds, mean_error
from trellis_keras.forecasting.series import Windows

_MOST_VALUES = 2**22  # in the windows used to fit a ridge regression
_QUIET = 0.05  # quantile of the windows' units that serves as the smallest unit


def naive(history: np.ndarray, horizon: int, season: int = 1) -> np.ndarray:
    """Returns the forecast that repeats the last season, (horizon, targets).

    Args:
        history: Array (time, targets). A missing value (NaN) is replaced by the last one before it.
        horizon: Positive integer, number of steps.
        season: Positive integer, at most `time`. Defaults to 1, the last value for all steps.
    """
    return _known(history)[len(history) - season + np.arange(horizon) % season]


def drift(history: np.ndarray, horizon: int) -> np.ndarray:
    """Returns the line through the first and the last known value, (horizon, targets).

    Args:
        history, horizon: As in `naive`.
    """
    known, is_known = _known(history), ~np.isnan(history)
    first, since = is_known.argmax(axis=0), is_known[::-1].argmax(axis=0)
    slope = (known[-1] - known[0]) / np.maximum(len(known) - 1 - since - first, 1)
    return known[-1] + (since + np.arange(1, horizon + 1)[:, None]) * slope


def _known(history):
    """Returns values with missing ones replaced by the last known or, at the start, the first."""
    rows = np.where(np.isnan(history), 0, np.arange(len(history))[:, None])
    rows = np.maximum.accumulate(rows, axis=0)
    known = np.take_along_axis(history, rows, axis=0).astype("float64")
    first = np.argmax(~np.isnan(known), axis=0)
    return np.where(np.isnan(known), np.take_along_axis(known, first[None], axis=0), known)


class WindowRidge:
    """Ridge regression from the window of each target to its next values.

    Windows are centred on their last value, in units of their mean change from step to step.
    Blocked cross-validation chooses the penalty. All series share the weights.

    Args:
        windows: `Windows` to fit.
    """

    def __init__(self, windows: Windows):
        size = windows.window * windows.series.values.shape[1]
        count = min(len(windows), max(_MOST_VALUES // size, 1))
        x, y = windows.read(np.linspace(0, len(windows) - 1, count).astype(int))
        x = fill(x[..., : y.shape[-1]])
        changes = _changes(x)
        self._least = [
            np.quantile(k[k > 0], _QUIET) if k.any() else 1.0 for k in np.moveaxis(changes, -1, 0)
        ]
        last, units = self._last_and_units(x)
        x, y = (x - last) / units, (y - last) / units
        self._kernels = [_fit(x[..., j], y[..., j]) for j in range(y.shape[-1])]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Returns forecasts (windows, horizon, targets).

        Args:
            x: Array (windows, window, channels).
        """
        x = fill(x[..., : len(self._kernels)])
        last, units = self._last_and_units(x)
        scaled = (x - last) / units
        found = [scaled[..., j] @ kernel for j, kernel in enumerate(self._kernels)]
        return last + units * np.stack(found, axis=-1)

    def _last_and_units(self, x):
        return x[:, -1:], np.maximum(_changes(x), self._least)[:, None]


def _changes(x):
    """Returns the mean change from step to step in each window, (windows, targets)."""
    return np.abs(np.diff(x, axis=1)).mean(axis=1)


def _fit(x, y):
    zeros = np.zeros((x.shape[1], y.shape[1]))
    whole = Ridge(x, y)
    parts = [(Ridge(x[fitted], y[fitted]), held) for fitted, held in folds(len(x), y.shape[1])]

    def error(penalty):
        held = [y[rows] - x[rows] @ part.shrunk(zeros, penalty) for part, rows in parts]
        return mean_error(np.concatenate(held))

    if not parts:
        return zeros
    return whole.shrunk(zeros, min(PENALTIES, key=error))
