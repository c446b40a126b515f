"""The residual block of temporal convolutional networks."""

import functools

import keras
import numpy as np
from keras import ops

from trellis_keras.kernels import cone
from trellis_keras.kernels.convolution import apply_taps, convolve, gather
from trellis_keras.layers import base, streaming
from trellis_keras.layers.base import FrozenPartsMixin
from trellis_keras.layers.regularization import ConvolutionKernel

CONVOLUTIONS = 2  # of a block


@keras.saving.register_keras_serializable("trellis_keras")
class TCNBlock(FrozenPartsMixin, streaming.StreamingMixin, keras.layers.Layer):
    """Residual block of two dilated causal convolutions (Bai et al. 2018, Fig. 1b).

    With * the convolution whose taps are `dilation_rate` steps apart and see no later step,

        z = dropout(activation(kernel_1 * x + bias_1))
        z = dropout(activation(kernel_2 * z + bias_2))
        y = activation(x + z)

    where x passes a 1x1 convolution first if its width is not `filters`. With
    `activation="glu"` each convolution has twice the filters, and one half gates the other,
    a * sigmoid(b) (appendix D); the sum x + z has no activation then, as in Dauphin et al. 2017.

    Args:
        filters: Channels of the output.
        kernel_size: Number of taps, at least 2.
        dilation_rate: Steps between two taps.
        dropout: Rate.
        dropout_kind: `"element"` drops every number by itself (the authors' program),
            `"spatial"` whole channels of a row (the paper).
        weight_norm: Whether kernels have weight normalisation.
        activation: `"relu"`, `"glu"`, or whatever `keras.activations.get` takes.
        normalization: `"layer"` for a `keras.layers.LayerNormalization` over the channels after
            each convolution, or None.
        residual: Whether x is added to the branch (False: for ablations).
        kernel_initializer: Of the convolutions. Default: uniform in +-1/sqrt(taps * channels),
            as the authors' program has in effect (the paper says N(0, 0.01)).
        bias_initializer: Of the convolutions.
        shortcut_initializer: Of the 1x1 convolution. Default: N(0, 0.01), as the authors'.
        kernel_regularizer: Of the convolutions.
        seed: Integer seed of dropout and of the default initializers.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time). Masked steps are zero before each convolution, like the steps
            before the sequence. Right for pre- and for post-padding.

    Returns:
        Tensor (batch, time, filters), zero in masked steps.

    Raises:
        ValueError: Arguments out of range.

    Example:

    >>> TCNBlock(8, kernel_size=3, dilation_rate=2)(np.zeros((2, 7, 4), "float32")).shape
    (2, 7, 8)
    """

    def __init__(
        self,
        filters,
        kernel_size,
        dilation_rate=1,
        *,
        dropout=0.0,
        dropout_kind="element",
        weight_norm=True,
        activation="relu",
        normalization=None,
        residual=True,
        kernel_initializer=None,
        bias_initializer="zeros",
        shortcut_initializer=None,
        kernel_regularizer=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        base.check_positive(filters=filters, kernel_size=kernel_size, dilation_rate=dilation_rate)
        if kernel_size == 1:
            raise ValueError(
                "`kernel_size` must be at least 2: with one tap no output depends on the past. "
                "Received: kernel_size=1"
            )
        if normalization not in (None, "layer"):
            raise ValueError(
                '`normalization` must be None or "layer". (Batch statistics would mix later steps '
                f"into earlier ones.) Received: normalization={normalization!r}"
            )
        self.filters = filters
        self.kernel_size = kernel_size
        self.dilation_rate = dilation_rate
        self.dropout = dropout
        self.dropout_kind = dropout_kind
        self.weight_norm = weight_norm
        is_glu = activation in ("glu", keras.activations.glu)
        self.activation = "glu" if is_glu else keras.activations.get(activation)
        self.normalization = normalization
        self.residual = residual
        self.kernel_initializer = default_kernel(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.shortcut_initializer = default_shortcut(shortcut_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.seed = seed
        self.supports_masking = True

        self.convolutions = [self._convolution(n) for n in range(CONVOLUTIONS)]
        self.dropouts = [self._dropout(n) for n in range(CONVOLUTIONS)]
        self.norms = []
        if normalization is not None:
            self.norms = [
                keras.layers.LayerNormalization(dtype=self.dtype_policy) for _ in self.convolutions
            ]
        self.shortcut = None

    def _convolution(self, n):
        return ConvolutionKernel(
            self.kernel_size,
            self.filters * (2 if self.activation == "glu" else 1),
            weight_norm=self.weight_norm,
            initializer=base.seeded(self.kernel_initializer, self.seed, n),
            regularizer=self.kernel_regularizer,
            dtype=self.dtype_policy,
            name=f"convolution_{n + 1}",
        )

    def _dropout(self, n):
        kinds = {
            "element": keras.layers.Dropout,
            "spatial": keras.layers.SpatialDropout1D,
        }
        if self.dropout_kind not in kinds:
            raise ValueError(
                f"`dropout_kind` must be one of {sorted(kinds)}. Received: {self.dropout_kind!r}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be in [0, 1). Received: dropout={self.dropout}")
        seed = base.sub_seed(self.seed, 10 + n)
        return kinds[self.dropout_kind](self.dropout, seed=seed, dtype=self.dtype_policy)

    def build(self, input_shape):
        self.input_spec = base.sequence_spec(self, input_shape)
        channels = input_shape[-1]
        self.biases = []
        for n, convolution in enumerate(self.convolutions):
            convolution.build((None, None, channels if n == 0 else self.filters))
            self.biases.append(
                self.add_weight(
                    name=f"bias_{n + 1}",
                    shape=(convolution.filters,),
                    initializer=base.seeded(self.bias_initializer, self.seed, 20 + n),
                )
            )
        for norm in self.norms:
            norm.build((None, None, self.filters))
        if self.residual and channels != self.filters:
            self.shortcut = keras.layers.Dense(
                self.filters,
                kernel_initializer=base.seeded(self.shortcut_initializer, self.seed, 30),
                dtype=self.dtype_policy,
                name="shortcut",
            )
            self.shortcut.build((None, None, channels))

    @property
    def receptive_field(self):
        """Number of inputs, the current one included, that an output depends on."""
        return 1 + CONVOLUTIONS * (self.kernel_size - 1) * self.dilation_rate

    def call(self, inputs, training=False, mask=None):
        levels = plan(inputs.shape[1], (self.offsets,) * CONVOLUTIONS)
        y, _ = self.apply(inputs, Positions(self, levels, 1, mask), training)
        return y

    def apply(self, x, seen, training=False):
        """The equations of the block, on whatever positions are wanted.

        Args:
            x: Tensor (batch, positions, channels).
            seen: What the convolutions see, `Positions` or `Steps`.
            training: Whether dropout is active.

        Returns:
            The output y, and the branch z.
        """
        z = x
        for n in range(CONVOLUTIONS):
            a = seen.convolve(n, z, self.convolutions[n]())
            a = a + ops.cast(self.biases[n], a.dtype)
            z = self.dropouts[n](self._activate(n, a), training=training)
        y = z
        if self.residual:
            here = seen.here(x)
            y = z + (here if self.shortcut is None else self.shortcut(here))
            y = y if self.activation == "glu" else self.activation(y)
        return seen.valid(y), seen.valid(z)

    def _activate(self, n, a):
        if self.activation == "glu":
            a, gate = ops.split(a, 2, axis=-1)
            a = a * ops.sigmoid(gate)
            return self.norms[n](a) if self.norms else a
        return self.activation(self.norms[n](a) if self.norms else a)

    @property
    def offsets(self):
        """How many steps back the taps of a convolution see."""
        return cone.offsets(self.kernel_size, self.dilation_rate)

    # Streaming

    def initial_cache(self, batch_size):
        """Returns the cache before the first step.

        A list with, per convolution, the inputs that its past taps will see: (batch,
        (kernel_size - 1) * dilation_rate, channels), newest last.

        Raises:
            ValueError: The layer is not built.
        """
        streaming.check_built(self)
        streaming.check_batch_size(batch_size)
        return [ops.zeros(shape, self.compute_dtype) for shape in self.cache_shapes(batch_size)]

    def step(self, x, cache):
        """Advances one step; see `layers.streaming`.

        Raises:
            ValueError: The layer is not built, x has another shape, or the cache is of another
                batch size or another layer.
        """
        y, cache = self.prefill(ops.expand_dims(x, 1), cache)
        return y[:, 0], cache

    def prefill(self, x, cache=None):
        """Advances all steps of x by one forward pass; see `layers.streaming`.

        Raises:
            ValueError: As `step`.
        """
        x, cache = checked_stream(self, x, cache)
        seen = Steps(self, cache, ops.shape(x)[1])
        y, _ = self.apply(x, seen)
        return y, seen.next

    def cache_shapes(self, batch):
        past = (self.kernel_size - 1) * self.dilation_rate
        return [[batch, past, c.kernel.shape[1]] for c in self.convolutions]

    @property
    def input_channels(self):
        return self.convolutions[0].kernel.shape[1]

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.filters)

    def get_config(self):
        return {**super().get_config(), "filters": self.filters, **shared_config(self)} | {
            "dilation_rate": self.dilation_rate
        }


class Positions:
    """What the convolutions of a block see in a forward pass: positions of a `Cone`.

    Args:
        block: The `TCNBlock`.
        plan: A `Cone` with a level per convolution.
        first: Level of the block's first convolution.
        mask: Boolean (batch, time), or None.
    """

    def __init__(self, block, plan, first, mask=None):
        self.block, self.plan, self.first = block, plan, first
        self.mask = None if mask is None else ops.cast(mask, "bool")[..., None]

    def convolve(self, n, z, kernel):
        """Convolution n of its input z."""
        level = self.first + n
        z = self._zero_masked(z, level - 1)
        wanted, available = self.plan.positions[level], self.plan.positions[level - 1]
        return convolve(z, kernel, self.block.dilation_rate, wanted, available)

    def here(self, x):
        """The block's input at the positions of its output."""
        return gather(x, self.plan.read(self._last, 0, below=self.first - 1))

    def valid(self, y):
        return self._zero_masked(y, self._last)

    @property
    def _last(self):
        return self.first + CONVOLUTIONS - 1

    def _zero_masked(self, x, level):
        if self.mask is None:
            return x
        positions = self.plan.positions[level]
        everything = None if positions is None else np.arange(self.plan.time)
        return ops.where(gather(self.mask, cone.read(positions, everything)), x, ops.zeros_like(x))


class Steps:
    """What the convolutions of a block see in a stream: a piece after what the cache holds.

    Args:
        block: The `TCNBlock`.
        cache: The block's cache.
        time: Number of steps of the piece.

    Attributes:
        next: The cache after the piece, once both convolutions have been computed.
    """

    def __init__(self, block, cache, time):
        self.block, self.cache, self.time = block, cache, time
        self.next = []

    def convolve(self, n, z, kernel):
        z = ops.concatenate([self.cache[n], z], axis=1)
        self.next.append(z[:, self.time :])
        starts = self.block.offsets  # the oldest tap sees the first steps
        seen = [z[:, start : start + self.time] for start in starts]
        return apply_taps(seen, ops.reshape(kernel, (-1, kernel.shape[-1])))

    def here(self, x):
        return x

    def valid(self, y):
        return y


@functools.lru_cache(maxsize=64)
def plan(time, reads, kept=None, output_levels=()):
    """Returns the `Cone` of a stack of convolutions, see there."""
    return cone.Cone(time, reads, kept, output_levels)


def default_kernel(initializer):
    """Uniform in +-1/sqrt(taps * channels), unless another is given."""
    usual = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    return keras.initializers.get(usual if initializer is None else initializer)


def default_shortcut(initializer):
    """N(0, 0.01), unless another is given."""
    usual = keras.initializers.RandomNormal(stddev=0.01)
    return keras.initializers.get(usual if initializer is None else initializer)


def shared_config(block):
    """The arguments that a TCN hands on to its blocks."""
    glu = block.activation == "glu"
    return {
        "kernel_size": block.kernel_size,
        "dropout": block.dropout,
        "dropout_kind": block.dropout_kind,
        "weight_norm": block.weight_norm,
        "activation": "glu" if glu else keras.activations.serialize(block.activation),
        "normalization": block.normalization,
        "residual": block.residual,
        "kernel_regularizer": keras.regularizers.serialize(block.kernel_regularizer),
        **initializer_config(block),
    }


def initializer_config(layer):
    """The arguments that say where the weights begin."""
    serialize = keras.initializers.serialize
    return {
        "kernel_initializer": serialize(layer.kernel_initializer),
        "bias_initializer": serialize(layer.bias_initializer),
        "shortcut_initializer": serialize(layer.shortcut_initializer),
        "seed": layer.seed,
    }


def checked_stream(layer, x, cache):
    """Returns x (batch, time, channels) in the compute dtype and the cache, refusing wrong ones."""
    streaming.check_built(layer)
    x = ops.cast(x, layer.compute_dtype)
    base.check_shape("x", x, (None, None, layer.input_channels))
    cache = layer.initial_cache(ops.shape(x)[0]) if cache is None else cache
    streaming.check_cache(layer, cache, layer.cache_shapes(x.shape[0]))
    return x, cache
