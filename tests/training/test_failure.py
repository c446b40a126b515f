"""A training that has diverged, or loses its data, says so and leaves the last good state."""

import keras
import numpy as np
import pytest

from tests.support.checkpoints import assert_same, data, make_model, values
from trellis_keras.training import Checkpoint, StopOnNaN, latest, restore
from trellis_keras.training.records import BestModel, HistoryCSV, read_history
from trellis_keras.training.run import explained

pytestmark = pytest.mark.both_backends


class Batches(keras.utils.PyDataset):
    """Four batches; `spoil(x, y)` is called for the third one of the second epoch."""

    def __init__(self, spoil=None):
        super().__init__()
        self.spoil = spoil
        self.epoch = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = (array[8 * index : 8 * index + 8].copy() for array in data())
        if self.spoil and (self.epoch, index) == (1, 2):
            self.spoil(x, y)
        return x, y


def train(folder, epochs=3, spoil=None, validation=None, at_epoch_end=None):
    model = make_model()
    batches = Batches(spoil)
    best = BestModel(folder / "best.keras")

    def count(epoch, logs):
        batches.epoch = epoch

    model.fit(
        batches,
        validation_data=validation or data(),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            StopOnNaN(),
            keras.callbacks.LambdaCallback(on_epoch_begin=count, on_epoch_end=at_epoch_end),
            HistoryCSV(folder / "history.csv"),
            best,
            Checkpoint(folder / "checkpoints", callbacks=[best]),
        ],
    )
    return model


def make_infinite(x, y):
    y[5] = np.inf


def make_nan(x, y):
    x[5] = np.nan


def cannot_read(x, y):
    raise OSError(5, "Input/output error", "numbers.npy")


def assert_first_epoch_is_left(folder):
    assert latest(folder / "checkpoints").name == "epoch-0001"
    assert [row["epoch"] for row in read_history(folder / "history.csv")] == ["1"]
    best, checkpoint = keras.saving.load_model(folder / "best.keras"), make_model()
    restore(checkpoint, folder / "checkpoints")
    assert_same(best.get_weights(), checkpoint.get_weights())
    assert all(np.isfinite(weight).all() for weight in best.get_weights())


@pytest.mark.parametrize(("spoil", "value"), [(make_nan, "nan"), (make_infinite, "inf")])
def test_a_lost_loss_ends_training_before_anything_is_saved(tmp_path, spoil, value):
    with pytest.raises(FloatingPointError, match=f"The loss is {value} at step 3 of epoch 2.$"):
        train(tmp_path, spoil=spoil)
    assert_first_epoch_is_left(tmp_path)


def test_a_lost_validation_ends_training(tmp_path):
    x, y = data()
    with pytest.raises(FloatingPointError, match="The validation loss after epoch 1 is inf.$"):
        train(tmp_path, validation=(x, y + np.inf))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert latest(tmp_path / "checkpoints") is None


def test_lost_weights_are_not_saved(tmp_path):
    def spoil(epoch, logs):
        if epoch == 1:
            kernel.assign(np.full(kernel.shape, np.nan))

    model = make_model()
    kernel = model.layers[0].kernel
    spoiling = keras.callbacks.LambdaCallback(on_epoch_end=spoil)
    with pytest.raises(FloatingPointError, match="After epoch 2 the weight .*kernel' is not"):
        model.fit(*data(), epochs=3, verbose=0, callbacks=[spoiling, Checkpoint(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0001"]


def test_a_model_that_diverged_is_not_the_best(tmp_path):
    best = BestModel(tmp_path / "best.keras")
    best.set_model(make_model())
    best.on_epoch_end(0, {"val_loss": float("nan")})
    assert not list(tmp_path.iterdir())
    best.on_epoch_end(1, {"val_loss": 3.0})
    assert best.get_state() == {"best": 3.0}


def test_data_that_cannot_be_read(tmp_path):
    told = (
        r"Input/output error.*The last good state is \S+epoch-0001. "
        r"When that is put right, go on with: trellis-keras train --output \S+$"
    )
    with pytest.raises(OSError, match=told) as raised, explained(tmp_path):
        train(tmp_path, spoil=cannot_read)
    assert "\n" not in str(raised.value)
    assert_first_epoch_is_left(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert_same(values(train(tmp_path)), values(train(whole)))


def test_other_errors_are_left_alone(tmp_path):
    with pytest.raises(KeyError, match="^'x'$"), explained(tmp_path):
        raise KeyError("x")
