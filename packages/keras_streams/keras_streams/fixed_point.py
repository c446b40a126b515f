"""Prints a program as integer-only C: int8 weights, int16 values, int32 sums.

A buffer is in fixed point: q stands for q / 2**bits, with as many fractional bits as the largest
value on representative inputs allows. Each column of weights has its own scale. Functions of one
variable, such as tanh, are tables of 513 values with linear interpolation. Integers and conditions
of the program are what they are. Sums, squares of sums, and single numbers have 32 bits. Where
that is closer, a table has 32 values for each power of two, as for a function of a logarithm.
"""

import math
import re
from typing import Any

import numpy as np

from keras_streams import passes
from keras_streams.c_source import (
    HELPERS,
    TYPES,
    Printer,
    Source,
    plus,
    read_operations,
    table_text,
    wrapped,
)
from keras_streams.cells import Buffer, Op, Program, pieces
from keras_streams.files import filled_template
from keras_streams.fixed_maps import MEAN_BITS, SIZES, WIDE_BITS, Body, fractional_bits
from keras_streams.lower import MAPS

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
        y = getattr(np, op.name)(args[0], axis=0)
    elif op.kind == "gather":
        index = args[0][0].astype(int)
        y = op.matrices[0][np.clip(index, 0, len(op.matrices[0]) - 1)].T
    else:  # copy and store
        y = args[0]
        if b.ring is not None:
            rest = memory[b.base + b.ring.width : b.base + b.size]
            memory[b.base : b.base + b.size] = np.concatenate([rest, y])
            return
    memory[b.base : b.base + b.size] = np.reshape(y, (b.size, -1))
    observe(b, y)


_LINEAR = {"Add", "Subtract", "Negative", "Where"}


