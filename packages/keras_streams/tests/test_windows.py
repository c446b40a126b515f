"""`to_stream(model, window=T)`: at each step the model's output for the last T steps."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from random_graphs import noise
from streams import outputs_of

from keras_streams import to_stream
from keras_streams.parts import Sliding

pytestmark = pytest.mark.both_backends

WINDOW = 12


def stack(*parts, length=WINDOW, shape=(3,)):
    return keras.Sequential([keras.Input((length, *shape)), *parts])


def check_windows(model, steps, rate=1):
    """Asserts that the stream's outputs are those of the model for each window alone."""
    length = model.inputs[0].shape[1] or WINDOW
    stream, x = to_stream(model, window=length), noise(2, steps, *model.inputs[0].shape[2:])
    assert all(n == length - 1 for n in keras.tree.flatten(stream.delay))
    assert all(n == rate for n in keras.tree.flatten(stream.rate))
    due = range(length - 1, steps, rate)
    expected = model(np.concatenate([x[:, t + 1 - length : t + 1] for t in due]))
    for y, wanted in zip(outputs_of(stream, [x]), keras.tree.flatten(expected), strict=True):
        assert np.all(np.isnan(np.delete(y, due, axis=1)))
        y = np.moveaxis(y[:, due], 1, 0).reshape(wanted.shape)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


class Centered(layers.Layer):
    """Its operations cannot be traced for any number of rows."""

    def call(self, x):
        y = ops.reshape(x, (ops.shape(x)[0], -1, 3))
        return y - ops.mean(y, axis=1, keepdims=True)


