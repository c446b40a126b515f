"""The levels of a TrellisNet at the positions of a cone, in loops that are compiled once.

All levels share their weights, so a level can be compiled once, not `depth` times. They differ in
the positions that they compute. `cone.plan_levels` therefore groups levels into blocks of equal
positions, and each block is a loop here. A turn of the loop is one cycle of the dilations.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.kernels import cone
from trellis_keras.kernels.convolution import gather, gather_taps
from trellis_keras.types import Tensor

States = list[Tensor]


def run_levels(
    plan: cone.Cone,
    states: Any,
    level: Callable[..., States],
    injection: "SharedInjection",
    loop: Callable[..., States],
) -> tuple[dict[int, Tensor], States]:
    """Runs all levels of a plan, as `TrellisLayer._run_levels` does at every position.

    Args:
        plan: `cone.Cone` with blocks.
        states: States of level 0 at its positions, each (batch, positions, units), or None for
            zeros, including before the first step.
        level: Function (i, below, read_taps, injected) that returns the states of level i, where
            `read_taps` is as in `TrellisLayer._level`. In a loop i is the level of the first turn:
            its dilation and positions are those of the others.
        injection: `SharedInjection` of the input.
        loop: Function (first, turn, states, injected, turns) that returns the states after all
            turns of a loop whose first level is `first`, such as `repeat`.

    Returns:
        {level: h} for the levels with outputs, and the states of the last one; all at the positions
        that the plan has for these levels, which end with the last step.
    """
    outputs: dict[int, Tensor] = {}
    for block in plan.blocks:
        first, period = block.first, block.period
        if block.turns == 1:
            states = level(first, states, _reader(plan, first, first - 1), injection(first))
        else:
            states = [gather(s, plan.read(first, 0)) for s in states]
            contributions = {i: injection.at_level(i) for i in range(first, first + period)}

            def turn(n, states, period=period, contributions=contributions):
                for i, contribution in contributions.items():
                    injected = injection.choose(i + n * period, contribution)
                    states = level(i, states, _reader(plan, i, i), injected)
                return states

            states = loop(first, turn, states, contributions[first], block.turns)
        if block.last in plan.output_levels:
            outputs[block.last] = states[0]
    return outputs, states


def _reader(plan, level, below):
    """Returns the function `read_taps` of a level, see `TrellisLayer._level`."""

    def read_taps(z, z_0, steps):
        return gather_taps(z, [plan.read(level, s, below) for s in steps], z_0)

    return read_taps


class SharedInjection:
    """The contribution of x and the bias to the pre-activations, computed once per dilation.

    Args:
        plan: `cone.Cone`.
        inject: Function (positions, dilation) that returns (batch, positions, preactivations).
        bias: Tensor (preactivations,), the contribution at levels without injection of x.
        dilation: Function of a level.
        enters: Function that returns whether x is injected at a level, an integer or a tensor.
    """

    def __init__(
        self,
        plan: cone.Cone,
        inject: Callable[[np.ndarray | None, int], Tensor],
        bias: Tensor,
        dilation: Callable[[int], int],
        enters: Callable[[Any], Any],
    ) -> None:
        self.plan, self.inject, self.bias = plan, inject, bias
        self.dilation, self.enters = dilation, enters
        self.enters_everywhere = all(enters(i) for i in range(1, len(plan.positions)))
        self.positions = self._find_positions()
        self.computed: dict[int, Tensor] = {}

    def _find_positions(self):
        """Returns {dilation: positions where x is injected at any of its levels}."""
        by_dilation = {}
        for block in self.plan.blocks:
            for level in range(block.first, block.last + 1):
                if self.enters(level) or block.turns > 1:
                    positions = self.plan.positions[level]
                    by_dilation.setdefault(self.dilation(level), []).append(positions)
        if self.plan.time is None:
            return dict.fromkeys(by_dilation)
        return {d: np.unique(np.concatenate(found)) for d, found in by_dilation.items()}

    def __call__(self, level: int) -> Tensor:
        """Returns the contribution at a level, (batch, positions, preactivations), or the bias."""
        return self.at_level(level) if self.enters(level) else self.bias

    def choose(self, level: Tensor, contribution: Tensor) -> Tensor:
        """Returns the contribution at a level in a loop, from its index and `at_level`."""
        if self.enters_everywhere:
            return contribution
        return ops.where(self.enters(level), contribution, self.bias)

    def at_level(self, level: int) -> Tensor:
        """Returns the contribution at a level with injection of x."""
        d, positions = self.dilation(level), self.plan.positions[level]
        read = cone.locate(positions, self.positions[d])
        # Scattered positions are recomputed: the gradient of gathering them is as large as that of
        # all positions.
        if not read.is_contiguous:
            return self.inject(positions, d)
        if d not in self.computed:
            self.computed[d] = self.inject(self.positions[d], d)
        return gather(self.computed[d], read)


def repeat(
    turn: Callable[[Tensor, States], States],
    states: States,
    turns: int,
    rematerialize: bool = False,
) -> States:
    """Returns the states after `states = turn(n, states)` for n = 0..turns-1, compiled once.

    Each backend uses the loop that it can differentiate: TensorFlow's `scan` has no gradient under
    XLA, and JAX's `while_loop` has none at all.

    Args:
        turn: Function of an integer tensor and a list of tensors. It must not draw random numbers.
        states: List of tensors.
        turns: Number of turns.
        rematerialize: Boolean, whether the backward pass recomputes what a turn computes and
            stores only the states. It has no effect on TensorFlow. Defaults to `False`.
    """
    if keras.backend.backend() == "tensorflow":
        _, *states = ops.while_loop(
            lambda n, *_: n < turns,
            lambda n, *s: (n + 1, *turn(n, list(s))),
            (0, *states),
            # XLA needs a static bound to allocate the gradient's inputs.
            maximum_iterations=turns,
        )
        return states
    turn = keras.remat(turn) if rematerialize else turn
    states, _ = ops.scan(lambda s, n: (turn(n, s), None), states, ops.arange(turns))
    return states


def in_tensorflow_graph() -> bool:
    """Returns whether TensorFlow is tracing a function."""
    if keras.backend.backend() != "tensorflow":
        return False
    from trellis_keras import _tensorflow

    return _tensorflow.in_graph()


def step_levels(
    a: Tensor,
    past: States,
    *,
    active: np.ndarray | None,
    current_product: Callable[[Tensor], Tensor],
    gated_states: Callable[..., States],
    compute_dtype: str,
) -> tuple[States, States]:
    """Runs all levels of one time step in a loop, given the contribution of the past taps to each.

    It equals `TrellisLayer._level` at every level. Only the current tap is multiplied here.

    Args:
        a: Tensor (batch, level, preactivations): contributions of x, the bias and the past taps.
        past: States below every level, d steps earlier, each (batch, level, units).
        active: Booleans (level, units), or None.
        current_product: Function that multiplies h (batch, 1, units) by the current tap of Wh.
        gated_states: `TrellisLayer._gated_states`.
        compute_dtype: Dtype of the product's operand.

    Returns:
        The states below every level, each (batch, level, units), and those of the last level, each
        (batch, units).
    """
    # The level axis first, for the loop. The cell expects a time axis.
    a, *past = (ops.moveaxis(z, 1, 0)[:, :, None] for z in (a, *past))
    started = [] if active is None else [ops.convert_to_tensor(active)]

    def level(below, own):
        a, past, started = own
        current = current_product(ops.cast(below[0], compute_dtype))
        states = gated_states(a + ops.cast(current, a.dtype), past, *started)
        return states, states

    ground = [ops.zeros_like(s[0]) for s in past]
    top, states = ops.scan(level, ground, (a, past, started))
    below = [
        ops.moveaxis(ops.concatenate([g[None], s[:-1]], axis=0)[:, :, 0], 0, 1)
        for g, s in zip(ground, states, strict=True)
    ]
    return below, [s[:, 0] for s in top]
