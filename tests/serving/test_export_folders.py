"""Where exports go: numbered versions, each whole or not there."""

import threading

import keras
import numpy as np
import pytest

from tests.support.processes import run_script
from tests.support.served import small_model
from trellis_keras import serving
from trellis_keras.serving import saved_model

tf = pytest.importorskip("tensorflow")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def quick(monkeypatch):
    """`export(path, version)` without a model: it writes one file."""

    def save(endpoints, folder, vocabulary):
        assert not (folder.parent.parent / folder.parent.name).name.isdecimal()
        folder.mkdir()
        (folder / "saved_model.pb").touch()

    monkeypatch.setattr(saved_model, "endpoints_of", lambda model: {})
    monkeypatch.setattr(saved_model, "save", save)
    return lambda path, version=None: saved_model.write(None, path, version)


def test_versions_count_up_unless_given(quick, tmp_path):
    path = tmp_path / "models" / "first"
    assert quick(path) == path / "1"
    assert quick(path) == path / "2"
    assert quick(path, 10) == path / "10"
    (path / "backup.30").mkdir()
    assert quick(path) == path / "11"
    assert quick(path, np.int64(4)) == path / "4"
    assert names(path) == ["1", "10", "11", "2", "4", "backup.30"]


def test_a_version_that_exists_is_refused(quick, tmp_path):
    quick(tmp_path)
    (tmp_path / "2").mkdir()
    for version in (1, 2):
        with pytest.raises(ValueError, match=f"/{version} exists already"):
            quick(tmp_path, version)
    assert names(tmp_path) == ["1", "2"] and names(tmp_path / "2") == []


@pytest.mark.parametrize("version", [0, -1, 1.0, "1", True])
def test_versions_are_whole_numbers(quick, tmp_path, version):
    with pytest.raises(ValueError, match="whole number from 1 on"):
        quick(tmp_path, version)
    assert names(tmp_path) == []


def test_a_path_that_is_no_folder_of_versions_is_refused(quick, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        quick(tmp_path / "file")
    quick(tmp_path / "model").rename(tmp_path / "renamed")
    for name in ("renamed", "7"):
        with pytest.raises(ValueError, match="looks like one version"):
            quick(tmp_path / name)
    assert names(tmp_path / "renamed") == ["assets.extra", "saved_model.pb"]


def test_two_exporters_at_once(quick, tmp_path, monkeypatch):
    together = threading.Barrier(2)
    count = saved_model._highest

    def highest(path):
        found = count(path)
        if found == 0:  # both have seen an empty folder
            together.wait(timeout=60)
        return found

    monkeypatch.setattr(saved_model, "_highest", highest)
    threads = [threading.Thread(target=quick, args=(tmp_path / "model",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path / "model") == ["1", "2"]


def test_another_exporter_takes_the_version_meanwhile(quick, tmp_path, monkeypatch):
    sync = saved_model._sync

    def take(folder):
        monkeypatch.setattr(saved_model, "_sync", sync)
        quick(tmp_path, 3)

    monkeypatch.setattr(saved_model, "_sync", take)
    with pytest.raises(ValueError, match="3 exists already"):
        quick(tmp_path, 3)
    assert names(tmp_path) == ["3"]


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def write_half(trackable, folder, *options):
        (tmp_path / "seen").mkdir()
        (tmp_path / "seen" / folder.replace("/", "|")).touch()
        raise OSError("disk full")

    model = small_model("tcn_adding")
    monkeypatch.setattr(tf.saved_model, "save", write_half)
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "model", tmp_path / "there"):
        with pytest.raises(OSError, match="disk full"):
            serving.export(model, path)
        (half,) = (tmp_path / "seen").iterdir()
        # What a server could have seen in the meantime.
        assert not half.name.split("|")[-2].isdecimal()
        half.unlink()
        (tmp_path / "seen").rmdir()
    assert names(tmp_path) == ["there"] and names(tmp_path / "there") == []


def test_a_killed_export_leaves_no_version(tmp_path):
    source = """
import os, signal, sys
import tensorflow as tf
from trellis_keras import serving, zoo
save = tf.saved_model.save

def save_and_die(*arguments):
    save(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

tf.saved_model.save = save_and_die
serving.export(zoo.tcn_adding(depth=1, filters=2), sys.argv[1])
"""
    done = run_script(source, tmp_path, check=False)
    assert done.returncode == -9
    (left,) = names(tmp_path)
    assert left.startswith(".exporting-")
    assert serving.export(small_model("tcn_adding"), tmp_path).name == "1"


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "pb"}, "`format` must be one of"),
        ({"format": "litert", "version": 2}, "belong to a SavedModel"),
        ({"format": "onnx", "warmup": True}, "belong to a SavedModel"),
        ({"quantization": "int8"}, "`quantization` belongs to format='litert'"),
    ],
)
def test_options_that_a_format_lacks_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        serving.export(None, tmp_path / "model", **options)
    assert names(tmp_path) == []


def test_other_models_are_refused(tmp_path):
    model = small_model("lru_char_ptb")
    unbuilt = type(model).from_config(model.get_config())
    with pytest.raises(ValueError, match=r"Build the model.*build\(\(None, None\)\)"):
        serving.export(unbuilt, tmp_path / "model")
    with pytest.raises(ValueError, match="Exported are a LanguageModel"):
        serving.export(keras.Sequential([keras.layers.Dense(2)]), tmp_path / "model")
    assert names(tmp_path) == []


def test_jax_is_told_how_to_export(tmp_path):
    source = """
import sys
from trellis_keras import serving, zoo
model = zoo.trellisnet_char(depth=1, hidden_units=1, embedding_dim=1)
try:
    serving.export(model, sys.argv[1])
except ValueError as error:
    print(error)
"""
    output = run_script(source, tmp_path / "model", backend="jax", block=("tensorflow",))
    assert "KERAS_BACKEND=tensorflow" in output
    assert names(tmp_path) == []
