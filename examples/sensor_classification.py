"""Recognize exercises from the acceleration and rotation of a watch.

    python examples/sensor_classification.py

The model is trained on eight people and tested on two others. It reads windows of four seconds.
"""

import pathlib

import keras
import matplotlib.pyplot as plt
import numpy as np

from trellis_keras.layers import TCN
from trellis_keras.models import SequenceClassifier

FILE = pathlib.Path(__file__).resolve().parent / "data" / "exercises.csv.gz"
WINDOW, STRIDE, RATE = 50, 5, 12.5  # steps, steps, steps per second

keras.utils.set_random_seed(0)
table = np.genfromtxt(FILE, delimiter=",", names=True, dtype=None, encoding="utf-8")
signals = np.stack([table[name] for name in ("ax", "ay", "az", "wx", "wy", "wz")], axis=-1)
signals = signals.astype("float32")
recording = np.char.add(np.char.add(table["exercise"], table["arm"]), table["person"].astype(str))

starts = np.arange(0, len(signals) - WINDOW, STRIDE)
starts = starts[recording[starts] == recording[starts + WINDOW - 1]]  # windows within one recording
x = signals[starts[:, None] + np.arange(WINDOW)]
y = table["exercise"][starts]
names = sorted(set(y))
test = table["person"][starts] > 8

backbone = TCN(32, kernel_size=3, depth=4, dropout=0.2, return_sequences=False, seed=0)
model = SequenceClassifier(backbone, len(names), class_names=names, normalize=True, seed=0)
model.adapt(x[~test])
model.compile("adam")
model.fit(x[~test], y[~test], batch_size=64, epochs=10, verbose=2)

probabilities = model.predict_proba(x[test], verbose=0)
found = np.array(names)[probabilities.argmax(axis=-1)]
accuracy = np.mean(found == y[test])
print(f"Correct: {accuracy:.1%} of the windows of two people the model has not seen")

# The exercises of one person in sequence: predicted probabilities, and the true class.
one = (table["person"][starts[test]] == 10) & (table["arm"][starts[test]] == "right")
true = np.array([names.index(name) for name in y[test][one]])
minutes = np.arange(len(true)) * STRIDE / RATE / 60
figure, axis = plt.subplots(figsize=(11, 3.6), layout="constrained")
mesh = axis.pcolormesh(minutes, range(len(names)), probabilities[one].T, cmap="Blues")
edges = np.flatnonzero(np.diff(true, prepend=-1, append=-1))
for first, last in zip(edges, edges[1:], strict=False):
    axis.hlines(true[first] + np.array([-0.5, 0.5]), minutes[first], minutes[last - 1], "tab:red")
axis.set(title="Exercises of a person the model has not seen, one after the other",
         xlabel="minutes", yticks=range(len(names)), yticklabels=names)  # fmt: skip
axis.plot([], "tab:red", label="the exercise it was")
axis.legend(loc="upper center")
figure.colorbar(mesh, label="probability of the model")
figure.savefig("sensor_classification.png", dpi=120)
