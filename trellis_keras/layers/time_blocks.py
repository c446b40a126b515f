"""Sequences cut into blocks of time steps, for work whose intermediate results are large.

Time is the axis before the last. A block has all rows of the axes before it: where a batch is
spread over several devices, each of them has work in every block.
"""

from keras import ops

from trellis_keras.kernels.scan import scan


class TimeBlocks:
    """How (..., time, channels) tensors are cut into blocks of equal length.

    Args:
        like: Tensor with the axes of all that is cut, but for the channels.
        longest: Most steps of a block: an integer or (on TensorFlow) a tensor.
    """

    def __init__(self, like, longest):
        *self.leading, self.time, _ = ops.shape(like)
        self.number = -(-self.time // longest)
        # Not `longest`, which may leave a last block that is nearly all padding.
        self.steps = -(-self.time // self.number)

    @property
    def single(self):
        """Whether there is known to be one block only."""
        return isinstance(self.number, int) and self.number == 1

    def cut(self, x):
        """(..., time, channels) -> (blocks, rows * steps, channels), padded with 0."""
        channels = x.shape[-1]
        x = ops.reshape(x, (-1, self.time, channels))
        missing = self.number * self.steps - self.time
        padding = ops.zeros((ops.shape(x)[0], missing, channels), dtype=x.dtype)
        x = ops.reshape(
            ops.concatenate([x, padding], axis=1), (-1, self.number, self.steps, channels)
        )
        return ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (self.number, -1, channels))

    def join(self, blocks):
        """(blocks, rows * steps, channels) -> (..., time, channels)."""
        channels = blocks.shape[-1]
        x = ops.reshape(blocks, (self.number, -1, self.steps, channels))
        x = ops.transpose(x, (1, 0, 2, 3))
        x = ops.reshape(x, (-1, self.number * self.steps, channels))
        return ops.reshape(x[:, : self.time], (*self.leading, self.time, channels))


def over_blocks(function, *blocks):
    """Applies a function of (rows, channels) tensors to one block after the other."""
    _, (outputs,) = scan(lambda carry, now: (carry, [function(*now)]), 0, list(blocks))
    return outputs
