"""The Lattice Recurrent Unit as one layer."""

import keras
from keras import ops

from trellis_keras.kernels.scan import scan
from trellis_keras.layers import base, streaming
from trellis_keras.layers.base import FrozenPartsMixin, StatefulMixin, at_least_float32
from trellis_keras.layers.lru_cell import LRUCell
from trellis_keras.layers.lru_row import row

# The arguments that the layer hands on to its cells.
_OF_CELLS = (
    "variant",
    "convention",
    "cells_per_node",
    "use_bias",
    "use_gate_bias",
    "kernel_regularizer",
    "recurrent_regularizer",
    "bias_regularizer",
    "kernel_constraint",
    "recurrent_constraint",
    "bias_constraint",
    "dropout",
    "recurrent_dropout",
)


@keras.saving.register_keras_serializable("trellis_keras")
class LRU(FrozenPartsMixin, StatefulMixin, streaming.StreamingMixin, keras.layers.Layer):
    """Lattice Recurrent Unit, `depth` cells high (Ahuja & Morency 2018); not the Linear one.

    The function is that of `keras.layers.RNN([LRUCell(units), ...])`, whose equations are in
    `LRUCell`, and the weights are those of the cells in `cells`. The work is arranged differently:
    of a cell's products only those of its own state that lead to the next state are done step by
    step. All others are done for all steps at once, and so are the gradients of the weights
    (`layers.lru_loop`). (With `cells_per_node` > 1 that holds for the inputs of a node only.)

    Args:
        units: Number of channels.
        depth: Number of cells above each other.
        variant, convention, cells_per_node, use_bias, use_gate_bias: See `LRUCell`.
        input_projection: Whether a `Dense` layer, with bias, brings the input to `units` channels.
            Without it, the input must have as many.
        return_sequences: Whether all steps are returned, or the last one only.
        return_state: Whether the last states are returned too.
        stateful: Whether the last states of a batch are the first ones of the next.
        kernel_initializer, recurrent_initializer, bias_initializer: See `LRUCell`. The first and
            the last are the projection's too.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Of the cells.
        kernel_constraint, recurrent_constraint, bias_constraint: Of the cells.
        dropout, recurrent_dropout: See `LRUCell`. Each cell has masks of its own.
        seed: Integer seed of the dropouts, and of initializers without one.

    Call arguments:
        inputs: Tensor (batch, time, units), or of any width with `input_projection`.
        initial_state: List of `depth` tensors (batch, units), from the bottom up. Default: zeros,
            or the carried states of a stateful layer.
        training: Whether dropout is active.
        mask: Boolean (batch, time). Masked steps keep the state and repeat the last output (zeros
            before the first), as in Keras' RNN layers.

    Returns:
        y (batch, time, units), without `return_sequences` (batch, units); with `return_state` a
        tuple of y and the `depth` last states, each (batch, units).

    Raises:
        ValueError: Arguments out of range, an input of another width than `units`, or states of
            the wrong number or shape.

    It has no `go_backwards`: for `keras.layers.Bidirectional` use `keras.layers.RNN` of the cells.

    Example:

    >>> layer = LRU(8, depth=3, return_sequences=True)
    >>> layer(np.zeros((2, 5, 8), "float32")).shape
    (2, 5, 8)
    """

    def __init__(
        self,
        units,
        depth=2,
        *,
        variant="ug",
        convention="paper",
        cells_per_node=1,
        use_bias=True,
        use_gate_bias=True,
        input_projection=False,
        return_sequences=False,
        return_state=False,
        stateful=False,
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
        # Inputs are cast in `call`: Keras' autocast would take the states down to half precision.
        super().__init__(autocast=False, **kwargs)
        base.check_positive(units=units, depth=depth)
        self.units = units
        self.input_projection = input_projection
        self.return_sequences = return_sequences
        self.return_state = return_state
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed
        self.supports_masking = True
        self._init_stateful([units] * depth, at_least_float32(self.compute_dtype), stateful)
        self.cells = [
            LRUCell(
                units,
                variant,
                convention=convention,
                cells_per_node=cells_per_node,
                use_bias=use_bias,
                use_gate_bias=use_gate_bias,
                kernel_initializer=base.seeded(self.kernel_initializer, seed, i, 0),
                recurrent_initializer=base.seeded(self.recurrent_initializer, seed, i, 1),
                bias_initializer=base.seeded(self.bias_initializer, seed, i, 2),
                kernel_regularizer=kernel_regularizer,
                recurrent_regularizer=recurrent_regularizer,
                bias_regularizer=bias_regularizer,
                kernel_constraint=kernel_constraint,
                recurrent_constraint=recurrent_constraint,
                bias_constraint=bias_constraint,
                dropout=dropout,
                recurrent_dropout=recurrent_dropout,
                seed=base.sub_seed(seed, i, 3),
                dtype=self.dtype_policy,
                name=f"cell_{i + 1}",
            )
            for i in range(depth)
        ]
        self.projection = None
        if input_projection:
            self.projection = keras.layers.Dense(
                units,
                kernel_initializer=base.seeded(self.kernel_initializer, seed, depth, 0),
                bias_initializer=base.seeded(self.bias_initializer, seed, depth, 2),
                dtype=self.dtype_policy,
                name="input_projection",
            )

    @property
    def depth(self):
        """Number of cells above each other."""
        return len(self.cells)

    def build(self, input_shape):
        self._channels = input_shape[-1]
        self.input_spec = base.sequence_spec(self, input_shape)
        shape = (None, None, input_shape[-1])
        if self.projection is not None:
            self.projection.build(shape)
            shape = (None, None, self.units)
        for cell in self.cells:
            cell.build(shape)
        self._build_state_cache(input_shape[0])

    def call(self, inputs, initial_state=None, training=False, mask=None):
        mask = base.resolve_mask(inputs, mask)
        states = self._initial_states(ops.shape(inputs)[0], initial_state, training)
        y, states = self._run(inputs, states, self.return_sequences, training, mask)
        self._carry_states(states, training)
        return (y, *states) if self.return_state else y

    def _run(self, inputs, states, all_steps, training=False, mask=None):
        """Returns the output of all steps, or of the last one, and the last states.

        Args:
            inputs: Tensor (batch, time, channels).
            states: The states before the first step, or None for zeros.
            all_steps: Which.
            training, mask: As in the call.
        """
        x = ops.transpose(self._project(inputs), (1, 0, 2))
        if states is None:
            states = [ops.zeros_like(x[0]) for _ in self.cells]
        valid = None if mask is None else ops.cast(ops.transpose(mask)[..., None], x.dtype)
        last = []
        for cell, state in zip(self.cells, states, strict=True):
            # Of the top cell's outputs those that nobody sees need not be computed.
            shorten = cell is self.cells[-1] and not all_steps and mask is None
            x, state = row(cell, x, state, valid, training, shorten)
            last.append(state)
        x = x if mask is None else _repeat_last(x, mask)
        y = ops.transpose(x, (1, 0, 2)) if all_steps else x[-1]
        return ops.cast(y, self.compute_dtype), last

    def _project(self, inputs):
        x = ops.cast(inputs, self.compute_dtype)
        x = x if self.projection is None else self.projection(x)
        return ops.cast(x, self.state_dtype)

    # Streaming

    def initial_cache(self, batch_size, initial_state=None):
        """Returns the cache before the first step: the list of the states, from the bottom up.

        Args:
            batch_size: Number of rows.
            initial_state: As in the call. Default: zeros.

        Raises:
            ValueError: The layer is not built, or the states are of the wrong number or shape.

        Example:

        >>> layer = LRU(8, depth=3)
        >>> layer.build((None, None, 8))
        >>> y, cache = layer.step(np.zeros((2, 8), "float32"), layer.initial_cache(2))
        >>> tuple(y.shape)
        (2, 8)
        """
        streaming.check_built(self)
        streaming.check_batch_size(batch_size)
        if initial_state is not None:
            rows = batch_size if isinstance(batch_size, int) else None
            return self._initial_states(rows, initial_state, training=False)
        return [ops.zeros((batch_size, self.units), self.state_dtype) for _ in self.cells]

    def step(self, x, cache):
        """Advances one step: x (batch, channels) to (y (batch, units), cache).

        Raises:
            ValueError: The layer is not built, x has another shape, or the cache is of another
                batch size or another layer.
        """
        x, cache = self._checked(x, cache, 2)
        h1, following = self._project(x), []
        for cell, h2 in zip(self.cells, cache, strict=True):
            h1, h2 = cell.advance(h1, h2)
            following.append(h2)
        return ops.cast(h1, self.compute_dtype), following

    def prefill(self, x, cache=None):
        """Advances all steps of x (batch, time, channels) by one forward pass.

        Raises:
            ValueError: As `step`.
        """
        x, cache = self._checked(x, cache, 3)
        return self._run(x, cache, all_steps=True)

    def _checked(self, x, cache, rank):
        streaming.check_built(self)
        x = ops.convert_to_tensor(x)
        base.check_shape("x", x, (*[None] * (rank - 1), self._channels))
        cache = self.initial_cache(ops.shape(x)[0]) if cache is None else cache
        streaming.check_cache(self, cache, [[x.shape[0], self.units] for _ in self.cells])
        return x, cache

    # Keras

    def compute_mask(self, inputs, mask=None):
        mask = mask if self.return_sequences else None
        return (mask, *[None] * self.depth) if self.return_state else mask

    def compute_output_shape(self, input_shape):
        steps = (input_shape[1],) if self.return_sequences else ()
        y = (input_shape[0], *steps, self.units)
        return (y, *[(input_shape[0], self.units)] * self.depth) if self.return_state else y

    def compute_output_spec(self, inputs, initial_state=None, training=False, mask=None):
        shapes = self.compute_output_shape(inputs.shape)
        if not self.return_state:
            return keras.KerasTensor(shapes, self.compute_dtype)
        dtypes = [self.compute_dtype, *[self.state_dtype] * self.depth]
        return tuple(map(keras.KerasTensor, shapes, dtypes))

    def get_config(self):
        of_cells = self.cells[0].get_config()
        return {
            **super().get_config(),
            "units": self.units,
            "depth": self.depth,
            **{name: of_cells[name] for name in _OF_CELLS},
            "input_projection": self.input_projection,
            "return_sequences": self.return_sequences,
            "return_state": self.return_state,
            "stateful": self.stateful,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "recurrent_initializer": keras.initializers.serialize(self.recurrent_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "seed": self.seed,
        }


def _repeat_last(y, mask):
    """Puts the last output of a valid step, or zeros before the first, in masked steps.

    Args:
        y: Tensor (time, batch, units).
        mask: Boolean (batch, time).
    """
    mask = ops.cast(ops.transpose(mask), "int32")
    steps = mask * ops.cumsum(ops.ones_like(mask), axis=0)

    def latest(step, now):
        step = ops.maximum(step, now[0])
        return step, [step]

    _, (steps,) = scan(latest, ops.zeros_like(steps[0]), [steps])
    with_zeros = ops.concatenate([ops.zeros_like(y[:1]), y], axis=0)
    return ops.take_along_axis(with_zeros, steps[..., None], axis=0)
