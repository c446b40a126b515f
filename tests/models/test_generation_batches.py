"""Prompts of different lengths, and searches that compare whole continuations."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.generation import make, rerun_greedily
from tests.support.layer_checks import compiled
from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.generation import loops
from trellis_keras.generation.samplers import get_sampler

samplers = pytest.importorskip("keras_nlp").samplers
pytestmark = pytest.mark.both_backends

PROMPTS = [[1, 5, 3], [10, 0, 7, 2, 9], [4]]


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def greedy(model):
    """What each of PROMPTS becomes by the greatest probabilities."""
    return rerun_greedily(model, PROMPTS, 12)


def cut(row, start, stop):
    """A row up to its first stop token at or after `start`."""
    ends = np.flatnonzero(np.isin(row[start:], stop))
    return row[: start + ends[0] + 1] if len(ends) else row


def test_each_row_is_what_it_would_be_alone(model, greedy):
    # The first row ends with it; within the second one's prompt it ends nothing.
    stop = int(greedy[0, 6])
    prompts = [PROMPTS[0], [10, 0, 7, stop, 9], PROMPTS[2]]
    alone = rerun_greedily(model, prompts, 12)
    generated = model.generate(prompts, 12, sampler="greedy", stop_tokens=stop)
    for row, prompt, whole in zip(generated, prompts, alone, strict=True):
        expected = cut(whole, len(prompt), stop)
        np.testing.assert_array_equal(row[: len(expected)], expected)
        assert (row[len(expected) :] == stop).all()


@pytest.mark.slow_elsewhere
def test_texts_of_different_lengths():
    speller = make(Vocabulary.from_text("abcdefgh \n", unit="character"))
    prompts = ["h gab", "ab"]
    encoded = [speller.vocabulary.encode(prompt) for prompt in prompts]
    expected = [speller.vocabulary.decode(row) for row in rerun_greedily(speller, encoded, 9)]
    assert speller.generate(prompts, 9, sampler="greedy") == expected


def sums_of_all_texts(model, prompt, length, stop):
    """All continuations, and the sum of each one's log-probabilities up to its stop token."""
    tails = np.array(list(itertools.product(range(3), repeat=length - len(prompt))), "int32")
    ids = np.concatenate([np.tile(prompt, (len(tails), 1)).astype("int32"), tails], axis=1)
    log_probs = np.asarray(model(ids))[:, len(prompt) - 1 : -1]
    log_probs = np.take_along_axis(log_probs, tails[:, :, None], axis=-1)[:, :, 0]
    ended = np.cumsum(tails == stop, axis=1) - (tails == stop) > 0
    return ids, np.where(ended, 0.0, log_probs).sum(axis=1)


@pytest.mark.parametrize("stop", [pytest.param(None, marks=pytest.mark.slow_elsewhere), 2])
def test_beam_search_with_all_beams_is_exhaustive(stop):
    model = make(size=3)
    model.head.kernel.assign(0.3 * model.head.kernel.value)
    prompts = [[0, 1, 1, 2], [2], [1, 2]]
    sampler = samplers.BeamSampler(num_beams=3**4)
    generated = model.generate(prompts, 6, sampler=sampler, stop_tokens=stop)
    greedy = rerun_greedily(model, prompts, 6)
    found = []
    for row, prompt, simple in zip(generated, prompts, greedy, strict=True):
        ids, sums = sums_of_all_texts(model, prompt, 6, stop)
        best = cut(ids[sums.argmax()], len(prompt), stop)
        np.testing.assert_array_equal(cut(row, len(prompt), stop), best)
        of_row = sums[(ids[:, : len(best)] == best).all(axis=1)]
        np.testing.assert_allclose(of_row, sums.max(), rtol=1e-5)
        found.append(len(best) < 6 or (best != simple).any())
    assert any(found), "the toy is too easy: the greedy choice is the best one"


def contrastive(forward, prompt, max_length, k, alpha):
    """Su et al. (2022), eq. (5), one row, the whole model run again for each token."""
    ids = np.zeros((k, max_length), "int32")
    ids[:, : len(prompt)] = prompt
    for t in range(len(prompt), max_length):
        log_probs, _ = forward(ops.convert_to_tensor(ids))
        probabilities = np.exp(np.asarray(log_probs)[0, t - 1])
        ids[:, t] = np.argsort(-probabilities)[:k]
        hidden = np.asarray(forward(ops.convert_to_tensor(ids))[1])
        unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
        likeness = np.einsum("ktc,kc->kt", unit[:, :t], unit[:, t]).max(axis=1)
        score = (1 - alpha) * probabilities[ids[:, t]] - alpha * likeness
        ids[:, t] = ids[score.argmax(), t]
    return ids[0]


def test_contrastive_search(model, greedy):
    @compiled
    def forward(ids):
        hidden = model.backbone(model.embedding(ids))
        return model.head(hidden), hidden

    sampler = samplers.ContrastiveSampler(k=4, alpha=0.5)
    generated = model.generate(PROMPTS, 12, sampler=sampler)
    for row, prompt in zip(generated, PROMPTS, strict=True):
        np.testing.assert_array_equal(row, contrastive(forward, prompt, 12, k=4, alpha=0.5))
    assert (generated != greedy).any()
    assert isinstance(get_sampler("contrastive", 11), samplers.ContrastiveSampler)


def test_hidden_states_of_zeros_can_be_compared():
    hidden = loops._comparable(ops.zeros((1, 2, 4), "float16"))
    likeness = samplers.ContrastiveSampler().similarity(hidden, hidden[:, 0])
    np.testing.assert_allclose(likeness, [[1.0, 1.0]], rtol=1e-5)
    assert keras.backend.standardize_dtype(hidden.dtype) == "float32"
