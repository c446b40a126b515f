"""Convolution kernels with weight normalisation and DropConnect."""

import keras
from keras import ops

from trellis_keras.layers.dropout import DropConnect


def weight_norm(direction, gain):
    """Returns `direction * gain / ||direction||`, the norm taken per output channel.

    Salimans & Kingma 2016, Eq. (2).

    Args:
        direction: Tensor (tap, in, out).
        gain: Tensor (out,).
    """
    return direction * (gain / _norm(direction))


def _norm(kernel):
    squares = ops.sum(ops.square(kernel), axis=(0, 1))
    # A channel without weights, masked or dropped, has a kernel of zeros, and a gradient of zeros.
    return ops.sqrt(ops.where(squares > 0, squares, ops.ones_like(squares)))


def _repeatable(initializer):
    if not isinstance(initializer, keras.initializers.Initializer):
        return False
    return isinstance(initializer.get_config().get("seed"), (int, type(None)))


@keras.saving.register_keras_serializable("trellis_keras")
class ConvolutionKernel(keras.layers.Layer):
    """A (tap, in, out) kernel, weight-normed and with DropConnect if asked for.

    With weight norm the kernel is kept as a direction and a gain per output channel. DropConnect
    acts on the direction, whose norm is then that of what was left (as in the authors' program).

    Args:
        kernel_size: Number of taps. The last tap acts on the current step.
        filters: Number of output channels.
        weight_norm: Whether to keep the kernel as direction and gain.
        dropout: DropConnect rate of the past taps.
        initializer, regularizer: Of the kernel (with weight norm: of its direction).
        seed: Integer seed of DropConnect.

    Call arguments:
        training: Whether DropConnect is active.

    Returns:
        The kernel to convolve with, (tap, in, out).

    Raises:
        ValueError: `kernel_size` or `filters` not positive, `dropout` outside [0, 1), or with
            `weight_norm` an initializer that gives other numbers each time.

    Example:

    >>> kernel = ConvolutionKernel(2, 8, weight_norm=True)
    >>> kernel.build((None, None, 3))
    >>> kernel().shape
    (2, 3, 8)
    """

    def __init__(
        self,
        kernel_size,
        filters,
        *,
        weight_norm=False,
        dropout=0.0,
        initializer="glorot_uniform",
        regularizer=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if kernel_size < 1 or filters < 1:
            raise ValueError(
                "`kernel_size` and `filters` must be positive. "
                f"Received: kernel_size={kernel_size}, filters={filters}"
            )
        self.kernel_size = kernel_size
        self.filters = filters
        self.weight_norm = weight_norm
        self.initializer = keras.initializers.get(initializer)
        self.regularizer = keras.regularizers.get(regularizer)
        self.seed = seed
        if weight_norm and not _repeatable(self.initializer):
            raise ValueError(
                "With `weight_norm` the initializer must give equal numbers twice, for the gain "
                "begins as the kernel's norm: a Keras initializer whose seed is None or an "
                f"integer. Received: initializer={initializer!r}"
            )
        # Norms and masks are taken in the variables' dtype; the result is cast once, at the end.
        self.drop_connect = DropConnect(dropout, seed=seed, dtype=self.variable_dtype)

    def build(self, input_shape):
        """Creates the weights for an operand of shape (batch, time, in)."""
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.kernel_size, input_shape[-1], self.filters),
            initializer=self._initial_value,
            regularizer=self._penalty if self.regularizer else None,
            autocast=False,
        )
        self.gain = None
        if self.weight_norm:
            self.gain = self.add_weight(
                name="gain",
                shape=(self.filters,),
                # The gain starts at the norm of the direction, so that the kernel is the direction.
                # The variable itself cannot be read: XLA would refuse to compile a `fit` that
                # builds the model.
                initializer=lambda shape, dtype: _norm(
                    self._initial_value(self.kernel.shape, dtype)
                ),
                autocast=False,
            )

    def _initial_value(self, shape, dtype):
        return self.connected(self.initializer(shape, dtype=dtype))

    def _penalty(self, kernel):
        return self.regularizer(self.connected(ops.convert_to_tensor(kernel)))

    def connected(self, kernel):
        """The kernel with zeros where a subclass wants no connection. Here: the kernel."""
        return kernel

    def call(self, training=False):
        return ops.cast(self.uncast(training), self.compute_dtype)

    def uncast(self, training=False):
        """The same in the variables' dtype, for a loop that casts it in each of its turns."""
        kernel = self.connected(ops.convert_to_tensor(self.kernel))
        kernel = self.drop_connect(kernel, training=training)
        if self.gain is not None:
            kernel = weight_norm(kernel, self.gain)
        return kernel

    def get_config(self):
        return {
            **super().get_config(),
            "kernel_size": self.kernel_size,
            "filters": self.filters,
            "weight_norm": self.weight_norm,
            "dropout": self.drop_connect.rate,
            "initializer": keras.initializers.serialize(self.initializer),
            "regularizer": keras.regularizers.serialize(self.regularizer),
            "seed": self.seed,
        }
