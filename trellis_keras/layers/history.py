"""The state that a stateful layer carries from one batch to the next."""

import keras
from keras import ops


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
            keras.Variable(
                ops.zeros((batch_size, size), dtype=self.compute_dtype),
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
