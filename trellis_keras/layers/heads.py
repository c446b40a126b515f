"""Output heads of language models: from hidden states to log-probabilities and losses."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import at_least_float32, shapes_match
from trellis_keras import kernels
from trellis_keras._keras_internals import AutocastScope
from trellis_keras.kernels import blockwise, clusters
from trellis_keras.kernels.activations import tanh
from trellis_keras.kernels.products import matmul
from trellis_keras.layers.checks import check_integer, check_rates, is_integer
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.saving import ConfigMixin
from trellis_keras.layers.seeds import seeded, sub_seed
from trellis_keras.types import Initializer, Shape, Tensor

# Number of logits of a mixture of softmaxes in memory at once: 16 MiB in float32. More are not
# faster on a CPU, and with 10,000 words they make 420 rows of a product, enough for a GPU.
LOGITS_AT_ONCE = 2**22
# Uniform in +-1/sqrt(channels).
_UNIFORM = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
_ZEROS = keras.initializers.serialize(keras.initializers.Zeros())


class Head(ConfigMixin, keras.layers.Layer):
    """The base class of output heads.

    A head maps hidden states (..., channels) to log-probabilities (..., vocabulary_size). A
    subclass defines `call(hidden, training=False)` and may define a cheaper `compute_nll` for
    valid targets. It has its own output matrix unless `embedding` is set.
    Logits, log-probabilities and losses are at least float32, whatever the dtype policy is.

    Args:
        vocabulary_size: Positive integer, number of tokens V.
    """

    def __init__(self, vocabulary_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size = check_integer("vocabulary_size", vocabulary_size, 1)
        self.embedding = None
        self.supports_masking = True

    def tie(self, embedding: keras.layers.Embedding) -> None:
        """Ties the output matrix to an embedding of (vocabulary_size, channels) before `build`."""
        if embedding.input_dim != self.vocabulary_size:
            raise ValueError(
                f"The tied embedding has {embedding.input_dim} tokens, but "
                f"vocabulary_size={self.vocabulary_size}"
            )
        if self.built:
            raise ValueError(f"The head {self.name} is built, with an output matrix of its own.")
        self.embedding = embedding

    def loss(self, hidden: Tensor, targets: Tensor, training: bool = False) -> Tensor:
        """Returns -log p(target) of each target, in nats.

        Args:
            hidden: Tensor (..., channels).
            targets: Integer tensor (...).
            training: Boolean, whether the head's own dropout is active. Defaults to `False`.

        Returns:
            Tensor of the shape of `targets`, at least float32; NaN for a target outside
            [0, vocabulary_size).
        """
        hidden, targets = ops.convert_to_tensor(hidden), ops.convert_to_tensor(targets)
        if not shapes_match(targets.shape, hidden.shape[:-1]):
            raise ValueError(
                f"`targets` must have shape {tuple(hidden.shape[:-1])}, that of `hidden` without "
                f"channels. Received: shape {tuple(targets.shape)}"
            )
        if not self.built:
            self.build(hidden.shape)
        targets = ops.cast(targets, "int32")
        # On some backends a lookup outside the vocabulary finds another word.
        is_word = (targets >= 0) & (targets < self.vocabulary_size)
        nll = self.compute_nll(hidden, ops.where(is_word, targets, 0), training)
        return ops.where(is_word, nll, np.nan)

    def compute_nll(self, hidden: Tensor, targets: Tensor, training: bool = False) -> Tensor:
        """Returns `loss` for an int32 tensor of valid targets."""
        log_p = self(hidden, training=training)
        return -ops.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], self.vocabulary_size)

    def compute_output_spec(self, hidden: Tensor, **_: Any) -> keras.KerasTensor:
        return keras.KerasTensor(self.compute_output_shape(hidden.shape), self._loss_dtype)

    @property
    def _loss_dtype(self):
        return at_least_float32(self.compute_dtype)

    def _add_bias(self, initializer):
        # Without autocast: rounded to half precision, it would be off in the logits.
        return self.add_weight(
            name="bias", shape=(self.vocabulary_size,), initializer=initializer, autocast=False
        )

    def _tied_matrix(self):
        """The embedding's matrix (V, channels)."""
        if self.embedding.quantization_mode is not None:
            raise ValueError(
                "An embedding tied to the output matrix cannot be quantized. For int8 use "
                'trellis_keras.export.export(model, path, format="litert", quantization="int8"). '
                f"Received: {self.embedding.name}, quantized to {self.embedding.quantization_mode}"
            )
        return self.embedding.embeddings

    def _check_tied_width(self, channels):
        if self.embedding is not None and self.embedding.output_dim != channels:
            raise ValueError(
                "A tied output matrix needs an embedding as wide as the hidden output. "
                f"Received: embedding_dim={self.embedding.output_dim}, hidden output "
                f"{channels} channels. Make them equal or set tie_embeddings=False."
            )


