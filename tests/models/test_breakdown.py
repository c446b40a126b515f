"""Figures by word frequency and by position: they add up, and each is what it says it is."""

import csv
import math

import keras
import numpy as np
import pytest

from trellis_keras import data, layers
from trellis_keras.breakdown import measure
from trellis_keras.layers import DenseHead
from trellis_keras.models import LanguageModel, Perplexity, SequenceRegressor

SIZE = 30


def text(length, seed=0):
    """A text in which tokens are not equally frequent, and the last two do not occur."""
    ids = np.random.default_rng(seed).zipf(1.3, length) - 1
    return (ids % (SIZE - 2)).astype("int32")


TRAIN, SPLIT = text(2000), text(211, seed=1)  # 211 - 1 targets do not fill the batches


def trellis(**options):
    return layers.TrellisLayer(units=10, depth=3, output_units=6, seed=1, **options)


def lstm():
    return layers.StackedRNN(
        [keras.layers.LSTM(6, return_sequences=True, return_state=True, seed=1)], stateful=True
    )


def language_model(backbone, jit_compile=False, **options):
    # Far from uniform: a mistake would not show otherwise.
    wide = keras.initializers.RandomUniform(-1.5, 1.5, seed=2)
    model = LanguageModel(SIZE, 6, backbone, embeddings_initializer=wide, seed=0, **options)
    model.compile("sgd", metrics=[Perplexity()], jit_compile=jit_compile)
    return model


def overlapping(**options):
    return data.TokenStream(SPLIT, batch_size=4, sequence_length=11, context_length=4, **options)


def stateful():
    return data.TokenStream(SPLIT, batch_size=4, sequence_length=11, stateful=True)


def check_sums(model, stream):
    """The parts together are what `evaluate` reports."""
    parts = measure(model, stream, TRAIN)
    results = model.evaluate(stream, return_dict=True, verbose=0)
    assert parts.mean == pytest.approx(results["loss"], rel=1e-6)
    assert parts.value == pytest.approx(results["perplexity"], rel=1e-6)
    counted = [row for row in parts.position if row["counted"]]
    for rows in (parts.frequency, counted):
        rows = [row for row in rows if row["tokens"]]
        tokens = sum(row["tokens"] for row in rows)
        nll = sum(row["tokens"] * row["cross_entropy"] for row in rows)
        assert tokens == stream.targets_counted
        assert nll / tokens == pytest.approx(parts.mean, rel=1e-9)
    return parts


@pytest.mark.both_backends
def test_the_parts_add_up_to_the_whole():
    check_sums(language_model(trellis(), jit_compile=True, output_dropout=0.5), overlapping())


@pytest.mark.both_backends
def test_a_carried_history():
    model = language_model(trellis(stateful=True))
    parts = check_sums(model, stateful())
    assert all(row["counted"] for row in parts.position)
    # Whatever came before, it starts with an empty history, and so does what comes after.
    assert measure(model, stateful(), TRAIN) == parts
    other = data.TokenStream(SPLIT, batch_size=2, sequence_length=11, stateful=True)
    check_sums(model, other)
    check_sums(model, stateful())


HEADS = {
    "mos": lambda: layers.MixtureOfSoftmaxes(SIZE, experts=3),
    "adaptive": lambda: layers.AdaptiveSoftmax(SIZE, cutoffs=[5, 15]),
}


@pytest.mark.parametrize("head", HEADS)
def test_other_heads(head):
    check_sums(language_model(trellis(), head=HEADS[head]()), overlapping())


def test_other_backbones():
    check_sums(language_model(lstm(), tie_embeddings=False), stateful())
    aux = trellis(return_aux=True, aux_every=1)
    check_sums(language_model(aux, aux_weight=0.1), overlapping(target_counting="original"))


def reference(model, rows_of, segment, horizon):
    """{position: NLLs} of the rows' segments, each read by itself."""
    firsts = [(r, f) for r in rows_of for f in range(*r, segment - horizon)]
    places = np.array([np.arange(segment) + first - horizon for _, first in firsts])
    inputs = np.where(places < 0, 0, SPLIT[np.clip(places, 0, len(SPLIT) - 2)])
    scores = model.predict(inputs, verbose=0)
    nll = {position: [] for position in range(1, segment + 1)}
    for score, ((start, end), _), segment_places in zip(scores, firsts, places, strict=True):
        for i, place in enumerate(segment_places):
            if start <= place < end:
                nll[i + 1].append(-score[i, SPLIT[place + 1]])
    return nll


