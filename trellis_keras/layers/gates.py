"""The gated activation f of a TrellisNet, as Keras layers.

A TrellisNet level computes pre-activations `a` with a convolution and hands them, with the states
of the level below one dilation earlier, to f (Bai et al. 2019, Eqs. 1 and 2):

    h^i_t, states^i_t = f(a_t, states^{i-1}_{t-d})

f is the part of a Keras RNN cell that is left when its matrix products are taken out, so it keeps
to the cell protocol: `units`, `state_size`, `output_size` and `call(inputs, states)`. Everything
is elementwise over (batch, time).
"""

import keras
from keras import ops

from trellis_keras.layers.base import tanh


class GatedActivation(keras.layers.Layer):
    """Base class of gated activations, and the contract for your own.

    A subclass sets `state_blocks` and `preactivation_blocks` and writes `call(inputs, states)`:

    - `inputs`: tensor (batch, time, preactivation_blocks * units), the pre-activations a_t: blocks
      of `units` channels side by side, each with a bias of its own;
    - `states`: list of `state_blocks` tensors (batch, time, units) of the level below, shifted by
      one dilation; `states[0]` is the hidden sequence h;
    - returns `(h, new_states)`, with new_states like `states` and `new_states[0]` being h.

    Only h of the level below is convolved, and x; the other states reach f as they are. Every block
    is a convolution of all taps, unless `arrange` says otherwise: the layer keeps its kernels as
    (tap, in, kernel_units), `kernel_units` being a multiple of `units`, and `arrange` lays them
    out as (tap, in, preactivation_size). It may repeat a block, or give it only some of the taps
    and zeros for the others. So a gate can act inside a product, as the reset gate of `GRUGates`
    does on the past taps' part of the candidate (`GatedCandidate`).

    f must not mix channels: channel n of its results depends on channel n of every block and state.
    It is then as well the f of a stack of RNN layers, a group of channels each (Theorem 1). It must
    be a pure function: a cell that draws random numbers makes all levels compile one by one. It
    computes in the dtype that it gets (at least float32).

    Args:
        units: Number of hidden channels of the TrellisNet.

    Example: an LSTM whose input gate is 1 - f (the "CIFG" of Greff et al. 2017).

    >>> class CoupledGates(GatedActivation):
    ...     state_blocks = 2
    ...     preactivation_blocks = 3
    ...
    ...     def call(self, inputs, states):
    ...         f, g, o = ops.split(inputs, 3, axis=-1)
    ...         f = ops.sigmoid(f)
    ...         c = f * states[1] + (1 - f) * ops.tanh(g)
    ...         h = ops.sigmoid(o) * ops.tanh(c)
    ...         return h, [h, c]
    ...
    >>> TrellisLayer(6, depth=4, cell=CoupledGates(6))(np.zeros((2, 5, 3), "float32")).shape
    (2, 5, 6)
    """

    state_blocks = 1
    preactivation_blocks = 1

    def __init__(self, units, **kwargs):
        super().__init__(autocast=False, **kwargs)  # the caller's dtype is the right one
        self.units = units
        self.built = True

    @property
    def state_size(self):
        return [self.units] * self.state_blocks

    @property
    def output_size(self):
        return self.units

    @property
    def preactivation_size(self):
        return self.preactivation_blocks * self.units

    @property
    def kernel_units(self):
        """Output channels of the kernels that the layer keeps as weights."""
        return self.preactivation_size

    def arrange(self, kernel):
        """Lays a kernel (tap, in, kernel_units) out as (tap, in, preactivation_size)."""
        return kernel

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("trellis_keras")
class RNNGates(GatedActivation):
    """Elman's activation: h = tanh(a)."""

    def call(self, inputs, states):
        h = tanh(inputs)
        return h, [h]


