"""The optimizers against the authors' trajectories and NumPy transcriptions."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.checkpoints import assert_same, values
from tests.support.processes import run_script
from trellis_keras.training import ASGD, SGD, Adam, RMSprop

pytestmark = pytest.mark.both_backends

CLASSES = {"SGD": SGD, "Adam": Adam, "RMSprop": RMSprop, "ASGD": ASGD}
ASGD_CASES = ("optim_asgd", "optim_asgd_wd")
CASES = (
    "optim_sgd_wd_clip",
    "optim_adam_l2",
    "optim_adam_amp",
    "optim_rmsprop_clip",
    "optim_rmsprop_clip_tight",
    *ASGD_CASES,
)


def variable(value, name="w"):
    return keras.Variable(np.asarray(value), dtype=keras.config.floatx(), name=name)


def gradient(value):
    return ops.convert_to_tensor(np.asarray(value, keras.config.floatx()))


def optimizer_of(meta):
    settings = meta["kwargs"]
    options = {"l2": settings.get("weight_decay", 0.0), "clip_norm": meta.get("clip") or None}
    if meta["optimizer"] == "ASGD":
        options |= {"lambd": settings["lambd"], "t0": settings["t0"]}
    return CLASSES[meta["optimizer"]](settings["lr"], **options)


def weights_at(arrays, step):
    """The fixture's weights after a step, and the averages if there are any."""
    names = ["W", "b"] + [name for name in ("ax_W", "ax_b") if f"traj.{name}_f64" in arrays]
    return {name: arrays[f"traj.{name}_f64"][step] for name in names}


@pytest.mark.float64
@pytest.mark.parametrize("case", CASES)
def test_golden_trajectory_from_gradients(case, golden, assert_close):
    arrays = golden(case)
    optimizer = optimizer_of(arrays["meta"])
    w, b = variable(arrays["param0.W"]), variable(arrays["param0.b"], "b")
    for step in range(arrays["meta"]["steps"]):
        grads = [gradient(arrays[f"traj.{name}_f64"][step]) for name in ("gW", "gb")]
        optimizer.apply(grads, [w, b])
        ours = [w, b, *getattr(optimizer, "_averages", ())]
        for weight, (name, expected) in zip(ours, weights_at(arrays, step).items(), strict=True):
            assert_close(ops.convert_to_tensor(weight), expected, "optimizer", f"{name} {step}")
    if case in ASGD_CASES:
        optimizer.use_average()
        assert_close(ops.convert_to_tensor(w), arrays["traj.ax_W_f64"][-1], "optimizer")


