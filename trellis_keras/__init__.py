"""TrellisNet, TCN and Lattice Recurrent Unit sequence models for Keras 3."""

import importlib
import importlib.util

from trellis_keras.startup import hidden_logs

__version__ = "0.1.0"

with hidden_logs():
    import keras  # noqa: F401

# These imports register all classes with `keras.saving.load_model`.
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

# The papers' models and runs may be missing from a build.
if importlib.util.find_spec(f"{__name__}.zoo") is not None:
    importlib.import_module(f"{__name__}.zoo")
    __all__.append("zoo")
