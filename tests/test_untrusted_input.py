"""Files that ask for far more than they have, and the page that says what is refused."""

import gzip
import json
import os
import re
import sys
import zipfile

import keras
import numpy as np
import PIL.Image
import pytest

from tests.support.hostile_hdf5 import arrays_of_nothing
from tests.support.processes import ROOT, run_script
from trellis_keras import files, zoo
from trellis_keras.data import Vocabulary
from trellis_keras.layers import LRU, TCN
from trellis_keras.models import LanguageModel
from trellis_keras.saved_files import check_file, load_model
from trellis_keras.training.history import read_history
from trellis_keras.zoo.datasets import images

MEMORY, SECONDS = 2**28, 10

# Reads its files one after the other: each within a limit of memory beside that of the process
# that has read a sound one, and of processor time. Prints a line of JSON for each.
_CHILD = """
import json, pathlib, resource, time
from trellis_keras import data, zoo
from trellis_keras.layers import TrellisLayer
from trellis_keras.saved_files import load_model
from trellis_keras.torch_weights import load_torch_state_dict
from trellis_keras.zoo import datasets

memory, seconds, sound, *paths = sys.argv[1:]
model, layer = load_model(sound), TrellisLayer(2, 1)
layer.build((None, None, 2))
readers = {
    ".keras": load_model,
    "": zoo.from_preset,
    ".h5": model.load_weights,
    ".npz": lambda path: load_torch_state_dict(layer, path),
    ".png": lambda path: datasets.load("seq_cifar10", data_dir=path.parents[1]),
    ".gz": lambda path: datasets.load("text", path=path.with_suffix("")),
    ".json": lambda path: zoo.read_recipe(path.parent),
    ".vocabulary": data.Vocabulary.load,
}
status = pathlib.Path("/proc/self/status").read_text()
used = 1024 * int(status.split("VmData:")[1].split()[0])
for path in map(pathlib.Path, paths):
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(memory), -1))
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + int(seconds) + 1, -1))
    try:
        readers[path.suffix](path)
        message = "accepted"
    except (ValueError, OSError) as error:
        message = str(error)
    print(json.dumps([path.name, message]), flush=True)
"""


def _backbone(backbone):
    return lambda config: config["config"].update(backbone=backbone)


def _lru(**arguments):
    config = keras.saving.serialize_keras_object(LRU(2))
    return _backbone(config | {"config": {"units": 2, **arguments}})


def _sequential(layers):
    config = {"class_name": "Sequential", "module": "keras", "config": {"layers": layers}}
    return _backbone(config)


_DENSE = {"class_name": "Dense", "module": "keras.layers", "config": {"units": 1}}
_METRIC = {"class_name": "MeanIoU", "module": "keras.metrics", "config": {"num_classes": 10**4}}

