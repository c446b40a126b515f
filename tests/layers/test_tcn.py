"""TCN: cone, receptive field, causality, masks, streaming, arguments and training."""

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import check_streaming, compiled
from trellis_keras.kernels.cone import Cone, offsets
from trellis_keras.kernels.convolution import find_window
from trellis_keras.layers import TCN, TCNBlock

# Largest error divided by max|reference|.
EXACT = {"float64": 1e-12, "float32": 2e-6}
# JAX compiles each example by itself, for seconds.
EXAMPLES = 15 if keras.backend.backend() == "tensorflow" else 5


def make(filters=5, kernel_size=3, depth=None, channels=4, **options):
    """A built TCN with biases that are not zero, so that padding and masks show."""
    options.setdefault("bias_initializer", keras.initializers.RandomNormal(stddev=0.5, seed=7))
    options.setdefault("shortcut_initializer", keras.initializers.GlorotUniform(seed=8))
    layer = TCN(filters, kernel_size, depth, seed=3, **options)
    layer.build((None, None, channels))
    return layer


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def assert_same(actual, reference):
    actual, reference = ops.convert_to_numpy(actual), ops.convert_to_numpy(reference)
    assert actual.dtype == reference.dtype == keras.config.floatx()
    assert actual.shape == reference.shape
    error = np.abs(actual - reference).max() / max(np.abs(reference).max(), 1e-30)
    assert error <= EXACT[keras.config.floatx()]


VARIANTS = {
    "plain": {},
    "glu": {"activation": "glu"},
    "layer norm": {"normalization": "layer"},
    "skip connections": {"skip_connections": True},
    # (On JAX `keras.activations.tanh` leaves float64.)
    "no weight norm, silu": {"weight_norm": False, "activation": "silu"},
    "no residual": {"residual": False},
    "widths": {"filters": [6, 6, 3]},
    "dilations": {"depth": None, "dilations": [1, 3, 2]},
}


def of_variant(name):
    return make(**({"depth": 3} | VARIANTS[name]))


@pytest.mark.both_backends
@pytest.mark.float64
@given(
    time=st.integers(9, 40),
    kernel_size=st.integers(2, 4),
    dilations=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kept=st.integers(1, 9),
    skip=st.booleans(),
    masked=st.booleans(),
)
@example(time=33, kernel_size=3, dilations=[1, 2, 4, 8], kept=1, skip=False, masked=False)
@example(time=21, kernel_size=2, dilations=[8, 4, 2, 1], kept=3, skip=True, masked=True)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def test_cone_equals_full(time, kernel_size, dilations, kept, skip, masked):
    layer = make(5, kernel_size, dilations=dilations, skip_connections=skip)
    x = random((2, time, 4))
    mask = ops.convert_to_tensor(random((2, time), 1) > -1) if masked else None

    def results(whole):
        def loss(x):
            y = layer(x, mask=mask)[:, -kept:] if whole else layer(x, mask=mask, output_length=kept)
            return ops.sum(ops.square(y)), y

        (_, y), by_variable, (by_x,) = value_and_gradients(loss, layer.trainable_variables, x)
        return [y, by_x, *by_variable]

    for ours, reference in zip(results(False), results(True), strict=True):
        assert_same(ours, reference)


