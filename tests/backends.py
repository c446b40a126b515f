"""Child processes for tests that need another Keras backend, another floatx or a clean interpreter.

A process has one backend and one floatx, so a test that must hold on both backends, or in
float64, runs again in a child process. Nothing has to be done for that beyond marking it:

    pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

* no mark: TensorFlow, float32, in the process of `pytest` itself;
* `both_backends`: once more on JAX, in float32;
* `float64`: once more with floatx float64, on TensorFlow;
* both: also on JAX in float64, and there in float32 with `pytest -m slow` only;
* `slow_elsewhere` beside them: those repetitions are for `pytest -m slow`. For what takes long to
  compile, where another test of the same code is repeated in each run.

`tests/test_backends.py` starts the child processes and shows their output where one fails. While
writing a test, run it directly:

    KERAS_BACKEND=jax TRELLIS_TEST_FLOATX=float64 pytest tests/training/test_optimizers.py

A test that needs a process of its own (one that is killed, one where tensorflow must not be
there) calls `run_script`.
"""

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a child process must not inherit: it decides these itself.
_DECIDED_HERE = ("KERAS_BACKEND", "TRELLIS_TEST_FLOATX", "JAX_ENABLE_X64", "PYTEST_ADDOPTS")


def child_environment(backend="tensorflow", floatx="float32", **extra):
    """Returns the environment of a child process with this backend and floatx.

    Args:
        backend: `"tensorflow"` or `"jax"`.
        floatx: `"float32"` or `"float64"`; on JAX the latter also sets `JAX_ENABLE_X64`, without
            which JAX computes in float32 while the variables still say float64.
        **extra: further environment variables.
    """
    if backend not in ("tensorflow", "jax"):
        raise ValueError(f"`backend` must be 'tensorflow' or 'jax'. Received: {backend!r}")
    if floatx not in ("float32", "float64"):
        raise ValueError(f"`floatx` must be 'float32' or 'float64'. Received: {floatx!r}")
    environment = {k: v for k, v in os.environ.items() if k not in _DECIDED_HERE}
    environment |= {
        "KERAS_BACKEND": backend,
        "TRELLIS_TEST_FLOATX": floatx,
        "JAX_ENABLE_X64": "1" if floatx == "float64" else "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return environment | {k: str(v) for k, v in extra.items()}


def start_tests(marks, output, backend="tensorflow", floatx="float32"):
    """Starts a child `pytest` on all tests with these marks.

    Args:
        marks: the `-m` expression that selects the tests.
        output: the file, open for writing, that takes the child's output.
        backend, floatx: as in `child_environment`.

    Returns:
        The `subprocess.Popen`.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=5", "--tb=short", "-m", marks]
    command += ["--durations=15", "-p", "no:cacheprovider", "tests"]
    environment = child_environment(backend, floatx)
    # Behind the tests that started it, so that no processor is left without work at the end.
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=functools.partial(os.nice, 10),
    )


_QUICK = "not slow and not slow_elsewhere"
# {name: (backend, floatx, marks of the tests that run there, those of them in a usual run)}. What
# holds on JAX in float64 is repeated there in float32 by `pytest -m slow`.
SETTINGS = {
    "tensorflow-float64": ("tensorflow", "float64", "float64", _QUICK),
    "jax-float32": ("jax", "float32", "both_backends", f"{_QUICK} and not float64"),
    "jax-float64": ("jax", "float64", "both_backends and float64", _QUICK),
}


@contextlib.contextmanager
def running_children(folder, slow):
    """Yields {setting: (process, file of its output)}: a child `pytest` for each of SETTINGS.

    Args:
        folder: where their output goes.
        slow: whether the children run what a usual run leaves out, instead of the rest.
    """
    children = {}
    for setting, (backend, floatx, marks, usual) in SETTINGS.items():
        which = f"not ({usual})" if slow else usual
        with open(folder / setting, "w") as output:
            child = start_tests(f"({marks}) and ({which})", output, backend, floatx)
        children[setting] = child, folder / setting
    try:
        yield children
    finally:
        for child, _ in children.values():
            child.kill()
            child.wait()


def run_script(
    source,
    *arguments,
    backend="tensorflow",
    floatx="float32",
    block=(),
    check=True,
    timeout=600,
    **environment,
):
    """Runs Python source in a child process.

    The script starts with floatx set, and with the modules in `block` impossible to import.

    Args:
        source: the Python source text.
        *arguments: seen by the script as `sys.argv[1:]`.
        backend, floatx: as in `child_environment`.
        block: names of modules that the script must not be able to import, such as
            `("tensorflow",)`.
        check: whether an exit status other than 0 fails the test, with the child's output.
        timeout: seconds until the child is ended.
        **environment: further environment variables.

    Returns:
        The child's standard output, or with `check=False` the `subprocess.CompletedProcess`.
    """
    command, variables = script_command(
        source, *arguments, backend=backend, floatx=floatx, block=block, **environment
    )
    return _run(command, variables, timeout, check)


def run_module(module, *arguments, timeout=600):
    """Runs `python -m module` in the root of the repository: a `subprocess.CompletedProcess`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return _run(command, child_environment(), timeout, check=False)


def script_command(
    source, *arguments, backend="tensorflow", floatx="float32", block=(), **environment
):
    """Returns `(command, environment)` for a script, for tests that start and kill it themselves.

    Args: as in `run_script`.
    """
    prologue = f"import sys\nfor _name in {tuple(block)!r}: sys.modules[_name] = None\n"
    if floatx != "float32":
        prologue += f"import keras\nkeras.config.set_floatx({floatx!r})\n"
    command = [sys.executable, "-c", prologue + source, *map(str, arguments)]
    return command, child_environment(backend, floatx, **environment)


def _run(command, environment, timeout, check=True):
    done = subprocess.run(
        command, env=environment, cwd=ROOT, timeout=timeout, capture_output=True, text=True
    )
    if not check:
        return done
    if done.returncode:
        settings = {name: environment[name] for name in ("KERAS_BACKEND", "TRELLIS_TEST_FLOATX")}
        raise AssertionError(
            f"The child process {settings} ended with status {done.returncode}.\n"
            f"--- its output\n{done.stdout[-12000:]}\n--- its errors\n{done.stderr[-6000:]}"
        )
    return done.stdout
