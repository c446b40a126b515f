"""Every loader of the package, with valid files of its kind and the ways they are damaged."""

import contextlib
import dataclasses
import functools
import gzip
import importlib.util
import io
import json
import os
import pathlib
import random
import zipfile
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import PIL.Image
import pytest

from tests.fuzz.inputs import damaged, damaged_json, either
from tests.support.hostile_hdf5 import HOSTILE, SECRET, replace_array
from tests.zoo.datasets.test_images import idx, small_images
from tests.zoo.datasets.test_music import small_music
from tests.zoo.datasets.test_texts import small_texts
from trellis_keras import layers, scoring, training, zoo
from trellis_keras.data import Vocabulary
from trellis_keras.files import file_checksum
from trellis_keras.models import LanguageModel
from trellis_keras.torch_weights import load_torch_state_dict
from trellis_keras.training.history import read_history
from trellis_keras.zoo import datasets
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.results import RESULTS, WEIGHTS

TARGETS = {}


@dataclasses.dataclass
class Target:
    """A loader ready to be tried.

    Attributes:
        path: The file that is damaged; the loader's error must name it or its folder.
        inputs: Function of a `random.Random` that returns what it holds: bytes.
        load: Function without arguments that reads it.
        put: Function that puts an input where it belongs. By default it is the file's content.
    """

    path: pathlib.Path
    inputs: Callable[[random.Random], bytes]
    load: Callable[[], object]
    put: Callable[[bytes], object] | None = None

    def __post_init__(self):
        if self.put is None:
            self.put = self.path.write_bytes


def target(function):
    """Registers `function(folder)`, a generator that yields the `Target` in an empty folder."""
    TARGETS[function.__name__] = contextlib.contextmanager(function)
    return function


# Data sets


def _image(kind, size, mode="RGB"):
    file = io.BytesIO()
    PIL.Image.new(mode, size).save(file, kind)
    return file.getvalue()


def _npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _hostile_npz():
    """Arrays that are not numeric, and one that claims far more than it has."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        shape = {"descr": "<f8", "fortran_order": False, "shape": (10**10,)}
        np.lib.format.write_array_header_1_0(header, shape)
        archive.writestr("y_train.npy", header.getvalue())
        archive.writestr("zeros.npy", bytes(10**7))
    objects = _npz(y_train=np.array([{}], dtype=object), y_test=[1])
    alone = io.BytesIO()
    np.save(alone, np.arange(3))
    return [file.getvalue(), objects, alone.getvalue(), _npz(y_train=["a"], y_test=[[1.5]])]


_IMAGES = [_image("PNG", (32, 32), mode) for mode in ("P", "L", "RGBA", "I;16", "1")]
_IMAGES += [_image(kind, (32, 32)) for kind in ("GIF", "TIFF", "BMP", "EPS")]
_IMAGES.append(_image("PNG", (20_000, 32)))
_TEXT = " the cat sat \n the <unk> ran \n the caf\u00e9 \n" * 3
# {name: (data set, the file that is damaged, what writes its files, other contents)}
_DATA_SETS = {
    "idx": (
        *("seq_mnist", "mnist/train-images-idx3-ubyte", small_images),
        [idx(np.zeros((2, 2))), idx(np.zeros(0))],
    ),
    "png": ("seq_cifar10", "cifar10/train_00.png", small_images, _IMAGES),
    "npz_labels": ("seq_cifar10", "cifar10/labels.npz", small_images, _hostile_npz()),
    "mat": ("jsb", "poly_music/JSB_Chorales.mat", small_music, []),
    "ptb": ("ptb", "ptb/ptb.train.txt", small_texts, [_TEXT.encode()]),
}


def _data_set(name, file, write, others, folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KERAS_HOME", str(folder / "keras"))
        write(folder, monkeypatch)
        path = folder / file
        inputs = damaged([path.read_bytes(), *others])
        yield Target(path, inputs, lambda: datasets.load(name, data_dir=folder))


for _name, _arguments in _DATA_SETS.items():
    TARGETS[_name] = contextlib.contextmanager(functools.partial(_data_set, *_arguments))


@target
def own_text(folder):
    path = folder / "text.txt"
    units = iter(lambda: len(path.read_bytes()) % 3, None)

    def load():
        unit = ("character", "word", "byte")[next(units)]
        datasets.load("text", path=path, unit=unit)

    yield Target(path, damaged([_TEXT.encode(), _TEXT.encode("utf-16"), b""]), load)


@target
def gzip_text(folder):
    contents = [gzip.compress(_TEXT.encode()), gzip.compress(bytes(10**6)), _TEXT.encode()]
    path = folder / "text.txt.gz"
    yield Target(path, damaged(contents), lambda: datasets.load("text", path=folder / "text.txt"))


# JSON and CSV


@target
def vocabulary(folder):
    documents = [
        {"tokens": ["<eos>", "the", "<unk>"], "unit": "word", "unknown": "<unk>"},
        {"tokens": ["a", "b"], "unit": "character", "unknown": None},
        {"tokens": ["\x00", "\xff"], "unit": "byte"},
    ]
    texts = [json.dumps(document).encode() for document in documents]
    inputs = either(damaged_json(documents), damaged(texts))
    path = folder / "vocabulary.json"

    def load():
        loaded = Vocabulary.load(path)
        assert Vocabulary(**loaded.get_config()) == loaded

    yield Target(path, inputs, load)


@target
def recipe(folder):
    names = ["trellisnet_char", "tcn_adding", "lru_char_ptb", "tcn_jsb"]
    texts = [zoo.recipe(name).to_json() for name in names]
    more = ["adding", "text", "trellisnet_ptb", {"path": "text.txt"}, {"T": 10**12}]
    inputs = either(
        damaged_json([json.loads(text) for text in texts], more),
        damaged([text.encode() for text in texts]),
    )
    path = folder / runs.RECIPE
    yield Target(path, inputs, lambda: zoo.read_recipe(folder).to_json())


@target
def history(folder):
    text = b"epoch,loss,val_loss\r\n1,0.5,0.25\r\n2,nan,1e-3\r\n"
    path = folder / "history.csv"
    inputs = damaged([text, b'epoch,"a\nb"\n1,2\n', b"epoch\n" + b"1" * 200_000])
    yield Target(path, inputs, lambda: read_history(path))


@target
def results(folder):
    (folder / "some_model").mkdir()
    weights = folder / "some_model" / WEIGHTS
    weights.write_bytes(b"no weights")
    document = {
        "recipe": zoo.recipe("tcn_adding", T=200, seed=3).to_dict(),
        "weights_sha256": file_checksum(weights),
        **{"test": 0.1, "parameters": 3, "other_seeds": []},
    }
    path = folder / "some_model" / RESULTS
    with mock.patch.dict(os.environ, {"TRELLIS_KERAS_ZOO": str(folder)}):
        inputs = either(damaged_json([document]), damaged([json.dumps(document).encode()]))
        own = zoo.recipe("tcn_adding", T=200).to_dict()

        def load():
            if any(run.model == own["name"] for run in zoo.results.all_runs()):  # else: of no model
                zoo.pretrained._pretrained(own)

        yield Target(path, inputs, load)


# Checkpoints


def _small_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(training.Adam(0.1), loss="mse")
    return model


def _checkpoint(folder):
    """Returns a checkpoint's path and a function that reads it."""
    model, place = _small_model(), folder / "checkpoints"
    decay = training.PlateauDecay(factor=0.5, rule="best_before", window=2)
    checkpoint = training.Checkpoint(place, callbacks=[decay])
    checkpoint.set_model(model)
    checkpoint.set_params({"epochs": 1, "steps": 2, "verbose": 0})
    checkpoint.on_epoch_end(0, {"loss": 0.5})

    def load():
        training.restore_checkpoint(model, place)
        checkpoint.on_train_begin()

    return place / "epoch-0001.npz", load


