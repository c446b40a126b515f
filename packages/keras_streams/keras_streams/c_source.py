"""Prints a `Program` as C99, with a function per kind of operation and a table per weight."""

import collections
import dataclasses
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_streams import program as p
from keras_streams.c_code import Source, _string, comment_text
from keras_streams.program import Expression, Part, Program, Vector

# The operations in C, for float; `Printer` substitutes its own type. OUTPUTS becomes a constant, so
# that compilers know the length of the inner loops. These run over outputs, so they vectorize
# without reordering sums.
TEMPLATES = {
    "push": """
static void push(float *ring, int *newest, int steps, int channels, const float *x)
{
    *newest = *newest + 1 == steps ? 0 : *newest + 1;
    memcpy(ring + *newest * channels, x, (size_t)channels * sizeof *x);
}
""",
    "tap": """
/* Returns the vector pushed `delay` steps ago. */
static const float *tap(const float *ring, int newest, int steps, int channels, int delay)
{
    int step = newest - delay;
    return ring + (step < 0 ? step + steps : step) * channels;
}
""",
    "dense": """
/* y = start + x kernel; a start of NULL means zeros. */
static void dense_OUTPUTS(
    int inputs, const float *x, const float *kernel, const float *start, float *y)
{
    float sum[OUTPUTS] = {0};
    if (start)
        memcpy(sum, start, sizeof sum);
    for (int i = 0; i < inputs; i++)
        for (int o = 0; o < OUTPUTS; o++)
            sum[o] += x[i] * kernel[i * OUTPUTS + o];
    memcpy(y, sum, sizeof sum);
}
""",
    "convolution": """
/* y = start + x kernel, summed over the taps of a ring. */
static void convolution_OUTPUTS(
    const float *ring, int newest, int steps, int inputs,
    int taps, int dilation, const float *kernel, const float *start, float *y)
{
    float sum[OUTPUTS] = {0};
    if (start)
        memcpy(sum, start, sizeof sum);
    for (int j = taps - 1; j >= 0; j--, kernel += inputs * OUTPUTS) {
        const float *x = tap(ring, newest, steps, inputs, j * dilation);
        for (int i = 0; i < inputs; i++)
            for (int o = 0; o < OUTPUTS; o++)
                sum[o] += x[i] * kernel[i * OUTPUTS + o];
    }
    memcpy(y, sum, sizeof sum);
}
""",
    "softmax": """
static void softmax(int n, const float *x, float *y)
{
    float largest = x[0], sum = 0;
    for (int k = 1; k < n; k++)
        largest = x[k] > largest ? x[k] : largest;
    for (int k = 0; k < n; k++) {
        y[k] = expf(x[k] - largest);
        sum += y[k];
    }
    for (int k = 0; k < n; k++)
        y[k] /= sum;
}
""",
    "log_softmax": """
static void log_softmax(int n, const float *x, float *y)
{
    float largest = x[0], sum = 0;
    for (int k = 1; k < n; k++)
        largest = x[k] > largest ? x[k] : largest;
    for (int k = 0; k < n; k++)
        sum += expf(x[k] - largest);
    for (int k = 0; k < n; k++)
        y[k] = x[k] - largest - logf(sum);
}
""",
    "normalize": """
static void normalize(int n, const float *x, float epsilon, int is_centered, float *y)
{
    float mean = 0, variance = 0;
    for (int k = 0; k < n && is_centered; k++)
        mean += x[k] / (float)n;
    for (int k = 0; k < n; k++)
        variance += (x[k] - mean) * (x[k] - mean) / (float)n;
    for (int k = 0; k < n; k++)
        y[k] = (x[k] - mean) / sqrtf(variance + epsilon);
}
""",
    "lookup": """
/* Looks up the embedding of a token; NAN if the token is out of range. */
static void lookup(
    int token, int tokens, int channels, const float *table, int row, int stride, float *y)
{
    for (int k = 0; k < channels; k++)
        y[k] = token < 0 || token >= tokens ? NAN : table[token * row + k * stride];
}
""",
    "spread": """
/* Builds increasing rows from their middle values in x and the gaps between values. */
static void spread(int rows, int columns, int middle, const float *x, const float *gap, float *y)
{
    for (int r = 0; r < rows; r++, x += columns, gap += columns, y += columns) {
        y[middle] = x[middle];
        for (int k = middle + 1; k < columns; k++)
            y[k] = y[k - 1] + gap[k];
        for (int k = middle - 1; k >= 0; k--)
            y[k] = y[k + 1] - gap[k];
    }
}
""",
    "fill": """
static void fill(int n, float value, float *y)
{
    for (int k = 0; k < n; k++)
        y[k] = value;
}
""",
    "sigmoid": "static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }",
    # NaN propagates, as in Keras.
    "maximum": "static float maximum(float a, float b) { return a < b ? b : a; }",
    "minimum": "static float minimum(float a, float b) { return b < a ? b : a; }",
}
# Rounding errors of a running mean are computed as differences that algebra would set to 0.
_EXACT = """\
#if defined __FAST_MATH__ || defined __ASSOCIATIVE_MATH__ || defined _M_FP_FAST
#error "A mean over all steps cannot be compiled with -ffast-math or /fp:fast."
#endif"""
_NEEDS = {"convolution": ["tap"]}
_MATH = {"absolute": "fabsf", "is_nan": "isnan"} | {
    name: f"{name}f" for name in ("exp", "log", "log1p", "sqrt", "tanh", "erf")
}
BYTES = {"int8_t": 1, "int16_t": 2, "int32_t": 4, "float": 4, "double": 8}
_IN_DOUBLE = re.compile(r"\b(exp|log|log1p|sqrt|tanh|erf|fabs)f\b")


