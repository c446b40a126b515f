"""Work in blocks of time steps gives what the work as a whole gives."""

import math
import re

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import floats
from trellis_keras.kernels import blockwise

pytestmark = pytest.mark.both_backends

WORDS, WIDTH, EXPERTS = 11, 4, 3


def random(*shape, seed=0):
    return floats(np.random.default_rng(seed).normal(size=shape))


def experts_nll(latent, targets, kernel, bias):
    """-log softmax of each expert, (..., K * width) and (..., 1) -> (..., K)."""
    shape = ops.shape(latent)[:-1]
    logits = ops.matmul(ops.reshape(latent, (*shape, EXPERTS, WIDTH)), kernel) + bias
    places = ops.broadcast_to(targets[..., None, :], (*shape, EXPERTS, 1))
    return -ops.take_along_axis(ops.log_softmax(logits), places, axis=-1)[..., 0]


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
    latent, kernel, bias = random(2, 30, EXPERTS * WIDTH), random(WIDTH, WORDS), random(WORDS)
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
