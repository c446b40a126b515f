"""Maps of fixed-point numbers: the C statements for one element of a loop."""

import dataclasses
import math

import numpy as np

from keras_streams.c_source import TYPES
from keras_streams.cells import pieces
from keras_streams.lower import MAPS

SIZES = {"int8": 16, "int16": 16, "int32": 32, "fixed64": 64}  # bits of an element, by dtype
WIDE_BITS = 30  # of a number with 32 bits
MEAN_BITS = 46  # of a mean over all steps: the share of one among 2^30 steps counts
_SEGMENTS = 512  # in a table
_PER_POWER = 32  # segments for each power of two, in the other kind of table
_GOOD_ENOUGH = 32  # of 32767, error of a table
_HEADROOM = 1.25  # for inputs larger than the representative ones
_CURVES = {  # functions that are tables
    *("Sigmoid", "Tanh", "Erf", "Exp", "Expm1", "Sin", "Cos", "Power", "Mod"),
}
_EXACT = {"Sqrt", "Rsqrt", "Log", "Log1p", "Divide", "Reciprocal"}  # that are not


def fractional_bits(largest: float, limit: int = 15) -> int:
    """Returns the most fractional bits with which values up to `largest` fit into 16 bits.

    With a `limit` of 30, into 32 bits.
    """
    if largest == 0:
        return 15
    return min(math.floor(math.log2((2**limit - 1) / (_HEADROOM * largest))), limit + 15)


@dataclasses.dataclass(frozen=True)
class Number:
    """An element as C.

    Attributes:
        text: Expression.
        bits: Number of fractional bits.
        size: Number of bits, with the sign, that its values need.
        long: Whether its type is `int64_t`, not `int32_t`.
    """

    text: str
    bits: int
    size: int = 16
    long: bool = False


