"""Time series: tables, windows and batches."""

from trellis_keras.forecasting.labelled_series import LabelledWindows
from trellis_keras.forecasting.series import Columns, TimeSeries, Windows, WindowStream

__all__ = ["Columns", "LabelledWindows", "TimeSeries", "WindowStream", "Windows"]
