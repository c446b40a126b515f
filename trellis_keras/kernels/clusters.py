"""An adaptive softmax that computes a tail only for the tokens that need it.

How many tokens of a batch fall into a tail is known only when the program runs, but compiled
programs need static shapes. So a tail takes its tokens `capacity` at a time, in a loop of as many
turns as there are tokens for: none where no token asks for that tail, several where they overflow
the capacity. No token is left out, and no array is larger than capacity x words of the tail.

A loop whose number of turns is unknown has no gradient on JAX, and none under XLA on TensorFlow.
So the gradient is written out: it takes the same turns again, computes a tail's logits a second
time instead of keeping them, and sums each tail's gradients in place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from keras import ops

from trellis_keras.kernels.scan import while_loop
from trellis_keras.types import Tensor


class Cluster(NamedTuple):
    """The weights of a tail's words, or of the head's words followed by a token for each tail.

    Attributes:
        kernel: Tensor (words, width).
        bias: Tensor (words,), at least float32.
        projection: Tensor (channels, width), or None where the width is the number of channels.
    """

    kernel: Tensor
    bias: Tensor
    projection: Tensor = None


def _features(cluster, hidden):
    """(n, channels) -> (n, width)."""
    if cluster.projection is None:
        return hidden
    return _product("nc,cd->nd", hidden, cluster.projection, hidden.dtype)


def _logits(cluster, features):
    """(n, width) -> (n, words), of the bias' dtype."""
    logits = _product("nd,wd->nw", features, cluster.kernel, features.dtype)
    return ops.cast(logits, cluster.bias.dtype) + cluster.bias


def _gradients(cluster, hidden, features, d_logits):
    """Returns the gradients with respect to hidden (n, channels) and to the cluster."""
    dtype = hidden.dtype
    d_features = _product("nw,wd->nd", d_logits, cluster.kernel, dtype)
    d_kernel = _product("nw,nd->wd", d_logits, features, dtype)
    d_bias = ops.sum(d_logits, axis=0)
    if cluster.projection is None:
        return d_features, Cluster(d_kernel, d_bias)
    d_hidden = _product("nd,cd->nc", d_features, cluster.projection, dtype)
    d_projection = _product("nc,nd->cd", hidden, d_features, dtype)
    return d_hidden, Cluster(d_kernel, d_bias, d_projection)


def _product(equation, a, b, dtype):
    """The product of two tensors, computed in `dtype`; nothing is transposed in memory."""
    return ops.einsum(equation, ops.cast(a, dtype), ops.cast(b, dtype))


def for_selected_rows(
    selected: Tensor, capacity: int | Tensor, body: Callable, carry: tuple
) -> tuple:
    """Visits the selected rows, `capacity` of them at a time.

    Args:
        selected: Boolean tensor (n,).
        capacity: The rows of a turn: an integer or, in graphs, a tensor.
        body: Function of row numbers (capacity,), of a boolean tensor (capacity,) that is False
            for the rows that fill up the last turn, and of the carry. Returns the next carry.
        carry: Tuple of tensors.

    Returns:
        The last carry.
    """
    count = ops.sum(ops.cast(selected, "int32"))
    order = ops.argsort(ops.where(selected, 0, 1))
    slots = ops.arange(capacity, dtype="int32")
    last = ops.shape(order)[0] - 1

    def turn(done, *carry):
        places = done + slots
        rows = ops.take(order, ops.minimum(places, last))
        return (done + capacity, *body(rows, places < count, carry))

    _, *carry = while_loop(lambda done, *_: done < count, turn, (0, *carry))
    return tuple(carry)


