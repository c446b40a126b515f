"""`to_stream`: models of Keras' layers, one sample at a time, equal to the whole."""

import copy
import pickle

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from keras import layers, ops
from random_graphs import noise, random_graph
from streams import assert_equal, assert_streams, check_equal, outputs_of

from keras_streams import compiled_step, to_stream

pytestmark = pytest.mark.both_backends


def check(model, delay=0, rate=1, batch=2, length=16):
    """Asserts that a model with one input streams."""
    shape = model.input_shape if hasattr(model, "input_shape") else (None, None, 3)
    stream = check_equal(model, [noise(batch, shape[1] or length, *shape[2:])])
    assert (stream.delay, stream.rate) == (delay, rate)
    return stream


def stack(*parts, length=None, channels=3):
    return keras.Sequential([keras.Input((length, channels)), *parts])


CASES = {
    "causal": ([layers.Conv1D(4, 3, padding="causal", dilation_rate=2)], 0, 1),
    "valid": ([layers.Conv1D(4, 3, dilation_rate=2)], 4, 1),
    "same": ([layers.Conv1D(4, 5, padding="same")], 2, 1),
    "same, even": ([layers.Conv1D(4, 4, padding="same", dilation_rate=3)], 5, 1),
    "same strides": ([layers.Conv1D(4, 5, padding="same", strides=2)], 3, 2),
    "strides twice": ([layers.Conv1D(4, 4, strides=2), layers.MaxPooling1D(2)], 5, 4),
    "down and up": ([layers.MaxPooling1D(2), layers.UpSampling1D(2)], 1, 1),
    "down, padding, up": (
        [layers.MaxPooling1D(2), layers.ZeroPadding1D((2, 0)), layers.UpSampling1D(2)], -3, 1,
    ),
    "up": ([layers.UpSampling1D(2), layers.Conv1D(3, 3, padding="same")], 1, 0.5),
    "padding": ([layers.ZeroPadding1D((2, 0)), layers.Dense(2), layers.Conv1D(4, 3)], 0, 1),
    "padding first": ([layers.ZeroPadding1D((2, 1)), layers.LSTM(2, return_sequences=True)], -2, 1),
    "cropping": ([layers.Cropping1D((3, 1))], 3, 1),
    "recurrent later": (
        [layers.Conv1D(4, 3, padding="same"), layers.GRU(3, return_sequences=True)], 1, 1,
    ),
    "spectral": ([layers.SpectralNormalization(layers.Conv1D(4, 3, padding="same"))], 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_stack(name):
    parts, delay, rate = CASES[name]
    check(stack(*(type(part).from_config(part.get_config()) for part in parts)), delay, rate)


def test_cumulative_sums_over_time():
    x = keras.Input((None, 2))
    y = ops.cumsum(layers.UpSampling1D(2)(x), axis=1)
    check(keras.Model(x, ops.cumsum(y, axis=-1)), 0, 0.5)


def test_a_recurrent_layer_for_each_frequency():
    x = keras.Input((None, 5, 2))
    y = layers.TimeDistributed(layers.GRU(3, return_sequences=True))(layers.Permute((2, 1, 3))(x))
    check(keras.Model(x, layers.Conv2D(2, 3)(layers.Permute((2, 1, 3))(y))), 2)


IMAGES = {
    "convolution": ([layers.Conv2D(4, (3, 2), strides=(1, 2), padding="same")], 1, 1),
    "dilation": ([layers.Conv2D(4, 3, dilation_rate=(2, 2), groups=2)], 4, 1),
    "strides": ([layers.Conv2D(3, 3, strides=(2, 1)), layers.DepthwiseConv2D(2)], 4, 2),
    "pooling": ([layers.MaxPooling2D(3, strides=1, padding="same"), layers.AveragePooling2D(2)],
        2, 2),
    "transposed": ([layers.Conv2DTranspose(3, (2, 3), strides=(2, 3), padding="same")], 0, 0.5),
    "transposed, cropped": ([layers.Conv2DTranspose(3, 4, strides=(1, 2), dilation_rate=1)], 0, 1),
    "up": ([layers.UpSampling2D(2), layers.Cropping2D((1, 2))], 1, 0.5),
    "padding": ([layers.ZeroPadding2D(((2, 0), (0, 1))), layers.Conv2D(2, 3)], 0, 1),
    "three axes": ([layers.Reshape((-1, 3, 2, 2)), layers.Conv3D(2, 2, padding="same")], 1, 1),
    "recurrent": ([layers.ConvLSTM1D(2, 3, padding="same", return_sequences=True)], 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_images_stream_along_their_first_axis(name):
    parts, delay, rate = IMAGES[name]
    check(keras.Sequential([keras.Input((None, 6, 2)), *parts]), delay, rate)


def test_layers_have_a_data_format_of_their_own():
    last = {"data_format": "channels_last"}
    pair = layers.Conv1D(4, 3, padding="same", **last), layers.MaxPooling1D(2, **last)
    keras.config.set_image_data_format("channels_first")
    try:
        check(stack(*pair), 2, 2)
    finally:
        keras.config.set_image_data_format("channels_last")


def test_branches_wait_for_the_latest_and_outputs_keep_their_own_clock():
    x, z = keras.Input((None, 3), name="x"), keras.Input((None, 2), name="z")
    early = layers.Conv1D(4, 3, padding="causal")(x)
    both = layers.Add()([early, layers.Conv1D(4, 5, padding="same")(z)])
    slow = layers.Conv1D(2, 2, strides=2)(both)
    model = keras.Model({"x": x, "z": z}, {"both": both, "slow": slow, "early": early})
    stream = check_equal(model, [noise(2, 12, 3), noise(2, 12, 2)])
    assert stream.delay == {"both": 2, "slow": 3, "early": 0}
    assert stream.rate == {"both": 1, "slow": 2, "early": 1}


def test_nested_models_read_their_inputs_as_in_keras():
    """A dict for a list of inputs by name, and `training=False`."""
    a, b = keras.Input((None, 3), name="late"), keras.Input((None, 3), name="early")
    inner = keras.Model([a, b], layers.Subtract()([layers.Conv1D(3, 3, padding="same")(a), b]))
    x = keras.Input((None, 3))
    y = inner({"late": x, "early": 2 * x}, training=False)
    check(keras.Model(x, inner([y, x])), delay=2)


def test_inputs_have_the_structure_of_the_model():
    """The tensors of a dict are sorted by name, those of a list are not."""
    late, early = keras.Input((None, 3), name="late"), keras.Input((None, 3), name="early")
    y, x = layers.Subtract()([late, early]), {"late": np.ones((2, 3)), "early": np.zeros((2, 3))}
    stream = to_stream(keras.Model([late, early], y))
    for step in (stream.step, compiled_step(stream)):
        with pytest.raises(ValueError, match=r"structure \['late', 'early'\].*'late': \(2, 3\)"):
            step(x, stream.initial_cache(2))
        y, _ = step(list(x.values()), stream.initial_cache(2))
        assert np.all(ops.convert_to_numpy(y) == 1)
    stream = to_stream(keras.Model({"late": late, "early": early}, stream.model.outputs[0]))
    with pytest.raises(ValueError, match="'early': 'early'.*'other': "):
        stream.step({"late": x["late"], "other": x["early"]}, stream.initial_cache(2))


def test_a_model_with_a_fixed_batch_size():
    x = keras.Input(batch_shape=(3, 8, 4))
    check(
        keras.Model(x, ops.reshape(layers.GRU(4, return_sequences=True)(x), (3, 8, 2, 2))), 0, 1, 3
    )


def test_outputs_without_a_time_axis_are_those_of_the_steps_so_far():
    ends = [
        [layers.GlobalAveragePooling1D()],
        [layers.GlobalMaxPooling1D(keepdims=True), layers.Flatten()],
        [layers.Lambda(lambda x: ops.mean(x, axis=1) + ops.max(x, axis=[1, 2])[:, None])],
        [layers.LSTM(4), layers.Reshape((2, 2)), layers.Conv1D(2, 2), layers.Flatten()],
    ]
    x = noise(2, 9, 3)
    for end in ends:
        model = stack(layers.Conv1D(4, 3, padding="causal"), *end, layers.Dense(2))
        stream = to_stream(model)
        assert not any(map(np.any, keras.tree.flatten(stream.initial_cache(2))))  # for LiteRT
        (found,) = outputs_of(stream, [x])
        for t in (0, 5):
            assert_equal(found[:, t], model(x[:, : t + 1]))


def last_of(y):
    return y[:, -1]


def largest_of(taps, **options):
    def branch(x):
        return layers.GlobalMaxPooling1D()(layers.Conv1D(2, taps, **options)(x))

    return branch


MERGED = {
    "convolutions of 2, 3 and 5 taps": [largest_of(2), largest_of(3), largest_of(5)],
    "a recurrent layer and a convolution": [layers.LSTM(3), largest_of(3)],
    "the last step and a convolution": [last_of, largest_of(5)],
    "strides in phase": [largest_of(2, strides=2), largest_of(4, strides=2)],
    "strides out of phase": [largest_of(2, strides=2), largest_of(3, strides=2)],
    "a cropped start": [last_of, lambda x: largest_of(1)(x[:, 3:])],
    "a cropped end": [last_of, lambda x: layers.GRU(3)(x[:, :-3])],
    "differences": [last_of, lambda x: last_of(x[:, 1:] - x[:, :-1])],
    "the last steps": [lambda x: layers.Flatten()(x[:, -3:]), largest_of(5)],
    "several samples a step": [lambda x: largest_of(3)(layers.UpSampling1D(2)(x)), largest_of(4)],
}


@pytest.mark.parametrize("case", MERGED)
def test_merged_outputs_without_time_are_those_of_the_sequence_so_far(case):
    x = keras.Input((None, 2))
    model = keras.Model(x, layers.Concatenate()([branch(x) for branch in MERGED[case]]))
    stream = to_stream(model)
    xs = noise(2, 12, 2)
    (found,) = outputs_of(stream, [xs])
    for t in range(stream.delay, 12, stream.rate):
        assert_equal(found[:, t], model(xs[:, : t + 1]))


def test_attention_within_each_step():
    x = keras.Input((None, 5, 4))
    check(keras.Model(x, layers.MultiHeadAttention(2, 3, attention_axes=(2,))(x, x)))


def test_the_end_of_a_sequence_is_cropped_in_time():
    x = keras.Input((None, 1))
    stream = to_stream(keras.Model(x, layers.Cropping1D((0, 3))(x)[:, -1]))
    found = np.array(stream.prefill(np.arange(6.0).reshape(1, 6, 1))[0])
    np.testing.assert_array_equal(found.ravel(), [np.nan, np.nan, np.nan, 0, 1, 2])
    y = layers.GlobalAveragePooling1D()(layers.Cropping1D((0, 1))(layers.UpSampling1D(2)(x)))
    with pytest.raises(ValueError, match="a sequence that ends with the current step"):
        to_stream(keras.Model(x, y))  # half of a step


def test_a_mean_over_millions_of_steps():
    """More than 2^24, at which a float32 stops counting, and than the largest integer."""
    stream = to_stream(stack(layers.GlobalAveragePooling1D(), channels=1))
    y, _ = stream.prefill(ops.full((1, 2**21, 1), 0.1))
    np.testing.assert_allclose(y[0, -1], [0.1], rtol=3e-7)
    _, first = stream.prefill(ops.ones((1, 1, 1)))

    def mean(count, value, steps):
        """Returns the mean of `count` ones and of `steps` values."""
        cache = keras.tree.map_structure(
            lambda leaf: ops.full_like(leaf, count) if "int" in str(leaf.dtype) else leaf, first
        )
        for _ in range(steps):
            y, cache = step(ops.full((1, 1), value), cache)
        return float(y[0, 0])

    step = compiled_step(stream)
    np.testing.assert_allclose(mean(2**24 + 1, 2.0, 500), 1 + 500 / (2**24 + 501), rtol=1.5e-7)
    assert 1 < mean(2**31 - 1, 3e7, 3) < 2


def test_prefill_continues_a_cache():
    """With every sample at its own step in blocks, with delays and strides step by step."""
    for parts in (
        [layers.UpSampling1D(2), layers.ZeroPadding1D((2, 0)), layers.Conv1D(4, 3), layers.LSTM(3)],
        [layers.Conv1D(4, 3, padding="same"), layers.MaxPooling1D(2)],
    ):
        stream, x = to_stream(stack(*parts)), noise(2, 9, 3)
        first, cache = stream.prefill(x[:, :4])
        second, _ = stream.prefill(x[:, 4:], cache)
        assert_equal(np.concatenate([first, second], axis=1), *outputs_of(stream, [x]))


def test_a_segment_that_ends_before_the_first_output():
    stream = to_stream(stack(layers.UpSampling1D(2), layers.Conv1D(4, 3, padding="same")))
    for steps in (0, 1):
        y, _ = stream.prefill(noise(2, steps, 3))
        assert y.shape == (2, steps, 2, 4) and np.all(np.isnan(y))


def test_tokens_slices_and_states():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(5, 4)(tokens)
    x = x[:, 1:] - x[:, :-1]
    y, h, c = layers.LSTM(3, return_sequences=True, return_state=True)(x[..., :2])
    model = keras.Model(tokens, [y[:, ::2], layers.Dense(2)(ops.concatenate([h, c], axis=-1))])
    stream = to_stream(model)
    assert (stream.delay, stream.rate) == ([1, 1], [2, 1])
    ids = np.random.default_rng(0).integers(0, 5, (2, 10)).astype("int32")
    every_other, last = outputs_of(stream, [ids])
    assert_streams(stream, [every_other], model(ids))
    for t in (1, 9):
        assert_equal(last[:, t], model(ids[:, : t + 1])[1])


def test_the_padding_of_strides_is_that_of_the_length():
    """Keras pads 15 steps by 1 and 1, 16 steps by 0 and 1."""
    for length, delay in ((15, 1), (16, 2), (None, 2)):
        check(stack(layers.Conv1D(4, 3, strides=2, padding="same"), length=length), delay, 2)


def test_a_compiled_step_runs_for_ever():
    """The count of steps does not grow."""
    model = stack(layers.Conv1D(4, 5, padding="same"), layers.MaxPooling1D(3), layers.GRU(2))
    stream = to_stream(model)
    step, cache = compiled_step(stream), stream.initial_cache(3)
    for t in range(40):
        y, cache = step(noise(3, 3), cache)
        assert bool(np.all(np.isnan(y))) == (t < 4 or (t - 4) % 3 > 0)
    assert float(np.max(cache.unpack()[-1])) <= 4 + 3


@pytest.mark.float64
@settings(
    max_examples=10 if keras.backend.backend() == "jax" else 60,  # twice
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data(), st.sampled_from([1, 3]))
def test_random_graphs(floatx, data, batch):
    check_random_graph(*random_graph(data.draw, max_calls=4), batch)


@pytest.mark.slow
@pytest.mark.float64
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([1, 3]))
def test_thousands_of_random_graphs(floatx, data, batch):
    check_random_graph(*random_graph(data.draw, max_calls=14), batch)


def check_random_graph(model, ending, batch):
    xs = [noise(batch, *x.shape[1:]) for x in model.inputs]
    expected = keras.tree.flatten(model(xs))  # as `predict`, in less time
    if ending is not None:
        y = model.outputs[0]
        for layer in ending:
            y = layer(y)
        model = keras.Model(model.inputs, [*model.outputs, y])
    try:
        stream = to_stream(model)
    except ValueError as error:  # all strides and delays together may exceed the drawn length
        if "Build it for longer sequences" in str(error):
            reject()
        raise
    found = outputs_of(stream, xs)
    assert_streams(stream, found, expected)
    if ending is None:
        return
    first, *_, last = [stream.plan.signals[n] for n in keras.tree.flatten(stream.plan.outputs)]
    whole = np.moveaxis(ops.convert_to_numpy(expected[0]), first.axis, 1)
    steps = [t for t in range(xs[0].shape[1]) if np.all(np.isfinite(found[-1][:, t]))]
    for t in steps[-3:]:
        y = whole[:, : first.block * ((t - last.offset) // first.pause + 1)]
        y = np.moveaxis(y, 1, first.axis)
        for layer in ending:
            y = layer(y)
        np.testing.assert_allclose(found[-1][:, t], y, rtol=1e-4, atol=1e-4)


@pytest.mark.both_backends(slow=True)
def test_masks_that_act_on_each_step():
    x = keras.Input((None, 3))
    steps, channels = ops.any(ops.greater(x, 0.5), axis=-1), ops.greater(x, 0.0)
    per_step = layers.TimeDistributed(layers.Dense(2))(x, mask=steps)
    for y in (
        layers.BatchNormalization()(x, mask=steps),
        layers.Softmax()(x, mask=channels),
        per_step,
    ):
        check(keras.Model(x, y))


# Layers of one's own


class Subclassed(keras.Model):
    def build(self, input_shape):
        self.layer = layers.Conv1D(3, 2)
        self.layer.build(input_shape)

    def call(self, inputs, training=None):
        return self.layer(inputs) * 2.0


class Separated(layers.Layer):
    """Treats each step separately, by operations that do not."""

    def call(self, x):
        return ops.transpose(ops.relu(ops.transpose(x, (0, 2, 1))), (0, 2, 1))


class Separable(layers.Layer):
    """Causal convolutions by channel, by operations."""

    def build(self, input_shape):
        channels = input_shape[-1]
        self.depthwise = self.add_weight(shape=(3, channels, 2), name="depthwise")
        self.pointwise = self.add_weight(shape=(1, 2 * channels, 4), name="pointwise")

    def call(self, x):
        padded = ops.pad(x, [[0, 0], [4, 0], [0, 0]])
        y = ops.depthwise_conv(padded, self.depthwise, padding="valid", dilation_rate=2)
        z = ops.separable_conv(padded[:, 2:], self.depthwise, self.pointwise, padding="valid")
        return ops.concatenate([ops.tanh(y), z], axis=-1)


def shift(x):
    return ops.pad(x, [[0, 0], [2, 0], [0, 0]], constant_values=1.0)[:, :-2]


def test_layers_of_ones_own_become_their_operations():
    for parts, delay, rate in (
        ([Subclassed()], 1, 1),
        ([layers.Conv1D(2, 3, padding="same"), Separated()], 1, 1),
        ([Separable()], 0, 1),
        ([layers.Lambda(lambda x: x[:, 1:] - x[:, :-1])], 1, 1),
        ([layers.Lambda(shift), layers.PReLU(shared_axes=[1])], -2, 1),
        ([layers.Reshape((-1, 6)), layers.Dense(2)], 1, 2),
        ([layers.Reshape((-1, 2, 3)), layers.TimeDistributed(layers.Conv1D(2, 2))], 1, 2),
    ):
        check(stack(*parts), delay, rate)


def test_a_stream_of_a_stateful_layer_has_its_own_states():
    x = keras.Input(batch_shape=(2, 8, 3))
    layer = layers.GRU(3, stateful=True, return_sequences=True)
    check(keras.Model(x, layer(x)))
    assert np.any(layer.states[0])  # those of the call


def test_a_vector_is_repeated_for_each_step():
    model = stack(layers.LSTM(3), layers.RepeatVector(4), layers.GRU(2, return_sequences=True))
    y, _ = to_stream(model).prefill(noise(2, 6, 3))
    np.testing.assert_allclose(y[:, -1], model(noise(2, 6, 3)), atol=1e-6)


# Errors


class Overridden(layers.Conv1D):
    """Computes something else with numbers than with symbolic tensors."""

    def call(self, inputs):
        scale = 1.0 if isinstance(inputs, keras.KerasTensor) else 2.0
        return scale * super().call(inputs)


def squeeze_and_excite(x):
    return layers.Multiply()([x, layers.GlobalAveragePooling1D(keepdims=True)(x)])


def with_mask(layer):
    return lambda x: layer(x, mask=ops.any(ops.not_equal(x, 0), axis=-1))


def normalize_batch(x):
    inner = keras.Sequential([keras.Input((8, 3)), layers.BatchNormalization()], name="inner")
    return inner(x, training=True)


def start_as_output(x):
    start = x[:, :2]
    return [start, ops.concatenate([ops.zeros_like(start), x], axis=1)]


class Clipped(layers.LSTM):
    def call(self, sequences, initial_state=None, mask=None, training=False):
        return super().call(ops.clip(sequences, -6, 6), initial_state, mask, training)


REFUSED = {
    "both .Bidirectional., operation 2 of 2, in net, does not stream.*Use a forward layer":
        lambda x: layers.Bidirectional(layers.LSTM(2), name="both")(layers.Dense(2)(x)),
    "global_average.*Call it with its inputs only, without `mask`":
        with_mask(layers.GlobalAveragePooling1D()),
    "lstm.*Call it with its inputs only, without `mask`": with_mask(layers.LSTM(2)),
    "gru.*starts from the layer's own initial state. Call it with its inputs only":
        lambda x: layers.GRU(2)(x, initial_state=np.ones((1, 2), "float32")),
    "lstm.*combines each step with a value computed from all steps":
        lambda x: layers.LSTM(2)(x, initial_state=layers.LSTM(2, return_state=True)(x)[1:]),
    "inner .Sequential.*called with training=True, but streaming is inference": normalize_batch,
    "dropout.*called with training=True": lambda x: layers.Dropout(0.5)(x, training=True),
    "stack.*changes the batch axis": lambda x: ops.stack([layers.GRU(2)(x)] * 4),
    r"p_re_lu.*Use shared_axes=.1.": layers.PReLU(),
    r"max.* .Max.*its output of shape \(\) depends on other steps": ops.max,
    "sum.*its output of shape .None, 3. depends.*To pool all steps, use keras.layers.Global":
        lambda x: layers.Flatten()(ops.sum(x, axis=1)),
    "gru.*its time axis is axis 2, which it takes for channels.*Permute.*`time_axis`":
        lambda x: layers.GRU(2)(layers.Permute((2, 1))(x)),
    "concatenate.*joins sequences": lambda x: layers.Concatenate(axis=1)([x, layers.Dense(3)(x)]),
    "get_item.*ends at a fixed step.*Received: 0:3:1": lambda x: layers.Dense(2)(x[:, :3]),
    "get_item.*operation 1 .*ends at a fixed step": start_as_output,
    "global_max.*reduces int32 over time: cast it to floats":
        lambda x: layers.GlobalMaxPooling1D()(ops.cast(x, "int32")),
    "repeats steps different numbers of times": lambda x: ops.repeat(x, [1, 2] * 4, axis=1),
    "clipped.*overrides `call`": Clipped(2, return_sequences=True),
    "softmax.*output at one step depends on other steps": lambda x: ops.softmax(x, axis=1),
    "layer_normalization.*depends on other steps": layers.LayerNormalization(axis=1),
    "subtract.*combines each step.*window=128": lambda x: x - ops.mean(x, axis=1, keepdims=True),
    "multiply.*combines each step with a value computed from all steps": squeeze_and_excite,
    "add.*come every 1, 2 steps. Give all branches the same strides":
        lambda x: layers.Add()([x[:, 4:], layers.Conv1D(3, 1, strides=2)(x)]),
    "it reads the sequence from its end. Use go_backwards=False": layers.GRU(2, go_backwards=True),
    "reshape.*mixes the time axis": lambda x: layers.Reshape((6, 4))(x),
    "takes step 0 of the sequence. A stream supports only the last": lambda x: x[:, 0],
    "transpose.*changes the batch axis": lambda x: ops.transpose(x, (1, 0, 2)),
    "depends on where the sequence ends.*Received: -3:-1:1": lambda x: x[:, -3:-1],
    "channels_first.*|time axis is the last axis": lambda x: layers.GlobalMaxPooling1D(
        data_format="channels_first")(x),
    "its outputs differ from those of its layers": Overridden(2, 2, padding="causal"),
    "has an output of int32, which has no NaN":
        lambda x: ops.argmax(layers.Conv1D(2, 3, padding="same")(x), axis=-1),
}  # fmt: skip


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("match", REFUSED)
def test_what_does_not_stream_is_named(match):
    x = keras.Input((8, 3))
    model = keras.Model(x, REFUSED[match](x), name="net")
    with pytest.raises(ValueError, match=match):
        to_stream(model)


def test_sizes_may_be_numbers_of_numpy():
    two = np.int64(2)
    x = keras.Input((None, 3))
    y = layers.Conv1D(2, 3, dilation_rate=(two,))(layers.Cropping1D((two, 0))(x[:, two:]))
    model = keras.Model(x, ops.repeat(layers.MaxPooling1D((two,))(y), np.array([2]), axis=1))
    check_equal(model, [noise(2, 20, 3)])


def test_a_stream_takes_the_names_that_a_model_takes():
    stream = to_stream(stack(layers.Dense(2, name="-x")))
    y, _ = compiled_step(stream)(noise(1, 3), stream.initial_cache(1))
    assert y.shape == (1, 2)


def test_models_without_time_or_weights_are_refused():
    a, b = keras.Input((8, 3)), keras.Input((9, 3))
    still = keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="net")
    for match, model in (
        (r"net has no time axis.*TimeDistributed.*Received: .* \(None, 4\)", still),
        ("is not built", keras.Sequential([layers.Dense(2)])),
        ("must be a Keras model or layer. Received: 'model.keras'", "model.keras"),
        (r"same number of steps. Received: \[8, 9\]", keras.Model([a, b], [a * 2.0, b * 2.0])),
    ):
        with pytest.raises(ValueError, match=match):
            to_stream(model)


class Untraced(keras.Model):
    def call(self, x):
        assert not isinstance(x, keras.KerasTensor)
        return ops.cumsum(x, axis=1)


def test_a_model_that_cannot_be_traced_is_named():
    model = Untraced()
    model(noise(1, 20, 3))
    with pytest.raises(ValueError, match="untraced.*cannot be traced.*Use operations of keras.ops"):
        to_stream(model)


def test_an_unknown_length_that_padding_needs():
    """Keras pads the two convolutions alike for no length."""
    x = keras.Input((None, 3))
    pair = [
        layers.Conv1D(2, 3, strides=2, padding="same", name="first")(x),
        layers.Conv1D(2, 3, strides=2, padding="same", name="second")(x[:, 1:]),
    ]
    with pytest.raises(ValueError, match="depends on the length of the sequence"):
        to_stream(keras.Model(x, pair))


def test_a_cache_or_a_step_that_does_not_fit():
    stream = to_stream(stack(layers.Conv1D(4, 3, padding="same"), layers.LSTM(2)))
    cache = stream.initial_cache(2)
    for match, shape, state in (
        ("does not fit", (3, 3), cache),
        ("does not fit", (2, 3), cache[1:]),
        (r"`x` must have shape \(None, 3\)", (2, 4), cache),
    ):
        with pytest.raises(ValueError, match=match):
            stream.step(np.zeros(shape), state)
    with pytest.raises(ValueError, match=r"does not fit .*of shapes: \[\]. Received: \[\(2, 3"):
        to_stream(stack(layers.Dense(2))).step(np.zeros((2, 3)), [np.zeros((2, 3))])
    with pytest.raises(ValueError, match="batch_size=0"):
        stream.initial_cache(0)
    with pytest.raises(ValueError, match="batch_size=None"):
        stream.initial_cache(None)


def test_last_steps_of_a_short_sequence_are_missing():
    x = keras.Input((None, 2))
    for layer in (keras.layers.GlobalAveragePooling1D(), keras.layers.Flatten()):
        model = keras.Model(x, layer(keras.layers.Conv1D(2, 3)(x)[:, -3:]))
        stream = to_stream(model)
        data = np.random.default_rng(0).normal(size=(2, 9, 2)).astype("float32")
        y, cache = stream.prefill(data[:, :1])  # shorter than the delay
        assert stream.delay == 4 and y.shape[:2] == (2, 1)
        y = np.concatenate([y, stream.prefill(data[:, 1:], cache)[0]], axis=1)
        assert np.isnan(y[:, :4]).all()
        np.testing.assert_allclose(y[:, -1], model(data), atol=1e-6)


@pytest.mark.parametrize("layer", [keras.layers.GroupNormalization(1), keras.layers.Softmax(1)])
def test_max_context_does_not_shorten_the_proof(layer):
    with pytest.raises(ValueError, match="depends on other steps"):
        to_stream(keras.Sequential([keras.Input((None, 4)), layer]), max_context=1)


@pytest.mark.parametrize("pool", ["GlobalAveragePooling1D", "GlobalMaxPooling1D"])
def test_a_window_across_samples_of_one_step_looks_ahead(pool):
    """As after any delay, the running value is of the outputs that are complete."""
    x = keras.Input((None, 1))
    y = keras.layers.Conv1D(1, 2)(keras.layers.Conv1DTranspose(2, 1, strides=3)(x))
    stream = to_stream(keras.Model(x, getattr(keras.layers, pool)()(y)))
    data = np.random.default_rng(0).normal(size=(1, 9, 1)).astype("float32")
    whole = np.asarray(keras.Model(x, y)(data))
    found, reduce = stream.prefill(data)[0], np.mean if "Average" in pool else np.max
    assert stream.delay == 1
    for step in range(1, 9):
        np.testing.assert_allclose(found[:, step], reduce(whole[:, : 3 * step], axis=1), atol=1e-6)


def test_integers_are_padded_by_integers_and_pooled_to_floats():
    tokens = keras.Input((None,), dtype="int32")
    padded = ops.pad(tokens, [[0, 0], [2, 0]], constant_values=7)
    assert to_stream(keras.Model(tokens, keras.layers.Embedding(9, 2)(padded))).delay == -2
    x = keras.Input((None, 3), dtype="int32")
    stream = to_stream(keras.Model(x, keras.layers.MaxPooling1D(2)(x)))
    y, cache = stream.step(np.ones((1, 3), "int32"), stream.initial_cache(1))
    assert np.isnan(y).all()
    y, _ = stream.step(np.full((1, 3), 5, "int32"), cache)
    np.testing.assert_array_equal(y, np.full((1, 3), 5.0))


def test_outputs_without_inputs_are_refused():
    x = keras.Input((None, 3))
    model = keras.Model(x, [ops.zeros_like(x)[:, :3], keras.layers.Conv1D(2, 2)(x)])
    with pytest.raises(ValueError, match="depends on none of its inputs"):
        to_stream(model)


def test_a_value_beside_no_samples_keeps_its_rows():
    x, condition = keras.Input((None, 3)), keras.Input((2,))
    last = keras.layers.Conv1D(2, 3)(x)[:, -1]
    stream = to_stream(keras.Model([x, condition], ops.concatenate([last, condition], axis=-1)))
    y, _ = stream.prefill([np.ones((2, 1, 3)), np.ones((2, 2))])
    assert y.shape == (2, 1, 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_stream_has_its_own_model(copied):
    net = stack(layers.Conv1D(4, 3), layers.GRU(2, return_sequences=True))
    stream = to_stream(net, example=np.ones((1, 8, 3)))
    other, x = copied(stream), np.ones((1, 8, 3), "float32")
    np.testing.assert_array_equal(stream.prefill(x)[0], other.prefill(x)[0])
    assert (other.proof, other.delay) == (stream.proof, 2)
    other.model.set_weights([0 * w for w in other.model.get_weights()])
    assert not np.any(np.asarray(other.prefill(x)[0])[:, 2:])
    assert np.any(np.asarray(stream.prefill(x)[0])[:, 2:])
