"""Update a forecast with every row of a stream.

    python examples/streaming_forecast.py

A cache holds the past that the model needs, so every row costs the same and no window has to be
stored. The forecasts equal those of `predict` on a window.
"""

import pathlib

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np

from keras_streams import compiled_step
from trellis_keras.forecasting import Columns, Forecaster, TimeSeries, WindowStream
from trellis_keras.layers import TCN

WINDOW, HORIZON = 168, 24
FILE = pathlib.Path(__file__).resolve().parent / "data" / "traffic.csv.gz"

calendar = ["hour_sin", "hour_cos", "weekday", "workday"]
series = TimeSeries.from_csv(FILE, Columns(["traffic"], future=calendar, time="time"))
train, _, _ = series.split(WINDOW, HORIZON, stride=4, shares=(0.8, 0.1, 0.1))
backbone = TCN(32, kernel_size=3, depth=5, return_sequences=False, seed=0)  # sees 125 hours
model = Forecaster(backbone, HORIZON, future_channels=4, normalize=True, seed=0)
model.adapt(train.rows())
model.compile("adam", "mae")
model.fit(WindowStream(train, batch_size=64, shuffle=True), epochs=10, verbose=2)

# Each row of the stream has the calendar of 24 hours later: known inputs are read in advance.
rows = np.roll(series.values, -HORIZON, axis=0)
rows[:, 0] = series.values[:, 0]

# A week of rows fills the cache; the rows of the next two days arrive one at a time.
times = series.times
first = np.searchsorted(times, np.datetime64("2018-09-03"))
step, cache = compiled_step(model), model.initial_cache(batch_size=1)
forecasts, differences = {}, []
for t in range(first - WINDOW, first + 2 * HORIZON):
    forecast, cache = step(rows[t : t + 1], cache)
    forecasts[t] = np.asarray(forecast)[0, :, 0]
    again = model.predict_on_batch(rows[None, t - WINDOW + 1 : t + 1])[0, :, 0]
    differences.append(np.abs(again - forecasts[t]).max())
print(f"`step` and `predict` differ by {max(differences[WINDOW:]):.4f} vehicles an hour at most")

figure, axis = plt.subplots(figsize=(11, 4.5), layout="constrained")
shown = range(first + 3, first + HORIZON, 4)
for t, colour in zip(shown, plt.cm.viridis(np.linspace(0, 0.9, len(shown))), strict=True):
    axis.plot(times[t], rows[t, 0], "o", color=colour, label=f"forecast at {times[t].item():%H:%M}")
    axis.plot(times[t + 1 :][:HORIZON], forecasts[t], color=colour)
shown = slice(first, first + 2 * HORIZON)
axis.plot(times[shown], rows[shown, 0], "k--", linewidth=1, label="measured")
axis.set(title="Interstate 94 near Minneapolis: the forecast as the hours of a holiday arrive",
         xlabel="Labor Day and the day after, 2018", ylabel="vehicles an hour")  # fmt: skip
axis.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M"))
axis.legend()
figure.savefig("streaming_forecast.png", dpi=120)
