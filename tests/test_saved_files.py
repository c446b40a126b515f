"""Model files that ask for more than they have, or for code to be run."""

import json
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from tests.support.hostile_hdf5 import HOSTILE, arrays_of_nothing, replace_array
from trellis_keras.data import Vocabulary
from trellis_keras.layers import LRU, TCN, TrellisLayer
from trellis_keras.layers.recurrent_cell import GateInitializer
from trellis_keras.models import LanguageModel, SequenceClassifier
from trellis_keras.saved_files import check_file, load_model
from trellis_keras.zoo import pretrained

DAMAGED = "altered.keras is damaged, or not a model of this version: "


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a model, its file)."""
    vocabulary = Vocabulary("abcd", "character")
    model = LanguageModel(4, 2, TCN(2, 2, 1), vocabulary=vocabulary)
    model.build((None, None))
    model.compile("adam")
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return model, path


@pytest.fixture
def altered(saved, tmp_path):
    """`altered(change, **parts)`: a copy of the file with another configuration or other parts."""

    def altered(change=None, **parts):
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

    return altered


def put(*place, value):
    """A change of a configuration."""

    def change(config):
        for key in place[:-1]:
            config = config[key]
        config[place[-1]] = value

    return change


BACKBONE = ("config", "backbone", "config")


def lru(**arguments):
    return keras.saving.serialize_keras_object(LRU(2)) | {"config": {"units": 2, **arguments}}


def called(depth):
    """A model that calls its layers as it is built."""
    layers = [keras.Input((None, 2)), TrellisLayer(2, 1)]
    config = keras.saving.serialize_keras_object(keras.Sequential(layers))
    config["config"]["layers"][1]["config"]["depth"] = depth
    return config


def gru(**arguments):
    initializer = GateInitializer("glorot_uniform", 3, **arguments)
    return keras.saving.serialize_keras_object(keras.layers.GRU(2, kernel_initializer=initializer))


def test_a_sound_file(saved):
    model, path = saved
    tokens = np.array([[0, 1, 2, 3]])
    check_file(path)
    loaded = load_model(path)
    assert not loaded.compiled
    np.testing.assert_array_equal(loaded(tokens), model(tokens))
    assert loaded.vocabulary == model.vocabulary
    with pytest.raises(FileNotFoundError, match="missing.keras"):
        load_model(Path("missing.keras"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(*BACKBONE, "filters", value=10**12), "filters=1000000000000 is too large"),
        (put(*BACKBONE, "filters", value=5_000), "would have .* weights, but it holds"),
        (put("config", "vocabulary_size", value=90_000), "vocabulary"),
        (put("config", "vocabulary_size", value=float("inf")), "vocabulary_size=inf is too large"),
        (put("build_config", "input_shape", value=[None, 10**10]), "input_shape=10000000000 is"),
        (put(*BACKBONE, "dilations", value=[1] * 20_000), "20,0.* numbers in lists, more than"),
        (put("config", "backbone", value=lru(depth=90_000)), "90,0.* levels"),
        (put("config", "backbone", value=lru(depth=-90_000)), "90,0.* levels"),
        (put("config", "backbone", value=lru(depth=50, cells_per_node=50)), "2,5.* levels"),
        (put("config", "backbone", value=called(depth=90_000)), "90,0.* levels"),
        (put("config", "backbone", value=gru(fan_in=90_000)), "fan_in=90000 for units=2 draws"),
        (
            put("config", "more", value="x" * 2**20),
            "config.json has 1,0.* bytes, more than 1,048,5",
        ),
        (put("config", value=3), "holds no configuration"),
        (put("registered_name", value="Unknown"), "is not a model of trellis_keras"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(altered, change, message):
    with pytest.raises(ValueError, match=f"{DAMAGED}.*({message})"):
        load_model(altered(change))


def unrolled(keras_layer, steps):
    inputs = keras.Input((steps, 3))
    model = SequenceClassifier(keras.Model(inputs, keras_layer(inputs)), 2, per_step=True)
    model.build((None, steps, 3))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.LSTM(2, unroll=True, return_sequences=True),
        lambda: keras.layers.RNN(keras.layers.GRUCell(2), unroll=True, return_sequences=True),
        lambda: keras.layers.TimeDistributed(keras.layers.Dense(2)),
    ],
)
def test_unrolled_steps_count_as_parts(make, tmp_path):
    path, changed = tmp_path / "model.keras", tmp_path / "changed.keras"
    unrolled(make(), 20).save(path)
    assert isinstance(load_model(path), SequenceClassifier)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(changed, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, archive.read(name).replace(b"[null, 20, ", b"[null, 100000, "))
    with pytest.raises(ValueError, match="changed.keras .* it has .*00,0.. layers, levels"):
        load_model(changed)


def test_saving_and_loading_plan_no_stream(tmp_path, monkeypatch):
    """The proof of a backbone of Keras layers takes seconds, and any time for a stranger's."""
    planned = []
    monkeypatch.setattr("trellis_keras.models.base.to_stream", planned.append)
    unrolled(keras.layers.LSTM(2, return_sequences=True), None).save(tmp_path / "model.keras")
    model = load_model(tmp_path / "model.keras")
    assert not planned
    model.stream()
    assert planned == [model.backbone]


