"""Every model on a stream of batches, on one device and on two replicas, and in float64."""

import keras
import numpy as np
import pytest

from tests.support.model_checks import check_float64, check_stream, fit_on_stream
from tests.support.parameters import SLOW_ON_JAX, slow_but
from tests.support.processes import run_script
from trellis_keras.layers import TCN
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)

ROWS, TIME, CHANNELS, CLASSES, TARGETS = 10, 9, 7, 6, 2


def tcn(per_step=False, **options):
    options = {"return_sequences": per_step, "kernel_regularizer": "l2", "seed": 1} | options
    return TCN(8, kernel_size=2, depth=1, **options)


def classifier(**options):
    return SequenceClassifier(tcn(**options), CLASSES, seed=2, **options)


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3 * ROWS, TIME, CHANNELS)).astype("float32")
Y = RANDOM.normal(size=(3 * ROWS, TARGETS)).astype("float32")
LABELS = RANDOM.integers(0, CLASSES, (3 * ROWS, TIME))

# Functions (**options) that return a model, and its inputs and targets.
MODELS = {
    "classifier": (classifier, X, LABELS[:, 0]),
    "regressor": (lambda **o: SequenceRegressor(tcn(**o), TARGETS, seed=2, **o), X, Y),
    "polyphonic": (
        lambda **o: PolyphonicModel(tcn(True, **o), CHANNELS, seed=2, **o),
        1.0 * (X > 0),
        X > 1.0,
    ),
    "language model": (
        lambda **o: LanguageModel(CLASSES, 8, tcn(True, **o), seed=2, **o),
        LABELS,
        LABELS,
    ),
}


def compiled(make, **options):
    model = make()
    model.compile(keras.optimizers.SGD(0.1), **options)
    return model


@pytest.mark.both_backends
@pytest.mark.parametrize("name", slow_but(MODELS, "classifier", mark=SLOW_ON_JAX))
def test_a_stream_trains_and_evaluates(name):
    make, x, y = MODELS[name]
    eager = keras.backend.backend() == "tensorflow"  # where compiling takes long
    check_stream(lambda: compiled(make, run_eagerly=eager), x, y, ROWS)


@pytest.mark.both_backends
@pytest.mark.parametrize("name", [name for name in MODELS if name != "language model"])
def test_losses_and_metrics_keep_float64(name):
    check_float64(*MODELS[name])


def fit(name):
    """Trains a model, and returns its figures and weights by name."""
    make, x, y = MODELS[name]
    history, weights = fit_on_stream(compiled(make, jit_compile=False), x, y, ROWS)
    return history | {f"weight {i}": weight for i, weight in enumerate(weights)}


REPLICAS = """
import sys, numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from tests.models.test_streams import fit

with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    np.savez(sys.argv[1], **fit("classifier"))
"""


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.distribute")
def test_two_replicas_train_as_one_device(tmp_path):
    """A classifier; tests/training/test_multi_device.py trains a language model."""
    run_script(REPLICAS, tmp_path / "classifier.npz")
    expected = fit("classifier")
    with np.load(tmp_path / "classifier.npz") as found:
        assert set(found) == set(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
