"""The base class of this package's cells for `keras.layers.RNN`, and initializers of gates."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trellis_keras._keras_internals import DropoutRNNCell
from trellis_keras.layers.checks import check_integer, check_rates
from trellis_keras.layers.regularization import VariationalDropout
from trellis_keras.layers.saving import ConfigMixin
from trellis_keras.layers.seeds import seeded, sub_seed
from trellis_keras.types import Initializer, Regularizer, Tensor

# Widest layer that XLA makes faster on a CPU. With LRUs it takes 0.83, 0.97, 1.04 of the time at
# 256, 512, 640 units.
UNITS_FOR_XLA = 512
_KINDS = ("kernel", "recurrent", "bias")


@keras.saving.register_keras_serializable("trellis_keras")
class GateInitializer(keras.initializers.Initializer):
    """Initializes each gate of a recurrent kernel as a separate matrix.

    A cell concatenates the kernels of its gates, `(rows, gates * units)`. If they were
    initialized as one matrix, the Glorot fan-out would count all gates, and cells with more
    gates would start with smaller weights. Here each gate is a matrix `[W; U]` of shape `(fan_in,
    units)`: `kernel` holds its first rows and `recurrent_kernel` the others.

    Args:
        initializer: Keras initializer of one gate. With a seed, each gate draws different numbers.
        gates: Positive integer, number of gates.
        fan_in: Positive integer, number of rows of a gate's full matrix. Only initializers that
            scale with it (`keras.initializers.VarianceScaling`, hence Glorot, He and LeCun) use it.
            Defaults to `None`, the number of rows of the kernel.

    Example:

    >>> kernel = GateInitializer("glorot_uniform", gates=4, fan_in=128)((64, 256))
    >>> bool(abs(np.std(kernel) - np.sqrt(2 / (128 + 64))) < 0.005)
    True
    """

    def __init__(self, initializer: Initializer, gates: int, fan_in: int | None = None):
        self.initializer = keras.initializers.get(initializer)
        self.gates = check_integer("gates", gates, 1)
        self.fan_in = fan_in

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        rows, columns = shape
        scales = isinstance(self.initializer, keras.initializers.VarianceScaling)
        gate_shape = (self.fan_in or rows) if scales else rows, columns // self.gates
        gates = [
            seeded(self.initializer, None, i)(gate_shape, dtype=dtype)[:rows]
            for i in range(self.gates)
        ]
        return ops.concatenate(gates, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "gates": self.gates,
            "fan_in": self.fan_in,
        }


def block_initializer(*initializers: keras.initializers.Initializer) -> Callable[..., Tensor]:
    """Returns the initializer of a bias made of equal blocks, with one initializer per block."""

    def initial(shape, dtype=None):
        units = shape[0] // len(initializers)
        return ops.concatenate([block((units,), dtype=dtype) for block in initializers])

    return initial


@keras.saving.register_keras_serializable("trellis_keras")
class ForgetBias(keras.initializers.Initializer):
    """Zeros, except for an LSTM's forget gate. Use it with `LSTM(..., unit_forget_bias=False)`.

    Args:
        value: Float, initial bias of the forget gate.

    Example:

    >>> np.asarray(ForgetBias(5.0)((8,))).tolist()  # input, forget, candidate, output
    [0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        zeros, value = keras.initializers.Zeros(), keras.initializers.Constant(self.value)
        return block_initializer(zeros, value, zeros, zeros)(shape, dtype)

    def get_config(self) -> dict[str, Any]:
        return {"value": self.value}


@keras.saving.register_keras_serializable("trellis_keras")
class ChronoBias(keras.initializers.Initializer):
    """Biases with which an LSTM's units remember for 2 to `longest` steps.

    The forget gates' biases are log(u) with u uniform between 1 and `longest` - 1, the input gates'
    are their negatives, all others are zero. Use it with `LSTM(..., unit_forget_bias=False)`.

    Reference:

    - [Tallec & Ollivier, 2018](https://arxiv.org/abs/1804.11188)

    Args:
        longest: Integer, at least 3, the longest delay in steps, such as the length of the
            sequences.
        seed: Integer seed of the draws. Defaults to `None`, a new one each time.

    Example:

    >>> i, f, c, o = np.split(np.asarray(ChronoBias(784, seed=0)((8,))), 4)
    >>> bool(np.all((0 < f) & (f < np.log(783)) & (i == -f) & (c == 0) & (o == 0)))
    True
    """

    def __init__(self, longest: int, seed: int | None = None) -> None:
        self.longest = check_integer("longest", longest, 3)
        self.seed = seed

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        gate = (shape[0] // 4,)
        steps = keras.random.uniform(gate, 1, self.longest - 1, dtype=dtype, seed=self.seed)
        forget, zeros = ops.log(steps), ops.zeros(gate, dtype)
        return ops.concatenate([-forget, forget, zeros, zeros])

    def get_config(self) -> dict[str, Any]:
        return {"longest": self.longest, "seed": self.seed}


class RecurrentCell(DropoutRNNCell, ConfigMixin, keras.layers.Layer):
    """Base class of this package's cells for `keras.layers.RNN`.

    A subclass creates its weights with `add_gate_weight` in `build`, and gets its dropout masks
    from `dropout_masks` in `call(inputs, states, training=False)`. With several states it sets
    `state_size` to a list; `recurrent_dropout` then acts on the first state. `output_size` is
    `units` unless the subclass sets it.

    A dropout mask (batch, channels) is drawn once per sequence, outside the time loop, and only
    during training: unlike Keras' cells, these neither advance a seed nor add random operations to
    an inference graph. A cell called on its own draws new masks in each call.

    Args:
        units: Positive integer, number of channels.
        kernel_initializer: Initializer of the input part W of each gate's matrix `[W; U]`, see
            `GateInitializer`. Defaults to `"glorot_uniform"`.
        recurrent_initializer: Initializer of the recurrent part U. Defaults to
            `"glorot_uniform"`.
        bias_initializer: Initializer of the biases. Defaults to `"zeros"`.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Regularizers of the weights.
            Defaults to `None`.
        dropout: Float in [0, 1), dropout rate of the inputs. Defaults to `0`.
        recurrent_dropout: Float in [0, 1), dropout rate of the (first) state. Defaults to `0`.
        seed: Integer seed of the dropouts, and of initializers without a seed. Defaults to `None`.
    """

    removed_options = dict.fromkeys(f"{kind}_constraint" for kind in _KINDS)

    def __init__(
        self,
        units: int,
        *,
        kernel_initializer: Initializer = "glorot_uniform",
        recurrent_initializer: Initializer = "glorot_uniform",
        bias_initializer: Initializer = "zeros",
        kernel_regularizer: Regularizer = None,
        recurrent_regularizer: Regularizer = None,
        bias_regularizer: Regularizer = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_rates(dropout=dropout, recurrent_dropout=recurrent_dropout)
        self.units = units = check_integer("units", units, 1)
        self.state_size: int | list[int] = units
        self.output_size = units
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.dropout = dropout
        self.recurrent_dropout = recurrent_dropout
        self.seed = seed
        policy = self.dtype_policy
        input_seed, state_seed = (
            sub_seed(seed, "RecurrentCell", name) for name in ("dropout", "recurrent_dropout")
        )
        self.input_dropout = _CellDropout(dropout, input_seed, dtype=policy)
        self.state_dropout = _CellDropout(recurrent_dropout, state_seed, dtype=policy)
        self.reset_dropout_mask()
        self.reset_recurrent_dropout_mask()

    def add_gate_weight(
        self,
        kind: str,
        shape: tuple[int, ...],
        *part: int,
        name: str | None = None,
        fan_in: int | None = None,
        initializer: Initializer = None,
    ) -> keras.Variable:
        """Adds a weight with the initializer and regularizer of its kind.

        Args:
            kind: `"kernel"`, `"recurrent"` or `"bias"`.
            shape, name: As in `add_weight`. The name defaults to the kind.
            *part: Integers that identify the weight among those of its kind, so that each draws
                different numbers from the same seed.
            fan_in: For a kernel, the number of rows that feed a gate, see `GateInitializer`.
            initializer: Overrides the initializer of the kind.
        """
        if initializer is None:
            initializer = getattr(self, f"{kind}_initializer")
            initializer = seeded(initializer, self.seed, "RecurrentCell", kind, *part)
            if kind != "bias":
                initializer = GateInitializer(initializer, shape[1] // self.units, fan_in)
        return self.add_weight(
            name=name or kind,
            shape=shape,
            initializer=initializer,
            regularizer=getattr(self, f"{kind}_regularizer"),
        )

    # `keras.layers.RNN` calls these two before its loop, and resets the masks after it.

    def get_dropout_mask(self, step_input: Tensor) -> Tensor | None:
        self._dropout_mask = self.input_dropout(step_input)
        return self._dropout_mask

    def get_recurrent_dropout_mask(self, step_input: Tensor) -> Tensor | None:
        self._recurrent_dropout_mask = self.state_dropout(step_input)
        return self._recurrent_dropout_mask

    def dropout_masks(
        self, inputs: Tensor, state: Tensor, training: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the masks of the inputs and of the state, each None if nothing is dropped.

        An RNN layer draws them before its loop. Outside an RNN layer, each call draws new masks.
        """
        if not training:
            return None, None
        masks = self._dropout_mask, self._recurrent_dropout_mask
        layers = (self.input_dropout, inputs), (self.state_dropout, state)
        return tuple(
            layer(like, training=True) if mask is None else mask
            for mask, (layer, like) in zip(masks, layers, strict=True)
        )

    def get_initial_state(self, batch_size: int | None = None) -> Tensor | list[Tensor]:
        """Returns zero states: a tensor (batch, units), or a list of them."""
        # A single state is not in a list: `keras.layers.RNN.reset_state` fails for stacked cells
        # with lists.
        if isinstance(self.state_size, int):
            return ops.zeros((batch_size, self.state_size), self.compute_dtype)
        return [ops.zeros((batch_size, size), self.compute_dtype) for size in self.state_size]


class _CellDropout(VariationalDropout):
    """Returns a dropout mask of the shape of its input: ones in inference, None at rate 0.

    It is a layer because Keras passes `training` on to nested layers, whereas `keras.layers.RNN`
    requests masks at inference as well, without telling the cell.
    """

    def call(self, inputs, training=None):
        if self.rate == 0:
            return None
        # None if an RNN's `call` was called directly. The mask is then not used at inference.
        if training is None or training:
            return self.draw(ops.shape(inputs))
        return ops.ones_like(inputs)
