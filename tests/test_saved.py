"""Model files of earlier versions load, and compute what they did."""

import json
import zipfile

import keras
import numpy as np
import pytest

from tests.saved.make import FOLDER, MODELS, outputs_of
from trellis_keras import layers, models, training

pytestmark = pytest.mark.both_backends

# Base classes, and parts that are saved within a layer, not by themselves.
_NOT_SAVED = {
    *("Head", "GatedActivation", "ConvolutionKernel", "MixedGroupKernel"),
    *("DropConnect", "EmbeddingDropout", "FrameLoss", "SquaredError"),
    "FrameNLL",
}


@pytest.mark.parametrize("name", MODELS)
def test_an_earlier_file_computes_what_it_did(name):
    model = keras.saving.load_model(FOLDER / f"{name}.keras")
    expected = np.load(FOLDER / f"{name}.npy")
    np.testing.assert_allclose(outputs_of(model), expected, rtol=1e-4, atol=1e-5)


def test_every_public_class_has_a_file():
    saved = set()
    for path in FOLDER.glob("*.keras"):
        with zipfile.ZipFile(path) as archive:
            saved |= set(_class_names(json.loads(archive.read("config.json"))))
    for module in (layers, models, training):
        for name in module.__all__:
            kind = getattr(module, name)
            if not isinstance(kind, type) or issubclass(kind, keras.callbacks.Callback):
                continue  # callbacks are part of a recipe, not of a model
            if keras.saving.get_registered_name(kind) != name:
                assert name in saved | _NOT_SAVED, name


def _class_names(config):
    if isinstance(config, dict):
        if "class_name" in config:
            yield config["class_name"]
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _class_names(part)
