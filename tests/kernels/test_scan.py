"""Loops over time: values, order and gradients, compiled, for any length."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import assert_all_close, noise
from trellis_keras.kernels.scan import scan


def decayed_sums(x, carry, reverse):
    def step(carry, inputs):
        carry = carry * inputs[1] + inputs[0]
        return carry, [carry, 2 * carry[:, :1]]

    return scan(step, carry, [x, 0.5 + x], reverse)


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients(reverse):
    x, start = noise(4, 2, 3), noise(2, 3, seed=1)
    order = range(4)[:: -1 if reverse else 1]

    def unrolled(x, carry, reverse):
        outputs = [None] * 4
        for t in order:
            carry = carry * (0.5 + x[t]) + x[t]
            outputs[t] = carry
        y = ops.stack(outputs)
        return carry, [y, 2 * y[:, :, :1]]

    def results(function):
        def loss(x, start):
            last, outputs = function(x, start, reverse)
            return sum(ops.sum(ops.sin(y)) for y in (last, *outputs)), [last, *outputs]

        (_, outputs), _, gradients = value_and_gradients(loss, [], x, start)
        return [*outputs, *gradients]

    assert_all_close(results(decayed_sums), results(unrolled))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="shapes are static on JAX")
def test_gradient_with_xla_for_any_length():
    import tensorflow as tf

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec((None, 1, 1))])
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            last, _ = decayed_sums(x, ops.zeros((1, 1)), False)
        return tape.gradient(last, x)

    for time in (1, 3):
        x = np.zeros((time, 1, 1), "float32")  # then the last carry is x_T + x_{T-1} / 2 + ...
        np.testing.assert_allclose(gradient(x)[:, 0, 0], 0.5 ** np.arange(time)[::-1])
