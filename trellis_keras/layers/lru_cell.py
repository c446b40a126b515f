"""The Lattice Recurrent Unit as a cell for `keras.layers.RNN`."""

import keras
from keras import ops

from trellis_keras.layers import base
from trellis_keras.layers.base import check_cell_call, tanh
from trellis_keras.layers.recurrent_cell import RecurrentCell, drop

_GATES = {"ug": ("z1", "z2", "r", "q"), "rg": ("z", "r", "q"), "ps": ("z", "r")}

# Which gate a variant uses in the place of one that it does not have of its own.
_SHARED = {"z1": "z", "z2": "z", "q": "r"}


@keras.saving.register_keras_serializable("trellis_keras")
class LRUCell(RecurrentCell):
    """Cell of a Lattice Recurrent Unit (Ahuja & Morency 2018), not of a Linear Recurrent Unit.

    Its input h1 comes from the cell below (depth), its state h2 from the step before (time), and
    each has an output of its own. With W[a; b] the sum of a `kernel` product of a and a
    `recurrent_kernel` product of b, and a bias,

        z1, z2, r, q = sigmoid(W[h1; h2])
        p1 = tanh(W[h1; r * h2])                     p2 = tanh(W[q * h1; h2])
        h1' = z1 * p2 + (1 - z1) * h1                h2' = z2 * p1 + (1 - z2) * h2

    (Eqs. 11 to 18). This is the full LRU, `"ug"`. `"rg"` has one update gate, z1 = z2 (Eqs. 11 to
    14), `"ps"` one reset gate too, q = r (Eqs. 7 to 10). For these two the paper's Eqs. 9 and 10
    say h' = z * h + (1 - z) * p, while the authors' program has one form for all three.

    The blocks of the weights are the gates in the order above, then p1, p2. A cell has
    12 units^2 + 6 units parameters as `"ug"`, 10 and 5 as `"rg"`, 8 and 4 as `"ps"`.

    Args:
        units: Number of channels, of the input too.
        variant: `"ug"`, `"rg"` or `"ps"`.
        convention: `"paper"`, or `"authors"` for z * p + (1 - z) * h in all variants.
        cells_per_node: How many of these cells, each with its own weights, stand in a chain here:
            the next one takes both outputs of the one before.
        use_bias: Whether there are biases.
        use_gate_bias: Whether the gates have one too. (False is the authors' `bias=False`.)
        kernel_initializer, recurrent_initializer, bias_initializer: Of the weights. Glorot counts
            the rows and the units of one gate `[W; U]`, whatever the number of gates.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Of the weights.
        kernel_constraint, recurrent_constraint, bias_constraint: Of the weights.
        dropout: Rate of h1 where it enters the products (not where it is mixed with p2). One mask
            (batch, units) serves all steps of a sequence.
        recurrent_dropout: The same of h2.
        seed: Integer seed of the dropouts, and of initializers without one.

    Call arguments:
        inputs: h1, a tensor (batch, units).
        states: List of h2, a tensor (batch, units).
        training: Whether dropout is active.

    Returns:
        h1' (batch, units) and the list of h2' (batch, units).

    Raises:
        ValueError: Arguments out of range, an input whose width is not `units`, or states of the
            wrong number or shape.

    `layers.LRU` is the faster layer of the same function. It also repeats outputs in masked steps
    as Keras documents it; `keras.layers.RNN` on JAX repeats the state there, which for this cell is
    not the output.

    Example:

    >>> layer = keras.layers.RNN([LRUCell(8), LRUCell(8)], return_sequences=True)
    >>> layer(np.zeros((2, 5, 8), "float32")).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        units,
        variant="ug",
        *,
        convention="paper",
        cells_per_node=1,
        use_bias=True,
        use_gate_bias=True,
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
        if variant not in _GATES:
            raise ValueError(f"`variant` must be one of {list(_GATES)}. Received: {variant!r}")
        if convention not in ("paper", "authors"):
            raise ValueError(f'`convention` must be "paper" or "authors". Received: {convention!r}')
        base.check_positive(cells_per_node=cells_per_node)
        self.variant = variant
        self.convention = convention
        self.cells_per_node = cells_per_node
        self.use_bias = use_bias
        self.use_gate_bias = use_gate_bias
        self.gates = _GATES[variant]
        self.blocks = (*self.gates, "p1", "p2")
        # Whether z is the part of h that is kept, and not the part that is replaced.
        self.z_keeps = convention == "paper" and variant != "ug"

    def build(self, input_shape):
        if input_shape[-1] != self.units:
            raise ValueError(
                f"The input of a Lattice Recurrent Unit must be as wide as its state: {self.name} "
                f"has units={self.units}. Received: input_shape={tuple(input_shape)}. Project the "
                "input first (`LRU` does so with `input_projection=True`)."
            )
        shape = (self.units, len(self.blocks) * self.units)
        n_biased = len(self.blocks if self.use_gate_bias else ("p1", "p2"))
        self.kernels, self.recurrent_kernels, self.biases = [], [], []
        for n in range(self.cells_per_node):
            end = f"_{n + 1}" if self.cells_per_node > 1 else ""
            fan_in = 2 * self.units
            kernel = self.weight("kernel", shape, n, name=f"kernel{end}", fan_in=fan_in)
            recurrent = self.weight(
                "recurrent", shape, n, name=f"recurrent_kernel{end}", fan_in=fan_in
            )
            self.kernels.append(kernel)
            self.recurrent_kernels.append(recurrent)
            if self.use_bias:
                bias = self.weight("bias", (n_biased * self.units,), n, name=f"bias{end}")
                self.biases.append(bias)

    def call(self, inputs, states, training=False):
        nested = isinstance(states, (list, tuple))
        states = states if nested else [states]
        check_cell_call(self, inputs, states, [self.units])
        h1, h2 = self.advance(inputs, states[0], self.masks(inputs, states[0], training))
        return h1, [h2] if nested else h2

    def advance(self, h1, h2, masks=(None, None), projected=None):
        """One step of all cells of the chain: h1', h2' of h1, h2, each (batch, units).

        Args:
            h1, h2: Tensors (batch, units).
            masks: Dropout masks of h1 and h2, or Nones.
            projected: What h1 and the bias add to the gates and p1 of the first cell, if it has
                been computed.
        """
        for n in range(self.cells_per_node):
            if projected is None:
                projected = self.from_depth(n, drop(h1, masks[0]), *self.gates, "p1")
            h1, h2 = self._advance_one(n, h1, h2, projected, masks)
            projected = None
        return h1, h2

    def _advance_one(self, n, h1, h2, projected, masks):
        x, s = drop(h1, masks[0]), drop(h2, masks[1])
        a, a1 = self.split(projected, self.gates, ("p1",))
        gate = self.by_role(ops.sigmoid(a + self.from_time(n, s, *self.gates)), self.gates)
        p1 = tanh(a1 + self.from_time(n, gate["r"] * s, "p1"))
        p2 = tanh(self.from_depth(n, gate["q"] * x, "p2") + self.from_time(n, s, "p2"))
        return self.mix(gate["z1"], h1, p2), self.mix(gate["z2"], h2, p1)

    def mix(self, z, h, p):
        return z * h + (1 - z) * p if self.z_keeps else z * p + (1 - z) * h

    # The blocks of the weights. `LRU` uses them too, for all steps at once.

    def from_depth(self, n, x, *blocks):
        """What an input x (rows, units) of cell n, and the bias, add to these blocks."""
        y = product(x, self.columns(self.kernels[n], *blocks), self.compute_dtype)
        biased = blocks if self.use_gate_bias else [b for b in blocks if b in ("p1", "p2")]
        if not self.use_bias or not biased:
            return y
        bias = ops.cast(self.biases[n], y.dtype)
        if not self.use_gate_bias:
            bias = ops.concatenate([ops.zeros(len(self.gates) * self.units, y.dtype), bias])
        return y + self.columns(bias, *blocks)

    def from_time(self, n, s, *blocks):
        """What a state s (rows, units) of cell n adds to these blocks."""
        return product(s, self.columns(self.recurrent_kernels[n], *blocks), self.compute_dtype)

    def columns(self, weight, *blocks):
        """The columns of these blocks, side by side."""
        numbers = [self.blocks.index(block) for block in blocks]
        first = numbers[0]
        if numbers == list(range(first, first + len(numbers))):
            return weight[..., first * self.units : (first + len(numbers)) * self.units]
        return ops.concatenate([self.columns(weight, block) for block in blocks], axis=-1)

    def split(self, x, *groups):
        """Splits blocks side by side into groups of blocks."""
        sizes = [len(group) * self.units for group in groups]
        return ops.split(x, [sum(sizes[:i]) for i in range(1, len(sizes))], axis=-1)

    def by_role(self, x, gates):
        """{role: gate} of gates side by side, for all roles that one of them plays."""
        parts = dict(zip(gates, ops.split(x, len(gates), axis=-1), strict=True))
        return parts | {
            role: parts[gate]
            for role, gate in _SHARED.items()
            if role not in self.gates and gate in parts
        }

    # Keras

    def get_initial_state(self, batch_size=None):
        """Returns a zero state (batch, units)."""
        # Not in a list: `keras.layers.RNN.reset_state` fails for stacked cells with lists.
        return super().get_initial_state(batch_size)[0]

    def get_config(self):
        return {
            **super().get_config(),
            "variant": self.variant,
            "convention": self.convention,
            "cells_per_node": self.cells_per_node,
            "use_bias": self.use_bias,
            "use_gate_bias": self.use_gate_bias,
        }


def product(x, weight, dtype):
    """x (rows, in) times weight (in, out), with operands of `dtype` and a result of x's own."""
    return ops.cast(ops.matmul(ops.cast(x, dtype), ops.cast(weight, dtype)), x.dtype)
