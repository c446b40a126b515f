"""Causal convolution between positions, against a loop over positions in NumPy."""

import itertools

import keras
import numpy as np
import pytest

from trellis_keras.kernels import convolution
from trellis_keras.kernels.cone import Cone, Read, locate, tap_offsets
from trellis_keras.kernels.convolution import (
    convolve,
    gather,
    gather_taps,
    pad_past,
    shift,
    strided_slice,
)

pytestmark = pytest.mark.both_backends

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 9, 3)).astype("float32")
INITIAL = RANDOM.normal(size=(2, 3)).astype("float32")


def earlier(x, steps, initial=None):
    """x some steps earlier, at every position."""
    before = np.zeros_like(x[:, 0]) if initial is None else initial
    return np.stack([x[:, t - steps] if t >= steps else before for t in range(x.shape[1])], axis=1)


@pytest.mark.parametrize("initial", [None, INITIAL])
@pytest.mark.parametrize("steps", [0, 1, 4, 11])
def test_shift_and_pad(steps, initial):
    expected = earlier(X, steps, initial)
    np.testing.assert_array_equal(shift(X, steps, initial), expected)
    padded = np.asarray(pad_past(X, steps, initial))
    assert padded.shape == (2, 9 + steps, 3)
    np.testing.assert_array_equal(padded[:, :9], expected)
    np.testing.assert_array_equal(padded[:, steps:], X)


READS = {
    "slice": Read(0, slice(1, 8, 3)),
    "padded": Read(2, slice(0, 5, 1)),
    "list": Read(1, np.array([0, 3, 4])),
    "any length": Read(3, None),
}


@pytest.mark.parametrize("initial", [None, INITIAL])
@pytest.mark.parametrize("name", READS)
def test_gather(name, initial):
    found = READS[name]
    values = X[:, :6] if found.index is None else X[:, found.index]
    before = np.zeros_like(INITIAL) if initial is None else initial
    expected = np.concatenate([np.repeat(before[:, None], found.padding, 1), values], 1)
    np.testing.assert_array_equal(gather(X, found, initial), expected)


@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_strided_slice(step):
    for first, last in itertools.combinations_with_replacement(range(9), 2):
        stop = last - (last - first) % step + 1
        index = slice(first, stop, step)
        np.testing.assert_array_equal(strided_slice(X, index), X[:, index])
    assert strided_slice(X, slice(0, 0, step)).shape == (2, 0, 3)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads a TensorFlow graph")
@pytest.mark.parametrize("index", [slice(0, 5, 1), slice(2, 9, 1), slice(2, 9, 3)])
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


@pytest.mark.parametrize("initial", [None, INITIAL])
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([1, 0], id="two taps"),
        pytest.param([6, 3, 0], id="three taps"),
        pytest.param([2], id="one tap"),
    ],
)
@pytest.mark.parametrize("wanted", [np.arange(9), np.array([8]), np.array([4, 6, 8])])
def test_gather_taps(wanted, steps, initial):
    everything = np.arange(9)
    found = gather_taps(X, [locate(wanted, everything, s) for s in steps], initial)
    expected = [earlier(X, s, initial)[:, wanted] for s in steps]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("initial", [None, INITIAL])
def test_taps_that_interleave(initial):
    """Positions 1, 3, 5, ... read two taps of dilation 2 below, which are all positions there."""
    available, wanted = np.arange(1, 10, 2), np.array([1, 5, 9])
    x = X[:, :5]
    reads = [locate(wanted, available, s) for s in (2, 0)]
    found = np.asarray(gather_taps(x, reads, initial))
    before = np.zeros_like(INITIAL) if initial is None else initial
    pairs = [(before, x[:, 0]), (x[:, 1], x[:, 2]), (x[:, 3], x[:, 4])]
    expected = np.stack([np.concatenate(pair, axis=-1) for pair in pairs], axis=1)
    np.testing.assert_array_equal(found, expected)


def convolved(x, kernel, dilation):
    """The convolution at every position."""
    taps = [earlier(x, j * dilation) @ kernel[-1 - j] for j in range(len(kernel))]
    return np.sum(taps, axis=0)


DOUBLING = [1, 2, 4, 8, 16]


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("output_length", [1, 7])
@pytest.mark.parametrize("dilations", [DOUBLING, [3, 1, 2]])
def test_convolve_between_the_positions_of_a_cone(dilations, output_length, taps):
    time = 40
    cone = Cone(time, [tap_offsets(taps, d) for d in dilations], output_length)
    x = RANDOM.normal(size=(2, time, 3)).astype("float32")
    kernel = RANDOM.normal(size=(taps, 3, 4)).astype("float32")
    for (below, wanted), d in zip(itertools.pairwise(cone.positions), dilations, strict=True):
        found = convolve(x[:, below], kernel, d, wanted, below)
        expected = convolved(x, kernel, d)[:, wanted]
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("known", [True, False], ids=["positions", "all steps"])
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_convolve_pads_no_more_than_a_short_sequence(taps, known, monkeypatch):
    """The other ones of five taps read only zeros, however far back they reach."""
    positions = np.arange(9) if known else None
    kernel = RANDOM.normal(size=(5, 3, 4)).astype("float32")
    dilation = {1: 2**27, 2: 8, 3: 4, 5: 2}[taps]
    padded = []
    monkeypatch.setattr(
        convolution,
        "pad_past",
        lambda x, steps, initial=None: padded.append(steps) or pad_past(x, steps, initial),
    )
    found = convolve(X, kernel, dilation, positions, positions)
    assert max(padded) == (0 if taps == 1 else (taps - 1) * dilation)
    np.testing.assert_allclose(found, convolved(X, kernel, dilation), atol=1e-5)
