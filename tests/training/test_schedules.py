"""Learning-rate, averaging and stopping rules against plain transcriptions, and their memory."""

import types

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tests.support.checkpoints import assert_same, data, fit, make_model, values
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel, Perplexity
from trellis_keras.training import (
    ASGD,
    SGD,
    ASGDSwitch,
    BestModel,
    Checkpoint,
    EarlyStopping,
    ExponentialDecay,
    GrowingDepth,
    PlateauDecay,
    StepDecay,
    restore_checkpoint,
)

pytestmark = [pytest.mark.both_backends, pytest.mark.slow_elsewhere]

NAN = float("nan")
# Few distinct values, so that equal ones are common.
LOSSES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=30)


def rates_of(callback, losses, learning_rate=16.0):
    """The learning rate in each epoch's logs, and the one after the last epoch."""
    optimizer = keras.optimizers.SGD(learning_rate)
    callback.set_model(types.SimpleNamespace(optimizer=optimizer, metrics=[]))
    callback.on_train_begin()
    rates = []
    for epoch, loss in enumerate(losses):
        callback.on_epoch_begin(epoch)
        logs = {"val_loss": loss}
        callback.on_epoch_end(epoch, logs)
        rates.append(logs["learning_rate"])
    return [*rates, float(ops.convert_to_numpy(optimizer.learning_rate))]


def stops_after(callback, losses):
    """The number of epochs, or None if the callback does not stop training."""
    callback.set_model(types.SimpleNamespace(stop_training=False))
    for epoch, loss in enumerate(losses):
        callback.on_epoch_end(epoch, {"val_loss": loss})
        if callback.model.stop_training:
            return epoch + 1
    return None


# Learning rates


def rates_by_script(losses, is_plateau, factor, floor, rate=16.0):
    """As a training script would have it."""
    seen, rates = [], []
    for loss in losses:
        rates.append(rate)
        if is_plateau(loss, seen):
            rate = max(rate * factor, floor)
        seen.append(loss)
    return [*rates, rate]


@settings(deadline=None, max_examples=40)
@given(LOSSES, st.integers(1, 6), st.booleans(), st.sampled_from(["best_before", "worst_of_last"]))
def test_plateaus(losses, window, strict, rule):
    def is_plateau(loss, seen):
        if rule == "best_before":
            reference = min(seen[:-window], default=NAN)
        else:
            reference = max(seen[-window:]) if len(seen) >= window else NAN
        return loss > reference or (not strict and loss == reference)

    by_default = strict == (rule == "best_before")
    expected = rates_by_script(losses, is_plateau, 0.5, 0.25)
    options = {"factor": 0.5, "rule": rule, "window": window, "min_lr": 0.25}
    decay = PlateauDecay(**options, strict=None if by_default else strict)
    assert rates_of(decay, losses) == expected
    negated = PlateauDecay(**options, strict=strict, mode="max")
    assert rates_of(negated, [-loss for loss in losses]) == expected
    assert rates_of(decay, losses, 0.125) == [0.125] * (len(losses) + 1)  # below min_lr


