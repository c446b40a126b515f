"""What is recorded of an epoch: the history and the best model."""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tests.support.checkpoints import data, make_model
from trellis_keras.training import (
    BestModel,
    Checkpoint,
    HistoryCSV,
    PlateauDecay,
    restore_checkpoint,
)
from trellis_keras.training.history import read_history


@pytest.mark.parametrize("callback", [HistoryCSV, BestModel])
def test_a_folder_of_the_name_of_a_file(callback, tmp_path):
    (tmp_path / "run.keras").mkdir()
    with pytest.raises(ValueError, match="run.keras is a folder"):
        callback(tmp_path / "run.keras").on_train_begin()


def test_history_and_best_model_in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    history, best = HistoryCSV("~/new/history.csv"), BestModel("~/new/best.keras")
    for callback in (history, best):
        callback.set_model(make_model())
        callback.on_train_begin()
    history.on_epoch_begin(0)
    assert read_history("~/new/history.csv") == []
    for epoch, loss in enumerate([math.nan, 3.0, 4.0]):
        history.on_epoch_end(epoch, {"loss": loss})
        best.on_epoch_end(epoch, {"val_loss": loss})
        assert (tmp_path / "new" / "best.keras").exists() == (epoch > 0)
    assert best.get_state() == {"best": 3.0}
    # The second epoch anew, after a kill before its checkpoint.
    history.on_train_begin()
    history.on_epoch_begin(1)
    history.on_epoch_end(1, {"loss": 2.5, "bpc": 1})
    rows = read_history("~/new/history.csv")
    first, second = dict(epoch="1", loss="nan", bpc=""), dict(epoch="2", loss="2.5", bpc="1")
    assert rows == [first, second]
    with pytest.raises(ValueError, match=r"BestModel monitors 'val_loss'.*\['loss'\]"):
        best.on_epoch_end(3, {"loss": 1.0})


def test_a_metric_of_each_class_is_recorded_and_resumed(tmp_path):
    def fit_with_f1(epochs):
        model, (x, y) = make_model(), data()
        model.compile("sgd", "mse", metrics=[keras.metrics.F1Score(threshold=0.5)])
        callbacks = [HistoryCSV(tmp_path / "h.csv"), Checkpoint(tmp_path)]
        return model.fit(x, y > 0, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)

    first, second = fit_with_f1(1).history, fit_with_f1(2).history
    found = [float(row["f1_score_0"]) for row in read_history(tmp_path / "h.csv")]
    assert found == pytest.approx([*first["f1_score"][0], *second["f1_score"][0]])
    state = restore_checkpoint(make_model(), tmp_path, weights_only=True)
    assert state["logs"]["f1_score"] == pytest.approx(found[1:])


def test_best_model_of_a_metric_to_maximize(tmp_path):
    best, kept = BestModel(tmp_path / "best.keras", "val_accuracy", mode="max"), []
    best.set_model(
        SimpleNamespace(metrics=[], save=lambda path: kept.append(best.best) or path.touch())
    )
    for epoch, accuracy in enumerate([math.nan, 0.5, 0.25, 0.75]):
        best.on_epoch_end(epoch, {"val_accuracy": accuracy})
    assert kept == [0.5, 0.75] and best.get_state() == {"best": 0.75}
    with pytest.raises(ValueError, match="`mode`"):
        BestModel(tmp_path / "best.keras", mode="auto")
    with pytest.raises(ValueError, match="`path` must end in .keras. Received: .*best.h5"):
        BestModel(tmp_path / "best.h5")


def test_a_best_model_of_unknown_value_is_not_replaced(tmp_path):
    x, path = np.zeros((4, 2)), tmp_path / "best.keras"

    def train(epochs, *, is_saved):
        model, best = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), BestModel(path)
        model.compile("sgd", "mse")
        checkpoint = Checkpoint(tmp_path / str(is_saved), callbacks=[best] * is_saved)
        data = {"x": x, "y": x[:, :1] + 1, "validation_data": (x, x[:, :1])}  # worse each time
        model.fit(**data, epochs=epochs, shuffle=False, verbose=0, callbacks=[best, checkpoint])
        return path.read_bytes()

    first = train(1, is_saved=False)
    with pytest.raises(ValueError, match=r"best.keras may be .* better. .*Checkpoint\(callbacks"):
        train(2, is_saved=False)
    assert path.read_bytes() == first
    first = train(1, is_saved=True)
    assert train(2, is_saved=True) == first


@pytest.mark.parametrize(
    "callback",
    [
        lambda folder: BestModel(folder / "best.keras", "val_accuracy"),
        lambda _: PlateauDecay("accuracy", factor=0.5, rule="best_before", window=1),
    ],
)
def test_the_worst_accuracy_is_not_the_best(tmp_path, callback):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = np.zeros((4, 2)), np.zeros(4)
    with pytest.raises(ValueError, match="pass mode='max'"):
        model.fit(x, y, validation_data=(x, y), callbacks=[callback(tmp_path)], verbose=0)
    assert not (tmp_path / "best.keras").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"epoch,loss\n1,a\n",
        b"epoch,loss\n0,1\n",
        b"epoch,loss\n1,2\n2,3",
        b"",
        b'epoch\n"1\n',
        b"epoch\n" + b"1" * 200_000,
    ],
)
def test_a_damaged_history_is_named(tmp_path, content):
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="history.csv is not a history, or damaged"):
        read_history(path)
