"""The base class of layers that stream, start from given states and carry them between batches."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import (
    StreamingMixin,
    at_least_float32,
    check_start,
    check_stream,
    shapes_match,
)
from trellis_keras._keras_internals import AutocastScope
from trellis_keras.layers.checks import check_has_steps
from trellis_keras.layers.saving import ConfigMixin, SublayersMixin
from trellis_keras.layers.time_steps import flip_time, last_step, output_mask, resolve_mask
from trellis_keras.types import Cache, Specs, Tensor


class StatefulLayer(ConfigMixin, SublayersMixin, StreamingMixin, keras.layers.Layer):
    """Base class of layers with the arguments `initial_state`, `return_state` and `stateful`.

    The states are a flat list of tensors, each (batch, size). A subclass sets `return_sequences`,
    `return_state` and `state_sizes` in its constructor and calls `build_states` in `build`. If its
    stream keeps only the states, it defines `step` and `run_steps`. Otherwise it defines the
    streaming methods itself, and a `call` that begins with `initial_states` and ends with
    `carry_states`.

    Args:
        stateful: Boolean, whether the last states of a batch are the initial states of the next
            one.

    Attributes:
        state_sizes: List of the states' channel counts.
        state_dtype: Dtype of the states, at least float32.
    """

    return_sequences: bool
    return_state: bool
    return_aux = False
    go_backwards = False
    output_length: int | None = None
    states = None  # `keras.layers.Bidirectional` asks for it.

    def __init__(self, *, stateful: bool, **kwargs: Any) -> None:
        # Inputs are cast in `call`: Keras' autocast would cast initial states to half precision.
        super().__init__(autocast=False, **kwargs)
        self.stateful = stateful
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)
        self.state_sizes: list[int] = []
        self.state_dtype = at_least_float32(self.compute_dtype)
        if stateful:
            self.training_states = CarriedStates(self.name, "training", self.state_dtype)
            self.evaluation_states = CarriedStates(self.name, "evaluation", self.state_dtype)

    @property
    def is_causal(self) -> bool:
        """Whether no output depends on later inputs."""
        return not self.go_backwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Keras casts the variables of an outermost layer even with `autocast=False`.
        with AutocastScope(None):
            return super().__call__(*args, **kwargs)

    def run_steps(
        self,
        x: Tensor,
        states: Sequence[Tensor] | None,
        mask: Tensor | None = None,
        training: bool = False,
        last_only: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the outputs of all steps, or of at least the last one, and the last states.

        Args:
            x: Tensor (batch, time, channels).
            states: The states before the first step, or None for zeros.
            mask, training: As in the call.
            last_only: Boolean, whether only the output of the last step is needed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `run_steps`.")

    def call(
        self,
        inputs: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        training: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        check_has_steps(self, inputs)
        training, mask = bool(training), resolve_mask(inputs, mask)
        if self.go_backwards:
            inputs, mask = flip_time(inputs, mask)
        states = self.initial_states(ops.shape(inputs)[0], initial_state, training)
        last_only = not self.return_sequences and mask is None
        y, states = self.run_steps(inputs, states, mask, training, last_only)
        self.carry_states(states, training)
        y = y if self.return_sequences else last_step([y], None, mask)[0]
        return (y, *states) if self.return_state else y

    # Streaming

    def initial_cache(
        self, batch_size: int, initial_state: Sequence[Tensor] | None = None
    ) -> Cache:
        """Returns the cache before the first step: the flat list of the states.

        Args:
            batch_size: Positive integer, number of rows.
            initial_state: As in the call. Defaults to `None`, zeros.
        """
        check_start(self, batch_size)
        if initial_state is not None:
            return self.given_states(initial_state, batch_size)
        return [ops.zeros((batch_size, size), self.state_dtype) for size in self.state_sizes]

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        return self.run_steps(*check_stream(self, x, cache))

    def cache_shapes(self, batch_size: int | None) -> Any:
        return [[batch_size, size] for size in self.state_sizes]

    # States

    def carried_states(self, training: bool) -> "CarriedStates":
        """Returns the carried states of a stateful layer, of training or of evaluation."""
        return self.training_states if training else self.evaluation_states

    def build_states(self, batch_size: int | None) -> None:
        """Allocates the carried states, unless the batch size is unknown."""
        if self.stateful and batch_size is not None:
            self.reset_state(batch_size)

    def initial_states(
        self,
        batch_size: int | Tensor | None,
        initial_state: Tensor | Sequence[Tensor] | None,
        training: bool,
    ) -> list[Tensor] | None:
        """Returns the states before the first step, each (batch, size), or None for zeros.

        Args:
            batch_size: Number of rows: an integer, a scalar tensor, or None if unknown.
            initial_state: The call's argument: a list of states, a single state, or None.
            training: Boolean, whether to read the carried states of training, or those of
                evaluation.
        """
        if initial_state is None:
            if not self.stateful:
                return None
            return self.carried_states(training).read(batch_size)
        return self.given_states(initial_state, batch_size if isinstance(batch_size, int) else None)

    def given_states(
        self, initial_state: Tensor | Sequence[Tensor], rows: int | None
    ) -> list[Tensor]:
        """Returns the argument `initial_state` of a call or of `initial_cache` as a list."""
        if not isinstance(initial_state, (list, tuple)):
            initial_state = [initial_state]
        shapes = [tuple(np.shape(state)) for state in initial_state]
        expected = [(rows, size) for size in self.state_sizes]
        if len(shapes) != len(expected) or not all(map(shapes_match, shapes, expected)):
            raise ValueError(
                f"`initial_state` must hold {len(expected)} tensors of shapes {expected}. "
                f"Received shapes: {shapes}"
            )
        return [ops.cast(state, self.state_dtype) for state in initial_state]

    def carry_states(self, states: Sequence[Tensor] | None, training: bool) -> None:
        """Keeps the last states for the next batch, if the layer is stateful."""
        if self.stateful and states is not None:
            self.carried_states(training).write(states)

    def reset_state(self, batch_size: int | None = None, training: bool | None = None) -> None:
        """Resets the carried states of a stateful layer to zeros.

        Args:
            batch_size: Number of rows to allocate. Defaults to `None`, the current batch size. (On
                TensorFlow a model compiled for any batch size must be recompiled for the new one:
                `model.make_predict_function(force=True)`, or the same for train or test.
                `LanguageModel` does so automatically.)
            training: True for the states of training, False for those of evaluation, None
                (default) for both.
        """
        if not self.stateful:
            raise ValueError("`reset_state` needs a layer with `stateful=True`.")
        for phase in (True, False) if training is None else (training,):
            self.carried_states(phase).reset(batch_size, self.state_sizes)

    def compute_mask(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor | tuple | None:
        """Returns a mask for y, the only output with a time axis, and None for other outputs."""
        mask = output_mask(self, mask)
        others = int(self.return_aux) + (len(self.state_sizes) if self.return_state else 0)
        return (mask, *[None] * others) if others else mask

    def compute_output_spec(
        self,
        inputs: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        training: bool = False,
        **kwargs: Any,
    ) -> Specs:
        if initial_state is not None:
            self.given_states(initial_state, inputs.shape[0])
        shapes = self.compute_output_shape(inputs.shape, **kwargs)
        if isinstance(shapes[0], tuple):  # the states have a dtype of their own
            n_states = len(self.state_sizes) if self.return_state else 0
            dtypes = [self.compute_dtype] * (len(shapes) - n_states) + [self.state_dtype] * n_states
            return tuple(map(keras.KerasTensor, shapes, dtypes))
        return keras.KerasTensor(shapes, self.compute_dtype)


def check_direction(stateful: bool, go_backwards: bool) -> None:
    """Raises ValueError for a stateful layer that reads backwards."""
    if stateful and go_backwards:
        raise ValueError(
            "With `go_backwards=True` the last states are those at the first step of a batch, "
            "which the next batch does not follow. Received: go_backwards=True, stateful=True"
        )


class CarriedStates(keras.layers.Layer):
    """The states that a stateful layer carries from batch to batch, zeros at first.

    `keras.layers.RNN` has one set of variables, built for one batch size. Here

    - training and evaluation have their own, so that a validation neither sees nor disturbs the
      states of training, and may have another batch size;
    - each batch size has its own: a compiled function keeps using those that it was compiled with;
    - they are variables of the model, which JAX passes through its compiled steps, but not weights:
      they are neither counted nor saved.

    Args:
        layer: String, name of the layer.
        phase: `"training"` or `"evaluation"`.
        dtype: Dtype of the states.

    Attributes:
        rows: The current batch size, or None if there are no states yet.
    """

    def __init__(self, layer: str, phase: str, dtype: str) -> None:
        super().__init__(name=f"{layer}_{phase}_states", dtype=dtype)
        self.rows: int | None = None
        self.built = True

    @property
    def current(self) -> list[keras.Variable]:
        """The states of the current batch size, each (rows, size)."""
        return [state for state in self.variables if state.shape[0] == self.rows]

    def reset(self, rows: int | None, sizes: Sequence[int]) -> None:
        """Resets all states to zeros, and allocates those of a new batch size."""
        for state in self.variables:
            state.assign(ops.zeros(state.shape, state.dtype))
        self.rows = self.rows if rows is None else rows
        if self.rows is not None and not self.current:
            for i, size in enumerate(sizes):
                name, shape = f"state_{i}_of_{self.rows}_rows", (self.rows, size)
                # The initializer by name: an array could not be kept while JAX traces shapes.
                self.add_weight(shape, "zeros", trainable=False, autocast=False, name=name)

    def read(self, batch_size: int | Tensor | None) -> list[Tensor]:
        """Returns the states, each (batch, size), with the gradient stopped.

        Args:
            batch_size: Number of rows: an integer, a scalar tensor, or None if unknown.
        """
        if self.rows is None:
            raise ValueError(
                "A layer with `stateful=True` needs a fixed batch size: build it with the full "
                "shape (batch, time, channels), or call `reset_state(batch_size)` first."
            )
        is_static = isinstance(batch_size, int)
        if is_static and batch_size != self.rows:
            raise ValueError(
                f"The carried state is for batches of {self.rows} rows. "
                f"Received: {batch_size} rows. "
                "Call `reset_state(batch_size)` to start with another batch size."
            )
        # Copies: on PyTorch, values are the variables' own storage, which `write` overwrites.
        states = [ops.copy(ops.stop_gradient(state.value)) for state in self.current]
        if batch_size is None or is_static:
            return states
        # A graph for any batch size reads the states of a single one. The concatenation makes it
        # fail for any other, where broadcasting could silently reuse one row. The slice keeps the
        # number of rows unknown, as in the inputs: the shape of a loop's states must not change.
        with keras.name_scope("carried_states_are_for_another_batch_size"):
            column = ops.zeros((batch_size, 1), self.compute_dtype)
            padded = [ops.concatenate([state, column], axis=1) for state in states]
        pairs = zip(padded, states, strict=True)
        return [ops.slice(wide, (0, 0), (batch_size, state.shape[1])) for wide, state in pairs]

    def write(self, states: Sequence[Tensor]) -> None:
        """Assigns the states."""
        for variable, state in zip(self.current, states, strict=True):
            variable.assign(ops.stop_gradient(state))

    @property
    def weights(self) -> list[keras.Variable]:
        return []

    def save_own_variables(self, store: Any) -> None:
        """Saves nothing: the states are not part of the model."""

    def load_own_variables(self, store: Any) -> None:
        """Loads nothing, see `save_own_variables`."""
