"""C at the ends of the range of numbers, and with weights in a file of their own."""

import subprocess

import keras
import numpy as np
import pytest
from keras import layers, ops
from random_graphs import noise

from keras_streams import StreamingMixin, c_export, to_stream
from keras_streams.exported_stream import exported_stream
from keras_streams.lower import lower
from keras_streams.native_stream import FixedStream, NativeStream, find_compiler, write_source
from keras_streams.trace import Trace, recorded

pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler"),
]


def test_infinite_and_large_numbers_are_those_of_keras():
    def functions(x):
        yield from (ops.silu(x), ops.gelu(x), ops.sigmoid(x), ops.tanh(x), ops.exp(x), ops.elu(x))
        yield from (ops.softplus(x), ops.maximum(x, -x), ops.logsumexp(x, -1, keepdims=True))

    x = keras.Input((None, 1))
    model = keras.Model(x, list(functions(x)))
    stream = NativeStream(c_export.c_source(exported_stream(model), "net"))
    for value in (-np.inf, -1e30, -100, -87, 88.3, 88.7, 89, 1e30, np.inf, np.nan):
        value = np.float32(value)
        wanted = [np.ravel(y)[0] for y in model(np.full((1, 1, 1), value))]
        np.testing.assert_allclose(stream.step([value]), wanted, rtol=2e-6, atol=1e-37)


def check(model, x=None, **options):
    """Proves a model's C code and integers; x are representative inputs (steps, channels)."""
    c_export.proven_source(model, "net")
    x = noise(40, model.inputs[0].shape[-1]) if x is None else x
    c_export.fixed_source(model, "net", "int8", x, **options)


def test_adapted_normalization_has_a_count_among_its_weights():
    layer = layers.Normalization()
    layer.adapt(noise(100, 3))
    check(keras.Sequential([keras.Input((None, 3)), layer, layers.Dense(2)]))


class Toggle(StreamingMixin, layers.Layer):
    """The last input but one that was read: every second one is."""

    def call(self, x):
        steps = ops.arange(ops.shape(x)[1])
        before = ops.take(x, ops.maximum(steps - 1 - (steps - 1) % 2, 0), axis=1)
        return ops.where((steps < 1)[:, None], 0.0, before)

    def initial_cache(self, batch_size):
        return [ops.ones((batch_size, 1), "bool"), ops.zeros((batch_size, 2))]

    def step(self, x, cache):
        due, kept = cache
        return kept, [ops.logical_not(due), ops.where(due, x, kept)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, -3:],
        lambda x: ops.extract_sequences(ops.pad(x[..., 0], [[0, 0], [4, 0]]), 5, 1),
        Toggle(),
    ],
    ids=["slice", "frames", "cache"],
)
def test_states_are_read_before_they_are_replaced(function):
    x = keras.Input((None, 2))
    check(keras.Model(x, function(x)))


def test_steps_are_counted_in_32_bits_whatever_the_default_dtype():
    convolution = layers.Conv1D(2, 3, padding="same", dtype="float32")
    keras.config.set_floatx("float16")
    try:
        model = keras.Sequential([keras.Input((None, 2), dtype="float32"), convolution])
        c_export.proven_source(model, "net")
    finally:
        keras.config.set_floatx("float32")


def test_a_layer_may_have_the_name_of_the_file():
    convolution = layers.Conv2D(2, 3, padding="same", name="net")
    c_export.proven_source(keras.Sequential([keras.Input((None, 4, 1)), convolution]), "net")


def test_a_step_without_a_state_has_no_warnings(tmp_path):
    model = keras.Sequential([keras.Input((None, 3)), layers.UpSampling1D(2)])
    for source in (
        c_export.proven_source(model, "net")[0],
        c_export.fixed_source(model, "net", "int8", noise(40, 3)),
    ):
        write_source(source, tmp_path)
        command = [*find_compiler(), "-std=c99", "-Wall", "-Wextra", "-Werror", "-c", "net.c"]
        subprocess.run(command, cwd=tmp_path, check=True)


