"""Small models of the kinds that papers publish, one a kind: their streams equal them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_streams import to_stream

pytestmark = pytest.mark.both_backends(slow=True)


def inputs(*shape, **options):
    return keras.Input(shape, **options)


def conv2d(x, filters, size, **options):
    x = layers.Conv2D(filters, size, use_bias=False, **options)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def ds_cnn():
    """Keyword spotting by depthwise separable convolutions over time and frequency."""
    x = inputs(20, 10, 1)
    y = conv2d(x, 4, (10, 4), strides=(2, 2), padding="same")
    for _ in range(2):
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
        y = conv2d(layers.ReLU()(layers.BatchNormalization()(y)), 4, 1)
    y = layers.GlobalAveragePooling2D()(layers.Dropout(0.2)(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def crnn():
    """Sound events: convolutions, pooling of frequencies, a recurrent layer."""
    x = inputs(None, 16, 1)
    y = layers.MaxPooling2D((1, 4))(conv2d(x, 4, 3, padding="same"))
    y = layers.MaxPooling2D((1, 2))(conv2d(y, 4, 3, padding="same"))
    y = layers.Reshape((-1, 2 * 4))(y)
    y = layers.GRU(5, return_sequences=True)(y)
    return keras.Model(x, layers.TimeDistributed(layers.Dense(3, activation="sigmoid"))(y))


def deep_speech_2():
    """Strided convolutions over spectrograms, then forward recurrent layers."""
    x = inputs(None, 12)
    y = layers.Reshape((-1, 12, 1))(x)
    y = conv2d(y, 3, (5, 7), strides=(2, 2), padding="valid")
    y = conv2d(y, 3, (5, 3), strides=(1, 1), padding="valid")
    y = layers.Reshape((-1, y.shape[2] * y.shape[3]))(y)
    for _ in range(2):
        y = layers.BatchNormalization()(layers.GRU(4, return_sequences=True)(y))
    return keras.Model(x, layers.Dense(6, activation="softmax")(y))


def bc_resnet():
    """Broadcast residuals: two-dimensional blocks plus averages over frequency."""
    x = inputs(None, 8, 1)
    y = conv2d(x, 4, 5, strides=(1, 2), padding="same")
    two = layers.DepthwiseConv2D((1, 3), padding="same")(y)
    two = layers.BatchNormalization()(two)
    one = ops.mean(two, axis=2, keepdims=True)
    one = layers.DepthwiseConv2D((3, 1), padding="same")(one)
    one = layers.Conv2D(4, 1)(layers.Activation("silu")(one))
    y = layers.ReLU()(y + two + one)
    y = layers.SeparableConv2D(4, 3, padding="same")(y)
    return keras.Model(x, layers.GlobalMaxPooling2D()(y))


def denoiser():
    """Two-dimensional encoder and decoder with transposed convolutions along frequency."""
    x = inputs(None, 8, 2)
    a = layers.ZeroPadding2D(((2, 0), (1, 1)))(x)
    a = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(4, 3, strides=(1, 2))(a))
    b = layers.Conv2DTranspose(2, (1, 4), strides=(1, 2), padding="same")(a)
    c = layers.Conv2DTranspose(2, (2, 3), strides=(1, 2), padding="valid")(a)
    c = layers.Cropping2D(((0, 1), (1, 0)))(c)
    up = layers.UpSampling2D((1, 2))(layers.AveragePooling2D((1, 2), padding="same")(x))
    return keras.Model(x, [layers.Multiply()([b, x]), layers.Concatenate()([c, up, x])])


MODELS = [ds_cnn, crnn, deep_speech_2, bc_resnet, denoiser]


def randomize(model, seed=0):
    """Sets all weights, statistics and scales too."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if weight.dtype.startswith("float"):
            values = rng.normal(size=weight.shape) / np.sqrt(max(weight.shape or (1,)))
            weight.assign(np.abs(values) + 0.5 if "variance" in weight.name else values)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_it_streams(make):
    model = make()
    randomize(model)
    stream = to_stream(model)
    assert stream.proof.difference < 1e-5
    steps = stream.plan.last_offset + 2 * stream.plan.cycle + 1
    xs = [ops.ones((1, *x.shape[2:]), dtype=x.dtype) for x in keras.tree.flatten(stream.inputs)]
    cache = stream.initial_cache(1)
    for _ in range(min(steps, 12)):
        y, cache = stream.step(keras.tree.pack_sequence_as(stream.inputs, xs), cache)
