"""The past states of every level in a streaming cache.

Level i reads the level below it up to some dilations earlier. Levels with the same dilation share a
tensor (batch, levels, steps, units) of the states below them, newest step last. Each step shifts it
by one: copying costs no more than writing at an index (for which XLA would also copy), and there is
no index to carry.
"""

from collections.abc import Sequence

import numpy as np
from keras import ops

from trellis_keras.types import Tensor


class LevelBuffers:
    """Layout of the states below the levels: one tensor per distinct dilation, ascending.

    Args:
        dilations: Dilation of every level, from level 1 on.
    """

    def __init__(self, dilations: Sequence[int]) -> None:
        self.dilations = np.array(dilations, "int32")
        # {dilation: indices of its levels, from 0}
        self.levels = {
            int(d): np.flatnonzero(self.dilations == d) for d in np.unique(self.dilations)
        }

    def shapes(self, batch_size: int | None, reach: int, units: int) -> list[list]:
        """Returns the shapes of the buffers of a state that is read `reach` dilations back."""
        return [[batch_size, len(i), reach * d, units] for d, i in self.levels.items()]

    def earlier(self, buffers: list[Tensor], n: int) -> Tensor:
        """Returns the states below every level, `n` dilations earlier, (batch, level, units)."""
        pairs = zip(self.levels, buffers, strict=True)
        return self._join([buffer[:, :, buffer.shape[2] - n * d] for d, buffer in pairs])

    def append(self, buffers: list[Tensor], newest: Tensor) -> list[Tensor]:
        """Drops the oldest step and appends the newest, (batch, level, units)."""
        return [
            ops.concatenate([buffer[:, :, 1:], _take(newest, i, 1)[:, :, None]], axis=2)
            for buffer, i in zip(buffers, self.levels.values(), strict=True)
        ]

    def stack(self, buffers: list[Tensor]) -> Tensor:
        """Returns one tensor (level, batch, steps, units), padded before the oldest steps."""
        longest = max(buffer.shape[2] for buffer in buffers)
        widths = [[[0, 0], [0, 0], [longest - b.shape[2], 0], [0, 0]] for b in buffers]
        padded = [ops.pad(b, w) for b, w in zip(buffers, widths, strict=True)]
        return ops.moveaxis(self._join(padded), 1, 0)

    def unstack(self, stacked: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Undoes `stack`, for buffers of the shapes of `like`."""
        return [
            ops.moveaxis(_take(stacked, i, 0), 0, 1)[:, :, -old.shape[2] :]
            for i, old in zip(self.levels.values(), like, strict=True)
        ]

    def _join(self, parts):
        """Joins parts (batch, levels of a dilation, ...) along the level axis, level 1 first."""
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(list(self.levels.values())))
        return _take(ops.concatenate(parts, axis=1), order, 1)


def _take(x, levels, axis):
    """`ops.take` along the level axis, skipped if it would change nothing."""
    if len(levels) == x.shape[axis] and np.all(np.diff(levels) == 1):
        return x
    return ops.take(x, levels.astype("int32"), axis=axis)
