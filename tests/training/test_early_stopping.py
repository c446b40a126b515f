"""The stopping rules against Keras' and against a plain transcription, and their memory."""

import json
import math
import types

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.training import Checkpoint, EarlyStopping

pytestmark = pytest.mark.both_backends

# Few distinct values, so that equal ones and equal changes are common.
LOSSES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=20)


def stops_after(callback, losses, start=0):
    """The number of epochs, or None if the callback lets all pass."""
    callback.set_model(types.SimpleNamespace(stop_training=False))
    callback.on_train_begin()
    for epoch, loss in enumerate(losses, start=start):
        callback.on_epoch_end(epoch, {"val_loss": loss})
        if callback.model.stop_training:
            return epoch + 1
    return None


def by_the_epoch_before(losses, patience, min_delta):
    """As a training script would have it."""
    count = 0
    for epoch in range(1, len(losses)):
        count = 0 if losses[epoch] < losses[epoch - 1] - min_delta else count + 1
        if count >= patience:
            return epoch + 1
    return None


@pytest.mark.slow_elsewhere
@settings(deadline=None, max_examples=60)
@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 1.0, 1.5]))
def test_against_the_epoch_before(losses, patience, min_delta):
    callback = EarlyStopping(patience=patience, min_delta=min_delta, against="previous")
    assert stops_after(callback, losses) == by_the_epoch_before(losses, patience, min_delta)


@pytest.mark.slow_elsewhere
@settings(deadline=None, max_examples=60)
@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 1.0, 1.5]), st.sampled_from(["min", "max"]))
def test_against_the_best_is_keras_rule(losses, patience, min_delta, mode):
    options = {"patience": patience, "min_delta": min_delta, "mode": mode}
    theirs = keras.callbacks.EarlyStopping("val_loss", **options)
    assert stops_after(EarlyStopping(**options), losses) == stops_after(theirs, losses)


@pytest.mark.slow_elsewhere
def test_the_programs_rule():
    stopping = EarlyStopping.lru
    assert stops_after(stopping(), [1.0, 0.9, 0.89995, 0.8999, 0.89985, 0.5]) == 5
    # It falls after each rise, though never below the best: Keras would stop after four.
    zigzag = [1.0, 1.2, 1.1, 1.2, 1.1, 1.2, 1.1]
    assert stops_after(stopping(), zigzag) is None
    assert stops_after(stopping(against="best"), zigzag) == 4
    assert stopping("val_bpc", patience=2).monitor == "val_bpc"


@pytest.mark.slow_elsewhere
def test_values_that_are_no_numbers_do_not_fall():
    nan = math.nan
    for against in ("best", "previous"):
        assert stops_after(EarlyStopping(patience=2, against=against), [1.0, nan, nan]) == 3
        assert stops_after(EarlyStopping(patience=2, against=against), [nan, 2.0, 1.0, 0.5]) is None


@pytest.mark.parametrize("against", ["best", "previous"])
def test_memory_survives_a_restart_as_json(against):
    losses = [5.0, 4.0, 4.0, 4.5, 3.0, 3.0, 3.5, 3.0, 3.0, 3.0, 3.0]
    options = {"patience": 3, "against": against}
    whole = stops_after(EarlyStopping(**options), losses)
    assert whole == (8 if against == "best" else 11)
    for cut in range(1, whole):
        first, second = EarlyStopping(**options), EarlyStopping(**options)
        assert stops_after(first, losses[:cut]) is None
        second.set_state(json.loads(json.dumps(first.get_state())))
        assert stops_after(second, losses[cut:], start=cut) == whole


def fit(epochs, *callbacks, rate=0.0):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), loss="mse")
    data = np.ones((4, 2)), np.ones((4, 1))
    history = model.fit(
        *data, epochs=epochs, validation_data=data, callbacks=callbacks, verbose=0, shuffle=False
    )
    return len(history.history.get("loss", []))


@pytest.mark.slow_elsewhere
def test_a_killed_run_stops_where_it_would_have(tmp_path, capsys):
    """The loss stays: epochs 2, 3 and 4 do not fall."""
    trained = []
    for epochs in (2, 9, 9):
        stopping = EarlyStopping.lru(verbose=1)
        checkpoint = Checkpoint(tmp_path, callbacks=[stopping])
        trained.append(fit(epochs, stopping, checkpoint))
    assert trained == [2, 2, 0]
    said = "Epoch 4: EarlyStopping ends training: val_loss has not fallen by more than 0.0001 for 3"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"patience": 0}, "patience"),
        ({"min_delta": -1.0}, "min_delta"),
        ({"against": "first"}, "against"),
        ({"mode": "auto"}, "mode"),
    ],
)
def test_wrong_settings(wrong, named):
    with pytest.raises(ValueError, match=named):
        EarlyStopping(**({"patience": 1} | wrong))


@pytest.mark.slow_elsewhere
def test_a_value_that_is_not_there():
    with pytest.raises(ValueError, match="EarlyStopping watches 'val_bpc'.*'val_loss'"):
        fit(1, EarlyStopping.lru("val_bpc"))
