"""The product with a mixed-group kernel (Bai et al. 2019, Eq. 5), without its zeros."""

from collections.abc import Sequence

import numpy as np
from keras import ops

from trellis_keras.kernels.convolution import product
from trellis_keras.types import Tensor

# Mean width of the groups from which products by group are faster than one product with the zeros
# (`python -m benchmarks run mixed_group_64 mixed_group_8 mixed_group_2`).
_LEAST_WIDTH = 8


def is_worthwhile(groups: Sequence[int]) -> bool:
    """Returns whether groups of these widths are wide enough for `GroupedProduct`."""
    return sum(groups) >= _LEAST_WIDTH * len(groups)


class GroupedProduct:
    """The product of h with a mixed-group kernel, computed group by group.

    It equals the product with the whole kernel, because all other connections are zero.

    Args:
        kernel: Tensor (tap, units, blocks * units), a mixed-group kernel or some of its taps.
        past_taps: Number of past taps, which come first.
        groups: List of channel widths.
        compute_dtype: Dtype of the products.
    """

    def __init__(self, kernel: Tensor, past_taps: int, groups: Sequence[int], compute_dtype: str):
        self.taps, units, filters = kernel.shape
        self.blocks = filters // units
        self.compute_dtype = compute_dtype
        ends = np.cumsum(groups).tolist()
        self.slices = [slice(end - width, end) for width, end in zip(groups, ends, strict=True)]
        # The operands of a group: itself in the past, the group below it in the present.
        self.sources = [
            [(tap, self.slices[j]) for tap in range(past_taps)]
            + [(tap, self.slices[j - 1]) for tap in range(past_taps, self.taps) if j > 0]
            for j in range(len(groups))
        ]
        kernel = ops.reshape(kernel, (self.taps, units, self.blocks, units))
        pairs = zip(self.sources, self.slices, strict=True)
        self.matrices = [self._matrix(kernel, sources, columns) for sources, columns in pairs]

    def _matrix(self, kernel, sources, columns):
        """Returns the weights into a group, (in, blocks * width), or None."""
        parts = [kernel[tap, rows, :, columns] for tap, rows in sources]
        parts = [ops.reshape(p, (p.shape[0], p.shape[1] * p.shape[2])) for p in parts]
        return ops.concatenate(parts, axis=0) if parts else None

    def __call__(self, seen: Tensor) -> Tensor:
        """Returns (batch, positions, blocks * units).

        Args:
            seen: The concatenated operands of the taps: (batch, positions, tap * units).
        """
        seen = ops.split(seen, self.taps, axis=-1)
        by_group = []
        for sources, matrix, columns in zip(self.sources, self.matrices, self.slices, strict=True):
            if matrix is None:
                by_group.append([ops.zeros_like(seen[0][..., columns])] * self.blocks)
                continue
            operand = ops.concatenate([seen[tap][..., rows] for tap, rows in sources], axis=-1)
            # Cast here, so that in a loop over levels the gradients add up in full precision.
            a = product(operand, ops.cast(matrix, self.compute_dtype), operand.dtype)
            by_group.append(ops.split(a, self.blocks, axis=-1))
        by_block = zip(*by_group, strict=True)
        return ops.concatenate([part for block in by_block for part in block], axis=-1)
