"""The arguments `return_sequences`, `go_backwards` and `output_length` of a layer.

`output_length` is the number of last steps to return, None for all. A layer has it as an attribute,
and as a call argument that overrides the attribute.
"""

import keras
from keras import ops

from trellis_keras.layers.checks import check_positive
from trellis_keras.types import Tensor


def check_output_length(
    output_length: int | None, return_sequences: bool, go_backwards: bool
) -> None:
    """Raises ValueError unless the arguments of a layer go together."""
    if output_length is None:
        return
    check_positive(output_length=output_length)
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


def output_mask(layer: keras.Layer, mask: Tensor | None) -> Tensor | None:
    """Returns the mask of the steps that a layer returns, or None."""
    if mask is None or not layer.return_sequences:
        return None
    if layer.go_backwards:
        return ops.flip(mask, axis=1)
    return mask if layer.output_length is None else mask[:, -layer.output_length :]