def _means(program, groups):
    """Returns the buffers between a division by a count of steps and the state that it changes.

    They are those of a mean over all steps: a sample changes it by a small share.
    """
    following, divided = set(), set()
    for op in (op for group in groups for op in group):
        by_count = op.name == "Divide" and all(
            b.dtype == "int64" and b.kind != "constant" for b in program.owners(op.args[1])
        )
        if by_count:
            divided.add(op.buffer)
        if by_count or op.name in _LINEAR or op.kind in ("copy", "store"):
            for b in program.reads([op]):
                if b.kind != "constant" and b.dtype == op.buffer.dtype == program.real:
                    following.add((b, op.buffer))

    def reached(edges):
        found, new = set(), divided
        while new:
            new = {b for a, b in edges if a in new} - found
            found |= new
        return found

    return reached(following) & reached({(b, a) for a, b in following})


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
    program.output = cast(program.output, Op("copy", "", program.inputs[0], []))
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
        seen, infinite = set(), set()

        def observe(b, value):
            seen.add(b)
            key = self.shared.of(b)
            with np.errstate(invalid="ignore"):
                within = np.abs(value) < _HUGE
            low, high = self.ranges.get(key, (math.inf, -math.inf))
            low = float(np.min(value, initial=low, where=within))
            high = float(np.max(value, initial=high, where=within))
            if np.any(value <= -_HUGE):
                infinite.add(key)
            self.ranges[key] = low, high

        simulate(program, groups, x, observe)
        for key in infinite:
            low, high = self.ranges[key]
            self.ranges[key] = low - _FAR, high
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
        low, high = self.range_of(b)
        return max(-low, high, 0.0)

    def _find_front(self, program, groups):
        """Finds the maps of the inputs alone, such as a standardization, for `quantize`."""
        if any(b.dtype == "int64" for b in program.inputs):  # a token
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

    def pointer(self, b, offset=0):
        is_input = self.front and b is self.front_buffer
        return plus("x", offset) if is_input else super().pointer(b, offset)

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
        n = start.shape[1]
        y, y_bits = (self.pointer(op.buffer), n), self.bits(op.buffer)
        known, begin, start_shift = self.program.values(start), ("NULL", 0), 0
        if known is None:
            (p,) = pieces(self.program, start)
            begin = self.pointer(p.buffer, p.offset), n
            start_shift = self.bits(p.buffer) - y_bits
        elif np.any(known):
            same = np.all(known == known[0])
            values = known[0] if same else known
            begin = self.quantized(values, y_bits, op.scope, "bias"), 0 if same else n
        for cells, matrix in zip(operands, op.matrices, strict=True):
            ((p,), step) = passes.rows_of(self.program, cells)
            x_bits = self.bits(p.buffer)
            matrix = matrix.astype("float64")
            scale = np.max(np.abs(matrix), axis=0) / 127
            scale = np.maximum(scale, np.sum(np.abs(matrix), axis=0) / 2**15)
            scale = np.where(scale > 0, scale, np.max(scale) or 1.0)
            shift = x_bits - y_bits - math.frexp(np.max(scale))[1]
            if not (-15 < shift < 30 and -15 < start_shift < 31):
                raise ValueError(
                    f"The weights of {op.scope} are too large or too small for 8 bits."
                )
            w = np.rint(matrix / scale).astype("int8")
            scales = np.rint(np.minimum(scale * 2.0 ** (shift + 15 + y_bits - x_bits), 32767))
            scales = self.table(scales.astype("int16"), op.scope, "scale", "int16_t")
            if p.size < (_MANY_ROWS if n >= 16 else 12):
                name, columns = self.use("product_N", N=n), []
            else:
                name, columns, w = self.use("rows_product"), [n], w.T
            w = self.table(w, op.scope, "kernel", "int8_t")
            x = self.pointer(p.buffer, p.offset), step
            fixed = ((value, 0) for value in (p.size, w, scales, shift))
            columns = ((value, 0) for value in columns)
            self.each_row(op, name, *columns, y, begin, (start_shift, 0), x, *fixed)
            begin, start_shift = y, 0

    def wide_product(self, op):
        """Adds a product with weights of 16 bits and a result of 32."""
        start, *operands = op.args
        n, y_bits = start.shape[1], self.bits(op.buffer)
        y = self.pointer(op.buffer), n
        first = self.quantized(self.program.values(start), y_bits, op.scope, "start", "int32_t")
        begin = first, n
        for cells, matrix in zip(operands, op.matrices, strict=True):
            ((p,), step) = passes.rows_of(self.program, cells)
            matrix = matrix.astype("float64")
            w_bits = np.array([fractional_bits(most) for most in np.max(np.abs(matrix), axis=0)])
            w = np.clip(np.rint(matrix * 2.0**w_bits), -32767, 32767).astype("int16").T
            w = self.table(w, op.scope, "kernel", "int16_t")
            shifts = np.clip(w_bits + self.bits(p.buffer) - y_bits, -30, 62).astype("int8")
            shifts = self.table(shifts, op.scope, "shift", "int8_t")
            name = self.use("wide_product", TYPES[p.buffer.dtype])
            x = self.pointer(p.buffer, p.offset), step
            self.each_row(op, name, y, (n, 0), begin, x, (p.size, 0), (w, 0), (shifts, 0))
            begin = y

    def dot(self, op):
        factors, bits = [], 0
        for cells in op.args:
            values = self.program.values(cells)
            if values is not None:
                own = fractional_bits(float(np.max(np.abs(values))))
                factors.append(f"{self.quantized(values, own, op.scope, 'kernel')}, {op.size}, 1")
            else:
                own = self.bits(self.program.owner(int(cells.flat[0])))
                factors.append(self.grid(cells))
            bits += own
        name, shift, y = (
            self.use("sum_products"),
            bits - self.bits(op.buffer),
            self.pointer(op.buffer),
        )
        self.say(f"{name}({y}, {op.size}, {len(op.args[0])}, {', '.join(factors)}, {shift});", op)

    def reduce(self, op):
        (cells,) = op.args
        if op.name not in _FOLDS:
            raise ValueError(f"The reduction {op.name!r} has no integer version.")
        b = self.program.owner(int(cells.flat[0]))
        clip = {"int32": "clip32", "int64": "clip64"}.get(op.buffer.dtype, "clip16_long")
        words = {"NAME": op.name, "OUT": TYPES[op.buffer.dtype], "FOLD": _FOLDS[op.name]}
        name = self.use("reduce_NAME_OUT", TYPES[b.dtype], CLIP=clip, **words)
        y, shift = self.pointer(op.buffer), self.bits(b) - self.bits(op.buffer)
        self.say(f"{name}({y}, {op.size}, {len(cells)}, {self.grid(cells)}, {shift});", op)

    def gather(self, op):
        (p,) = pieces(self.program, op.args[0])
        index, y = self.pointer(p.buffer, p.offset), self.pointer(op.buffer)
        (table,) = op.matrices
        w = self.quantized(table, self.bits(op.buffer), op.scope, "table")
        self.say(f"{self.use('lookup')}({y}, {op.size}, *({index}), {len(table)}, {w});", op)

    def copied(self, b, cells, op):
        """Copies numbers to consecutive ones, also between 8 and 16 bits, and constants."""
        cells = cells.reshape(-1)
        if b is None:  # the outputs
            owners = [b for b in self.program.owners(cells) if b.kind != "constant"]
            kind, bits = "int16", self.bits(owners[0]) if owners else 15
            self.output_bits = bits
        else:
            kind, bits = b.dtype, self.bits(b)
        for p in pieces(self.program, cells):
            y, x, stride, source = self.place(b, p.start), None, p.stride, p.buffer.dtype
            if p.buffer.kind == "constant" and kind in ("int16", "int8", "int32"):
                values = self.program.values(cells[p.start : p.stop])
                source, stride = "int32" if kind == "int32" else "int16", 1
                x = self.quantized(values, bits, op.scope, "constant", TYPES[source])
            x = x or self.pointer(p.buffer, p.offset)
            if kind == "int16" and source in ("int64", "bool"):
                raise ValueError("An output of integers has no integer version.")
            if {kind, source} == {"int16", "int8"}:
                name = self.use("expand" if source == "int8" else "shorten")
                self.say(f"{name}({y}, {p.size}, {x}, {stride});", op)
            else:
                self.copy_piece(y, x, TYPES[source], p.size, stride, op)

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

    def initial(self, b, data):
        if b.dtype in ("int64", "bool"):
            return super().initial(b, data)
        most = 2 ** (SIZES[b.dtype] - 1) - 1
        values = np.nan_to_num(data * 2.0 ** self.bits(b), posinf=most, neginf=-most - 1)
        values = np.clip(np.rint(values), -most - 1, most)
        if b.dtype == "int8":  # the upper 8 of 16 bits
            values = np.minimum((values + 128) // 256, 127)
        return values.astype("int64" if b.dtype == "fixed64" else b.dtype)

    def more_declarations(self):
        name = self.prefix
        x = "" if self.about.takes_token else f"void {name}_quantize(const float *x, int16_t *q);\n"
        return (
            "\n/* For tests: convert inputs from, and outputs to, floating point. */\n"
            f"{x}void {name}_dequantize(const int16_t *q, float *y);\n"
        )

    def more_code(self):
        bits = [self.bits(b) for b in self.program.inputs for _ in range(b.size)]
        code, maps = [], ["const float *y = x;"]
        if self.front:
            code, maps = self._print_front()
            bits = [self.bits(self.front_buffer)] * len(bits)
        values = {
            "PREFIX": self.prefix,
            "UPPER": self.prefix.upper(),
            "BITS": str(self.output_bits),
            "TABLES": "".join(f"{text}\n\n" for text in code),
            "INPUT": ", ".join(map(str, bits)),
            "MAPS": "\n".join(wrapped("    ", line) for line in maps),
        }
        return filled_template("fixed_conversions.c", values).strip()

    def _print_front(self):
        """Returns the functions and the statements of the inputs' maps, in floating point."""
        printer = Printer(self.program, [], self.prefix, "float", self.about)
        printer.kept, printer.offsets = {self.front_buffer}, {self.front_buffer: 0}
        printer.taken = set(self.taken)
        changed = [*self.program.inputs, *(op.buffer for op in self.front)]
        dtypes = [b.dtype for b in changed]
        for b in changed:
            b.dtype = "bool" if b.dtype == "bool" else "float32"
        printer.map(self.front)
        code = [table_text(name, *array) for name, array in printer.arrays.items()]
        code += printer.functions.values()
        for b, dtype in zip(changed, dtypes, strict=True):
            b.dtype = dtype
        statements = (re.sub(r"s->work( \+ 0\b)?", "y", s.text) for s in printer.statements)
        return code, [f"float y[{self.about.inputs}];", *statements]
