"""The Recurrent Highway Network as a Keras RNN cell."""

import keras
from keras import ops

from trellis_keras.layers import base
from trellis_keras.layers.base import blockwise_initializer, check_cell_call, tanh
from trellis_keras.layers.recurrent_cell import RecurrentCell, drop

_CARRIES = ("coupled", "independent")


@keras.saving.register_keras_serializable("trellis_keras")
class RHNCell(RecurrentCell):
    """Cell of a Recurrent Highway Network (Zilly et al. 2017, section 4).

    Between two time steps the state passes `transition_depth` highway layers, each with its own
    weights. The input x enters the first of them only. With s_0 the old state, for l = 1..L

        h_l = tanh(x W_h [l = 1] + s_{l-1} R_hl + b_hl)
        t_l = sigmoid(x W_t [l = 1] + s_{l-1} R_tl + b_tl)
        s_l = h_l * t_l + s_{l-1} * (1 - t_l)

    and s_L is both the output and the new state. With `carry="independent"` a gate c_l of the
    form of t_l takes the place of 1 - t_l.

    Weights: `kernel` (channels, blocks), and `recurrent_kernel_l` (units, blocks) and `bias_l`
    (blocks) of layer l, with the blocks h, t and, if it is independent, c. With an input as wide
    as the state these are 12 H^2 + 10 H numbers for H units, depth 5 and the coupled gate.

    The Lattice Recurrent Unit's authors compare with this cell (Ahuja & Morency 2018, Table 1):
    coupled, depth 5, and in their program `transform_bias_initializer="zeros"`.

    Args:
        units: Number of channels of the state and of the output.
        transition_depth: Number L of highway layers in a step.
        carry: `"coupled"` (the carry gate is 1 - t) or `"independent"`.
        use_bias: Whether there are biases.
        transform_bias_initializer: Of b_t. Default: -2, as the RHN authors start with on word PTB
            (-4 on characters), so that a new cell mostly carries its state. The independent carry
            gate's bias starts at minus what this initializer gives: sigmoid(-b) is 1 - sigmoid(b).
        kernel_initializer, recurrent_initializer, bias_initializer: Of W, R and b_h. Glorot counts
            the rows and the units of one gate `[W; U]`, whatever the number of gates.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Of the weights.
        kernel_constraint, recurrent_constraint, bias_constraint: Of the weights.
        dropout: Rate of the inputs. One mask (batch, channels) serves all steps of a sequence.
        recurrent_dropout: Rate of s where it enters the products, with one mask (batch, units) for
            all steps and layers, as in the RHN authors' program. The s that is carried is whole.
        seed: Integer seed of the dropouts, and of initializers without one.

    Call arguments:
        inputs: Tensor (batch, channels).
        states: List of s_0, a tensor (batch, units).
        training: Whether dropout is active.

    Returns:
        The output s_L (batch, units), and the list of the new state, which is s_L too.

    Raises:
        ValueError: An argument out of range, inputs of another width than the cell was built for,
            or states of the wrong number or shape.

    Example:

    >>> rnn = keras.layers.RNN(RHNCell(4, transition_depth=3), return_sequences=True)
    >>> rnn(np.zeros((2, 7, 5), "float32")).shape
    (2, 7, 4)
    """

    def __init__(
        self,
        units,
        transition_depth=5,
        *,
        carry="coupled",
        use_bias=True,
        transform_bias_initializer=None,
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
        base.check_positive(transition_depth=transition_depth)
        if carry not in _CARRIES:
            raise ValueError(f"`carry` must be one of {_CARRIES}. Received: carry={carry!r}")
        self.transition_depth = transition_depth
        self.carry = carry
        self.use_bias = use_bias
        usual = keras.initializers.Constant(-2.0)
        self.transform_bias_initializer = keras.initializers.get(
            usual if transform_bias_initializer is None else transform_bias_initializer
        )

    def build(self, input_shape):
        self.input_width = input_shape[-1]
        blocks = (2 if self.carry == "coupled" else 3) * self.units
        layers = range(1, self.transition_depth + 1)
        fan_in = self.input_width + self.units  # of the first layer; the others have no input
        self.kernel = self.weight("kernel", (self.input_width, blocks), fan_in=fan_in)
        self.recurrent_kernels = [
            self.weight(
                "recurrent",
                (self.units, blocks),
                layer,
                name=f"recurrent_kernel_{layer}",
                fan_in=fan_in if layer == 1 else None,
            )
            for layer in layers
        ]
        self.biases = [self._bias(blocks, layer) for layer in layers] if self.use_bias else []

    def _bias(self, blocks, layer):
        def seeded(initializer, block):
            return base.seeded(initializer, self.seed, 2, layer, block)

        transform, carry = (seeded(self.transform_bias_initializer, block) for block in (1, 2))
        initial = [seeded(self.bias_initializer, 0), transform]
        if self.carry == "independent":
            initial.append(lambda shape, dtype=None: -carry(shape, dtype=dtype))
        return self.add_weight(
            name=f"bias_{layer}",
            shape=(blocks,),
            initializer=blockwise_initializer(*initial),
            regularizer=self.bias_regularizer,
            constraint=self.bias_constraint,
        )

    def call(self, inputs, states, training=False):
        nested = isinstance(states, (list, tuple))
        states = states if nested else [states]
        check_cell_call(self, inputs, states, [self.input_width])
        s = states[0]
        input_mask, state_mask = self.masks(inputs, s, training)
        x = ops.matmul(drop(inputs, input_mask), self.kernel)
        for n, recurrent_kernel in enumerate(self.recurrent_kernels):
            a = ops.matmul(drop(s, state_mask), recurrent_kernel)
            a = a + x if n == 0 else a
            a = a + self.biases[n] if self.use_bias else a
            s = self._highway(a, s)
        return s, [s] if nested else s

    def _highway(self, a, s):
        if self.carry == "coupled":
            h, t = ops.split(a, 2, axis=-1)
            t = ops.sigmoid(t)
            return tanh(h) * t + s * (1 - t)
        h, t, c = ops.split(a, 3, axis=-1)
        return tanh(h) * ops.sigmoid(t) + s * ops.sigmoid(c)

    def get_config(self):
        return {
            **super().get_config(),
            "transition_depth": self.transition_depth,
            "carry": self.carry,
            "use_bias": self.use_bias,
            "transform_bias_initializer": keras.initializers.serialize(
                self.transform_bias_initializer
            ),
        }
