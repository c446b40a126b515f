"""TCN and TCNBlock: the authors' results, the shared check, cone, masks, dropout, arguments."""

import functools
import inspect

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    check_gradients,
    family,
    matched_variables,
    tcn_layer,
    to_keras_time,
)
from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import (
    assert_all_close,
    assert_close,
    check_backwards,
    check_causality,
    check_config,
    check_float64,
    check_kernels,
    check_layer,
    check_streaming,
    made,
    noise,
)
from tests.support.parameters import slow_but
from trellis_keras import kernels
from trellis_keras.layers import TCN, TCNBlock

both = pytest.mark.both_backends
exact = pytest.mark.float64


@both
@exact
@pytest.mark.parametrize("case", ["k2", "k3_widen", "k7_deep"])
def test_authors_results(case, golden, assert_close):
    arrays = golden(f"tcn_core_{case}")
    layer = tcn_layer(arrays)
    reference = family(arrays, "grad")

    def loss(x):
        y = layer(x)
        blocks = [x]
        for block in layer.blocks:
            blocks.append(block(blocks[-1]))
        return ops.sum(ops.square(y)), (y, blocks[1:])

    (value, (y, blocks)), by_variable, (by_x,) = value_and_gradients(
        loss, matched_variables(layer), to_keras_time(arrays["in.x"])
    )
    assert_close(y, to_keras_time(arrays["out.y_f64"]), "output", "y")
    for i, block in enumerate(blocks):
        assert_close(block, to_keras_time(arrays[f"out.block{i}_f64"]), "output", f"block {i}")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    assert_close(by_x, to_keras_time(reference["x"]), "gradient", "x")
    check_gradients(layer, by_variable, reference, assert_close)


# The shared check

LAYERS = {
    "tcn": functools.partial(
        TCN, [5, 6], 2, depth=2, dropout=0.3, dropout_kind="spatial", output_length=4, seed=1
    ),
    "centered": functools.partial(TCN, 4, 3, depth=2, padding="same", activation="silu", seed=1),
    "batch normalization": functools.partial(
        TCN, 5, 3, depth=2, normalization="batch", activation="silu", output_length=4, seed=1
    ),
    "other options": functools.partial(
        TCN,
        6,
        2,
        dilations=[1, 3],
        weight_norm=False,
        activation="glu",
        normalization="layer",
        skip_connections=True,
        return_sequences=False,
        seed=1,
    ),
}


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("name", slow_but(LAYERS, "other options"))
@both
def test_layer(name):
    # Float32 divides by the small deviations of 24 steps.
    options = {"tolerance": 1e-4} if name == "batch normalization" else {}
    check_layer(LAYERS[name], (2, 12, 4), streams=name != "centered", **options)


