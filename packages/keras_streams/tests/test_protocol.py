"""The streaming protocol: its checks, `prefill` made of steps, and compiled steps."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from random_graphs import noise

from keras_streams import PackedCache, compiled_step, to_stream
from keras_streams.protocol import StreamingMixin, check_cache, check_start
from keras_streams.xla import compile_xla

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
    x = noise(2, 5, CHANNELS)
    first, cache = layer.prefill(x[:, :2])
    none, cache = layer.prefill(x[:, 2:2], cache)
    second, cache = layer.prefill(x[:, 2:], cache)
    assert none.shape == (2, 0, CHANNELS)
    np.testing.assert_allclose(ops.concatenate([first, second], axis=1), layer(x), rtol=1e-6)
    np.testing.assert_allclose(cache["sum"], layer(x)[:, -1], rtol=1e-6)


def test_a_compiled_step_reads_the_weights_of_the_moment_unless_frozen():
    model = keras.Sequential([keras.Input((None, CHANNELS)), layers.GRU(4), layers.Dense(2)])
    stream, steps = to_stream(model), [compiled_step(model), compiled_step(model, frozen=True)]
    x, cache = noise(2, CHANNELS), stream.initial_cache(2)
    before = [step(x, cache)[0] for step in (stream.step, *steps)]
    for weight in model.trainable_weights:
        weight.assign(weight + 0.5)
    after = [step(x, cache)[0] for step in (stream.step, *steps)]
    expected = [before[0], before[0], after[0], before[0]]
    np.testing.assert_allclose([*before[1:], *after[1:]], expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_normalizes_as_loaded(tmp_path):
    model, other = (
        keras.Sequential([keras.Input((None, CHANNELS)), layers.Normalization()]) for _ in range(2)
    )
    x = noise(2, CHANNELS)
    other.layers[0].adapt(5 * x[:, None] + 1)
    other.save_weights(tmp_path / "net.weights.h5")
    stream, step = to_stream(model), compiled_step(model)
    step(x, stream.initial_cache(2))
    model.load_weights(tmp_path / "net.weights.h5")
    y, _ = step(x, stream.initial_cache(2))
    np.testing.assert_allclose(y, other(x[:, None])[:, 0], rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")
def test_a_compiled_step_has_layers_that_xla_cannot_compile():
    parts = layers.Hashing(5), layers.Embedding(5, 4), layers.GRU(3)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *parts])
    x, stream = np.array([[7], [3]]), to_stream(model)
    y, _ = compiled_step(stream)(x[:, 0], stream.initial_cache(2))
    np.testing.assert_allclose(y, model(x), rtol=1e-5, atol=1e-6)


def test_a_packed_cache_is_that_of_the_layers():
    half = layers.Conv1D(2, 3, padding="causal", dtype="bfloat16")
    stack = keras.Sequential(
        [keras.Input((None, CHANNELS)), layers.GRU(4, return_sequences=True), half]
    )
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


def test_checks():
    with pytest.raises(ValueError, match="gru.* is not built"):
        compiled_step(layers.GRU(4))
    layer, expected = RunningSum(name="sums"), {"sum": [None, CHANNELS]}
    check_cache(layer, layer.initial_cache(2), expected)
    with pytest.raises(ValueError, match=r"fit sums.*\(None, 3\).*Received: .*\(2, 4\)"):
        check_cache(layer, {"sum": np.zeros((2, 4))}, expected)
    with pytest.raises(ValueError, match="does not fit"):
        check_cache(layer, [np.zeros((2, CHANNELS))], expected)
    with pytest.raises(ValueError, match=r"`cache.unpack\(\)`.*Received: \(\)"):
        check_cache(layer, PackedCache.pack(layer.initial_cache(2)), expected)
    with pytest.raises(ValueError, match="`model` must be.* Received: None"):
        compiled_step(None)
    with pytest.raises(ValueError, match="`cache` must be.* Received: None"):
        PackedCache.pack(None)
    layer.build((None, None, CHANNELS))
    for batch_size in (0, -1, np.int64(-1), 2.5, "2", True, None):
        with pytest.raises(ValueError, match="`batch_size` must be a positive integer. Received"):
            check_start(layer, batch_size)
    check_start(layer, np.int64(2))
    check_start(layer, keras.ops.shape(np.zeros((2, 3)))[0])


def test_a_layer_without_its_steps_is_told_what_to_define():
    layer = StreamingMixin()
    with pytest.raises(NotImplementedError, match=r"must define `initial_cache\(batch_size\)`"):
        layer.initial_cache(1)
    with pytest.raises(NotImplementedError, match=r"StreamingMixin must define `step\(x, cache\)`"):
        layer.step(np.zeros((1, 2)), None)
