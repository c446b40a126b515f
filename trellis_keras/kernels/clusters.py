"""An adaptive softmax that computes a tail only for the tokens that need it.

The number of tokens of a batch in a tail is known only at run time, but compiled programs need
static shapes. A tail therefore processes `capacity` tokens at a time, in a loop with as many
iterations as needed: none if no token is in the tail, several if they exceed the capacity. No token
is left out, and no array of a tail is larger than capacity x its words.

A loop with an unknown number of iterations has no gradient on JAX, and none under XLA on
TensorFlow. The gradient is therefore written by hand: it repeats the same iterations, recomputes a
tail's logits instead of storing them, and sums each tail's gradients in place.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from keras import ops

from trellis_keras.kernels.gradients import custom_gradient
from trellis_keras.kernels.scan import while_loop
from trellis_keras.types import Tensor


class Cluster(NamedTuple):
    """The weights of a tail's words, or of the head's words followed by one token per tail.

    Attributes:
        kernel: Tensor (words, width).
        bias: Tensor (words,), at least float32.
        projection: Tensor (channels, width), or None if the width is the number of channels.
    """

    kernel: Tensor
    bias: Tensor
    projection: Tensor | None = None


def cluster_nll(
    hidden: Tensor,
    targets: Tensor,
    clusters: Sequence[Cluster],
    cutoffs: Sequence[int],
    capacity: int | Tensor,
) -> Tensor:
    """Returns -log p of each target; equals `AdaptiveSoftmax.call` at the targets.

    Args:
        hidden: Tensor (n, channels).
        targets: int32 tensor (n,).
        clusters: The head, with the tail tokens after its words, and each tail.
        cutoffs: First word of each tail.
        capacity: Number of tokens per iteration: a positive integer or, in graphs, a tensor.

    Returns:
        Tensor (n,) of the dtype of the biases.
    """
    sizes = [2 if cluster.projection is None else 3 for cluster in clusters]
    tail_of = sum(ops.cast(targets >= first, "int32") for first in cutoffs)  # 0: the head
    head_choice = targets
    if cutoffs:
        head_choice = ops.where(tail_of == 0, targets, cutoffs[0] - 1 + tail_of)

    def flatten(clusters):
        return [w for cluster, size in zip(clusters, sizes, strict=True) for w in cluster[:size]]

    def pack(weights):
        weights = iter(weights)
        return [Cluster(*(next(weights) for _ in range(size))) for size in sizes]

    def visit(i, tail, body, carry):
        """Calls `body(rows, counts, choice, carry)` for the tokens of tail i, in iterations."""

        def turn(rows, counts, carry):
            # Padding rows of an iteration may contain words of any cluster.
            choice = ops.take(targets, rows) - cutoffs[i]
            choice = ops.clip(choice, 0, tail.kernel.shape[0] - 1)
            return body(rows, counts, choice, carry)

        return _for_selected_rows(tail_of == i + 1, capacity, turn, carry)

    def add_tails(hidden, tails, values):
        """Adds -log p(word | tail); also returns the log of each softmax's denominator."""
        carry = values, ops.zeros_like(values)
        for i, tail in enumerate(tails):

            def body(rows, counts, choice, carry, tail=tail):
                logits = _logits(tail, _features(tail, ops.take(hidden, rows, axis=0)))
                scores = [ops.where(counts, score, 0) for score in _score(logits, choice)]
                return tuple(_add_rows(c, rows, s) for c, s in zip(carry, scores, strict=True))

            carry = visit(i, tail, body, carry)
        return carry

    def tail_gradients(hidden, tails, normalizers, upstream, d_hidden):
        d_tails, d_hidden = [], ops.cast(d_hidden, upstream.dtype)
        for i, tail in enumerate(tails):

            def body(rows, counts, choice, carry, tail=tail):
                d_hidden, *sums = carry
                h = ops.take(hidden, rows, axis=0)
                features = _features(tail, h)
                row_upstream = ops.where(counts, ops.take(upstream, rows), 0)
                # The normalizer of other rows may be small, and a logit minus it overflow.
                row_normalizers = ops.where(counts, ops.take(normalizers, rows), math.inf)
                d_logits = _logit_gradients(
                    _logits(tail, features), row_normalizers, choice, row_upstream
                )
                d_h, d_tail = _gradients(tail, h, features, d_logits)
                gradients = (d for d in d_tail if d is not None)
                sums = [s + ops.cast(d, s.dtype) for s, d in zip(sums, gradients, strict=True)]
                return (_add_rows(d_hidden, rows, d_h), *sums)

            zeros = [ops.zeros(w.shape, upstream.dtype) for w in tail if w is not None]
            d_hidden, *sums = visit(i, tail, body, (d_hidden, *zeros))
            d_tails.append(Cluster(*sums))
        return d_hidden, d_tails

    @custom_gradient
    def nll(hidden, *weights):
        head, *tails = pack(weights)
        head_logits = _logits(head, hidden)
        values, head_normalizers = _score(head_logits, head_choice)
        values, normalizers = add_tails(hidden, tails, values)

        def gradient(upstream):
            d_logits = _logit_gradients(head_logits, head_normalizers, head_choice, upstream)
            d_hidden, d_head = _gradients(head, hidden, hidden, d_logits)
            d_hidden, d_tails = tail_gradients(hidden, tails, normalizers, upstream, d_hidden)
            inputs, gradients = [hidden, *weights], [d_hidden, *flatten([d_head, *d_tails])]
            return tuple(ops.cast(d, x.dtype) for d, x in zip(gradients, inputs, strict=True))

        return values, gradient

    return nll(hidden, *flatten(clusters))


def _for_selected_rows(
    selected: Tensor, capacity: int | Tensor, body: Callable, carry: tuple
) -> tuple:
    """Visits the selected rows, `capacity` of them at a time, and returns the last carry.

    Args:
        selected: Boolean tensor (n,).
        capacity: Number of rows per iteration, n at most: a positive integer or, in graphs, a
            tensor.
        body: Function of row numbers, a boolean tensor of their shape that is False for padding
            rows of the last iteration, and the carry. Returns the next carry.
        carry: Tuple of tensors.
    """
    count = ops.sum(ops.cast(selected, "int32"))
    order = ops.argsort(ops.where(selected, 0, 1))
    size = ops.shape(order)[0]
    is_static = isinstance(size, int)
    capacity = min(capacity, size) if is_static else ops.minimum(capacity, size)
    slots = ops.arange(capacity, dtype="int32")

    def turn(done, *carry):
        places = done + slots
        rows = ops.take(order, ops.minimum(places, size - 1))
        return (done + capacity, *body(rows, places < count, carry))

    _, *last_carry = while_loop(lambda done, *_: done < count, turn, (0, *carry))
    return tuple(last_carry)


def _features(cluster, hidden):
    """(n, channels) -> (n, width)."""
    if cluster.projection is None:
        return hidden
    return _product("nc,cd->nd", hidden, cluster.projection, hidden.dtype)


def _logits(cluster, features):
    """(n, width) -> (n, words), in the dtype of the bias."""
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
    """The product of two tensors, computed in `dtype`, without transposing them in memory."""
    return ops.einsum(equation, ops.cast(a, dtype), ops.cast(b, dtype))


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
