"""Metrics: exact over a split, whatever the batches are."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from trellis_keras.models import (
    BitsPerCharacter,
    CrossEntropy,
    DigitsRecalled,
    FrameNLL,
    Perplexity,
)
from trellis_keras.models.base import BackboneModel

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

TOKEN_METRICS = (CrossEntropy, Perplexity, BitsPerCharacter)


def test_the_mean_is_over_tokens_not_over_batches(tolerance):
    rng = np.random.default_rng(0)
    nll, weight = rng.gamma(2.0, size=101), rng.integers(0, 2, size=101).astype(float)
    mean = np.sum(nll * weight) / np.sum(weight)
    expected = {"cross_entropy": mean, "perplexity": np.exp(mean), "bpc": mean / math.log(2)}
    for metric in (cls() for cls in TOKEN_METRICS):
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
    assert float(metric.result()) == 0.0
    metric.update_state([3.0])
    assert float(metric.result()) == 3.0


def counted(metric):
    parts = (metric._weight, metric._weight_remainder)
    return sum(float(ops.convert_to_numpy(part)) for part in parts)


@pytest.mark.parametrize(
    ("make", "one"),
    [
        (CrossEntropy, ([1.0],)),
        (lambda: DigitsRecalled(1), ([[0]], [[[1.0, 0.0]]])),
        (lambda: BackboneModel()._mean_loss, (1.0, 1.0)),
    ],
    ids=["tokens", "sequences", "loss"],
)
def test_single_values_are_counted_beyond_two_to_the_24(make, one):
    metric = make()
    metric._weight.assign(2.0**24)
    metric._total.assign(2.0**24)
    for _ in range(64):
        metric.update_state(*one)
    assert counted(metric) == 2**24 + 64
    assert float(metric.result()) == 1.0


def test_compilation_keeps_the_remainders():
    """XLA must not simplify (old + value) - old."""
    metric = CrossEntropy()
    nll = ops.convert_to_tensor(np.full(1001, 1.1, keras.config.floatx()))

    def loop(*state):
        def step(_, state):
            return tuple(metric.stateless_update_state(list(state), nll))

        return ops.fori_loop(0, 20_000, step, state)

    state = [ops.convert_to_tensor(variable) for variable in metric.variables]
    if keras.backend.backend() == "jax":
        import jax

        state = jax.jit(loop)(*state)
    else:
        import tensorflow as tf

        state = tf.function(loop, jit_compile=True)(*state)
    for variable, value in zip(metric.variables, state, strict=True):
        variable.assign(value)
    # A float32 total beyond 2^24 has steps of 2: it would count 1000 tokens of a batch.
    assert counted(metric) == 20_020_000
    assert float(metric.result()) == pytest.approx(1.1, rel=6e-7)


def test_digits_recalled():
    y = np.tile(np.arange(12) % 10, (3, 1))
    logits = np.eye(10)[y]
    logits[1, -10] = 0.0  # argmax 0, but 2 is right
    logits[2, 0] = np.eye(10)[5]  # not one of the last ten
    metric = DigitsRecalled()
    metric.update_state(y[..., None], logits)
    assert float(metric.result()) == pytest.approx(2 / 3)
    for weight in ([1.0, 1.0, 0.0], np.repeat([[1.0], [1.0], [0.0]], 12, axis=1)):
        metric.reset_state()
        metric.update_state(y, logits, sample_weight=weight)
        assert float(metric.result()) == pytest.approx(1 / 2)
    metric = DigitsRecalled(digits=12)
    metric.update_state(y, logits)
    assert float(metric.result()) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="digits"):
        DigitsRecalled(0)


@pytest.mark.parametrize("cls", [*TOKEN_METRICS, FrameNLL, DigitsRecalled])
def test_config_round_trip(cls):
    metric = cls(name="mine")
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert type(restored) is cls
    assert restored.get_config() == metric.get_config()
    assert restored.name == "mine"
