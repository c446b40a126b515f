"""The state that a stateful layer carries from one batch to the next."""

import keras
from keras import ops

from trellis_keras.layers.arguments import compatible


class CarriedState:
    """What a layer with states needs to take them as an argument and to carry them.

    The states are a flat list of tensors, each (batch, size). A layer that mixes this in

    - calls `_init_states` in its constructor, and `_allocate_states` in `build`;
    - starts from `_starting_states` in `call`, and hands its last states to `_carry_states`.

    Attributes:
        stateful: Whether the last states of a batch are the first ones of the next.
        state_sizes: List of the states' channel counts.
        state_dtype: Their dtype.
        history: `History` of a stateful layer. Others have none.
    """

    def _init_states(self, state_sizes, dtype, stateful):
        self.stateful = stateful
        self.state_sizes = list(state_sizes)
        self.state_dtype = dtype
        if stateful:
            self.history = History(self.state_sizes, dtype=dtype)

    def _allocate_states(self, batch):
        """Makes room for the states of `batch` rows, if that many are known to come."""
        if self.stateful and batch is not None:
            for training in (True, False):
                if self.history.batch_size(training) != batch:
                    self.history.allocate(batch, training)

    def _starting_states(self, batch, initial_state, training):
        """Returns the states before the first step, each (batch, size), or None for zeros.

        Args:
            batch: Number of rows, or None if it is not known.
            initial_state: The call's argument: a list of states, one alone, or None.
            training: Whether the carried states of training are wanted, or those of evaluation.

        Raises:
            ValueError: States of the wrong number or shape, or none are carried for this batch
                size.
        """
        if initial_state is None:
            return self.history.read(batch, bool(training)) if self.stateful else None
        if not isinstance(initial_state, (list, tuple)):
            initial_state = [initial_state]
        shapes = [tuple(state.shape) for state in initial_state]
        wanted = [(batch, size) for size in self.state_sizes]
        right = len(shapes) == len(wanted) and all(map(compatible, shapes, wanted))
        if not right:
            raise ValueError(
                f"`initial_state` must hold {len(wanted)} tensors of shapes {wanted}. "
                f"Received shapes: {shapes}"
            )
        return [ops.cast(state, self.state_dtype) for state in initial_state]

    def _carry_states(self, states, training):
        """Keeps the last states for the next batch, if the layer is stateful."""
        if self.stateful:
            self.history.write(states, bool(training))

    def reset_state(self, batch_size=None, training=None):
        """Zeroes the carried states of a stateful layer.

        Args:
            batch_size: Number of rows to allocate. Default: as before.
            training: Which states: those of training, of evaluation, or (None) both.

        Raises:
            ValueError: The layer is not stateful.
        """
        if not self.stateful:
            raise ValueError("`reset_state` needs a layer with `stateful=True`.")
        self.history.reset(batch_size, training)


class History(keras.layers.Layer):
    """Holds the states of a `stateful=True` layer between batches.

    Training and evaluation each have their own, so that a validation in the middle of training
    neither sees nor disturbs the training state, and may use another batch size. The states are
    variables of the model (JAX hands them through its compiled steps) but not weights: they are
    neither counted nor saved with them.

    Args:
        state_size: List of channel counts, one per state.
    """

    def __init__(self, state_size, **kwargs):
        super().__init__(**kwargs)
        self.state_size = list(state_size)
        # A plain attribute: Keras' tracking would make weights of the variables.
        object.__setattr__(self, "_states", {True: [], False: []})
        self.built = True

    def allocate(self, batch_size, training):
        """Makes zero states for `batch_size` rows, or zeroes those that are there."""
        states = self._states[training]
        if states and states[0].shape[0] == batch_size:
            for state in states:
                state.assign(ops.zeros(state.shape, dtype=state.dtype))
            return
        phase = "training" if training else "evaluation"
        self._states[training] = [
            # By name: while JAX works out shapes, a model can make no array that it keeps.
            keras.Variable(
                "zeros",
                shape=(batch_size, size),
                dtype=self.compute_dtype,
                trainable=False,
                name=f"{phase}_state_{i}",
            )
            for i, size in enumerate(self.state_size)
        ]

    def batch_size(self, training):
        """Rows of the states held for this phase, or None if there are none yet."""
        states = self._states[training]
        return states[0].shape[0] if states else None

    def held(self, training):
        """The variables of this phase. `allocate` makes other ones for another batch size."""
        return self._states[training]

    def read(self, batch_size, training):
        """Returns the carried states, each (batch, size), with the gradient stopped.

        Raises:
            ValueError: No states are allocated, or for another batch size.
        """
        held = self.batch_size(training)
        if held is None:
            raise ValueError(
                "A layer with `stateful=True` needs a fixed batch size: build it with the whole "
                "shape (batch, time, channels), or call `reset_state(batch_size)` first."
            )
        if batch_size is not None and batch_size != held:
            raise ValueError(
                f"The carried state is for batches of {held} rows. Received: {batch_size} rows. "
                "Call `reset_state(batch_size)` to start with another batch size."
            )
        return [ops.stop_gradient(state.value) for state in self._states[training]]

    def write(self, states, training):
        for variable, state in zip(self._states[training], states, strict=True):
            variable.assign(ops.stop_gradient(state))

    def reset(self, batch_size=None, training=None):
        """Zeroes the states of one phase, or of both (`training=None`)."""
        for phase in (True, False) if training is None else (bool(training),):
            size = batch_size or self.batch_size(phase)
            if size is not None:
                self.allocate(size, phase)

    @property
    def variables(self):
        return [*self._states[True], *self._states[False]]

    @property
    def non_trainable_variables(self):
        return self.variables

    @property
    def trainable_variables(self):
        return []

    @property
    def weights(self):
        return []

    def save_own_variables(self, store):
        """Saves nothing: the history belongs to a run, not to the model."""

    def load_own_variables(self, store):
        """Loads nothing, see `save_own_variables`."""
