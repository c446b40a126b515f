"""The package knows nothing of the packages above it."""

import ast
import pathlib
import sys

import pytest

import keras_streams

MODULES = sorted(pathlib.Path(keras_streams.__file__).parent.glob("**/*.py"))
ALLOWED = {"keras_streams", "keras", "numpy", "tensorflow", "jax", "onnx", "onnxruntime", "tf2onnx"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_it_imports_keras_and_backends_only(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    roots = {name.split(".")[0] for name in names}
    assert roots - set(sys.stdlib_module_names) <= ALLOWED
    is_private = any(name.startswith("keras.src") for name in names)
    assert is_private == (path.stem == "_keras_internals")
