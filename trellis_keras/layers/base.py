"""Code shared by the layers: argument checks, seeds, precision, and three mixins.

- `OutputLengthMixin`: the arguments `return_sequences` and `output_length`;
- `StatefulMixin`: `initial_state` and `stateful`, with a `StateCache` for the carried states;
- `SublayersMixin`: saves which sublayers have `trainable=False` or were quantized.
"""

import contextlib
import math
import numbers
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask  # traced JAX arrays have no `_keras_mask`

from keras_streams.protocol import check_shape, shapes_match
from trellis_keras.types import Initializer, Shape, Tensor

# Argument checks


def is_integer(value: Any, minimum: float = -math.inf) -> bool:
    """Returns whether a value is an integer of Python or NumPy, and at least `minimum`."""
    is_integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integral and value >= minimum


def check_integer(name: str, value: Any, minimum: float = -math.inf) -> int:
    """Returns an argument as a Python integer (NumPy integers are not JSON serializable).

    Raises:
        ValueError: It is not an integer, or less than `minimum`.
    """
    if not is_integer(value, minimum):
        wanted = {-math.inf: "an integer", 1: "a positive integer"}
        wanted = wanted.get(minimum, f"an integer >= {minimum}")
        raise ValueError(f"`{name}` must be {wanted}. Received: {name}={value!r}")
    return int(value)


def check_positive(**arguments: Any) -> tuple[int, ...]:
    """Returns the arguments as Python integers.

    Raises:
        ValueError: An argument is not a positive integer.
    """
    return tuple(check_integer(name, value, minimum=1) for name, value in arguments.items())


def check_tokens(tokens: Any, vocabulary_size: int) -> None:
    """Raises ValueError unless `tokens` is an array of integers in [0, vocabulary_size).

    Embedding lookups outside this range are silent on some backends.
    """
    tokens = np.asanyarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"Token ids must be integers in [0, {vocabulary_size}). "
            f"Received: an array of type {tokens.dtype}"
        )
    if tokens.size == 0:
        return
    for value in (tokens.min(), tokens.max()):
        if not 0 <= value < vocabulary_size:
            raise ValueError(f"Token ids must lie in [0, {vocabulary_size}). Received: {value}")


def sequence_spec(layer: keras.Layer, input_shape: Shape) -> keras.layers.InputSpec:
    """Returns the input spec of a layer built for sequences (batch, time, channels).

    Raises:
        ValueError: `input_shape` is not of rank 3.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"{type(layer).__name__} needs inputs (batch, time, channels). "
            f"Received: input_shape={tuple(input_shape)}"
        )
    return keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})


def dilation_cycle(dilation_rate: int | Sequence[int]) -> list[int]:
    """Returns the dilations as a list, from one positive integer or a sequence of them."""
    if is_integer(dilation_rate):
        dilation_rate = [dilation_rate]
    cycle = list(dilation_rate)
    if not cycle:
        raise ValueError("`dilation_rate` must not be empty.")
    return [n for d in cycle for n in check_positive(dilation_rate=d)]


def check_condition(condition: Tensor | None, condition_size: int | None) -> None:
    """Raises ValueError unless a call's `condition` matches `condition_size`."""
    if condition_size is None and condition is not None:
        raise ValueError(
            "`condition` needs a layer with `condition_size`, the number of its channels. "
            f"Received: condition of shape {tuple(condition.shape)}, condition_size=None"
        )
    if condition_size is not None and condition is None:
        raise ValueError(
            f"A layer with condition_size={condition_size} needs `condition`, a tensor (batch, "
            f"{condition_size}), in its call and in `initial_cache`. Received: condition=None"
        )
    if condition is not None:
        check_shape("condition", condition, (None, condition_size))


def check_has_steps(layer: keras.Layer, inputs: Tensor) -> None:
    """Raises ValueError for inputs (batch, 0, channels)."""
    if inputs.shape[1] == 0:
        raise ValueError(
            f"{layer.name} needs at least one time step. Received: shape {tuple(inputs.shape)}"
        )


def resolve_mask(inputs: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of a call: the argument if given, else the mask attached to `inputs`.

    Keras ignores the attached mask in calls with several tensor arguments.
    """
    return get_keras_mask(inputs) if mask is None else mask


def flip_time(inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the inputs and the mask of a call, reversed in time."""
    return ops.flip(inputs, axis=1), None if mask is None else ops.flip(mask, axis=1)


# Seeds and initializers


def sub_seed(seed: int | None, *path: int | str) -> int | None:
    """Returns an independent seed for one part of a layer or model.

    All layers and models derive their seeds with this function, so no two parts draw the same
    numbers, whether they share a seed or not.

    Args:
        seed: Integer or None.
        *path: Strings and integers that identify the part: its class, then its place in the class.
    """
    if seed is None:
        return None
    parts = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed % 2**32, *parts]).generate_state(1)[0] >> 1)


def seeded(initializer: Initializer, seed: int | None, *path: int | str) -> Initializer:
    """Returns a copy of an initializer with the seed of a part of a layer.

    An initializer with an integer seed draws the same numbers on every call, so parts that share
    it would start out equal.

    Args:
        initializer: Keras initializer. Its own seed takes precedence over `seed`.
        seed: Integer or None.
        *path: See `sub_seed`.
    """
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    own = config.get("seed", False)
    if own is not None and (isinstance(own, bool) or not isinstance(own, int)):
        return initializer  # it is deterministic, or has a SeedGenerator
    base = seed if own is None else own
    if base is None:
        return initializer.clone()
    return type(initializer).from_config({**config, "seed": sub_seed(base, *path)})


