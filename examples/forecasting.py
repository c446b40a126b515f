"""Forecast a day of traffic on a motorway, with a band.

    pip install ./packages/keras_streams . ./packages/trellis_series   # in the checkout
    python examples/forecasting.py

The forecast reads two years of hourly traffic, the weather up to now, and the calendar.
"""

import pathlib

import numpy as np

from trellis_series import Forecasts, read_csv

FILE = pathlib.Path(__file__).resolve().parent / "data" / "traffic.csv.gz"
HORIZON, WINDOWS = 24, 7

table = read_csv(FILE)
forecasts = Forecasts(
    HORIZON,
    past=["temperature", "clouds"],
    future=["hour_sin", "hour_cos", "weekday", "workday"],
    network=None,  # "auto" also trains a network, which takes a minute and lowers the error
    time_col="time",
    target_col="traffic",
)

# Each of the last seven days, forecast from the rows before it.
backtest = forecasts.cross_validation(table, n_windows=WINDOWS, naive=True)
error, naive = (np.abs(backtest[name] - backtest["traffic"]).mean() for name in ("ours", "naive"))
inside = backtest["traffic"].between(backtest["ours-lo-80"], backtest["ours-hi-80"]).mean()
print(f"Mean absolute error: {error:.0f} vehicles an hour; repeating the last week: {naive:.0f}")
print(f"Values inside the 80 % band: {inside:.0%}")

# The picture shows the backtest and the week before it.
forecasts.fit(table[: -HORIZON * WINDOWS])
length = 2 * HORIZON * WINDOWS
figure = forecasts.plot(table, backtest, models=["ours"], max_insample_length=length)
figure.axes[0].set_title("Forecasts of seven days, each from the rows before it")
figure.savefig("forecasting.png", dpi=120, bbox_inches="tight")
