"""Child processes, for tests that need another backend or a process that they may kill."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What a child process must not inherit: it decides these itself.
_DECIDED_HERE = ("KERAS_BACKEND", "JAX_ENABLE_X64", "PYTEST_ADDOPTS")


def child_environment(backend="tensorflow", **extra):
    """Returns the environment of a child process with this backend, in float32, and variables."""
    environment = {k: v for k, v in os.environ.items() if k not in _DECIDED_HERE}
    environment |= {
        "KERAS_BACKEND": backend,
        "JAX_ENABLE_X64": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return environment | {k: str(v) for k, v in extra.items()}


def run_script(
    source, *arguments, backend="tensorflow", block=(), check=True, timeout=600, **environment
):
    """Runs Python source in a child process, and returns its standard output.

    The modules in `block` are impossible to import there. With `check=False` an exit status other
    than 0 fails no test: returns a `subprocess.CompletedProcess`.
    """
    prologue = f"import sys\nfor _name in {tuple(block)!r}: sys.modules[_name] = None\n"
    command = [sys.executable, "-c", prologue + source, *map(str, arguments)]
    return _run(command, child_environment(backend, **environment), timeout, check)


def run_module(module, *arguments, backend="tensorflow", timeout=600):
    """Runs `python -m module` in the root of the repository: a `subprocess.CompletedProcess`."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return _run(command, child_environment(backend), timeout, check=False)


def _run(command, environment, timeout, check):
    done = subprocess.run(
        command, env=environment, cwd=ROOT, timeout=timeout, capture_output=True, text=True
    )
    if not check:
        return done
    if done.returncode:
        settings = environment["KERAS_BACKEND"]
        raise AssertionError(
            f"The child process {settings} ended with status {done.returncode}.\n"
            f"--- its output\n{done.stdout[-12000:]}\n--- its errors\n{done.stderr[-6000:]}"
        )
    return done.stdout
