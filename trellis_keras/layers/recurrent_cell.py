"""What the recurrent cells have in common: arguments, weights, dropout masks and configuration."""

import keras
from keras import ops

# Not public: `keras.layers.RNN` asks cells of this class, and no others, for their masks before its
# loop begins. A test (test_lru_cell.py) holds that it does.
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

from trellis_keras.layers import base
from trellis_keras.layers.cell_arguments import GateInitializer
from trellis_keras.layers.regularization import VariationalDropout

_KINDS = ("kernel", "recurrent", "bias")


class RecurrentCell(DropoutRNNCell, keras.layers.Layer):
    """Base class of cells for `keras.layers.RNN`.

    A subclass writes `build`, which makes its weights with `weight`, and
    `call(inputs, states, training=False)`, which gets its dropout masks from `masks`. If it has
    more than one state it sets `state_size` to a list, the state that `recurrent_dropout` acts on
    first; `output_size` is `units` unless it sets another.

    A dropout mask (batch, channels) is drawn once per sequence, outside the loop over time, and
    only in training: unlike Keras' own cells these neither advance a seed nor put random operations
    into a graph of inference. A cell that is called by itself draws new masks in each call.

    Args:
        units: Number of channels.
        kernel_initializer, recurrent_initializer, bias_initializer: Of the weights. Glorot counts
            the rows and the units of one gate `[W; U]`, whatever the number of gates.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Of the weights.
        kernel_constraint, recurrent_constraint, bias_constraint: Of the weights.
        dropout: Rate of the inputs.
        recurrent_dropout: Rate of the (first) state.
        seed: Integer seed of the dropouts, and of initializers without one.

    Raises:
        ValueError: `units` not positive, or a rate outside [0, 1).
    """

    def __init__(
        self,
        units,
        *,
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
        super().__init__(**kwargs)
        base.check_positive(units=units)
        for name, rate in (("dropout", dropout), ("recurrent_dropout", recurrent_dropout)):
            if not 0 <= rate < 1:
                raise ValueError(f"`{name}` must be in [0, 1). Received: {name}={rate}")
        self.units = units
        self.state_size = units
        self.output_size = units
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.recurrent_constraint = keras.constraints.get(recurrent_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.dropout = dropout
        self.recurrent_dropout = recurrent_dropout
        self.seed = seed
        self.input_dropout = self._dropout(dropout, 1)
        self.state_dropout = self._dropout(recurrent_dropout, 2)
        self.reset_dropout_mask()
        self.reset_recurrent_dropout_mask()

    def _dropout(self, rate, part):
        seed = base.sub_seed(self.seed, part)
        return _CellDropout(rate, seed=seed, dtype=self.dtype_policy)

    def weight(self, kind, shape, *part, name=None, fan_in=None):
        """Adds a weight with the initializer, regularizer and constraint of its kind.

        Args:
            kind: `"kernel"`, `"recurrent"` or `"bias"`.
            shape: Its shape.
            *part: Integers that tell it from the cell's other weights of this kind, so that one
                seed gives each numbers of its own.
            name: Its name. Default: the kind.
            fan_in: Of a kernel, the number of all rows that feed a gate, see `GateInitializer`.
        """
        initializer = getattr(self, f"{kind}_initializer")
        initializer = base.seeded(initializer, self.seed, _KINDS.index(kind), *part)
        if kind != "bias":
            initializer = GateInitializer(initializer, shape[1] // self.units, fan_in)
        return self.add_weight(
            name=name or kind,
            shape=shape,
            initializer=initializer,
            regularizer=getattr(self, f"{kind}_regularizer"),
            constraint=getattr(self, f"{kind}_constraint"),
        )

    # Dropout. The first four methods are what `keras.layers.RNN` calls: get before its loop, reset
    # after it. It does so in inference too, and does not say which it is; the dropout layers know,
    # since Keras hands `training` down from the layer that is being called.

    def get_dropout_mask(self, step_input):
        self._input_mask = _draw(self.input_dropout, step_input)
        return self._input_mask

    def get_recurrent_dropout_mask(self, step_input):
        self._state_mask = _draw(self.state_dropout, step_input)
        return self._state_mask

    def reset_dropout_mask(self):
        self._input_mask = None

    def reset_recurrent_dropout_mask(self):
        self._state_mask = None

    def masks(self, inputs, state, training):
        """Returns the masks of the inputs and of the state, each None if nothing is dropped.

        They are those that an RNN layer drew before its loop, or new ones if none did.
        """
        if not training:
            return None, None
        of_inputs, of_state = self._input_mask, self._state_mask
        if of_inputs is None:
            of_inputs = _draw(self.input_dropout, inputs, training=True)
        if of_state is None:
            of_state = _draw(self.state_dropout, state, training=True)
        return of_inputs, of_state

    def draw_masks(self, inputs, state, training):
        """Returns new masks, each None if nothing is dropped. For layers with their own loop."""
        if not training:
            return None, None
        return (
            _draw(self.input_dropout, inputs, training=True),
            _draw(self.state_dropout, state, training=True),
        )

    # Keras

    def get_initial_state(self, batch_size=None):
        """Returns a list of zero states, each (batch, size)."""
        sizes = self.state_size if isinstance(self.state_size, list) else [self.state_size]
        return [ops.zeros((batch_size, size), self.compute_dtype) for size in sizes]

    def get_config(self):
        config = {**super().get_config(), "units": self.units, "seed": self.seed}
        for kind in _KINDS:
            for module in ("initializer", "regularizer", "constraint"):
                serialize = getattr(keras, f"{module}s").serialize
                config[f"{kind}_{module}"] = serialize(getattr(self, f"{kind}_{module}"))
        return {
            **config,
            "dropout": self.dropout,
            "recurrent_dropout": self.recurrent_dropout,
        }


def drop(x, mask):
    """x times a dropout mask, which is None where nothing is dropped."""
    return x if mask is None else x * ops.cast(mask, x.dtype)


def _draw(dropout, like, **training):
    """A mask of the shape of a tensor: zeros, and 1 / (1 - rate) where it is kept."""
    return None if dropout.rate == 0 else dropout(like, **training)


class _CellDropout(VariationalDropout):
    """Makes a mask of the shape of its input, of ones in inference."""

    def call(self, inputs, training=None):
        # None: `call` of an RNN was called and not the layer, so that nothing was handed down.
        # If this turns out to be inference, the mask is not used.
        if training is None or training:
            return self.draw(ops.shape(inputs))
        return ops.ones_like(inputs)
