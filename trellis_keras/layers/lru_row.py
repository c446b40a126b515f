"""All steps of one cell of a Lattice Recurrent Unit: a row of the lattice."""

from keras import ops

from trellis_keras.kernels.scan import scan
from trellis_keras.layers.base import tanh
from trellis_keras.layers.lru_loop import time_gates, time_states
from trellis_keras.layers.recurrent_cell import drop


def row(cell, x, h2, valid=None, training=False, only_last=False):
    """Returns h1' of all steps (time, batch, units) and the last h2.

    Args:
        cell: The `LRUCell`.
        x: h1 of all steps, (time, batch, units).
        h2: The first state, (batch, units).
        valid: 1 in steps that count and 0 in masked ones, (time, batch, 1), or None.
        training: Whether dropout is active.
        only_last: Whether only the last step of h1' is wanted.
    """
    masks = cell.draw_masks(x[0], h2, training)
    if cell.cells_per_node > 1:
        return _chains(cell, x, h2, valid, masks)
    early = time_gates(cell)
    dropped = drop(x, masks[0])
    to_gates = _on_rows(cell.from_depth, 0, dropped, *early)
    to_p = _on_rows(cell.from_depth, 0, dropped, "p1")
    before, last, gates = time_states(cell, to_gates, to_p, h2, valid, masks[1])
    gate = {} if gates is None else cell.by_role(gates, early)
    if only_last:
        x, dropped, before = (t[-1:] for t in (x, dropped, before))
        gate = {role: t[-1:] for role, t in gate.items()}
    return _depth_outputs(cell, x, dropped, drop(before, masks[1]), gate), last


def _depth_outputs(cell, x, dropped, s, gate):
    """h1' of all steps.

    Args:
        cell: The `LRUCell`.
        x, dropped: h1, and what of it enters the products.
        s: What of h2 enters the products.
        gate: {role: gate} of the gates that the loop over time has computed.
    """
    late = [name for name in cell.gates if name not in time_gates(cell)]
    from_time = _on_rows(cell.from_time, 0, s, *late, "p2")
    if late:
        a, from_time = cell.split(from_time, late, ("p2",))
        a = a + _on_rows(cell.from_depth, 0, dropped, *late)
        gate = gate | cell.by_role(ops.sigmoid(a), late)
    p2 = tanh(_on_rows(cell.from_depth, 0, gate["q"] * dropped, "p2") + from_time)
    return cell.mix(gate["z1"], x, p2)


def _chains(cell, x, h2, valid, masks):
    """`row` for nodes of several cells: only what x adds to the first is out of the loop."""
    projected = _on_rows(cell.from_depth, 0, drop(x, masks[0]), *cell.gates, "p1")

    def step(h2, now):
        h1, following = cell.advance(now[0], h2, masks, projected=now[1])
        if valid is not None:
            following = ops.where(now[2] > 0, following, h2)
        return following, [h1]

    last, (y,) = scan(step, h2, [x, projected, *([] if valid is None else [valid])])
    return y, last


def _on_rows(function, n, x, *blocks):
    """`function(n, rows, *blocks)` of all rows of x (time, batch, units) at once."""
    y = function(n, ops.reshape(x, (-1, x.shape[-1])), *blocks)
    return ops.reshape(y, (*ops.shape(x)[:-1], y.shape[-1]))
