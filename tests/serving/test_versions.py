"""Where exports go: numbered versions, each complete or not there."""

import pathlib
import sys

import keras
import numpy as np
import pytest

from tests.support.served import MODELS, small_model
from trellis_keras.export import export
from trellis_keras.export import saved_model as module
from trellis_keras.layers import TCN


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def model():
    return small_model("regressor")


@pytest.fixture
def quick(model, monkeypatch):
    """`export` of a model without graphs: it writes one file."""

    def write(endpoints, folder):
        assert not folder.name.isdecimal()
        folder.mkdir()
        (folder / "saved_model.pb").touch()

    monkeypatch.setattr(module, "write_archive", write)
    return lambda path, version=None: export(model, path, version)


def test_versions_count_up_unless_given(quick, tmp_path):
    path = tmp_path / "models" / "first"
    assert quick(path) == path / "1"
    assert quick(path) == path / "2"
    assert quick(path, 10) == path / "10"
    (path / "backup.30").mkdir()
    assert quick(path) == path / "11"
    assert quick(path, np.int64(4)) == path / "4"
    assert names(path) == ["1", "10", "11", "2", "4", "backup.30"]
    assert names(path / "1") == ["assets.extra", "saved_model.pb"]


@pytest.mark.parametrize(
    ("path", "version", "message"),
    [
        ("model", 2, "/2 already exists"),
        ("model", 0, "version=0"),
        ("file", None, "is a file"),
        ("7", None, "looks like one version"),
        ("renamed", None, "looks like one version"),
    ],
)
def test_wrong_paths_and_versions(quick, tmp_path, path, version, message):
    quick(tmp_path / "model")
    (tmp_path / "model" / "2").mkdir()
    quick(tmp_path / "other").rename(tmp_path / "renamed")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        quick(tmp_path / path, version)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("version", [None, 1])
def test_another_process_takes_the_version_meanwhile(quick, tmp_path, monkeypatch, version):
    rename = pathlib.Path.rename

    def late(folder, target):
        (tmp_path / "1").mkdir(exist_ok=True)
        (tmp_path / "1" / "saved_model.pb").touch()
        return rename(folder, target)

    monkeypatch.setattr(pathlib.Path, "rename", late)
    if version is None:
        assert quick(tmp_path) == tmp_path / "2"
    else:
        with pytest.raises(ValueError, match="1 already exists"):
            quick(tmp_path, version)
    assert names(tmp_path) == (["1", "2"] if version is None else ["1"])


def test_a_failed_export_leaves_nothing(model, tmp_path, monkeypatch):
    def write_half(archive, folder, **options):
        pathlib.Path(folder).mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(type(keras.export.ExportArchive()), "write_out", write_half)
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "model", tmp_path / "there"):
        with pytest.raises(OSError, match="disk full"):
            export(model, path)
    assert names(tmp_path) == ["there"] and names(tmp_path / "there") == []


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "pb"}, "'pb'"),
        ({"format": "litert", "version": 2}, "`version`"),
        ({"format": "onnx", "warmup": True}, "`warmup`"),
        ({"weights": "file"}, "`weights`"),
    ],
)
def test_wrong_options(model, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "model", **options)
    assert names(tmp_path) == []


def test_a_suffix_that_no_format_has(model, tmp_path):
    with pytest.raises(
        ValueError, match=r"model.keras has an unknown suffix.*, or a folder without"
    ):
        export(model, tmp_path / "model.keras")
    assert names(tmp_path) == []


def test_wrong_models(tmp_path):
    layer = TCN(2, 2, depth=1)
    layer.build((None, None, 2))
    for model, message in (
        (MODELS["regressor"](), "is not built"),
        (keras.Sequential([keras.layers.Dense(2)]), "is not built"),
        (layer, "wrap a layer in keras.Sequential"),
    ):
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "model")
    assert names(tmp_path) == []


def test_what_is_missing_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving", None)
    with pytest.raises(ImportError, match="pip install tensorflow-serving-api"):
        export(model, tmp_path / "model", warmup=True)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="KERAS_BACKEND=tensorflow"):
        export(model, tmp_path / "model")
    assert names(tmp_path) == []
