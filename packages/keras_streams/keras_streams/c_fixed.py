"""Prints a `Program` as integer-only C: int8 weights, int16 values, int32 sums.

The rings of convolutions may keep only the upper 8 bits of the values.

A vector is in fixed point: q stands for q / 2**bits, with as many fractional bits as the largest
value on representative inputs allows. Each column of weights has its own scale. Functions of one
variable, such as tanh, are tables with linear interpolation: of 513 equidistant values, or, where
that is closer, of 32 values for each power of two, as for a logarithm.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

from keras_streams import program as p
from keras_streams.c_source import BYTES, TEMPLATES, Printer, Source, statement
from keras_streams.interpreter import evaluate, interpret
from keras_streams.program import Expression, Program, Vector, Weight

_SEGMENTS = 512  # in a table
_PER_POWER = 32  # segments for each power of two, in the other kind of table
_GOOD_ENOUGH = 32  # of 32767, error of a table
_SCALE_BITS = 24  # of the largest scale in a matrix
_HEADROOM = 1.25  # for inputs larger than the representative ones
# These saturate beyond +-8, so their tables cover that range, whatever the range of the variable.
_SATURATING = {"sigmoid", "tanh", "erf"}
_SATURATING_BITS = 12

_TEMPLATES = {name: TEMPLATES[name] for name in ("push", "tap", "fill")} | {
    "clip16": """
/* Clips to 16 bits without INT16_MIN, which marks minus infinity or, in outputs, no output. */
static int16_t clip16(int64_t x)
{
    return (int16_t)(x < -32767 ? -32767 : x > 32767 ? 32767 : x);
}
""",
    "align": """
/* x / 2^shift, rounded. */
static int32_t align(int32_t x, int shift)
{
    return shift > 0 ? (x + (1 << (shift - 1))) >> shift : x * (1 << -shift);
}
""",
    "rescale": """
/* sum * scale / 2^shift, rounded. */
static int64_t rescale(int32_t sum, int32_t scale, int shift)
{
    return ((int64_t)sum * scale + ((int64_t)1 << (shift - 1))) >> shift;
}
""",
    "dense": """
/* y = start + x kernel, with a scale for each column; bias and start may be NULL. */
static void dense_OUTPUTS(
    int inputs, const int16_t *x, const int8_t *kernel, const int32_t *scale, int shift,
    const int32_t *bias, const int16_t *start, int start_shift, int16_t *y)
{
    int32_t sum[OUTPUTS] = {0};
    if (bias)
        memcpy(sum, bias, sizeof sum);
    for (int i = 0; i < inputs; i++)
        for (int o = 0; o < OUTPUTS; o++)
            sum[o] += x[i] * kernel[i * OUTPUTS + o];
    for (int o = 0; o < OUTPUTS; o++) {
        int32_t more = start ? align(start[o], start_shift) : 0;
        y[o] = clip16(rescale(sum[o], scale[o], shift) + more);
    }
}
""",
    "convolution": """
/* y = start + x kernel, summed over the taps of a ring; see `dense`. */
static void convolution_OUTPUTS(
    const int16_t *ring, int newest, int steps, int inputs, int taps, int dilation,
    const int8_t *kernel, const int32_t *scale, int shift,
    const int32_t *bias, const int16_t *start, int start_shift, int16_t *y)
{
    int32_t sum[OUTPUTS] = {0};
    if (bias)
        memcpy(sum, bias, sizeof sum);
    for (int j = taps - 1; j >= 0; j--, kernel += inputs * OUTPUTS) {
        const int16_t *x = tap(ring, newest, steps, inputs, j * dilation);
        for (int i = 0; i < inputs; i++)
            for (int o = 0; o < OUTPUTS; o++)
                sum[o] += x[i] * kernel[i * OUTPUTS + o];
    }
    for (int o = 0; o < OUTPUTS; o++) {
        int32_t more = start ? align(start[o], start_shift) : 0;
        y[o] = clip16(rescale(sum[o], scale[o], shift) + more);
    }
}
""",
    "push_8": """
