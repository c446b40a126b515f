"""One step of a streaming model as a list of operations with their sizes and weights.

`emit` turns a model into a `Program`; a printer turns a program into C. An operation reads and
writes vectors: the step's input, weights, states and values of this step. What a later step needs
lies in states and rings.

Elementwise functions are ordinary Python functions of `Expression`s, which look like the equations
that they state:

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
    """Numbers that operations read or write.

    Attributes:
        name: Its name; several values may have one name.
        size: Number of its elements.
        kind: "input", "output", "value", "tap", "state" or "weight".
        whole, start: The vector that this one is a part of, and the place of its first element.
    """

    name: str
    size: int
    kind: str
    whole: Union["Vector", None] = None
    start: int = 0

    def part(self, start: int, size: int) -> "Vector":
        """Returns `size` of the elements as a vector."""
        whole = self if self.whole is None else self.whole
        return Vector(self.name, size, self.kind, whole=whole, start=self.start + start)

    def split(self, sections: int) -> list["Vector"]:
        """Returns equal parts."""
        size = self.size // sections
        return [self.part(i * size, size) for i in range(sections)]


@dataclasses.dataclass(frozen=True, eq=False)
class Weight(Vector):
    """Constants: an array, row after row, and what its axes are."""

    array: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    axes: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The last `steps` vectors that were pushed, each of `channels` elements, `fill` at first."""

    name: str
    steps: int
    channels: int
    fill: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class State(Vector):
    """Numbers that keep their values until the next step, `fill` at first.

    What `grows`, such as a count of all steps, has no largest value.
    """

    fill: float = 0.0
    grows: bool = False


# Operations. Each has the attribute `y` or `ys`, what it writes.


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """y = start + x W; W has axes (input, output), and `start` is a vector or None for zeros."""

    x: Vector
    kernel: Weight
    start: Vector | None
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution:
    """y = start + sum_j x_{t - j dilation} W[taps - 1 - j], of a ring whose newest vector is x_t.

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
    """y = the vector that was pushed `delay` steps ago."""

    ring: Ring
    delay: int
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise:
    """ys = function(xs), element by element. Vectors of one element are the same for all."""

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
    """y = (x - mean(x)) / sqrt(variance(x) + epsilon), with `centered=False` without the means."""

    x: Vector
    epsilon: float
    centered: bool
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """y = the embedding of the input token, NaN for a token outside the vocabulary.

    The table has axes (token, channel), or with `transposed` (channel, token).
    """

    table: Weight
    tokens: int
    transposed: bool
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Rows of increasing numbers: the middle one as in x, the others farther and farther from it.

    y[middle] = x[middle] and y[middle +- n] = y[middle +- (n - 1)] +- gap[middle +- n], in every
    row of `gap` and x, each (rows, columns).
    """

    x: Vector
    gap: Vector
    columns: int
    middle: int
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Fill:
    """y = value, in all elements."""

    value: float
    y: Vector


@dataclasses.dataclass(frozen=True, eq=False)
class Copy:
    """y = x; y may be a part of a value, or a state."""

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
    """Some of the steps: from step `offset` on, one of `pause` steps."""

    offset: int
    pause: int

    def is_due(self, step: int) -> bool:
        """Returns whether the operations run at a step."""
        return step >= self.offset and (step - self.offset) % self.pause == 0


@dataclasses.dataclass(frozen=True)
class Counter:
    """What a program counts its steps by: from `first` up to `end`, then back by `cycle`.

    The steps below 0 are those of a reset, with inputs of zeros.
    """

    first: int
    end: int
    cycle: int


