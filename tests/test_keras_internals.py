"""Private names of Keras are used in one module only, which other tests exercise."""

import ast
import pathlib

import trellis_keras

PACKAGE = pathlib.Path(trellis_keras.__file__).parent


def test_no_other_module_imports_private_modules():
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_keras_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            modules = [getattr(node, "module", None) or "", *names]
            assert not [name for name in modules if name.startswith("keras.src")], path
