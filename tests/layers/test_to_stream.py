"""Streams of Keras models with layers of this package."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_streams import compiled_step, to_stream
from tests.support.layer_checks import noise
from trellis_keras.layers import LRU, TCN, StackedRNN, TCNBlock, TrellisLayer

pytestmark = pytest.mark.both_backends


def stack(*parts):
    return keras.Sequential([keras.Input((None, 3)), *parts])


def check(model, delay, length=16):
    """Asserts that a model streams with a delay."""
    stream, x = to_stream(model), noise(2, length, 3)
    assert (stream.delay, stream.rate) == (delay, 1)
    found = ops.convert_to_numpy(stream.prefill(x)[0])
    expected = ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(found[:, delay:], expected[:, : length - delay], atol=1e-5)
    return stream


def test_a_layer_of_this_package_is_a_stream():
    layer = TCN(4, 2, depth=2)
    layer.build((None, None, 3))
    assert to_stream(layer) is layer and (layer.delay, layer.rate) == (0, 1)


@pytest.mark.slow_elsewhere
def test_layers_of_this_package_between_those_of_keras():
    check(stack(layers.Dense(4), TCN(4, 2, depth=2), TrellisLayer(4, depth=2), LRU(3)), 0)
    options = {"return_sequences": True, "return_state": True}
    recurrent = StackedRNN(
        [layers.LSTM(3, **options), layers.Dropout(0.5), layers.GRU(2, **options)]
    )
    check(stack(layers.Conv1D(4, 3, padding="same"), recurrent, layers.Dense(2)), 1)


def test_the_output_of_a_layer_at_the_last_step():
    model, x = stack(TCN(4, 2, depth=1, return_sequences=False), layers.Dense(2)), noise(2, 9, 3)
    found, _ = to_stream(model).prefill(x)
    for t in range(9):
        np.testing.assert_allclose(found[:, t], model(x[:, : t + 1]), rtol=1e-5, atol=1e-6)


def test_layers_that_read_later_steps_are_refused():
    with pytest.raises(ValueError, match="tcn.* reads later steps.*go_backwards=False"):
        to_stream(stack(TCN(2, depth=1, go_backwards=True)))
    with pytest.raises(ValueError, match="tcn.* is not built"):
        compiled_step(TCN(4, 2, depth=2))


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends(slow=True)
def test_a_tcn_with_centered_taps():
    for centered, delay in (
        (TCN(4, 3, depth=2, padding="same", normalization="layer"), 6),
        (TCN(3, 2, depth=3, padding="same", activation="glu", skip_connections=True), 8),
        (TCN(3, 3, depth=1, padding="same", normalization="batch"), 2),
        (TCNBlock(4, 4, dilation_rate=2, padding="same"), 6),
    ):
        stream = check(stack(layers.Dense(3), centered), delay, length=24)
        assert stream.receptive_field == centered.receptive_field
    for weight in centered.weights:  # those of the layer, whatever they become
        weight.assign(noise(*weight.shape))
    check(centered, delay, length=24)
