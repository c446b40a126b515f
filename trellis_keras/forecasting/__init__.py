"""Forecasts of time series: tables, windows, the model, its losses and metrics."""

from trellis_keras.forecasting import emit  # noqa: F401  # makes a Forecaster known to exports
from trellis_keras.forecasting.anomalies import anomaly_scores, one_step_forecasts
from trellis_keras.forecasting.backtest import backtest, backtest_scores
from trellis_keras.forecasting.columns import Columns
from trellis_keras.forecasting.estimator import FittedForecaster, fit
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.labelled_series import (
    LabelledSeries,
    LabelledWindows,
    SeriesStream,
)
from trellis_keras.forecasting.losses import PinballLoss
from trellis_keras.forecasting.metrics import MASE, Coverage, MeanPinball, mase_scale
from trellis_keras.forecasting.series import TimeSeries, Windows, WindowStream

__all__ = [
    "MASE",
    "Columns",
    "Coverage",
    "FittedForecaster",
    "Forecaster",
    "LabelledSeries",
    "LabelledWindows",
    "MeanPinball",
    "PinballLoss",
    "SeriesStream",
    "TimeSeries",
    "WindowStream",
    "Windows",
    "anomaly_scores",
    "backtest",
    "backtest_scores",
    "fit",
    "mase_scale",
    "one_step_forecasts",
]
