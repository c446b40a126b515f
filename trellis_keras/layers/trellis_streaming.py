"""Streaming of a TrellisLayer: constant work per step, exact.

At step t, level i needs the level below it at t, t - d, ..., t - (k-1)d. All but the first lie in
the past, so they are known for every level before any level of this step has been computed:

    a^i_t = [past^i + inject^i + b] + h^{i-1}_t Wh[k-1],        i = 1..L,
    past^i = sum_j h^{i-1}_{t-j*d} Wh[k-1-j],                   j = 1..k-1

The bracket is one matrix product for all levels. Only the last term goes from level to level.

The cache holds, per dilation, the last steps of the levels below the levels that have it. Newest
last, it is moved on by one each step: copying costs no more than writing into a ring at an index
(XLA copies there too), and there is no index to carry.
"""

import numpy as np
from keras import ops

from trellis_keras.layers import base, streaming
from trellis_keras.layers.mixed_group import hidden_product


class TrellisStreaming(streaming.StreamingMixin):
    """What `TrellisLayer` adds to stream, see `layers.streaming`."""

    def initial_cache(self, batch_size, initial_state=None):
        """Returns the cache before the first step.

        Args:
            batch_size: Number of rows.
            initial_state: As in the call: a list of states, each (batch, units), that stands in
                every step before the first, at every level. Default: zeros.

        Returns:
            `{"inputs": x, "states": [h, c]}` (only [h] for cells with one state). x is (batch,
            steps, channels), the last inputs. h and c are lists with an entry per distinct
            dilation, ascending: (batch, levels, steps, units), the last states of the level below
            each of the levels that have this dilation.

        Raises:
            ValueError: The layer is not built, or a state has another shape.

        Example:

        >>> layer = TrellisLayer(units=12, depth=5, output_units=4)
        >>> layer.build((None, None, 3))
        >>> y, cache = layer.step(np.zeros((2, 3), "float32"), layer.initial_cache(2))
        >>> tuple(y.shape)
        (2, 4)
        """
        streaming.check_built(self)
        streaming.check_batch_size(batch_size)
        history = _initial_states(self, batch_size, initial_state)
        shapes = _cache_shapes(self, batch_size)
        states = [
            [ops.broadcast_to(state[:, None, None, :], shape) for shape in of_state]
            for state, of_state in zip(history, shapes["states"], strict=True)
        ]
        return {"inputs": ops.zeros(shapes["inputs"], self.compute_dtype), "states": states}

    def step(self, x, cache):
        """Advances one step; its work does not depend on how many came before.

        Args:
            x: Tensor (batch, channels).
            cache: What `initial_cache`, `step` or `prefill` returned.

        Returns:
            The output y (batch, output_units) of this step, and the new cache.

        Raises:
            ValueError: The layer is not built, x has another shape, or the cache is of another
                batch size or another layer.
        """
        x = _checked_input(self, x, cache, 2)
        inputs = ops.concatenate([cache["inputs"], x[:, None]], axis=1)
        kernel, recurrent_kernel, bias = _weights(self)
        # Sliced here, once a step: inside the loop XLA would copy it at every level.
        current_product = hidden_product(self, recurrent_kernel[-1:], 0)
        a = _past_products(self, recurrent_kernel[:-1], cache["states"][0])
        awake = _awake(self)
        # The level axis first: it is the one to loop over. The cell wants a time axis.
        a = ops.moveaxis(a + _injections(self, inputs, kernel, 1)[:, :, 0] + bias, 1, 0)
        past = [
            ops.moveaxis(_steps_back(self, rings, 1), 1, 0)[:, :, None] for rings in cache["states"]
        ]

        def level(below, own):
            a, past, awake = own
            h = ops.cast(below[0], self.compute_dtype)
            current = current_product([h], self.compute_dtype)
            states = _apply_cell(self, a + ops.cast(current, self.state_dtype), past, *awake)
            return states, states

        ground = [ops.zeros_like(state[0]) for state in past]
        top, states = ops.scan(level, ground, (a[:, :, None], past, awake))
        below = [
            ops.moveaxis(ops.concatenate([g[None], s[:-1]], axis=0)[:, :, 0], 0, 1)
            for g, s in zip(ground, states, strict=True)
        ]
        y = ops.cast(top[0][:, 0, -self.output_units :], self.compute_dtype)
        return y, {"inputs": inputs[:, 1:], "states": _move_on(self, cache["states"], below)}

    def prefill(self, x, cache=None):
        """Advances all steps of x by one forward pass, a level at a time.

        Args:
            x: Tensor (batch, time, channels) of any length, also shorter than a dilation.
            cache: The cache to go on from. Default: the initial one.

        Returns:
            The outputs y (batch, time, output_units), and the cache after the last step.

        Raises:
            ValueError: As `step`.
        """
        if cache is None:
            cache = self.initial_cache(ops.shape(x)[0])
        x = _checked_input(self, x, cache, 3)
        inputs = ops.concatenate([cache["inputs"], x], axis=1)
        time = ops.shape(x)[1]
        kernel, recurrent_kernel, bias = _weights(self)
        taps = recurrent_kernel.shape[0]
        product = hidden_product(self, recurrent_kernel, taps - 1)
        injected, injection = _injected_rows(self, inputs, kernel, time)
        injection = ops.convert_to_tensor(injection)
        dilations = ops.convert_to_tensor(_dilations(self))
        awake = _awake(self)

        def level(i, carried):
            below, rings = carried
            # All indices of a slice must be of one integer type, that of the loop's counter.
            d = ops.cast(dilations[i], ops.convert_to_tensor(i).dtype)
            seen = [
                ops.concatenate([ring[i], state], axis=1)
                for ring, state in zip(rings, below, strict=True)
            ]
            h = ops.cast(seen[0], self.compute_dtype)
            a = product(
                [_piece(h, j * d, time) for j in range(taps - 1, -1, -1)], self.compute_dtype
            )
            a = ops.cast(a, self.state_dtype) + injected[injection[i]] + bias
            past = [_piece(s, d, time) for s in seen]
            states = _apply_cell(self, a, past, *[of_level[i] for of_level in awake])
            rings = [
                streaming.replace_row(ring, i, s[:, -ring.shape[2] :])
                for ring, s in zip(rings, seen, strict=True)
            ]
            return states, rings

        rings = [_all_levels(self, groups) for groups in cache["states"]]
        ground = [
            ops.zeros((ops.shape(x)[0], time, n), self.state_dtype) for n in self.cell.state_size
        ]
        top, rings = ops.fori_loop(0, self.depth, level, (ground, rings))
        states = [_by_dilation(self, r, g) for r, g in zip(rings, cache["states"], strict=True)]
        y = ops.cast(top[0][..., -self.output_units :], self.compute_dtype)
        return y, {"inputs": inputs[:, time:], "states": states}