@pytest.mark.float64
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_accumulates_gradients_so_that_a_new_rate_acts_at_once(nesterov, assert_close):
    rng = np.random.default_rng(0)
    expected, grads = rng.normal(size=5), rng.normal(size=(4, 5))
    optimizer, w = SGD(0.5, momentum=0.875, nesterov=nesterov), variable(expected)
    m = np.zeros(5)
    for g, rate in zip(grads, [0.5, 0.5, 0.125, 0.125], strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([gradient(g)], [w])
        m = 0.875 * m + g
        expected = expected - rate * (g + 0.875 * m if nesterov else m)
    assert_close(ops.convert_to_tensor(w), expected, "optimizer")


@pytest.mark.float64
def test_rmsprop_with_momentum(assert_close):
    rng = np.random.default_rng(1)
    start, grads = rng.normal(size=3), rng.normal(size=(5, 3))
    optimizer, w = RMSprop(0.01, rho=0.5, momentum=0.5), variable(start)
    square, m, expected = np.zeros(3), np.zeros(3), start
    for g in grads:
        optimizer.apply([gradient(g)], [w])
        square = 0.5 * square + 0.5 * g * g
        m = 0.5 * m + g / (np.sqrt(square) + 1e-8)
        expected = expected - 0.01 * m
    assert_close(ops.convert_to_tensor(w), expected, "optimizer")


@pytest.mark.float64
def test_clipping_is_global_and_keeps_small_gradients(assert_close):
    first, second = variable([0.0, 0.0]), variable([0.0], "v")
    optimizer = SGD(1.0, clip_norm=0.5)
    optimizer.apply([gradient([0.0, 3.0]), gradient([4.0])], [first, second])
    factor = 0.5 / (5.0 + 1e-6)
    assert_close(ops.convert_to_tensor(first), np.array([0.0, -3.0 * factor]), "optimizer")
    assert_close(ops.convert_to_tensor(second), np.array([-4.0 * factor]), "optimizer")
    optimizer.apply([gradient([0.0, 0.25]), gradient([0.0])], [first, second])
    assert_close(ops.convert_to_tensor(first)[1], np.array(-3.0 * factor - 0.25), "optimizer")


def test_the_norm_of_half_precision_gradients_is_float32():
    w = keras.Variable(np.zeros(4), dtype="float16", name="w")
    optimizer = SGD(1.0, clip_norm=1.0)
    optimizer.apply([ops.cast(gradient([300.0] * 4), "float16")], [w])  # squares: 90000 > 65504
    np.testing.assert_allclose(ops.convert_to_numpy(w), [-0.5] * 4, rtol=1e-3)


def test_embedding_gradients_are_summed_before_clipping_and_l2():
    table = np.array([[1.0, -1.0], [2.0, 0.5], [4.0, 4.0]])
    tokens = np.array([[0, 0, 1], [0, 1, 0]])

    def train(jit_compile):
        model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(3, 2)])
        model.layers[0].set_weights([table])
        optimizer = SGD(0.5, l2=0.125, clip_norm=0.25)
        model.compile(optimizer, loss="mse", jit_compile=jit_compile)
        model.fit(tokens, np.zeros((2, 3, 2), keras.config.floatx()), batch_size=2, verbose=0)
        return model.layers[0].get_weights()[0]

    g = np.zeros_like(table)
    np.add.at(g, tokens.ravel(), 2 * table[tokens.ravel()] / 12)
    g = g * min(1, 0.25 / (np.linalg.norm(g) + 1e-6)) + 0.125 * table
    for jit_compile in (False, True):
        np.testing.assert_allclose(train(jit_compile), table - 0.5 * g, rtol=1e-6)