def test_positions_also_those_that_do_not_count():
    model, stream = language_model(trellis()), overlapping()
    length = math.ceil((len(SPLIT) - 1) / 4)
    rows = [(i * length, min((i + 1) * length, len(SPLIT) - 1)) for i in range(4)]
    expected = reference(model, rows, 11, 4)
    for row in measure(model, stream, TRAIN).position:
        theirs = expected[row["position"]]
        assert row["tokens"] == len(theirs)
        assert row["cross_entropy"] == pytest.approx(np.mean(theirs), rel=1e-5)
        assert row["counted"] == (row["position"] > 4)
    first_segments_only = data.TokenStream(
        SPLIT[:20], batch_size=2, sequence_length=14, context_length=4
    )
    position = measure(model, first_segments_only, TRAIN).position
    assert [row["tokens"] for row in position[:4]] == [0] * 4
    assert position[0]["cross_entropy"] is None


def test_frequencies():
    model, stream = language_model(trellis()), stateful()
    scores = [model.predict(x, verbose=0) for x, _, _ in stream]
    counts = np.bincount(TRAIN, minlength=SIZE)
    parts = measure(model, stream, TRAIN).frequency
    assert [(p["count_from"], p["count_to"]) for p in parts][:3] == [(0, 0), (1, 9), (10, 99)]
    assert parts[-1]["count_from"] <= counts.max() <= parts[-1]["count_to"]
    for part in parts:
        inside = (counts >= part["count_from"]) & (counts <= part["count_to"])
        nll = [
            -score[row, column, y[row, column]]
            for score, (_, y, weight) in zip(scores, stream, strict=True)
            for row, column in np.argwhere((weight > 0) & inside[y])
        ]
        assert part["words"] == inside.sum()
        assert part["tokens"] == len(nll)
        if nll:
            assert part["cross_entropy"] == pytest.approx(np.mean(nll), rel=1e-5)
            assert part["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert parts[0]["words"] == 2
    assert parts[0]["perplexity"] is None


def test_no_scores_of_the_vocabulary_are_made(monkeypatch):
    def call(self, hidden):
        raise AssertionError("log-probabilities were made")

    monkeypatch.setattr(DenseHead, "call", call)
    measure(language_model(trellis()), overlapping(), TRAIN)


def test_files(tmp_path):
    parts = measure(language_model(trellis()), overlapping(), TRAIN, metric="bpc")
    parts.write(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    names = ["frequency.csv", "frequency.png", "position.csv", "position.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in ("frequency", "position"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with open(folder / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        ours = getattr(parts, name)
        assert rows == [{k: "" if v is None else str(v) for k, v in r.items()} for r in ours]
        row = next(row for row in ours if row["tokens"])
        assert row["bpc"] == pytest.approx(row["cross_entropy"] / math.log(2))
    parts.write(folder)  # again


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    measure(language_model(trellis()), overlapping(), TRAIN).write("~/figures")
    assert (tmp_path / "figures" / "frequency.csv").is_file()


def test_wrong_input():
    model, stream = language_model(trellis()), overlapping()
    with pytest.raises(ValueError, match="for a LanguageModel. Received: SequenceRegressor"):
        measure(SequenceRegressor(trellis(return_sequences=False)), stream, TRAIN)
    with pytest.raises(ValueError, match="needs a text, as a data.TokenStream.*Received: tuple"):
        measure(model, stream[0], TRAIN)
    with pytest.raises(ValueError, match="`metric` must be one of.*Received: 'ppl'"):
        measure(model, stream, TRAIN, metric="ppl")
    with pytest.raises(ValueError, match=r"Token ids must lie in \[0, 30\). Received: 30"):
        measure(model, stream, np.append(TRAIN, SIZE))
    with pytest.raises(ValueError, match="Token ids must be integers"):
        measure(model, stream, TRAIN / 2)
    for wrong in (TRAIN[:0], TRAIN[None]):
        with pytest.raises(ValueError, match="`train_tokens` must be a text"):
            measure(model, stream, wrong)
    other = data.TokenStream(SPLIT + 5, batch_size=4, sequence_length=11)
    with pytest.raises(ValueError, match=r"Token ids must lie in \[0, 30\). Received: 3"):
        measure(model, other, TRAIN)
