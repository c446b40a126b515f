"""Type aliases of the public signatures."""

from collections.abc import Callable
from typing import Any

import keras

from keras_streams.types import Cache, Shape, Tensor

__all__ = ["Cache", "Constraint", "Initializer", "Logs", "Regularizer", "Shape", "Tensor"]

# A dict of metrics that Keras passes to callbacks.
Logs = Any

Initializer = str | dict | keras.initializers.Initializer | Callable | None
Regularizer = str | dict | keras.regularizers.Regularizer | Callable | None
Constraint = str | dict | keras.constraints.Constraint | Callable | None