@target
def checkpoint(folder):
    path, load = _checkpoint(folder)
    yield Target(path, damaged([path.read_bytes(), *_hostile_npz()]), load)


def _in_npz(path, name):
    """Damages a JSON text in an archive whose checksums match, as an attacker would write them."""
    arrays = dict(np.load(path))
    text = str(arrays[name])

    def put(content):
        np.savez(path, **arrays | {name: content.decode(errors="replace")})

    return either(damaged([text.encode()]), damaged_json([json.loads(text)])), put


@target
def checkpoint_state(folder):
    path, load = _checkpoint(folder)
    inputs, put = _in_npz(path, "state")
    yield Target(path, inputs, load, put)


@target
def score_progress(folder):
    """The progress of an interrupted `score`."""
    model = _language_model()
    settings = {"whole": True, "start": None, "field": None, "batch_tokens": 8}
    settings["metric"] = "bpc"
    (folder / "text.txt").write_text("abcd\n" * 3)

    def job():
        return scoring._Progress(model, folder / "text.txt", folder / "scores.csv", settings)

    first = job()
    first.state.parent.mkdir()
    first.rows.write_bytes(bytes(9))
    first.save(9)

    def load():
        first.rows.write_bytes(bytes(99))  # a load cuts it
        job().load()

    inputs, put = _in_npz(first.state, "progress")
    yield Target(first.state, inputs, load, put)


# Weights


def _trellis():
    layer = layers.TrellisLayer(units=3, depth=2)
    layer.build((None, None, 2))
    weights = {"weight1": np.ones((12, 2, 2)), "weight2": np.ones((12, 3, 2)), "bias2": np.ones(12)}
    return layer, weights


@target
def npz_weights(folder):
    layer, weights = _trellis()
    path = folder / "weights.npz"
    inputs = damaged([_npz(**weights), *_hostile_npz()])
    yield Target(path, inputs, lambda: load_torch_state_dict(layer, path))


