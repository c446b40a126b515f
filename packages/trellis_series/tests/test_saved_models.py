"""Model files of earlier versions load, and compute what they did."""

import pathlib

import keras
import numpy as np
import pytest

import trellis_series.forecaster  # noqa: F401  # makes its classes known to Keras
import trellis_series.rocket  # noqa: F401

pytestmark = pytest.mark.both_backends

FOLDER = pathlib.Path(__file__).parent / "saved"


@pytest.mark.parametrize("name", ["forecaster", "point_forecaster", "rocket"])
def test_an_earlier_file_computes_what_it_did(name):
    model = keras.saving.load_model(FOLDER / f"{name}.keras")
    x = np.random.RandomState(0).normal(size=(2, 7, 3)).astype("float32")
    expected = np.load(FOLDER / f"{name}.npy")
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