def test_a_compile_config_is_not_read(altered):
    """Its metrics could take any memory; what the package does with a file needs none."""
    metric = entry("MeanIoU", "keras.metrics", {"num_classes": 10**6})
    change = put("compile_config", value={"optimizer": "hostile", "loss": metric})
    assert not load_model(altered(change)).compiled


def test_a_compressed_file(saved, tmp_path):
    """A small file could fill the memory, before anything in it is compared with its size."""
    path = tmp_path / "compressed.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b" " * 10**7)
        archive.writestr("model.weights.h5", bytes(10**7))
    for load in (load_model, saved[0].load_weights):
        with pytest.raises(ValueError, match="compressed.keras .*'config.json' is compressed"):
            load(path)


def test_a_file_of_two_formats_is_refused(saved, tmp_path, monkeypatch):
    """What is checked is what Keras would load, which it chooses by the file's name."""
    model, path = saved
    net = keras.Sequential([keras.Input((1,)), keras.layers.Discretization([0.5])])
    net.save(tmp_path / "legacy.h5")
    contents = (tmp_path / "legacy.h5").read_bytes(), path.read_bytes()
    monkeypatch.setattr(keras.saving, "load_model", None)
    monkeypatch.setattr(keras.Model, "load_weights", None)
    for name in ("two.weights.h5", "two.h5", "two.keras", "two", ".h5", ".keras"):
        for first, second in (contents, contents[::-1], contents[:1] * 2):
            (tmp_path / name).write_bytes(first + second)
            if first == path.read_bytes() and name.endswith(".keras"):
                continue  # an archive with a comment
            for load in (load_model, model.load_weights):
                with pytest.raises(ValueError, match=name):
                    load(tmp_path / name)


def entry(class_name, module, config, registered_name=None):
    return {
        "class_name": class_name,
        "module": module,
        "config": config,
        "registered_name": registered_name,
    }


PICTURE = {"path": "altered.png", "images": [[[[0, 0, 0]]]]}
GALLERY = entry("function", "keras.visualization", "plot_image_gallery", "plot_image_gallery")
CODE = {"class_name": "__lambda__", "config": {"value": ["4wEA", None, None]}}


@pytest.mark.parametrize(
    "hostile",
    [
        entry("Lambda", "keras.layers", {"function": CODE}),
        # A public function of Keras, which writes a file when the model is called.
        entry("Lambda", "keras.layers", {"function": GALLERY, "arguments": PICTURE}),
        GALLERY,
        entry("function", "trellis_keras", "plot_image_gallery", "trellis_keras>TCN"),
        entry("TFSMLayer", "keras.layers", {"filepath": "somewhere"}),
        entry("TextVectorization", "keras.layers", {"vocabulary": "/etc/passwd"}),
        entry("Dense", "keras.layers", {"units": 2}, "trellis_keras>FrameNLL"),
        entry("Dense", "elsewhere", {"units": 2}),
        entry("MeanIoU", "keras.metrics", {"num_classes": 10**4}),
        entry("mkdir", "os", {}),
        entry("__numpy__", None, {"value": ["a"], "dtype": "S4000000000"}),
        {"class_name": "Lambda", "config": {"function": CODE}},  # as Keras 2 wrote it
        "trellis_keras>FrameNLL",
    ],
)
def test_only_layers_that_compute_are_built(altered, tmp_path, monkeypatch, hostile):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keras.saving, "deserialize_keras_object", None)
    monkeypatch.setattr(keras.saving, "load_model", None)
    within = entry("Sequential", "keras", {"layers": [hostile]})
    for place in (("config", "backbone"), (*BACKBONE, "activation")):
        for value in (hostile, within):
            with pytest.raises(ValueError, match=f"{DAMAGED}(it contains|'.*' is a class)"):
                load_model(altered(put(*place, value=value)))
    assert {path.name for path in tmp_path.iterdir()} == {"altered.keras"}


