"""Temporal convolutional networks (Bai et al. 2018): the residual block and the network."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import (
    StreamingMixin,
    check_built,
    check_causal,
    check_start,
    check_stream,
)
from trellis_keras import kernels
from trellis_keras.kernels.activations import activate
from trellis_keras.kernels.cone import Cone, locate, tap_offsets
from trellis_keras.kernels.convolution import convolve, gather, product
from trellis_keras.layers.checks import (
    check_choice,
    check_dilations,
    check_has_steps,
    check_integer,
    check_rates,
    largest_dilation,
)
from trellis_keras.layers.linear import linear
from trellis_keras.layers.regularization import ConvolutionKernel, Dropout, VariationalDropout
from trellis_keras.layers.saving import ConfigMixin, SublayersMixin
from trellis_keras.layers.seeds import seeded, sub_seed
from trellis_keras.layers.time_steps import (
    check_output_length,
    count_outputs,
    flip_time,
    last_step,
    last_steps,
    output_mask,
    resolve_mask,
    time_axis,
    zero_masked,
)
from trellis_keras.types import Cache, Initializer, Regularizer, Shape, Tensor

# Uniform in +-1/sqrt(taps * channels).
_UNIFORM = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
_NORMAL = keras.initializers.RandomNormal(stddev=0.01)
_DROPOUTS = {"element": Dropout, "spatial": VariationalDropout}
_REMOVED = {
    "bias_initializer": keras.initializers.serialize(keras.initializers.Zeros()),
    "condition_size": None,
    "residual": True,
}
_NORMALIZATIONS: dict[str | None, Callable | None] = {
    None: None,
    "layer": keras.layers.LayerNormalization,
    # A batch has many steps, so its statistics are stable: less averaging than Keras' 0.99 will do.
    "batch": functools.partial(keras.layers.BatchNormalization, momentum=0.9),
}


@keras.saving.register_keras_serializable("trellis_keras")
class TCNBlock(ConfigMixin, SublayersMixin, StreamingMixin, keras.layers.Layer):
    """Residual block of two dilated causal convolutions (Bai et al. 2018, Fig. 1b).

    With * a causal convolution with dilation rate `dilation_rate`,

        z = dropout(activation(kernel_1 * x + bias_1))
        z = dropout(activation(kernel_2 * z + bias_2))
        y = activation(x + z)

    where x first passes through a 1x1 convolution, the shortcut, if it does not have `filters`
    channels. With `activation="glu"` each convolution has twice the filters, and one half gates the
    other, a * sigmoid(b) (appendix D). The sum x + z then has no activation, as in Dauphin et al.
    2017.

    Reference:

    - [Bai et al., 2018](https://arxiv.org/abs/1803.01271)

    Args:
        filters: Positive integer, channels of the output.
        kernel_size: Integer, number of taps, at least 2.
        dilation_rate: Positive integer, number of steps between two taps. Defaults to `1`.
        dropout: Float in [0, 1), dropout rate. Defaults to `0`.
        dropout_kind: `"element"` drops individual values (the authors' code), `"spatial"` whole
            channels of a row (the paper). Defaults to `"element"`.
        weight_norm: Boolean, whether the kernels have weight normalization. Defaults to `True`.
        activation: `"relu"`, `"glu"`, or any activation accepted by `keras.activations.get`.
            Defaults to `"relu"`.
        normalization: `"layer"` for a `keras.layers.LayerNormalization` over the channels after
            each convolution, `"batch"` for a `keras.layers.BatchNormalization` (momentum 0.9)
            instead of the biases, or None. Batch statistics cover all steps of a batch, so during
            training later steps influence earlier ones; at inference they are fixed, and the
            layer is causal. Defaults to `None`.
        padding: `"causal"`, or `"same"` for taps centered on the current step. With `"same"`
            outputs depend on later steps, and `keras_streams.to_stream` delays them. Defaults to
            `"causal"`.
        kernel_initializer: Initializer of the convolutions. Defaults to the uniform distribution
            in +-1/sqrt(taps * channels), the effective default of the authors' code (the paper
            says N(0, 0.01)).
        shortcut_initializer: Initializer of the 1x1 convolution. Defaults to N(0, 0.01), as in the
            authors' code.
        kernel_regularizer: Regularizer of the two dilated convolutions. The shortcut has none.
            Defaults to `None`.
        seed: Integer seed of dropout, and of initializers without a seed. Defaults to `None`.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        mask: Boolean (batch, time). Masked steps are zero before each convolution, like the steps
            before the sequence. Padding may be on either side.
        training: Boolean, whether dropout is active. Defaults to `False`.

    Returns:
        Tensor (batch, time, filters), zero at masked steps.

    Example:

    >>> TCNBlock(8, kernel_size=3, dilation_rate=2)(np.zeros((2, 7, 4), "float32")).shape
    (2, 7, 8)
    """

    removed_options = _REMOVED

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        dilation_rate: int = 1,
        *,
        dropout: float = 0.0,
        dropout_kind: str = "element",
        weight_norm: bool = True,
        activation: str | Callable = "relu",
        normalization: str | None = None,
        padding: str = "causal",
        kernel_initializer: Initializer = None,
        shortcut_initializer: Initializer = None,
        kernel_regularizer: Regularizer = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        filters = check_integer("filters", filters, 1)
        kernel_size = check_integer("kernel_size", kernel_size, 2)  # one tap would read no past
        (dilation_rate,) = check_dilations("dilation_rate", [dilation_rate], kernel_size)
        check_rates(dropout=dropout)
        check_choice("dropout_kind", dropout_kind, _DROPOUTS)
        check_choice("normalization", normalization, _NORMALIZATIONS)
        check_choice("padding", padding, ("causal", "same"))
        is_glu = activation in ("glu", keras.activations.glu)
        self.filters = filters
        self.kernel_size = kernel_size
        self.dilation_rate = dilation_rate
        self.dropout = dropout
        self.dropout_kind = dropout_kind
        self.weight_norm = weight_norm
        self.activation = "glu" if is_glu else keras.activations.get(activation)
        self.normalization = normalization
        self.padding = padding
        self.kernel_initializer = keras.initializers.get(kernel_initializer or _UNIFORM)
        self.shortcut_initializer = keras.initializers.get(shortcut_initializer or _NORMAL)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.seed = seed
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)

        self.convolutions = [
            ConvolutionKernel(
                kernel_size,
                2 * filters if is_glu else filters,
                weight_norm=weight_norm,
                initializer=seeded(self.kernel_initializer, seed, "TCNBlock", "kernel", n),
                regularizer=self.kernel_regularizer,
                trainable=self.trainable,
                dtype=self.dtype_policy,
                name=f"convolution_{n + 1}",
            )
            for n in range(2)
        ]
        self.dropouts = [
            _DROPOUTS[dropout_kind](
                dropout, seed=sub_seed(seed, "TCNBlock", "dropout", n), dtype=self.dtype_policy
            )
            for n in range(2)
        ]
        norm = _NORMALIZATIONS[normalization]
        self.norms = []
        if norm is not None:
            self.norms = [
                norm(
                    trainable=self.trainable,
                    dtype=self.dtype_policy,
                    name=f"normalization_{n + 1}",
                )
                for n in range(2)
            ]
        self.shortcut: keras.layers.Dense | None = None

    def build(self, input_shape: Shape) -> None:
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})
        self.input_channels = channels = input_shape[-1]
        self.biases = []
        for n, convolution in enumerate(self.convolutions):
            convolution.build((None, None, channels if n == 0 else self.filters))
            if self.normalization == "batch":
                continue  # Batch normalization subtracts any bias and adds its own.
            bias = self.add_weight((convolution.filters,), "zeros", name=f"bias_{n + 1}")
            self.biases.append(bias)
        for norm in self.norms:
            norm.build((None, None, self.filters))
        if channels != self.filters:
            self.shortcut = keras.layers.Dense(
                self.filters,
                kernel_initializer=seeded(
                    self.shortcut_initializer, self.seed, "TCNBlock", "shortcut"
                ),
                trainable=self.trainable,
                dtype=self.dtype_policy,
                name="shortcut",
            )
            self.shortcut.build((None, None, channels))

    @property
    def receptive_field(self) -> int:
        """Number of inputs, the current one included, that an output depends on."""
        return 1 + 2 * (self.kernel_size - 1) * self.dilation_rate

    @property
    def is_causal(self) -> bool:
        """Whether no output depends on later inputs."""
        return self.padding == "causal"

    def call(self, inputs: Tensor, mask: Tensor | None = None, training: bool = False) -> Tensor:
        check_has_steps(self, inputs)
        y, _ = self._output_and_branch(inputs, resolve_mask(inputs, mask), training)
        return y

    def _equations(self, x, shortcut_x, convolution, masks=(None, None), training=False):
        """Computes the block, at all steps or at some of them.

        Args:
            x: Tensor (batch, steps, channels), zero at masked steps.
            shortcut_x: x at the steps of the output.
            convolution: Function (n, z, kernel) that computes convolution n (0 or 1) of z.
            masks: Masks (batch, steps) of the first convolution and of the output.
            training: Boolean, whether dropout is active.

        Returns:
            The output y, and the branch z.
        """
        z = x
        for n in range(2):
            z = convolution(n, z, self.convolutions[n]())
            if self.biases:
                z = z + ops.cast(self.biases[n], z.dtype)
            z = self.dropouts[n](self._activate(n, z, training, masks[n]), training=training)
            z = zero_masked(z, masks[n])
        y = z + (shortcut_x if self.shortcut is None else linear(self.shortcut, shortcut_x))
        y = y if self.activation == "glu" else activate(self.activation, y)
        return zero_masked(y, masks[1]), z

    def _activate(self, n, a, training, mask):
        if self.activation == "glu":
            a, gate = ops.split(a, 2, axis=-1)
            return self._normalize(n, a * ops.sigmoid(gate), training, mask)
        return activate(self.activation, self._normalize(n, a, training, mask))

    def _normalize(self, n, a, training, mask):
        if self.normalization == "batch":
            return self.norms[n](a, training=training, mask=mask)
        return self.norms[n](a) if self.norms else a

    def _output_and_branch(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        training: bool = False,
        positions: Sequence[np.ndarray | None] = (None,) * 3,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the branch of a forward pass.

        `positions` are those of x, of the first convolution and of the output, each an ascending
        array or None for all.
        """

        def convolution(n, z, kernel):
            if self.padding == "causal" and kernels.enabled():
                return convolve(z, kernel, self.dilation_rate, positions[n + 1], positions[n])
            if self.padding == "causal":  # the last tap acts on the current step
                z = ops.pad(z, [[0, 0], [self.offsets[-1], 0], [0, 0]])
            padding = "same" if self.padding == "same" else "valid"
            return ops.conv(
                z,
                kernel,
                padding=padding,
                dilation_rate=self.dilation_rate,
                data_format="channels_last",
            )

        first, *masks = [_select_mask(mask, p) for p in positions]
        x = zero_masked(ops.cast(x, self.compute_dtype), first)
        shortcut_x = _select(x, positions[2], positions[0])
        return self._equations(x, shortcut_x, convolution, masks, training)

    # Streaming

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first step.

        The cache is a list with the past inputs of each convolution: (batch,
        (kernel_size - 1) * dilation_rate, channels), newest last.
        """
        check_start(self, batch_size)
        return [ops.zeros(shape, self.compute_dtype) for shape in self.cache_shapes(batch_size)]

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        y, cache = self.prefill(ops.expand_dims(x, 1), cache)
        return y[:, 0], cache

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        y, _, cache = self._advance(*check_stream(self, x, cache))
        return y, cache

    def _advance(self, x: Tensor, cache: Cache) -> tuple[Tensor, Tensor, Cache]:
        """Returns the output and the branch of the steps x after a cache, and the next cache."""
        time, next_cache = ops.shape(x)[1], []

        def convolution(n, z, kernel):
            past_and_z = ops.concatenate([cache[n], z], axis=1)
            next_cache.append(past_and_z[:, time:])
            # The first tap reads the oldest steps, from 0 on.
            seen = [past_and_z[:, start : start + time] for start in self.offsets]
            seen = ops.concatenate(seen, axis=-1)
            return product(seen, ops.reshape(kernel, (-1, kernel.shape[-1])), seen.dtype)

        y, branch = self._equations(x, x, convolution)
        return y, branch, next_cache

    @property
    def offsets(self) -> tuple[int, ...]:
        """Number of steps that each tap looks back, the last tap first."""
        return tap_offsets(self.kernel_size, self.dilation_rate)

    def cache_shapes(self, batch_size: int | None) -> list:
        return [[batch_size, self.offsets[-1], n] for n in (self.input_channels, self.filters)]

    # Keras

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], self.filters)


@keras.saving.register_keras_serializable("trellis_keras")
class TCN(ConfigMixin, SublayersMixin, StreamingMixin, keras.layers.Layer):
    """Temporal convolutional network: a stack of `TCNBlock`s (Bai et al. 2018, section 3).

    By default block i = 1..n has dilation 2^(i-1), so an output depends on
    `receptive_field` = 1 + 2 (kernel_size - 1) (2^n - 1) inputs. The network is causal: output t
    depends only on inputs up to t. If only the last outputs are returned, each convolution computes
    just the positions that they depend on (`kernels.cone`).

    Reference:

    - [Bai et al., 2018](https://arxiv.org/abs/1803.01271)

    Args:
        filters: Positive integer, channels of the blocks, or a list with one per block.
        kernel_size: Integer, number of taps of every convolution, at least 2. Defaults to `3`.
        depth: Positive integer, number of blocks, with dilations 1, 2, 4, ... Pass exactly one of
            `depth`, `dilations` and `receptive_field`.
        dilations: List of integers, the dilation rate of each block.
        receptive_field: Positive integer, minimum number of steps that an output depends on. The
            depth is the smallest that reaches it. The attribute `receptive_field` is the actual
            number of steps, which may be larger.
        dropout, dropout_kind, weight_norm, activation, normalization: See `TCNBlock`. The blocks
            share an activation that has weights, such as `keras.layers.PReLU`.
        padding: `"causal"`, or `"same"` for taps centered on the current step, in which case
            outputs also depend on later inputs. Defaults to `"causal"`.
        skip_connections: Boolean, whether the output is the sum of all blocks' branches, as in
            WaveNet, instead of the last block's output. All blocks must be equally wide. Defaults
            to `False`.
        return_sequences, go_backwards: As in `keras.layers.RNN`, but all steps are returned by
            default. With a mask the last step is each row's last valid one.
        output_length: Positive integer, number of last outputs to return. Defaults to `None`, all.
        kernel_initializer, shortcut_initializer, kernel_regularizer: See `TCNBlock`.
        seed: Integer seed. Defaults to `None`.

    Call arguments:
        inputs: Tensor (batch, time, channels). The past before the first step is zero, so the
            sequence may be shorter than the receptive field.
        mask: Boolean (batch, time). Masked steps are zero before each convolution.
        training: Boolean, whether dropout is active. Defaults to `False`.
        output_length: Overrides the constructor argument for this call. (The mask that Keras
            passes on to the next layer follows the constructor argument.)
        initial_state: Must be None; accepted for `keras.layers.Bidirectional`. See `initial_cache`.

    Returns:
        Tensor (batch, time, filters); without `return_sequences`, (batch, filters). Outputs of
        masked steps, and of rows without a valid step, are zero.

    To migrate from keras-tcn, see `trellis_keras.interop`.

    Example:

    >>> layer = TCN(8, kernel_size=3, depth=4)
    >>> layer(np.zeros((2, 20, 3), "float32")).shape
    (2, 20, 8)
    >>> layer.receptive_field
    61
    """

    removed_options = _REMOVED
    # For `keras.layers.Bidirectional`. The state of a TCN is its streaming cache.
    stateful = False
    return_state = False

    def __init__(
        self,
        filters: int | Sequence[int],
        kernel_size: int = 3,
        depth: int | None = None,
        *,
        dilations: Sequence[int] | None = None,
        receptive_field: int | None = None,
        dropout: float = 0.0,
        dropout_kind: str = "element",
        weight_norm: bool = True,
        activation: str | Callable = "relu",
        normalization: str | None = None,
        padding: str = "causal",
        skip_connections: bool = False,
        return_sequences: bool = True,
        output_length: int | None = None,
        go_backwards: bool = False,
        kernel_initializer: Initializer = None,
        shortcut_initializer: Initializer = None,
        kernel_regularizer: Regularizer = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if sum(given is not None for given in (depth, dilations, receptive_field)) != 1:
            raise ValueError(
                "Pass one of `depth` (dilations 1, 2, 4, ...), `dilations` and `receptive_field`. "
                f"Received: depth={depth}, dilations={dilations}, receptive_field={receptive_field}"
            )
        kernel_size = check_integer("kernel_size", kernel_size, 2)
        if receptive_field is not None:
            depth = _depth_for(check_integer("receptive_field", receptive_field, 1), kernel_size)
        if depth is not None:
            depth = check_integer("depth", depth, 1)
            deepest = largest_dilation(kernel_size).bit_length()
            if depth > deepest:
                wanted = "" if receptive_field is None else f" for {receptive_field=}"
                raise ValueError(
                    f"With kernel_size={kernel_size}, `depth` must be at most {deepest}. "
                    f"Received: depth={depth}{wanted}"
                )
            dilations = [2**i for i in range(depth)]
        dilations = check_dilations("dilations", dilations, kernel_size)
        depth = len(dilations)
        if isinstance(filters, (list, tuple)):
            filters = widths = [check_integer("filters", n, 1) for n in filters]
        else:
            filters = check_integer("filters", filters, 1)
            widths = [filters] * depth
        if len(widths) != depth:
            raise ValueError(
                f"`filters` must be an integer, or a list of {depth} integers, one per block. "
                f"Received: filters={filters}"
            )
        if skip_connections and len(set(widths)) > 1:
            raise ValueError(
                "`skip_connections` add the blocks' branches, so all `filters` must be equal. "
                f"Received: filters={filters}"
            )
        if padding == "same" and not return_sequences:
            raise ValueError(
                'With `padding="same"` the last step sees zeros for half of its inputs: use '
                "`return_sequences=True` and take the step in the middle, `y[:, time // 2]`, or "
                "an average over time. Received: padding='same', return_sequences=False"
            )
        check_output_length(output_length, return_sequences, go_backwards)
        self.return_sequences = return_sequences
        self.output_length = output_length
        self.go_backwards = go_backwards
        self.filters = filters
        self.kernel_size = kernel_size
        self.depth = depth
        self.dropout = dropout
        self.dropout_kind = dropout_kind
        self.weight_norm = weight_norm
        self.normalization = normalization
        self.padding = padding
        self.dilations = dilations
        self.skip_connections = skip_connections
        self.kernel_initializer = keras.initializers.get(kernel_initializer or _UNIFORM)
        self.shortcut_initializer = keras.initializers.get(shortcut_initializer or _NORMAL)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.seed = seed
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)
        activation = keras.activations.get(activation)  # one object for all blocks
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
                padding=padding,
                kernel_initializer=seeded(self.kernel_initializer, seed, "TCN", i, "kernel"),
                shortcut_initializer=seeded(self.shortcut_initializer, seed, "TCN", i, "shortcut"),
                kernel_regularizer=kernel_regularizer,
                seed=sub_seed(seed, "TCN", i),
                trainable=self.trainable,
                dtype=self.dtype_policy,
                name=f"block_{i + 1}",
            )
            for i, (width, dilation) in enumerate(zip(widths, dilations, strict=True))
        ]
        self.activation = self.blocks[0].activation

    @property
    def receptive_field(self) -> int:
        """Number of inputs, the current one included, that an output depends on."""
        return 1 + sum(block.receptive_field - 1 for block in self.blocks)

    @property
    def is_causal(self) -> bool:
        """Whether no output depends on later inputs."""
        return self.padding == "causal" and not self.go_backwards

    def build(self, input_shape: Shape) -> None:
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})
        self.input_channels = input_shape[-1]
        shape: Shape = (None, None, self.input_channels)
        for block in self.blocks:
            block.build(shape)
            shape = block.compute_output_shape(shape)

    def call(
        self,
        inputs: Tensor,
        mask: Tensor | None = None,
        training: bool = False,
        output_length: int | None = None,
        initial_state: None = None,
    ) -> Tensor:
        if initial_state is not None:
            raise ValueError(
                "The state of a TCN is its streaming cache: call `prefill(x, cache)` instead. "
                "Received: `initial_state` in the call"
            )
        check_has_steps(self, inputs)
        steps = count_outputs(self, inputs.shape[1], output_length)
        mask = resolve_mask(inputs, mask)
        if self.go_backwards:
            inputs, mask = flip_time(inputs, mask)
        if mask is not None and not self.return_sequences:
            steps = None  # The last valid step of a row can be anywhere.
        # Batch statistics need all steps.
        all_steps = training and self.blocks[0].normalization == "batch"
        positions = self._positions(inputs.shape[1], None if all_steps else steps)
        x, branches = _select(inputs, positions[0]), []
        for i, block in enumerate(self.blocks):
            wanted = positions[2 * i : 2 * i + 3]
            x, branch = block._output_and_branch(x, mask, training, wanted)
            branches.append(branch)
        y = self._output(x, branches, steps)
        return y if self.return_sequences else last_step([y], None, mask)[0]

    def _positions(self, time, steps):
        """The positions of the input and of every convolution, None for all."""
        if not kernels.enabled() or time is None or self.padding == "same":
            return [None] * (1 + 2 * self.depth)
        reads = tuple(block.offsets for block in self.blocks for _ in range(2))
        return _cone_positions(time, reads, steps)

    def _output(self, x, branches, steps=None):
        """The last block's output or the sum of the branches, at the last steps."""
        outputs = branches if self.skip_connections else [x]
        return sum(last_steps(y, steps) for y in outputs)

    # Streaming

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first step: a list of the blocks' caches.

        Example:

        >>> layer = TCN(8, kernel_size=3, depth=4)
        >>> layer.build((None, None, 3))
        >>> y, cache = layer.step(np.zeros((2, 3), "float32"), layer.initial_cache(2))
        >>> tuple(y.shape)
        (2, 8)
        """
        check_causal(self)
        check_built(self)
        return [block.initial_cache(batch_size) for block in self.blocks]

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        y, cache = self.prefill(ops.expand_dims(x, 1), cache)
        return y[:, 0], cache

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        x, cache = check_stream(self, x, cache)
        branches, next_cache = [], []
        for block, block_cache in zip(self.blocks, cache, strict=True):
            x, branch, block_cache = block._advance(x, block_cache)
            branches.append(branch)
            next_cache.append(block_cache)
        return self._output(x, branches), next_cache

    def cache_shapes(self, batch_size: int | None) -> list:
        return [block.cache_shapes(batch_size) for block in self.blocks]

    # Keras

    def compute_mask(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor | tuple | None:
        return output_mask(self, mask)

    def compute_output_shape(self, input_shape: Shape, output_length: int | None = None) -> Shape:
        time = time_axis(self, input_shape[1], output_length)
        return (input_shape[0], *time, self.blocks[-1].filters)

    def compute_output_spec(
        self, inputs: Tensor, *args: Any, output_length: int | None = None, **kwargs: Any
    ) -> keras.KerasTensor:
        shape = self.compute_output_shape(inputs.shape, output_length)
        return keras.KerasTensor(shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "depth": None, "receptive_field": None}


def _depth_for(receptive_field, kernel_size):
    """Returns the smallest depth with which a `TCN` sees this many steps."""
    depth = 1
    while 1 + 2 * (kernel_size - 1) * (2**depth - 1) < receptive_field:
        depth += 1
    return depth


@functools.lru_cache(maxsize=64)
def _cone_positions(time, reads, steps):
    """The positions of all levels of a `Cone`. Every level includes the output positions."""
    return Cone(time, reads, steps).positions


def _select(x, wanted, available=None):
    """x at the positions `wanted`, from those `available`, by default all."""
    if wanted is None:
        return x
    return gather(x, locate(wanted, np.arange(x.shape[1]) if available is None else available))


def _select_mask(mask, wanted):
    """The mask at the positions `wanted`."""
    return mask if mask is None or wanted is None else ops.take(mask, wanted, axis=1)
