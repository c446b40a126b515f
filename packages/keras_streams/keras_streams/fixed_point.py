"""Prints a program as integer-only C: int8 weights, int16 values, int32 sums.

A buffer is in fixed point: q stands for q / 2**bits, with as many fractional bits as the largest
value on representative inputs allows. Each column of weights has its own scale. Functions of one
variable, such as tanh, are tables of 513 values with linear interpolation. Integers and conditions
of the program are what they are. Sums, squares of sums, and single numbers have 32 bits. Where
that is closer, a table has 32 values for each power of two, as for a function of a logarithm.
"""

import collections
import math
from typing import Any

import numpy as np

from keras_streams import passes
from keras_streams.c_source import HELPERS, TYPES, Printer, Source, read_operations, wrapped
from keras_streams.cells import Buffer, Op, Program, grid, pieces
from keras_streams.fixed_maps import MEAN_BITS, WIDE_BITS, Body, fractional_bits
from keras_streams.lower import MAPS
from keras_streams.statements import Number, Place

_HUGE = 1e30  # larger numbers stand for infinity, and saturate
_FAR = 12  # below all finite values, stands for minus infinity: its exponential is 0 in 16 bits
_MANY_ROWS = 40  # of a product: then vectors are along the rows, in few columns from 12 on
_BLOCK = 64  # columns

_HELPERS = {name: HELPERS[name] for name in ("copy", "pick", "remainder_of", "row")}
_HELPERS |= read_operations("fixed_operations.c")
_FOLDS = {
    "sum": "found + next",
    "max": "next > found ? next : found",
    "min": "next < found ? next : found",
}


def simulate(
    program: Program, groups: list[passes.Group], x: np.ndarray, observe: Any
) -> np.ndarray:
    """Runs a program on rows of inputs in NumPy.

    Args:
        program: `Program`.
        groups: Its operations.
        x: Array (rows, steps, inputs), or tokens (rows, steps).
        observe: Function `(buffer, values)`, called with all results.

    Returns:
        The outputs (steps, outputs) of the first row.
    """
    x = x[..., None] if x.ndim == 2 else x
    size = max(b.base + b.size for b in program.buffers)
    memory = np.zeros((size, len(x)))
    for b in program.buffers:
        if b.data is not None:
            data = b.data.reshape(-1, 1).astype("float64")
            memory[b.base : b.base + b.size] = data
            if b.kind == "state":
                observe(b, data)
    outputs = []
    for t in range(x.shape[1]):
        start = 0
        for b in program.inputs:
            memory[b.base : b.base + b.size] = x[:, t, start : start + b.size].T
            observe(b, memory[b.base : b.base + b.size])
            start += b.size
        for op in (op for group in groups for op in group):
            if all(memory[address, 0] for address in op.guard):
                _run(op, memory, observe)
        outputs.append(memory[program.output, 0])
    return np.stack(outputs)


def _run(op, memory, observe):
    b = op.buffer
    args = [memory[cells] for cells in op.args]
    if op.kind == "map":
        with np.errstate(all="ignore"):
            y = MAPS[op.name].numpy(*args)
    elif op.kind == "product":
        y = args[0]
        observe(b, y)
        for vector, matrix in zip(args[1:], op.matrices, strict=True):
            y = y + np.einsum("rib,io->rob", vector, matrix)
            observe(b, y)  # also of partial sums
    elif op.kind == "dot":
        y = np.sum(args[0] * args[1], axis=0)
    elif op.kind == "reduce":
        y = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}[op.name](args[0], axis=0)
    elif op.kind == "gather":
        index = args[0][0].astype(int)
        y = op.matrices[0][np.clip(index, 0, len(op.matrices[0]) - 1)].T
    else:  # copy and store
        y = args[0]
        if b.ring is not None:
            memory[b.base : b.base + b.size - b.ring.width] = memory[
                b.base + b.ring.width : b.base + b.size
            ]
            memory[b.base + b.size - b.ring.width : b.base + b.size] = y
            return
    memory[b.base : b.base + b.size] = np.reshape(y, (b.size, -1))
    observe(b, y)


_LINEAR = {"Add", "Subtract", "Negative", "Where"}


