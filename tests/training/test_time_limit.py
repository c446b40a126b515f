"""The time limit, by a clock that only the test moves."""

import types

import keras
import numpy as np
import pytest

from trellis_keras.training import Checkpoint, TimeLimit, latest


class Clock(keras.callbacks.Callback):
    """A clock that each epoch moves on by its own seconds."""

    def __init__(self, *seconds):
        super().__init__()
        self.now = 100.0
        self.seconds = seconds

    def __call__(self):
        return self.now

    def on_epoch_begin(self, epoch, logs=None):
        self.now += self.seconds[epoch]


def epochs_until_stopped(limit, clock, stopped_by_others_after=None):
    """How many epochs a training without a model lasts."""
    limit.set_params({"epochs": len(clock.seconds)})
    limit.set_model(types.SimpleNamespace(stop_training=False))
    limit.on_train_begin()
    for epoch in range(len(clock.seconds)):
        clock.on_epoch_begin(epoch)
        limit.model.stop_training = epoch + 1 == stopped_by_others_after
        limit.on_epoch_end(epoch)
        if limit.model.stop_training:
            return epoch + 1
    return len(clock.seconds)


@pytest.mark.parametrize(
    ("seconds", "lost_before", "epochs", "expected"),
    [
        (39, 0, [10] * 6, 3),  # the fourth would end at 40
        (40, 0, [10] * 6, 4),  # just in time
        (40, 11, [10] * 6, 2),  # loading data counts
        (44, 0, [20, 5, 5, 5, 5, 5], 2),  # the longest counts: the third is expected to end at 45
        (45, 0, [20, 5, 5, 5, 5, 5], 3),
        (44, 0, [5, 20, 5, 5, 5, 5], 2),
        (1, 0, [10] * 6, 1),  # one is always trained
        (1, 50, [10] * 6, 1),
        (60, 0, [10] * 6, 6),
    ],
)
def test_another_epoch_must_fit(seconds, lost_before, epochs, expected):
    clock = Clock(*epochs)
    limit = TimeLimit(seconds, clock=clock)
    clock.now += lost_before
    assert epochs_until_stopped(limit, clock) == expected
    assert limit.stopped == (expected < 6)


@pytest.mark.parametrize(("epochs", "others"), [([10, 10], 1), ([10], None)])
def test_training_that_is_over_is_not_stopped(epochs, others):
    clock = Clock(*epochs)
    limit = TimeLimit(5, clock=clock)
    assert epochs_until_stopped(limit, clock, others) == 1
    assert not limit.stopped


def fit(*callbacks, epochs=4):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", jit_compile=False)
    x = np.ones((2, 1))
    return model.fit(x, x, epochs=epochs, callbacks=callbacks, verbose=2, shuffle=False).epoch


@pytest.mark.both_backends
def test_the_checkpoint_before_it_goes_on(tmp_path, capsys):
    clock = Clock(*[10] * 4)
    limit = TimeLimit(20, clock=clock, command="train again")
    assert fit(clock, Checkpoint(tmp_path), limit) == [0, 1]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "2 of 4 epochs are done; the time limit leaves no room for another. To go on: train again"
    )
    assert latest(tmp_path).name == "epoch-0002"
    assert fit(Checkpoint(tmp_path), limit, epochs=3) == [2]
    assert not limit.stopped and "train again" not in capsys.readouterr().out


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_limit_is_positive(seconds):
    with pytest.raises(ValueError, match="`seconds` must be positive. Received: seconds="):
        TimeLimit(seconds)
