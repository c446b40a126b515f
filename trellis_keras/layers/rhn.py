"""The Recurrent Highway Network (Zilly et al. 2017)."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from trellis_keras.kernels.activations import drop, tanh
from trellis_keras.layers.checks import check_integer
from trellis_keras.layers.recurrent_cell import RecurrentCell, block_initializer
from trellis_keras.layers.seeds import seeded
from trellis_keras.types import Initializer, Tensor


@keras.saving.register_keras_serializable("trellis_keras")
class RHNCell(RecurrentCell):
    """Cell of a Recurrent Highway Network (Zilly et al. 2017, section 4).

    Between two time steps the state passes through `transition_depth` highway layers, each with
    its own weights. Only the first reads the input x. With s_0 the old state, for l = 1..L

        h_l = tanh(x W_h [l = 1] + s_{l-1} R_hl + b_hl)
        t_l = sigmoid(x W_t [l = 1] + s_{l-1} R_tl + b_tl)
        s_l = h_l * t_l + s_{l-1} * (1 - t_l)

    and s_L is both the output and the new state.

    The weights are `kernel` (channels, 2 * units), and for each layer l `recurrent_kernel_l`
    (units, 2 * units) and `bias_l` (2 * units), with the blocks h and t. With an input of H
    channels, H units and depth 5 there are 12 H^2 + 10 H of them.

    This cell is a baseline of the LRU paper (Ahuja & Morency 2018, Table 1), with depth 5 and, in
    the authors' code, `transform_bias_initializer="zeros"`.

    Reference:

    - [Zilly et al., 2017](https://arxiv.org/abs/1607.03474)

    Args:
        units: Positive integer, channels of the state and of the output.
        transition_depth: Positive integer, number L of highway layers per step. Defaults to `5`.
        transform_bias_initializer: Initializer of b_t. Defaults to `Constant(-2)`, the RHN authors'
            value for word-level PTB (-4 for characters), with which a new cell mostly carries its
            state.
        **kwargs: As in `RecurrentCell`. As in the RHN authors' code, `recurrent_dropout` drops s in
            the matrix products, with one mask (batch, units) for all steps and layers. The carried
            s is not dropped.

    Example:

    >>> rnn = keras.layers.RNN(RHNCell(4, transition_depth=3), return_sequences=True)
    >>> rnn(np.zeros((2, 7, 5), "float32")).shape
    (2, 7, 4)
    """

    removed_options = {**RecurrentCell.removed_options, "carry": "coupled", "use_bias": True}

    def __init__(
        self,
        units: int,
        transition_depth: int = 5,
        *,
        transform_bias_initializer: Initializer = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        self.transition_depth = check_integer("transition_depth", transition_depth, 1)
        if transform_bias_initializer is None:
            transform_bias_initializer = keras.initializers.Constant(-2.0)
        self.transform_bias_initializer = keras.initializers.get(transform_bias_initializer)

    def build(self, input_shape: Sequence[int]) -> None:
        channels, columns = input_shape[-1], 2 * self.units
        fan_in = channels + self.units  # of the first layer; others have no input
        self.kernel = self.add_gate_weight("kernel", (channels, columns), fan_in=fan_in)
        self.recurrent_kernels, self.biases = [], []
        for i in range(1, self.transition_depth + 1):
            recurrent_kernel = self.add_gate_weight(
                "recurrent",
                (self.units, columns),
                i,
                name=f"recurrent_kernel_{i}",
                fan_in=fan_in if i == 1 else None,
            )
            self.recurrent_kernels.append(recurrent_kernel)
        for i in range(1, self.transition_depth + 1):
            bias = self.add_gate_weight(
                "bias", (columns,), name=f"bias_{i}", initializer=self._initial_bias(i)
            )
            self.biases.append(bias)

    def _initial_bias(self, i):
        path = self.seed, "RHNCell", "bias", i
        return block_initializer(
            seeded(self.bias_initializer, *path, "h"),
            seeded(self.transform_bias_initializer, *path, "t"),
        )

    def call(
        self, inputs: Tensor, states: Sequence[Tensor], training: bool = False
    ) -> tuple[Tensor, Tensor | list[Tensor]]:
        is_list = isinstance(states, (list, tuple))
        states = states if is_list else [states]
        s = states[0]
        input_mask, state_mask = self.dropout_masks(inputs, s, training)
        x = ops.matmul(drop(inputs, input_mask), self.kernel)
        for i in range(self.transition_depth):
            a = ops.matmul(drop(s, state_mask), self.recurrent_kernels[i])
            a = a + x if i == 0 else a
            h, t = ops.split(a + self.biases[i], 2, axis=-1)
            t = ops.sigmoid(t)
            s = tanh(h) * t + s * (1 - t)
        return s, [s] if is_list else s
