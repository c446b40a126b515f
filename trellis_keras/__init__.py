"""TrellisNet, TCN and Lattice Recurrent Unit sequence models for Keras 3."""

import importlib
import importlib.util

__version__ = "0.1.0"

# Importing them registers their classes, so that `keras.saving.load_model` finds every one.
from trellis_keras import (
    data,
    export,
    interop,
    kernels,
    layers,
    models,
    scoring,
    theorem1,
    torch_weights,
    training,
)

__all__ = [
    "data",
    "export",
    "interop",
    "kernels",
    "layers",
    "models",
    "scoring",
    "theorem1",
    "torch_weights",
    "training",
]

# What is built on the library, which a build of the library alone leaves out.
for _name in ("forecasting", "zoo"):
    if importlib.util.find_spec(f"{__name__}.{_name}") is not None:
        importlib.import_module(f"{__name__}.{_name}")
        __all__.append(_name)
