import pickle

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.data import (
    EpochOrder,
    Examples,
    PianoRollStream,
    SequenceStream,
    Splits,
    TokenStream,
)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_every_example_counts_once(n, batch_size, shuffle):
    stream = SequenceStream(np.arange(n), 10 * np.arange(n), batch_size, shuffle=shuffle, seed=5)
    counted = []
    for x, y, weight in stream:
        assert x.shape == y.shape == weight.shape == (batch_size,)
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(y, 10 * x)
        counted += x[weight == 1].tolist()
    assert sorted(counted) == list(range(n))
    assert shuffle or counted == list(range(n))
    assert len(stream) == -(-n // batch_size)


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
    # In any order of asking, and as if the epochs before had not been.
    backwards = [other[i][0].tolist() for i in reversed(range(len(other)))]
    assert sum(reversed(backwards), []) == third
    one.epoch = 0
    assert order(one) == first
    assert order(stream(2)) != first


def test_epochs_follow_fit_also_after_a_resume():
    seen = []

    class Recorded(SequenceStream):
        def _batch(self, group, rows, counts):
            seen.append((self.epoch, tuple(rows)))
            return super()._batch(group, rows, counts)

    def fit(**kwargs):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        stream = Recorded(np.zeros((6, 1)), np.zeros((6, 1)), 2, shuffle=True)
        seen.clear()
        callback = EpochOrder(stream)
        model.fit(stream, epochs=3, shuffle=False, callbacks=[callback], verbose=0, **kwargs)
        return [batch for batch in seen if batch[0] == 2][-3:]

    whole = fit()
    assert len({rows for _, rows in whole}) == 3
    assert {epoch for epoch, _ in seen} == {0, 1, 2}
    assert fit(initial_epoch=2) == whole


@pytest.mark.parametrize("stream", [SequenceStream, TokenStream])
def test_there_are_no_workers(stream):
    """With threads of Keras' the batches come twice or never on JAX."""
    with pytest.raises(TypeError, match="workers"):
        stream(np.arange(9), np.arange(9), 4, workers=2)


def test_streams_travel_to_other_processes():
    stream = SequenceStream(np.arange(9), np.arange(9), 4, shuffle=True)
    stream.epoch = 2
    assert order(pickle.loads(pickle.dumps(stream))) == order(stream)


def test_weights_of_examples_and_of_the_rest_multiply():
    weight = np.array([[1, 0], [1, 1], [0, 2]])
    stream = SequenceStream(np.zeros((3, 2, 1)), np.zeros((3, 2)), 2, weight=weight)
    np.testing.assert_array_equal(stream[1][2], [[0, 2], [0, 0]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"x": np.zeros((3, 2))}, r"same number of examples.*\(3, 2\) and \(4,\)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "at least one example"),
        ({"batch_size": 0}, "`batch_size` must be an integer >= 1"),
        ({"seed": -1}, "`seed` must be an integer >= 0"),
        ({"weight": np.ones(3)}, r"`weight` must have the shape.*\(3,\)"),
        ({"weight": np.array([1, 0, 1, 0])}, r"needs a step that counts.*example 1 \(2 such"),
    ],
)
def test_bad_arguments(arguments, message):
    arguments = {"x": np.zeros((4, 2)), "y": np.zeros(4), "batch_size": 2} | arguments
    with pytest.raises(ValueError, match=message):
        SequenceStream(**arguments)


def test_no_worker_processes():
    # Keras waits for ever for one that has died.
    with pytest.raises(TypeError, match="use_multiprocessing"):
        SequenceStream(np.zeros(4), np.zeros(4), 3, use_multiprocessing=True)
    with pytest.raises(TypeError, match="use_multiprocessing"):
        TokenStream(np.arange(9), 2, 3, use_multiprocessing=True)


def test_bad_index_and_epoch():
    stream = SequenceStream(np.zeros(4), np.zeros(4), 3)
    with pytest.raises(IndexError, match="batches 0 to 1. Received: 2"):
        stream[2]
    with pytest.raises(ValueError, match="`epoch`"):
        stream.epoch = -1


def test_splits_shuffle_the_training_set_only():
    part = Examples(np.arange(30), np.arange(30))
    splits = Splits("some", part, part, part, checksum="")
    assert order(splits.stream("valid", 10)) == list(range(30))
    assert order(splits.stream("train", 10)) != list(range(30))
    assert order(splits.stream("train", 10, shuffle=False)) == list(range(30))
    with pytest.raises(ValueError, match="split='dev'"):
        splits.stream("dev", 10)


