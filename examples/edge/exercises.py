"""Train a model that recognizes exercises from watch data, and export it to C and WebAssembly.

    python examples/edge/exercises.py          # a minute; needs ziglang: pip install ziglang
    make -C examples/edge                      # ./demo < samples.raw: live predictions in C
    python -m http.server -d examples          # then open localhost:8000/edge/browser/

The files go to `build`: exercises.c (float), exercises_int8.c (integers only), exercises.wasm and
samples.raw, a recording of a held-out person.
"""

import pathlib

import keras
import numpy as np

from trellis_keras.export import export, native
from trellis_keras.layers import TCN
from trellis_keras.models import SequenceClassifier

FOLDER = pathlib.Path(__file__).resolve().parent
WINDOW, STRIDE = 50, 5  # steps; 12.5 steps per second

keras.utils.set_random_seed(0)
table = np.genfromtxt(
    FOLDER.parent / "data" / "exercises.csv.gz",
    delimiter=",",
    names=True,
    dtype=None,
    encoding="utf-8",
)
signals = np.stack([table[name] for name in ("ax", "ay", "az", "wx", "wy", "wz")], axis=-1)
signals = signals.astype("float32")
recording = np.char.add(np.char.add(table["exercise"], table["arm"]), table["person"].astype(str))
starts = np.arange(0, len(signals) - WINDOW, STRIDE)
starts = starts[recording[starts] == recording[starts + WINDOW - 1]]  # a window has one recording
x = signals[starts[:, None] + np.arange(WINDOW)]
y = table["exercise"][starts]
names = sorted(set(y))
test = table["person"][starts] > 8

backbone = TCN(32, kernel_size=3, depth=4, dropout=0.2, return_sequences=False, seed=0)
model = SequenceClassifier(backbone, len(names), class_names=names, normalize=True, seed=0)
model.adapt(x[~test])
model.compile("adam")
model.fit(x[~test], y[~test], batch_size=64, epochs=10, verbose=2)

representative = x[~test][::20]
export(model, FOLDER / "build" / "exercises.c", overwrite=True)
export(
    model,
    FOLDER / "build" / "exercises_int8.c",
    quantization="int8",
    representative_data=representative,
    overwrite=True,
)
export(model, FOLDER / "build" / "exercises.wasm", overwrite=True)
person = (table["person"] == 10) & (table["arm"] == "right")
(FOLDER / "build" / "samples.raw").write_bytes(signals[person].astype("<f4").tobytes())


def accuracy(stream):
    """Returns the share of the test windows that a stream classifies correctly."""
    right = 0
    for window, wanted in zip(x[test], y[test], strict=True):
        stream.reset()
        for row in window:
            probabilities = stream.step(row)
        right += names[np.argmax(probabilities)] == wanted
    return right / np.sum(test)


keras_accuracy = np.mean(np.array(names)[model.predict_proba(x[test]).argmax(-1)] == y[test])
print(f"Correct windows of people the net has not seen: {keras_accuracy:.2%} with Keras")
print(f"C: {accuracy(native(model)):.2%}")
for quantization, tolerance in (("int8", 0.05), ("int8_rings", 0.25)):  # of a probability
    integers = native(
        model,
        quantization=quantization,
        representative_data=representative,
        quantization_tolerance=tolerance,
    )
    print(f"C with integers only, {quantization}: {accuracy(integers):.2%}")
