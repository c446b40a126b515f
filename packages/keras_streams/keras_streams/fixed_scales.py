"""Scales the channels of a program's vectors by powers of two, so that each has its own format.

The numbers of a vector share one format: a channel whose values are 2**8 times smaller than those
of others has 8 of 16 bits. Scaled, all channels have most of them. The factors are folded into the
weights and constants that write and read a channel, so a step does the same work.
"""

import numpy as np

from keras_streams.cells import Buffer, Op, Program
from keras_streams.passes import Group, uniform

_HEADROOM = 2  # bits that channels of small values keep for larger ones
_CAPS = range(0, 15, 2)  # the largest exponents to choose from
_LITTLE_NOISE = 1e-6  # relative to a signal's power; that of 8-bit weights is about 1e-4
_COMPARISONS = {"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
_TIED = {
    *("Add", "Subtract", "Maximum", "Minimum", "Where", "Negative", "Absolute", "Cast"),
    *_COMPARISONS,
}


def scale_channels(
    program: Program,
    groups: list[Group],
    source: Buffer | None,
    limits: dict[Buffer, np.ndarray],
    small_rings: bool,
) -> list[Op]:
    """Scales the numbers of a program where that lowers its noise, and sets their exponents.

    Args:
        program, groups: The program, and its operations.
        source: The buffer of the inputs, if they may be scaled, or `None`.
        limits: Dict from buffer to the limits of its numbers, (2, size).
        small_rings: Boolean, whether rings have 8 bits.

    Returns:
        The operation that scales the source, if any.
    """
    scales = _Scales(program, [op for group in groups for op in group], source, limits)
    exponents = scales.chosen(small_rings)
    if not np.any(exponents):
        return []
    scales.fold(exponents)
    for b in scales.buffers:
        if np.any(exponents[b.cells]):
            b.exponents = exponents[b.cells.reshape(-1)]
    if source is None or not np.any(source.exponents):
        return []
    scaled = program.buffer("work", (source.size,), program.real, scope=source.scope)
    scaled.exponents, source.exponents = source.exponents, 0
    limits[scaled] = limits[source]
    for op in scales.ops:
        for i, cells in enumerate(op.args):
            inside = (cells >= source.base) & (cells < source.base + source.size)
            op.args[i] = np.where(inside, cells + (scaled.base - source.base), cells)
    factors = program.constant((2.0**scaled.exponents).astype(program.real))
    return [Op("map", "Multiply", scaled, [source.cells.reshape(-1), factors])]


class _Sets:
    """Disjoint sets of addresses, each known by the smallest of them."""

    def __init__(self, size):
        self.parents = np.arange(size)

    def roots(self, cells):
        while not np.array_equal(cells, above := self.parents[cells]):
            cells = above
        return cells

    def join(self, a, b):
        while a.size:
            a, b = self.roots(a), self.roots(b)
            a, b = a[a != b], b[a != b]
            self.parents[np.maximum(a, b)] = np.minimum(a, b)


class _Scales:
    """Which numbers of a program can be scaled, and by how much.

    Numbers that are added or compared have one exponent. Those of functions that are not linear,
    and of products of two variables, have the exponent 0, as constants have, such as address 0.
    """

    def __init__(self, program, ops, source, limits):
        self.program, self.ops = program, ops
        self.buffers = [
            b for b in program.buffers if b.kind != "constant" and b.dtype == program.real
        ]
        size = max(b.base + b.size for b in program.buffers)
        self.largest, self.is_variable = np.zeros(size), np.zeros(size, bool)
        for b in self.buffers:
            self.is_variable[b.cells] = True
            if (ends := limits.get(b)) is not None:
                finite = np.where(np.isfinite(ends), np.abs(ends), 0)
                self.largest[b.cells.reshape(-1)] = np.max(finite, axis=0)
        self.sets = _Sets(size)
        self.keep(program.output, *(b.cells for b in program.inputs if b is not source))
        self.factors = {op: i for op in ops if (i := self.factor(op)) is not None}
        for op in ops:
            self.tie_operands(op)
        for op in ops:
            if _is_product(op) and op not in self.factors:
                self.tie_product(op)

    def tie(self, *tensors):
        """Gives variables one exponent, element by element."""
        a, *others = (cells.reshape(-1) for cells in np.broadcast_arrays(*tensors))
        for b in others:
            both = self.is_variable[a] & self.is_variable[b]
            self.sets.join(a[both], b[both])

    def keep(self, *tensors):
        """Gives variables the exponent 0."""
        for cells in tensors:
            variables = cells[self.is_variable[cells]]
            self.sets.join(variables, np.zeros_like(variables))

    def tie_operands(self, op):
        y, args = op.buffer.cells.reshape(-1), op.args
        numbers = _numbers(op)
        owners = {b for cells in numbers for b in self.program.owners(cells)}
        is_real = all(b.kind == "constant" or b.dtype == self.program.real for b in owners)
        if op.kind == "product":
            y = y.reshape(args[0].shape)
            for cells in (y, *args[1:]):  # rows have the same matrix
                self.tie(cells[:1], cells)
            self.tie(y, args[0])
        elif op.kind == "store":  # every row of a ring
            self.tie(args[0].reshape(-1), y.reshape(-1, args[0].size))
        elif op.kind == "copy":
            self.tie(y, args[0].reshape(-1))
        elif op.kind == "reduce" and op.name != "prod":
            self.tie(y, args[0])
        elif op.name in _TIED and is_real and op.buffer.dtype != "int64":
            self.tie(y, *numbers)
            self.tie(*numbers)
        elif op.kind != "gather" and not _is_product(op):
            self.keep(y, *args)

    def factor(self, op):
        """Returns which operand is constants that can take factors, or `None`."""
        for i, cells in enumerate(op.args if _is_product(op) else ()):
            is_constant = self.program.values(cells) is not None
            if is_constant and np.all(self.is_variable[op.args[1 - i]]):
                is_uniform = op.kind == "map" and uniform(self.program, cells) is not None
                return None if is_uniform or (i, op.name) == (0, "Divide") else i
        return None

    def tie_product(self, op):
        y, (a, b) = op.buffer.cells.reshape(-1), op.args
        for x, other in ((a, b),) if op.name == "Divide" else ((a, b), (b, a)):
            is_known = np.all(self.sets.roots(other[self.is_variable[other]]) == 0)
            if op.kind == "map" and is_known and np.all(self.is_variable[x]):
                self.tie(y, x)
                return
        self.keep(y, a, b)

    def chosen(self, small_rings):
        """Returns the exponents with the least noise of rounding, an array by address."""
        cells = np.arange(len(self.largest))
        sets = np.where(self.is_variable, self.sets.roots(cells), 0)
        linked = _Sets(len(cells))  # sets in one buffer
        for b in self.buffers:
            inside = sets[b.cells][sets[b.cells] > 0]
            linked.join(inside, np.broadcast_to(inside[:1], inside.shape))
        _, groups = np.unique(linked.roots(sets), return_inverse=True)  # 0: not scalable
        of_set, of_group = np.zeros(len(cells)), np.zeros(np.max(groups) + 1)
        is_coarse = np.zeros(len(cells), bool)  # in 8 bits
        np.maximum.at(of_set, sets, self.largest)
        for b in self.buffers:
            np.maximum.at(of_group, groups[b.cells], np.max(self.largest[b.cells], initial=0))
            is_coarse[sets[b.cells]] |= small_rings and b.ring is not None
        of_set, is_coarse = np.where(of_set > 0, of_set, np.inf)[sets], is_coarse[sets]
        with np.errstate(divide="ignore"):
            room = np.floor(np.log2(of_group[groups] / of_set)) - _HEADROOM
        room = np.where(groups > 0, np.clip(room, 0, _CAPS[-1]), 0).astype(int)
        noise = np.zeros((len(_CAPS), len(of_group)))
        scalable = {}
        for op in self.ops:
            inside = np.concatenate([x.reshape(-1) for x in (op.buffer.cells, *_numbers(op))])
            if np.any(room[inside]):
                scalable[op] = inside
        for of_cap, cap in zip(noise, _CAPS, strict=True):
            exponents = np.minimum(room, cap)
            for op, inside in scalable.items():
                of_cap[np.unique(groups[inside])] += self.noise(op, exponents, is_coarse)
        helps = (noise[0] > _LITTLE_NOISE) & (np.min(noise, axis=0) < noise[0] / 2)
        caps = np.where(helps, np.array(_CAPS)[np.argmin(noise, axis=0)], 0)
        return np.minimum(room, caps[groups])

    def noise(self, op, exponents, is_coarse):
        """Returns the mean power of rounding errors in results, relative to that of the results."""

        def rounded(cells):
            """Returns the largest values, and the power of their errors."""
            x = self.largest[cells] * 2.0 ** exponents[cells]
            bits = 7 if np.any(is_coarse[cells]) else 15
            return x, (np.max(x) * 2.0**-bits) ** 2 / 12

        errors, power = np.zeros(1), np.zeros(1)
        if op in self.factors:
            x, errors = rounded(op.args[1 - self.factors[op]])
            power = x**2
        elif op.kind == "product":
            for cells, matrix in zip(op.args[1:], op.matrices, strict=True):
                x, error = rounded(cells)
                x = np.max(x, axis=0)[:, None]
                w = np.abs(self.changed(op, matrix, cells, exponents))
                power = power + np.sum((x * w) ** 2, axis=0)
                of_weights = (np.max(w, axis=0) / 127) ** 2 / 12
                errors = errors + of_weights * np.sum(x**2) + error * np.sum(w**2, axis=0)
        found = power > 0
        return np.sum(errors / np.where(found, power, np.inf)) / max(np.count_nonzero(found), 1)

    def changed(self, op, matrix, cells, exponents):
        """Returns a matrix of a product on scaled numbers."""
        columns = exponents[op.buffer.cells.reshape(-1)[: matrix.shape[1]]]
        return matrix * 2.0 ** (columns - exponents[cells[0]][:, None])

    def fold(self, exponents):
        """Folds exponents into the matrices and constants of all operations."""
        for op in self.ops:
            y = exponents[op.buffer.cells.reshape(-1)]
            if op.kind == "product":
                op.args[0] = self.scaled(op.args[0], y.reshape(op.args[0].shape))
                pairs = zip(op.matrices, op.args[1:], strict=True)
                op.matrices = [self.changed(op, *pair, exponents) for pair in pairs]
            elif op.kind == "gather":
                op.matrices = [op.matrices[0] * 2.0**y]
            elif op in self.factors:
                factor = self.factors[op]
                change = y - exponents[op.args[1 - factor]]
                change = -change if op.name == "Divide" else change
                op.args[factor] = self.scaled(op.args[factor], change)
            elif op.kind in ("copy", "store") or op.name in _TIED:
                numbers = _numbers(op)
                if op.name in _COMPARISONS:
                    y = np.max([exponents[cells] for cells in numbers], axis=0)
                scaled = [self.scaled(x, y[-x.size :].reshape(x.shape)) for x in numbers]
                op.args[len(op.args) - len(scaled) :] = scaled
        for b in self.program.states:
            if b.data is not None and np.any(exponents[b.cells]):
                b.data = b.data.reshape(-1) * 2.0 ** exponents[b.cells.reshape(-1)]

    def scaled(self, cells, exponents):
        """Returns addresses with scaled constants in place of constants."""
        found = ~self.is_variable[cells]
        values = self.program.values(cells[found]) if np.any(exponents[found]) else np.zeros(0)
        if not np.any(values):
            return cells
        values = (values * 2.0 ** exponents[found]).astype(self.program.real)
        cells = cells.copy()
        cells[found] = self.program.constant(values)
        return cells


def _is_product(op):
    return op.kind == "dot" or op.name in ("Multiply", "Divide")


def _numbers(op):
    """Returns the operands that have the exponents of the results, or are constants."""
    return op.args[op.name == "Where" :]
