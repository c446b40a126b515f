"""interop: weights of keras-tcn. The fixture was made by keras-tcn (see make_keras_tcn_fixture)."""

import functools

import keras
import numpy as np
import pytest

from tests.support.golden import load_golden
from tests.support.layer_checks import made
from tests.support.make_keras_tcn_fixture import CASES, SHAPE, keras_tcn_layer
from trellis_keras.interop import from_keras_tcn, load_keras_tcn
from trellis_keras.layers import TCN

both = pytest.mark.both_backends

# Our arguments for the cases of the fixture.
OURS = {
    "plain": {
        "filters": 5,
        "kernel_size": 3,
        "depth": 3,
        "skip_connections": True,
        "return_sequences": False,
    },
    "no skip connections": {"filters": [4, 6], "kernel_size": 2, "dilations": [1, 3]},
    "two stacks": {
        "filters": 3,
        "kernel_size": 4,
        "dilations": 2 * [1, 2],
        "skip_connections": True,
        "return_sequences": False,
        "go_backwards": True,
        "weight_norm": False,
    },
    "layer normalization": {
        "filters": 6,
        "kernel_size": 2,
        "dilations": [2, 1],
        "skip_connections": True,
        "normalization": "layer",
    },
    "batch normalization": {
        "filters": 4,
        "kernel_size": 3,
        "dilations": 2 * [1, 2],
        "return_sequences": False,
    },
    "centered": {
        "filters": 4,
        "kernel_size": 4,
        "depth": 3,
        "skip_connections": True,
        "padding": "same",
        "activation": "linear",
    },
}


@pytest.fixture(scope="module")
def arrays():
    return load_golden("keras_tcn")


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
    def model():
        return keras.Sequential(
            [
                keras.Input(SHAPE[1:]),
                keras.layers.LayerNormalization(),
                TCN(**OURS["two stacks"]),
                keras.layers.Dense(2),
            ]
        )

    new = model()
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
        (weights[:-1], "weights end before block_3, convolution_2, bias of shape .5,."),
        ([*weights, weights[0]], r"1 arrays are left over, of shapes \[.3, 3, 5.\]"),
        ([weights[0][:2], *weights[1:]], r"block_1, .*needs .* \(3, 3, 5\). Received.*\(2, 3, 5\)"),
        (weights_of(arrays, "layer normalization"), "have layer normalization.*must be 'layer'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_keras_tcn(layer, given)
    for found, expected in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    for other, message in (
        (made(plain, SHAPE, normalization="layer"), "have no normalization.*must be None"),
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


class OldLayer:
    """What the conversion reads of a keras-tcn layer."""

    nb_filters, name, built, trainable = 5, "old", True, False

    def __init__(self, weights, **options):
        self.options, self.weights = options, weights

    def get_config(self):
        return {
            "nb_filters": 5,
            "nb_stacks": 1,
            "kernel_size": 3,
            "dilations": (1, 2, 4),
            "dropout_rate": 0.0,
            "activation": "relu",
            "use_batch_norm": False,
            "use_layer_norm": False,
            "padding": "causal",
            "use_skip_connections": True,
            "return_sequences": False,
            "go_backwards": False,
            **self.options,
        }

    def get_weights(self):
        return self.weights

    dtype_policy = "float32"


def test_options_of_the_old_layer_are_compared(arrays):
    layer, weights = (
        made(functools.partial(TCN, **OURS["plain"]), SHAPE),
        weights_of(arrays, "plain"),
    )
    load_keras_tcn(layer, OldLayer(weights))
    for options, message in (
        ({"use_skip_connections": False}, "skip_connections=False"),
        ({"dilations": (1, 2, 3)}, r"dilations=\[1, 2, 3\]"),
        ({"activation": "linear"}, "activation='linear'"),
    ):
        with pytest.raises(ValueError, match=f"needs the options .*: {message}"):
            load_keras_tcn(layer, OldLayer(weights, **options))


def test_conversion_keeps_frozen_layers_frozen(arrays):
    new = from_keras_tcn(OldLayer(weights_of(arrays, "plain")))
    assert not new.trainable
    assert_equal_outputs(new(arrays["plain.x"]), arrays["plain.y"])
