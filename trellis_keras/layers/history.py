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
            self.history = History(self.state_sizes, dtype=dtype, name=f"{self.name}_history")

    def _allocate_states(self, batch):
        """Makes room for the states of `batch` rows, if that many are known to come."""
        if self.stateful and batch is not None:
            for training in (True, False):
                if self.history.batch_size(training) != batch:
                    self.history.allocate(batch, training)

    def _starting_states(self, batch, initial_state, training):
        """Returns the states before the first step, each (batch, size), or None for zeros.

        Args:
            batch: Number of rows: an integer, a scalar tensor, or None if it is not known.
            initial_state: The call's argument: a list of states, one alone, or None.
            training: Whether the carried states of training are wanted, or those of evaluation.

        Raises:
            ValueError: States of the wrong number or shape, or none are carried for this batch
                size.
        """
        if initial_state is None:
            return self.history.read(batch, bool(training)) if self.stateful else None
        batch = _static(batch)
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
            batch_size: Number of rows to allocate. Default: as before. (Where TensorFlow has
                compiled a model for any batch size, it must compile it for this one again:
                `model.make_predict_function(force=True)`, or that of train or test. A
                `LanguageModel` sees to that.)
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

    Each batch size has variables of its own, which stay: a function that was compiled for one goes
    on with the variables that it was compiled with.

    Args:
        state_size: List of channel counts, one per state.
    """

    def __init__(self, state_size, **kwargs):
        super().__init__(**kwargs)
        self.state_size = list(state_size)
        # A plain attribute: Keras' tracking would make weights of the variables.
        object.__setattr__(self, "_states", {True: {}, False: {}})
        self._rows = {True: None, False: None}
        self.built = True

    def allocate(self, batch_size, training):
        """Makes zero states for `batch_size` rows, and zeroes those that are there."""
        states = self._states[training]
        for state in keras.tree.flatten(states):
            state.assign(ops.zeros(state.shape, dtype=state.dtype))
        if batch_size not in states:
            states[batch_size] = self._zeros(batch_size, training)
        self._rows[training] = batch_size

    def allocate_as(self, other):
        """Makes zero states for as many rows as another history has them."""
        for training in (True, False):
            if other.batch_size(training) is not None:
                self.allocate(other.batch_size(training), training)

    def _zeros(self, batch_size, training):
        phase = "training" if training else "evaluation"
        with keras.name_scope(self.name):
            return [
                # By name: while JAX works out shapes, a model can make no array that it keeps.
                keras.Variable(
                    "zeros",
                    shape=(batch_size, size),
                    dtype=self.compute_dtype,
                    trainable=False,
                    autocast=False,
                    name=f"{phase}_state_{i}_of_{batch_size}_rows",
                )
                for i, size in enumerate(self.state_size)
            ]

    def batch_size(self, training):
        """Rows of the states held for this phase, or None if there are none yet."""
        return self._rows[training]

    def held(self, training):
        """The variables of this phase, other ones for each batch size."""
        return self._states[training].get(self._rows[training], [])

    def read(self, batch_size, training):
        """Returns the carried states, each (batch, size), with the gradient stopped.

        Args:
            batch_size: Rows of the batch, as in `CarriedState._starting_states`.
            training: Which phase.

        Raises:
            ValueError: No states are allocated, or for another batch size.
        """
        held = self.batch_size(training)
        if held is None:
            raise ValueError(
                "A layer with `stateful=True` needs a fixed batch size: build it with the whole "
                "shape (batch, time, channels), or call `reset_state(batch_size)` first."
            )
        if _static(batch_size) not in (None, held):
            raise ValueError(
                f"The carried state is for batches of {held} rows. Received: {batch_size} rows. "
                "Call `reset_state(batch_size)` to start with another batch size."
            )
        states = [ops.stop_gradient(state.value) for state in self.held(training)]
        if batch_size is None or _static(batch_size):
            return states
        # A graph for any batch size is made for the states of one. With another it must fail, as
        # this concatenation does: what follows might take one row for all.
        with keras.name_scope("carried_states_are_for_another_batch_size"):
            column = ops.zeros((batch_size, 1), self.compute_dtype)
            return [ops.concatenate([state, column], axis=1)[:, :-1] for state in states]

    def write(self, states, training):
        for variable, state in zip(self.held(training), states, strict=True):
            variable.assign(ops.stop_gradient(state))

    def reset(self, batch_size=None, training=None):
        """Zeroes the states of one phase, or of both (`training=None`)."""
        for phase in (True, False) if training is None else (bool(training),):
            size = batch_size or self.batch_size(phase)
            if size is not None:
                self.allocate(size, phase)

    @property
    def variables(self):
        return keras.tree.flatten(self._states)

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


def _static(batch_size):
    """The batch size if it is known while a graph is made, else None."""
    return batch_size if isinstance(batch_size, int) else None
