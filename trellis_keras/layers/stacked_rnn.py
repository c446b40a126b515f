"""A stack of Keras' recurrent layers that streams and carries its states."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.parts import RATES_LOCK, cell_step, take, without_dropout
from keras_streams.protocol import at_least_float32, check_start, check_stream
from trellis_keras import kernels
from trellis_keras.kernels import recurrent_loop
from trellis_keras.kernels.activations import tanh
from trellis_keras.layers.checks import (
    check_has_steps,
    sequence_spec,
)
from trellis_keras.layers.masks import last_step, resolve_mask
from trellis_keras.layers.recurrent_cell import RecurrentCell
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.stateful import StatefulLayer
from trellis_keras.types import Cache, Shape, Shapes, Tensor

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
