"""Heads of half-precision models: logits, losses and what Keras is told of them are float32."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import AdaptiveSoftmax, MixtureOfSoftmaxes
from trellis_keras.layers.heads import DenseHead

pytestmark = [pytest.mark.both_backends, pytest.mark.slow_elsewhere]
WORDS, CHANNELS = 12, 5
HEADS = {
    "dense": lambda **kw: DenseHead(WORDS, **kw),
    "mixture": lambda **kw: MixtureOfSoftmaxes(WORDS, experts=2, seed=1, **kw),
    "adaptive": lambda **kw: AdaptiveSoftmax(WORDS, cutoffs=[4, 8], seed=1, **kw),
}


@pytest.mark.parametrize("name", HEADS)
def test_predictions_have_the_loss_that_is_trained(name):
    head = HEADS[name](
        dtype="mixed_bfloat16", bias_initializer=keras.initializers.RandomUniform(-8, 8, seed=0)
    )
    random = np.random.default_rng(0)
    hidden = random.standard_normal((3, 4, CHANNELS)).astype("float32")
    targets = random.integers(0, WORDS, (3, 4))
    log_p = np.asarray(head(hidden))
    assert log_p.dtype == "float32"
    nll = -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    # The products are rounded alike; biases rounded to 8 bits would be off by up to 0.016.
    np.testing.assert_allclose(nll, head.loss(hidden, targets), atol=2e-3)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_the_symbolic_dtype_is_the_real_one(name, policy):
    head = HEADS[name](dtype=policy)
    symbol = head(keras.Input((4, CHANNELS)))
    real = head(np.ones((2, 4, CHANNELS), "float32"))
    assert symbol.dtype == keras.backend.standardize_dtype(real.dtype)
    assert symbol.shape == (None, 4, WORDS)
