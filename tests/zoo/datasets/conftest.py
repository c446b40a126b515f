"""Fixtures of the data tests: the real data sets, and a cache that no test shares."""

import os
import pathlib

import pytest

from trellis_keras.zoo.datasets.sources import ENVIRONMENT_VARIABLE

REAL_DATA = os.environ.get(ENVIRONMENT_VARIABLE)


@pytest.fixture
def real_data():
    """`real_data(name)`: the folder of the real data sets, or a skip if it lacks `name`."""

    def check(name):
        if not REAL_DATA or not (pathlib.Path(REAL_DATA) / name).is_dir():
            pytest.skip(f"no local copy of {name}/: set {ENVIRONMENT_VARIABLE} to its folder")
        return pathlib.Path(REAL_DATA)

    return check


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder of downloads and token ids; without local copies in the environment."""
    home = tmp_path_factory.mktemp("keras")
    monkeypatch.setenv("KERAS_HOME", str(home))
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    return home / "datasets" / "trellis_keras"
