"""The Lattice Recurrent Unit (Ahuja & Morency 2018), not the Linear Recurrent Unit."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import check_stream
from trellis_keras import kernels
from trellis_keras.kernels.activations import drop, tanh
from trellis_keras.kernels.lattice_loop import lattice_loop
from trellis_keras.kernels.products import matmul
from trellis_keras.kernels.scan import scan
from trellis_keras.layers.checks import check_choice, check_integer, check_positive
from trellis_keras.layers.linear import linear
from trellis_keras.layers.recurrent_cell import UNITS_FOR_XLA, RecurrentCell
from trellis_keras.layers.seeds import seeded, sub_seed
from trellis_keras.layers.stateful import StatefulLayer, check_direction
from trellis_keras.layers.time_steps import zero_masked
from trellis_keras.types import Cache, Initializer, Regularizer, Shape, Shapes, Tensor

# The gates in the order of their column blocks, before those of p1 and p2.
_GATES = {"ug": ("z1", "z2", "r2", "r1"), "rg": ("z2", "r2", "r1"), "ps": ("z2", "r2")}


@keras.saving.register_keras_serializable("trellis_keras")
class LRUCell(RecurrentCell):
    """Cell of a Lattice Recurrent Unit, not of a Linear Recurrent Unit.

    The input h1 comes from the cell below (depth), the state h2 from the previous step (time), and
    the cell has an output for each. The equations of the full LRU, `"ug"`, are

        z1, z2, r1, r2 = sigmoid(h1 W + h2 U + b)         Eqs. 15, 16, 11, 12
        p1 = tanh(h1 W + (r2 * h2) U + b)                 Eq. 13
        p2 = tanh((r1 * h1) W + h2 U + b)                 Eq. 14
        h1' = z1 * p2 + (1 - z1) * h1                     Eq. 17
        h2' = z2 * p1 + (1 - z2) * h2                     Eq. 18

    where each gate and each projected state p has its own blocks W, U and b in `kernel`,
    `recurrent_kernel` and `bias`.

    `"rg"` has one update gate, z1 = z2 (Eqs. 11 to 14), and `"ps"` also one reset gate, r1 = r2
    (Eqs. 7 to 10). For these two Eqs. 9 and 10 are h' = z * h + (1 - z) * p; the authors' code
    computes all variants by Eqs. 17 and 18.

    The column blocks of the weights are z1, z2, r2, r1, p1, p2 (those that the variant has). A cell
    has 12 units^2 + 6 units weights with `"ug"`, 10 and 5 with `"rg"`, 8 and 4 with `"ps"`.

    Reference:

    - [Ahuja & Morency, 2018](https://arxiv.org/abs/1710.02254)

    Args:
        units: Positive integer, number of channels of the state and of the input.
        variant: `"ug"`, `"rg"` or `"ps"`. Defaults to `"ug"`.
        convention: `"paper"`, or `"authors"` for Eqs. 17 and 18 in all variants. Defaults to
            `"paper"`.
        cells_per_node: Positive integer, number of chained cells, each with its own weights and
            reading both outputs of the previous one. Defaults to `1`.
        use_gate_bias: Boolean, whether the gates have biases. (False corresponds to `bias=False` in
            the authors' code.) Defaults to `True`.
        **kwargs: As in `RecurrentCell`. `dropout` drops h1 and `recurrent_dropout` h2 in the matrix
            products, not where they are mixed with p1 and p2.

    Call arguments:
        inputs: h1, a tensor (batch, units).
        states: List of h2, a tensor (batch, units).
        training: Boolean, whether dropout is active. Defaults to `False`.

    `LRU` computes the same function faster. It also repeats outputs at masked steps, as
    Keras documents; on JAX `keras.layers.RNN` repeats the state instead, which differs from this
    cell's output.

    Example:

    >>> layer = keras.layers.RNN([LRUCell(8), LRUCell(8)], return_sequences=True)
    >>> layer(np.zeros((2, 5, 8), "float32")).shape
    (2, 5, 8)
    """

    removed_options = {**RecurrentCell.removed_options, "use_bias": True}

    def __init__(
        self,
        units: int,
        variant: str = "ug",
        *,
        convention: str = "paper",
        cells_per_node: int = 1,
        use_gate_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        check_choice("variant", variant, _GATES)
        check_choice("convention", convention, ("paper", "authors"))
        self.variant = variant
        self.convention = convention
        self.cells_per_node = check_integer("cells_per_node", cells_per_node, 1)
        self.use_gate_bias = use_gate_bias
        self.gates = _GATES[variant]
        # Whether z weights the old state (Eqs. 9 and 10) or the new one (Eqs. 17 and 18).
        self.update_gate_keeps = convention == "paper" and variant != "ug"

    def build(self, input_shape: Shape) -> None:
        if input_shape[-1] != self.units:
            raise ValueError(
                f"The input of a Lattice Recurrent Unit must be as wide as its state: {self.name} "
                f"has units={self.units}. Project the input first, as `LRU` does. Received: "
                f"input_shape={tuple(input_shape)}"
            )
        n_blocks = len(self.gates) + 2
        shape, fan_in = (self.units, n_blocks * self.units), 2 * self.units
        bias_shape = ((n_blocks if self.use_gate_bias else 2) * self.units,)
        self.kernels, self.recurrent_kernels, self.biases = [], [], []
        for n in range(self.cells_per_node):
            end = f"_{n + 1}" if self.cells_per_node > 1 else ""
            kernel = self.add_gate_weight("kernel", shape, n, name=f"kernel{end}", fan_in=fan_in)
            recurrent_kernel = self.add_gate_weight(
                "recurrent", shape, n, name=f"recurrent_kernel{end}", fan_in=fan_in
            )
            self.kernels.append(kernel)
            self.recurrent_kernels.append(recurrent_kernel)
            self.biases.append(self.add_gate_weight("bias", bias_shape, n, name=f"bias{end}"))

    def call(
        self, inputs: Tensor, states: Sequence[Tensor], training: bool = False
    ) -> tuple[Tensor, Tensor | list[Tensor]]:
        is_list = isinstance(states, (list, tuple))
        states = states if is_list else [states]
        masks = self.dropout_masks(inputs, states[0], training)
        h1, h2 = self.advance(inputs, states[0], masks)
        return h1, [h2] if is_list else h2

    def advance(
        self, h1: Tensor, h2: Tensor, masks: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> tuple[Tensor, Tensor]:
        """Returns h1' and h2' (batch, units), following the paper's equations.

        Args:
            h1, h2: Tensors (batch, units).
            masks: Dropout masks (batch, units) of h1 and of h2, or None.
        """
        product = functools.partial(matmul, compute_dtype=self.compute_dtype, dtype=h1.dtype)
        for n in range(self.cells_per_node):
            (W, W1, W2), (U, U1, U2), (b, b1, b2) = map(self._split, self.weights_of(n, h1.dtype))
            x, s = drop(h1, masks[0]), drop(h2, masks[1])
            gates = ops.sigmoid(product(x, W) + product(s, U) + b)
            gate = dict(zip(self.gates, ops.split(gates, len(self.gates), axis=-1), strict=True))
            gate = {"z1": gate["z2"], "r1": gate["r2"]} | gate  # shared unless they exist
            z1, z2, r1, r2 = (gate[name] for name in ("z1", "z2", "r1", "r2"))
            p1 = tanh(product(x, W1) + product(r2 * s, U1) + b1)
            p2 = tanh(product(r1 * x, W2) + product(s, U2) + b2)
            if self.update_gate_keeps:
                h1, h2 = z1 * h1 + (1 - z1) * p2, z2 * h2 + (1 - z2) * p1
            else:
                h1, h2 = z1 * p2 + (1 - z1) * h1, z2 * p1 + (1 - z2) * h2
        return h1, h2

    def weights_of(self, n: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the kernel, recurrent kernel and bias of cell n of the chain.

        Blocks without a bias are zero in it.
        """
        kernel, recurrent_kernel, bias = self.kernels[n], self.recurrent_kernels[n], self.biases[n]
        bias = ops.pad(bias, [[kernel.shape[-1] - bias.shape[0], 0]])
        return tuple(ops.cast(weight, dtype) for weight in (kernel, recurrent_kernel, bias))

    def _split(self, weight):
        """Splits a weight into the columns of the gates, of p1 and of p2."""
        n = len(self.gates) * self.units
        return ops.split(weight, [n, n + self.units], axis=-1)


@keras.saving.register_keras_serializable("trellis_keras")
class LRU(StatefulLayer):
    """Lattice Recurrent Unit of `depth` cells, not the Linear Recurrent Unit.

    It computes the same function as `keras.layers.RNN([LRUCell(units), ...])`: h1 passes up from
    cell to cell, and each cell passes its h2 to the next time step. `LRUCell` has the equations,
    `cells` the weights. Only the products that the next state depends on are computed step by
    step; all others are computed for all steps at once (`kernels.lattice_loop`, for
    `cells_per_node=1`). Inputs without `units` channels first pass through a `Dense` layer.

    Reference:

    - [Ahuja & Morency, 2018](https://arxiv.org/abs/1710.02254)

    Args:
        units: Positive integer, number of channels.
        depth: Positive integer, number of stacked cells. Defaults to `2`.
        variant, convention, cells_per_node, use_gate_bias: See `LRUCell`.
        return_sequences, return_state, go_backwards, stateful: As in `keras.layers.RNN`, but all
            steps are returned by default.
        kernel_initializer, kernel_regularizer, bias_initializer, bias_regularizer: See `LRUCell`.
            They also apply to the projection.
        recurrent_initializer, recurrent_regularizer, recurrent_dropout: See `LRUCell`.
        dropout, seed: See `LRUCell`.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        initial_state: List of `depth` tensors (batch, units), from the bottom up. Defaults to
            `None`, zeros or the carried states of a stateful layer.
        mask: Boolean (batch, time). Masked steps keep the state and repeat the last output (zeros
            before the first), as in Keras' RNN layers.
        training: Boolean, whether dropout is active. Defaults to `False`.

    Returns:
        y (batch, time, units); without `return_sequences`, (batch, units). With `return_state`, a
        tuple of y and the `depth` last states, each (batch, units).

    Example:

    >>> layer = LRU(8, depth=3)
    >>> layer(np.zeros((2, 5, 8), "float32")).shape
    (2, 5, 8)
    """

    removed_options = {**LRUCell.removed_options, "input_projection": None}

    def __init__(
        self,
        units: int,
        depth: int = 2,
        *,
        variant: str = "ug",
        convention: str = "paper",
        cells_per_node: int = 1,
        use_gate_bias: bool = True,
        return_sequences: bool = True,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        kernel_initializer: Initializer = "glorot_uniform",
        recurrent_initializer: Initializer = "glorot_uniform",
        bias_initializer: Initializer = "zeros",
        kernel_regularizer: Regularizer = None,
        recurrent_regularizer: Regularizer = None,
        bias_regularizer: Regularizer = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(stateful=stateful, **kwargs)
        check_direction(stateful, go_backwards)
        units, depth, cells_per_node = check_positive(
            units=units, depth=depth, cells_per_node=cells_per_node
        )
        self.units = units
        self.depth = depth
        self.variant = variant
        self.convention = convention
        self.cells_per_node = cells_per_node
        self.use_gate_bias = use_gate_bias
        self.return_sequences = return_sequences
        self.return_state = return_state
        self.go_backwards = go_backwards
        self.dropout = dropout
        self.recurrent_dropout = recurrent_dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.seed = seed
        self.state_sizes = [units] * depth
        self.cells = [
            LRUCell(
                units,
                variant,
                convention=convention,
                cells_per_node=cells_per_node,
                use_gate_bias=use_gate_bias,
                kernel_initializer=seeded(self.kernel_initializer, seed, "LRU", i, "kernel"),
                recurrent_initializer=seeded(
                    self.recurrent_initializer, seed, "LRU", i, "recurrent"
                ),
                bias_initializer=seeded(self.bias_initializer, seed, "LRU", i, "bias"),
                kernel_regularizer=kernel_regularizer,
                recurrent_regularizer=recurrent_regularizer,
                bias_regularizer=bias_regularizer,
                dropout=dropout,
                recurrent_dropout=recurrent_dropout,
                seed=sub_seed(seed, "LRU", i),
                trainable=self.trainable,
                dtype=self.dtype_policy,
                name=f"cell_{i + 1}",
            )
            for i in range(depth)
        ]
        self.projection: keras.layers.Dense | None = None

    @property
    def prefers_xla(self) -> bool:
        """Whether XLA is faster on a CPU in float32. Models use it for `jit_compile="auto"`.

        XLA saves the copies between small operations, but its matrix products are slower.
        """
        return self.units <= UNITS_FOR_XLA

    def build(self, input_shape: Shape) -> None:
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})
        self.input_channels = input_shape[-1]
        shape = (None, None, self.input_channels)
        if self.input_channels != self.units:
            self.projection = keras.layers.Dense(
                self.units,
                kernel_initializer=seeded(
                    self.kernel_initializer, self.seed, "LRU", "input_projection", "kernel"
                ),
                bias_initializer=seeded(
                    self.bias_initializer, self.seed, "LRU", "input_projection", "bias"
                ),
                kernel_regularizer=self.kernel_regularizer,
                bias_regularizer=self.bias_regularizer,
                trainable=self.trainable,
                dtype=self.dtype_policy,
                name="input_projection",
            )
            self.projection.build(shape)
            shape = (None, None, self.units)
        for cell in self.cells:
            cell.build(shape)
        self.build_states(input_shape[0])

    def run_steps(
        self,
        x: Tensor,
        states: Sequence[Tensor] | None,
        mask: Tensor | None = None,
        training: bool = False,
        last_only: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        x, valid = zero_masked(x, mask), None  # masked values reach neither outputs nor gradients
        if mask is not None:
            valid = ops.transpose(ops.cast(mask, "bool"))[..., None]
        h1 = ops.transpose(self._project(x), (1, 0, 2))
        if states is None:
            states = [ops.zeros_like(h1[0])] * self.depth
        last_states = []
        for cell, h2 in zip(self.cells, states, strict=True):
            is_top = cell is self.cells[-1]
            h1, h2 = self._run_cell(cell, h1, h2, valid, training, last_only and is_top)
            last_states.append(h2)
        y = h1 if valid is None else _repeat_last(h1, valid)
        return ops.cast(ops.transpose(y, (1, 0, 2)), self.compute_dtype), last_states

    def _run_cell(self, cell, h1, h2, valid, training, last_only):
        """Returns h1' of a cell at all steps (time, batch, units), and its last h2."""
        masks = cell.dropout_masks(h1[0], h2, training)
        if kernels.enabled() and cell.cells_per_node == 1:
            return lattice_loop(
                h1,
                h2,
                *cell.weights_of(0, h2.dtype),
                gates=cell.gates,
                update_gate_keeps=cell.update_gate_keeps,
                compute_dtype=cell.compute_dtype,
                valid=valid,
                masks=masks,
                last_only=last_only,
            )

        def step(h2, inputs):
            h1, *valid = inputs
            h1, new = cell.advance(h1, h2, masks)
            return (ops.where(valid[0], new, h2) if valid else new), [h1]

        last, (y,) = scan(step, h2, [h1] if valid is None else [h1, valid])
        return y, last

    def _project(self, inputs):
        x = ops.cast(inputs, self.compute_dtype)
        x = x if self.projection is None else linear(self.projection, x)
        return ops.cast(x, self.state_dtype)

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x, cache = check_stream(self, ops.expand_dims(x, 1), cache)
        h1, states = self._project(x)[:, 0], []
        for cell, h2 in zip(self.cells, cache, strict=True):
            h1, h2 = cell.advance(h1, h2)
            states.append(h2)
        return ops.cast(h1, self.compute_dtype), states

    # Keras

    def compute_output_shape(self, input_shape: Shape) -> Shapes:
        steps = (input_shape[1],) if self.return_sequences else ()
        y = (input_shape[0], *steps, self.units)
        return (y, *[(input_shape[0], self.units)] * self.depth) if self.return_state else y


def _repeat_last(y, valid):
    """Repeats the last valid output at masked steps, with zeros before the first valid one.

    Args:
        y: Tensor (time, batch, units).
        valid: Boolean (time, batch, 1).
    """

    def step(last, inputs):
        y, valid = inputs
        last = ops.where(valid, y, last)
        return last, [last]

    return scan(step, ops.zeros_like(y[0]), [y, valid])[1][0]
