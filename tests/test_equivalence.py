"""Theorem 1: the TrellisNet of an RNN computes what the truncated RNN does, and so does its way
back, its dense form, its stream and its copy from a file."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rnn_stacks import (
    CHANNELS,
    LAYERS,
    assert_same,
    exact_tanh,
    random_input,
    random_stack,
    randomize,
    run,
    truncated,
)
from trellis_keras.layers import StackedRNN, TrellisLayer
from trellis_keras.theorem1 import TruncatedRNN, to_dense, to_rnn, to_trellis

__all__ = ["exact_tanh"]
pytestmark = pytest.mark.usefixtures("exact_tanh")
JAX = keras.backend.backend() == "jax"
cells = pytest.mark.parametrize("cell", LAYERS)
slowly = pytest.mark.slow_elsewhere  # JAX compiles each of the shapes


def everywhere(function):
    return pytest.mark.both_backends(pytest.mark.float64(function))


@st.composite
def networks(draw):
    widths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    biased = draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths)))
    return widths, biased, draw(st.integers(1, 10)), draw(st.integers(0, 99))


def check_network(cell, network):
    widths, biased, truncation, seed = network
    layers = random_stack(cell, widths, biased, seed)
    x = random_input(seed=seed)
    trellis = to_trellis(layers, truncation)
    assert (trellis.depth, trellis.output_units) == (truncation + len(widths) - 1, widths[-1])
    assert trellis.truncation == trellis.receptive_field == truncation
    assert_same(run(trellis, x), truncated(layers, x, truncation))
    assert_same(run(to_rnn(trellis), x), run(layers, x))


@slowly
@everywhere
@cells
@settings(deadline=None, max_examples=3, derandomize=True)
@given(networks())
def test_exact_at_every_step(cell, network):
    check_network(cell, network)


@pytest.mark.slow
@everywhere
@cells
@settings(deadline=None, max_examples=8 if JAX else 40)
@given(networks())
def test_exact_at_every_step_of_many(cell, network):
    check_network(cell, network)


@everywhere
@cells
def test_four_layers(cell):
    """The most layers, with biases: what the start levels of the groups are for."""
    check_network(cell, ([2, 4, 1, 3], [True] * 4, 3, 1))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_without_start_levels_biases_leak_in(cell):
    layers, x = random_stack(cell, [3, 4]), random_input()
    trellis = to_trellis(layers, 3)
    config = trellis.get_config() | {"group_starts": None}
    unheld = TrellisLayer.from_config(config)
    unheld.build((None, None, CHANNELS))
    unheld.set_weights(trellis.get_weights())
    assert np.max(np.abs(unheld(x) - truncated(layers, x, 3))) > 1e-2


@slowly
@everywhere
@cells
def test_what_follows_from_a_conversion(cell, tmp_path):
    """The mask lifted, the way back from there, the last step alone, a file."""
    lower, upper = random_stack(cell, [3, 2])
    x = random_input()
    trellis = to_trellis([lower, upper], 4)
    y = trellis(x)
    dense = to_dense(trellis)
    assert type(dense) is TrellisLayer and dense.kernel_structure == "dense"
    assert_same(dense(x), y)
    assert_same(run(to_rnn(dense), x), run([lower, upper], x))
    upper.return_sequences = False
    last = to_trellis([lower, upper], np.int64(4))
    assert_same(last(x), y[:, -1])
    assert not to_rnn(last)[-1].return_sequences
    inputs = keras.Input((None, CHANNELS))
    keras.Model(inputs, last(inputs)).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[-1], TruncatedRNN)
    np.testing.assert_array_equal(loaded(x), last(x))


@slowly
@everywhere
def test_stream():
    trellis, x = to_trellis(random_stack("gru", [3, 2]), 3), random_input(time=5)
    steps, cache = [], trellis.initial_cache(len(x))
    for t in range(5):
        y, cache = trellis.step(x[:, t], cache)
        steps.append(y)
    assert_same(np.stack(steps, axis=1), trellis(x))


@everywhere
@pytest.mark.parametrize(
    "cell", ["lstm", *(pytest.param(cell, marks=slowly) for cell in ("gru", "rnn"))]
)
def test_segments_carry_on_the_rnn_that_is_not_truncated(cell):
    """Appendix B.1: segments of at most M = 4 steps, carried by hand and by a stateful layer."""
    layers, x = random_stack(cell, [3, 2, 4], return_state=True), random_input(time=11)
    rnn = StackedRNN(layers, return_state=True)
    whole, *last = rnn(x)
    trellis, stateful = (to_trellis(r, 4) for r in (rnn, StackedRNN(layers, stateful=True)))
    stateful.reset_state(len(x))
    pieces, states = [], None
    for segment in np.split(x, [4, 7], axis=1):
        y, *states = trellis(segment, initial_state=states)
        assert_same(stateful(segment), y)
        pieces.append(y)
    assert_same(np.concatenate(pieces, axis=1), whole)
    # Those of all layers side by side: h, and of LSTMs c.
    for i, state in enumerate(states):
        assert_same(state, np.concatenate(last[i :: len(states)], axis=-1))
    assert np.max(np.abs(truncated(layers_alone(layers), x, 4) - whole)) > 1e-3


def layers_alone(layers):
    return [lambda x, layer=layer: layer(x)[0] for layer in layers]


def test_a_segment_longer_than_the_truncation_is_refused():
    layers = random_stack("rnn", [3, 2], return_state=True)
    trellis, stateful = (to_trellis(StackedRNN(layers, stateful=s), 4) for s in (False, True))
    x = random_input(time=5)
    assert trellis(x).shape == (2, 5, 2)
    state = np.zeros((2, 5))
    for refused in (
        lambda: trellis(x, initial_state=[state]),
        lambda: stateful(x),
        lambda: stateful(keras.Input((5, CHANNELS), batch_size=2)),
    ):
        with pytest.raises(ValueError, match="at most truncation=4 .* Received: 5 steps"):
            refused()


def test_weights_are_those_of_equation_5():
    """Of a GRU of 2 layers: the sum of its biases but for the candidates', nothing elsewhere."""
    lower, upper = random_stack("gru", [2, 1])
    trellis = to_trellis([lower, upper], 4)
    K1, U1, b1 = lower.get_weights()
    K2, U2, _ = upper.get_weights()
    kernel = np.asarray(trellis.kernel.kernel).reshape(2, CHANNELS, 3, 3)
    recurrent = np.asarray(trellis.recurrent_kernel.kernel).reshape(2, 3, 3, 3)
    np.testing.assert_array_equal(kernel[1, ..., :2].reshape(K1.shape), K1)
    np.testing.assert_array_equal(recurrent[0, :2, :, :2].reshape(U1.shape), U1)
    np.testing.assert_array_equal(recurrent[0, 2, :, 2:].reshape(U2.shape), U2)
    np.testing.assert_array_equal(recurrent[1, :2, :, 2:].reshape(K2.shape), K2)
    used = [K1, U1, K2, U2]
    assert np.count_nonzero(kernel) + np.count_nonzero(recurrent) == sum(w.size for w in used)
    connections = (trellis.kernel, trellis.recurrent_kernel)
    assert sum(k.count_connections() for k in connections) == sum(w.size for w in used)
    bias = np.asarray(trellis.bias).reshape(4, 3)[:, :2]
    (z, r, c), (z2, r2, c2) = b1.reshape(2, 3, 2)
    np.testing.assert_array_equal(bias, [z + z2, r + r2, c, c2])


def test_layers_of_cells_and_a_dropout_of_rate_0():
    x = random_input()
    cells = [keras.layers.LSTMCell(3), keras.layers.LSTMCell(2)]
    several = randomize(built(keras.layers.RNN(cells, return_sequences=True), CHANNELS))
    one = randomize(built(keras.layers.RNN(keras.layers.LSTMCell(4), return_sequences=True), 2))
    trellis = to_trellis([several, keras.layers.Dropout(0.0), one], 3)
    assert trellis.groups == [3, 2, 4]
    assert_same(trellis(x), truncated([several, one], x, 3))


def test_half_precision_keeps_its_policy():
    layer = built(keras.layers.LSTM(3, return_sequences=True, dtype="mixed_bfloat16"), CHANNELS)
    trellis = to_trellis(layer, 3)
    assert trellis.dtype_policy.name == "mixed_bfloat16"
    x = random_input(time=3)
    error = np.abs(np.asarray(trellis(x), "float32") - np.asarray(layer(x), "float32"))
    assert np.max(error) < 0.02
    assert to_rnn(trellis)[0].dtype_policy.name == "mixed_bfloat16"


def built(layer, channels):
    layer.build((None, None, channels))
    return layer
