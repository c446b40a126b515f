"""What recurrent cells with several gates have in common: checks of a call, and initializers."""

import keras
from keras import ops

from trellis_keras.layers import arguments, streaming


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


@keras.saving.register_keras_serializable("trellis_keras")
class GateInitializer(keras.initializers.Initializer):
    """Initializes every gate of a recurrent kernel by itself.

    A cell keeps the kernels of its gates side by side, `(rows, gates * units)`. Initialized as one
    matrix, Glorot's fan-out would count all gates, so that cells with more of them would start
    with smaller weights. Here each gate is one matrix `[W; U]` of shape `(fan_in, units)`, of
    which `kernel` holds the first rows and `recurrent_kernel` the others.

    Args:
        initializer: Keras initializer of one gate. With a seed, every gate draws its own numbers.
        gates: Positive integer, number of gates.
        fan_in: Positive integer, number of rows of a gate's whole matrix. Only initializers that
            scale with it (`keras.initializers.VarianceScaling`, thus Glorot, He and LeCun) use it.
            Default: the number of rows of the kernel.

    Example:

    >>> kernel = GateInitializer("glorot_uniform", gates=4, fan_in=128)((64, 256))
    >>> bool(abs(np.std(kernel) - np.sqrt(2 / (128 + 64))) < 0.005)
    True
    """

    def __init__(self, initializer, gates, fan_in=None):
        arguments.check_positive(gates=gates)
        self.initializer = keras.initializers.get(initializer)
        self.gates = gates
        self.fan_in = fan_in

    def __call__(self, shape, dtype=None):
        rows, columns = shape
        scales = isinstance(self.initializer, keras.initializers.VarianceScaling)
        drawn = (self.fan_in or rows) if scales else rows
        parts = [
            arguments.seeded(self.initializer, None, gate)(
                (drawn, columns // self.gates), dtype=dtype
            )[:rows]
            for gate in range(self.gates)
        ]
        return ops.concatenate(parts, axis=-1)

    def get_config(self):
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "gates": self.gates,
            "fan_in": self.fan_in,
        }
