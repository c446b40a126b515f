"""Steps that a mask leaves out count in no figure of an epoch, compiled or not."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import TrellisLayer
from trellis_keras.models import SequenceClassifier

pytestmark = pytest.mark.both_backends


@pytest.mark.parametrize("jit_compile", [False, True])
def test_batches_count_by_their_valid_steps(jit_compile):
    random = np.random.default_rng(0)
    x = random.standard_normal((4, 9, 3)).astype("float32")
    y = random.integers(0, 3, (4, 9))
    x[:2, 2:] = 0  # the first batch has 4 valid steps, the second one 18
    valid = np.any(x != 0, axis=-1)
    backbone = keras.Sequential([keras.layers.Masking(), TrellisLayer(5, depth=3, seed=1)])
    model = SequenceClassifier(backbone, 3, per_step=True, seed=1)
    model.compile("sgd", jit_compile=jit_compile)
    results = model.evaluate(x, y, batch_size=2, verbose=0, return_dict=True)
    logits = np.asarray(model(x))
    hits = (np.argmax(logits, axis=-1) == y)[valid]
    assert results["accuracy"] == pytest.approx(np.mean(hits), rel=1e-6)
    p = np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    nll = -np.log(np.take_along_axis(p, y[..., None], axis=-1))[..., 0][valid]
    assert results["loss"] == pytest.approx(np.mean(nll), rel=1e-5)
