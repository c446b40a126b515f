"""A small training run that survives being killed. Run by test_checkpoint.py as a script.

Arguments: directory, number of epochs, seconds to sleep in every batch, and whether to compare
the result with an uninterrupted run (in which case this process must not be killed).
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np

from trellis_keras.training import Adam, Checkpoint, PlateauDecay


class Data(keras.utils.PyDataset):
    """Batches as a function of their number, the same in every epoch."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def __len__(self):
        return 5

    def __getitem__(self, index):
        time.sleep(self.seconds)
        rng = np.random.default_rng(index)
        x = rng.normal(size=(8, 6)).astype("float32")
        return x, x.sum(axis=1, keepdims=True)


def train(directory, epochs, seconds):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            keras.Sequential([keras.layers.GaussianNoise(0.5), keras.layers.Dense(1)]),
        ]
    )
    for index, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(index).normal(size=variable.shape, scale=0.5))
    model.compile(Adam(0.05, l2=1e-3, clip_norm=0.5), loss="mse")
    # A falling loss is no good to "max", so that the rule comes into play.
    decay = PlateauDecay(factor=0.9, rule="best_before", window=1, mode="max")
    checkpoint = Checkpoint(directory, seed=3, callbacks=[decay])
    model.fit(
        Data(seconds),
        epochs=epochs,
        validation_data=Data(0.0),
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=announce), decay, checkpoint],
    )
    return [keras.ops.convert_to_numpy(v) for v in model.weights + model.optimizer.variables]


def announce(epoch, logs=None):
    print("epoch", epoch, flush=True)


if __name__ == "__main__":
    folder, epochs, seconds, compare = Path(sys.argv[1]), *map(float, sys.argv[2:])
    resumed = train(folder, int(epochs), seconds)
    if compare:
        whole = train(folder.with_name("whole"), int(epochs), 0.0)
        differ = [
            i
            for i, (a, b) in enumerate(zip(whole, resumed, strict=True))
            if a.tobytes() != b.tobytes()
        ]
        print("variables that differ:", differ)
