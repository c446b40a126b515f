from trellis_keras.layers.dropout import DropConnect, EmbeddingDropout, VariationalDropout
from trellis_keras.layers.gates import GatedActivation, GRUGates, LSTMGates, RNNGates
from trellis_keras.layers.tcn import TCN
from trellis_keras.layers.tcn_block import TCNBlock
from trellis_keras.layers.trellis import TrellisLayer
from trellis_keras.layers.weight_norm import ConvolutionKernel, weight_norm

__all__ = [
    "ConvolutionKernel",
    "DropConnect",
    "EmbeddingDropout",
    "GRUGates",
    "GatedActivation",
    "LSTMGates",
    "RNNGates",
    "TCN",
    "TCNBlock",
    "TrellisLayer",
    "VariationalDropout",
    "weight_norm",
]
