"""Weights that come with the package have the results that stand beside them."""

import os

import pytest

from trellis_keras import zoo
from trellis_keras.zoo.pretrained import published

ON_EVERY_MACHINE = {"adding", "copy_memory", "pydoc"}


@pytest.fixture(scope="module")
def folder_of_data():
    return os.environ.get("TRELLIS_KERAS_DATA")


def check_results(results, folder_of_data):
    """Evaluates published weights on the real data."""
    if results["data"] not in ON_EVERY_MACHINE and not folder_of_data:
        pytest.skip(f"no local copy of {results['data']}: set TRELLIS_KERAS_DATA to its folder")
    recipe = zoo.recipe(results["model"], **results["settings"], data_dir=folder_of_data)
    loaded = recipe.load_data()
    if results["data"] == "pydoc" and loaded.checksum != results["data_checksum"]:
        pytest.skip("another Python's help texts")
    assert loaded.checksum == results["data_checksum"]
    size = results.get("vocabulary") and {"vocabulary_size": len(loaded.vocabulary)}
    recipe = recipe.replace(**size or {})
    model = zoo.get_model(recipe.name, **vars(recipe.model), weights="pretrained")
    logs = model.evaluate(recipe.stream(loaded.test), verbose=0, return_dict=True)
    logs.setdefault(results["metric"], logs["loss"])
    assert logs[results["metric"]] == pytest.approx(results["test"], rel=1e-3)
    for name in logs.keys() & results["test_metrics"].keys():
        assert logs[name] == pytest.approx(results["test_metrics"][name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "results", [results for _, results in published()], ids=[path.name for path, _ in published()]
)
def test_pretrained_weights_have_their_published_result(results, folder_of_data):
    check_results(results, folder_of_data)


def test_the_quickest_of_them_has_its_published_result(folder_of_data):
    (results,) = (results for path, results in published() if path.name == "tcn_jsb")
    check_results(results, folder_of_data)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "holds no results of a model"),
        ("[]", "holds no results of a model"),
        ("[" * 100_000, "holds no results of a model"),
        ('{"model": 3}', "its model is 3"),
        ('{"model": "tcn_adding"}', "is of no recipe of this version: KeyError"),
        ('{"model": "tcn_adding", "settings": [1]}', "is of no recipe of this version"),
        ('{"model": "tcn_adding", "settings": {"T": "x"}}', "is of no recipe of this version"),
        ('{"model": "tcn_adding", "settings": {}}', "is not the file that was published"),
    ],
)
def test_results_that_are_damaged(tmp_path, monkeypatch, content, message):
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "results.json").write_text(content)
    (tmp_path / "some" / "weights.weights.h5").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=f"some/(results.json|weights).*{message}"):
        zoo.tcn_adding(weights="pretrained")


@pytest.mark.parametrize("content", [b"", b"no HDF5" * 100])
def test_a_file_that_holds_no_weights(tmp_path, content):
    path = tmp_path / "some.weights.h5"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="some.weights.h5 does not hold the weights of this tcn_"):
        zoo.tcn_adding(weights=path)


@pytest.mark.parametrize(
    ("name", "theirs", "fields"),
    [
        ("trellisnet_char", "depth=", {"depth": 4}),
        ("trellisnet_char", "injection_every=1", {"injection_every": 5}),
        ("trellisnet_char", "groups=None", {"groups": 2}),
        ("trellisnet_seq_mnist", "dilations=", {"dilations": [1] * 11}),
    ],
)
def test_weights_that_another_function_would_take(name, theirs, fields):
    with pytest.raises(ValueError, match=f"of a model with {theirs}.* Received: {min(fields)}="):
        zoo.get_model(name, weights="pretrained", **fields)
