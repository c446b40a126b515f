"""The checks that every model passes: on a stream of batches, in a file, and in float64."""

import json

import keras
import numpy as np
from keras import ops

JAX = keras.backend.backend() == "jax"
# Without compilation JAX is slow; on TensorFlow, compiling is what is slow.
COMPILED = {"jit_compile": True} if JAX else {"run_eagerly": True}


class Recorder(keras.layers.Layer):
    """A backbone that notes what it is called with, and returns all steps."""

    def build(self, input_shape):
        self.calls = []

    def call(self, inputs, output_length=None):
        self.calls.append((inputs, output_length))
        return inputs[:, -output_length:] if output_length else inputs

    def compute_output_shape(self, input_shape):
        return input_shape


class Batches(keras.utils.PyDataset):
    """Arrays (x, y, weight) in batches."""

    def __init__(self, arrays, batch_size):
        super().__init__()
        self.arrays = arrays
        self.batch_size = batch_size

    def __len__(self):
        return len(self.arrays[0]) // self.batch_size

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return tuple(array[rows] for array in self.arrays)


class OneBatch(keras.utils.PyDataset):
    """A batch: x, (x, y) or (x, y, weight)."""

    def __init__(self, *batch):
        super().__init__()
        self.batch = batch

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.batch if len(self.batch) > 1 else self.batch[0]


def row_weights(x):
    """A weight for each row, 0 for the last, as where a stream fills up its last batch."""
    return np.arange(len(x) - 1, -1, -1).astype("float32")


def check_stream(make, x, y, batch_size):
    """A new model is evaluated on a stream as on the arrays, and trains on it.

    Args:
        make: Function that returns a compiled model.
        x, y: Arrays of several batches.
        batch_size: Unlike every other size, so that no wrong shape fits by chance.
    """
    weight = row_weights(x)
    model = make()
    figures = model.evaluate(Batches((x, y, weight), batch_size), verbose=0, return_dict=True)
    arrays = {"sample_weight": weight, "batch_size": batch_size, "verbose": 0}
    for name, value in model.evaluate(x, y, return_dict=True, **arrays).items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-5, err_msg=name)
    history, _ = fit_on_stream(model, x, y, batch_size)
    assert set(history) == set(figures) | {f"val_{name}" for name in figures}


def fit_on_stream(model, x, y, batch_size):
    """Trains for an epoch, with a validation: the history and the weights."""
    stream = Batches((x, y, row_weights(x)), batch_size)
    history = model.fit(stream, validation_data=stream, shuffle=False, verbose=0).history
    return {name: value for name, (value,) in history.items()}, model.get_weights()


def check_file(model, x, y, path, **custom_objects):
    """A compiled model trains for an epoch, and its file is the model.

    Returns the loaded model, and the names of the figures of both.
    """
    model.fit(x, y, validation_data=(x, y), verbose=0)
    model.save(path)
    loaded = keras.saving.load_model(path, custom_objects=custom_objects)
    pair = model, loaded
    np.testing.assert_array_equal(*(m.predict(x, verbose=0) for m in pair))
    figures, again = (m.evaluate(x, y, verbose=0, return_dict=True) for m in pair)
    assert figures == again
    for a, b in zip(*(m.optimizer.variables for m in pair), strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(a), ops.convert_to_numpy(b))
    # As JSON, which makes lists of the tuples in Keras' own configs.
    assert json.dumps(loaded.get_config()) == json.dumps(model.get_config())
    return loaded, set(figures)


def check_float64(make, x, y):
    """In float64, loss and metrics are the same whatever floatx is.

    Args:
        make: Function (dtype) that returns a model.
        x, y: Arrays of a batch.
    """
    x, y, weight = (ops.convert_to_tensor(array) for array in (x, y, row_weights(x)))

    def figures():
        model = make(dtype="float64")
        model.build((None, *x.shape[1:]))
        model.compile("sgd")
        loss = model.compute_loss(x, y, model(x), weight)
        return {"the loss of a step": loss, **model.get_metrics_result()}

    try:
        found = figures()
        keras.config.set_floatx("float64")
        for name, value in figures().items():
            assert keras.backend.standardize_dtype(found[name].dtype) == "float64", name
            np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)
    finally:
        keras.config.set_floatx("float32")
