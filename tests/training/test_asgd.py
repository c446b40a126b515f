"""Averaged SGD against the authors' trajectories and against averages taken by hand."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.asgd import dense_model, fit_whole, linear_model, number, variable
from tests.support.checkpoints import assert_same, values
from trellis_keras.training import ASGD
from trellis_keras.training.checkpoint import _role

pytestmark = pytest.mark.both_backends

CASES = ("optim_asgd", "optim_asgd_wd")


def asgd_of(meta):
    settings = meta["kwargs"]
    return ASGD(settings["lr"], settings["lambd"], t0=settings["t0"], l2=settings["weight_decay"])


def gradient(value):
    return ops.convert_to_tensor(np.asarray(value, keras.config.floatx()))


@pytest.mark.float64
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_golden_trajectory_in_fit(case, jit_compile, golden, assert_close, floatx):
    arrays = golden(case)
    optimizer = asgd_of(arrays["meta"])
    model = dense_model(arrays["param0.W"].T, arrays["param0.b"], optimizer, jit_compile)
    x, y = (arrays[name].astype(floatx) for name in ("in.X", "in.Y"))
    for step in range(arrays["meta"]["steps"]):
        model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
        w, b = model.get_weights()
        assert_close(w.T, arrays["traj.W_f64"][step], "optimizer", f"W {step}")
        assert_close(b, arrays["traj.b_f64"][step], "optimizer", f"b {step}")
        w, b = (number(average) for average in optimizer._averages)
        assert_close(w.T, arrays["traj.ax_W_f64"][step], "optimizer", f"average W {step}")
        assert_close(b, arrays["traj.ax_b_f64"][step], "optimizer", f"average b {step}")


@pytest.mark.float64
@pytest.mark.parametrize("case", CASES)
def test_golden_averages_from_gradients(case, golden, assert_close):
    arrays = golden(case)
    optimizer = asgd_of(arrays["meta"])
    w, b = variable(arrays["param0.W"]), variable(arrays["param0.b"], "b")
    for step in range(arrays["meta"]["steps"]):
        grads = [gradient(arrays[f"traj.{name}_f64"][step]) for name in ("gW", "gb")]
        optimizer.apply(grads, [w, b])
    assert_close(ops.convert_to_tensor(w), arrays["traj.W_f64"][-1], "optimizer", "W")
    optimizer.use_average()
    assert_close(ops.convert_to_tensor(w), arrays["traj.ax_W_f64"][-1], "optimizer", "average W")
    assert_close(ops.convert_to_tensor(b), arrays["traj.ax_b_f64"][-1], "optimizer", "average b")


@pytest.mark.slow_elsewhere
@pytest.mark.float64
def test_lambd_decays_weights_and_learning_rate(assert_close):
    lambd, alpha, lr, l2, clip, t0 = 0.25, 0.5, 0.5, 0.125, 1.0, 2
    optimizer = ASGD(lr, lambd, alpha, t0, l2=l2, clip_norm=clip)
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=3), rng.normal(size=(6, 3)) * 2
    w = variable(start)
    expected, average = start, np.zeros(3)
    rate, share = lr, 1.0
    for step, g in enumerate(grads, start=1):
        optimizer.apply([gradient(g)], [w])
        g = g * min(1, clip / (np.linalg.norm(g) + 1e-6)) + l2 * expected
        expected = expected * (1 - lambd * rate) - rate * g
        average = expected if share == 1 else average + share * (expected - average)
        rate = lr / (1 + lambd * lr * step) ** alpha
        share = 1 / max(1, step - t0)
    assert_close(ops.convert_to_tensor(w), expected, "optimizer")
    assert_close(ops.convert_to_tensor(optimizer._averages[0]), average, "optimizer")


def one_weight(optimizer):
    """A weight w = 0 that each step of `walk` moves to the next integer."""
    w = variable([0.0])
    optimizer.build([w])

    def walk(steps):
        for _ in range(steps):
            optimizer.apply([gradient([-1.0])], [w])

    return walk, lambda: float(number(w)[0])


@pytest.mark.slow_elsewhere
def test_the_average_and_the_weights_change_places():
    optimizer = ASGD(1.0, t0=0)
    walk, w = one_weight(optimizer)
    optimizer.use_average()
    assert w() == 0.0 and not optimizer.shows_average, "there is no average yet"
    walk(4)
    for _ in range(2):  # the second time does nothing
        optimizer.use_average()
        assert (w(), optimizer.shows_average) == (3.0, True)  # of 2, 3 and 4
    for _ in range(2):
        optimizer.use_weights()
        assert (w(), optimizer.shows_average) == (4.0, False)
    walk(1)
    optimizer.use_average()
    assert w() == 3.5


@pytest.mark.slow_elsewhere
def test_without_t0_averaging_begins_when_it_is_told_to():
    optimizer = ASGD(1.0)
    walk, w = one_weight(optimizer)
    walk(5)
    optimizer.use_average()
    assert w() == 5.0 and not optimizer.has_start and not optimizer.is_averaging
    optimizer.start_averaging()
    assert optimizer.has_start and not optimizer.is_averaging
    walk(3)
    optimizer.use_average()
    assert w() == 7.5  # of 7 and 8


@pytest.mark.slow_elsewhere
def test_training_on_from_the_averages_averages_anew():
    optimizer = ASGD(1.0, t0=0)
    walk, w = one_weight(optimizer)
    walk(4)
    optimizer.use_average()
    walk(3)
    assert w() == 6.0 and not optimizer.shows_average
    optimizer.use_average()
    assert w() == 5.5  # of 5 and 6: the weights before the restart do not count
    optimizer.use_weights()
    walk(1)
    optimizer.use_average()
    assert w() == 6.0  # of 5, 6 and 7


@pytest.mark.slow_elsewhere
def test_gradient_accumulation_averages_over_updates():
    optimizer = ASGD(1.0, t0=0, gradient_accumulation_steps=2)
    walk, w = one_weight(optimizer)
    walk(8)
    assert w() == 4.0
    optimizer.use_average()
    assert w() == 3.0


@pytest.mark.slow_elsewhere
def test_keras_file_keeps_the_optimizer_and_its_state(tmp_path):
    model = linear_model(ASGD(0.1, t0=0))
    fit_whole(model, 4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        fit_whole(each, 2)
    assert isinstance(loaded.optimizer, ASGD)
    assert_same(values(model), values(loaded))


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"lambd": -1.0}, "lambd=-1.0"),
        ({"alpha": -0.5}, "alpha=-0.5"),
        ({"t0": -1}, "t0=-1"),
        ({"t0": 1e6}, "t0=1000000.0"),
        ({"l2": -1.0}, "l2"),
        ({"use_ema": True}, "has no `use_ema`"),
        ({"momentum": 0.9}, "has no `momentum`"),
        ({"weight_decay": 0.1}, "Use `l2`"),
    ],
)
def test_wrong_coefficients(wrong, named):
    with pytest.raises(ValueError, match=named):
        ASGD(0.1, **wrong)


@pytest.mark.slow_elsewhere
def test_checkpoints_of_another_name_fit():
    roles = []
    for name in ("use_ema", "asgd"):  # every one was called by the first name once
        optimizer = ASGD(name=name)
        optimizer.build([variable([0.0])])
        roles.append([_role("optimizer", v.path) for v in optimizer.variables])
    assert roles[0] == roles[1] and {"start", "exchanged", "average"} <= set(roles[0])


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("t0", [None, 5])
def test_config_round_trip(t0):
    optimizer = ASGD(0.5, 1e-4, 0.5, t0, l2=1e-6, clip_norm=0.2, name="mine")
    config = optimizer.get_config()
    assert optimizer.name == "mine" and ASGD().name == "asgd"
    assert not {"momentum", "use_ema", "weight_decay"} & set(config)
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(restored) is ASGD and restored.get_config() == config
    assert restored.has_start == (t0 is not None)