@keras.saving.register_keras_serializable("trellis_keras")
class LSTMGates(GatedActivation):
    """The LSTM's gates (TrellisNet, Eq. 12), blocks in Keras' order: i, f, c, o.

    c = f * c_{t-d} + i * tanh(g);  h = o * tanh(c). States are h and c.
    """

    state_blocks = 2
    preactivation_blocks = 4

    def call(self, inputs, states):
        i, f, g, o = ops.split(inputs, 4, axis=-1)
        c = ops.sigmoid(f) * states[1] + ops.sigmoid(i) * tanh(g)
        h = ops.sigmoid(o) * tanh(c)
        return h, [h, c]


class GatedCandidate(GatedActivation):
    """Base class of cells with a gate on what the past taps add to the candidate.

    The candidate's kernel is the last block of `kernel_units`. As pre-activations its current tap
    and its past taps are two blocks, the last ones, each with its bias.
    """

    @property
    def kernel_units(self):
        return (self.preactivation_blocks - 1) * self.units

    def arrange(self, kernel):
        gates, candidate = kernel[..., : -self.units], kernel[..., -self.units :]
        nothing = ops.zeros_like(candidate[:1])
        past_taps = kernel.shape[0] - 1
        current = ops.concatenate([nothing] * past_taps + [candidate[-1:]], axis=0)
        past = ops.concatenate([candidate[:-1], nothing], axis=0)
        return ops.concatenate([gates, current, past], axis=-1)


@keras.saving.register_keras_serializable("trellis_keras")
class GRUGates(GatedCandidate):
    """The GRU's gates as in Keras' `reset_after=True`, blocks z, r, candidate.

    The reset gate multiplies what the past taps add to the candidate, so that part is a
    pre-activation of its own with its own bias: z, r, candidate (current tap), candidate (past).

    h = z * h_{t-d} + (1 - z) * tanh(current + r * past)
    """

    preactivation_blocks = 4

    def call(self, inputs, states):
        z, r, current, past = ops.split(inputs, 4, axis=-1)
        z = ops.sigmoid(z)
        candidate = tanh(current + ops.sigmoid(r) * past)
        h = z * states[0] + (1 - z) * candidate
        return h, [h]


@keras.saving.register_keras_serializable("trellis_keras")
class MGUGates(GatedCandidate):
    """The minimal gated unit (Zhou et al. 2016), blocks f, candidate: one gate does all.

    In the paper's Eq. (6) f multiplies h before the product, U (f * h). That is not of
    TrellisNet's Eq. (4), for f would sit between two products of one level. As in `GRUGates` f
    multiplies the product instead, f * (U h + b), so the pre-activations are three: f, candidate
    (current tap), candidate (past taps).

    h = (1 - f) * h_{t-d} + f * tanh(current + f * past)
    """

    preactivation_blocks = 3

    def call(self, inputs, states):
        f, current, past = ops.split(inputs, 3, axis=-1)
        f = ops.sigmoid(f)
        h = (1 - f) * states[0] + f * tanh(current + f * past)
        return h, [h]


_BY_NAME = {"lstm": LSTMGates, "gru": GRUGates, "mgu": MGUGates, "rnn": RNNGates}


def get(cell, units, dtype=None):
    """Returns the gated activation of a name, or a layer of the user's.

    Raises:
        ValueError: An unknown name, or a layer that does not keep to the contract of
            `GatedActivation`, or that was made for another number of units.
    """
    if isinstance(cell, str) and cell in _BY_NAME:
        return _BY_NAME[cell](units, dtype=dtype)
    if isinstance(cell, dict):
        cell = keras.saving.deserialize_keras_object(cell)
    missing = [
        name
        for name in ("state_size", "preactivation_size", "kernel_units", "arrange", "call")
        if not hasattr(cell, name)
    ]
    if missing or isinstance(cell, type):
        lacks = f"which lacks {missing}" if missing else "a class: pass an instance of it"
        raise ValueError(
            f"`cell` must be one of {sorted(_BY_NAME)} or a `GatedActivation` layer. "
            f"Received: cell={cell!r}, {lacks}"
        )
    if list(cell.state_size) != [units] * len(cell.state_size):
        raise ValueError(
            f"`cell` was made for state sizes {list(cell.state_size)}, "
            f"but the layer has units={units}"
        )
    return cell
