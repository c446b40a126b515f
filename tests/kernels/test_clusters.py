"""An adaptive softmax in turns gives what all its clusters give for all tokens."""

import numpy as np
import pytest
from keras import ops

from keras_streams.xla import compile_xla
from tests.support.golden import floats
from tests.support.gradients import value_and_gradients
from trellis_keras.kernels.clusters import Cluster, cluster_nll

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

WORDS, CUTOFFS, CHANNELS = 40, [5, 12, 25], 8
BOUNDS = [0, *CUTOFFS, WORDS]


def random(*shape, seed=0, scale=1.0):
    return floats(np.random.default_rng(seed).normal(scale=scale, size=shape))


def random_weights(projected):
    """Arrays, kernel and bias and maybe projection of each cluster."""
    weights = [[random(5 + 3, CHANNELS, scale=0.5), random(8, seed=1)]]
    for i in range(1, 4):
        words, width = BOUNDS[i + 1] - BOUNDS[i], CHANNELS // 2**i if projected else CHANNELS
        tail = [random(words, width, seed=3 * i, scale=0.5), random(words, seed=3 * i + 1)]
        weights.append([*tail, random(CHANNELS, width, seed=3 * i + 2)] if projected else tail)
    return weights


def clusters_of(flat):
    size = 2 if len(flat) == 8 else 3
    return [Cluster(*flat[:2]), *(Cluster(*flat[i : i + size]) for i in range(2, len(flat), size))]


def plain_log_p(hidden, clusters):
    """Every cluster for every token."""
    log_p = []
    for kernel, bias, projection in clusters:
        h = hidden if projection is None else ops.matmul(hidden, projection)
        log_p.append(ops.log_softmax(ops.matmul(h, ops.transpose(kernel)) + bias))
    head, *tails = log_p
    tails = [head[:, 5 + i, None] + tail for i, tail in enumerate(tails)]
    return ops.concatenate([head[:, :5], *tails], axis=-1)


# {name: capacity, range of the targets}; 30 tokens
BATCHES = {
    "one turn": (64, (0, WORDS)),
    "overflow": (2, (0, WORDS)),
    "one tail takes all": (4, (12, 25)),
    "no tail": (4, (0, 5)),
}


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_nll_and_gradients(projected, batch, assert_close):
    capacity, words = BATCHES[batch]
    hidden = random(30, CHANNELS, seed=20)
    targets = np.random.default_rng(2).integers(*words, 30).astype("int32")
    upstream = random(30, seed=21)
    flat = [w for cluster in random_weights(projected) for w in cluster]

    def ours(hidden, *flat):
        nll = cluster_nll(hidden, targets, clusters_of(flat), CUTOFFS, capacity)
        return ops.sum(nll * upstream), nll

    def plain(hidden, *flat):
        log_p = plain_log_p(hidden, clusters_of(flat))
        nll = -ops.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
        return ops.sum(nll * upstream), nll

    (_, nll), _, gradients = value_and_gradients(ours, [], hidden, *flat)
    (_, wanted), _, references = value_and_gradients(plain, [], hidden, *flat)
    assert_close(nll, wanted, "output")
    for i, (gradient, reference) in enumerate(zip(gradients, references, strict=True)):
        assert_close(gradient, reference, "gradient", str(i))


def test_one_token_in_a_graph_of_its_own(assert_close):
    """XLA loses rows that padding repeats if there is no other."""
    hidden, flat = random(1, CHANNELS), [w for cluster in random_weights(False) for w in cluster]

    def nll(hidden):
        return cluster_nll(hidden, np.array([39], "int32"), clusters_of(flat), CUTOFFS, 32)

    expected = -plain_log_p(hidden, clusters_of(flat))[:, 39]
    assert_close(compile_xla(nll, [], jit_compile=True)(hidden), expected, "output")


def test_gradients_of_large_logits_are_finite():
    """The turns of a tail also visit rows of other clusters, whose normalizers are small."""
    hidden, targets = random(6, CHANNELS, seed=20), np.array([13, 1, 2, 39, 3, 4], "int32")
    flat = [100 * w for cluster in random_weights(False) for w in cluster]

    def loss(hidden, *flat):
        return ops.sum(cluster_nll(hidden, targets, clusters_of(flat), CUTOFFS, 4)), ()

    *_, gradients = value_and_gradients(loss, [], hidden, *flat)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
