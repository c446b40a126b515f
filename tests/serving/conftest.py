"""The SavedModels that the tests of this folder share."""

import importlib.util

import keras
import pytest

from trellis_keras.export import export

if keras.backend.backend() != "tensorflow":  # a SavedModel is TensorFlow's
    collect_ignore_glob = ["test_*.py"]
HAS_TENSORFLOW_SERVING = importlib.util.find_spec("tensorflow_serving") is not None


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """`exported(name)`: a model of `served.MODELS` and the folder of its SavedModel.

    The first one comes from a `.keras` file, as that of a run does.
    """
    from tests.support.served import small_model

    folder = tmp_path_factory.mktemp("exported")
    made = {}

    def make(name):
        if name not in made:
            model = small_model(name)
            if not made:
                model.save(folder / "model.keras")
                model = keras.saving.load_model(folder / "model.keras")
            made[name] = model, export(model, folder / name, warmup=HAS_TENSORFLOW_SERVING)
        return made[name]

    return make