# Precision


@contextlib.contextmanager
def default_policy(name: str | None) -> Iterator[None]:
    """Context in which layers get the dtype policy `name`. None changes nothing."""
    before = keras.config.dtype_policy()
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


# Mixins


class OutputLengthMixin:
    """The arguments `return_sequences` and `output_length` of a layer.

    Attributes:
        return_sequences: Whether to return all steps, or only the last one.
        go_backwards: Whether to read the input from its last step to its first.
        output_length: Number of last steps to return, None for all. The call argument of the
            same name overrides it.
    """

    def _init_output_length(self, return_sequences, output_length, go_backwards):
        self.return_sequences = return_sequences
        self.go_backwards = go_backwards
        self._check_output_length(output_length)
        self.output_length = output_length

    def _check_output_length(self, output_length):
        if output_length is None:
            return
        check_positive(output_length=output_length)
        if self.go_backwards:
            raise ValueError(
                "`go_backwards=True` returns the outputs from the last step to the first, so "
                f"`output_length` must be None. Received: output_length={output_length}"
            )
        if not self.return_sequences and output_length != 1:
            raise ValueError(
                "`return_sequences=False` returns one step. "
                f"Received: output_length={output_length}"
            )

    def _check_time(self, time, output_length):
        """Checks a call's `output_length`, and that the input is long enough for it."""
        self._check_output_length(output_length)
        output_length = self._output_steps(output_length)
        if None not in (time, output_length) and output_length > time:
            raise ValueError(
                f"`output_length` must be at most the length of the input. "
                f"Received: output_length={output_length}, input length {time}"
            )

    def _last_steps(self, x, steps):
        """Returns the last `steps` steps of x (batch, time, channels), all of them for None."""
        if steps is None or x.shape[1] is not None:
            return x if steps is None else x[:, -steps:]
        # A graph for any length: unlike `x[:, -steps:]`, a slice fails if there are fewer steps.
        with keras.name_scope("output_length_exceeds_the_length_of_the_input"):
            batch, time, channels = ops.shape(x)
            return ops.slice(x, (0, time - steps, 0), (batch, steps, channels))

    def _output_steps(self, output_length=None):
        """Returns the number of last steps that a call returns, None for all."""
        if not self.return_sequences:
            return 1
        return self.output_length if output_length is None else output_length

    def _time_axis(self, time, output_length=None):
        """Returns the time axis of the output shape as a tuple, empty if there is none."""
        steps = self._output_steps(output_length)
        return (time if steps is None else steps,) if self.return_sequences else ()

    def _output_mask(self, mask):
        """Returns the mask of the returned steps, or None."""
        if mask is None or not self.return_sequences:
            return None
        if self.go_backwards:
            return ops.flip(mask, axis=1)
        return mask if self.output_length is None else mask[:, -self.output_length :]


def last_step(
    states: Sequence[Tensor], initial_states: Sequence[Tensor] | None, mask: Tensor | None
) -> list[Tensor]:
    """Returns the states of each row at its last step, or with a mask at its last valid step.

    Args:
        states: List of tensors (batch, time, units). Without a mask, any part of the sequence that
            ends with the last step.
        initial_states: List of tensors (batch, units) for rows without a valid step, or None for
            zeros.
        mask: Boolean (batch, time), or None.
    """
    if mask is None:
        return [state[:, -1] for state in states]
    steps = ops.cumsum(ops.ones_like(mask, dtype="int32"), axis=1)
    last = ops.max(ops.where(ops.cast(mask, "bool"), steps, 0), axis=1)[:, None, None]
    if initial_states is None:
        before = [ops.zeros_like(state[:, :1]) for state in states]
    else:
        before = [state[:, None] for state in initial_states]
    padded = [ops.concatenate(pair, axis=1) for pair in zip(before, states, strict=True)]
    return [ops.take_along_axis(state, last, axis=1)[:, 0] for state in padded]


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
        """Returns the batch size of this phase's states, or None if none are allocated."""
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


class SublayersMixin(keras.layers.Layer):
    """Saves which sublayers of a layer or model have `trainable=False` or were quantized by Keras.

    Keras saves both in the config of layers that are constructor arguments, but sublayers created
    by the constructor have no config in the file.
    """

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        parts = list(enumerate(self._flatten_layers()))
        frozen = [i for i, part in parts if not part.trainable]
        quantized = {
            str(i): keras.saving.serialize_keras_object(part.quantization_config)
            for i, part in parts
            if getattr(part, "quantization_config", None) is not None
        }
        found = {"frozen": frozen, "quantized": quantized}
        found = {name: value for name, value in found.items() if value}
        return {**(config or {}), **found} if found else config

    def build_from_config(self, config: dict[str, Any] | None) -> None:
        config = dict(config or {})
        frozen, quantized = config.pop("frozen", ()), config.pop("quantized", {})
        super().build_from_config(config)
        parts = list(self._flatten_layers())
        for i in frozen:
            parts[i].trainable = False
        for i, how in quantized.items():
            # Unless a layer within this one has done so.
            if parts[int(i)].quantization_mode is None:
                how = keras.saving.deserialize_keras_object(how)
                parts[int(i)].quantize(how.mode, config=how)
