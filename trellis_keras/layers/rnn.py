"""The papers' recurrent baselines: RHN and Grid-LSTM cells, and stacks of Keras' recurrent layers.

`RecurrentCell` is the base class of the cells for `keras.layers.RNN`, including `LRUCell`.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.parts import RATES_LOCK, cell_step, take, without_dropout
from keras_streams.protocol import at_least_float32, check_shape, check_start, check_stream
from trellis_keras import kernels
from trellis_keras._keras_internals import DropoutRNNCell
from trellis_keras.kernels import recurrent_loop
from trellis_keras.kernels.activations import tanh
from trellis_keras.layers.checks import (
    check_has_steps,
    check_positive,
    sequence_spec,
    without_removed,
)
from trellis_keras.layers.masks import last_step, resolve_mask
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.seeds import seeded, sub_seed
from trellis_keras.layers.stateful import StatefulLayer
from trellis_keras.types import Cache, Initializer, Regularizer, Shape, Shapes, Tensor

_KINDS = ("kernel", "recurrent", "bias")


@keras.saving.register_keras_serializable("trellis_keras")
class GateInitializer(keras.initializers.Initializer):
    """Initializes each gate of a recurrent kernel as a separate matrix.

    A cell concatenates the kernels of its gates, `(rows, gates * units)`. If they were
    initialized as one matrix, the Glorot fan-out would count all gates, and cells with more
    gates would start with smaller weights. Here each gate is a matrix `[W; U]` of shape `(fan_in,
    units)`: `kernel` holds its first rows and `recurrent_kernel` the others.

    Args:
        initializer: Keras initializer of one gate. With a seed, each gate draws different numbers.
        gates: Positive integer, number of gates.
        fan_in: Positive integer, number of rows of a gate's full matrix. Only initializers that
            scale with it (`keras.initializers.VarianceScaling`, hence Glorot, He and LeCun) use it.
            Defaults to the number of rows of the kernel.

    Raises:
        ValueError: `gates` is not a positive integer.

    Example:

    >>> kernel = GateInitializer("glorot_uniform", gates=4, fan_in=128)((64, 256))
    >>> bool(abs(np.std(kernel) - np.sqrt(2 / (128 + 64))) < 0.005)
    True
    """

    def __init__(self, initializer: Initializer, gates: int, fan_in: int | None = None):
        check_positive(gates=gates)
        self.initializer = keras.initializers.get(initializer)
        self.gates = gates
        self.fan_in = fan_in

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        rows, columns = shape
        scales = isinstance(self.initializer, keras.initializers.VarianceScaling)
        gate_shape = (self.fan_in or rows) if scales else rows, columns // self.gates
        gates = [
            seeded(self.initializer, None, i)(gate_shape, dtype=dtype)[:rows]
            for i in range(self.gates)
        ]
        return ops.concatenate(gates, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "gates": self.gates,
            "fan_in": self.fan_in,
        }


def _blockwise(*initializers):
    """Returns the initializer of a bias made of equal blocks, with one initializer per block."""

    def initial(shape, dtype=None):
        units = shape[0] // len(initializers)
        return ops.concatenate([block((units,), dtype=dtype) for block in initializers])

    return initial


class RecurrentCell(DropoutRNNCell, keras.layers.Layer):
    """Base class of cells for `keras.layers.RNN`.

    A subclass creates its weights with `add_gate_weight` in `build`, and gets its dropout masks
    from `dropout_masks` in `call(inputs, states, training=False)`. With several states it sets
    `state_size` to a list; `recurrent_dropout` then acts on the first state. `output_size` is
    `units` unless the subclass sets it.

    A dropout mask (batch, channels) is drawn once per sequence, outside the time loop, and only
    during training: unlike Keras' cells, these neither advance a seed nor add random operations to
    an inference graph. A cell called on its own draws new masks in each call.

    Args:
        units: Positive integer, number of channels.
        kernel_initializer: Initializer of the input part W of each gate's matrix `[W; U]`, see
            `GateInitializer`. Defaults to `"glorot_uniform"`.
        recurrent_initializer: Initializer of the recurrent part U. Defaults to
            `"glorot_uniform"`.
        bias_initializer: Initializer of the biases. Defaults to `"zeros"`.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Regularizers of the weights.
            Defaults to None.
        dropout: Float in [0, 1), dropout rate of the inputs. Defaults to 0.
        recurrent_dropout: Float in [0, 1), dropout rate of the (first) state. Defaults to 0.
        seed: Integer seed of the dropouts, and of initializers without a seed. Defaults to None.

    Raises:
        ValueError: `units` not positive, or a rate outside [0, 1).
    """

    def __init__(
        self,
        units: int,
        *,
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
        super().__init__(**kwargs)
        (units,) = check_positive(units=units)
        for name, rate in (("dropout", dropout), ("recurrent_dropout", recurrent_dropout)):
            if not 0 <= rate < 1:
                raise ValueError(f"`{name}` must be in [0, 1). Received: {name}={rate}")
        self.units = units
        self.state_size: int | list[int] = units
        self.output_size = units
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.dropout = dropout
        self.recurrent_dropout = recurrent_dropout
        self.seed = seed
        policy = self.dtype_policy
        input_seed, state_seed = (
            sub_seed(seed, "RecurrentCell", name) for name in ("dropout", "recurrent_dropout")
        )
        self.input_dropout = _CellDropout(dropout, input_seed, dtype=policy)
        self.state_dropout = _CellDropout(recurrent_dropout, state_seed, dtype=policy)
        self.reset_dropout_mask()
        self.reset_recurrent_dropout_mask()

    def add_gate_weight(
        self,
        kind: str,
        shape: tuple[int, ...],
        *part: int,
        name: str | None = None,
        fan_in: int | None = None,
        initializer: Initializer = None,
    ) -> keras.Variable:
        """Adds a weight with the initializer and regularizer of its kind.

        Args:
            kind: `"kernel"`, `"recurrent"` or `"bias"`.
            shape: Shape of the weight.
            *part: Integers that identify the weight among those of its kind, so that each draws
                different numbers from the same seed.
            name: Name of the weight. Defaults to the kind.
            fan_in: For a kernel, the number of rows that feed a gate, see `GateInitializer`.
            initializer: Overrides the initializer of the kind.
        """
        if initializer is None:
            initializer = getattr(self, f"{kind}_initializer")
            initializer = seeded(initializer, self.seed, "RecurrentCell", kind, *part)
            if kind != "bias":
                initializer = GateInitializer(initializer, shape[1] // self.units, fan_in)
        return self.add_weight(
            name=name or kind,
            shape=shape,
            initializer=initializer,
            regularizer=getattr(self, f"{kind}_regularizer"),
        )

    def _check_call(self, inputs, states, widths):
        """Raises ValueError unless the inputs have one of these widths and the states match."""
        if len(inputs.shape) != 2 or inputs.shape[-1] not in widths:
            expected = " or ".join(f"(batch, {width})" for width in widths)
            raise ValueError(
                f"The inputs of {self.name} must have shape {expected}. "
                f"Received: shape {tuple(inputs.shape)}"
            )
        sizes = keras.tree.flatten(self.state_size)
        if not isinstance(states, (list, tuple)) or len(states) != len(sizes):
            received = len(states) if isinstance(states, (list, tuple)) else type(states).__name__
            raise ValueError(
                f"{self.name} needs a list of states of the sizes {sizes}. Received: {received}"
            )
        for i, (state, size) in enumerate(zip(states, sizes, strict=True)):
            check_shape(f"states[{i}]", state, (inputs.shape[0], size))

    # `keras.layers.RNN` calls these two before its loop, and resets the masks after it.

    def get_dropout_mask(self, step_input: Tensor) -> Tensor | None:
        self._dropout_mask = self.input_dropout(step_input)
        return self._dropout_mask

    def get_recurrent_dropout_mask(self, step_input: Tensor) -> Tensor | None:
        self._recurrent_dropout_mask = self.state_dropout(step_input)
        return self._recurrent_dropout_mask

    def dropout_masks(
        self, inputs: Tensor, state: Tensor, training: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the masks of the inputs and of the state, each None if nothing is dropped.

        An RNN layer draws them before its loop. Outside an RNN layer, each call draws new masks.
        """
        if not training:
            return None, None
        masks = self._dropout_mask, self._recurrent_dropout_mask
        layers = (self.input_dropout, inputs), (self.state_dropout, state)
        return tuple(
            layer(like, training=True) if mask is None else mask
            for mask, (layer, like) in zip(masks, layers, strict=True)
        )

    def get_initial_state(self, batch_size: int | None = None) -> Tensor | list[Tensor]:
        """Returns zero states: a tensor (batch, units), or a list of them."""
        # A single state is not in a list: `keras.layers.RNN.reset_state` fails for stacked cells
        # with lists.
        if isinstance(self.state_size, int):
            return ops.zeros((batch_size, self.state_size), self.compute_dtype)
        return [ops.zeros((batch_size, size), self.compute_dtype) for size in self.state_size]

    def get_config(self) -> dict[str, Any]:
        config = {**super().get_config(), "units": self.units, "seed": self.seed}
        for kind in _KINDS:
            for module in ("initializer", "regularizer"):
                serialize = getattr(keras, f"{module}s").serialize
                config[f"{kind}_{module}"] = serialize(getattr(self, f"{kind}_{module}"))
        return {**config, "dropout": self.dropout, "recurrent_dropout": self.recurrent_dropout}

    # The former defaults of removed options, see `without_removed`.
    _REMOVED: dict[str, Any] = dict.fromkeys(f"{kind}_constraint" for kind in _KINDS)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RecurrentCell":
        return super().from_config(without_removed(config, **cls._REMOVED))


