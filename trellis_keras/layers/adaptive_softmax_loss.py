"""The loss of an adaptive softmax, with a gradient of its own.

How many tokens of a batch fall into a tail is known only when it runs, but compiled programs need
static shapes. So a tail takes its tokens `capacity` at a time, in a loop of as many turns as there
are tokens for: none where no token asks for that tail, more than one where they overflow the
capacity. No token is ever left out, and no array is larger than capacity x words of the tail.

A loop whose number of turns is not known has no gradient on JAX, and none under XLA on TensorFlow.
The gradient is therefore written out here: it goes through the same turns again. It computes a
tail's logits a second time instead of keeping them, adds each tail's gradients up in place, and
hands over one gradient for a matrix that all clusters share (slices of it, differentiated one by
one, would each bring along a matrix of its full size).
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from trellis_keras.kernels.scan import while_loop
from trellis_keras.layers.base import at_least_float32


class Cluster(NamedTuple):
    """Weights of some words: those of the head with the tails' tokens behind, or those of a tail.

    Attributes:
        kernel: (words, width).
        bias: (words,).
        projection: (channels, width), or None where the width is that of the hidden states.
    """

    kernel: Any
    bias: Any
    projection: Any = None

    def features(self, hidden):
        """What the kernel multiplies: (n, channels) -> (n, width)."""
        if self.projection is None:
            return hidden
        return product("nc,cd->nd", hidden, self.projection, hidden.dtype)

    def logits(self, features):
        """(n, width) -> (n, words), at least float32."""
        wide = at_least_float32(keras.backend.standardize_dtype(features.dtype))
        logits = product("nd,wd->nw", features, self.kernel, features.dtype)
        return ops.cast(logits, wide) + ops.cast(self.bias, wide)

    def gradients(self, hidden, features, d_logits):
        """Returns the gradient of (n, channels) hidden states, and those of the weights."""
        dtype = hidden.dtype
        d_features = product("nw,wd->nd", d_logits, self.kernel, dtype)
        d_kernel = product("nw,nd->wd", d_logits, features, dtype)
        d_bias = ops.sum(d_logits, axis=0)
        if self.projection is None:
            return d_features, Cluster(d_kernel, d_bias)
        d_hidden = product("nd,cd->nc", d_features, self.projection, dtype)
        d_projection = product("nc,nd->cd", hidden, d_features, dtype)
        return d_hidden, Cluster(d_kernel, d_bias, d_projection)


def product(equation, a, b, dtype):
    """The product of two tensors, computed in `dtype`; nothing is transposed in memory."""
    return ops.einsum(equation, ops.cast(a, dtype), ops.cast(b, dtype))


def visit(wanted, capacity, body, carry):
    """Goes through the rows that are wanted, `capacity` of them at a time.

    Args:
        wanted: Boolean tensor (n,).
        capacity: How many rows a turn takes; an integer or, in graphs, a tensor.
        body: Function of row numbers (capacity,), of which of them count (capacity,) and of the
            carried tensors; returns these. In the last turn some rows do not count.
        carry: Tuple of tensors.

    Returns:
        What the last turn returned.
    """
    count = ops.sum(ops.cast(wanted, "int32"))
    order = ops.argsort(ops.where(wanted, 0, 1))
    slots = ops.arange(capacity, dtype="int32")
    last = ops.shape(order)[0] - 1

    def turn(done, *carry):
        places = done + slots
        rows = ops.take(order, ops.minimum(places, last))
        return (done + capacity, *body(rows, places < count, carry))

    _, *carry = while_loop(lambda done, *_: done < count, turn, (0, *carry))
    return carry


def add_rows(x, rows, values):
    """x (n, ...) with values (capacity, ...) added to some of its rows."""
    return ops.scatter_update(x, rows[:, None], ops.cast(values, x.dtype), reduction="add")


class ClusterLoss:
    """-log p of each target, from the weights of the clusters.

    Args:
        bounds: First word of each cluster, and the number of words.
        capacities: Capacity of each tail.
        split: Function from the list of weights to one `Cluster` for the head and each tail.
        join: Function from their gradients, of the same form, to the list of the weights'.
    """

    def __init__(self, bounds, capacities, split, join):
        self.bounds, self.capacities = bounds, capacities
        self.split, self.join = split, join
        self.tails = range(1, len(bounds) - 1)

    def __call__(self, hidden, targets, *weights):
        """hidden (n, channels), targets (n,) and weights -> (n,), at least float32."""

        @ops.custom_gradient
        def nll(hidden, *weights):
            head, *tails = self.split(weights)
            head_logits = head.logits(hidden)
            choice = self._head_choice(targets)
            values, normalizers = _score(head_logits, choice)
            values, tail_normalizers = self._add_tails(hidden, targets, tails, values)

            def gradient(upstream, **_):
                d_hidden, d_head = head.gradients(
                    hidden, hidden, _logit_gradients(head_logits, normalizers, choice, upstream)
                )
                d_hidden, d_tails = self._tail_gradients(
                    hidden, targets, tails, tail_normalizers, upstream, d_hidden
                )
                d_weights = self.join([d_head, *d_tails])
                d_weights = [ops.cast(d, w.dtype) for d, w in zip(d_weights, weights, strict=True)]
                return (ops.cast(d_hidden, hidden.dtype), *d_weights)

            return values, gradient

        return nll(hidden, *weights)

    def clusters(self, targets):
        """The number of each target's cluster, 0 being the head."""
        return sum(ops.cast(targets >= self.bounds[i], "int32") for i in self.tails)

    def _head_choice(self, targets):
        """Which of the head's logits counts: the word's own or its cluster's."""
        if not self.tails:
            return targets
        cluster, words = self.clusters(targets), self.bounds[1]
        return ops.where(cluster == 0, targets, words - 1 + cluster)

    def _tail_choice(self, i, targets, rows):
        """The same in tail i. Rows that do not count hold words of any cluster."""
        words = self.bounds[i + 1] - self.bounds[i]
        return ops.clip(ops.take(targets, rows) - self.bounds[i], 0, words - 1)

    def _add_tails(self, hidden, targets, tails, values):
        """Adds -log p(word | cluster); returns also the log of each softmax' denominator."""
        carry = values, ops.zeros_like(values)
        cluster = self.clusters(targets)
        for i, tail, capacity in zip(self.tails, tails, self.capacities, strict=True):

            def body(rows, counts, carry, i=i, tail=tail):
                logits = tail.logits(tail.features(ops.take(hidden, rows, axis=0)))
                scores = _score(logits, self._tail_choice(i, targets, rows))
                scores = [ops.where(counts, score, 0) for score in scores]
                return tuple(add_rows(c, rows, s) for c, s in zip(carry, scores, strict=True))

            carry = visit(cluster == i, capacity, body, carry)
        return carry

    def _tail_gradients(self, hidden, targets, tails, normalizers, upstream, d_hidden):
        gradients = []
        cluster = self.clusters(targets)
        d_hidden = ops.cast(d_hidden, upstream.dtype)
        for i, tail, capacity in zip(self.tails, tails, self.capacities, strict=True):
            projected = tail.projection is not None

            def body(rows, counts, carry, i=i, tail=tail, projected=projected):
                d_hidden, *sums = carry
                h = ops.take(hidden, rows, axis=0)
                features = tail.features(h)
                d_logits = _logit_gradients(
                    tail.logits(features),
                    ops.take(normalizers, rows),
                    self._tail_choice(i, targets, rows),
                    # 0 in rows that do not count: with it, all that they add is 0.
                    ops.where(counts, ops.take(upstream, rows), 0),
                )
                d_h, d_tail = tail.gradients(h, features, d_logits)
                sums = [s + ops.cast(d, s.dtype) for s, d in zip(sums, d_tail, strict=False)]
                return (add_rows(d_hidden, rows, d_h), *sums)

            zeros = [
                ops.zeros(weight.shape, upstream.dtype)
                for weight in (tail if projected else tail[:2])
            ]
            d_hidden, *sums = visit(cluster == i, capacity, body, (d_hidden, *zeros))
            gradients.append(Cluster(*sums))
        return d_hidden, gradients


def _score(logits, choice):
    """-log softmax(logits) at the choices (n,), and the log of the denominators (n,)."""
    normalizers = ops.logsumexp(logits, axis=-1)
    chosen = ops.take_along_axis(logits, choice[:, None], axis=-1)[:, 0]
    return normalizers - chosen, normalizers


def _logit_gradients(logits, normalizers, choice, upstream):
    """Gradient of sum(upstream * -log softmax(logits) at the choices): upstream * (p - one-hot)."""
    probabilities = ops.exp(logits - normalizers[:, None]) * upstream[:, None]
    # The choices alone differ. Comparing every word with the choice takes three times as long.
    places = ops.stack([ops.arange(ops.shape(choice)[0], dtype=choice.dtype), choice], axis=-1)
    return ops.scatter_update(probabilities, places, -upstream, reduction="add")