class Body:
    """Translates a group of maps to integer statements for one element.

    Attributes:
        lines: The statements.
        outputs: Dict from name to (C type, pointer) of the results that are kept.
    """

    def __init__(self, printer, group, parameters, cut):
        self.printer, self.program, self.bits = printer, printer.program, printer.bits
        self.scope, self.parameters, self.cut = group[0].scope, parameters, cut
        self.lines, self.outputs, self.found = [], {}, {}
        self.ops = {op.buffer: op for op in group}
        self.variables = {}  # buffer: the operands that it depends on
        self.curved = {}  # buffer: whether a tabulated function is among its operations
        for op in group:
            depends, curved = set(), op.name in _CURVES | _EXACT
            if op.name == "Divide":
                curved = self.uniform(op.args[1]) is None
            for cells in op.args:
                if self.uniform(cells) is not None:
                    continue
                b = self.owner(cells)
                depends |= self.variables[b] if b in self.ops else {self.key(cells)}
                curved |= b in self.ops and self.curved[b]
            self.variables[op.buffer], self.curved[op.buffer] = depends, curved
        for op in group:
            if op.buffer in printer.kept:
                self.store(op)

    # Operands

    def owner(self, cells):
        return self.program.owner(int(cells[self.cut[0]]))

    def key(self, cells):
        a, b = self.cut
        (p,) = pieces(self.program, cells[a:b])
        return p.buffer, p.offset, p.stride if b - a > 1 else 0

    def uniform(self, cells):
        """Returns the value of a constant operand, or None."""
        values = self.program.values(cells[self.cut[0] : self.cut[1]])
        same = values is not None and (np.all(values == values[0]) or np.all(np.isnan(values)))
        return float(values[0]) if same else None

    def element_text(self, buffer, offset, stride):
        """Returns an element of a buffer as C."""
        key = self.printer.pointer(buffer, offset), TYPES[buffer.dtype], stride
        return self.printer.element(self.parameters, key)

    def element_of(self, buffer, offset, stride):
        """Returns an element of a buffer as a `Number`."""
        text = self.element_text(buffer, offset, stride)
        if buffer.dtype in ("int64", "bool"):
            return Number(f"(int64_t){text}", 0, 64, True)
        size = SIZES[buffer.dtype]
        return Number(text, self.bits(buffer), size, size > 32)

    def operand(self, cells):
        """Returns an operand as a float or a `Number`."""
        value = self.uniform(cells)
        if value is not None:
            return 0.0 if math.isnan(value) else value
        b = self.owner(cells)
        if b in self.ops:
            return self.value(self.ops[b])
        values = self.program.values(cells[self.cut[0] : self.cut[1]])
        if values is not None:
            bits = fractional_bits(float(np.max(np.abs(values))))
            table = self.printer.quantized(values, bits, self.scope, "constant")
            text = self.printer.element(self.parameters, (table, "int16_t", 1))
            return Number(text, bits)
        return self.element_of(*self.key(cells))

    def numbers(self, op):
        """Returns the operands, at least one of them variable, with constants as `Number`s."""
        found = [self.operand(cells) for cells in op.args]
        return [
            self.aligned(x, fractional_bits(abs(x))) if isinstance(x, float) else x for x in found
        ]

    def in_32(self, x):
        """Returns a number with at most 32 bits."""
        if x.size <= 32:
            return x
        return self.fitted(x, x.bits - (MEAN_BITS - WIDE_BITS if x.bits > 0 else 0), 32)

    def named(self, x):
        """Returns a number that is read twice."""
        return x if "(" not in x.text else self.local(x)

    def local(self, x):
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {'int64_t' if x.long else 'int32_t'} {name} = {x.text};")
        return dataclasses.replace(x, text=name)

    # Fractional bits

    def aligned(self, x, bits):
        """Returns a number with the given fractional bits, which may need more bits."""
        if isinstance(x, float):
            limit = 2.0**WIDE_BITS
            value = round(min(max(x * 2.0**bits, -limit), limit))
            return Number(f"({value})" if value < 0 else str(value), bits, value.bit_length() + 1)
        shift = max(min(x.bits - bits, 62), -62)
        if shift == 0:
            return dataclasses.replace(x, bits=bits)
        size = x.size - shift if shift < 0 else max(x.size - shift + 1, 2)
        if max(size, x.size) <= 31 and shift < 31:
            return Number(f"{self.printer.use('shifted')}({x.text}, {shift})", bits, size)
        if size > 62:
            return Number(f"{self.printer.use('raised')}({x.text}, {-shift})", bits, 62, True)
        return Number(f"{self.printer.use('align')}({x.text}, {shift})", bits, size, True)

    def clipped(self, x, size):
        name = f"clip{size}" + ("_long" if size == 16 and x.long else "")
        return Number(f"{self.printer.use(name)}({x.text})", x.bits, size, size > 32)

    def fitted(self, x, bits, size):
        """Returns a number with the given fractional bits that fits into `size` bits."""
        return self.local(self.clipped(self.aligned(x, bits), size))

    def store(self, op):
        """Adds the statement that keeps a result."""
        b, name = op.buffer, f"y{len(self.outputs)}"
        if b.dtype in ("int64", "bool"):
            text = self.whole(op)
        elif op.name == "Where" and self.uniform(op.args[2]) != self.uniform(op.args[2]):
            # Nothing, at steps without an output.
            value = self.clipped(self.aligned(self.operand(op.args[1]), self.bits(b)), 16)
            text = f"{self.whole_operand(op.args[0])} ? {value.text} : INT16_MIN"
        else:
            value, size = self.value(op), SIZES[b.dtype]
            is_fit = (value.bits, value.size) == (self.bits(b), size)
            text = (value if is_fit else self.clipped(self.aligned(value, self.bits(b)), size)).text
        self.outputs[name] = TYPES[b.dtype], self.printer.pointer(b, self.cut[0])
        self.lines.append(f"{name}[i] = {text};")

    # Integers and conditions

    def whole(self, op):
        """Returns an operation on integers and conditions, or a comparison, as C."""
        if op.name == "Isnan":
            return "0"  # integers are never NaN
        if self.printer.reads_integers(op) or op.name in ("LogicalAnd", "LogicalOr", "LogicalNot"):
            texts = [self.whole_operand(cells) for cells in op.args]
            if op.name == "Mod":
                return f"{self.printer.use('remainder_of')}({texts[0]}, {texts[1]})"
            return MAPS[op.name].c.format(*texts)
        numbers = [self.operand(cells) for cells in op.args]
        if op.buffer.dtype != "bool" or len(numbers) != 2:
            raise ValueError(f"The operation {op.name!r} has no integer version.")
        bits = min(n.bits for n in numbers if isinstance(n, Number))
        return MAPS[op.name].c.format(*(self.aligned(n, bits).text for n in numbers))

    def whole_operand(self, cells):
        value = self.uniform(cells)
        if value is not None:
            return f"({int(value)})"
        b = self.owner(cells)
        if b not in self.ops:
            return self.element_text(*self.key(cells))
        if b not in self.found:
            text = self.whole(self.ops[b])
            name = f"t{len(self.lines)}"
            self.lines.append(f"const {TYPES[b.dtype]} {name} = {text};")
            self.found[b] = Number(name, 0, 64, True)
        return self.found[b].text

    # Operations

    def value(self, op):
        """Returns an operation's result as a `Number`."""
        b = op.buffer
        if b.dtype in ("int64", "bool"):
            self.whole_operand(b.cells.reshape(-1))
        elif b not in self.found:
            self.found[b] = self.compute(op)
        return self.found[b]

    def compute(self, op):
        b = op.buffer
        if self.curved[b] and len(self.variables[b]) == 1 and not self.is_exact(op):
            return self.tabulated(op)
        if op.name in _CURVES:
            x, *more = (self.operand(cells) for cells in op.args)
            if all(isinstance(y, float) for y in more):
                limits = self.printer.range_of(self.owner(op.args[0]))
                return self.lookup(lambda x: MAPS[op.name].numpy(x, *more), x, op, limits)
        method = getattr(self, op.name.lower(), None)
        if method is None or op.name in _CURVES:
            raise ValueError(
                f"The operation {op.name!r} has no integer version. Export without `quantization`."
            )
        return self.fitted(method(op, self.bits(b)), self.bits(b), SIZES[b.dtype])

    def add(self, op, bits):
        x, y = (self.aligned(self.operand(cells), bits) for cells in op.args)
        size, sign = max(x.size, y.size) + 1, "+" if op.name == "Add" else "-"
        cast = "(int64_t)" if size > 32 else ""
        return Number(f"{cast}{x.text} {sign} {y.text}", bits, size, x.long or y.long or size > 32)

    subtract = add

    def multiply(self, op, bits):
        x, y = map(self.in_32, self.numbers(op))
        return self.times(x, y)

    def square(self, op, bits):
        x = self.named(self.in_32(self.operand(op.args[0])))
        return self.times(x, x)

    def times(self, x, y):
        is_short = x.size + y.size <= 32 and not (x.long or y.long)
        size = 31 if is_short else x.size + y.size  # a product has two signs
        cast = "" if is_short else "(int64_t)"
        return Number(f"{cast}{x.text} * {y.text}", x.bits + y.bits, size, not is_short)

    def divide(self, op, bits):
        x, y = self.operand(op.args[0]), self.operand(op.args[1])
        if isinstance(y, float):
            return self.times(self.in_32(x), self.aligned(1 / y, fractional_bits(abs(1 / y))))
        return self.quotient(x, y, bits, SIZES[op.buffer.dtype])

    def reciprocal(self, op, bits):
        return self.quotient(1.0, self.operand(op.args[0]), bits, SIZES[op.buffer.dtype])

    def quotient(self, x, y, bits, size):
        if isinstance(x, float):
            x = self.aligned(x, fractional_bits(abs(x)))
        x = x if size == 64 else self.in_32(x)
        y = y if y.bits == 0 else self.in_32(y)
        extra = min(max(bits - x.bits + y.bits, 0), 62 - min(x.size, 62))
        text = f"{self.printer.use('divide')}({x.text}, {y.text}, {extra})"
        return Number(text, extra + x.bits - y.bits, x.size + extra, True)

    def maximum(self, op, bits):
        x, y = (self.named(self.aligned(self.operand(cells), bits)) for cells in op.args)
        text = MAPS[op.name].c.format(x.text, y.text)
        return Number(text, bits, max(x.size, y.size), x.long or y.long)

    minimum = maximum

    def where(self, op, bits):
        test = self.whole_operand(op.args[0])
        x, y = (self.aligned(self.operand(cells), bits) for cells in op.args[1:])
        text = f"{test} ? {x.text} : {y.text}"
        return Number(text, bits, max(x.size, y.size), x.long or y.long)

    def negative(self, op, bits):
        x = self.operand(op.args[0])
        return dataclasses.replace(x, text=f"-{self.named(x).text}")

    def absolute(self, op, bits):
        x = self.named(self.operand(op.args[0]))
        return dataclasses.replace(x, text=f"{x.text} < 0 ? -{x.text} : {x.text}")

    def floor(self, op, bits):
        x = self.operand(op.args[0])
        shift = min(max(x.bits, 0), x.size - 1)
        return dataclasses.replace(x, text=f"({x.text} >> {shift})", bits=x.bits - shift)

    def cast(self, op, bits):
        return self.operand(op.args[0])

    def sqrt(self, op, bits):
        return self.root_of(self.in_32(self.operand(op.args[0])))

    def rsqrt(self, op, bits):
        root = self.root_of(self.in_32(self.operand(op.args[0])))
        place = min(bits + root.bits, 62)
        text = f"{self.printer.use('divide')}(1, {root.text}, {place})"
        return Number(text, place - root.bits, 63, True)

    def root_of(self, x):
        more = WIDE_BITS + x.bits % 2
        text = f"(int64_t)({x.text} < 0 ? 0 : {x.text}) * ((int64_t)1 << {more})"
        return Number(f"{self.printer.use('root')}({text})", (x.bits + more) // 2, 32, True)

    def log(self, op, bits):
        return self.logarithm(self.in_32(self.operand(op.args[0])))

    def log1p(self, op, bits):
        x = self.in_32(self.operand(op.args[0]))
        text = f"{x.text} + (int64_t){2 ** max(x.bits, 0)}"
        return self.logarithm(self.local(Number(text, x.bits, 33 + max(x.bits, 0), True)))

    def logarithm(self, x):
        table = self.printer.quantized(
            np.log2(1 + np.arange(257) / 256), 24, "", "log2_table", "int32_t"
        )
        found = f"{self.printer.use('log2_of')}({table}, {x.text} < 1 ? 1 : {x.text})"
        text = f"({found} - {x.bits} * (int64_t)16777216) * {round(math.log(2) * 2**30)}"
        return Number(text, 54, 62, True)

    # Tables

    def is_exact(self, op):
        """Returns whether an operation has a better version than a table."""
        if op.name in _EXACT:
            return True
        chain = [op]
        while chain:
            one = chain.pop()
            if one.buffer.dtype in ("int32", "int64", "fixed64", "bool"):
                return True
            for cells in one.args:
                b = self.owner(cells) if self.uniform(cells) is None else None
                if b in self.ops:
                    chain.append(self.ops[b])
        return False

    def tabulated(self, op):
        """Returns a function of one variable as a table lookup."""
        ((buffer, offset, stride),) = self.variables[op.buffer]
        if buffer.dtype in ("int64", "bool"):
            raise ValueError(f"The operation {op.name!r} of integers has no integer version.")

        def function(places):
            values = {}

            def value(cells):
                known = self.uniform(cells)
                if known is not None:
                    return known
                b = self.owner(cells)
                if b not in self.ops:
                    return places
                if b not in values:
                    one = self.ops[b]
                    values[b] = MAPS[one.name].numpy(*map(value, one.args))
                return values[b]

            return np.broadcast_to(value(op.buffer.cells.reshape(-1)), places.shape)

        x = self.element_of(buffer, offset, stride)
        return self.lookup(function, x, op, self.printer.range_of(buffer))

    def lookup(self, function, x, op, limits):
        """Returns a table lookup, in the finest grid beyond which the function is constant."""
        bits, name = fractional_bits(self.printer.largest_of(op.buffer)), op.name.lower()
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
        helper, table = self.curve(function, x_bits, bits, *limits, name)
        place = self.aligned(x, x_bits)
        place = place if (place.bits, place.size) == (x.bits, 16) else self.clipped(place, 16)
        return self.local(Number(f"{helper}({table}, {place.text})", bits))

    def curve(self, function, bits, y_bits, low, high, name):
        """Returns the function that interpolates a table, and the table's name.

        Args:
            function: Function of one array.
            bits, y_bits: Fractional bits of the variable and of the function.
            low, high: Range of the variable on representative inputs.
            name: Name of the function.
        """

        def values(places):
            with np.errstate(all="ignore"):
                found = np.nan_to_num(function(places)) * 2.0**y_bits
            return np.clip(np.rint(found), -32768, 32767)

        ends = (int(np.clip(np.rint(end * 2.0**bits), -32767, 32767)) for end in (low, high))
        first, last = ends
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
        # A table of powers is larger, and slower to read.
        is_even = errors[0] <= max(4 * errors[1], _GOOD_ENOUGH)
        table = values(even if is_even else powers).astype("int16")
        called = self.printer.use("function" if is_even else "function_by_powers")
        return called, self.printer.table(table, "", f"{name}_table", "int16_t")
