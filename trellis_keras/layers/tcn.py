"""Temporal convolutional networks: a stack of residual blocks."""

import keras
import numpy as np
from keras import ops

from trellis_keras.kernels import cone
from trellis_keras.kernels.convolution import gather
from trellis_keras.layers import base, streaming
from trellis_keras.layers.base import FrozenPartsMixin, OutputLengthMixin, last_step
from trellis_keras.layers.tcn_block import (
    CONVOLUTIONS,
    Positions,
    Steps,
    TCNBlock,
    checked_stream,
    default_kernel,
    default_shortcut,
    initializer_config,
    plan,
    shared_config,
)


@keras.saving.register_keras_serializable("trellis_keras")
class TCN(FrozenPartsMixin, OutputLengthMixin, streaming.StreamingMixin, keras.layers.Layer):
    """Temporal convolutional network: a stack of `TCNBlock`s (Bai et al. 2018, section 3).

    The block i = 1..n has the dilation 2^(i-1) unless others are given, so the stack sees
    `receptive_field` = 1 + 2 (kernel_size - 1) (2^n - 1) steps. It is causal: output t depends on
    inputs up to t only. Where the last outputs alone are wanted, each convolution computes only
    what these depend on (`kernels.cone`).

    Args:
        filters: Channels of the blocks: one number, or a list with one per block.
        kernel_size: Number of taps of every convolution, at least 2.
        depth: Number of blocks n, of dilations 1, 2, 4, ... Default: that of `dilations`.
        dilations: List of the blocks' dilations, in place of `depth`.
        dropout, dropout_kind, weight_norm, activation, normalization, residual: See `TCNBlock`.
        skip_connections: Whether the output is the sum of all blocks' branches (as in WaveNet)
            and not that of the last block. The blocks must be of one width.
        return_sequences: Whether all steps are returned, or the last one only: with a mask, the
            last valid one of each row.
        output_length: How many of the last outputs are wanted. Default: all.
        kernel_initializer, bias_initializer, shortcut_initializer, kernel_regularizer: See
            `TCNBlock`.
        seed: Integer seed.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time). Masked steps are zero before each convolution.
        output_length: Overrides the constructor's for this call. (A mask that Keras passes on to
            the next layer has the constructor's.)

    Returns:
        Tensor (batch, time, filters); without `return_sequences` (batch, filters). Outputs of
        masked steps, and of rows without a valid one, are zero.

    Raises:
        ValueError: Arguments out of range, or inputs shorter than a dilation or than
            `output_length`.

    For users of `keras-tcn`: `nb_filters` is `filters`, `dropout_rate` is `dropout` with
    `dropout_kind="spatial"`, `use_skip_connections` is `skip_connections`, `use_weight_norm` is
    `weight_norm`, `use_layer_norm` is `normalization="layer"`. `nb_stacks=n` is
    `dilations=n * [1, 2, 4, ...]`. Batch normalisation is left out, as its statistics would mix
    later steps into earlier ones. For `go_backwards` flip the input, `ops.flip(x, axis=1)`; for
    `padding="same"` add a second TCN on the flipped input, as in a bidirectional RNN. In place of
    `return_state` and `stateful` there is the cache, see `layers.streaming`.

    Example:

    >>> layer = TCN(8, kernel_size=3, depth=4)
    >>> layer(np.zeros((2, 20, 3), "float32")).shape
    (2, 20, 8)
    >>> layer.receptive_field
    61
    """

    def __init__(
        self,
        filters,
        kernel_size,
        depth=None,
        *,
        dilations=None,
        dropout=0.0,
        dropout_kind="element",
        weight_norm=True,
        activation="relu",
        normalization=None,
        residual=True,
        skip_connections=False,
        return_sequences=True,
        output_length=None,
        kernel_initializer=None,
        bias_initializer="zeros",
        shortcut_initializer=None,
        kernel_regularizer=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        dilations = _dilations(depth, dilations)
        widths = _widths(filters, len(dilations))
        if skip_connections and len(set(widths)) > 1:
            raise ValueError(
                "`skip_connections` add the blocks' branches, so all `filters` must be equal. "
                f"Received: filters={filters}"
            )
        self._init_output_length(return_sequences, output_length)
        self.filters = filters
        self.kernel_size = kernel_size
        self.dilations = dilations
        self.skip_connections = skip_connections
        self.kernel_initializer = default_kernel(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.shortcut_initializer = default_shortcut(shortcut_initializer)
        self.seed = seed
        self.supports_masking = True
        self.blocks = [
            TCNBlock(
                width,
                kernel_size,
                dilation,
                dropout=dropout,
                dropout_kind=dropout_kind,
                weight_norm=weight_norm,
                activation=activation,
                normalization=normalization,
                residual=residual,
                kernel_initializer=base.seeded(self.kernel_initializer, seed, i, 0),
                bias_initializer=base.seeded(self.bias_initializer, seed, i, 1),
                shortcut_initializer=base.seeded(self.shortcut_initializer, seed, i, 2),
                kernel_regularizer=kernel_regularizer,
                seed=base.sub_seed(seed, i, 3),
                dtype=self.dtype_policy,
                name=f"block_{i + 1}",
            )
            for i, (width, dilation) in enumerate(zip(widths, dilations, strict=True))
        ]

    @property
    def depth(self):
        """Number of blocks."""
        return len(self.blocks)

    @property
    def receptive_field(self):
        """Number of inputs, the current one included, that an output depends on."""
        return 1 + sum(block.receptive_field - 1 for block in self.blocks)

    def build(self, input_shape):
        self.input_spec = base.sequence_spec(self, input_shape)
        shape = (None, None, input_shape[-1])
        for block in self.blocks:
            block.build(shape)
            shape = block.compute_output_shape(shape)

    def call(self, inputs, training=False, mask=None, output_length=None):
        self._check_time(inputs.shape[1], output_length)
        kept = self._output_steps(output_length)
        # The last valid step of a masked row can be any one.
        any_last = mask is not None and not self.return_sequences
        levels = self._plan(inputs.shape[1], None if any_last else kept)
        x = inputs
        if levels.time is not None:
            x = gather(x, cone.read(levels.positions[0], np.arange(levels.time)))
        branches = []
        for i, block in enumerate(self.blocks):
            x, z = block.apply(x, Positions(block, levels, 1 + i * CONVOLUTIONS, mask), training)
            branches.append(z)
        y = self._output(x, branches, kept if kept is not None and not any_last else None)
        if self.return_sequences:
            return y
        return last_step([y], None, mask)[0] if any_last else y[:, -1]

    def _plan(self, time, kept):
        reads = tuple(b.offsets for b in self.blocks for _ in range(CONVOLUTIONS))
        also = range(CONVOLUTIONS, len(reads), CONVOLUTIONS) if self.skip_connections else ()
        return plan(time, reads, kept, tuple(also))

    def _output(self, last, branches, kept):
        """The last block's output or the sum of the branches, at the last `kept` positions."""
        last_positions = [last] if not self.skip_connections else branches
        return sum(y if kept is None else y[:, -kept:] for y in last_positions)

    # Streaming

    def initial_cache(self, batch_size):
        """Returns the cache before the first step: a list of the blocks' caches.

        Raises:
            ValueError: The layer is not built.

        Example:

        >>> layer = TCN(8, kernel_size=3, depth=4)
        >>> layer.build((None, None, 3))
        >>> y, cache = layer.step(np.zeros((2, 3), "float32"), layer.initial_cache(2))
        >>> tuple(y.shape)
        (2, 8)
        """
        streaming.check_built(self)
        return [block.initial_cache(batch_size) for block in self.blocks]

    def step(self, x, cache):
        """Advances one step: x (batch, channels) to (y (batch, filters), cache).

        Raises:
            ValueError: The layer is not built, x has another shape, or the cache is of another
                batch size or another layer.
        """
        y, cache = self.prefill(ops.expand_dims(x, 1), cache)
        return y[:, 0], cache

    def prefill(self, x, cache=None):
        """Advances all steps of x (batch, time, channels), of any length, by one forward pass.

        Raises:
            ValueError: As `step`.
        """
        x, cache = checked_stream(self, x, cache)
        following, branches = [], []
        for block, of_block in zip(self.blocks, cache, strict=True):
            seen = Steps(block, of_block, ops.shape(x)[1])
            x, z = block.apply(x, seen)
            following.append(seen.next)
            branches.append(z)
        return self._output(x, branches, None), following

    def cache_shapes(self, batch):
        return [block.cache_shapes(batch) for block in self.blocks]

    @property
    def input_channels(self):
        return self.blocks[0].input_channels

    # Keras

    def compute_mask(self, inputs, mask=None):
        return self._output_mask(mask)

    def compute_output_shape(self, input_shape, output_length=None):
        steps = self._time_axis(input_shape[1], output_length)
        return (input_shape[0], *steps, self.blocks[-1].filters)

    def compute_output_spec(self, inputs, training=False, mask=None, output_length=None):
        self._check_time(inputs.shape[1], output_length)
        shape = self.compute_output_shape(inputs.shape, output_length)
        return keras.KerasTensor(shape, self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "filters": self.filters,
            "depth": None,
            "dilations": self.dilations,
            "skip_connections": self.skip_connections,
            "return_sequences": self.return_sequences,
            "output_length": self.output_length,
            **shared_config(self.blocks[0]),
            **initializer_config(self),
        }


def _dilations(depth, dilations):
    if (depth is None) == (dilations is None):
        raise ValueError(
            "Give either `depth` (dilations 1, 2, 4, ...) or `dilations`. "
            f"Received: depth={depth}, dilations={dilations}"
        )
    if dilations is None:
        base.check_positive(depth=depth)
        return [2**i for i in range(depth)]
    return base.dilation_cycle(dilations)


def _widths(filters, depth):
    widths = list(filters) if isinstance(filters, (list, tuple)) else [filters] * depth
    if len(widths) != depth:
        raise ValueError(
            f"`filters` must be one number or one per block, of which there are {depth}. "
            f"Received: filters={filters}"
        )
    return widths
