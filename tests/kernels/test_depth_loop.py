"""Loops over levels, on arrays. `tests/layers/test_trellisnet.py` compares whole nets."""

import keras
import numpy as np
import pytest
from keras import ops

from trellis_keras.kernels import cone, depth_loop

pytestmark = pytest.mark.both_backends

TENSORFLOW = keras.backend.backend() == "tensorflow"
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape)


def test_repeat():
    def turn(n, states):
        a, b = states
        return [a + ops.cast(n, "float32") * b, 2 * b]

    states = [ops.ones((2,)), ops.ones((2,))]
    a, b = depth_loop.repeat(turn, states, 4)
    np.testing.assert_array_equal(a, [1 + 0 * 1 + 1 * 2 + 2 * 4 + 3 * 8] * 2)
    np.testing.assert_array_equal(b, [16, 16])


# Levels that add what they read, and x's part where it enters: sums that can be written down.


def test_x_enters_once_for_all_levels_of_a_dilation():
    plan = cone.Cone(20, [cone.tap_offsets(2, d) for d in (1, 2, 1, 2)], output_length=2)
    calls = []

    def inject(positions, d):
        calls.append((positions.tolist(), d))
        return ops.ones((1, len(positions), 1))

    def dilation(i):
        return (1, 2)[(i - 1) % 2]

    injection = depth_loop.SharedInjection(plan, inject, ops.zeros((1,)), dilation, lambda i: True)
    for i in range(1, 5):
        assert injection(i).shape == (1, len(plan.positions[i]), 1)
    assert calls == [(plan.positions[1].tolist(), 1), (plan.positions[2].tolist(), 2)]


def test_scattered_positions_are_computed_by_themselves():
    plan = cone.Cone(30, [cone.tap_offsets(2, d) for d in (1, 1, 8)], output_length=1)
    assert plan.positions[2].tolist() == [21, 29]
    calls = []

    def inject(positions, d):
        calls.append(positions.tolist())
        return ops.convert_to_tensor(np.asarray(positions, "float32")[None, :, None])

    injection = depth_loop.SharedInjection(
        plan, inject, ops.zeros((1,)), lambda i: 1, lambda i: True
    )
    np.testing.assert_array_equal(np.asarray(injection(2)).ravel(), [21, 29])
    assert calls == [[21, 29]]


def test_step_levels():
    """All levels of one step: each reads the one below in this step, and its own past."""
    depth, units = 4, 3
    a, past = normal(2, depth, units), [normal(2, depth, units), normal(2, depth, units)]
    weights = normal(units, units)
    active = np.arange(depth)[:, None] >= np.arange(units)

    def gated_states(a, past, active):
        h = ops.tanh(a) * ops.cast(active, a.dtype) + past[0]
        return [h, h * past[1]]

    arrays = [ops.convert_to_tensor(z.astype("float32")) for z in (a, *past)]
    below, top = depth_loop.step_levels(
        arrays[0],
        arrays[1:],
        active=active,
        current_product=lambda h: ops.matmul(h, weights.astype("float32")),
        gated_states=gated_states,
        compute_dtype="float32",
    )
    states = [np.zeros((2, units)), np.zeros((2, units))]
    for i in range(depth):
        for found, state in zip(below, states, strict=True):
            np.testing.assert_allclose(found[:, i], state, atol=1e-5)
        h = np.tanh(a[:, i] + states[0] @ weights) * active[i] + past[0][:, i]
        states = [h, h * past[1][:, i]]
    for found, state in zip(top, states, strict=True):
        np.testing.assert_allclose(found, state, atol=1e-5)


# TensorFlow's loop of LSTM levels, against four products and automatic differentiation.


def lstm_level(states, injected, kernel, dropout, initial):
    """One level of `TrellisLayer._level` with LSTM gates, kernel size 2 and dilation 1."""
    import tensorflow as tf

    def earlier(z, z_0):
        return tf.concat([z_0[:, None], z[:, :-1]], axis=1)

    (h, c), (h_0, c_0) = states, initial
    if dropout is not None:
        h, h_0 = h * dropout, h_0 * dropout[:, 0]
    a = earlier(h, h_0) @ kernel[0] + h @ kernel[1] + injected
    i, f, g, o = tf.split(a, 4, axis=-1)
    c = tf.sigmoid(f) * earlier(c, c_0) + tf.sigmoid(i) * tf.tanh(g)
    return [tf.sigmoid(o) * tf.tanh(c), c]


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's loop")
@pytest.mark.parametrize("training, rematerialize", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("dropped, starts", [(True, True), (False, False)])
def test_fused_lstm_levels(width, training, rematerialize, dropped, starts):
    import tensorflow as tf

    from trellis_keras.kernels.depth_loop_tf import lstm_levels

    batch, units, turns = 2, 3, 4
    arrays = {
        "h": normal(batch, width, units),
        "c": normal(batch, width, units),
        "injected": normal(batch, width, 4 * units),
        "kernel": normal(2, units, 4 * units),
        "h_0": normal(batch, units) * starts,
        "c_0": normal(batch, units) * starts,
    }
    tensors = {name: tf.constant(array) for name, array in arrays.items()}
    dropout = tf.constant([[[0.0, 2.0, 2.0]], [[2.0, 0.0, 2.0]]], "float64") if dropped else None
    upstream = [tf.constant(normal(batch, width, units)) for _ in range(2)]

    def results(function):
        with tf.GradientTape() as tape:
            tape.watch(list(tensors.values()))
            states = function(**tensors)
            loss = sum(tf.reduce_sum(s * u) for s, u in zip(states, upstream, strict=True))
        gradients = tape.gradient(loss, list(tensors.values()), unconnected_gradients="zero")
        return [*states, *gradients]

    def fused(h, c, injected, kernel, h_0, c_0):
        initial = [h_0, c_0] if starts else None
        return lstm_levels(
            [h, c],
            injected,
            kernel,
            dropout=dropout,
            initial=initial,
            turns=turns,
            compute_dtype="float64",
            training=training,
            rematerialize=rematerialize,
        )

    def plain(h, c, injected, kernel, h_0, c_0):
        states = [h, c]
        for _ in range(turns):
            states = lstm_level(states, injected, kernel, dropout, [h_0, c_0])
        return states

    for name, found, wanted in zip(
        ["h", "c", *arrays], results(fused), results(plain), strict=True
    ):
        if starts or not name.endswith("_0"):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11, err_msg=name)
