"""The two-dimensional Grid-LSTM as a Keras RNN cell."""

import keras
from keras import ops

from trellis_keras.layers import base
from trellis_keras.layers.base import blockwise_initializer, check_cell_call, tanh
from trellis_keras.layers.recurrent_cell import RecurrentCell, drop

_UPDATES = ("parallel", "sequential")
_DIRECTIONS = ("depth", "time")


@keras.saving.register_keras_serializable("trellis_keras")
class GridLSTMCell(RecurrentCell):
    """One time step of a two-dimensional Grid-LSTM (Kalchbrenner et al. 2016).

    A node of the grid has an LSTM for each direction, depth (1) and time (2), and each has a
    hidden state h and a memory m (Ahuja & Morency 2018, Eqs. 5 and 6):

        h1', m1' = LSTM(h1, h2, m1; depth weights)
        h2', m2' = LSTM(h1, h2, m2; time weights)

    where LSTM(h1, h2, m) is, with the blocks i, f, c, o of the weights in Keras' order,

        a  = h1 kernel + h2 recurrent_kernel + bias
        m' = sigmoid(a_f) * m + sigmoid(a_i) * tanh(a_c)
        h' = sigmoid(a_o) * tanh(m')

    The memory m1 flows from node to node within a time step, so a cell is a column of `depth`
    nodes: h1', m1' of one are h1, m1 of the node above it, and h2', m2' are h2, m2 of the same
    node in the next step. The bottom node's h1 is the input, its m1 is 0.

    Weights: `depth_kernel`, `time_kernel`, `depth_recurrent_kernel`, `time_recurrent_kernel`
    (units, 4 units), `depth_bias`, `time_bias` (4 units), or such weights with the suffix `_l`
    for each node l. These are 16 H^2 + 8 H numbers for H units, per node if they are not shared.

    Args:
        units: Number of channels of every h and every m. The input must be as wide: it is the h1
            of the bottom node. (Put a `Dense` or `Embedding` of `units` channels before it.)
        depth: Number of nodes.
        update: `"parallel"` as in the equations, or `"sequential"` as in the program of Ahuja &
            Morency, where the time LSTM reads h1' in place of h1.
        share_depth_weights: Whether the nodes of the column have the same weights (the "tied"
            Grid-LSTM, and footnote 3 of Ahuja & Morency; False: their program).
        return_memory: Whether the output is [h1', m1'] of the top node (2 units channels) instead
            of h1'. A `GridLSTMCell` on top of it goes on with both: an input of 2 units channels
            is [h1, m1] of the bottom node.
        use_bias: Whether there are biases.
        unit_forget_bias: Whether the biases of forget gates start at 1, as in
            `keras.layers.LSTMCell`.
        kernel_initializer, recurrent_initializer, bias_initializer: Of the weights. Glorot counts
            the rows and the units of one gate `[W; U]`, whatever the number of gates.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Of the weights.
        kernel_constraint, recurrent_constraint, bias_constraint: Of the weights.
        dropout: Rate of h1 (and h1') where it enters a product. One mask (batch, units) serves all
            nodes and all steps of a sequence. Memories are never masked.
        recurrent_dropout: The same of h2.
        seed: Integer seed of the dropouts, and of initializers without one.

    Call arguments:
        inputs: Tensor (batch, units), or (batch, 2 * units).
        states: List of 2 * depth tensors (batch, units): h2, m2 of the bottom node, then of the
            node above it, and so on.
        training: Whether dropout is active.

    Returns:
        The output (batch, units), or (batch, 2 * units), and the list of the new states.

    Raises:
        ValueError: An argument out of range, inputs of another width, or states of the wrong
            number or shape.

    In masked steps `keras.layers.RNN` repeats the output of the step before, except on JAX, where
    it takes the first state for it. This cell's output is none of its states, so use
    `zero_output_for_mask=True` there and read the outputs at the valid steps; states are right.

    Example:

    >>> rnn = keras.layers.RNN(GridLSTMCell(4, depth=2), return_state=True)
    >>> y, *states = rnn(np.zeros((2, 7, 4), "float32"))
    >>> y.shape, len(states)
    ((2, 4), 4)
    """

    def __init__(
        self,
        units,
        depth=1,
        *,
        update="parallel",
        share_depth_weights=True,
        return_memory=False,
        use_bias=True,
        unit_forget_bias=True,
        kernel_initializer="glorot_uniform",
        recurrent_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        recurrent_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        recurrent_constraint=None,
        bias_constraint=None,
        dropout=0.0,
        recurrent_dropout=0.0,
        seed=None,
        **kwargs,
    ):
        super().__init__(
            units,
            kernel_initializer=kernel_initializer,
            recurrent_initializer=recurrent_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            recurrent_constraint=recurrent_constraint,
            bias_constraint=bias_constraint,
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
            **kwargs,
        )
        base.check_positive(depth=depth)
        if update not in _UPDATES:
            raise ValueError(f"`update` must be one of {_UPDATES}. Received: update={update!r}")
        self.depth = depth
        self.update = update
        self.share_depth_weights = share_depth_weights
        self.return_memory = return_memory
        self.use_bias = use_bias
        self.unit_forget_bias = unit_forget_bias
        self.state_size = [units] * (2 * depth)
        self.output_size = 2 * units if return_memory else units

    def build(self, input_shape):
        self._check_width(input_shape)
        suffixes = [""] if self.share_depth_weights else [f"_{n + 1}" for n in range(self.depth)]
        self.nodes = [
            [self._lstm_weights(n, direction, suffix) for direction in range(len(_DIRECTIONS))]
            for n, suffix in enumerate(suffixes)
        ]

    def _check_width(self, input_shape):
        if input_shape[-1] not in (self.units, 2 * self.units):
            raise ValueError(
                "The input of a GridLSTMCell is the depth state h1 of its bottom node, so it must "
                f"have units={self.units} channels, or {2 * self.units} for [h1, m1]. Put a "
                f"Dense layer of {self.units} units before it. Received: shape {input_shape}"
            )

    def _lstm_weights(self, n, direction, suffix):
        shape, name = (self.units, 4 * self.units), _DIRECTIONS[direction]

        def kernel(kind, suffix):
            return self.weight(kind, shape, n, direction, name=suffix, fan_in=2 * self.units)

        return [
            kernel("kernel", f"{name}_kernel{suffix}"),
            kernel("recurrent", f"{name}_recurrent_kernel{suffix}"),
            self._bias(n, direction, f"{name}_bias{suffix}") if self.use_bias else None,
        ]

    def _bias(self, n, direction, name):
        usual = [
            base.seeded(self.bias_initializer, self.seed, 2, n, direction, block)
            for block in range(4)
        ]
        forget = keras.initializers.Ones() if self.unit_forget_bias else usual[1]
        return self.add_weight(
            name=name,
            shape=(4 * self.units,),
            initializer=blockwise_initializer(usual[0], forget, *usual[2:]),
            regularizer=self.bias_regularizer,
            constraint=self.bias_constraint,
        )

    def call(self, inputs, states, training=False):
        check_cell_call(self, inputs, states, [self.units, 2 * self.units])
        h1 = inputs[:, : self.units]
        m1 = ops.zeros_like(h1) if inputs.shape[-1] == self.units else inputs[:, self.units :]
        input_mask, state_mask = self.masks(inputs, states[0], training)
        masks = (None if input_mask is None else input_mask[:, : self.units]), state_mask
        new_states = []
        for n in range(self.depth):
            weights = self.nodes[0 if self.share_depth_weights else n]
            (h1, m1), time = self._node(weights, (h1, m1), states[2 * n : 2 * n + 2], masks)
            new_states += time
        return ops.concatenate([h1, m1], axis=-1) if self.return_memory else h1, new_states

    def _node(self, weights, depth, time, masks):
        """(h1', m1') and (h2', m2') from (h1, m1) and (h2, m2)."""
        (h1, m1), (h2, m2) = depth, time
        depth_weights, time_weights = weights
        below, before = drop(h1, masks[0]), drop(h2, masks[1])
        h1, m1 = _lstm(below, before, m1, depth_weights)
        if self.update == "sequential":
            below = drop(h1, masks[0])
        h2, m2 = _lstm(below, before, m2, time_weights)
        return (h1, m1), (h2, m2)

    def get_config(self):
        return {
            **super().get_config(),
            "depth": self.depth,
            "update": self.update,
            "share_depth_weights": self.share_depth_weights,
            "return_memory": self.return_memory,
            "use_bias": self.use_bias,
            "unit_forget_bias": self.unit_forget_bias,
        }


def _lstm(h1, h2, m, weights):
    """Eq. 5 or 6: the new h and m of one direction."""
    kernel, recurrent_kernel, bias = weights
    a = ops.matmul(h1, kernel) + ops.matmul(h2, recurrent_kernel)
    i, f, c, o = ops.split(a if bias is None else a + bias, 4, axis=-1)
    m = ops.sigmoid(f) * m + ops.sigmoid(i) * tanh(c)
    return ops.sigmoid(o) * tanh(m), m
