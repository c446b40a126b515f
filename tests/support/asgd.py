"""Small linear models for the tests of averaged SGD."""

import keras
import numpy as np
from keras import ops

from tests.support.checkpoints import data


@keras.saving.register_keras_serializable("tests")
def squares(y, prediction):
    """As Keras' "mse", which on JAX takes a third in float32 only."""
    return ops.sum(ops.square(y - prediction), axis=-1) / prediction.shape[-1]


def dense_model(kernel, bias, optimizer, jit_compile=False):
    model = keras.Sequential([keras.Input((len(kernel),)), keras.layers.Dense(len(bias))])
    model.set_weights([kernel, bias])
    model.compile(optimizer, loss=squares, jit_compile=jit_compile)
    return model


def variable(value, name="w"):
    return keras.Variable(np.asarray(value), dtype=keras.config.floatx(), name=name)


def number(value):
    return ops.convert_to_numpy(value)


def linear_model(optimizer, jit_compile=False):
    return dense_model(np.zeros((4, 1)), np.zeros(1), optimizer, jit_compile)


def fit_whole(model, epochs, *callbacks, **kwargs):
    """One step an epoch. The loss falls from epoch to epoch."""
    x, y = data()
    kwargs = {"validation_data": (x, y)} | kwargs
    return model.fit(
        x,
        y,
        batch_size=len(x),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **kwargs,
    )
