"""The private names of Keras that the package uses exist in this version of Keras."""

import ast
import io
import pathlib

import keras
import numpy as np
import pytest

import trellis_keras
from trellis_keras import _keras_internals

PACKAGE = pathlib.Path(trellis_keras.__file__).parent


def test_no_other_module_imports_private_modules():
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_keras_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            modules = [getattr(node, "module", None) or "", *names]
            assert not [name for name in modules if name.startswith("keras.src")], path


def compiled_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=1)])
    model.add(keras.layers.Dense(2))
    model.compile("sgd", "mse")
    return model


def test_layers_and_variables():
    model = compiled_model()
    dropout, dense = model.layers
    assert _keras_internals.all_layers(model) == [model, *model._layers]
    assert {dropout, dense} <= set(_keras_internals.direct_layers(model))
    assert _keras_internals.own_trainable_variables(model) == []
    assert len(_keras_internals.own_trainable_variables(dense)) == 2
    assert _keras_internals.seed_generators(dropout) == [dropout.seed_generator]


def test_seeded_generator():
    generator = keras.random.SeedGenerator()
    _keras_internals.mark_as_seeded(generator, 3)
    assert generator.get_config()["seed"] == 3


def test_fit_starts_at_a_callbacks_epoch():
    class Start(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            _keras_internals.set_initial_epoch(self.model, 2)

    x = np.zeros((2, 3), "float32")
    history = compiled_model().fit(x, x[:, :2], epochs=4, verbose=0, callbacks=[Start()])
    assert history.epoch == [2, 3]


def test_loss_dtype():
    model = compiled_model()
    _keras_internals.set_loss_dtype(model, "float64")
    assert model._compile_loss.dtype == "float64"


def test_saves_to_memory():
    _keras_internals.save_to_file(compiled_model(), file := io.BytesIO())
    assert file.getvalue().startswith(b"PK")


@pytest.mark.parametrize("name", ["_compile_loss", "_compile_metrics", "_loss_tracker"])
def test_members_of_a_compiled_model(name):
    assert hasattr(compiled_model(), name)


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (keras.Model, ["_symbolic_build"]),
        (
            keras.optimizers.Optimizer,
            ["_clip_gradients", "_get_variable_index", "_use_weight_decay"],
        ),
        (keras.optimizers.SGD(), ["_trainable_variables"]),
    ],
    ids=["Model", "Optimizer", "built optimizer"],
)
def test_members_that_subclasses_use(owner, names):
    assert all(hasattr(owner, name) for name in names)
