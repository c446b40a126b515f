"""Nets that stream: random ones, those with a head, and graphs of Keras layers."""

import keras
import numpy as np
from keras import layers, ops

from trellis_keras.layers import LRU, TCN, GridLSTMCell, RHNCell, StackedRNN, TCNBlock, TrellisLayer
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)

CHANNELS = 3
ACTIVATIONS = [
    *("relu", "tanh", "sigmoid", "elu", "selu", "silu", "gelu", "softplus", "mish", "hard_silu"),
    *("relu6", "leaky_relu", "celu", "hard_tanh", "softsign", "squareplus", "tanh_shrink"),
    *("log_sigmoid", "linear", "softmax", "log_softmax"),
]
# Of bounded nets: others amplify rounding errors.
BOUNDED = ["tanh", "sigmoid", "hard_sigmoid", "hard_tanh", "softsign"]
STATES = {"return_sequences": True, "return_state": True}


def random_net(seed):
    """Returns a built layer, stack or model, with random weights."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    def some(low, high):
        return int(rng.integers(low, high + 1))

    def tcn():
        return TCN(
            some(2, 9),
            kernel_size=some(2, 4),
            dilations=[some(1, 5) for _ in range(some(1, 3))],
            activation=one_of("glu", *ACTIVATIONS[:-2]),
            normalization=one_of(None, "layer", "batch"),
            skip_connections=one_of(True, False),
            weight_norm=one_of(True, False),
            dropout=one_of(0.0, 0.3),
        )

    def block():
        return TCNBlock(some(2, 70), some(2, 5), some(1, 4), activation=one_of("relu", "glu"))

    def trellis():
        units = some(2, 20)
        options = {
            "output_units": some(2, units),
            "kernel_size": some(1, 3),
            "dilation_rate": [some(1, 4) for _ in range(some(1, 3))],
            "cell": one_of("lstm", "gru", "rnn"),
            "injection_every": one_of(1, 1, 2),
            "weight_norm": one_of(True, False),
        }
        depth = some(1, 5)
        if one_of(True, False) and depth > 1:
            options |= {"groups": [1, units - 1], "group_starts": [1, 2]}
            options |= {"kernel_structure": one_of("dense", "mixed_group")}
        return TrellisLayer(units, depth, **options)

    def lru():
        return LRU(
            some(2, 9),
            some(1, 3),
            variant=one_of("ug", "rg", "ps"),
            convention=one_of("paper", "authors"),
            cells_per_node=some(1, 2),
            use_gate_bias=one_of(True, False),
        )

    def cell():
        units, bias = some(2, 8), one_of(True, False)
        gates = {"activation": one_of(*BOUNDED), "use_bias": bias}
        if one_of(True, False):
            width = one_of(CHANNELS, 2 * CHANNELS)
            return one_of(
                [RHNCell(units, some(1, 3))],
                [
                    RHNCell(width, 1),
                    GridLSTMCell(
                        CHANNELS,
                        some(1, 3),
                        update=one_of("parallel", "sequential"),
                        share_depth_weights=one_of(True, False),
                        return_memory=one_of(True, False),
                    ),
                ],
            )
        gated = gates | {"recurrent_activation": one_of("sigmoid", "hard_sigmoid")}
        return one_of(
            [keras.layers.SimpleRNNCell(units, **gates)],
            [keras.layers.LSTMCell(units, **gated)],
            [keras.layers.GRUCell(units, reset_after=one_of(True, False), **gated)],
        )

    def stacked():
        layers = [keras.layers.RNN(cell(), **STATES) for _ in range(some(1, 2))]
        return StackedRNN([layers[0], keras.layers.Dropout(0.5), *layers[1:]])

    def pointwise():
        return one_of(
            lambda: keras.layers.Dense(some(2, 70), activation=one_of(*ACTIVATIONS)),
            lambda: keras.layers.Activation(one_of(*ACTIVATIONS)),
            keras.layers.BatchNormalization,
            lambda: keras.layers.LayerNormalization(center=one_of(True, False)),
            keras.layers.RMSNormalization,
            lambda: keras.layers.Rescaling(0.5, -1),
            lambda: keras.layers.ReLU(max_value=one_of(None, 2.0), negative_slope=0.1),
            keras.layers.LeakyReLU,
            lambda: keras.layers.ELU(0.7),
            lambda: keras.layers.GaussianNoise(1.0),
            lambda: keras.layers.Normalization(mean=0.5, variance=2.0, invert=one_of(True, False)),
        )()

    streams = tcn, block, trellis, lru, stacked
    layers = [one_of(*streams)() for _ in range(some(1, 2))]
    for _ in range(some(0, 2)):
        layers.insert(some(0, len(layers)), pointwise())
    net = keras.Sequential(layers) if len(layers) > 1 else layers[0]
    kind = one_of("layer", "classifier", "regressor", "music")
    if kind == "classifier":
        activation = one_of(None, "softmax")
        net = SequenceClassifier(net, 3, per_step=True, activation=activation, normalize=True)
    elif kind == "regressor":
        net = SequenceRegressor(net, some(1, 3), per_step=True, normalize=one_of(True, False))
    elif kind == "music":
        net = PolyphonicModel(net, CHANNELS)
    net.build((None, None, CHANNELS))
    draw(net, rng)
    return net


def draw(net, rng):
    """Gives a net random weights, also where they start as zeros or ones."""
    for weight in net.weights:
        value = rng.normal(size=weight.shape, scale=0.25)
        if any(part in weight.path for part in ("variance", "scale", "gain", "gamma")):
            value = 1 + np.abs(value)
        weight.assign(value)


def classifier(**options):
    backbone = TCN(4, kernel_size=3, depth=2, return_sequences=False)
    model = SequenceClassifier(backbone, 2, class_names=["walk", "run"], normalize=True, **options)
    model.build((None, None, CHANNELS))
    draw(model, np.random.default_rng(0))
    return model


def language_model(head=None, tie_embeddings=True):
    backbone = LRU(4, 2, stateful=True)
    model = LanguageModel(9, 4, backbone, head=head, tie_embeddings=tie_embeddings)
    model.build((1, None))
    draw(model, np.random.default_rng(0))
    return model


def residual(x):
    """Delays, groups and depthwise kernels, down and up again."""
    y = layers.Conv1D(4, 5, padding="same", activation="relu")(x)
    z = layers.Conv1D(4, 3, groups=2, padding="causal", dilation_rate=2)
    z = layers.SpectralNormalization(z)(y)
    z = layers.BatchNormalization()(layers.DepthwiseConv1D(3, padding="same")(z))
    y = layers.Add()([y, z])
    down = layers.SeparableConv1D(6, 4, strides=2, padding="same", activation="tanh")(y)
    up = layers.Conv1DTranspose(4, 4, strides=2, padding="same")(down)
    held = layers.UpSampling1D(2)(layers.MaxPooling1D(2)(y))
    return layers.Softmax()(layers.Dense(3)(layers.Concatenate()([up, held, y])))


def spotter(x):
    """Strides, pooling and a recurrent net, with running pooling at the end."""
    x = layers.Conv1D(8, 4, strides=2, padding="causal", activation="relu")(x)
    x = layers.AveragePooling1D(3, strides=2, padding="same")(x)
    x = layers.GRU(5, return_sequences=True, dropout=0.5)(x)
    x = layers.TimeDistributed(layers.Dense(6))(layers.LSTM(4, return_sequences=True)(x))
    mean, largest = layers.GlobalAveragePooling1D()(x), layers.GlobalMaxPooling1D()(x)
    return layers.Dense(2)(layers.Concatenate()([mean, largest]))


def padded(x):
    """Padding before the first step, which biases, states and pools see."""
    x = layers.Dense(4)(layers.ZeroPadding1D((4, 0))(x))
    x = TCN(4, 2, depth=2)(x)
    x = layers.MaxPooling1D(3, strides=1, padding="same")(x)
    x = layers.Conv1D(5, 4, activation="elu")(x)
    return layers.Reshape((-1, 2))(x[..., 1:3])[:, 1:]


def arithmetic(x):
    """Operators, slices, and layers that move numbers."""
    y = (x[:, 1:] - x[:, :-1]) * 0.5 + np.array([1.0, 2.0, 3.0], "float32")
    y = ops.maximum(ops.log1p(ops.abs(y[..., ::-1])), 0.25 - y)
    return layers.Multiply()([y, layers.Rescaling(2.0)(y), 1.5 * y])[:, ::3]


def two_variables(x):
    """A product whose two floats are a quarter of the work array, of which gcc may warn."""
    pairs = layers.Reshape((-1, 3, 2))(layers.Concatenate()([x, x[..., ::-1]]))
    return layers.Dense(4)(ops.matmul(ops.expand_dims(x, 2), pairs)[:, :, 0])


def counts(x):
    """Products of integers with floats."""
    return layers.LSTM(2, return_sequences=True)(ops.cast(x > 0, "int32"))


GRAPHS = {f.__name__: f for f in (residual, spotter, padded, arithmetic, two_variables, counts)}


def graph(name):
    """Returns a model of `GRAPHS`."""
    x = keras.Input((None, 3))
    model = keras.Model(x, GRAPHS[name](x), name=name)
    draw(model, np.random.default_rng(0))
    return model
