"""C with integers only: close to Keras, without floating point, the same on a Cortex-M."""

import math
import re
import shutil
import subprocess

import keras
import numpy as np
import pytest
from keras import layers, ops

from benchmarks import cortex_m
from keras_streams import native_stream, to_stream
from keras_streams.c_export import fixed_source, keras_steps
from keras_streams.exported_stream import exported_stream
from tests.export.nets import CHANNELS, classifier, graph, language_model, random_net
from tests.export.test_c import GCC, compile_c
from trellis_keras.export import export, native
from trellis_keras.layers import TCN, MixtureOfSoftmaxes

# A random walk, like the data of a sensor: smooth, with large and small values.
X = np.random.default_rng(0).normal(size=(120, CHANNELS)).cumsum(axis=0).astype("float32") / 4
QUICK = (1, 2, 4, 5)


def outputs(model, x=X, quantization="int8", **options):
    """Returns the outputs of integers and of Keras, as parts of the largest output."""
    stream = native(model, quantization=quantization, representative_data=x, **options)
    expected = keras_steps(model, x)
    found = np.stack([stream.step(row) for row in x])
    largest = np.nanmax(np.abs(expected))
    return found / largest, expected / largest


def difference(model, x=X, quantization="int8", **options):
    """Returns the mean difference from Keras; each is below 5 %, or there is an error."""
    return stated_difference(fixed_source(model, "net", quantization, x, **options))


def stated_difference(source):
    return float(re.search(r"(\S+) on average", source.comment)[1])


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in range(60) if n not in QUICK]


@pytest.mark.parametrize("seed", [*QUICK, *SLOW])
def test_random_nets_are_close_to_keras(seed, tmp_path):
    # In others, norms of few channels, one after the other, amplify the errors of some steps.
    options = {} if seed in QUICK else {"tolerance": 0.6}
    source = fixed_source(random_net(seed), "net", "int8", X, **options)
    assert stated_difference(source) < (0.005 if seed in QUICK else 0.01)
    if shutil.which("gcc"):
        native_stream.write_source(source, tmp_path)
        compile_c(tmp_path, "-c", files=["net.c"])


def test_models_are_close_to_keras():
    model = classifier()
    model.adapt(X)
    assert difference(model) < 2e-3
    assert difference(model, quantization="int8_rings") < 2e-2
    ids = np.random.default_rng(0).integers(0, 9, 200)
    assert difference(language_model(), ids) < 2e-3
    assert difference(language_model(MixtureOfSoftmaxes(9, 2)), ids) < 5e-3


def sequential(*parts):
    return keras.Sequential([keras.Input((None, CHANNELS)), *parts])


def clocked():
    """A model with a delay, a branch that waits, strides and a maximum."""
    inputs = keras.Input((None, CHANNELS))
    x = layers.Conv1D(6, 5, padding="same", activation="relu")(inputs)
    z = layers.MaxPooling1D(3, strides=1, padding="same")(x)
    z = layers.Add()([x, layers.BatchNormalization()(z)])
    z = layers.GRU(4, return_sequences=True)(layers.AveragePooling1D(2)(z))
    return keras.Model(inputs, layers.Dense(2)(z), name="clocked")


def averaging():
    """A classifier of the mean over all steps."""
    keras.utils.set_random_seed(1)
    x = layers.Conv1D(4, 3, padding="causal", activation="relu")
    return sequential(x, layers.GlobalAveragePooling1D(), layers.Dense(2))


def steep():
    """A model that reads a table by the size of its inputs, which may be INT16_MIN."""
    x = keras.Input((None, CHANNELS))
    y = ops.concatenate([layers.Dense(2)(x), ops.absolute(x) ** 0.25], axis=-1)
    return keras.Model(x, y)


