"""Weights that come with the package have the results that stand beside them."""

import os
import pathlib

import pytest

from trellis_keras import zoo
from trellis_keras.zoo.pretrained import published

GENERATED = {"adding", "copy_memory"}
BESIDE_CHECKOUT = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def folder_of_data():
    return pathlib.Path(os.environ.get("TRELLIS_KERAS_DATA") or BESIDE_CHECKOUT)


@pytest.mark.parametrize(
    "results", [results for _, results in published()], ids=[path.name for path, _ in published()]
)
def test_pretrained_weights_have_their_published_result(results, folder_of_data):
    if results["data"] not in GENERATED and not folder_of_data.is_dir():
        pytest.skip(f"no local copy of {results['data']}: set TRELLIS_KERAS_DATA to its folder")
    recipe = zoo.recipe(results["model"], **results["settings"], data_dir=folder_of_data)
    loaded = recipe.load_data()
    assert loaded.checksum == results["data_checksum"]
    model = zoo.get_model(recipe.name, **vars(recipe.model), weights="pretrained")
    logs = model.evaluate(recipe.stream(loaded.test), verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(results["test_metrics"]["loss"], rel=1e-3)