@keras.saving.register_keras_serializable("trellis_keras")
class DenseHead(Head):
    """A linear map to the vocabulary and a softmax.

        log p = log softmax(h E + b)

    Args:
        vocabulary_size: Positive integer, number of tokens V.
        kernel_initializer: Initializer for the output matrix E (channels, V), unless it is tied.
            Defaults to U(-0.1, 0.1).
        bias_initializer: Initializer for the bias b (V,). Defaults to `"zeros"`.

    Example:

    >>> head = DenseHead(vocabulary_size=7)
    >>> head(np.zeros((2, 3, 4), "float32")).shape
    (2, 3, 7)
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        kernel_initializer: Initializer = None,
        bias_initializer: Initializer = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(vocabulary_size, **kwargs)
        self.kernel_initializer = _or_uniform(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def build(self, input_shape: Shape) -> None:
        channels = input_shape[-1]
        self._check_tied_width(channels)
        if self.embedding is None:
            shape = channels, self.vocabulary_size
            self.kernel = self.add_weight(shape, self.kernel_initializer, name="kernel")
        self.bias = self._add_bias(self.bias_initializer)

    def call(self, hidden: Tensor, training: bool = False) -> Tensor:
        return ops.log_softmax(self.logits(hidden), axis=-1)

    def compute_nll(self, hidden: Tensor, targets: Tensor, training: bool = False) -> Tensor:
        return _nll(targets, self.logits(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (..., V), at least float32."""
        logits = matmul(hidden, self.matrix(), self.compute_dtype, self._loss_dtype)
        return logits + ops.cast(self.bias, self._loss_dtype)

    def matrix(self) -> Tensor:
        """Returns the output matrix (width, V) as a tensor of the variable's dtype."""
        # Uncast: else the gradients of a mixture's blocks would add up in half precision.
        with AutocastScope(None):
            if self.embedding is None:
                return ops.copy(self.kernel)
            return ops.transpose(self._tied_matrix())