def cluster_nll(
    hidden: Tensor,
    targets: Tensor,
    clusters: Sequence[Cluster],
    cutoffs: Sequence[int],
    capacities: Sequence[int | Tensor],
) -> Tensor:
    """Returns -log p of each target; equals `AdaptiveSoftmax.call` at the targets.

    Args:
        hidden: Tensor (n, channels).
        targets: int32 tensor (n,).
        clusters: The head, with the tails' tokens behind its words, and each tail.
        cutoffs: First word of each tail.
        capacities: Tokens that a turn takes, for each tail.

    Returns:
        Tensor (n,) of the dtype of the biases.
    """
    sizes = [2 if cluster.projection is None else 3 for cluster in clusters]

    def pack(weights):
        weights = iter(weights)
        return [Cluster(*(next(weights) for _ in range(size))) for size in sizes]

    def flatten(clusters):
        return [w for cluster, size in zip(clusters, sizes, strict=True) for w in cluster[:size]]

    @ops.custom_gradient
    def nll(hidden, *weights):
        head, *tails = pack(weights)
        split = _Split(targets, cutoffs, capacities)
        head_logits = _logits(head, hidden)
        values, normalizers = _score(head_logits, split.head_choice)
        values, tail_normalizers = _add_tails(hidden, tails, split, values)

        def gradient(upstream, **_):
            d_logits = _logit_gradients(head_logits, normalizers, split.head_choice, upstream)
            d_hidden, d_head = _gradients(head, hidden, hidden, d_logits)
            d_hidden, d_tails = _tail_gradients(
                hidden, tails, split, tail_normalizers, upstream, d_hidden
            )
            d_weights = flatten([d_head, *d_tails])
            d_weights = [ops.cast(d, w.dtype) for d, w in zip(d_weights, weights, strict=True)]
            return (ops.cast(d_hidden, hidden.dtype), *d_weights)

        return values, gradient

    return nll(hidden, *flatten(clusters))


class _Split:
    """Which tokens are in which tail, and which logit of a softmax each token's loss is about."""

    def __init__(self, targets, cutoffs, capacities):
        self.targets, self.cutoffs, self.capacities = targets, cutoffs, capacities
        self.tail = sum(ops.cast(targets >= first, "int32") for first in cutoffs)  # 0: the head
        in_head = self.tail == 0
        self.head_choice = (
            ops.where(in_head, targets, cutoffs[0] - 1 + self.tail) if cutoffs else targets
        )

    def for_tail(self, i, body, carry):
        """`for_selected_rows` of tail i."""
        return for_selected_rows(self.tail == i + 1, self.capacities[i], body, carry)

    def tail_choice(self, i, rows, words):
        """Rows that fill up a turn may hold words of any cluster."""
        return ops.clip(ops.take(self.targets, rows) - self.cutoffs[i], 0, words - 1)


def _add_tails(hidden, tails, split, values):
    """Adds -log p(word | tail); returns also the log of each softmax's denominator."""
    carry = values, ops.zeros_like(values)
    for i, tail in enumerate(tails):

        def body(rows, counts, carry, i=i, tail=tail):
            logits = _logits(tail, _features(tail, ops.take(hidden, rows, axis=0)))
            scores = _score(logits, split.tail_choice(i, rows, logits.shape[-1]))
            scores = [ops.where(counts, score, 0) for score in scores]
            return tuple(_add_rows(c, rows, s) for c, s in zip(carry, scores, strict=True))

        carry = split.for_tail(i, body, carry)
    return carry


def _tail_gradients(hidden, tails, split, normalizers, upstream, d_hidden):
    d_tails = []
    d_hidden = ops.cast(d_hidden, upstream.dtype)
    for i, tail in enumerate(tails):

        def body(rows, counts, carry, i=i, tail=tail):
            d_hidden, *sums = carry
            h = ops.take(hidden, rows, axis=0)
            features = _features(tail, h)
            logits = _logits(tail, features)
            d_logits = _logit_gradients(
                logits,
                ops.take(normalizers, rows),
                split.tail_choice(i, rows, logits.shape[-1]),
                ops.where(counts, ops.take(upstream, rows), 0),
            )
            d_h, d_tail = _gradients(tail, h, features, d_logits)
            sums = [s + ops.cast(d, s.dtype) for s, d in zip(sums, d_tail, strict=False)]
            return (_add_rows(d_hidden, rows, d_h), *sums)

        zeros = [ops.zeros(w.shape, upstream.dtype) for w in tail if w is not None]
        d_hidden, *sums = split.for_tail(i, body, (d_hidden, *zeros))
        d_tails.append(Cluster(*sums))
    return d_hidden, d_tails