@pytest.mark.parametrize(
    ("rule", "window", "losses", "decays"),
    [
        ("best_before", 1, [NAN, 2, 3, 4], 1),  # the best of the first two is 2
        ("worst_of_last", 2, [1, NAN, 2], 0),  # better than NaN
    ],
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_compares_as_worst(rule, window, losses, decays, mode):
    callback = PlateauDecay(factor=0.5, rule=rule, window=window, mode=mode)
    sign = 1 if mode == "min" else -1
    assert rates_of(callback, [sign * loss for loss in losses])[-1] == 16 * 0.5**decays
    callback.set_state({"values": [NAN, 2.0]})
    assert callback.get_state() == {"values": [np.inf, 2.0]}


def test_step_and_exponential_decay():
    assert rates_of(StepDecay((2, 5), 0.5), [0.0] * 7, 8.0)[:-1] == [8, 8, 4, 4, 4, 2, 2]
    expected = 1e-3 * 0.9 ** np.arange(20)
    rates = rates_of(ExponentialDecay(), [0.0] * 20, 1e-3)
    np.testing.assert_allclose(rates[:-1], expected, rtol=1e-5)


def test_the_rate_under_a_loss_scale(capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.25)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
    decay = PlateauDecay("loss", factor=0.5, rule="worst_of_last", window=1, mode="max", verbose=1)
    history = model.fit(
        np.ones((8, 2)), np.ones((8, 1)), epochs=3, verbose=0, callbacks=[StepDecay((1,)), decay]
    )
    np.testing.assert_allclose(history.history["learning_rate"], [0.25, 0.025, 0.0125])
    np.testing.assert_allclose(ops.convert_to_numpy(inner.learning_rate), 0.00625)
    assert "Epoch 2: PlateauDecay sets the learning rate to 0.0125" in capsys.readouterr().out


# Stopping


@settings(deadline=None, max_examples=30)
@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 1.0, 1.5]))
def test_early_stopping_against_the_previous_epoch(losses, patience, min_delta):
    def by_script():
        count = 0
        for epoch in range(1, len(losses)):
            count = 0 if losses[epoch] < losses[epoch - 1] - min_delta else count + 1
            if count >= patience:
                return epoch + 1
        return None

    options = {"patience": patience, "min_delta": min_delta}
    assert (
        stops_after(EarlyStopping(against="previous", **options, mode="min"), losses) == by_script()
    )
    theirs = keras.callbacks.EarlyStopping(**options, mode="min")
    assert stops_after(EarlyStopping(**options, mode="min"), losses) == stops_after(theirs, losses)


# Averaging


def switched_after(losses, **settings):
    """The number of epochs after which averaging starts, or None."""
    optimizer = ASGD(0.5)
    optimizer.build([keras.Variable([0.0], name="w")])
    switch = ASGDSwitch(**settings)
    switch.set_model(types.SimpleNamespace(optimizer=optimizer, metrics=[]))
    switch.on_train_begin()
    for epoch, loss in enumerate(losses):
        switch.on_epoch_begin(epoch)
        switch.on_epoch_end(epoch, {"val_loss": loss})
        if optimizer.has_start:
            return epoch + 1
    return None


@pytest.mark.parametrize(
    ("window", "losses", "epochs"),
    [
        (1, [3, 2, 3, 2.5], 4),  # equal is not worse; 2.5 is worse than 2
        (1, [3, 4, 5, 6], 3),  # after the second epoch there is nothing yet to compare with
        (2, [5, 3, 4, 4, 4], 5),  # 4 is better than 5, then worse than 3
        (2, [5, 4, 3, 3.5, 2], None),  # better than 5; 4 and 3 are the last two
        (1, [2, NAN, NAN, NAN], None),  # NaN is not worse
        (1, [NAN, 2, 3, 4], 4),  # nor the best
    ],
)
def test_the_non_monotonic_trigger(window, losses, epochs, capsys):
    assert switched_after(losses, window=window, verbose=1) == epochs
    told = f"Epoch {epochs}: ASGDSwitch starts averaging" if epochs else ""
    assert told in capsys.readouterr().out
    assert switched_after([-loss for loss in losses], window=window, mode="max") == epochs


def linear_model(optimizer):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.set_weights([np.zeros((4, 1)), np.zeros(1)])
    model.compile(optimizer, loss="mse")
    return model


class Rising(keras.callbacks.Callback):
    """A value at which an `ASGDSwitch` with a window of 1 starts after the third epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["rising"] = epoch


class Watch(keras.callbacks.Callback):
    """Keeps the kernel at the beginning and at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.begins, self.ends, self.losses = [], [], []

    def kernel(self):
        return ops.convert_to_numpy(self.model.trainable_variables[0]).copy()

    def on_epoch_begin(self, epoch, logs=None):
        self.begins.append(self.kernel())

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(self.kernel())
        self.losses.append(logs.get("val_loss"))


def fit_one_step(model, epochs, *callbacks, **options):
    return fit(model, epochs, *callbacks, batch_size=32, **options)