# {name: (the change of a sound model's configuration, what the error says)}
_CONFIGS = {
    "width": (_lru(units=90_000), "weights, but it holds"),
    "any_width": (_lru(units=10**12), "units=1000000000000 is too large"),
    "depth": (_lru(depth=90_000), "more than the"),
    "cells": (_lru(depth=300, cells_per_node=300), "more than the"),
    "dilations": (
        lambda config: config["config"]["backbone"]["config"].update(dilations=[1] * 20_000),
        "more than the",
    ),
    "layers": (_sequential([_DENSE] * 5_000), "more than the"),
    "metric": (_sequential([_METRIC]), "it contains keras.metrics.MeanIoU"),
    "text": (lambda config: config.update(a="a" * 30_000_000), "config.json has 30,0"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The file of a small language model."""
    path = tmp_path_factory.mktemp("sound") / "sound.keras"
    model = LanguageModel(4, 2, TCN(2, 2, 1))
    model.build((None, None))
    model.save(path)
    return path


def _write(path, parts, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def _bombs(sound, folder):
    """Returns {path: what the error says} of files that would take memory or time."""
    with zipfile.ZipFile(sound) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    bombs = {}
    for name, (change, message) in _CONFIGS.items():
        config = json.loads(parts["config.json"])
        change(config)
        bombs[folder / f"{name}.keras"] = message
        _write(folder / f"{name}.keras", parts | {"config.json": json.dumps(config)})
    _write(folder / "deep.keras", parts | {"config.json": b"[" * 10**5 + b"]" * 10**5})
    zeros = parts | {"model.weights.h5": bytes(2**27)}
    _write(folder / "zeros.keras", zeros, zipfile.ZIP_DEFLATED)
    _write(folder / "claims.keras", parts | {"model.weights.h5": arrays_of_nothing()})
    (folder / "claims.weights.h5").write_bytes(arrays_of_nothing())
    preset = folder / "preset"
    preset.mkdir()
    (preset / "config.json").write_bytes(b" " * 2**25)
    (preset / "model.weights.h5").write_bytes(parts["model.weights.h5"])
    (folder / "text.txt.gz").write_bytes(20 * gzip.compress(bytes(2**24)))
    (folder / "recipe.json").write_bytes(b"{" + b" " * 2**23 + b"}")
    (folder / "some.vocabulary").write_bytes(b'{"tokens": [' + b"[]," * 2**25 + b"[]]}")
    _write(folder / "zeros.npz", {"weight1.npy": bytes(2**29)}, zipfile.ZIP_DEFLATED)
    _write_images(folder / "cifar10")
    return bombs | {
        folder / "deep.keras": "recursion",
        folder / "zeros.keras": "is compressed",
        folder / "claims.keras": "claim 40,000,000,000 bytes",
        folder / "claims.weights.h5": "claim 40,000,000,000 bytes",
        preset: "config.json has 33,554,432 bytes",
        folder / "text.txt.gz": "would unpack to more than",
        folder / "recipe.json": "has more than 8,388,608 bytes",
        folder / "some.vocabulary": "has more than 67,108,864 bytes",
        folder / "zeros.npz": "would unpack to 536,870,912",
        folder / "cifar10" / "train_00.png": "is damaged: ",
    }


def _write_images(folder):
    """Makes the files of CIFAR-10; the first has 360 million points, which would take 1 GB."""
    folder.mkdir()
    np.savez(folder / "labels.npz", y_train=np.zeros(50_000, int), y_test=np.zeros(10_000, int))
    for file in images.CIFAR10.paths:
        if file.endswith(".png"):
            PIL.Image.new("1", (1, 1)).save(folder.parent / file)
    PIL.Image.new("1", (60_000, 6_000)).save(folder / "train_00.png")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is only bounded on Linux")
def test_what_is_refused_takes_little_memory_and_time(sound, tmp_path):
    bombs = _bombs(sound, tmp_path)
    done = run_script(_CHILD, MEMORY, SECONDS, sound, *bombs, check=False)
    answers = dict(map(json.loads, done.stdout.splitlines()))
    for path, message in bombs.items():
        assert path.name in answers, f"the process ended at {path.name}: {done.stderr[-2000:]}"
        assert path.name in (answer := answers[path.name])[:500] and message in answer


_READERS = {
    "a.keras": load_model,
    "b.keras": check_file,
    "c.weights.h5": check_file,
    "f.npz": files.read_npz,
    "h.txt": files.read_file,
    "i.txt.gz": files.read_file,
    "j.txt": lambda path: list(files.read_blocks(path, "text")),
    "k.json": Vocabulary.load,
    "l.bin": files.file_checksum,
    "history.csv": read_history,
    "recipe.json": lambda path: zoo.read_recipe(path.parent),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("name", _READERS)
def test_a_pipe_is_refused_at_once(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises((ValueError, OSError), match=name if name != "recipe.json" else "no run"):
        _READERS[name](tmp_path / name)


def test_the_page_names_tests_that_exist():
    page = (ROOT / "docs" / "untrusted_input.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    for row in rows:
        named = re.findall(r"`((?:packages/\w+/)?tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), row
