"""Initialization of recurrent kernels with several gates."""

import keras
from keras import ops

from trellis_keras.layers import base


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
        base.check_positive(gates=gates)
        self.initializer = keras.initializers.get(initializer)
        self.gates = gates
        self.fan_in = fan_in

    def __call__(self, shape, dtype=None):
        rows, columns = shape
        scales = isinstance(self.initializer, keras.initializers.VarianceScaling)
        drawn = (self.fan_in or rows) if scales else rows
        parts = [
            base.seeded(self.initializer, None, gate)((drawn, columns // self.gates), dtype=dtype)[
                :rows
            ]
            for gate in range(self.gates)
        ]
        return ops.concatenate(parts, axis=-1)

    def get_config(self):
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "gates": self.gates,
            "fan_in": self.fan_in,
        }
