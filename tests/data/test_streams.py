import json
import pathlib

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.data import TokenStream

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
START = 10_000


@st.composite
def exact_streams(draw):
    """A stream in which token t is the number t, so that every id tells its place."""
    n = draw(st.one_of(st.integers(2, 200), st.sampled_from([2, 3, 13, 97, 199, 211])))
    segment = draw(st.integers(1, 30))
    history = draw(st.sampled_from(["chop", "repackage"]))
    horizon = draw(st.integers(0, segment - 1)) if history == "chop" else 0
    batch_size = draw(st.integers(1, n - 1))
    return TokenStream(
        np.arange(n), batch_size, segment, history=history, horizon=horizon, start_token=START
    )


@settings(deadline=None, max_examples=200)
@given(exact_streams())
def test_every_target_counts_once_and_has_its_true_context(stream):
    batch_size, segment, n = stream.batch_size, stream.segment, stream.output_length
    counted = []
    for x, y, weight in stream:
        assert (x.shape, y.shape, weight.shape) == (
            (batch_size, segment),
            (batch_size, n),
            (batch_size, n),
        )
        assert (x.dtype, y.dtype, weight.dtype) == (np.int32, np.int32, np.float32)
        for b, k in np.argwhere(weight == 1):
            target = y[b, k]
            counted.append(target)
            # The inputs up to this position are the text before the target.
            place = stream.horizon + k
            context = np.arange(target - 1 - place, target)
            np.testing.assert_array_equal(x[b, : place + 1], np.where(context < 0, START, context))
        assert set(np.unique(weight)) <= {0, 1}
    assert sorted(counted) == list(range(1, stream.targets_counted + 1))
    assert stream.targets_skipped == 0
    assert len(stream) == stream.steps


@settings(deadline=None, max_examples=100)
@given(exact_streams())
def test_padding_holds_tokens_of_the_text(stream):
    last = stream.targets_counted
    for x, y, _ in stream:
        assert np.all((x < last) | (x == START))
        assert np.all((y >= 1) & (y <= last))


def test_repackaged_segments_follow_each_other():
    stream = TokenStream(np.arange(101), 4, 7, history="repackage")
    rows = np.concatenate([x for x, _, _ in stream], axis=1)
    # 25 targets a row, 4 segments of 7.
    assert stream.steps == 4
    for b in range(4):
        np.testing.assert_array_equal(rows[b, :25], np.arange(25 * b, 25 * b + 25))


def test_carried_state_sees_each_row_without_gaps_up_to_its_last_target():
    """The Lattice Recurrent Unit paper's batches, 250 rows of 50 steps, over a prime number."""
    n, rows, steps = 100_003, 250, 50
    stream = TokenStream(np.arange(n), rows, steps, history="repackage")
    x, y, weight = (np.concatenate(arrays, axis=1) for arrays in zip(*stream, strict=True))
    # 401 targets a row, so that the last segment has one; the last row has only 153.
    assert x.shape == y.shape == weight.shape == (250, 9 * 50)
    lengths = [401] * 249 + [153]
    assert weight.sum(axis=1).tolist() == lengths
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(x[b, :length], 401 * b + np.arange(length))
        np.testing.assert_array_equal(weight[b], np.arange(450) < length)
    np.testing.assert_array_equal(np.sort(y[weight == 1]), np.arange(1, n))


def test_a_text_shorter_than_one_batch_is_one_padded_batch():
    stream = TokenStream(np.arange(2_000), 250, 50, history="repackage")
    ((_, y, weight),) = list(stream)
    assert weight.shape == (250, 50)
    np.testing.assert_array_equal(y[weight == 1], np.arange(1, 2_000))


@st.composite
def authors_streams(draw):
    n = draw(st.integers(20, 300))
    segment = draw(st.integers(1, 12))
    history = draw(st.sampled_from(["chop", "repackage"]))
    horizon = draw(st.integers(0, segment - 1)) if history == "chop" else 0
    batch_size = draw(st.integers(1, n // (horizon + 2)))
    return TokenStream(
        np.arange(n), batch_size, segment, history=history, horizon=horizon, protocol="authors"
    ), n


@settings(deadline=None, max_examples=100)
@given(authors_streams())
def test_authors_protocol_counts_what_it_says(case):
    stream, n = case
    counted = []
    for i, (x, y, weight) in enumerate(stream):
        assert x.shape == (stream.batch_size, stream.segment)
        assert y.shape == weight.shape == (stream.batch_size, stream.output_length)
        np.testing.assert_array_equal(y, x[:, stream.horizon :] + 1)
        assert np.all(weight == 1) or i == stream.steps - 1
        counted += y[weight == 1].tolist()
    assert len(counted) == len(set(counted)) == stream.targets_counted
    assert stream.targets_counted + stream.targets_skipped == n - 1
    # Per row: all targets inside the row, but for the first `horizon` ones.
    length = n // stream.batch_size
    expected = [
        b * length + t for b in range(stream.batch_size) for t in range(1 + stream.horizon, length)
    ]
    assert sorted(counted) == expected


@pytest.mark.parametrize(
    "length, segment, horizon, steps, last",
    [(85, 10, 6, 20, 8), (87, 10, 6, 20, 10), (95, 8, 0, 12, 6)],
)
def test_authors_segments_of_the_golden_trajectories(length, segment, horizon, steps, last):
    """The stream lengths, batch size and step counts of the recorded training runs."""
    history = "chop" if horizon else "repackage"
    stream = TokenStream(
        np.arange(4 * length), 4, segment, history=history, horizon=horizon, protocol="authors"
    )
    assert stream.steps == steps
    assert np.all(stream[steps - 1][2].sum(axis=1) == last - horizon)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("trajectory_*.npz")), ids=lambda p: p.stem)
