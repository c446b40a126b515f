"""TrellisNet, TCN and Lattice Recurrent Unit sequence models for Keras 3."""

__version__ = "0.1.0"

# Importing them registers their classes, so that `keras.saving.load_model` finds every one.
from trellis_keras import (
    data,
    export,
    forecasting,
    interop,
    kernels,
    layers,
    models,
    scoring,
    theorem1,
    torch_weights,
    training,
    zoo,
)

__all__ = [
    "data",
    "export",
    "forecasting",
    "interop",
    "kernels",
    "layers",
    "models",
    "scoring",
    "theorem1",
    "torch_weights",
    "training",
    "zoo",
]