def test_batch_normalization_without_a_scale():
    check(keras.Sequential([keras.Input((None, 3)), layers.BatchNormalization(scale=False)]))


class Generator(keras.Model):
    """Passes `training` to a layer without it, and zeros as a state."""

    def __init__(self):
        super().__init__()
        self.gru, self.dense = layers.GRU(3, return_sequences=True), layers.Dense(2)

    def call(self, x, training=False):
        states = self.gru.get_initial_state(ops.shape(x)[0])
        return self.dense(self.gru(x, initial_state=states), training=training)


def test_a_model_of_ones_own_that_starts_with_zeros():
    model = Generator()
    model(noise(2, 8, 3))
    check(model, noise(40, 3))


def test_attention_within_a_window():
    x = keras.Input((6, 4))
    y = layers.MultiHeadAttention(2, 3)(x, x)
    y = y + layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
    stream = to_stream(keras.Model(x, layers.Flatten()(y)), window=6)
    check(stream, noise(40, 4))
    code = c_export.c_source(exported_stream(stream), "net").code
    assert ", 1 * sizeof(float)" not in code  # scattered numbers are copied together


def test_spectra_and_phases():
    x = keras.Input((None, 8))
    real, imaginary = ops.rfft(x)
    check(keras.Model(x, ops.irfft((real * real, imaginary), fft_length=8)))
    c_export.proven_source(keras.Model(x, ops.arctan2(imaginary, real)), "net")


def test_representative_images_have_the_shape_of_the_model():
    images = keras.Sequential([keras.Input((None, 4, 2)), layers.Conv2D(3, 2)])
    check(images, noise(1, 40, 4, 2))
    check(images, noise(40, 4, 2))


class LastPositive(StreamingMixin, layers.Layer):
    """The exponentials of the last step whose first channel was positive."""

    def call(self, x):
        steps = ops.arange(ops.shape(x)[1])
        is_seen = (x[:, None, :, 0] > 0) & (steps <= steps[:, None])
        last = ops.max(ops.where(is_seen, steps, -1), axis=-1, keepdims=True)
        return ops.matmul(ops.cast(ops.equal(steps, last), x.dtype), ops.exp(x))

    def initial_cache(self, batch_size):
        return ops.zeros((batch_size, 2))

    def step(self, x, cache):
        y = ops.where(x[:, :1] > 0, ops.exp(x), cache)
        return y, y


def test_each_row_of_representative_data_has_its_own_conditions():
    x = keras.Input((None, 2))
    rows = np.abs(noise(2, 40, 2)) * np.array([[[-1.0]], [[1.0]]])
    check(keras.Model(x, LastPositive()(x)), rows)


class Counted(StreamingMixin, layers.Layer):
    """A function of the input and of the number of the step, an int32."""

    def __init__(self, function, start=0):
        super().__init__()
        self.function, self.start = function, start

    def call(self, x):
        rows, steps, _ = ops.shape(x)
        count = self.start + ops.arange(steps, dtype="int32")[:, None]
        return self.function(x, ops.broadcast_to(count, (rows, steps, 1)))

    def initial_cache(self, batch_size):
        return ops.full((batch_size, 1), self.start, "int32")

    def step(self, x, cache):
        return self.function(x, cache), cache + 1


