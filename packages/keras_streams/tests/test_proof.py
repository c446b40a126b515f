"""`to_stream` compares a stream with its model, and refuses what is not equal."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_streams import to_stream

pytestmark = pytest.mark.both_backends


def model(function, length=None):
    x = keras.Input((length, 3))
    return keras.Model(x, function(x), name="net")


class Opaque(layers.Layer):
    """A layer whose `call` takes no symbolic tensors."""

    def compute_output_shape(self, input_shape):
        return input_shape

    def call(self, x):
        return self.compute(x) * (len(x) / len(x))


class Shift(Opaque):
    """Delays a sequence by 24 steps."""

    def compute(self, x):
        return ops.concatenate([ops.zeros_like(x[:, :24]), x[:, :-24]], axis=1)


class Dilated(Opaque):
    """A causal convolution with a dilation rate of 8."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(3, input_shape[-1], input_shape[-1]), name="kernel")

    def compute(self, x):
        padded = ops.pad(x, [[0, 0], [16, 0], [0, 0]])
        return ops.conv(padded, self.kernel, padding="valid", dilation_rate=8)


class Echo(Opaque):
    """Adds what came 300 steps before."""

    def compute(self, x):
        return x + ops.pad(x, [[0, 0], [300, 0], [0, 0]])[:, : x.shape[1]]


class Loudness(Opaque):
    """Depends on a sum of all steps, through a condition alone."""

    def compute(self, x):
        return ops.cond(ops.sum(x) > 0, lambda: 2 * x, lambda: x)


def fill(x):
    """Replaces missing numbers by the mean of the others."""
    missing = ops.isnan(x)
    mean = ops.mean(ops.where(missing, 0.0, x), axis=1, keepdims=True)
    return ops.where(missing, mean, x)


def attend(x):
    y = ops.log(x)
    return layers.MultiHeadAttention(1, 2)(y, y)


class Slice(layers.Layer):
    """Cuts padding by a number of steps, which is unknown in the model."""

    def call(self, x):
        rows, steps, channels = ops.shape(x)
        padded = ops.pad(x, [[0, 0], [5, 0], [0, 0]])
        return ops.slice(padded, (0, 0, 0), (rows, steps, channels))


class Fill(Opaque):
    def compute(self, x):
        return fill(x)


UNEQUAL = {
    "roll": lambda x: ops.roll(x, 24, axis=1),
    "flip": lambda x: ops.flip(ops.log(x), axis=1),  # no finite number on either side
    "flip_": lambda x: ops.flip(ops.sqrt(x), axis=1),
    "flip_1": lambda x: ops.flip(ops.relu(x - 100.0), axis=1),  # zeros on both sides
    "flip_2": lambda x: ops.where(ops.flip(x > 100.0, axis=1), 1.0, x),  # the same condition
    "flip_3": lambda x: x + ops.cast(ops.flip(ops.cast(x > 100.0, "int32"), axis=1), "float32"),
    "group_normalization": lambda x: x + layers.GroupNormalization(3, gamma_initializer="zeros")(x),
    "attention": attend,
    "loudness": lambda x: Loudness()(x),
    "fill": lambda x: Fill()(x),  # equal unless numbers are missing
    "where": lambda x: layers.Activation(fill)(x),
    "vectorized_map": lambda x: ops.vectorized_map(lambda row: fill(row[None])[0], x),
    "unit_normalization": lambda x: layers.UnitNormalization(axis=1)(1e8 * x),
}


@pytest.mark.parametrize("name, length", [("roll", 128), *((name, None) for name in UNEQUAL)])
def test_operations_across_steps_are_refused(name, length):
    with pytest.raises(ValueError, match=f"{name.rstrip('_123')}.*in net.*does not stream"):
        to_stream(model(UNEQUAL[name], length))


def test_conditions_as_inputs_have_both_values():
    x, mask = keras.Input((None, 3)), keras.Input((None,), dtype="bool")
    y = x * ops.expand_dims(ops.cast(ops.roll(mask, -1, axis=1), "float32"), -1)
    with pytest.raises(ValueError, match="roll.*does not stream"):
        to_stream(keras.Model([x, mask], y))


def test_integers_may_be_divisors_and_indices():
    table = np.arange(6.0).reshape(2, 3).astype("float32")

    def divided(x):
        always = ops.cast(x[..., 0] < 100.0, "int32")
        number = ops.floor_divide(7, -always)
        rows = ops.take(table, ops.cast(number < 0, "int32"), axis=0)  # the last row
        return x + rows + layers.Embedding(2, 3)(always)

    assert to_stream(model(divided)).proof.difference == 0.0


