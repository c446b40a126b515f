"""Regularization of sequence models: dropout layers, DropConnect, weight normalization.

The dropout layers draw their masks in one method, `draw`, so that a test or a study can replace
the random mask with a known one.
"""

from typing import Any

import keras
from keras import ops

from trellis_keras.layers.checks import check_integer, check_positive, check_rates
from trellis_keras.layers.saving import ConfigMixin
from trellis_keras.types import Initializer, Regularizer, Shape, Shapes, Tensor


class _MaskDropout(ConfigMixin, keras.layers.Layer):
    """Base class: a rate, a seed and an inverted-dropout mask."""

    def __init__(self, rate: float, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_rates(rate=rate)
        self.rate = rate
        self.seed = seed
        # At rate 0 the layer adds no random state to a model.
        self.seed_generator = keras.random.SeedGenerator(seed) if rate > 0 else None
        self.supports_masking = True
        self.built = True

    def draw(self, shape: Shape) -> Tensor:
        """Draws a 0/1 mask of `shape` divided by `1 - rate`, in the compute dtype."""
        kept = _uniform(shape, self.seed_generator) >= self.rate
        return ops.cast(kept, self.compute_dtype) / (1 - self.rate)

    def is_active(self, training: bool) -> bool:
        return bool(training) and self.rate > 0

    def compute_output_shape(self, input_shape: Shape) -> Shapes:
        return input_shape


@keras.saving.register_keras_serializable("trellis_keras")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`, with masks that XLA draws fast and whose rate is exact.

    On TensorFlow, XLA on a CPU draws the mask of `keras.layers.Dropout` so slowly that it may take
    longer than the rest of a training step. In bfloat16 that mask drops a fraction of 0.0078 if
    `rate` is 0.003. In float32 without XLA, and on other backends, the two layers drop the same
    elements.

    Args:
        rate, noise_shape, seed: As in `keras.layers.Dropout`.

    Example:

    >>> y = Dropout(0.5, seed=1)(np.ones((2, 5, 4), "float32"), training=True)
    >>> set(np.unique(y)) == {0.0, 2.0}
    True
    """

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        is_active = training and 0 < self.rate < 1
        if keras.backend.backend() != "tensorflow" or not is_active:
            return super().call(inputs, training=training)
        from trellis_keras import _tensorflow

        return _tensorflow.dropout(inputs, self.rate, self.noise_shape, self.seed_generator)


@keras.saving.register_keras_serializable("trellis_keras")
class VariationalDropout(_MaskDropout):
    """Dropout with one mask for all time steps (Gal & Ghahramani 2016).

    On 3-D inputs it equals `keras.layers.SpatialDropout1D`. It also takes the auxiliary outputs
    (batch, n_aux, time, channels) of a `TrellisLayer`.

    Reference:

    - [Gal & Ghahramani, 2016](https://arxiv.org/abs/1512.05287)

    Args:
        rate: Float in [0, 1), fraction of the channels to drop.
        seed: As in `keras.layers.Dropout`.

    Call arguments:
        inputs: Tensor (batch, ..., time, channels).
        training: Boolean, whether to drop anything. Defaults to `False`.

    Example:

    >>> y = VariationalDropout(0.3, seed=1)(np.ones((2, 5, 4), "float32"), training=True)
    >>> bool(np.all(y[:, 0] == y[:, 4]))
    True
    """

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        if not self.is_active(training):
            return inputs
        if len(inputs.shape) < 3:
            raise ValueError(
                "VariationalDropout has one mask for all time steps of inputs (batch, ..., time, "
                f"channels). Received: inputs of shape {tuple(inputs.shape)}. Without a time axis, "
                "use keras.layers.Dropout."
            )
        shape = ops.shape(inputs)
        return inputs * self.draw((*shape[:-2], 1, shape[-1]))


@keras.saving.register_keras_serializable("trellis_keras")
class EmbeddingDropout(_MaskDropout):
    """Drops whole words: all occurrences of a word in a batch (Gal & Ghahramani 2016).

    It is equivalent to multiplying the embedding matrix by a (vocabulary, 1) mask before the
    lookup, but multiplies only the rows that were looked up.

    Reference:

    - [Gal & Ghahramani, 2016](https://arxiv.org/abs/1512.05287)

    Args:
        rate: Float in [0, 1), fraction of the vocabulary to drop.
        input_dim: Positive integer, size of the vocabulary.
        seed: As in `keras.layers.Dropout`.

    Call arguments:
        embedded: Tensor (batch, time, channels), the embeddings of `tokens`.
        tokens: Integer tensor (batch, time).
        training: Boolean, whether to drop anything. Defaults to `False`.

    Example:

    >>> tokens = np.array([[3, 1, 3]])
    >>> y = EmbeddingDropout(0.5, input_dim=4)(np.ones((1, 3, 2), "float32"), tokens, training=True)
    >>> bool(np.all(y[:, 0] == y[:, 2]))
    True
    """

    def __init__(self, rate: float, input_dim: int, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(rate, seed=seed, **kwargs)
        self.input_dim = check_integer("input_dim", input_dim, 1)

    def call(self, embedded: Tensor, tokens: Tensor, training: bool = False) -> Tensor:
        if not self.is_active(training):
            return embedded
        # TensorFlow gathers by int32 and int64 only, and bytes are uint8.
        tokens = ops.cast(tokens, "int32")
        return embedded * ops.take(self.draw((self.input_dim, 1)), tokens, axis=0)

    def compute_output_shape(
        self, embedded_shape: Shape, tokens_shape: Shape | None = None
    ) -> Shape:
        return embedded_shape


@keras.saving.register_keras_serializable("trellis_keras")
class DropConnect(_MaskDropout):
    """DropConnect (Wan et al. 2013) on the past taps of a convolution kernel.

    The past taps, which act as recurrent matrices, are dropped. The last tap, which acts on the
    current step as a feed-forward matrix, is kept (Merity et al. 2018; TrellisNet, section 5.3).

    Reference:

    - [Wan et al., 2013](https://proceedings.mlr.press/v28/wan13.html)

    Args:
        rate: Float in [0, 1), fraction of the past taps' weights to drop.
        seed: As in `keras.layers.Dropout`.

    Call arguments:
        kernel: Tensor (tap, in, out).
        training: Boolean, whether to drop anything. Defaults to `False`.

    Example:

    >>> kernel = DropConnect(0.5)(np.ones((2, 3, 4), "float32"), training=True)
    >>> bool(np.all(kernel[-1] == 1))
    True
    """

    def call(self, kernel: Tensor, training: bool = False) -> Tensor:
        taps = kernel.shape[0]
        if not self.is_active(training) or taps == 1:
            return kernel
        past = kernel[:-1] * self.draw((taps - 1, *kernel.shape[1:]))
        return ops.concatenate([past, kernel[-1:]], axis=0)


def _uniform(shape, seed_generator):
    """Draws float32 numbers in [0, 1)."""
    if keras.backend.backend() != "tensorflow":
        return keras.random.uniform(shape, dtype="float32", seed=seed_generator)
    from trellis_keras import _tensorflow

    return _tensorflow.uniform(shape, seed_generator)


def weight_norm(direction: Tensor, gain: Tensor) -> Tensor:
    """Returns `direction * gain / ||direction||`, the norm taken per output channel.

    Reference:

    - [Salimans & Kingma, 2016](https://arxiv.org/abs/1602.07868), Eq. (2)

    Args:
        direction: Tensor (tap, in, out).
        gain: Tensor (out,).
    """
    return direction * (gain / _norm(direction))


def _norm(kernel):
    squares = ops.sum(ops.square(kernel), axis=(0, 1))
    # A channel that is masked or dropped entirely stays zero, with a gradient of zero.
    return ops.sqrt(ops.where(squares > 0, squares, ops.ones_like(squares)))


@keras.saving.register_keras_serializable("trellis_keras")
class ConvolutionKernel(ConfigMixin, keras.layers.Layer):
    """A convolution kernel (tap, in, out) with optional weight normalization and DropConnect.

    With weight norm the weights are a direction and a gain per output channel. DropConnect acts on
    the direction, before its norm is taken, as in the authors' code.

    Args:
        kernel_size: Positive integer, number of taps. The last tap acts on the current step.
        filters: Positive integer, number of output channels.
        weight_norm: Boolean, whether to normalize the weights. Defaults to `False`.
        dropout: Float in [0, 1), DropConnect rate of the past taps. Defaults to `0`.
        initializer: Initializer of the kernel. Defaults to `"glorot_uniform"`.
        regularizer: Regularizer of the kernel, or of its direction with weight norm. Defaults to
            `None`.
        seed: Integer seed of DropConnect. Defaults to `None`.

    Call arguments:
        training: Boolean, whether DropConnect is active. Defaults to `False`.

    Returns:
        Tensor (tap, in, out), the kernel to convolve with.

    Example:

    >>> kernel = ConvolutionKernel(2, 8, weight_norm=True)
    >>> kernel.build((None, None, 3))
    >>> kernel().shape
    (2, 3, 8)
    """

    def __init__(
        self,
        kernel_size: int,
        filters: int,
        *,
        weight_norm: bool = False,
        dropout: float = 0.0,
        initializer: Initializer = "glorot_uniform",
        regularizer: Regularizer = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kernel_size, self.filters = check_positive(kernel_size=kernel_size, filters=filters)
        check_rates(dropout=dropout)
        self.weight_norm = weight_norm
        self.dropout = dropout
        self.initializer = keras.initializers.get(initializer)
        self.regularizer = keras.regularizers.get(regularizer)
        self.seed = seed
        if weight_norm and not _is_repeatable(self.initializer):
            raise ValueError(
                "With `weight_norm` the gain starts as the norm of the initial kernel, so the "
                "initializer must draw the same numbers twice: a Keras initializer whose seed is "
                f"None or an integer. Received: initializer={initializer!r}"
            )
        # Norms and masks use the variables' dtype; the result is cast once.
        self.drop_connect = DropConnect(dropout, seed=seed, dtype=self.variable_dtype)

    def build(self, input_shape: Shape) -> None:
        """Creates the weights for an operand of shape (batch, time, in)."""
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.kernel_size, input_shape[-1], self.filters),
            initializer=self._initial_kernel,
            regularizer=self._penalty if self.regularizer else None,
            autocast=False,
        )
        self.gain = None
        if self.weight_norm:
            self.gain = self.add_weight(
                name="gain",
                shape=(self.filters,),
                # Drawn again: XLA cannot compile a `fit` that builds the model and reads the
                # variable of the direction.
                initializer=lambda shape, dtype: _norm(
                    self._initial_kernel(self.kernel.shape, dtype)
                ),
                autocast=False,
            )

    def _initial_kernel(self, shape, dtype):
        return self.apply_connections(self.initializer(shape, dtype=dtype))

    def _penalty(self, kernel):
        return self.regularizer(self.apply_connections(ops.convert_to_tensor(kernel)))

    def apply_connections(self, kernel: Tensor) -> Tensor:
        """Hook: returns the kernel with zeros where a subclass has no connection."""
        return kernel

    def call(self, training: bool = False) -> Tensor:
        return ops.cast(self.effective_kernel(training), self.compute_dtype)

    def effective_kernel(self, training: bool = False) -> Tensor:
        """Returns the kernel in the variables' dtype, after DropConnect and weight norm."""
        kernel = self.apply_connections(ops.convert_to_tensor(self.kernel))
        kernel = self.drop_connect(kernel, training=training)
        if self.gain is not None:
            kernel = weight_norm(kernel, self.gain)
        return kernel


def _is_repeatable(initializer):
    if not isinstance(initializer, keras.initializers.Initializer):
        return False
    return isinstance(initializer.get_config().get("seed"), (int, type(None)))
