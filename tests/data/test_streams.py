import json
import pathlib
import pickle

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.data import EpochOrder, PianoRollStream, SequenceStream, TokenStream

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@st.composite
def token_streams(draw, target_counting):
    """A stream of the text 0, 1, 2, ..., in which every token is its own place."""
    sequence_length = draw(st.integers(1, 30))
    context_length = draw(st.integers(0, sequence_length - 1))
    n = draw(st.one_of(st.integers(2, 200), st.sampled_from([2, 3, 13, 97, 199, 211])))
    most_rows = n - 1
    if target_counting == "original":
        n += context_length
        most_rows = n // (context_length + 2)
    batch_size = draw(st.integers(1, most_rows))
    return TokenStream(np.arange(n), batch_size, sequence_length, context_length, target_counting)


@settings(deadline=None, max_examples=100)
@given(token_streams("all"))
def test_every_target_counts_once_and_has_its_true_context(stream):
    rows, length, n = stream.batch_size, stream.sequence_length, stream.output_length
    counted = []
    for x, y, weight in stream:
        assert (x.shape, y.shape, weight.shape) == ((rows, length), (rows, n), (rows, n))
        assert (x.dtype, y.dtype, weight.dtype) == (np.int32, np.int32, np.float32)
        assert set(np.unique(weight)) <= {0, 1}
        for b, k in np.argwhere(weight == 1):
            target = y[b, k]
            counted.append(target)
            # The inputs up to this position are the text before the target.
            end = stream.context_length + k + 1
            context = np.arange(target - end, target)
            np.testing.assert_array_equal(x[b, :end], np.maximum(context, 0))
        # Padding holds tokens of the text.
        assert np.all((x >= 0) & (x < stream.targets_counted))
        assert np.all((y >= 1) & (y <= stream.targets_counted))
    assert sorted(counted) == list(range(1, stream.targets_counted + 1))


def test_stateful_rows_are_read_without_gaps():
    """The batches of the Lattice Recurrent Unit paper, over a prime number of tokens."""
    n, rows, steps = 100_003, 250, 50
    stream = TokenStream(np.arange(n), rows, steps)
    x, y, weight = (np.concatenate(arrays, axis=1) for arrays in zip(*stream, strict=True))
    # 401 targets per row, so the last segment has one; the last row has only 153.
    assert x.shape == y.shape == weight.shape == (250, 9 * 50)
    lengths = [401] * 249 + [153]
    for b, length in enumerate(lengths):
        np.testing.assert_array_equal(x[b, :length], 401 * b + np.arange(length))
        np.testing.assert_array_equal(weight[b], np.arange(450) < length)
    np.testing.assert_array_equal(np.sort(y[weight == 1]), np.arange(1, n))


@settings(deadline=None, max_examples=50)
@given(token_streams("original"))
def test_original_counting(stream):
    counted = []
    for i, (x, y, weight) in enumerate(stream):
        assert x.shape == (stream.batch_size, stream.sequence_length)
        assert y.shape == weight.shape == (stream.batch_size, stream.output_length)
        counts = weight == 1
        np.testing.assert_array_equal(y[counts], x[:, stream.context_length :][counts] + 1)
        assert np.all(counts) or i == len(stream) - 1
        counted += y[counts].tolist()
    # All targets inside a row except the first `context_length`.
    length = len(stream._tokens) // stream.batch_size
    firsts = range(0, stream.batch_size * length, length)
    inside = range(1 + stream.context_length, length)
    assert sorted(counted) == [first + t for first in firsts for t in inside]
    assert len(counted) == stream.targets_counted


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("trajectory_*.npz")), ids=lambda p: p.stem)
def test_original_batches_of_recorded_trajectories(path):
    data = np.load(path)
    config = json.loads(str(data["meta"]))["config"]
    text = data["in.stream"].T.reshape(-1)
    if config.get("repack"):
        arguments = {"sequence_length": config["horizon"]}
    else:
        arguments = {"sequence_length": config["seq_len"], "context_length": config["horizon"]}
    stream = TokenStream(text, config["N"], target_counting="original", **arguments)
    assert len(stream) == config["steps"]
    for i, (x, y, weight) in enumerate(stream):
        start, context = i * stream.output_length, stream.context_length
        length = int(weight[0].sum())
        column = data["in.stream"][start : start + context + length + 1].T
        np.testing.assert_array_equal(x[:, : context + length], column[:, :-1])
        np.testing.assert_array_equal(y[:, :length], column[:, 1 + context :])


