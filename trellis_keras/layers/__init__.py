"""Keras layers: sequence networks, cells for `keras.layers.RNN`, output layers and dropouts."""

from trellis_keras.layers.grid_lstm import GridLSTMCell
from trellis_keras.layers.heads import AdaptiveSoftmax, DenseHead, Head, MixtureOfSoftmaxes
from trellis_keras.layers.lru import LRU, LRUCell
from trellis_keras.layers.regularization import (
    ConvolutionKernel,
    DropConnect,
    Dropout,
    EmbeddingDropout,
    VariationalDropout,
    weight_norm,
)
from trellis_keras.layers.rhn import RHNCell
from trellis_keras.layers.stacked_rnn import StackedRNN
from trellis_keras.layers.tcn import TCN, TCNBlock
from trellis_keras.layers.trellisnet import (
    GatedActivation,
    GRUGates,
    LSTMGates,
    MixedGroupKernel,
    RNNGates,
    TrellisLayer,
)

__all__ = [
    "AdaptiveSoftmax",
    "ConvolutionKernel",
    "DenseHead",
    "DropConnect",
    "Dropout",
    "EmbeddingDropout",
    "GRUGates",
    "GatedActivation",
    "GridLSTMCell",
    "Head",
    "LRU",
    "LRUCell",
    "LSTMGates",
    "MixedGroupKernel",
    "MixtureOfSoftmaxes",
    "RHNCell",
    "RNNGates",
    "StackedRNN",
    "TCN",
    "TCNBlock",
    "TrellisLayer",
    "VariationalDropout",
    "weight_norm",
]
