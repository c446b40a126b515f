"""Prints a program as C99: tables of weights, a function for each kind of operation, and a step."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_streams import passes
from keras_streams.cells import Buffer, Op, Program, grid, pieces, taps
from keras_streams.lower import MAPS
from keras_streams.statements import Code, Function, Number, Place, Statement, grouped

TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "bool": "int"}
TYPES |= {name: f"{name}_t" for name in ("int8", "int16", "int32")}
TYPES["fixed64"] = "int64_t"
_BYTES = {"float": 4, "double": 8, "int64_t": 8, "int": 4, "int8_t": 1, "int16_t": 2, "int32_t": 4}
_MATH = "fabs sqrt expm1 log log1p pow erf sin cos floor ceil rint exp tanh fmod".split()


def read_operations(name: str) -> dict[str, str]:
    """Returns {name: text} of the functions in a C file beside this one."""
    text = pathlib.Path(__file__).with_name(name).read_text()
    functions = text.strip().split("\n\n")[1:]
    return {re.search(r"^static .*?(\w+)\(", f, re.M)[1]: f for f in functions}


HELPERS = read_operations("operations.c")
_LIBRARY = {  # float64 has the functions of the C library
    "logarithm": "log(x)",
    "logarithm_of_1_plus": "log1p(x)",
    "exponential": "exp(x)",
    "exponential_minus_1": "expm1(x)",
    "sigmoid": "1.0 / (1.0 + exp(-x))",
    "hyperbolic": "tanh(x)",
}
# With a count, rounding errors are computed as differences that algebra would set to 0.
_EXACT = """\
#if defined __FAST_MATH__ || defined __ASSOCIATIVE_MATH__ || defined _M_FP_FAST
#error "A mean over all steps cannot be compiled with -ffast-math or /fp:fast."
#endif"""
# Constants of each layer are folded into its function, unless code is to be small.
_INLINED = """\
#if defined __OPTIMIZE__ && !defined __OPTIMIZE_SIZE__
#define INLINED static inline __attribute__((always_inline))
#else
#define INLINED static
#endif"""
_FOLDS = {  # function of two numbers, and first value
    "sum": ("add", "0"),
    "prod": ("multiply", "1"),
    "max": ("larger", "-INFINITY"),
    "min": ("smaller", "INFINITY"),
}


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
    return Printer(program, groups, prefix, real, about, in_file).print()


