"""NeuralCache: its equations, and that it streams, writes and scores as the model does."""

import numpy as np
import pytest
from keras import ops

from keras_streams import compiled_step
from tests.support.generation import make, random_tokens, recurrent, small, without_x64
from tests.support.golden import nll_of
from tests.support.layer_checks import at_once
from tests.support.parameters import slow_but
from trellis_keras import scoring
from trellis_keras.data import Vocabulary
from trellis_keras.layers import TCN, AdaptiveSoftmax, TrellisLayer
from trellis_keras.models import NeuralCache

pytestmark = pytest.mark.both_backends

V = 7
SIZE, THETA, MIX = 4, 0.7, 0.3


CASES = {
    "TrellisLayer": lambda: small(TrellisLayer(8, 3, output_units=5)),
    "TCN, adaptive": lambda: small(TCN(5, 2, 2), head=AdaptiveSoftmax(V, cutoffs=(2, 4))),
    "StackedRNN": lambda: small(recurrent()),
}


def plain(model, row, size=SIZE, theta=THETA, mix=MIX):
    """log p (time, V) after each token of a row, as the paper writes it."""

    @at_once
    def forward(row):
        return model.encode(row)["hidden"], model(row)

    hidden, log_p = (np.asarray(a[0], "float64") for a in forward(row[None]))
    p = np.exp(log_p)
    for t in range(1, len(row)):
        weights = np.zeros(model.vocabulary_size)
        for i in range(max(0, t - size), t):
            weights[row[i + 1]] += np.exp(theta * hidden[t] @ hidden[i])
        p[t] = (1 - mix) * p[t] + mix * weights / weights.sum()
    return np.log(p)


@pytest.mark.parametrize("case", slow_but(CASES, "TrellisLayer", mark=pytest.mark.slow_elsewhere))
def test_equals_the_plain_formulation(case):
    model = CASES[case]()
    neural = NeuralCache(model, SIZE, THETA, MIX)
    tokens = random_tokens(2, 13)
    expected = np.stack([plain(model, row) for row in tokens])
    losses = nll_of(expected[:, :-1], tokens[:, 1:])
    close = {"rtol": 1e-4, "atol": 1e-5}
    step, cache = compiled_step(neural), neural.initial_cache(2)
    for t in range(13):
        log_p, cache = step(tokens[:, t].astype("int32"), cache)
        np.testing.assert_allclose(log_p, expected[:, t], **close)
    log_p, cache = neural.prefill(tokens[:, :6])
    np.testing.assert_allclose(log_p, expected[:, 5], **close)
    log_p, _ = neural.prefill(tokens[:, 6:], cache)
    np.testing.assert_allclose(log_p, expected[:, -1], **close)
    for dtype in ("int32", "int64"):
        found = neural.text_loss(ops.convert_to_tensor(tokens, dtype))
        np.testing.assert_allclose(found, losses, **close)
    np.testing.assert_allclose(neural.token_losses(tokens), losses, **close)
    assert neural.evaluate(tokens[1])["loss"] == pytest.approx(losses[1].mean(), rel=1e-4)


def test_segments_and_rows_do_not_matter_and_the_future_neither(monkeypatch):
    neural = NeuralCache(CASES["TrellisLayer"](), SIZE, THETA, MIX)
    tokens = random_tokens(3, 23)
    whole = neural.token_losses(tokens)
    monkeypatch.setattr("trellis_keras.models.neural_cache._SEGMENT", 5)
    losses = neural.token_losses(tokens)
    np.testing.assert_allclose(losses, whole, rtol=1e-4, atol=1e-5)
    poisoned = tokens.copy()
    poisoned[:, 12:] = (tokens[:, 12:] + 1) % V
    poisoned[2] = (tokens[2] + 1) % V
    others = neural.token_losses(poisoned)
    # Target i is token i + 1.
    np.testing.assert_array_equal(losses[:2, :11], others[:2, :11])
    assert np.all(losses[:2, 11:] != others[:2, 11:])


@pytest.fixture
def only_32_bits():
    with without_x64():
        yield


@pytest.mark.slow_elsewhere
@pytest.mark.usefixtures("only_32_bits")
def test_generates():
    """Greedily the most probable token of the plain formulation, and a beam within the loop."""
    model = make(tie_embeddings=True)
    neural = NeuralCache(model, 3, 2.0, 0.9)
    ids = neural.generate([[1, 2, 3, 1]], 12, "greedy")
    row = np.array([1, 2, 3, 1])
    while len(row) < 12:
        best = plain(model, row, 3, 2.0, 0.9)[-1].argmax()
        row = np.append(row, best)
    assert ids[0].tolist() == row.tolist()
    assert list(neural.generate_stream([1, 2, 3, 1], 12, "greedy")) == row.tolist()
    assert neural.generate([[1, 2], [3, 4]], 8, "beam").shape == (2, 8)


def test_scores_files(tmp_path):
    """Lines of any length, and one text that is cut and resumed."""
    vocabulary = Vocabulary("\nabcde ", unit="character")
    model = small(TrellisLayer(8, 3, output_units=5), vocabulary=vocabulary)
    neural = NeuralCache(model, SIZE, THETA, MIX)
    lines = ["abc" * 12, "", "e d", "cab " * 5]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines))
    expected = [
        -neural.token_losses(vocabulary.encode(line)).sum() if line else 0 for line in lines
    ]
    scoring.score(neural, path, tmp_path / "lines.csv", batch_tokens=32)
    table = np.loadtxt(tmp_path / "lines.csv", delimiter=",", skiprows=1, usecols=1)
    np.testing.assert_allclose(table, expected, rtol=1e-4, atol=1e-5)
    totals = scoring.score(neural, path, tmp_path / "whole.csv", whole=True, batch_tokens=16)
    losses = neural.token_losses(vocabulary.encode("\n".join(lines)))
    assert totals["log_probability"] == pytest.approx(-losses.sum(), rel=1e-4)


@pytest.mark.both_backends(slow=True)
def test_documents_are_scored_with_the_current_settings():
    vocabulary = Vocabulary("\nabcde ", unit="character")
    model = small(TrellisLayer(8, 3, output_units=5), vocabulary=vocabulary)
    model.compile("sgd")
    neural = NeuralCache(model, SIZE, THETA, MIX)
    changes = [("mix", 0.9), ("theta", 5.0), ("size", 1), ("backbone.depth", 1)]
    for name, value in [("mix", MIX), *changes]:
        if name == "backbone.depth":
            model.set_depth(value)
        else:
            setattr(neural, name, value)
        scores, _ = scoring.score_documents(neural, ["abba"], batch_tokens=16)
        expected = neural.text_loss(vocabulary.encode("abba")[None])
        assert scores[0] == pytest.approx(-float(np.sum(expected)), rel=1e-5)


@pytest.mark.both_backends(slow=True)
def test_errors():
    model = small(TCN(5, 2, 1))
    with pytest.raises(ValueError, match="`mix` must lie between 0 and 1. Received: .*mix=1.5"):
        NeuralCache(model, mix=1.5)
    with pytest.raises(ValueError, match="`theta` must be a number >= 0"):
        NeuralCache(model, theta="1")
    with pytest.raises(ValueError, match="size"):
        NeuralCache(model, size=0)
    with pytest.raises(ValueError, match="two steps or more"):
        NeuralCache(model).evaluate([1])
