"""Keras' recurrent layers, one above the other, as one causal layer."""

import contextlib
import inspect
import threading

import keras
from keras import ops

from trellis_keras.layers import base, streaming
from trellis_keras.layers.base import StatefulMixin, at_least_float32, last_step
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.tcn_block import checked_stream

# What may stand between the recurrent layers. (Keras' SpatialDropout1D is a Dropout.)
DROPOUTS = (keras.layers.Dropout, VariationalDropout)
# Held while the dropout rates of cells, which several layers and threads may share, are set to 0,
# or while they are read in training.
_RATES = threading.RLock()


@keras.saving.register_keras_serializable("trellis_keras")
class StackedRNN(StatefulMixin, streaming.StreamingMixin, keras.layers.Layer):
    """Recurrent layers, one above the other, that carry their states and stream as one layer.

    With `stateful=True` the last states of a batch are the first ones of the next, without
    gradient: truncated backpropagation through time. Training and evaluation have states of their
    own, which `stateful=True` of Keras' layers mixes up. In inference nothing is drawn at random:
    Keras' cells draw their dropout masks there too.

    Args:
        layers: List of `keras.layers.LSTM`, `GRU`, `SimpleRNN` or `RNN` (of one cell or of
            several), from the input upwards, each with `return_sequences=True` and
            `return_state=True`. Dropout layers may stand between them.
        return_sequences: Whether to return all steps, or the last one only: with a mask, each
            row's last valid one (a row without any gets zeros).
        return_state: Whether to return the last states too.
        stateful: Whether the last states of a batch are the first ones of the next. They begin
            as zeros.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        initial_state: List of states, each (batch, size): those of the lowest layer first, each
            layer's in its own order (LSTM: h, c), those of a layer of several cells flattened.
            Default: what the layers begin with (zeros), or the carried states of a stateful layer.
        training: Whether dropout is active.
        mask: Boolean (batch, time). Masked steps leave the states as they are.

    Returns:
        y (batch, time, channels of the last layer), or with `return_state` a tuple of y and the
        states. Without `return_sequences` y is (batch, channels).

    Raises:
        ValueError: A layer of another kind or with other options, or states of the wrong number or
            shape.

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
        self, layers, *, return_sequences=True, return_state=False, stateful=False, **kwargs
    ):
        # Inputs are cast in `call`: Keras' autocast would take the states down to half precision.
        super().__init__(autocast=False, **kwargs)
        _check_layers(layers)
        self.layers = list(layers)
        _leave_cudnn_alone(self.layers)
        self.return_sequences = return_sequences
        self.return_state = return_state
        self.supports_masking = True
        sizes = [size for layer in self._recurrent for size in _sizes(layer)]
        self._init_stateful(sizes, at_least_float32(self.compute_dtype), stateful)

    @property
    def _recurrent(self):
        return [layer for layer in self.layers if not isinstance(layer, DROPOUTS)]

    def build(self, input_shape):
        self.input_spec = base.sequence_spec(self, input_shape)
        self.input_channels = input_shape[-1]
        shape = (None, None, self.input_channels)
        for layer in self.layers:
            if not layer.built:
                layer.build(shape)
            shape = _output_shape(layer, shape)
        self._build_state_cache(input_shape[0])

    def call(self, inputs, initial_state=None, training=False, mask=None):
        training, mask = bool(training), base.resolve_mask(inputs, mask)
        states = self._initial_states(ops.shape(inputs)[0], initial_state, training)
        x = ops.cast(inputs, self.compute_dtype)
        y, states = self._forward(x, states, training, mask)
        self._carry_states(states, training)
        if not self.return_sequences:
            y = y[:, -1] if mask is None else last_step([y], None, mask)[0]
        return (y, *states) if self.return_state else y

    def _forward(self, x, states, training=False, mask=None):
        """Returns all outputs and the last states, from states or from None."""
        given, last = iter(states or []), []
        with _RATES if training else _nothing_drawn(self._recurrent):
            for layer in self.layers:
                if isinstance(layer, DROPOUTS):
                    x = layer(x, training=training)
                    continue
                first = None if states is None else _take(layer, given)
                x, *new = layer(x, initial_state=first, mask=mask, training=training)
                last += keras.tree.flatten(new)
        last = [ops.cast(state, self.state_dtype) for state in last]
        return ops.cast(x, self.compute_dtype), last

    # Streaming

    def initial_cache(self, batch_size, initial_state=None):
        """Returns the cache before the first step: the flat list of states.

        Args:
            batch_size: Number of rows.
            initial_state: As in the call. Default: what the layers begin with (zeros).

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
        streaming.check_built(self)
        streaming.check_batch_size(batch_size)
        if initial_state is not None:
            rows = batch_size if isinstance(batch_size, int) else None
            return self._initial_states(rows, initial_state, training=False)
        begun = [layer.get_initial_state(batch_size) for layer in self._recurrent]
        return [ops.cast(state, self.state_dtype) for state in keras.tree.flatten(begun)]

    def step(self, x, cache):
        """Advances one step: x (batch, channels) to (y (batch, filters), cache).

        Raises:
            ValueError: The layer is not built, x has another shape, or the cache is of another
                batch size or another layer.
        """
        x, cache = checked_stream(self, ops.expand_dims(x, 1), cache)
        x, states, following = x[:, 0], iter(cache), []
        with _nothing_drawn(self._recurrent):
            for layer in self._recurrent:
                x, new = _step(layer.cell, x, _take(layer, states))
                x = ops.cast(x, layer.compute_dtype)
                following += keras.tree.flatten(new)
        following = [ops.cast(state, self.state_dtype) for state in following]
        return ops.cast(x, self.compute_dtype), following

    def prefill(self, x, cache=None):
        """Advances all steps of x (batch, time, channels) by the layers' forward pass.

        Raises:
            ValueError: As `step`.
        """
        x, cache = checked_stream(self, x, cache)
        return self._forward(x, cache)

    def cache_shapes(self, batch):
        return [[batch, size] for size in self.state_sizes]

    # Keras

    def compute_mask(self, inputs, mask=None):
        mask = mask if self.return_sequences else None
        return (mask, *[None] * len(self.state_sizes)) if self.return_state else mask

    def compute_output_shape(self, input_shape):
        shape = input_shape
        for layer in self.layers:
            shape = _output_shape(layer, shape)
        shape = tuple(shape) if self.return_sequences else (shape[0], shape[-1])
        if not self.return_state:
            return shape
        return (shape, *[(input_shape[0], size) for size in self.state_sizes])

    def compute_output_spec(self, inputs, initial_state=None, training=False, mask=None):
        shapes = self.compute_output_shape(inputs.shape)
        if not self.return_state:
            return keras.KerasTensor(shapes, self.compute_dtype)
        states = [keras.KerasTensor(shape, self.state_dtype) for shape in shapes[1:]]
        return (keras.KerasTensor(shapes[0], self.compute_dtype), *states)

    def get_config(self):
        return {
            **super().get_config(),
            "layers": [keras.saving.serialize_keras_object(layer) for layer in self.layers],
            "return_sequences": self.return_sequences,
            "return_state": self.return_state,
            "stateful": self.stateful,
        }

    @classmethod
    def from_config(cls, config):
        layers = [keras.saving.deserialize_keras_object(layer) for layer in config["layers"]]
        return cls(**{**config, "layers": layers})


