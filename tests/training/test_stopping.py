"""Training that stops at a lost loss, or at a time limit."""

import itertools
import math
import types

import keras
import numpy as np
import pytest

from tests.support.checkpoints import assert_same, data, fit, make_model, values
from trellis_keras.data import EpochOrder
from trellis_keras.training import (
    BestModel,
    Checkpoint,
    HistoryCSV,
    StopOnNaN,
    TimeLimit,
    latest_checkpoint,
    restore_checkpoint,
)
from trellis_keras.training.checkpoint_files import read
from trellis_keras.training.history import read_history
from trellis_keras.training.stopping import EpochInterrupted

# A lost loss


class Batches(keras.utils.PyDataset):
    """Four batches; `spoil(x, y)` changes the third one of the second epoch."""

    epoch = 0

    def __init__(self, spoil=None):
        super().__init__()
        self.spoil = spoil

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = (array[8 * index : 8 * index + 8].copy() for array in data())
        if self.spoil and (self.epoch, index) == (1, 2):
            self.spoil(x, y)
        return x, y


def train(folder, spoil=None, validation=None):
    model, batches = make_model(), Batches(spoil)
    best = BestModel(folder / "best.keras")
    checkpoint = Checkpoint(folder / "checkpoints", callbacks=[best])
    history = HistoryCSV(folder / "history.csv")
    callbacks = [StopOnNaN(), EpochOrder(batches), history, best, checkpoint]
    options = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    model.fit(batches, validation_data=validation or data(), **options)
    return model


def make_nan(x, y):
    x[5] = np.nan


def cannot_read(x, y):
    raise OSError(5, "Input/output error", "numbers.npy")


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (make_nan, (FloatingPointError, "The loss is nan at step 3 of epoch 2.$")),
        (cannot_read, (Exception, "Input/output error")),  # TensorFlow has its own
    ],
)
def test_a_lost_epoch_leaves_what_the_one_before_has_saved(tmp_path, spoil, error):
    with pytest.raises(error[0], match=error[1]):
        train(tmp_path, spoil)
    assert latest_checkpoint(tmp_path / "checkpoints").name == "epoch-0001.npz"
    assert [row["epoch"] for row in read_history(tmp_path / "history.csv")] == ["1"]
    best, checkpoint = keras.saving.load_model(tmp_path / "best.keras"), make_model()
    restore_checkpoint(checkpoint, tmp_path / "checkpoints")
    assert_same(best.get_weights(), checkpoint.get_weights())
    if spoil is cannot_read:  # resumed, the run ends as one without the error
        assert_same(values(train(tmp_path)), values(train(tmp_path / "whole")))


@pytest.mark.both_backends(slow=True)
def test_a_lost_validation_ends_training_before_anything_is_saved(tmp_path):
    x, y = data()
    with pytest.raises(FloatingPointError, match="The validation loss after epoch 1 is inf.$"):
        train(tmp_path, validation=(x, y + np.inf))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert latest_checkpoint(tmp_path / "checkpoints") is None


# A time limit


class Clock(keras.callbacks.Callback):
    """A clock that advances in each epoch by its seconds."""

    def __init__(self, *seconds):
        super().__init__()
        self.now = 100.0
        self.seconds = seconds

    def __call__(self):
        return self.now

    def on_epoch_begin(self, epoch, logs=None):
        self.now += self.seconds[epoch]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("trellis_keras.training.stopping.monotonic", clock)
    return clock


def epochs_until_stopped(limit, clock, stopped_by_others_after=None):
    """The number of epochs of a loop without a model."""
    limit.set_params({"epochs": len(clock.seconds)})
    limit.set_model(types.SimpleNamespace(stop_training=False))
    limit.on_train_begin()
    for epoch in range(len(clock.seconds)):
        clock.on_epoch_begin(epoch)
        limit.model.stop_training = epoch + 1 == stopped_by_others_after
        limit.on_epoch_end(epoch)
        if limit.model.stop_training:
            break
    return epoch + 1


@pytest.mark.parametrize(
    ("seconds", "lost_before", "epochs", "expected"),
    [
        (40, 0, [10] * 6, 4),  # just in time
        (40, 11, [10] * 6, 2),  # loading data counts
        (44, 0, [20, 5, 5, 5, 5, 5], 5),  # the first, which compiles, does not count
        (39, 0, [20, 5, 5, 5, 5, 5], 1),  # unless there is no other: the second might end at 40
        (44, 0, [5, 20, 5, 5, 5, 5], 2),  # of the others, the longest counts
        (1, 50, [10] * 6, 1),  # one is always trained
        (60, 0, [10] * 6, 6),
    ],
)
def test_the_next_epoch_must_fit(seconds, lost_before, epochs, expected, clock):
    clock.seconds = epochs
    limit = TimeLimit(seconds)
    clock.now += lost_before
    assert epochs_until_stopped(limit, clock) == expected
    assert limit.stopped == (expected < 6)


@pytest.mark.parametrize(("seconds", "batches"), [(49, 3), (50, 4)])
def test_another_two_batches_must_fit(seconds, batches, clock):
    """Of ten seconds each."""
    saved = []
    checkpoint = types.SimpleNamespace(save_within_epoch=lambda: saved.append(clock.now))
    limit = TimeLimit(seconds, checkpoint=checkpoint)
    limit.set_model(types.SimpleNamespace(stop_training=False))
    limit.set_params({"epochs": 1, "steps": 9})
    limit.on_train_begin()
    limit.on_epoch_begin(0)
    with pytest.raises(EpochInterrupted):
        for batch in range(9):
            limit.on_train_batch_begin(batch)
            clock.now += 10
            limit.on_train_batch_end(batch)
    assert saved == [100 + 10 * batches]


@pytest.mark.parametrize(("epochs", "others"), [([10, 10], 1), ([10], None)])
def test_finished_training_is_not_stopped(epochs, others, clock):
    clock.seconds, limit = epochs, TimeLimit(5)
    assert epochs_until_stopped(limit, clock, others) == 1
    assert not limit.stopped


def test_training_resumes_after_the_limit(tmp_path, capsys, clock):
    clock.seconds, limit = [10] * 4, TimeLimit(20, command="train again")
    assert fit(make_model(), 4, clock, Checkpoint(tmp_path), limit, verbose=2).epoch == [0, 1]
    assert capsys.readouterr().out.endswith("after 2 of 4 epochs. To resume: train again\n")
    assert not read(tmp_path / "epoch-0002.npz")[0]["stopped"]
    assert fit(make_model(), 3, Checkpoint(tmp_path), limit, verbose=2).epoch == [2]
    assert not limit.stopped and "train again" not in capsys.readouterr().out


def test_wrong_limits(tmp_path):
    with pytest.raises(ValueError, match="seconds=nan"):
        TimeLimit(math.nan)
    with pytest.raises(ValueError, match="seconds='1'"):
        TimeLimit("1")
    limit = TimeLimit(9, checkpoint=Checkpoint(tmp_path))
    model = make_model()
    model.fit(*data(), epochs=2, shuffle=False, verbose=0, callbacks=[limit.checkpoint])
    with pytest.raises(ValueError, match="TimeLimit"):
        model.fit(
            (data() for _ in itertools.count()), verbose=0, callbacks=[limit.checkpoint, limit]
        )
    assert model.fit(*data(), verbose=0).epoch == [0]  # without the checkpoint
