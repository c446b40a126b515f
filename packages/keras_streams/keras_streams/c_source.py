"""Prints a program as C99: tables of weights, a function for each kind of operation, and a step."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_streams import passes
from keras_streams.cells import Buffer, Op, Program, grid, pieces, taps
from keras_streams.lower import MAPS

TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "bool": "int"}
TYPES |= {name: f"{name}_t" for name in ("int8", "int16", "int32")}
TYPES["fixed64"] = "int64_t"
_BYTES = {"float": 4, "double": 8, "int64_t": 8, "int": 4, "int8_t": 1, "int16_t": 2, "int32_t": 4}
_MATH = "fabs sqrt expm1 log log1p pow erf sin cos floor ceil rint exp tanh fmod".split()

HELPERS = {
    "row": """
/* The place of a row in a ring. */
static inline int row(int i, int rows) { return i < rows ? i : i - rows; }
""",
    "power": """
/* e^x - less for |x| < 88, without branches, so that loops vectorize. */
static inline float power(float x, float less)
{
    union { float f; uint32_t i; } two;
    const float bounded = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    const float shifted = bounded * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    const float p =
        ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r
          + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    two.f = shifted;
    two.i = (two.i - 0x4b400000u + 127u) << 23;
    return (p * r * r + r) * two.f + (two.f - less);
}
""",
    "exponential": """
static inline float exponential(float x)
{
    return x > 88.72f ? INFINITY : x < -87.0f ? 0.0f : power(x, 0.0f);
}
""",
    "exponential_minus_1": """
static inline float exponential_minus_1(float x)
{
    return x > 88.72f ? INFINITY : power(x, 1.0f);
}
""",
    "sigmoid": "static inline float sigmoid(float x) { return 1.0f / (1.0f + power(-x, 0.0f)); }",
    "hyperbolic": """