def test_a_compiled_model_within_a_model(altered):
    """Keras would build its metrics, of any size."""
    place = ("config", "backbone", "compile_config")
    with pytest.raises(ValueError, match="it contains a compiled model, .*TCN"):
        load_model(altered(put(*place, value={"optimizer": "adam"})))


def test_a_foreign_model(tmp_path):
    path = tmp_path / "foreign.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]).save(path)
    with pytest.raises(
        ValueError, match="foreign.keras .* it holds keras.Sequential, which is not"
    ):
        load_model(path)


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c[:2000] + b"more" + c[2000:]])
def test_an_hdf5_file_of_another_length_than_it_says(saved, tmp_path, change):
    path = tmp_path / "some.weights.h5"
    saved[0].save_weights(path)
    check_file(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="some.weights.h5 is damaged: its stated length is"):
        saved[0].load_weights(path)


def test_arrays_that_claim_more_than_the_file_has(saved, altered, tmp_path):
    path = altered(model=arrays_of_nothing())
    for load in (load_model, saved[0].load_weights):
        with pytest.raises(ValueError, match="claim 40,000,000,000 bytes"):
            load(path)
    (tmp_path / "some.weights.h5").write_bytes(arrays_of_nothing())
    with pytest.raises(ValueError, match="some.weights.h5 is damaged: .*40,000,000,000"):
        saved[0].load_weights(tmp_path / "some.weights.h5")


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda function: function.__name__)
def test_files_that_lead_elsewhere(saved, altered, tmp_path, monkeypatch, hostile):
    """Refused before Keras opens them, by everything that reads weights."""
    path = tmp_path / "some.weights.h5"
    saved[0].save_weights(path)
    replace_array(path, "embedding/vars/0", hostile, tmp_path / "secret.h5")
    archive = altered(model=path.read_bytes())
    monkeypatch.setattr(keras.Model, "load_weights", None)
    monkeypatch.setattr(keras.saving, "load_model", None)
    files = path, archive
    calls = [(saved[0].load_weights, file) for file in files]
    calls += [(SequenceClassifier(TCN(2, 2, 1), 3).load_weights, file) for file in files]
    calls.append((load_model, archive))
    calls.append((lambda file: pretrained.load_weights(saved[0], "some_model", file), path))
    for load, file in calls:
        with pytest.raises(ValueError, match=f"{file.name} .*{HOSTILE[hostile]}"):
            load(file)


def test_groups_that_contain_each_other(saved, tmp_path):
    path = tmp_path / "some.weights.h5"
    saved[0].save_weights(path)
    with h5py.File(path, "a") as file:
        file["embedding/again"] = file["embedding"]
        file["embedding/vars/all"] = file["/"]
    check_file(path)


@pytest.mark.parametrize(
    "parts", [{"config": b"[" * 10**5}, {"config": None}, {"model": b"no HDF5"}, {"model": None}]
)
def test_damaged_parts(saved, altered, parts):
    for load in (load_model, saved[0].load_weights):
        with pytest.raises(ValueError, match="altered.keras is damaged"):
            load(altered(**parts))


def test_a_full_disk_is_not_damage(saved, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keras.saving, "load_model", fail)
    with pytest.raises(OSError, match="No space left"):
        load_model(saved[1])


@pytest.mark.parametrize(
    "change",
    [put("config", "vocabulary", value=3), put("config", "vocabulary", value={"config": {}})],
)
def test_a_file_without_a_vocabulary_is_named(saved, altered, change):
    with pytest.raises(ValueError, match="altered.keras is damaged"):
        saved[0].load_weights(altered(change))
