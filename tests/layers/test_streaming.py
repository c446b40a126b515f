"""Streaming: the protocol, and TrellisLayer's exact stream."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tests.support.layer_checks import assert_close, check_streaming, compiled
from trellis_keras.layers import GatedActivation, TrellisLayer, streaming
from trellis_keras.layers.base import tanh

pytestmark = pytest.mark.both_backends

CHANNELS = 3


class MinimalGate(GatedActivation):
    """A user's own cell."""

    preactivation_blocks = 2

    def call(self, inputs, states):
        forget, candidate = ops.split(inputs, 2, axis=-1)
        forget = ops.sigmoid(forget)
        h = (1 - forget) * states[0] + forget * tanh(candidate)
        return h, [h]


def make(units=6, depth=5, cell="lstm", seed=0, **options):
    """A built layer whose weights are large enough for errors to show."""
    glorot = {
        name: keras.initializers.GlorotUniform(seed=seed + i)
        for i, name in enumerate(("kernel_initializer", "recurrent_initializer"))
    }
    bias = keras.initializers.RandomNormal(stddev=0.3, seed=seed)
    cell = MinimalGate(units) if cell == "user's" else cell
    layer = TrellisLayer(units, depth, cell=cell, bias_initializer=bias, **glorot, **options)
    layer.build((None, None, CHANNELS))
    return layer


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def history(layer, batch):
    return [noise(batch, size, seed=7 + i) for i, size in enumerate(layer.cell.state_size)]


@st.composite
def configurations(draw):
    dilations = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    options = {
        "depth": draw(st.integers(1, 5)),
        "kernel_size": draw(st.integers(1, 3)),
        "dilation_rate": dilations,
        "cell": draw(st.sampled_from(["lstm", "gru", "rnn", "user's"])),
        "injection_every": draw(st.integers(1, 3)),
        "weight_norm": draw(st.booleans()),
        "output_units": draw(st.integers(1, 6)),
    }
    time = draw(st.integers(max(dilations), max(dilations) + 6).filter(lambda time: time > 1))
    steps = draw(st.integers(1, time - 1))
    return options, draw(st.integers(1, 3)), time, steps, draw(st.booleans())


@pytest.mark.float64
@settings(max_examples=5, deadline=None, derandomize=True)
@given(configurations())
def test_stream_equals_forward_for_random_settings(configuration):
    options, batch, time, steps, with_history = configuration
    layer = make(**options)
    initial = {"initial_state": history(layer, batch)} if with_history else {}
    check_streaming(layer, noise(batch, time, CHANNELS), steps, **initial)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(configurations())
def test_stream_equals_forward_for_many_random_settings(configuration):
    test_stream_equals_forward_for_random_settings.hypothesis.inner_test(configuration)


@pytest.mark.float64
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "dilation_rate": [1, 3, 2], "cell": "gru", "injection_every": 2},
        {"dilation_rate": [4, 1], "weight_norm": True},
    ],
)
def test_stream_equals_forward(options):
    layer = make(**options)
    check_streaming(layer, noise(2, 9, CHANNELS), 6, initial_state=history(layer, 2))


@pytest.mark.float64
def test_500_steps_equal_the_forward_pass():
    layer = make(units=24, depth=12, output_units=8)
    x = ops.convert_to_tensor(noise(2, 500, CHANNELS))
    (y, _), forward = compiled(lambda x: (streaming.step_through(layer, x), layer(x)))(x)
    assert_close(y, forward)


@pytest.mark.float64
def test_prompts_shorter_than_a_dilation():
    layer = make(dilation_rate=4, kernel_size=3)
    x = noise(2, 10, CHANNELS)

    @compiled
    def run(pieces):
        cache = layer.initial_cache(2)
        ys = []
        for piece in pieces:
            y, cache = layer.prefill(piece, cache)
            ys.append(y)
        return ops.concatenate(ys, axis=1), layer(ops.concatenate(pieces, axis=1))

    assert_close(*run([ops.convert_to_tensor(x[:, a:b]) for a, b in ((0, 1), (1, 3), (3, 10))]))


def test_dropout_is_off():
    layer = make(dropout=0.5, weight_dropout=0.5, seed=3)
    check_streaming(layer, noise(2, 6, CHANNELS), 3)


def test_states_stay_float32_under_mixed_precision():
    layer = make(dtype="mixed_bfloat16")
    x = ops.convert_to_tensor(noise(2, 6, CHANNELS))
    y, cache = compiled(lambda x: streaming.step_through(layer, x))(x)
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    dtypes = {keras.backend.standardize_dtype(s.dtype) for s in keras.tree.flatten(cache["states"])}
    assert dtypes == {"float32"}
    actual, forward = (ops.cast(y, "float32") for y in (y, layer(x)))
    assert_close(actual, forward, tolerance=2e-2)


