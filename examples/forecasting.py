"""Forecast traffic for the next 24 hours, with a prediction interval.

    python examples/forecasting.py

The model reads a week of traffic and weather, and the calendar of the next day.
"""

import pathlib

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np

from trellis_keras.forecasting import Columns, Forecaster, TimeSeries, WindowStream
from trellis_keras.layers import TCN

WINDOW, HORIZON = 168, 24
FILE = pathlib.Path(__file__).resolve().parent / "data" / "traffic.csv.gz"

calendar = ["hour_sin", "hour_cos", "weekday", "workday"]
columns = Columns(["traffic"], past=["temperature", "clouds"], future=calendar, time="time")
series = TimeSeries.from_csv(FILE, columns)
train, valid, test = series.split(WINDOW, HORIZON, stride=2, shares=(0.85, 0.05, 0.1))

backbone = TCN(32, kernel_size=3, depth=6, return_sequences=False, seed=0)
model = Forecaster(
    backbone, HORIZON, quantiles=(0.1, 0.5, 0.9), future_channels=4, normalize=True, seed=0
)
model.adapt(train.rows())
model.compile("adam")
model.fit(WindowStream(train, batch_size=64, shuffle=True), epochs=15, verbose=2)

# Calibrate the width of the intervals on the last two weeks of the validation split.
model.calibrate(*valid.read(np.arange(len(valid))[-WINDOW:]))
result = model.evaluate(WindowStream(test, 64), return_dict=True, verbose=0)
naive = test.naive_error(season=WINDOW)[0]
print(f"Mean absolute error: {result['mae']:.0f} vehicles an hour; of the week before: {naive:.0f}")
print(f"Within the band of 80 %: {result['coverage']:.0%} of the hours")

# A week with a holiday, forecast day by day at midnight.
first = np.searchsorted(series.times, np.datetime64("2018-09-01"))
bands = [
    model.forecast(series.values[t - WINDOW : t], HORIZON, series.values[t : t + HORIZON, -4:])
    for t in range(first, first + WINDOW, HORIZON)
]
low, middle, high = np.concatenate(bands)[:, 0].T
times, measured = series.times[first:][:WINDOW], series.values[first - WINDOW :, 0]
figure, axis = plt.subplots(figsize=(11, 4.5), layout="constrained")
axis.fill_between(times, low, high, alpha=0.25, label="forecast, 10 to 90 %")
axis.plot(times, middle, label="forecast, median")
axis.plot(times, measured[WINDOW:][:WINDOW], "k", label="measured")
axis.plot(times, measured[:WINDOW], ":", color="tab:red", label="the week before")
axis.annotate("Labor Day", (times[60], 6700), ha="center")
axis.set(title="Interstate 94 near Minneapolis, forecast every midnight for 24 hours",
         xlabel="September 2018", ylabel="vehicles an hour", ylim=(0, 7400))  # fmt: skip
axis.xaxis.set_major_formatter(mdates.DateFormatter("%a %d"))
axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
figure.savefig("forecasting.png", dpi=120)
