"""Settings and fixtures of all tests. How tests reach other backends: see `backends.py`."""

import os
import sys
from pathlib import Path

FLOATX = os.environ.get("TRELLIS_TEST_FLOATX", "float32")

# Before Keras, JAX or TensorFlow are imported for the first time.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tiny nets that are compiled and run once: LLVM's optimizations would take half of the tests' time.
# `XLA_FLAGS= pytest` runs with them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if FLOATX == "float64":
    os.environ["JAX_ENABLE_X64"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # test modules say `from backends import ...`

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from backends import running_children  # noqa: E402

keras.config.set_floatx(FLOATX)

GOLDEN = Path(__file__).parent / "golden"

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


@pytest.fixture
def floatx():
    """The floatx of this process: "float32" or "float64"."""
    return FLOATX


@pytest.fixture
def tolerance():
    """`tolerance(kind)`: the error allowed in this floatx; the kinds are those of TOLERANCES."""
    return lambda kind: TOLERANCES[kind][0 if FLOATX == "float64" else 1]


@pytest.fixture
def golden():
    """`golden(name)`: the arrays of tests/golden/name.npz as a dict; `meta` is parsed JSON."""

    def load(name):
        import json

        with np.load(GOLDEN / f"{name}.npz") as file:
            arrays = dict(file)
        return arrays | {"meta": json.loads(str(arrays["meta"]))}

    return load


@pytest.fixture
def assert_close(tolerance):
    """`assert_close(actual, reference, kind)`: dtype is floatx, shapes agree, error allowed."""

    def check(actual, reference, kind, name=""):
        # The tensor's own dtype: a JAX array without x64 would become float32 here, unseen.
        actual, reference = np.asarray(actual), np.asarray(reference)
        assert actual.dtype == FLOATX, f"{name}: dtype {actual.dtype}, floatx is {FLOATX}"
        assert actual.shape == reference.shape, f"{name}: {actual.shape} != {reference.shape}"
        scale = np.max(np.abs(reference), initial=0.0) or 1.0
        error = np.max(np.abs(actual - reference), initial=0.0) / scale
        assert error <= tolerance(kind), f"{name}: error {error:.3g} > {tolerance(kind):.3g}"

    return check


# Child processes on other backends run beside the other tests: started first, awaited last. With
# `pytest -n 2` one of the two processes of pytest-xdist awaits them while the other one tests.

_CHILDREN = {"children", "slow_children"}


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist: files in the order below, not by size


def pytest_collection_modifyitems(config, items):
    items.sort(key=_needs_children, reverse=_is_worker(config))


@pytest.fixture(scope="session", autouse=True)
def _start_children(request):
    if _is_worker(request.config):
        return  # the one that gets the tests that need them starts them
    needed = {name for item in request.session.items for name in item.fixturenames}
    for name in sorted(_CHILDREN & needed):
        request.getfixturevalue(name)


def _is_worker(config):
    """Whether this is one of the processes that pytest-xdist has started."""
    return hasattr(config, "workerinput")


def _needs_children(item):
    return not _CHILDREN.isdisjoint(item.fixturenames)


@pytest.fixture(scope="session")
def children(tmp_path_factory):
    """{setting: (process, file of its output)} of the marked tests."""
    with running_children(tmp_path_factory.mktemp("children"), slow=False) as started:
        yield started


@pytest.fixture(scope="session")
def slow_children(tmp_path_factory):
    """The same, of the slow ones."""
    with running_children(tmp_path_factory.mktemp("children"), slow=True) as started:
        yield started