/* Pushes the upper 8 of the 16 bits. */
static void push_8(int8_t *ring, int *newest, int steps, int channels, const int16_t *x)
{
    *newest = *newest + 1 == steps ? 0 : *newest + 1;
    for (int k = 0; k < channels; k++) {
        int32_t rounded = align(x[k], 8);
        ring[*newest * channels + k] = (int8_t)(rounded > 127 ? 127 : rounded);
    }
}
""",
    "function": """
/* Interpolates a function of x in a table of 513 values. */
static int32_t function(const int16_t *table, int32_t x)
{
    int32_t place = clip16(x) + 32768, i = place >> 7;
    return table[i] + (((table[i + 1] - table[i]) * (place & 127) + 64) >> 7);
}
""",
    "function_by_powers": """
/* Interpolates a function of x in a table of 705 values, 32 for each power of two. */
static int32_t function_by_powers(const int16_t *table, int32_t x)
{
    int32_t size = clip16(x), sign = size < 0 ? -1 : 1, shift = 0;
    size *= sign;
    while (size >> shift >= 64)
        shift++;
    const int16_t *at = table + 352 + sign * (32 * shift + (size >> shift));
    int32_t part = size & ((1 << shift) - 1);
    return at[0] + (((at[sign] - at[0]) * part + (1 << shift >> 1)) >> shift);
}
""",
    "softmax": """
/* `table` is that of exp, for differences with one fractional bit less than x. */
static void softmax(int n, const int16_t *x, const int16_t *table, int bits, int16_t *y)
{
    int32_t largest = x[0], sum = 0;
    for (int k = 1; k < n; k++)
        largest = x[k] > largest ? x[k] : largest;
    for (int k = 0; k < n; k++)
        sum += function(table, align(x[k] - largest, 1));
    for (int k = 0; k < n; k++)
        y[k] = clip16(function(table, align(x[k] - largest, 1)) * (1 << bits) / sum);
}
""",
    "root": """
static int64_t root(int64_t x)
{
    int64_t found = 0;
    for (int64_t bit = (int64_t)1 << 30; bit; bit >>= 1)
        if ((found + bit) * (found + bit) <= x)
            found += bit;
    return found;
}
""",
    "normalize": """
/* Differences have four more fractional bits than x, and epsilon as many as their squares. */
static void normalize(
    int n, const int16_t *x, int64_t epsilon, int is_centered, int bits, int16_t *y)
{
    int64_t mean = 0, variance = 0;
    for (int k = 0; k < n && is_centered; k++)
        mean += x[k] * 16;
    mean /= n;
    for (int k = 0; k < n; k++)
        variance += (x[k] * 16 - mean) * (x[k] * 16 - mean);
    int64_t deviation = root(variance / n + epsilon);
    for (int k = 0; k < n; k++)
        y[k] = clip16((x[k] * 16 - mean) * (1 << bits) / deviation);
}
""",
    "divide": """
/* a / b with extra fractional bits. */
static int64_t divide(int32_t a, int32_t b, int bits)
{
    return b == 0 ? 0 : a * ((int64_t)1 << bits) / b;
}
""",
    "spread": """
/* Builds increasing rows from their middle values in x and the gaps between values. */
static void spread(
    int rows, int columns, int middle, const int16_t *x, int x_shift,
    const int16_t *gap, int gap_shift, int16_t *y)
{
    for (int r = 0; r < rows; r++, x += columns, gap += columns, y += columns) {
        y[middle] = clip16(align(x[middle], x_shift));
        for (int k = middle + 1; k < columns; k++)
            y[k] = clip16(y[k - 1] + align(gap[k], gap_shift));
        for (int k = middle - 1; k >= 0; k--)
            y[k] = clip16(y[k + 1] - align(gap[k], gap_shift));
    }
}
""",
    "lookup": """
