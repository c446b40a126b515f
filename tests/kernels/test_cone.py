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
    offsets,
    plan_levels,
    read,
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
    reads = [offsets(kernel_size, cycle[i % len(cycle)]) for i in range(depth)]
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
    assert cone.fraction == cone.count / (time * len(reads))


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


def test_doubling_dilations_read_slices():
    cone = Cone(784, [(0, d) for d in (1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)], output_length=1)
    assert len(cone.positions[10]) == 2
    assert all(isinstance(cone.read(i, 0).index, slice) for i in range(1, 12))
    assert cone.fraction < 0.19


def test_taps_of_doubling_dilations_interleave():
    cone = Cone(784, [(0, d) for d in (1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)], output_length=1)
    widths = [len(positions) for positions in cone.positions]
    found = [
        interleaved_padding([cone.read(i, d), cone.read(i, 0)], widths[i - 1])
        for i, (_, d) in enumerate(cone.offsets, start=1)
    ]
    assert found == [None, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0]


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


def test_last_step_with_auxiliary_level():
    cone = Cone(9, [(0, 1), (0, 4)], output_length=2, output_levels=[1])
    assert cone.positions[1].tolist() == [3, 4, 7, 8]
    assert cone.read(2, 4).index == slice(0, 2, 1)
    found = read(np.array([3, 5, 8]), np.array([3, 4, 5, 8]))
    assert found.index.tolist() == [0, 2, 3]


def test_number_of_blocks_does_not_grow_with_depth():
    def number(depth):
        reads = [(0, 1)] * depth
        return len(choose_blocks(4 * depth, reads, output_length=2 * depth, first=2))

    assert number(140) <= number(35) + 1
    assert choose_blocks(50, [(0, 1)] * 140, first=2) == [Block(1, 1, 1), Block(2, 140, 1)]


def test_few_positions_are_wasted():
    reads = [(0, 1)] * 55
    blocks = choose_blocks(110, reads, 55, bounds=(16, 32, 48), first=2)
    assert Cone(110, reads, 55, blocks=blocks).count < 1.08 * Cone(110, reads, 55).count


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
    assert plan.fraction == (1 if time is None else count / (depth * time))
    looped = plan_levels(time, reads, output_length, unroll=False, weights=weights)
    assert any(block.turns > 1 for block in looped.blocks)


def test_unknown_length():
    cone = Cone(None, [(0, 1), (0, 2)], output_length=1)
    assert cone.positions == [None] * 3
    assert cone.read(2, 2).padding == 2 and cone.read(2, 2).is_contiguous
    blocks = choose_blocks(None, [(0, 1)] * 9, output_length=1, first=2)
    assert blocks == [Block(1, 1, 1), Block(2, 9, 1)]


def test_read_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="positions"):
        read(np.array([1, 2, 3]), np.array([1, 3]))


def test_taps_are_multiples_of_the_dilation_back():
    assert offsets(3, 4) == (0, 4, 8)


@pytest.mark.parametrize(
    ("cycle", "period"),
    [([3], 1), ([1, 1, 1], 1), ([1, 2, 1, 2], 2), ([1, 2, 1], 3), ([1, 2, 4], 3)],
)
def test_period_of_a_cycle_of_dilations(cycle, period):
    assert find_period(cycle) == period
