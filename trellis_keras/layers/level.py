"""The levels of one call of a TrellisLayer: the equations of a level, and the order they run in."""

import numpy as np
from keras import ops

from trellis_keras.kernels import cone
from trellis_keras.kernels.convolution import gather, gather_taps, product
from trellis_keras.layers import depth_loop, mixed_group
from trellis_keras.layers.mixed_group import GroupedProduct


class Levels:
    """What all levels of one call share: weights, input injection, history and masks.

    Args:
        layer: The `TrellisLayer`.
        x: Tensor (batch, time, channels) in the compute dtype.
        history: States before the first step, each (batch, units), or None for zeros.
        mask: Boolean (batch, time), or None.
        training: Whether dropout is active.
        plan: The `Cone` of this call, see `depth_loop.plan_levels`.
    """

    def __init__(self, layer, x, history, mask, training, plan):
        self.layer, self.plan, self.training = layer, plan, training
        self.history = [None] * len(layer.cell.state_size) if history is None else history
        self.batch, self.time, _ = ops.shape(x)
        self.everything = None if plan.time is None else np.arange(plan.time)
        self.mask = None if mask is None else ops.cast(mask, "bool")[..., None]
        # Weights may be half as wide as states: under the policy "bfloat16".
        kernel = ops.cast(layer.recurrent_kernel.uncast(training=training), layer.state_dtype)
        kernel = layer.cell.arrange(kernel)
        self.taps, channels, filters = kernel.shape
        self.kernel = ops.reshape(kernel, (self.taps * channels, filters))
        self.by_group = None
        if mixed_group.splits(layer):
            self.by_group = GroupedProduct(kernel, self.taps - 1, layer.groups)
        ones = ops.ones((self.batch, 1, channels), layer.state_dtype)
        self.dropout = layer.hidden_dropout.mask(ones, training)
        self.bias = ops.cast(layer.bias, layer.state_dtype)
        x = x if mask is None else ops.where(self.mask, x, ops.zeros_like(x))
        self.x, self.x_kernel = x, layer.cell.arrange(layer.kernel(training=training))
        self.shared, self.injection = self._shared(), {}

    def run(self):
        """Runs all levels.

        Returns:
            {level: its h} of the auxiliary levels and the last one, and the last one's states. All
            at the positions that the plan has for these levels, so they end with the last step.
        """
        states = self._ground()
        outputs = {}
        for block in self.plan.blocks:
            run = self._loop if block.turns > 1 else self._single
            states = run(block, states)
            if block.last in self.layer.aux_levels or block.last == self.layer.depth:
                outputs[block.last] = states[0]
        return outputs, states

    def level(self, below, inject, reads, valid, awake):
        """The states of a level, from those of the level below it (TrellisNet, Eqs. 1, 2, 12).

        Args:
            below: List of states (batch, positions below, units), or None for the zeros below
                level 1, which add nothing.
            inject: What x and the bias add: (batch, positions, preactivations).
            reads: Where the taps find the states below, see `_reads`.
            valid: Boolean (batch, positions, 1), False where the history stands; None: all True.
            awake: Boolean (units,), False for the channels that are held at zero; None: all True.
        """
        layer = self.layer
        if below is None:
            a, past = inject, self._zeros(ops.shape(inject)[1])
        else:
            a = ops.cast(self._convolve(below[0], reads[-self.taps :]), layer.state_dtype) + inject
            past = [gather(s, reads[-2], p) for s, p in zip(below, self.history, strict=True)]
        _, states = layer.cell(a, past)
        states = [ops.cast(s, layer.state_dtype) for s in states]
        if awake is not None:
            states = [ops.where(awake, s, ops.zeros_like(s)) for s in states]
        return self._hold(states, valid)

    def _convolve(self, h, reads):
        """The product of what the taps see with the kernel."""
        h, before = self._operand(h), self._operand(self.history[0])
        dtype = self.layer.compute_dtype
        if self.by_group is not None:
            return self.by_group([gather(h, read, before) for read in reads], dtype)
        # Cast in here, so that the weight gradients of all levels add up in full precision.
        return product(gather_taps(h, reads, before), ops.cast(self.kernel, dtype))

    def _operand(self, h):
        """h (batch, positions, units), or before the first step (batch, units), as convolved."""
        if h is None:
            return None
        if self.dropout is not None:
            h = h * (self.dropout if len(h.shape) == 3 else self.dropout[:, 0])
        return ops.cast(h, self.layer.compute_dtype)

    def _single(self, block, below):
        """A level that is not in a loop."""
        level = block.first
        inject = self._injected(level) if self.layer.enters(level) else self.bias
        reads, valid = self._reads(level, level - 1), self._valid(level)
        return self.level(below, inject, reads, valid, self.layer.awake(level))

    def _loop(self, block, states):
        """The levels of a block, of which all compute the same positions."""
        layer, first = self.layer, block.first
        states = [gather(s, self.plan.read(first, 0)) for s in states]
        # The same at all levels of the block: it ends where a group starts.
        valid, awake = self._valid(first), layer.awake(first)
        if valid is awake is None and depth_loop.has_fast_path(layer, self.plan.time):
            return self._fast_loop(block, states)
        cycle = range(first, first + block.period)
        injected = {layer.dilation(level): self._injected(level) for level in cycle}

        def turn(i, states):
            for level in cycle:
                inject = injected[layer.dilation(level)]
                if layer.injection_every > 1:
                    inject = ops.where(layer.enters(level + i * block.period), inject, self.bias)
                states = self.level(states, inject, self._reads(level, level), valid, awake)
            return states

        return depth_loop.repeat(turn, states, block.turns)

    def _fast_loop(self, block, states):
        """The same as `_loop`, see `depth_loop_tf`."""
        from trellis_keras.layers import depth_loop_tf

        return depth_loop_tf.lstm_levels(
            states,
            self._injected(block.first),
            self.kernel,
            self.dropout,
            self.history,
            block.turns,
            self.layer.compute_dtype,
            self.training,
            lean=self.layer.memory == "lean",
        )

    def _reads(self, level, below):
        """Where a level finds the states of the one below: the oldest tap first, at last now.

        Also one dilation ago if the kernel has but one tap: the gates want the states there.
        """
        d = self.layer.dilation(level)
        return [self.plan.read(level, j * d, below) for j in reversed(range(max(self.taps, 2)))]

    def _injected(self, level):
        """What x and the bias add at a level: (batch, positions, preactivations).

        It is computed once for all levels of a dilation, of which each takes a stretch. Rows that
        lie scattered are computed anew: the gradient of picking them is as large as all the rows.
        """
        d, positions = self.layer.dilation(level), self.plan.positions[level]
        read = cone.read(positions, self.shared[d])
        if not read.is_contiguous:
            return self._inject(d, positions)
        if d not in self.injection:
            self.injection[d] = self._inject(d, self.shared[d])
        return gather(self.injection[d], read)

    def _inject(self, d, positions):
        taps, channels, filters = self.x_kernel.shape
        reads = [cone.read(positions, self.everything, j * d) for j in reversed(range(taps))]
        kernel = ops.reshape(self.x_kernel, (taps * channels, filters))
        a = product(gather_taps(self.x, reads), kernel)
        return ops.cast(a, self.layer.state_dtype) + self.bias

    def _shared(self):
        """The positions where x enters any of the levels of a dilation: {dilation: positions}."""
        by_dilation = {}
        for block in self.plan.blocks:
            for level in range(block.first, block.last + 1):
                if self.layer.enters(level) or block.turns > 1:
                    by_dilation.setdefault(self.layer.dilation(level), []).append(level)
        return {d: self._union(levels) for d, levels in by_dilation.items()}

    def _union(self, levels):
        if self.everything is None:
            return None
        return np.unique(np.concatenate([self.plan.positions[i] for i in levels]))

    def _ground(self):
        """The states below level 1: zeros, or None where they are seen nowhere."""
        if self.history[0] is None:
            return None
        positions = self.plan.positions[0]
        return self._hold(
            self._zeros(self.time if positions is None else len(positions)), self._valid(0)
        )

    def _zeros(self, width):
        shapes = [(self.batch, width, size) for size in self.layer.cell.state_size]
        return [ops.zeros(shape, self.layer.state_dtype) for shape in shapes]

    def _valid(self, level):
        if self.mask is None:
            return None
        return gather(self.mask, cone.read(self.plan.positions[level], self.everything))

    def _hold(self, states, valid):
        """Puts the history where the mask is False."""
        if valid is None:
            return states
        pairs = zip(states, self.history, strict=True)
        pasts = [ops.zeros_like(s) if p is None else p[:, None, :] for s, p in pairs]
        return [ops.where(valid, s, p) for s, p in zip(states, pasts, strict=True)]
