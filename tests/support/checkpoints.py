"""A small model with every kind of state, and how the checkpoint tests train it."""

import keras
import numpy as np
from keras import ops

from trellis_keras.training import Adam, Checkpoint


@keras.saving.register_keras_serializable("tests")
class Carry(keras.layers.Layer):
    """Adds a state that it carries from batch to batch, as a stateful layer does."""

    def build(self, input_shape):
        self.carried = self.add_weight(
            shape=(input_shape[-1],), initializer="zeros", trainable=False, name="carried"
        )

    def call(self, x, training=None):
        y = x + self.carried
        if training:
            self.carried.assign(ops.stop_gradient(ops.mean(y, axis=0)) * 0.5)
        return y


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 4)).astype(keras.config.floatx())
    return x, x.sum(axis=1, keepdims=True)


def make_model(units=6, optimizer=None, dtype=None):
    """Two seed generators, a carried state and an optimizer. Eager: compiling takes seconds."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units, activation="tanh", dtype=dtype, name="dense"),
            keras.layers.Dropout(0.5),
            keras.Sequential([Carry(), keras.layers.GaussianNoise(0.5), keras.layers.Dense(1)]),
        ]
    )
    for index, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(index).normal(size=variable.shape))
    optimizer = optimizer or Adam(0.05, l2=1e-3, clip_norm=0.5)
    model.compile(optimizer, loss="mse", run_eagerly=True)
    return model


def fit(model, epochs, *callbacks, verbose=0, **kwargs):
    x, y = data()
    kwargs = {"validation_data": (x, y), "batch_size": 16} | kwargs
    return model.fit(
        x, y, epochs=epochs, shuffle=False, verbose=verbose, callbacks=callbacks, **kwargs
    )


def values(model):
    return [ops.convert_to_numpy(v) for v in model.weights + model.optimizer.variables]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def two_epochs(folder):
    model = make_model()
    fit(model, 2, Checkpoint(folder))
    return model


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])
