"""Runs a `Program` in NumPy and reports the values of all operations."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_streams import program as p
from keras_streams.program import Expression, Program, Vector

Observer = Callable[[Any, np.ndarray], None]


def interpret(program: Program, x: np.ndarray, observe: Observer) -> np.ndarray:
    """Runs a program on rows of inputs, from its initial state.

    Args:
        program: `Program` with an output.
        x: Array (rows, steps, inputs), or tokens (rows, steps).
        observe: Function `(key, values)`, called with each vector and its values (rows, size), and
            with each pair (operation, expression) and its values (rows, size) or ().

    Returns:
        The outputs (rows, steps, outputs).
    """
    run = _Run(program, len(x), observe)
    return np.stack([run.step(x[:, t]) for t in range(x.shape[1])], axis=1)


_FUNCTIONS: dict[str, Callable] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "<": np.less,
    "negative": np.negative,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "where": np.where,
    "absolute": np.abs,
    "is_nan": np.isnan,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=["float64"]),
    "sigmoid": lambda x: 0.5 * (1 + np.tanh(0.5 * x)),
}


def evaluate(
    expression: Expression,
    parameters: dict[str, Any],
    observe: Callable[[Expression, Any], None] = lambda expression, value: None,
) -> Any:
    """Returns the value of an expression."""
    if expression.operator == "number":
        value = expression.operands[0]
    elif expression.operator == "parameter":
        value = parameters[expression.operands[0]]
    else:
        operands = [evaluate(operand, parameters, observe) for operand in expression.operands]
        with np.errstate(over="ignore"):
            value = _FUNCTIONS[expression.operator](*operands)
    observe(expression, value)
    return value


class _Run:
    def __init__(self, program, rows, observe):
        self.program, self.observe = program, observe
        self.values = {id(s): np.full((rows, s.size), s.fill) for s in program.states}
        self.rings = {r: np.full((rows, r.steps, r.channels), r.fill) for r in program.rings}
        self.rows = rows
        self.tick = 0 if program.counter is None else program.counter.first
        padding = np.zeros((rows,) if program.takes_token else (rows, program.inputs), "int32")
        while self.tick < 0:
            self.step(padding)

    def step(self, x):
        self.token = x
        if not self.program.takes_token:
            self._write(self.program.input, np.asarray(x, "float64"))
        self._run(self.program.body)
        counter = self.program.counter
        if counter is not None:
            self.tick += 1 if self.tick + 1 < counter.end else 1 - counter.cycle
        return self._read(self.program.output)

    def _run(self, part):
        for item in part.items:
            if not isinstance(item, p.Part):
                getattr(self, f"_{type(item).__name__.lower()}")(item)
            elif item.clock is None or item.clock.is_due(self.tick):
                self._run(item)

    def _read(self, vector: Vector):
        whole = vector if vector.whole is None else vector.whole
        if isinstance(whole, p.Weight):
            array = whole.array.reshape(1, -1)
        else:  # zeros for values that no step has written yet
            array = self.values.setdefault(id(whole), np.zeros((self.rows, whole.size)))
        return array[:, vector.start : vector.start + vector.size].astype("float64")

    def _write(self, vector: Vector, value):
        whole = vector if vector.whole is None else vector.whole
        if whole is vector:
            self.values[id(whole)] = value
        else:
            array = self.values.setdefault(id(whole), np.zeros((self.rows, whole.size)))
            array[:, vector.start : vector.start + vector.size] = value
        self.observe(whole, value)

    def _start(self, start):
        return 0.0 if start is None else self._read(start)

    def _dense(self, o):
        self._write(o.y, self._start(o.start) + self._read(o.x) @ o.kernel.array)

    def _convolution(self, o):
        taps, ring = o.kernel.array.shape[0], self.rings[o.ring]
        delays = [-1 - j * o.dilation for j in reversed(range(taps))]
        self._write(
            o.y, self._start(o.start) + np.einsum("rjc,jco->ro", ring[:, delays], o.kernel.array)
        )

    def _push(self, o):
        x = self._read(o.x)
        self.rings[o.ring] = np.concatenate([self.rings[o.ring][:, 1:], x[:, None]], axis=1)

    def _tap(self, o):
        self._write(o.y, self.rings[o.ring][:, -1 - o.delay])

    def _elementwise(self, o):
        parameters = dict(zip(o.function.parameters, map(self._read, o.xs), strict=True))

        def observe(expression, value):
            self.observe((o, expression), value)

        for y, output in zip(o.ys, o.function.outputs.values(), strict=True):
            value = evaluate(output, parameters, observe)
            self._write(y, np.broadcast_to(value, (self.rows, y.size)))

    def _softmax(self, o):
        x = self._read(o.x)
        x = x - np.max(x, axis=-1, keepdims=True)
        log_p = x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
        self._write(o.y, log_p if o.log else np.exp(log_p))

    def _normalize(self, o):
        x = self._read(o.x)
        mean = np.mean(x, axis=-1, keepdims=True) if o.centered else 0.0
        variance = np.mean((x - mean) ** 2, axis=-1, keepdims=True)
        self._write(o.y, (x - mean) / np.sqrt(variance + o.epsilon))

    def _lookup(self, o):
        table = o.table.array.T if o.transposed else o.table.array
        self._write(o.y, table[self.token])

    def _spread(self, o):
        rows = (self.rows, -1, o.columns)
        x, gap = self._read(o.x).reshape(rows), self._read(o.gap).reshape(rows)
        y = x.copy()
        for k in range(o.middle + 1, o.columns):
            y[..., k] = y[..., k - 1] + gap[..., k]
        for k in range(o.middle - 1, -1, -1):
            y[..., k] = y[..., k + 1] - gap[..., k]
        self._write(o.y, y.reshape(self.rows, -1))

    def _fill(self, o):
        self._write(o.y, np.full((self.rows, o.y.size), o.value))

    def _copy(self, o):
        self._write(o.y, self._read(o.x))
