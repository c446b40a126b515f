"""Inputs with time on another axis, and inputs without time."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from random_graphs import noise
from streams import check_equal

from keras_streams import to_stream
from keras_streams.proof import random_examples

pytestmark = pytest.mark.both_backends


@pytest.mark.both_backends(slow=True)
def test_layers_of_every_kind_on_the_second_axis():
    x = keras.Input((3, 30, 2))
    y = layers.ZeroPadding2D(((0, 1), (4, 0)))(x)
    y = layers.Conv2D(3, (2, 3), dilation_rate=(1, 2))(y)
    y = layers.MaxPooling2D(2)(layers.Conv2DTranspose(2, 2, strides=(1, 2))(y))
    y = layers.PReLU(shared_axes=[1, 2])(layers.Cropping2D(((0, 1), (0, 0)))(y[:, :, 1:]))
    y = layers.Reshape((-1, 4))(ops.transpose(layers.UpSampling2D((2, 1))(y), (0, 2, 1, 3)))
    model = keras.Model(x, layers.GRU(3, return_sequences=True)(y))
    stream = check_equal(model, [noise(2, 3, 30, 2)], time_axis=np.int64(-2))
    assert (stream.delay, stream.rate) == (1, 1)


def test_one_channel_with_strides_longer_than_the_window():
    x = keras.Input((3, 28, 1))
    model = keras.Model(x, layers.Conv2D(1, (1, 2), strides=(1, 3))(x))
    check_equal(model, [noise(2, 3, 28, 1)], time_axis=2)


def test_axes_that_operations_move():
    x = keras.Input((24, 5))
    y = ops.expand_dims(layers.Permute((2, 1))(x), -1)  # (batch, 5, 24, 1)
    y = layers.Conv2D(2, 3, padding="same")(y)
    y = ops.squeeze(ops.max(y, axis=1, keepdims=True), 1)
    model = keras.Model(x, [layers.LSTM(3, return_sequences=True)(y), ops.swapaxes(y, 1, 2)])
    check_equal(model, [noise(2, 24, 5)])


def test_a_square_has_its_time_axis_where_the_operations_put_it():
    x = keras.Input((6, 6))
    y = ops.swapaxes(layers.Dense(6)(x), 1, 2)
    y = layers.Dense(6)(ops.swapaxes(ops.tanh(y), 1, 2)) + ops.mean(y, axis=1)[..., None]
    check_equal(keras.Model(x, y), [noise(2, 6, 6)])


def test_inputs_of_different_lengths():
    xs = [keras.Input((None, 2)), keras.Input((None, 2))]
    y = layers.Add()([layers.GRU(2, return_sequences=True)(x) for x in xs])
    stream = to_stream(keras.Model(xs, y))
    with pytest.raises(ValueError, match="same number of steps"):
        stream.prefill([noise(1, 10, 2), noise(1, 8, 2)])


def test_inputs_without_time():
    x, static = keras.Input((None, 3), name="x"), keras.Input((4,), name="static")
    context = layers.Dense(3, activation="tanh")(static)
    y = layers.Conv1D(3, 3)(layers.ZeroPadding1D(1)(x)) * ops.expand_dims(context, 1)
    y = layers.GRU(3, return_sequences=True)(y, initial_state=context)
    model = keras.Model({"static": static, "x": x}, y)
    stream = check_equal(model, [noise(2, 4), noise(2, 9, 3)])
    assert stream.delay == 1
    y = layers.UpSampling1D(2)(layers.Conv1D(3, 2)(x)) + ops.expand_dims(context, 1)
    check_equal(keras.Model([x, static], y), [noise(2, 9, 3), noise(2, 4)])


@pytest.mark.parametrize("length", [None, 9])
def test_integer_features_beside_a_sequence_are_not_tokens(length):
    x, features = keras.Input((length, 3)), keras.Input((4,), dtype="int32")
    context = layers.Dense(3)(ops.cast(features, "float32"))
    y = layers.Add()([layers.GRU(3, return_sequences=True)(x), ops.expand_dims(context, 1)])
    check_equal(keras.Model([x, features], y), [noise(2, 9, 3), np.arange(8).reshape(2, 4)])


def test_a_mask_among_the_inputs():
    x, mask = keras.Input((10, 3)), keras.Input((10,), dtype="bool")
    model = keras.Model([x, mask], layers.GRU(3, return_sequences=True)(x, mask=mask))
    with pytest.raises(ValueError, match="gru.*without `mask`"):
        to_stream(model)
    to_stream(model, ignore_masks=True)


def test_features_that_are_as_many_as_the_steps_are_no_steps():
    x, static = keras.Input((6, 3)), keras.Input((3,))
    y = layers.Concatenate()([layers.GRU(6)(x), ops.tile(static, (1, 2))])
    inputs = [noise(2, 6, 3), noise(2, 3)]
    model = keras.Model([x, static], y)
    found, _ = to_stream(model).prefill(inputs)
    np.testing.assert_allclose(found[:, -1], model(inputs), atol=1e-6)


def test_inputs_without_time_are_repeated_for_each_step():
    x, token = keras.Input((10, 3)), keras.Input((1,), dtype="int32")
    code = layers.Flatten()(layers.Embedding(5, 2)(token))
    y = layers.Concatenate()(inputs=[x, layers.RepeatVector(10)(code)])
    model = keras.Model([x, token], layers.LSTM(3, return_sequences=True)(y))
    check_equal(model, [noise(2, 10, 3), np.array([[1], [4]], "int32")])


def test_categories_of_each_step():
    token, x = keras.Input((None,), dtype="int32"), keras.Input((None,))
    y = [
        layers.CategoryEncoding(4, output_mode="one_hot")(token),
        layers.Discretization([-0.5, 0.5], output_mode="one_hot")(x),
    ]
    model = keras.Model([token, x], layers.Concatenate()(y))
    stream = check_equal(model, [np.arange(18).reshape(2, 9) % 4, noise(2, 9)])
    tokens, _ = next(random_examples(stream, 50, np.random.default_rng(0)))
    assert set(tokens.flat) == {0, 1, 2, 3}


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")
def test_words_of_each_step():
    words = keras.Input((None,), dtype="string")
    lookup = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    model = keras.Model(words, layers.Dense(2)(lookup(words)))
    x = np.array([["a", "b", "?", "a", "a"]])
    stream = to_stream(model, example=x)
    y, _ = stream.prefill(x)
    np.testing.assert_allclose(y, model(ops.convert_to_tensor(x)), atol=1e-6)


def test_all_inputs_have_the_same_rows():
    a, b = keras.Input((None, 3)), keras.Input((None, 3))
    stream = to_stream(keras.Model([a, b], a + b))
    with pytest.raises(ValueError, match="same batch size"):
        stream.step([noise(2, 3), noise(1, 3)], stream.initial_cache(2))


def test_a_value_of_all_steps_and_an_input_without_time():
    x, static = keras.Input((None, 3)), keras.Input((4,))
    y = layers.Concatenate()([layers.GlobalMaxPooling1D()(x), layers.Dense(2)(static)])
    stream = to_stream(keras.Model([x, static], layers.Dense(2)(y)))
    xs = noise(2, 7, 3), noise(2, 4)
    found, _ = stream.prefill(list(xs))
    for t in (0, 6):
        expected = stream.model([xs[0][:, : t + 1], xs[1]])
        np.testing.assert_allclose(found[:, t], expected, rtol=1e-4, atol=1e-5)


def test_keys_that_no_query_waits_for():
    x, keys = keras.Input((None, 4)), keras.Input((6, 4))
    y = layers.MultiHeadAttention(2, 3)(x, keys)
    model = keras.Model([x, keys], layers.GRU(3, return_sequences=True)(y))
    check_equal(model, [noise(2, 8, 4), noise(2, 6, 4)], time_axis=[1, None])


def test_a_time_axis_that_the_inputs_lack():
    x = keras.Input((9, 3))
    model = keras.Model(x, layers.Dense(2)(x))
    for axis in (0, 3, -3, [1, 1], {"y": 1}, "1", 1.0):
        with pytest.raises(ValueError, match="`time_axis` must be an axis of the inputs"):
            to_stream(model, time_axis=axis)
    with pytest.raises(ValueError, match=r"net has no time axis.*to_stream\(model, time_axis=1\)"):
        x = keras.Input((9,))
        to_stream(keras.Model(x, layers.Dense(2)(x), name="net"))
