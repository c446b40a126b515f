"""Quantizes a program: operations on integers in place of those on floating-point numbers.

Weights have 8 bits, and each column its own scale; sums have 32 bits.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from keras_streams import passes
from keras_streams.c_source import TYPES, Printer, Source, table_text, without_zeros, wrapped
from keras_streams.cells import Program, as_grid, pieces
from keras_streams.files import filled_template
from keras_streams.fixed_formats import FixedProgram, calibrate, fractional_bits
from keras_streams.fixed_maps import Loop, constant, integers

_MANY_ROWS = 40  # of a product: then vectors are along the rows, in few columns from 12 on
_FOLDS = {
    "sum": "found + next",
    "max": "next > found ? next : found",
    "min": "next < found ? next : found",
}
_CLIPS = {"int16": "clip16_long", "int32": "clip32", "int64": "clip64", "bool": "clip16_long"}


def quantize(
    program: Program, groups: list[passes.Group], x: np.ndarray, small_rings: bool
) -> FixedProgram:
    """Returns the program in integers. See `calibrate` for the arguments.

    Raises:
        ValueError: If an operation cannot be computed with integers.
    """
    calibrated, rewriting = calibrate(program, groups, x, small_rings), _Rewriting(program)
    kept = passes.kept_buffers(program, calibrated.groups)
    for group in calibrated.groups:
        if group[0].kind == "map":
            for part in passes.cut(program, group):
                loop = Loop(program, part, kept, calibrated.ranges)
                rewriting.groups += filter(None, loop.groups)
        else:
            getattr(rewriting, group[0].kind)(group[0])
    owners = [b for b in program.owners(program.output) if b.kind != "constant"]
    if any(b.dtype in ("int64", "bool") for b in owners):
        raise ValueError("An output of integers cannot be exported with `quantization`.")
    bits = owners[0].bits if owners else 15
    program.output = rewriting.formatted(program.output, bits, "int16", "")
    for b in program.states:
        if b.dtype == "int8":  # the upper 8 of 16 bits
            b.data = np.minimum((integers(b.data, b.bits, "int16") + 128.0) // 256, 127)
        elif b.dtype not in ("int64", "bool"):
            b.data = integers(b.data, b.bits, b.dtype)
    return dataclasses.replace(calibrated, groups=rewriting.groups)


class _Rewriting:
    """The operations on integers of a program."""

    def __init__(self, program):
        self.program, self.groups = program, []

    def call(self, op, name, args, numbers, start=0, **words):
        """Adds a call of a C function in place of an operation."""
        changed = {"kind": "call", "name": name, "args": args, "matrices": []}
        self.groups.append(
            [dataclasses.replace(op, **changed, numbers=numbers, start=start, words=words)]
        )

    def formatted(self, cells, bits, dtype, scope):
        """Returns addresses with constants that have fractional bits in place of others."""
        cells, inside = cells.copy(), np.zeros(cells.shape, bool)
        for b in self.program.owners(cells):
            if b.kind == "constant":
                inside |= (cells >= b.base) & (cells < b.base + b.size)
        if np.any(inside):
            values = self.program.values(cells[inside])
            cells[inside] = constant(self.program, values, bits, scope, dtype=dtype)
        return cells

    def product(self, op):
        start, *operands = op.args
        y, known = op.buffer, self.program.values(start)
        if y.dtype == "int32":
            self.wide_product(op)
            return
        start_shift = 0
        if known is None:
            start_shift = self.program.owner(int(start.flat[0])).bits - y.bits
        elif np.any(known):
            same = np.all(known == known[0])
            bias = constant(self.program, known[0] if same else known, y.bits, op.scope, "bias")
            start = np.broadcast_to(bias, start.shape)
        else:
            start = start[:, :0]
        n = op.args[0].shape[1]
        for cells, matrix in zip(operands, op.matrices, strict=True):
            x_bits, size = self.program.owner(int(cells.flat[0])).bits, cells.shape[1]
            matrix = matrix.astype("float64")
            scale = np.max(np.abs(matrix), axis=0) / 127
            scale = np.maximum(scale, np.sum(np.abs(matrix), axis=0) / 2**15)
            scale = np.where(scale > 0, scale, np.max(scale) or 1.0)
            shift = x_bits - y.bits - math.frexp(np.max(scale))[1]
            if not (-15 < shift < 30 and -15 < start_shift < 31):
                raise ValueError(
                    f"The weights of {op.scope} are too large or too small for 8 bits."
                )
            w, numbers = np.rint(matrix / scale), [size, start_shift, shift]
            name, words = "product_int8_N", {"N": n}
            if size >= (_MANY_ROWS if n >= 16 else 12):
                w, numbers, name, words = w.T, [n, *numbers], "rows_product_int8", {}
            w = self.row(op, w, "kernel", "int8")
            scales = self.row(op, scale * 2.0 ** (shift + 15 + y.bits - x_bits), "scale")
            self.call(op, name, [cells, start, w, scales], numbers, **words)
            start, start_shift = y.cells.reshape(start.shape[0], n), 0

    def row(self, op, values, name, dtype="int16"):
        """Returns the address of constants for each row of a product."""
        cells = constant(self.program, values, 0, op.scope, name, dtype)
        return np.full((len(op.args[0]), 1), cells.flat[0])

    def wide_product(self, op):
        """Adds a product with weights of 16 bits and a result of 32."""
        start, *operands = op.args
        y, values = op.buffer, self.program.values(start)
        start = constant(self.program, values, y.bits, op.scope, "start", "int32")
        for cells, matrix in zip(operands, op.matrices, strict=True):
            x_bits = self.program.owner(int(cells.flat[0])).bits
            matrix = matrix.astype("float64")
            w_bits = np.array([fractional_bits(most) for most in np.max(np.abs(matrix), axis=0)])
            w = np.clip(np.rint(matrix * 2.0**w_bits), -32767, 32767)
            w = self.row(op, w.T, "kernel")
            shifts = self.row(op, np.clip(w_bits + x_bits - y.bits, -30, 62), "shift", "int8")
            numbers = [start.shape[1], cells.shape[1]]
            self.call(op, "product_int16", [cells, start, w, shifts], numbers)
            start = y.cells.reshape(start.shape)

    def dot(self, op):
        factors = list(op.args)
        for i, values in enumerate(map(self.program.values, factors)):
            if values is not None:
                bits = fractional_bits(float(np.max(np.abs(values))))
                factors[i] = constant(self.program, values, bits, op.scope, "kernel")
        a, b = (as_grid(self.program, cells) for cells in factors)
        numbers = [op.size, len(op.args[0]), *a.strides, *b.strides]
        numbers.append(a.buffer.bits + b.buffer.bits - op.buffer.bits)
        self.call(op, "sum_products", [cells.reshape(1, -1) for cells in factors], numbers)

    def reduce(self, op):
        (cells,) = op.args
        if op.name not in _FOLDS:
            raise ValueError(f"The reduction {op.name!r} cannot be computed with integers.")
        x, y = as_grid(self.program, cells), op.buffer
        numbers = [op.size, len(cells), *x.strides, x.buffer.bits - y.bits]
        words = {"NAME": op.name, "OUT": TYPES[y.dtype], "FOLD": _FOLDS[op.name]}
        words["CLIP"] = _CLIPS[y.dtype]
        self.call(op, "reduce_NAME_OUT", [cells.reshape(1, -1)], numbers, **words)

    def gather(self, op):
        (table,) = op.matrices
        rows = constant(self.program, table, op.buffer.bits, op.scope, "table")
        args = [op.args[0].reshape(1, -1), rows.reshape(1, -1)]
        self.call(op, "lookup_row", args, [op.size, len(table)])

    def copy(self, op):
        b, cells = op.buffer, op.args[0].reshape(-1)
        if b.dtype not in ("int64", "bool"):
            dtype = "int16" if b.dtype == "int8" else b.dtype
            cells = self.formatted(cells, b.bits, dtype, op.scope)
        if {owner.dtype for owner in self.program.owners(cells)} == {b.dtype}:
            self.groups.append([dataclasses.replace(op, args=[cells])])
            return
        for p in pieces(self.program, cells):  # of 8 and 16 bits
            part = cells[None, p.start : p.stop]
            if p.buffer.dtype == b.dtype:
                self.groups.append([dataclasses.replace(op, args=[part], start=p.start)])
            else:
                name = "expand" if b.dtype == "int16" else "shorten"
                self.call(op, name, [part], [p.size, p.stride], start=p.start)

    store = copy


def print_fixed(
    fixed: FixedProgram, prefix: str, about: Any, apart: bool = False
) -> tuple[Printer, Source]:
    """Returns the printer of an integer program, and its source, which also converts floats.

    See `Printer` for the other arguments.
    """
    program = fixed.program
    printer = Printer(program, fixed.groups, prefix, "int16_t", about, apart=apart)
    source = printer.print()
    tables, maps = _front(fixed, printer) if fixed.front else ([], ["const float *y = x;"])
    bits = [b.bits + n for b in program.inputs for n in np.broadcast_to(b.exponents, b.size)]
    values = {
        "PREFIX": prefix,
        "UPPER": prefix.upper(),
        "BITS": str(program.owner(int(program.output[0])).bits),
        "TABLES": "".join(f"{text}\n\n" for text in tables),
        "INPUT": ", ".join(map(str, bits)),
        "MAPS": "\n".join(wrapped("    ", line) for line in maps),
    }
    conversions = filled_template("fixed_conversions.c", values)
    return printer, dataclasses.replace(source, code=f"{source.code}\n{conversions}")


def _front(fixed, printer):
    """Returns the functions and the statements of the inputs' maps, in floating point."""
    program, _ = fixed.floats
    for b in [*program.inputs, *(op.buffer for op in fixed.front)]:
        b.dtype = "bool" if b.dtype == "bool" else "float32"
    y = fixed.front[-1].buffer
    y.kind, program.output = "output", y.cells
    maps = Printer(program, [fixed.front], printer.prefix, "float", printer.about)
    maps.taken |= printer.taken
    maps.map(fixed.front)
    tables = [table_text(name, *array) for name, array in maps.arrays.items()]
    lines = [without_zeros(s.text) for s in maps.statements]
    return [*tables, *maps.functions.values()], [f"float y[{y.size}];", *lines]
