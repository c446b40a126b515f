"""TrellisNet's core as a Keras layer."""

import functools

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import base, gates, mixed_group
from trellis_keras.layers.base import OutputLengthMixin, StatefulMixin, at_least_float32, last_step
from trellis_keras.layers.depth_loop import plan_levels
from trellis_keras.layers.level import Levels
from trellis_keras.layers.mixed_group import MixedGroupKernel
from trellis_keras.layers.regularization import ConvolutionKernel, VariationalDropout
from trellis_keras.layers.trellis_streaming import TrellisStreaming

MEMORIES = ("fast", "lean")


@keras.saving.register_keras_serializable("trellis_keras")
class TrellisLayer(OutputLengthMixin, StatefulMixin, TrellisStreaming, keras.layers.Layer):
    """Weight-tied, input-injected temporal convolution (Bai et al. 2019, Eqs. 1, 2 and 12).

    With d the dilation of level i, m a dropout mask and f the gated activation, every level
    i = 1..depth computes, with the same weights,

        a_t = sum_j x_{t-j*d} Wx[k-1-j] + (m * h^{i-1}_{t-j*d}) Wh[k-1-j] + b,    j = 0..k-1
        h^i_t, c^i_t = f(a_t, h^{i-1}_{t-d}, c^{i-1}_{t-d})

    and the output is the last `output_units` channels of h at the last level. It is causal:
    output t depends on inputs up to t only, and on no more than `receptive_field` of them.

    Args:
        units: Channels of the hidden sequence h (the papers' hidden size plus output size).
        depth: Number of levels.
        output_units: Channels of the output, the last ones of h. Default: `units`.
        kernel_size: Number of taps of the convolutions.
        dilation_rate: One integer, or a list that the levels cycle through.
        output_length: Only the last `output_length` steps are returned, and no more is computed
            than they depend on (`kernels.cone`). Default: all. Everything is computed if the length
            of the input is not static, or if the last step or the states of a masked input are
            wanted: a row's last valid step can be any one.
        cell: Gated activation: `"lstm"`, `"gru"`, `"mgu"`, `"rnn"`, or a `GatedActivation` layer.
        kernel_structure: `"dense"`, or `"mixed_group"` for the sparse kernels of Eq. (5): past taps
            of Wh connect each group with itself, its current tap each with the next one, and x's
            current tap feeds the first (`layers.mixed_group`). The kernels keep their shapes; what
            is not connected is and stays zero.
        groups: List of the channel widths of the groups, the bottom one first, summing to `units`.
            In each block of gates the groups lie side by side in this order.
        group_starts: List of levels, one per group. At the levels below its own all states of a
            group are zero at every step of the sequence (before the first step the history stands
            at all levels). Default: no group is held. Theorem 1 needs 1, 2, 3, ... if there are
            biases. They hold for dense kernels too.
        injection_every: x enters at levels 1, 1 + n, 1 + 2n, ... (1: at every level, Eq. 1).
        weight_norm: Whether both kernels are weight-normed, each per output channel.
        dropout: Variational dropout rate of h where it enters the convolution. One mask
            (batch, channel) is drawn per call and serves all levels and steps.
        weight_dropout: DropConnect rate of the past taps of both kernels (there are none with
            `kernel_size=1`).
        aux_every: Auxiliary outputs are taken after every `aux_every` levels.
        aux_from: `"bottom"` counts levels n, 2n, ... up to and including the last one (the
            authors' program); `"top"` counts L - n, L - 2n, ... (the paper).
        return_sequences: Whether to return all steps, or the last one only: with a mask, each
            row's last valid one, as `keras.layers.RNN` does (a row without any gets the initial h).
        return_state: Whether to return the last step's states too.
        return_aux: Whether to return the auxiliary outputs too.
        stateful: Whether the last states of a batch pad the next one (history repackaging).
        unroll: Whether every level is compiled by itself (True), or a block of levels as a loop,
            which compiles once (False). The results are the same. Default (None): a loop, unless
            it would compute over 1.25 times as many positions as unrolled levels (more if these
            are many), or the cell has variables that are not trained (its own random seed).
            Dilations that do not repeat leave nothing to loop over. See `layers.depth_loop`.
        memory: What `layers.depth_loop_tf`, the faster loop that TensorFlow has for LSTM gates with
            kernel size 2, dilation 1, x at every level, static lengths and no mask, keeps for the
            gradient: `"fast"` keeps each level's pre-activations, `"lean"` computes them again;
            None does without that loop. Elsewhere it changes nothing.
        seed: Integer seed of the dropouts and of the default initializers. (An initializer that is
            given has its own.)
        kernel_initializer, recurrent_initializer, bias_initializer: Of Wx, Wh and b. Default:
            N(0, 0.01) for all three, as in the authors' program.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Of Wx, Wh and b.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        initial_state: List of states, each (batch, units): [h, c] for `"lstm"`, [h] else. It
            stands in every step before the first, at every level (paper, appendix B). Default:
            zeros, or the carried states of a stateful layer.
        training: Whether dropout is active.
        mask: Boolean (batch, time). Masked steps count as steps before the sequence: x is zero
            and the states are the initial ones there. Right for pre- and for post-padding.
        output_length: Overrides the constructor's for this call. (A mask that Keras passes on to
            the next layer has the constructor's.)

    Returns:
        y (batch, time, output_units), or a tuple of y, then with `return_aux` the auxiliary
        outputs (batch, n_aux, time, output_units), then with `return_state` the states, each
        (batch, units). Without `return_sequences` the time axis is gone from y and aux.

    Raises:
        ValueError: Arguments out of range or that need others, inputs shorter than a dilation or
            than `output_length`, or states of the wrong number or shape.

    Example:

    >>> layer = TrellisLayer(units=12, depth=5, output_units=4)
    >>> layer(np.zeros((2, 7, 3), "float32")).shape
    (2, 7, 4)
    """

    def __init__(
        self,
        units,
        depth,
        *,
        output_units=None,
        kernel_size=2,
        dilation_rate=1,
        output_length=None,
        cell="lstm",
        kernel_structure="dense",
        groups=None,
        group_starts=None,
        injection_every=1,
        weight_norm=False,
        dropout=0.0,
        weight_dropout=0.0,
        aux_every=None,
        aux_from="bottom",
        return_sequences=True,
        return_state=False,
        return_aux=False,
        stateful=False,
        unroll=None,
        memory="fast",
        seed=None,
        kernel_initializer=None,
        recurrent_initializer=None,
        bias_initializer=None,
        kernel_regularizer=None,
        recurrent_regularizer=None,
        bias_regularizer=None,
        **kwargs,
    ):
        # Inputs are cast in `call`: Keras' autocast would take the states down to half precision.
        super().__init__(autocast=False, **kwargs)
        output_units = units if output_units is None else output_units
        base.check_positive(
            units=units,
            depth=depth,
            output_units=output_units,
            kernel_size=kernel_size,
            injection_every=injection_every,
        )
        if output_units > units:
            raise ValueError(
                "The output is a part of the hidden channels: `output_units` must be at most "
                f"`units`. Received: output_units={output_units}, units={units}"
            )
        self._init_output_length(return_sequences, output_length)
        mixed_group.check_arguments(units, depth, groups, kernel_structure, group_starts)
        self.units = units
        self.depth = depth
        self.output_units = output_units
        self.kernel_size = kernel_size
        self.dilations = base.dilation_cycle(dilation_rate)
        self.dilation_rate = self.dilations if np.ndim(dilation_rate) else self.dilations[0]
        self.kernel_structure = kernel_structure
        self.groups = None if groups is None else list(groups)
        self.group_starts = None if group_starts is None else list(group_starts)
        self.injection_every = injection_every
        self.weight_norm = weight_norm
        self.dropout = dropout
        self.weight_dropout = weight_dropout
        self.aux_every = aux_every
        self.aux_from = aux_from
        self.aux_levels = aux_levels(depth, aux_every, aux_from)
        self.return_state = return_state
        self.return_aux = return_aux
        if return_aux and not self.aux_levels:
            raise ValueError("`return_aux=True` needs `aux_every`. Received: aux_every=None")
        if unroll not in (None, True, False):
            raise ValueError(f"`unroll` must be None, True or False. Received: {unroll!r}")
        self.unroll = unroll
        if memory not in (*MEMORIES, None):
            raise ValueError(f'`memory` must be "fast", "lean" or None. Received: {memory!r}')
        self.memory = memory
        self.seed = seed
        self.kernel_initializer = _initializer(kernel_initializer, seed, 0)
        self.recurrent_initializer = _initializer(recurrent_initializer, seed, 1)
        self.bias_initializer = _initializer(bias_initializer, seed, 2)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.supports_masking = True

        # States and gates stay at least at float32 under mixed precision.
        state_dtype = at_least_float32(self.compute_dtype)
        self.cell = gates.get(cell, units, dtype=state_dtype)
        self._init_stateful(self.cell.state_size, state_dtype, stateful)
        self.kernel = self._convolution_kernel("kernel", seed)
        self.recurrent_kernel = self._convolution_kernel("recurrent_kernel", seed)
        # It multiplies states.
        self.hidden_dropout = VariationalDropout(dropout, seed=seed, dtype=state_dtype)

    def _convolution_kernel(self, name, seed):
        recurrent = name == "recurrent_kernel"
        kernel = ConvolutionKernel
        if self.kernel_structure == "mixed_group":
            kernel = functools.partial(MixedGroupKernel, groups=self.groups, recurrent=recurrent)
        return kernel(
            self.kernel_size,
            self.cell.kernel_units,
            weight_norm=self.weight_norm,
            dropout=self.weight_dropout,
            initializer=self.recurrent_initializer if recurrent else self.kernel_initializer,
            regularizer=self.recurrent_regularizer if recurrent else self.kernel_regularizer,
            seed=None if seed is None else seed + 1 + recurrent,
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape):
        self.input_spec = base.sequence_spec(self, input_shape)
        self.kernel.build(input_shape)
        self.recurrent_kernel.build((None, None, self.units))
        self.bias = self.add_weight(
            name="bias",
            shape=(self.cell.preactivation_size,),
            initializer=self.bias_initializer,
            regularizer=self.bias_regularizer,
            autocast=False,
        )
        self._build_state_cache(input_shape[0])

    @property
    def receptive_field(self):
        """Number of inputs, the current one included, that an output depends on."""
        return mixed_group.receptive_field(self)

    def to_dense(self):
        """Returns a new layer with dense kernels that computes the same function.

        It has this layer's weights, with zeros where this one has no connection, its start levels
        and its other arguments. Training it moves all of the kernels: the step from an RNN to a
        TrellisNet (paper, section 4.2).

        Raises:
            ValueError: The layer's kernels are dense.
        """
        return mixed_group.lift_mask(self)

    def awake(self, levels):
        """Which channels have started at a level: booleans (units,), or for an array of levels
        (levels, units). None if all have, at each of them."""
        if self.group_starts is None or np.min(levels) >= max(self.group_starts):
            return None
        return np.repeat(self.group_starts, self.groups) <= np.asarray(levels)[..., None]

    def dilation(self, level):
        """Dilation of a level, counted from 1."""
        return self.dilations[(level - 1) % len(self.dilations)]

    def enters(self, level):
        """Whether x enters at a level, counted from 1."""
        return (level - 1) % self.injection_every == 0

    def call(self, inputs, initial_state=None, training=False, mask=None, output_length=None):
        training = bool(training)
        mask = base.resolve_mask(inputs, mask)
        self._check_time(inputs.shape[1], output_length)
        x = ops.cast(inputs, self.compute_dtype)
        history = self._initial_states(ops.shape(x)[0], initial_state, training)
        wants_states = self.return_state or self.stateful
        kept = self._output_steps(output_length)
        # The last valid step of a masked row can be any one.
        anywhere = mask is not None and (wants_states or not self.return_sequences)
        plan = plan_levels(self, x.shape[1], None if anywhere else kept)
        outputs, states = Levels(self, x, history, mask, training, plan).run()
        if not self.return_sequences:
            past = None if history is None else history[:1]
            outputs = {i: last_step([h], past, mask)[0] for i, h in outputs.items()}
        last = last_step(states, history, mask) if wants_states else None
        self._carry_states(last, training)
        return self._outputs(outputs, last, kept)

    def _outputs(self, outputs, states, kept):
        def finish(h):
            h = h[:, -kept:] if self.return_sequences and kept is not None else h
            return ops.cast(h[..., -self.output_units :], self.compute_dtype)

        result = [finish(outputs[self.depth])]
        if self.return_aux:
            result.append(ops.stack([finish(outputs[i]) for i in self.aux_levels], axis=1))
        if self.return_state:
            result.extend(states)
        return result[0] if len(result) == 1 else tuple(result)

    def compute_mask(self, inputs, mask=None):
        """Returns a mask per output: only y keeps the time axis that the mask belongs to."""
        mask = self._output_mask(mask)
        others = self.return_aux + self.return_state * len(self.cell.state_size)
        return (mask, *[None] * others) if others else mask

    def compute_output_shape(self, input_shape, output_length=None):
        batch, steps = input_shape[0], self._time_axis(input_shape[1], output_length)
        shapes = [(batch, *steps, self.output_units)]
        if self.return_aux:
            shapes.append((batch, len(self.aux_levels), *steps, self.output_units))
        if self.return_state:
            shapes.extend((batch, size) for size in self.cell.state_size)
        return shapes[0] if len(shapes) == 1 else tuple(shapes)

    def compute_output_spec(
        self, inputs, initial_state=None, training=False, mask=None, output_length=None
    ):
        self._check_time(inputs.shape[1], output_length)
        shapes = self.compute_output_shape(inputs.shape, output_length)
        if not isinstance(shapes[0], tuple):
            return keras.KerasTensor(shapes, self.compute_dtype)
        n_states = self.return_state * len(self.cell.state_size)
        dtypes = [self.compute_dtype] * (len(shapes) - n_states) + [self.state_dtype] * n_states
        return tuple(map(keras.KerasTensor, shapes, dtypes))

    def get_config(self):
        return {
            **super().get_config(),
            "units": self.units,
            "depth": self.depth,
            "output_units": self.output_units,
            "kernel_size": self.kernel_size,
            "dilation_rate": self.dilation_rate,
            "output_length": self.output_length,
            "cell": keras.saving.serialize_keras_object(self.cell),
            "kernel_structure": self.kernel_structure,
            "groups": self.groups,
            "group_starts": self.group_starts,
            "injection_every": self.injection_every,
            "weight_norm": self.weight_norm,
            "dropout": self.dropout,
            "weight_dropout": self.weight_dropout,
            "aux_every": self.aux_every,
            "aux_from": self.aux_from,
            "return_sequences": self.return_sequences,
            "return_state": self.return_state,
            "return_aux": self.return_aux,
            "stateful": self.stateful,
            "unroll": self.unroll,
            "memory": self.memory,
            "seed": self.seed,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "recurrent_initializer": keras.initializers.serialize(self.recurrent_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "recurrent_regularizer": keras.regularizers.serialize(self.recurrent_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }


def aux_levels(depth, aux_every, aux_from):
    if aux_from not in ("bottom", "top"):
        raise ValueError(f'`aux_from` must be "bottom" or "top". Received: {aux_from!r}')
    if aux_every is None:
        return []
    base.check_positive(aux_every=aux_every)
    if aux_from == "bottom":
        levels = list(range(aux_every, depth + 1, aux_every))
    else:
        levels = sorted(range(depth - aux_every, 0, -aux_every))
    if not levels:
        raise ValueError(
            "`aux_every` leaves no auxiliary output: it must be at most the depth (less than it "
            f'with aux_from="top"). Received: aux_every={aux_every}, depth={depth}'
        )
    return levels


def _initializer(identifier, seed, offset):
    """The authors' N(0, 0.01), with a seed of its own per weight, unless another is given."""
    if identifier is not None:
        return keras.initializers.get(identifier)
    seed = None if seed is None else seed + offset
    return keras.initializers.RandomNormal(stddev=0.01, seed=seed)
