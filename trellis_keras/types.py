"""Type aliases of the public signatures."""

from collections.abc import Callable
from typing import Any

import keras

from keras_streams.types import Cache, Shape, Tensor

__all__ = ["Cache", "Initializer", "Logs", "Regularizer", "Shape", "Shapes", "Specs", "Tensor"]

# A dict of metrics that Keras passes to callbacks.
Logs = Any

Initializer = str | dict | keras.initializers.Initializer | Callable | None
Regularizer = str | dict | keras.regularizers.Regularizer | Callable | None

# Of a layer with one output or several.
Shapes = Shape | tuple[Shape, ...]
Specs = keras.KerasTensor | tuple[keras.KerasTensor, ...]