@dataclasses.dataclass(eq=False)
class Part:
    """The operations of a layer.

    Attributes:
        name: Name of the layer.
        comment: What the layer is.
        clock: The steps at which the operations run, None for all.
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
        inputs: Positive integer, number of inputs, or of tokens with `takes_token`.
        takes_token: Boolean, whether the input is the id of a token. Defaults to `False`.

    Attributes:
        body: `Part` with all operations.
        input: Vector of the inputs; nothing for a token.
        output: Vector of the outputs, after `finish`.
        weights, states, rings: Lists of what the program keeps.
        counter: How steps are counted, None if no operation waits.
        delay, rate: See `layers.streaming.to_stream`.
        notes: List of lines about inputs and outputs, for a reader.
        names: List of the outputs' names, where the model has them.
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
        """All operations in their order."""
        return list(_operations(self.body))

    # What is kept

    def weight(self, name: str, array: Any, axes: str = "") -> Weight:
        """Returns a vector of constants.

        Args:
            name: Name within the layer.
            array: NumPy array, of any rank.
            axes: What the array's axes are, for a reader.

        Raises:
            ValueError: If a number is not finite.
        """
        name, array = self._unique(name), np.asarray(array)
        if not np.all(np.isfinite(array)):
            raise ValueError(f"The weight {name} has values that are not finite.")
        self.weights.append(Weight(name, array.size, "weight", array=array, axes=axes))
        return self.weights[-1]

    def state(self, name: str, size: int, fill: float = 0.0, grows: bool = False) -> Vector:
        """Returns a vector that keeps its value until the next step."""
        self.states.append(State(self._unique(name), size, "state", fill=fill, grows=grows))
        return self.states[-1]

    def ring(self, name: str, x: Vector, steps: int, fill: float = 0.0) -> Ring:
        """Returns a ring of `steps` vectors, the newest of which is x."""
        self.rings.append(Ring(self._unique(name), steps, x.size, fill))
        self._add(Push(self.rings[-1], x))
        return self.rings[-1]

    def _unique(self, name):
        path = [part.name for part in self._path[1:]]
        name = wanted = identifier("_".join([*path, name]))
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
            name: Name of the function. Defaults to its own.
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
        """Returns a vector of the parts side by side."""
        y, start = Vector(name, sum(part.size for part in parts), "value"), 0
        for part in parts:
            self._add(Copy(part, y.part(start, part.size)))
            start += part.size
        return y

    def assign(self, state: Vector, x: Vector) -> None:
        """Makes x the value of another vector, also for the operations of this step that follow."""
        self._add(Copy(x, state))

    def finish(self, x: Vector) -> None:
        """Makes x the output."""
        self.output = Vector("y", x.size, "output")
        self._add(Copy(x, self.output))


def _operations(part):
    for item in part.items:
        if isinstance(item, Part):
            yield from _operations(item)
        else:
            yield item


def identifier(name: str) -> str:
    """Returns a name with an underscore for all that C allows in no identifier."""
    name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    return f"_{name}" if name[:1].isdigit() else name


# Elementwise functions


class Expression:
    """An elementwise expression: an operator and its operands.

    Attributes:
        operator: "parameter", "number", one of "+-*/<", or the name of a function.
        operands: Expressions; of a parameter its name, of a number its value.
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
        """What is equal for equal expressions."""
        return (self.operator, *(getattr(o, "key", o) for o in self.operands))


def _expression(value):
    return value if isinstance(value, Expression) else Expression("number", float(value))


def _is_zero(expression):
    return expression.operator == "number" and expression.operands[0] == 0


# A state that is zero at every step drops out of the equations.


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
where = _function("where")  # condition, value if it holds, value otherwise
is_nan = _function("is_nan")


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """An elementwise function.

    Attributes:
        name: Its name.
        parameters: Dict from the name of each parameter to whether it is one number for all.
        outputs: Dict from the name of each output to its expression.
        used: Indices of those arguments of the traced function that are parameters.
    """

    name: str
    parameters: dict[str, bool]
    outputs: dict[str, Expression]
    used: tuple[int, ...]

    @classmethod
    def trace(
        cls, function: Callable, xs: Sequence[Vector | float], size: int, name: str
    ) -> "Function":
        """Calls a Python function with an expression for each vector."""
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
        """What is equal for equal functions."""
        outputs = tuple((name, output.key) for name, output in self.outputs.items())
        return self.name, tuple(self.parameters.items()), outputs


def is_parameter(expression: Expression) -> bool:
    """Whether an expression is a parameter."""
    return expression.operator == "parameter"


def nodes(expression: Any) -> Iterator[Expression]:
    """Yields an expression and all that it is made of."""
    expression = _expression(expression)
    yield expression
    for operand in expression.operands:
        if isinstance(operand, Expression):
            yield from nodes(operand)
