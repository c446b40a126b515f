"""What recurrent cells with several blocks have in common: checks of a call, and bias blocks."""

from keras import ops

from trellis_keras.layers import streaming


def check_call(cell, inputs, states, widths):
    """Refuses inputs and states of a cell that do not fit it.

    Args:
        cell: A cell; its `state_size` says which states it has.
        inputs: Tensor (batch, channels).
        states: What the cell was called with.
        widths: Numbers of channels that the inputs may have.

    Raises:
        ValueError: The inputs have another width, there is another number of states, or one is of
            the wrong shape. The message says what was received and what would be right.
    """
    if len(inputs.shape) != 2 or inputs.shape[-1] not in widths:
        wanted = " or ".join(f"(batch, {width})" for width in widths)
        raise ValueError(
            f"The inputs of {cell.name} must have shape {wanted}. "
            f"Received: shape {tuple(inputs.shape)}"
        )
    size = cell.state_size
    sizes = list(size) if isinstance(size, (list, tuple)) else [size]
    if not isinstance(states, (list, tuple)) or len(states) != len(sizes):
        received = len(states) if isinstance(states, (list, tuple)) else type(states).__name__
        raise ValueError(
            f"{cell.name} needs a list of states of the sizes {sizes}. Received: {received}"
        )
    for i, (state, n) in enumerate(zip(states, sizes, strict=True)):
        streaming.check_shape(f"states[{i}]", state, (inputs.shape[0], n))


def by_block(*initializers):
    """An initializer of a bias of equal blocks, each of which has one of its own."""

    def initial(shape, dtype=None):
        units = shape[0] // len(initializers)
        return ops.concatenate([block((units,), dtype=dtype) for block in initializers])

    return initial