/* Looks up the embedding of a token; zeros if the token is out of range. */
static void lookup(
    int token, int tokens, int channels, const int16_t *table, int row, int stride, int16_t *y)
{
    for (int k = 0; k < channels; k++)
        y[k] = token < 0 || token >= tokens ? 0 : table[token * row + k * stride];
}
""",
    "maximum": "static int32_t maximum(int32_t a, int32_t b) { return a < b ? b : a; }",
    "minimum": "static int32_t minimum(int32_t a, int32_t b) { return b < a ? b : a; }",
    "absolute": "static int32_t absolute(int32_t x) { return x < 0 ? -x : x; }",
}
# Versions for 8-bit rings.
_TEMPLATES["tap_8"] = _TEMPLATES["tap"].replace("float", "int8_t").replace("*tap(", "*tap_8(")
_TEMPLATES["convolution_8"] = (
    _TEMPLATES["convolution"]
    .replace("convolution_OUTPUTS", "convolution_8_OUTPUTS")
    .replace("const int16_t *ring", "const int8_t *ring")
    .replace("const int16_t *x = tap(", "const int8_t *x = tap_8(")
)
_NEEDS = {
    "dense": ["clip16", "align", "rescale"],
    "convolution": ["clip16", "align", "rescale", "tap"],
    "convolution_8": ["clip16", "align", "rescale", "tap_8"],
    "push_8": ["align"],
    "function": ["clip16"],
    "function_by_powers": ["clip16"],
    "softmax": ["clip16", "align", "function"],
    "normalize": ["clip16", "root"],
    "spread": ["clip16", "align"],
}
_FUNCTIONS = {"exp", "log", "log1p", "sqrt", "tanh", "erf", "sigmoid"}


def print_fixed(program: Program, prefix: str, x: np.ndarray, small_rings: bool) -> Source:
    """Prints a program as integer-only C.

    Args:
        program: `Program` with an output.
        prefix: Prefix of the public names, a C identifier.
        x: Representative inputs (rows, steps, inputs), or tokens (rows, steps).
        small_rings: Whether the rings that only convolutions read have 8 bits.

    Raises:
        ValueError: If an operation has no integer version.
    """
    return _FixedPrinter(program, prefix, x, small_rings).print()


class _FixedPrinter(Printer):
    templates, needs = _TEMPLATES, _NEEDS
    nothing = "INT16_MIN"

    def __init__(self, program, prefix, x, small_rings):
        if any(state.grows for state in program.states):
            raise ValueError(
                "An average over all steps has no integer version, because its count of steps has "
                "no bound. Export without `quantization`, or use AveragePooling1D or the last step."
            )
        if program.counter is not None and x.shape[1] <= program.counter.end:
            raise ValueError(
                f"`representative_data` must have more than {program.counter.end} steps, so that "
                f"all layers receive samples. Received: shape {x.shape}"
            )
        super().__init__(program, prefix, "int16_t")
        tapped = {o.ring for o in program.operations if isinstance(o, p.Tap)}
        self.small = {ring for ring in program.rings if small_rings and ring not in tapped}
        self.constants = {}  # name: ((type, bytes, axes), values, shape)
        self.texts = {}  # parameters, outputs and lines of an elementwise function: name
        # An elementwise function of the inputs, such as a standardization, is computed in
        # floating point by `quantize`.
        readers = [o for o in program.operations if any(v.kind == "input" for v in _read(o))]
        self.first = None
        if len(readers) == 1 and isinstance(readers[0], p.Elementwise):
            others = [v for v in readers[0].xs if v.kind != "input"]
            if len(readers[0].ys) == 1 and all(isinstance(v, Weight) for v in others):
                self.first = readers[0]
                self.names[id(self.first.ys[0])] = "x"
                self.given.add(id(self.first.ys[0]))
                self.skipped.add(id(self.first))
        self._calibrate(x)

    def _calibrate(self, x):
        """Chooses the fractional bits of all vectors and expressions."""
        largest: dict[int, float] = {}
        self.ranges: dict[int, tuple[float, float]] = {}
        self.group = _Groups()
        for operation in self.program.operations:
            if isinstance(operation, p.Copy):
                self.group.join(_key(operation.x), _key(operation.y))
            elif isinstance(operation, p.Push):
                self.group.join(id(operation.ring), _key(operation.x))
            elif isinstance(operation, p.Tap):
                self.group.join(id(operation.ring), _key(operation.y))

        def observe(of, value):
            key = self.group.of(_key(of)) if isinstance(of, Vector) else _node_key(*of)
            is_finite = np.isfinite(value)  # not so a running maximum before its first sample
            if not np.any(is_finite):
                value, is_finite = 0.0, True
            low, high = self.ranges.get(key, (math.inf, -math.inf))
            low = float(np.min(value, initial=low, where=is_finite))
            high = float(np.max(value, initial=high, where=is_finite))
            self.ranges[key], largest[key] = (low, high), max(-low, high)

        interpret(self.program, x, observe)
        for weight in self.program.weights:
            observe(weight, weight.array)
        self.bits_of = {key: _bits(value) for key, value in largest.items()}
        self._choose_scales()

    def _bits(self, of):
        key = id(of) if isinstance(of, p.Ring) else _key(of)
        return self.bits_of[self.group.of(key)] - 8 * (of in self.small)

    def _ring_type(self, ring):
        return "int8_t" if ring in self.small else "int16_t"

    def _for_ring(self, function, ring):
        return f"{function}_8" if ring in self.small else function

    # Weights

    def _choose_scales(self):
        """Chooses the scale of each column of each kernel, so that no sum overflows."""
        self.scales = {}
        products = [o for o in self.program.operations if isinstance(o, (p.Dense, p.Convolution))]
        for o in products:
            columns = o.kernel.array.reshape(-1, o.kernel.array.shape[-1]).astype("float64")
            scale = np.max(np.abs(columns), axis=0) / 127
            bias = np.zeros(len(scale))
            if isinstance(o.start, Weight):
                bias = np.abs(o.start.array) * 2.0 ** self._bits(_source(o))
            scale = np.maximum(scale, np.sum(np.abs(columns), axis=0) / 2**15)
            scale = np.maximum(scale, bias / 2**29)
            scale = np.where(scale > 0, scale, 1.0)
            self.scales[o.kernel] = np.maximum(scale, self.scales.get(o.kernel, 0.0))

    def _constant(self, name, kind, values, shape=None, axes=""):
        """Adds a table, unless one with the same content exists, and returns its name."""
        values = np.asarray(values)
        content = kind, values.tobytes(), axes
        wanted, number = name, 1
        while name in self.constants and self.constants[name][0] != content:
            number += 1
            name = f"{wanted}_{number}"
        self.constants[name] = content, values, shape or values.shape
        return name

    def _tables(self):
        tables, size = [], 0
        for name, ((kind, _, axes), values, shape) in self.constants.items():
            tables.append(self.table(name, kind, map(str, values.reshape(-1)), shape, axes))
            size += values.size * BYTES[kind]
        return "\n\n".join(tables), size

    def _product(self, o):
        """Returns the arguments of a product that follow its inputs."""
        kernel, scale = o.kernel, self.scales[o.kernel]
        q = np.rint(kernel.array / scale).astype("int8")
        unit = 2.0 ** (_SCALE_BITS - math.floor(math.log2(np.max(scale))))
        x_bits, y_bits = self._bits(_source(o)), self._bits(o.y)
        shift = round(math.log2(unit)) + x_bits - y_bits
        if not 0 < shift < 63:
            raise ValueError(f"The weights {kernel.name} are too large or too small for 8 bits.")
        bias, start, start_shift = "NULL", "NULL", 0
        if isinstance(o.start, Weight):
            rounded = np.rint(o.start.array / (scale * 2.0**-x_bits)).astype("int32")
            bias = self._constant(o.start.name, "int32_t", rounded)
        elif o.start is not None:
            start, start_shift = self._at(o.start), self._bits(o.start) - y_bits
        return (
            self._constant(kernel.name, "int8_t", q, axes=kernel.axes),
            self._constant(
                f"{kernel.name}_scale", "int32_t", np.rint(scale * unit).astype("int32")
            ),
            *(shift, bias, start, start_shift, self._at(o.y)),
        )

    # Operations

    def _dense(self, dense):
        name = self._use("dense", dense.y.size)
        return statement(name, dense.x.size, self._at(dense.x), *self._product(dense))

    def _convolution(self, o):
        name = self._use(self._for_ring("convolution", o.ring), o.y.size)
        taps = o.kernel.array.shape[0]
        return statement(name, *self._ring(o.ring), taps, o.dilation, *self._product(o))

    def _softmax(self, softmax):
        if softmax.log:
            raise ValueError(
                "Log-probabilities have no integer version. Use a SequenceClassifier, or a "
                "LanguageModel with a DenseHead."
            )
        places = _places(self._bits(softmax.x) - 1)
        table = self._constant("exp_table", "int16_t", _table(np.exp(np.minimum(places, 0)), 15))
        arguments = softmax.x.size, self._at(softmax.x), table, self._bits(softmax.y)
        return statement(self._use("softmax"), *arguments, self._at(softmax.y))

    def _normalize(self, o):
        epsilon = max(round(o.epsilon * 4.0 ** (self._bits(o.x) + 4)), 1)
        options = f"{epsilon}LL", int(o.centered), self._bits(o.y)
        name = self._use("normalize")
        return statement(name, o.x.size, self._at(o.x), *options, self._at(o.y))

    def _lookup(self, lookup):
        table = np.rint(lookup.table.array * 2.0 ** self._bits(lookup.y)).astype("int16")
        table = self._constant(f"{lookup.table.name}_values", "int16_t", table)
        channels = lookup.y.size
        strides = (1, lookup.tokens) if lookup.transposed else (channels, 1)
        y = self._at(lookup.y)
        return statement(self._use("lookup"), "token", lookup.tokens, channels, table, *strides, y)

    def _spread(self, o):
        sizes, bits = (o.x.size // o.columns, o.columns, o.middle), self._bits(o.y)
        x, gap = ((self._at(v), self._bits(v) - bits) for v in (o.x, o.gap))
        return statement(self._use("spread"), *sizes, *x, *gap, self._at(o.y))

    def _at(self, vector):
        if isinstance(vector and (vector.whole or vector), Weight):
            whole = vector.whole or vector
            values = np.rint(whole.array * 2.0 ** self._bits(whole)).astype("int16")
            name = self._constant(whole.name, "int16_t", values)
            return f"{name} + {vector.start}" if vector.start else name
        return super()._at(vector)

    def _elementwise(self, o):
        lines = _Body(self, o).lines
        key = *o.function.parameters, *o.function.outputs, *lines
        if key not in self.texts:
            self.texts[key] = self._add_loop(o.function, lines)
        return statement(self.texts[key], o.ys[0].size, *map(self._at, (*o.xs, *o.ys)))

    def _number(self, value):
        """Returns the fill value of a value, ring or state."""
        return "0" if value == 0 else "INT16_MIN"

    # Inputs and outputs

    def _header_includes(self):
        return "\n#include <stdint.h>\n"

    def _more_declarations(self):
        name = self.prefix
        x = (
            ""
            if self.program.takes_token
            else f"void {name}_quantize(const float *x, int16_t *q);\n"
        )
        return (
            "\n/* For tests: convert inputs from, and outputs to, floating point. */\n"
            f"{x}void {name}_dequantize(const int16_t *q, float *y);\n"
        )

    def _more_code(self):
        name, n = self.prefix, self.program.output.size
        is_nothing = "" if self.program.counter is None else "q[k] == INT16_MIN ? NAN : "
        code = [
            f"void {name}_dequantize(const int16_t *q, float *y)\n{{\n"
            f"    for (int k = 0; k < {n}; k++)\n"
            f"        y[k] = {is_nothing}ldexpf(q[k], {-self._bits(self.program.output)});\n}}"
        ]
        if not self.program.takes_token:
            code.append(self._quantize())
        return "/* Floating-point conversions */\n\n" + "\n\n".join(code)

    def _quantize(self):
        program, name = self.program, self.prefix
        lines, code = ["const float *y = x;"], []
        vector = program.input
        if self.first is not None:
            vector = self.first.ys[0]
            printer = Printer(program, name, "float")
            printer.names[id(vector)] = "y"
            call = printer._elementwise(self.first)
            tables = [v for v in self.first.xs if isinstance(v, Weight)]
            code += [
                printer.table(w.name, "float", map(printer._number, w.array.flat), w.array.shape)
                for w in tables
            ]
            code += printer.functions.values()
            lines = [f"float y[{program.inputs}];", call]
        lines += [
            f"for (int k = 0; k < {program.inputs}; k++) {{",
            f"    float scaled = rintf(ldexpf(y[k], {self._bits(vector)}));",
            "    q[k] = (int16_t)(scaled < -32767 ? -32767 : scaled > 32767 ? 32767 : scaled);",
            "}",
        ]
        body = "\n".join(f"    {line}" for line in lines)
        code.append(f"void {name}_quantize(const float *x, int16_t *q)\n{{\n{body}\n}}")
        text = "\n\n".join(code)
        for same in self.functions:  # avoids the names of the integer versions
            text = re.sub(rf"\b{same}\(", f"{same}_float(", text)
        return text


class _Body:
    """Translates an elementwise function to integer statements for one element.

    Attributes:
        lines: The statements.
    """

    def __init__(self, printer, operation):
        self.lines, self._printer, self._operation = [], printer, operation
        self._vectors = dict(zip(operation.function.parameters, operation.xs, strict=True))
        self._found, self._count = {}, 0
        outputs = zip(operation.function.outputs.items(), operation.ys, strict=True)
        for (key, output), y in outputs:
            bits = printer._bits(y)
            self.lines.append(f"{key}[k] = {self._clip(self._aligned(output, bits))};")

    def _clip(self, text):
        return f"{self._printer._use('clip16')}({text})"

    def _aligned(self, node, bits):
        """Returns a node with the given fractional bits, as C that may exceed 16 bits."""
        if node.operator == "number":
            return str(round(node.operands[0] * 2.0**bits))
        text, own = self._value(node)
        return text if own == bits else f"{self._printer._use('align')}({text}, {own - bits})"

    def _value(self, node):
        """Returns a node as a C name or constant, and its fractional bits."""
        if id(node) not in self._found:
            self._found[id(node)] = self._compute(node)
        return self._found[id(node)]

    def _local(self, text, bits):
        name = f"t{self._count}"
        self._count += 1
        self.lines.append(f"const int32_t {name} = {text};")
        return name, bits

    def _compute(self, node):
        operator, operands = node.operator, node.operands
        if operator == "number":
            bits = _bits(abs(operands[0]))
            return str(round(operands[0] * 2.0**bits)), bits
        if operator == "parameter":
            index = 0 if self._operation.function.parameters[operands[0]] else "k"
            return f"{operands[0]}[{index}]", self._printer._bits(self._vectors[operands[0]])
        bits = self._printer.bits_of[_node_key(self._operation, node)]
        if any(n.operator in {*_FUNCTIONS, "/"} for n in p.nodes(node)):
            read = {n.operands[0]: n for n in p.nodes(node) if p.is_parameter(n)}
            if len(read) == 1:
                ((name, parameter),) = read.items()
                return self._tabulated(node, name, parameter, bits)
        if operator in _FUNCTIONS:
            of_x = Expression(operator, Expression("parameter", "x"))
            return self._tabulated(of_x, "x", operands[0], bits)
        if operator == "negative":
            text, bits = self._value(operands[0])
            return self._local(f"-{text}", bits)
        if operator == "absolute":
            text, bits = self._value(operands[0])
            return self._local(f"{self._printer._use(operator)}({text})", bits)
        if operator == "*":
            (a, a_bits), (b, b_bits) = map(self._value, operands)
            bits = min(bits, a_bits + b_bits)
            shift = a_bits + b_bits - bits
            align = self._printer._use("align")
            return self._local(self._clip(f"{align}({a} * {b}, {shift})"), bits)
        if operator == "/":
            (a, a_bits), (b, b_bits) = map(self._value, operands)
            bits = max(bits, a_bits - b_bits)
            divide = self._printer._use("divide")
            return self._local(self._clip(f"{divide}({a}, {b}, {bits - a_bits + b_bits})"), bits)
        if operator in "+-":
            a, b = (self._aligned(operand, bits) for operand in operands)
            return self._local(self._clip(f"{a} {operator} {b}"), bits)
        if operator in ("maximum", "minimum"):
            a, b = (self._aligned(operand, bits) for operand in operands)
            return self._local(self._clip(f"{self._printer._use(operator)}({a}, {b})"), bits)
        if operator == "where":
            condition = self._condition(operands[0])
            a, b = (self._aligned(operand, bits) for operand in operands[1:])
            return self._local(self._clip(f"{condition} ? {a} : {b}"), bits)
        raise ValueError(
            f"The operator {operator!r} has no integer version. Export without `quantization`."
        )

    def _condition(self, node):
        if node.operator == "is_nan":
            return "0"  # integers are never NaN
        bits = min(self._value(o)[1] for o in node.operands if o.operator != "number")
        a, b = (self._aligned(operand, bits) for operand in node.operands)
        return f"{a} < {b}"

    def _tabulated(self, node, name, variable, bits):
        """Returns a function of one variable as a table lookup."""
        x_bits = self._value(variable)[1]
        if node.operator in _SATURATING:
            bits, x_bits = 15, _SATURATING_BITS
        what = node.operator if node.operator in _FUNCTIONS else self._operation.function.name
        function, places = "function", _places(x_bits)
        if node.operator not in _SATURATING:
            key = self._key_of(variable)
            function, places = _best_table(node, name, x_bits, bits, *self._printer.ranges[key])
        with np.errstate(all="ignore"):
            values = _table(evaluate(node, {name: places}), bits)
        table = self._printer._constant(f"{what}_table", "int16_t", values)
        x = self._aligned(variable, x_bits)
        return self._local(f"{self._printer._use(function)}({table}, {x})", bits)

    def _key_of(self, node):
        if not p.is_parameter(node):
            return _node_key(self._operation, node)
        return self._printer.group.of(_key(self._vectors[node.operands[0]]))


def _best_table(node, name, x_bits, bits, low, high):
    """Returns the function that interpolates, and the points of its table.

    Args:
        node: Expression of one parameter.
        name: The parameter's name.
        x_bits, bits: Fractional bits of the parameter and of the node.
        low, high: The parameter's range on representative inputs.
    """
    first, last = (int(np.clip(np.rint(end * 2.0**x_bits), -32767, 32767)) for end in (low, high))
    x = np.arange(first, last + 1) / 2.0**x_bits

    def error(places):
        with np.errstate(all="ignore"):
            at_places, at_x = (_table(evaluate(node, {name: v}), bits) for v in (places, x))
        return np.max(np.abs(np.interp(x, places, at_places) - at_x))

    even, by_powers = _places(x_bits), _places_by_powers(x_bits)
    # A table of powers is larger, and slower to read.
    if error(even) <= max(4 * error(by_powers), _GOOD_ENOUGH):
        return "function", even
    return "function_by_powers", by_powers


def _places(bits):
    """Returns the grid points of a table whose variable has `bits` fractional bits."""
    return np.linspace(-32768, 32768, _SEGMENTS + 1) / 2.0**bits


def _places_by_powers(bits):
    """Returns the grid points of a table with as many segments for each power of two."""
    q = np.arange(11 * _PER_POWER + 1)
    shift = np.maximum(q // _PER_POWER - 1, 0)
    q = (q - _PER_POWER * shift) << shift
    return np.concatenate([-q[:0:-1], q]) / 2.0**bits


def _table(values, bits):
    values = np.clip(np.nan_to_num(values), -(2.0 ** (16 - bits)), 2.0 ** (16 - bits))
    return np.clip(np.rint(values * 2.0**bits), -32768, 32767).astype("int16")


def _bits(largest):
    """Returns the most fractional bits with which values up to `largest` fit into 16 bits."""
    if largest == 0:
        return 15
    return min(math.floor(math.log2(32767 / (_HEADROOM * largest))), 15)


def _key(vector):
    return id(vector if vector.whole is None else vector.whole)


def _node_key(operation, expression):
    return id(operation), id(expression)


def _source(product):
    return product.ring if isinstance(product, p.Convolution) else product.x


def _read(operation) -> Sequence[Vector]:
    """Returns the vectors that an operation reads."""
    if isinstance(operation, p.Elementwise):
        return operation.xs
    found = (getattr(operation, name, None) for name in ("x", "start", "gap"))
    return [vector for vector in found if vector is not None]


class _Groups:
    """Sets of vectors and rings that share their fractional bits (a union-find)."""

    def __init__(self):
        self._parents = {}

    def of(self, key):
        """Returns the representative of the key's set."""
        while key in self._parents:
            key = self._parents[key]
        return key

    def join(self, a, b):
        a, b = self.of(a), self.of(b)
        if a != b:
            self._parents[a] = b
