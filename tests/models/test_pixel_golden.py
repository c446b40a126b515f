"""SequenceClassifier on a TrellisLayer against the authors' pixel program."""

import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    family,
    floats,
    pixel_classifier,
    to_keras_time,
    to_ours,
    variables_of,
)
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import TrellisLayer

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

CASES = ["plain_rgb", "wnorm"]


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("case", CASES)
def test_outputs_loss_and_gradients(case, golden, assert_close):
    arrays = golden(f"trellis_pixel_{case}")
    model = pixel_classifier(arrays)
    model.compile("sgd")
    y = arrays["in.target"]

    def loss(x):
        logits = model(x)
        return model.compute_loss(x, y, logits), logits

    variables = variables_of(model.backbone) | {
        "linear.weight": model.head.kernel,
        "linear.bias": model.head.bias,
    }
    (value, logits), by_variable, (by_x,) = value_and_gradients(
        loss, list(variables.values()), to_keras_time(arrays["in.x"])
    )
    assert_close(ops.log_softmax(logits), arrays["out.logp_f64"], "output", "logp")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    reference = family(arrays, "grad")
    assert_close(by_x, reference["x"].transpose(0, 2, 1), "gradient", "x")
    for name, gradient in zip(variables, by_variable, strict=True):
        linear = name.startswith("linear")
        wanted = reference[name].T if linear else to_ours(name, reference[name])
        assert_close(ops.convert_to_numpy(gradient), wanted, "gradient", name)


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("case", CASES)
def test_states(case, golden, assert_close):
    arrays = golden(f"trellis_pixel_{case}")
    backbone = pixel_classifier(arrays).backbone
    layer = TrellisLayer.from_config({**backbone.get_config(), "return_state": True})
    layer.build((None, None, arrays["in.x"].shape[1]))
    layer.set_weights(backbone.get_weights())
    _, h, c = layer(floats(to_keras_time(arrays["in.x"])))
    assert_close(np.asarray(h), arrays["out.h_f64"][:, :, 0], "output", "h")
    assert_close(np.asarray(c), arrays["out.c_f64"][:, :, 0], "output", "c")
