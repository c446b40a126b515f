"""Time-step masks, and the last valid step of each row."""

from collections.abc import Sequence

from keras import ops

from trellis_keras._keras_internals import get_keras_mask
from trellis_keras.types import Tensor


def resolve_mask(inputs: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of a call: the argument if given, else the mask attached to `inputs`.

    Keras ignores the attached mask in calls with several tensor arguments.
    """
    return get_keras_mask(inputs) if mask is None else mask


def flip_time(inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the inputs and the mask of a call, reversed in time."""
    return ops.flip(inputs, axis=1), None if mask is None else ops.flip(mask, axis=1)


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
