"""The recurrent loop equals Keras' loop over the layer's cell; so do its gradients."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import assert_close, noise, randomize
from trellis_keras import kernels
from trellis_keras.kernels import recurrent_loop
from trellis_keras.layers import StackedRNN

MASK = np.array([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], bool)
LAYERS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU, "rnn": keras.layers.SimpleRNN}


def make(kind, **options):
    return LAYERS[kind](4, return_sequences=True, return_state=True, **options)


def check(stack, mask, monkeypatch):
    """The loop and Keras' agree in outputs, last states and gradients."""
    calls = []
    loop = recurrent_loop.recurrent_loop

    def count(layer, *arguments):
        calls.append(layer)
        return loop(layer, *arguments)

    monkeypatch.setattr("trellis_keras.layers.rnn.recurrent_loop", count)
    x, weight = noise(3, 5, 2, seed=1), noise(3, 5, 4, seed=2)
    states = [noise(3, size, seed=3 + i) for i, size in enumerate(stack.state_sizes)]
    stack.build(x.shape)
    randomize(stack)
    # The outputs of masked steps are anything.
    counted = np.asarray(np.ones_like(MASK) if mask is None else mask, x.dtype)[..., None]

    def results():
        def loss(x, *states):
            y, *last = stack(x, initial_state=list(states), training=True, mask=mask)
            total = ops.sum(y * weight * counted) + sum(ops.sum(ops.sin(s)) for s in last)
            return total, (y * counted, last)

        return keras.tree.flatten(value_and_gradients(loss, stack.trainable_variables, x, *states))

    found = results()
    assert calls == stack.layers
    with kernels.disabled():
        expected = results()
    assert calls == stack.layers
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.both_backends
@pytest.mark.parametrize("mask", [None, MASK], ids=["all steps", "masked"])
@pytest.mark.parametrize("kind", LAYERS)
def test_equals_keras(kind, mask, monkeypatch):
    check(StackedRNN([make(kind), make(kind)], return_state=True), mask, monkeypatch)


@pytest.mark.parametrize("kind", LAYERS)
def test_equals_keras_without_biases(kind, monkeypatch):
    check(StackedRNN([make(kind, use_bias=False)], return_state=True), MASK, monkeypatch)


def test_bfloat16_keeps_states_in_float32():
    stack = StackedRNN([make("gru", dtype="mixed_bfloat16")], dtype="mixed_bfloat16")
    plain = StackedRNN([make("gru")])
    x = noise(3, 50, 4).astype("float32")
    for layer in (stack, plain):
        layer.build(x.shape)
        randomize(layer)
    y = ops.convert_to_numpy(ops.cast(stack(x), "float32"))
    np.testing.assert_allclose(y, plain(x), atol=0.02)
    with kernels.disabled():
        rounded = ops.convert_to_numpy(ops.cast(stack(x), "float32"))
    assert np.abs(y - plain(x)).mean() < np.abs(rounded - plain(x)).mean()


@pytest.mark.parametrize(
    "layer",
    [
        make("gru", reset_after=False),
        make("lstm", activation="relu"),
        make("lstm", recurrent_activation="hard_sigmoid"),
        make("rnn", dropout=0.1),
        make("gru", recurrent_dropout=0.1),
        make("lstm", activity_regularizer="l2"),
        keras.layers.RNN(keras.layers.LSTMCell(4), return_sequences=True, return_state=True),
    ],
    ids=lambda layer: layer.name,
)
def test_other_layers_run_as_keras_layers(layer):
    assert not recurrent_loop.supports(layer)
    assert StackedRNN([layer])(noise(2, 3, 4)).shape == (2, 3, 4)


def test_accelerators_run_keras_loops(monkeypatch):
    assert recurrent_loop.supports(make("lstm"))
    monkeypatch.setattr(recurrent_loop, "_has_only_cpus", lambda: False)
    assert not recurrent_loop.supports(make("lstm"))