def _means(program, groups):
    """Returns the buffers between a division by a count of steps and the state that it changes.

    They are those of a mean over all steps: a sample changes it by a small share.
    """
    following, divided = collections.defaultdict(set), set()
    for op in (op for group in groups for op in group):
        by_count = op.name == "Divide" and all(
            b.dtype == "int64" and b.kind != "constant" for b in program.owners(op.args[1])
        )
        if by_count:
            divided.add(op.buffer)
        if by_count or op.name in _LINEAR or op.kind in ("copy", "store"):
            for b in program.reads([op]):
                if b.kind != "constant" and b.dtype == op.buffer.dtype == program.real:
                    following[b].add(op.buffer)
    preceding = collections.defaultdict(set)
    for b, others in following.items():
        for other in others:
            preceding[other].add(b)

    def reached(edges):
        found, new = set(), set(divided)
        while new:
            new = {other for b in new for other in edges[b]} - found
            found |= new
        return found

    return reached(following) & reached(preceding)


_LOGARITHMS = {"Log", "Log1p"}
_WIDE_MAPS = {
    *("Add", "Subtract", "Multiply", "Square", "Negative", "Absolute"),
    *("Maximum", "Minimum", "Where", "Sqrt"),
}


def _before_logarithms(program, groups):
    """Returns the buffers from which logarithms are computed: powers and energies.

    Small values count as much as large ones there, so they have 32 bits, and the weights of their
    products 16.
    """
    ops = [op for group in groups for op in group]
    writers, found = {op.buffer: op for op in ops}, set()
    new = {b for op in ops if op.name in _LOGARITHMS for b in program.owners(op.args[0])}
    while new:
        b = new.pop()
        op = writers.get(b)
        if op is None or b in found or b.dtype != program.real:
            continue
        is_product = op.kind == "product" and program.values(op.args[0]) is not None
        if op.kind in ("reduce", "copy") or is_product or op.name in _WIDE_MAPS:
            found.add(b)
            new |= program.reads([op])
    narrow = None
    while narrow != set():
        narrow = {
            b
            for b in found
            if writers[b].kind == "copy"
            and any(a not in found and a.kind != "constant" for a in program.reads([writers[b]]))
        }
        found -= narrow
    return found


def _read_in_16(program, groups, wide):
    """Casts numbers of more than 16 bits for the operations that read 16."""

    def cast(cells, like):
        if not wide & set(program.owners(cells)):
            return cells
        buffer = program.buffer("work", cells.shape, program.real, scope=like.scope)
        op = Op("map", "Cast", buffer, [cells.reshape(-1)], scope=like.scope, guard=like.guard)
        found.append([op])
        return buffer.cells

    found = []
    for group in groups:
        (first, *_) = group
        if first.kind not in ("map", "reduce") and first.buffer not in wide:
            first.args = [cast(cells, first) for cells in first.args]
        found.append(group)
    program.output = cast(program.output, groups[-1][0])
    return found


_LIMITS = {"int8": 15, "int16": 15, "int32": WIDE_BITS, "fixed64": MEAN_BITS}


class _Groups:
    """Sets of buffers that share their fractional bits (a union-find)."""

    def __init__(self):
        self._parents = {}

    def of(self, b):
        while b in self._parents:
            b = self._parents[b]
        return b

    def join(self, a, b):
        a, b = self.of(a), self.of(b)
        if a is not b:
            self._parents[a] = b


