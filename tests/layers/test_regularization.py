"""Masks of the dropout layers and of DropConnect, weight normalization."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import (
    ConvolutionKernel,
    DropConnect,
    Dropout,
    EmbeddingDropout,
    TCNBlock,
    VariationalDropout,
    weight_norm,
)

pytestmark = pytest.mark.both_backends

ONES = np.ones((40, 6, 50), "float32")


@pytest.mark.parametrize(
    "layer, inputs, axis",
    [
        (VariationalDropout(0.25, seed=1), (ONES,), 1),
        (EmbeddingDropout(0.25, input_dim=600, seed=1), (ONES, np.arange(240).reshape(40, 6)), 2),
        (DropConnect(0.25, seed=1), (np.ones((5, 60, 50), "float32"),), None),
    ],
)
def test_rate_scale_and_shared_axis(layer, inputs, axis):
    assert np.array_equal(layer(*inputs), inputs[0])
    y = np.asarray(layer(*inputs, training=True))
    dropped = y[:-1] if isinstance(layer, DropConnect) else y
    assert set(np.unique(dropped)) == {0, np.float32(1 / 0.75)}
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.06)
    if axis is not None:
        assert np.array_equal(y.min(axis=axis), y.max(axis=axis))


@pytest.mark.parametrize(
    "make",
    [
        Dropout,
        VariationalDropout,
        DropConnect,
        lambda rate, **options: TCNBlock(8, 2, dropout=rate, **options).dropouts[0],
        lambda rate, **options: TCNBlock(
            8, 2, dropout=rate, dropout_kind="spatial", **options
        ).dropouts[0],
    ],
    ids=["Dropout", "VariationalDropout", "DropConnect", "TCN", "spatial TCN"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dropped_fraction_is_the_rate(make, dtype):
    x = keras.ops.ones((400, 2, 400), dtype)
    for rate in (0.003, 0.9):
        y = make(rate, seed=1, dtype=dtype)(x, training=True)
        dropped = np.asarray(keras.ops.cast(y, "float32"))[:, 0] == 0
        assert np.mean(dropped) == pytest.approx(rate, abs=4 * np.sqrt(rate / dropped.size))


@pytest.mark.parametrize("noise_shape", [None, (None, 1, None), (4, 5)])
def test_dropout_is_that_of_keras(noise_shape):
    options = {"noise_shape": noise_shape, "seed": 3}
    x = np.random.default_rng(1).normal(size=(3, 4, 5)).astype("float32")
    for rate in (0, 0.3, 1):
        ours, keras_layer = (layer(rate, **options) for layer in (Dropout, keras.layers.Dropout))
        for training in (True, True, False):  # twice, with two masks
            pair = (keras.ops.cast(f(x, training=training), "float32") for f in (ours, keras_layer))
            assert np.array_equal(*pair)


@pytest.mark.parametrize(
    "make", [Dropout, VariationalDropout, DropConnect], ids=lambda layer: layer.__name__
)
def test_xla_does_not_derive_a_key_for_each_number(make):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("other backends have one algorithm")
    import tensorflow as tf

    layer = make(0.25, seed=1)
    draw = tf.function(lambda: layer(ONES, training=True), jit_compile=True)
    program = draw.experimental_get_compiler_ir()(stage="hlo")
    assert "rng-bit-generator" in program and "GetKeyCounter" not in program
    first, second = (np.asarray(draw()) for _ in range(2))
    assert set(np.unique(first[:-1])) == {0, np.float32(1 / 0.75)}
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_a_word_is_dropped_everywhere(dtype):
    tokens = np.array([[1, 2, 1], [2, 1, 1]], dtype)
    y = EmbeddingDropout(0.5, input_dim=3, seed=4)(ONES[:2, :3], tokens, training=True)
    y = np.asarray(y)[..., 0]
    for word in (1, 2):
        assert len(np.unique(y[tokens == word])) == 1


def test_the_current_tap_is_never_dropped():
    kernel = np.asarray(DropConnect(0.9, seed=0)(np.ones((3, 8, 8), "float32"), training=True))
    assert np.all(kernel[-1] == 1) and np.any(kernel[:-1] == 0)
    single = np.ones((1, 8, 8), "float32")
    assert np.array_equal(DropConnect(0.9)(single, training=True), single)


def test_weight_norm_needs_an_initializer_that_repeats():
    initializer = keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1))
    with pytest.raises(ValueError, match="same numbers twice"):
        ConvolutionKernel(2, 7, weight_norm=True, initializer=initializer)
    ConvolutionKernel(2, 7, initializer=initializer).build((None, None, 3))


def test_weight_norm_starts_at_the_direction():
    kernel = ConvolutionKernel(2, 7, weight_norm=True, initializer="random_normal")
    kernel.build((None, None, 3))
    np.testing.assert_allclose(kernel(), kernel.kernel, rtol=1e-5)
    norms = np.sqrt(np.sum(np.asarray(kernel.kernel) ** 2, axis=(0, 1)))
    np.testing.assert_allclose(kernel.gain, norms, rtol=1e-5)
    doubled = weight_norm(np.asarray(kernel.kernel), 2 * norms)
    np.testing.assert_allclose(doubled, 2 * np.asarray(kernel.kernel), rtol=1e-5)


def test_one_mask_for_all_steps_needs_steps():
    x = np.ones((4, 6), "float32")
    with pytest.raises(ValueError, match=r"Received: inputs of shape \(4, 6\).*layers.Dropout"):
        VariationalDropout(0.5)(x, training=True)
    assert VariationalDropout(0.5)(x).shape == (4, 6)  # in inference it is the identity
