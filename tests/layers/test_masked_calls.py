"""A functional model passes on the mask of `inputs` where it passes states beside them, too."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import LRU, StackedRNN, TrellisLayer

pytestmark = [pytest.mark.both_backends, pytest.mark.slow_elsewhere]
OPTIONS = {"return_sequences": False, "return_state": True}
LAYERS = {
    "trellis": lambda: TrellisLayer(4, depth=3, **OPTIONS),
    "lru": lambda: LRU(3, depth=2, **OPTIONS),
    "stacked rnn": lambda: StackedRNN(
        [keras.layers.GRU(4, return_sequences=True, return_state=True)], **OPTIONS
    ),
}


def data(layer):
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 6, 3)).astype("float32")
    layer.build(x.shape)
    x[0, 3:] = 0
    states = [np.full((2, *s.shape[1:]), 0.3, "float32") for s in layer(x)[1:]]
    return x, states


@pytest.mark.parametrize("name", LAYERS)
def test_mask_beside_states(name):
    layer = LAYERS[name]()
    x, states = data(layer)
    inputs = keras.Input((None, 3))
    starts = [keras.Input(s.shape[1:]) for s in states]
    outputs = layer(keras.layers.Masking()(inputs), initial_state=starts)
    model = keras.Model([inputs, *starts], outputs)
    model.compile(jit_compile=name == "trellis")
    expected = layer(x, initial_state=states, mask=np.any(x != 0, axis=-1))
    for a, b in zip(model.predict([x, *states], verbose=0), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