@keras.saving.register_keras_serializable("trellis_keras")
class MixtureOfSoftmaxes(DenseHead):
    """A mixture of K softmaxes with a shared output matrix (Yang et al. 2018, section 2.4).

    The rank of a single softmax's log-probabilities is at most the width of its output matrix. A
    mixture has no such limit ("MoS" in Table 1 of the TrellisNet paper). With hidden state h,
    output matrix E and its bias b,

        prior = softmax(h W_prior + b_prior)                        (K,)
        latent_k = tanh(h W_k + b_k)                                k = 1..K
        p = sum_k prior_k softmax(latent_k E + b)                   (V,)

    W_prior and W_k start uniform in +-1/sqrt(channels), as in the authors' code.
    Time steps are computed in blocks whose logits, for all experts, take 16 MiB in float32 (at
    least one step). The backward pass recomputes them.

    Reference:

    - [Yang et al., 2018](https://arxiv.org/abs/1711.03953)

    Args:
        vocabulary_size: Positive integer, number of tokens V.
        experts: Positive integer, number of softmaxes K.
        latent_units: Positive integer, width of each latent vector and of the output matrix.
            Defaults to `None`, the width of a tied embedding, or else that of `hidden`.
        latent_dropout: Float in [0, 1), variational dropout rate of the latent vectors before the
            tanh, one mask per row (and auxiliary output) for all time steps. Defaults to `0`.
        epsilon: Positive float for log(p + epsilon), which the authors' code uses with 1e-8, or
            `None` for log(p) without underflow. Defaults to `None`.
        kernel_initializer: Initializer for the output matrix E (latent_units, V), unless it is
            tied. Defaults to U(-0.1, 0.1).
        bias_initializer: Initializer for its bias b (V,). Defaults to `"zeros"`.
        expert_bias_initializer: Initializer for b_prior and the latents' biases. Defaults to
            `"zeros"`.
        seed: Integer seed of the dropout, the default initializers and the expert biases.
            Defaults to `None`.

    Example:

    >>> head = MixtureOfSoftmaxes(vocabulary_size=7, experts=3, latent_units=5)
    >>> log_probabilities = head(np.ones((2, 3, 4), "float32"))
    >>> np.sum(np.exp(log_probabilities), axis=-1).round(5).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    removed_options = {"expert_kernel_initializer": keras.initializers.serialize(_UNIFORM)}

    def __init__(
        self,
        vocabulary_size: int,
        experts: int,
        *,
        latent_units: int | None = None,
        latent_dropout: float = 0.0,
        epsilon: float | None = None,
        kernel_initializer: Initializer = None,
        bias_initializer: Initializer = "zeros",
        expert_bias_initializer: Initializer = "zeros",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        kernel_seed = sub_seed(seed, "MixtureOfSoftmaxes", "kernel")
        super().__init__(
            vocabulary_size,
            kernel_initializer=_or_uniform(kernel_initializer, kernel_seed),
            bias_initializer=bias_initializer,
            **kwargs,
        )
        self.experts = check_integer("experts", experts, 1)
        check_rates(latent_dropout=latent_dropout)
        if latent_units is not None:
            latent_units = check_integer("latent_units", latent_units, 1)
        if epsilon is not None and not (
            isinstance(epsilon, numbers.Real) and 0 < epsilon < math.inf
        ):
            raise ValueError(f"`epsilon` must be positive or None. Received: epsilon={epsilon!r}")
        self.latent_units = latent_units
        self.epsilon = epsilon
        self.expert_bias_initializer = keras.initializers.get(expert_bias_initializer)
        self.seed = seed
        self.latent_dropout = VariationalDropout(
            latent_dropout,
            sub_seed(seed, "MixtureOfSoftmaxes", "latent_dropout"),
            dtype=self.dtype_policy,
            name="latent_dropout",
        )

    def build(self, input_shape: Shape) -> None:
        channels, width = input_shape[-1], self._latent_width(input_shape[-1])
        self.prior_kernel, self.prior_bias = self._add_linear("prior", (channels, self.experts))
        self.latent_kernel, self.latent_bias = self._add_linear(
            "latent", (channels, self.experts * width)
        )
        super().build((*input_shape[:-1], width))

    def _add_linear(self, name, shape):
        path = self.seed, "MixtureOfSoftmaxes", name
        kernel = self.add_weight(shape, seeded(_UNIFORM, *path, "kernel"), name=f"{name}_kernel")
        initial_bias = seeded(self.expert_bias_initializer, *path, "bias")
        return kernel, self.add_weight(shape[1:], initial_bias, name=f"{name}_bias")

    def _latent_width(self, channels):
        if self.embedding is None:
            return self.latent_units or channels
        width = self.embedding.output_dim
        if self.latent_units not in (None, width):
            raise ValueError(
                "A tied output matrix needs latent vectors as wide as the embedding. Received: "
                f"latent_units={self.latent_units}, embedding_dim={width}. Omit `latent_units`, "
                "or set tie_embeddings=False."
            )
        return width

    def call(self, hidden: Tensor, training: bool = False) -> Tensor:
        log_prior, latent = self._mixture(hidden, training)

        def log_mixture(log_prior, latent, kernel, bias):
            log_p = ops.log_softmax(self._expert_logits(latent, kernel, bias), axis=-1)
            return ops.logsumexp(log_prior[..., None] + log_p, axis=-2)

        return self._add_epsilon(self._in_blocks(log_mixture, log_prior, latent))

    def compute_nll(self, hidden: Tensor, targets: Tensor, training: bool = False) -> Tensor:
        log_prior, latent = self._mixture(hidden, training)

        def log_mixture(log_prior, latent, targets, kernel, bias):
            targets = ops.repeat(targets, self.experts, axis=-1)
            nll = _nll(targets, self._expert_logits(latent, kernel, bias))
            return ops.logsumexp(log_prior - nll, axis=-1, keepdims=True)

        log_p = self._in_blocks(log_mixture, log_prior, latent, targets[..., None])
        return -self._add_epsilon(log_p[..., 0])

    def _in_blocks(self, function, *tensors):
        """Returns `function(*tensors, kernel, bias)`."""
        weights = self.matrix(), ops.cast(self.bias, self._loss_dtype)
        if not kernels.enabled():
            return function(*tensors, *weights)
        logits = self.experts * self.vocabulary_size
        steps = blockwise.steps_within(LOGITS_AT_ONCE, tensors[0], logits)
        return blockwise.map_blocks(function, steps, tensors, weights)

    def _mixture(self, hidden, training):
        """Returns log priors (..., K), at least float32, and latents (..., K * latent_units)."""
        hidden = ops.cast(hidden, self.compute_dtype)
        prior = self._linear(hidden, self.prior_kernel, self.prior_bias)
        latent = self._linear(hidden, self.latent_kernel, self.latent_bias)
        # Drawn outside the blocks, which share one mask.
        latent = tanh(self.latent_dropout(latent, training=training))
        return ops.log_softmax(ops.cast(prior, self._loss_dtype), axis=-1), latent

    def _linear(self, x, kernel, bias):
        kernel, bias = (ops.cast(weight, self.compute_dtype) for weight in (kernel, bias))
        return ops.matmul(x, kernel) + bias

    def _expert_logits(self, latent, kernel, bias):
        """(..., K * latent_units) -> (..., K, V)."""
        width, words = kernel.shape
        latent_rows = ops.reshape(latent, (-1, width))
        # The kernel is cast for each block, so that the blocks' gradients are summed in float32.
        logits = matmul(latent_rows, kernel, self.compute_dtype, self._loss_dtype) + bias
        return ops.reshape(logits, (*ops.shape(latent)[:-1], self.experts, words))

    def _add_epsilon(self, log_p):
        """log(p + epsilon) = log p + log(1 + epsilon / p)."""
        if self.epsilon is None:
            return log_p
        return log_p + ops.softplus(math.log(self.epsilon) - log_p)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "latent_dropout": self.latent_dropout.rate}


@keras.saving.register_keras_serializable("trellis_keras")
class AdaptiveSoftmax(Head):
    """A softmax over frequent words and clusters of rare ones (Grave et al. 2017, section 4).

    Words are sorted by decreasing frequency and split into a head [0, cutoffs[0]) and tails
    [cutoffs[0], cutoffs[1]), ..., [cutoffs[-1], V). The head also has one token for each tail:

        log p(word) = log p_head(word)                                  for a word in the head
        log p(word) = log p_head(tail) + log p_tail(word | tail)        for a word in a tail

    `loss` computes the head for all tokens, and a tail only for the tokens whose target is in it:
    about 1/32 of the batch at a time, repeatedly until all are done, so shapes are static and
    results exact.

    When tied to an embedding, the matrix of each cluster is a slice of the embedding matrix, as in
    the split cross-entropy of the TrellisNet authors' code. Untied tails may be narrower: with
    `div_value=4`, tail i = 1, 2, ... has a projection to channels // 4**i and a matrix of that
    width, as in the paper.

    Reference:

    - [Grave et al., 2017](https://arxiv.org/abs/1609.04309)

    Args:
        vocabulary_size: Positive integer, number of words V.
        cutoffs: Increasing integers between 1 and V - 1, the first word of each tail. Empty for
            a single softmax.
        div_value: Number, at least 1, the factor by which each tail is narrower than the previous
            one. Defaults to `1`: tails are as wide as the hidden states, without projections.
        kernel_initializer: Initializer for the clusters' matrices (words, width) and projections
            (channels, width), unless they are tied. Defaults to U(-0.1, 0.1).
        bias_initializer: Initializer for the biases of words (V,) and of tails. Defaults to
            `"zeros"`.
        seed: Integer seed of the initializers. Defaults to `None`.

    Example:

    >>> head = AdaptiveSoftmax(vocabulary_size=1000, cutoffs=(100, 400), div_value=2)
    >>> hidden = np.random.normal(size=(2, 3, 8)).astype("float32")
    >>> head(hidden).shape
    (2, 3, 1000)
    >>> head.loss(hidden, np.array([[3, 999, 100], [0, 150, 42]])).shape
    (2, 3)
    """

    removed_options = {"capacity": None, "cluster_initializer": _ZEROS}

    def __init__(
        self,
        vocabulary_size: int,
        cutoffs: Sequence[int],
        *,
        div_value: float = 1,
        kernel_initializer: Initializer = None,
        bias_initializer: Initializer = "zeros",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(vocabulary_size, **kwargs)
        self.cutoffs = _check_cutoffs(cutoffs, vocabulary_size)
        is_number = isinstance(div_value, numbers.Real)
        if not is_number or not div_value >= 1:
            raise ValueError(f"`div_value` must be at least 1. Received: div_value={div_value!r}")
        self.div_value = div_value
        self.kernel_initializer = _or_uniform(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed

    def tie(self, embedding: keras.layers.Embedding) -> None:
        if self.div_value != 1:
            raise ValueError(
                "A head tied to an embedding must have div_value=1, for tails as wide as the "
                "embedding. For projected tails, set tie_embeddings=False. "
                f"Received: div_value={self.div_value}"
            )
        super().tie(embedding)

    def build(self, input_shape: Shape) -> None:
        channels, tails = input_shape[-1], len(self.cutoffs)
        self._check_tied_width(channels)
        if self.embedding is None:
            self._add_kernels(channels)
        path = self.bias_initializer, self.seed, "AdaptiveSoftmax"
        self.bias = self._add_bias(seeded(*path, "bias"))
        if tails:
            # The vectors of the tail tokens in the head.
            self.cluster_kernel = self.add_weight((tails, channels), "zeros", name="cluster_kernel")
            self.cluster_bias = self.add_weight(
                (tails,), seeded(*path, "cluster_bias"), autocast=False, name="cluster_bias"
            )

    def _add_kernels(self, channels):
        """Adds the matrix of each cluster and, for `div_value > 1`, the tails' projections."""
        self.kernels, self.projections = [], []
        bounds = [0, *self.cutoffs, self.vocabulary_size]
        for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            width = int(channels // self.div_value**i)
            if width < 1:
                raise ValueError(
                    f"div_value={self.div_value} leaves no channels for tail {i} of "
                    f"{len(self.cutoffs)}: channels // div_value**{i} is 0 for {channels} channels."
                )
            self.kernels.append(self._add_matrix("kernel", i, (end - begin, width)))
            if i and self.div_value > 1:
                self.projections.append(self._add_matrix("projection", i, (channels, width)))

    def _add_matrix(self, part, i, shape):
        initializer = seeded(self.kernel_initializer, self.seed, "AdaptiveSoftmax", part, i)
        return self.add_weight(shape, initializer, name=f"{part}_{i}")

    def call(self, hidden: Tensor, training: bool = False) -> Tensor:
        hidden = ops.cast(hidden, self.compute_dtype)
        head, *tails = self.read_clusters()
        log_p = self._log_softmax(hidden, head)
        words = log_p.shape[-1] - len(tails)
        parts = [log_p[..., :words]]
        for i, tail in enumerate(tails):
            parts.append(log_p[..., words + i, None] + self._log_softmax(hidden, tail))
        return ops.concatenate(parts, axis=-1)

    def _log_softmax(self, hidden, cluster):
        kernel, bias, projection = cluster
        if projection is not None:
            hidden = ops.matmul(hidden, ops.cast(projection, hidden.dtype))
        logits = ops.matmul(hidden, ops.transpose(ops.cast(kernel, hidden.dtype)))
        return ops.log_softmax(ops.cast(logits, bias.dtype) + bias, axis=-1)

    def compute_nll(self, hidden: Tensor, targets: Tensor, training: bool = False) -> Tensor:
        if not kernels.enabled():
            return super().compute_nll(hidden, targets, training)
        hidden = ops.cast(hidden, self.compute_dtype)
        flat = ops.reshape(hidden, (-1, hidden.shape[-1]))
        # At most 32 iterations: each adds to the gradient of the tail's whole matrix. A larger
        # capacity would compute more padding.
        capacity = ops.shape(flat)[0] // 32 + 32
        words = ops.reshape(targets, (-1,))
        nll = clusters.cluster_nll(flat, words, self.read_clusters(), self.cutoffs, capacity)
        return ops.reshape(nll, ops.shape(targets))

    def read_clusters(self) -> list[clusters.Cluster]:
        """Returns the weights of the head, then of each tail.

        The weights of the head have the tail tokens after its words.
        """
        if self.embedding is None:
            # Copies, because custom gradients do not accept variables in TensorFlow's eager mode.
            matrices = [ops.copy(kernel) for kernel in self.kernels]
            projections = [None, *map(ops.copy, self.projections)]
        else:
            matrices, projections = self._split(self._tied_matrix()), []
        biases = self._split(ops.cast(self.bias, self._loss_dtype))
        if self.cutoffs:
            cluster_bias = ops.cast(self.cluster_bias, self._loss_dtype)
            matrices[0] = ops.concatenate([matrices[0], self.cluster_kernel])
            biases[0] = ops.concatenate([biases[0], cluster_bias])
        projections += [None] * (len(matrices) - len(projections))
        return [clusters.Cluster(*c) for c in zip(matrices, biases, projections, strict=True)]

    def _split(self, weight):
        """Splits a weight (V, ...) at the cutoffs, with an operation that has a single gradient."""
        return list(ops.split(weight, self.cutoffs)) if self.cutoffs else [ops.copy(weight)]


def _nll(targets, logits):
    """-log softmax(logits) at the targets, in the dtype of the logits (Keras' may be float64)."""
    nll = ops.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    return ops.cast(nll, logits.dtype)


def _check_cutoffs(cutoffs: Sequence[int], vocabulary_size: int) -> list[int]:
    """Returns the first words of the tails as a list."""
    integers = np.ndim(cutoffs) == 1 and all(is_integer(c) for c in cutoffs)
    bounds = [0, *cutoffs, vocabulary_size] if integers else []
    if not integers or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(
            "`cutoffs` must be increasing integers between 1 and vocabulary_size - 1 = "
            f"{vocabulary_size - 1}. Received: cutoffs={cutoffs}"
        )
    return [int(c) for c in cutoffs]


def _or_uniform(initializer, seed=None):
    """Returns the given initializer, or U(-0.1, 0.1) for None."""
    if initializer is None:
        return keras.initializers.RandomUniform(-0.1, 0.1, seed=seed)
    return keras.initializers.get(initializer)
