"""Functions of many time steps, computed block by block.

For softmaxes over large vocabularies, whose logits do not fit in memory for all steps at once.
Time is the second-to-last axis. A block contains all rows of the axes before it, so every device
has work in every block if the batch is distributed.
"""

from collections.abc import Callable, Sequence

import keras
from keras import ops

from trellis_keras.kernels.scan import scan
from trellis_keras.types import Tensor


def map_blocks(
    function: Callable, steps: int | Tensor, tensors: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """Returns `function(*tensors, *weights)`, computed for at most `steps` time steps at once.

    The gradient recomputes each block instead of keeping intermediate results.

    Args:
        function: Callable of tensors (..., channels) and the weights that treats each position
            separately and returns a tensor (..., channels).
        steps: Positive integer, or on TensorFlow a tensor.
        tensors: Tensors (..., time, channels).
        weights: Tensors that every block needs whole.
    """
    blocks = _Blocks(tensors[0], steps)
    if isinstance(blocks.number, int) and blocks.number == 1:
        return function(*tensors, *weights)
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in tensors]
    has_gradient = list(map(keras.backend.is_float_dtype, dtypes))

    def step(carry, block):
        def differentiable(*inputs):
            inputs = iter(inputs)
            merged = [next(inputs) if f else x for f, x in zip(has_gradient, block, strict=True)]
            return function(*merged, *inputs)

        inputs = [x for f, x in zip(has_gradient, block, strict=True) if f]
        return carry, [keras.remat(differentiable)(*inputs, *weights)]

    _, (outputs,) = scan(step, 0, [blocks.cut(x) for x in tensors])
    return blocks.join(outputs)


def steps_within(limit: int, x: Tensor, size: int) -> int | Tensor:
    """Returns how many time steps of x (..., time, channels) to compute at once, at least one.

    Args:
        limit: Positive integer, most numbers in memory.
        x: Tensor.
        size: Positive integer, numbers per time step of one row.

    Returns:
        Integer, or a tensor if the number of rows is unknown.
    """
    steps = limit // size
    for rows in ops.shape(x)[:-2]:
        steps = steps // rows
    return max(1, steps) if isinstance(steps, int) else ops.maximum(1, steps)


class _Blocks:
    """Splits tensors (..., time, channels) with the same leading axes into equal blocks."""

    def __init__(self, like, longest):
        *self.leading, self.time, _ = ops.shape(like)
        self.number = -(-self.time // longest)
        # Not `longest`, with which the last block may be nearly all padding.
        self.steps = -(-self.time // self.number)

    def cut(self, x):
        """(..., time, channels) -> (blocks, rows * steps, channels), padded with zeros."""
        channels = x.shape[-1]
        x = ops.reshape(x, (-1, self.time, channels))
        missing = self.number * self.steps - self.time
        padding = ops.zeros((ops.shape(x)[0], missing, channels), dtype=x.dtype)
        x = ops.concatenate([x, padding], axis=1)
        x = ops.reshape(x, (-1, self.number, self.steps, channels))
        return ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (self.number, -1, channels))

    def join(self, blocks):
        """(blocks, rows * steps, channels) -> (..., time, channels)."""
        channels = blocks.shape[-1]
        x = ops.reshape(blocks, (self.number, -1, self.steps, channels))
        x = ops.transpose(x, (1, 0, 2, 3))
        x = ops.reshape(x, (-1, self.number * self.steps, channels))
        return ops.reshape(x[:, : self.time], (*self.leading, self.time, channels))