def test_batches_of_a_memory_map_read_only_their_part(tmp_path):
    tokens = np.arange(5000, dtype="uint16")
    tokens.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype="uint16", mode="r")
    stream = TokenStream(mapped, 8, 20, 5)
    assert isinstance(stream._tokens, np.memmap)
    assert stream.token_range == (0, 4999)
    for ours, theirs in zip(stream[3], TokenStream(tokens, 8, 20, 5)[3], strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_array_equal(ours, theirs)


def test_tokens_that_int32_cannot_hold():
    stream = TokenStream(np.array([1, 2**32 + 5, 3, 4]), 1, 3)
    with pytest.raises(ValueError, match="smaller than 2.*31. Received: 4294967301"):
        stream[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": 20}, "batch_size=20"),
        ({"context_length": 4}, "context_length=4"),
        ({"target_counting": "exact"}, "`target_counting`"),
        ({"tokens": np.zeros(20, "float32")}, "`tokens`.*float32"),
        ({"tokens": np.zeros((5, 4), "int32")}, "`tokens`"),
        ({"tokens": np.zeros(1, "int32"), "batch_size": 1}, "`tokens`"),
        ({"target_counting": "original", "batch_size": 7, "context_length": 1}, "batch_size=7"),
    ],
)
def test_bad_token_stream(arguments, message):
    arguments = {"tokens": np.arange(20), "batch_size": 2, "sequence_length": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        TokenStream(**arguments)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_every_example_counts_once(n, batch_size, shuffle):
    stream = SequenceStream(np.arange(n), 10 * np.arange(n), batch_size, shuffle=shuffle, seed=5)
    assert stream.targets_counted == n
    assert len(stream) == -(-n // batch_size)
    counted = []
    for x, y, weight in stream:
        assert x.shape == y.shape == weight.shape == (batch_size,)
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(y, 10 * x)
        counted += x[weight == 1].tolist()
    assert sorted(counted) == list(range(n))
    assert shuffle or counted == list(range(n))


def order(stream):
    return np.concatenate([x for x, _, _ in stream]).tolist()


def test_batch_is_a_function_of_seed_epoch_and_index():
    def stream(seed):
        return SequenceStream(np.arange(50), np.arange(50), 8, shuffle=True, seed=seed)

    one, other = stream(1), stream(1)
    first = order(one)
    one.epoch = 3
    third = order(one)
    assert third != first
    other.epoch = 3
    # In any order of access, and without the epochs before.
    backwards = [other[i][0].tolist() for i in reversed(range(len(other)))]
    assert sum(reversed(backwards), []) == third
    assert order(pickle.loads(pickle.dumps(other))) == third
    one.epoch = 0
    assert order(one) == first
    assert order(stream(2)) != first


class Recorded(SequenceStream):
    """Keeps the epoch and the rows of its batches."""

    def __init__(self, seen):
        super().__init__(np.zeros((6, 1)), np.zeros((6, 1)), 2, shuffle=True)
        self.seen = seen

    def _batch(self, group, rows, counts):
        self.seen.append((self.epoch, tuple(rows)))
        return super()._batch(group, rows, counts)


def test_epochs_follow_fit_also_after_a_resume():
    seen = []

    def fit(**kwargs):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        stream = Recorded(seen)
        seen.clear()
        callback = EpochOrder(stream)
        model.fit(stream, epochs=3, shuffle=False, callbacks=[callback], verbose=0, **kwargs)
        return [batch for batch in seen if batch[0] == 2][-3:]

    whole = fit()
    assert len({rows for _, rows in whole}) == 3
    assert {epoch for epoch, _ in seen} == {0, 1, 2}
    assert fit(initial_epoch=2) == whole


def test_augmentation_follows_from_seed_epoch_and_batch():
    def stream(seed=0):
        return SequenceStream(
            np.zeros((9, 4)),
            np.zeros(9),
            2,
            shuffle=True,
            seed=seed,
            augment=lambda x, generator: x + generator.random(x.shape),
        )

    one = stream()
    first = [x.tolist() for x, _, _ in one]
    assert len({str(x) for x in first}) == 5
    assert [x.tolist() for x, _, _ in stream()] == first
    one.epoch = 1
    assert not {str(x.tolist()) for x, _, _ in one} & {str(x) for x in first}
    assert stream(1)[0][0].tolist() != first[0]


def test_weights_of_examples_and_padding_multiply():
    weight = np.array([[1, 0], [1, 1], [0, 2]])
    stream = SequenceStream(np.zeros((3, 2, 1)), np.zeros((3, 2)), 2, weight=weight)
    np.testing.assert_array_equal(stream[1][2], [[0, 2], [0, 0]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"x": np.zeros((3, 2))}, "same number of examples"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "at least one"),
        ({"seed": -1}, "`seed`"),
        ({"weight": np.ones(3)}, "`weight`"),
        ({"weight": np.array([1, 0, 1, 0])}, "example 1"),
    ],
)
def test_bad_sequence_stream(arguments, message):
    arguments = {"x": np.zeros((4, 2)), "y": np.zeros(4), "batch_size": 2} | arguments
    with pytest.raises(ValueError, match=message):
        SequenceStream(**arguments)


