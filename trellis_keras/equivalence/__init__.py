"""Theorem 1 of the TrellisNet paper as a program (Bai et al. 2019, sections 4.2, A and B.1).

`to_trellis` makes of a stack of Keras' recurrent layers the TrellisNet that computes the same
function, with a horizon of M steps; `to_dense` lets it be trained on without the RNN's sparsity;
`to_rnn` is the way back.
"""

from trellis_keras.equivalence.conversion import to_trellis
from trellis_keras.equivalence.dense import to_dense
from trellis_keras.equivalence.inverse import to_rnn
from trellis_keras.equivalence.truncated_rnn import TruncatedRNN

__all__ = ["TruncatedRNN", "to_dense", "to_rnn", "to_trellis"]
