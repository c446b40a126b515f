"""Runs every test marked `both_backends` or `float64` again, in a child process for each setting.

`pytest -m slow` runs this file's slow half: the marked tests that are slow themselves.
"""

import pytest
from backends import run_script, run_tests

SETTINGS = {
    "tensorflow-float64": ("tensorflow", "float64", "float64"),
    "jax-float32": ("jax", "float32", "both_backends"),
    "jax-float64": ("jax", "float64", "both_backends and float64"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_marked_tests_hold_elsewhere(setting):
    backend, floatx, marks = SETTINGS[setting]
    run_tests(backend=backend, floatx=floatx, marks=f"{marks} and not slow")


@pytest.mark.slow
def test_marked_slow_tests_hold_on_jax():
    run_tests(backend="jax", marks="both_backends and slow", timeout=7200)


def test_the_settings_reach_the_child():
    source = (
        "import sys, keras, jax\n"
        "print(keras.backend.backend(), keras.config.floatx(), jax.numpy.ones(1, 'float64').dtype)"
    )
    assert run_script(source, backend="jax", floatx="float64").split() == ["jax", *["float64"] * 2]


def test_blocked_modules_cannot_be_imported():
    done = run_script("import tensorflow", backend="jax", block=("tensorflow",), check=False)
    assert done.returncode and "tensorflow" in done.stderr


def test_a_failing_child_shows_its_output():
    with pytest.raises(AssertionError, match="seen from outside"):
        run_script("raise SystemExit('seen from outside')")