@both
def test_statistics_of_a_batch():
    block = made(functools.partial(TCNBlock, 4, 2, normalization="batch"), (2, 6, 3))
    x, mask = noise(3, 6, 3), np.arange(6) < np.array([[6], [4], [2]])
    before = [(np.asarray(n.moving_mean), np.asarray(n.moving_variance)) for n in block.norms]
    y = np.asarray(block(x, training=True, mask=mask))
    z = np.where(mask[..., None], x, 0)
    for n, norm in enumerate(block.norms):
        past = np.pad(z, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        kernel = np.asarray(block.convolutions[n]())
        z = past @ kernel[0] + z @ kernel[1]
        mean, variance = z[mask].mean(0), z[mask].var(0)  # of valid steps alone
        assert_close(norm.moving_mean, 0.9 * before[n][0] + 0.1 * mean)
        assert_close(norm.moving_variance, 0.9 * before[n][1] + 0.1 * variance)
        z = (z - mean) / np.sqrt(variance + norm.epsilon) * np.asarray(norm.gamma)
        z = np.where(mask[..., None], np.maximum(z + np.asarray(norm.beta), 0), 0)
    shortcut = x @ np.asarray(block.shortcut.kernel) + np.asarray(block.shortcut.bias)
    assert_close(y, np.where(mask[..., None], np.maximum(z + shortcut, 0), 0))


@both
def test_statistics_of_a_batch_are_those_of_all_steps():
    found = []
    for options in ({}, {"return_sequences": False}):
        make = functools.partial(TCN, 4, 2, depth=2, normalization="batch")
        layer = made(functools.partial(make, **options), (2, 9, 3))
        y = layer(noise(2, 9, 3), training=True)
        y = y if layer.return_sequences else y[:, None]
        found.append([y[:, -1], *layer.non_trainable_weights])
    assert_all_close(*found)


@pytest.mark.both_backends(slow=True)
def test_backwards():
    check_backwards(functools.partial(TCN, 4, 2, depth=2, seed=1), (2, 7, 3))
    check_backwards(functools.partial(TCN, 4, 2, depth=2, return_sequences=False), (2, 7, 3))


def test_block():
    make = functools.partial(
        TCNBlock, filters=4, kernel_size=3, kernel_regularizer="l2", activation="silu", seed=1
    )
    check_config(make)
    check_causality(make, (2, 8, 3))
    check_streaming(made(make, (2, 6, 3)), noise(2, 6, 3))
    block, x = made(functools.partial(make, filters=3), (2, 6, 3)), noise(2, 6, 3)
    y, z = block._output_and_branch(x)
    assert_close(y, keras.activations.silu(x + z))
    for activation in ("glu", keras.activations.glu):
        assert TCNBlock(3, 2, activation=activation).activation == "glu"


@both
def test_half_precision_adds_up_gradients_of_the_shortcuts_bias_in_float32():
    options = {"activation": "linear", "dtype": "mixed_bfloat16"}
    block = made(functools.partial(TCNBlock, 4, 2, **options), (4, 300, 3))

    def total(x):
        return ops.sum(ops.cast(block(x), "float32")), []

    _, (gradient,), _ = value_and_gradients(total, [block.shortcut.bias], noise(4, 300, 3))
    assert_close(gradient, np.full(4, 1200, "float32"))  # in bfloat16, 256 + 1 is 256


@both
def test_every_activation_keeps_float64():
    others = {"get", "serialize", "deserialize", "threshold"}  # the last one needs arguments
    functions = inspect.getmembers(keras.activations, inspect.isfunction)
    for name in {name for name, _ in functions} - others:
        make = functools.partial(TCNBlock, 3, 2, activation=name, seed=1)
        check_float64(make, (1, 4, 3), streams=False)


# The cone and the stream against every position


@both(slow=True)
@pytest.mark.parametrize(
    ("time", "dilations", "masked", "options"),
    [
        pytest.param(33, [1, 2, 4, 8], False, {"return_sequences": False}, id="strided"),
        pytest.param(
            21,
            [8, 2, 1],
            True,
            {"output_length": 3, "skip_connections": True},
            id="uneven",
            marks=pytest.mark.slow_elsewhere,
        ),
    ],
)
def test_cone_equals_all_positions(time, dilations, masked, options):
    mask = {"mask": ops.convert_to_tensor(noise(2, time, seed=1) > -1)} if masked else {}
    dropout = {"dropout": 0.3, "dropout_kind": "spatial"}
    make = functools.partial(TCN, 5, 3, dilations=dilations, seed=1, **dropout, **options)
    check_kernels(make, (2, time, 4), **mask)


def test_only_the_cone_is_computed():
    layer = made(functools.partial(TCN, 3, 2, depth=2, return_sequences=False), (1, 20, 3))
    seen = []
    for n, block in enumerate(layer.blocks):
        for dropout in block.dropouts:
            dropout.call = lambda z, n=n, **_: seen.append((n, z.shape[1])) or z
    layer(noise(1, 20, 3))
    assert seen == [(0, 6), (0, 3), (1, 2), (1, 1)]
    seen.clear()
    with kernels.disabled():
        layer(noise(1, 20, 3))
    assert [positions for _, positions in seen] == [20] * 4


def test_centered_taps():
    """With padding="same" an output depends on as many later inputs as earlier ones."""
    layer = made(functools.partial(TCN, 3, 3, 2, padding="same", activation="silu"), (1, 1, 2))

    def output(x):
        return ops.sum(ops.square(layer(x)[:, 9])), ()

    _, _, (gradient,) = value_and_gradients(output, [], noise(1, 20, 2))
    depends = np.flatnonzero(np.any(np.asarray(gradient) != 0, axis=(0, 2)))
    assert (depends.min(), depends.max()) == (9 - 6, 9 + 6)
    assert layer.receptive_field == 13
    block, z = layer.blocks[0], ops.convert_to_tensor(noise(1, 20, 2))
    for kernel, bias in zip(block.convolutions, block.biases, strict=True):
        z = ops.silu(ops.conv(z, kernel(), padding="same", dilation_rate=1) + bias)
    assert_close(block._output_and_branch(noise(1, 20, 2))[1], z)
    with pytest.raises(ValueError, match='padding="causal".*padding=.same'):
        layer.initial_cache(1)


def test_receptive_field():
    for wanted in (1, 5, 61, 62, 168):
        layer = TCN(3, 3, receptive_field=wanted)
        assert layer.receptive_field >= wanted
        assert layer.depth == 1 or TCN(3, 3, layer.depth - 1).receptive_field < wanted
    assert TCN(3, 7, 8).receptive_field == 1 + 2 * 6 * (2**8 - 1)
    assert TCN(3, 2, dilations=[5, 1]).receptive_field == 1 + 2 * (5 + 1)
    assert TCNBlock(3, 4, 5).receptive_field == 31


# Weights and arguments


def test_weights_start_as_documented():
    layer = TCN(50, 4, 1)
    layer.build((None, None, 20))
    block, bound = layer.blocks[0], 1 / np.sqrt(4 * 20)
    kernel = np.asarray(block.convolutions[0].kernel)
    assert 0.99 * bound < np.abs(kernel).max() <= bound
    assert np.std(kernel) == pytest.approx(bound / np.sqrt(3), rel=0.03)
    assert np.std(block.shortcut.kernel) == pytest.approx(0.01, rel=0.1)
    assert not any(np.any(bias) for bias in block.biases)


def test_dropout_kinds():
    x = noise(4, 9, 30) + 3
    for kind in ("spatial", "element"):
        block = TCNBlock(30, 2, dropout=0.5, dropout_kind=kind, activation="linear", seed=1)
        block.build(x.shape)
        assert np.all(block._output_and_branch(x)[1])
        dropped = np.asarray(block._output_and_branch(x, training=True)[1]) == 0
        assert 0.4 < dropped.mean() < 0.6
        whole = dropped.all(axis=1)
        assert np.array_equal(dropped.any(axis=1), whole) == (kind == "spatial")
        assert len({row.tobytes() for row in whole if row.any()}) == (4 if kind == "spatial" else 0)
    dropouts = [d for b in TCN(4, 2, 3, dropout=0.5, seed=1).blocks for d in b.dropouts]
    assert len({dropout.seed for dropout in dropouts}) == 6


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("kernel_size", {"kernel_size": 1}),
        ("dilations", {"depth": None, "dilations": [1, 2**40]}),
        ("dilations", {"depth": None, "dilations": 2}),
        ("depth", {"depth": 32}),
        ("With kernel_size=8, `depth` must be at most 28", {"kernel_size": 8, "depth": 29}),
        ("at most .* receptive_field=10{12}", {"depth": None, "receptive_field": 10**12}),
        ("filters", {"filters": [4, 5]}),
        ("depth", {"dilations": [1, 2]}),
        ("depth", {"depth": None}),
        ("padding", {"padding": "valid"}),
        ("padding", {"padding": "same", "return_sequences": False}),
        ("output_length", {"go_backwards": True, "output_length": 1}),
        ("dropout", {"dropout": None}),
        ("seed", {"seed": keras.random.SeedGenerator(1)}),
        ("dropout_kind", {"dropout_kind": ["spatial"]}),
        ("skip_connections", {"skip_connections": True, "filters": [4, 5, 6]}),
    ],
)
def test_bad_arguments(argument, options):
    with pytest.raises(ValueError, match=argument):
        TCN(**({"filters": 4, "kernel_size": 3, "depth": 3} | options))


