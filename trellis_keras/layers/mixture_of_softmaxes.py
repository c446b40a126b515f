"""An output head whose distribution is a mixture of several softmaxes."""

import math
import numbers

import keras
from keras import ops

from trellis_keras.kernels.scan import scan
from trellis_keras.layers import base
from trellis_keras.layers.base import at_least_float32, tanh
from trellis_keras.layers.heads import DenseHead, tied_matrix
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.time_blocks import TimeBlocks, over_blocks

# Logits that exist at once with `block_steps="auto"`: 16 MiB of them in float32. More make no step
# faster on a processor, and with V = 10,000 these are 420 rows of a product: enough for a GPU.
AUTOMATIC = 2**22


@keras.saving.register_keras_serializable("trellis_keras")
class MixtureOfSoftmaxes(DenseHead):
    """A mixture of K softmaxes over one output matrix (Yang et al. 2018, section 2.4).

    The rank of the log-probabilities of a single softmax is at most the width of its output
    matrix; a mixture's is not (TrellisNet, Table 1: "MoS"). With hidden state g, output matrix E
    and its bias b,

        prior = softmax(g W_prior + b_prior)                        (K,)
        latent_k = tanh(g W_k + b_k)                                k = 1..K
        p = sum_k prior_k softmax(latent_k E^T + b)                 (V,)

    It follows the protocol of `layers.heads`. `loss` holds the logits of all experts for a block
    of time steps only, and computes them a second time for the gradient, which is exact.

    Args:
        vocabulary_size: Number of tokens V.
        experts: Number of softmaxes K.
        latent_units: Width of each latent vector, which is that of the output matrix. Default:
            the width of a tied embedding, else the number of channels of `hidden`.
        latent_dropout: Variational dropout rate of the latent vectors before the tanh, as in the
            authors' program: one mask per row (and auxiliary output), for all time steps.
        epsilon: None for log(p), computed without underflow, or a number for the authors'
            log(p + epsilon), where it is 1e-8 (the probabilities then add up to more than 1).
        block_steps: Time steps whose logits exist at once, an integer, None for all or `"auto"`
            for as many as have 16 MiB of logits in float32 (at least one).
        kernel_initializer: Of the output matrix (latent_units, V) when it is not tied. Default:
            U(-0.1, 0.1).
        bias_initializer: Of its bias (V,).
        expert_kernel_initializer: Of W_prior (channels, K) and W (channels, K * latent_units),
            one expert after the other. Default: uniform in +-1/sqrt(channels), the authors'.
        expert_bias_initializer: Of b_prior and of the latents' biases.
        seed: Integer seed of the dropout and the default initializers.

    Call arguments:
        hidden: Tensor (..., time, channels).
        training: Whether latent vectors are dropped.

    Returns:
        Log-probabilities (..., time, V), at least float32.

    Raises:
        ValueError: No experts, a rate outside [0, 1), or an embedding of another width than the
            latent vectors.

    Example:

    >>> head = MixtureOfSoftmaxes(vocabulary_size=7, experts=3, latent_units=5)
    >>> log_probabilities = head(np.ones((2, 3, 4), "float32"))
    >>> np.sum(np.exp(log_probabilities), axis=-1).round(5).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]

    The output of a language model's backbone need not be as wide as the embedding then:

    >>> backbone = TrellisLayer(units=24, depth=6, output_units=20)
    >>> model = LanguageModel(50, 16, backbone, head=MixtureOfSoftmaxes(50, experts=3))
    >>> model.compile("adam")
    """

    def __init__(
        self,
        vocabulary_size,
        experts,
        latent_units=None,
        latent_dropout=0.0,
        epsilon=None,
        block_steps="auto",
        kernel_initializer=None,
        bias_initializer="zeros",
        expert_kernel_initializer=None,
        expert_bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        if kernel_initializer is None:
            own_seed = base.sub_seed(seed, 1)
            kernel_initializer = keras.initializers.RandomUniform(-0.1, 0.1, seed=own_seed)
        super().__init__(vocabulary_size, kernel_initializer, bias_initializer, **kwargs)
        base.check_positive(experts=experts)
        if latent_units is not None:
            base.check_positive(latent_units=latent_units)
        if block_steps not in (None, "auto"):
            _check_block_steps(block_steps)
        if epsilon is not None and not (isinstance(epsilon, numbers.Real) and epsilon > 0):
            raise ValueError(f"`epsilon` must be positive or None. Received: epsilon={epsilon!r}")
        self.experts = experts
        self.latent_units = latent_units
        self.epsilon = epsilon
        self.block_steps = block_steps
        usual = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        self.expert_kernel_initializer = keras.initializers.get(
            usual if expert_kernel_initializer is None else expert_kernel_initializer
        )
        self.expert_bias_initializer = keras.initializers.get(expert_bias_initializer)
        self.seed = seed
        self.latent_dropout = VariationalDropout(
            latent_dropout,
            base.sub_seed(seed, 0),
            dtype=self.dtype_policy,
            name="latent_dropout",
        )

    def build(self, input_shape):
        channels, width = input_shape[-1], self._latent_width(input_shape[-1])
        self.prior_kernel, self.prior_bias = self._linear_weights(
            "prior", (channels, self.experts), 0
        )
        self.latent_kernel, self.latent_bias = self._linear_weights(
            "latent", (channels, self.experts * width), 1
        )
        super().build((*input_shape[:-1], width))

    def _linear_weights(self, name, shape, part):
        kernel = self.add_weight(
            name=f"{name}_kernel",
            shape=shape,
            initializer=base.seeded(self.expert_kernel_initializer, self.seed, 2, part),
        )
        bias = self.add_weight(
            name=f"{name}_bias",
            shape=shape[1:],
            initializer=base.seeded(self.expert_bias_initializer, self.seed, 3, part),
        )
        return kernel, bias

    def _latent_width(self, channels):
        if self.embedding is None:
            return self.latent_units or channels
        width = self.embedding.output_dim
        if self.latent_units not in (None, width):
            raise ValueError(
                "A tied output matrix needs latent vectors as wide as the embedding. Received: "
                f"latent_units={self.latent_units}, embedding_dim={width}. Leave `latent_units` "
                "out, or set tie_embeddings=False."
            )
        return width

    def call(self, hidden, training=False):
        log_prior, latent = self._mixture(hidden, training)
        mixed = _Experts(self, latent).mixed
        blocks = self._blocks(latent)
        if blocks.single:
            log_p = mixed(log_prior, latent)
        else:
            log_p = blocks.join(over_blocks(mixed, blocks.cut(log_prior), blocks.cut(latent)))
        return self._with_epsilon(log_p)

    def loss(self, hidden, targets, training=False):
        """Returns -log p(target), in nats, of the shape of `targets`.

        Args:
            hidden: Tensor (..., time, channels).
            targets: Integer tensor (..., time).
            training: Whether latent vectors are dropped.
        """
        log_prior, latent = self._mixture(hidden, training)
        experts = _Experts(self, latent)
        blocks = self._blocks(latent)
        targets = targets[..., None]
        if blocks.single:
            nll = experts.nll(latent, targets)
        else:
            nll = blocks.join(experts.nll_of_blocks(blocks.cut(latent), blocks.cut(targets)))
        return -self._with_epsilon(ops.logsumexp(log_prior - nll, axis=-1))

    def _mixture(self, hidden, training):
        """Returns log priors (..., K), at least float32, and latents (..., K * latent_units)."""
        hidden = ops.cast(hidden, self.compute_dtype)
        prior = self._linear(hidden, self.prior_kernel, self.prior_bias)
        latent = self._linear(hidden, self.latent_kernel, self.latent_bias)
        # Drawn here for all blocks and for the second computation.
        latent = tanh(self.latent_dropout(latent, training=training))
        wide = at_least_float32(self.compute_dtype)
        return ops.log_softmax(ops.cast(prior, wide), axis=-1), latent

    def _linear(self, x, kernel, bias):
        kernel, bias = (ops.cast(weight, self.compute_dtype) for weight in (kernel, bias))
        return ops.matmul(x, kernel) + bias

    def _blocks(self, latent):
        *leading, time, _ = ops.shape(latent)
        if self.block_steps is None:
            return TimeBlocks(latent, time)
        if self.block_steps != "auto":
            return TimeBlocks(latent, self.block_steps)
        steps = AUTOMATIC // (self.experts * self.vocabulary_size)
        for rows in leading:
            steps = steps // rows
        # Where the number of rows is not known yet it is a tensor.
        return TimeBlocks(
            latent, max(1, steps) if isinstance(steps, int) else ops.maximum(1, steps)
        )

    def _with_epsilon(self, log_p):
        """log(p + epsilon) = log p + log(1 + epsilon / p)."""
        if self.epsilon is None:
            return log_p
        return log_p + ops.softplus(math.log(self.epsilon) - log_p)

    def get_config(self):
        serialize = keras.initializers.serialize
        return {
            **super().get_config(),
            "experts": self.experts,
            "latent_units": self.latent_units,
            "latent_dropout": self.latent_dropout.rate,
            "epsilon": self.epsilon,
            "block_steps": self.block_steps,
            "expert_kernel_initializer": serialize(self.expert_kernel_initializer),
            "expert_bias_initializer": serialize(self.expert_bias_initializer),
            "seed": self.seed,
        }


class _Experts:
    """The K softmaxes of some latent vectors (..., K * latent_units)."""

    def __init__(self, head, latent):
        self.experts, self.width = head.experts, latent.shape[-1] // head.experts
        tied = head.embedding is not None
        kernel = ops.transpose(tied_matrix(head.embedding)) if tied else head.kernel
        self.kernel = ops.cast(kernel, head.compute_dtype)
        self.wide = at_least_float32(head.compute_dtype)
        self.bias = ops.cast(head.bias, self.wide)

    def logits(self, latent, kernel, bias):
        """(..., K * latent_units) -> (..., K, V)."""
        logits = ops.matmul(ops.reshape(latent, (-1, self.width)), kernel)
        logits = ops.cast(logits, self.wide) + bias
        shape = (*ops.shape(latent)[:-1], self.experts, kernel.shape[-1])
        return ops.reshape(logits, shape)

    def mixed(self, log_prior, latent):
        """Log-probabilities (..., V) of the mixture with log priors (..., K)."""
        log_p = ops.log_softmax(self.logits(latent, self.kernel, self.bias), axis=-1)
        return ops.logsumexp(log_prior[..., None] + log_p, axis=-2)

    def nll(self, latent, targets):
        """Negative log-likelihood (..., K) that each expert gives the targets (..., 1)."""
        return self._nll(latent, targets, self.kernel, self.bias)

    def _nll(self, latent, targets, kernel, bias):
        logits = self.logits(latent, kernel, bias)
        targets = ops.repeat(targets, self.experts, axis=-1)
        return ops.sparse_categorical_crossentropy(targets, logits, from_logits=True)

    def nll_of_blocks(self, latent, targets):
        """As `nll`, for (blocks, positions, K * latent_units); one block's logits exist at once."""

        @ops.custom_gradient
        def nll(latent, kernel, bias):
            def gradient(upstream, **_):
                return self._gradient(upstream, latent, targets, kernel, bias)

            # Else TensorFlow's eager mode records what it will not need.
            stopped = [ops.stop_gradient(weight) for weight in (kernel, bias)]
            blocks = over_blocks(
                lambda latent, targets: self._nll(latent, targets, *stopped),
                ops.stop_gradient(latent),
                targets,
            )
            return blocks, gradient

        return nll(latent, self.kernel, self.bias)

    def _gradient(self, upstream, latent, targets, kernel, bias):
        """The gradient of `nll_of_blocks` with respect to latent, kernel and bias."""

        def step(carry, now):
            d_kernel, d_bias = carry
            latent, targets, upstream = now
            p = ops.softmax(self.logits(latent, kernel, bias), axis=-1)
            d_logits = p - ops.one_hot(targets, kernel.shape[-1], dtype=self.wide)
            d_logits = ops.reshape(d_logits * upstream[..., None], (-1, kernel.shape[-1]))
            d_bias = d_bias + ops.sum(d_logits, axis=0)
            d_logits = ops.cast(d_logits, kernel.dtype)
            of_kernel = ops.matmul(ops.transpose(ops.reshape(latent, (-1, self.width))), d_logits)
            d_kernel = d_kernel + ops.cast(of_kernel, self.wide)
            d_latent = ops.matmul(d_logits, ops.transpose(kernel))
            return (d_kernel, d_bias), [ops.reshape(d_latent, ops.shape(latent))]

        start = ops.zeros_like(ops.cast(kernel, self.wide)), ops.zeros_like(bias)
        (d_kernel, d_bias), (d_latent,) = scan(step, start, [latent, targets, upstream])
        return d_latent, ops.cast(d_kernel, kernel.dtype), d_bias


def _check_block_steps(block_steps):
    if not isinstance(block_steps, numbers.Integral) or block_steps < 1:
        raise ValueError(
            '`block_steps` must be a positive integer, None or "auto". '
            f"Received: block_steps={block_steps!r}"
        )