def _score(logits, choice):
    """-log softmax(logits) at the choices (n,), and the log of the denominators (n,)."""
    normalizers = ops.logsumexp(logits, axis=-1)
    chosen = ops.take_along_axis(logits, choice[:, None], axis=-1)[:, 0]
    return normalizers - chosen, normalizers


def _logit_gradients(logits, normalizers, choice, upstream):
    """Gradient of sum(upstream * -log softmax(logits) at the choices): upstream * (p - one-hot)."""
    probabilities = ops.exp(logits - normalizers[:, None]) * upstream[:, None]
    # Comparing every word with the choice would take three times as long.
    places = ops.stack([ops.arange(ops.shape(choice)[0], dtype=choice.dtype), choice], axis=-1)
    return ops.scatter_update(probabilities, places, -upstream, reduction="add")


def _add_rows(x, rows, values):
    """Adds values (capacity, ...) to some of the rows of x (n, ...)."""
    return ops.scatter_update(x, rows[:, None], ops.cast(values, x.dtype), reduction="add")


def cluster_top_k(
    hidden: Tensor,
    clusters: Sequence[Cluster],
    cutoffs: Sequence[int],
    capacities: Sequence[int | Tensor],
    k: int,
) -> tuple[Tensor, Tensor]:
    """Returns the k best log-probabilities (n, k) and their words; equals `Head.top_k`.

    A word of a tail is at most as probable as the tail itself. So a tail is computed only for the
    tokens for which it is more probable than the k-th best word so far.

    Args:
        hidden, clusters, cutoffs, capacities: See `cluster_nll`.
        k: Positive integer, at most the number of words.
    """
    head, *tails = clusters
    log_p = ops.log_softmax(_logits(head, hidden), axis=-1)
    words = cutoffs[0] if cutoffs else log_p.shape[-1]
    best = ops.top_k(log_p[:, :words], min(k, words))
    # Row n is a place to write the rows that fill up a turn to.
    padding = [[0, 1], [0, k - min(k, words)]]
    best = (
        ops.pad(best[0], padding, constant_values=-float("inf")),
        ops.pad(ops.cast(best[1], "int32"), padding),
    )
    nobody = ops.shape(hidden)[0]
    for i, (tail, capacity) in enumerate(zip(tails, capacities, strict=True)):
        tail_log_p = log_p[:, words + i]

        def body(rows, counts, best, i=i, tail=tail, tail_log_p=tail_log_p):
            logits = _logits(tail, _features(tail, ops.take(hidden, rows, axis=0)))
            found = ops.take(tail_log_p, rows)[:, None] + ops.log_softmax(logits, axis=-1)
            found, places = ops.top_k(found, min(k, found.shape[-1]))
            new = found, ops.cast(places, "int32") + cutoffs[i]
            candidates, words = (
                ops.concatenate([ops.take(old, rows, axis=0), more], axis=-1)
                for old, more in zip(best, new, strict=True)
            )
            candidates, places = ops.top_k(candidates, k)
            words = ops.take_along_axis(words, places, axis=-1)
            rows = ops.where(counts, rows, nobody)[:, None]
            return tuple(
                ops.scatter_update(old, rows, more)
                for old, more in zip(best, (candidates, words), strict=True)
            )

        best = for_selected_rows(tail_log_p > best[0][:-1, -1], capacity, body, best)
    return best[0][:-1], best[1][:-1]