CASES = {
    "average": (stack(layers.Conv1D(4, 3), layers.GlobalAveragePooling1D(), layers.Dense(2)), 1),
    "any length": (stack(layers.Conv1D(4, 3), layers.GlobalMaxPooling1D(), length=None), 1),
    "joined": (stack(layers.Conv1D(4, 3), layers.Flatten(), layers.Dense(2)), 1),
    "one channel": (stack(layers.Conv1D(1, 3), layers.Flatten(), layers.Dense(2)), 1),
    "strides": (
        stack(layers.Conv1D(4, 4, strides=2), layers.MaxPooling1D(3), layers.GlobalMaxPooling1D()),
        6,
    ),
    "strides, joined": (stack(layers.AveragePooling1D(3), layers.Flatten(), layers.Dense(2)), 3),
    "recurrent": (stack(layers.Conv1D(4, 3), layers.LSTM(3), layers.Dense(2)), 1),
    "both directions": (stack(layers.BatchNormalization(), layers.Bidirectional(layers.GRU(2))), 1),
    "two recurrent": (stack(layers.GRU(4, return_sequences=True), layers.GRU(3)), 1),
    "softmax": (stack(layers.Softmax(axis=1), layers.Flatten()), 1),
    "resized": (stack(layers.Resizing(4, 4), layers.Flatten(), shape=(6, 1)), 1),
    "steps of an own layer": (stack(Centered()), 1),
    "image": (
        stack(layers.Conv2D(2, 3), layers.Reshape((10, 8)), layers.Flatten(), shape=(6, 1)), 1,
    ),
    "image, average": (
        stack(layers.Conv2D(2, 3, strides=2), layers.GlobalAveragePooling2D(), shape=(6, 1)), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_output_is_that_of_the_last_steps(name):
    model, rate = CASES[name]
    check_windows(model, WINDOW + 8, rate)


@pytest.mark.parametrize("length", [1, 13, 16])
def test_sums_and_extremes_of_windows_of_every_length(length):
    x = keras.Input((length, 3))
    y = [ops.sum(x, axis=1), ops.mean(x, axis=(1, 2)), ops.min(x, axis=1, keepdims=True)]
    check_windows(keras.Model(x, [*y, layers.GlobalMaxPooling1D()(x)]), 2 * length + 5)


def test_an_input_without_time_scales_the_steps_of_a_window():
    x, speaker = keras.Input((WINDOW, 3)), keras.Input((4,))
    scale = layers.Reshape((1, 5))(layers.Dense(5, activation="sigmoid")(speaker))
    y = layers.GlobalAveragePooling1D()(layers.Conv1D(5, 3)(x) * scale)
    model, given = keras.Model([x, speaker], y), [noise(2, WINDOW + 4, 3), noise(2, 4)]
    stream = to_stream(model, window=WINDOW)
    assert isinstance(stream.plan.parts[-1], Sliding)  # not each window as a whole
    found = outputs_of(stream, given)[0]
    np.testing.assert_allclose(found[:, -1], model([given[0][:, 4:], given[1]]), atol=1e-5)


@pytest.mark.parametrize("function", [layers.GlobalAveragePooling1D(dtype="float16"), ops.cumsum])
def test_half_precision_is_summed_in_single_precision(function):
    is_mean = isinstance(function, keras.Layer)
    length, value = (16, 8e3) if is_mean else (4096, 1.0)  # float16 ends at 65504, and at 2048 + 1
    x = keras.Input((length, 1), dtype="float16")
    y = function(x) if is_mean else ops.cumsum(x, axis=1)
    stream = to_stream(keras.Model(x, y), window=length if is_mean else None)
    first, last = np.split(np.full((1, length, 1), value, "float16"), [length - 1], axis=1)
    _, cache = stream.prefill(first)
    y, _ = stream.step(last[:, 0], cache)
    assert ops.convert_to_numpy(y).item() == (value if is_mean else length)


def test_a_sum_of_a_window_does_not_drift():
    stream = to_stream(stack(layers.GlobalAveragePooling1D()), window=WINDOW)
    x = np.ones((1, 3000, 3), "float32")
    x[:, :2000] = 1e8
    found, _ = stream.prefill(x)
    np.testing.assert_array_equal(found[:, -1], np.ones((1, 3), "float32"))


def joining(x):
    """Operations that join the steps of a window in different ways."""
    y = layers.Conv1D(4, 3)(x)
    scale = layers.GlobalAveragePooling1D(keepdims=True)(y)
    y = y * layers.Dense(4, activation="sigmoid")(scale)
    y = y + layers.MultiHeadAttention(2, 3)(y, y)
    weights = layers.Softmax(axis=1)(layers.Dense(1)(y))
    last = x[:, -1:]
    return [ops.sum(weights * y, axis=1), layers.Flatten()(x - last), y[:, 3], x[:, 0] + last[:, 0]]


@pytest.mark.both_backends(slow=True)
def test_what_joins_steps_gets_each_window_as_a_whole():
    x = keras.Input((WINDOW, 3))
    check_windows(keras.Model(x, joining(x)), WINDOW + 8)
    y = layers.Conv1D(4, 3)(x)
    ends = [ops.mean(y, axis=1), y[:, -1], ops.max(y[:, 2:], axis=(1, 2))]
    check_windows(keras.Model(x, ends), WINDOW + 8)


def test_branches_of_a_window_have_different_strides():
    x = keras.Input((WINDOW, 3))
    ends = [layers.GlobalMaxPooling1D()(layers.AveragePooling1D(n)(x)) for n in (1, 2, 3)]
    check_windows(keras.Model(x, layers.Concatenate()(ends)), WINDOW + 12, rate=6)


REFUSED = {
    'conv1d.*padding="valid"': [layers.Conv1D(4, 3, padding="same"), layers.Flatten()],
    'conv1d.*whose past is not zero.*padding="valid"':
        [layers.Conv1D(4, 3, padding="causal"), layers.GlobalAveragePooling1D()],
    "has an output with a time axis": [layers.Conv1D(4, 3)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "shape", "window"),
    [
        (layers.LSTM(2, stateful=True), (WINDOW, 3), WINDOW),
        (layers.TimeDistributed(layers.LSTM(2, stateful=True)), (WINDOW, 4, 3), None),
    ],
)
def test_states_go_from_one_sequence_to_the_next(layer, shape, window):
    x = keras.Input(batch_shape=(2, *shape))
    with pytest.raises(ValueError, match="would carry states.*stateful=False"):
        to_stream(keras.Model(x, layers.Dense(2)(layer(x))), window=window)


@pytest.mark.parametrize("match", REFUSED)
def test_what_a_window_alone_computes_differently_is_refused(match):
    with pytest.raises(ValueError, match=match):
        to_stream(stack(*REFUSED[match]), window=WINDOW)


def test_the_window_is_that_of_the_model():
    with pytest.raises(ValueError, match="`window` must be the length.*12.*Received: window=13"):
        to_stream(stack(layers.Flatten()), window=13)
    with pytest.raises(ValueError, match=r"flatten.*to_stream\(model, window=128\)"):
        to_stream(stack(layers.Flatten()))
    model = stack(layers.Conv1D(2, 5), layers.GlobalMaxPooling1D(), length=None)
    with pytest.raises(ValueError, match=r"conv1d.*\(None, 3, 3\) it raised.*longer `window`"):
        to_stream(model, window=3)


def test_masks_are_ignored_on_request():
    model = stack(layers.Masking(), layers.GRU(3), length=None)
    with pytest.raises(ValueError, match="masking.*no masked steps.*pass ignore_masks=True"):
        to_stream(model)
    with pytest.raises(ValueError, match="`ignore_masks` must be True or False. Received: 'no'"):
        to_stream(model, ignore_masks="no")
    y, _ = to_stream(model, ignore_masks=True).prefill(noise(2, 7, 3))
    np.testing.assert_allclose(y[:, -1], model(noise(2, 7, 3)), atol=1e-6)