def _check_layers(layers):
    if not isinstance(layers, (list, tuple)) or not any(
        isinstance(layer, keras.layers.RNN) for layer in layers
    ):
        raise ValueError(
            f"`layers` must be a list with at least one recurrent layer. Received: {layers!r}"
        )
    wanted = {
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
        wrong = {name: getattr(layer, name) for name in wanted}
        wrong = {name: value for name, value in wrong.items() if value != wanted[name]}
        if wrong:
            needed = ", ".join(f"{name}={wanted[name]}" for name in wrong)
            raise ValueError(
                f"The layers of a StackedRNN need {needed}: they are read and their states are "
                f"carried by the StackedRNN. Received: {layer.name} with {wrong}"
            )


def _sizes(layer):
    """Sizes of the layer's states, flat."""
    return keras.tree.flatten(layer.state_size)


def _take(layer, states):
    """The layer's states, in its own structure, from an iterator of flat ones."""

    def take(size):
        # Keras' own list type, which `state_size` is of, is none that JAX knows.
        return [take(part) for part in size] if isinstance(size, (list, tuple)) else next(states)

    return take(layer.state_size)


def _output_shape(layer, shape):
    if isinstance(layer, DROPOUTS):
        return shape
    return layer.compute_output_shape(shape)[0]


def _leave_cudnn_alone(layers):
    """On JAX with a GPU Keras takes cuDNN's LSTM in half precision too, which cannot be compiled.

    Here rather than where a model is built: an LSTM's config does not say what it was told.
    """
    if keras.backend.backend() != "jax":
        return
    for layer in layers:
        half = layer.compute_dtype in ("bfloat16", "float16")
        if isinstance(layer, keras.layers.LSTM) and layer.use_cudnn == "auto" and half:
            layer.use_cudnn = False


def _step(cell, x, states):
    """Calls a cell as `keras.layers.RNN` does, in inference."""
    states = keras.tree.map_structure(lambda state: ops.cast(state, cell.compute_dtype), states)
    takes_training = "training" in inspect.signature(cell.call).parameters
    return cell(x, states, **({"training": False} if takes_training else {}))


@contextlib.contextmanager
def _nothing_drawn(layers):
    """Within it Keras' cells draw no dropout masks, which in inference they would not use."""
    cells = [cell for layer in layers for cell in _cells(layer.cell)]
    with _RATES:
        rates = [(cell, cell.dropout, cell.recurrent_dropout) for cell in cells]
        for cell in cells:
            cell.dropout = cell.recurrent_dropout = 0.0
        try:
            yield
        finally:
            for cell, dropout, recurrent_dropout in rates:
                cell.dropout, cell.recurrent_dropout = dropout, recurrent_dropout


def _cells(cell):
    """A cell's parts, or the cell itself, that have dropout rates."""
    if isinstance(cell, keras.layers.StackedRNNCells):
        return [part for inner in cell.cells for part in _cells(inner)]
    rates = ("dropout", "recurrent_dropout")
    return [cell] if all(isinstance(getattr(cell, name, None), float) for name in rates) else []