def _initial_states(layer, batch_size, initial_state):
    """The states before the first step, each (batch, units)."""
    sizes = layer.cell.state_size
    if initial_state is None:
        return [ops.zeros((batch_size, size), layer.state_dtype) for size in sizes]
    if not isinstance(initial_state, (list, tuple)):
        initial_state = [initial_state]
    if len(initial_state) != len(sizes):
        raise ValueError(
            f"`initial_state` must hold {len(sizes)} states. Received: {len(initial_state)}"
        )
    states = [ops.cast(state, layer.state_dtype) for state in initial_state]
    for state, size in zip(states, sizes, strict=True):
        rows = batch_size if isinstance(batch_size, int) else None
        base.check_shape("initial_state", state, (rows, size))
    return states


def _checked_input(layer, x, cache, rank):
    """Returns x in the compute dtype; refuses what `step` and `prefill` (rank 3) cannot take."""
    streaming.check_built(layer)
    x = ops.cast(x, layer.compute_dtype)
    channels = layer.kernel.kernel.shape[1]
    base.check_shape("x", x, (*[None] * (rank - 1), channels))
    streaming.check_cache(layer, cache, _cache_shapes(layer, x.shape[0]))
    return x


def _dilations(layer):
    """The dilation of every level, from level 1 on."""
    return np.array([layer.dilation(i) for i in range(1, layer.depth + 1)], "int32")


def _levels_by_dilation(layer):
    """{dilation: indices, from 0, of its levels}, dilations ascending."""
    dilations = _dilations(layer)
    return {int(d): np.flatnonzero(dilations == d) for d in np.unique(dilations)}


def _injected_dilations(layer):
    """Distinct dilations of the levels where x enters."""
    return [int(d) for d in np.unique(_dilations(layer)[:: layer.injection_every])]


def _cache_shapes(layer, batch):
    past_taps = layer.kernel_size - 1
    channels = layer.kernel.kernel.shape[1]
    groups = _levels_by_dilation(layer)
    # Past taps reach (k-1)d steps back, the gated activation d.
    reach = [max(past_taps, 1)] + [1] * (len(layer.cell.state_size) - 1)
    return {
        "inputs": [batch, past_taps * max(_injected_dilations(layer)), channels],
        "states": [
            [[batch, len(levels), r * d, size] for d, levels in groups.items()]
            for r, size in zip(reach, layer.cell.state_size, strict=True)
        ],
    }


def _weights(layer):
    """Kernels (tap, in, preactivations) as the forward pass uses them, and the bias."""
    kernel = layer.cell.arrange(layer.kernel(training=False))
    recurrent_kernel = layer.cell.arrange(layer.recurrent_kernel(training=False))
    return kernel, recurrent_kernel, ops.cast(layer.bias, layer.state_dtype)


