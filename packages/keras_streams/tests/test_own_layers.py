"""Layers of one's own that compute with their weights, positions, and shifts."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from random_graphs import noise
from streams import check_equal

from keras_streams import StreamingMixin, to_stream

pytestmark = pytest.mark.both_backends


class WeightNormalized(layers.Layer):
    """A causal convolution whose kernel is computed in `call`."""

    def build(self, input_shape):
        self.v = self.add_weight(shape=(3, input_shape[-1], 4), name="v")
        self.g = self.add_weight(shape=(4,), initializer="ones", name="g")

    def call(self, x):
        kernel = self.g * self.v / ops.sqrt(ops.sum(self.v**2, axis=(0, 1)) + 1e-3)
        return ops.relu(ops.conv(ops.pad(x, [[0, 0], [2, 0], [0, 0]]), kernel, padding="valid"))


def test_kernels_that_a_layer_computes_are_those_of_the_moment():
    x = keras.Input((None, 3))
    model = keras.Model(x, WeightNormalized()(WeightNormalized()(x)))
    layer = model.layers[1]
    for computed in (layer, model):
        stream = check_equal(computed, [noise(2, 9, 3)])
        for weight in model.weights:
            weight.assign(1.5 * weight)
        found, _ = stream.prefill(noise(1, 9, 3))
        np.testing.assert_allclose(found, computed(noise(1, 9, 3)), rtol=1e-4, atol=1e-5)


def test_weights_that_a_lambda_reads_are_those_of_the_moment():
    embedding = layers.Embedding(5, 4)
    tied = layers.Lambda(lambda x: ops.matmul(x, ops.transpose(embedding.embeddings)))
    tokens = keras.Input((None,), dtype="int32")
    x = layers.GRU(4, return_sequences=True)(embedding(tokens))
    model = keras.Model(tokens, tied(x))
    stream, x = to_stream(model), np.array([[1, 2, 3, 0]])
    for weight in model.weights:
        weight.assign(weight + 1.0)
    np.testing.assert_allclose(stream.prefill(x)[0], model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_layer_computes_in_half_precision(policy):
    x = keras.Input((None, 3))
    model = keras.Model(x, WeightNormalized(dtype=policy)(x))
    found, _ = to_stream(model).prefill(noise(1, 4, 3))
    expected = model(noise(1, 4, 3))
    assert found.dtype == expected.dtype
    found, expected = (ops.cast(y, "float32") for y in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


class Late(StreamingMixin, layers.Layer):
    """Returns its inputs, in its stream a step later."""

    delay = 1

    def call(self, x):
        return x

    def initial_cache(self, batch_size):
        return ops.full((batch_size, 3), np.nan)

    def step(self, x, cache):
        return cache, x


def test_a_layer_with_a_delay_streams_by_itself_only():
    x = keras.Input((None, 3))
    with pytest.raises(ValueError, match="Received: delay=1"):
        to_stream(keras.Model(x, Late()(x)))


class Ids(layers.Layer):
    """Adds up numbers."""

    def call(self, x):
        return ops.cumsum(ops.cast(x, "float32"), axis=1)[..., None]


def test_a_layer_of_integers():
    x = keras.Input((None,), dtype="int32")
    stream = to_stream(keras.Model(x, Ids(dtype="int32")(x)))
    assert stream.prefill(np.array([[1, 2, 3]], "int32"))[0][0, -1, 0] == 6


class Alarm(layers.Layer):
    """Is silent if a value is large anywhere."""

    def call(self, x):
        return ops.where(ops.any(ops.abs(x) > 10.0, axis=1, keepdims=True), 0.0, x)


def test_a_threshold_that_few_numbers_reach():
    with pytest.raises(ValueError, match="does not stream"):
        to_stream(keras.Sequential([keras.Input((None, 1)), Alarm()]))


class Upsampled(layers.Layer):
    """A transposed convolution whose kernel is computed in `call`."""

    def build(self, input_shape):
        self.v = self.add_weight(shape=(4, 2, input_shape[-1]), name="v")

    def call(self, x):
        return ops.conv_transpose(x, ops.tanh(self.v), strides=2, padding="same")


def test_a_transposed_convolution_whose_kernel_is_computed():
    x = keras.Input((None, 3))
    check_equal(keras.Model(x, Upsampled()(x)), [noise(2, 9, 3)])


class Positions(layers.Layer):
    """Adds a learned vector of each position."""

    def __init__(self, rows, channels):
        super().__init__()
        self.table = layers.Embedding(rows, channels)

    def build(self, input_shape):
        self.table.build(None)

    def call(self, x):
        return x + self.table(ops.arange(ops.shape(x)[1]))


class Waves(layers.Layer):
    """Adds constants of each position."""

    def call(self, x):
        waves = np.sin(np.arange(x.shape[1])[:, None] / np.arange(1, 1 + x.shape[2]))
        return x + ops.convert_to_tensor(waves, x.dtype)


class Times(layers.Layer):
    """Adds the time as a channel."""

    def call(self, x):
        rows, steps, _ = ops.shape(x)
        times = ops.cast(ops.arange(steps), x.dtype)[None, :, None] / steps
        return ops.concatenate([x, ops.repeat(times, rows, axis=0)], axis=-1)


@pytest.mark.parametrize("make", [lambda: Positions(16, 3), Waves, Times])
def test_positions_of_a_model_of_fixed_length(make):
    x = keras.Input((12, 3))
    y = make()(layers.Conv1D(3, 3, padding="causal")(x))
    model = keras.Model(x, layers.GRU(3, return_sequences=True)(y))
    stream = check_equal(model, [noise(2, 12, 3)])
    y, _ = stream.prefill(noise(1, 14, 3))
    assert np.all(np.isfinite(y[:, :12])) and np.all(np.isnan(y[:, 12:]))


class Countdown(layers.Layer):
    def call(self, x):
        steps = ops.shape(x)[1]
        return x + ops.cast(steps - ops.arange(steps), x.dtype)[None, :, None]


class Count(layers.Layer):
    def call(self, x):
        return x / ops.cast(ops.convert_to_tensor(ops.shape(x)[1]), x.dtype)


@pytest.mark.parametrize("layer", [Countdown, Count])
@pytest.mark.parametrize("max_context", [16, 64])
def test_a_count_of_all_steps_is_not_a_position(layer, max_context):
    x = keras.Input((None, 3))
    with pytest.raises(ValueError, match="counts all steps"):
        to_stream(keras.Model(x, layers.Dense(2)(layer()(x))), max_context=max_context)


def test_positions_of_a_model_of_any_length():
    x = keras.Input((None, 3))
    model = keras.Model(x, layers.Dense(2)(Positions(40, 3)(x)))
    check_equal(model, [noise(2, 16, 3)], max_context=16)
    # On JAX an embedding has rows of NaN for later positions; others raise an error.
    advice = "" if keras.backend.backend() == "jax" else ".*max_context"
    with pytest.raises(ValueError, match=f"positions.*does not stream{advice}"):
        to_stream(model)


class CausalMask(layers.Layer):
    """Attention with a mask of its own."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        rows, steps, _ = ops.shape(x)
        mask = ops.arange(steps)[:, None] >= ops.arange(steps)
        mask = ops.tile(ops.reshape(mask, (1, steps, steps)), [rows, 1, 1])
        return x + self.attention(x, x, attention_mask=mask)