def test_recorded_trajectories(path):
    data = np.load(path)
    config = json.loads(str(data["meta"]))["config"]
    text = data["in.stream"].T.reshape(-1)
    if config.get("repack"):
        arguments = {"segment": config["horizon"], "history": "repackage"}
    else:
        arguments = {"segment": config["seq_len"], "horizon": config["horizon"]}
    stream = TokenStream(text, config["N"], protocol="authors", **arguments)
    assert stream.steps == config["steps"]
    for i, (x, y, weight) in enumerate(stream):
        start, length = i * stream.output_length, int(weight[0].sum())
        column = data["in.stream"][start : start + stream.horizon + length + 1].T
        np.testing.assert_array_equal(x[:, : stream.horizon + length], column[:, :-1])
        np.testing.assert_array_equal(y[:, :length], column[:, 1 + stream.horizon :])


def test_batches_of_a_memory_map_read_only_their_part(tmp_path):
    tokens = np.arange(5000, dtype="uint16")
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype="uint16", mode="r")
    stream = TokenStream(mapped, 8, 20, horizon=5)
    assert isinstance(stream._tokens, np.memmap)
    for ours, theirs in zip(stream[3], TokenStream(tokens, 8, 20, horizon=5)[3], strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_array_equal(ours, theirs)


def test_index_outside_the_stream():
    stream = TokenStream(np.arange(10), 2, 3)
    for index in (-1, len(stream)):
        with pytest.raises(IndexError, match=f"Received: {index}"):
            stream[index]


@pytest.mark.parametrize("history, horizon", [("chop", 3), ("repackage", 0)])
@pytest.mark.parametrize("protocol", ["exact", "authors"])
def test_to_tf_data(history, horizon, protocol):
    pytest.importorskip("tensorflow")
    stream = TokenStream(np.arange(103), 4, 8, history=history, horizon=horizon, protocol=protocol)
    dataset = stream.to_tf_data()
    assert int(dataset.cardinality()) == stream.steps
    shapes = [spec.shape.as_list() for spec in dataset.element_spec]
    assert shapes == [[4, 8], [4, 8 - horizon], [4, 8 - horizon]]
    for _ in range(2):
        batches = list(dataset.as_numpy_iterator())
        assert len(batches) == stream.steps
        for ours, theirs in zip(batches, stream, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)


def test_fit_and_evaluate_take_the_stream():
    tokens = np.random.default_rng(0).integers(0, 11, 203)
    stream = TokenStream(tokens, 4, 8, horizon=3, vocabulary_size=11)
    model = keras.Sequential(
        [
            keras.layers.Embedding(11, 4),
            keras.layers.Lambda(lambda x: x[:, -5:]),
            keras.layers.Dense(11),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    model.fit(stream, epochs=1, shuffle=False, verbose=0)
    assert np.isfinite(model.evaluate(stream, verbose=0))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"segment": 0}, "`segment` must be an integer >= 1.*segment=0"),
        ({"segment": 2.5}, "segment=2.5"),
        ({"batch_size": 0}, "batch_size=0"),
        (
            {"batch_size": 20},
            "at most the number of targets, 19.* 20 rows of 4 tokens.*batch_size=20",
        ),
        ({"horizon": 4}, "smaller than `segment`.*horizon=4, segment=4"),
        ({"horizon": -1}, "horizon=-1"),
        ({"history": "repackage", "horizon": 2}, "must be 0. Received: horizon=2"),
        ({"history": "carry"}, "Received: 'carry'"),
        ({"protocol": "loose"}, "Received: 'loose'"),
        ({"start_token": -1}, "start_token=-1"),
        ({"start_token": 20, "vocabulary_size": 20}, r"\[0, 20\). Received: 20"),
        ({"vocabulary_size": 19}, r"\[0, 19\). Received: 19"),
        ({"tokens": np.zeros(20, "float32")}, "integers.*float32"),
        ({"tokens": np.zeros((5, 4), "int32")}, r"shape \(5, 4\)"),
        ({"tokens": np.zeros(1, "int32"), "batch_size": 1}, "at least 2 tokens. Received: 1"),
        ({"protocol": "authors", "batch_size": 7, "horizon": 2}, "which makes 2 a row"),
    ],
)
def test_bad_arguments(arguments, message):
    arguments = {"tokens": np.arange(20), "batch_size": 2, "segment": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        TokenStream(**arguments)
