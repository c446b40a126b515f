"""Models around a TCN against the authors' programs, one per task: outputs, losses, gradients."""

import pytest
from keras import ops

from tests.support.golden import (
    check_gradients,
    family,
    floats,
    log_softmax,
    matched_variables,
    to_keras_time,
)
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import TCN
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.torch_weights import load_torch_state_dict

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]


def backbone(arrays, **options):
    config = arrays["meta"]["config"]
    return TCN(config["channels"], config["k"], len(config["channels"]), **options)


def check_sequence_model(model, x, y, arrays, finish, assert_close):
    """`finish` makes the authors' outputs and loss of ours."""
    model.build((None, None, x.shape[-1]))
    load_torch_state_dict(model, family(arrays, "param"))
    model.compile("sgd")

    def loss(x):
        y_pred = model(x)
        return finish(model.compute_loss(x, y, y_pred), y_pred)

    (value, outputs), by_variable, (by_x,) = value_and_gradients(loss, matched_variables(model), x)
    assert_close(outputs, arrays["out.y_f64"], "output", "outputs")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    check_gradients(model, by_variable, family(arrays, "grad"), assert_close)
    return by_x


SEQUENCE_TASKS = {
    "adding": lambda arrays: SequenceRegressor(backbone(arrays, return_sequences=False)),
    "copy_memory": lambda arrays: SequenceClassifier(backbone(arrays), 10, per_step=True),
    "pixel": lambda arrays: SequenceClassifier(backbone(arrays, return_sequences=False), 10),
}


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("task", SEQUENCE_TASKS)
def test_sequences(task, golden, assert_close):
    arrays = golden(f"tcn_task_{task}")
    x, y = to_keras_time(arrays["in.x"]), arrays["in.y"]
    y = floats(y) if task == "adding" else y

    def finish(loss, outputs):
        return loss, ops.log_softmax(outputs) if task == "pixel" else outputs

    by_x = check_sequence_model(SEQUENCE_TASKS[task](arrays), x, y, arrays, finish, assert_close)
    assert_close(by_x, family(arrays, "grad")["x"].transpose(0, 2, 1), "gradient", "x")


def test_poly_music(golden, assert_close):
    arrays = golden("tcn_task_poly_music")
    x, y = floats(arrays["in.x"]), floats(arrays["in.y"])[None]
    frames = x.shape[1]  # theirs is a sum over frames, ours a mean
    model = PolyphonicModel(backbone(arrays), keys=x.shape[-1])
    by_x = check_sequence_model(
        model, x, y, arrays, lambda loss, z: (frames * loss, ops.sigmoid(z)), assert_close
    )
    assert_close(by_x, family(arrays, "grad")["x"], "gradient", "x")


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("level", ["word", "char"])
def test_language_model(level, golden, assert_close):
    arrays = golden(f"tcn_task_{level}_lm")
    config = arrays["meta"]["config"]
    model = LanguageModel(config["V"], config["emsize"], backbone(arrays))
    model.build((None, None))
    load_torch_state_dict(model, family(arrays, "param"))
    x, y = arrays["in.x"], arrays["in.y"][:, -config["valid"] :]

    assert_close(model(x), log_softmax(arrays["out.y_f64"]), "lm_output", "log-probabilities")

    def loss():
        y_pred = model((x, y), training=True)
        return model.compute_loss(x, y, y_pred), y_pred

    (value, _), gradients, _ = value_and_gradients(loss, matched_variables(model))
    assert_close(value, arrays["out.loss_f64"], "lm_output", "loss")
    check_gradients(model, gradients, family(arrays, "grad"), assert_close, "lm_gradient")
