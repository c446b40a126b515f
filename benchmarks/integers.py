"""Compares the accuracy of integer-only C with Keras, on keyword nets for synthetic features.

    python -m benchmarks run integers

Keywords are random smooth patterns over time and frequency, with noise: hard enough that no net
finds all.
"""

import keras
import numpy as np
from keras import layers

from benchmarks.results import heading
from keras_streams import native

STEPS, FEATURES, CLASSES = 20, 10, 10


def keywords(rng, patterns, count):
    """Returns features (count, steps, features) and labels."""
    labels = rng.integers(0, CLASSES, count)
    noise = rng.normal(size=(count, STEPS, FEATURES))
    return (patterns[labels] + 2.6 * noise).astype("float32"), labels


def recurrent():
    """A recurrent layer of 24 units."""
    x = keras.Input((None, FEATURES))
    return keras.Model(x, layers.Dense(CLASSES)(layers.GRU(24)(x)))


def ds_cnn():
    """Depthwise separable convolutions over time and frequency, and their average."""
    x = keras.Input((STEPS, FEATURES))
    y = layers.Reshape((STEPS, FEATURES, 1))(x)
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, (5, 4))(y)))
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization()(layers.DepthwiseConv2D((3, 3))(y)))
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 1)(y)))
    return keras.Model(x, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(y)))


NETS = {"GRU": recurrent, "DS-CNN": ds_cnn}


VARIANTS = ["Keras", "int8", "int8_rings"]


def measure(tests=1000):
    """Returns {"nets": {net: {way: accuracy}}}."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, STEPS, FEATURES)).cumsum(axis=1) / 3
    x, labels = keywords(rng, patterns, 4000)
    x_test, labels_test = keywords(rng, patterns, tests)
    results = {}
    for name, make in NETS.items():
        keras.utils.set_random_seed(0)
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss)
        model.fit(x, labels, batch_size=64, epochs=6, verbose=0)
        results[name] = {"Keras": _accuracy(model.predict(x_test, verbose=0), labels_test)}
        options = {"representative_data": x[:50], "quantization_tolerance": 1.0}
        for way in VARIANTS[1:]:
            stream = native(model, quantization=way, **options)
            scores = np.stack([_last(stream, row) for row in x_test])
            results[name][way] = _accuracy(scores, labels_test)
    return {"nets": results}


def _last(stream, row):
    stream.reset()
    return [stream.step(x) for x in row][-1]


def _accuracy(scores, labels):
    return float(np.mean(np.argmax(scores, axis=-1) == labels))


def markdown(results):
    """Returns the results as Markdown."""
    lines = heading("integers: test accuracy on synthetic keywords", results["machine"])
    lines += ["| net | " + " | ".join(VARIANTS) + " |", "|---" * (1 + len(VARIANTS)) + "|"]
    for name, row in results["nets"].items():
        lines.append(f"| {name} | " + " | ".join(f"{row[way]:.1%}" for way in VARIANTS) + " |")
    return "\n".join(lines) + "\n"