@target
def torch_weights(folder):
    import torch

    layer, weights = _trellis()
    path = folder / "weights.pt"
    tensors = {name: torch.tensor(array) for name, array in weights.items()}
    contents = []
    for zipped in (True, False):
        for bias in (tensors["bias2"], torch.ones(()).expand(10**6, 10**6)):
            file = io.BytesIO()
            torch.save(tensors | {"bias2": bias}, file, _use_new_zipfile_serialization=zipped)
            contents.append(file.getvalue())
    yield Target(path, damaged(contents), lambda: load_torch_state_dict(layer, path))


if importlib.util.find_spec("torch") is None:
    del TARGETS["torch_weights"]


CANARY = "a loader ran this"

_HOSTILE_CONFIGS = [
    {"class_name": "__lambda__", "config": {"value": ["4wEAAAA=", None, None]}},
    {"class_name": "Lambda", "module": "keras.layers", "config": {"function": "os.mkdir"}},
    {"class_name": "function", "module": "os", "config": "mkdir", "registered_name": "mkdir"},
    {"class_name": "system", "module": "os", "config": {}, "registered_name": None},
    {"class_name": "get_file", "module": "keras.utils", "config": {}, "registered_name": None},
    {"class_name": "TFSMLayer", "module": "keras.layers", "config": {"filepath": CANARY}},
    {"class_name": "Dense", "module": "keras.layers", "config": {"units": 10**12}},
    {"class_name": "__numpy__", "config": {"value": [1], "dtype": "object"}},
    {"class_name": "__tensor__", "config": {"value": [1], "dtype": "float32"}},
]


_MODULES = "layers losses metrics ops optimizers random saving utils visualization".split()


def _every_class():
    """Configurations of all that Keras exports, as classes and as functions, and of all of ours."""
    kinds = [
        {"class_name": name, "module": f"keras.{module}", "config": {}, "registered_name": None}
        for module in _MODULES
        for name in vars(getattr(keras, module))
    ]
    names = [kind["class_name"] for kind in kinds]
    functions = [kind | {"class_name": "function", "config": kind["class_name"]} for kind in kinds]
    registered = [*keras.saving.get_custom_objects()]
    ours = [
        {"class_name": name.partition(">")[2], "module": "a", "config": {}, "registered_name": name}
        for name in registered
    ]
    return [*kinds, *functions, *ours, *registered, *names]


def _language_model():
    vocabulary = Vocabulary("abcd", "character")
    model = LanguageModel(4, 2, layers.TCN(2, 2, 1), vocabulary=vocabulary)
    model.build((None, None))
    return model


def _saved_model(folder):
    model = _language_model()
    model.compile(training.Adam(0.1))
    model.save(folder / runs.BEST)
    return model


def _leading_elsewhere(folder, content):
    """An HDF5 file, and copies in which an array leads to another file."""
    contents, path = [content], folder / "hostile.h5"
    for hostile in HOSTILE:
        path.write_bytes(content)
        replace_array(path, "embedding/vars/0", hostile, folder / "secret.h5")
        contents.append(path.read_bytes())
    return contents


def _check_no_secret(model):
    assert not any((weight == SECRET).any() for weight in model.get_weights()), "a secret was read"


def _damaged_config(content):
    """Any class anywhere, also in the compile configuration."""
    return damaged_json([json.loads(content)], [*_HOSTILE_CONFIGS, *_every_class()])


def _damaged_weights(folder):
    return lambda content: damaged(_leading_elsewhere(folder, content))


def _keras(folder, part, inputs):
    """A model whose file has one damaged part in an archive that is sound."""
    (folder / runs.RECIPE).write_text(zoo.recipe("trellisnet_char").to_json(), encoding="utf-8")
    model = _saved_model(folder)
    path = folder / runs.BEST
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}

    def put(content):
        with zipfile.ZipFile(path, "w") as archive:
            for name, whole in (parts | {part: content}).items():
                archive.writestr(name, whole)

    def load():
        model.load_weights(path)
        _check_no_secret(model)
        _check_no_secret(runs.load_best(folder))

    if part is None:
        yield Target(path, inputs(path.read_bytes()), load)
    else:
        yield Target(path, inputs(parts[part]), load, put)


@target
def keras_file(folder):
    yield from _keras(folder, None, lambda content: damaged([content]))


@target
def keras_config(folder):
    yield from _keras(folder, "config.json", _damaged_config)


@target
def keras_weights(folder):
    yield from _keras(folder, "model.weights.h5", _damaged_weights(folder))


@target
def h5_weights(folder):
    model = _saved_model(folder)
    path = folder / "some.weights.h5"
    model.save_weights(path)

    def load():
        zoo.pretrained.load_weights(model, "trellisnet_char", path)
        _check_no_secret(model)

    yield Target(path, damaged(_leading_elsewhere(folder, path.read_bytes())), load)


def _preset(folder, part, inputs):
    preset = folder / "preset"
    _language_model().save_to_preset(preset)
    path = preset / part

    def load():
        _check_no_secret(zoo.from_preset(preset))

    yield Target(path, inputs(path.read_bytes()), load)


@target
def preset_config(folder):
    yield from _preset(folder, "config.json", _damaged_config)


@target
def preset_weights(folder):
    yield from _preset(folder, "model.weights.h5", _damaged_weights(folder))