@pytest.mark.float64
def test_evaluation_uses_the_averages_and_training_does_not(tolerance):
    plain, raw = linear_model(SGD(0.1, l2=0.01, clip_norm=1.0)), Watch()
    fit_one_step(plain, 7, raw)
    model, watch = linear_model(ASGD(0.1, l2=0.01, clip_norm=1.0)), Watch()
    fit_one_step(model, 7, Rising(), ASGDSwitch(1, "rising"), watch)
    np.testing.assert_array_equal(watch.begins, raw.begins)
    averages = [np.mean(raw.ends[4 : end + 1], axis=0) for end in (5, 6)]
    expected = [*raw.ends[:5], *averages]
    np.testing.assert_allclose(watch.ends, expected, rtol=tolerance("optimizer"))
    np.testing.assert_array_equal(model.get_weights()[0], watch.ends[-1])
    shown = model.evaluate(*data(), verbose=0)
    np.testing.assert_allclose(shown, watch.losses[-1], rtol=1e-6)
    model.optimizer.use_weights()
    assert_same(model.get_weights(), plain.get_weights())


def test_an_optimizer_with_t0_under_a_loss_scale():
    inner, watch = ASGD(0.1, t0=3), Watch()
    model = linear_model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2))
    fit_one_step(model, 6, ASGDSwitch(1, "not in the logs"), watch)
    assert inner.uses_average
    inner.use_weights()
    (raw, _), before = model.get_weights(), watch.begins[5]
    np.testing.assert_allclose(watch.ends[5], (before + raw) / 2, rtol=1e-5)