@pytest.mark.parametrize(
    "stream", [TokenStream(np.arange(10), 2, 3), SequenceStream(np.zeros(4), np.zeros(4), 3)]
)
def test_index_outside_the_stream(stream):
    for index in (-1, 2):
        with pytest.raises(IndexError):
            stream[index]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_every_frame_counts_once_after_its_past(frames, batch_size, shuffle):
    rolls = [np.zeros((n, 88), dtype="uint8") for n in frames]
    for number, roll in enumerate(rolls):
        # Every frame spells its piece and its place.
        roll[:, :6] = [[number >> k & 1 for k in range(6)]]
        roll[np.arange(len(roll)), 6 + np.arange(len(roll))] = 1
    stream = PianoRollStream(rolls, batch_size, shuffle=shuffle)
    counted = []
    for x, y, weight in stream:
        assert x.shape == y.shape == (*weight.shape, 88)
        assert weight.shape in {(batch_size, length) for length in stream.lengths}
        for b in np.flatnonzero(weight.any(axis=1)):
            steps = int(weight[b].sum())
            assert np.all(weight[b, :steps] == 1)
            number = int(x[b, 0, :6] @ 2 ** np.arange(6))
            np.testing.assert_array_equal(x[b, :steps], rolls[number][:-1])
            np.testing.assert_array_equal(y[b, :steps], rolls[number][1:])
            assert not x[b, steps:].any() and not y[b, steps:].any()
            counted.append(number)
    assert sorted(counted) == list(range(len(frames)))
    assert sum(weight.sum() for _, _, weight in stream) == stream.targets_counted
    assert len(stream.lengths) <= 4
    assert stream.lengths[-1] == max(frames) - 1


def test_rolls_are_transposed_and_lose_notes():
    """Each anew in each epoch, and what is heard and what is predicted alike."""
    rolls = [np.zeros((50, 88), dtype="uint8") for _ in range(40)]
    for roll in rolls:
        roll[:, [0, 30, 34, 37]] = 1  # the lowest key leaves the keyboard on the way down
    stream = PianoRollStream(rolls, 40, shuffle=True, transpose=0.5, note_dropout=0.1)
    (x, y, _), lowest = stream[0], []
    for heard, predicted in zip(x, y, strict=True):
        keys = np.flatnonzero(predicted[0])
        assert np.all(predicted == predicted[0]) and not heard[:, predicted[0] == 0].any()
        lowest.append(int(keys[-3] - 30))
        expected = np.array([0, 30, 34, 37]) + lowest[-1]
        assert keys.tolist() == expected[expected >= 0].tolist()
    assert set(lowest) <= set(range(-6, 6)) and len(set(lowest)) > 6
    assert 0.3 < np.mean(np.array(lowest) != 0) < 0.6
    assert x.sum() / y.sum() == pytest.approx(0.9, abs=0.02)
    np.testing.assert_array_equal(stream[0][0], x)
    stream.epoch = 1
    assert not np.array_equal(stream[0][0], x)
    for option, value in (("transpose", 1.5), ("note_dropout", 1.0)):
        with pytest.raises(ValueError, match=f"`{option}` must be in .*Received: .*{value}"):
            PianoRollStream(rolls, 40, **{option: value})


def test_rolls_share_batches_by_length():
    rolls = [np.zeros((steps + 1, 88)) for steps in (2, 3, 5, 16)]
    stream = PianoRollStream(rolls, 2)  # 16, 8, 4, 2
    assert stream.lengths == (2, 4, 8, 16)
    assert [x.shape[1] for x, _, _ in stream] == [2, 4, 8, 16]


def test_batches_of_several_lengths_train_under_xla():
    rolls = [np.zeros((frames, 88)) for frames in (20, 20, 20, 20, 20, 5, 5)]
    stream = PianoRollStream(rolls, 2, shuffle=True)
    assert stream.lengths == (5, 19)
    # TensorFlow takes the shapes of the first two batches for all.
    for stream.epoch in range(5):
        assert stream[0][0].shape != stream[1][0].shape
    model = keras.Sequential([keras.layers.Dense(88)])
    model.compile("sgd", keras.losses.BinaryCrossentropy(True), jit_compile=True)
    history = model.fit(stream, epochs=2, shuffle=False, callbacks=[EpochOrder(stream)], verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))


@pytest.mark.parametrize(
    "rolls, message",
    [
        ([np.zeros((4, 88)), np.zeros((5, 87))], r"Piano roll 1.*\(5, 87\)"),
        ([np.full((5, 88), 2)], "only 0 and 1. Received: 2"),
        ([np.zeros((1, 88))], "at least 2 frames"),
        ([], "at least one piano roll"),
    ],
)
def test_bad_piano_rolls(rolls, message):
    with pytest.raises(ValueError, match=message):
        PianoRollStream(rolls, 2)


def test_each_epoch_has_an_order_of_its_own_without_a_callback():
    seen = []
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    stream = Recorded(seen)
    model.fit(stream, epochs=3, shuffle=False, verbose=0)
    assert {epoch for epoch, _ in seen} >= {0, 1, 2}  # Keras may fetch ahead
    assert len({rows for _, rows in seen}) > 3
