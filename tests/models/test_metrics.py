"""Metrics over tokens: exact over a split, whatever the batches."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from trellis_keras.models.metrics import BitsPerCharacter, CrossEntropy, Perplexity

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

METRICS = (CrossEntropy, Perplexity, BitsPerCharacter)


def test_mean_over_tokens_not_over_batches(tolerance):
    rng = np.random.default_rng(0)
    nll, weight = rng.gamma(2.0, size=101), rng.integers(0, 2, size=101).astype(float)
    mean = np.sum(nll * weight) / np.sum(weight)
    expected = {"cross_entropy": mean, "perplexity": np.exp(mean), "bpc": mean / math.log(2)}
    for metric in (cls() for cls in METRICS):
        for part in (slice(0, 7), slice(7, 90), slice(90, 101)):
            metric.update_state(nll[part], sample_weight=weight[part])
        result = np.asarray(metric.result())
        assert result.dtype == keras.config.floatx()
        np.testing.assert_allclose(result, expected[metric.name], rtol=tolerance("output"))


def test_weights_of_rows_and_infinite_padding():
    metric = CrossEntropy()
    metric.update_state([[1.0, 2.0], [math.inf, 5.0]], sample_weight=[1.0, 0.0])
    assert float(metric.result()) == 1.5
    metric.update_state([[4.5, math.nan]], sample_weight=[[1.0, 0.0]])
    assert float(metric.result()) == 2.5
    metric.reset_state()
    metric.update_state([3.0])
    assert float(metric.result()) == 3.0


def compiled_updates(metric, nll, weight, steps):
    """The metric's mean after the same batch `steps` times, in one compiled loop."""

    def step(state):
        metric_variables = metric.stateless_update_state(list(state), nll, weight)
        return tuple(metric_variables)

    def loop(*state):
        return ops.fori_loop(0, steps, lambda _, s: step(s), state)

    state = [ops.convert_to_tensor(v) for v in metric.variables]
    if keras.backend.backend() == "jax":
        import jax

        final = jax.jit(loop)(*state)
    else:
        import tensorflow as tf

        final = tf.function(loop, jit_compile=True)(*state)
    for variable, value in zip(metric.variables, final, strict=True):
        variable.assign(value)
    return float(metric.result())


def counted(metric):
    parts = (metric._weight, metric._weight_remainder)
    return sum(float(ops.convert_to_numpy(part)) for part in parts)


def test_a_hundred_million_tokens_lose_no_digits():
    # 1001 tokens a batch: a float32 total of 10^8 has steps of 8 and would count 1000 of them.
    nll = ops.convert_to_tensor(np.full(1001, 1.1, keras.config.floatx()))
    weight = ops.convert_to_tensor(np.ones(1001, keras.config.floatx()))
    metric = CrossEntropy()
    mean = compiled_updates(metric, nll, weight, steps=100_000)
    assert counted(metric) == 100_100_000
    assert mean == pytest.approx(1.1, rel=6e-7)  # a batch's own float32 sum is off by 4e-7


def test_single_tokens_are_counted_beyond_two_to_the_24():
    metric = CrossEntropy()
    metric._weight.assign(2.0**24)
    metric._nll.assign(2.0**25)
    for _ in range(64):
        metric.update_state([2.0])
    assert counted(metric) == 2**24 + 64 and float(metric.result()) == 2.0


def test_half_precision_input_is_summed_in_float32():
    metric = CrossEntropy(dtype="float16")
    for _ in range(8):
        metric.update_state(ops.cast(np.full(4096, 8.0), "float16"))
    assert float(metric.result()) == 8.0
    assert keras.backend.standardize_dtype(metric.result().dtype) == "float16"


@pytest.mark.parametrize("cls", METRICS)
def test_config_round_trip(cls):
    metric = cls(name="mine")
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert type(restored) is cls and restored.get_config() == metric.get_config()
    assert float(restored.result()) == float(np.exp(0.0) if cls is Perplexity else 0.0)