def test_l2_leaves_out_excluded_weights_and_those_without_a_gradient():
    optimizer = SGD(0.5, l2=0.5, clip_norm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel, bias, unused = (variable([1.0], name) for name in ("kernel", "bias", "unused"))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([gradient([0.0]), gradient([0.0]), None], [kernel, bias, unused])
    assert [ops.convert_to_numpy(v)[0] for v in (kernel, bias, unused)] == [0.75, 1.0, 1.0]


def test_gradient_accumulation_clips_the_mean():
    optimizer, w = SGD(1.0, clip_norm=1.0, gradient_accumulation_steps=2), variable([0.0])
    optimizer.apply([gradient([8.0])], [w])
    assert ops.convert_to_numpy(w)[0] == 0.0
    optimizer.apply([gradient([-7.0])], [w])
    np.testing.assert_allclose(ops.convert_to_numpy(w), [-0.5])


# ASGD


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

    return walk, lambda: float(ops.convert_to_numpy(w)[0])


@pytest.mark.slow_elsewhere
def test_weights_and_averages_are_swapped():
    optimizer = ASGD(1.0, t0=0)
    walk, w = one_weight(optimizer)
    optimizer.use_average()
    assert w() == 0.0 and not optimizer.uses_average, "there is no average yet"
    walk(4)
    for _ in range(2):  # the second time does nothing
        optimizer.use_average()
        assert (w(), optimizer.uses_average) == (3.0, True)  # of 2, 3 and 4
    for _ in range(2):
        optimizer.use_weights()
        assert (w(), optimizer.uses_average) == (4.0, False)
    walk(1)
    optimizer.use_average()
    assert w() == 3.5


@pytest.mark.slow_elsewhere
def test_without_t0_averaging_starts_on_demand():
    optimizer = ASGD(1.0)
    walk, w = one_weight(optimizer)
    walk(5)
    optimizer.use_average()
    assert w() == 5.0 and not optimizer.has_start
    optimizer.start_averaging()
    assert optimizer.has_start
    walk(3)
    optimizer.use_average()
    assert w() == 7.5  # of 7 and 8


@pytest.mark.slow_elsewhere
def test_training_from_the_averages_averages_anew():
    optimizer = ASGD(1.0, t0=0)
    walk, w = one_weight(optimizer)
    walk(4)
    optimizer.use_average()
    walk(3)
    assert w() == 6.0 and not optimizer.uses_average
    optimizer.use_average()
    assert w() == 5.5  # of 5 and 6: the weights before the restart do not count
    optimizer.use_weights()
    walk(1)
    optimizer.use_average()
    assert w() == 6.0  # of 5, 6 and 7


# Arguments and files


@pytest.mark.parametrize("cls", CLASSES.values())
def test_config_round_trip(cls):
    options = {"t0": 5, "lambd": 1e-4, "alpha": 0.5} if cls is ASGD else {}
    optimizer = cls(0.5, l2=1e-6, clip_norm=0.2, name="mine", **options)
    config = optimizer.get_config()
    unsupported = {"weight_decay", "clipnorm", "clipvalue", "global_clipnorm"}
    assert not (unsupported | ({"momentum", "use_ema"} if cls is ASGD else set())) & set(config)
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(restored) is cls and restored.get_config() == config
    assert config["name"] == "mine" and config["l2"] == 1e-6 and config["clip_norm"] == 0.2


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(("cls", "options"), [(Adam, {"clip_norm": 1.0}), (ASGD, {"t0": 0})])
def test_a_keras_file_keeps_the_optimizer_and_its_state(cls, options, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(cls(0.1, l2=0.5, **options), loss="mse")
    data = np.ones((4, 2)), np.ones((4, 1))
    model.fit(*data, epochs=3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    for each in (model, loaded):
        each.fit(*data, verbose=0)
    assert_same(values(model), values(loaded))


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        *[(SGD, {name: 0.5}) for name in ("weight_decay", "clipnorm", "clipvalue")],
        (Adam, {"amsgrad": True}),
        (RMSprop, {"centered": True}),
        (Adam, {"l2": -1.0}),
        (Adam, {"clip_norm": 0.0}),
        (ASGD, {"lambd": -1.0}),
        (ASGD, {"alpha": -0.5}),
        (ASGD, {"t0": -1}),
        (ASGD, {"t0": 1e6}),
        (ASGD, {"use_ema": True}),
        (ASGD, {"momentum": 0.9}),
    ],
)
def test_wrong_arguments(cls, wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        cls(0.1, **wrong)


# Replicas

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
    optimizer = ASGD(0.1, 0.01, l2=0.01, clip_norm=0.5)
    model.compile(optimizer, loss="mse", jit_compile=False)
    x, y = rng.integers(0, 5, (16, 3)), rng.normal(size=(16, 2))
    model.fit(x, y, validation_data=(x, y), batch_size=8, epochs=5, shuffle=False, verbose=0,
              callbacks=[ASGDSwitch(1, mode="max")])
    assert model.optimizer.uses_average
    averages = model.get_weights()
    model.optimizer.use_weights()
    assert not np.allclose(model.get_weights()[0], averages[0], rtol=1e-4)
    return model, averages

alone, averages = train()
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    shared, shared_averages = train()
for ours, theirs in ((averages, shared_averages), (alone.get_weights(), shared.get_weights())):
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
for kernel in shared.trainable_variables:
    np.testing.assert_array_equal(*[np.asarray(value) for value in kernel.value.values])
"""


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.distribute")
def test_replicas_clip_the_summed_gradient_and_average_alike():
    run_script(REPLICAS)
