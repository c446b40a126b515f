"""A softmax in clusters, for large vocabularies."""

import numbers

import keras
from keras import ops

from trellis_keras.layers.adaptive_softmax_loss import Cluster, ClusterLoss, visit
from trellis_keras.layers.base import check_positive, seeded
from trellis_keras.layers.heads import Head, tied_matrix


@keras.saving.register_keras_serializable("trellis_keras")
class AdaptiveSoftmax(Head):
    """A softmax over frequent words and clusters of rare ones (Grave et al. 2017, section 4).

    Words are numbered by falling frequency and cut into a head [0, cutoffs[0]) and tails
    [cutoffs[0], cutoffs[1]), ..., [cutoffs[-1], V). The head also holds one token for each tail:

        log p(word) = log p_head(word)                                  for a word of the head
        log p(word) = log p_head(tail) + log p_tail(word | tail)        for a word of a tail

    The loss computes the head for all tokens, and a tail only for those tokens whose target is in
    it: its cost grows with the head and with the tails that occur.

    It is a head as `layers.heads` describes it. Tied to an embedding (`tie`), the matrix of each
    cluster is a slice of the embedding's, as in the split cross-entropy of the TrellisNet
    authors' programs. With weights of its own the tails may be narrower: `div_value=4` makes tail
    i = 1, 2, ... a projection to channels // 4**i and a matrix of that width, as in the paper.

    Static shapes and exact results: `loss` gathers the tokens of a tail `capacity` at a time, in a
    loop of as many turns as there are such tokens. A batch that overflows the capacity takes more
    turns; none of its tokens is dropped. A tail that no token needs costs nothing. No array has
    more than capacity x (words of the tail) elements, neither in the gradient, which computes the
    logits of a tail again.

    Args:
        vocabulary_size: Number of words V.
        cutoffs: First word of each tail, increasing, between 1 and V - 1. Empty: one softmax.
        div_value: By how much each tail is narrower than the one before it; 1 for tails as wide as
            the hidden states, without projections.
        capacity: How many tokens a turn takes: an integer, or one for each tail. Default:
            n // 32 + 32, n being the number of tokens in the batch. Each turn computes that many
            rows, however few of them count, and goes once over the gradient of the tail's matrix.
        kernel_initializer: Of the clusters' matrices (words, width) and projections
            (channels, width) when they are not tied. Default: U(-0.1, 0.1).
        cluster_initializer: Of the vectors that stand for the tails in the head.
        bias_initializer: Of the biases, of words (V,) and of tails.
        seed: Integer seed of the initialisers.

    Call arguments:
        hidden: Tensor (..., channels).

    Returns:
        Log-probabilities (..., V), at least float32.

    Raises:
        ValueError: Cutoffs that are not increasing or beyond the vocabulary; a `div_value` below 1
            or that leaves a tail no width; a wrong capacity; a tied embedding of another width or
            vocabulary; a tied embedding with `div_value > 1`.

    Example:

    >>> head = AdaptiveSoftmax(vocabulary_size=1000, cutoffs=(100, 400), div_value=2)
    >>> hidden = np.random.normal(size=(2, 3, 8)).astype("float32")
    >>> head(hidden).shape
    (2, 3, 1000)
    >>> head.loss(hidden, np.array([[3, 999, 100], [0, 150, 42]])).shape
    (2, 3)
    >>> log_probs, words = head.top_k(hidden, k=5)
    >>> words.shape
    (2, 3, 5)

    In a language model, with the embedding's matrix:

    >>> head = AdaptiveSoftmax(1000, cutoffs=(100, 400))
    >>> model = LanguageModel(1000, 8, TCN(8, kernel_size=2, depth=2), head=head)
    """

    def __init__(
        self,
        vocabulary_size,
        cutoffs,
        div_value=1,
        capacity=None,
        kernel_initializer=None,
        cluster_initializer="zeros",
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive(vocabulary_size=vocabulary_size)
        cutoffs = check_cutoffs(cutoffs, vocabulary_size)
        if not isinstance(div_value, numbers.Real) or not div_value >= 1:
            raise ValueError(f"`div_value` must be at least 1. Received: div_value={div_value!r}")
        self.vocabulary_size = vocabulary_size
        self.cutoffs = cutoffs
        self.div_value = div_value
        self.capacity = _check_capacity(capacity, len(cutoffs))
        self.kernel_initializer = (
            keras.initializers.RandomUniform(-0.1, 0.1)
            if kernel_initializer is None
            else keras.initializers.get(kernel_initializer)
        )
        self.cluster_initializer = keras.initializers.get(cluster_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed
        self.embedding = None
        self._bounds = [0, *cutoffs, vocabulary_size]

    def tie(self, embedding):
        """Uses the matrix of `embedding`, a `keras.layers.Embedding` of (V, channels).

        Raises:
            ValueError: The embedding has another vocabulary, or `div_value` is not 1.
        """
        if self.div_value != 1:
            raise ValueError(
                "A head that is tied to an embedding has tails as wide as the embedding: "
                "div_value=1. With projected tails, set tie_embeddings=False. "
                f"Received: div_value={self.div_value}"
            )
        self.check_vocabulary(embedding)
        self.embedding = embedding

    def build(self, input_shape):
        channels, tails = input_shape[-1], len(self.cutoffs)
        if self.embedding is None:
            self._add_kernels(channels)
        elif self.embedding.output_dim != channels:
            raise ValueError(
                "A tied output matrix needs an embedding as wide as the hidden output. "
                f"Received: embedding_dim={self.embedding.output_dim}, hidden output "
                f"{channels} channels. Make them equal or set tie_embeddings=False."
            )
        # Biases are not rounded in half precision: logits are at least float32.
        self.bias = self.add_weight(
            name="bias",
            shape=(self.vocabulary_size,),
            initializer=seeded(self.bias_initializer, self.seed, 0, 1),
            autocast=False,
        )
        if tails:
            self.cluster_kernel = self.add_weight(
                name="cluster_kernel",
                shape=(tails, channels),
                initializer=seeded(self.cluster_initializer, self.seed, 0),
            )
            self.cluster_bias = self.add_weight(
                name="cluster_bias",
                shape=(tails,),
                initializer=seeded(self.bias_initializer, self.seed, 0, 2),
                autocast=False,
            )

    def _add_kernels(self, channels):
        """Adds the matrix of each cluster and, for `div_value > 1`, the tails' projections."""
        self.kernels, self.projections = [], []
        for i, (begin, end) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            width = int(channels // self.div_value**i)
            if width < 1:
                raise ValueError(
                    f"div_value={self.div_value} leaves tail {i} of {len(self.cutoffs)} no width: "
                    f"channels // div_value**{i} is 0 for {channels} channels."
                )
            initial = [seeded(self.kernel_initializer, self.seed, 1 + i, part) for part in (0, 1)]
            self.kernels.append(
                self.add_weight(
                    name=f"kernel_{i}", shape=(end - begin, width), initializer=initial[0]
                )
            )
            if i and self.div_value > 1:
                self.projections.append(
                    self.add_weight(
                        name=f"projection_{i}", shape=(channels, width), initializer=initial[1]
                    )
                )

    # The list of all weights as tensors, as clusters, and back

    def _weights(self):
        weights = [self.bias]
        weights += [self.cluster_kernel, self.cluster_bias] if self.cutoffs else []
        if self.embedding is not None:
            weights += [tied_matrix(self.embedding)]
        else:
            weights += [*self.kernels, *self.projections]
        return [ops.convert_to_tensor(weight) for weight in weights]

    def _split(self, weights):
        """The head, with the tails' tokens behind its words, and the tails."""
        bias, *kernels = weights
        names, kernels = (kernels[:2], kernels[2:]) if self.cutoffs else ([], kernels)
        slices = list(zip(self._bounds, self._bounds[1:], strict=False))
        projections = kernels[len(slices) :] or [None] * len(self.cutoffs)
        if self.embedding is not None:
            kernels = [kernels[0][begin:end] for begin, end in slices]
        biases = [bias[begin:end] for begin, end in slices]
        head = Cluster(kernels[0], biases[0])
        if self.cutoffs:
            head = Cluster(*(ops.concatenate(pair) for pair in zip(head, names, strict=False)))
        tails = zip(kernels[1 : len(slices)], biases[1:], projections, strict=True)
        return [head, *(Cluster(*tail) for tail in tails)]

    def _join(self, clusters):
        """The inverse of `_split`."""
        head, *tails = clusters
        words = self._bounds[1]
        kernels = [head.kernel[:words], *(tail.kernel for tail in tails)]
        bias = ops.concatenate([head.bias[:words], *(tail.bias for tail in tails)])
        names = [head.kernel[words:], head.bias[words:]] if self.cutoffs else []
        if self.embedding is not None:
            return [bias, *names, ops.concatenate(kernels)]
        projections = [tail.projection for tail in tails if tail.projection is not None]
        return [bias, *names, *kernels, *projections]

    # The protocol of a head

    def call(self, hidden):
        flat = self._flat(hidden)
        head, *tails = self._split(self._weights())
        log_p = ops.log_softmax(head.logits(flat), axis=-1)
        words = self._bounds[1]
        parts = [log_p[:, :words]]
        for i, tail in enumerate(tails):
            parts.append(log_p[:, words + i, None] + _log_softmax(tail, flat))
        log_p = ops.concatenate(parts, axis=-1)
        return ops.reshape(log_p, (*ops.shape(hidden)[:-1], self.vocabulary_size))

    def loss(self, hidden, targets):
        """Returns -log p(target), in nats, of the shape of `targets`.

        Args:
            hidden: Tensor (..., channels).
            targets: Integer tensor (...).
        """
        flat, targets = self._flat(hidden), ops.convert_to_tensor(targets)
        loss = ClusterLoss(self._bounds, self._capacities(flat), self._split, self._join)
        words = ops.cast(ops.reshape(targets, (-1,)), "int32")
        # A gradient of one's own needs tensors: in eager mode, TensorFlow's are variables so far.
        weights = [ops.copy(weight) for weight in self._weights()]
        return ops.reshape(loss(flat, words, *weights), ops.shape(targets))

    def log_prob(self, hidden, targets):
        """Returns log p(target), in nats, of the shape of `targets`; arguments as of `loss`."""
        return -self.loss(hidden, targets)

    def top_k(self, hidden, k):
        """Finds the k most probable words, without looking at tails that cannot hold one.

        A word of a tail is at most as probable as the tail itself. So a tail is computed only for
        the tokens for which it is more probable than the k-th best word so far, in the same loop
        as in `loss`. The head is computed for all.

        Args:
            hidden: Tensor (..., channels).
            k: How many words, at most V.

        Returns:
            Log-probabilities (..., k), falling, and the words' ids (..., k).

        Raises:
            ValueError: k is not between 1 and V.
        """
        check_positive(k=k)
        if k > self.vocabulary_size:
            raise ValueError(
                f"`k` must be at most vocabulary_size={self.vocabulary_size}. Received: k={k}"
            )
        flat = self._flat(hidden)
        head, *tails = self._split(self._weights())
        log_p, words = ops.log_softmax(head.logits(flat), axis=-1), self._bounds[1]
        best = ops.top_k(log_p[:, :words], min(k, words))
        # Row n is nobody's: rows of a turn that do not count are written there.
        padding = [[0, 1], [0, k - min(k, words)]]
        best = [
            ops.pad(best[0], padding, constant_values=-float("inf")),
            ops.pad(ops.cast(best[1], "int32"), padding),
        ]
        capacities = self._capacities(flat)
        for i, (tail, capacity) in enumerate(zip(tails, capacities, strict=True)):
            best = _search(flat, tail, log_p[:, words + i], self._bounds[1 + i], capacity, best, k)
        shape = (*ops.shape(hidden)[:-1], k)
        return tuple(ops.reshape(x[:-1], shape) for x in best)

    def predict(self, hidden):
        """Returns the ids (...) of the most probable words, found as `top_k` finds them.

        Args:
            hidden: Tensor (..., channels).
        """
        return self.top_k(hidden, 1)[1][..., 0]

    def _flat(self, hidden):
        hidden = ops.cast(hidden, self.compute_dtype)
        return ops.reshape(hidden, (-1, hidden.shape[-1]))

    def _capacities(self, flat):
        if self.capacity is None:
            return [ops.shape(flat)[0] // 32 + 32] * len(self.cutoffs)
        if isinstance(self.capacity, list):
            return self.capacity
        return [self.capacity] * len(self.cutoffs)

    def get_config(self):
        serialize = keras.initializers.serialize
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "cutoffs": list(self.cutoffs),
            "div_value": self.div_value,
            "capacity": self.capacity,
            "kernel_initializer": serialize(self.kernel_initializer),
            "cluster_initializer": serialize(self.cluster_initializer),
            "bias_initializer": serialize(self.bias_initializer),
            "seed": self.seed,
        }


def _log_softmax(tail, hidden):
    return ops.log_softmax(tail.logits(tail.features(hidden)), axis=-1)


def _search(hidden, tail, tail_log_p, first_word, capacity, best, k):
    """Puts the words of a tail among the k best where they belong there."""
    nobody = ops.shape(hidden)[0]

    def body(rows, counts, best):
        log_p = ops.take(tail_log_p, rows)[:, None] + _log_softmax(
            tail, ops.take(hidden, rows, axis=0)
        )
        found = ops.top_k(log_p, min(k, log_p.shape[-1]))
        found = [found[0], ops.cast(found[1], "int32") + first_word]
        log_p, words = (
            ops.concatenate([ops.take(old, rows, axis=0), new], axis=-1)
            for old, new in zip(best, found, strict=True)
        )
        log_p, places = ops.top_k(log_p, k)
        words = ops.take_along_axis(words, places, axis=-1)
        rows = ops.where(counts, rows, nobody)[:, None]
        return tuple(
            ops.scatter_update(old, rows, new)
            for old, new in zip(best, (log_p, words), strict=True)
        )

    return visit(tail_log_p > best[0][:-1, -1], capacity, body, tuple(best))


def check_cutoffs(cutoffs, vocabulary_size):
    """Returns the first words of the tails as a list, or raises a `ValueError`."""
    cutoffs = list(cutoffs)
    bounds = [0, *cutoffs, vocabulary_size]
    integers = all(isinstance(c, numbers.Integral) for c in cutoffs)
    if not integers or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(
            "`cutoffs` must be increasing integers between 1 and vocabulary_size - 1 = "
            f"{vocabulary_size - 1}. Received: cutoffs={cutoffs}"
        )
    return [int(c) for c in cutoffs]


def _check_capacity(capacity, tails):
    if capacity is None:
        return None
    if isinstance(capacity, numbers.Integral):
        check_positive(capacity=capacity)
        return int(capacity)
    capacity = list(capacity)
    if len(capacity) != tails:
        raise ValueError(
            f"`capacity` must be an integer or one for each of the {tails} tails. "
            f"Received: capacity={capacity}"
        )
    check_positive(**{f"capacity[{i}]": c for i, c in enumerate(capacity)})
    return [int(c) for c in capacity]
