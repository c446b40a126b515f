"""Backends and precisions of the tests of all packages.

A test runs on TensorFlow in float32 unless it is marked:

* `float64`: in float64 too. `floatx` is the fixture that sets Keras' floatx for it;
* `both_backends`: on JAX too, in the run of `KERAS_BACKEND=jax python -m pytest`, which leaves all
  others out. There a test marked `float64` runs in float64, with `-m slow` in float32 too. With
  `both_backends(slow=True)` a test runs on JAX with `-m slow` only;
* `slow_elsewhere`: in float64 and on JAX with `-m slow` only.

With `KERAS_BACKEND=torch` the same tests are chosen as on JAX; `tests/layers/test_torch_backend.py`
runs some of them.
"""

import gc
import importlib.metadata
import os

# Before Keras, JAX or TensorFlow are imported for the first time.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tiny nets that are compiled and run once: most of the tests' time would go into optimizing them.
# `XLA_FLAGS= pytest` runs with all optimizations.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_JAXLIB = [found.version for found in importlib.metadata.distributions(name="jaxlib")]
# Newer ones do not know this flag, and end the process.
if all([int(part) for part in version.split(".")[:2]] < [0, 11] for version in _JAXLIB):
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _FLAGS)
# A compilation makes millions of objects; garbage is collected after each 700 of them by default.
gc.set_threshold(10_000)
# Without it JAX computes in float32 while the variables still say float64.
os.environ["JAX_ENABLE_X64"] = "1"

import pytest  # noqa: E402

BACKEND = os.environ["KERAS_BACKEND"]
ON_JAX = BACKEND == "jax"

if BACKEND == "torch":  # which does not let NumPy read tensors that have a gradient
    import torch

    _to_array = torch.Tensor.__array__
    torch.Tensor.__array__ = lambda tensor, *args, **kwargs: _to_array(
        tensor.detach(), *args, **kwargs
    )


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("float64") is None:
        return
    slow = pytest.mark.slow
    later = metafunc.definition.get_closest_marker("slow_elsewhere") is not None
    single = pytest.param("float32", marks=[slow] if ON_JAX else [])
    double = pytest.param("float64", marks=[slow] if later else [])
    metafunc.parametrize("floatx", [single, double], indirect=True)


def pytest_collection_finish():
    """Each further garbage collection leaves out what was imported: millions of objects."""
    gc.freeze()


def pytest_ignore_collect(collection_path):
    """On another backend, files without a marked test need not be imported."""
    if BACKEND != "tensorflow" and collection_path.match("test_*.py"):
        return "both_backends" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if BACKEND == "tensorflow":
        return
    marks = {item: _closest_marker(item, "both_backends") for item in items}
    config.hook.pytest_deselected(items=[item for item in items if marks[item] is None])
    items[:] = [item for item in items if marks[item] is not None]
    for item in items:
        if marks[item].kwargs.get("slow") or item.get_closest_marker("slow_elsewhere") is not None:
            item.add_marker(pytest.mark.slow)


def _closest_marker(item, name):
    """As `get_closest_marker`, which prefers the function's markers to those of its parameters."""
    own = [marker for marker in item.own_markers if marker.name == name]
    return own[-1] if own else item.get_closest_marker(name)


@pytest.fixture(autouse=True)
def floatx(request):
    """Keras' floatx during the test: "float32", or the parameter of the marker `float64`."""
    name = getattr(request, "param", "float32")
    _set_floatx(name)
    yield name
    _set_floatx("float32")


def _set_floatx(name):
    import keras  # here: the process that only distributes the tests is to start at once

    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
