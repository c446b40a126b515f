"""Output heads of language models: from hidden states to log-probabilities and losses.

The protocol of a head is two methods and an optional third:

- `call(hidden)` returns log-probabilities (..., vocabulary): what `predict` and serving need;
- `loss(hidden, targets)` returns the negative log-likelihood of each target in nats (...): what
  training and evaluation need. A head may compute it without ever holding all logits; one with a
  dropout of its own takes `loss(hidden, targets, training=False)`;
- `tie(embedding)` makes the head use the matrix of a `keras.layers.Embedding`.

`hidden` is (..., channels), with any number of leading axes.
"""

import keras
from keras import ops

from trellis_keras.layers.base import at_least_float32, check_positive


class Head(keras.layers.Layer):
    """What a head returns, symbolically: it is at least float32 in half precision too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def check_vocabulary(self, embedding):
        """Raises a `ValueError` where an embedding that is to be tied has other tokens."""
        if embedding.input_dim != self.vocabulary_size:
            raise ValueError(
                f"The tied embedding has {embedding.input_dim} tokens, but "
                f"vocabulary_size={self.vocabulary_size}"
            )

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.vocabulary_size)

    def compute_output_spec(self, hidden, **_):
        shape = self.compute_output_shape(hidden.shape)
        return keras.KerasTensor(shape, at_least_float32(self.compute_dtype))


def tied_matrix(embedding):
    """Returns the matrix (V, channels) of a `keras.layers.Embedding`.

    Raises:
        ValueError: It holds the numbers of a quantization.
    """
    if embedding.quantization_mode is not None:
        raise ValueError(
            "The output matrix is the embedding's, which cannot be quantized then. For int8 use "
            f'serving.export(model, path, format="litert", quantization="int8"). Received: '
            f"{embedding.name}, quantized to {embedding.quantization_mode}"
        )
    return embedding.embeddings


@keras.saving.register_keras_serializable("trellis_keras")
class DenseHead(Head):
    """A linear map to the vocabulary and a softmax; its matrix may be the embedding's.

    Args:
        vocabulary_size: Number of tokens V.
        kernel_initializer: Of the (channels, V) matrix when it is not tied. Default: U(-0.1, 0.1).
        bias_initializer: Of the (V,) bias.

    Call arguments:
        hidden: Tensor (..., channels).

    Returns:
        Log-probabilities (..., V), at least float32.

    Raises:
        ValueError: `vocabulary_size` is not positive, or a tied embedding has another vocabulary
            or not as many units as `hidden` has channels.

    Example:

    >>> head = DenseHead(vocabulary_size=7)
    >>> head(np.zeros((2, 3, 4), "float32")).shape
    (2, 3, 7)
    """

    def __init__(
        self, vocabulary_size, kernel_initializer=None, bias_initializer="zeros", **kwargs
    ):
        super().__init__(**kwargs)
        check_positive(vocabulary_size=vocabulary_size)
        self.vocabulary_size = vocabulary_size
        self.kernel_initializer = (
            keras.initializers.RandomUniform(-0.1, 0.1)
            if kernel_initializer is None
            else keras.initializers.get(kernel_initializer)
        )
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.embedding = None

    def tie(self, embedding):
        """Uses the matrix of `embedding`, a `keras.layers.Embedding` of (V, channels).

        Raises:
            ValueError: The embedding has another vocabulary.
        """
        self.check_vocabulary(embedding)
        self.embedding = embedding

    def build(self, input_shape):
        channels = input_shape[-1]
        if self.embedding is None:
            self.kernel = self.add_weight(
                name="kernel",
                shape=(channels, self.vocabulary_size),
                initializer=self.kernel_initializer,
            )
        elif self.embedding.output_dim != channels:
            raise ValueError(
                "A tied output matrix needs an embedding as wide as the hidden output. "
                f"Received: embedding_dim={self.embedding.output_dim}, hidden output "
                f"{channels} channels. Make them equal or set tie_embeddings=False."
            )
        self.bias = self.add_weight(
            name="bias",
            shape=(self.vocabulary_size,),
            initializer=self.bias_initializer,
            autocast=False,  # logits are at least float32
        )

    def logits(self, hidden):
        """Returns unnormalised log-probabilities (..., V), at least float32."""
        kernel = (
            self.kernel if self.embedding is None else ops.transpose(tied_matrix(self.embedding))
        )
        kernel = ops.cast(kernel, self.compute_dtype)
        logits = ops.matmul(ops.cast(hidden, self.compute_dtype), kernel)
        wide = at_least_float32(self.compute_dtype)
        return ops.cast(logits, wide) + ops.cast(self.bias, wide)

    def call(self, hidden):
        return ops.log_softmax(self.logits(hidden), axis=-1)

    def loss(self, hidden, targets):
        """Returns -log p(target), in nats, of the shape of `targets`.

        Args:
            hidden: Tensor (..., channels).
            targets: Integer tensor (...).
        """
        return ops.sparse_categorical_crossentropy(targets, self.logits(hidden), from_logits=True)

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }
