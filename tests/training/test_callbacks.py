"""The learning-rate rules against plain transcriptions, and their memory."""

import json
import types

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from trellis_keras.training.callbacks import ExponentialDecay, PlateauDecay, StepDecay

pytestmark = pytest.mark.both_backends

NAN = float("nan")
# Few distinct values, so that equal ones are common.
LOSSES = st.lists(st.integers(0, 6).map(float), max_size=40)


def model_with(learning_rate):
    optimizer = keras.optimizers.SGD(learning_rate)
    return types.SimpleNamespace(optimizer=optimizer, stop_training=False)


def rates_of(callback, losses, learning_rate=16.0, start=0):
    """The learning rate after each epoch."""
    callback.set_model(model_with(learning_rate))
    callback.on_train_begin()
    rates = []
    for epoch, loss in enumerate(losses, start=start):
        callback.on_epoch_begin(epoch)
        logs = {"val_loss": loss}
        callback.on_epoch_end(epoch, logs)
        rates.append(float(ops.convert_to_numpy(callback.model.optimizer.learning_rate)))
    return rates


def best_before(losses, window, factor, floor, rate=16.0):
    """As a training script would have it."""
    seen, rates = [], []
    for loss in losses:
        if len(seen) > window and loss > min(seen[:-window]):
            rate = max(rate * factor, floor)
        seen.append(loss)
        rates.append(rate)
    return rates


def worst_of_last(losses, window, factor, floor, strict, rate=16.0):
    seen, rates = [], []
    for loss in losses:
        if len(seen) >= window:
            worst = max(seen[-window:])
            if loss > worst or (loss == worst and not strict):
                rate = max(rate * factor, floor)
        seen.append(loss)
        rates.append(rate)
    return rates


@settings(deadline=None, max_examples=40)
@given(LOSSES, st.integers(1, 6))
def test_best_before_as_a_script_has_it(losses, window):
    callback = PlateauDecay(factor=0.25, rule="best_before", window=window, min_lr=0.5)
    assert rates_of(callback, losses) == best_before(losses, window, 0.25, 0.5)


@settings(deadline=None, max_examples=40)
@given(LOSSES, st.integers(1, 6), st.booleans())
def test_worst_of_last_as_a_script_has_it(losses, window, strict):
    callback = PlateauDecay(
        factor=0.5, rule="worst_of_last", window=window, min_lr=0.25, strict=strict
    )
    assert rates_of(callback, losses) == worst_of_last(losses, window, 0.5, 0.25, strict)


@settings(deadline=None, max_examples=40)
@given(LOSSES, st.integers(1, 4), st.integers(0, 3), st.sampled_from([0.0, 1.5]))
def test_patience_is_keras_rule(losses, window, cooldown, min_delta):
    options = {"factor": 0.5, "min_lr": 2.0, "cooldown": cooldown, "min_delta": min_delta}
    theirs = keras.callbacks.ReduceLROnPlateau(patience=window, mode="min", **options)
    assert rates_of(PlateauDecay(window=window, **options), losses) == rates_of(theirs, losses)


def test_presets_are_the_programs_settings():
    word = PlateauDecay.trellisnet_word()
    falling_then_flat = [5.0, 4.0] + [4.5] * 11
    rates = rates_of(word, falling_then_flat, 20.0)
    # Epoch 12 sees the best of all but the last ten, 5.0; epoch 13 sees 4.0.
    np.testing.assert_allclose(rates, [20.0] * 12 + [5.0])
    rates = rates_of(PlateauDecay.trellisnet_word(), [1.0] * 11 + [2.0] * 20, 20.0)
    np.testing.assert_allclose(rates[10:17], [20, 5, 1.25, 0.3125, 0.078125, 0.02, 0.02])
    np.testing.assert_allclose(rates_of(PlateauDecay.tcn_word(), [1.0] * 7, 4.0), [4] * 5 + [2, 1])
    char = PlateauDecay.tcn_char("val_bpc")
    assert (char.monitor, char.factor, char.window, char.strict) == ("val_bpc", 0.1, 3, True)
    losses = [1.0] * 4 + [1.5]
    np.testing.assert_allclose(rates_of(PlateauDecay.tcn_char(), losses, 4.0), [4] * 4 + [0.4])
    assert PlateauDecay.trellisnet_word(window=5).window == 5


def test_larger_is_better():
    losses = [3.0, 2.0, 1.0, 1.0, 4.0, 3.0]
    down = PlateauDecay(factor=0.5, window=1)
    up = PlateauDecay(factor=0.5, window=1, mode="max")
    assert rates_of(down, losses) == rates_of(up, [-loss for loss in losses])


@pytest.mark.parametrize(
    ("rule", "window", "losses", "decays"),
    [
        ("best_before", 1, [NAN, 2, 3, 4], 1),  # the best of the first two is 2
        ("worst_of_last", 2, [1, NAN, 2], 0),  # better than none
        ("patience", 2, [NAN, 2, 1, 0], 0),
    ],
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_value_that_is_none_is_the_worst_to_remember(rule, window, losses, decays, mode):
    callback = PlateauDecay(factor=0.5, rule=rule, window=window, mode=mode)
    sign = 1 if mode == "min" else -1
    assert rates_of(callback, [sign * loss for loss in losses])[-1] == 16 * 0.5**decays
    restored = PlateauDecay(factor=0.5, rule=rule, window=window)
    restored.set_state({"values": [NAN, 2.0], "best": NAN, "wait": 0, "cooldown_left": 0})
    assert restored.get_state()["values"] == [np.inf, 2.0]
    assert restored.get_state()["best"] == np.inf


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "best_before", "window": 2},
        {"rule": "worst_of_last", "window": 3},
        {"rule": "patience", "window": 2, "cooldown": 1},
    ],
)
def test_memory_survives_a_restart_as_json(options):
    losses = [3.0, 2.0, 2.0, 3.0, 3.0, 3.0, 1.0, 2.0, 2.0, 2.0]
    whole = rates_of(PlateauDecay(factor=0.5, **options), losses)
    for cut in range(1, len(losses)):
        first = PlateauDecay(factor=0.5, **options)
        rates = rates_of(first, losses[:cut])
        second = PlateauDecay(factor=0.5, **options)
        second.set_state(json.loads(json.dumps(first.get_state())))
        assert rates + rates_of(second, losses[cut:], rates[-1], start=cut) == whole


def test_step_decay_is_a_function_of_the_epoch():
    expected = [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0]
    assert rates_of(StepDecay((2, 5), 0.5), [0.0] * 7, 8.0) == expected
    for cut in range(1, 7):
        first = StepDecay((2, 5), 0.5)
        rates = rates_of(first, [0.0] * cut, 8.0)
        second = StepDecay((2, 5), 0.5)
        second.set_state(json.loads(json.dumps(first.get_state())))
        # The optimizer of the restarted run holds the decayed rate.
        assert rates + rates_of(second, [0.0] * (7 - cut), rates[-1], start=cut) == expected


def test_exponential_decay_is_a_function_of_the_epoch():
    expected = [8.0, 4.0, 2.0, 1.0]
    assert rates_of(ExponentialDecay(0.5), [0.0] * 4, 8.0) == expected
    for cut in range(1, 4):
        first = ExponentialDecay(0.5)
        rates = rates_of(first, [0.0] * cut, 8.0)
        second = ExponentialDecay(0.5)
        second.set_state(json.loads(json.dumps(first.get_state())))
        assert rates + rates_of(second, [0.0] * (4 - cut), rates[-1], start=cut) == expected
    np.testing.assert_allclose(
        rates_of(ExponentialDecay(), [0.0] * 20, 1e-3), 1e-3 * 0.9 ** np.arange(20), rtol=1e-6
    )


def small_model(learning_rate=0.25):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(learning_rate), loss="mse")
    return model


def fit(model, *callbacks, **kwargs):
    return model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=callbacks, **kwargs)


@pytest.mark.parametrize(
    "callback", [StepDecay((1,)), ExponentialDecay(), PlateauDecay(factor=0.5, window=1)]
)
def test_schedules_are_refused_before_training(callback):
    model = small_model(keras.optimizers.schedules.ExponentialDecay(0.25, 10, 0.5))
    with pytest.raises(ValueError, match="float `learning_rate`"):
        fit(model, callback)
    assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 0


def test_missing_value_is_an_error_after_the_first_epoch_and_the_weights_stay_readable():
    model = small_model()
    with pytest.raises(ValueError, match="'val_loss'.*'loss'"):
        fit(model, PlateauDecay(factor=0.5, window=1), epochs=3)
    assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 1
    assert np.isfinite(model.get_weights()[0]).all()
    fit(model)  # the model is of use after the error


def test_fit_sets_and_logs_the_rate(capsys):
    model = small_model()
    history = fit(model, StepDecay((1, 2), 0.5, verbose=1), epochs=3).history
    assert history["learning_rate"] == [0.25, 0.125, 0.0625]
    assert "Epoch 2: StepDecay sets the learning rate to 0.125" in capsys.readouterr().out


def test_rate_under_loss_scaling():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.25)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
    fit(model, StepDecay((1,), 0.5), epochs=2)
    assert float(ops.convert_to_numpy(inner.learning_rate)) == 0.125


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"factor": 1.0}, "factor"),
        ({"factor": 0.0}, "factor"),
        ({"rule": "best"}, "rule"),
        ({"window": 0}, "window"),
        ({"min_lr": -1.0}, "min_lr"),
        ({"mode": "auto"}, "mode"),
        ({"rule": "patience", "strict": True}, "strict"),
        ({"rule": "best_before", "min_delta": 0.5}, "min_delta"),
        ({"rule": "worst_of_last", "cooldown": 2}, "cooldown"),
    ],
)
def test_wrong_settings_of_plateau_decay(wrong, named):
    with pytest.raises(ValueError, match=named):
        PlateauDecay(**({"factor": 0.5, "window": 3} | wrong))


@pytest.mark.parametrize("epochs", [(), (0, 5), (5, 5), (7, 5)])
def test_wrong_epochs_of_step_decay(epochs):
    with pytest.raises(ValueError, match="rising"):
        StepDecay(epochs)


def test_wrong_factor_of_exponential_decay():
    with pytest.raises(ValueError, match="factor"):
        ExponentialDecay(1.0)
