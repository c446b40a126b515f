"""Every loader of the package, with valid files of its kind and the ways they are damaged."""

import contextlib
import dataclasses
import gzip
import hashlib
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

from tests.fuzz.inputs import damaged, damaged_json, either
from tests.support.hostile_hdf5 import HOSTILE, SECRET, replace_array
from trellis_keras import layers, scoring, training, zoo
from trellis_keras.data import Vocabulary
from trellis_keras.files import file_checksum
from trellis_keras.models import LanguageModel
from trellis_keras.torch_weights import load_torch_state_dict
from trellis_keras.training.history import read_history
from trellis_keras.zoo import datasets
from trellis_keras.zoo import environment as environments
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.datasets import images, music, sources, texts
from trellis_keras.zoo.results import RESULTS, WEIGHTS

TARGETS = {}


@dataclasses.dataclass(frozen=True)
class Target:
    """A loader ready to be tried.

    Attributes:
        path: The file that is damaged; the loader's error must name it or its folder.
        inputs: Function of a `random.Random` that returns what it holds: bytes.
        load: Function without arguments that reads it.
        write: Function that puts an input where it belongs.
    """

    path: pathlib.Path
    inputs: Callable[[random.Random], bytes]
    load: Callable[[], object]
    write: Callable[[bytes], object] | None = None

    def put(self, content):
        if self.write is None:
            self.path.write_bytes(content)
        else:
            self.write(content)


def target(function):
    """Registers `function(folder)`, a generator that yields the `Target` in an empty folder."""
    TARGETS[function.__name__] = contextlib.contextmanager(function)
    return function


# Images


def _idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype("uint8").tobytes()


def _few(name, **sizes):
    """Makes a few images a whole data set."""
    published = dataclasses.replace(images.PUBLISHED[name], **sizes)
    return mock.patch.dict(images.PUBLISHED, {name: published})


def _mnist(folder, damaged_file):
    (folder / "mnist").mkdir()
    pixels = np.arange(3 * 784).reshape(3, 28, 28) % 256
    for stem, count in (("train", 3), ("t10k", 1)):
        (folder / f"mnist/{stem}-images-idx3-ubyte").write_bytes(_idx(pixels[:count]))
        (folder / f"mnist/{stem}-labels-idx1-ubyte").write_bytes(_idx(np.arange(count)))
    path = folder / "mnist" / damaged_file
    with _few("seq_mnist", train=3, test=1, validation=1):
        inputs = damaged([path.read_bytes(), _idx(np.zeros((2, 2))), _idx(np.zeros(0))])
        yield Target(path, inputs, lambda: datasets.load("seq_mnist", data_dir=folder))


@target
def idx_images(folder):
    yield from _mnist(folder, "train-images-idx3-ubyte")


@target
def idx_labels(folder):
    yield from _mnist(folder, "train-labels-idx1-ubyte")


def _cifar10(folder, damaged_file, contents):
    import PIL.Image

    (folder / "cifar10").mkdir()
    strip = (np.arange(64 * 32 * 3).reshape(64, 32, 3) % 251).astype("uint8")
    for split in ("train", "test"):
        PIL.Image.fromarray(strip).save(folder / f"cifar10/{split}_00.png")
    np.savez(folder / "cifar10/labels.npz", y_train=[1, 2], y_test=[3, 4])
    path = folder / "cifar10" / damaged_file
    files = sources.Source(("cifar10/labels.npz", "cifar10/train_00.png", "cifar10/test_00.png"))
    with (
        _few("seq_cifar10", train=2, test=2, validation=1),
        mock.patch.object(images, "CIFAR10", files),
    ):
        inputs = damaged([path.read_bytes(), *contents])
        yield Target(path, inputs, lambda: datasets.load("seq_cifar10", data_dir=folder))


def _image(kind, size, mode="RGB"):
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.new(mode, size).save(file, kind)
    return file.getvalue()


