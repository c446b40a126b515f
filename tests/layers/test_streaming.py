"""The streaming protocol: its checks, `prefill` made of steps, and compiled steps."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_streams import compiled_step, to_stream
from keras_streams.protocol import StreamingMixin, check_cache, replace_row
from keras_streams.xla import compile_xla
from tests.support.layer_checks import check_streaming, noise
from trellis_keras.layers import TCN

pytestmark = pytest.mark.both_backends

CHANNELS = 3


class RunningSum(StreamingMixin, keras.layers.Layer):
    def call(self, x):
        return ops.cumsum(x, axis=1)

    def initial_cache(self, batch_size):
        return {"sum": ops.zeros((batch_size, CHANNELS), keras.config.floatx())}

    def step(self, x, cache):
        return x + cache["sum"], {"sum": x + cache["sum"]}


@pytest.mark.float64
def test_prefill_made_of_steps():
    layer = RunningSum()
    layer.build((None, None, CHANNELS))
    check_streaming(layer, noise(2, 5, CHANNELS), 2)


def test_a_compiled_step_of_a_stack():
    stack = keras.Sequential([keras.Input((None, 3)), TCN(4, 2, depth=1), keras.layers.Dense(2)])
    x = np.random.default_rng(0).normal(size=(1, 3)).astype("float32")
    y, _ = compiled_step(stack)(x, to_stream(stack).initial_cache(1))
    np.testing.assert_allclose(y, stack(x[:, None])[:, 0], atol=1e-6)


def test_a_compiled_step_reads_the_weights_of_the_moment_unless_frozen():
    layer = TCN(4, 2, depth=2)
    layer.build((None, None, CHANNELS))
    steps = compiled_step(layer), compiled_step(layer, frozen=True)
    x, cache = noise(2, CHANNELS), layer.initial_cache(2)
    before = [step(x, cache)[0] for step in (layer.step, *steps)]
    for weight in layer.trainable_weights:
        weight.assign(weight + 0.5)
    after = [step(x, cache)[0] for step in (layer.step, *steps)]
    expected = [before[0], before[0], after[0], before[0]]
    np.testing.assert_allclose([*before[1:], *after[1:]], expected, rtol=1e-5)


def test_a_packed_cache_is_that_of_the_layers():
    parts = [keras.Input((None, CHANNELS)), TCN(4, 2, depth=2), TCN(2, 3, 1, dtype="bfloat16")]
    stack = keras.Sequential(parts)
    stream, step = to_stream(stack), compiled_step(stack)
    x = noise(2, 4, CHANNELS)
    _, cache = stream.prefill(x[:, :2])
    for t in (2, 3):
        _, cache = step(x[:, t], cache)
    _, expected = stream.prefill(x)
    for found, wanted in zip(*map(keras.tree.flatten, (cache.unpack(), expected)), strict=True):
        assert found.dtype == wanted.dtype
        found, wanted = (ops.cast(tensor, "float32") for tensor in (found, wanted))
        np.testing.assert_allclose(found, wanted, rtol=0.01, atol=2e-3)  # units of bfloat16
    with pytest.raises(ValueError, match="does not fit"):
        step(x[:1, 1], cache)


def test_a_compiled_function_updates_variables():
    count = keras.Variable(np.zeros(2, "float32"))

    def add(x):
        count.assign(count + x)
        return 2 * count

    compiled = compile_xla(add, [], [count])
    for _ in range(2):
        doubled = compiled(np.ones(2, "float32"))
    np.testing.assert_array_equal(count.value, [2, 2])
    np.testing.assert_array_equal(doubled, [4, 4])


def test_replace_row():
    rows = replace_row(ops.zeros((3, 2)), ops.convert_to_tensor(1), ops.ones((2,)))
    np.testing.assert_array_equal(rows, [[0, 0], [1, 1], [0, 0]])


def test_checks():
    with pytest.raises(ValueError, match="tcn.* is not built"):
        compiled_step(TCN(4, 2, depth=2))
    layer = TCN(4, 2, depth=2)
    layer.build((None, None, CHANNELS))
    for wrong in (0, -1, None):
        with pytest.raises(ValueError, match=f"batch_size={wrong}"):
            layer.initial_cache(wrong)
    layer, expected = RunningSum(name="sums"), {"sum": [None, CHANNELS]}
    check_cache(layer, layer.initial_cache(2), expected)
    with pytest.raises(ValueError, match=r"fit sums.*\(None, 3\).*Received: .*\(2, 4\)"):
        check_cache(layer, {"sum": np.zeros((2, 4))}, expected)
    with pytest.raises(ValueError, match="does not fit"):
        check_cache(layer, [np.zeros((2, CHANNELS))], expected)


@pytest.mark.both_backends(slow=True)
@pytest.mark.float64
def test_a_stack_streams_through_layers_that_treat_each_step_by_itself():
    statistics = {"mean": [1.0, 2.0, 3.0], "variance": [4.0, 5.0, 6.0]}
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.LayerNormalization()])
    norm = keras.layers.BatchNormalization(moving_mean_initializer="ones")
    for end in ([], [TCN(2, 2, depth=1, return_sequences=False), keras.layers.Dense(2)]):
        stack = [keras.layers.Normalization(**statistics), inner, TCN(4, 3, depth=2), norm]
        layer = keras.Sequential([*stack, keras.layers.Dropout(0.5), RunningMax(), *end])
        x = noise(2, 7, CHANNELS)
        layer.build((None, None, CHANNELS))
        stream = to_stream(layer)
        y, first = stream.prefill(x[:, :4])
        for t in range(4, 7):
            y, first = stream.step(x[:, t], first)
            expected = layer(x[:, : t + 1])
            expected = expected if end else expected[:, -1]
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        whole, _ = stream.prefill(x)
        np.testing.assert_allclose(whole[:, -1], y, rtol=1e-5, atol=1e-6)


class RunningMax(StreamingMixin, keras.layers.Layer):
    def call(self, x):
        return ops.stack([ops.max(x[:, : t + 1], axis=1) for t in range(x.shape[1])], axis=1)

    def compute_output_shape(self, shape):
        return shape

    def initial_cache(self, batch_size):
        return ops.full((batch_size, 4), -np.inf, keras.config.floatx())

    def step(self, x, cache):
        y = ops.maximum(x, cache)
        return y, y


def test_a_layer_without_its_steps_is_told_what_to_define():
    layer = StreamingMixin()
    with pytest.raises(NotImplementedError, match=r"must define `initial_cache\(batch_size\)`"):
        layer.initial_cache(1)
    with pytest.raises(NotImplementedError, match=r"StreamingMixin must define `step\(x, cache\)`"):
        layer.step(np.zeros((1, 2)), None)
