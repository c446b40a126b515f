"""The SavedModels that the tests of this folder share."""

import keras
import pytest

from tests.support.served import KINDS, small_model
from tests.support.tiny_model import NAME, make_model
from trellis_keras import serving


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """`exported(name)`: a model of `served.KINDS` and the folder of its SavedModel.

    The first one comes from a `.keras` file, as that of a run does.
    """
    folder = tmp_path_factory.mktemp("exported")
    made = {}

    def export(name):
        if name not in made:
            model = small_model(name, **KINDS[name])
            if not made:
                model.save(folder / "model.keras")
                model = keras.saving.load_model(folder / "model.keras")
            made[name] = model, serving.export(model, folder / name)
        return made[name]

    return export


@pytest.fixture(scope="session")
def double(tmp_path_factory):
    """The test double of a server, without the network, and a tiny model's first version."""
    from tests.support.rest_double import Double

    folder = tmp_path_factory.mktemp("models") / NAME
    serving.export(make_model(seed=1), folder)
    return Double(folder, NAME)
