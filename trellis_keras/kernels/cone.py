"""The dependency cone: the positions that each level of a causal network must compute.

Level i reads the level below it at the same position and at a few earlier ones, its *offsets*:

    level i at t   <-   level i-1 at t - o,    o in offsets of level i       (0, d, ..., (k-1)d)

When only the last n outputs enter the loss, a level need not compute every position. From the top
down, with P_i the positions of level i and T the length of the sequence,

    P_L = {T-n, ..., T-1},    P_{i-1} = {t - o >= 0 : t in P_i, o an offset of level i},

and a level whose outputs are also returned (auxiliary outputs) adds {T-n, ..., T-1}. With
dilation 1 these are ranges that get shorter towards the top; with doubling dilations and n = 1 they
are strided (the level below the one with dilation 512 computes two positions); otherwise irregular.

A `Cone` stores the positions as arrays. `Cone.read` locates the values that a level reads at an
offset among the positions computed by the level below (`Read`): the number of values before the
sequence, and a slice or index array for the others. All of this is NumPy on static shapes, so it
costs nothing once a function is traced. Without a static length (`time=None`) every level computes
all positions, and positions are None.

Levels that share their weights can run in a loop that is compiled once, if they compute the same
positions. A `Block` computes at each of its levels the whole range that its lowest level reads,

    P = {s, ..., T-1},    s = the first position that the block reads of the level below it.

Within the block, the earlier taps of the first positions point before s. If s = 0 they are before
the sequence. Otherwise their values are wrong, but no output depends on them, because every level
of the block needs that much less than the level below.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

# A loop may compute this much more than unrolled levels; beyond that, the saved compile time is not
# worth it.
_WASTE = 0.25

# Compiling one more loop takes about a second. It must save this many multiply-adds per row of the
# batch and step (50 ms of 16 rows, forward and backward, at 200 GFLOP/s), and as a fraction of all
# work at least _LEAST_SAVED; a loop that saves _MOST_SAVED is always worth it.
_LOOP_COST = 1e8
_LEAST_SAVED, _MOST_SAVED = 0.01, 0.06
_LEVELS_PER_LOOP = 4  # unrolled levels that compile in the time of one loop


@dataclasses.dataclass(frozen=True)
class Read:
    """The location of the values that a level reads at one offset.

    Attributes:
        padding: Number of leading values before the sequence.
        index: Slice or index array of the others, among the positions of the level below. None if
            the length is unknown: then the first ones are used, as many as fit.
    """

    padding: int
    index: slice | np.ndarray | None

    @property
    def is_contiguous(self) -> bool:
        """Whether the values are contiguous."""
        return self.index is None or isinstance(self.index, slice) and self.index.step == 1


class Block(NamedTuple):
    """Levels first..last that form a loop of equal turns, each of `period` levels."""

    first: int
    last: int
    period: int

    @property
    def turns(self) -> int:
        return (self.last - self.first + 1) // self.period


class Cone:
    """The positions that each level computes.

    Args:
        time: Length of the sequence, or None if unknown.
        offsets: Per level, from level 1 on, how many steps back it reads, including 0.
        output_length: Number of last outputs needed. Defaults to `None`, all.
        output_levels: Levels below the last whose last outputs are also needed; their positions
            always include them.
        blocks: List of `Block`s from level 1 to the last. The levels of a block of one turn are
            not looped over and have their own positions. Defaults to `None`, no loops.

    Attributes:
        positions: List of ascending arrays: the positions of levels 0 (the input) to the last.
        output_levels: Set of all levels with outputs, including the last.
        count: Number of positions that all levels together compute.

    Example: a level of dilation 4 above levels of dilations 1 and 2.

    >>> cone = Cone(16, [(0, 1), (0, 2), (0, 4)], output_length=1)
    >>> [p.tolist() for p in cone.positions[1:]]
    [[9, 11, 13, 15], [11, 15], [15]]
    >>> cone.read(3, 4)
    Read(padding=0, index=slice(0, 1, 1))
    """

    def __init__(
        self,
        time: int | None,
        offsets: Sequence[Sequence[int]],
        output_length: int | None = None,
        output_levels: Collection[int] = (),
        blocks: Sequence[Block] | None = None,
    ):
        self.time = time
        self.offsets = [tuple(o) for o in offsets]
        depth = len(self.offsets)
        self.output_levels = {*output_levels, depth}
        self.blocks = blocks or [Block(i, i, 1) for i in range(1, depth + 1)]
        self.positions = [None] * (depth + 1)
        self.count = None
        if time is not None:
            self._find_positions(time, output_length)

    def _find_positions(self, time, output_length):
        # These include the outputs of the levels below, because offsets include 0.
        wanted = np.arange(time - (time if output_length is None else output_length), time)
        for block in reversed(self.blocks):
            for level in range(block.last, block.first - 1, -1):
                self.positions[level] = wanted
                wanted = _read_positions(wanted, self.offsets[level - 1])
            if block.turns > 1:
                wanted = np.arange(_even_start(wanted[0], time), time)
                self.positions[block.first : block.last + 1] = [wanted] * (
                    block.last - block.first + 1
                )
        self.positions[0] = wanted
        self.count = sum(map(len, self.positions[1:]))

    def read(self, level: int, offset: int, below: int | None = None) -> Read:
        """Returns the `Read` of a level at an offset, from the one below it or another level."""
        below = level - 1 if below is None else below
        return locate(self.positions[level], self.positions[below], offset)


def _even_start(start, time):
    """Makes the number of positions even if possible: `depth_loop_tf` processes pairs."""
    return start - 1 if (time - start) % 2 and start > 0 else start


def _read_positions(positions, offsets):
    """Returns all positions >= 0 that a level with these positions reads of the level below."""
    wanted = np.unique(positions[:, None] - np.asarray(offsets))
    return wanted[wanted >= 0]


def locate(wanted: np.ndarray | None, available: np.ndarray | None, offset: int = 0) -> Read:
    """Returns the `Read` that finds the positions `wanted - offset` among `available`.

    Both are ascending arrays, or None: all positions, of an unknown number.
    """
    if wanted is None or available is None:
        return Read(offset, None)
    wanted = wanted - offset
    padding = int(np.searchsorted(wanted, available[0]))
    rest = wanted[padding:]
    index = np.searchsorted(available, rest)
    if len(index) == 0:
        return Read(padding, slice(0, 0, 1))
    step = int(index[1] - index[0]) if len(index) > 1 else 1
    if np.all(np.diff(index) == step):
        return Read(padding, slice(int(index[0]), int(index[-1]) + 1, step))
    return Read(padding, index)


def interleaved_padding(reads: Sequence[Read], width: int) -> int | None:
    """Returns how many steps to put before `width` positions for the reads to take them in turn.

    With doubling dilations and one output, the two taps of a level read every position of the level
    below exactly once: the older tap reads the first, the third, ..., the newer one the others. The
    oldest offset comes first. Returns None if the reads do not interleave.
    """
    if any(r.index is None for r in reads):
        return None
    rows = [np.r_[np.full(r.padding, -1), np.arange(width)[r.index]] for r in reads]
    order = np.stack(rows, axis=1).ravel()
    padding = len(order) - width
    if padding < 0 or np.any(order != np.maximum(np.arange(-padding, width), -1)):
        return None
    return padding


def tap_offsets(kernel_size: int, dilation: int) -> tuple[int, ...]:
    """Returns the offsets of a convolution: 0, d, ..., (k-1)d."""
    return tuple(j * dilation for j in range(kernel_size))


@functools.lru_cache(maxsize=64)
def plan_levels(
    time: int | None,
    offsets: tuple[tuple[int, ...], ...],
    output_length: int | None,
    *,
    output_levels: tuple[int, ...] = (),
    bounds: tuple[int, ...] = (),
    period: int = 1,
    unroll: bool | None,
    weights: int,
) -> Cone:
    """Returns the `Cone` of levels that share their weights, with the blocks to loop over.

    Level 1 is never in a loop: without an initial state it has no hidden product. When dilations
    grow until they span the whole sequence, as in image classification with dilations 1, 1, 2, 4,
    ..., 512, they do not repeat, and every level is unrolled. A cone of few, strided positions is
    unrolled too: a loop would have to compute all positions in between.

    Args:
        time, offsets, output_length, output_levels: As in `Cone`.
        bounds: Additional levels at which a block must end.
        period: Number of levels after which the offsets repeat.
        unroll: True for no loops, False for loops, None to loop unless they waste too much.
        weights: Number of weights, that is multiply-adds per position, of a level.
    """
    unrolled = Cone(time, offsets, output_length, output_levels)
    if unroll:
        return unrolled
    block_cost = _block_cost(unrolled, weights)
    blocks = choose_blocks(
        time,
        offsets,
        output_length,
        bounds=(*output_levels, *bounds),
        period=period,
        first=2,
        block_cost=block_cost,
    )
    looped = Cone(time, offsets, output_length, output_levels, blocks)
    if unroll is None and time is not None:
        allowed = max(_WASTE, block_cost * len(offsets) / _LEVELS_PER_LOOP)
        if looped.count > (1 + allowed) * unrolled.count:
            return unrolled
    return looped


def _block_cost(unrolled, weights):
    """Returns the fraction of the work that an additional block must save to be worthwhile."""
    if unrolled.time is None:
        return _LEAST_SAVED
    cost = _LOOP_COST / (weights * unrolled.count)
    return min(max(cost, _LEAST_SAVED), _MOST_SAVED)


def find_period(cycle: list[int]) -> int:
    """Returns after how many levels a cycle of dilations repeats: [1, 2, 1, 2] does after two."""
    n = len(cycle)
    return next(p for p in range(1, n + 1) if n % p == 0 and cycle[:p] * (n // p) == cycle)


def choose_blocks(
    time: int | None,
    offsets: Sequence[Sequence[int]],
    output_length: int | None = None,
    *,
    bounds: Collection[int] = (),
    period: int = 1,
    first: int = 1,
    block_cost: float = 0.01,
) -> list[Block]:
    """Divides levels into few blocks that compute little more than the cone.

    Args:
        time, offsets, output_length: As in `Cone`.
        bounds: Levels at which a block must end (the last level is one anyway).
        period: Levels per turn of the loop, after which the offsets repeat.
        first: Levels below this one are separate blocks.
        block_cost: Fraction of all work that an additional block must save to be worth compiling.
            Since it is a fraction, the number of blocks depends on how much the cone shrinks, not
            on the number of levels.

    Returns:
        List of `Block`s from level 1 to the last. Levels below a bound that do not fill a whole
        turn are separate blocks.
    """
    depth = len(offsets)
    starts = _first_positions(time, offsets, output_length)
    width = [0 if time is None else time - s for s in starts]
    block_cost = block_cost * sum(width[1:])
    blocks = [Block(i, i, 1) for i in range(1, first)]
    below = first - 1
    for bound in sorted({*(b for b in bounds if b >= first), depth}):
        turns = (bound - below) // period
        cuts = _cheapest_cuts(width[below : below + turns * period + 1 : period], block_cost)
        for low, high in zip(cuts, cuts[1:], strict=False):
            low, high = below + low * period, below + high * period
            if high - low == period:  # a single turn is not a loop: levels have separate positions
                blocks += [Block(i, i, 1) for i in range(low + 1, high + 1)]
            else:
                blocks.append(Block(low + 1, high, period))
        blocks += [Block(i, i, 1) for i in range(below + turns * period + 1, bound + 1)]
        below = bound
    return blocks


def _first_positions(time, offsets, output_length):
    """Returns the first position needed, per level from 0."""
    start = 0 if time is None or output_length is None else time - output_length
    starts = [start]
    for level_offsets in reversed(offsets):
        start = max(0, start - max(level_offsets))
        starts.append(start)
    return starts[::-1]


def _cheapest_cuts(width, block_cost):
    """Splits turns 0..n into blocks, each of which costs its turns times its lowest width."""
    best, before = [0.0], [0]
    for end in range(1, len(width)):
        costs = [best[i] + (end - i) * width[i] + block_cost for i in range(end)]
        before.append(int(np.argmin(costs)))
        best.append(costs[before[-1]])
    cuts = [len(width) - 1]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]