@target
def png(folder):
    others = [_image("PNG", (32, 32), mode) for mode in ("P", "L", "RGBA", "I;16", "1")]
    formats = [_image(kind, (32, 32)) for kind in ("GIF", "TIFF", "BMP", "EPS")]
    yield from _cifar10(folder, "train_00.png", [*others, *formats, _image("PNG", (20_000, 32))])


def _npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _hostile_npz():
    """Arrays that are no numbers, and one that claims far more than it has."""
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


@target
def npz_labels(folder):
    yield from _cifar10(folder, "labels.npz", _hostile_npz())


# Music


@target
def mat(folder):
    import scipy.io

    (folder / "poly_music").mkdir()
    path = folder / "poly_music" / "JSB_Chorales.mat"
    variables = {}
    for name, count in (("traindata", 2), ("validdata", 1), ("testdata", 1)):
        variables[name] = np.empty((1, count), dtype=object)
        for i in range(count):
            variables[name][0, i] = np.eye(4 + i, 88, dtype="uint8")
    contents = []
    for compressed in (False, True):
        file = io.BytesIO()
        scipy.io.savemat(file, variables, do_compression=compressed)
        contents.append(file.getvalue())
    file = io.BytesIO()
    scipy.io.savemat(file, {"traindata": np.eye(3)}, format="4")
    contents.append(file.getvalue())
    published = {"jsb": hashlib.sha256(contents[0]).hexdigest()}
    with mock.patch.dict(music.CHECKSUMS, published):
        yield Target(path, damaged(contents), lambda: datasets.load("jsb", data_dir=folder))


# Texts

_TEXT = " the cat sat \n the <unk> ran \n the caf\u00e9 \n" * 3


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


def _corpus(folder, name, source, sizes):
    files = [path if isinstance(path, str) else path[0] for path in source.paths]
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(_TEXT.encode())
    with mock.patch.dict(texts.SIZES, {name: sizes}):
        path = folder / files[0]
        inputs = damaged([_TEXT.encode(), _TEXT.replace("<unk>", "a").encode()])
        yield Target(path, inputs, lambda: datasets.load(name, data_dir=folder))


@target
def ptb(folder):
    yield from _corpus(folder, "ptb", texts.PTB, (33, 33, 33, 7))


@target
def wt103(folder):
    with mock.patch.dict(os.environ, {"KERAS_HOME": str(folder / "keras")}):
        yield from _corpus(folder, "wt103", texts.WIKITEXT103, (33, 33, 33, 7))


@target
def lambada_passages(folder):
    (folder / "lambada").mkdir()
    for name in texts.LAMBADA.paths:
        (folder / name).write_bytes(_TEXT.encode())
    path = folder / texts.LAMBADA.paths[0]
    with mock.patch.object(texts, "LAMBADA_PASSAGES", (9, 9)):
        inputs = damaged([_TEXT.encode()])
        yield Target(path, inputs, lambda: datasets.load("lambada", data_dir=folder))


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
    }
    path = folder / "some_model" / RESULTS
    with mock.patch.dict(os.environ, {"TRELLIS_KERAS_ZOO": str(folder)}):
        inputs = either(damaged_json([document]), damaged([json.dumps(document).encode()]))
        own = zoo.recipe("tcn_adding", T=200)

        def load():
            if any(run.model == own.name for run in zoo.results.all_runs()):  # else: of no model
                zoo.pretrained._pretrained(own)

        yield Target(path, inputs, load)


@target
def environment(folder):
    path = folder / runs.ENVIRONMENT
    environments.record(path, None, 1)
    text = path.read_bytes()
    inputs = either(damaged_json([json.loads(text)]), damaged([text]))
    yield Target(path, inputs, lambda: environments.read(path))


# Checkpoints


def _small_model():

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(training.Adam(0.1), loss="mse")
    return model


