"""Mixed-group convolutions: the sparse kernels of Theorem 1 (Bai et al. 2019, Eq. 5).

The channels of h are divided into groups, the bottom layer of an RNN first. A TrellisNet level
that advances every layer of that RNN by a step connects them so, for each block of the gates:

    past taps of Wh        group j  ->  group j          W_hh of layer j
    current tap of Wh      group j  ->  group j + 1      W_hx of layer j + 1
    current tap of Wx            x  ->  group 1          W_hx of layer 1

and has no other weights. Group j carries layer j's state of an RNN that started j - 1 levels later
than layer 1 did, so it must be zero until then: its *start level* is j. A dense kernel can have
start levels too (where training begins from an RNN, they must stay as they are).
"""

from numbers import Integral

import keras
import numpy as np
from keras import ops

from trellis_keras.kernels.convolution import apply_taps, product
from trellis_keras.layers.regularization import ConvolutionKernel

STRUCTURES = ("dense", "mixed_group")

# Groups that are narrower on average may cost more than the zeros between them. On a CPU with XLA a
# training step by group is 1.8 times faster with 64 channels a group, 1.4 times with 8, and 0.75
# times as fast with 2 (`python -m benchmarks run mixed_group_64 mixed_group_8 mixed_group_2`).
_LEAST_WIDTH = 8


