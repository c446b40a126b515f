"""Imports point one way: kernels <- layers <- models <- data, training <- export <- zoo."""

import ast
import pathlib

import pytest

import trellis_keras

PACKAGE = pathlib.Path(trellis_keras.__file__).parent
# The first part of a module's name under `trellis_keras`, from the bottom up. A module may import
# from its own level's package and from lower levels, at run time and inside functions.
LEVELS = [
    {"_keras_internals", "_tensorflow", "files", "startup", "terminal", "types"},
    {"jobs", "kernels", "saved_files"},
    {"layers"},
    {"models"},
    {"data", "training"},
    {"theorem1", "export", "interop", "scoring", "torch_weights"},
    {"zoo"},
    {"__main__"},
]
HEIGHT = {name: height for height, level in enumerate(LEVELS) for name in level}
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")
)


def imported(module):
    """Names of all that a module imports, lazily or not."""
    package = ["trellis_keras", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: 1 - node.level or None], *base.split(".")])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


IMPORTS = {module: set(imported(module)) for module in MODULES}


def upward(module):
    """Names that a module imports from its own height or above, except from its own package."""
    own = module.split("/")[0]
    parts = (name.split(".") for name in IMPORTS[module])
    theirs = {name[1] for name in parts if name[0] == "trellis_keras" and len(name) > 1}
    return sorted(t for t in theirs - {own} if t in HEIGHT and HEIGHT[t] >= HEIGHT[own])


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_point_down(module):
    assert module.split("/")[0] in HEIGHT, "a new part of the package: give it a level"
    assert not upward(module)


def modules_that_import(*roots):
    """Of the modules, those that import one of these packages."""
    return {m for m in MODULES for name in IMPORTS[m] if f"{name}.".startswith(roots)}


def test_nets_import_tensorflow_in_modules_of_its_own_only():
    found = modules_that_import("tensorflow.")
    nets = [m for m in found if m.split("/")[0] in ("kernels", "layers", "models")]
    assert nets and all(module.endswith("_tf") for module in nets)


def test_nothing_imports_the_tools():
    assert not modules_that_import("tools.", "tests.", "benchmarks.")


def test_private_names_of_keras_are_used_in_one_module_only():
    """Which other tests exercise."""
    assert modules_that_import("keras.src.") == {"_keras_internals"}