class Printer:
    """Prints a program that computes in one type.

    Args:
        program, groups, prefix, real, about, in_file: As in `print_c`.
    """

    helpers = HELPERS
    nothing = "NAN"  # outputs at steps without an output

    def __init__(
        self,
        program: Program,
        groups: list[passes.Group],
        prefix: str,
        real: str,
        about: Any,
        in_file: bool = False,
    ) -> None:
        self.program, self.groups, self.about = program, groups, about
        self.prefix, self.real, self.in_file = prefix, real, in_file
        self.tables: dict[tuple, Place] = {}  # content: name
        self.arrays: dict[str, tuple] = {}  # name: (type, array)
        self.functions: dict[str, str] = {}  # name: text, in the order of first use
        self.loops: dict[str, str] = {}  # body of a map: name of its function
        self.layers: dict[str, str] = {}  # text of a function of equal layers: its name
        self.taken = {"s", "x", "y", "token", "weights"}
        self.statements: list[Statement] = []
        self.offsets, self.sizes = passes.allocate(program, groups)
        self.kept = passes.kept(program, groups)
        products = [op for group in groups for op in group if op.kind == "product"]
        self.matrices = [m for op in products for m in op.matrices]
        self.names = self._named_states()
        self.starts: dict[str, int] = {}  # name of an array of the state: its first byte
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
        """Returns the place of a table of constants."""
        kind = kind or TYPES[np.asarray(array).dtype.name]
        array = np.ascontiguousarray(array)
        key = kind, array.tobytes()
        if key not in self.tables:
            name = self._unique(scope, name)
            is_in_file = self.in_file and kind == self.real
            self.tables[key] = Place("s->weights" if is_in_file else "", name, 0, kind)
            self.arrays[name] = kind, array.reshape(-1)
        return self.tables[key]

    def use(self, name, kind=None, **words):
        """Adds a function of `operations.c` and those that it calls, and returns its name.

        Args:
            name: Its name.
            kind: Type of its numbers. Defaults to the program's.
            words: Words of the function, and what replaces them.
        """
        kind, text, full = kind or self.real, self.helpers[name], name
        for word, value in words.items():
            full = full.replace(f"_{word}", f"_{value}")
        if kind != self.real and "REAL" in text:
            full = f"{full}_{kind}"
        if full not in self.functions:
            if kind == "double" and name in _LIBRARY:
                text = f"static inline double {name}(double x) {{ return {_LIBRARY[name]}; }}"
            if kind in ("int", "int64_t"):
                text = text.replace(" || b != b", "")
            for word, value in {**words, "REAL": kind}.items():
                text = re.sub(rf"\b{word}\b", str(value), text)
            head, body = re.sub(rf"\b{name}\(", f"{full}(", text).split("{", 1)
            self.functions[full] = f"{head}{{{self.linked(body, kind)}"
        return full

    def linked(self, text, kind=None):
        """Returns C code for floats in the program's type, with the functions that it calls."""
        for name in self.helpers:
            if re.search(rf"\b{name}\(", text):
                text = re.sub(rf"\b{name}\(", f"{self.use(name, kind)}(", text)
        return text if self.real == "float" else re.sub(rf"\b({'|'.join(_MATH)})f\(", r"\1(", text)

    # Addresses

    def pointer(self, b: Buffer, offset: int) -> Place | Code:
        """Returns a pointer to an element of a buffer."""
        kind = TYPES[b.dtype]
        if b.kind == "input":
            array = "ids" if b.dtype == "int64" else "x"
            return Place(array, "", offset + self.input_offsets[b] * (array == "x"), kind)
        if b.kind == "work":
            return Place(f"s->{self.array('work', b.dtype)}", "", self.offsets[b] + offset, kind)
        if b.kind == "constant":
            return self.table(b.data, b.scope, b.name) + offset
        if b.ring is None:
            return self.state(b) + offset
        at, column = divmod(offset, b.ring.width)
        head = Code("s->heads[%s]", (Number(b.ring.head, "head"),))
        if at:
            rows = Number(at, "at"), Number(b.ring.rows, "rows")
            head = Code(f"{self.use('row')}(%s + %s, %s)", (head, *rows))
        return Code("%s + %s * %s", (self.state(b) + column, head, Number(b.ring.width, "width")))

    def state(self, b):
        """Returns the place of a state."""
        return Place(f"s->{self.array('states', b.dtype)}", self.names[b], 0, TYPES[b.dtype])

    def array(self, name, dtype):
        """Returns the name of the state's array of a kind of buffers with a dtype."""
        return name if TYPES[dtype] == self.real else f"{name}_{dtype}"

    def say(self, text, *values, like):
        """Adds a statement: a text with %s for each value."""
        scope = like.scope or (self.statements[-1].scope if self.statements else "")
        self.statements.append(Statement(Code(text, values), scope, like.guard))

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
            found = passes.rows_of(self.program, cells)
            assert found is not None  # by `copy_scattered`
            parts, step = found
            w = self.table(in_blocks(matrix.astype(op.buffer.dtype)), op.scope, "kernel")
            runs = list(taps(parts))
            while runs:
                i, count = runs.pop(0)
                p = parts[i]
                x = self.pointer(p.buffer, p.offset)
                if p.buffer.ring is None:
                    name, inputs = "product_N", ((x, step), None, p.size)
                else:
                    newest = "NULL", 0
                    if runs and runs[0][1] == 1 and parts[runs[0][0]].size == p.size:
                        q = parts[runs.pop(0)[0]]
                        newest = self.pointer(q.buffer, q.offset), step
                    name = "convolution_N"
                    rows_of_ring = self.rows_of_ring(parts[i : i + count], step)
                    inputs = (*rows_of_ring, newest, None, p.size)
                self.columns(op, name, (y, n), begin, inputs, (w, p.start, len(matrix)))
                begin = y, n

    def rows_of_ring(self, parts, step):
        """Returns the arguments of a convolution for equally distant rows."""
        p, ring = parts[0], parts[0].buffer.ring
        at, column = divmod(p.offset, ring.width)
        head = Code("s->heads[%s]", (Number(ring.head, "head"),))
        first = Code("%s + %s", (head, Number(at, "at"))) if at else head
        apart = (parts[1].offset - p.offset) // ring.width if len(parts) > 1 else 0
        return (
            *((self.state(p.buffer) + column, step), first, Number(apart, "apart"), len(parts)),
            *(Number(ring.rows, "rows"), ring.width),
        )

    def columns(self, op, name, y, start, inputs, weights):
        """Adds a product for each row, in blocks of columns.

        Args:
            op: The operation.
            name: Name of the function.
            y, start: Pairs of a pointer and a step from row to row.
            inputs: The other arguments, with such pairs, and None for the weights.
            weights: The matrix, the first of its rows that is read, and their number.
        """
        rows, n = op.args[0].shape
        width = min(block_width(n), n)
        w, first_row, all_rows = weights
        for at, size, count in ((0, width, n // width), (n - n % width, n % width, 1)):
            if size:
                table = _moved((w + first_row * size, 0), all_rows, at, count)
                values = [_moved(y, 1, at, count), _moved(start, 1, at, count)]
                for value in inputs:
                    pair = value if isinstance(value, tuple) else (value, 0)
                    values.append(table if value is None else pair)
                call = f"{self.use(name, N=size)}({', '.join(['%s'] * len(values))});"
                if count > 1:
                    call = f"for (int k = 0; k < {count * size}; k += {size})\n    {call}"
                self.rows_loop(op, rows, call, *values)

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

    def rows_loop(self, op, rows, call, *values):
        """Adds a call for each row, with pairs of a pointer and its step from row to row."""
        if rows > 1:
            call = call.replace("\n", "\n    ")
            call = f"for (int r = 0; r < {rows}; r++)\n    {call}"
        moved = [Code(f"%s + r * {step}", (x,)) if rows > 1 and step else x for x, step in values]
        self.say(call, *moved, like=op)

    def dot(self, op):
        y, n, kind = self.pointer(op.buffer, 0), op.size, TYPES[op.buffer.dtype]
        self.say(f"memset(%s, 0, {n} * sizeof({kind}));", y, like=op)
        name = self.use("add_products", kind)
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
            text = f"{name}(%s, {n}, 1, %s, 0, {a.stride}, %s, 0, {b.stride});"
            self.say(text, y, *pointers, like=op)

    def reduce(self, op):
        (cells,) = op.args
        y, n, kind = self.pointer(op.buffer, 0), op.size, TYPES[op.buffer.dtype]
        fold, first = _FOLDS[op.name]
        if kind in ("int", "int64_t"):
            first = first.replace("INFINITY", "INT32_MAX" if kind == "int" else "INT64_MAX")
        words = {"NAME": op.name, "FOLD": self.use(fold, kind), "FIRST": first}
        found = grid(self.program, cells)
        if n > 1 and found is not None and found.strides[0] == 1:
            name, x = (
                self.use("reduce_NAME", kind, **words),
                self.pointer(found.buffer, found.offset),
            )
            call = f"(%s)[i] = {name}({first}, %s + i * {found.strides[1]}, {len(cells)}, 1);"
            self.say(f"for (int i = 0; i < {n}; i++)\n    {call}", y, x, like=op)
        elif n == 1:
            name = self.use("reduce_NAME", kind, **words)
            for p in pieces(self.program, cells[:, 0]):
                begin = Code("*(%s)", (y,)) if p.start else first
                text = f"*(%s) = {name}(%s, %s, {p.size}, {p.stride});"
                self.say(text, y, begin, self.pointer(p.buffer, p.offset), like=op)
        else:
            self.copied(y, cells[0], op)
            name = self.use("fold_NAME", kind, **words)
            rows = [(1, 0, *pieces(self.program, row)) for row in cells[1:]]
            if found is not None:
                term, step = found.strides
                x = dataclasses.replace(rows[0][2], stride=step)
                rows = [(len(cells) - 1, term, x)]
            for terms, term, p in rows:
                text = f"{name}(%s, {n}, {terms}, %s, {term}, {p.stride});"
                self.say(text, y, self.pointer(p.buffer, p.offset), like=op)

    def gather(self, op):
        y, n = self.pointer(op.buffer, 0), op.size
        (p,) = pieces(self.program, op.args[0])
        index = self.pointer(p.buffer, p.offset)
        (table,) = op.matrices
        kind = op.buffer.dtype
        tied = [m for m in self.matrices if m.shape == table.T.shape and np.array_equal(m, table.T)]
        if tied:  # a column of the matrix of a product
            name = self.use("lookup_in_columns", TYPES[kind])
            w = self.table(in_blocks(tied[0].astype(kind)), op.scope, "kernel")
            text = f"{name}(%s, {n}, *(%s), {len(table)}, %s, {block_width(len(table))});"
        else:
            name = self.use("lookup", TYPES[kind])
            w = self.table(table.astype(kind), op.scope, "table")
            text = f"{name}(%s, {n}, *(%s), {len(table)}, %s);"
        self.say(text, y, index, w, like=op)

    def copy(self, op):
        self.copied(self.pointer(op.buffer, 0), op.args[0], op)

    def copied(self, target, cells, op):
        """Copies numbers to consecutive ones."""
        cells = cells.reshape(-1)
        found = pieces(self.program, cells)
        b = found[0].buffer if found else None
        if len(found) > 8 and all(p.buffer is b for p in found) and b.ring is None:
            places = self.table((cells - b.base).astype("int32"), op.scope, "places", "int")
            name = self.use("pick", TYPES[b.dtype])
            x = self.pointer(b, 0)
            self.say(f"{name}(%s, {len(cells)}, %s, %s);", target, x, places, like=op)
            return
        for p in found:
            to, x, kind = target + p.start, self.pointer(p.buffer, p.offset), TYPES[p.buffer.dtype]
            if p.stride == 1:
                self.say(f"memcpy(%s, %s, {p.size} * sizeof({kind}));", to, x, like=op)
            else:
                name = self.use("copy", kind)
                self.say(f"{name}(%s, {p.size}, %s, {p.stride});", to, x, like=op)

    def store(self, op):
        self.copied(self.pointer(op.buffer, 0), op.args[0], op)  # of a ring: its oldest row

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
        text, is_real = MAPS[op.name].c, kind in ("float", "double")
        if op.name in ("Maximum", "Minimum") and is_real:
            text = f"{_FOLDS[op.name[:3].lower()][0]}({{0}}, {{1}})"
        if op.name == "Mod" and kind == "int64_t":
            text = text.replace("modulo", "remainder_of")
        if op.name == "Cast" and kind != "int":
            text = f"({kind}){{0}}"
        if op.name == "Divide" and is_real and self.is_integer(op):
            text = f"({kind}){{0}} / {{1}}"
        return self.linked(text).format(*operands)

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
        key = self.pointer(p.buffer, p.offset), TYPES[p.buffer.dtype], stride
        return self.element(parameters, key)

    def element(self, parameters, key):
        """Returns element i of an operand (pointer, type, stride) as C."""
        name = parameters.setdefault(key, f"x{len(parameters)}")
        return f"{name}[{ {0: '0', 1: 'i'}.get(key[2], f'{key[2]} * i') }]"

    def literal(self, value):
        if value.dtype.kind in "iub":
            return str(int(value))
        if not np.isfinite(value):
            return "NAN" if np.isnan(value) else "-INFINITY" if value < 0 else "INFINITY"
        kind = np.float32 if self.real == "float" else np.float64
        return str(kind(value)) + ("f" if self.real == "float" else "")

    # The whole

    def print(self) -> Source:
        for group in self.groups:
            if group[0].kind == "map":
                self.map(group)
            else:
                getattr(self, group[0].kind)(group[0])
        outputs = Op("copy", "", self.program.inputs[0], [])
        self.copied(Place("y", "", 0, self.real), self.program.output, outputs)
        for number, (rows, store) in self.heads().items():
            head = Number(number, "head")
            text = f"s->heads[%s] = {self.use('row')}(s->heads[%s] + 1, %s);"
            self.say(text, head, head, Number(rows, "rows"), like=store)
        reset, step, more_code = list(self.reset()), list(self.step()), self.more_code()
        members, state_bytes = self.members()
        weight_bytes = sum(array.size * _BYTES[kind] for kind, array in self.arrays.values())
        sums = (re.fullmatch(r"(?:product|convolution)_(\d+)", name) for name in self.functions)
        widest = max((int(found[1]) for found in sums if found), default=0)
        stack_bytes = self.bytes_of_sums(widest)
        in_file = {
            n: a for n, (kind, a) in self.arrays.items() if self.in_file and kind == self.real
        }
        has_counts = any(_is_count(b) for b in self.program.states)
        texts = [
            f'#include "{self.prefix}.h"',
            "#include <math.h>\n#include <string.h>",
            _EXACT if has_counts and self.real != "int16_t" else "",
            *self.places(in_file),
            "/* Weights */",
            *(self.table_text(name) for name in self.arrays if name not in in_file),
            "/* Operations */",
            *self.functions.values(),
            "/* The model */",
            _INLINED if self.layers else "",
            *(wrapped_head(f"INLINED void {name}", text) for text, name in self.layers.items()),
            "\n".join([self.reset_signature(), "{", *reset, "}"]),
            "\n".join([self.signature(restrict=True), "{", *step, "}"]),
            more_code,
        ]
        about = self.about
        return Source(
            self.prefix,
            "",
            self.header(members, state_bytes, weight_bytes, stack_bytes),
            "\n\n".join(filter(None, texts)) + "\n",
            self.real,
            list(about.names),
            about.takes_token,
            about.inputs,
            self.program.output.size,
            state_bytes,
            weight_bytes,
            stack_bytes,
            not any(statement.guard for statement in self.statements),
            b"".join(array.tobytes() for array in in_file.values()) if self.in_file else None,
        )

    def places(self, in_file):
        """Yields the constants that name places in the arrays of the state, and in the weights."""
        arrays: dict[str, dict[str, int]] = {"weights": {n: a.size for n, a in in_file.items()}}
        for b in self.program.states:
            arrays.setdefault(self.array("states", b.dtype), {})[self.names[b]] = b.size
        for array, sizes in arrays.items():
            starts = itertools.accumulate(sizes.values(), initial=0)
            lines = [f"    {n} = {start}," for n, start in zip(sizes, starts, strict=False)]
            if lines:
                yield "\n".join([f"/* Places in `{array}` */", "enum {", *lines, "};"])

    def step(self) -> Iterator[str]:
        if any(b.dtype == "int64" for b in self.program.inputs):
            yield "    const int64_t ids[1] = {token};"
        for guard, statements in itertools.groupby(self.statements, key=lambda s: s.guard):
            lines = self.lines(grouped(list(statements)))
            if guard:
                yield f"    if ({self.condition(guard)}) {{"
                lines = itertools.chain((f"    {line}" for line in lines), ["}"])
            for line in lines:
                yield wrapped("    ", line)

    def lines(self, statements: Sequence[Statement | Function], scope: str = "") -> Iterator[str]:
        """Yields the lines of statements, with the names of their layers after `scope`."""
        for statement in statements:
            if isinstance(statement, Function):
                scope = ""
                yield from self.calls(statement)
                continue
            if statement.scope != scope:
                scope = statement.scope
                yield f"/* {comment_text(scope)} */"
            yield from str(statement.code).splitlines()

    def calls(self, function: Function) -> Iterator[str]:
        """Adds a function of equal layers, and yields its calls."""
        scope = function.body[0].scope
        heads = (f"{kind}{name}" for name, kind in function.parameters.items())
        head = f"({self.prefix}_state *s, {', '.join(heads)})"
        lines = [wrapped("    ", line) for line in self.lines(function.body, scope)]
        text = "\n".join([head, "{", *lines, "}"])
        if text not in self.layers:
            name = self._unique(scope.partition(" to ")[0], "layer")
            self.layers[text] = name
        yield f"/* {comment_text(scope)} */"
        for arguments in function.calls:
            yield f"{self.layers[text]}(s, {', '.join(arguments)});"

    def condition(self, guard):
        found = []
        for address in sorted(guard):
            b = self.program.owner(address)
            found.append(f"*({self.pointer(b, address - b.base)})")
        return " && ".join(found)

    def heads(self) -> dict[int, tuple[int, Op]]:
        """Returns {head: (number of rows, a store that moves it)}."""
        rings = [(store.buffer.ring, store) for store in self.program.stores]
        return {ring.head: (ring.rows, store) for ring, store in rings if ring is not None}

    def reset(self) -> Iterator[str]:
        yield "    memset(s, 0, sizeof *s);"
        if self.in_file:
            yield "    s->weights = weights;"
        for b in self.program.states:
            if b.data is None or not np.any(b.data):
                continue
            data = self.initial(b, np.asarray(b.data).reshape(-1))
            target = self.state(b)
            if np.all(data == data[0]):
                yield f"    for (int i = 0; i < {b.size}; i++)"
                yield f"        ({target})[i] = {self.literal(data[0])};"
            else:
                table = self.table(data, "", f"{self.names[b]}_first")
                yield f"    memcpy({target}, {table}, {b.size} * sizeof({table.kind}));"

    def initial(self, b, data):
        """Returns the initial values of a state in its type."""
        return data.astype(b.dtype)

    def bytes_of_sums(self, columns):
        """Returns the size of the sums of a product on the stack."""
        return columns * _BYTES[self.real]

    def more_declarations(self):
        return ""

    def more_code(self):
        return ""

    def members(self):
        """Returns the members of the state's struct, and its size."""
        sizes: dict[tuple[str, str], int] = {}
        for b in self.program.states:
            key = TYPES[b.dtype], self.array("states", b.dtype)
            sizes[key] = sizes.get(key, 0) + b.size
        sizes |= {(TYPES[d], self.array("work", d)): size for d, size in self.sizes.items()}
        heads = self.heads()
        sizes |= {("int", "heads"): max(heads) + 1} if heads else {}
        sizes |= {(f"const {self.real} *", "weights"): 0} if self.in_file else {}
        sizes = {key: size for key, size in sizes.items() if size or key[1] == "weights"}
        found = sorted((sizes or {("int", "nothing"): 0}).items(), key=lambda m: -_size_of(m[0][0]))
        *starts, size = itertools.accumulate(
            (_size_of(kind) * (count or 1) for (kind, _), count in found), initial=0
        )
        self.starts = {name: at for ((_, name), _), at in zip(found, starts, strict=True)}
        unit = _size_of(found[0][0][0])
        lines = [f"{kind} {name}{f'[{n}]' if n else ''};".replace("* ", "*")
                 for (kind, name), n in found]  # fmt: skip
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
        if array.dtype.kind == "f" and np.all(np.isfinite(array)):
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


def _size_of(kind):
    return 8 if kind.endswith("*") else _BYTES[kind]  # a pointer has 8 bytes, or fewer


def _is_count(state):
    return state.data is not None and state.data.dtype.kind == "i"


def _common(values):
    """Returns the common value of all outputs, or the value for each of them."""
    values = keras.tree.flatten(values)
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))


def _moved(pair, distance, at, count):
    """Returns a pointer and its step, for the first of `count` blocks of columns, or in a loop."""
    pointer, step = pair
    if pointer == "NULL":
        return pair
    place = pointer + at * distance
    moved = "%s + k" if distance == 1 else f"%s + k * {distance}"
    return Code(moved, (place,)) if count > 1 else place, step


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
