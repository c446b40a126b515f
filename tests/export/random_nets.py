"""Random nets that stream: layers, widths, dilations, activations and stacks."""

import contextlib

import keras
import numpy as np

from trellis_keras.layers import LRU, TCN, GridLSTMCell, RHNCell, StackedRNN, TCNBlock, TrellisLayer
from trellis_keras.models import PolyphonicModel, SequenceClassifier, SequenceRegressor

CHANNELS = 3
ACTIVATIONS = [
    *("relu", "tanh", "sigmoid", "elu", "selu", "silu", "gelu", "softplus", "mish", "hard_silu"),
    *("relu6", "leaky_relu", "celu", "hard_tanh", "softsign", "squareplus", "tanh_shrink"),
    *("log_sigmoid", "linear", "softmax", "log_softmax"),
]
# Of bounded nets: others amplify rounding errors.
BOUNDED = ["tanh", "sigmoid", "hard_sigmoid", "hard_tanh", "softsign"]
STATES = {"return_sequences": True, "return_state": True}


def random_net(seed, dtype="float32"):
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

    with _default_dtype(dtype):
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


@contextlib.contextmanager
def _default_dtype(dtype):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def draw(net, rng):
    """Gives a net random weights, also where they start as zeros or ones."""
    for weight in net.weights:
        value = rng.normal(size=weight.shape, scale=0.25)
        if any(part in weight.path for part in ("variance", "scale", "gain", "gamma")):
            value = 1 + np.abs(value)
        weight.assign(value)
