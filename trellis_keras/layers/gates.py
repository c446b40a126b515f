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

from trellis_keras.layers.precision import tanh


class GatedActivation(keras.layers.Layer):
    """Base class of gated activations, and the contract for your own.

    A subclass sets `state_blocks` and `preactivation_blocks` and writes `call(inputs, states)`:

    - `inputs`: tensor (batch, time, preactivation_blocks * units), the pre-activations;
    - `states`: list of `state_blocks` tensors (batch, time, units) of the level below, shifted by
      one dilation; `states[0]` is the hidden sequence h;
    - returns `(h, new_states)` with `new_states[0]` being h.

    Args:
        units: Number of hidden channels of the TrellisNet.

    Example: a minimal gated unit (Zhou et al. 2016).

    >>> class MinimalGate(GatedActivation):
    ...     preactivation_blocks = 2
    ...
    ...     def call(self, inputs, states):
    ...         forget, candidate = ops.split(inputs, 2, axis=-1)
    ...         forget = ops.sigmoid(forget)
    ...         h = (1 - forget) * states[0] + forget * ops.tanh(candidate)
    ...         return h, [h]
    """

    state_blocks = 1
    preactivation_blocks = 1

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
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


@keras.saving.register_keras_serializable("trellis_keras")
class GRUGates(GatedActivation):
    """The GRU's gates as in Keras' `reset_after=True`, blocks z, r, candidate.

    The reset gate multiplies what the past taps add to the candidate, so that part is a
    pre-activation of its own with its own bias: z, r, candidate (current tap), candidate (past).

    h = z * h_{t-d} + (1 - z) * tanh(current + r * past)
    """

    preactivation_blocks = 4

    @property
    def kernel_units(self):
        return 3 * self.units

    def arrange(self, kernel):
        gates, candidate = kernel[..., : 2 * self.units], kernel[..., 2 * self.units :]
        nothing = ops.zeros_like(candidate[:1])
        past_taps = kernel.shape[0] - 1
        current = ops.concatenate([nothing] * past_taps + [candidate[-1:]], axis=0)
        past = ops.concatenate([candidate[:-1], nothing], axis=0)
        return ops.concatenate([gates, current, past], axis=-1)

    def call(self, inputs, states):
        z, r, current, past = ops.split(inputs, 4, axis=-1)
        z = ops.sigmoid(z)
        candidate = tanh(current + ops.sigmoid(r) * past)
        h = z * states[0] + (1 - z) * candidate
        return h, [h]


_BY_NAME = {"lstm": LSTMGates, "gru": GRUGates, "rnn": RNNGates}


def get(cell, units, dtype=None):
    """Returns the gated activation for `"lstm"`, `"gru"`, `"rnn"` or a layer of the user's.

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
    if missing:
        raise ValueError(
            f"`cell` must be one of {sorted(_BY_NAME)} or a `GatedActivation` layer. "
            f"Received: cell={cell!r}, which lacks {missing}"
        )
    if list(cell.state_size) != [units] * len(cell.state_size):
        raise ValueError(
            f"`cell` was made for state sizes {list(cell.state_size)}, "
            f"but the layer has units={units}"
        )
    return cell
