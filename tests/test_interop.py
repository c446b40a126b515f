"""interop: weights of keras-tcn. The fixture was made by keras-tcn (see make_keras_tcn_fixture)."""

import functools
import types

import keras
import numpy as np
import pytest

from tests.support.layer_checks import made
from tests.support.make_keras_tcn_fixture import CASES, SHAPE, keras_tcn_layer
from trellis_keras.interop import from_keras_tcn, load_keras_tcn
from trellis_keras.layers import TCN

both = pytest.mark.both_backends

# Our arguments for the cases of the fixture.
LAST = {"return_sequences": False}
SKIPS = {"skip_connections": True}
OURS = {
    "plain": {"filters": 5, "kernel_size": 3, "depth": 3, **SKIPS, **LAST},
    "no skip connections": {"filters": [4, 6], "kernel_size": 2, "dilations": [1, 3]},
    "two stacks": {"filters": 3, "kernel_size": 4, "dilations": 2 * [1, 2], **SKIPS, **LAST}
    | {"go_backwards": True, "weight_norm": False},
    "layer normalization": {"filters": 6, "kernel_size": 2, "dilations": [2, 1], **SKIPS}
    | {"normalization": "layer"},
    "batch normalization": {"filters": 4, "kernel_size": 3, "dilations": 2 * [1, 2], **LAST},
    "centered": {"filters": 4, "kernel_size": 4, "depth": 3, **SKIPS}
    | {"padding": "same", "activation": "linear"},
}


@pytest.fixture(scope="module")
def arrays(golden):
    return golden("keras_tcn")


def weights_of(arrays, name):
    return [arrays[key] for key in sorted(arrays) if key.startswith(f"{name}.w")]


def assert_equal_outputs(found, expected):
    error = np.max(np.abs(np.asarray(found) - expected))
    assert error <= 1e-6 * np.max(np.abs(expected))


@both
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CASES), ("batch normalization", {"normalization": "batch"})],
)
def test_outputs_are_those_of_keras_tcn(name, options, arrays):
    layer = made(functools.partial(TCN, **OURS[name], **options), SHAPE)
    load_keras_tcn(layer, weights_of(arrays, name))
    assert_equal_outputs(layer(arrays[f"{name}.x"]), arrays[f"{name}.y"])


def test_in_a_model(arrays):
    parts = [keras.layers.LayerNormalization(), TCN(**OURS["two stacks"]), keras.layers.Dense(2)]
    new = keras.Sequential([keras.Input(SHAPE[1:]), *parts])
    random = np.random.default_rng(0)
    norm = [random.normal(size=3).astype("float32") for _ in range(2)]
    dense = [random.normal(size=shape).astype("float32") for shape in ((3, 2), (2,))]
    load_keras_tcn(new, [*norm, *weights_of(arrays, "two stacks"), *dense])
    x = arrays["two stacks.x"]
    layer = made(functools.partial(TCN, **OURS["two stacks"]), SHAPE)
    load_keras_tcn(layer, weights_of(arrays, "two stacks"))
    assert_equal_outputs(new(x), layer(new.layers[0](x)) @ dense[0] + dense[1])
    np.testing.assert_array_equal(new.layers[0].gamma, norm[0])


def test_weights_that_do_not_fit(arrays):
    plain = functools.partial(TCN, **OURS["plain"])
    weights = weights_of(arrays, "plain")
    layer = made(plain, SHAPE)
    before = layer.get_weights()
    for given, message in (
        (weights[:-1], "weights end before block_3"),
        ([*weights, weights[0]], "1 arrays are left over"),
        ([weights[0][:2], *weights[1:]], r"block_1, .*\(2, 3, 5\)"),
        (weights_of(arrays, "layer normalization"), "have layer normalization"),
    ):
        with pytest.raises(ValueError, match=message):
            load_keras_tcn(layer, given)
    for found, expected in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    for other, message in (
        (made(plain, SHAPE, normalization="layer"), "have no normalization"),
        (made(plain, SHAPE, activation="silu"), "applies the activation twice"),
        (plain(), "not built"),
        (keras.layers.Dense(3), "must be a TCN or a model"),
    ):
        with pytest.raises(ValueError, match=message):
            load_keras_tcn(other, weights)


# With keras-tcn itself, where it is installed. The cases after the first are those of its own test
# program (tasks/tcn_call_test.py): output shapes, receptive fields and normalizations.


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="keras-tcn needs TensorFlow")
@pytest.mark.parametrize("name", CASES)
def test_conversion_of_a_layer(name):
    pytest.importorskip("tcn")
    old, x, y = keras_tcn_layer(CASES[name], seed=9)
    new = from_keras_tcn(old)
    assert_equal_outputs(new(x), y)
    assert new.receptive_field == old.receptive_field
    config = new.get_config()
    assert TCN.from_config(config).get_config() == config


def old_layer(weights, **options):
    """What the conversion reads of a keras-tcn layer."""
    config = {"nb_filters": 5, "nb_stacks": 1, "kernel_size": 3, "dilations": (1, 2, 4)}
    config |= {"dropout_rate": 0.0, "activation": "relu", "padding": "causal"}
    config |= {"use_batch_norm": False, "use_layer_norm": False, "use_skip_connections": True}
    config |= {"return_sequences": False, "go_backwards": False, **options}
    return types.SimpleNamespace(
        nb_filters=5,
        name="old",
        built=True,
        trainable=False,
        dtype_policy="float32",
        weights=weights,
        get_weights=lambda: weights,
        get_config=lambda: config,
    )


def test_options_of_the_old_layer_are_compared(arrays):
    layer = made(functools.partial(TCN, **OURS["plain"]), SHAPE)
    weights = weights_of(arrays, "plain")
    load_keras_tcn(layer, old_layer(weights))
    for options, message in (
        ({"use_skip_connections": False}, "skip_connections=False"),
        ({"dilations": (1, 2, 3)}, r"dilations=\[1, 2, 3\]"),
        ({"activation": "linear"}, "activation='linear'"),
        ({"return_sequences": True}, "return_sequences=True"),
    ):
        with pytest.raises(ValueError, match=message):
            load_keras_tcn(layer, old_layer(weights, **options))


def test_conversion_keeps_frozen_layers_frozen(arrays):
    new = from_keras_tcn(old_layer(weights_of(arrays, "plain")))
    assert not new.trainable
    assert_equal_outputs(new(arrays["plain.x"]), arrays["plain.y"])
