"""A stack of Keras' recurrent layers that streams and carries its states."""

import copy
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import (
    RATES_LOCK,
    at_least_float32,
    cell_step,
    check_start,
    check_stream,
    pack_states,
    without_dropout,
)
from trellis_keras import kernels
from trellis_keras.kernels import recurrent_loop
from trellis_keras.layers.recurrent_cell import UNITS_FOR_XLA, RecurrentCell
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.stateful import StatefulLayer
from trellis_keras.layers.time_steps import zero_masked
from trellis_keras.types import Cache, Shape, Shapes, Tensor

# The layers allowed between recurrent layers. (Keras' SpatialDropout1D and this package's Dropout
# are Dropouts.)
DROPOUTS = (keras.layers.Dropout, VariationalDropout)
# Those that `kernels.recurrent_loop` computes.
_LAYERS = (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN, keras.layers.RNN)
_EQUATIONS = {
    keras.layers.LSTMCell: recurrent_loop.LSTM,
    keras.layers.GRUCell: recurrent_loop.GRU,
    keras.layers.SimpleRNNCell: recurrent_loop.ELMAN,
}
_SIGMOID = keras.activations.sigmoid


@keras.saving.register_keras_serializable("trellis_keras")
class StackedRNN(StatefulLayer):
    """A stack of Keras' recurrent layers that carries its states and streams as one layer.

    With `stateful=True` the last states of a batch are the initial states of the next one, with the
    gradient stopped: truncated backpropagation through time. Training and evaluation have separate
    states, whereas Keras' `stateful=True` layers share one. Inference draws no random numbers,
    whereas Keras' cells draw their dropout masks even then. On a CPU, LSTM, GRU and SimpleRNN with
    their default activations, and without active dropout in the cell, run in a loop of this
    package, which keeps the states in float32 at least. `kernels.disabled()` selects Keras'
    own loop.

    Args:
        layers: List of `keras.layers.LSTM`, `GRU`, `SimpleRNN` or `RNN` (of one cell or several),
            from the input up, each with `return_sequences=True` and `return_state=True`. Dropout
            layers are allowed between them.
        return_sequences, return_state, stateful: As in `keras.layers.RNN`, but all steps are
            returned by default. With a mask the last step is each row's last valid one.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        initial_state: Flat list of states, each (batch, size), from the bottom layer up, in each
            layer's order (LSTM: h, c). Defaults to `None`, the layers' initial states (zeros) or
            the carried states of a stateful layer.
        mask: Boolean (batch, time). Masked steps leave the states unchanged.
        training: Boolean, whether dropout is active. Defaults to `False`.

    Returns:
        y (batch, time, channels of the last layer); without `return_sequences`, (batch, channels).
        With `return_state`, a tuple of y and the states.

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

        XLA does not speed up wide Keras layers, or layers that run in Keras' own loop.
        """
        return all(
            isinstance(layer.cell, RecurrentCell)
            or (_runs_in_loop(layer) and layer.cell.units <= UNITS_FOR_XLA)
            for layer in self._recurrent
        )

    @property
    def _recurrent(self):
        return [layer for layer in self.layers if not isinstance(layer, DROPOUTS)]

    @property
    def _cells(self):
        return [layer.cell for layer in self._recurrent]

    def build(self, input_shape: Shape) -> None:
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})
        self.input_channels = input_shape[-1]
        shape = (None, None, self.input_channels)
        for layer in self.layers:
            if not layer.built:
                layer.build(shape)
            shape = _output_shape(layer, shape)
        self.build_states(input_shape[0])

    def run_steps(
        self,
        x: Tensor,
        states: Sequence[Tensor] | None,
        mask: Tensor | None = None,
        training: bool = False,
        last_only: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        x, remaining, last = ops.cast(x, self.compute_dtype), iter(states or []), []
        x = zero_masked(x, mask)  # masked values reach neither outputs nor gradients
        with RATES_LOCK if training else without_dropout(self._cells):
            for layer in self.layers:
                if isinstance(layer, DROPOUTS):
                    x = layer(x, training=training)
                    continue
                initial = None if states is None else pack_states(layer.state_size, remaining)
                x, *new = self._run_layer(layer, x, initial, training, mask)
                last += keras.tree.flatten(new)
        last = [ops.cast(state, self.state_dtype) for state in last]
        return ops.cast(x, self.compute_dtype), last

    def _run_layer(self, layer, x, states, training, mask):
        """Returns the outputs of a recurrent layer at all steps, and its last states."""
        if kernels.enabled() and _runs_in_loop(layer):
            if states is None:
                states = layer.get_initial_state(ops.shape(x)[0])
            states = _at_least_float32(layer.cell, states)
            y, states = recurrent_loop.recurrent_loop(
                x, states, **_cell_arguments(layer.cell, states), mask=mask, training=training
            )
            y = ops.cast(y, layer.compute_dtype)
        else:
            y, *states = layer(x, initial_state=states, mask=mask, training=training)
        if mask is not None:  # before the first valid step Keras returns zeros, on JAX a state
            y = ops.where(ops.cumsum(ops.cast(mask, "int32"), axis=1)[..., None] > 0, y, 0.0)
        return y, *states

    # Streaming

    def initial_cache(
        self, batch_size: int, initial_state: Sequence[Tensor] | None = None
    ) -> Cache:
        if initial_state is not None:
            return super().initial_cache(batch_size, initial_state)
        check_start(self, batch_size)
        states = [layer.get_initial_state(batch_size) for layer in self._recurrent]
        return [ops.cast(state, self.state_dtype) for state in keras.tree.flatten(states)]

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        x, cache = check_stream(self, ops.expand_dims(x, 1), cache)
        x, remaining, last = x[:, 0], iter(cache), []
        with without_dropout(self._cells):
            for layer in self._recurrent:
                states = pack_states(layer.state_size, remaining)
                if kernels.enabled() and _runs_in_loop(layer):
                    states = _at_least_float32(layer.cell, states)
                    arguments = _cell_arguments(layer.cell, states)
                    x, new = recurrent_loop.recurrent_step(x, states, **arguments)
                else:
                    x, new = cell_step(layer.cell, x, states)
                x = ops.cast(x, layer.compute_dtype)
                last += keras.tree.flatten(new)
        last = [ops.cast(state, self.state_dtype) for state in last]
        return ops.cast(x, self.compute_dtype), last

    # Keras

    def compute_output_shape(self, input_shape: Shape) -> Shapes:
        shape = input_shape
        for layer in self.layers:
            shape = _output_shape(layer, shape)
        shape = tuple(shape) if self.return_sequences else (shape[0], shape[-1])
        if not self.return_state:
            return shape
        return (shape, *[(input_shape[0], size) for size in self.state_sizes])

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "StackedRNN":
        if config.get("go_backwards"):  # asked for by keras.layers.Bidirectional
            raise ValueError(
                "A StackedRNN runs forwards only: wrap each of its layers in Bidirectional instead."
            )
        layers = copy.deepcopy(config["layers"])  # Keras' RNN pops its cell from the config
        layers = [keras.saving.deserialize_keras_object(layer) for layer in layers]
        return super().from_config({**config, "layers": layers})


def _runs_in_loop(layer):
    """Returns whether `kernels.recurrent_loop` can compute a recurrent layer.

    These are Keras' LSTM, GRU (with the reset gate after the product) and SimpleRNN, or RNN of
    their cells, on a machine without an accelerator, for which Keras has cuDNN's loops. They have
    the default activations, and no dropout, activity regularizer or `zero_output_for_mask`.
    """
    cell = layer.cell
    return (
        type(layer) in _LAYERS
        and type(cell) in _EQUATIONS
        and cell.activation is keras.activations.tanh
        and getattr(cell, "recurrent_activation", _SIGMOID) is _SIGMOID
        and getattr(cell, "reset_after", True)
        and not (cell.dropout or cell.recurrent_dropout)
        and layer.activity_regularizer is None
        and not layer.zero_output_for_mask
        and _has_only_cpus()
    )


def _cell_arguments(cell, states):
    """Returns the arguments of `recurrent_loop` for a built cell."""
    biases = []
    if cell.use_bias:
        bias = ops.cast(cell.bias, states[0].dtype)
        biases = ops.unstack(ops.reshape(bias, (-1, cell.kernel.shape[-1])))
    return {
        "kernel": cell.kernel,
        "recurrent_kernel": cell.recurrent_kernel,
        "biases": biases,
        "equations": _EQUATIONS[type(cell)],
        "compute_dtype": cell.compute_dtype,
    }


def _has_only_cpus():
    """Returns whether there is no accelerator."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_backend() == "cpu"
    if keras.backend.backend() == "tensorflow":
        from trellis_keras import _tensorflow

        return _tensorflow.has_only_cpus()
    return False


def _at_least_float32(cell, states):
    dtype = at_least_float32(cell.compute_dtype)
    return [ops.cast(state, dtype) for state in keras.tree.flatten(states)]


def _check_layers(layers):
    is_list = isinstance(layers, (list, tuple))
    recurrent = [part for part in layers if not isinstance(part, DROPOUTS)] if is_list else []
    if not recurrent or not all(isinstance(layer, keras.layers.RNN) for layer in recurrent):
        raise ValueError(
            "`layers` must be a list of at least one keras.layers.LSTM, GRU, SimpleRNN or "
            f"RNN, with optional dropout layers between them. Received: {layers!r}"
        )
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(
            "The layers of a StackedRNN must be different objects, each with its own weights. "
            f"Received: {[layer.name for layer in layers]}"
        )
    for layer in recurrent:
        for name in ("return_sequences", "return_state", "stateful", "go_backwards"):
            needed = name.startswith("return")
            if getattr(layer, name) != needed:
                raise ValueError(
                    f"The layers of a StackedRNN need {name}={needed}: the StackedRNN reads their "
                    f"outputs and carries their states. Received: {layer.name}"
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
