"""The levels of a TrellisNet as loops that compile once.

All levels share their weights, so a level needs to be compiled once, not `depth` times. What they
do not share is the positions that they compute (see `cone`). So levels are grouped in blocks, of
equal positions within, and each block is a loop:

- level 1 is never in a loop: without a history it has no hidden product;
- a block ends at every auxiliary level, below every level where a group of channels starts, and
  where enough positions fall out of the cone to be worth another loop (`cone.choose_blocks`);
- a turn of the loop is one cycle of the dilations: one level for a single dilation. Levels that are
  left over in a block when all whole cycles are done are unrolled.

When dilations grow until they reach over the whole sequence, as in image classification with
dilations 1, 1, 2, 4, ..., 512, they do not repeat: everything is unrolled then. The other reason to
unroll is a cone of few, strided positions, of which a loop would have to compute all in between.

Where `has_fast_path` says so, TensorFlow runs a block by `depth_loop_tf` instead, with less work.
"""

import keras
from keras import ops

from trellis_keras.kernels import cone
from trellis_keras.layers import mixed_group
from trellis_keras.layers.gates import LSTMGates


def plan_levels(layer, time, kept):
    """Returns the `Cone` of a TrellisLayer: what its levels compute and which of them are loops.

    Args:
        layer: The `TrellisLayer`; its `unroll` decides, or with None the rule described there.
        time: Length of the sequence, or None if unknown.
        kept: How many of the last outputs are wanted, or None for all.
    """
    unroll = layer.unroll
    if unroll is None and layer.cell.non_trainable_variables:
        unroll = True
    dilations = tuple(layer.dilation(i) for i in range(1, layer.depth + 1))
    aux = tuple(layer.aux_levels)
    held = tuple(sorted({level - 1 for level in layer.group_starts or [] if level > 1}))
    weights = layer.kernel_size * layer.units * layer.cell.preactivation_size
    period = cone.find_period(layer.dilations)
    # The gated activation reads the states one dilation ago, even if the kernel has but one tap.
    reads = tuple(cone.offsets(max(layer.kernel_size, 2), d) for d in dilations)
    return cone.plan_levels(time, reads, kept, aux, held, period, unroll, weights)


def has_fast_path(layer, time):
    """Whether `depth_loop_tf` can run a layer's loops: TensorFlow while it traces a function, LSTM
    gates, kernel size 2, dilation 1, x at every level, sequences of static length (and no mask).
    Its trick saves nothing where a mixed-group kernel is split: its taps share no connection."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return (
        layer.memory is not None
        and not tf.executing_eagerly()
        and type(layer.cell) is LSTMGates
        and layer.kernel_size == 2
        and not mixed_group.splits(layer)
        and set(layer.dilations) == {1}
        and layer.injection_every == 1
        and time is not None
    )


def repeat(turn, states, turns):
    """Returns the states after `states = turn(i, states)` for i = 0..turns-1, compiled once.

    Each backend gets the loop whose gradient it has: TensorFlow's `scan` has none under XLA, JAX's
    `while_loop` has none at all.

    Args:
        turn: Function of an integer tensor and a list of tensors. It must not draw random numbers.
        states: List of tensors.
        turns: Number of turns.
    """
    if keras.backend.backend() == "tensorflow":
        _, *states = ops.while_loop(
            lambda i, *_: i < turns,
            lambda i, *s: (i + 1, *turn(i, list(s))),
            (0, *states),
            # Without a static bound, XLA cannot allocate what the gradient needs.
            maximum_iterations=turns,
        )
        return states
    states, _ = ops.scan(lambda s, i: (turn(i, s), None), states, ops.arange(turns))
    return states
