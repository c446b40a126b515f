"""Runs every test marked `both_backends` or `float64` again, in a child process for each setting.

`pytest -m slow` runs this file's slow half: the marked tests that are slow themselves.
"""

import pytest
from backends import SETTINGS, run_script


@pytest.mark.parametrize("setting", SETTINGS)
def test_marked_tests_hold_elsewhere(setting, children):
    child, output = children[setting]
    assert child.wait() == 0, f"{setting}:\n{output.read_text()[-20000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_marked_slow_tests_hold_elsewhere(setting, slow_children):
    child, output = slow_children[setting]
    assert child.wait() == 0, f"{setting}:\n{output.read_text()[-20000:]}"


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
