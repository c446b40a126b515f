"""Update a forecast with every new hour, with constant work.

    pip install ./packages/keras_streams . ./packages/trellis_series   # in the checkout
    python examples/streaming_forecast.py

A stream continues where the fitted rows end. Its numbers are those of `update` and `predict`.
"""

import pathlib
import time

import matplotlib.pyplot as plt
import numpy as np

from keras_streams import compiled_step
from trellis_series import Forecasts, read_csv

FILE = pathlib.Path(__file__).resolve().parent / "data" / "traffic.csv.gz"
HORIZON, DAYS = 24, 14

table = read_csv(FILE)[["time", "traffic"]]
known, new = table[: -24 * DAYS], table[-24 * DAYS :]
forecasts = Forecasts(HORIZON, network=None, time_col="time", target_col="traffic").fit(known)

stream = forecasts.stream()
step, cache = compiled_step(stream), stream.initial_cache(batch_size=1)
found = []
for value in new["traffic"]:
    start = time.perf_counter()
    forecast, cache = step(np.array([[value]]), cache)
    found.append((time.perf_counter() - start, np.asarray(forecast)[0]))
seconds, forecasted = map(np.array, zip(*found, strict=True))
print(f"An hour is read and {HORIZON} are forecast in {1e3 * np.median(seconds):.2f} ms")

expected = forecasts.update(new).predict()["ours"]
print(f"Largest difference from predict: {np.abs(forecasted[-1, :, 0] - expected).max():.1e}")

# The forecasts of noon, made 24 hours, 12 hours and an hour before it.
figure, axis = plt.subplots(figsize=(11, 3.6), layout="constrained")
noon = np.arange(36, len(new), 24)
axis.plot(new["traffic"].to_numpy(), color="black", linewidth=1, label="measured")
for ahead, color in ((24, "tab:blue"), (12, "tab:orange"), (1, "tab:green")):
    mean, low, high = forecasted[noon - ahead, ahead - 1].T
    place = noon + {24: -1, 12: 0, 1: 1}[ahead]
    bars = np.maximum([mean - low, high - mean], 0)
    axis.errorbar(place, mean, bars, fmt="o", color=color, label=f"{ahead} h before")
axis.set(title="Forecasts of noon, with 80 % bands", xlabel="hours", ylabel="vehicles an hour")
figure.legend(ncols=4, loc="outside lower center")
figure.savefig("streaming_forecast.png", dpi=120)