@both
def test_blocks_share_an_activation_with_weights(tmp_path):
    tcn = TCN(4, 2, 2, activation=keras.layers.PReLU(shared_axes=[1]))
    model, x = keras.Sequential([keras.Input((None, 3)), tcn]), noise(2, 7, 3)
    model(x)  # creates the weights of the activation
    model.set_weights([weight + 0.1 for weight in model.get_weights()])
    model.save(tmp_path / "tcn.keras")
    loaded, clone = keras.saving.load_model(tmp_path / "tcn.keras"), keras.models.clone_model(model)
    clone(x)
    clone.set_weights(model.get_weights())
    for copy in (loaded, clone):
        np.testing.assert_array_equal(copy(x), model(x))


def test_bad_calls():
    x, layer = noise(1, 9, 4), made(functools.partial(TCN, 5, 3, depth=2), (1, 9, 4))
    centered = made(functools.partial(TCNBlock, 4, 3, padding="same"), (1, 9, 4))
    for call, message in (
        (lambda: layer(x, initial_state=[noise(1, 5)]), "call `prefill"),
        (lambda: layer.blocks[1].step(x[:, 0, :1], layer.initial_cache(1)[0]), "must have shape"),
        (lambda: layer.blocks[1].step(noise(2, 5), layer.initial_cache(2)[0]), "does not fit"),
        (lambda: centered.initial_cache(2), 'padding="causal".*padding=.same'),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_second_half_of_a_glu_is_the_gate():
    block = TCNBlock(2, kernel_size=2, activation="glu", weight_norm=False)
    block.build((None, None, 2))
    a, gate = np.array([1.0, -2.0]), np.array([3.0, 0.5])
    for weight in block.weights:
        weight.assign(ops.zeros(weight.shape))
    block.biases[1].assign(np.concatenate([a, gate]))
    x = np.random.default_rng(0).normal(size=(1, 3, 2)).astype("float32")
    np.testing.assert_allclose(block(x), x + a / (1 + np.exp(-gate)), rtol=1e-6)
