"""DynamicEvaluation: its rules, its order of scoring and learning, and what it leaves alone."""

import keras
import numpy as np
import pytest

from tests.support.generation import random_tokens, recurrent, small
from tests.support.golden import nll_of
from tests.support.parameters import SLOW_ON_JAX
from trellis_keras.data import TokenStream
from trellis_keras.layers import TCN, DenseHead, TrellisLayer
from trellis_keras.models import DynamicEvaluation, LanguageModel, NeuralCache

pytestmark = pytest.mark.both_backends

V = 7


@pytest.mark.parametrize(
    ("backbone", "rows"),
    [
        pytest.param(lambda: TrellisLayer(8, 3, output_units=5), (), marks=SLOW_ON_JAX),
        pytest.param(lambda: TCN(5, 2, 2), (3,), marks=pytest.mark.slow),
        (recurrent, ()),
    ],
    ids=["TrellisLayer", "TCN", "StackedRNN"],
)
def test_no_token_is_learned_from_before_it_is_scored(backbone, rows):
    model = small(backbone(), output_dropout=0.5)
    weights = model.get_weights()
    dynamic = DynamicEvaluation(model, 0.1, 0.01, rule="sgd", segment_length=4)
    tokens = random_tokens(*rows, 15)
    poisoned = tokens.copy()
    poisoned[..., 11:] = (tokens[..., 11:] + 1) % V
    losses, others = dynamic.token_losses(tokens), dynamic.token_losses(poisoned)
    assert losses.shape == (*rows, 14)
    assert dynamic.evaluate(tokens) == {"loss": pytest.approx(losses.mean(), rel=1e-6)}
    # Target i is token i + 1. A poisoned target moves nothing before it, also in its own segment.
    np.testing.assert_array_equal(losses[..., :10], others[..., :10])
    assert np.all(losses[..., 10:] != others[..., 10:])
    # The first segment is scored as it is, later ones by what the model has learned.
    rows = np.atleast_2d(tokens)
    static = nll_of(model(rows[:, :-1]), rows[:, 1:]).reshape(losses.shape)
    np.testing.assert_allclose(losses[..., :4], static[..., :4], rtol=1e-4, atol=1e-5)
    assert np.all(np.abs(losses[..., 4:] - static[..., 4:]) > 1e-6)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


class Unigram(keras.layers.Layer):
    """Knows nothing of the past: the head's bias alone decides."""

    def call(self, x):
        return 0 * x

    def compute_output_shape(self, input_shape):
        return input_shape

    def initial_cache(self, batch_size):
        return []

    def step(self, x, cache):
        return 0 * x, cache

    def prefill(self, x, cache):
        return 0 * x, cache


@pytest.mark.parametrize("rule", ["sgd", "rms"])
def test_rules(rule):
    """The bias of a softmax, by hand: its gradient is p minus the frequencies of the targets."""
    model = LanguageModel(V, 5, Unigram(), head=DenseHead(V), tie_embeddings=False)
    model.build((None, None))
    (bias,) = [v for v in model.trainable_variables if v.path.endswith("bias")]
    bias.assign(np.linspace(-1, 1, V))
    start = np.array(bias.value, "float64")

    def softmax(b):
        return np.exp(b) / np.exp(b).sum()

    def gradient(b, targets):
        return softmax(b) - np.bincount(targets, minlength=V) / len(targets)

    rate, decay = 0.3, 0.2
    dynamic = DynamicEvaluation(model, rate, decay, rule=rule, segment_length=3)
    rates, decays = rate, decay
    if rule == "rms":
        stream = TokenStream(random_tokens(13, seed=1), 1, 4)
        batches = [stream[i] for i in range(3)]
        x, y = random_tokens(4, 4), random_tokens(4, 4, seed=2)
        batches.append((x, y, np.array([0.0, 1.0, 0.0, 0.0])))  # of which one row counts
        dynamic.collect_statistics(batches)
        squares = [gradient(start, row) ** 2 for row in (*(b[1][0] for b in batches[:3]), y[1])]
        r = np.sqrt(np.mean(squares, axis=0))
        rates = rate / (r + 1e-3)
        decays = np.minimum(decay * r / (r.sum() / model.count_params()), 1)
    tokens, b, expected = random_tokens(11), start, []
    for first in range(0, 10, 3):
        targets = tokens[first + 1 : min(first + 4, 11)]
        expected += list(-np.log(softmax(b))[targets])
        b = b - rates * gradient(b, targets) + decays * (start - b)
    np.testing.assert_allclose(dynamic.token_losses(tokens), expected, rtol=1e-4)


@pytest.mark.both_backends(slow=True)
def test_errors():
    model = small(TCN(5, 2, 1))
    with pytest.raises(ValueError, match="`rule` must be one of"):
        DynamicEvaluation(model, 0.1, rule="adam")
    with pytest.raises(ValueError, match="only for rule='rms'"):
        DynamicEvaluation(model, 0.1, rule="sgd", epsilon=0.1)
    with pytest.raises(ValueError, match="`learning_rate` must be a number >= 0"):
        DynamicEvaluation(model, float("nan"))
    with pytest.raises(ValueError, match="`decay`"):
        DynamicEvaluation(model, 0.1, decay=2)
    with pytest.raises(ValueError, match="`model` must be a LanguageModel"):
        DynamicEvaluation(NeuralCache(model), 0.1)
    dynamic = DynamicEvaluation(model, 0.1)
    with pytest.raises(ValueError, match="collect_statistics"):
        dynamic.evaluate(random_tokens(9))
    with pytest.raises(ValueError, match="received no batches"):
        dynamic.collect_statistics([])
    with pytest.raises(ValueError, match=r"\[0, 7\)"):
        dynamic.collect_statistics([(random_tokens(2, 3), random_tokens(2, 3) + 5)])
    with pytest.raises(ValueError, match="two steps or more"):
        dynamic.evaluate([1])