def test_attention_with_a_constant_mask():
    x = keras.Input((12, 4))
    check_equal(keras.Model(x, CausalMask()(x)), [noise(2, 12, 4)])
    band = np.tril(np.triu(np.ones((1, 12, 12), bool), -2))
    y = layers.MultiHeadAttention(2, 3)(x, x, attention_mask=band)
    stream = check_equal(keras.Model(x, y), [noise(2, 12, 4)])
    assert np.all(np.isfinite(stream.prefill(noise(1, 20, 4))[0]))
    y = layers.MultiHeadAttention(2, 3)(x, x, attention_mask=band[:, ::-1])
    with pytest.raises(ValueError, match="attends to all steps"):
        to_stream(keras.Model(x, y))


class Present(layers.Layer):
    """Masks steps of zeros."""

    def call(self, x):
        return x

    def compute_mask(self, x, previous_mask=None):
        return ops.any(ops.not_equal(x, 0), axis=-1)


def test_attention_under_a_mask_of_another_layer():
    x = keras.Input((12, 4))
    y = Present()(x)
    model = keras.Model(x, layers.MultiHeadAttention(2, 3)(y, y, use_causal_mask=True))
    with pytest.raises(ValueError, match="mask"):
        to_stream(model)
    to_stream(model, ignore_masks=True)


