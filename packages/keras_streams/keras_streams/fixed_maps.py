"""Maps of fixed-point numbers: operations on integers in place of those of a loop.

Functions of one variable, such as tanh, are tables of 513 values with linear interpolation. Where
that is closer, a table has 32 values for each power of two, as for a function of a logarithm.
`Truncate` drops the fraction, as a cast to integers does.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from keras_streams.c_source import reads_integers
from keras_streams.cells import Buffer, Op, Program
from keras_streams.fixed_formats import MEAN_BITS, WIDE_BITS, fractional_bits
from keras_streams.lower import MAPS
from keras_streams.passes import Group, uniform

SIZES = {"int8": 16, "int16": 16, "int32": 32, "fixed64": 64, "int64": 64, "bool": 64}  # in bits
_SEGMENTS = 512  # in a table
_PER_POWER = 32  # segments for each power of two, in the other kind of table
_SHORT = {"function", "function_by_powers", "clip16", "clip16_long"}  # their results have 16 bits
_MANY = 32  # lookups: then they are read apart from the rest of a loop
_GOOD_ENOUGH = 32  # of 32767, error of a table
_CURVES = {  # functions that are tables
    *("Sigmoid", "Tanh", "Erf", "Exp", "Expm1", "Sin", "Cos", "Arctan", "Power", "Mod"),
}
_EXACT = {"Sqrt", "Rsqrt", "Log", "Log1p", "Divide", "Reciprocal"}  # that are not


def integers(values: Any, bits: int, dtype: str) -> np.ndarray:
    """Returns numbers as integers with fractional bits."""
    limits = np.iinfo(dtype.replace("fixed", "int"))
    values = np.asarray(values, "float64") * 2.0**bits
    values = np.rint(np.nan_to_num(values, posinf=limits.max, neginf=limits.min))
    return np.clip(values, limits.min, limits.max).astype(limits.dtype)


def constant(
    program: Program,
    values: Any,
    bits: int = 0,
    scope: str = "",
    name: str = "constant",
    dtype: str = "int16",
) -> np.ndarray:
    """Returns the addresses of constants as integers with fractional bits."""
    values = integers(values, bits, dtype)
    buffer = program.buffer("constant", values.shape, dtype, data=values, scope=scope, name=name)
    buffer.dtype, buffer.bits = dtype, bits
    return buffer.cells


@dataclasses.dataclass(frozen=True)
class Number:
    """Addresses of a number in each pass, its fractional bits, and the size of values in bits."""

    cells: np.ndarray
    bits: int
    size: int = 16  # with the sign


class Loop:
    """Translates maps whose operands have one stride, from those whose results are kept.

    Attributes:
        groups: The operations on integers. Tables of many numbers are read apart, because the rest
            of a loop vectorizes.
    """

    def __init__(
        self,
        program: Program,
        group: Group,
        kept: set[Buffer],
        ranges: dict[Buffer, tuple[float, float]],
    ) -> None:
        self.program, self.ranges = program, ranges
        self.like, self.count = group[0], len(group[0].args[0])
        self.ops = {op.buffer: op for op in group}
        self.found: dict[Buffer, Number] = {}
        self.groups: list[Group] = [[]]
        for op in group:
            if op.buffer in kept:
                self.store(op)

    def emit(self, name: str, args: list, bits: int, size: int) -> Number:
        """Adds an operation on `Number`s, addresses and integers, and returns its result."""
        scope, guard, cells = self.like.scope, self.like.guard, [self.cells(x) for x in args]
        buffer = self.program.buffer("work", (self.count,), "int64", scope=scope)
        buffer.dtype = "int16" if name in _SHORT else "int32" if size <= 32 else "int64"
        buffer.bits = bits
        if name == "function" and self.count >= _MANY and np.all(np.diff(cells[1]) == 1):
            rows, words = [np.atleast_2d(x) for x in reversed(cells)], {"N": self.count}
            op = Op("call", "functions_N", buffer, rows, scope=scope, guard=guard, words=words)
            self.groups += [[op], []]
        else:
            self.groups[-1].append(Op("map", name, buffer, cells, scope=scope, guard=guard))
        return Number(buffer.cells, bits, size)

    def cells(self, x):
        if isinstance(x, Number):
            return x.cells
        return np.repeat(self.program.constant(x), self.count) if isinstance(x, int) else x

    # Operands

    def owner(self, cells):
        return self.program.owner(int(cells[0]))

    def operand(self, cells):
        """Returns an operand as a float or a `Number`."""
        value = uniform(self.program, cells)
        if value is not None:
            return 0.0 if math.isnan(value) else float(value)
        b, values = self.owner(cells), self.program.values(cells)
        if b in self.ops:
            return self.value(b)
        if values is not None:
            bits = fractional_bits(float(np.max(np.abs(values))))
            return Number(constant(self.program, values, bits, self.like.scope), bits)
        return Number(cells, b.bits, SIZES[b.dtype])

    def operands(self, op):
        return [self.operand(cells) for cells in op.args]

    def whole(self, cells):
        """Returns integers or conditions, after those of the loop are computed."""
        if self.owner(cells) in self.ops:
            self.value(self.owner(cells))
        return cells

    # Fractional bits

    def aligned(self, x, bits):
        """Returns a number with the given fractional bits, which may need more bits."""
        if isinstance(x, float):
            limit = 2.0**WIDE_BITS
            value = round(min(max(x * 2.0**bits, -limit), limit))
            return Number(self.cells(value), bits, value.bit_length() + 1)
        shift = max(min(x.bits - bits, 62), -62)
        if shift == 0:
            return dataclasses.replace(x, bits=bits)
        size = x.size - shift if shift < 0 else max(x.size - shift + 1, 2)
        if max(size, x.size) <= 31 and shift < 31:
            return self.emit("shifted", [x, shift], bits, size)
        if size > 62:
            return self.emit("raised", [x, -shift], bits, 62)
        return self.emit("align", [x, shift], bits, size)

    def clipped(self, x, size):
        name = f"clip{size}" + ("_long" if size == 16 and x.size > 32 else "")
        return self.emit(name, [x], x.bits, size)

    def fitted(self, x, bits, size):
        """Returns a number with the given fractional bits that fits into `size` bits."""
        return self.clipped(self.aligned(x, bits), size)

    def in_32(self, x):
        """Returns a number with at most 32 bits."""
        if isinstance(x, float):
            return self.aligned(x, fractional_bits(abs(x)))
        less = MEAN_BITS - WIDE_BITS if x.bits > 0 else 0
        return x if x.size <= 32 else self.fitted(x, x.bits - less, 32)

    # Operations

    def store(self, op):
        """Adds the operations whose result is kept."""
        b = op.buffer
        if b.dtype in ("int64", "bool"):
            self.value(b)
            return
        other = uniform(self.program, op.args[-1])
        if op.name == "Where" and other != other:
            # Nothing, at steps without an output.
            value = self.fitted(self.operand(op.args[1]), b.bits, 16)
            value = self.emit("Where", [self.whole(op.args[0]), value, -32768], b.bits, 16)
        else:
            value = self.value(b)
            if (value.bits, value.size) != (b.bits, SIZES[b.dtype]):
                value = self.fitted(value, b.bits, SIZES[b.dtype])
        self.groups[-1].append(dataclasses.replace(op, name="Cast", args=[value.cells]))

    def value(self, b):
        """Returns a result of the loop as a `Number`."""
        op = self.ops[b]
        if b not in self.found and b.dtype in ("int64", "bool"):
            whole = self.of_integers(op)
            self.groups[-1].append(whole)
            self.found[b] = Number(b.cells.reshape(-1)[op.start :][: self.count], 0, 64)
        elif b not in self.found:
            self.found[b] = self.compute(op)
        return self.found[b]

    def of_integers(self, op):
        """Returns an operation on integers and conditions, or a comparison."""
        if op.name == "Isnan":  # integers are never NaN
            return dataclasses.replace(op, name="Cast", args=[self.cells(0)])
        if reads_integers(self.program, op) or op.name.startswith("Logical"):
            return dataclasses.replace(op, args=[self.whole(cells) for cells in op.args])
        numbers = self.operands(op)
        if op.name == "Cast" and op.buffer.dtype != "bool":
            x = self.aligned(numbers[0], max(numbers[0].bits, 0))
            return dataclasses.replace(op, name="Truncate", args=[x.cells, self.cells(x.bits)])
        if op.buffer.dtype != "bool":
            raise ValueError(f"The operation {op.name!r} cannot be computed with integers.")
        bits = min(n.bits for n in numbers if isinstance(n, Number))
        return dataclasses.replace(op, args=[self.aligned(n, bits).cells for n in numbers])

    def compute(self, op):
        bits, size = op.buffer.bits, SIZES[op.buffer.dtype]
        ops, variables = self.origins(op)
        is_curved = any(
            uniform(self.program, one.args[1]) is None
            if one.name == "Divide"
            else one.name in _CURVES | _EXACT
            for one in ops.values()
        )
        is_narrow = all(b.dtype == "int16" for b in ops)
        if is_curved and len(variables) == 1 and is_narrow and op.name not in _EXACT:
            return self.tabulated(op, ops, *variables.values())
        if op.name in _CURVES:
            x, *more = self.operands(op)
            if all(isinstance(y, float) for y in more):
                limits = self.ranges.get(self.owner(op.args[0]), (0.0, 0.0))
                return self.lookup(lambda x: MAPS[op.name].numpy(x, *more), x, op, limits)
        if op.name not in _RULES:
            raise ValueError(
                f"The operation {op.name!r} cannot be computed with integers. Export without "
                "`quantization`."
            )
        return self.fitted(_RULES[op.name](self, op), bits, size)

    def origins(self, op):
        """Returns the operations of the loop that a result depends on, and what these read."""
        ops, variables, new = {}, {}, [op]
        while new:
            one = new.pop()
            ops[one.buffer] = one
            for cells in one.args:
                if uniform(self.program, cells) is not None:
                    continue
                b = self.owner(cells)
                if b not in self.ops:
                    variables[int(cells[0]), int(cells[-1])] = cells
                elif b not in ops:
                    new.append(self.ops[b])
        return ops, variables

    def aligned_map(self, op):
        *tests, x, y = op.args
        numbers = [self.operand(cells) for cells in (x, y)]  # 16 bits, before 32 of the aligned
        x, y = (self.aligned(number, op.buffer.bits) for number in numbers)
        size = max(x.size, y.size) + (op.name in ("Add", "Subtract"))
        return self.emit(op.name, [*map(self.whole, tests), x, y], op.buffer.bits, size)

    def product(self, op):
        x, *y = map(self.in_32, self.operands(op))
        return self.times(x, *(y or [x]))

    def times(self, x, y):
        size = x.size + y.size  # a product has two signs
        return self.emit("Multiply", [x, y], x.bits + y.bits, 31 if size <= 32 else size)

    def quotient(self, op):
        x, y = [1.0, *self.operands(op)][-2:]
        if isinstance(y, float):
            return self.times(self.in_32(x), self.in_32(1 / y))
        is_mean = op.buffer.dtype == "fixed64" and isinstance(x, Number)
        x = x if is_mean else self.in_32(x)
        y = y if y.bits == 0 else self.in_32(y)
        extra = min(max(op.buffer.bits - x.bits + y.bits, 0), 62 - min(x.size, 62))
        return self.emit("divide", [x, y, extra], extra + x.bits - y.bits, x.size + extra)

    def same_bits(self, op):
        (x,) = self.operands(op)
        return x if op.name == "Cast" else self.emit(op.name, [x], x.bits, x.size)

    def floor(self, op):
        (x,) = self.operands(op)
        shift = min(max(x.bits, 0), x.size - 1)
        return self.emit("Shift", [x, shift], x.bits - shift, x.size)

    def root(self, op):
        x = self.in_32(*self.operands(op))
        more = WIDE_BITS + x.bits % 2
        root = self.emit("root", [x, more], (x.bits + more) // 2, 32)
        if op.name == "Sqrt":
            return root
        place = min(op.buffer.bits + root.bits, 62)
        return self.emit("divide", [1, root, place], place - root.bits, 63)

    def logarithm(self, op):
        x = self.in_32(*self.operands(op))
        if op.name == "Log1p":
            whole = max(x.bits, 0)
            x = self.emit("Add", [x, 2**whole], x.bits, 33 + whole)
        values = np.log2(1 + np.arange(257) / 256)
        table = constant(self.program, values, 24, name="log2_table", dtype="int32")
        return self.emit("logarithm_by_table", [table[None], x, x.bits], 54, 62)

    # Tables

    def tabulated(self, op, ops, variable):
        """Returns a function of one variable as a table lookup."""
        b = self.owner(variable)
        if b.dtype in ("int64", "bool"):
            raise ValueError(f"The operation {op.name!r} of integers cannot be exported.")

        def function(places):
            values = {}
            for one in (one for one in self.ops.values() if one.buffer in ops):
                args = []
                for cells in one.args:
                    value = uniform(self.program, cells)
                    args.append(values.get(self.owner(cells), places) if value is None else value)
                values[one.buffer] = MAPS[one.name].numpy(*args)
            return np.broadcast_to(values[op.buffer], places.shape)

        return self.lookup(function, self.operand(variable), op, self.ranges.get(b, (0.0, 0.0)))

    def lookup(self, function, x, op, limits):
        """Returns a table lookup, in the finest grid beyond which the function is constant."""
        low, high = self.ranges.get(op.buffer, (0.0, 0.0))
        bits = fractional_bits(max(-low, high, 0.0))
        x_bits = min(x.bits, fractional_bits(max(map(abs, limits)))) if x.size > 16 else x.bits
        places = np.linspace(-32768, 32768, _SEGMENTS + 1)
        with np.errstate(all="ignore"):
            whole = np.nan_to_num(function(places / 2.0**x_bits))
            while x_bits < 12:
                edge = 2.0 ** (15 - x_bits - 1)
                ends = np.nan_to_num(function(np.array([-edge, edge])))
                outside = places / 2.0**x_bits
                low, high = whole[outside <= -edge], whole[outside >= edge]
                change = max(np.max(np.abs(low - ends[0])), np.max(np.abs(high - ends[1])))
                if change * 2.0**bits > 0.5:
                    break
                x_bits += 1
                whole = np.nan_to_num(function(places / 2.0**x_bits))
        place = self.aligned(x, x_bits)
        place = place if (place.bits, place.size) == (x.bits, 16) else self.clipped(place, 16)
        name, values = _curve(function, x_bits, bits, limits)
        table = constant(self.program, values, name=f"{op.name.lower()}_table")
        return self.emit(name, [table[None], place], bits, 16)


def _curve(function, bits, y_bits, limits):
    """Returns the C function that interpolates a table, and the table's values.

    Args:
        function: Function of one array.
        bits, y_bits: Fractional bits of the variable and of the function.
        limits: Range of the variable on representative inputs.
    """

    def values(places):
        with np.errstate(all="ignore"):
            found = np.nan_to_num(function(places)) * 2.0**y_bits
        return np.clip(np.rint(found), -32768, 32767)

    first, last = np.clip(np.rint(np.array(limits) * 2.0**bits), -32767, 32767)
    x = np.arange(first, last + 1) / 2.0**bits
    even = np.linspace(-32768, 32768, _SEGMENTS + 1) / 2.0**bits
    q = np.arange(11 * _PER_POWER + 1)
    shift = np.maximum(q // _PER_POWER - 1, 0)
    q = (q - _PER_POWER * shift) << shift
    powers = np.concatenate([-q[:0:-1], q]) / 2.0**bits
    errors = [
        np.max(np.abs(np.interp(x, places, values(places)) - values(x)), initial=0)
        for places in (even, powers)
    ]
    if errors[0] <= max(4 * errors[1], _GOOD_ENOUGH):  # smaller, and faster to read
        return "function", values(even)
    return "function_by_powers", values(powers)


_RULES = {
    **dict.fromkeys(["Add", "Subtract", "Maximum", "Minimum", "Where"], Loop.aligned_map),
    **dict.fromkeys(["Multiply", "Square"], Loop.product),
    **dict.fromkeys(["Divide", "Reciprocal"], Loop.quotient),
    **dict.fromkeys(["Negative", "Absolute", "Cast"], Loop.same_bits),
    "Floor": Loop.floor,
    **dict.fromkeys(["Sqrt", "Rsqrt"], Loop.root),
    **dict.fromkeys(["Log", "Log1p"], Loop.logarithm),
}