def test_rows_of_a_cache_can_be_reordered():
    layer = make()
    x = noise(3, 4, CHANNELS)
    _, cache = layer.prefill(x[:, :3])
    order = np.array([2, 0, 0])
    reordered = keras.tree.map_structure(lambda leaf: ops.take(leaf, order, axis=0), cache)
    y, _ = layer.step(x[order, 3], reordered)
    assert_close(y, ops.take(layer.step(x[:, 3], cache)[0], order, axis=0))


def test_the_program_does_not_grow_with_depth():
    assert _program_size(make(depth=5)) == _program_size(make(depth=60))


def _program_size(layer):
    x = ops.convert_to_tensor(noise(1, 2, CHANNELS))

    def stream(x, cache):
        return layer.step(x[:, 0], cache), layer.prefill(x, cache)

    if keras.backend.backend() == "jax":
        import jax

        return str(jax.make_jaxpr(stream)(x, layer.initial_cache(1))).count("\n")
    import tensorflow as tf

    graph = tf.function(stream).get_concrete_function(x, layer.initial_cache(1)).graph
    definition = graph.as_graph_def()
    functions = [len(function.node_def) for function in definition.library.function]
    return len(definition.node) + sum(functions)


def test_unknown_batch_size_on_tensorflow():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("JAX has no unknown batch size")
    import tensorflow as tf

    layer = make(dilation_rate=[1, 2])

    @tf.function(input_signature=[tf.TensorSpec((None, 4, CHANNELS))])
    def run(x):
        y, cache = layer.prefill(x[:, :3])
        return y, layer.step(x[:, 3], cache)[0]

    x = noise(2, 4, CHANNELS)
    y, last = run(x)
    assert_close(ops.concatenate([y, last[:, None]], axis=1), layer(x))


class RunningSum(streaming.StreamingMixin, keras.layers.Layer):
    def call(self, x):
        return ops.cumsum(x, axis=1)

    def initial_cache(self, batch_size):
        return ops.zeros((batch_size, CHANNELS), keras.config.floatx())

    def step(self, x, cache):
        return x + cache, x + cache


@pytest.mark.float64
def test_prefill_made_of_steps():
    layer = RunningSum()
    layer.build((None, None, CHANNELS))
    check_streaming(layer, noise(2, 5, CHANNELS), 2)


def test_errors():
    layer = make()
    x = noise(2, CHANNELS)
    cache = layer.initial_cache(2)
    with pytest.raises(ValueError, match=r"(?s)batch size.*Expected.*\(2, 5, 1.*\(3, 5, 1"):
        layer.step(x, layer.initial_cache(3))
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(x, make(depth=4).initial_cache(2))
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(x, make(cell="gru").initial_cache(2))
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(x, cache["states"])
    with pytest.raises(ValueError, match=r"\(None, 3\).*\(2, 4\)"):
        layer.step(noise(2, 4), cache)
    with pytest.raises(ValueError, match=r"\(None, 3\).*\(2, 1, 3\)"):
        layer.step(x[:, None], cache)
    with pytest.raises(ValueError, match=r"\(None, None, 3\).*\(2, 3\)"):
        layer.prefill(x, cache)
    with pytest.raises(ValueError, match="batch_size=0"):
        layer.initial_cache(0)
    with pytest.raises(ValueError, match="must hold 2 states. Received: 1"):
        layer.initial_cache(2, initial_state=[noise(2, 6)])
    with pytest.raises(ValueError, match=r"initial_state.*\(2, 6\).*\(3, 6\)"):
        layer.initial_cache(2, initial_state=history(layer, 3))
    new = TrellisLayer(4, 2)
    with pytest.raises(ValueError, match="not built.*build"):
        new.step(x, cache)
    with pytest.raises(ValueError, match="not built.*build"):
        new.initial_cache(2)
    with pytest.raises(ValueError, match="protocol.*lacks.*step"):
        streaming.check_streams(keras.layers.LSTM(4))


def test_a_layer_without_its_steps_is_told_what_to_define():
    layer = streaming.StreamingMixin()
    with pytest.raises(
        NotImplementedError, match=r"StreamingMixin must define `initial_cache\(batch_s"
    ):
        layer.initial_cache(1)
    with pytest.raises(NotImplementedError, match=r"StreamingMixin must define `step\(x, cache\)`"):
        layer.step(np.zeros((1, 2)), None)
