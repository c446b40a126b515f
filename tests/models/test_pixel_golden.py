"""SequenceClassifier on a TrellisLayer against the authors' pixel program."""

import pytest
from keras import ops

from tests.support.golden import (
    check_gradients,
    family,
    matched_variables,
    pixel_classifier,
    to_keras_time,
)
from tests.support.gradients import value_and_gradients

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("case", ["plain_rgb", "wnorm"])
def test_outputs_loss_and_gradients(case, golden, assert_close):
    arrays = golden(f"trellis_pixel_{case}")
    model = pixel_classifier(arrays)
    model.compile("sgd")
    y = arrays["in.target"]

    def loss(x):
        logits = model(x)
        return model.compute_loss(x, y, logits), logits

    (value, logits), by_variable, (by_x,) = value_and_gradients(
        loss, matched_variables(model), to_keras_time(arrays["in.x"])
    )
    assert_close(ops.log_softmax(logits), arrays["out.logp_f64"], "output", "logp")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    reference = family(arrays, "grad")
    assert_close(by_x, reference["x"].transpose(0, 2, 1), "gradient", "x")
    check_gradients(model, by_variable, reference, assert_close)