def _awake(layer):
    """[Which channels have started at each level, (level, units)], or [] if all have."""
    awake = layer.awake(np.arange(1, layer.depth + 1))
    return [] if awake is None else [ops.convert_to_tensor(awake)]


def _apply_cell(layer, a, past, awake=None):
    """The states of a level; `awake` as in `level.Levels.level`."""
    _, states = layer.cell(a, past)
    states = [ops.cast(state, layer.state_dtype) for state in states]
    if awake is None:
        return states
    return [ops.where(awake, state, ops.zeros_like(state)) for state in states]


def _past_products(layer, past_kernel, rings):
    """The past taps' part of every level's pre-activation, (batch, level, preactivations)."""
    taps = past_kernel.shape[0]
    if taps == 0:
        return ops.zeros((), layer.state_dtype)
    h = [_steps_back(layer, rings, j) for j in range(taps, 0, -1)]
    h = [ops.cast(tap, layer.compute_dtype) for tap in h]
    product = hidden_product(layer, past_kernel, taps)
    return ops.cast(product(h, layer.compute_dtype), layer.state_dtype)


def _injections(layer, inputs, kernel, time):
    """What x adds at every level, (batch, level, time, preactivations)."""
    rows, index = _injected_rows(layer, inputs, kernel, time)
    return ops.moveaxis(ops.take(rows, index, axis=0), 0, 1)


def _injected_rows(layer, inputs, kernel, time):
    """x's part once per distinct dilation, (row, batch, time, preactivations), and the row of
    every level. The first row is zero, for the levels that x does not enter.

    Args:
        inputs: Tensor (batch, steps + time, channels): x with what the cache holds before it.
        kernel: Tensor (tap, channels, preactivations).
        time: Number of steps of x.
    """
    taps, channels, filters = kernel.shape
    kernel = ops.reshape(kernel, (taps * channels, filters))
    distinct = _injected_dilations(layer)
    x = ops.stack(
        [
            ops.concatenate([_piece(inputs, j * d, time) for j in range(taps - 1, -1, -1)], axis=-1)
            for d in distinct
        ]
    )
    rows = ops.cast(ops.einsum("nbtc,cd->nbtd", x, kernel), layer.state_dtype)
    rows = ops.concatenate([ops.zeros_like(rows[:1]), rows], axis=0)
    index = np.searchsorted(distinct, _dilations(layer)).astype("int32") + 1
    enters = np.arange(layer.depth) % layer.injection_every == 0
    return rows, np.where(enters, index, 0).astype("int32")


def _piece(x, steps, time):
    """The `time` steps of x (batch, all, channels) that end `steps` before its last one."""
    batch, total, channels = ops.shape(x)
    return ops.slice(x, (0, total - time - steps, 0), (batch, time, channels))


def _steps_back(layer, rings, dilations):
    """The states `dilations` dilations ago below every level, (batch, level, units)."""
    groups = _levels_by_dilation(layer)
    rows = [
        ring[:, :, ring.shape[2] - dilations * d] for d, ring in zip(groups, rings, strict=True)
    ]
    return _in_level_order(groups, rows)


def _move_on(layer, states, below):
    """Drops the oldest step of every ring and appends the newest, below (batch, level, units)."""
    groups = _levels_by_dilation(layer).values()
    return [
        [
            ops.concatenate([r[:, :, 1:], _pick(new, levels, 1)[:, :, None]], axis=2)
            for r, levels in zip(rings, groups, strict=True)
        ]
        for rings, new in zip(states, below, strict=True)
    ]


def _all_levels(layer, rings):
    """Rings of all levels in one tensor (level, batch, steps, units), padded at the old end."""
    longest = max(ring.shape[2] for ring in rings)
    padded = [ops.pad(r, [[0, 0], [0, 0], [longest - r.shape[2], 0], [0, 0]]) for r in rings]
    return ops.moveaxis(_in_level_order(_levels_by_dilation(layer), padded), 1, 0)


def _by_dilation(layer, rings, like):
    """Undoes `_all_levels`; `like` are rings of the shapes wanted."""
    groups = _levels_by_dilation(layer).values()
    return [
        ops.moveaxis(_pick(rings, levels, 0), 0, 1)[:, :, -old.shape[2] :]
        for levels, old in zip(groups, like, strict=True)
    ]


def _in_level_order(groups, parts):
    """Joins parts (batch, levels of a dilation, ...) along the level axis, level 1 first."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(list(groups.values())))
    return _pick(ops.concatenate(parts, axis=1), order, 1)


def _pick(x, levels, axis):
    """`ops.take` along the level axis, left out where it would copy everything in place."""
    if len(levels) == x.shape[axis] and np.all(np.diff(levels) == 1):
        return x
    return ops.take(x, levels.astype("int32"), axis=axis)
