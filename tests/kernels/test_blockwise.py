"""Work in blocks of time steps gives what the work as a whole gives."""

import math
import re

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import noise
from trellis_keras.kernels import blockwise

pytestmark = pytest.mark.both_backends

WORDS, WIDTH, EXPERTS = 11, 4, 3


def experts_nll(latent, targets, kernel, bias):
    """-log softmax of each expert, (..., K * width) and (..., 1) -> (..., K)."""
    shape = ops.shape(latent)[:-1]
    logits = ops.matmul(ops.reshape(latent, (*shape, EXPERTS, WIDTH)), kernel) + bias
    places = ops.broadcast_to(targets[..., None, :], (*shape, EXPERTS, 1))
    return -ops.take_along_axis(ops.log_softmax(logits), places, axis=-1)[..., 0]


# 7 steps: the last block of 2 or 3 is padded.
@pytest.mark.float64
@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_values_and_gradients(leading, assert_close):
    """Of floats, with integers among the tensors and weights that all blocks share."""
    targets = np.random.default_rng(1).integers(0, WORDS, (*leading, 7, 1)).astype("int32")
    upstream = noise(*leading, 7, EXPERTS, seed=4)
    inputs = noise(*leading, 7, EXPERTS * WIDTH), noise(WIDTH, WORDS, seed=2), noise(WORDS)

    def results(steps):
        def total(latent, *weights):
            tensors = latent, ops.convert_to_tensor(targets)
            if steps is None:
                values = experts_nll(*tensors, *weights)
            else:
                values = blockwise.map_blocks(experts_nll, steps, tensors, weights)
            return ops.sum(values * upstream), values

        (_, values), _, gradients = value_and_gradients(total, [], *inputs)
        return [values, *gradients]

    plain = results(None)
    for steps in (1, 2, 3, 100):
        for actual, reference in zip(results(steps), plain, strict=True):
            assert_close(actual, reference, "gradient")


def optimized_gradient(function, *inputs):
    """The program that XLA makes of a gradient, as text."""
    if keras.backend.backend() == "jax":
        import jax

        gradient = jax.jit(jax.grad(function, argnums=tuple(range(len(inputs)))))
        return gradient.lower(*map(jax.numpy.asarray, inputs)).compile().as_text()
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def gradient(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = function(*inputs)
        return tape.gradient(loss, inputs)

    inputs = map(tf.constant, inputs)
    return gradient.experimental_get_compiler_ir(*inputs)(stage="optimized_hlo")


def test_no_more_logits_than_a_block_has():
    latent, kernel, bias = noise(2, 30, EXPERTS * WIDTH), noise(WIDTH, WORDS), noise(WORDS)
    targets = np.zeros((2, 30, 1), "int32")

    def largest_array(steps):
        def loss(latent, *weights):
            tensors = latent, ops.convert_to_tensor(targets)
            return ops.mean(blockwise.map_blocks(experts_nll, steps, tensors, weights))

        program = optimized_gradient(loss, latent, kernel, bias)
        shapes = re.findall(r"\bf32\[([\d,]+)\]", program)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest_array(30) >= 2 * 30 * EXPERTS * WORDS
    # As large as a block of 3 steps, or as all latent vectors.
    assert largest_array(3) <= max(2 * 3 * EXPERTS * WORDS, 2 * 30 * EXPERTS * WIDTH)
