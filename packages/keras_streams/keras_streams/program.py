"""One step of a streaming model as a list of operations.

`emit` turns a model into a `Program`, which a printer turns into C. Operations read and write
vectors: the input, weights, states, and temporary values. States and rings (ring buffers) last
from step to step.

Elementwise functions are ordinary Python functions of `Expression`s, and read like equations:

>>> def mix(z, old, new):
...     z = sigmoid(z)
...     return {"h": z * old + (1 - z) * new}
...
>>> program = Program("model", inputs=2)
>>> (h,) = program.elementwise(mix, program.input, program.state("old", 2), program.input)
>>> h.size, len(program.operations)
(2, 1)
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

import numpy as np

# Vectors


@dataclasses.dataclass(frozen=True, eq=False)
class Vector:
    """A vector that operations read or write.

    Attributes:
        name: Name, not necessarily unique for values.
        size: Number of elements.
        kind: "input", "output", "value", "tap", "state" or "weight".
        whole, start: For a slice, the sliced vector and the index of the first element.
    """

    name: str
    size: int
    kind: str
    whole: Union["Vector", None] = None
    start: int = 0

    def part(self, start: int, size: int) -> "Vector":
        """Returns the slice of `size` elements from `start`."""
        whole = self if self.whole is None else self.whole
        return Vector(self.name, size, self.kind, whole=whole, start=self.start + start)

    def split(self, sections: int) -> list["Vector"]:
        """Returns slices of equal size."""
        size = self.size // sections
        return [self.part(i * size, size) for i in range(sections)]


@dataclasses.dataclass(frozen=True, eq=False)
class Weight(Vector):
    """A constant array in row-major order, with a description of its axes."""

    array: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    axes: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """A ring buffer of the last `steps` vectors of size `channels`, initialized with `fill`."""

    name: str
    steps: int
    channels: int
    fill: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class State(Vector):
    """A vector that keeps its value from step to step, initialized with `fill`.

    `grows` marks unbounded values, such as a count of all steps.
    """

    fill: float = 0.0
    grows: bool = False


# Operations. Most write to `y` or `ys`.


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """y = start + x W, where W has axes (input, output) and a `start` of None means zeros."""

    x: Vector
    kernel: Weight
    start: Vector | None
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution:
    """y = start + sum_j x_{t - j dilation} W[taps - 1 - j], where x_t is the newest in the ring.

    W has axes (tap, input, output).
    """

    ring: Ring
    kernel: Weight
    dilation: int
    start: Vector | None
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Push:
    """Appends x to a ring."""

    ring: Ring
    x: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """y = the vector pushed `delay` steps ago."""

    ring: Ring
    delay: int
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise:
    """ys = function(xs), element by element. Vectors of size 1 are broadcast."""

    function: "Function"
    xs: tuple[Vector, ...]
    ys: tuple[Vector, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax:
    """y = softmax(x), or its logarithm."""

    x: Vector
    log: bool
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Normalize:
    """y = (x - mean(x)) / sqrt(variance(x) + epsilon); `centered=False` takes the mean as 0."""

    x: Vector
    epsilon: float
    centered: bool
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """y = the embedding of the input token, NaN for a token outside the vocabulary.

    The table has axes (token, channel), or (channel, token) if `transposed`.
    """

    table: Weight
    tokens: int
    transposed: bool
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Builds increasing rows from their middle values and gaps; x and gap are (rows, columns).

    For each row, y[middle] = x[middle], y[k] = y[k - 1] + gap[k] for k > middle, and
    y[k] = y[k + 1] - gap[k] for k < middle.
    """

    x: Vector
    gap: Vector
    columns: int
    middle: int
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Fill:
    """y = value, for all elements."""

    value: float
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Copy:
    """y = x, where y may be a slice of a value, or a state."""

    x: Vector
    y: Vector