/* tanh(x): a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel. */
static inline float hyperbolic(float x)
{
    const float z = x * x, far = 1.0f - 2.0f / (power(2.0f * x, 0.0f) + 1.0f);
    const float near =
        ((((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z
          + 1.33314422036e-1f) * z - 3.33332819422e-1f) * z * x + x;
    return z < 0.390625f ? near : far;
}
""",
    "logarithm": """
static inline float logarithm(float x)
{
    union { float f; uint32_t i; } m;
    m.f = x < 1.17549435e-38f ? x * 8388608.0f : x;
    const float scale = x < 1.17549435e-38f ? -149.0f : -126.0f;
    float e = (float)(int)(m.i >> 23) + scale;
    m.i = (m.i & 0x007fffffu) | 0x3f000000u;
    const int low = m.f < 0.707106781f;
    e = low ? e - 1.0f : e;
    const float z = low ? m.f + m.f - 1.0f : m.f - 1.0f, z2 = z * z;
    float p =
        ((((((((7.0376836292e-2f * z - 1.1514610310e-1f) * z + 1.1676998740e-1f) * z
               - 1.2420140846e-1f) * z + 1.4249322787e-1f) * z - 1.6668057665e-1f) * z
            + 2.0000714765e-1f) * z - 2.4999993993e-1f) * z + 3.3333331174e-1f) * z * z2;
    p = (p - 2.12194440e-4f * e - 0.5f * z2) + z + 0.693359375f * e;
    p = x < INFINITY ? p : x;
    return x > 0.0f ? p : x == 0.0f ? -INFINITY : NAN;
}
""",
    "logarithm_of_1_plus": """
static inline float logarithm_of_1_plus(float x)
{
    const float y = 1.0f + x, d = y - 1.0f, z = logarithm(y);
    return d == 0.0f ? x : y < INFINITY ? z * (x / d) : z;
}
""",
    "modulo": """
/* The remainder with the sign of b. */
static inline REAL modulo(REAL a, REAL b)
{
    const REAL r = fmodf(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
""",
    "remainder_of": """
/* The remainder with the sign of b. */
static inline int64_t remainder_of(int64_t a, int64_t b)
{
    const int64_t r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
""",
    "copy": """
static void copy(REAL *y, int n, const REAL *x, int stride)
{
    for (int i = 0; i < n; i++)
        y[i] = x[i * stride];
}
""",
    "pick": """
static void pick(REAL *y, int n, const REAL *x, const int *places)
{
    for (int i = 0; i < n; i++)
        y[i] = x[places[i]];
}
""",
    "lookup": """
/* A row of a table, NAN for an index outside of it. */
static void lookup(REAL *y, int n, int64_t index, int rows, const REAL *table)
{
    for (int i = 0; i < n; i++)
        y[i] = index < 0 || index >= rows ? NAN : table[(int)index * n + i];
}
""",
    "lookup_in_columns": """
/* A column of a matrix in blocks of columns, NAN for an index outside of it. */
static void lookup_in_columns(REAL *y, int n, int64_t index, int columns, const REAL *w, int width)
{
    const int is_inside = index >= 0 && index < columns, at = is_inside ? (int)index : 0;
    const int first = at - at % width, rest = columns - first, size = rest < width ? rest : width;
    for (int i = 0; i < n; i++)
        y[i] = is_inside ? w[first * n + i * size + at - first] : NAN;
}
""",
    "add_products": """
/* y += the sum of the terms a * b. */
static void add_products(
    REAL *restrict y, int n, int terms,
    const REAL *a, int a_term, int a_step, const REAL *b, int b_term, int b_step)
{
    for (int k = 0; k < terms; k++, a += a_term, b += b_term)
        for (int i = 0; i < n; i++)
            y[i] += a[i * a_step] * b[i * b_step];
}
""",
}
_NEEDS = {
    "logarithm_of_1_plus": ["logarithm"],
    "exponential": ["power"],
    "exponential_minus_1": ["power"],
    "sigmoid": ["power"],
    "hyperbolic": ["power"],
}
# With a count, rounding errors are computed as differences that algebra would set to 0.
_EXACT = """\
#if defined __FAST_MATH__ || defined __ASSOCIATIVE_MATH__ || defined _M_FP_FAST
#error "A mean over all steps cannot be compiled with -ffast-math or /fp:fast."
#endif"""
_IN_DOUBLE = {  # float64 has the functions of the C library
    "logarithm": "static inline double logarithm(double x) { return log(x); }",
    "logarithm_of_1_plus": "static inline double logarithm_of_1_plus(double x) {return log1p(x);}",
    "exponential": "static inline double exponential(double x) { return exp(x); }",
    "exponential_minus_1": "static inline double exponential_minus_1(double x) {return expm1(x);}",
    "sigmoid": "static inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }",
    "hyperbolic": "static inline double hyperbolic(double x) { return tanh(x); }",
}
_FUNCTIONS = (
    *("exponential_minus_1", "exponential", "sigmoid", "hyperbolic"),
    *("logarithm_of_1_plus", "logarithm", "modulo", "remainder_of"),
)
_PRODUCT = """
/* y = start + x w; a start of NULL means zeros. */
static void product_{n}({T} *y, const {T} *start, const {T} *x, const {T} *w, int rows)
{{
    {T} sum[{n}] = {{0}};
    if (start)
        memcpy(sum, start, sizeof sum);
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < {n}; k++)
            sum[k] += x[i] * w[i * {n} + k];
    memcpy(y, sum, sizeof sum);
}}
"""
_WIDE_PRODUCT = """
/* y = start + x w, with a w in blocks of {width} columns. */
static void product_{n}({T} *y, const {T} *start, const {T} *x, const {T} *w, int rows)
{{
    for (int k = 0; k < {whole}; k += {width})
        product_{width}(y + k, start ? start + k : NULL, x, w + k * rows, rows);
{rest}}}
"""
_WIDE_REST = "    product_{n}(y + {at}, start ? start + {at} : NULL, x, w + {at} * rows, rows);\n"
_WIDE_CONVOLUTION = """
/* As convolution_{width}, with a w in blocks of {width} columns. */
static void convolution_{n}(
    {T} *y, const {T} *start, const {T} *ring, int first, int step, int taps, int rows, int width,
    const {T} *z, const {T} *w, int inputs)
{{
    const int all = (taps + (z != NULL)) * inputs;
    for (int k = 0; k < {whole}; k += {width})
        convolution_{width}(
            y + k, start ? start + k : NULL, ring, first, step, taps, rows, width, z,
            w + k * all, inputs);
{rest}}}
"""
_WIDE_CONVOLUTION_REST = """
    convolution_{n}(
        y + {at}, start ? start + {at} : NULL, ring, first, step, taps, rows, width, z,
        w + {at} * all, inputs);
"""
_CONVOLUTION = """
/* y = start + x w, where x consists of rows of a ring, `step` apart, and of z unless it is NULL. */
static void convolution_{n}(
    {T} *y, const {T} *start, const {T} *ring, int first, int step, int taps, int rows, int width,
    const {T} *z, const {T} *w, int inputs)
{{
    {T} sum[{n}] = {{0}};
    if (start)
        memcpy(sum, start, sizeof sum);
    for (int t = 0; t < taps + (z != NULL); t++, w += inputs * {n}) {{
        const {T} *x = t < taps ? ring + row(first + t * step, rows) * width : z;
        for (int i = 0; i < inputs; i++)
            for (int k = 0; k < {n}; k++)
                sum[k] += x[i] * w[i * {n} + k];
    }}
    memcpy(y, sum, sizeof sum);
}}
"""
_PRODUCTS = "product", _PRODUCT, _WIDE_PRODUCT, _WIDE_REST
_CONVOLUTIONS = "convolution", _CONVOLUTION, _WIDE_CONVOLUTION, _WIDE_CONVOLUTION_REST
_FOLDS = {  # first value, and step
    "sum": ("0", "{0} + {1}"),
    "prod": ("1", "{0} * {1}"),
    "max": ("-INFINITY", "{0} < {1} || {1} != {1} ? {1} : {0}"),
    "min": ("INFINITY", "{1} < {0} || {1} != {1} ? {1} : {0}"),
}
_REDUCE = """
/* The {name} of n numbers, in eight parts that vectorize. */
static {T} reduce_{name}({T} first, const {T} *x, int n, int stride)
{{
    {T} part[8] = {{{starts}}};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++)
            part[k] = {each};
    for (; i < n; i++)
        part[0] = {rest};
    for (i = 0; i < 8; i++)
        first = {both};
    return first;
}}
"""
_FOLD = """
/* The {name} of y and x, element by element. */
static void fold_{name}({T} *restrict y, int n, int terms, const {T} *x, int term, int step)
{{
    for (int k = 0; k < terms; k++, x += term)
        for (int i = 0; i < n; i++)
            y[i] = {both};
}}
"""


@dataclasses.dataclass(frozen=True)
class Source:
    """A program as C.

    Attributes:
        prefix: Prefix of the public names.
        comment: Description of the model, the first lines of `prefix.h`.
        header, code: Contents of `prefix.h` and `prefix.c`.
        real: `"float"` or `"double"`, or `"int16_t"` for integer-only C.
        names: Names of the outputs; may be empty.
        takes_token: Whether the input is a token id.
        inputs, outputs: Numbers of channels, or with `takes_token` the vocabulary size.
        state_bytes, weight_bytes: Sizes of the state and of all weights.
        stack_bytes: Size of all arrays on the stack during a step.
        is_unconditional: Whether all steps do the same work.
        weights: Content of `prefix.bin`, the weights if they are not in the code.
    """

    prefix: str
    comment: str
    header: str
    code: str
    real: str
    names: list[str]
    takes_token: bool
    inputs: int
    outputs: int
    state_bytes: int
    weight_bytes: int
    stack_bytes: int
    is_unconditional: bool = True
    weights: bytes | None = None


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement of C: a text with %s for pointers and numbers."""

    text: str
    values: tuple[Any, ...]
    scope: str
    guard: frozenset[int]

    def __str__(self):
        return self.text % self.values


def print_c(
    program: Program,
    groups: list[passes.Group],
    prefix: str,
    real: str,
    about: Any,
    in_file: bool = False,
) -> Source:
    """Prints a program.

    Args:
        program: `Program`.
        groups: Its operations, from `passes.optimize`.
        prefix: Prefix of the public names, a C identifier.
        real: `"float"` or `"double"`.
        about: Object with `inputs`, `takes_token`, `names`, `delay` and `rate` of the stream.
        in_file: Boolean, whether the weights are in a file of their own. Defaults to `False`.
    """
    printer = Printer(program, groups, prefix, real, about)
    printer.in_file = in_file
    return printer.print()


class Printer:
    """Prints a program that computes in one type.

    Args:
        program, groups, prefix, real, about: As in `print_c`.
    """

    helpers, needs = HELPERS, _NEEDS
    nothing = "NAN"  # outputs at steps without an output
    is_real = True  # whether numbers are floating-point ones
    in_file = False  # whether `weights`, an argument of reset, has all tables of the real type

    def __init__(
        self,
        program: Program,
        groups: list[passes.Group],
        prefix: str,
        real: str,
        about: Any,
    ) -> None:
        self.program, self.groups, self.about = program, groups, about
        self.prefix, self.real = prefix, real
        self.tables: dict[tuple, str] = {}  # content: name
        self.arrays: dict[str, tuple] = {}  # name: (type, array)
        self.functions: dict[str, str] = {}  # name: text, in the order of first use
        self.loops: dict[str, str] = {}  # body of a map: name of its function
        self.taken = {"s", "x", "y", "token", "weights"}
        self.statements: list[Statement] = []
        self.offsets, self.sizes = passes.allocate(program, groups)
        self.kept = passes.kept(program, groups)
        products = [op for group in groups for op in group if op.kind == "product"]
        self.matrices = [m for op in products for m in op.matrices]
        self.names = self._named_states()
        self.input_offsets: dict[Buffer, int] = {}
        for b in program.inputs:
            self.input_offsets[b] = sum(o.size for o in self.input_offsets)

    # Names

    def _named_states(self):
        readers: dict[Buffer, str] = {}
        for group in self.groups:
            for op in group:
                for b in self.program.reads([op]):
                    readers.setdefault(b, op.scope)
        names = {}
        for b in self.program.states:
            scope = readers.get(b, "")
            names[b] = self._unique(scope, "ring" if b.ring else "state")
        return names

    def _unique(self, scope, name):
        wanted = identifier(f"{scope.rpartition('/')[2]}_{name}" if scope else name)
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name

    def table(self, array, scope, name, kind=None):
        """Returns the name of a table of constants."""
        kind = kind or TYPES[np.asarray(array).dtype.name]
        array = np.ascontiguousarray(array)
        key = kind, array.tobytes()
        if key not in self.tables:
            self.tables[key] = self._unique(scope, name)
            self.arrays[self.tables[key]] = kind, array.reshape(-1)
        return self.tables[key]

    def use(self, name, **values):
        """Adds a helper function and returns its name."""
        kind = values.get("T", self.real)
        text, needed = self.helpers[name].strip(), self.needs.get(name, [])
        if kind == "double" and name in _IN_DOUBLE:
            text, needed = _IN_DOUBLE[name], []
        for other in needed:
            self.use(other)
        full = name if kind == self.real or "REAL" not in text else f"{name}_{kind}"
        if full not in self.functions:
            text = re.sub(rf"\b{name}\(", f"{full}(", text.replace("REAL", kind))
            self.functions[full] = self.typed(text)
        return full

    def typed(self, text):
        """Returns C code for float in the real type."""
        if self.real == "float":
            return text
        return re.sub(rf"\b({'|'.join(_MATH)})f\b", r"\1", text)

    # Addresses

    def pointer(self, b: Buffer, offset: int) -> str:
        """Returns a pointer to an element of a buffer."""
        if b.ring is not None:
            at, column = divmod(offset, b.ring.width)
            return self.ring_pointer(b, str(at) if at else "", column)
        if b.kind == "input":
            name = "ids" if b.dtype == "int64" else "x"
            offset += 0 if b.dtype == "int64" else self.input_offsets[b]
        elif b.kind == "state":
            name = f"s->{self.names[b]}"
        elif b.kind == "work":
            name, offset = f"s->{_WORK[b.dtype]}", offset + self.offsets[b]
        else:
            name = self.table(b.data, b.scope, b.name)
        return f"{name} + {offset}" if offset else name

    def ring_pointer(self, b, at, column):
        ring = b.ring
        head = f"s->head_{ring.head}"
        place = f"{self.use('row')}({head} + {at}, {ring.rows})" if at else head
        place = f"{place} * {ring.width}" if ring.width > 1 else place
        return f"s->{self.names[b]} + {place}" + (f" + {column}" if column else "")

    def say(self, text, *values, like):
        self.statements.append(Statement(text, values, like.scope, like.guard))

    # Operations

    def product(self, op):
        start, *operands = op.args
        for values in (self.program.values(start), *op.matrices):
            if values is not None and not np.all(np.isfinite(values)):
                raise ValueError(f"The weights of {op.scope} have values that are not finite.")
        rows, n = start.shape
        y = self.pointer(op.buffer, 0)
        begin = self.start(op, start, y, n)
        for cells, matrix in zip(operands, op.matrices, strict=True):
            found = passes.rows_of(self.program, cells, n)
            assert found is not None  # by `copy_scattered`
            parts, step = found
            w = self.table(in_blocks(matrix.astype(op.buffer.dtype)), op.scope, "kernel")
            runs = list(taps(parts))
            while runs:
                i, count = runs.pop(0)
                p = parts[i]
                weights = f"{w} + {p.start * n}" if p.start else w
                if p.buffer.ring is None:
                    name, x = self.product_function(n), self.pointer(p.buffer, p.offset)
                    text = f"{name}(%s, %s, %s, {weights}, {p.size});"
                    self.rows_loop(op, rows, text, (y, n), begin, (x, step))
                else:
                    newest = ("NULL", 0)
                    if runs and runs[0][1] == 1 and parts[runs[0][0]].size == p.size:
                        q = parts[runs.pop(0)[0]]
                        newest = self.pointer(q.buffer, q.offset), step
                    rows_of_ring = parts[i : i + count]
                    self.convolution(
                        op, rows, n, rows_of_ring, weights, (y, n), begin, newest, step
                    )
                begin = (y, n)

    def convolution(self, op, rows, n, parts, weights, y, begin, newest, step):
        """Adds a product with rows of a ring, and with the newest row."""
        self.use("row")
        name, p = self.product_function(n, _CONVOLUTIONS), parts[0]
        ring = p.buffer.ring
        at, column = divmod(p.offset, ring.width)
        first = f"s->head_{ring.head}" + (f" + {at}" if at else "")
        apart = (parts[1].offset - p.offset) // ring.width if len(parts) > 1 else 0
        pointer = f"s->{self.names[p.buffer]}" + (f" + {column}" if column else "")
        text = (
            f"{name}(%s, %s, %s, {first}, {apart}, {len(parts)}, {ring.rows}, {ring.width}, "
            f"%s, {weights}, {p.size});"
        )
        self.rows_loop(op, rows, text, y, begin, (pointer, step), newest)

    def rows_loop(self, op, rows, call, *pointers):
        """Adds a call for each row, with pointers (first, step)."""
        if rows == 1:
            self.say(call, *(p for p, _ in pointers), like=op)
            return
        values = [p if not step or p == "NULL" else f"{p} + r * {step}" for p, step in pointers]
        self.say(f"for (int r = 0; r < {rows}; r++)\n    {call}", *values, like=op)

    def start(self, op, cells, y, n):
        """Returns a pointer to the start of a product, and its step from row to row."""
        values = self.program.values(cells)
        if values is not None and not np.any(values):
            return "NULL", 0
        if values is not None:
            same = np.all(values == values[0])
            rows = values[0] if same else values
            table = self.table(rows.astype(op.buffer.dtype), op.scope, "bias")
            return table, 0 if same else n
        found = pieces(self.program, cells)
        if len(found) == 1 and found[0].stride == 1:
            return self.pointer(found[0].buffer, found[0].offset), n
        self.copied(y, cells, op)
        return y, n

    def product_function(self, n, templates=None):
        """Adds the function of a product with n columns and returns its name."""
        kind, text, wide, wide_rest = templates or _PRODUCTS
        name, width = f"{kind}_{n}", block_width(n)
        if name not in self.functions:
            if n <= width:
                self.functions[name] = text.strip().format(n=n, T=self.real)
            else:
                self.product_function(width, templates)
                whole, rest = n - n % width, ""
                if n % width:
                    self.product_function(n % width, templates)
                    rest = wide_rest.lstrip("\n").format(n=n % width, at=whole)
                self.functions[name] = wide.strip().format(
                    n=n, T=self.real, width=width, whole=whole, rest=rest
                )
        return name

    def dot(self, op):
        y, n = self.pointer(op.buffer, 0), op.size
        self.say(f"memset(%s, 0, {n} * sizeof *(%s));", y, y, like=op)
        name = self.use("add_products", T=TYPES[op.buffer.dtype])
        grids = [grid(self.program, cells) for cells in op.args]
        terms = len(op.args[0])
        if all(g is not None for g in grids):
            pointers = [self.pointer(g.buffer, g.offset) for g in grids]
            (a_term, a_step), (b_term, b_step) = (g.strides for g in grids)
            text = f"{name}(%s, {n}, {terms}, %s, {a_term}, {a_step}, %s, {b_term}, {b_step});"
            self.say(text, y, *pointers, like=op)
            return
        for rows in zip(*op.args, strict=True):
            (a,), (b,) = (pieces(self.program, row) for row in rows)
            pointers = [self.pointer(p.buffer, p.offset) for p in (a, b)]
            self.say(
                f"{name}(%s, {n}, 1, %s, 0, {a.stride}, %s, 0, {b.stride});", y, *pointers, like=op
            )

    def reduce(self, op):
        (cells,) = op.args
        y, n, kind = self.pointer(op.buffer, 0), op.size, TYPES[op.buffer.dtype]
        found = grid(self.program, cells)
        if n == 1 or (found is not None and found.strides[0] == 1):
            name = self.reduction(_REDUCE, "reduce", op.name, kind)
            if n > 1:
                x = self.pointer(found.buffer, found.offset)
                first, step = self.first(op.name, kind), found.strides[1]
                call = f"(%s)[i] = {name}({first}, %s + i * {step}, {len(cells)}, 1);"
                self.say(f"for (int i = 0; i < {n}; i++)\n    {call}", y, x, like=op)
                return
            first = self.first(op.name, kind)
            for p in pieces(self.program, cells[:, 0]):
                x = self.pointer(p.buffer, p.offset)
                text = f"*(%s) = {name}({'*(%s)' if p.start else first}, %s, {p.size}, {p.stride});"
                self.say(text, *([y, y, x] if p.start else [y, x]), like=op)
            return
        self.copied(y, cells[0], op)
        name = self.reduction(_FOLD, "fold", op.name, kind)
        if found is not None:
            term, step = found.strides
            x = self.pointer(found.buffer, found.offset + term)
            text = f"{name}(%s, {n}, {len(cells) - 1}, %s, {term}, {step});"
            self.say(text, y, x, like=op)
            return
        for row in cells[1:]:
            (p,) = pieces(self.program, row)
            x = self.pointer(p.buffer, p.offset)
            self.say(f"{name}(%s, {n}, 1, %s, 0, {p.stride});", y, x, like=op)

    def first(self, name, kind):
        first = _FOLDS[name][0]
        if "INFINITY" in first and kind in ("int", "int64_t"):
            return first.replace("INFINITY", "INT32_MAX" if kind == "int" else "INT64_MAX")
        return first

    def reduction(self, template, verb, name, kind):
        full = f"{verb}_{name}" + ("" if kind == self.real else f"_{kind}")
        if full not in self.functions:
            first, text = self.first(name, kind), _FOLDS[name][1]
            if kind in ("int", "int64_t"):
                text = text.replace(" || {1} != {1}", "")
            one = "x[i * stride]" if verb == "reduce" else "x[i * step]"
            parts = {
                "each": text.format("part[k]", "x[(i + k) * stride]"),
                "rest": text.format("part[0]", one),
                "both": text.format("first", "part[i]") if verb == "reduce"
                else text.format("y[i]", one),
            }  # fmt: skip
            starts = ", ".join([first] * 8)
            text = template.strip().format(name=name, T=kind, starts=starts, **parts)
            self.functions[full] = text.replace(f"{verb}_{name}(", f"{full}(")
        return full

    def gather(self, op):
        y, n = self.pointer(op.buffer, 0), op.size
        (p,) = pieces(self.program, op.args[0])
        index = f"*({self.pointer(p.buffer, p.offset)})"
        (table,) = op.matrices
        kind = op.buffer.dtype
        tied = [m for m in self.matrices if m.shape == table.T.shape and np.array_equal(m, table.T)]
        if tied:  # a column of the matrix of a product
            name = self.use("lookup_in_columns", T=TYPES[kind])
            w = self.table(in_blocks(tied[0].astype(kind)), op.scope, "kernel")
            text = f"{name}(%s, {n}, {index}, {len(table)}, {w}, {block_width(len(table))});"
        else:
            name = self.use("lookup", T=TYPES[kind])
            w = self.table(table.astype(kind), op.scope, "table")
            text = f"{name}(%s, {n}, {index}, {len(table)}, {w});"
        self.say(text, y, like=op)

    def copy(self, op):
        self.copied(self.pointer(op.buffer, 0), op.args[0], op)

    def copied(self, target, cells, op):
        """Copies numbers to consecutive ones."""
        cells = cells.reshape(-1)
        found = pieces(self.program, cells)
        if len(found) > 8 and all(p.buffer is found[0].buffer for p in found):
            b = found[0].buffer
            if b.ring is None:
                places = self.table((cells - b.base).astype("int32"), op.scope, "places", "int")
                name = self.use("pick", T=TYPES[b.dtype])
                self.say(f"{name}(%s, {len(cells)}, %s, {places});", target, self.pointer(b, 0),
                         like=op)  # fmt: skip
                return
        for p in found:
            to = f"{target} + {p.start}" if p.start else target
            x = self.pointer(p.buffer, p.offset)
            if p.stride == 1:
                self.say(f"memcpy(%s, %s, {p.size} * sizeof *(%s));", to, x, to, like=op)
            else:
                name = self.use("copy", T=TYPES[p.buffer.dtype])
                self.say(f"{name}(%s, {p.size}, %s, {p.stride});", to, x, like=op)

    def store(self, op):
        b = op.buffer
        target = self.pointer(b, 0)  # of a ring: its oldest row
        self.copied(target, op.args[0], op)

    # Maps

    def map(self, group):
        """Adds a loop for each range in which all operands have one stride."""
        mine = {op.buffer: f"v{i}" for i, op in enumerate(group)}
        cuts = {0, group[0].size}
        for op in group:
            for cells in op.args:
                if not passes.is_uniform(self.program, cells):
                    cuts.update(
                        p.start for p in pieces(self.program, cells) if p.buffer not in mine
                    )
        for a, b in itertools.pairwise(sorted(cuts)):
            self.loop(group, mine, a, b)

    def loop(self, group, mine, a, b):
        parameters: dict[tuple, str] = {}  # (pointer, type, stride): name
        lines, outputs = self.statements_of(group, mine, parameters, (a, b))
        heads = [f"{kind} *restrict {name}" for name, (kind, _) in outputs.items()]
        values = [pointer for _, pointer in outputs.values()]
        for (pointer, kind, _), name in parameters.items():
            heads.append(f"const {kind} *{name}")
            values.append(pointer)
        n = b - a
        loop = (
            f"    for (int i = 0; i < {n}; i++) {{\n" if n > 1 else "    const int i = 0;\n    {\n"
        )
        body = "".join(f"        {line}\n" for line in lines)
        body = f"({', '.join(heads)})\n{{\n{loop}{body}    }}\n}}"
        if body not in self.loops:
            kinds = list(dict.fromkeys(op.name.lower() for op in group))
            name = self._unique("", "_".join(["each", *kinds[:3], str(n)]))
            self.loops[body] = name
            self.functions[name] = wrapped_head(f"static void {name}", body)
        self.say(f"{self.loops[body]}({', '.join(['%s'] * len(values))});", *values, like=group[-1])

    def statements_of(self, group, mine, parameters, cut):
        """Returns the lines for one element of a group, and {name: (type, pointer)} of results."""
        a, b = cut
        outputs, lines = {}, []
        for op in group:
            whole = self.reads_integers(op)
            operands = [
                self.operand(cells[a:b], mine, parameters, b - a, whole) for cells in op.args
            ]
            kind = TYPES[op.buffer.dtype]
            text = self.expression(op, operands, kind)
            lines.append(f"const {kind} {mine[op.buffer]} = {text};")
            if op.buffer in self.kept:
                name = f"y{len(outputs)}"
                outputs[name] = kind, self.pointer(op.buffer, a)
                lines.append(f"{name}[i] = {mine[op.buffer]};")
        return lines, outputs

    def expression(self, op, operands, kind):
        text = MAPS[op.name].c
        if op.name in ("Maximum", "Minimum") and kind in ("float", "double"):
            if self.program.values(op.args[1]) is None:
                text = _FOLDS[op.name[:3].lower()][1]
        if op.name == "Mod" and kind == "int64_t":
            text = text.replace("modulo", "remainder_of")
        for name in _FUNCTIONS:
            if f"{name}(" in text:
                text = text.replace(f"{name}(", f"{self.use(name)}(")
        if op.name == "Cast" and kind != "int":
            text = f"({kind}){{0}}"
        if op.name == "Divide" and kind in ("float", "double"):
            text = f"({kind}){{0}} / {{1}}" if self.is_integer(op) else text
        return self.typed(text.format(*operands))

    def is_integer(self, op):
        return self.program.owner(int(op.args[0][0])).dtype in ("int64", "bool")

    def reads_integers(self, op):
        """Returns whether all variable operands of a map are integers."""
        owners = [b for cells in op.args for b in self.program.owners(cells)]
        return all(b.dtype in ("int64", "bool") for b in owners if b.kind != "constant")

    def operand(self, cells, mine, parameters, n, whole=False):
        """Returns an operand of a map as C."""
        values = self.program.values(cells)
        if values is not None and (np.all(values == values[0]) or np.all(values != values)):
            is_whole = whole and values[0] == np.rint(values[0])
            text = str(int(values[0])) if is_whole else self.literal(values[0])
            return f"({text})" if text.startswith("-") else text
        (p,) = pieces(self.program, cells)
        if p.buffer in mine:
            return mine[p.buffer]
        stride = p.stride if n > 1 else 0
        kind = TYPES[p.buffer.dtype]
        key = self.pointer(p.buffer, p.offset), kind, stride
        name = parameters.setdefault(key, f"x{len(parameters)}")
        index = {0: "0", 1: "i"}.get(stride, f"{stride} * i")
        return f"{name}[{index}]"

    def literal(self, value):
        if value.dtype.kind in "iub":
            return str(int(value))
        if not np.isfinite(value):
            return "NAN" if np.isnan(value) else "-INFINITY" if value < 0 else "INFINITY"
        kind = np.float32 if self.real == "float" else np.float64
        return str(kind(value)) + ("f" if self.real == "float" else "")

    # The whole

    def print(self):
        for group in self.groups:
            if group[0].kind == "map":
                self.map(group)
            else:
                getattr(self, group[0].kind)(group[0])
        self.copied("y", self.program.output, Op("copy", "", self.program.inputs[0], []))
        reset = list(self.reset())
        step = list(self.step())
        more_code = self.more_code()
        members, state_bytes = self.members()
        weight_bytes = sum(array.size * _BYTES[kind] for kind, array in self.arrays.values())
        widest = max([int(n[8:]) for n in self.functions if n.startswith("product_")] or [0])
        stack_bytes = min(widest, passes.WIDTH) * _BYTES[self.real]
        header = self.header(members, state_bytes, weight_bytes, stack_bytes)
        in_file = [a for kind, a in self.arrays.values() if kind == self.real]
        names = [name for name, (kind, _) in self.arrays.items() if kind == self.real]
        starts = np.cumsum([0, *(array.size for array in in_file)])
        self.places = dict(zip(names, starts.tolist(), strict=False))
        indent = "\n".join
        texts = [
            f'#include "{self.prefix}.h"',
            "#include <math.h>\n#include <string.h>",
            _EXACT if self.is_real and any(_is_count(b) for b in self.program.states) else "",
            "/* Weights */",
            "\n\n".join(self.table_text(name) for name in self.arrays),
            "/* Operations */",
            "\n\n".join(self.functions.values()),
            "/* The model */",
            f"{self.reset_signature()}\n{{\n{indent(reset)}\n}}",
            f"{self.signature(restrict=True)}\n{{\n{indent(step)}\n}}",
            more_code,
        ]
        code = "\n\n".join(text for text in texts if text) + "\n"
        about = self.about
        return Source(
            self.prefix, "", header, code, self.real, list(about.names), about.takes_token,
            about.inputs, self.program.output.size, state_bytes, weight_bytes, stack_bytes,
            not any(statement.guard for statement in self.statements),
            b"".join(array.tobytes() for array in in_file) if self.in_file else None,
        )  # fmt: skip

    def step(self) -> Iterator[str]:
        if any(b.dtype == "int64" for b in self.program.inputs):
            yield "    const int64_t ids[1] = {token};"
        scope, guard = None, frozenset[int]()
        for statement in self.statements:
            if statement.guard != guard:
                if guard:
                    yield "    }"
                guard = statement.guard
                scope = None
                if guard:
                    yield f"    if ({self.condition(guard)}) {{"
            indent = "        " if guard else "    "
            if statement.scope != scope:
                scope = statement.scope
                if scope:
                    yield f"{indent}/* {comment_text(scope)} */"
            for line in str(statement).splitlines():
                yield wrapped(indent, line)
        if guard:
            yield "    }"
        for head, (rows, guard) in self.heads().items():
            test = f"if ({self.condition(guard)}) " if guard else ""
            yield f"    {test}s->head_{head} = row(s->head_{head} + 1, {rows});"

    def condition(self, guard):
        found = []
        for address in sorted(guard):
            b = self.program.owner(address)
            found.append(f"*({self.pointer(b, address - b.base)})")
        return " && ".join(found)

    def heads(self):
        found = {}
        for store in self.program.stores:
            if store.buffer.ring is not None:
                found[store.buffer.ring.head] = store.buffer.ring.rows, store.guard
                self.use("row")
        return found

    def reset(self) -> Iterator[str]:
        yield "    memset(s, 0, sizeof *s);"
        if self.in_file:
            yield "    s->weights = weights;"
        for b in self.program.states:
            if b.data is None or not np.any(b.data):
                continue
            data = self.initial(b, np.asarray(b.data).reshape(-1))
            target = f"s->{self.names[b]}"
            if np.all(data == data[0]):
                yield f"    for (int i = 0; i < {b.size}; i++)"
                yield f"        {target}[i] = {self.literal(data[0])};"
            else:
                table = self.table(data, "", f"{self.names[b]}_first")
                yield f"    memcpy({target}, {table}, sizeof {target});"

    def initial(self, b, data):
        """Returns the initial values of a state in its type."""
        return data.astype(b.dtype)

    def more_declarations(self):
        return ""

    def more_code(self):
        return ""

    def members(self):
        """Returns the members of the state's struct, and its size."""
        found = [(TYPES[b.dtype], self.names[b], b.size) for b in self.program.states]
        found += [(TYPES[dtype], _WORK[dtype], size) for dtype, size in self.sizes.items()]
        found += [("int", f"head_{head}", 0) for head in self.heads()]
        if self.in_file:
            found.append((f"const {self.real} *", "weights", 0))
        found = found or [("int", "nothing", 0)]
        found.sort(key=lambda member: -_size_of(member[0]))
        size = sum(_size_of(kind) * (count or 1) for kind, _, count in found)
        unit = max(_size_of(kind) for kind, _, _ in found)
        lines = [f"{kind} {name}{f'[{count}]' if count else ''};" for kind, name, count in found]
        lines = [line.replace("* ", "*") for line in lines]
        return lines, -(-size // unit) * unit

    def reset_signature(self):
        weights = f", const {self.real} *weights" if self.in_file else ""
        return f"void {self.prefix}_reset({self.prefix}_state *s{weights})"

    def signature(self, restrict=False):
        word = " restrict " if restrict else " "
        pointer = f"*{word.strip()} " if restrict else "*"
        x = "int token" if self.about.takes_token else f"const {self.real} {pointer}x"
        y = f"{self.real} {pointer}y"
        return f"void {self.prefix}_step({self.prefix}_state *s, {x}, {y})"

    def table_text(self, name):
        kind, array = self.arrays[name]
        if self.in_file and kind == self.real:
            return f"#define {name} (s->weights + {self.places[name]})"
        if array.dtype.kind != "f":
            numbers = [str(int(n)) for n in array]
        elif np.all(np.isfinite(array)):
            f = "f" if kind == "float" else ""
            numbers = [n + f for n in array.astype("U").tolist()]
        else:
            numbers = [self.literal(n) for n in array]
        rows = [", ".join(numbers[i : i + 8]) for i in range(0, len(numbers), 8)]
        text = ",\n    ".join(rows)
        return f"static const {kind} {name}[{len(numbers)}] = {{\n    {text}\n}};"

    def header(self, members, state_bytes, weight_bytes, stack_bytes):
        upper, about = self.prefix.upper(), self.about
        inputs = "TOKENS" if about.takes_token else "INPUTS"
        lines = "\n".join(f"    {member}" for member in members)
        names = ", ".join(map(_string, about.names))
        names = f"#define {upper}_NAMES {names} /* of the outputs */\n" if names else ""
        delay, rate = map(_common, (about.delay, about.rate))
        sizes = " if int has 4 bytes" + (" and a pointer 8" if self.in_file else "")
        weights = f" `weights` has the content of {self.prefix}.bin." if self.in_file else ""
        if (delay, rate) != (0, 1):
            names = (
                "/* Step DELAY + RATE * n writes output n of the model; other steps write "
                f"{self.nothing}. */\n"
                f"#define {upper}_DELAY {delay}\n#define {upper}_RATE {rate}\n{names}"
            )
        return f"""\
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_{inputs} {about.inputs}
#define {upper}_OUTPUTS {self.program.output.size}
#define {upper}_STATE_BYTES {state_bytes} /* sizeof({self.prefix}_state){sizes} */
#define {upper}_WEIGHT_BYTES {weight_bytes}
#define {upper}_STACK_BYTES {stack_bytes} /* arrays of a step, without call frames */
{names}
/* The state of one stream, and the memory of a step. */
typedef struct {{
{lines}
}} {self.prefix}_state;

/* Starts or restarts a stream.{weights} */
{self.reset_signature()};

/* Reads one time step x and writes the outputs y; x and y must not overlap. */
{self.signature()};
{self.more_declarations()}
#ifdef __cplusplus
}}
#endif

#endif
"""


_WORK = {"float32": "work", "float64": "work", "int64": "integers", "bool": "flags"}
_WORK |= {"int16": "work", "int32": "sums", "fixed64": "means"}


def _size_of(kind):
    return 8 if kind.endswith("*") else _BYTES[kind]  # a pointer has 8 bytes, or fewer


def _is_count(state):
    return state.data is not None and state.data.dtype.kind == "i"


def _common(values):
    """Returns the common value of all outputs, or the value for each of them."""
    values = keras.tree.flatten(values)
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))


def block_width(columns: int) -> int:
    """Returns the number of columns in each block of a product: at most `passes.WIDTH`."""
    blocks = -(-columns // passes.WIDTH)
    return min(-(-columns // blocks // 8) * 8, passes.WIDTH)


def in_blocks(matrix: np.ndarray) -> np.ndarray:
    """Returns a matrix as blocks of columns, one after another."""
    width = block_width(matrix.shape[1])
    if matrix.shape[1] <= width:
        return matrix
    blocks = [matrix[:, i : i + width].reshape(-1) for i in range(0, matrix.shape[1], width)]
    return np.concatenate(blocks)


def identifier(name: str) -> str:
    """Returns a name as a C identifier, with underscores for all other characters."""
    name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    return f"_{name}" if name[:1].isdigit() else name


def _string(text):
    """Returns the UTF-8 of a text as a C string literal.

    A raw `\\n`, `\\r` or `??/` would end the literal, and the rest of a name would be code. So all
    but printable ASCII are octal escapes.
    """
    octets = text.encode("utf-8", "backslashreplace")
    plain = set(range(0x20, 0x7F)) - set(b'"?\\')
    return '"' + "".join(chr(o) if o in plain else f"\\{o:03o}" for o in octets) + '"'


# Ends or nests a comment, splices lines, or is half of a trigraph.
_NOT_IN_COMMENTS = re.compile(r"[^ -~]|\\|(?<=\*)/|(?<=/)\*|(?<=\?)\?")


def comment_text(text: str) -> str:
    """Returns a text, such as a name, as a line of a comment in C or JavaScript.

    Example:

    >>> comment_text("a*/ é")
    'a*\\\\x2f \\\\xe9'
    """
    return _NOT_IN_COMMENTS.sub(lambda found: _escaped(ord(found[0])), text)


def _escaped(code_point):
    if code_point < 2**8:
        return f"\\x{code_point:02x}"
    return f"\\u{code_point:04x}" if code_point < 2**16 else f"\\U{code_point:08x}"


def wrapped_head(head: str, body: str) -> str:
    """Returns a function whose line of parameters is wrapped."""
    line, rest = body.split("\n", 1)
    return f"{wrapped('', head + line)}\n{rest}"


def wrapped(indent: str, line: str) -> str:
    """Returns a line of C, wrapped after commas."""
    indent += " " * (len(line) - len(line.lstrip()))
    parts, lines = line.strip().split(", "), [indent]
    for i, part in enumerate(parts):
        part += ", " if i + 1 < len(parts) else ""
        if len(lines[-1]) + len(part.rstrip()) > 100 and lines[-1].strip():
            lines.append(indent + "    ")
        lines[-1] += part
    return "\n".join(text.rstrip() for text in lines)
