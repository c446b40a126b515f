"""Type aliases of the public signatures."""

from collections.abc import Sequence
from typing import Any

# A tensor of the current backend, a NumPy array, or a symbolic tensor.
Tensor = Any
# Nested lists and dictionaries of tensors, with the batch as their first axis.
Cache = Any
# None stands for any size.
Shape = Sequence[int | None]
