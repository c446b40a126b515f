"""Forecasts and classes of time series, on data frames and as streams."""

import importlib

from trellis_series.files import read_csv
from trellis_series.forecasts import Forecasts

__version__ = "0.1.0"

# These import Keras, which takes seconds, and which `Forecasts` rarely needs.
_KERAS = {
    "Coverage": "quantiles",
    "ForecastStream": "stream",
    "Forecaster": "forecaster",
    "MASE": "quantiles",
    "MeanPinball": "quantiles",
    "PinballLoss": "quantiles",
    "RocketClassifier": "rocket",
    "windows": "forecaster",
}

__all__ = ["Forecasts", "read_csv", *_KERAS]


def __getattr__(name):
    if name not in _KERAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_KERAS[name]}"), name)
