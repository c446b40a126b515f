"""Prints a program as integer-only C: int8 weights, int16 values, int32 sums.

A buffer is in fixed point: q stands for q / 2**bits, with as many fractional bits as the largest
value on representative inputs allows. Each column of weights has its own scale. Functions of one
variable, such as tanh, are tables of 513 values with linear interpolation. Integers and conditions
of the program are what they are. Sums, squares of sums, and single numbers have 32 bits. Where
that is closer, a table has 32 values for each power of two, as for a function of a logarithm.
"""

import collections
import dataclasses
import math
from typing import Any

import numpy as np

from keras_streams import passes
from keras_streams.c_source import HELPERS, TYPES, Printer, Source, wrapped
from keras_streams.cells import Buffer, Op, Program, grid, pieces
from keras_streams.lower import MAPS
from keras_streams.statements import Number, Place

_SEGMENTS = 512  # in a table
_PER_POWER = 32  # segments for each power of two, in the other kind of table
_GOOD_ENOUGH = 32  # of 32767, error of a table
_SCALE_BITS = 24  # of the largest scale in a matrix
_HEADROOM = 1.25  # for inputs larger than the representative ones
_HUGE = 1e30  # larger numbers stand for infinity, and saturate
_WIDE_BITS = 30  # of a number with 32 bits
_MEAN_BITS = 46  # of a mean over all steps: the share of one among 2^30 steps counts
_FAR = 12  # below all finite values, stands for minus infinity: its exponential is 0 in 16 bits
_TABULATED = {
    *("Sigmoid", "Tanh", "Erf", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Power"),
    *("Sin", "Cos", "Divide", "Reciprocal", "Mod"),
}

_HELPERS = {name: HELPERS[name] for name in ("copy", "pick", "remainder_of", "row")} | {
    "clip16": """
/* Clips to 16 bits without INT16_MIN, which marks no output. */
static inline int16_t clip16(int64_t x)
{
    return (int16_t)(x < -32767 ? -32767 : x > 32767 ? 32767 : x);
}
""",
    "clip32": """
static inline int32_t clip32(int64_t x)
{
    return (int32_t)(x < -2147483647 ? -2147483647 : x > 2147483647 ? 2147483647 : x);
}
""",
    "clip64": """
/* Clips so that sums of two do not overflow. */
static inline int64_t clip64(int64_t x)
{
    const int64_t most = (int64_t)1 << 61;
    return x < -most ? -most : x > most ? most : x;
}
""",
    "align": """
/* x / 2^shift, rounded. */
static inline int64_t align(int64_t x, int shift)
{
    return shift > 0 ? (x + ((int64_t)1 << (shift - 1))) >> shift : x * ((int64_t)1 << -shift);
}
""",
    "shifted": """
/* x / 2^shift, rounded, for numbers of 16 bits and products of two. */
static inline int32_t shifted(int32_t x, int shift)
{
    return shift > 0 ? (x + (1 << (shift - 1))) >> shift : x * (1 << -shift);
}
""",
    "product": """
/* y = start + x w, with a scale for each of the n columns; bias and start may be NULL. */
static void product(
    int16_t *y, int n, const int16_t *start, int start_shift, const int16_t *x, int rows,
    const int8_t *w, const int32_t *bias, const int32_t *scale, int shift)
{
    for (int k = 0; k < n; k++, w += rows) {
        int32_t sum = bias ? bias[k] : 0;
        for (int i = 0; i < rows; i++)
            sum += x[i] * w[i];
        const int64_t more = start ? align(start[k], start_shift) : 0;
        y[k] = clip16((((int64_t)sum * scale[k] + ((int64_t)1 << (shift - 1))) >> shift) + more);
    }
}
""",
    "wide_product": """
/* y = start + x w, with a shift for each of the n columns. */
static void wide_product(
    int32_t *y, int n, const int32_t *start, const REAL *x, int rows,
    const int16_t *w, const int8_t *shift)
{
    for (int k = 0; k < n; k++, w += rows) {
        int64_t sum = 0;
        for (int i = 0; i < rows; i++)
            sum += (int64_t)x[i] * w[i];
        y[k] = clip32(start[k] + align(sum, shift[k]));
    }
}
""",
    "sum_products": """
/* The sums of the terms a * b, with `shift` fewer fractional bits. */
static void sum_products(
    int16_t *y, int n, int terms, const int16_t *a, int a_term, int a_step,
    const int16_t *b, int b_term, int b_step, int shift)
{
    for (int i = 0; i < n; i++) {
        int64_t sum = 0;
        for (int k = 0; k < terms; k++)
            sum += a[k * a_term + i * a_step] * b[k * b_term + i * b_step];
        y[i] = clip16(align(sum, shift));
    }
}
""",
    "function": """
/* Interpolates a function of x in a table of 513 values. */
static inline int32_t function(const int16_t *table, int32_t x)
{
    const int32_t place = x + 32768, i = place >> 7;
    return table[i] + (((table[i + 1] - table[i]) * (place & 127) + 64) >> 7);
}
""",
    "function_by_powers": """
/* Interpolates a function of x in a table of 705 values, 32 for each power of two. */
static inline int32_t function_by_powers(const int16_t *table, int32_t x)
{
    int32_t size = x < 0 ? -x : x, sign = x < 0 ? -1 : 1, shift = 0;
    while (size >> shift >= 64)
        shift++;
    const int16_t *at = table + 352 + sign * (32 * shift + (size >> shift));
    const int32_t part = size & ((1 << shift) - 1);
    return at[0] + (((at[sign] - at[0]) * part + (1 << shift >> 1)) >> shift);
}
""",
    "root": """
/* The square root of a number below 2^62, rounded down. */
static int64_t root(int64_t x)
{
    int64_t found = 0;
    for (int64_t bit = (int64_t)1 << 30; bit; bit >>= 1)
        if ((found + bit) * (found + bit) <= x)
            found += bit;
    return found;
}
""",
    "log2_of": """
/* log2 of x > 0 with 24 fractional bits, by a table of log2(1 + i / 256). */
static int32_t log2_of(const int32_t *table, int64_t x)
{
    int exponent = 0;
    for (; x >> exponent > 1; exponent++)
        ;
    x = exponent > 32 ? x >> (exponent - 32) : x << (32 - exponent);
    const int64_t part = x & 0xffffffff;
    const int32_t i = (int32_t)(part >> 24), rest = (int32_t)((part >> 8) & 65535);
    const int32_t more = (int32_t)(((int64_t)(table[i + 1] - table[i]) * rest) >> 16);
    return exponent * 16777216 + table[i] + more;
}
""",
    "divide": """
/* a / b with extra fractional bits. */
static inline int64_t divide(int64_t a, int64_t b, int bits)
{
    return b == 0 ? 0 : a * ((int64_t)1 << bits) / b;
}
""",
    "lookup": """
/* A row of a table; zeros for an index outside of it. */
static void lookup(int16_t *y, int n, int64_t index, int rows, const int16_t *table)
{
    for (int i = 0; i < n; i++)
        y[i] = index < 0 || index >= rows ? 0 : table[(int)index * n + i];
}
""",
    "expand": """
/* Numbers from the upper 8 of their 16 bits. */
static void expand(int16_t *y, int n, const int8_t *x, int stride)
{
    for (int i = 0; i < n; i++)
        y[i] = (int16_t)(x[i * stride] * 256);
}
""",
    "shorten": """
/* The upper 8 of 16 bits. */
static void shorten(int8_t *y, int n, const int16_t *x, int stride)
{
    for (int i = 0; i < n; i++) {
        const int32_t rounded = (x[i * stride] + 128) >> 8;
        y[i] = (int8_t)(rounded > 127 ? 127 : rounded);
    }
}
""",
}
_REDUCE = """
static void reduce_{name}_{X}_{Y}(
    {Y} *y, int n, int terms, const {X} *x, int term, int step, int shift)
{{
    for (int i = 0; i < n; i++) {{
        int64_t found = x[i * step];
        for (int k = 1; k < terms; k++) {{
            const int64_t next = x[k * term + i * step];
            found = {both};
        }}
        y[i] = {clip}(align(found, shift));
    }}
}}
"""
_FOLDS = {
    "sum": "found + next",
    "max": "next > found ? next : found",
    "min": "next < found ? next : found",
}


def print_fixed(
    program: Program,
    groups: list[passes.Group],
    prefix: str,
    about: Any,
    x: np.ndarray,
    small_rings: bool,
) -> Source:
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
    return _FixedPrinter(program, groups, prefix, about, x, small_rings).print()


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


_SIZES = {"int8": 16, "int16": 16, "int32": 32, "fixed64": 64}
_LIMITS = {"int8": 15, "int16": 15, "int32": _WIDE_BITS, "fixed64": _MEAN_BITS}


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


def _bits(largest, limit=15):
    """Returns the most fractional bits with which values up to `largest` fit into 16 bits.

    With a `limit` of 30, into 32 bits.
    """
    if largest == 0:
        return 15
    return min(math.floor(math.log2((2**limit - 1) / (_HEADROOM * largest))), limit + 15)


@dataclasses.dataclass(frozen=True)
class _Number:
    """An element as C: its text, its fractional bits, and how many bits it has."""

    text: str
    bits: int
    size: int = 16


class _FixedPrinter(Printer):
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
        if b.kind == "constant":
            values = np.abs(np.asarray(b.data, "float64"))
            return _bits(float(np.max(values, initial=0.0, where=values < _HUGE)))
        largest = self.largest.get(self.shared.of(b), 0.0)
        return _bits(largest, _LIMITS[b.dtype])

    def bits_in_16(self, b):
        """Returns the fractional bits of a buffer's numbers in a table."""
        return _bits(self.largest.get(self.shared.of(b), 0.0))

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
        called = self.use("function" if is_even else "function_by_powers")
        return called, self.table(table, "", f"{name}_table", "int16_t")

    # Operations

    def product(self, op):
        if op.buffer in self.wide:
            self.wide_product(op)
            return
        start, *operands = op.args
        rows, n = start.shape
        y, y_bits = self.pointer(op.buffer, 0), self.bits(op.buffer)
        name = self.use("product")
        known = self.program.values(start)
        bias = None if known is None or not np.any(known) else known
        if bias is not None and np.any(bias != bias[0]):
            bias, more = None, (self.quantized(known, y_bits, op.scope, "start"), n, 0)
        elif known is None:
            (p,) = pieces(self.program, start)
            more = self.pointer(p.buffer, p.offset), n, self.bits(p.buffer) - y_bits
        else:
            more = "NULL", 0, 0
        for i, (cells, matrix) in enumerate(zip(operands, op.matrices, strict=True)):
            parts, step = passes.rows_of(self.program, cells)
            (p,) = parts
            x_bits = self.bits(p.buffer)
            matrix = matrix.astype("float64")
            scale = np.max(np.abs(matrix), axis=0) / 127
            scale = np.maximum(scale, np.sum(np.abs(matrix), axis=0) / 2**15)
            if bias is not None:
                scale = np.maximum(scale, np.abs(bias[0]) * 2.0**x_bits / 2**29)
            scale = np.where(scale > 0, scale, 1.0)
            unit = 2.0 ** (_SCALE_BITS - math.floor(math.log2(np.max(scale))))
            shift = round(math.log2(unit)) + x_bits - y_bits
            if not 0 < shift < 63:
                raise ValueError(
                    f"The weights of {op.scope} are too large or too small for 8 bits."
                )
            w = np.rint(matrix / scale).astype("int8").T
            w = self.table(w, op.scope, "kernel", "int8_t")
            table = "NULL"
            if bias is not None and i == 0:
                rounded = np.rint(bias[0] / (scale * 2.0**-x_bits)).astype("int32")
                table = self.table(rounded, op.scope, "bias", "int32_t")
            scales = np.rint(scale * unit).astype("int32")
            scales = self.table(scales, op.scope, "scale", "int32_t")
            x = self.pointer(p.buffer, p.offset)
            text = f"{name}(%s, {n}, %s, %s, %s, {p.size}, %s, %s, %s, %s);"
            start_shift, shift = (Number(by, "shift") for by in (more[2], shift))
            pointers = (y, n), more[:2], (start_shift, 0), (x, step)
            tables = ((value, 0) for value in (w, table, scales, shift))
            self.rows_loop(op, rows, text, *pointers, *tables)
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
            w_bits = np.array([_bits(largest) for largest in np.max(np.abs(matrix), axis=0)])
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
                own = _bits(float(np.max(np.abs(values))))
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
        kinds = {"Y": TYPES[op.buffer.dtype], "X": TYPES[found.buffer.dtype]}
        if op.buffer.dtype == "int64":
            raise ValueError("A sum of integers has no integer version.")
        clip = "clip32" if op.buffer.dtype == "int32" else "clip16"
        name = f"reduce_{op.name}_{kinds['X']}_{kinds['Y']}"
        if name not in self.functions:
            self.use(clip), self.use("align")
            text = _REDUCE.strip().format(name=op.name, both=_FOLDS[op.name], clip=clip, **kinds)
            self.functions[name] = text
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
            kind, bits = (
                op.buffer.dtype,
                None if op.buffer.dtype == "int64" else self.bits(op.buffer),
            )
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
        body = _Body(self, group, mine, parameters, cut)
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
            for b in [*self.program.inputs, *(op.buffer for op in self.front)]:
                b.dtype = "bool" if b.dtype == "bool" else "float32"
            printer.taken = set(self.taken)
            printer.loop(self.front, {op.buffer: f"v{i}" for i, op in enumerate(self.front)}, 0, n)
            code += [printer.table_text(table) for table in printer.arrays]
            code += printer.functions.values()
            (statement,) = printer.statements
            of_the_step = Place("s->work", "", 0, "float")
            values = ["y" if v == of_the_step else v for v in statement.code.parts]
            lines = [f"float y[{n}];", statement.code.text % tuple(values)]
            self.front_buffer.dtype = "int16"
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


class _Body:
    """Translates a group of maps to integer statements for one element.

    Attributes:
        lines: The statements.
        outputs: Dict from name to (C type, pointer) of the results that are kept.
    """

    def __init__(self, printer, group, mine, parameters, cut):
        self.printer, self.program = printer, printer.program
        self.group, self.mine, self.parameters, self.cut = group, mine, parameters, cut
        self.lines, self.outputs, self.found = [], {}, {}
        self.ops = {op.buffer: op for op in group}
        self.variables = {}  # buffer: the operands that it depends on
        self.curved = {}  # buffer: whether a tabulated function is among its operations
        for op in group:
            depends, curved = set(), op.name in _TABULATED
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

    def store(self, op):
        b, name = op.buffer, f"y{len(self.outputs)}"
        kind = TYPES[b.dtype]
        if b.dtype in ("int64", "bool"):
            text = self.whole(op)
        elif op.name == "Where" and self.uniform(op.args[2]) != self.uniform(op.args[2]):
            # Nothing, at steps without an output.
            test, value = self.condition(op.args[0]), self.operand(op.args[1])
            text = f"{test} ? {self.clipped(self.aligned(value, self.bits(b)), b)} : INT16_MIN"
        else:
            value = self.value(op)
            text = self.aligned(value, self.bits(b))
            if value.bits != self.bits(b) or value.size != _SIZES[b.dtype]:
                text = self.clipped(text, b)
        self.outputs[name] = kind, self.printer.pointer(b, self.cut[0])
        self.lines.append(f"{name}[i] = {text};")

    def bits(self, b):
        return self.printer.bits(b)

    def clipped(self, text, b):
        return f"{self.printer.use(f'clip{_SIZES[b.dtype]}')}({text})"

    def aligned(self, number, bits):
        """Returns a number with the given fractional bits, as C that may exceed its bits."""
        if isinstance(number, float):
            limit = 2.0**_WIDE_BITS
            return str(round(min(max(number * 2.0**bits, -limit), limit)))
        shift = number.bits - bits
        if shift == 0:
            return number.text
        shift = min(shift, 62)
        name = "shifted" if number.size == 16 and -15 < shift < 31 else "align"
        return f"{self.printer.use(name)}({number.text}, {shift})"

    def local(self, text, bits, size=16):
        name = f"t{len(self.lines)}"
        self.lines.append(f"const int{max(size, 32)}_t {name} = {text};")
        return _Number(name, bits, size)

    def in_32(self, x):
        """Returns a number with at most 32 bits."""
        if x.size <= 32:
            return x
        bits = x.bits - _MEAN_BITS + _WIDE_BITS
        return self.local(f"{self.printer.use('clip32')}({self.aligned(x, bits)})", bits, 32)

    def named(self, text, bits):
        """Returns the text of an operand that is read twice."""
        return text if "(" not in text else self.local(text, bits).text

    def operand(self, cells):
        """Returns an operand as a float or a `_Number`."""
        value = self.uniform(cells)
        if value is not None:
            return 0.0 if math.isnan(value) else value
        b = self.owner(cells)
        if b in self.ops:
            return self.value(self.ops[b])
        a, stop = self.cut
        values = self.program.values(cells[a:stop])
        if values is not None:
            bits = _bits(float(np.max(np.abs(values))))
            table = self.printer.quantized(values, bits, self.group[0].scope, "constant")
            return _Number(self.printer.element(self.parameters, (table, "int16_t", 1)), bits)
        buffer, offset, stride = self.key(cells)
        key = self.printer.pointer(buffer, offset), TYPES[buffer.dtype], stride
        text = self.printer.element(self.parameters, key)
        if buffer.dtype in ("int64", "bool"):
            return _Number(f"(int32_t){text}", 0, 32)
        return _Number(text, self.bits(buffer), _SIZES[buffer.dtype])

    def whole(self, op):
        """Returns an operation on integers and conditions, or a comparison, as C."""
        if op.name == "Isnan":
            return "0"  # integers are never NaN
        if self.printer.reads_integers(op) or op.name in ("LogicalAnd", "LogicalOr", "LogicalNot"):
            texts = [self.whole_operand(cells) for cells in op.args]
            text = MAPS[op.name].c.format(*texts)
            if op.name == "Mod":
                text = f"{self.printer.use('remainder_of')}({texts[0]}, {texts[1]})"
            return text
        numbers = [self.operand(cells) for cells in op.args]
        if op.buffer.dtype != "bool" or len(numbers) != 2:
            raise ValueError(f"The operation {op.name!r} has no integer version.")
        bits = min(n.bits for n in numbers if isinstance(n, _Number))
        return MAPS[op.name].c.format(*(self.aligned(n, bits) for n in numbers))

    def whole_operand(self, cells):
        value = self.uniform(cells)
        if value is not None:
            return f"({int(value)})"
        b = self.owner(cells)
        if b in self.ops:
            if b not in self.found:
                op = self.ops[b]
                name = f"t{len(self.lines)}"
                text = self.whole(op)
                name = f"t{len(self.lines)}"
                self.lines.append(f"const {TYPES[b.dtype]} {name} = {text};")
                self.found[b] = _Number(name, 0, 32)
            return self.found[b].text
        buffer, offset, stride = self.key(cells)
        key = self.printer.pointer(buffer, offset), TYPES[buffer.dtype], stride
        return self.printer.element(self.parameters, key)

    def condition(self, cells):
        return self.whole_operand(cells)

    def value(self, op):
        """Returns an operation's result as a `_Number`."""
        b = op.buffer
        if b not in self.found:
            if b.dtype in ("int64", "bool"):
                self.whole_operand(b.cells.reshape(-1))
            else:
                self.found[b] = self.compute(op)
        return self.found[b]

    def compute(self, op):
        b, name = op.buffer, op.name
        size = _SIZES[b.dtype]
        bits = self.bits(b)
        if self.curved[b] and len(self.variables[b]) == 1 and not self.is_exact(op):
            return self.tabulated(op, self.printer.bits_in_16(b))
        if name in ("Sqrt", "Rsqrt", "Log", "Log1p"):
            return getattr(self, name.lower())(self.operand(op.args[0]), bits, b)
        if name in _TABULATED - {"Divide", "Reciprocal", "Mod", "Power"}:
            x, limits = self.operand(op.args[0]), self.range_of(self.owner(op.args[0]))
            bits = self.printer.bits_in_16(b)
            return self.lookup(MAPS[name].numpy, x, bits, name, limits)
        numbers = [self.operand(cells) for cells in op.args[name == "Where" :]]
        align = self.aligned
        if name == "Divide" and isinstance(numbers[1], float):
            name, numbers[1] = "Multiply", 1 / numbers[1]
        if name in ("Multiply", "Square"):
            x, y = numbers if name == "Multiply" else numbers * 2
            if isinstance(x, float):
                x, y = y, x
            if isinstance(y, float):
                y_bits = _bits(abs(y))
                y = _Number(f"({round(y * 2.0**y_bits)})", y_bits)
            x, y = self.in_32(x), self.in_32(y)
            shift = x.bits + y.bits - bits
            if max(x.size, y.size, size) > 16 or not 0 <= shift < 31:
                text = f"{self.printer.use('align')}((int64_t){x.text} * {y.text}, {shift})"
            else:
                text = f"{self.printer.use('shifted')}({x.text} * {y.text}, {shift})"
        elif name in ("Divide", "Reciprocal"):
            x, y = numbers if name == "Divide" else (1.0, numbers[0])
            if isinstance(x, float):
                x_bits = _bits(abs(x))
                x = _Number(f"({round(x * 2.0**x_bits)})", x_bits)
            x, y = x if size == 64 else self.in_32(x), self.in_32(y)
            extra = min(max(bits - x.bits + y.bits, 0), 62 - min(x.size, 62))
            bits = extra + x.bits - y.bits
            text = f"{self.printer.use('divide')}({x.text}, {y.text}, {extra})"
        elif name in ("Add", "Subtract"):
            sign = "+" if name == "Add" else "-"
            text = f"{align(numbers[0], bits)} {sign} {align(numbers[1], bits)}"
        elif name in ("Maximum", "Minimum"):
            text = MAPS[name].c.format(*(self.named(align(n, bits), bits) for n in numbers))
        elif name == "Where":
            test = self.condition(op.args[0])
            text = f"{test} ? {align(numbers[0], bits)} : {align(numbers[1], bits)}"
        elif name == "Negative":
            text = f"-{align(numbers[0], bits)}"
        elif name == "Absolute":
            inner = self.named(align(numbers[0], bits), bits)
            text = f"{inner} < 0 ? -{inner} : {inner}"
        elif name == "Floor":
            x = numbers[0]
            text = f"({x.text} >> {x.bits}) * (1 << {x.bits})" if x.bits > 0 else x.text
            text = align(_Number(f"({text})", x.bits, x.size), bits)
        elif name == "Cast":
            is_whole = self.owner(op.args[0]).dtype in ("int64", "bool")
            x = self.whole_operand(op.args[0]) if is_whole else self.operand(op.args[0])
            text = align(_Number(x, 0, 64) if is_whole else x, bits)
        else:
            raise ValueError(
                f"The operation {name!r} has no integer version. Export without `quantization`."
            )
        return self.local(self.clipped(text, b), bits, size)

    def is_exact(self, op):
        """Returns whether an operation has a better version than a table."""
        if op.name in ("Sqrt", "Rsqrt", "Log", "Log1p", "Divide", "Reciprocal"):
            return True
        chain = [op]
        while chain:
            one = chain.pop()
            if one.buffer.dtype in ("int32", "int64", "bool"):
                return True
            for cells in one.args:
                b = self.owner(cells) if self.uniform(cells) is None else None
                if b in self.ops:
                    chain.append(self.ops[b])
        return False

    def tabulated(self, op, bits):
        """Returns a function of one variable as a table lookup."""
        ((buffer, offset, stride),) = self.variables[op.buffer]
        if buffer.dtype in ("int64", "bool"):
            raise ValueError(f"The operation {op.name!r} of integers has no integer version.")
        key = self.printer.pointer(buffer, offset), TYPES[buffer.dtype], stride
        text = self.printer.element(self.parameters, key)
        x = _Number(text, self.bits(buffer), _SIZES[buffer.dtype])

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

        return self.lookup(function, x, bits, op.name, self.range_of(buffer))

    def range_of(self, b):
        return self.printer.ranges.get(self.printer.shared.of(b), (0.0, 0.0))

    def lookup(self, function, x, bits, name, limits):
        """Returns a table lookup, in the finest grid beyond which the function is constant."""
        x_bits = x.bits if x.size == 16 else min(x.bits, _bits(self.largest_of(x)))
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
        called, table = self.printer.curve(function, x_bits, bits, *limits, name.lower())
        text = f"{self.printer.use('clip16')}({self.aligned(x, x_bits)})"
        return self.local(f"{called}({table}, {text})", bits)

    def largest_of(self, x):
        return 2.0 ** (_WIDE_BITS - x.bits)

    def sqrt(self, x, bits, b):
        more = 30 + x.bits % 2
        text = self.rooted(x, more)
        text = f"{self.printer.use('align')}({text}, {(x.bits + more) // 2 - bits})"
        return self.local(self.clipped(text, b), bits, _SIZES[b.dtype])

    def rsqrt(self, x, bits, b):
        more = 30 + x.bits % 2
        root_bits = (x.bits + more) // 2
        place = min(bits + root_bits, 62)
        text = f"{self.printer.use('divide')}(1, {self.rooted(x, more)}, {place})"
        text = self.aligned(_Number(text, place - root_bits, 64), bits)
        return self.local(self.clipped(text, b), bits, _SIZES[b.dtype])

    def rooted(self, x, more):
        text = f"(int64_t)({x.text} < 0 ? 0 : {x.text}) * ((int64_t)1 << {more})"
        return f"{self.printer.use('root')}({text})"

    def log1p(self, x, bits, b):
        more = _Number(f"({x.text} + (int64_t){2 ** max(x.bits, 0)})", x.bits, 32)
        return self.log(more, bits, b)

    def log(self, x, bits, b):
        table = self.printer.quantized(
            np.log2(1 + np.arange(257) / 256), 24, "", "log2_table", "int32_t"
        )
        found = f"{self.printer.use('log2_of')}({table}, {x.text} < 1 ? 1 : {x.text})"
        text = f"({found} - {x.bits} * (int64_t)16777216) * {round(math.log(2) * 2**30)}"
        text = f"{self.printer.use('align')}({text}, {54 - bits})"
        return self.local(self.clipped(text, b), bits, _SIZES[b.dtype])
