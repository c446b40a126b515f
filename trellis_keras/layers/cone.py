"""The dependency cone: which positions each level of a causal network must compute.

Level i reads the level below it at the same position and at a few earlier ones, its *offsets*:

    level i at t   <-   level i-1 at t - o,    o in offsets of level i       (0, d, ..., (k-1)d)

So when only the last n outputs are wanted, a level need not compute every position. From the top
down, with P_i the positions of level i and T the length of the sequence,

    P_L = {T-n, ..., T-1},    P_{i-1} = {t - o >= 0 : t in P_i, o an offset of level i},

and a level whose outputs are kept too (an auxiliary one) adds {T-n, ..., T-1} to its own. With
dilation 1 these are ranges that get shorter towards the top; with doubling dilations and n = 1 they
are strided (the level below the one with dilation 512 computes two positions); else lists.

A `Cone` holds the positions as arrays, and says for each level and offset where the values that are
read lie among those that the level below has computed (`Read`): how many of them lie before the
sequence, and a slice or an index list for the others. Nothing here knows what a level computes.
Everything is numpy on static shapes, so it costs nothing once a function is traced. Without a
static length (`time=None`) every level computes everything, and positions are None.

Blocks. Levels that run in a compiled loop must all have the same positions. A *block* of levels
computes at each of its levels the whole range that its lowest level reads,

    P = {s, ..., T-1},    s = the first position that the block reads of the level below it.

Inside a block the offsets of the first positions point before s. If s = 0 they lie before the
sequence. Else what stands there is no longer in the cone: it is wrong, and nothing that is kept
depends on it, because every level of the block needs that much less than the one below. More blocks
waste fewer positions and take longer to compile; `choose_blocks` weighs the two.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Read:
    """Where the values that a level reads at one offset are.

    Attributes:
        padding: How many leading ones lie before the sequence.
        index: Slice or index array of the others, among the positions of the level below. None
            if the length is unknown: as many from the first on as there is room for.
    """

    padding: int
    index: slice | np.ndarray | None

    @property
    def stretch(self):
        """Whether the values lie side by side."""
        return self.index is None or isinstance(self.index, slice) and self.index.step == 1


class Block(NamedTuple):
    """Levels first..last, which form a loop of equal turns of `period` levels each."""

    first: int
    last: int
    period: int

    @property
    def turns(self):
        return (self.last - self.first + 1) // self.period


class Cone:
    """The positions that each level computes.

    Args:
        time: Length of the sequence, or None if unknown.
        offsets: Per level, from level 1 on, how many steps back it reads; 0 must be among them.
        kept: How many of the last outputs are wanted. Default: all.
        also_kept: Levels below the last whose last `kept` outputs are wanted too.
        blocks: `Block`s from level 1 to the last, see `choose_blocks`. A block of one turn is
            no loop: its levels have their own positions. Default: no loops.

    Attributes:
        positions: List of ascending arrays: the positions of levels 0 (the input) to the last.
        count: Number of positions that all levels together compute.
        fraction: The same, divided by what computing everything would take.

    Example: a level of dilation 4 above levels of dilations 1 and 2.

    >>> cone = Cone(16, [(0, 1), (0, 2), (0, 4)], kept=1)
    >>> [p.tolist() for p in cone.positions[1:]]
    [[9, 11, 13, 15], [11, 15], [15]]
    >>> cone.read(3, 4)
    Read(padding=0, index=slice(0, 1, 1))
    """

    def __init__(self, time, offsets, kept=None, also_kept=(), blocks=None):
        self.time = time
        self.offsets = [tuple(o) for o in offsets]
        depth = len(self.offsets)
        self.blocks = blocks or [Block(i, i, 1) for i in range(1, depth + 1)]
        self.positions = [None] * (depth + 1)
        self.count, self.fraction = None, 1.0
        if time is not None:
            self._find_positions(time, kept, also_kept)

    def _find_positions(self, time, kept, also_kept):
        depth = len(self.offsets)
        kept = np.arange(time - (time if kept is None else kept), time)
        wanted = kept
        for block in reversed(self.blocks):
            for level in range(block.last, block.first - 1, -1):
                if level in also_kept:
                    wanted = np.union1d(wanted, kept)
                self.positions[level] = wanted
                wanted = _read_positions(wanted, self.offsets[level - 1])
            if block.turns > 1:
                wanted = np.arange(_even_start(wanted[0], time), time)
                self.positions[block.first : block.last + 1] = [wanted] * (
                    block.last - block.first + 1
                )
        self.positions[0] = wanted
        self.count = sum(map(len, self.positions[1:]))
        self.fraction = self.count / (time * depth)

    def read(self, level, offset, below=None):
        """Returns the `Read` of a level at an offset.

        Args:
            level: The level that reads.
            offset: How many steps back.
            below: The level that it reads from. Default: the one below it.
        """
        below = level - 1 if below is None else below
        return read(self.positions[level], self.positions[below], offset)


def _even_start(start, time):
    """One position earlier if that makes their number even: `depth_loop_tf` takes them in pairs."""
    return start - 1 if (time - start) % 2 and start > 0 else start


def read(wanted, available, offset=0):
    """Returns the `Read` that finds the positions `wanted - offset` among `available`.

    Args:
        wanted, available: Ascending arrays, or both None: all positions, of an unknown number.
        offset: How many steps back.

    Raises:
        ValueError: A wanted position after the first available one is not available.
    """
    if wanted is None:
        return Read(offset, None)
    wanted = wanted - offset
    padding = int(np.searchsorted(wanted, available[0]))
    rest = wanted[padding:]
    index = np.searchsorted(available, rest)
    if not np.array_equal(available[np.minimum(index, len(available) - 1)], rest):
        raise ValueError(f"Not all of the positions {rest} are among {available}.")
    if len(index) == 0:
        return Read(padding, slice(0, 0, 1))
    step = int(index[1] - index[0]) if len(index) > 1 else 1
    if np.all(np.diff(index) == step):
        index = slice(int(index[0]), int(index[-1]) + 1, step)
    return Read(padding, index)


def interleaved(reads, width):
    """How many steps to put before `width` positions for the reads to take them in turn.

    With doubling dilations and one kept output, the two taps of a level read every position of the
    level below exactly once: the older tap the first, the third, ..., the other one the rest.

    Args:
        reads: List of `Read`s, the oldest offset first.
        width: Number of positions that they read from.

    Returns:
        The number of steps, or None if the reads do not interleave.
    """
    if any(r.index is None for r in reads):
        return None
    rows = [np.r_[np.full(r.padding, -1), np.arange(width)[r.index]] for r in reads]
    order = np.stack(rows, axis=1).ravel()
    padding = len(order) - width
    if padding < 0 or np.any(order != np.maximum(np.arange(-padding, width), -1)):
        return None
    return padding


def offsets(kernel_size, dilation):
    """Offsets of a convolution: 0, d, ..., (k-1)d."""
    return tuple(j * dilation for j in range(kernel_size))


def choose_blocks(time, offsets, kept=None, bounds=(), period=1, first=1, block_cost=0.01):
    """Divides levels into blocks that compute little more than the cone, and are few.

    Args:
        time: Length of the sequence, or None if unknown: then everything is computed.
        offsets, kept: As in `Cone`.
        bounds: Levels at which a block must end (the last level is one anyway).
        period: Levels per turn of the loop: after so many, the offsets repeat.
        first: Levels below this one are blocks of their own.
        block_cost: What one more block must save, as a fraction of all the work, to be worth
            compiling. Being a fraction, it makes the number of blocks depend on how much the cone
            shrinks, and not on how many levels it has.

    Returns:
        List of `Block`s from level 1 to the last. The levels at the top of a stretch between two
        bounds that are no whole turn are blocks of their own.
    """
    depth = len(offsets)
    starts = _starts(time, offsets, kept)
    width = [0 if time is None else time - s for s in starts]
    block_cost = block_cost * sum(width[1:])
    blocks = [Block(i, i, 1) for i in range(1, first)]
    below = first - 1
    for bound in sorted({*(b for b in bounds if b >= first), depth}):
        turns = (bound - below) // period
        cuts = _cheapest_cuts(width[below : below + turns * period + 1 : period], block_cost)
        for low, high in zip(cuts, cuts[1:], strict=False):
            low, high = below + low * period, below + high * period
            if high - low == period:  # one turn: no loop, so each level has its own positions
                blocks += [Block(i, i, 1) for i in range(low + 1, high + 1)]
            else:
                blocks.append(Block(low + 1, high, period))
        blocks += [Block(i, i, 1) for i in range(below + turns * period + 1, bound + 1)]
        below = bound
    return blocks


def _starts(time, offsets, kept):
    """First position that is needed, per level from 0."""
    start = 0 if time is None or kept is None else time - kept
    starts = [start]
    for level_offsets in reversed(offsets):
        start = max(0, start - max(level_offsets))
        starts.append(start)
    return starts[::-1]


def _cheapest_cuts(width, block_cost):
    """Where to cut turns 0..n into blocks, a block costing its turns times its lowest width."""
    best, before = [0.0], [0]
    for end in range(1, len(width)):
        costs = [best[i] + (end - i) * width[i] + block_cost for i in range(end)]
        before.append(int(np.argmin(costs)))
        best.append(costs[before[-1]])
    cuts = [len(width) - 1]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def _read_positions(positions, offsets):
    """All positions >= 0 that a level with these positions reads of the level below."""
    wanted = np.unique(positions[:, None] - np.asarray(offsets))
    return wanted[wanted >= 0]


def draw_cone(cone, path, title=None):
    """Draws which positions are computed, and which values each of them reads.

    Needs matplotlib. Meant for a few dozen positions.

    Args:
        cone: A `Cone`.
        path: Where the PNG is written.
        title: Title. Default: the amount of work.

    Example:

    >>> draw_cone(Cone(16, [(0, 1)] * 6, kept=8), "/tmp/cone.png")
    """
    from matplotlib.figure import Figure

    time, depth = cone.time, len(cone.offsets)
    figure = Figure(figsize=(1.2 + 0.3 * time, 1.4 + 0.5 * depth), layout="constrained")
    axes = figure.add_subplot()
    everything = np.stack(np.meshgrid(np.arange(time), np.arange(depth + 1)), axis=-1)
    axes.scatter(*everything.reshape(-1, 2).T, s=24, color="0.85", zorder=1, label="not computed")
    for level in range(1, depth + 1):
        for t in cone.positions[level]:
            for source in t - np.asarray(cone.offsets[level - 1]):
                if source >= cone.positions[level - 1][0]:
                    axes.plot([source, t], [level - 1, level], color="tab:blue", lw=0.6, zorder=2)
    nodes = [(t, i) for i in range(1, depth + 1) for t in cone.positions[i]]
    axes.scatter(*np.transpose(nodes), s=36, color="tab:blue", zorder=3, label="computed")
    inputs = cone.positions[0]
    axes.scatter(inputs, 0 * inputs, s=36, color="tab:green", zorder=3, label="input read")
    kept = cone.positions[depth]
    axes.scatter(kept, 0 * kept + depth, s=36, color="tab:orange", zorder=4, label="output")
    axes.set_xlabel("position")
    axes.set_ylabel("level (0: input)")
    axes.set_yticks(range(depth + 1))
    axes.set_xlim(-1, time)
    axes.set_title(title or f"{cone.count} of {time * depth} positions ({cone.fraction:.0%})")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
