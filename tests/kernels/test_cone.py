"""The positions that the dependency cone names, against a search for them node by node."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.kernels.cone import (
    Block,
    Cone,
    choose_blocks,
    find_period,
    interleaved_padding,
    plan_levels,
    tap_offsets,
)


def reachable(time, reads, kept, output_levels):
    """The nodes (level, t) that a kept output depends on."""
    found = set()
    todo = [(i, t) for i in {len(reads), *output_levels} for t in range(time - kept, time)]
    while todo:
        level, t = todo.pop()
        if t >= 0 and (level, t) not in found:
            found.add((level, t))
            if level:
                todo += [(level - 1, t - o) for o in reads[level - 1]]
    return found


@st.composite
def networks(draw):
    time = draw(st.integers(1, 24))
    cycle = draw(st.sampled_from([[1], [2], [1, 2], [1, 1, 2, 4, 8], [3, 1]]))
    depth = draw(st.integers(1, 8))
    kernel_size = draw(st.integers(1, 4))
    reads = [tap_offsets(kernel_size, cycle[i % len(cycle)]) for i in range(depth)]
    kept = draw(st.integers(1, time))
    output_levels = draw(st.sets(st.integers(1, depth), max_size=2))
    return time, reads, kept, output_levels, len(cycle)


@settings(max_examples=100, deadline=None)
@given(networks())
def test_positions_are_those_that_outputs_depend_on(network):
    time, reads, kept, output_levels, _ = network
    cone = Cone(time, reads, kept, output_levels)
    nodes = {(i, int(t)) for i, positions in enumerate(cone.positions) for t in positions}
    assert nodes == reachable(time, reads, kept, output_levels)
    assert cone.count == sum(level > 0 for level, _ in nodes)


@settings(max_examples=100, deadline=None)
@given(networks())
def test_blocks_compute_the_cone(network):
    time, reads, kept, output_levels, period = network
    blocks = choose_blocks(time, reads, kept, bounds=output_levels, period=period, first=2)
    levels = [i for block in blocks for i in range(block.first, block.last + 1)]
    assert levels == list(range(1, len(reads) + 1))
    assert output_levels <= {block.last for block in blocks}
    cone = Cone(time, reads, kept, output_levels, blocks)
    for level, t in reachable(time, reads, kept, output_levels):
        assert t in cone.positions[level]


@settings(max_examples=100, deadline=None)
@given(networks())
def test_reads_find_the_positions_below(network):
    time, reads, kept, output_levels, _ = network
    cone = Cone(time, reads, kept, output_levels)
    for level in range(1, len(reads) + 1):
        for o in reads[level - 1]:
            found = cone.read(level, o)
            wanted = cone.positions[level] - o
            assert np.all(wanted[: found.padding] < 0)
            np.testing.assert_array_equal(
                cone.positions[level - 1][found.index], wanted[found.padding :]
            )


@settings(max_examples=100, deadline=None)
@given(networks())
def test_what_interleaves_is_read_in_turn(network):
    time, reads, kept, output_levels, _ = network
    cone = Cone(time, reads, kept, output_levels)
    for level in range(1, len(reads) + 1):
        found = [cone.read(level, o) for o in reversed(reads[level - 1])]
        below = cone.positions[level - 1] + 1  # so that 0 can stand for what lies before
        taps = [np.pad(below[r.index], (r.padding, 0)) for r in found]
        padding = interleaved_padding(found, len(below))
        in_turn = np.stack(taps, axis=1).ravel()
        if padding is None:
            padded = np.pad(below, (max(0, len(in_turn) - len(below)), 0))
            assert not np.array_equal(in_turn, padded)
        else:
            np.testing.assert_array_equal(in_turn, np.pad(below, (padding, 0)))


@pytest.mark.parametrize(
    "time, output_length, depth, weights, turns, count",
    [
        (80, 40, 55, 4 * 100**2, [1, 34, 20], 4000),
        (80, 40, 55, 4 * 1400**2, [1, 22, 8, 8, 8, 8], 3760),
        (30, 6, 20, 4 * 100**2, [1, 6, 6, 7], 400),  # 1.29 of what unrolled levels compute
        (30, 6, 20, 4 * 1400**2, [1] * 20, 310),
        (40, 5, 12, 4 * 100**2, [1] * 12, 126),
        (None, 1, 20, 4 * 100**2, [1, 19], None),
    ],
)
def test_loops_where_they_are_worth_it(time, output_length, depth, weights, turns, count):
    """Few loops for narrow levels, more for wide ones, none where they would waste too much."""
    reads = ((0, 1),) * depth
    plan = plan_levels(time, reads, output_length, unroll=None, weights=weights)
    assert ([block.turns for block in plan.blocks], plan.count) == (turns, count)
    looped = plan_levels(time, reads, output_length, unroll=False, weights=weights)
    assert any(block.turns > 1 for block in looped.blocks)


def test_unknown_length():
    cone = Cone(None, [(0, 1), (0, 2)], output_length=1)
    assert cone.positions == [None] * 3
    assert cone.read(2, 2).padding == 2 and cone.read(2, 2).is_contiguous
    blocks = choose_blocks(None, [(0, 1)] * 9, output_length=1, first=2)
    assert blocks == [Block(1, 1, 1), Block(2, 9, 1)]


@pytest.mark.parametrize(
    ("cycle", "period"),
    [([3], 1), ([1, 1, 1], 1), ([1, 2, 1, 2], 2), ([1, 2, 1], 3), ([1, 2, 4], 3)],
)
def test_period_of_a_cycle_of_dilations(cycle, period):
    assert find_period(cycle) == period


def test_taps_are_multiples_of_the_dilation_back():
    assert tap_offsets(3, 4) == (0, 4, 8)