@keras.saving.register_keras_serializable("trellis_keras")
class MixedGroupKernel(ConvolutionKernel):
    """A `ConvolutionKernel` with the connections of Eq. (5), and zeros elsewhere.

    It is stored with its zeros, in the shape of a dense kernel. Those are no weights: nothing
    moves them, they are in no norm and in no penalty.

    Args:
        kernel_size: Number of taps. The last tap acts on the current step.
        filters: Number of output channels, a multiple of the sum of the groups: blocks of gates,
            each with all groups side by side.
        groups: List of channel widths, the bottom group first.
        recurrent: Whether the operand is h (the groups), or x (which feeds the first group).
        **kwargs: As `ConvolutionKernel`.

    Example:

    >>> kernel = MixedGroupKernel(2, 3, groups=[1, 1, 1], recurrent=True, initializer="ones")
    >>> kernel.build((None, None, 3))
    >>> np.asarray(kernel())[0].tolist()  # the past tap
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> np.asarray(kernel())[1].tolist()  # the current one
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, kernel_size, filters, *, groups, recurrent, **kwargs):
        super().__init__(kernel_size, filters, **kwargs)
        if filters % sum(groups):
            raise ValueError(
                "`filters` must be blocks of gates, each as wide as all groups together. "
                f"Received: filters={filters}, groups={groups}"
            )
        self.groups = list(groups)
        self.recurrent = recurrent

    def connections(self, channels):
        """Which groups are connected, for an operand of so many channels.

        Returns:
            The group that an input channel feeds, (tap, in), and the group that an output channel
            belongs to, (out,), from 0. Where they are equal there is a weight.
        """
        numbered = np.repeat(np.arange(len(self.groups), dtype="int32"), self.groups)
        fed = np.full((self.kernel_size, channels), -1, "int32")
        if self.recurrent:
            fed[:-1], fed[-1] = numbered, numbered + 1
        else:
            fed[-1] = 0
        return fed, np.tile(numbered, self.filters // len(numbered))

    def apply_connections(self, kernel):
        # Compared in the graph: as a constant the mask would be as large there as the kernel.
        fed, belongs = map(ops.convert_to_tensor, self.connections(kernel.shape[1]))
        return ops.where(ops.equal(fed[..., None], belongs), kernel, ops.zeros_like(kernel))

    def count_connections(self):
        """Number of weights that are not masked."""
        fed, belongs = self.connections(self.kernel.shape[1])
        n = len(self.groups)
        fed = np.bincount(fed[(fed >= 0) & (fed < n)], minlength=n)
        return int(np.sum(fed * np.bincount(belongs, minlength=n)))

    def copy_to(self, dense):
        """Gives the weights to a dense `ConvolutionKernel` of the same shape, with their zeros."""
        kernel = self.apply_connections(ops.convert_to_tensor(self.kernel))
        if self.gain is not None:
            # Directions of zeros cannot be trained. Where there are no weights the gain is zero.
            none = ops.all(kernel == 0, axis=(0, 1))
            kernel = ops.where(none, dense.initializer(kernel.shape, dtype=kernel.dtype), kernel)
            gain = ops.convert_to_tensor(self.gain)
            dense.gain.assign(ops.where(none, ops.zeros_like(gain), gain))
        dense.kernel.assign(kernel)

    def get_config(self):
        return {**super().get_config(), "groups": self.groups, "recurrent": self.recurrent}


def splits(layer):
    """Whether a `TrellisLayer` multiplies by group (`GroupedProduct`), or with zeros in between."""
    mixed = layer.kernel_structure == "mixed_group"
    return mixed and layer.units >= _LEAST_WIDTH * len(layer.groups)


def hidden_product(layer, kernel, past_taps):
    """Returns a function (seen, dtype) that multiplies h with taps of a recurrent kernel.

    Args:
        layer: A `TrellisLayer`.
        kernel, past_taps: As in `GroupedProduct`, whose call the function is.
    """
    if splits(layer):
        return GroupedProduct(kernel, past_taps, layer.groups)
    rows = ops.reshape(kernel, (kernel.shape[0] * kernel.shape[1], kernel.shape[2]))
    return lambda seen, dtype: apply_taps(seen, ops.cast(rows, dtype))


class GroupedProduct:
    """The product of h with a mixed-group kernel, each group by itself, without the zeros.

    Args:
        kernel: Tensor (tap, units, blocks * units), a mixed-group kernel or some of its taps.
        past_taps: How many of the taps are past ones; they come first.
        groups: List of channel widths.
    """

    def __init__(self, kernel, past_taps, groups):
        taps, units, filters = kernel.shape
        self.blocks = filters // units
        ends = np.cumsum(groups).tolist()
        self.slices = [slice(end - width, end) for width, end in zip(groups, ends, strict=True)]
        self.sources = [
            [(tap, self.slices[j]) for tap in range(past_taps)]
            + [(tap, self.slices[j - 1]) for tap in range(past_taps, taps) if j > 0]
            for j in range(len(groups))
        ]
        kernel = ops.reshape(kernel, (taps, units, self.blocks, units))
        self.matrices = [
            self._matrix(kernel, *pair) for pair in zip(self.sources, self.slices, strict=True)
        ]

    def _matrix(self, kernel, sources, columns):
        """What feeds a group, one below the other: (in, blocks * width)."""
        parts = [kernel[tap, rows, :, columns] for tap, rows in sources]
        parts = [ops.reshape(p, (p.shape[0], p.shape[1] * p.shape[2])) for p in parts]
        return ops.concatenate(parts, axis=0) if parts else None

    def __call__(self, seen, dtype):
        """Returns (batch, positions, blocks * units).

        Args:
            seen: What each tap sees, a list of (batch, positions, units).
            dtype: Of the products. The matrices are cast in here, so that in a loop of levels
                their gradients add up in full precision.
        """
        by_group = []
        for sources, matrix, columns in zip(self.sources, self.matrices, self.slices, strict=True):
            if matrix is None:
                by_group.append([ops.zeros_like(seen[0][..., columns])] * self.blocks)
                continue
            operand = ops.concatenate([seen[tap][..., rows] for tap, rows in sources], axis=-1)
            a = product(operand, ops.cast(matrix, dtype))
            by_group.append(ops.split(a, self.blocks, axis=-1))
        by_block = zip(*by_group, strict=True)
        return ops.concatenate([part for block in by_block for part in block], axis=-1)


def check_arguments(units, depth, groups, kernel_structure, group_starts):
    """Checks these arguments of a `TrellisLayer`.

    Raises:
        ValueError: An unknown structure, groups that are missing, not wanted or do not sum to
            `units`, more groups than levels, start levels out of range or of the wrong number.
    """
    if kernel_structure not in STRUCTURES:
        raise ValueError(
            f"`kernel_structure` must be one of {STRUCTURES}. Received: {kernel_structure!r}"
        )
    mixed = kernel_structure == "mixed_group"
    if groups is None:
        if mixed or group_starts is not None:
            raise ValueError(
                '`kernel_structure="mixed_group"` and `group_starts` need `groups`, the channel '
                "width of each group, the bottom one first. Received: groups=None"
            )
        return
    if not mixed and group_starts is None:
        raise ValueError(
            '`groups` needs `kernel_structure="mixed_group"` or `group_starts`: without either '
            f"it would change nothing. Received: groups={groups}"
        )
    if not _are_positive(groups) or sum(groups) != units:
        raise ValueError(
            "`groups` must be a list of positive channel widths that sum to `units`. "
            f"Received: groups={groups}, units={units}"
        )
    if mixed and len(groups) > depth:
        raise ValueError(
            "x rises by one group a level, so it needs at least as many levels as there are "
            f"`groups`. Received: groups={groups}, depth={depth}"
        )
    if group_starts is None:
        return
    wanted = _are_positive(group_starts) and len(group_starts) == len(groups)
    if not wanted or max(group_starts) > depth:
        raise ValueError(
            "`group_starts` must list one level for each of the groups, from 1 to `depth`. "
            f"Received: group_starts={group_starts}, groups={groups}, depth={depth}"
        )


def _are_positive(numbers):
    return isinstance(numbers, (list, tuple)) and all(
        isinstance(n, Integral) and n >= 1 for n in numbers
    )


def receptive_field(layer):
    """Number of inputs, the current one included, that an output of a `TrellisLayer` depends on."""
    groups = np.array(layer.groups or [layer.units])
    starts = np.array(layer.group_starts or [1] * len(groups))
    mixed = layer.kernel_structure == "mixed_group"
    farthest = np.full(len(groups), -np.inf)  # steps back to the oldest x that a group has seen
    for level in range(1, layer.depth + 1):
        oldest_tap = (layer.kernel_size - 1) * layer.dilation(level)
        # The gates read the states one dilation ago even where the kernel has but one tap.
        own = farthest + max(oldest_tap, layer.dilation(level))
        if mixed:
            others = np.append(0 if layer.enters(level) else -np.inf, farthest[:-1])
        else:
            x = 0 if layer.enters(level) else -np.inf
            others = max(np.max(farthest), x) + oldest_tap
        farthest = np.where(level < starts, -np.inf, np.maximum(own, others))
    in_output = np.cumsum(groups) > layer.units - layer.output_units
    return int(max(np.max(farthest[in_output]) + 1, 0))


def lift_mask(layer):
    """Returns a dense `TrellisLayer` that computes what a mixed-group one does."""
    if layer.kernel_structure != "mixed_group":
        raise ValueError(
            '`to_dense` lifts the mask of a layer with `kernel_structure="mixed_group"`. '
            f"Received: kernel_structure={layer.kernel_structure!r}"
        )
    config = layer.get_config() | {"kernel_structure": "dense"}
    if layer.group_starts is None:
        config["groups"] = None
    dense = type(layer).from_config(config)
    if not layer.built:
        return dense
    dense.build_from_config(layer.get_build_config())
    dense.set_weights(layer.get_weights())
    layer.kernel.copy_to(dense.kernel)
    layer.recurrent_kernel.copy_to(dense.recurrent_kernel)
    if layer.stateful:
        dense.state_cache.allocate_like(layer.state_cache)
        for training in (True, False):
            # As arrays of their own: JAX gives those of a model that it computes with away.
            states = [ops.copy(state) for state in layer.state_cache.state_variables(training)]
            dense.state_cache.write(states, training)
    return dense