@pytest.mark.both_backends
@pytest.mark.float64
@given(
    kernel_size=st.integers(2, 4),
    dilations=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def test_receptive_field_and_causality_by_gradient(kernel_size, dilations):
    layer = make(4, kernel_size, dilations=dilations, activation="tanh")
    field = layer.receptive_field
    assert field == 1 + 2 * (kernel_size - 1) * sum(dilations)
    t = field + 1
    x = random((1, t + 4, 4))
    _, _, (gradient,) = value_and_gradients(lambda x: (ops.sum(layer(x)[:, t]), None), [], x)
    sees = np.flatnonzero(np.abs(ops.convert_to_numpy(gradient)).sum(axis=(0, 2)))
    assert sees.min() == t - field + 1
    assert sees.max() == t


def test_receptive_field_of_doubling_dilations():
    assert make(kernel_size=7, depth=8).receptive_field == 1 + 2 * 6 * (2**8 - 1)
    assert TCNBlock(3, 4, 5).receptive_field == 31


def test_convolutions_are_dense_where_positions_are_even():
    """The last-step cone of doubling dilations needs no gather, nor does a plain forward pass."""
    last = Cone(600, [offsets(8, 2 ** (i // 2)) for i in range(16)], output_length=1)
    for level in range(1, 17):
        wanted, available = last.positions[level], last.positions[level - 1]
        window = find_window(wanted, available, 8, 2 ** ((level - 1) // 2))
        assert window.dilation == 1 and window.stride in (1, 2)
    everything = np.arange(30)
    assert find_window(everything, everything, 3, 4) == (-8, 1, 4, 30)
    assert find_window(np.array([3, 4, 9]), everything, 3, 4) is None


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("name", VARIANTS)
def test_streaming_equals_forward(name):
    check_streaming(of_variant(name), random((2, 17, 4)), steps=9)


def test_a_block_streams():
    block = TCNBlock(4, 3, 2, seed=1)
    block.build((None, None, 4))
    check_streaming(block, random((2, 9, 4)), steps=5)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("side", ["pre", "post"])
def test_masks_equal_unpadded_sequences(name, side):
    layer = of_variant(name)
    last = make(**({"depth": 3} | VARIANTS[name]), return_sequences=False)
    last.set_weights(layer.get_weights())
    lengths, time = [11, 16, 8], 16
    x, mask = random((3, time, 4)), np.zeros((3, time), bool)
    for row, n in enumerate(lengths):
        mask[row, time - n :] = side == "pre"
        mask[row, :n] |= side == "post"
    y, ends = ops.convert_to_numpy(layer(x, mask=mask)), last(x, mask=mask)
    for row in range(3):
        alone = ops.convert_to_numpy(layer(x[row][mask[row]][None]))[0]
        assert_same(y[row][mask[row]], alone)
        assert_same(ends[row], alone[-1])
        assert not y[row][~mask[row]].any()


@pytest.mark.both_backends
def test_masks_come_from_keras_layers():
    x = random((2, 12, 4))
    x[0, 7:] = 0
    for return_sequences in (True, False):
        layer = make(depth=2, return_sequences=return_sequences)
        model = keras.Sequential([keras.Input((None, 4)), keras.layers.Masking(), layer])
        wanted = layer(x[:1, :7])[0]
        wanted = wanted[-1] if return_sequences else wanted
        found = model(x)[0, 6] if return_sequences else model(x)[0]
        assert_same(found, wanted)


@pytest.mark.both_backends
def test_rows_without_a_valid_step_are_zero():
    layer = make(depth=2, return_sequences=False)
    y = ops.convert_to_numpy(layer(random((2, 8, 4)), mask=np.arange(2)[:, None] == [1] * 8))
    assert not y[0].any() and y[1].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_config_and_file(name, tmp_path):
    layer = of_variant(name)
    again = TCN.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    x = random((2, 10, 4))
    model = keras.Sequential([keras.Input((None, 4)), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_block_config():
    block = TCNBlock(4, 3, 2, dropout=0.1, dropout_kind="spatial", activation="glu", seed=1)
    assert TCNBlock.from_config(block.get_config()).get_config() == block.get_config()


def test_shapes():
    layer = make([4, 6], 2, 2)
    assert layer.compute_output_shape((None, None, 4)) == (None, None, 6)
    assert layer(keras.Input((None, 4))).shape == (None, None, 6)
    assert make(depth=2, return_sequences=False)(keras.Input((9, 4))).shape == (None, 5)
    assert make(depth=2, output_length=3)(keras.Input((9, 4))).shape == (None, 3, 5)
    assert make(depth=2, output_length=3).compute_mask(None, ops.ones((2, 9))).shape == (2, 3)


@pytest.mark.both_backends
def test_unknown_length():
    x = random((2, 13, 4))
    for options in ({}, {"output_length": 2}, {"return_sequences": False}):
        layer = make(depth=3, **options)
        model = keras.Sequential([keras.Input((None, 4)), layer])
        assert_same(model.predict(x, verbose=0), layer(x))


def test_weights_start_as_documented():
    layer = make(50, 4, 1, channels=20)
    kernel = ops.convert_to_numpy(layer.blocks[0].convolutions[0].kernel)
    bound = 1 / np.sqrt(4 * 20)
    assert np.abs(kernel).max() <= bound
    assert np.abs(kernel).std() == pytest.approx(bound / np.sqrt(12), rel=0.05)


@pytest.mark.parametrize(
    "options",
    [{"seed": 3}, {"kernel_initializer": keras.initializers.GlorotUniform(seed=3)}],
    ids=["seed", "seeded initializer"],
)
def test_every_weight_has_numbers_of_its_own(options):
    layer = TCN([4, 8, 4, 8], 3, 4, **options)
    layer.build((None, None, 4))
    again = TCN.from_config(layer.get_config())
    again.build((None, None, 4))
    weights = [ops.convert_to_numpy(w) for w in layer.trainable_weights]
    random = [w for w in weights if w.ndim > 1]
    assert len({w.ravel()[:8].tobytes() for w in random}) == len(random)
    assert len({w.std() for w in random if w.shape == (3, 8, 8)}) > 1
    if "seed" in options:
        others = TCN([4, 8, 4, 8], 3, 4, seed=4)
        others.build((None, None, 4))
        new = [ops.convert_to_numpy(w) for w in others.trainable_weights if len(w.shape) > 1]
        assert not {w.tobytes() for w in new} & {w.tobytes() for w in random}
        for a, b in zip(weights, again.trainable_weights, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_image_data_format_does_not_matter():
    layer, x = make(depth=3), random((2, 12, 4))
    wanted = ops.convert_to_numpy(layer(x))
    keras.config.set_image_data_format("channels_first")
    try:
        assert_same(layer(x), wanted)
    finally:
        keras.config.set_image_data_format("channels_last")


def test_the_glu_function_is_the_glu_activation():
    assert TCNBlock(3, 2, activation=keras.activations.glu).activation == "glu"


def test_spatial_dropout_drops_channels():
    block = TCNBlock(
        30, 2, dropout=0.5, dropout_kind="spatial", activation="tanh", residual=False, seed=1
    )
    y = ops.convert_to_numpy(block(random((4, 9, 30)) + 3, training=True))
    assert 0.3 < (y == 0).all(axis=1).mean() < 0.7
    assert not (y == 0).any(axis=1)[~(y == 0).all(axis=1)].any()
    element = TCNBlock(30, 2, dropout=0.5, activation="tanh", residual=False, seed=1)
    y = ops.convert_to_numpy(element(random((4, 9, 30)) + 3, training=True))
    assert (y == 0).all(axis=1).mean() < 0.05
    assert 0.3 < (y == 0).mean() < 0.7


@pytest.mark.both_backends
def test_mixed_precision():
    layer = make(depth=2, dtype="mixed_bfloat16")
    y = layer(random((2, 9, 4)))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert all(v.dtype == "float32" for v in layer.trainable_variables)


@pytest.mark.both_backends
@pytest.mark.parametrize("options", [{}, {"return_sequences": False}], ids=["all", "last"])
def test_fit_with_xla(options):
    """11 rows in batches of 4: the last batch is another shape."""
    layer = make(depth=3, dropout=0.05, **options)
    model = keras.Sequential([keras.Input((20, 4)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=True)
    x = random((11, 20, 4))
    y = x.sum(axis=-1, keepdims=True) if not options else x[:, -4:].sum(axis=(1, 2))[:, None]
    losses = model.fit(x, y, batch_size=4, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.both_backends
def test_fit_on_batches_of_different_lengths():
    """Keras gives the model no static length then."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            x = random((4, 9 + 3 * i, 4))
            return x, x[..., :1]

    model = keras.Sequential([keras.Input((None, 4)), make(depth=3), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=True)
    losses = model.fit(Batches(), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_step_compiles_once_for_many_steps():
    layer = make(depth=3)
    x = random((2, 6, 4))
    step = compiled(lambda x, cache: layer.step(x, cache))
    cache, y = layer.initial_cache(2), []
    for t in range(6):
        out, cache = step(ops.convert_to_tensor(x[:, t]), cache)
        y.append(ops.convert_to_numpy(out))
    assert_same(np.stack(y, axis=1), layer(x))


BAD = {
    "kernel_size.*at least 2": {"kernel_size": 1},
    "kernel_size.*positive": {"kernel_size": 0},
    "dilation_rate.*positive": {"depth": None, "dilations": [1, 0]},
    "filters.*positive": {"filters": 0},
    "one per block, of which there are 3": {"filters": [4, 5]},
    "either `depth`": {"dilations": [1, 2]},
    "depth.*positive": {"depth": 0},
    "dropout.*0, 1": {"dropout": 1.0},
    "dropout_kind": {"dropout_kind": "channel"},
    "normalization": {"normalization": "batch"},
    "skip_connections": {"skip_connections": True, "filters": [4, 5, 6]},
    "returns one step": {"return_sequences": False, "output_length": 2},
    "output_length.*positive": {"output_length": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    arguments = {"filters": 4, "kernel_size": 3, "depth": 3} | BAD[message]
    with pytest.raises(ValueError, match=message):
        TCN(**arguments)


def test_bad_input():
    layer = make(depth=4)
    with pytest.raises(ValueError, match="7 steps, fewer than the dilation 8"):
        layer(random((1, 7, 4)))
    with pytest.raises(ValueError, match="output_length=10, input length 9"):
        layer(random((1, 9, 4)), output_length=10)


def test_bad_stream():
    layer = make(depth=2)
    with pytest.raises(ValueError, match="not built"):
        TCN(3, 2, 2).initial_cache(1)
    with pytest.raises(ValueError, match="batch_size"):
        layer.initial_cache(0)
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(random((3, 4)), layer.initial_cache(2))
    with pytest.raises(ValueError, match="does not fit"):
        layer.step(random((2, 4)), make(depth=3).initial_cache(2))
    with pytest.raises(ValueError, match="must have shape"):
        layer.step(random((2, 5)), layer.initial_cache(2))