def counted(function, start=0):
    return keras.Sequential([keras.Input((None, 1)), Counted(function, start)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x + ops.cast(ops.cast(n, "int8"), x.dtype),
        lambda x, n: x + ops.cast(ops.cast(ops.absolute(x), "uint8") + 1, x.dtype),
        lambda x, n: ops.round(x, 2),
        lambda x, n: x + ops.cast(n**2, x.dtype),
        lambda x, n: x + ops.cast(ops.matmul(n, np.ones((1, 1), "int32")), x.dtype),
        lambda x, n: ops.max(x, axis=-1, keepdims=True, initial=-6.0),
    ],
    ids=["int8", "uint8", "decimals", "power", "matmul", "initial"],
)
def test_operations_that_c_would_change_are_refused(function):
    with pytest.raises(ValueError, match="has no C code"):
        c_export.proven_source(counted(function), "net")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.where(ops.any(x, axis=-1, keepdims=True), x, 7.0),
        lambda x: ops.where(ops.all(x, axis=-1, keepdims=True), x, 7.0),
        lambda x: ops.cast(ops.sum(x > 0, axis=-1, keepdims=True), "float32"),
        lambda x: ops.floor_divide(x, 0.1),
        lambda x: ops.logaddexp(x, x),
        lambda x: ops.cast(ops.argmax(x, axis=-1, keepdims=True), "float32"),
        lambda x: ops.cast(ops.argmin(x, axis=-1, keepdims=True), "float32"),
    ],
    ids=["any", "all", "sum", "floor_divide", "logaddexp", "argmax", "argmin"],
)
def test_c_has_the_edge_values_of_keras(function):
    x = keras.Input((None, 3))
    model = keras.Model(x, function(x))
    rows = [[0, -1, -2], [0, 0, 0], [1, 2, 3], [1, np.nan, 2], [np.nan, 1, np.nan], [-np.inf] * 3]
    rows = np.array(rows, "float32")
    if keras.backend.backend() == "tensorflow":  # whose position of an extremum beside NaN varies
        rows = rows[~np.isnan(rows).any(axis=-1)]
    step = NativeStream(c_export.proven_source(model, "net")[0]).step
    expected = ops.convert_to_numpy(model(rows[None]))[0]
    np.testing.assert_allclose(np.stack([step(row) for row in rows]), expected, rtol=1e-6)


def test_each_output_is_compared_by_its_own_size():
    x = keras.Input((None, 3))
    model = keras.Model(x, [1e4 * layers.Dense(1)(x), layers.Softmax()(x)])
    source, _, expected = c_export.proven_source(model, "net")
    assert source.output_sizes == [1, 3]
    wrong = np.where(np.arange(4) == 0, expected, 0.0)
    with pytest.raises(RuntimeError, match="by 1.0e[+]00 of the largest value of the same output"):
        c_export.check_equal("net", source, wrong, expected)
    data = np.random.default_rng(0).normal(size=(4, 50, 3)).astype("float32")
    with pytest.raises(ValueError, match="or scale the outputs, which share one format"):
        c_export.fixed_source(model, "net", "int8", data)


def test_slices_from_a_variable_index_are_refused():
    class From(layers.Layer):
        def call(self, x):
            start = ops.cast(x[0, 0, 0] > 0, "int32")
            return ops.slice(x, ops.stack([0 * start, 0 * start, start]), (1, 1, 2))

    x = keras.KerasTensor((1, 1, 3))
    with recorded() as nodes:
        y = From().call(x)
    with pytest.raises(ValueError, match="Slice has no C code"):
        lower(Trace([x], [], [y], [], [], nodes))


