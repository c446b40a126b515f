"""The optimizers against the authors' own trajectories and against NumPy transcriptions."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.processes import run_script
from trellis_keras.training.optimizers import SGD, Adam, RMSprop

pytestmark = pytest.mark.both_backends

CLASSES = {"SGD": SGD, "Adam": Adam, "RMSprop": RMSprop}
CASES = (
    "optim_sgd_wd_clip",
    "optim_adam_l2",
    "optim_adam_amp",
    "optim_rmsprop_clip",
    "optim_rmsprop_clip_tight",
)


class Linear(keras.Model):
    """X W^T + b with the layout of the fixtures: W is (out, in)."""

    def __init__(self, w, b):
        super().__init__()
        self.w = self.add_weight(shape=w.shape, initializer="zeros", name="w")
        self.b = self.add_weight(shape=b.shape, initializer="zeros", name="b")
        self.w.assign(w)
        self.b.assign(b)
        self.built = True

    def call(self, x):
        return ops.add(ops.matmul(x, ops.transpose(self.w)), self.b)


def variable(value, name="w"):
    return keras.Variable(np.asarray(value), dtype=keras.config.floatx(), name=name)


def gradient(value):
    return ops.convert_to_tensor(np.asarray(value, keras.config.floatx()))


def optimizer_of(meta):
    settings = meta["kwargs"]
    return CLASSES[meta["optimizer"]](
        settings["lr"], l2=settings.get("weight_decay", 0.0), clip_norm=meta["clip"] or None
    )


@pytest.mark.float64
@pytest.mark.parametrize(
    ("case", "jit_compile"), [(case, True) for case in CASES] + [("optim_adam_l2", False)]
)
def test_golden_trajectory_in_fit(case, jit_compile, golden, assert_close, floatx):
    arrays = golden(case)
    model = Linear(arrays["param0.W"], arrays["param0.b"])
    model.compile(optimizer_of(arrays["meta"]), loss="mse", jit_compile=jit_compile)
    x, y = (arrays[name].astype(floatx) for name in ("in.X", "in.Y"))
    for step in range(arrays["meta"]["steps"]):
        model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
        for name, weight in (("W", model.w), ("b", model.b)):
            value = ops.convert_to_tensor(weight)
            assert_close(value, arrays[f"traj.{name}_f64"][step], "optimizer", f"{name} {step}")
    assert all(
        keras.backend.standardize_dtype(v.dtype) == floatx for v in model.optimizer.variables[1:]
    )


@pytest.mark.float64
@pytest.mark.parametrize("case", CASES)
def test_golden_trajectory_from_gradients(case, golden, assert_close):
    arrays = golden(case)
    optimizer = optimizer_of(arrays["meta"])
    w, b = variable(arrays["param0.W"]), variable(arrays["param0.b"], "b")
    for step in range(arrays["meta"]["steps"]):
        grads = [gradient(arrays[f"traj.{name}_f64"][step]) for name in ("gW", "gb")]
        optimizer.apply(grads, [w, b])
    assert_close(ops.convert_to_tensor(w), arrays["traj.W_f64"][-1], "optimizer", "W")
    assert_close(ops.convert_to_tensor(b), arrays["traj.b_f64"][-1], "optimizer", "b")


def momentum_sgd(w, grads, rates, momentum, nesterov):
    m = np.zeros_like(w)
    for g, rate in zip(grads, rates, strict=True):
        m = momentum * m + g
        w = w - rate * (g + momentum * m if nesterov else m)
    return w


@pytest.mark.float64
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_accumulates_gradients_so_that_a_new_rate_acts_at_once(nesterov, assert_close):
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=5), rng.normal(size=(4, 5))
    rates = [0.5, 0.5, 0.125, 0.125]
    optimizer, w = SGD(rates[0], momentum=0.875, nesterov=nesterov), variable(start)
    for g, rate in zip(grads, rates, strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([gradient(g)], [w])
    expected = momentum_sgd(start, grads, rates, 0.875, nesterov)
    assert_close(ops.convert_to_tensor(w), expected, "optimizer")


@pytest.mark.float64
def test_amsgrad_divides_by_the_largest_second_moment(assert_close):
    grads = np.array([[4.0], [0.25], [0.25]])
    optimizer, w = Adam(0.125, amsgrad=True), variable([1.0])
    m, v, largest, expected = 0.0, 0.0, 0.0, 1.0
    for step, g in enumerate(grads[:, 0], start=1):
        optimizer.apply([gradient([g])], [w])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        largest = max(largest, v)
        root = np.sqrt(largest / (1 - 0.999**step))
        expected -= 0.125 * m / (1 - 0.9**step) / (root + 1e-8)
    assert_close(ops.convert_to_tensor(w), np.array([expected]), "optimizer")


@pytest.mark.float64
def test_centered_rmsprop_with_momentum(assert_close):
    rng = np.random.default_rng(1)
    start, grads = rng.normal(size=3), rng.normal(size=(5, 3))
    optimizer, w = RMSprop(0.01, rho=0.5, momentum=0.5, centered=True), variable(start)
    mean, square, m, expected = np.zeros(3), np.zeros(3), np.zeros(3), start
    for g in grads:
        optimizer.apply([gradient(g)], [w])
        square, mean = 0.5 * square + 0.5 * g * g, 0.5 * mean + 0.5 * g
        m = 0.5 * m + g / (np.sqrt(square - mean**2) + 1e-8)
        expected = expected - 0.01 * m
    assert_close(ops.convert_to_tensor(w), expected, "optimizer")


def test_centered_rmsprop_of_a_gradient_that_stays():
    # Its variance is 0, which rounding makes negative for some.
    g = gradient(np.random.default_rng(2).normal(size=200))
    optimizer, w = RMSprop(0.01, rho=0.1, centered=True), variable(np.zeros(200))
    for _ in range(12):
        optimizer.apply([g], [w])
    assert np.all(np.isfinite(ops.convert_to_numpy(w)))


@pytest.mark.float64
def test_clipping_counts_all_gradients_and_keeps_small_ones(assert_close):
    first, second = variable([0.0, 0.0]), variable([0.0], "v")
    optimizer = SGD(1.0, clip_norm=0.5)
    optimizer.apply([gradient([0.0, 3.0]), gradient([4.0])], [first, second])
    factor = 0.5 / (5.0 + 1e-6)
    assert_close(ops.convert_to_tensor(first), np.array([0.0, -3.0 * factor]), "optimizer")
    assert_close(ops.convert_to_tensor(second), np.array([-4.0 * factor]), "optimizer")
    optimizer.apply([gradient([0.0, 0.25]), gradient([0.0])], [first, second])
    assert_close(ops.convert_to_tensor(first)[1], np.array(-3.0 * factor - 0.25), "optimizer")


def test_norm_of_half_precision_gradients_is_taken_in_float32():
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


def test_none_gradients_are_skipped_with_keras_warning():
    used, unused = variable([1.0]), variable([1.0], "unused")
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        SGD(0.5, l2=0.5, clip_norm=1.0).apply([gradient([1.0]), None], [used, unused])
    assert float(ops.convert_to_numpy(unused)[0]) == 1.0
    assert float(ops.convert_to_numpy(used)[0]) < 1.0


def test_l2_leaves_out_excluded_weights():
    optimizer = SGD(0.5, l2=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel, bias = variable([1.0], "kernel"), variable([1.0], "bias")
    optimizer.apply([gradient([0.0]), gradient([0.0])], [kernel, bias])
    assert ops.convert_to_numpy(kernel)[0] == 0.75 and ops.convert_to_numpy(bias)[0] == 1.0


def test_gradient_accumulation_clips_the_mean():
    optimizer, w = SGD(1.0, clip_norm=1.0, gradient_accumulation_steps=2), variable([0.0])
    optimizer.apply([gradient([8.0])], [w])
    assert ops.convert_to_numpy(w)[0] == 0.0
    optimizer.apply([gradient([-7.0])], [w])
    np.testing.assert_allclose(ops.convert_to_numpy(w), [-0.5])


def test_learning_rate_schedule():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.25])
    optimizer, w = SGD(schedule), variable([0.0])
    for _ in range(2):
        optimizer.apply([gradient([1.0])], [w])
    np.testing.assert_allclose(ops.convert_to_numpy(w), [-1.25])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_mixed_precision_keeps_float32_weights(jit_compile):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
    inner = Adam(0.01, l2=0.01, clip_norm=0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    before = model.get_weights()[0]
    model.fit(x, x.sum(axis=1, keepdims=True), epochs=3, verbose=0)
    after = model.get_weights()[0]
    assert after.dtype == "float32" and np.isfinite(after).all() and (after != before).any()


@pytest.mark.parametrize("cls", CLASSES.values())
@pytest.mark.parametrize("name", ["weight_decay", "clipnorm", "clipvalue", "global_clipnorm"])
def test_keras_own_arguments_are_refused_by_name(cls, name):
    instead = "`l2`" if name == "weight_decay" else "`clip_norm`"
    with pytest.raises(ValueError, match=f"`{name}`. Use {instead}"):
        cls(0.1, **{name: 0.5})


@pytest.mark.parametrize("wrong", [{"l2": -1.0}, {"clip_norm": 0.0}, {"clip_norm": -2.0}])
def test_coefficients_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Adam(0.1, **wrong)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_config_round_trip(cls):
    optimizer = cls(0.5, l2=1e-6, clip_norm=0.2, name="mine")
    config = optimizer.get_config()
    assert not {"weight_decay", "clipnorm", "clipvalue", "global_clipnorm"} & set(config)
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(restored) is cls and restored.get_config() == config


def test_keras_file_keeps_the_optimizer_and_its_state(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Adam(0.125, l2=0.5, clip_norm=1.0), loss="mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, Adam) and loaded.optimizer.l2 == 0.5
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(old), ops.convert_to_numpy(new))


REPLICAS = """
import numpy as np, tensorflow as tf, keras
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from trellis_keras.training.optimizers import Adam

def train():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 4),
                              keras.layers.Flatten(), keras.layers.Dense(2)])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile(Adam(0.01, l2=0.01, clip_norm=0.1), loss="mse", jit_compile=False)
    x, y = rng.integers(0, 5, (16, 3)), rng.normal(size=(16, 2))
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()

alone = train()
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    shared = train()
for a, b in zip(alone, shared):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
"""


def test_replicas_clip_the_summed_gradient(floatx):
    if keras.backend.backend() != "tensorflow" or floatx != "float32":
        pytest.skip("tf.distribute: once, on TensorFlow")
    run_script(REPLICAS)
