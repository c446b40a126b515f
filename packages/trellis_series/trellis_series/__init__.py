"""Forecasting and classification of time series, on data frames and as streams."""

from trellis_series.files import read_csv
from trellis_series.forecaster import Forecaster, windows
from trellis_series.forecasts import Forecasts
from trellis_series.quantiles import MASE, Coverage, MeanPinball, PinballLoss
from trellis_series.rocket import RocketClassifier
from trellis_series.stream import ForecastStream

__version__ = "0.1.0"

__all__ = [
    "MASE",
    "Coverage",
    "ForecastStream",
    "Forecaster",
    "Forecasts",
    "MeanPinball",
    "PinballLoss",
    "RocketClassifier",
    "read_csv",
    "windows",
]
