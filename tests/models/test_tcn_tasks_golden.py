"""Models around a TCN against the authors' programs, one per task: outputs, losses, gradients."""

import numpy as np
import pytest
from keras import ops

from tests.support.golden import family, floats, to_keras_time, variables_and_references
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import TCN
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.torch_weights import load_torch_state_dict, parameters

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]


def backbone(arrays, **options):
    config = arrays["meta"]["config"]
    return TCN(config["channels"], config["k"], len(config["channels"]), **options)


def check_gradients(model, gradients, arrays, kind, assert_close):
    references = variables_and_references(model, family(arrays, "grad"))
    for (name, _, wanted), gradient in zip(references, gradients, strict=True):
        assert_close(ops.convert_to_numpy(gradient), wanted, kind, name)


def variables_of(model):
    return [parameter.variable for parameter in parameters(model)]


def check_sequence_model(model, x, y, arrays, finish, assert_close):
    """`finish` makes the authors' outputs and loss of ours."""
    model.build((None, None, x.shape[-1]))
    load_torch_state_dict(model, family(arrays, "param"))
    model.compile("sgd")

    def loss(x):
        y_pred = model(x)
        return finish(model.compute_loss(x, y, y_pred), y_pred)

    (value, outputs), by_variable, (by_x,) = value_and_gradients(loss, variables_of(model), x)
    assert_close(outputs, arrays["out.y_f64"], "output", "outputs")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    check_gradients(model, by_variable, arrays, "gradient", assert_close)
    return by_x


@pytest.mark.both_backends(slow=True)
def test_adding(golden, assert_close):
    arrays = golden("tcn_task_adding")
    model = SequenceRegressor(backbone(arrays, return_sequences=False))
    x, y = to_keras_time(arrays["in.x"]), floats(arrays["in.y"])
    by_x = check_sequence_model(model, x, y, arrays, lambda *both: both, assert_close)
    assert_close(by_x, family(arrays, "grad")["x"].transpose(0, 2, 1), "gradient", "x")


@pytest.mark.both_backends(slow=True)
def test_copy_memory(golden, assert_close):
    arrays = golden("tcn_task_copy_memory")
    model = SequenceClassifier(backbone(arrays), 10, per_step=True)
    x, y = to_keras_time(arrays["in.x"]), arrays["in.y"]
    by_x = check_sequence_model(model, x, y, arrays, lambda *both: both, assert_close)
    assert_close(by_x, family(arrays, "grad")["x"].transpose(0, 2, 1), "gradient", "x")


@pytest.mark.both_backends(slow=True)
def test_pixel(golden, assert_close):
    arrays = golden("tcn_task_pixel")
    model = SequenceClassifier(backbone(arrays, return_sequences=False), 10)
    x, y = to_keras_time(arrays["in.x"]), arrays["in.y"]
    by_x = check_sequence_model(
        model, x, y, arrays, lambda loss, logits: (loss, ops.log_softmax(logits)), assert_close
    )
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

    logits = np.asarray(arrays["out.y_f64"])
    log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    assert_close(model(x), log_p, "lm_output", "log-probabilities")

    def loss():
        with model.loss_mode((x, y)):
            y_pred = model(x, training=True)
            return model.compute_loss(x, y, y_pred), y_pred["hidden"]

    (value, _), gradients, _ = value_and_gradients(loss, variables_of(model))
    assert_close(value, arrays["out.loss_f64"], "lm_output", "loss")
    check_gradients(model, gradients, arrays, "lm_gradient", assert_close)
