"""What all layers for sequences refuse: inputs of another rank or width, a wrong output_length."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import LRU, TCN, StackedRNN, TCNBlock, TrellisLayer


def stacked():
    return StackedRNN([keras.layers.GRU(4, return_sequences=True, return_state=True)])


LAYERS = {
    "TrellisLayer": lambda: TrellisLayer(4, 2),
    "TCN": lambda: TCN(4, 2, 2, residual=False),
    "TCNBlock": lambda: TCNBlock(4, 2, residual=False),
    "LRU": lambda: LRU(4, input_projection=True),
    "StackedRNN": stacked,
}


def zeros(*shape):
    return np.zeros(shape, "float32")


@pytest.mark.parametrize("name", LAYERS)
def test_another_rank(name):
    message = rf"{name} needs inputs \(batch, time, channels\).*Received: input_shape=\(2, 3\)"
    with pytest.raises(ValueError, match=message):
        LAYERS[name]()(zeros(2, 3))
    layer = LAYERS[name]()
    layer(zeros(2, 6, 4))
    with pytest.raises(ValueError, match="expected ndim=3, found ndim=2"):
        layer(zeros(2, 4))


# A multiple of the width would do for a convolution in groups.
@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_another_width(name, channels):
    layer = LAYERS[name]()
    layer(zeros(2, 6, 4))
    with pytest.raises(ValueError, match=rf"value 4, but received .* \(2, 6, {channels}\)"):
        layer(zeros(2, 6, channels))


@pytest.mark.parametrize(
    "make", [TrellisLayer, lambda units, depth, **k: TCN(units, 2, depth, **k)]
)
def test_output_length_of_a_call(make):
    x = np.random.default_rng(0).normal(size=(2, 6, 3)).astype("float32")
    layer = make(4, 2)
    np.testing.assert_allclose(layer(x, output_length=2), layer(x)[:, -2:], atol=1e-6)
    for wrong in (0, -2, 2.5):
        with pytest.raises(ValueError, match=f"positive integer. Received: output_length={wrong}"):
            layer(x, output_length=wrong)
    last = make(4, 2, return_sequences=False)
    assert last(x, output_length=1).shape == (2, 4)
    for call in (last, lambda x, **k: last(keras.Input((6, 3)), **k)):
        with pytest.raises(ValueError, match="returns one step. Received: output_length=3"):
            call(x, output_length=3)