def test_tokens_may_be_floats_or_all_the_same():
    for rows, options in ((5, {}), (1, {}), (5, {"example": np.full((2, 30), 4)})):
        net = keras.Sequential([keras.Input((None,)), layers.Embedding(rows, 2), layers.LSTM(3)])
        to_stream(net, **options)


@pytest.mark.parametrize("length", [None, 128])
def test_layers_of_ones_own_that_look_back_far_are_refused(length):
    before = layers.Conv1D(3, 3, padding="causal")
    for layer in (Shift(), Dilated(), *([] if length else [Echo()])):
        with pytest.raises(ValueError, match="does not stream"):
            to_stream(model(lambda x, layer=layer: layer(before(x)), length))


def test_a_distributed_layer_that_looks_back_far_is_refused():
    """Of rows, whose steps are the layer's own."""
    x = keras.Input((None, 2, 3))
    y = layers.TimeDistributed(Echo())(layers.Permute((2, 1, 3))(x))
    with pytest.raises(ValueError, match="time_distributed.*does not stream"):
        to_stream(keras.Model(x, y))


def test_a_layer_of_each_step_needs_no_long_proof():
    x = keras.Input((None, 5, 3))
    net = keras.Model(x, layers.TimeDistributed(Echo())(x))
    assert to_stream(net).proof.steps == 256


class Broken(Opaque):
    def compute(self, x):
        raise TypeError("it is broken")


def test_fewer_steps_are_not_advised_for_a_layer_that_takes_none():
    with pytest.raises(ValueError, match="it is broken") as info:
        to_stream(model(lambda x: Broken()(x)))
    assert "max_context" not in str(info.value)


def test_an_operation_that_raises_an_error_for_padding_is_named():
    with pytest.raises(ValueError, match="slice.*in net/own, does not stream: for the first 5"):
        to_stream(model(Slice(name="own")))


def test_a_model_whose_outputs_are_never_finite_needs_an_example():
    net = model(lambda x: layers.Conv1D(2, 3)(ops.log(-50.0 - x)))
    with pytest.raises(ValueError, match=r"log.*none of its outputs is a finite number.*example=x"):
        to_stream(net)
    x = -60 - np.random.default_rng(0).random((1, 40, 3))
    assert to_stream(net, example=x).proof.difference < 1e-5
    for wrong in (x[..., :2], x[0]):
        with pytest.raises(ValueError, match=r"`example` must have shape \(None, None, 3\)"):
            to_stream(net, example=wrong)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")
def test_a_model_of_strings_needs_an_example():
    x = keras.Input((None,), dtype="string", name="word")
    net = keras.Model(x, layers.Embedding(3, 2)(layers.StringLookup(vocabulary=["a", "b"])(x)))
    with pytest.raises(ValueError, match=r"takes strings \(word\), .*example=x"):
        to_stream(net)
    stream, x = to_stream(net, example=np.array([["b", "a"]])), np.array([["a", "c"]])
    np.testing.assert_array_equal(stream.prefill(x)[0], net(x))


def test_a_branch_without_its_last_steps_waits_for_one_without_its_first():
    stream = to_stream(model(lambda x: x[:, :-200] + x[:, 200:]))
    assert (stream.delay, stream.proof.difference) == (200, 0.0)


def test_rounding_where_numbers_cancel_is_not_a_difference():
    """The mean of numbers less their mean."""
    x = keras.Input((None, 5, 1))
    y = layers.GlobalAveragePooling2D()(x - ops.mean(x, axis=2, keepdims=True))
    to_stream(keras.Model(x, [y, layers.Dense(3)(y)]))


def test_a_stream_has_its_proof():
    net = model(lambda x: layers.GRU(4)(layers.Conv1D(4, 3, padding="same")(x)))
    proof = to_stream(net).proof
    assert proof.steps >= 256 and proof.difference < 1e-5
    stream = to_stream(net)
    assert to_stream(stream) is stream


@pytest.mark.parametrize("option", ["time_axis", "window", "ignore_masks", "max_context"])
def test_a_stream_takes_no_options(option):
    model = keras.Sequential([keras.Input((None, 3)), layers.Dense(2)])
    with pytest.raises(ValueError, match=option):
        to_stream(to_stream(model), **{option: 1})
