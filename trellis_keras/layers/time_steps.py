"""The time steps of a layer's inputs that count, and those that it returns.

`output_length` is the number of last steps to return, None for all. A layer has it as an attribute,
and as a call argument that overrides the attribute.
"""

from collections.abc import Sequence

import keras
from keras import ops

from keras_streams.protocol import check_shape
from trellis_keras._keras_internals import get_keras_mask
from trellis_keras.layers.checks import check_integer
from trellis_keras.types import Tensor


def resolve_mask(inputs: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of a call: the argument if given, else the mask attached to `inputs`.

    Keras ignores the attached mask in calls with several tensor arguments.

    Raises:
        ValueError: If the mask has another number of rows or steps than the inputs.
    """
    mask = get_keras_mask(inputs) if mask is None else mask
    if mask is None:
        return None
    mask = ops.convert_to_tensor(mask)
    check_shape("mask", mask, inputs.shape[:2])
    return mask


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Returns x (batch, time, channels) with zeros, even for NaN, at masked steps."""
    if mask is None:
        return x
    return ops.where(ops.cast(mask, "bool")[..., None], x, ops.zeros_like(x))


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


def output_mask(layer: keras.Layer, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of the steps that a layer returns, or None."""
    if mask is None or not layer.return_sequences:
        return None
    if layer.go_backwards:
        return ops.flip(mask, axis=1)
    return mask if layer.output_length is None else mask[:, -layer.output_length :]


def check_output_length(
    output_length: int | None, return_sequences: bool, go_backwards: bool
) -> None:
    """Raises ValueError unless the arguments of a layer go together."""
    if output_length is None:
        return
    check_integer("output_length", output_length, 1)
    if go_backwards:
        raise ValueError(
            "`go_backwards=True` returns the outputs from the last step to the first, so "
            f"`output_length` must be None. Received: output_length={output_length}"
        )
    if not return_sequences and output_length != 1:
        raise ValueError(
            f"`return_sequences=False` returns one step. Received: output_length={output_length}"
        )


def count_outputs(
    layer: keras.Layer, time: int | None, output_length: int | None = None
) -> int | None:
    """Returns the number of last steps that a call computes, or None for all.

    Args:
        layer: Layer with the attributes `return_sequences`, `go_backwards` and `output_length`.
        time: Length of the input, or None if unknown.
        output_length: The call argument.
    """
    check_output_length(output_length, layer.return_sequences, layer.go_backwards)
    if not layer.return_sequences:
        steps = 1
    else:
        steps = layer.output_length if output_length is None else output_length
    if time is not None and steps is not None and steps > time:
        raise ValueError(
            "`output_length` must be at most the length of the input. "
            f"Received: output_length={steps}, input length {time}"
        )
    return steps


def time_axis(
    layer: keras.Layer, time: int | None, output_length: int | None
) -> tuple[int | None, ...]:
    """Returns the time axis of the output shape, empty without one. See `count_outputs`."""
    steps = count_outputs(layer, time, output_length)
    return (time if steps is None else steps,) if layer.return_sequences else ()


def last_steps(x: Tensor, steps: int | None) -> Tensor:
    """Returns the last `steps` steps of x (batch, time, channels), all of them for None."""
    if steps is None or x.shape[1] is not None:
        return x if steps is None else x[:, -steps:]
    # A graph for any length: unlike `x[:, -steps:]`, a slice fails if there are fewer steps.
    with keras.name_scope("output_length_exceeds_the_length_of_the_input"):
        batch, time, channels = ops.shape(x)
        return ops.slice(x, (0, time - steps, 0), (batch, steps, channels))
