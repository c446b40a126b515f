"""The Grid-LSTM in two dimensions (Kalchbrenner et al. 2016)."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from trellis_keras.kernels.activations import drop, lstm
from trellis_keras.layers.checks import check_choice, check_positive
from trellis_keras.layers.recurrent_cell import RecurrentCell, block_initializer
from trellis_keras.layers.seeds import seeded
from trellis_keras.types import Shape, Tensor


@keras.saving.register_keras_serializable("trellis_keras")
class GridLSTMCell(RecurrentCell):
    """One time step of a two-dimensional Grid-LSTM (Kalchbrenner et al. 2016).

    A node of the grid has one LSTM for the depth dimension (1) and one for time (2), each with
    a hidden state h and a memory m (Ahuja & Morency 2018, Eqs. 5 and 6):

        h1', m1' = LSTM(h1, h2, m1; depth weights)
        h2', m2' = LSTM(h1, h2, m2; time weights)

    where LSTM(h1, h2, m) is, with the blocks i, f, c, o of the weights in Keras' order,

        i, f, c, o = h1 kernel + h2 recurrent_kernel + bias
        m' = sigmoid(f) * m + sigmoid(i) * tanh(c)
        h' = sigmoid(o) * tanh(m')

    The memory m1 flows from node to node within a time step, so a cell is a column of `depth`
    nodes: h1', m1' of one node are h1, m1 of the node above it, and h2', m2' are h2, m2 of the
    same node in the next step. For the bottom node, h1 is the input and m1 is 0.

    The weights are `depth_kernel`, `depth_recurrent_kernel`, `time_kernel` and
    `time_recurrent_kernel` (units, 4 units), `depth_bias` and `time_bias` (4 units); if they are
    not shared, each node l has its own, with the suffix `_l`. A node with H units
    has 16 H^2 + 8 H weights.

    Reference:

    - [Kalchbrenner et al., 2016](https://arxiv.org/abs/1507.01526)

    Args:
        units: Positive integer, channels of every h and every m. The input must have the same
            number of channels, since it is the h1 of the bottom node. (Put a `Dense` or
            `Embedding` layer before the cell.)
        depth: Positive integer, number of nodes. Defaults to `1`.
        update: `"parallel"` for the equations above, or `"sequential"` for the LRU authors' code,
            where the time LSTM reads h1' instead of h1. Defaults to `"parallel"`.
        share_depth_weights: Boolean, whether the nodes of the column share their weights (the
            "tied" Grid-LSTM, and footnote 3 of Ahuja & Morency; their code does not). Defaults to
            `True`.
        return_memory: Boolean, whether to output [h1', m1'] of the top node (2 * units channels)
            instead of h1'. A `GridLSTMCell` above accepts it: an input of 2 * units channels is
            [h1, m1] of its bottom node. Defaults to `False`.
        **kwargs: As in `RecurrentCell`. `dropout` drops h1 (and h1') in the matrix products,
            `recurrent_dropout` h2, each with one mask (batch, units) for all nodes and steps.
            Memories are not dropped. The forget gates' biases start at 1, as in
            `keras.layers.LSTM`; `bias_initializer` applies to the others.

    Call arguments:
        inputs: Tensor (batch, units), or (batch, 2 * units).
        states: List of 2 * depth tensors (batch, units): h2, m2 of the bottom node, then of the
            node above it, and so on.
        training: Boolean, whether dropout is active. Defaults to `False`.

    At masked steps `keras.layers.RNN` repeats the previous output, except on JAX, where
    it returns the first state instead. The output of this cell is not one of its states, so on JAX
    use `zero_output_for_mask=True` and read the outputs at the valid steps.

    Example:

    >>> rnn = keras.layers.RNN(GridLSTMCell(4, depth=2), return_state=True)
    >>> y, *states = rnn(np.zeros((2, 7, 4), "float32"))
    >>> y.shape, len(states)
    ((2, 4), 4)
    """

    removed_options = {
        **RecurrentCell.removed_options,
        "unit_forget_bias": True,
        "use_bias": True,
    }

    def __init__(
        self,
        units: int,
        depth: int = 1,
        *,
        update: str = "parallel",
        share_depth_weights: bool = True,
        return_memory: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        units, depth = check_positive(units=units, depth=depth)
        check_choice("update", update, ("parallel", "sequential"))
        self.depth = depth
        self.update = update
        self.share_depth_weights = share_depth_weights
        self.return_memory = return_memory
        self.state_size = [units] * (2 * depth)
        self.output_size = 2 * units if return_memory else units

    def build(self, input_shape: Shape) -> None:
        if input_shape[-1] not in (self.units, 2 * self.units):
            raise ValueError(
                "The input of a GridLSTMCell is the depth state h1 of its bottom node, so it must "
                f"have units={self.units} channels, or {2 * self.units} for [h1, m1]. Put a "
                f"Dense layer of {self.units} units before it. Received: shape {input_shape}"
            )
        self.nodes = []
        for n in range(1 if self.share_depth_weights else self.depth):
            suffix = "" if self.share_depth_weights else f"_{n + 1}"
            depth_weights = self._lstm_weights(n, 0, "depth", suffix)
            self.nodes.append((depth_weights, self._lstm_weights(n, 1, "time", suffix)))

    def _lstm_weights(self, n, direction, name, suffix):
        shape, fan_in = (self.units, 4 * self.units), 2 * self.units
        kernel = self.add_gate_weight(
            "kernel", shape, n, direction, name=f"{name}_kernel{suffix}", fan_in=fan_in
        )
        recurrent_kernel = self.add_gate_weight(
            "recurrent", shape, n, direction, name=f"{name}_recurrent_kernel{suffix}", fan_in=fan_in
        )
        blocks = [
            seeded(self.bias_initializer, self.seed, "GridLSTMCell", "bias", n, direction, block)
            for block in range(4)
        ]
        blocks[1] = keras.initializers.Ones()  # of the forget gate, as in `keras.layers.LSTMCell`
        bias = self.add_gate_weight(
            "bias",
            (4 * self.units,),
            name=f"{name}_bias{suffix}",
            initializer=block_initializer(*blocks),
        )
        return kernel, recurrent_kernel, bias

    def call(
        self, inputs: Tensor, states: Sequence[Tensor], training: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        h1, m1 = inputs[:, : self.units], inputs[:, self.units :]
        m1 = m1 if m1.shape[-1] else ops.zeros_like(h1)
        h1_mask, h2_mask = self.dropout_masks(inputs, states[0], training)
        h1_mask = None if h1_mask is None else h1_mask[:, : self.units]
        new_states = []
        for n in range(self.depth):
            depth_weights, time_weights = self.nodes[0 if self.share_depth_weights else n]
            h2, m2 = states[2 * n : 2 * n + 2]
            below, before = drop(h1, h1_mask), drop(h2, h2_mask)
            h1, m1 = _lstm(below, before, m1, *depth_weights)  # Eq. 5
            if self.update == "sequential":
                below = drop(h1, h1_mask)
            h2, m2 = _lstm(below, before, m2, *time_weights)  # Eq. 6
            new_states += [h2, m2]
        return ops.concatenate([h1, m1], axis=-1) if self.return_memory else h1, new_states


def _lstm(h1, h2, m, kernel, recurrent_kernel, bias):
    """The new h and m of an LSTM."""
    return lstm(ops.matmul(h1, kernel) + ops.matmul(h2, recurrent_kernel) + bias, m)
