"""Models of the papers' tasks against the authors' programs: outputs, losses, gradients."""

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
from trellis_keras.layers import TCN, TrellisLayer
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.torch_weights import load_torch_state_dict

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]


def tcn(arrays, **options):
    config = arrays["meta"]["config"]
    return TCN(config["channels"], config["k"], len(config["channels"]), **options)


def trellisnet(arrays):
    config = arrays["meta"]["config"]
    return TrellisLayer(
        config["nhid"] + config["nout"],
        config["nlevels"],
        output_units=config["nout"],
        kernel_size=config["k"],
        dilation_rate=config["dil"],
        weight_norm=config["wn"],
        return_sequences=False,
    )


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


# {fixture: function of its arrays that returns the model}
SEQUENCES = {
    "tcn_task_adding": lambda arrays: SequenceRegressor(tcn(arrays, return_sequences=False)),
    "tcn_task_copy_memory": lambda arrays: SequenceClassifier(tcn(arrays), 10, per_step=True),
    "tcn_task_pixel": lambda arrays: SequenceClassifier(tcn(arrays, return_sequences=False), 10),
    "trellis_pixel_plain_rgb": lambda arrays: SequenceClassifier(trellisnet(arrays), 10),
    "trellis_pixel_wnorm": lambda arrays: SequenceClassifier(trellisnet(arrays), 10),
}
# TrellisNet's names of what the others call y.
NAMES = {"in.target": "in.y", "out.logp_f64": "out.y_f64"}


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("fixture", SEQUENCES)
def test_sequences(fixture, golden, assert_close):
    arrays = {NAMES.get(name, name): array for name, array in golden(fixture).items()}
    x, y = to_keras_time(arrays["in.x"]), arrays["in.y"]
    y = floats(y) if fixture == "tcn_task_adding" else y

    def finish(loss, outputs):
        return loss, ops.log_softmax(outputs) if "pixel" in fixture else outputs

    by_x = check_sequence_model(SEQUENCES[fixture](arrays), x, y, arrays, finish, assert_close)
    assert_close(by_x, family(arrays, "grad")["x"].transpose(0, 2, 1), "gradient", "x")


def test_poly_music(golden, assert_close):
    arrays = golden("tcn_task_poly_music")
    x, y = floats(arrays["in.x"]), floats(arrays["in.y"])[None]
    frames = x.shape[1]  # theirs is a sum over frames, ours a mean
    model = PolyphonicModel(tcn(arrays), keys=x.shape[-1])
    by_x = check_sequence_model(
        model, x, y, arrays, lambda loss, z: (frames * loss, ops.sigmoid(z)), assert_close
    )
    assert_close(by_x, family(arrays, "grad")["x"], "gradient", "x")


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("level", ["word", "char"])
def test_language_model(level, golden, assert_close):
    arrays = golden(f"tcn_task_{level}_lm")
    config = arrays["meta"]["config"]
    model = LanguageModel(config["V"], config["emsize"], tcn(arrays))
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
