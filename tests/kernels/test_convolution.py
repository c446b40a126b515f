"""Causal convolution between positions, against a loop over positions in NumPy."""

import itertools

import keras
import numpy as np
import pytest

from trellis_keras.kernels.cone import Cone, offsets
from trellis_keras.kernels.convolution import (
    convolve,
    strided_slice,
)

pytestmark = pytest.mark.both_backends

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 9, 3)).astype("float32")


@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_strided_slice(step):
    for first, last in itertools.combinations_with_replacement(range(9), 2):
        stop = last - (last - first) % step + 1
        index = slice(first, stop, step)
        np.testing.assert_array_equal(strided_slice(X, index), X[:, index])
    assert strided_slice(X, slice(0, 0, step)).shape == (2, 0, 3)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads a TensorFlow graph")
@pytest.mark.parametrize("index", [slice(2, 9, 1), slice(2, 9, 3)])
def test_the_gradient_of_strided_slice_copies_whole_rows(index):
    import tensorflow as tf

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = strided_slice(x, index)
        return tape.gradient(found, x)

    expected = np.zeros_like(X)
    expected[:, index] = 1
    np.testing.assert_array_equal(gradient(tf.constant(X)), expected)
    graph = gradient.get_concrete_function(tf.constant(X)).graph
    assert not [op for op in graph.get_operations() if op.type == "StridedSliceGrad"]


def convolved(x, kernel, dilation):
    """The convolution at every position."""
    past = np.pad(x, ((0, 0), ((len(kernel) - 1) * dilation, 0), (0, 0)))
    taps = [past[:, j * dilation :][:, : x.shape[1]] @ kernel[j] for j in range(len(kernel))]
    return np.sum(taps, axis=0)


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("output_length", [1, 7, None])
@pytest.mark.parametrize("dilations", [[1, 2, 4, 8], [3, 1, 2]])
def test_convolve_between_the_positions_of_a_cone(dilations, output_length, taps):
    time = 40
    cone = Cone(time, [offsets(taps, d) for d in dilations], output_length)
    x = RANDOM.normal(size=(2, time, 3)).astype("float32")
    kernel = RANDOM.normal(size=(taps, 3, 4)).astype("float32")
    for (below, wanted), d in zip(itertools.pairwise(cone.positions), dilations, strict=True):
        found = convolve(x[:, below], kernel, d, wanted, below)
        expected = convolved(x, kernel, d)[:, wanted]
        np.testing.assert_allclose(found, expected, atol=1e-5)