class Blocks(layers.Layer):
    """Makes one step of two, as an encoder of speech does."""

    def call(self, x):
        rows, steps, channels = ops.shape(x)
        return ops.reshape(x, (rows, steps // 2, 2 * channels))


def test_reshapes_that_stack_and_split_steps():
    x = keras.Input((24, 4))
    y = layers.Dense(8)(Blocks()(x))
    model = keras.Model(x, [y, layers.Reshape((24, 4))(y), layers.Reshape((96, 1))(y)])
    stream = check_equal(model, [noise(2, 24, 4)])
    assert (stream.delay, list(map(float, stream.rate))) == ([1, 1, 1], [2, 1, 1 / 4])
    with pytest.raises(ValueError, match="makes 3 samples from one that comes every 2 steps"):
        to_stream(keras.Model(x, layers.Reshape((36, 2))(layers.Dense(6)(Blocks()(x)))))


class Pairs(layers.Layer):
    """The products of each step's halves with those of the step before."""

    def call(self, x):
        y = ops.reshape(x, (-1, ops.shape(x)[1], 2, x.shape[-1] // 2))
        return ops.sum(y[:, 1:] * y[:, :-1], axis=-1)


def test_a_reshape_to_a_number_of_steps_that_is_unknown():
    x = keras.Input((None, 4))
    check_equal(keras.Model(x, Pairs()(x)), [noise(2, 12, 4)])


@pytest.mark.parametrize("strides, size", [(4, 2), (2, 4)])
def test_a_reshape_that_splits_a_step(strides, size):
    x = keras.Input((24, 3))
    y = layers.Conv1D(4, strides, strides=strides)(x)
    y = layers.Reshape((-1, 4 // size))(y)
    model = keras.Model(x, layers.Conv1D(2, 2, padding="causal")(y))
    check_equal(model, [noise(2, 24, 3)])


SHIFTS = {
    "zeros of the first steps": lambda x: ops.concatenate(
        [ops.zeros_like(x[:, :2]), x[:, :-2]], axis=1
    ),
    "minus ones": lambda x: ops.concatenate([ops.zeros_like(x[:, :1]) - 1.0, x[:, :-1]], axis=1),
    "the first of all zeros": lambda x: ops.concatenate([ops.zeros_like(x)[:, :1], x[:, :-1]], 1),
    "ones of the batch's size": lambda x: ops.concatenate(
        [ops.ones((ops.shape(x)[0], 3, x.shape[-1])), x[:, :-3]], axis=1
    ),
    "padding": lambda x: ops.pad(x, [[0, 0], [1, 0], [0, 0]])[:, :-1],
}


@pytest.mark.parametrize("name", SHIFTS)
def test_shifts(name):
    x = keras.Input((None, 3))
    y = layers.Lambda(SHIFTS[name], output_shape=lambda shape: shape)(x)
    model = keras.Model(x, layers.Conv1D(2, 4, padding="causal")(layers.Concatenate()([x, y])))
    check_equal(model, [noise(2, 12, 3)])


class Start(layers.Layer):
    """Starts the sequence with a learned vector, or a layer of one."""

    def __init__(self, layer=None):
        super().__init__()
        self.layer = layer

    def build(self, input_shape):
        self.start = self.add_weight(shape=(1, 1, input_shape[-1]), initializer="zeros")

    def call(self, x):
        start = ops.repeat(self.start * 2.0, ops.shape(x)[0], axis=0)
        start = start if self.layer is None else self.layer(ops.zeros_like(x[:, :1]))
        return ops.concatenate([start, x[:, :-1]], axis=1)


class Padded(Start):
    """Pads with a learned number."""

    def call(self, x):
        return ops.pad(x, [[0, 0], [1, 0], [0, 0]], constant_values=self.start[0, 0, 0])[:, :-1]


@pytest.mark.parametrize(
    "layer", [lambda: Start(), lambda: Start(layers.Dense(3)), lambda: Padded()]
)
def test_a_weight_of_zero_is_not_padding(layer):
    x = keras.Input((None, 3))
    model = keras.Model(x, layer()(x))
    with pytest.raises(ValueError, match="weight, which may change"):
        to_stream(model)


def test_layers_of_a_layer_may_have_equal_names():
    class Twice(layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Conv1D(3, 2, padding="same", name="add") for _ in range(2)]

        def call(self, x):
            for part in self.parts:
                x = part(x) + (1.0 if part.name == "add" else 2.0) + x
            return x

    layer = Twice()
    x = keras.Input((None, 3))
    assert check_equal(keras.Model(x, layer(x)), [noise(2, 12, 3)]).delay == 2
    assert [part.name for part in layer.parts] == ["add", "add"]


def test_attributes_that_a_call_stores_stay_as_they_are():
    class Stores(layers.Layer):
        last = None

        def call(self, x):
            self.last = ops.max(x)
            self.first = self.last
            return 2.0 * x

    layer = Stores()
    x = keras.Input((None, 3))
    model = keras.Model(x, layer(x))
    model(noise(1, 4, 3))
    del layer.first
    to_stream(model)
    for name in ("first", "last"):
        assert not isinstance(getattr(layer, name), keras.KerasTensor)


@pytest.mark.parametrize("name", ["window", "max_context"])
def test_counts(name):
    x = keras.Input((8, 3))
    model = keras.Model(x, layers.Flatten()(x))
    for wrong in (True, 0, 2.0, "3"):
        with pytest.raises(ValueError, match=f"`{name}` must be a positive integer.*{wrong}"):
            to_stream(model, **{name: wrong})
    assert to_stream(model, window=np.int64(8)).delay == 7