class _CellDropout(VariationalDropout):
    """Returns a dropout mask of the shape of its input: ones in inference, None at rate 0.

    It is a layer because Keras passes `training` on to nested layers, whereas `keras.layers.RNN`
    requests masks at inference as well, without telling the cell.
    """

    def call(self, inputs, training=None):
        if self.rate == 0:
            return None
        # None if an RNN's `call` was called directly. The mask is then not used at inference.
        if training is None or training:
            return self.draw(ops.shape(inputs))
        return ops.ones_like(inputs)


def drop(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x times a dropout mask, or x if the mask is None."""
    return x if mask is None else x * ops.cast(mask, x.dtype)


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

    Args:
        units: Positive integer, channels of the state and of the output.
        transition_depth: Positive integer, number L of highway layers per step. Defaults to 5.
        transform_bias_initializer: Initializer of b_t. Defaults to -2, the RHN authors' value for
            word-level PTB (-4 for characters), with which a new cell mostly carries its state.
        **kwargs: Arguments of `RecurrentCell` (initializers, regularizers, `dropout`,
            `recurrent_dropout`, `seed`) and of `keras.layers.Layer`. As in the RHN authors' code,
            `recurrent_dropout` drops s in the matrix products, with one mask (batch, units) for all
            steps and layers. The carried s is not dropped.

    Call arguments:
        inputs: Tensor (batch, channels).
        states: List of s_0, a tensor (batch, units).
        training: Whether dropout is active. Defaults to False.

    Returns:
        The output s_L (batch, units), and the list of the new state, also s_L.

    Raises:
        ValueError: An argument out of range, or inputs or states whose shape does not match.

    Example:

    >>> rnn = keras.layers.RNN(RHNCell(4, transition_depth=3), return_sequences=True)
    >>> rnn(np.zeros((2, 7, 5), "float32")).shape
    (2, 7, 4)
    """

    def __init__(
        self,
        units: int,
        transition_depth: int = 5,
        *,
        transform_bias_initializer: Initializer = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        (transition_depth,) = check_positive(transition_depth=transition_depth)
        self.transition_depth = transition_depth
        if transform_bias_initializer is None:
            transform_bias_initializer = keras.initializers.Constant(-2.0)
        self.transform_bias_initializer = keras.initializers.get(transform_bias_initializer)

    def build(self, input_shape: Sequence[int]) -> None:
        self.input_channels = input_shape[-1]
        columns = 2 * self.units
        fan_in = self.input_channels + self.units  # of the first layer; others have no input
        self.kernel = self.add_gate_weight("kernel", (self.input_channels, columns), fan_in=fan_in)
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
        return _blockwise(
            seeded(self.bias_initializer, *path, "h"),
            seeded(self.transform_bias_initializer, *path, "t"),
        )

    def call(
        self, inputs: Tensor, states: Sequence[Tensor], training: bool = False
    ) -> tuple[Tensor, Tensor | list[Tensor]]:
        is_list = isinstance(states, (list, tuple))
        states = states if is_list else [states]
        self._check_call(inputs, states, [self.input_channels])
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

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "transition_depth": self.transition_depth,
            "transform_bias_initializer": keras.initializers.serialize(
                self.transform_bias_initializer
            ),
        }

    _REMOVED = {**RecurrentCell._REMOVED, "carry": "coupled", "use_bias": True}


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
    not shared, each node l has its own, with the suffix `_l`. With H units there are 16 H^2 + 8 H
    of them.

    Args:
        units: Positive integer, channels of every h and every m. The input must have the same
            number of channels, since it is the h1 of the bottom node. (Put a `Dense` or
            `Embedding` layer before the cell.)
        depth: Positive integer, number of nodes. Defaults to 1.
        update: `"parallel"` for the equations above, or `"sequential"` for the LRU authors' code,
            where the time LSTM reads h1' instead of h1. Defaults to `"parallel"`.
        share_depth_weights: Whether the nodes of the column share their weights (the "tied"
            Grid-LSTM, and footnote 3 of Ahuja & Morency; their code does not). Defaults to True.
        return_memory: Whether to output [h1', m1'] of the top node (2 * units channels) instead
            of h1'. A `GridLSTMCell` above accepts it: an input of 2 * units channels is [h1, m1] of
            its bottom node. Defaults to False.
        unit_forget_bias: Whether the biases of forget gates start at 1, as in
            `keras.layers.LSTMCell`. Defaults to True.
        **kwargs: Arguments of `RecurrentCell` (initializers, regularizers, `dropout`,
            `recurrent_dropout`, `seed`) and of `keras.layers.Layer`. `dropout` drops h1 (and h1')
            in the matrix products, `recurrent_dropout` h2, each with one mask (batch, units) for
            all nodes and steps. Memories are not dropped.

    Call arguments:
        inputs: Tensor (batch, units), or (batch, 2 * units).
        states: List of 2 * depth tensors (batch, units): h2, m2 of the bottom node, then of the
            node above it, and so on.
        training: Whether dropout is active. Defaults to False.

    Returns:
        The output (batch, units), or (batch, 2 * units), and the list of the new states.

    Raises:
        ValueError: An argument out of range, or inputs or states whose shape does not match.

    At masked steps `keras.layers.RNN` repeats the previous output, except on JAX, where
    it returns the first state instead. The output of this cell is not one of its states, so on JAX
    use `zero_output_for_mask=True` and read the outputs at the valid steps.

    Example:

    >>> rnn = keras.layers.RNN(GridLSTMCell(4, depth=2), return_state=True)
    >>> y, *states = rnn(np.zeros((2, 7, 4), "float32"))
    >>> y.shape, len(states)
    ((2, 4), 4)
    """

    def __init__(
        self,
        units: int,
        depth: int = 1,
        *,
        update: str = "parallel",
        share_depth_weights: bool = True,
        return_memory: bool = False,
        unit_forget_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, **kwargs)
        units, depth = check_positive(units=units, depth=depth)
        if update not in ("parallel", "sequential"):
            raise ValueError(f'`update` must be "parallel" or "sequential". Received: {update=}')
        self.depth = depth
        self.update = update
        self.share_depth_weights = share_depth_weights
        self.return_memory = return_memory
        self.unit_forget_bias = unit_forget_bias
        self.state_size = [units] * (2 * depth)
        self.output_size = 2 * units if return_memory else units

    def build(self, input_shape: Shape) -> None:
        if input_shape[-1] not in (self.units, 2 * self.units):
            raise ValueError(
                "The input of a GridLSTMCell is the depth state h1 of its bottom node, so it must "
                f"have units={self.units} channels, or {2 * self.units} for [h1, m1]. Put a "
                f"Dense layer of {self.units} units before it. Received: shape {input_shape}"
            )
        suffixes = [""] if self.share_depth_weights else [f"_{n + 1}" for n in range(self.depth)]
        self.nodes = [
            [
                self._lstm_weights(n, direction, name, suffix)
                for direction, name in enumerate(("depth", "time"))
            ]
            for n, suffix in enumerate(suffixes)
        ]

    def _lstm_weights(self, n, direction, name, suffix):
        shape, fan_in = (self.units, 4 * self.units), 2 * self.units
        kernel, recurrent_kernel = (
            self.add_gate_weight(
                kind, shape, n, direction, name=f"{name}_{weight}{suffix}", fan_in=fan_in
            )
            for kind, weight in (("kernel", "kernel"), ("recurrent", "recurrent_kernel"))
        )
        blocks = [
            seeded(self.bias_initializer, self.seed, "GridLSTMCell", "bias", n, direction, block)
            for block in range(4)
        ]
        if self.unit_forget_bias:
            blocks[1] = keras.initializers.Ones()
        bias = self.add_gate_weight(
            "bias", (4 * self.units,), name=f"{name}_bias{suffix}", initializer=_blockwise(*blocks)
        )
        return kernel, recurrent_kernel, bias

    def call(
        self, inputs: Tensor, states: Sequence[Tensor], training: bool = False
    ) -> tuple[Tensor, Tensor | list[Tensor]]:
        self._check_call(inputs, states, [self.units, 2 * self.units])
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

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "depth": self.depth,
            "update": self.update,
            "share_depth_weights": self.share_depth_weights,
            "return_memory": self.return_memory,
            "unit_forget_bias": self.unit_forget_bias,
        }

    _REMOVED = {**RecurrentCell._REMOVED, "use_bias": True}


def _lstm(h1, h2, m, kernel, recurrent_kernel, bias):
    """The new h and m of an LSTM."""
    a = ops.matmul(h1, kernel) + ops.matmul(h2, recurrent_kernel) + bias
    i, f, c, o = ops.split(a, 4, axis=-1)
    m = ops.sigmoid(f) * m + ops.sigmoid(i) * tanh(c)
    return ops.sigmoid(o) * tanh(m), m


# The layers allowed between recurrent layers. (Keras' SpatialDropout1D and this package's Dropout
# are Dropouts.)
DROPOUTS = (keras.layers.Dropout, VariationalDropout)
# Measured with LRUs: XLA takes 0.83, 0.97, 1.04 of the time at 256, 512, 640 units.
UNITS_FOR_XLA = 512


@keras.saving.register_keras_serializable("trellis_keras")
class StackedRNN(StatefulLayer):
    """A stack of Keras' recurrent layers that carries its states and streams as one layer.

    With `stateful=True` the last states of a batch are the initial states of the next one, with the
    gradient stopped: truncated backpropagation through time. Training and evaluation have separate
    states, whereas Keras' `stateful=True` layers share one. Inference draws no random numbers,
    whereas Keras' cells draw their dropout masks even then. On a CPU, LSTM, GRU and SimpleRNN with
    their default activations, and without active dropout in the cell, run in a loop of this
    package, which keeps the states in float32 at least; under `kernels.disabled()` in Keras' own.

    Args:
        layers: List of `keras.layers.LSTM`, `GRU`, `SimpleRNN` or `RNN` (of one cell or several),
            from the input up, each with `return_sequences=True` and `return_state=True`. Dropout
            layers are allowed between them.
        return_sequences: Whether to return all steps, or only the last one (with a mask, the last
            valid step of each row; zeros for a row without any). Defaults to True.
        return_state: Whether to also return the last states. Defaults to False.
        stateful: Whether the last states of a batch are the initial states of the next one. The
            first batch starts from zeros. Defaults to False.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        initial_state: Flat list of states, each (batch, size), from the bottom layer up, in each
            layer's order (LSTM: h, c). Defaults to the layers' initial states (zeros), or to the
            carried states of a stateful layer.
        training: Whether dropout is active. Defaults to False.
        mask: Boolean (batch, time). Masked steps leave the states unchanged.

    Returns:
        y (batch, time, channels of the last layer); without `return_sequences`, (batch, channels).
        With `return_state`, a tuple of y and the states.

    Raises:
        ValueError: An unsupported layer or layer option, or states of the wrong number or shape.

    Example:

    >>> options = {"return_sequences": True, "return_state": True}
    >>> lower, upper = keras.layers.LSTM(8, **options), keras.layers.GRU(6, **options)
    >>> layer = StackedRNN([lower, keras.layers.Dropout(0.3), upper])
    >>> layer(np.zeros((2, 7, 3), "float32")).shape
    (2, 7, 6)
    >>> layer.state_sizes
    [8, 8, 6]
    """

    def __init__(
        self,
        layers: Sequence[keras.Layer],
        *,
        return_sequences: bool = True,
        return_state: bool = False,
        stateful: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(stateful=stateful, **kwargs)
        _check_layers(layers)
        self.layers = list(layers)
        _disable_cudnn_in_half_precision(self.layers)
        self.return_sequences = return_sequences
        self.return_state = return_state
        self.state_sizes = keras.tree.flatten([layer.state_size for layer in self._recurrent])

    @property
    def prefers_xla(self) -> bool:
        """Whether XLA makes the layer faster on a CPU in float32.

        It does not for wide layers of Keras, and not for those that run in Keras' own loop.
        """
        return all(
            isinstance(layer.cell, RecurrentCell)
            or (recurrent_loop.supports(layer) and layer.cell.units <= UNITS_FOR_XLA)
            for layer in self._recurrent
        )

    @property
    def _recurrent(self):
        return [layer for layer in self.layers if not isinstance(layer, DROPOUTS)]

    @property
    def _cells(self):
        return [layer.cell for layer in self._recurrent]

    def build(self, input_shape: Shape) -> None:
        self.input_spec = sequence_spec(self, input_shape)
        self.input_channels = input_shape[-1]
        shape = (None, None, self.input_channels)
        for layer in self.layers:
            if not layer.built:
                layer.build(shape)
            shape = _output_shape(layer, shape)
        self.build_states(input_shape[0])

    def call(
        self,
        inputs: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        training: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        check_has_steps(self, inputs)
        training, mask = bool(training), resolve_mask(inputs, mask)
        states = self.initial_states(ops.shape(inputs)[0], initial_state, training)
        y, states = self._forward(inputs, states, training, mask)
        self.carry_states(states, training)
        if not self.return_sequences:
            y = last_step([y], None, mask)[0]
        return (y, *states) if self.return_state else y

    def _forward(self, x, states, training=False, mask=None):
        """Returns the outputs of all steps and the last states. `states` may be None."""
        x, remaining, last = ops.cast(x, self.compute_dtype), iter(states or []), []
        if mask is not None:
            # Masked values, NaN included, reach neither outputs nor gradients.
            x = ops.where(ops.cast(mask, "bool")[..., None], x, ops.zeros_like(x))
        with RATES_LOCK if training else without_dropout(self._cells), _float64_tanh(self._cells):
            for layer in self.layers:
                if isinstance(layer, DROPOUTS):
                    x = layer(x, training=training)
                    continue
                initial = None if states is None else take(layer.state_size, remaining)
                x, *new = self._run_layer(layer, x, initial, training, mask)
                last += keras.tree.flatten(new)
        last = [ops.cast(state, self.state_dtype) for state in last]
        return ops.cast(x, self.compute_dtype), last

    def _run_layer(self, layer, x, states, training, mask):
        """Returns the outputs of a recurrent layer at all steps, and its last states."""
        if not (kernels.enabled() and recurrent_loop.supports(layer)):
            return layer(x, initial_state=states, mask=mask, training=training)
        if states is None:
            states = layer.get_initial_state(ops.shape(x)[0])
        states = _at_least_float32(layer.cell, states)
        y, states = recurrent_loop.recurrent_loop(layer.cell, x, states, mask, training)
        return ops.cast(y, layer.compute_dtype), *states

    # Streaming

    def initial_cache(
        self, batch_size: int, initial_state: Sequence[Tensor] | None = None
    ) -> Cache:
        """Returns the cache before the first step: the flat list of states.

        Args:
            batch_size: Number of rows.
            initial_state: As in the call. Defaults to the layers' initial states (zeros).

        Raises:
            ValueError: The layer is not built, or states of the wrong number or shape.

        Example:

        >>> gru = keras.layers.GRU(6, return_sequences=True, return_state=True)
        >>> layer = StackedRNN([gru])
        >>> layer.build((None, None, 3))
        >>> y, cache = layer.step(np.zeros((2, 3), "float32"), layer.initial_cache(2))
        >>> tuple(y.shape)
        (2, 6)
        """
        check_start(self, batch_size)
        if initial_state is not None:
            return self.given_states(initial_state, batch_size)
        states = [layer.get_initial_state(batch_size) for layer in self._recurrent]
        return [ops.cast(state, self.state_dtype) for state in keras.tree.flatten(states)]

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x, cache = check_stream(self, ops.expand_dims(x, 1), cache)
        x, remaining, last = x[:, 0], iter(cache), []
        with without_dropout(self._cells), _float64_tanh(self._cells):
            for layer in self._recurrent:
                states = take(layer.state_size, remaining)
                if kernels.enabled() and recurrent_loop.supports(layer):
                    states = _at_least_float32(layer.cell, states)
                    x, new = recurrent_loop.recurrent_step(layer.cell, x, states)
                else:
                    x, new = cell_step(layer.cell, x, states)
                x = ops.cast(x, layer.compute_dtype)
                last += keras.tree.flatten(new)
        last = [ops.cast(state, self.state_dtype) for state in last]
        return ops.cast(x, self.compute_dtype), last

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        x, cache = check_stream(self, x, cache)
        return self._forward(x, cache)

    def cache_shapes(self, batch_size: int | None) -> list:
        return [[batch_size, size] for size in self.state_sizes]

    # Keras

    def compute_output_shape(self, input_shape: Shape) -> Shapes:
        shape = input_shape
        for layer in self.layers:
            shape = _output_shape(layer, shape)
        shape = tuple(shape) if self.return_sequences else (shape[0], shape[-1])
        if not self.return_state:
            return shape
        return (shape, *[(input_shape[0], size) for size in self.state_sizes])

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "layers": [keras.saving.serialize_keras_object(layer) for layer in self.layers],
            "return_sequences": self.return_sequences,
            "return_state": self.return_state,
            "stateful": self.stateful,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "StackedRNN":
        layers = copy.deepcopy(config["layers"])  # Keras' RNN pops its cell from the config
        layers = [keras.saving.deserialize_keras_object(layer) for layer in layers]
        return cls(**{**config, "layers": layers})


def _at_least_float32(cell, states):
    dtype = at_least_float32(cell.compute_dtype)
    return [ops.cast(state, dtype) for state in keras.tree.flatten(states)]


@contextlib.contextmanager
def _float64_tanh(cells: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Context, under `RATES_LOCK`, in which Keras' cells compute tanh in float64 on JAX too.

    There `keras.activations.tanh` returns float32, and the loop over a SimpleRNN's cell fails.
    """
    changed = [
        (cell, name)
        for cell in _single_cells(cells)
        for name in ("activation", "recurrent_activation")
        if keras.backend.backend() == "jax"
        and cell.compute_dtype == "float64"
        and getattr(cell, name, None) is keras.activations.tanh
    ]
    for cell, name in changed:
        setattr(cell, name, tanh)
    try:
        yield
    finally:
        for cell, name in changed:
            setattr(cell, name, keras.activations.tanh)


def _single_cells(cells):
    for cell in cells:
        if isinstance(cell, keras.layers.StackedRNNCells):
            yield from _single_cells(cell.cells)
        else:
            yield cell


def _check_layers(layers):
    if not isinstance(layers, (list, tuple)) or not any(
        isinstance(layer, keras.layers.RNN) for layer in layers
    ):
        raise ValueError(
            f"`layers` must be a list with at least one recurrent layer. Received: {layers!r}"
        )
    required = {
        "return_sequences": True,
        "return_state": True,
        "stateful": False,
        "go_backwards": False,
    }
    for layer in layers:
        if isinstance(layer, DROPOUTS):
            continue
        if not isinstance(layer, keras.layers.RNN):
            raise ValueError(
                "`layers` must be keras.layers.LSTM, GRU, SimpleRNN or RNN, and dropout layers "
                f"between them. Received: {layer!r}"
            )
        wrong = {name: getattr(layer, name) for name in required}
        wrong = {name: value for name, value in wrong.items() if value != required[name]}
        if wrong:
            needed = ", ".join(f"{name}={required[name]}" for name in wrong)
            raise ValueError(
                f"The layers of a StackedRNN need {needed}: the StackedRNN reads their outputs and "
                f"carries their states. Received: {layer.name} with {wrong}"
            )


def _disable_cudnn_in_half_precision(layers):
    """Disables cuDNN's LSTM in half precision on JAX, where it cannot be compiled.

    Done here because an LSTM's config does not contain `use_cudnn`.
    """
    if keras.backend.backend() != "jax":
        return
    for layer in layers:
        is_half = layer.compute_dtype in ("bfloat16", "float16")
        if isinstance(layer, keras.layers.LSTM) and layer.use_cudnn == "auto" and is_half:
            layer.use_cudnn = False


def _output_shape(layer, shape):
    return shape if isinstance(layer, DROPOUTS) else layer.compute_output_shape(shape)[0]