def test_counts_beyond_the_integers_of_floats():
    def function(x, n):
        return x + ops.cast((n // 3) % 7 + (-n // 5) % 3, x.dtype)

    c_export.proven_source(counted(function, 2**24), "net")


def test_integers_divided_by_0_are_0():
    def function(x, n):
        divisor = ops.maximum(2000 - n, 0)
        return x + ops.cast(n // divisor + n % divisor, x.dtype)

    stream = NativeStream(c_export.proven_source(counted(function), "net")[0])
    outputs = [stream.step([0.5]) for _ in range(2010)]
    assert outputs[1990] != 0.5 and outputs[-1] == 0.5


@pytest.mark.parametrize("masked", [-np.inf, -1e30])
def test_fractions_beside_integers(masked):
    def function(x, n):
        return ops.clip(x + ops.where(n % 3 > 0, 0.0, masked) * 2, -9.0, 9.0)

    c_export.proven_source(counted(function), "net")
    if masked == -np.inf:
        c_export.fixed_source(counted(function), "net", "int8", noise(40, 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda n: 1e-17 * (1e17 * n),
        lambda n: 1e4 * ops.reciprocal(n),
        lambda n: 1e-8 * ops.square(n),
        lambda n: ops.maximum(n, 7.0) / n,
    ],
    ids=["product", "reciprocal", "square", "quotient"],
)
def test_functions_of_counts_are_floats(function):
    net = counted(lambda x, n: x + function(ops.cast(n, x.dtype)), start=10_000)
    c_export.proven_source(net, "net")


def test_missing_inputs_of_integers_saturate():
    model = keras.Sequential([keras.Input((None, 1)), layers.Dense(1)])
    stream = FixedStream(c_export.fixed_source(model, "net", "int8", noise(40, 1)))
    np.testing.assert_array_equal(stream.step([np.nan]), stream.step([-1e9]))


def test_sums_that_cancel_in_calibration_only_saturate():
    x = keras.Input((None, 2))
    y = ops.einsum("btc,btc->bt", x * np.array([1.0, -1.0], "float32"), x)[..., None]
    equal = 2.0**24 * np.repeat(noise(40, 1), 2, axis=1)
    source = c_export.fixed_source(keras.Model(x, y), "net", "int8", equal, tolerance=2.0)
    stream, most = FixedStream(source), 1 - 2.0**-15
    assert stream.step([2.0**24, 0]) == most and stream.step([0, 2.0**24]) == -most


class InputAndTwice(StreamingMixin, layers.Layer):
    """A layer with two outputs of one delay."""

    def build(self, input_shape):
        self.built = True

    def call(self, x):
        return x, 2 * x

    def initial_cache(self, batch_size):
        return []

    def step(self, x, cache):
        return self.call(x), cache


def test_a_layer_with_two_outputs():
    layer = InputAndTwice()
    layer.build((None, None, 2))
    source, *_ = c_export.proven_source(layer, "net")
    assert " *     y[0..1]: output 0\n *     y[2..3]: output 1\n" in source.comment


def test_a_stream_is_exported_with_its_example():
    x = keras.Input((None, 2))
    y = layers.Conv1D(3, 3, padding="same", kernel_initializer="ones")(x)
    model = keras.Model(x, ops.log(y))
    with pytest.raises(ValueError, match="not finite.*example=x"):  # though it has a delay
        c_export.proven_source(model, "net")
    c_export.proven_source(to_stream(model, example=np.abs(noise(1, 50, 2))), "net")


def test_what_is_proven_is_what_is_written(tmp_path, monkeypatch):
    """Also where the weights are in a file."""
    model = keras.Sequential([keras.Input((None, 3)), layers.GRU(4), layers.Dense(2)])
    proven = []
    monkeypatch.setattr(
        c_export, "NativeStream", lambda source: proven.append(source) or NativeStream(source)
    )
    for weights in ("code", "file"):
        path = c_export.write_c(model, tmp_path / f"{weights}.c", weights=weights)
        assert path.read_text().startswith(proven[-1].code)
    assert path.with_suffix(".bin").read_bytes() == proven[-1].weights


def test_program_for_another_machine_finds_a_step_that_is_nan(tmp_path):
    model = keras.Sequential([keras.Input((None, 1)), layers.Dense(1)])
    source, x, expected = c_export.proven_source(model, "net")
    write_source(source, tmp_path)
    for missing, code in ((None, 0), (3, 1)):
        wanted = np.where(np.arange(len(x))[:, None] == missing, np.nan, expected)
        (tmp_path / "net_test.c").write_text(c_export._test_program(source, x, wanted))
        files = "net.c", "net_test.c", "-lm", "-o", "net"
        subprocess.run([*find_compiler(), *files], cwd=tmp_path, check=True)
        assert subprocess.run([tmp_path / "net"], capture_output=True).returncode == code


def test_equal_layers_are_one_function():
    def statements(depth):
        x = y = keras.Input((None, 4))
        for i in range(depth):
            z = layers.Conv1D(4, 3, dilation_rate=2**i, padding="causal", activation="relu")(y)
            y = layers.Add()([y, layers.Conv1D(4, 3, padding="causal")(z)])
        source, *_ = c_export.proven_source(keras.Model(x, y), "net")
        (_, model) = source.code.split("/* The model */")
        return model.count("convolution_4("), model.count("each_"), model.count("memcpy(")

    assert statements(10) == statements(5)