@pytest.mark.parametrize(
    "quantization", ["int8_rings", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_delays_and_strides_are_close_to_keras(quantization):
    keras.utils.set_random_seed(2)  # one small net in ten needs a larger tolerance for 8-bit rings
    stride = layers.Conv1D(4, 3, padding="causal", strides=2, activation="relu")
    for model in (
        clocked(),
        sequential(stride, layers.SeparableConv1D(5, 3, strides=2)),
        sequential(TCN(4, 3, depth=2, padding="same")),
        sequential(layers.ZeroPadding1D((3, 1)), layers.LSTM(3, return_sequences=True)),
        sequential(layers.Conv1D(4, 3, padding="same"), layers.GlobalMaxPooling1D()),
        sequential(layers.MaxPooling1D(2), layers.UpSampling1D(2), layers.Dense(2)),
        sequential(layers.AveragePooling1D(2), layers.Dense(1, activation="sigmoid")),
        graph("padded"),  # rings that start with other numbers than zeros
    ):
        assert difference(model, quantization=quantization) < 0.02


@pytest.mark.parametrize(
    "parts",
    [
        [layers.UnitNormalization()],
        [layers.Discretization([-0.5, 0.5], output_mode="one_hot")],
        [layers.MaxPooling1D(2), layers.Conv1DTranspose(4, 3, strides=2, padding="same")],
    ],
    ids=lambda parts: parts[-1].name,
)
def test_layers_of_other_operations_are_close_to_keras(parts):
    assert difference(sequential(*parts)) < 0.01


def test_states_are_close_to_keras():
    x = keras.Input((None, CHANNELS))
    model = keras.Model(x, layers.LSTM(3, return_sequences=True, return_state=True)(x))
    assert difference(to_stream(model)) < 0.01


def test_a_model_may_only_move_or_scale_its_inputs():
    x, rows = keras.Input((None, 3, 3)), np.random.default_rng(0).normal(size=(50, 9))
    for y in (ops.repeat(x, 2, axis=-1), layers.Rescaling(np.arange(3.0).reshape(3, 1))(x)):
        assert difference(keras.Model(x, y), rows.astype("float32")) < 1e-3


def test_tokens_beside_floats_are_close_to_keras():
    x, token = keras.Input((None, CHANNELS)), keras.Input((None,), dtype="int32")
    normal = keras.initializers.RandomNormal(stddev=100.0, seed=0)
    y = x + layers.Embedding(6, CHANNELS, embeddings_initializer=normal)(token)
    model = keras.Model([x, token], layers.LSTM(4, return_sequences=True)(y / 100))
    rows = np.concatenate([100 * X, np.arange(len(X))[:, None] % 6], axis=-1)
    assert difference(model, rows.astype("float32")) < 0.01


@pytest.mark.parametrize("size", [3, 30_000])
def test_tokens_beside_floats_are_integers(size):
    """Also those above the representative ones, and those above 2^15 / 1.25."""
    x, token = keras.Input((None, CHANNELS)), keras.Input((None,), dtype="int32")
    y = x + layers.Embedding(size + 50, CHANNELS, embeddings_initializer="normal")(token)
    model, ids = keras.Model([x, token], y), np.arange(len(X))[:, None] % 3 + size - 3
    rows = np.concatenate([X, ids], axis=-1).astype("float32")
    stream = native(model, quantization="int8", representative_data=rows)
    row = np.array([*X[0], size + 41], "float32")
    np.testing.assert_allclose(stream.step(row), keras_steps(model, row[None])[0], atol=0.01)
    if size > 3:
        with pytest.raises(ValueError, match="Integers above 32767"):
            fixed_source(model, "net", "int8", np.float32([[0, 0, 0, 40_000]]))


@GCC
@pytest.mark.parametrize(
    ("shape", "layer"),
    [((2,), layers.Embedding(30, 4)), ((), layers.CategoryEncoding(30, output_mode="one_hot"))],
)
def test_integers_other_than_tokens_are_inputs(shape, layer):
    x = keras.Input((None, *shape), dtype="int32")
    rows = np.arange(60).reshape(30, 2)[:, : math.prod(shape)] % 30
    assert difference(keras.Model(x, layer(x)), rows.astype("float32")) < 0.01


def test_integers_of_many_bits_are_scaled_as_floats():
    x = keras.Input((None, 1), dtype="int32")
    model = keras.Model(x, layers.Conv1D(3, 2, padding="causal")(layers.Rescaling(1e-5)(x)))
    assert difference(model, np.float32([[n] for n in range(0, 100_000, 999)])) < 0.01


def test_computed_tokens_are_not_scaled():
    """A channel of smaller values than others would have more fractional bits."""
    inputs = keras.Input((None, CHANNELS))
    scale, dense = layers.Dense(CHANNELS, use_bias=False), layers.Dense(4)
    normal = keras.initializers.RandomNormal(stddev=3.0, seed=0)
    x = layers.ReLU()(scale(inputs))
    tokens = ops.cast(x[..., -1] + 0.01, "int32")
    y = dense(x) + layers.Embedding(6, 4, embeddings_initializer=normal)(tokens)
    model, scales = keras.Model(inputs, y), np.array([1e3] * (CHANNELS - 1) + [1.0])
    scale.kernel.assign(np.diag(scales))
    dense.kernel.assign(dense.kernel / scales[:, None])
    rows = np.concatenate([X[:, :-1], np.arange(len(X))[:, None] % 6], axis=-1)
    assert difference(model, rows.astype("float32"), tolerance=0.2) < 0.05


def test_ranges_are_those_of_truncated_numbers():
    x = keras.Input((None, 1))
    is_even = ops.equal(ops.cast(layers.Dense(1, kernel_initializer="ones")(x), "int32") % 2, 0)
    rows = np.arange(-8, 8)[:, None] + np.float32(0.5)
    assert difference(keras.Model(x, ops.where(is_even, 10 * x, x)), rows) < 1e-3


def test_a_function_of_numbers_in_another_order():
    x = keras.Input((None, CHANNELS))
    assert difference(keras.Model(x, ops.tanh(layers.Dense(32)(x)[..., ::-1]))) < 5e-3


def test_masked_scores_have_no_weight():
    inputs = keras.Input((None, CHANNELS))
    y = layers.MultiHeadAttention(2, 3, sliding_window=9)(inputs, inputs, use_causal_mask=True)
    assert difference(keras.Model(inputs, y), X[:8] / 4) < 1e-2


def test_a_mean_over_all_steps_moves_after_many():
    model = averaging()
    x = np.concatenate([np.ones((20_000, CHANNELS)), -np.ones((20_000, CHANNELS))])
    stream = native(model, quantization="int8", representative_data=np.stack([X, -X]))
    expected = keras_steps(model, x.astype("float32"))
    found = np.stack([stream.step(row) for row in x])
    scale = np.max(np.abs(keras_steps(model, np.concatenate([X, -X]))))
    assert np.max(np.abs(found - expected)) < 0.01 * scale


def denoiser(bins=17):
    """Masks the spectrum of each frame by the logarithms of all powers, those of noise too."""
    n = 2 * bins - 2
    angles = 2 * np.pi * np.arange(n)[:, None] * np.arange(bins) / n
    transform = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    share = np.where(np.arange(2 * bins) % bins % (bins - 1), 2 / n, 1 / n)
    frame = keras.Input((None, n))
    spectrum = layers.Dense(2 * bins, use_bias=False)(frame)
    re, im = spectrum[..., :bins], spectrum[..., bins:]
    power = re * re + im * im + 1e-6
    mask = ops.sigmoid(ops.log(power) + ops.mean(ops.log(power), axis=-1, keepdims=True) + 8)
    y = layers.Dense(n, use_bias=False)(ops.concatenate([re * mask, im * mask], axis=-1))
    model = keras.Model(frame, y)
    model.set_weights([transform, (transform * share).T])
    return model


def test_a_mask_by_the_logarithm_of_power_is_close_to_keras():
    """Of a signal whose frequencies have powers from 1 to 1e-6."""
    model = denoiser()
    rng, t = np.random.default_rng(0), np.arange(100 * 32)
    tones = sum(10.0**-k * np.sin(2 * np.pi * t * (4 * k + 2) / 32) for k in range(4))
    x = (tones * np.hanning(800)[t % 800] + 1e-3 * rng.normal(size=len(t))).astype("float32")
    x = x.reshape(100, 32)
    stream = native(model, quantization="int8", representative_data=x)
    expected = keras_steps(model, x)
    error = np.stack([stream.step(row) for row in x]) - expected
    assert np.sum(error**2) < 1e-4 * np.sum(expected**2)


def test_squares_of_the_inputs_have_their_32_bits():
    filters = np.random.default_rng(0).uniform(size=(CHANNELS, 3)).astype("float32")
    x = keras.Input((None, CHANNELS))
    energy = ops.log(ops.matmul(ops.square(x), filters) + 0.1)
    assert difference(keras.Model(x, energy)) < 0.01


def test_delayed_conditions_and_counts_are_close_to_keras():
    x = keras.Input((None, CHANNELS))
    is_large, count = x > 0.2, ops.sum(ops.cast(x > 0, "int32"), axis=-1, keepdims=True)
    before = ops.concatenate([ops.zeros_like(is_large[:, :2]), is_large[:, :-2]], axis=1)
    y = ops.where(ops.any(before, axis=-1, keepdims=True), x, -x) * ops.cast(count, "float32")
    assert difference(keras.Model(x, y)) < 2e-3


def test_sums_of_many_products_do_not_overflow():
    model = keras.Sequential(
        [keras.Input((None, 1200)), layers.Dense(2, kernel_initializer="ones")]
    )
    x = np.ones((3, 1200), "float32")
    x[1], x[2, ::2] = -1, 0.5
    for quantization in ("int8", "int8_rings"):
        stream = native(model, quantization=quantization, representative_data=x)
        for row, total in zip(x, (1200, -1200, 900), strict=True):
            np.testing.assert_allclose(stream.step(row), total, rtol=0.02)


def dense(x):
    return layers.Dense(4, use_bias=False)(x)


def products(x):
    return ops.einsum("btc,btc->bt", x, ops.absolute(x))[..., None]


ROUNDED = {
    "product": dense,
    "table": lambda x: ops.tanh(dense(x)),
    "sum of products": lambda x: products(dense(x)),
    "ring": lambda x: layers.Conv1D(4, 3, padding="causal", use_bias=False)(x),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_results_are_rounded_to_the_nearest(name):
    """Of x and -x: cut off, each result of an odd function would be half of a unit too small."""
    keras.utils.set_random_seed(1)
    x = keras.Input((None, CHANNELS))
    model, data = keras.Model(x, ROUNDED[name](x)), np.stack([X, -X])
    stream = native(model, quantization="int8_rings", representative_data=data)
    found = [stream.clone() for _ in data]
    found = np.array([[one.step(x) for x in rows] for one, rows in zip(found, data, strict=True)])
    unit = np.min(np.diff(np.unique(np.abs(found))))
    limit = 5 if name == "ring" else 0.2  # of 8 bits, whose unit is 256
    assert abs(np.mean(found[0] + found[1])) < limit * unit


def unequal(kind):
    """A model whose channels differ by factors up to 1e4, for which weights compensate."""
    keras.utils.set_random_seed(0)
    sizes = np.geomspace(1e-2, 1e2, 8)
    x = keras.Input((None, 8))
    if kind == "inputs":
        convolution = layers.Conv1D(8, 3, padding="causal", activation="relu")
        model = keras.Model(x, layers.Dense(2)(convolution(x)))
        convolution.kernel.assign(convolution.kernel / sizes[:, None])
        return model, X8 * sizes
    first, last = layers.Dense(8, activation="relu"), layers.Conv1D(4, 3, padding="causal")
    normalization = layers.LayerNormalization()
    model = keras.Model(x, last(layers.ReLU(negative_slope=0.2)(normalization(first(x)))))
    normalization.set_weights([sizes, sizes])
    last.kernel.assign(last.kernel / sizes[:, None])
    return model, X8


X8 = np.random.default_rng(0).normal(size=(120, 8)).cumsum(axis=0).astype("float32") / 4


@pytest.mark.parametrize("kind", ["inputs", "hidden"])
@pytest.mark.parametrize(("quantization", "decibels"), [("int8", 30), ("int8_rings", 20)])
def test_channels_of_small_values_have_more_fractional_bits(kind, quantization, decibels):
    model, x = unequal(kind)
    found, expected = outputs(model, x, quantization, quantization_tolerance=1.0)
    noise = np.sum((found - expected) ** 2, axis=0) / np.sum(expected**2, axis=0)
    assert np.max(10 * np.log10(noise)) < -decibels
    if kind == "hidden":
        source = fixed_source(model, "net", quantization, x, tolerance=1.0, with_layers=True)
        fewest, most = re.search(r"re_lu.*%  (-?\d+) to (\d+)$", source.comment, re.M).groups()
        assert int(most) - int(fewest) >= 8


FUNCTIONS = {
    "log": ops.log,
    "log1p": ops.log1p,
    "sqrt": ops.sqrt,
    "exp": lambda x: ops.exp(x / 40),
    "reciprocal": lambda x: 1 / x,
    "power": lambda x: x**0.25,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_large_and_small_values(name):
    """Values from 0.06 to 460, on which a table of equidistant values is off by 12."""
    x, function = np.geomspace(0.06, 460, 1000, dtype="float32")[:, None], FUNCTIONS[name]
    inputs = keras.Input((None, 1))
    # The exporter computes a function of the inputs themselves in floating point.
    hidden = layers.Dense(1, kernel_initializer="ones")(inputs)
    found, expected = outputs(keras.Model(inputs, function(hidden)), x, quantization_tolerance=0.3)
    # An input is off by up to half of its unit of 1/32.
    apart = np.abs(function(x + 1 / 32) - function(np.maximum(x - 1 / 32, 1 / 64)))
    assert np.all(np.abs(found - expected) <= apart / np.max(np.abs(function(x))) + 1e-3)


def test_the_stated_differences_are_those_of_all_data(tmp_path):
    model = classifier()
    model.adapt(X)
    rows = np.stack([0 * X, X])
    options = {"quantization": "int8", "representative_data": rows}
    export(model, tmp_path / "model.c", format="c", **options)
    stated = re.search(r"on average, (\S+) at most", (tmp_path / "model.h").read_text())[1]
    stream, errors, largest = native(model, **options), [], 0
    for row in rows:
        stream.reset()
        expected = keras_steps(model, row)
        errors.append(np.max(np.abs([stream.step(x) for x in row] - expected)))
        largest = max(largest, np.max(np.abs(expected)))
    assert errors[1] > errors[0]
    assert float(stated) == pytest.approx(errors[1] / largest, rel=0.05)


def test_the_table_of_layers_has_their_largest_values_and_errors(tmp_path):
    keras.utils.set_random_seed(0)
    loud = layers.Dense(4, kernel_initializer="ones", use_bias=False, name="loud")
    model = sequential(loud, layers.Dense(2, name="quiet"))
    x = np.stack([0.1 * X, X])  # ranges are of both; the table is of the first
    export(model, tmp_path / "model.c", format="c", quantization="int8", representative_data=x)
    header = (tmp_path / "model.h").read_text()
    largest = float(re.search(r"loud +(\S+) +0.00% +\S+%", header)[1])
    assert largest == pytest.approx(np.max(np.abs(np.sum(x[0], axis=-1))), rel=1e-3)
    assert re.search(r"quiet +\S+ +0.00% +0\.\d+%", header)
    model, x = classifier(), keras.Input((None, CHANNELS))
    model.adapt(X)
    rectified = layers.ReLU()(layers.Dense(32)(x))
    activated = keras.Model(x, [rectified, layers.Activation("tanh")(rectified)])
    for net in (model, clocked(), averaging(), activated):
        options = {"quantization": "int8_rings", "representative_data": X, "overwrite": True}
        export(net, tmp_path / "model.c", format="c", quantization_tolerance=0.3, **options)
        table = re.findall(
            r"(\S+) +(\S+)% +(\S+)%  -?\d+$", (tmp_path / "model.h").read_text(), re.M
        )
        assert len(table) >= 2
        for largest, saturated, error in table:
            assert float(largest) > 0 and float(saturated) < 1 and float(error) < 30


def test_missing_values_may_be_representative_of_a_model_that_fills_them():
    model, x = classifier(), X.copy()
    x[5, 1] = x[20:23] = np.nan
    model.adapt(x)
    assert difference(model, x) < 2e-3


def parallel(merge, *branches):
    x = keras.Input((None, CHANNELS))
    return keras.Model(x, merge([branch(x) for branch in branches]))


@GCC
@pytest.mark.parametrize(
    "make",
    [
        lambda: sequential(layers.Dense(1, "tanh"), layers.Dense(4)),
        lambda: sequential(layers.Dense(1, "sigmoid"), layers.GRU(3, return_sequences=True)),
        lambda: sequential(layers.Dense(1), layers.AveragePooling1D(2), layers.Dense(3)),
        lambda: sequential(layers.Lambda(lambda x: ops.sum(x, -1, True)), layers.Dense(3)),
        lambda: parallel(layers.Add(), layers.Dense(1, "tanh"), layers.Dense(1)),
    ],
    ids=["tanh", "sigmoid", "mean", "sum", "start"],
)
def test_numbers_that_products_read_have_16_bits(make, tmp_path):
    keras.utils.set_random_seed(1)
    source = fixed_source(make(), "net", "int8", X)
    assert stated_difference(source) < 5e-3
    native_stream.write_source(source, tmp_path)
    compile_c(tmp_path, "-c", files=["net.c"])


def test_unit_norms_of_data_with_zeros():
    assert difference(sequential(layers.UnitNormalization()), X * (X[:, :1] > 0)) < 5e-3


def test_a_large_difference_is_an_error_unless_it_is_accepted(tmp_path):
    model = sequential(layers.LayerNormalization())
    x = 1000 + np.random.default_rng(0).normal(size=(50, CHANNELS)).astype("float32") / 20
    options = {"format": "c", "quantization": "int8", "representative_data": x}
    with pytest.raises(ValueError, match="`quantization_tolerance`"):
        export(model, tmp_path / "model.c", **options)
    assert not list(tmp_path.iterdir())
    export(model, tmp_path / "model.c", quantization_tolerance=2.0, **options)
    assert "at most" in (tmp_path / "model.h").read_text()


def write(folder, quantization, make=classifier):
    keras.utils.set_random_seed(2)  # one small net in ten needs a larger tolerance
    model = make()
    if make is classifier:
        model.adapt(X)
    path = folder / "model.c"
    export(model, path, format="c", quantization=quantization, representative_data=X)
    return path.read_text(), path.with_suffix(".h").read_text()


@GCC
@pytest.mark.parametrize(
    ("make", "quantization"),
    [
        *((classifier, "int8"), (classifier, "int8_rings")),
        *((clocked, "int8_rings"), (averaging, "int8"), (steep, "int8")),
    ],
)
def test_the_step_has_no_floating_point(tmp_path, quantization, make):
    code, header = write(tmp_path, quantization, make)
    assert ("other steps write INT16_MIN" in header) == (make is clocked)
    step = code.split("/* Floating-point conversions */")[0]
    assert not re.search(r"float|double|\d\.\d", step)
    assert re.search(r"int8_t \w+\[", header) is not None or quantization == "int8"
    assert "int8_t" in code and re.search(r"representative data.*\n.* on average", header)
    (tmp_path / "main.c").write_text(_MAIN)
    (tmp_path / "host.c").write_text(_ON_HOST)
    options = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-O1"]
    compile_c(tmp_path, *options, files=["model.c", "main.c", "host.c"])
    assert subprocess.run(tmp_path / "a.out").returncode == 0


def test_errors(tmp_path):
    model, options = classifier(), {"format": "c", "quantization": "int8"}
    with pytest.raises(ValueError, match="`quantization` must be one of .*Received: 'int4'"):
        native(model, quantization="int4", representative_data=X)
    model.adapt(X)
    for data, message in {
        None: "given together. Received: quantization='int8' and no data",
        (7, 4): r"shape \(steps, 3\) or \(rows, steps, 3\). Received: shape \(1, 7, 4\)",
    }.items():
        data = None if data is None else np.zeros(data)
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "model.c", representative_data=data, **options)
    wrong, stream = X.copy(), exported_stream(clocked())
    for value in (np.nan, np.inf, -np.inf):
        wrong[5, 1] = value
        with pytest.raises(ValueError, match="`representative_data` must be finite"):
            fixed_source(stream, "model", "int8", wrong)
    with pytest.raises(ValueError, match=r"must have more steps.*Received: shape \(1, 3, 3\)"):
        fixed_source(stream, "model", "int8", X[:3])
    for data in (np.array([1, 9]), np.array([1.0, 2.0])):
        with pytest.raises(ValueError, match="Token ids"):
            fixed_source(language_model(), "model", "int8", data)
    options = {"quantization": "int8", "representative_data": X}
    for wrong in ([[1.0, 2.0], [3.0]], [["a", "b", "c"]]):
        with pytest.raises(ValueError, match="`representative_data` must be an array of numbers"):
            fixed_source(model, "model", "int8", wrong)
    for tolerance in (0, np.nan, None, "0.1"):
        with pytest.raises(ValueError, match="`quantization_tolerance` must be a positive number"):
            native(model, quantization_tolerance=tolerance, **options)
    with pytest.raises(ValueError, match="`quantization_tolerance` needs `quantization`"):
        native(model, quantization_tolerance=1.0)
    assert not list(tmp_path.iterdir())


_MAIN = """
#include "model.h"

static model_state state;
static const int16_t rows[3][MODEL_INPUTS] = {{3000, -2000, 100}, {-32768, 32767, 0}, {1, 2, 3}};
void put(int value);

int main(void)
{
    int16_t y[MODEL_OUTPUTS];
    model_reset(&state);
    for (int t = 0; t < 100; t++) {
        model_step(&state, rows[t % 3], y);
        for (int k = 0; k < MODEL_OUTPUTS; k++)
            put(y[k]);
    }
    return sizeof state != MODEL_STATE_BYTES;
}
"""
_ON_HOST = '#include <stdio.h>\nvoid put(int value) { printf("%d\\n", value); }\n'


@GCC
@pytest.mark.slow
@pytest.mark.parametrize("cpu", cortex_m.MACHINES)
@pytest.mark.parametrize("quantization", ["int8", "int8_rings"])
@pytest.mark.parametrize("make", [classifier, clocked, averaging])
def test_a_cortex_m_computes_what_the_host_computes(tmp_path, cpu, quantization, make):
    if not cortex_m.is_installed():
        pytest.skip("needs qemu-system-arm and gcc-arm-none-eabi")
    write(tmp_path, quantization, make)
    (tmp_path / "main.c").write_text(_MAIN)
    (tmp_path / "host.c").write_text(_ON_HOST)
    compile_c(tmp_path, files=["model.c", "main.c", "host.c"])
    host = subprocess.run(tmp_path / "a.out", capture_output=True, text=True).stdout.split()
    assert cortex_m.run_main(tmp_path, cpu)[0] == host
