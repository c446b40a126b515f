"""The arguments `initial_state` and `stateful` of a layer, and the states that it carries."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import shapes_match
from trellis_keras.types import Tensor


class StatefulMixin:
    """The arguments `initial_state` and `stateful` of a layer.

    The states are a flat list of tensors, each (batch, size). A layer with this mixin calls
    `_init_stateful` in its constructor and `_build_state_cache` in `build`. Its `call` starts from
    `_initial_states` and ends with `_carry_states`.

    Attributes:
        stateful: Whether the last states of a batch are the initial states of the next one.
        state_sizes: List of the states' channel counts.
        state_dtype: Dtype of the states.
        state_cache: `StateCache` of a stateful layer.
    """

    states = None  # `keras.layers.Bidirectional` asks for it.

    def _init_stateful(self, state_sizes, dtype, stateful):
        if stateful and getattr(self, "go_backwards", False):
            raise ValueError(
                "With `go_backwards=True` the last states are those at the first step of a batch, "
                "which the next batch does not follow. Received: go_backwards=True, stateful=True"
            )
        self.stateful = stateful
        self.state_sizes = list(state_sizes)
        self.state_dtype = dtype
        if stateful:
            name = f"{self.name}_state_cache"
            self.state_cache = StateCache(self.state_sizes, dtype=dtype, name=name)

    def _build_state_cache(self, batch_size):
        """Allocates states for `batch_size` rows, unless the batch size is unknown."""
        if self.stateful and batch_size is not None:
            for training in (True, False):
                if self.state_cache.batch_size(training) != batch_size:
                    self.state_cache.allocate(batch_size, training)

    def _initial_states(self, batch_size, initial_state, training):
        """Returns the states before the first step, each (batch, size), or None for zeros.

        Args:
            batch_size: Number of rows: an integer, a scalar tensor, or None if unknown.
            initial_state: The call's argument: a list of states, a single state, or None.
            training: Whether to read the carried states of training, or those of evaluation.

        Raises:
            ValueError: States of the wrong number or shape, or no states are carried for this
                batch size.
        """
        if initial_state is None:
            return self.state_cache.read(batch_size, bool(training)) if self.stateful else None
        rows = batch_size if isinstance(batch_size, int) else None
        if not isinstance(initial_state, (list, tuple)):
            initial_state = [initial_state]
        shapes = [tuple(state.shape) for state in initial_state]
        expected = [(rows, size) for size in self.state_sizes]
        if len(shapes) != len(expected) or not all(map(shapes_match, shapes, expected)):
            raise ValueError(
                f"`initial_state` must hold {len(expected)} tensors of shapes {expected}. "
                f"Received shapes: {shapes}"
            )
        return [ops.cast(state, self.state_dtype) for state in initial_state]

    def _carry_states(self, states, training):
        """Keeps the last states for the next batch, if the layer is stateful."""
        if self.stateful:
            self.state_cache.write(states, bool(training))

    def reset_state(self, batch_size: int | None = None, training: bool | None = None) -> None:
        """Resets the carried states of a stateful layer to zeros.

        Args:
            batch_size: Number of rows to allocate. Defaults to the current batch size. (On
                TensorFlow a model compiled for any batch size must be recompiled for the new one:
                `model.make_predict_function(force=True)`, or the same for train or test.
                `LanguageModel` does so automatically.)
            training: True for the states of training, False for those of evaluation, None
                (default) for both.

        Raises:
            ValueError: The layer is not stateful.
        """
        if not self.stateful:
            raise ValueError("`reset_state` needs a layer with `stateful=True`.")
        self.state_cache.reset(batch_size, training)


class StateCache(keras.layers.Layer):
    """Holds the states of a `stateful=True` layer between batches.

    Training and evaluation have separate states: validation during training neither sees nor
    disturbs the training states, and can use another batch size. The states are
    variables of the model (JAX passes them through its compiled steps) but not weights: they are
    neither counted nor saved.

    Each batch size has its own variables, which are never deleted: a compiled function keeps using
    those it was compiled with.

    Args:
        state_sizes: List of channel counts, one per state.
    """

    def __init__(self, state_sizes: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_sizes = list(state_sizes)
        # {training: {batch size: variables}}, hidden from Keras' tracking, which would make them
        # weights.
        object.__setattr__(self, "_by_phase", {True: {}, False: {}})
        self._batch_sizes: dict[bool, int | None] = {True: None, False: None}
        self.built = True

    def allocate(self, batch_size: int, training: bool) -> None:
        """Allocates zero states for `batch_size` rows, and resets all other batch sizes."""
        by_batch_size = self._by_phase[training]
        for state in keras.tree.flatten(by_batch_size):
            state.assign(ops.zeros(state.shape, dtype=state.dtype))
        if batch_size not in by_batch_size:
            by_batch_size[batch_size] = self._make_variables(batch_size, training)
        self._batch_sizes[training] = batch_size

    def allocate_like(self, other: "StateCache") -> None:
        """Allocates zero states for the batch sizes of another cache."""
        for training in (True, False):
            batch_size = other.batch_size(training)
            if batch_size is not None:
                self.allocate(batch_size, training)

    def _make_variables(self, batch_size, training):
        phase = "training" if training else "evaluation"
        with keras.name_scope(self.name):
            return [
                # The initializer by name: an array could not be kept while JAX traces shapes.
                keras.Variable(
                    "zeros",
                    shape=(batch_size, size),
                    dtype=self.compute_dtype,
                    trainable=False,
                    autocast=False,
                    name=f"{phase}_state_{i}_of_{batch_size}_rows",
                )
                for i, size in enumerate(self.state_sizes)
            ]

    def batch_size(self, training: bool) -> int | None:
        """Returns the batch size of this phase's states, or None if they are unallocated."""
        return self._batch_sizes[training]

    def state_variables(self, training: bool) -> list[keras.Variable]:
        """Returns the variables of this phase for its current batch size."""
        return self._by_phase[training].get(self._batch_sizes[training], [])

    def read(self, batch_size: int | Tensor | None, training: bool) -> list[Tensor]:
        """Returns the carried states, each (batch, size), with the gradient stopped.

        Args:
            batch_size: Number of rows: an integer, a scalar tensor, or None if unknown.
            training: Which phase.

        Raises:
            ValueError: No states are allocated for this batch size.
        """
        allocated = self.batch_size(training)
        if allocated is None:
            raise ValueError(
                "A layer with `stateful=True` needs a fixed batch size: build it with the full "
                "shape (batch, time, channels), or call `reset_state(batch_size)` first."
            )
        is_static = isinstance(batch_size, int)
        if is_static and batch_size != allocated:
            raise ValueError(
                f"The carried state is for batches of {allocated} rows. "
                f"Received: {batch_size} rows. "
                "Call `reset_state(batch_size)` to start with another batch size."
            )
        # Copies: on PyTorch, values are the variables' own storage, which `write` overwrites.
        states = [
            ops.copy(ops.stop_gradient(state.value)) for state in self.state_variables(training)
        ]
        if batch_size is None or is_static:
            return states
        # A graph for any batch size reads the states of a single one. The concatenation makes it
        # fail for any other, where broadcasting could silently reuse one row. The slice keeps the
        # number of rows unknown, as in the inputs: the shape of a loop's states must not change.
        with keras.name_scope("carried_states_are_for_another_batch_size"):
            column = ops.zeros((batch_size, 1), self.compute_dtype)
            padded = [ops.concatenate([state, column], axis=1) for state in states]
        return [
            ops.slice(state, (0, 0), (batch_size, size))
            for state, size in zip(padded, self.state_sizes, strict=True)
        ]

    def write(self, states: Sequence[Tensor], training: bool) -> None:
        """Assigns the carried states of a phase."""
        for variable, state in zip(self.state_variables(training), states, strict=True):
            variable.assign(ops.stop_gradient(state))

    def reset(self, batch_size: int | None = None, training: bool | None = None) -> None:
        """Resets the states of one phase, or of both (`training=None`), to zeros."""
        for phase in (True, False) if training is None else (bool(training),):
            size = batch_size or self.batch_size(phase)
            if size is not None:
                self.allocate(size, phase)

    @property
    def variables(self) -> list[keras.Variable]:
        return keras.tree.flatten(self._by_phase)

    @property
    def non_trainable_variables(self) -> list[keras.Variable]:
        return self.variables

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        return []

    @property
    def weights(self) -> list[keras.Variable]:
        return []

    def save_own_variables(self, store: Any) -> None:
        """Saves nothing: the states are not part of the model."""

    def load_own_variables(self, store: Any) -> None:
        """Loads nothing, see `save_own_variables`."""