class Interrupt(keras.callbacks.Callback):
    """Ends the validation after an epoch, as a kill would."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_test_batch_end(self, batch, logs=None):
        if self.now == self.epoch:
            raise KeyboardInterrupt


def train_with_switch(folder, *stops, interrupts=()):
    """Trains up to each number of epochs, with a new model each time."""
    for epochs, interrupt in zip(stops, [*interrupts, *[None] * len(stops)], strict=False):
        model = make_model(optimizer=ASGD(0.05, l2=1e-3, clip_norm=0.5))
        switch = ASGDSwitch(1, "rising")
        best = BestModel(folder / "best.keras")
        checkpoint = Checkpoint(folder / "checkpoints", seed=7, callbacks=[switch, best])
        try:
            # The switch first: the averages are swapped in at the interruption.
            fit(model, epochs, Rising(), switch, Interrupt(interrupt), best, checkpoint)
        except KeyboardInterrupt:
            pass
    return model


def test_resumed_runs_equal_an_uninterrupted_one(tmp_path):
    whole = tmp_path / "whole"
    model = train_with_switch(whole, 6)
    assert model.optimizer.uses_average
    best = keras.saving.load_model(whole / "best.keras", compile=False).get_weights()
    resumed = tmp_path / "resumed"
    again = train_with_switch(resumed, 1, 6, 5, 6, 6, interrupts=(None, 2, None, 5))
    assert_same(values(model), values(again))
    theirs = keras.saving.load_model(resumed / "best.keras", compile=False)
    assert_same(best, theirs.get_weights())
    averages = make_model(optimizer=SGD(0.1))
    restore_checkpoint(averages, whole / "checkpoints", weights_only=True)
    assert_same(averages.get_weights(), model.get_weights())


# Errors


def plateau(**options):
    return PlateauDecay(**{"factor": 0.5, "rule": "best_before", "window": 3} | options)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (plateau, {"factor": 1.0}),
        (plateau, {"rule": "patience"}),
        (ASGDSwitch, {"window": 2.5}),
        (plateau, {"min_lr": -1.0}),
        (StepDecay, {"epochs": (5, 5)}),
        (ExponentialDecay, {"factor": 1.0}),
        (EarlyStopping, {"against": "first"}),
        (EarlyStopping, {"restore_best_weights": True, "against": "previous"}),
        (ASGDSwitch, {"mode": "auto"}),
    ],
)
def test_wrong_settings(make, wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        make(**wrong)


@pytest.mark.parametrize("make", [plateau, ASGDSwitch])
def test_a_missing_value_names_those_in_the_logs(make):
    callback = make(monitor="val_bpc")
    callback.set_model(types.SimpleNamespace(optimizer=ASGD(0.1)))
    with pytest.raises(ValueError, match=r"monitors 'val_bpc'.*\['loss'\]"):
        callback.on_epoch_end(0, {"loss": 1.0})


def test_optimizers_that_cannot_be_used_are_refused_before_training():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 10, 0.5)
    for callback, optimizer, named in (
        (plateau(), SGD(schedule), "float `learning_rate`"),
        (ASGDSwitch(), SGD(0.1), "requires the optimizer .*ASGD`. Received: SGD"),
    ):
        callback.set_model(types.SimpleNamespace(optimizer=optimizer))
        with pytest.raises(ValueError, match=named):
            callback.on_train_begin()


@pytest.fixture
def growing():
    """A TrellisNet of 3 levels whose weights `fit` does not change, and a text."""
    net = LanguageModel(5, 4, TrellisLayer(6, 3, output_units=4, seed=0), seed=0)
    net.compile(keras.optimizers.SGD(0.0), jit_compile=keras.backend.backend() == "jax")
    net.build((None, None))
    tokens = np.arange(24).reshape(2, 12) % 5
    return net, tokens[:, :-1], tokens[:, 1:]


def test_growing_depth_trains_and_validates_shallow_epochs_with_fewer_levels(growing):
    net, x, y = growing
    with pytest.raises(ValueError, match="depth=4"):
        net.fit(x, y, callbacks=[GrowingDepth(depth=4, epochs=1)], verbose=0)
    losses = {}
    for depth in (1, 3):
        net.backbone.depth = depth
        net.make_test_function(force=True)
        losses[depth] = net.evaluate(x, y, return_dict=True, verbose=0)["loss"]
    predict = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: net.predict(x, verbose=0))
    options = {"callbacks": [GrowingDepth(depth=1, epochs=2), predict], "verbose": 0}
    history = net.fit(x, y, validation_data=(x, y), epochs=3, **options).history
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(history[name], [losses[1], losses[1], losses[3]], rtol=1e-6)
    assert net.backbone.depth == 3
    np.testing.assert_allclose(net.predict(x, verbose=0), net(x), rtol=1e-5, atol=1e-6)


class Hits(Perplexity):
    _direction = "up"
    default_name = "hits"


def test_growing_depth_may_start_below_the_auxiliary_levels(tmp_path):
    backbone = TrellisLayer(6, 3, output_units=4, aux_every=2, return_aux=True, seed=0)
    net = LanguageModel(5, 4, backbone, aux_weight=0.5, seed=0)
    net.compile(keras.optimizers.SGD(0.0))
    tokens = np.arange(24).reshape(2, 12) % 5
    x, y = tokens[:, :-1], tokens[:, 1:]
    best = BestModel(tmp_path / "best.keras", monitor="loss")  # the shallow epoch
    callbacks = [GrowingDepth(depth=1, epochs=1), best]
    shallow, deep = net.fit(x, y, epochs=2, callbacks=callbacks, verbose=0).history["loss"]
    loaded = keras.saving.load_model(best.path)
    assert loaded.backbone.depth == 1
    assert loaded.evaluate(x, y, verbose=0) == pytest.approx(shallow)
    grouped = TrellisLayer(6, 8, groups=[3, 3], group_starts=[1, 5], output_units=3)
    assert TrellisLayer.from_config(grouped.get_config() | {"depth": 2}).depth == 2
    # With equal predictions, half of a second loss is added.
    np.testing.assert_allclose([shallow, deep], [np.log(5), 1.5 * np.log(5)], rtol=0.05)


def test_early_stopping_knows_in_which_direction_a_metric_improves(growing):
    net, x, y = growing
    for metric, better in ((Perplexity(), keras.ops.less), (Hits(), keras.ops.greater)):
        net.compile(keras.optimizers.SGD(0.0), metrics=[metric])
        stopping = EarlyStopping(f"val_{metric.name}", patience=2)
        options = {"validation_data": (x, y), "callbacks": [stopping], "verbose": 0}
        assert len(net.fit(x, y, epochs=9, **options).history["loss"]) == 3
        assert stopping.monitor_op is better


def test_interrupted_fit_with_growing_depth_leaves_all_levels(growing):
    def interrupt(epoch, logs):
        raise KeyboardInterrupt

    net, x, y = growing
    expected = net.evaluate(x, y, return_dict=True, verbose=0)["loss"]
    callbacks = [GrowingDepth(1, 2), keras.callbacks.LambdaCallback(on_epoch_end=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        net.fit(x, y, validation_data=(x, y), callbacks=callbacks, verbose=0)
    assert net.backbone.depth == 3
    evaluated = net.evaluate(x, y, return_dict=True, verbose=0)["loss"]
    (trained,) = net.fit(x, y, verbose=0).history["loss"]
    np.testing.assert_allclose([evaluated, trained], expected, rtol=1e-6)