def _checkpoint(folder, write, damages):
    model, place = _small_model(), folder / "checkpoints"
    decay = training.PlateauDecay(factor=0.5, rule="best_before", window=2)
    checkpoint = training.Checkpoint(place, callbacks=[decay])
    checkpoint.set_model(model)
    checkpoint.set_params({"epochs": 1, "steps": 2, "verbose": 0})
    checkpoint.on_epoch_end(0, {"loss": 0.5})
    path = place / "epoch-0001.npz"
    inputs = damages(path)

    def load():
        training.restore(model, place)
        checkpoint.on_train_begin()

    yield Target(path, inputs, load, write(path))


@target
def checkpoint(folder):
    def damages(path):
        return damaged([path.read_bytes(), *_hostile_npz()])

    yield from _checkpoint(folder, lambda path: path.write_bytes, damages)


@target
def checkpoint_state(folder):
    """With checksums that match, as an attacker would write them."""

    def write(path):
        arrays = dict(np.load(path))
        return lambda text: np.savez(path, **arrays | {"state": text.decode(errors="replace")})

    def damages(path):
        text = str(np.load(path)["state"])
        return either(damaged([text.encode()]), damaged_json([json.loads(text)]))

    yield from _checkpoint(folder, write, damages)


@target
def score_progress(folder):
    """The progress of an interrupted `score`, in an archive that is sound."""
    model = _language_model()
    settings = {"whole": True, "start": None, "field": None, "batch_tokens": 8}
    settings["metric"] = "bpc"
    (folder / "text.txt").write_text("abcd\n" * 3)

    def job():
        return scoring._Progress(model, folder / "text.txt", folder / "scores.csv", settings)

    first = job()
    path = first.state
    path.parent.mkdir()
    first.rows.write_bytes(bytes(9))
    first.save(9)
    arrays = dict(np.load(path))
    text = str(arrays["progress"])

    def write(content):
        first.rows.write_bytes(bytes(99))  # a load cuts it
        np.savez(path, **arrays | {"progress": content.decode(errors="replace")})

    inputs = either(damaged([text.encode()]), damaged_json([json.loads(text)]))
    yield Target(path, inputs, lambda: job().load(), write)


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

    names = [(module, name) for module in _MODULES for name in vars(getattr(keras, module))]
    kinds = [
        {"class_name": name, "module": f"keras.{module}", "config": {}, "registered_name": None}
        for module, name in names
    ]
    functions = [
        kind | {"class_name": "function", "config": kind["class_name"]}
        for kind in kinds
        if kind["class_name"].islower()
    ]
    registered = [*keras.saving.get_custom_objects()]
    ours = [
        {"class_name": name.partition(">")[2], "module": "a", "config": {}, "registered_name": name}
        for name in registered
    ]
    return [*kinds, *functions, *ours, *registered]


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
    return damaged_json([json.loads(content)], _HOSTILE_CONFIGS)


def _damaged_weights(folder):
    return lambda content: damaged(_leading_elsewhere(folder, content))


def _keras(folder, part, inputs):
    """A model whose file has one damaged part in an archive that is sound."""
    (folder / runs.RECIPE).write_text(zoo.recipe("trellisnet_char").to_json(), encoding="utf-8")
    model = _saved_model(folder)
    path = folder / runs.BEST
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}

    def write(content):
        with zipfile.ZipFile(path, "w") as archive:
            for name, whole in parts.items():
                archive.writestr(name, content if name == part else whole)

    def load():
        model.load_weights(path)
        _check_no_secret(model)
        _check_no_secret(runs.load_best(folder))

    whole = path.read_bytes()
    yield Target(path, inputs(parts.get(part, whole)), load, part and write)


@target
def keras_file(folder):
    yield from _keras(folder, None, lambda content: damaged([content]))


@target
def keras_config(folder):
    yield from _keras(folder, "config.json", _damaged_config)


@target
def keras_classes(folder):
    """Any class anywhere, also in the compile configuration."""

    def inputs(content):
        return damaged_json([json.loads(content)], _every_class())

    yield from _keras(folder, "config.json", inputs)


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