class FixedPrinter(Printer):
    """Prints a program as integer-only C.

    Args:
        program: `Program`.
        groups: Its operations, from `passes.optimize(program, contiguous=True)`.
        prefix: Prefix of the public names, a C identifier.
        about: The `ExportedStream`.
        x: Representative inputs (rows, steps, inputs), or tokens (rows, steps).
        small_rings: Boolean, whether the rings that only products read have 8 bits.

    Raises:
        ValueError: If an operation has no integer version.
    """

    helpers = _HELPERS
    nothing = "INT16_MIN"

    def __init__(self, program, groups, prefix, about, x, small_rings):
        self.means, self.wide = _means(program, groups), _before_logarithms(program, groups)
        groups = _read_in_16(program, groups, self.means | self.wide)
        self._calibrate(program, groups, x)
        self._choose_types(program, groups, small_rings)
        self.front: list[Op] = []
        self._find_front(program, groups)
        super().__init__(program, groups, prefix, "int16_t", about)

    def print_apart(self) -> Source:
        """Prints the program with a place of its own for each result, so that all can be read."""
        super().__init__(self.program, self.groups, self.prefix, "int16_t", self.about)
        self.sizes = {}
        for b in self.kept:
            self.offsets[b] = self.sizes.get(b.dtype, 0)
            self.sizes[b.dtype] = self.offsets[b] + b.size
        return self.print()

    def result(self, b: Buffer, state: np.ndarray) -> np.ndarray:
        """Returns the integers of a result, from the bytes of a state after `print_apart`."""
        dtype = np.dtype("int64" if b.dtype == "fixed64" else b.dtype)
        start = self.starts[self.array("work", b.dtype)] + self.offsets[b] * dtype.itemsize
        return state[start : start + b.size * dtype.itemsize].view(dtype).astype("float64")

    def bytes_of_sums(self, columns):
        return 4 * min(columns, _BLOCK)

    # Ranges

    def _calibrate(self, program, groups, x):
        """Finds the largest value of each buffer, and the buffers that share their bits."""
        self.largest: dict[Buffer, float] = {}
        self.shared = _Groups()

        def join(a, cells):
            for b in program.owners(cells):
                if b.kind != "constant" and b.dtype == program.real == a.dtype:
                    self.shared.join(a, b)

        for op in (op for group in groups for op in group):
            if op.kind in ("copy", "store"):
                join(op.buffer, op.args[0])
            elif op.kind in ("product", "dot", "reduce"):
                for cells in op.args[op.kind == "product" :]:
                    join(program.owners(cells)[0], cells)
        owners = [b for b in program.owners(program.output) if b.kind != "constant"]
        for b in owners:
            join(owners[0], b.cells)
        for b in self.means:
            self.shared.join(next(iter(self.means)), b)

        self.ranges: dict[Buffer, tuple[float, float]] = {}

        def observe(b, value):
            key = self.shared.of(b)
            with np.errstate(invalid="ignore"):
                within = np.abs(value) < _HUGE
            low, high = self.ranges.get(key, (math.inf, -math.inf))
            low = float(np.min(value, initial=low, where=within))
            high = float(np.max(value, initial=high, where=within))
            if np.any(value <= -_HUGE):
                infinite.add(key)
            self.ranges[key] = low, high
            self.largest[key] = max(-low, high, 0.0)

        seen, infinite = set(), set()

        def watch(b, value):
            observe(b, value)
            seen.add(b)

        simulate(program, groups, x, watch)
        for key in infinite:
            low, high = self.ranges[key]
            self.ranges[key] = low - _FAR, high
            self.largest[key] = max(_FAR - low, high)
        if any(op.buffer not in seen for group in groups for op in group if op.kind != "store"):
            raise ValueError(
                "`representative_data` must have more steps, so that all layers receive samples. "
                f"Received: shape {x.shape}"
            )

    def _choose_types(self, program, groups, small_rings):
        ops = [op for group in groups for op in group]
        readers: dict[Buffer, list[Op]] = {}
        for op in ops:
            for b in program.reads([op]):
                readers.setdefault(b, []).append(op)
        tied = set(self.shared._parents) | set(self.shared._parents.values())
        outputs = set(program.owners(program.output))
        for b in self.wide:
            b.dtype = "int32"
        for op in ops:
            b, of = op.buffer, readers.get(op.buffer, [])
            is_kept = b in self.means or b in outputs
            if b.dtype != program.real or is_kept or op.kind not in ("map", "reduce"):
                continue
            squares = op.name in ("Square", "Multiply") and all(r.kind == "reduce" for r in of)
            is_sum = op.kind == "reduce" and op.name == "sum"
            if (b not in tied and (is_sum or (op.kind == "map" and b.size == 1))) or squares:
                b.dtype = "int32"
        for b in program.buffers:
            if b.kind != "constant" and b.dtype == program.real:
                b.dtype = "fixed64" if b in self.means else "int16"
        for b in program.states if small_rings else ():
            if b.ring is not None and all(op.kind == "copy" for op in readers.get(b, [])):
                b.dtype = "int8"

    def bits(self, b):
        """Returns the fractional bits of a buffer."""
        if b.dtype in ("int64", "bool"):
            return 0
        if b.kind == "constant":
            values = np.abs(np.asarray(b.data, "float64"))
            return fractional_bits(float(np.max(values, initial=0.0, where=values < _HUGE)))
        return fractional_bits(self.largest_of(b), _LIMITS[b.dtype])

    def range_of(self, b):
        """Returns the smallest and largest value of a buffer."""
        return self.ranges.get(self.shared.of(b), (0.0, 0.0))

    def largest_of(self, b):
        """Returns the largest absolute value of a buffer."""
        return self.largest.get(self.shared.of(b), 0.0)

    def _find_front(self, program, groups):
        """Finds the maps of the inputs alone, such as a standardization, for `quantize`."""
        if self._reads_token(program):
            return
        inside = {b: [b.cells.reshape(-1)] for b in program.inputs}
        found, size = [], sum(b.size for b in program.inputs)
        for op in (op for group in groups for op in group):
            cells = [a for a in op.args if program.values(a) is None]
            owners = {b for a in cells for b in program.owners(a)}
            whole = all(np.array_equal(a, program.owners(a)[0].cells.reshape(-1)) for a in cells)
            if op.kind == "map" and owners and owners <= set(inside) and whole and op.size == size:
                inside[op.buffer] = [op.buffer.cells.reshape(-1)]
                found.append(op)
        rest = [op for group in groups for op in group if op not in found]
        read = {b for b in program.reads(rest) if b in inside}
        read |= {b for b in program.owners(program.output) if b in inside}
        if len(program.inputs) == 1 and len(read) == 1 and read <= {op.buffer for op in found}:
            (self.front_buffer,) = read
            self.front = found

    def _reads_token(self, program):
        return any(b.dtype == "int64" for b in program.inputs)

    def pointer(self, b, offset):
        if self.front and b is self.front_buffer:
            return Place("x", "", offset, self.real)
        return super().pointer(b, offset)

    # Tables

    def quantized(self, values, bits, scope, name, kind="int16_t"):
        """Returns the place of a table of numbers with fractional bits."""
        values = np.nan_to_num(
            np.asarray(values, "float64") * 2.0**bits, posinf=32767, neginf=-32768
        )
        limits = {"int16_t": (-32768, 32767), "int32_t": (-(2**31) + 1, 2**31 - 1)}[kind]
        dtype = {"int16_t": "int16", "int32_t": "int32"}[kind]
        return self.table(np.clip(np.rint(values), *limits).astype(dtype), scope, name, kind)

    # Operations

    def product(self, op):
        if op.buffer in self.wide:
            self.wide_product(op)
            return
        start, *operands = op.args
        rows, n = start.shape
        y, y_bits = self.pointer(op.buffer, 0), self.bits(op.buffer)
        known, more = self.program.values(start), ("NULL", 0, 0)
        if known is None:
            (p,) = pieces(self.program, start)
            more = self.pointer(p.buffer, p.offset), n, self.bits(p.buffer) - y_bits
        elif np.any(known):
            same = np.all(known == known[0])
            bias = self.quantized(known[0] if same else known, y_bits, op.scope, "bias")
            more = bias, 0 if same else n, 0
        for cells, matrix in zip(operands, op.matrices, strict=True):
            ((p,), step) = passes.rows_of(self.program, cells)
            x_bits = self.bits(p.buffer)
            matrix = matrix.astype("float64")
            scale = np.max(np.abs(matrix), axis=0) / 127
            scale = np.maximum(scale, np.sum(np.abs(matrix), axis=0) / 2**15)
            scale = np.where(scale > 0, scale, np.max(scale) or 1.0)
            shift = x_bits - y_bits - math.frexp(np.max(scale))[1]
            if not (-15 < shift < 30 and -15 < more[2] < 31):
                raise ValueError(
                    f"The weights of {op.scope} are too large or too small for 8 bits."
                )
            w = np.rint(matrix / scale).astype("int8")
            scales = np.rint(np.minimum(scale * 2.0 ** (shift + 15 + y_bits - x_bits), 32767))
            scales = self.table(scales.astype("int16"), op.scope, "scale", "int16_t")
            if p.size < (_MANY_ROWS if n >= 16 else 12):
                name = self.use("product_N", N=n)
            else:
                name, w = self.use("rows_product"), w.T
            w = self.table(w, op.scope, "kernel", "int8_t")
            columns = f"{n}, " if name == "rows_product" else ""
            x = self.pointer(p.buffer, p.offset)
            shifts = (Number(by, "shift") for by in (more[2], shift))
            start_shift, shift = ((by, 0) for by in shifts)
            text = f"{name}({columns}%s, %s, %s, %s, {p.size}, %s, %s, %s);"
            pointers = (y, n), more[:2], start_shift, (x, step), (w, 0), (scales, 0), shift
            self.rows_loop(op, rows, text, *pointers)
            more = y, n, 0

    def wide_product(self, op):
        """Adds a product with weights of 16 bits and a result of 32."""
        start, *operands = op.args
        rows, n = start.shape
        y, y_bits = self.pointer(op.buffer, 0), self.bits(op.buffer)
        first = self.quantized(self.program.values(start), y_bits, op.scope, "start", "int32_t")
        begin = first, n
        for cells, matrix in zip(operands, op.matrices, strict=True):
            ((p,), step) = passes.rows_of(self.program, cells)
            matrix = matrix.astype("float64")
            w_bits = np.array(
                [fractional_bits(largest) for largest in np.max(np.abs(matrix), axis=0)]
            )
            w = np.clip(np.rint(matrix * 2.0**w_bits), -32767, 32767).astype("int16").T
            w = self.table(w, op.scope, "kernel", "int16_t")
            shifts = np.clip(w_bits + self.bits(p.buffer) - y_bits, -30, 62).astype("int8")
            shifts = self.table(shifts, op.scope, "shift", "int8_t")
            name = self.use("wide_product", TYPES[p.buffer.dtype])
            text = f"{name}(%s, {n}, %s, %s, {p.size}, %s, %s);"
            x = self.pointer(p.buffer, p.offset), step
            self.rows_loop(op, rows, text, (y, n), begin, x, (w, 0), (shifts, 0))
            begin = y, n

    def dot(self, op):
        name, y, n = self.use("sum_products"), self.pointer(op.buffer, 0), op.size
        arguments, bits = [], 0
        for cells in op.args:
            values = self.program.values(cells)
            if values is not None:
                own = fractional_bits(float(np.max(np.abs(values))))
                table = self.quantized(values, own, op.scope, "kernel")
                arguments.append((table, n, 1))
            else:
                found = grid(self.program, cells)
                own = self.bits(found.buffer)
                arguments.append((self.pointer(found.buffer, found.offset), *found.strides))
            bits += own
        (a, a_term, a_step), (b, b_term, b_step) = arguments
        text = (
            f"{name}(%s, {n}, {len(op.args[0])}, %s, {a_term}, {a_step}, %s, {b_term}, {b_step}, "
            "%s);"
        )
        self.say(text, y, a, b, Number(bits - self.bits(op.buffer), "shift"), like=op)

    def reduce(self, op):
        (cells,) = op.args
        if op.name not in _FOLDS:
            raise ValueError(f"The reduction {op.name!r} has no integer version.")
        found = grid(self.program, cells)
        clip = {"int32": "clip32", "int64": "clip64"}.get(op.buffer.dtype, "clip16_long")
        words = {"NAME": op.name, "OUT": TYPES[op.buffer.dtype], "FOLD": _FOLDS[op.name]}
        name = self.use("reduce_NAME_OUT", TYPES[found.buffer.dtype], CLIP=clip, **words)
        shift = self.bits(found.buffer) - self.bits(op.buffer)
        term, step = found.strides
        x = self.pointer(found.buffer, found.offset)
        text = f"{name}(%s, {op.size}, {len(cells)}, %s, {term}, {step}, %s);"
        self.say(text, self.pointer(op.buffer, 0), x, Number(shift, "shift"), like=op)

    def gather(self, op):
        (p,) = pieces(self.program, op.args[0])
        index = self.pointer(p.buffer, p.offset)
        (table,) = op.matrices
        name = self.use("lookup")
        w = self.quantized(table, self.bits(op.buffer), op.scope, "table")
        text = f"{name}(%s, {op.size}, *(%s), {len(table)}, %s);"
        self.say(text, self.pointer(op.buffer, 0), index, w, like=op)

    def copied(self, target, cells, op):
        """Copies numbers to consecutive ones, also between 8 and 16 bits, and constants."""
        cells = cells.reshape(-1)
        if str(target) == "y":  # the outputs
            owners = [b for b in self.program.owners(cells) if b.kind != "constant"]
            kind, bits = "int16", self.bits(owners[0]) if owners else 15
            self.output_bits = bits
        else:
            kind, bits = op.buffer.dtype, self.bits(op.buffer)
        for p in pieces(self.program, cells):
            to = target + p.start
            if p.buffer.kind == "constant" and kind in ("int16", "int8", "int32"):
                values = self.program.values(cells[p.start : p.stop])
                source, stride = "int32" if kind == "int32" else "int16", 1
                x = self.quantized(values, bits, op.scope, "constant", TYPES[source])
            else:
                x, stride, source = self.pointer(p.buffer, p.offset), p.stride, p.buffer.dtype
            if kind == "int16" and source in ("int64", "bool"):
                raise ValueError("An output of integers has no integer version.")
            if kind == "int16" and source == "int8":
                name = self.use("expand")
            elif kind == "int8" and source == "int16":
                name = self.use("shorten")
            elif stride == 1:
                self.say(f"memcpy(%s, %s, {p.size} * sizeof({TYPES[source]}));", to, x, like=op)
                continue
            else:
                name = self.use("copy", TYPES[source])
            self.say(f"{name}(%s, {p.size}, %s, {stride});", to, x, like=op)

    # Maps

    def map(self, group):
        if self.front and group[0] in self.front:
            group = [op for op in group if op not in self.front]
        if group:
            super().map(group)

    def statements_of(self, group, mine, parameters, cut):
        """Returns the lines for one element of a group, and its outputs."""
        body = Body(self, group, parameters, cut)
        return body.lines, body.outputs

    # Inputs and outputs

    def literal(self, value):
        return str(int(value)) if np.isfinite(value) else "INT16_MIN"

    def initial(self, b, data):
        if b.dtype in ("int64", "bool"):
            return data.astype("int64")
        bits = self.bits(b)
        values = np.nan_to_num(data * 2.0**bits, posinf=32767, neginf=-32768)
        values = np.clip(np.rint(values), -32768, 32767)
        return (values // 256 if b.dtype == "int8" else values).astype("int16")

    def more_declarations(self):
        name = self.prefix
        x = "" if self.about.takes_token else f"void {name}_quantize(const float *x, int16_t *q);\n"
        return (
            "\n/* For tests: convert inputs from, and outputs to, floating point. */\n"
            f"{x}void {name}_dequantize(const int16_t *q, float *y);\n"
        )

    def more_code(self):
        name, n = self.prefix, self.program.output.size
        is_clocked = any(s.guard for s in self.statements) or self.has_nothing
        is_nothing = "q[k] == INT16_MIN ? NAN : " if is_clocked else ""
        code = [
            f"void {name}_dequantize(const int16_t *q, float *y)\n{{\n"
            f"    for (int k = 0; k < {n}; k++)\n"
            f"        y[k] = {is_nothing}ldexpf(q[k], {-self.output_bits});\n}}"
        ]
        if not self.about.takes_token:
            code.append(self._quantize())
        return "/* Floating-point conversions */\n\n" + "\n\n".join(code)

    @property
    def has_nothing(self):
        values = [
            self.program.values(cells)
            for group in self.groups
            for op in group
            if op.name == "Where"
            for cells in op.args[1:]
        ]
        return any(v is not None and np.any(np.isnan(v)) for v in values)

    def _quantize(self):
        name, n = self.prefix, self.about.inputs
        lines, code, bits = ["const float *y = x;"], [], 0
        if self.front:
            printer = Printer(self.program, [], name, "float", self.about)
            printer.kept, printer.offsets = {self.front_buffer}, {self.front_buffer: 0}
            changed = [*self.program.inputs, *(op.buffer for op in self.front)]
            dtypes = [b.dtype for b in changed]
            for b in changed:
                b.dtype = "bool" if b.dtype == "bool" else "float32"
            printer.taken = set(self.taken)
            printer.loop(self.front, {op.buffer: f"v{i}" for i, op in enumerate(self.front)}, 0, n)
            code += [printer.table_text(table) for table in printer.arrays]
            code += printer.functions.values()
            (statement,) = printer.statements
            of_the_step = Place("s->work", "", 0, "float")
            values = ["y" if v == of_the_step else v for v in statement.code.parts]
            lines = [f"float y[{n}];", statement.code.text % tuple(values)]
            for b, dtype in zip(changed, dtypes, strict=True):
                b.dtype = dtype
            bits = f"{self.bits(self.front_buffer)}"
            conversion = [f"    float scaled = rintf(ldexpf(y[k], {bits}));"]
        else:
            shared = {self.bits(b) for b in self.program.inputs}
            if len(shared) == 1:
                conversion = [f"    float scaled = rintf(ldexpf(y[k], {shared.pop()}));"]
            else:
                each = [self.bits(b) for b in self.program.inputs for _ in range(b.size)]
                numbers = ", ".join(map(str, each))
                code.append(f"static const int input_bits[{n}] = {{{numbers}}};")
                conversion = ["    float scaled = rintf(ldexpf(y[k], input_bits[k]));"]
        lines += [
            f"for (int k = 0; k < {n}; k++) {{",
            *conversion,
            "    q[k] = (int16_t)(scaled < -32767 ? -32767 : scaled > 32767 ? 32767 : scaled);",
            "}",
        ]
        body = "\n".join(wrapped("    ", line) for line in lines)
        code.append(f"void {name}_quantize(const float *x, int16_t *q)\n{{\n{body}\n}}")
        return "\n\n".join(code)
