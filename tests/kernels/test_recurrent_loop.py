"""The recurrent loop equals Keras' loop over the layer's cell; so do its gradients."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import assert_all_close, noise, randomize
from tests.support.parameters import SLOW_ON_JAX
from trellis_keras import kernels
from trellis_keras.kernels import recurrent_loop
from trellis_keras.layers import RHNCell, StackedRNN, stacked_rnn

MASK = np.array([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], bool)
LAYERS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU, "rnn": keras.layers.SimpleRNN}

EQUATIONS = {
    keras.layers.LSTM: recurrent_loop.LSTM,
    keras.layers.GRU: recurrent_loop.GRU,
    keras.layers.SimpleRNN: recurrent_loop.ELMAN,
}


def make(kind, units=4, **options):
    return LAYERS[kind](units, return_sequences=True, return_state=True, **options)


@pytest.fixture
def cells(monkeypatch):
    """The equations of the cells that run in the loop, in the order of the calls."""
    found, loop = [], recurrent_loop.recurrent_loop

    def counted(*arguments, equations, **options):
        found.append(equations)
        return loop(*arguments, equations=equations, **options)

    monkeypatch.setattr(recurrent_loop, "recurrent_loop", counted)
    return found


@pytest.mark.both_backends
@pytest.mark.parametrize(
    "mask", [pytest.param(None, marks=SLOW_ON_JAX), MASK], ids=["all steps", "masked"]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_equals_keras(kind, mask, cells):
    """The loop and Keras' agree in outputs, last states and gradients."""
    stack = StackedRNN([make(kind, 3, use_bias=False), make(kind)], return_state=True)
    x, weight = noise(3, 5, 2, seed=1), noise(3, 5, 4, seed=2)
    states = [noise(3, size, seed=3 + i) for i, size in enumerate(stack.state_sizes)]
    stack.build(x.shape)
    randomize(stack)

    def results():
        def loss(x, *states):
            y, *last = stack(x, initial_state=list(states), training=True, mask=mask)
            total = ops.sum(y * weight) + sum(ops.sum(ops.sin(s)) for s in last)
            return total, (y, last)

        return value_and_gradients(loss, stack.trainable_variables, x, *states)

    found = results()
    expected_cells = [EQUATIONS[type(layer)] for layer in stack.layers]
    assert cells == expected_cells
    with kernels.disabled():
        expected = results()
    assert cells == expected_cells
    assert_all_close(found, expected, 1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_half_precision(kind):
    """States are in float32, so that results are nearer to float32's, and streams equal them."""
    stack = StackedRNN([make(kind, dtype="mixed_bfloat16")], dtype="mixed_bfloat16")
    plain = StackedRNN([make(kind)])
    x = noise(3, 50, 4).astype("float32")
    for layer in (stack, plain):
        layer.build(x.shape)
        randomize(layer)

    def error(y):
        return np.abs(ops.convert_to_numpy(ops.cast(y, "float32")) - plain(x)).mean()

    y = stack(x)
    with kernels.disabled():
        assert error(y) < error(stack(x)) < 0.02
    cache = stack.initial_cache(3)
    for t in range(50):
        streamed, cache = stack.step(x[:, t], cache)
        np.testing.assert_allclose(
            ops.cast(streamed, "float32"), ops.cast(y[:, t], "float32"), atol=4e-3
        )


class OtherCell(keras.layers.LSTMCell):
    """A cell that may compute anything."""


@pytest.mark.parametrize(
    "layer",
    [
        make("gru", reset_after=False),
        make("lstm", activation="relu"),
        make("lstm", recurrent_activation="hard_sigmoid"),
        make("rnn", dropout=0.1),
        make("gru", recurrent_dropout=0.1),
        make("lstm", activity_regularizer="l2"),
        make("gru", zero_output_for_mask=True),
        keras.layers.RNN(OtherCell(4), return_sequences=True, return_state=True),
        keras.layers.RNN(RHNCell(4), return_sequences=True, return_state=True),
    ],
    ids=lambda layer: layer.name,
)
def test_other_layers_run_in_keras_loop(layer, cells):
    assert StackedRNN([layer])(noise(2, 3, 4), training=True).shape == (2, 3, 4)
    assert not cells


def test_accelerators_run_keras_loops(monkeypatch, cells):
    monkeypatch.setattr(stacked_rnn, "_has_only_cpus", lambda: False)
    assert StackedRNN([make("lstm")])(noise(2, 3, 4)).shape == (2, 3, 4)
    assert not cells
