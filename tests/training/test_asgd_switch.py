"""When averaging begins, who sees the average, and runs resumed before and after the switch."""

import json

import keras
import numpy as np
import pytest

from tests.support.asgd import fit_whole, linear_model, number, variable
from tests.support.checkpoints import assert_same, data, fit, make_model, values
from tests.support.processes import run_script
from trellis_keras.training import ASGD, SGD, ASGDSwitch, Checkpoint, restore
from trellis_keras.training.records import BestModel

pytestmark = pytest.mark.both_backends


# The trigger


def switched_after(losses, **settings):
    """After how many epochs averaging begins; None: not after as many as there are losses."""
    optimizer = ASGD(0.5)
    optimizer.build([variable([0.0])])
    switch, began = ASGDSwitch(**settings), None
    switch.set_model(type("Model", (), {"optimizer": optimizer}))
    switch.on_train_begin()
    for epoch, loss in enumerate(losses):
        switch.on_epoch_begin(epoch)
        switch.on_epoch_end(epoch, {"val_loss": loss})
        if optimizer.has_start and began is None:
            began = epoch + 1
    return began


NAN = float("nan")


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    ("window", "losses", "epochs"),
    [
        (1, [3, 2, 4], 3),  # worse than the 3
        (1, [3, 2, 3, 2.5], 4),  # equal is not worse; 2.5 is worse than the 2
        (1, [3, 4, 5, 6], 3),  # not after the second: all but the last is none
        (2, [1, 2, 3], None),
        (2, [1, 2, 3, 4], 4),
        (2, [5, 4, 3, 6, 2], 4),
        (2, [5, 3, 4, 4, 4], 5),  # 4 is better than the 5, then worse than the 3
        (2, [5, 4, 3, 3.5, 2], None),  # better than the 5; the 4 and the 3 are the last two
        (5, [9, 8, 7, 6, 5, 4, 3, 2, 1], None),
        (5, [1, 9, 9, 9, 9, 1, 2], 7),
        (1, [2, NAN, NAN, NAN], None),  # a value that is none is not worse
        (1, [NAN, 2, 3, 4], 4),  # nor is it the best
        (10, [1] * 11 + [1.5], 12),
    ],
)
def test_the_trigger(window, losses, epochs):
    assert switched_after(losses, window=window) == epochs
    assert switched_after([-loss for loss in losses], window=window, mode="max") == epochs


@pytest.mark.slow_elsewhere
def test_the_default_window_is_the_programs():
    assert switched_after([1, *[2] * 10, 2]) == 12


@pytest.mark.slow_elsewhere
def test_it_says_when_it_begins(capsys):
    assert switched_after([1, 2, 3, 4], window=1, verbose=1) == 3
    assert capsys.readouterr().out.count("Epoch 3: from now on ASGDSwitch averages") == 1


# In `fit`


class Rising(keras.callbacks.Callback):
    """A value that has an `ASGDSwitch` with a window of 1 begin after the third epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["rising"] = epoch


class Watch(keras.callbacks.Callback):
    """Keeps the kernel at the begin and at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.begins, self.ends, self.losses = [], [], []

    def kernel(self):
        return number(self.model.trainable_variables[0]).copy()

    def on_epoch_begin(self, epoch, logs=None):
        self.begins.append(self.kernel())

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(self.kernel())
        self.losses.append(logs.get("val_loss"))


@pytest.mark.float64
@pytest.mark.parametrize("jit_compile", [False, True])
def test_evaluation_sees_the_average_and_training_does_not(jit_compile, tolerance):
    plain = linear_model(SGD(0.1, l2=0.01, clip_norm=1.0), jit_compile)
    raw = Watch()
    fit_whole(plain, 7, raw)
    model = linear_model(ASGD(0.1, l2=0.01, clip_norm=1.0), jit_compile)
    watch = Watch()
    fit_whole(model, 7, Rising(), ASGDSwitch(1, "rising"), watch)
    np.testing.assert_array_equal(watch.begins, raw.begins)
    expected = [
        *raw.ends[:5],
        (raw.ends[4] + raw.ends[5]) / 2,
        (raw.ends[4] + raw.ends[5] + raw.ends[6]) / 3,
    ]
    np.testing.assert_allclose(watch.ends, expected, rtol=tolerance("optimizer"))
    assert not np.array_equal(watch.ends[-1], raw.ends[-1])
    np.testing.assert_array_equal(number(model.trainable_variables[0]), watch.ends[-1])
    x, y = data()
    shown = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(shown, watch.losses[-1], rtol=1e-6)
    model.optimizer.use_weights()
    assert_same(model.get_weights(), plain.get_weights())


@pytest.mark.slow_elsewhere
def test_without_validation_what_is_saved_is_the_average(tmp_path):
    model, watch = linear_model(ASGD(0.1)), Watch()
    switch = ASGDSwitch(1, "rising")
    best = BestModel(tmp_path / "best.keras", monitor="loss")
    fit_whole(model, 6, Rising(), switch, watch, best, validation_data=None)
    saved = keras.saving.load_model(tmp_path / "best.keras")
    np.testing.assert_array_equal(saved.get_weights()[0], watch.ends[-1])
    assert saved.optimizer.shows_average
    saved.optimizer.use_weights()
    assert not np.array_equal(saved.get_weights()[0], watch.ends[-1])


@pytest.mark.slow_elsewhere
def test_an_optimizer_with_t0_needs_no_trigger():
    model, watch = linear_model(ASGD(0.1, t0=1)), Watch()
    switch = ASGDSwitch(1, "nothing of this name")
    fit_whole(model, 5, switch, watch)
    assert not np.array_equal(watch.begins[4], watch.ends[3])
    np.testing.assert_array_equal(model.get_weights()[0], watch.ends[4])


