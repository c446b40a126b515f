"""TrellisNet (Bai, Kolter & Koltun 2019, Trellis Networks for Sequence Modeling).

Contents: the gated activations f, then `TrellisLayer` (constructor, full pass, equation of a level,
streaming, config), `LevelBuffers`, the layout of its cache, and `MixedGroupKernel`, the sparse
kernel of Theorem 1.
`TrellisLayer._run_levels` is the network as the paper defines it, `TrellisLayer._level` its
equation. Everything from `trellis_keras.kernels` is a faster way to compute the same result.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import check_stream, replace_row
from trellis_keras import kernels
from trellis_keras.kernels import cone, depth_loop, mixed_group
from trellis_keras.kernels.activations import lstm, tanh
from trellis_keras.kernels.convolution import gather, gather_taps, product, shift
from trellis_keras.layers.checks import (
    check_choice,
    check_dilations,
    check_has_steps,
    check_integer,
    check_positive,
    check_rates,
    is_integer,
)
from trellis_keras.layers.regularization import ConvolutionKernel, VariationalDropout
from trellis_keras.layers.saving import ConfigMixin
from trellis_keras.layers.seeds import seeded, sub_seed
from trellis_keras.layers.stateful import StatefulLayer, check_direction
from trellis_keras.layers.time_steps import (
    check_output_length,
    count_outputs,
    flip_time,
    last_step,
    last_steps,
    resolve_mask,
    time_axis,
    zero_masked,
)
from trellis_keras.types import Cache, Initializer, Regularizer, Shape, Shapes, Tensor

# Gated activations


class GatedActivation(ConfigMixin, keras.layers.Layer):
    """Base class of the gated activation f of a TrellisNet.

    A level computes pre-activations a with a convolution and applies f to them and to the states of
    the level below, d steps earlier (Bai et al. 2019, Eqs. 1 and 2; d is the dilation):

        h^i_t, states^i_t = f(a_t, states^{i-1}_{t-d})

    f is a Keras RNN cell without its matrix products, and has the interface of a cell: `units`,
    `state_size` and `call(inputs, states)`. A subclass sets `state_blocks` and
    `preactivation_blocks` and writes `call`:

    - `inputs`: tensor (batch, time, preactivation_blocks * units), the pre-activations: blocks of
      `units` channels side by side, each with its own bias;
    - `states`: list of `state_blocks` tensors (batch, time, units) of the level below, d steps
      earlier; `states[0]` is the hidden sequence h;
    - returns `(h, new_states)`, where new_states has the structure of `states` and
      `new_states[0]` is h.

    f must be elementwise over channels: channel n of its results depends only on channel n of
    every block and state. The same f then works for a stack of RNN layers, each a group of
    channels (Theorem 1). f should be a pure function: with a cell that draws random numbers, every
    level is compiled separately. It computes in the dtype of its inputs, which is at least float32.

    Each block of pre-activations is a convolution with all taps, unless `arrange` is overridden.
    `arrange` maps the layer's weights, (tap, in, kernel_units), to the kernels of the convolution,
    (tap, in, preactivation_size). It can repeat a block, or restrict a block to some of the taps,
    so that a gate can act within a product, like the reset gate of `GRUGates`.

    Args:
        units: Positive integer, number of hidden channels of the TrellisNet.

    Example: an LSTM whose input gate is 1 - f (the CIFG of Greff et al. 2017).

    >>> class CoupledGates(GatedActivation):
    ...     state_blocks = 2
    ...     preactivation_blocks = 3
    ...
    ...     def call(self, inputs: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    ...         f, g, o = ops.split(inputs, 3, axis=-1)
    ...         f = ops.sigmoid(f)
    ...         c = f * states[1] + (1 - f) * ops.tanh(g)
    ...         h = ops.sigmoid(o) * ops.tanh(c)
    ...         return h, [h, c]
    ...
    >>> TrellisLayer(6, depth=4, cell=CoupledGates(6))(np.zeros((2, 5, 3), "float32")).shape
    (2, 5, 6)
    """

    state_blocks = 1
    preactivation_blocks = 1

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)  # it keeps the dtype of its inputs
        self.units = check_integer("units", units, 1)
        self.built = True

    @property
    def state_size(self) -> list[int]:
        return [self.units] * self.state_blocks

    @property
    def preactivation_size(self) -> int:
        return self.preactivation_blocks * self.units

    @property
    def kernel_units(self) -> int:
        """Number of output channels of the layer's weights."""
        return self.preactivation_size

    def arrange(self, kernel: Tensor) -> Tensor:
        """Maps a kernel (tap, in, kernel_units) to (tap, in, preactivation_size)."""
        return kernel


@keras.saving.register_keras_serializable("trellis_keras")
class RNNGates(GatedActivation):
    """Elman's activation: h = tanh(a)."""

    def call(self, inputs: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        h = tanh(inputs)
        return h, [h]


@keras.saving.register_keras_serializable("trellis_keras")
class LSTMGates(GatedActivation):
    """The LSTM's gates (Bai et al. 2019, Eq. 12), blocks in Keras' order i, f, g, o.

    c = f * c_{t-d} + i * tanh(g),  h = o * tanh(c). The states are h and c.
    """

    state_blocks = 2
    preactivation_blocks = 4

    def call(self, inputs: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        h, c = lstm(inputs, states[1])
        return h, [h, c]


@keras.saving.register_keras_serializable("trellis_keras")
class GRUGates(GatedActivation):
    """The GRU's gates as in Keras' `reset_after=True`, blocks z, r, candidate.

    The reset gate multiplies the past taps' contribution to the candidate, which is therefore a
    pre-activation with its own bias: z, r, candidate (current tap), candidate (past taps).

    h = z * h_{t-d} + (1 - z) * tanh(current + r * past)
    """

    preactivation_blocks = 4

    @property
    def kernel_units(self) -> int:
        return 3 * self.units

    def arrange(self, kernel: Tensor) -> Tensor:
        gates, candidate = ops.split(kernel, [2 * self.units], axis=-1)
        zeros = ops.zeros_like(candidate[:1])
        past_taps = kernel.shape[0] - 1
        current = ops.concatenate([zeros] * past_taps + [candidate[-1:]], axis=0)
        past = ops.concatenate([candidate[:-1], zeros], axis=0)
        return ops.concatenate([gates, current, past], axis=-1)

    def call(self, inputs: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        z, r, current, past = ops.split(inputs, 4, axis=-1)
        z = ops.sigmoid(z)
        candidate = tanh(current + ops.sigmoid(r) * past)
        h = z * states[0] + (1 - z) * candidate
        return h, [h]


_GATES = {"lstm": LSTMGates, "gru": GRUGates, "rnn": RNNGates}

# The layer


class _Weights(NamedTuple):
    """Values shared by all levels of a call."""

    kernel: Tensor  # Wx (tap, channels, preactivations), compute dtype
    recurrent_kernel: Tensor  # Wh (tap, units, preactivations), at least float32
    bias: Tensor  # b (preactivations,)
    hidden_product: Callable  # operands of all taps (batch, positions, tap * units) times Wh
    dropout: Tensor | None = None  # m (batch, 1, units)


@keras.saving.register_keras_serializable("trellis_keras")
class TrellisLayer(StatefulLayer):
    """Weight-tied, input-injected temporal convolution (Bai et al. 2019, Eqs. 1, 2 and 12).

    With k taps, d the dilation of level i, m a dropout mask and f the gated activation, every level
    i = 1..depth computes, with the same weights,

        a_t = b + sum_j (x_{t-jd} Wx[k-1-j] + (m * h^{i-1}_{t-jd}) Wh[k-1-j]),    j = 0..k-1
        h^i_t, c^i_t = f(a_t, h^{i-1}_{t-d}, c^{i-1}_{t-d})

    with h^0 = c^0 = 0. The output is the last `output_units` channels of h at the last level. The
    layer is causal: output t depends on the last `receptive_field` inputs up to t.

    Reference:

    - [Bai et al., 2019](https://arxiv.org/abs/1810.06682)

    Args:
        units: Positive integer, channels of the hidden sequence h (the paper's hidden size plus
            output size).
        depth: Positive integer, number of levels.
        output_units: Positive integer, channels of the output. Defaults to `None`, `units`.
        kernel_size: Positive integer, number of taps of the convolutions. Defaults to `2`.
        dilation_rate: Positive integer, or a list that the levels cycle through. Defaults to `1`.
        output_length: Positive integer, number of last steps to return. Only the positions that
            they depend on are computed (`kernels.cone`). All positions are computed if the input
            length is not static, or if the last step or the states of a masked input are returned.
            Defaults to `None`, all steps.
        cell: Gated activation: `"lstm"`, `"gru"`, `"rnn"`, or a `GatedActivation`. Defaults to
            `"lstm"`.
        kernel_structure: `"dense"`, or `"mixed_group"` for the sparse kernels of Theorem 1, see
            `MixedGroupKernel`. Defaults to `"dense"`.
        groups: List of channel widths that sum to `units`, the groups of a mixed-group kernel from
            the bottom up. They lie side by side in each block of gates. Defaults to `None`.
        group_starts: List of levels, one per group. Below its start level all states of a group
            are zero at every step of the sequence (before the first step they are the initial
            states). Theorem 1 with biases needs 1, 2, 3, ... Defaults to `None`.
        injection_every: Positive integer n: x is injected at levels 1, 1 + n, 1 + 2n, ... Defaults
            to `1`, every level.
        weight_norm: Boolean, whether both kernels are weight-normalized, each per output channel.
            Defaults to `False`.
        dropout: Float in [0, 1), rate of variational dropout on h at the input of the convolution.
            One mask (batch, channel) per call is shared by all levels and steps. Defaults to `0`.
        weight_dropout: Float in [0, 1), DropConnect rate of the past taps of both kernels. Defaults
            to `0`.
        aux_every: Positive integer, number of levels between auxiliary outputs. Defaults to `None`.
        aux_from: With n = `aux_every` and L = `depth`, `"bottom"` takes levels n, 2n, ... up to L
            (the authors' code), `"top"` L - n, L - 2n, ... (the paper). Defaults to `"bottom"`.
        return_sequences, return_state, go_backwards: As in `keras.layers.RNN`, but all steps are
            returned by default. With a mask the last step is each row's last valid one; a row
            without any gets the initial h.
        return_aux: Boolean, whether to also return the auxiliary outputs. Defaults to `False`.
        stateful: Boolean, whether the last states of a batch are the initial states of the next
            (the paper's history repackaging). Defaults to `False`.
        unroll: Boolean, whether to compile each level separately (True), or blocks of levels as
            loops that are compiled once (False). Defaults to `None`: loops, unless they would
            compute many more positions than unrolled levels (over 1.25 times as many; more for deep
            networks), or the cell has random state. Dilations that do not repeat are always
            unrolled.
        rematerialize: Boolean, whether the backward pass of loops over levels recomputes
            pre-activations to save memory: on JAX in all loops, on TensorFlow in those of
            `kernels.depth_loop_tf` (in compiled functions, with LSTM gates, kernel size 2,
            dilation 1, x at every level, static lengths and no mask). Defaults to `False`.
        seed: Integer seed of the dropouts, and of initializers without a seed. Defaults to `None`.
        kernel_initializer, recurrent_initializer, bias_initializer: Initializers of Wx, Wh and b.
            Default to N(0, 0.01), as in the authors' code.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Regularizers of Wx, Wh and b.
            Default to `None`.

    Call arguments:
        inputs: Tensor (batch, time, channels), of any length.
        initial_state: List of states, each (batch, units): [h, c] for `"lstm"`, [h] otherwise.
            Every level has these states at every step before the first (paper, appendix B).
            Defaults to `None`, zeros or the carried states of a stateful layer.
        mask: Boolean tensor (batch, time). Masked steps are treated as steps before the sequence: x
            is zero and the states of every level are the initial ones. Valid outputs are therefore
            those of the unpadded sequence, with padding on either side. Defaults to `None`.
        training: Boolean, whether dropout is active. Defaults to `False`.
        output_length: Overrides the constructor argument for this call. (The mask that Keras
            passes on to the next layer follows the constructor argument.)

    Returns:
        y (batch, time, output_units), or a tuple of y, the auxiliary outputs (batch, n_aux, time,
        output_units) with `return_aux`, and the states, each (batch, units), with `return_state`.
        Without `return_sequences`, y and the auxiliary outputs have no time axis.

    Example:

    >>> layer = TrellisLayer(units=12, depth=5, output_units=4)
    >>> layer(np.zeros((2, 7, 3), "float32")).shape
    (2, 7, 4)
    """

    removed_options = {"condition_size": None, "fused": True}
    # In float32 on a CPU, for `compile(jit_compile="auto")`.
    prefers_xla = True

    def __init__(
        self,
        units: int,
        depth: int,
        *,
        output_units: int | None = None,
        kernel_size: int = 2,
        dilation_rate: int | Sequence[int] = 1,
        output_length: int | None = None,
        cell: str | GatedActivation = "lstm",
        kernel_structure: str = "dense",
        groups: Sequence[int] | None = None,
        group_starts: Sequence[int] | None = None,
        injection_every: int = 1,
        weight_norm: bool = False,
        dropout: float = 0.0,
        weight_dropout: float = 0.0,
        aux_every: int | None = None,
        aux_from: str = "bottom",
        return_sequences: bool = True,
        return_state: bool = False,
        return_aux: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool | None = None,
        rematerialize: bool = False,
        seed: int | None = None,
        kernel_initializer: Initializer = None,
        recurrent_initializer: Initializer = None,
        bias_initializer: Initializer = None,
        kernel_regularizer: Regularizer = None,
        recurrent_regularizer: Regularizer = None,
        bias_regularizer: Regularizer = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(stateful=stateful, **kwargs)
        check_direction(stateful, go_backwards)
        output_units = units if output_units is None else output_units
        units, depth, output_units, kernel_size, injection_every = check_positive(
            units=units,
            depth=depth,
            output_units=output_units,
            kernel_size=kernel_size,
            injection_every=injection_every,
        )
        if output_units > units:
            raise ValueError(
                "The output is a slice of the hidden channels: `output_units` must be at most "
                f"`units`. Received: output_units={output_units}, units={units}"
            )
        check_rates(dropout=dropout, weight_dropout=weight_dropout)
        check_choice("unroll", unroll, (None, True, False))
        check_choice("aux_from", aux_from, ("bottom", "top"))
        check_choice("kernel_structure", kernel_structure, ("dense", "mixed_group"))
        _check_groups(units, depth, groups, kernel_structure, group_starts)
        check_output_length(output_length, return_sequences, go_backwards)
        self.units = units
        self.depth = depth
        self.output_units = output_units
        self.kernel_size = kernel_size
        is_cycle = np.ndim(dilation_rate) > 0
        self.dilations = check_dilations(
            "dilation_rate", dilation_rate if is_cycle else [dilation_rate], kernel_size
        )
        self.dilation_rate = self.dilations if is_cycle else self.dilations[0]
        self.kernel_structure = kernel_structure
        self.groups = None if groups is None else list(groups)
        self.group_starts = None if group_starts is None else list(group_starts)
        self.injection_every = injection_every
        self.weight_norm = weight_norm
        self.dropout = dropout
        self.weight_dropout = weight_dropout
        self.aux_every = None if aux_every is None else check_integer("aux_every", aux_every, 1)
        self.aux_from = aux_from
        self.return_sequences = return_sequences
        self.output_length = output_length
        self.return_state = return_state
        self.go_backwards = go_backwards
        self.return_aux = return_aux
        if (return_aux or aux_every) and not self.aux_levels:
            raise ValueError(
                "`return_aux=True` needs `aux_every`, at most the depth (less than the depth with "
                f'aux_from="top"). Received: aux_every={aux_every}, depth={depth}'
            )
        self.unroll = unroll
        self.rematerialize = rematerialize
        self.seed = seed
        self.kernel_initializer, self.recurrent_initializer, self.bias_initializer = (
            keras.initializers.get(initializer or keras.initializers.RandomNormal(stddev=0.01))
            for initializer in (kernel_initializer, recurrent_initializer, bias_initializer)
        )
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        # Under mixed precision, states and gates stay at least in float32.
        self.cell = _gated_activation(cell, units, self.state_dtype)
        self.state_sizes = list(self.cell.state_size)
        self.kernel = self._convolution_kernel("kernel")
        self.recurrent_kernel = self._convolution_kernel("recurrent_kernel")
        self.hidden_dropout = VariationalDropout(
            dropout, sub_seed(seed, "TrellisLayer", "dropout"), dtype=self.state_dtype
        )

    def _convolution_kernel(self, name):
        recurrent = name == "recurrent_kernel"
        initializer = self.recurrent_initializer if recurrent else self.kernel_initializer
        make = ConvolutionKernel
        if self.kernel_structure == "mixed_group":
            make = functools.partial(MixedGroupKernel, groups=self.groups, recurrent=recurrent)
        return make(
            self.kernel_size,
            self.cell.kernel_units,
            weight_norm=self.weight_norm,
            dropout=self.weight_dropout,
            initializer=seeded(initializer, self.seed, "TrellisLayer", name),
            regularizer=self.recurrent_regularizer if recurrent else self.kernel_regularizer,
            seed=sub_seed(self.seed, "TrellisLayer", name, "dropout"),
            trainable=self.trainable,
            dtype=self.dtype_policy,
            name=name,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TrellisLayer":
        # A model of a shallow epoch (`GrowingDepth`) may end below the levels of its other options.
        depth, levels = config.get("depth", 0), _named_levels(config)
        if not is_integer(depth, minimum=1) or depth >= levels:
            return super().from_config(config)
        layer = super().from_config({**config, "depth": levels})
        layer.depth = depth
        return layer

    def build(self, input_shape: Shape) -> None:
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})
        self.input_channels = input_shape[-1]
        self.kernel.build(input_shape)
        self.recurrent_kernel.build((None, None, self.units))
        self.bias = self.add_weight(
            name="bias",
            shape=(self.cell.preactivation_size,),
            initializer=seeded(self.bias_initializer, self.seed, "TrellisLayer", "bias"),
            regularizer=self.bias_regularizer,
            autocast=False,
        )
        self.build_states(input_shape[0])

    @property
    def aux_levels(self) -> list[int]:
        """The levels of the auxiliary outputs, in increasing order."""
        if self.aux_every is None:
            return []
        if self.aux_from == "bottom":
            return list(range(self.aux_every, self.depth + 1, self.aux_every))
        return sorted(range(self.depth - self.aux_every, 0, -self.aux_every))

    def dilation(self, level: int) -> int:
        """Returns the dilation of a level. Levels count from 1."""
        return self.dilations[(level - 1) % len(self.dilations)]

    def injects_input(self, level: int | np.ndarray | Tensor) -> bool | np.ndarray | Tensor:
        """Returns whether x is injected at a level (or at each of an array of levels)."""
        return (level - 1) % self.injection_every == 0

    def active_channels(self, level: int | np.ndarray) -> np.ndarray | None:
        """Returns which channels (units,) or (levels, units) have started, or None if all have."""
        if self.group_starts is None or np.min(level) >= max(self.group_starts):
            return None
        starts = np.repeat(np.array(self.group_starts), np.array(self.groups))
        return starts <= np.asarray(level)[..., None]

    @property
    def receptive_field(self) -> int:
        """Number of inputs, the current one included, that an output depends on.

        It counts the states d steps back for every gated activation, even one that ignores them.
        """
        groups = np.array(self.groups or [self.units])
        starts = np.array(self.group_starts or [1] * len(groups))
        farthest = np.full(len(groups), -np.inf)  # steps back to the oldest x in a group's state
        for level in range(1, self.depth + 1):
            oldest_tap = (self.kernel_size - 1) * self.dilation(level)
            # The gates read the states d steps back even if the kernel has only one tap.
            own = farthest + max(oldest_tap, self.dilation(level))
            x = 0 if self.injects_input(level) else -np.inf
            if self.kernel_structure == "mixed_group":
                others = np.append(x, farthest[:-1])
            else:
                others = max(np.max(farthest), x) + oldest_tap
            farthest = np.where(level < starts, -np.inf, np.maximum(own, others))
        in_output = np.cumsum(groups) > self.units - self.output_units
        return int(max(np.max(farthest[in_output]) + 1, 0))

    # Full pass

    def call(
        self,
        inputs: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        training: bool = False,
        output_length: int | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        check_has_steps(self, inputs)
        training = bool(training)
        mask = resolve_mask(inputs, mask)
        mask = None if mask is None else ops.cast(mask, "bool")
        steps = count_outputs(self, inputs.shape[1], output_length)
        if self.go_backwards:
            inputs, mask = flip_time(inputs, mask)
        x = zero_masked(ops.cast(inputs, self.compute_dtype), mask)
        initial = self.initial_states(ops.shape(x)[0], initial_state, training)
        needs_states = self.return_state or self.stateful
        # The last valid step of a masked row may lie anywhere.
        any_step = mask is not None and (needs_states or not self.return_sequences)

        weights = self._weights(training, ops.shape(x)[0])
        if kernels.enabled():
            plan = self.plan_levels(x.shape[1], None if any_step else steps)
            outputs, states = self._run_cone(x, weights, initial, mask, plan, training)
        else:
            outputs, states = self._run_levels(x, weights, initial, mask)

        if not self.return_sequences:
            h_0 = None if initial is None else initial[:1]
            outputs = {i: last_step([h], h_0, mask)[0] for i, h in outputs.items()}
        last = last_step(states, initial, mask) if needs_states else None
        self.carry_states(last, training)
        return self._format_outputs(outputs, last, steps)

    def _weights(self, training=False, batch_size=None):
        """Returns the `_Weights` of a call, with its dropout mask.

        `ConvolutionKernel.effective_kernel` applies DropConnect and weight normalization.
        """
        kernel = self.cell.arrange(self.kernel(training=training))
        # Under the policy "bfloat16" the variables are narrower than the states.
        recurrent = ops.cast(
            self.recurrent_kernel.effective_kernel(training=training), self.state_dtype
        )
        recurrent = self.cell.arrange(recurrent)
        bias = ops.cast(self.bias, self.state_dtype)
        dropout = None
        if self.hidden_dropout.is_active(training):
            dropout = self.hidden_dropout.draw((batch_size, 1, self.units))
        hidden_product = self._hidden_product(recurrent, self.kernel_size - 1)
        return _Weights(kernel, recurrent, bias, hidden_product, dropout)

    def _hidden_product(self, kernel, past_taps):
        """Returns the function that multiplies the operands of some taps by their part of Wh."""
        if kernels.enabled() and self.multiplies_by_group:
            return mixed_group.GroupedProduct(kernel, past_taps, self.groups, self.compute_dtype)
        taps, units, filters = kernel.shape
        kernel = ops.reshape(kernel, (taps * units, filters))
        # Cast here, so that in a loop over levels the weight gradients add up in full precision.
        return lambda seen: product(seen, ops.cast(kernel, self.compute_dtype), self.state_dtype)

    @property
    def multiplies_by_group(self) -> bool:
        """Whether products are computed group by group, without the zeros in between."""
        if self.groups is None or self.kernel_structure != "mixed_group":
            return False
        return mixed_group.is_worthwhile(self.groups)

    def _run_levels(self, x, weights, initial, mask):
        """The network as the paper defines it: level by level, each at every position.

        x (batch, time, channels) is zero at masked steps. Returns {level: h (batch, time, units)},
        and the states of the last level.
        """

        def read_taps(z, z_0, steps):
            return ops.concatenate([shift(z, s, z_0) for s in steps], axis=-1)

        outputs = {}
        states = self._apply_mask(self._zero_states(x, ops.shape(x)[1]), initial, mask)
        for i in range(1, self.depth + 1):
            injected = weights.bias
            if self.injects_input(i):
                injected = self._injection(x, weights, read_taps, self.dilation(i))
            states = self._level(
                states,
                initial,
                weights,
                read_taps,
                injected,
                self.dilation(i),
                self.active_channels(i),
            )
            states = self._apply_mask(states, initial, mask)
            outputs[i] = states[0]
        return outputs, states

    def _injection(self, x, weights, read_taps, dilation):
        """Returns x's part of a level and the bias: sum_j x_{t-jd} Wx[k-1-j] + b."""
        taps, channels, filters = weights.kernel.shape
        seen = read_taps(x, None, [j * dilation for j in reversed(range(taps))])
        kernel = ops.reshape(weights.kernel, (taps * channels, filters))
        return product(seen, kernel, self.state_dtype) + weights.bias

    def _level(self, below, initial, weights, read_taps, injected, dilation, active=None):
        """The equation of a level (Bai et al. 2019, Eqs. 1, 2 and 12).

            a_t = injected_t + sum_j (m * h^{i-1}_{t-jd}) Wh[k-1-j],    j = 0..k-1
            h^i_t, c^i_t = f(a_t, h^{i-1}_{t-d}, c^{i-1}_{t-d})

        All forward passes use this method. They differ in the positions that they compute, and
        hence in the function `read_taps` that reads the level below.

        Args:
            below: States of level i - 1: h and, with LSTM gates, c; each (batch, positions below,
                units).
            initial: States before the first step, each (batch, units), or None for zeros.
            weights: `_Weights` of the call.
            read_taps: Function (z, z_0, steps) that reads the tensor z (batch, positions below,
                channels) at t - s for every position t of this level and every s in the list
                `steps`, concatenated: (batch, positions, n * channels). Before the first step it
                reads z_0 (batch, channels).
            injected: What `_injection` returns, (batch, positions, preactivations), or the bias.
            dilation: d, integer or scalar tensor.
            active: Booleans (units,), False for channels that start at a later level, or None.

        Returns:
            List of states of level i, each (batch, positions, units).
        """
        initial = [None] * len(below) if initial is None else initial
        h, h_0, m = below[0], initial[0], weights.dropout
        if m is not None:
            h, h_0 = h * m, None if h_0 is None else h_0 * m[:, 0]
        h = ops.cast(h, self.compute_dtype)
        h_0 = None if h_0 is None else ops.cast(h_0, self.compute_dtype)
        # (batch, positions, k * units): the oldest tap first
        seen = read_taps(h, h_0, [j * dilation for j in reversed(range(self.kernel_size))])
        # (batch, positions, preactivations)
        a = ops.cast(weights.hidden_product(seen), self.state_dtype) + injected
        # each (batch, positions, units)
        past = [read_taps(s, s_0, [dilation]) for s, s_0 in zip(below, initial, strict=True)]
        return self._gated_states(a, past, active)

    def _gated_states(self, a, past, active=None):
        """Returns f(a, past), with zeros in the channels that have not started."""
        result = self.cell(a, past)
        self._check_gated(result, past)
        states = [ops.cast(s, self.state_dtype) for s in result[1]]
        if active is None:
            return states
        return [ops.where(active, s, ops.zeros_like(s)) for s in states]

    def _check_gated(self, result, past):
        """Raises ValueError unless a cell's result is (h, [h, ...]) with states like the past."""
        if isinstance(result, tuple) and len(result) == 2:
            h, states = result
            is_list = isinstance(states, (list, tuple))
            if is_list and [len(s.shape) for s in states] == [3] * len(past):
                units = [s.shape[-1] for s in states]
                if units == [p.shape[-1] for p in past] and states[0] is h:
                    return
        shapes = keras.tree.map_structure(lambda tensor: tuple(tensor.shape), result)
        raise ValueError(
            f"{self.cell!r} must return (h, states): h (batch, time, {past[0].shape[-1]}), and a "
            f"list of {len(past)} states of the same shape, the first being h. "
            f"Received: shapes {shapes}"
        )

    def _apply_mask(self, states, initial, mask):
        """Replaces states with the initial ones where the mask (batch, positions) is False."""
        if mask is None:
            return states
        initial = [None] * len(states) if initial is None else initial
        pairs = zip(states, initial, strict=True)
        initial = [ops.zeros_like(s) if s_0 is None else s_0[:, None] for s, s_0 in pairs]
        pairs = zip(states, initial, strict=True)
        return [ops.where(mask[..., None], s, s_0) for s, s_0 in pairs]

    def _zero_states(self, x, width):
        """Returns the states h^0 = c^0 = 0 at `width` positions."""
        shapes = [(ops.shape(x)[0], width, size) for size in self.cell.state_size]
        return [ops.zeros(shape, self.state_dtype) for shape in shapes]

    def _format_outputs(self, outputs, states, steps):
        """Returns y, auxiliary outputs and states as `call` does."""

        def finish(h):
            h = last_steps(h, steps) if self.return_sequences else h
            return ops.cast(h[..., -self.output_units :], self.compute_dtype)

        result = [finish(outputs[self.depth])]
        if self.return_aux and self.aux_levels:  # none below a reduced depth
            result.append(ops.stack([finish(outputs[i]) for i in self.aux_levels], axis=1))
        if self.return_state:
            result.extend(states)
        return result[0] if len(result) == 1 else tuple(result)

    # Full pass by kernels

    def plan_levels(self, time: int | None, output_length: int | None = None) -> cone.Cone:
        """Returns the positions that a call computes, and the levels that run in loops."""
        # The gates read the states d steps back even if the kernel has only one tap.
        taps = max(self.kernel_size, 2)
        starts = self.group_starts or []
        draws = bool(self.cell.non_trainable_variables)  # random state, which no loop can carry
        return cone.plan_levels(
            time,
            tuple(cone.tap_offsets(taps, self.dilation(i)) for i in range(1, self.depth + 1)),
            output_length,
            output_levels=tuple(self.aux_levels) if self.return_aux else (),
            bounds=tuple(sorted({level - 1 for level in starts if level > 1})),
            period=cone.find_period(self.dilations),
            unroll=True if self.unroll is None and draws else self.unroll,
            weights=self.kernel_size * self.units * self.cell.preactivation_size,
        )

    def _run_cone(self, x, weights, initial, mask, plan, training):
        """Computes `_run_levels` at the positions of a cone, with levels in loops."""
        everything = None if plan.time is None else np.arange(plan.time)

        def apply_mask(states, level):
            if mask is None:
                return states
            read = cone.locate(plan.positions[level], everything)
            return self._apply_mask(states, initial, gather(mask[..., None], read)[..., 0])

        def inject(positions, dilation):
            def read_taps(z, z_0, steps):
                return gather_taps(z, [cone.locate(positions, everything, s) for s in steps], z_0)

            return self._injection(x, weights, read_taps, dilation)

        def level(i, below, read_taps, injected):
            d, active = self.dilation(i), self.active_channels(i)
            if below is None:  # zeros, which add nothing
                zeros = self._zero_states(x, ops.shape(injected)[1])
                states = self._gated_states(injected, zeros, active)
            else:
                states = self._level(below, initial, weights, read_taps, injected, d, active)
            return apply_mask(states, i)

        def loop(i, turn, states, injected, turns):
            if mask is not None or not self._can_fuse(i, plan.time):
                return depth_loop.repeat(turn, states, turns, self.rematerialize)
            from trellis_keras.kernels import depth_loop_tf

            return depth_loop_tf.lstm_levels(
                states,
                injected,
                weights.recurrent_kernel,
                dropout=weights.dropout,
                initial=initial,
                turns=turns,
                compute_dtype=self.compute_dtype,
                training=training,
                rematerialize=self.rematerialize,
            )

        zero_states = None
        if initial is not None:
            width = ops.shape(x)[1] if plan.time is None else len(plan.positions[0])
            zero_states = apply_mask(self._zero_states(x, width), 0)
        injection = depth_loop.SharedInjection(
            plan, inject, weights.bias, self.dilation, self.injects_input
        )
        return depth_loop.run_levels(plan, zero_states, level, injection, loop)

    def _can_fuse(self, level, time):
        """Whether `kernels.depth_loop_tf` can compute a loop that starts at this level."""
        return (
            time is not None
            and type(self.cell) is LSTMGates
            and self.kernel_size == 2
            and set(self.dilations) == {1}
            and self.injection_every == 1
            and self.active_channels(level) is None
            and not self.multiplies_by_group
            and depth_loop.in_tensorflow_graph()
        )

    # Streaming
    #
    # The cache holds, for every level i, the states of the level below at t - d, ..., t - (k-1)d.

    def initial_cache(
        self, batch_size: int, initial_state: Sequence[Tensor] | None = None
    ) -> Cache:
        """Returns the cache before the first step.

        Returns:
            `{"inputs": x, "states": [h, c]}` (only [h] for cells with one state). x holds the last
            inputs, (batch, steps, channels). h and c are lists with one tensor per distinct
            dilation, ascending: (batch, levels, steps, units), the last states of the level below
            each level with this dilation.

        Example:

        >>> layer = TrellisLayer(units=12, depth=5, output_units=4)
        >>> layer.build((None, None, 3))
        >>> y, cache = layer.step(np.zeros((2, 3), "float32"), layer.initial_cache(2))
        >>> tuple(y.shape)
        (2, 4)
        """
        states = super().initial_cache(batch_size, initial_state)
        shapes = self.cache_shapes(batch_size)
        buffers = [
            [ops.broadcast_to(s[:, None, None, :], shape) for shape in shapes_of_state]
            for s, shapes_of_state in zip(states, shapes["states"], strict=True)
        ]
        return {"inputs": ops.zeros(shapes["inputs"], self.compute_dtype), "states": buffers}

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Advances one step, with constant work however long the stream.

        Equals `prefill` with one step, but uses one matrix product for the past taps of all levels:
        their operands are in the cache before any level of this step is computed.

            a^i = [injected^i + sum_j h^{i-1}_{t-jd} Wh[k-1-j]] + h^{i-1}_t Wh[k-1],   j = 1..k-1

        Only the last term depends on the level below at this step.
        """
        x, cache = check_stream(self, ops.expand_dims(x, 1), cache)
        if not kernels.enabled():
            y, cache = self.prefill(x, cache)
            return y[:, 0], cache
        inputs = ops.concatenate([cache["inputs"], x], axis=1)
        buffers = self._level_buffers
        weights = self._weights()
        # Cast and sliced here, once a step: in the loop XLA would do so at every level.
        kernel = ops.cast(weights.recurrent_kernel, self.compute_dtype)
        past_taps = self.kernel_size - 1
        injected, index = self._injection_by_dilation(inputs, weights, 1)
        # (batch, level, preactivations)
        a = ops.moveaxis(ops.take(injected, index, axis=0)[:, :, 0], 0, 1)
        if past_taps:
            taps = range(past_taps, 0, -1)
            h = [buffers.earlier(cache["states"][0], j) for j in taps]
            h = ops.cast(ops.concatenate(h, axis=-1), self.compute_dtype)
            a = a + ops.cast(self._hidden_product(kernel[:-1], past_taps)(h), self.state_dtype)
        past = [buffers.earlier(buffers_of_state, 1) for buffers_of_state in cache["states"]]
        below, top = depth_loop.step_levels(
            a,
            past,
            active=self.active_channels(np.arange(1, self.depth + 1)),
            current_product=self._hidden_product(kernel[-1:], 0),
            gated_states=self._gated_states,
            compute_dtype=self.compute_dtype,
        )
        pairs = zip(cache["states"], below, strict=True)
        states = [buffers.append(buffers_of_state, newest) for buffers_of_state, newest in pairs]
        y = ops.cast(top[0][..., -self.output_units :], self.compute_dtype)
        return y, {"inputs": inputs[:, 1:], "states": states}

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Advances all steps of x, even fewer than a dilation, one level at a time."""
        x, cache = check_stream(self, x, cache)
        time = ops.shape(x)[1]
        inputs = ops.concatenate([cache["inputs"], x], axis=1)
        buffers = self._level_buffers
        weights = self._weights()
        injected, index = self._injection_by_dilation(inputs, weights, time)
        index, dilations = ops.convert_to_tensor(index), ops.convert_to_tensor(buffers.dilations)
        active = self.active_channels(np.arange(1, self.depth + 1))
        active = None if active is None else ops.convert_to_tensor(active)

        def read_taps(z, z_0, steps):
            return ops.concatenate([_window(z, s, time) for s in steps], axis=-1)

        def level(i, carried):
            states, kept = carried
            # All indices of a slice must have one integer type, that of the loop's counter.
            d = ops.cast(dilations[i], ops.convert_to_tensor(i).dtype)
            pairs = zip(kept, states, strict=True)
            below = [ops.concatenate([steps[i], s], axis=1) for steps, s in pairs]
            states = self._level(
                below,
                None,
                weights,
                read_taps,
                injected[index[i]],
                d,
                None if active is None else active[i],
            )
            pairs = zip(kept, below, strict=True)
            kept = [replace_row(k, i, s[:, -k.shape[2] :]) for k, s in pairs]
            return states, kept

        kept = [buffers.stack(buffers_of_state) for buffers_of_state in cache["states"]]
        states, kept = ops.fori_loop(0, self.depth, level, (self._zero_states(x, time), kept))
        pairs = zip(kept, cache["states"], strict=True)
        following = [buffers.unstack(k, like) for k, like in pairs]
        y = ops.cast(states[0][..., -self.output_units :], self.compute_dtype)
        return y, {"inputs": inputs[:, time:], "states": following}

    @property
    def _level_buffers(self):
        return LevelBuffers([self.dilation(i) for i in range(1, self.depth + 1)])

    def cache_shapes(self, batch_size: int | None) -> dict:
        past_taps = self.kernel_size - 1
        longest = max(self.dilation(i) for i in range(1, self.depth + 1) if self.injects_input(i))
        # The past taps read h up to (k-1)d steps back; the gates read all states d steps back.
        reach = [max(past_taps, 1)] + [1] * (len(self.cell.state_size) - 1)
        return {
            "inputs": [batch_size, past_taps * longest, self.input_channels],
            "states": [
                self._level_buffers.shapes(batch_size, r, size)
                for r, size in zip(reach, self.cell.state_size, strict=True)
            ],
        }

    def _injection_by_dilation(self, inputs, weights, time):
        """Returns the distinct `_injection`s, and the index among them of each level's.

        The first is the bias alone, for the levels without injection. The others are those of x,
        one per distinct dilation: (injection, batch, time, preactivations). `inputs` (batch,
        steps + time, channels) are x after the last inputs of the cache.
        """
        levels = np.arange(1, self.depth + 1)
        dilations = np.array([self.dilation(i) for i in levels])
        distinct = np.unique(dilations[self.injects_input(levels)])

        def read_taps(z, z_0, steps):  # steps of all dilations: one product for all of them
            seen = [[_window(z, s, time) for s in of_tap] for of_tap in steps]
            return ops.concatenate([ops.concatenate(s, axis=0) for s in seen], axis=-1)

        x = self._injection(inputs, weights._replace(bias=0.0), read_taps, distinct)
        x = ops.reshape(x, (len(distinct), -1, *ops.shape(x)[1:])) + weights.bias
        bias = ops.broadcast_to(weights.bias, ops.shape(x[:1]))
        index = np.where(self.injects_input(levels), np.searchsorted(distinct, dilations) + 1, 0)
        return ops.concatenate([bias, x], axis=0), index.astype("int32")

    # Keras

    def compute_output_shape(self, input_shape: Shape, output_length: int | None = None) -> Shapes:
        batch, steps = input_shape[0], time_axis(self, input_shape[1], output_length)
        shapes = [(batch, *steps, self.output_units)]
        if self.return_aux and self.aux_levels:
            shapes.append((batch, len(self.aux_levels), *steps, self.output_units))
        if self.return_state:
            shapes.extend((batch, size) for size in self.state_sizes)
        return shapes[0] if len(shapes) == 1 else tuple(shapes)


def _window(x, steps, time):
    """Returns the `time` steps of x (batch, all, channels) that end `steps` before its last one."""
    batch, total, channels = ops.shape(x)
    return ops.slice(x, (0, total - time - steps, 0), (batch, time, channels))


class LevelBuffers:
    """Layout of the past states of every level in a streaming cache.

    Level i reads the level below it up to some dilations earlier. Levels with the same dilation
    share a tensor (batch, levels, steps, units) of the states below them, newest step last; the
    dilations ascend. Each step shifts it by one: copying costs no more than writing at an index
    (for which XLA would also copy), and there is no index to carry.

    Args:
        dilations: Dilation of every level, from level 1 on.
    """

    def __init__(self, dilations: Sequence[int]) -> None:
        self.dilations = np.array(dilations, "int32")
        # {dilation: indices of its levels, from 0}
        self.levels = {
            int(d): np.flatnonzero(self.dilations == d) for d in np.unique(self.dilations)
        }

    def shapes(self, batch_size: int | None, reach: int, units: int) -> list[list]:
        """Returns the shapes of the buffers of a state that is read `reach` dilations back."""
        return [[batch_size, len(i), reach * d, units] for d, i in self.levels.items()]

    def earlier(self, buffers: list[Tensor], n: int) -> Tensor:
        """Returns the states below every level, `n` dilations earlier, (batch, level, units)."""
        pairs = zip(self.levels, buffers, strict=True)
        return self._join([buffer[:, :, buffer.shape[2] - n * d] for d, buffer in pairs])

    def append(self, buffers: list[Tensor], newest: Tensor) -> list[Tensor]:
        """Drops the oldest step and appends the newest, (batch, level, units)."""
        return [
            ops.concatenate([buffer[:, :, 1:], _take_levels(newest, i, 1)[:, :, None]], axis=2)
            for buffer, i in zip(buffers, self.levels.values(), strict=True)
        ]

    def stack(self, buffers: list[Tensor]) -> Tensor:
        """Returns one tensor (level, batch, steps, units), padded before the oldest steps."""
        longest = max(buffer.shape[2] for buffer in buffers)
        widths = [[[0, 0], [0, 0], [longest - b.shape[2], 0], [0, 0]] for b in buffers]
        padded = [ops.pad(b, w) for b, w in zip(buffers, widths, strict=True)]
        return ops.moveaxis(self._join(padded), 1, 0)

    def unstack(self, stacked: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Undoes `stack`, for buffers of the shapes of `like`."""
        return [
            ops.moveaxis(_take_levels(stacked, i, 0), 0, 1)[:, :, -old.shape[2] :]
            for i, old in zip(self.levels.values(), like, strict=True)
        ]

    def _join(self, parts):
        """Joins parts (batch, levels of a dilation, ...) along the level axis, level 1 first."""
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(list(self.levels.values())))
        return _take_levels(ops.concatenate(parts, axis=1), order, 1)


def _take_levels(x, levels, axis):
    """`ops.take` along the level axis, skipped if it would change nothing."""
    if len(levels) == x.shape[axis] and np.all(np.diff(levels) == 1):
        return x
    return ops.take(x, levels.astype("int32"), axis=axis)


# The sparse kernel of Theorem 1


@keras.saving.register_keras_serializable("trellis_keras")
class MixedGroupKernel(ConvolutionKernel):
    """A `ConvolutionKernel` with the connections of an RNN (Bai et al. 2019, Eq. 5).

    The channels of h are divided into groups, one per layer of the RNN, the bottom one first. A
    level that advances every layer by a step has, for each block of the gates, the connections

        past taps of Wh        group j  ->  group j          W_hh of layer j
        current tap of Wh      group j  ->  group j + 1      W_hx of layer j + 1
        current tap of Wx            x  ->  group 1          W_hx of layer 1

    The kernel is stored in dense shape. The zeros elsewhere are not weights: they have no gradient
    and do not contribute to norms or penalties.

    Args:
        kernel_size: Positive integer, number of taps. The last tap acts on the current step.
        filters: Positive integer, number of output channels: blocks of gates, each a concatenation
            of all groups.
        groups: List of channel widths, the bottom group first.
        recurrent: Boolean, whether the operand is h (the groups), or x (which feeds the first
            group).
        **kwargs: As in `ConvolutionKernel`.

    Example:

    >>> kernel = MixedGroupKernel(2, 3, groups=[1, 1, 1], recurrent=True, initializer="ones")
    >>> kernel.build((None, None, 3))
    >>> np.asarray(kernel())[0].tolist()  # the past tap
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> np.asarray(kernel())[1].tolist()  # the current tap
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        kernel_size: int,
        filters: int,
        *,
        groups: Sequence[int],
        recurrent: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(kernel_size, filters, **kwargs)
        if not _are_positive(groups) or not groups or filters % sum(groups):
            raise ValueError(
                "`groups` must be a list of positive channel widths, and `filters` a multiple of "
                "their sum. "
                f"Received: filters={filters}, groups={groups}"
            )
        self.groups = list(groups)
        self.recurrent = recurrent

    def apply_connections(self, kernel: Tensor) -> Tensor:
        group = np.repeat(np.arange(len(self.groups), dtype="int32"), self.groups)
        # The group that each input channel feeds, (tap, in), and that of each output channel.
        feeds = np.full(kernel.shape[:2], -1, "int32")
        if self.recurrent:
            feeds[:-1], feeds[-1] = group, group + 1
        else:
            feeds[-1] = 0
        belongs = np.tile(group, self.filters // len(group))
        # Compared in the graph: a constant mask would be as large as the kernel.
        feeds, belongs = map(ops.convert_to_tensor, (feeds, belongs))
        return ops.where(ops.equal(feeds[..., None], belongs), kernel, ops.zeros_like(kernel))


# Constructor arguments


def _gated_activation(cell, units, dtype):
    """Returns the gated activation with the given name, or the given one, checked."""
    if isinstance(cell, str) and cell in _GATES:
        return _GATES[cell](units, dtype=dtype)
    if isinstance(cell, dict):
        cell = keras.saving.deserialize_keras_object(cell)
    if not isinstance(cell, GatedActivation):
        raise ValueError(
            f"`cell` must be one of {sorted(_GATES)} or an instance of `GatedActivation`. "
            f"Received: cell={cell!r}"
        )
    if cell.units != units:
        raise ValueError(f"`cell` has units={cell.units}, but the layer has units={units}")
    return cell


def _check_groups(units, depth, groups, kernel_structure, group_starts):
    """Checks these arguments of a `TrellisLayer`."""
    mixed = kernel_structure == "mixed_group"
    received = f"Received: {kernel_structure=}, {groups=}, {group_starts=}, {units=}, {depth=}"
    if (groups is None) == (mixed or group_starts is not None):
        raise ValueError(
            '`kernel_structure="mixed_group"` and `group_starts` need `groups`, the channel '
            f"width of each group, and `groups` needs one of these two. {received}"
        )
    if groups is None:
        return
    if not _are_positive(groups) or sum(groups) != units or mixed and len(groups) > depth:
        raise ValueError(
            "`groups` must be a list of positive channel widths that sum to `units`, and at most "
            f"`depth` of them, as x advances one group per level. {received}"
        )
    if group_starts is None:
        return
    fits = _are_positive(group_starts) and len(group_starts) == len(groups)
    if not fits or max(group_starts) > depth:
        raise ValueError(
            f"`group_starts` must list a level from 1 to `depth` for each group. {received}"
        )


def _named_levels(config):
    """Returns how many levels the options of a config need, besides `depth`."""
    aux_every: Any = config.get("aux_every")
    groups, starts = (config.get(name) or () for name in ("groups", "group_starts"))
    levels = [aux_every + 1] if is_integer(aux_every) else []
    levels += [len(groups)] if _are_positive(groups) else []
    levels += starts if _are_positive(starts) else []
    return max(levels, default=0)


def _are_positive(values):
    return isinstance(values, (list, tuple)) and all(is_integer(n, minimum=1) for n in values)