def random_rolls(lengths):
    generator = np.random.default_rng(0)
    return [(generator.random((n, 88)) < 0.05).astype("uint8") for n in lengths]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_frame_counts_once_behind_its_past(lengths, batch_size, buckets, shuffle):
    rolls = [np.zeros((n, 88), dtype="uint8") for n in lengths]
    for number, roll in enumerate(rolls):
        # Every frame tells its piece and its place.
        roll[:, :6] = [[number >> k & 1 for k in range(6)]]
        roll[np.arange(len(roll)), 6 + np.arange(len(roll))] = 1
    stream = PianoRollStream(rolls, batch_size, buckets=buckets, shuffle=shuffle)
    counted = []
    for x, y, weight in stream:
        assert x.shape == y.shape == (*weight.shape, 88)
        assert weight.shape in {(batch_size, time) for time in stream.times}
        for b in np.flatnonzero(weight.any(axis=1)):
            steps = int(weight[b].sum())
            assert np.all(weight[b, :steps] == 1)
            number = int(x[b, 0, :6] @ 2 ** np.arange(6))
            np.testing.assert_array_equal(x[b, :steps], rolls[number][:-1])
            np.testing.assert_array_equal(y[b, :steps], rolls[number][1:])
            assert not x[b, steps:].any() and not y[b, steps:].any()
            counted.append(number)
    assert sorted(counted) == list(range(len(lengths)))
    assert sum(weight.sum() for _, _, weight in stream) == stream.frames_counted
    assert len(stream.times) <= buckets
    assert stream.times[-1] == max(lengths) - 1


@pytest.fixture(scope="module")
def causal_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((None, 88)),
            keras.layers.Conv1D(12, 5, padding="causal", dilation_rate=3, activation="tanh"),
            keras.layers.Conv1D(88, 3, padding="causal", bias_initializer="ones"),
        ]
    )


def nll_per_frame(model, stream):
    total = frames = 0
    for x, y, weight in stream:
        logits = np.asarray(model(x), dtype="float64")
        nll = (np.logaddexp(0, logits) - y * logits).sum(axis=-1)
        total, frames = total + (nll * weight).sum(), frames + weight.sum()
    return total / frames


@pytest.mark.parametrize("buckets", [1, 3])
def test_nll_of_padded_batches_is_that_of_single_pieces(causal_model, buckets):
    rolls = random_rolls([3, 40, 17, 8, 21, 2, 29])
    alone = nll_per_frame(causal_model, [next(iter(PianoRollStream([r], 1))) for r in rolls])
    padded = nll_per_frame(causal_model, PianoRollStream(rolls, 4, buckets=buckets))
    assert padded == pytest.approx(alone, rel=1e-5)


def test_batches_of_several_lengths_train_under_xla(causal_model):
    rolls = random_rolls([20, 20, 20, 20, 20, 5, 5])
    stream = PianoRollStream(rolls, 2, buckets=3, shuffle=True)
    assert stream.times == (5, 19)
    # TensorFlow takes the shapes of the first two batches for all.
    for stream.epoch in range(5):
        assert stream[0][0].shape != stream[1][0].shape
    causal_model.compile("sgd", keras.losses.BinaryCrossentropy(True), jit_compile=True)
    history = causal_model.fit(
        stream, epochs=2, shuffle=False, callbacks=[EpochOrder(stream)], verbose=0
    )
    assert np.all(np.isfinite(history.history["loss"]))


@pytest.mark.parametrize(
    "roll, message",
    [
        (np.zeros((5, 87)), r"Piano roll 1 must have the shape \(frames, 88\).*\(5, 87\)"),
        (np.zeros(88), r"shape \(88,\)"),
        (np.full((5, 88), 2), "only 0 and 1. Received: 2"),
        (np.full((5, 88), np.nan), "only 0 and 1. Received: nan"),
        (np.zeros((1, 88)), "Piano roll 1 has no step.*Received: 1"),
    ],
)
def test_bad_piano_rolls(roll, message):
    with pytest.raises(ValueError, match=message):
        PianoRollStream([np.zeros((4, 88)), roll], 2)


def test_bad_piano_roll_arguments():
    with pytest.raises(ValueError, match="at least one piano roll"):
        PianoRollStream([], 2)
    with pytest.raises(ValueError, match="`buckets` must be an integer >= 1"):
        PianoRollStream([np.zeros((4, 88))], 2, buckets=0)


def test_more_buckets_than_there_are_lengths():
    rolls = [np.zeros((steps, 88)) for steps in (2, 5, 9)]
    assert PianoRollStream(rolls, 2, buckets=70).times == PianoRollStream(rolls, 2, buckets=9).times
