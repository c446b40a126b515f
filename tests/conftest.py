"""Fixtures of the tests."""

import json
import math
import os
import pathlib
import sys

import numpy as np
import pytest

# Largest error divided by max|reference|, in float64 and in float32.
TOLERANCES = {
    "output": (1e-9, 5e-6),
    "gradient": (1e-9, 1e-5),
    "lm_output": (1e-9, 5e-6),
    "lm_gradient": (1e-9, 2e-5),
    "optimizer": (1e-9, 5e-6),
    "trajectory_loss": (1e-8, 1e-4),
    "trajectory_gradient_norm": (1e-8, 1e-3),
    "trajectory_weight": (1e-6, 1e-4),
}


_memory_of_the_last_collection = 0


@pytest.fixture(autouse=True, scope="module")
def _free_memory():
    """Frees compiled functions when they have added up to half a gigabyte."""
    global _memory_of_the_last_collection
    yield
    if _resident_memory() < _memory_of_the_last_collection + 2**29:
        return
    import keras

    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
    keras.utils.clear_session(free_memory=True)
    _memory_of_the_last_collection = _resident_memory()


def _resident_memory():
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return math.inf
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def tolerance(floatx):
    """`tolerance(kind)`: the error allowed in this floatx; the kinds are those of TOLERANCES."""
    return lambda kind: TOLERANCES[kind][0 if floatx == "float64" else 1]


@pytest.fixture(scope="session")
def golden():
    """`golden(name)`: the arrays of tests/golden/name.npz as a dict; `meta` is parsed JSON."""

    def load(name):
        with np.load(pathlib.Path(__file__).parent / "golden" / f"{name}.npz") as file:
            arrays = dict(file)
        return arrays | {"meta": json.loads(str(arrays["meta"]))}

    return load


@pytest.fixture
def assert_close(floatx, tolerance):
    """`assert_close(actual, reference, kind)`: dtype is floatx, shapes agree, error allowed."""

    def check(actual, reference, kind, name=""):
        # The tensor's own dtype: a JAX array without x64 would become float32 here, unseen.
        actual, reference = np.asarray(actual), np.asarray(reference)
        assert actual.dtype == floatx, f"{name}: dtype {actual.dtype}, floatx is {floatx}"
        assert actual.shape == reference.shape, f"{name}: {actual.shape} != {reference.shape}"
        scale = np.max(np.abs(reference), initial=0.0) or 1.0
        error = np.max(np.abs(actual - reference), initial=0.0) / scale
        assert error <= tolerance(kind), f"{name}: error {error:.3g} > {tolerance(kind):.3g}"

    return check


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The folder of a run of two epochs, which no test may change."""
    from tests.support.small_runs import tiny_run

    return tiny_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def command(monkeypatch, capsys):
    """`command("list", ...)`: exit status, standard output and errors of `trellis-keras`."""
    import trellis_keras_command as cli

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["trellis-keras", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return command


@pytest.fixture
def refused(command):
    """`refused("train", ...)`: the error of a command that ends with status 2 and one line."""

    def refused(*arguments):
        status, _, err = command(*arguments)
        assert status == 2 and err.startswith("Error: ") and err.count("\n") == 1, err
        return err.removeprefix("Error: ").rstrip()

    return refused
