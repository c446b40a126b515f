"""Model files that ask for more than they have, or for code to be run."""

import io
import json
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from trellis_keras import files
from trellis_keras.data import Vocabulary
from trellis_keras.layers import TCN
from trellis_keras.models import LanguageModel
from trellis_keras.models.saved_files import check_claims, load_model
from trellis_keras.training import Adam

TOKENS = [[0, 1, 2, 3]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a model, its file)."""
    vocabulary = Vocabulary("abcd", "character")
    model = LanguageModel(4, 2, TCN(2, 2, 1), vocabulary=vocabulary)
    model.build((None, None))
    model.compile(Adam(0.1))
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return model, path


def altered(saved, tmp_path, change=None, **parts):
    """A copy of the file with another configuration or other parts."""
    path = tmp_path / "altered.keras"
    with zipfile.ZipFile(saved[1]) as archive, zipfile.ZipFile(path, "w") as copy:
        for name in archive.namelist():
            content = parts.get(name.split(".")[0], archive.read(name))
            if name == "config.json" and change is not None:
                config = json.loads(content)
                change(config)
                content = json.dumps(config)
            if content is not None:
                copy.writestr(name, content)
    return path


def test_a_sound_file(saved, tmp_path):
    model, path = saved
    for compile in (True, False):
        loaded = load_model(path, compile=compile)
        assert loaded.compiled == compile
        np.testing.assert_array_equal(
            model.predict(np.array(TOKENS), verbose=0), loaded.predict(np.array(TOKENS), verbose=0)
        )
    check_claims(path)
    assert loaded.vocabulary == model.vocabulary


def _set(*place, value):
    def change(config):
        for key in place[:-1]:
            config = config[key]
        config[place[-1]] = value

    return change


BACKBONE = ("config", "backbone", "config")


@pytest.mark.parametrize(
    "change, message",
    [
        (_set(*BACKBONE, "filters", value=10**12), "filters=1000000000000 is too large"),
        (_set(*BACKBONE, "filters", value=5_000), "would have .* weights, but it holds"),
        (_set("config", "vocabulary_size", value=90_000), "vocabulary"),
        (_set("config", "vocabulary_size", value=float("inf")), "vocabulary_size=inf is too large"),
        (_set("build_config", "input_shape", value=[None, 10**10]), "input_shape=10000000000 is"),
        (
            _set("compile_config", "metrics", value=[{"num_classes": 10**5}]),
            "num_classes=100000 is too large",
        ),
        (_set("config", value=3), "holds no configuration"),
        (_set("registered_name", value="Unknown"), "Unknown|LanguageModel"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(saved, tmp_path, change, message):
    path = altered(saved, tmp_path, change)
    with pytest.raises(ValueError, match=f"altered.keras is damaged, or no model of.*{message}"):
        load_model(path)


def test_a_full_disk_is_no_damage(saved, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keras.saving, "load_model", fail)
    with pytest.raises(OSError, match="No space left"):
        load_model(saved[1])


def test_weights_that_do_not_fit_are_named(saved, tmp_path):
    path = altered(saved, tmp_path, _set("config", "vocabulary_size", value=float("inf")))
    with pytest.raises(ValueError, match="altered.keras holds no language model.*infinity"):
        saved[0].load_weights(path)
    other = LanguageModel(4, 2, TCN(2, 2, 2))
    other.build((None, None))
    with pytest.raises(ValueError, match="model.keras does not fit this model"):
        other.load_weights(saved[1])


LAMBDA = {
    "class_name": "Lambda",
    "module": "keras.layers",
    "registered_name": None,
    "config": {
        "name": "hostile",
        "function": {
            "class_name": "__lambda__",
            "config": {"code": "4wEA", "defaults": None, "closure": None},
        },
    },
}


@pytest.mark.parametrize(
    "hostile",
    [
        LAMBDA,
        {"class_name": "mkdir", "module": "os", "config": {}, "registered_name": None},
        {"class_name": "function", "module": "os", "config": "mkdir", "registered_name": "mkdir"},
        {"class_name": "get_file", "module": "keras.utils", "config": {}, "registered_name": None},
    ],
)
def test_nothing_in_a_configuration_is_run(saved, tmp_path, monkeypatch, hostile):
    monkeypatch.chdir(tmp_path)
    for place in (("config", "backbone"), (*BACKBONE, "activation")):
        path = altered(saved, tmp_path, _set(*place, value=hostile))
        with pytest.raises(ValueError, match="altered.keras is damaged, or no model"):
            load_model(path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"altered.keras"}


def test_a_lambda_of_a_model_is_not_run(tmp_path):
    keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x)]).save(
        tmp_path / "lambda.keras"
    )
    with pytest.raises(ValueError, match="lambda.keras is damaged, or no model.*lambda"):
        load_model(tmp_path / "lambda.keras")


def h5(**datasets):
    file = io.BytesIO()
    with h5py.File(file, "w") as content:
        for name, arguments in datasets.items():
            content.create_dataset(name, **arguments)
    return file.getvalue()


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c[:2000] + b"more" + c[2000:]])
def test_an_hdf5_file_of_another_length_than_it_says(saved, tmp_path, change):
    path = tmp_path / "some.weights.h5"
    saved[0].save_weights(path)
    check_claims(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="some.weights.h5 is damaged: it says that it ends at"):
        saved[0].load_weights(path)


BOMB = {"shape": (10**10,), "dtype": "float32", "chunks": (10**6,), "compression": "gzip"}


def test_arrays_that_claim_more_than_the_file_has(saved, tmp_path):
    content = h5(a=BOMB)
    path = altered(saved, tmp_path, model=content)
    with pytest.raises(ValueError, match="claim to have 40,000,000,000 bytes"):
        load_model(path)
    with pytest.raises(ValueError, match="claim to have 40,000,000,000 bytes"):
        saved[0].load_weights(path)
    (tmp_path / "some.weights.h5").write_bytes(content)
    with pytest.raises(ValueError, match="some.weights.h5 is damaged: .*40,000,000,000"):
        saved[0].load_weights(tmp_path / "some.weights.h5")


@pytest.mark.parametrize(
    "parts", [{"config": b"[" * 10**5}, {"config": None}, {"model": b"no HDF5"}, {"model": None}]
)
def test_damaged_parts(saved, tmp_path, parts):
    path = altered(saved, tmp_path, **parts)
    with pytest.raises(ValueError, match="altered.keras is damaged"):
        load_model(path)
    with pytest.raises(ValueError, match="altered.keras is damaged"):
        saved[0].load_weights(path)


def test_a_file_that_unpacks_to_far_more_than_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_UNPACKED", 10**6)
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", bytes(2 * 10**6))
    with pytest.raises(ValueError, match="bomb.keras is damaged.*would unpack to 2,000,000"):
        load_model(path)


@pytest.mark.parametrize(
    "change",
    [
        _set("config", "vocabulary", value=3),
        _set("config", "vocabulary", value={"config": {}}),
        _set("config", "vocabulary_size", value=None),
    ],
)
def test_a_vocabulary_that_is_none(saved, tmp_path, change):
    path = altered(saved, tmp_path, change)
    with pytest.raises(ValueError, match="altered.keras holds no language model"):
        saved[0].load_weights(path)


def test_a_vocabulary_of_another_length(saved, tmp_path):
    tokens = _set("config", "vocabulary", "config", "tokens", value=list("abc"))
    with pytest.raises(ValueError, match="token 3 is None there, 'd' in the model's"):
        saved[0].load_weights(altered(saved, tmp_path, tokens))


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match="missing.keras"):
        load_model(Path("missing.keras"))
