"""examples/gradient_heatmap.py: the norms of the levels, and the picture."""

import keras
import numpy as np
import pytest
from keras import ops

from examples.gradient_heatmap import LevelGradient
from tests.support.gradients import value_and_gradients
from trellis_keras import kernels
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel

pytestmark = pytest.mark.both_backends

TOKENS = np.random.default_rng(0).integers(0, 7, (4, 13)).astype("int32")
X, Y = TOKENS[:, :-1], TOKENS[:, 5:]


@pytest.fixture(scope="module")
def model():
    layer = TrellisLayer(
        units=6,
        depth=4,
        output_units=4,
        dilation_rate=[1, 2],
        injection_every=2,
        weight_norm=True,
        aux_every=2,
        return_aux=True,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.5, seed=1),
        recurrent_initializer=keras.initializers.RandomNormal(stddev=0.5, seed=2),
    )
    model = LanguageModel(7, 4, layer, aux_weight=0.5, seed=3)
    model.build((None, None))
    model.compile(keras.optimizers.SGD(0.0, loss_scale_factor=8.0))
    return model


class Shifted:
    """The cell with a tensor of zeros added to the pre-activations of each level."""

    def __init__(self, cell, added):
        self._cell, self._added = cell, iter(added)

    def __getattr__(self, name):
        return getattr(self._cell, name)

    def __call__(self, a, states):
        return self._cell(a + next(self._added), states)


@pytest.mark.both_backends(slow=True)
def test_the_gradient_of_each_level(model):
    layer, cell = model.backbone, model.backbone.cell

    def loss(*added):
        vars(layer)["cell"] = Shifted(cell, added)
        with kernels.disabled():
            y_pred = model((X, Y), training=True)
            return model.compute_loss(X, ops.convert_to_tensor(Y), y_pred), None

    zeros = np.zeros((layer.depth, *X.shape, cell.preactivation_size), "float32")
    try:
        expected = value_and_gradients(loss, [], *zeros)[2]
    finally:
        vars(layer)["cell"] = cell
    squares = [np.sum(np.square(ops.convert_to_numpy(g))) for g in expected]
    *gradients, measured = LevelGradient(model)((X, Y))
    np.testing.assert_allclose(ops.convert_to_numpy(measured), squares, rtol=1e-4)
    # The gradient of a shared weight is the sum of the levels' shares.
    bias = [v is layer.bias for v in model.trainable_variables].index(True)
    share = sum(ops.convert_to_numpy(g).sum(axis=(0, 1)) for g in expected)
    np.testing.assert_allclose(ops.convert_to_numpy(gradients[bias]), share, rtol=1e-3, atol=1e-6)
    assert layer.cell is cell
