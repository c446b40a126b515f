"""The three dropouts that TrellisNet adds to Keras' own.

Each layer draws its mask in one method, `draw`, so that a test (or a study) can put a known mask
in place of the random one.
"""

import keras
from keras import ops


class _MaskDropout(keras.layers.Layer):
    """What the three have in common: a rate, a seed and an inverted-dropout mask."""

    def __init__(self, rate, seed=None, **kwargs):
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"`rate` must be in [0, 1). Received: rate={rate} (layer {self.name})")
        self.rate = rate
        self.seed = seed
        # Without a seed generator at rate 0 the layer adds no random state to a model.
        self.seed_generator = keras.random.SeedGenerator(seed) if rate > 0 else None
        self.supports_masking = True
        self.built = True

    def draw(self, shape):
        """Draws a 0/1 mask of `shape` divided by `1 - rate`, in the compute dtype."""
        kept = keras.random.uniform(shape, dtype="float32", seed=self.seed_generator) >= self.rate
        return ops.cast(kept, self.compute_dtype) / (1 - self.rate)

    def active(self, training):
        return bool(training) and self.rate > 0

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


@keras.saving.register_keras_serializable("trellis_keras")
class VariationalDropout(_MaskDropout):
    """Dropout with one mask for all time steps (Gal & Ghahramani 2016).

    Unlike `keras.layers.SpatialDropout1D`, which is the same function of a 3-D input, it also
    takes the (batch, n_aux, time, channels) auxiliary outputs of a `TrellisLayer`, and it hands
    out its mask (`mask`) to layers that reuse it inside a loop.

    Args:
        rate: Fraction of the channels that are dropped, in [0, 1).
        seed: Integer seed, or None for a random one.

    Call arguments:
        inputs: Tensor (batch, ..., time, channels).
        training: Whether to drop anything.

    Returns:
        A tensor of the shape of `inputs`. Kept channels are scaled by `1 / (1 - rate)`.

    Raises:
        ValueError: `rate` outside [0, 1), or inputs without a time axis.

    Example:

    >>> y = VariationalDropout(0.3, seed=1)(np.ones((2, 5, 4), "float32"), training=True)
    >>> bool(np.all(y[:, 0] == y[:, 4]))
    True
    """

    def call(self, inputs, training=False):
        mask = self.mask(inputs, training)
        return inputs if mask is None else inputs * mask

    def mask(self, inputs, training=False):
        """Returns a mask that broadcasts over the time axis of `inputs`, or None if inactive."""
        if not self.active(training):
            return None
        if len(inputs.shape) < 3:
            raise ValueError(
                "VariationalDropout has one mask for all time steps of inputs (batch, ..., time, "
                f"channels). Received: inputs of shape {tuple(inputs.shape)}. Where there is no "
                "time, use keras.layers.Dropout."
            )
        shape = ops.shape(inputs)
        return self.draw((*shape[:-2], 1, shape[-1]))


@keras.saving.register_keras_serializable("trellis_keras")
class EmbeddingDropout(_MaskDropout):
    """Drops whole words: all occurrences of a word in a batch, or none (Gal & Ghahramani 2016).

    Equal to multiplying the embedding matrix with a (vocabulary, 1) mask before the lookup, but
    it touches only the rows that were looked up.

    Args:
        rate: Fraction of the vocabulary that is dropped, in [0, 1).
        input_dim: Size of the vocabulary.
        seed: Integer seed, or None for a random one.

    Call arguments:
        embedded: Tensor (batch, time, channels): the embeddings of `tokens`.
        tokens: Integer tensor (batch, time).
        training: Whether to drop anything.

    Returns:
        A tensor of the shape of `embedded`.

    Raises:
        ValueError: `rate` outside [0, 1), or `input_dim` not positive.

    Example:

    >>> tokens = np.array([[3, 1, 3]])
    >>> y = EmbeddingDropout(0.5, input_dim=4)(np.ones((1, 3, 2), "float32"), tokens, training=True)
    >>> bool(np.all(y[:, 0] == y[:, 2]))
    True
    """

    def __init__(self, rate, input_dim, seed=None, **kwargs):
        super().__init__(rate, seed=seed, **kwargs)
        if input_dim < 1:
            raise ValueError(f"`input_dim` must be positive. Received: input_dim={input_dim}")
        self.input_dim = input_dim

    def call(self, embedded, tokens, training=False):
        if not self.active(training):
            return embedded
        return embedded * ops.take(self.draw((self.input_dim, 1)), tokens, axis=0)

    def compute_output_shape(self, embedded_shape, tokens_shape=None):
        return embedded_shape

    def get_config(self):
        return {**super().get_config(), "input_dim": self.input_dim}


@keras.saving.register_keras_serializable("trellis_keras")
class DropConnect(_MaskDropout):
    """Drops weights of a convolution kernel that act on past steps (Wan et al. 2013).

    The last tap, which acts on the current step, is never dropped: it plays the part of a
    feed-forward matrix, the past taps that of recurrent ones, and only those are regularised
    (Merity et al. 2018; TrellisNet, section 5.3).

    Args:
        rate: Fraction of the past taps' weights that are dropped, in [0, 1).
        seed: Integer seed, or None for a random one.

    Call arguments:
        kernel: Tensor (tap, in, out).
        training: Whether to drop anything.

    Returns:
        A tensor of the shape of `kernel`.

    Raises:
        ValueError: `rate` outside [0, 1).

    Example:

    >>> kernel = DropConnect(0.5)(np.ones((2, 3, 4), "float32"), training=True)
    >>> bool(np.all(kernel[-1] == 1))
    True
    """

    def call(self, kernel, training=False):
        taps = kernel.shape[0]
        if not self.active(training) or taps == 1:
            return kernel
        past = kernel[:-1] * self.draw((taps - 1, *kernel.shape[1:]))
        return ops.concatenate([past, kernel[-1:]], axis=0)
