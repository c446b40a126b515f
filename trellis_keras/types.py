"""Type aliases of the public signatures."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

# A tensor of the current backend, a NumPy array, or a symbolic tensor.
Tensor = Any
# Nested lists and dictionaries of tensors, with the batch as their first axis.
Cache = Any
# A dict of metrics that Keras passes to callbacks.
Logs = Any
# None stands for any size.
Shape = Sequence[int | None]

Initializer = str | dict | keras.initializers.Initializer | Callable | None
Regularizer = str | dict | keras.regularizers.Regularizer | Callable | None
Constraint = str | dict | keras.constraints.Constraint | Callable | None
