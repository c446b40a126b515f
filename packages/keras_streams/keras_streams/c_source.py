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
from keras_streams.cells import Buffer, Op, Program, as_grid, pieces, taps
from keras_streams.files import filled_template
from keras_streams.lower import MAPS
from keras_streams.statements import Function, Statement, free_name, grouped

TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "bool": "int"}
TYPES |= {name: f"{name}_t" for name in ("int8", "int16", "int32")}
TYPES["fixed64"] = "int64_t"
_BYTES = {"float": 4, "double": 8, "int64_t": 8, "int": 4, "int8_t": 1, "int16_t": 2, "int32_t": 4}
_MATH = "fabs sqrt expm1 log log1p pow erf sin cos atan atan2 floor ceil rint exp tanh fmod".split()


def read_operations(name: str) -> dict[str, str]:
    """Returns {name: text} of the functions in a C file beside this one."""
    text = pathlib.Path(__file__).with_name(name).read_text()
    functions = text.strip().split("\n\n")[1:]
    names = (re.findall(r"^static .*?(\w+)\(", f, re.M)[0] for f in functions)
    return dict(zip(names, functions, strict=True))


HELPERS = read_operations("operations.c") | read_operations("fixed_operations.c")
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
_INTEGERS = {  # what floats have another version of, or none
    "Add": "(KIND){0} + {1}",
    "Subtract": "(KIND){0} - {1}",
    "Multiply": "(KIND){0} * {1}",
    "Absolute": "{0} < 0 ? -{0} : {0}",
    "Mod": "remainder_of({0}, {1})",
    "Cast": "(KIND){0}",
    "Shift": "{0} >> {1}",
    "Truncate": "{0} / ((int64_t)1 << {1})",
}
_SUMS = {"int16_t": 64}  # at most, of a product at a time
_FOLDS = {  # function of two numbers, and first value
    "sum": ("add", "0"),
    "prod": ("multiply", "1"),
    "max": ("larger", "-INFINITY"),
    "min": ("smaller", "INFINITY"),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A program as C."""

    prefix: str  # of the public names
    comment: str  # description of the model, the first lines of `prefix.h`
    header: str  # the rest of `prefix.h`
    code: str  # content of `prefix.c`
    real: str  # "float" or "double", or "int16_t" for integer-only C
    names: list[str]  # of the outputs; may be empty
    takes_token: bool  # whether the input is a token id
    inputs: int  # channels, or the size of the vocabulary
    output_sizes: list[int]
    state_bytes: int
    weight_bytes: int
    stack_bytes: int  # of all arrays on the stack during a step
    is_unconditional: bool = True  # whether all steps do the same work
    weights: bytes | None = None  # content of `prefix.bin`, if they are not in the code

    @property
    def outputs(self) -> int:
        """The number of all outputs together."""
        return sum(self.output_sizes)


class Printer:
    """Prints a program, of operations from `passes.optimize`, as a `Source`.

    Args:
        about: Object with `inputs`, `takes_token`, `names`, `delay` and `rate` of the stream.
        in_file: Boolean, whether the weights are in a file of their own. Defaults to `False`.
        apart: Boolean, whether each result has a place of its own in the state. Defaults to
            `False`.
    """

    def __init__(
        self,
        program: Program,
        groups: list[passes.Group],
        prefix: str,
        real: str,
        about: Any,
        in_file: bool = False,
        apart: bool = False,
    ) -> None:
        self.program, self.groups, self.about = program, groups, about
        self.prefix, self.real, self.in_file = prefix, real, in_file
        self.tables: dict[tuple, str] = {}  # content: pointer
        self.arrays: dict[str, tuple] = {}  # name: (type, array)
        self.functions: dict[str, str] = {}  # name: text, in the order of first use
        self.loops: dict[str, str] = {}  # body of a map: name of its function
        self.layers: dict[str, str] = {}  # text of a function of equal layers: its name
        public = "state", "reset", "step", "quantize", "dequantize"
        self.taken = {"s", "x", "y", "token", "weights", *(f"{prefix}_{name}" for name in public)}
        self.statements: list[Statement] = []
        self.offsets, self.sizes = passes.allocate(program, groups, apart)
        self.kept = passes.kept_buffers(program, groups)
        ops = [op for group in groups for op in group]
        self.matrices = [m for op in ops if op.kind == "product" for m in op.matrices]
        scopes = {b: op.scope for op in reversed(ops) for b in program.reads([op])}  # of the first
        self.names = {
            b: self._unique(scopes.get(b, ""), "ring" if b.ring else "state")
            for b in program.states
        }
        self.starts: dict[str, int] = {}  # name of an array of the state: its first byte

    # Names

    def _unique(self, scope, name):
        name = identifier(f"{scope.rpartition('/')[2]}_{name}" if scope else name)
        name = free_name(name, self.taken)
        self.taken.add(name)
        return name

    def table(self, array, scope, name):
        """Returns a pointer to a table of constants."""
        kind, array = TYPES[array.dtype.name], np.ascontiguousarray(array)
        key = kind, array.tobytes()
        if key not in self.tables:
            name = self._unique(scope, name)
            self.tables[key] = f"s->weights + {name}" if self.is_in_file(kind) else name
            self.arrays[name] = kind, array.reshape(-1)
        return self.tables[key]

    def is_in_file(self, kind):
        """Returns whether tables of a type are in a file of their own."""
        return self.in_file and kind == self.real

    def use(self, name, kind=None, **words):
        """Adds a function in C and those that it calls, and returns its name.

        `kind` is the type of its numbers, by default the program's; `words` are replaced in it.
        """
        kind, text, full = kind or self.real, HELPERS[name], name
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
        for name in HELPERS:
            if re.search(rf"\b{name}\(", text):
                text = re.sub(rf"\b{name}\(", f"{self.use(name, kind)}(", text)
        return text if self.real == "float" else re.sub(rf"\b({'|'.join(_MATH)})f\(", r"\1(", text)

    # Addresses

    def pointer(self, b: Buffer, offset: int = 0) -> str:
        """Returns a pointer to an element of a buffer."""
        if b.kind == "input":
            first = self.program.inputs[0]
            return "ids" if b.dtype == "int64" else plus("x", b.base + offset - first.base)
        if b.kind == "output":
            return plus("y", offset)
        if b.kind == "work":
            return f"s->{self.array('work', b.dtype)} + {self.offsets[b] + offset}"
        if b.kind == "constant":
            return plus(self.table(b.data, b.scope, b.name), offset)
        if b.ring is None:
            return plus(self.state(b), offset)
        at, column = divmod(offset, b.ring.width)
        head = f"s->heads[{b.ring.head}]"
        if at:
            head = f"{self.use('row')}({head} + {at}, {b.ring.rows})"
        return f"{plus(self.state(b), column)} + {head} * {b.ring.width}"

    def at(self, cells):
        """Returns a pointer to the first of some numbers."""
        b = self.program.owner(int(cells.flat[0]))
        return self.pointer(b, int(cells.flat[0]) - b.base)

    def state(self, b):
        """Returns a pointer to a state."""
        return f"s->{self.array('states', b.dtype)} + {self.names[b]}"

    def array(self, name, dtype):
        """Returns the name of the state's array of a kind of buffers with a dtype."""
        return name if TYPES[dtype] == self.real else f"{name}_{dtype}"

    def add_statement(self, text, like):
        """Adds a statement of an operation."""
        scope = like.scope or (self.statements[-1].scope if self.statements else "")
        self.statements.append(Statement(text, scope, like.guard))

    # Operations

    def call(self, op):
        """Adds calls of a C function."""
        kind, rows = TYPES[self.program.owner(int(op.args[0][0, 0])).dtype], len(op.args[0])
        vectors = [(self.pointer(op.buffer, op.start), op.size // rows)]
        for cells in op.args:
            step = int(cells[1, 0] - cells[0, 0]) if rows > 1 and cells.size else 0
            vectors.append((self.at(cells) if cells.size else "NULL", step))
        name = self.use(op.name, kind, **op.words)
        self.each_row(op, name, *vectors, *((number, 0) for number in op.numbers))

    def product(self, op):
        """Adds a product of vectors, and of rows of rings, with matrices."""
        start, *operands = op.args
        for values in (self.program.values(start), *op.matrices):
            if values is not None and not np.all(np.isfinite(values)):
                raise ValueError(f"The weights of {op.scope} have values that are not finite.")
        y, begin = (self.pointer(op.buffer), start.shape[1]), self.start(op)
        for cells, matrix in zip(operands, op.matrices, strict=True):
            parts, step = passes.rows_of(self.program, cells)
            runs = list(taps(parts))
            while runs:
                i, count = runs.pop(0)
                p, used = parts[i], parts[i : i + count]
                if p.buffer.ring is None:
                    name, x = "product_N", [(self.pointer(p.buffer, p.offset), step)]
                else:
                    name, x = "convolution_N", self.rows_of_ring(used, step)
                    newest = "NULL", 0
                    if runs and runs[0][1] == 1 and parts[runs[0][0]].size == p.size:
                        q = parts[runs.pop(0)[0]]
                        newest, used = (self.pointer(q.buffer, q.offset), step), [*used, q]
                    x.append(newest)
                columns = matrix[p.start : used[-1].stop].astype(op.buffer.dtype)
                self.columns(op, name, y, begin, x, columns, p.size)
                begin = y

    def rows_of_ring(self, parts, step):
        """Returns the arguments of a convolution for equally distant rows."""
        p, ring = parts[0], parts[0].buffer.ring
        at, column = divmod(p.offset, ring.width)
        apart = (parts[1].offset - p.offset) // ring.width if len(parts) > 1 else 0
        numbers = (plus(f"s->heads[{ring.head}]", at), apart, len(parts), ring.rows, ring.width)
        return [(plus(self.state(p.buffer), column), step), *((n, 0) for n in numbers)]

    def columns(self, op, name, y, start, x, matrix, size):
        """Adds a product of `size` inputs for each row, in blocks of columns.

        y, start and x are pointers, with their steps from row to row.
        """
        rows, n = matrix.shape
        width = min(block_width(n), n)
        w = self.table(in_blocks(matrix), op.scope, "kernel")
        for first, block, count in ((0, width, n // width), (n - n % width, n % width, 1)):
            if block:
                k, loop = first, ""
                if count > 1:
                    k, loop = "k", f"for (int k = 0; k < {count * block}; k += {block})"
                moved = [(plus(p, k) if p != "NULL" else p, step) for p, step in (y, start)]
                of_block = plus(w, f"k * {rows}" if loop else first * rows)
                name_of_block = self.use(name, N=block)
                self.each_row(op, name_of_block, *moved, *x, (of_block, 0), (size, 0), loop=loop)

    def start(self, op):
        """Returns a pointer to the start of a product, and its step from row to row."""
        cells, n = op.args[0], op.args[0].shape[1]
        values = self.program.values(cells)
        if values is not None:
            same = np.all(values == values[0])
            rows = (values[0] if same else values).astype(op.buffer.dtype)
            is_zero = same and not np.any(rows)
            return "NULL" if is_zero else self.table(rows, op.scope, "bias"), 0 if same else n
        found = pieces(self.program, cells)
        if len(found) == 1 and found[0].stride == 1:
            return self.at(cells), n
        self.copied(op, cells)
        return self.pointer(op.buffer), n

    def each_row(self, op, name, *arguments, loop=""):
        """Adds a call for each row, with arguments and their steps from row to row."""
        rows = len(op.args[0])
        loops = [f"for (int r = 0; r < {rows}; r++)"] * (rows > 1) + [loop] * bool(loop)
        texts = (f"{x} + r * {step}" if rows > 1 and step else f"{x}" for x, step in arguments)
        lines = [*loops, f"{name}({', '.join(texts)});"]
        self.add_statement("\n".join("    " * i + line for i, line in enumerate(lines)), op)

    def dot(self, op):
        """Adds sums of products of two variables."""
        y, n, kind = self.pointer(op.buffer), op.size, TYPES[op.buffer.dtype]
        name = self.use("add_products", kind)
        self.add_statement(f"memset(&({y})[0], 0, {n} * sizeof({kind}));", op)
        factors = [op.args]
        if any(as_grid(self.program, cells) is None for cells in op.args):
            factors = [[row[None] for row in rows] for rows in zip(*op.args, strict=True)]
        for a, b in factors:
            matrices = f"{self.grid_arguments(a)}, {self.grid_arguments(b)}"
            self.add_statement(f"{name}({y}, {n}, {len(a)}, {matrices});", op)

    def grid_arguments(self, cells):
        """Returns a pointer to a matrix and its strides, as arguments."""
        found = as_grid(self.program, cells)
        return f"{self.at(cells)}, {found.strides[0]}, {found.strides[1]}"

    def reduce(self, op):
        """Adds sums, products or extrema of several vectors."""
        (cells,) = op.args
        y, n, terms, kind = self.pointer(op.buffer), op.size, len(cells), TYPES[op.buffer.dtype]
        fold, first = _FOLDS[op.name]
        if kind in ("int", "int64_t"):
            first = first.replace("INFINITY", "INT32_MAX" if kind == "int" else "INT64_MAX")
        words = {"NAME": op.name, "FOLD": self.use(fold, kind), "FIRST": first}
        x, (term, step) = self.at(cells), as_grid(self.program, cells).strides
        if n == 1 or term == 1:
            name = self.use("reduce_NAME", kind, **words)
            loop, i = ("", 0) if n == 1 else (f"for (int i = 0; i < {n}; i++)\n    ", "i")
            x = x if n == 1 else f"{x} + i * {step}"
            self.add_statement(f"{loop}({y})[{i}] = {name}({first}, {x}, {terms}, {term});", op)
        else:
            name = self.use("fold_NAME", kind, **words)
            self.copied(op, cells[0])
            self.add_statement(f"{name}({y}, {n}, {terms - 1}, {x} + {term}, {term}, {step});", op)

    def gather(self, op):
        """Adds a row of a table."""
        (table,) = op.matrices
        kind, rows = op.buffer.dtype, len(table)
        tied = [m for m in self.matrices if m.shape == table.T.shape and np.array_equal(m, table.T)]
        if tied:  # a column of the matrix of a product
            name = self.use("lookup_in_columns", TYPES[kind])
            w = self.table(in_blocks(tied[0].astype(kind)), op.scope, "kernel")
            w = f"{w}, {block_width(rows)}"
        else:
            name = self.use("lookup", TYPES[kind])
            w = self.table(table.astype(kind), op.scope, "table")
        y, index = self.pointer(op.buffer), self.at(op.args[0])
        self.add_statement(f"{name}({y}, {op.size}, *({index}), {rows}, {w});", op)

    def copy(self, op):
        """Adds copies of consecutive numbers."""
        self.copied(op, op.args[0])

    store = copy  # to a ring: its oldest row

    def copied(self, op, cells):
        """Copies numbers to consecutive ones of an operation's buffer."""
        b, cells = op.buffer, cells.reshape(-1)
        found = pieces(self.program, cells)
        sources = list({p.buffer: None for p in found})
        is_work = {(source.kind, source.dtype) for source in sources} == {("work", b.dtype)}
        is_alone = len(sources) == 1 and sources[0].ring is None
        if len(found) > 8 and (is_alone or (is_work and 2 * len(found) > len(cells))):
            source = min(sources, key=lambda each: self.offsets.get(each, 0))
            places = cells.astype("int64")
            for each in sources:
                distance = self.offsets.get(each, 0) - self.offsets.get(source, 0) - each.base
                places[(cells >= each.base) & (cells < each.base + each.size)] += distance
            kind = "int16" if places.max() < 2**15 else "int32"
            places = self.table(places.astype(kind), op.scope, "places")
            name = self.use("pick_PLACE", TYPES[source.dtype], PLACE=TYPES[kind])
            y = self.pointer(b, op.start)
            self.add_statement(f"{name}({y}, {len(cells)}, {self.pointer(source)}, {places});", op)
            return
        for p in found:
            y, x = self.pointer(b, op.start + p.start), self.at(cells[p.start :])
            kind = TYPES[p.buffer.dtype]
            if p.stride == 1:
                self.add_statement(f"memcpy({y}, {x}, {p.size} * sizeof({kind}));", op)
            else:
                self.add_statement(f"{self.use('copy', kind)}({y}, {p.size}, {x}, {p.stride});", op)

    # Maps

    def map(self, group):
        """Adds the loops of maps, one for each range with common strides."""
        for part in passes.cut(self.program, group):
            self.loop(part)

    def loop(self, group):
        """Adds the call of a loop, whose function equal loops share."""
        parameters: dict[tuple, str] = {}  # (pointer, type, stride): name
        lines, outputs = self.statements_of(group, parameters)
        heads = [f"{kind} *restrict {name}" for name, (kind, _) in outputs.items()]
        values = [pointer for _, pointer in outputs.values()]
        for (pointer, kind, _), name in parameters.items():
            heads.append(f"const {kind} *{name}")
            values.append(pointer)
        n = len(group[0].args[-1])
        loop = (
            f"    for (int i = 0; i < {n}; i++) {{\n" if n > 1 else "    const int i = 0;\n    {\n"
        )
        body = "".join(f"        {line}\n" for line in lines)
        body = f"({', '.join(heads)})\n{{\n{loop}{body}    }}\n}}"
        if body not in self.loops:
            kinds = list(dict.fromkeys(op.name.lower() for op in group if op.name in MAPS))
            name = self._unique("", "_".join(["each", *kinds[:3], str(n)]))
            self.loops[body] = name
            self.functions[name] = wrapped_head(f"static void {name}", body)
        self.add_statement(f"{self.loops[body]}({', '.join(values)});", group[-1])

    def statements_of(self, group, parameters):
        """Returns the lines for one element of a group, and {name: (type, pointer)} of results."""
        mine, outputs, lines = {op.buffer: f"v{i}" for i, op in enumerate(group)}, {}, []
        for op in group:
            is_real = TYPES[op.buffer.dtype] in ("float", "double")  # Keras converts its operands
            whole = not is_real and reads_integers(self.program, op)
            operands = [self.operand(cells, mine, parameters, whole) for cells in op.args]
            kind = "int32_t" if op.buffer.dtype == "int16" else TYPES[op.buffer.dtype]
            text = self.expression(op, operands, kind)
            lines.append(f"const {kind} {mine[op.buffer]} = {text};")
            if op.buffer in self.kept:
                name = f"y{len(outputs)}"
                outputs[name] = TYPES[op.buffer.dtype], self.pointer(op.buffer, op.start)
                lines.append(f"{name}[i] = {mine[op.buffer]};")
        return lines, outputs

    def expression(self, op, operands, kind):
        """Returns one element of a map as C."""
        is_real = kind in ("float", "double")
        if op.name in HELPERS:
            return f"{self.use(op.name)}({', '.join(operands)})"
        dtype = self.program.owner(int(op.args[0].flat[0])).dtype
        if op.name == "Cast" and kind == "int64_t" and dtype == self.program.real:
            text = "whole({0})"
        elif op.name in _INTEGERS and (not is_real or op.name == "Cast"):
            text = _INTEGERS[op.name].replace("KIND", kind)
        elif op.name in ("Maximum", "Minimum") and is_real:
            text = f"{_FOLDS[op.name[:3].lower()][0]}({{0}}, {{1}})"
        else:
            text = MAPS[op.name].c
            if is_real and (op.name == "Divide" or dtype == "int64"):  # counters are integers
                operands = [f"({kind}){operands[0]}", *operands[1:]]
        return self.linked(text).format(*operands)

    def operand(self, cells, mine, parameters, whole):
        """Returns an operand of a map as C."""
        if cells.ndim > 1:
            return self.at(cells)
        value = passes.uniform(self.program, cells)
        if value is not None:
            is_whole = whole and abs(value) < 2**53 and value == np.rint(value)
            text = str(int(value)) if is_whole else literals(np.array([value]), self.real)[0]
            return f"({text})" if text.startswith("-") else text
        (p,) = pieces(self.program, cells)
        if p.buffer in mine:
            return mine[p.buffer]
        stride = p.stride if len(cells) > 1 else 0
        key = self.at(cells), TYPES[p.buffer.dtype], stride
        name = parameters.setdefault(key, f"x{len(parameters)}")
        return f"{name}[{ {0: '0', 1: 'i'}.get(stride, f'{stride} * i') }]"

    # The whole

    def print(self) -> Source:
        """Prints all operations."""
        for group in self.groups:
            if group[0].kind == "map":
                self.map(group)
            else:
                getattr(self, group[0].kind)(group[0])
        y = Buffer("output", 0, self.program.output.shape, "")
        self.copy(Op("copy", "", y, [self.program.output]))
        for head, (rows, store) in self.heads().items():
            moved = f"{self.use('row')}(s->heads[{head}] + 1, {rows})"
            self.add_statement(f"s->heads[{head}] = {moved};", store)
        reset, step = list(self.reset()), list(self.step())
        members, state_bytes = self.members()
        weight_bytes = sum(array.size * _BYTES[kind] for kind, array in self.arrays.values())
        sums = (re.fullmatch(r"(?:product|convolution)\w*_(\d+)", f) for f in self.functions)
        widest = max((int(found[1]) for found in sums if found), default=0)
        stack_bytes = max(_BYTES[self.real], 4) * min(widest, _SUMS.get(self.real, widest))
        in_file = {n: a for n, (kind, a) in self.arrays.items() if self.is_in_file(kind)}
        has_counts = any(
            op.name == "Divide" and self.program.owner(int(op.args[1].flat[0])).dtype == "int64"
            for op in self.program.ops
        )
        texts = [
            f'#include "{self.prefix}.h"',
            "#include <math.h>\n#include <string.h>",
            _EXACT if has_counts and self.real != "int16_t" else "",
            *self.places(in_file),
            "/* Weights */",
            *(table_text(n, *array) for n, array in self.arrays.items() if n not in in_file),
            "/* Operations */",
            *self.functions.values(),
            "/* The model */",
            _INLINED if self.layers else "",
            *(wrapped_head(f"INLINED void {name}", text) for text, name in self.layers.items()),
            "\n".join([self.reset_signature(), "{", *reset, "}"]),
            "\n".join([self.signature(restrict=True), "{", *step, "}"]),
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
            self.program.output_sizes,
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
        """Yields the body of the function of a step."""
        if any(b.dtype == "int64" for b in self.program.inputs):
            yield "    const int64_t ids[1] = {token};"
        names = {
            name: "int " if self.is_in_file(kind) else f"const {kind} *"
            for name, (kind, _) in self.arrays.items()
        }
        names |= dict.fromkeys(self.names.values(), "int ")
        names |= {"x": f"const {self.real} *", "y": f"{self.real} *", "ids": "const int64_t *"}
        if not any(re.search(r"\bs->", statement.text) for statement in self.statements):
            yield "    (void)s;"
        for guard, statements in itertools.groupby(self.statements, key=lambda s: s.guard):
            lines = self.lines(grouped(list(statements), names))
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
            yield from without_zeros(statement.text).splitlines()

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
        """Returns the condition of C under which the statements of a guard run."""
        return " && ".join(f"*({self.at(np.array(address))})" for address in sorted(guard))

    def heads(self) -> dict[int, tuple[int, Op]]:
        """Returns {head: (number of rows, a store that moves it)}."""
        rings = [(store.buffer.ring, store) for store in self.program.stores]
        return {ring.head: (ring.rows, store) for ring, store in rings if ring is not None}

    def reset(self) -> Iterator[str]:
        """Yields the body of the function that resets a state."""
        yield "    memset(s, 0, sizeof *s);"
        if self.in_file:
            yield "    s->weights = weights;"
        for b in self.program.states:
            if b.data is None or not np.any(b.data):
                continue
            data = np.asarray(b.data).reshape(-1).astype(b.dtype.replace("fixed", "int"))
            target = self.state(b)
            if np.all(data == data[0]):
                yield f"    for (int i = 0; i < {b.size}; i++)"
                yield f"        ({target})[i] = {literals(data[:1], self.real)[0]};"
            else:
                table = self.table(data, "", f"{self.names[b]}_first")
                yield f"    memcpy({target}, {table}, {b.size} * sizeof({TYPES[b.dtype]}));"

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
        pointer = "*restrict " if restrict else "*"
        x = "int token" if self.about.takes_token else f"const {self.real} {pointer}x"
        y = f"{self.real} {pointer}y"
        return f"void {self.prefix}_step({self.prefix}_state *s, {x}, {y})"

    def header(self, members, state_bytes, weight_bytes, stack_bytes):
        """Returns the content of `prefix.h` after the comment."""
        upper, about = self.prefix.upper(), self.about
        names = ", ".join(map(_string, about.names))
        names = f"#define {upper}_NAMES {names} /* of the outputs */\n" if names else ""
        delay, rate = _common(about.delay, str), _common(about.rate, _quotient)
        is_fixed = self.real == "int16_t"
        if (delay, rate) != ("0", "1"):
            names = (
                "/* Step DELAY + RATE * n (rounded down) writes output n of the model; other steps "
                f"write {'INT16_MIN' if is_fixed else 'NAN'}. */\n"
                f"#define {upper}_DELAY {delay}\n#define {upper}_RATE {rate}\n{names}"
            )
        quantize = f"void {self.prefix}_quantize(const float *x, int16_t *q);\n"
        conversions = (
            "\n/* For tests: convert inputs from, and outputs to, floating point. */\n"
            f"void {self.prefix}_dequantize(const int16_t *q, float *y);\n"
            f"{'' if about.takes_token else quantize}"
        )
        values = {
            "UPPER": upper,
            "PREFIX": self.prefix,
            "KIND": "TOKENS" if about.takes_token else "INPUTS",
            "INPUTS": str(about.inputs),
            "OUTPUTS": str(self.program.output.size),
            "STATE": str(state_bytes),
            "POINTER": " and a pointer 8" if self.in_file else "",
            "BYTES": str(weight_bytes),
            "STACK": str(stack_bytes),
            "NAMES": names,
            "MEMBERS": "\n".join(f"    {member}" for member in members),
            "WEIGHTS": (
                f" `weights` has the content of {self.prefix}.bin." if self.in_file else ""
            ),
            "RESET": self.reset_signature(),
            "STEP": self.signature(),
            "MORE": conversions if is_fixed else "",
        }
        return filled_template("model.h", values)


def reads_integers(program: Program, op: Op) -> bool:
    """Returns whether all variable operands of a map are integers or conditions."""
    owners = [b for cells in op.args for b in program.owners(cells)]
    return all(b.dtype in ("int64", "bool") for b in owners if b.kind != "constant")


def _size_of(kind):
    return 8 if kind.endswith("*") else _BYTES[kind]  # a pointer has 8 bytes, or fewer


def _common(values, text):
    """Returns the text of the common value of all outputs, or those of each of them."""
    values = keras.tree.flatten(values)
    return ", ".join(map(text, values[:1] if len(set(values)) == 1 else values))


def _quotient(number):
    """Returns a fraction as C, or an integer."""
    if number == int(number):
        return str(number)
    return f"({float(number.numerator)} / {number.denominator})"


_NOT_FINITE = {"nan": "NAN", "inf": "INFINITY", "-inf": "-INFINITY"}


def literals(values: np.ndarray, kind: str) -> list[str]:
    """Returns numbers as C, floats in a type."""
    if values.dtype.kind in "iub":
        return values.astype("int64").astype("U").tolist()
    numbers = values.astype("float32" if kind == "float" else "float64").astype("U").tolist()
    suffix = "f" if kind == "float" else ""
    return [_NOT_FINITE.get(number) or number + suffix for number in numbers]


def table_text(name: str, kind: str, array: np.ndarray) -> str:
    """Returns a table of numbers as C."""
    numbers = literals(array.reshape(-1), kind)
    rows = [", ".join(numbers[i : i + 8]) for i in range(0, len(numbers), 8)]
    text = ",\n    ".join(rows)
    return f"static const {kind} {name}[{len(numbers)}] = {{\n    {text}\n}};"


def without_zeros(statement: str) -> str:
    """Returns a statement of C without offsets of 0."""
    return re.sub(r" \+ 0(?![\w.])", "", statement)


def plus(pointer: str, offset: Any) -> str:
    """Returns a pointer plus an offset, as C."""
    return f"{pointer} + {offset}" if offset else pointer


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
    name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return f"_{name}" if name[:1].isdigit() else name


def _string(text):
    """Returns the UTF-8 of a text as a C string literal.

    A raw `\\n`, `\\r` or `??/` would end the literal, and the rest of a name would be code. So all
    but printable ASCII are octal escapes.
    """
    octets = text.encode("utf-8", "backslashreplace")
    plain = set(range(0x20, 0x7F)) - set(b'"?\\')
    return '"' + "".join(chr(o) if o in plain else f"\\{o:03o}" for o in octets) + '"'


def comment_text(text: str) -> str:
    """Returns a text, such as a name, as a line of a comment in C or JavaScript.

    What ends or nests a comment, splices lines, or is half of a trigraph is escaped.

    Example:

    >>> comment_text("a*/ é")
    'a*\\\\x2f \\\\xe9'
    """
    text = text.encode("unicode_escape").decode()
    return text.replace("*/", "*\\x2f").replace("/*", "/\\x2a").replace("??", "?\\x3f")


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