@pytest.mark.slow_elsewhere
def test_a_later_fit_goes_on_with_the_weights():
    def train(*epochs):
        model, switch = linear_model(ASGD(0.1)), ASGDSwitch(1, "rising")
        for number_of in epochs:
            fit_whole(model, number_of, Rising(), switch)
        return values(model)

    assert_same(train(7), train(4, 3))


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("jit_compile", [False, True])
def test_under_a_loss_scale(jit_compile):
    inner = ASGD(0.1)
    model = linear_model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2), jit_compile)
    watch = Watch()
    fit_whole(model, 6, Rising(), ASGDSwitch(1, "rising"), watch)
    assert inner.shows_average
    np.testing.assert_allclose(watch.ends[5], (watch.begins[5] + raw_of(model)) / 2, rtol=1e-6)


def raw_of(model):
    model.optimizer.inner_optimizer.use_weights()
    return number(model.trainable_variables[0])


# Resuming


class Dies(keras.callbacks.Callback):
    """Interrupts the validation after an epoch, as a kill would."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_test_batch_end(self, batch, logs=None):
        if self.now == self.epoch:
            raise KeyboardInterrupt


def train(folder, *stops, dies=()):
    """Trains up to each of the numbers of epochs, with a new model each time."""
    for epochs in stops:
        model = make_model(optimizer=ASGD(0.05, l2=1e-3, clip_norm=0.5))
        switch = ASGDSwitch(1, "rising")
        best = BestModel(folder / "best.keras")
        checkpoint = Checkpoint(folder / "checkpoints", seed=7, callbacks=[switch, best])
        try:
            # First, so that weights and averages have changed places when it dies.
            fit(model, epochs, Rising(), switch, Dies(dies and dies[0]), best, checkpoint)
        except KeyboardInterrupt:
            dies = dies[1:]
    return model, switch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *train(folder, 6)


@pytest.mark.slow_elsewhere
@pytest.mark.float64
@pytest.mark.parametrize(
    ("stops", "dies"),
    [((1, 6), ()), ((3, 6), ()), ((2, 4, 5, 6), ()), ((6, 6, 6), (2, 4))],
)
def test_a_resumed_run_equals_an_uninterrupted_one(uninterrupted, tmp_path, stops, dies):
    folder, whole, switch = uninterrupted
    resumed, again = train(tmp_path, *stops, dies=dies)
    assert whole.optimizer.shows_average and 12 == number(whole.optimizer._start)
    assert_same(values(whole), values(resumed))
    assert switch.get_state() == again.get_state() == json.loads(json.dumps(switch.get_state()))
    best = [keras.saving.load_model(run / "best.keras") for run in (folder, tmp_path)]
    assert_same(*(model.get_weights() for model in best))


@pytest.mark.slow_elsewhere
def test_a_checkpoint_holds_the_averages(uninterrupted):
    folder, model, _ = uninterrupted
    restored = make_model(optimizer=SGD(0.1))
    restore(restored, folder / "checkpoints", weights_only=True)
    assert_same(restored.get_weights(), model.get_weights())
    weights = make_model(optimizer=ASGD(0.1))
    restore(weights, folder / "checkpoints")
    weights.optimizer.use_weights()
    assert not np.array_equal(restored.get_weights()[0], weights.get_weights()[0])


# What is refused


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"window": 0}, "window=0"), ({"window": -3}, "window=-3"), ({"mode": "auto"}, "mode='auto'")],
)
def test_wrong_settings_of_the_switch(wrong, named):
    with pytest.raises(ValueError, match=named):
        ASGDSwitch(**wrong)


@pytest.mark.slow_elsewhere
def test_an_optimizer_without_averages_is_refused():
    with pytest.raises(ValueError, match="needs an optimizer that averages.*Received: SGD"):
        fit_whole(linear_model(SGD(0.5)), 1, ASGDSwitch())


@pytest.mark.slow_elsewhere
def test_a_missing_value_is_refused():
    with pytest.raises(ValueError, match="watches 'val_loss'.*It has .*'loss'"):
        fit_whole(linear_model(ASGD(0.1)), 1, ASGDSwitch(), validation_data=None)


REPLICAS = """
import numpy as np, tensorflow as tf, keras
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from trellis_keras.training import ASGD, ASGDSwitch

def train():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 4),
                              keras.layers.Flatten(), keras.layers.Dense(2)])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile(ASGD(0.1, 0.01, l2=0.01, clip_norm=0.5), loss="mse", jit_compile=False)
    x, y = rng.integers(0, 5, (16, 3)), rng.normal(size=(16, 2))
    model.fit(x, y, validation_data=(x, y), batch_size=8, epochs=5, shuffle=False, verbose=0,
              callbacks=[ASGDSwitch(1, mode="max")])
    averages = model.get_weights()
    assert model.optimizer.shows_average
    return model, averages

alone, averages = train()
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    shared, theirs = train()
for a, b in zip(averages, theirs):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
for model in (alone, shared):
    model.optimizer.use_weights()
for kernel in shared.trainable_variables:
    on_each = [np.asarray(value) for value in kernel.value.values]
    np.testing.assert_array_equal(*on_each)
for a, b, average in zip(alone.get_weights(), shared.get_weights(), averages):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not np.allclose(a, average, rtol=1e-4)
"""


@pytest.mark.slow
def test_replicas_average_alike(floatx):
    if keras.backend.backend() != "tensorflow" or floatx != "float32":
        pytest.skip("tf.distribute: once, on TensorFlow")
    run_script(REPLICAS)
