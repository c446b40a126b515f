"""Work in blocks of time steps gives what the work as a whole gives."""

import math
import re

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import floats
from tests.support.gradients import value_and_gradients
from trellis_keras.kernels import blockwise

pytestmark = pytest.mark.both_backends

WORDS, WIDTH, EXPERTS = 11, 4, 3


def random(*shape, seed=0):
    return floats(np.random.default_rng(seed).normal(size=shape))


def plain_nll(latent, targets, kernel, bias):
    """-log softmax of each expert, written out."""
    latent = ops.reshape(latent, (*latent.shape[:-1], EXPERTS, WIDTH))
    log_p = ops.log_softmax(ops.matmul(latent, kernel) + bias)
    places = ops.broadcast_to(targets[..., None, None], (*targets.shape, EXPERTS, 1))
    return -ops.take_along_axis(log_p, places, axis=-1)[..., 0]


def assert_same_gradients(functions, inputs, assert_close):
    """All functions of the inputs have the value and the gradients of the first one."""
    results = []
    for function in functions:

        def total(*inputs, function=function):
            value = function(*inputs)
            weight = random(*value.shape, seed=9)
            return ops.sum(value * weight), value

        (_, value), _, gradients = value_and_gradients(total, [], *inputs)
        results.append([value, *gradients])
    for result in results[1:]:
        for actual, reference in zip(result, results[0], strict=True):
            assert_close(actual, reference, "gradient")


# 7 steps: the last block of 2 or 3 is padded.
@pytest.mark.float64
@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_experts_nll(leading, assert_close):
    latent = random(*leading, 7, EXPERTS * WIDTH)
    targets = np.random.default_rng(1).integers(0, WORDS, (*leading, 7)).astype("int32")

    def of_blocks(steps):
        return lambda latent, kernel, bias: blockwise.experts_nll(
            latent, targets, kernel, bias, steps
        )

    functions = [lambda latent, *weights: plain_nll(latent, targets, *weights)]
    functions += [of_blocks(steps) for steps in (1, 2, 3, 7, 100)]
    inputs = latent, random(WIDTH, WORDS, seed=2), random(WORDS, seed=3)
    assert_same_gradients(functions, inputs, assert_close)


@pytest.mark.float64
def test_map_blocks(assert_close):
    def softmax(x, y):
        return ops.log_softmax(x[..., :3] * y)

    functions = [softmax]
    functions += [lambda x, y, n=n: blockwise.map_blocks(softmax, n, x, y) for n in (2, 3, 100)]
    assert_same_gradients(functions, (random(2, 3, 7, 4), random(2, 3, 7, 1)), assert_close)


def test_no_more_logits_than_a_block_has():
    latent, kernel, bias = random(2, 30, EXPERTS * WIDTH), random(WIDTH, WORDS), random(WORDS)
    targets = np.zeros((2, 30), "int32")

    def largest_array(steps):
        def loss(latent, kernel, bias):
            return ops.mean(blockwise.experts_nll(latent, targets, kernel, bias, steps))

        program = optimized_gradient(loss, latent, kernel, bias)
        shapes = re.findall(r"\bf32\[([\d,]+)\]", program)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest_array(30) >= 2 * 30 * EXPERTS * WORDS
    # As large as a block of 3 steps, or as all latent vectors.
    assert largest_array(3) <= max(2 * 3 * EXPERTS * WORDS, 2 * 30 * EXPERTS * WIDTH)


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


@pytest.mark.parametrize(
    ("limit", "steps"), [(1, 1), (2 * 33 * 7 - 1, 6), (2 * 33 * 7, 7), (10**9, 10**9 // 66)]
)
def test_steps_within_a_number_of_logits(limit, steps):
    assert blockwise.steps_within(limit, np.zeros((2, 30, 12)), 33) == steps


def test_blocks_are_of_equal_length():
    blocks = blockwise.TimeBlocks(np.zeros((2, 30, 12)), longest=14)
    assert (blocks.number, blocks.steps) == (3, 10)
