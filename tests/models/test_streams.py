"""Every model on a stream of batches, on one device and on two replicas."""

import keras
import numpy as np
import pytest

from tests.support.model_checks import check_stream, fit_on_stream
from tests.support.processes import run_script
from trellis_keras.forecasting import Forecaster
from trellis_keras.layers import TCN
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)

ROWS, TIME, CHANNELS, CLASSES, HORIZON, TARGETS = 10, 9, 7, 6, 4, 2
QUANTILES = (0.1, 0.5, 0.9)


def tcn(per_step=False):
    return TCN(8, kernel_size=2, depth=1, return_sequences=per_step, seed=1)


def forecaster(per_step=False, quantiles=QUANTILES):
    return Forecaster(
        tcn(per_step), HORIZON, TARGETS, per_step=per_step, quantiles=quantiles, seed=2
    )


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3 * ROWS, TIME, CHANNELS)).astype("float32")
Y = RANDOM.normal(size=(3 * ROWS, TIME, HORIZON, TARGETS)).astype("float32")
LABELS = RANDOM.integers(0, CLASSES, (3 * ROWS, TIME))

# Functions that return a model, and its inputs and targets.
MODELS = {
    "classifier": (lambda: SequenceClassifier(tcn(), CLASSES, seed=2), X, LABELS[:, 0]),
    "classifier of steps": (
        lambda: SequenceClassifier(tcn(True), CLASSES, per_step=True, seed=2),
        X,
        LABELS,
    ),
    "regressor": (lambda: SequenceRegressor(tcn(), TARGETS, seed=2), X, Y[:, 0, 0]),
    "forecaster": (forecaster, X, Y[:, 0]),
    "forecaster of steps": (lambda: forecaster(per_step=True), X, Y),
    "point forecaster": (lambda: forecaster(quantiles=None), X, Y[:, 0]),
    "polyphonic": (lambda: PolyphonicModel(tcn(True), CHANNELS, seed=2), 1.0 * (X > 0), X > 1.0),
    "language model": (lambda: LanguageModel(CLASSES, 8, tcn(True), seed=2), LABELS, LABELS),
}


def compiled(make):
    model = make()
    model.compile(keras.optimizers.SGD(0.1), jit_compile=keras.backend.backend() == "jax")
    return model


@pytest.mark.both_backends
@pytest.mark.parametrize("name", MODELS)
def test_a_stream_trains_and_evaluates(name):
    make, x, y = MODELS[name]
    check_stream(lambda: compiled(make), x, y, ROWS)


def fit_forecaster():
    make, x, y = MODELS["forecaster"]
    return fit_on_stream(compiled(make), x, y, ROWS)


REPLICAS = """
import sys, numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from tests.models.test_streams import fit_forecaster

with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    history, weights = fit_forecaster()
np.savez(sys.argv[1], *weights, **history)
"""


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.distribute")
def test_two_replicas_train_as_one_device(tmp_path):
    run_script(REPLICAS, tmp_path / "end.npz")
    history, weights = fit_forecaster()
    expected = {f"arr_{i}": weight for i, weight in enumerate(weights)} | history
    with np.load(tmp_path / "end.npz") as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
