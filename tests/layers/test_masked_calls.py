"""Masks of rows of different lengths, and beside states in functional models."""

import functools

import keras
import numpy as np
import pytest

from tests.support.layer_checks import assert_close, made, noise
from trellis_keras.layers import LRU, TCN, StackedRNN, TrellisLayer

pytestmark = [pytest.mark.both_backends, pytest.mark.slow_elsewhere]


def stacked(**options):
    layer = keras.layers.GRU(4, return_sequences=True, return_state=True)
    return StackedRNN([layer], **options)


LAYERS = {
    "trellis": functools.partial(TrellisLayer, 4, depth=3),
    "tcn": functools.partial(TCN, 4, 2, depth=2),
    "lru": functools.partial(LRU, 4, depth=2),
    "stacked rnn": stacked,
}


@pytest.mark.parametrize("name", LAYERS)
def test_last_valid_step_of_each_row(name):
    """It is that of the row alone; a row without a valid step has none, so zeros."""
    layer = made(functools.partial(LAYERS[name], return_sequences=False), (1, 1, 3))
    x, mask = noise(4, 8, 3), np.zeros((4, 8), bool)
    rows = [slice(0, 8), slice(0, 5), slice(2, 7), slice(0, 0)]
    for row, steps in enumerate(rows):
        mask[row, steps] = True
    arguments = (mask,) if name == "tcn" else (None, mask)  # by position, as in Keras' RNN
    ends = np.asarray(layer(x, *arguments))
    for row, steps in enumerate(rows[:3]):
        assert_close(ends[row], layer(x[row : row + 1, steps])[0])
    assert not np.any(ends[3])
    assert layer.compute_mask(x, mask) is None


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(2, 9), (2, 1), (1, 7), (2, 7, 1)])
def test_masks_of_other_shapes_are_refused(name, shape):
    layer = made(LAYERS[name], (2, 7, 3))
    with pytest.raises(ValueError, match=r"`mask` must have shape \(2, 7\)"):
        layer(noise(2, 7, 3), mask=np.ones(shape, bool))


@pytest.mark.parametrize("name", ["trellis", "lru", "stacked rnn"])
def test_mask_beside_states(name):
    layer = LAYERS[name](return_sequences=False, return_state=True)
    x = noise(2, 6, 3)
    layer.build(x.shape)
    states = [np.full((2, *s.shape[1:]), 0.3, "float32") for s in layer(x)[1:]]
    x[0, 3:] = 0
    inputs, starts = keras.Input((None, 3)), [keras.Input(s.shape[1:]) for s in states]
    outputs = layer(keras.layers.Masking()(inputs), initial_state=starts)
    model = keras.Model([inputs, *starts], outputs)
    model.compile(jit_compile=name == "trellis")
    expected = layer(x, initial_state=states, mask=np.any(x != 0, axis=-1))
    for a, b in zip(model.predict([x, *states], verbose=0), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
