"""Detect anomalous flow in a water pipe, without examples of anomalies.

    python examples/anomaly_detection.py

A model learns to forecast the next hour from three normal weeks. Hours far from their forecast are
anomalies, as are the hours after them within the model's one-day receptive field. Hours without a
measurement have no score.
"""

import pathlib

import keras
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np

from trellis_keras.forecasting import Columns, Forecaster, TimeSeries, anomaly_scores
from trellis_keras.layers import TCN

FILE = pathlib.Path(__file__).resolve().parent / "data" / "water.csv.gz"
WINDOW = 48

keras.utils.set_random_seed(0)
series = TimeSeries.from_csv(FILE, Columns(["flow"], time="time"))
time, flow = series.times, series.values
quiet = (time >= np.datetime64("2022-04-04")) & (time < np.datetime64("2022-04-24"))

# At every hour of a window, the model forecasts the next hour.
windows = np.lib.stride_tricks.sliding_window_view(flow[quiet, 0], WINDOW + 1)[..., None]
x, y = windows[:, :-1], windows[:, 1:, None]

backbone = TCN(16, kernel_size=3, depth=3, seed=0)
model = Forecaster(backbone, horizon=1, per_step=True, normalize=True, seed=0)
model.adapt(flow[quiet])
model.compile("adam")
model.fit(x, y, batch_size=16, epochs=10, verbose=2)

score = anomaly_scores(model, flow)[:, 0]
threshold = 2 * np.nanmax(score[quiet])
anomaly = score > threshold
print(f"Anomalies: {anomaly.sum()} of {len(time):,} hours")

figure, (top, bottom) = plt.subplots(2, figsize=(11, 5.4), sharex=True, layout="constrained")
top.plot(time, flow, color="black", linewidth=1, label="measured")
top.plot(time[anomaly], flow[anomaly], ".", color="tab:red", label="anomaly")
top.set(title="Flow through a water pipe", ylabel="litres a second")
bottom.semilogy(time, score, linewidth=1, label="score")
bottom.axhline(threshold, color="tab:red", linestyle="--", label="threshold")
bottom.set(title="Anomaly score: how far each hour is from its forecast",
           xlabel="2022", ylabel="standard deviations", ylim=(0.05, 1000))  # fmt: skip
for axis, place, columns in (top, "center", 1), (bottom, "upper center", 3):
    axis.axvspan(*time[quiet][[0, -1]], color="tab:green", alpha=0.12, label="training")
    axis.legend(loc=place, ncols=columns)
bottom.xaxis.set_major_formatter(mdates.DateFormatter("%d %b"))
figure.savefig("anomaly_detection.png", dpi=120)
