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


def imported(source, package):
    """Names of the modules of the package that a source imports, lazily or not.

    Args:
        source: The text of a module.
        package: Its package, such as "trellis_keras.layers".
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: -node.level + 1 or None], *base.split(".")])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def upward(module, source):
    """Names that a module imports from its own height or above, except from its own package."""
    own = module.split("/")[0]
    package = ".".join(["trellis_keras", *module.split("/")[:-1]])
    parts = (name.split(".") for name in imported(source, package))
    theirs = {name[1] for name in parts if name[0] == "trellis_keras" and len(name) > 1}
    return sorted(t for t in theirs - {own} if t in HEIGHT and HEIGHT[t] >= HEIGHT[own])


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_point_down(module):
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert module.split("/")[0] in HEIGHT, "a new part of the package: give it a level"
    assert not upward(module, source)


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.split("/")[0] in ("kernels", "layers", "models")]
)
def test_nets_import_tensorflow_in_modules_of_its_own_only(module):
    names = imported((PACKAGE / f"{module}.py").read_text(encoding="utf-8"), "trellis_keras")
    uses = any(name.split(".")[0] == "tensorflow" for name in names)
    assert not uses or module.endswith("_tf")


def test_nothing_imports_the_tools():
    for module in MODULES:
        names = imported((PACKAGE / f"{module}.py").read_text(encoding="utf-8"), "trellis_keras")
        assert not [
            name for name in names if name.split(".")[0] in ("tools", "tests", "benchmarks")
        ]