Operation = (
    Dense
    | Convolution
    | Push
    | Tap
    | Elementwise
    | Softmax
    | Normalize
    | Lookup
    | Spread
    | Fill
    | Copy
)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Every `pause`-th step, starting at step `offset`."""

    offset: int
    pause: int

    def is_due(self, step: int) -> bool:
        """Returns whether the operations run at a step."""
        return step >= self.offset and (step - self.offset) % self.pause == 0


@dataclasses.dataclass(frozen=True)
class Counter:
    """The step counter of a program: runs from `first` up to `end`, then jumps back by `cycle`.

    `reset` runs the steps below 0, with zeros as inputs.
    """

    first: int
    end: int
    cycle: int


@dataclasses.dataclass(eq=False)
class Part:
    """The operations of a layer.

    Attributes:
        name: Name of the layer.
        comment: Description of the layer.
        clock: The steps at which the operations run, or None for all steps.
        items: Operations, and the parts of inner layers.
    """

    name: str
    comment: str
    clock: Clock | None = None
    items: list[Union[Operation, "Part"]] = dataclasses.field(default_factory=list)


class Program:
    """One step of a streaming model.

    Args:
        name: Name of the model.
        inputs: Positive integer, number of inputs, or with `takes_token` the vocabulary size.
        takes_token: Boolean, whether the input is a token id. Defaults to `False`.

    Attributes:
        body: `Part` with all operations.
        input: Vector of the inputs; empty for a token.
        output: Vector of the outputs, after `finish`.
        weights, states, rings: Lists of the program's weights, states and rings.
        counter: `Counter`, or None if no operation has a clock.
        delay, rate: See `keras_streams.to_stream`.
        notes: List of lines that describe inputs and outputs.
        names: List of the outputs' names; may be empty.
    """

    def __init__(self, name: str, inputs: int, takes_token: bool = False) -> None:
        self.body = Part(name, "")
        self.takes_token = takes_token
        self.inputs = inputs
        self.input = Vector("x", 0 if takes_token else inputs, "input")
        self.output: Vector | None = None
        self.weights: list[Weight] = []
        self.states: list[State] = []
        self.rings: list[Ring] = []
        self.counter: Counter | None = None
        self.delay, self.rate = 0, 1
        self.notes: list[str] = []
        self.names: list[str] = []
        self._path = [self.body]
        self._taken: set[str] = set()
        self._weights: dict[str, list[Weight]] = {}
        self._functions: dict[tuple, Function] = {}

    @contextlib.contextmanager
    def part(self, name: str, comment: str, clock: Clock | None = None) -> Iterator[None]:
        """Collects the operations of a layer in a `Part`."""
        part = Part(name, comment, clock)
        self._path[-1].items.append(part)
        self._path.append(part)
        try:
            yield
        finally:
            self._path.pop()

    @property
    def operations(self) -> list[Operation]:
        """All operations, in order of execution."""
        return list(_operations(self.body))

    # Weights, states and rings

    def weight(self, name: str, array: Any, axes: str = "") -> Weight:
        """Adds a `Weight` and returns it, or returns an equal one of the same name.

        Args:
            name: Name within the layer.
            array: NumPy array of any rank.
            axes: Description of the array's axes.

        Raises:
            ValueError: If a value is not finite.
        """
        array, same_name = np.asarray(array), self._weights.setdefault(self._full(name), [])
        for weight in same_name:
            if np.array_equal(weight.array, array):
                return weight
        name = self._unique(name)
        if not np.all(np.isfinite(array)):
            raise ValueError(f"The weight {name} has values that are not finite.")
        self.weights.append(Weight(name, array.size, "weight", array=array, axes=axes))
        same_name.append(self.weights[-1])
        return self.weights[-1]

    def state(self, name: str, size: int, fill: float = 0.0, grows: bool = False) -> Vector:
        """Adds a `State` and returns it."""
        self.states.append(State(self._unique(name), size, "state", fill=fill, grows=grows))
        return self.states[-1]

    def ring(self, name: str, x: Vector, steps: int, fill: float = 0.0) -> Ring:
        """Adds a ring of `steps` vectors, to which each step pushes x, and returns it."""
        self.rings.append(Ring(self._unique(name), steps, x.size, fill))
        self._add(Push(self.rings[-1], x))
        return self.rings[-1]

    def _full(self, name):
        return identifier("_".join([*(part.name for part in self._path[1:]), name]))

    def _unique(self, name):
        name = wanted = self._full(name)
        number = 1
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name

    # Operations

    def _add(self, operation):
        self._path[-1].items.append(operation)
        return getattr(operation, "y", None)

    def dense(self, x: Vector, kernel: Weight, start: Vector | None = None, name="a") -> Vector:
        """Adds a `Dense` and returns its y."""
        inputs, outputs = kernel.array.shape
        if x.size != inputs:
            raise ValueError(f"A kernel of shape {kernel.array.shape} got {x.size} inputs.")
        return self._add(Dense(x, kernel, start, Vector(name, outputs, "value")))

    def convolution(
        self, ring: Ring, kernel: Weight, dilation: int, start: Vector | None = None, name="a"
    ) -> Vector:
        """Adds a `Convolution` and returns its y."""
        y = Vector(name, kernel.array.shape[-1], "value")
        return self._add(Convolution(ring, kernel, dilation, start, y))

    def tap(self, ring: Ring, delay: int, name: str) -> Vector:
        """Adds a `Tap` and returns its y."""
        return self._add(Tap(ring, delay, Vector(name, ring.channels, "tap")))

    def elementwise(
        self, function: Callable, *xs: Vector | float, name: str | None = None
    ) -> list[Vector]:
        """Adds an `Elementwise` and returns its ys.

        Args:
            function: Function of `Expression`s that returns a dict of them.
            *xs: Its arguments: vectors, or numbers.
            name: Name of the function. Defaults to `function.__name__`.
        """
        size = max(x.size for x in xs if isinstance(x, Vector))
        traced = Function.trace(function, xs, size, name or function.__name__)
        traced = self._functions.setdefault(traced.key, traced)
        vectors = tuple(x for i, x in enumerate(xs) if i in traced.used and isinstance(x, Vector))
        ys = tuple(Vector(name, size, "value") for name in traced.outputs)
        self._add(Elementwise(traced, vectors, ys))
        return list(ys)

    def softmax(self, x: Vector, log: bool = False) -> Vector:
        """Adds a `Softmax` and returns its y."""
        return self._add(Softmax(x, log, Vector("log_p" if log else "p", x.size, "value")))

    def normalize(self, x: Vector, epsilon: float, centered: bool = True) -> Vector:
        """Adds a `Normalize` and returns its y."""
        return self._add(Normalize(x, epsilon, centered, Vector("normal", x.size, "value")))

    def lookup(self, table: Weight, transposed: bool = False) -> Vector:
        """Adds a `Lookup` and returns its y."""
        tokens, channels = table.array.shape[::-1] if transposed else table.array.shape
        y = Vector("embedded", channels, "value")
        return self._add(Lookup(table, tokens, transposed, y))

    def spread(self, x: Vector, gap: Vector, columns: int, middle: int) -> Vector:
        """Adds a `Spread` and returns its y."""
        return self._add(Spread(x, gap, columns, middle, Vector("spread", x.size, "value")))

    def fill(self, size: int, value: float, name: str) -> Vector:
        """Adds a `Fill` and returns its y."""
        return self._add(Fill(value, Vector(name, size, "value")))

    def concatenate(self, parts: Sequence[Vector], name: str) -> Vector:
        """Concatenates vectors."""
        y, start = Vector(name, sum(part.size for part in parts), "value"), 0
        for part in parts:
            self._add(Copy(part, y.part(start, part.size)))
            start += part.size
        return y

    def assign(self, state: Vector, x: Vector) -> None:
        """Copies x to a state; later operations of the same step see the new value."""
        self._add(Copy(x, state))

    def finish(self, x: Vector) -> None:
        """Sets x as the output."""
        self.output = Vector("y", x.size, "output")
        self._add(Copy(x, self.output))


def _operations(part):
    for item in part.items:
        if isinstance(item, Part):
            yield from _operations(item)
        else:
            yield item


def identifier(name: str) -> str:
    """Returns a name as a C identifier, with underscores for all other characters."""
    name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    return f"_{name}" if name[:1].isdigit() else name


# Elementwise functions


class Expression:
    """An elementwise expression: an operator and its operands.

    Attributes:
        operator: "parameter", "number", one of "+-*/<", or the name of a function.
        operands: Expressions, or the name of a parameter, or the value of a number.
    """

    def __init__(self, operator: str, *operands: Any) -> None:
        self.operator = operator
        self.operands = operands

    def __add__(self, other):
        return _add(self, _expression(other))

    def __radd__(self, other):
        return _add(_expression(other), self)

    def __sub__(self, other):
        return Expression("-", self, _expression(other))

    def __rsub__(self, other):
        return Expression("-", _expression(other), self)

    def __mul__(self, other):
        return _multiply(self, _expression(other))

    def __rmul__(self, other):
        return _multiply(_expression(other), self)

    def __truediv__(self, other):
        if not isinstance(other, Expression):
            return self * (1 / other)
        return Expression("/", self, other)

    def __rtruediv__(self, other):
        return Expression("/", _expression(other), self)

    def __neg__(self):
        return Expression("negative", self)

    def __lt__(self, other):
        return Expression("<", self, _expression(other))

    def __gt__(self, other):
        return Expression("<", _expression(other), self)

    @property
    def key(self) -> tuple:
        """A hashable key; equal expressions have equal keys."""
        return (self.operator, *(getattr(o, "key", o) for o in self.operands))


def _expression(value):
    return value if isinstance(value, Expression) else Expression("number", float(value))


def _is_zero(expression):
    return expression.operator == "number" and expression.operands[0] == 0


# Constant zeros drop out of the equations.


def _add(a, b):
    if _is_zero(a) or _is_zero(b):
        return b if _is_zero(a) else a
    return Expression("+", a, b)


def _multiply(a, b):
    if _is_zero(a) or _is_zero(b):
        return a if _is_zero(a) else b
    return Expression("*", a, b)


def _function(name):
    def call(*operands: Any) -> Expression:
        return Expression(name, *map(_expression, operands))

    return call


exp, log, log1p, sqrt, tanh, erf, absolute, sigmoid = map(
    _function, ("exp", "log", "log1p", "sqrt", "tanh", "erf", "absolute", "sigmoid")
)
maximum, minimum = map(_function, ("maximum", "minimum"))
where = _function("where")  # condition, value if true, value if false
is_nan = _function("is_nan")


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """An elementwise function.

    Attributes:
        name: Name of the function.
        parameters: Dict from parameter name to whether the parameter is broadcast.
        outputs: Dict from output name to expression.
        used: Indices of the traced function's arguments that became parameters.
    """

    name: str
    parameters: dict[str, bool]
    outputs: dict[str, Expression]
    used: tuple[int, ...]

    @classmethod
    def trace(
        cls, function: Callable, xs: Sequence[Vector | float], size: int, name: str
    ) -> "Function":
        """Traces a Python function by calling it with expressions."""
        names = list(inspect.signature(function).parameters)
        arguments = [
            Expression("parameter", name) if isinstance(x, Vector) else _expression(x)
            for name, x in zip(names, xs, strict=True)
        ]
        outputs = function(*arguments)
        read = {e.operands[0] for o in outputs.values() for e in nodes(o) if is_parameter(e)}
        used = tuple(i for i, n in enumerate(names) if n in read)
        sizes = [x.size if isinstance(x, Vector) else 1 for x in xs]
        parameters = {names[i]: sizes[i] < size for i in used}
        return cls(name, parameters, {n: _expression(o) for n, o in outputs.items()}, used)

    @property
    def key(self) -> tuple:
        """A hashable key; equal functions have equal keys."""
        outputs = tuple((name, output.key) for name, output in self.outputs.items())
        return self.name, tuple(self.parameters.items()), outputs


def is_parameter(expression: Expression) -> bool:
    """Returns whether an expression is a parameter."""
    return expression.operator == "parameter"


def nodes(expression: Any) -> Iterator[Expression]:
    """Yields an expression and all of its subexpressions."""
    expression = _expression(expression)
    yield expression
    for operand in expression.operands:
        if isinstance(operand, Expression):
            yield from nodes(operand)
