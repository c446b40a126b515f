"""The examples in the docstrings run, and show what they say they show."""

import doctest
import importlib
import itertools
import pkgutil
import re

import keras
import numpy as np
import pytest

import keras_streams
import trellis_keras
from tests.support.model_checks import OneBatch
from trellis_keras import layers, models, training, zoo
from trellis_keras.zoo import registry

# Trains a whole model.
SLOW = {"trellis_keras.zoo.train_run.train"}


class Checker(doctest.OutputChecker):
    """Takes a shape as TensorFlow prints it, and any output where an example shows none."""

    def check_output(self, want, got, optionflags):
        got = re.sub(r"TensorShape\(\[(.*?)\]\)", r"(\1)", got)
        return not want or super().check_output(want, got, optionflags)


class BriefModel(keras.Sequential):
    """Trains for two epochs at most, whatever an example asks for."""

    def fit(self, *args, epochs=1, **kwargs):
        return super().fit(*args, epochs=min(epochs, 2), verbose=0, **kwargs)


def _reader_has():
    """What an example may use without making it."""
    x, y = np.random.default_rng(0).normal(size=(2, 20, 1)).astype("float32")
    model = BriefModel([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    public = {
        name: getattr(part, name)
        for part in (keras_streams, layers, models, training)
        for name in part.__all__
    }
    return {
        "np": np,
        "keras": keras,
        "ops": keras.ops,
        "trellis_keras": trellis_keras,
        "zoo": zoo,
        "model": model,
        "x": x,
        "y": y,
        **dict.fromkeys(("train", "valid", "test"), OneBatch(x, y)),
        **public,
    }


def _examples():
    packages = (keras_streams, trellis_keras)
    walks = (
        pkgutil.walk_packages(package.__path__, f"{package.__name__}.") for package in packages
    )
    for module in itertools.chain(*walks):
        if module.name.endswith("__main__"):
            continue
        for found in doctest.DocTestFinder().find(importlib.import_module(module.name)):
            if found.examples:
                marks = [pytest.mark.slow] if found.name in SLOW else []
                yield pytest.param(found, id=found.name, marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("example", _examples())
def test_example(example, folder, monkeypatch):
    monkeypatch.chdir(folder)  # one for all: some examples read what others have written
    # An example may register a model.
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    example.globs = {**_reader_has(), **example.globs}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report = []
    result = doctest.DocTestRunner(checker=Checker(), optionflags=flags).run(
        example, out=report.append
    )
    assert not result.failed, "".join(report)