def print_c(program: Program, prefix: str, real: str) -> Source:
    """Prints a program.

    Args:
        program: `Program` with an output.
        prefix: Prefix of the public names, a C identifier.
        real: `"float"` or `"double"`.
    """
    return Printer(program, prefix, real).print()


class Printer:
    """Prints a program that computes in a single type.

    Args:
        program: `Program` with an output.
        prefix: Prefix of the public names.
        real: The C type of all values.
    """

    templates, needs = TEMPLATES, _NEEDS
    nothing = "NAN"  # outputs at steps without an output

    def __init__(self, program: Program, prefix: str, real: str) -> None:
        self.program, self.prefix, self.real = program, prefix, real
        self.f = "f" if real == "float" else ""  # suffix of constants and math.h functions
        self.bytes = BYTES[real]
        self.functions: dict[str, str] = {}  # name: text, in the order of first use
        self.elementwise: dict[p.Function, str] = {}  # Function: name in C
        self.names = collections.defaultdict(str)  # id of a value: name in C
        self.given: set[int] = set()  # ids of values that are arguments
        self.skipped: set[int] = set()  # ids of operations that are not printed
        # The value that would be copied to the output is written there directly.
        copy = program.operations[-1]
        assert isinstance(copy, p.Copy) and program.output is not None  # by `finish`
        self.outputs = program.output.size
        if copy.x.kind == "value" and copy.x.whole is None:
            self.names[id(copy.x)] = "y"
            self.given.add(id(copy.x))
            self.skipped.add(id(copy))

    def print(self) -> Source:
        """Returns the program as C."""
        program = self.program
        for operation in program.operations:
            if id(operation) not in self.skipped:
                self._call(operation)  # collects the functions, whose names values must avoid
        reset = "\n".join(f"    {line}" for line in self._reset())
        self._place_values()
        step = "\n".join(self._part(self.program.body, 1))
        members = list(self._members())
        counters = len(self.program.rings) + (self.program.counter is not None)
        arrays = sum(BYTES[kind] * math.prod(shape) for kind, _, shape in self._arrays())
        state_bytes = self._aligned(arrays, counters)
        widest = max(
            (o.y.size for o in program.operations if isinstance(o, (p.Dense, p.Convolution))),
            default=0,
        )
        stack_bytes = (self._stack(self.program.body) + widest) * self.bytes
        tables, weight_bytes = self._tables()
        header = self._header(members, state_bytes, weight_bytes, stack_bytes)
        functions = "\n\n".join(self.functions.values())
        texts = [
            f'#include "{self.prefix}.h"',
            "#include <math.h>\n#include <string.h>",
            _EXACT if any(state.grows for state in program.states) else "",
            "/* Weights */",
            tables,
            "/* Operations */",
            functions,
            "/* The model */",
            f"void {self.prefix}_reset({self.prefix}_state *s)\n{{\n{reset}\n}}",
            f"{self._signature()}\n{{\n{step}\n}}",
            self._more_code(),
        ]
        code = "\n\n".join(text for text in texts if text) + "\n"
        return Source(
            self.prefix,
            "",
            header,
            code,
            self.real,
            program.names,
            program.takes_token,
            program.inputs,
            self.outputs,
            state_bytes,
            weight_bytes,
            stack_bytes,
        )

    def _reset(self):
        """Yields the statements that start a stream."""
        yield "memset(s, 0, sizeof *s);"
        for ring in (r for r in self.program.rings if r.fill):
            size = ring.steps * ring.channels
            yield statement(self._use("fill"), size, self._number(ring.fill), f"s->{ring.name}[0]")
        for state in (s for s in self.program.states if s.fill):
            yield statement(
                self._use("fill"), state.size, self._number(state.fill), f"s->{state.name}"
            )
        counter = self.program.counter
        if counter is not None and counter.first:  # the padding before the first step
            x = "" if self.program.takes_token else f"x[{self.program.inputs}] = {{0}}, "
            yield f"{self.real} {x}y[{self.outputs}];"
            yield f"for (s->step = {counter.first}; s->step < 0;)"
            argument = "0" if self.program.takes_token else "x"
            yield f"    {self.prefix}_step(s, {argument}, y);"

    def _aligned(self, size, counters):
        """Returns the size of the state: its arrays and 4-byte counters, with padding."""
        if counters:
            size = -(-size // 4) * 4 + 4 * counters
            return -(-size // self.bytes) * self.bytes
        return size or 4  # `int nothing`

    def _stack(self, part):
        """Returns the most elements on the stack at once within a part."""
        inner = (self._stack(item) for item in part.items if isinstance(item, Part))
        return sum(v.size for v in self.declared[id(part)]) + max(inner, default=0)

    def _tables(self):
        """Returns the tables of the weights, and their size in bytes."""
        tables = [
            self.table(w.name, self.real, map(self._number, w.array.flat), w.array.shape, w.axes)
            for w in self.program.weights
        ]
        return "\n\n".join(tables), sum(w.size for w in self.program.weights) * self.bytes

    def table(
        self, name: str, kind: str, numbers: Iterable[str], shape: Sequence[int], axes: str = ""
    ) -> str:
        """Returns a table of constants."""
        comment = f" /* {axes} */" if axes else ""
        text = textwrap.fill(
            ", ".join(numbers),
            98,
            initial_indent="    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        size = " * ".join(map(str, shape))
        return f"static const {kind} {name}[{size}] = {{{comment}\n{text}\n}};"

    # The header

    def _header_includes(self):
        return ""

    def _more_declarations(self):
        return ""

    def _more_code(self):
        return ""

    def _signature(self):
        x = "int token" if self.program.takes_token else f"const {self.real} *x"
        return f"void {self.prefix}_step({self.prefix}_state *s, {x}, {self.real} *y)"

    def _header(self, members, state_bytes, weight_bytes, stack_bytes):
        upper = self.prefix.upper()
        inputs = "TOKENS" if self.program.takes_token else "INPUTS"
        lines = "\n".join(f"    {member}" for member in members)
        names = ", ".join(map(_string, self.program.names))
        names = f"#define {upper}_NAMES {names} /* of the outputs */\n" if names else ""
        delay, rate = self.program.delay, self.program.rate
        if (delay, rate) != (0, 1):
            names = (
                "/* Step DELAY + RATE * n writes output n of the model; other steps write "
                f"{self.nothing}. */\n"
                f"#define {upper}_DELAY {delay}\n#define {upper}_RATE {rate}\n{names}"
            )
        return f"""\
#ifndef {upper}_H
#define {upper}_H
{self._header_includes()}
#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_{inputs} {self.program.inputs}
#define {upper}_OUTPUTS {self.outputs}
#define {upper}_STATE_BYTES {state_bytes} /* sizeof({self.prefix}_state) if int has 4 bytes */
#define {upper}_WEIGHT_BYTES {weight_bytes}
#define {upper}_STACK_BYTES {stack_bytes} /* arrays of a step, without call frames */
{names}
/* The state of one stream. */
typedef struct {{
{lines}
}} {self.prefix}_state;

/* Starts or restarts a stream. */
void {self.prefix}_reset({self.prefix}_state *s);

/* Reads one time step x and writes the outputs y; x and y must not overlap. */
{self._signature()};
{self._more_declarations()}
#ifdef __cplusplus
}}
#endif

#endif
"""

    def _members(self):
        for kind, name, shape in self._arrays():
            yield f"{kind} {name}{''.join(f'[{size}]' for size in shape)};"
        for ring in self.program.rings:
            yield f"int {ring.name}_newest;"
        if self.program.counter is not None:
            yield "int step; /* cyclic */"
        elif not self.program.rings and not self.program.states:
            yield "int nothing;"

    def _arrays(self):
        """Returns the arrays of the state as (type, name, shape), widest types first."""
        rings = [(self._ring_type(r), r.name, (r.steps, r.channels)) for r in self.program.rings]
        states = [(self.real, state.name, (state.size,)) for state in self.program.states]
        return sorted([*rings, *states], key=lambda array: -BYTES[array[0]])

    def _ring_type(self, ring):
        return self.real

    def _for_ring(self, function, ring):
        """Returns the name of a function in its version for the ring's type."""
        return function

    def _number(self, value):
        if not np.isfinite(value):
            return "NAN" if np.isnan(value) else "-INFINITY" if value < 0 else "INFINITY"
        text = str(np.float32(value) if self.real == "float" else np.float64(value))
        return text + self.f

    # The step

    def _place_values(self):
        """Declares each value in the innermost part that contains all of its uses."""
        self.declared = collections.defaultdict(list)  # id of a part: values
        seen = {}  # id of a value: (value, path of parts)

        def visit(part, path):
            path = [*path, part]
            for item in part.items:
                if isinstance(item, Part):
                    visit(item, path)
                elif id(item) not in self.skipped:
                    for vector in _vectors(item):
                        use(vector if vector.whole is None else vector.whole, path)

        def use(value, path):
            if value.kind != "value" or id(value) in self.given:
                return
            _, common, first = seen.setdefault(id(value), (value, path, path))
            same = [a for a, b in zip(common, path, strict=False) if a is b]
            seen[id(value)] = value, same, first

        visit(self.program.body, [])
        self.wanted = {}  # id of a value: preferred name
        self.clocked = set()  # ids of values that look uninitialized to a compiler
        for value, path, first in seen.values():
            self.declared[id(path[-1])].append(value)
            if any(part.clock is not None for part in first[len(path) :]):
                self.clocked.add(id(value))
            # A value used outside its part is named after the part.
            leaves = len(first) > len(path)
            self.wanted[id(value)] = p.identifier(first[len(path)].name) if leaves else value.name
        taken = {"s", "x", "y", "token", "memcpy", *_KEYWORDS, *self.functions}
        taken.update(weight.name for weight in self.program.weights)
        self._name_values(self.program.body, frozenset(taken))

    def _name_values(self, part, taken):
        """Names the values of a part; an inner part never shadows a name."""
        taps = [o.y for o in part.items if isinstance(o, p.Tap)]
        for value in [*self.declared[id(part)], *taps]:
            name = wanted = self.wanted.get(id(value), value.name)
            number = 1
            while name in taken:
                number += 1
                name = f"{wanted}_{number}"
            taken = taken | {name}
            self.names[id(value)] = name
        for item in part.items:
            if isinstance(item, Part):
                self._name_values(item, taken)

    def _part(self, part, depth):
        """Yields the lines of C for a part."""
        indent = "    " * depth
        values, counter = self.declared[id(part)], self.program.counter
        is_pure = not (self.program.rings or self.program.states or counter)
        if not values and depth == 1 and is_pure:
            yield f"{indent}(void)s;"
        for value in values:
            zero = " = {0}" if id(value) in self.clocked else ""
            yield f"{indent}{self.real} {self.names[id(value)]}[{value.size}]{zero};"
        if depth == 1 and is_pure and values:
            yield f"{indent}(void)s;"
        if values:
            yield ""
        for item in part.items:
            if isinstance(item, Part):
                comment = f"/* {comment_text(f'{item.name}: {item.comment}')} */"
                lines = list(self._part(item, depth + 1))
                if lines:
                    yield f"{indent}{self._when(item.clock)}{{ {comment}"
                    yield from lines
                    yield f"{indent}}}"
            elif id(item) not in self.skipped:
                yield wrapped(indent, self._call(item))
        if depth == 1 and counter is not None:
            yield f"{indent}s->step += s->step + 1 < {counter.end} ? 1 : {1 - counter.cycle};"

    def _when(self, clock):
        """Returns the `if` for a clock, or an empty string."""
        if clock is None:
            return ""
        offset, pause = clock.offset, clock.pause
        since = (
            "s->step" if offset == 0 else f"(s->step {'-' if offset > 0 else '+'} {abs(offset)})"
        )
        conditions = [f"s->step >= {offset}"] if offset > self.program.counter.first else []
        conditions += [f"{since} % {pause} == 0"] if pause > 1 else []
        return f"if ({' && '.join(conditions)}) "

    def _call(self, operation):
        return getattr(self, f"_{type(operation).__name__.lower()}")(operation)

    def _at(self, vector):
        """Returns a vector as a pointer."""
        if vector is None:
            return "NULL"
        whole = vector if vector.whole is None else vector.whole
        name = {"input": "x", "output": "y", "state": f"s->{whole.name}"}.get(vector.kind)
        if name is None:
            name = whole.name if vector.kind == "weight" else self.names[id(whole)]
        return f"{name} + {vector.start}" if vector.start else name

    # Operations: each returns a call and adds the function that it calls

    def _use(self, name, outputs=None):
        """Adds a template's function and returns its name."""
        for needed in self.needs.get(name, []):
            self._use(needed)
        text = self.templates[name]
        if outputs is not None:
            name, text = f"{name}_{outputs}", text.replace("OUTPUTS", str(outputs))
        self.functions[name] = self._typed(text.strip())
        return name

    def _typed(self, text):
        if self.real == "float":
            return text
        return _IN_DOUBLE.sub(r"\1", re.sub(r"\bfloat\b", self.real, text)).replace(".0f", ".0")

    def _push(self, push):
        ring, name = push.ring, self._use(self._for_ring("push", push.ring))
        at = f"s->{ring.name}[0]", f"&s->{ring.name}_newest", ring.steps, ring.channels
        return statement(name, *at, self._at(push.x))

    def _ring(self, ring):
        return f"s->{ring.name}[0]", f"s->{ring.name}_newest", ring.steps, ring.channels

    def _tap(self, tap):
        call = statement(self._use("tap"), *self._ring(tap.ring), tap.delay)
        return f"const {self.real} *{self.names[id(tap.y)]} = {call}"

    def _dense(self, dense):
        name = self._use("dense", dense.y.size)
        vectors = dense.x, dense.kernel, dense.start, dense.y
        return statement(name, dense.x.size, *map(self._at, vectors))

    def _convolution(self, convolution):
        name = self._use("convolution", convolution.y.size)
        taps = convolution.kernel.array.shape[0]
        vectors = convolution.kernel, convolution.start, convolution.y
        ring = self._ring(convolution.ring)
        return statement(name, *ring, taps, convolution.dilation, *map(self._at, vectors))

    def _softmax(self, softmax):
        name = self._use("log_softmax" if softmax.log else "softmax")
        return statement(name, softmax.x.size, self._at(softmax.x), self._at(softmax.y))

    def _normalize(self, normalize):
        options = self._number(normalize.epsilon), int(normalize.centered), self._at(normalize.y)
        name, n = self._use("normalize"), normalize.x.size
        return statement(name, n, self._at(normalize.x), *options)

    def _lookup(self, lookup):
        channels = lookup.y.size
        strides = (1, lookup.tokens) if lookup.transposed else (channels, 1)
        table, y = self._at(lookup.table), self._at(lookup.y)
        return statement(self._use("lookup"), "token", lookup.tokens, channels, table, *strides, y)

    def _fill(self, fill):
        value = self._number(fill.value)
        return statement(self._use("fill"), fill.y.size, value, self._at(fill.y))

    def _spread(self, spread):
        sizes = spread.x.size // spread.columns, spread.columns, spread.middle
        return statement(
            self._use("spread"), *sizes, *map(self._at, (spread.x, spread.gap, spread.y))
        )

    def _copy(self, copy):
        return statement("memcpy", self._at(copy.y), self._at(copy.x), f"{copy.x.size} * sizeof *y")

    def _elementwise(self, elementwise):
        name, n = self._function(elementwise.function), elementwise.ys[0].size
        return statement(name, n, *map(self._at, (*elementwise.xs, *elementwise.ys)))

    # Elementwise functions

    def _function(self, function):
        """Adds an elementwise function and returns its name."""
        if function not in self.elementwise:
            self.elementwise[function] = self._add_loop(function, list(self._lines(function)))
        return self.elementwise[function]

    def _add_loop(self, function, lines):
        """Adds a function that runs statements for each element, and returns its name."""
        name, number = function.name, 1
        while name in self.functions or name in self.templates:
            number += 1
            name = f"{function.name}_{number}"
        xs = [f"const {self.real} *{parameter}" for parameter in function.parameters]
        ys = [f"{self.real} *restrict {key}" for key in function.outputs]
        head = wrapped("", f"static void {name}({', '.join(['int n', *xs, *ys])})")
        body = "\n".join(f"        {line}" for line in lines)
        begin, end = (" {", "\n    }") if len(lines) > 1 else ("", "")
        loop = f"    for (int k = 0; k < n; k++){begin}\n{body}{end}"
        self.functions[name] = f"{head}\n{{\n{loop}\n}}"
        return name

    def _lines(self, function):
        """Yields the statements for one element."""
        uses = collections.Counter(id(n) for n in _distinct(function.outputs.values()))
        uses.update(
            id(o)
            for n in _distinct(function.outputs.values())
            for o in n.operands
            if isinstance(o, Expression)
        )
        written = {}
        for node in _distinct(function.outputs.values()):  # operands first
            keys = [key for key, output in function.outputs.items() if output is node]
            text = self._expression(node, written, function)
            if keys:
                yield f"{keys[0]}[k] = {text};"
                text = f"{keys[0]}[k]"
                for key in keys[1:]:
                    yield f"{key}[k] = {text};"
            elif uses[id(node)] > 2 and node.operator not in ("parameter", "number"):
                name = f"t{len([w for w in written.values() if w[0][:1] == 't'])}"
                yield f"const {self.real} {name} = {text};"
                text = name
            else:
                written[id(node)] = text, _PRECEDENCE.get(node.operator, 9)
                continue
            written[id(node)] = text, 9

    def _expression(self, node, written, function):
        operator, operands = node.operator, node.operands
        if operator == "parameter":
            return f"{operands[0]}[{0 if function.parameters[operands[0]] else 'k'}]"
        if operator == "number":
            return self._number(operands[0])
        texts = [written[id(operand)] for operand in operands]
        if operator in _PRECEDENCE:
            own, parts = _PRECEDENCE[operator], []
            for i, (text, precedence) in enumerate(texts):
                # A right operand needs parentheses at equal precedence too: a - (b - c).
                parts.append(f"({text})" if precedence < own + (i > 0) else text)
            if operator == "negative":
                return f"-{parts[0]}" if texts[0][1] == 9 else f"-({texts[0][0]})"
            if operator == "where":
                return f"{parts[0]} ? {texts[1][0]} : {texts[2][0]}"
            return f" {operator} ".join(parts)
        arguments = ", ".join(text for text, _ in texts)
        if operator in _MATH:
            return f"{self._typed(_MATH[operator])}({arguments})"
        return f"{self._use(operator)}({arguments})"


_KEYWORDS = (
    "auto break case char const continue default do double else enum extern float for goto if "
    "inline int long register restrict return short signed sizeof static struct switch typedef "
    "union unsigned void volatile while"
).split()

_PRECEDENCE = {"where": 1, "<": 2, "+": 3, "-": 3, "*": 4, "/": 4, "negative": 5}


def _distinct(expressions: Iterable[Expression]) -> list[Expression]:
    """Returns the nodes of expressions, each once and after its operands."""
    found: dict[int, Expression] = {}

    def visit(node):
        if id(node) not in found:
            for operand in node.operands:
                if isinstance(operand, Expression):
                    visit(operand)
            found[id(node)] = node

    for expression in expressions:
        visit(expression)
    return list(found.values())


def _vectors(operation: p.Operation) -> Iterator[Vector]:
    """Yields the vectors that an operation reads or writes."""
    for field in dataclasses.fields(operation):
        value = getattr(operation, field.name)
        yield from (v for v in (value if isinstance(value, tuple) else [value]) if _is_vector(v))


def _is_vector(value):
    return isinstance(value, Vector)


def statement(name: str, *arguments: object) -> str:
    """Returns a call as a statement."""
    return f"{name}({', '.join(map(str, arguments))});"


def wrapped(indent: str, line: str) -> str:
    """Returns a line of C, wrapped after commas."""
    text = textwrap.fill(
        line.replace(" ", "\0").replace(",\0", ", "),
        100,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.replace("\0", " ")
