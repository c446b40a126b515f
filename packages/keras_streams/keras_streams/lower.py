"""Lowers traced Keras operations to operations on addresses.

Operations that move numbers (reshape, slice, concatenate, ...) are run on the addresses, and
vanish. Maps, products, reductions and rows of tables remain; `COMPOSITES` states all others in
terms of them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams._keras_internals import compute_conv_transpose_padding_args_for_jax
from keras_streams.cells import Cells, Op, Program
from keras_streams.rules import padding_of, per_axis, reversed_conv, spread
from keras_streams.trace import Trace, recorded

# Operations that only move numbers: Keras runs them on the numbers' addresses.
_MOVES = set(
    "BroadcastTo Concatenate ExpandDims Flip GetItem Hstack Moveaxis Pad Ravel Repeat Reshape Roll "
    "Slice Split Squeeze Stack Swapaxes Tile Transpose Unstack Vstack".split()
)
_SAME = {"Copy", "ConvertToTensor", "Identity", "StopGradient"}
_WRAPPING = {"int8", "int16", "uint8", "uint16", "uint32", "uint64"}  # in C they have 64 bits
REDUCTIONS = {"Sum": "sum", "Max": "max", "Amax": "max", "Min": "min", "Amin": "min"}
REDUCTIONS |= {"Prod": "prod", "Any": "max", "All": "min"}


@dataclasses.dataclass(frozen=True)
class Map:
    """An element-by-element function: a C expression of operands {0}, {1}, ..., and in NumPy."""

    c: str
    numpy: Callable


MAPS = {
    "Add": Map("{0} + {1}", np.add),
    "Subtract": Map("{0} - {1}", np.subtract),
    "Multiply": Map("{0} * {1}", np.multiply),
    "Divide": Map("{0} / {1}", np.divide),
    "Negative": Map("-{0}", np.negative),
    # NaN of {0} propagates, as in Keras; `Printer.expression` adds that of {1}.
    "Maximum": Map("{0} < {1} ? {1} : {0}", np.maximum),
    "Minimum": Map("{1} < {0} ? {1} : {0}", np.minimum),
    "Absolute": Map("fabsf({0})", np.abs),
    "Square": Map("{0} * {0}", np.square),
    "Sqrt": Map("sqrtf({0})", np.sqrt),
    "Rsqrt": Map("1 / sqrtf({0})", lambda x: 1 / np.sqrt(x)),
    "Reciprocal": Map("1 / {0}", np.reciprocal),
    "Exp": Map("exponential({0})", np.exp),
    "Expm1": Map("exponential_minus_1({0})", np.expm1),
    "Log": Map("logarithm({0})", np.log),
    "Log1p": Map("logarithm_of_1_plus({0})", np.log1p),
    "Power": Map("powf({0}, {1})", np.power),
    "Sigmoid": Map("sigmoid({0})", lambda x: 0.5 * (1 + np.tanh(0.5 * x))),
    "Tanh": Map("hyperbolic({0})", np.tanh),
    "Erf": Map("erff({0})", np.vectorize(math.erf, otypes=["float64"])),
    "Sin": Map("sinf({0})", np.sin),
    "Cos": Map("cosf({0})", np.cos),
    "Arctan": Map("atanf({0})", np.arctan),
    "Arctan2": Map("atan2f({0}, {1})", np.arctan2),
    "Floor": Map("floorf({0})", np.floor),
    "Ceil": Map("ceilf({0})", np.ceil),
    "Round": Map("rintf({0})", np.round),
    "Mod": Map("modulo({0}, {1})", np.mod),
    "IntegerDivide": Map("quotient_of({0}, {1})", np.floor_divide),
    "Greater": Map("{0} > {1}", np.greater),
    "GreaterEqual": Map("{0} >= {1}", np.greater_equal),
    "Less": Map("{0} < {1}", np.less),
    "LessEqual": Map("{0} <= {1}", np.less_equal),
    "Equal": Map("{0} == {1}", np.equal),
    "NotEqual": Map("{0} != {1}", np.not_equal),
    "LogicalAnd": Map("{0} && {1}", np.logical_and),
    "LogicalOr": Map("{0} || {1}", np.logical_or),
    "LogicalNot": Map("!{0}", np.logical_not),
    "Isnan": Map("{0} != {0}", np.isnan),
    "Where": Map("{0} ? {1} : {2}", np.where),
    "Cast": Map("{0}", lambda x: x),
}
_ALIASES = {"TrueDivide": "Divide", "Abs": "Absolute", "Fabs": "Absolute"}


def lower(traced: Trace, real: str = "float32") -> Program:
    """Returns a program that computes a traced step in "float32" or "float64".

    Raises:
        ValueError: An operation is not supported.
    """
    program = Program(real)
    lowering = _Lowering(program)
    for tensor in traced.inputs:
        program.inputs.append(program.buffer("input", tensor.shape, tensor.dtype))
        lowering.env[id(tensor)] = Cells(program.inputs[-1].cells)
    for tensor, initial in zip(traced.states, traced.initial, strict=True):
        state = program.buffer("state", tensor.shape, tensor.dtype, data=initial)
        lowering.env[id(tensor)] = Cells(state.cells)
    states = program.states
    lowering.run(traced.nodes)
    flat = []
    for tensor in traced.outputs:
        at = lowering.cells(lowering.value(tensor))
        flat.append(lowering.cast(at, str(tensor.dtype), real).reshape(-1))
    program.output = np.concatenate(flat)
    program.output_sizes = [len(at) for at in flat]
    for state, tensor in zip(states, traced.following, strict=True):
        after = lowering.cells(lowering.value(tensor)).reshape(-1)
        program.stores.append(Op("store", "", state, [after]))
    return program


class _Lowering:
    """Lowers nodes; `env` maps the ids of symbolic tensors to `Cells`."""

    def __init__(self, program: Program):
        self.program, self.scope = program, ""
        self.env: dict[int, Cells] = {}
        self.known: dict[tuple, np.ndarray] = {}
        self.kept: list = []  # objects whose ids are keys

    def run(self, nodes: Sequence[tuple[Any, str]]) -> None:
        for node, scope in nodes:
            if node.is_input or any(id(t) not in self.env for t in node.input_tensors):
                continue  # it only serves to find a shape
            self.scope = scope or self.scope
            arguments = list(node.arguments.args), dict(node.arguments.kwargs)
            args, kwargs = keras.tree.map_structure(self.value, arguments)
            try:
                outputs = self.node(node, args, kwargs)
            except NotImplementedError as error:
                place = f"{scope}: " if scope else ""
                raise ValueError(
                    f"{place}the operation {type(node.operation).__name__} has no C code. {error}"
                ) from error
            pairs = zip(node.outputs, keras.tree.flatten(outputs), strict=True)
            self.env.update((id(tensor), Cells(at)) for tensor, at in pairs)

    def value(self, tensor: Any) -> Any:
        """Returns the cells of a symbolic tensor, or a constant."""
        return self.env.get(id(tensor), tensor)

    def cells(self, value: Any) -> np.ndarray:
        """Returns the addresses of a tensor or constant."""
        return value.at if isinstance(value, Cells) else self.constant(_numbers(value))

    def node(self, node: Any, args: list, kwargs: dict) -> Any:
        """Returns the addresses of the outputs of an operation, in the structure of its result."""
        operation = node.operation
        name = type(operation).__name__
        dtype = node.outputs[0].dtype
        given = [v for v in keras.tree.flatten((args, kwargs)) if isinstance(v, Cells)]
        if name in ("OnesLike", "ZerosLike", "FullLike"):
            value = args[1] if name == "FullLike" else float(name == "OnesLike")
            kind = self.program.element_type(dtype)
            return self.constant(np.full(args[0].at.shape, value, kind))
        if all(self.program.values(v.at) is not None for v in given):
            return self.folded(operation, args, kwargs)
        if name in _SAME:
            return args[0].at
        if name in _MOVES or (name == "Take" and not isinstance(args[1], Cells)):
            return self.moved(node, args, kwargs)
        if name == "Take":
            return self.rows(operation, *args)
        if getattr(operation, "data_format", None) == "channels_first":
            raise NotImplementedError('Use data_format="channels_last".')
        if dtype in _WRAPPING and any(x.dtype != "bool" for x in node.input_tensors):
            raise NotImplementedError(f"Integers of {dtype} wrap in Keras: use int32.")
        if name == "Cast":
            return self.cast(args[0].at, node.arguments.args[0].dtype, dtype)
        if name in REDUCTIONS:
            if getattr(operation, "initial", None) is not None:
                raise NotImplementedError("Use initial=None, and ops.maximum or ops.minimum.")
            at = self.cast(args[0].at, node.arguments.args[0].dtype, dtype)
            return self.reduced(operation, REDUCTIONS[name], at, dtype)
        if name in _PRODUCTS:
            if "float" not in dtype:
                raise NotImplementedError("It takes floats only: cast its operands.")
            subscripts = _PRODUCTS[name](operation, *(len(_shape(v)) for v in args[:2]))
            pairs = zip(args[:2], node.arguments.args, strict=False)
            x, y = (
                Cells(self.cast(v.at, given.dtype, dtype)) if isinstance(v, Cells) else v
                for v, given in pairs
            )
            return self.contracted(subscripts, x, y, dtype)
        name = _ALIASES.get(name, name)
        if name == "Round" and operation.decimals:
            raise NotImplementedError("It rounds to whole numbers only: use decimals=0.")
        if name in ("Power", "Round") and "int" in dtype:
            raise NotImplementedError("It takes floats only: cast its operands.")
        if name == "FloorDivide" and "int" in dtype:
            name = "IntegerDivide"
        if name in MAPS:
            return self.mapped(name, [*args, *kwargs.values()], dtype)
        if name in COMPOSITES:
            call = COMPOSITES[name]
            return self.inlined(lambda *a, **k: call(operation, *a, **k), node, args, kwargs)
        raise NotImplementedError("Use other operations of keras.ops.")

    def constant(self, value: np.ndarray) -> np.ndarray:
        return self.program.constant(value, self.scope)

    def add(self, kind: str, name: str, shape: Any, dtype: str, args: list, matrices: Any = ()):
        """Adds an operation, unless an equal one exists, and returns the addresses of results."""
        key = kind, name, tuple(shape), dtype, *(a.tobytes() for a in args), *map(id, matrices)
        if key not in self.known:
            buffer = self.program.buffer("work", shape, dtype, scope=self.scope)
            self.program.ops.append(Op(kind, name, buffer, args, list(matrices), self.scope))
            self.known[key] = buffer.cells
            self.kept.append(matrices)  # their ids are those of no others
        return self.known[key]

    # Operations without work

    def folded(self, operation: Any, args: list, kwargs: dict) -> Any:
        """Computes an operation on constants."""

        def known(value):
            if not isinstance(value, Cells):
                return value
            numbers = self.program.values(value.at)
            # Keras' own integers: JAX has no 64 bits.
            return numbers.astype("int32") if numbers.dtype == "int64" else numbers

        args, kwargs = keras.tree.map_structure(known, (args, kwargs))
        result = operation.call(*args, **kwargs)
        return keras.tree.map_structure(lambda y: self.constant(_numbers(y)), result)

    def moved(self, node: Any, args: list, kwargs: dict) -> Any:
        """Moves addresses by the operation itself."""
        dtype, old = node.outputs[0].dtype, node.arguments
        is_pad = type(node.operation).__name__ == "Pad"
        if not is_pad and any(
            isinstance(x, Cells) for x in keras.tree.flatten((list(args[1:]), kwargs))
        ):
            raise NotImplementedError("Its indices must be constant.")

        def at(value, symbol):
            if isinstance(value, Cells):
                return self.cast(value.at, symbol.dtype, dtype)
            is_tensor = hasattr(value, "dtype") and "float" in str(value.dtype)
            return self.cells(value) if is_tensor else value

        given = keras.tree.map_structure(at, (args, kwargs), (list(old.args), dict(old.kwargs)))
        if is_pad:
            given = _padded_args(self, node, given[0][0])
        result = node.operation.call(*given[0], **given[1])
        return keras.tree.map_structure(_numbers, result)

    def cast(self, at: np.ndarray, before: str, after: str) -> np.ndarray:
        """Returns numbers in another dtype."""
        if self.program.element_type(before) == self.program.element_type(after):
            return at
        if self.program.element_type(after) == "bool":
            return self.mapped("NotEqual", [Cells(at), 0], "bool")
        return self.add("map", "Cast", at.shape, after, [at.reshape(-1)])

    # Maps

    def mapped(self, name: str, args: list, dtype: str) -> np.ndarray:
        """Adds a map, unless it is an identity."""
        if self.program.element_type(dtype) == "bool" and name in ("Maximum", "Minimum"):
            name = {"Maximum": "LogicalOr", "Minimum": "LogicalAnd"}[name]
        arrays = np.broadcast_arrays(*(self.cells(v) for v in args))
        neutral = {"Add": 0, "Multiply": 1, "Subtract": 0, "Divide": 1}.get(name)
        for one, other in ((1, 0), (0, 1)) if neutral is not None else ():
            known = self.program.values(arrays[one])
            kind = self.program.owner(int(arrays[other].flat[0])).dtype
            if known is None or not np.all(known == neutral):
                continue
            is_same = kind == self.program.element_type(dtype)
            if is_same and (one == 1 or name in ("Add", "Multiply")):
                return arrays[other]
        return self.add("map", name, arrays[0].shape, dtype, [a.reshape(-1) for a in arrays])

    # Reductions and rows

    def reduced(self, operation: Any, name: str, at: np.ndarray, dtype: str) -> np.ndarray:
        axes = operation.axis
        axes = range(at.ndim) if axes is None else [a % at.ndim for a in np.atleast_1d(axes)]
        rest = [a for a in range(at.ndim) if a not in axes]
        terms = at.transpose(*axes, *rest).reshape(math.prod(at.shape[a] for a in axes), -1)
        shape = [1 if a in axes else n for a, n in enumerate(at.shape)]
        shape = shape if operation.keepdims else [at.shape[a] for a in rest]
        if len(terms) == 1:
            return terms[0].reshape(shape)
        return self.add("reduce", name, terms.shape[1:], dtype, [terms]).reshape(shape)

    def rows(self, operation: Any, table: Any, index: Cells) -> np.ndarray:
        """Adds rows of a constant table, at variable indices."""
        if isinstance(table, Cells) or operation.axis not in (0, -np.ndim(_numbers(table))):
            raise NotImplementedError("Only the first axis of a constant has variable indices.")
        array = _numbers(table)
        flat, shape = array.reshape(len(array), -1), array.shape[1:]
        name = array.dtype.name
        rows = [self.add("gather", "", shape, name, [i.reshape(1)], [flat]) for i in index.at.flat]
        return np.stack(rows).reshape(*index.at.shape, *shape)

    # Products

    def contracted(self, subscripts: str, x: Any, y: Any, dtype: str) -> np.ndarray:
        """Adds an einsum of two operands."""
        (left, right), out = _letters(subscripts, _shape(x), _shape(y))
        if not isinstance(x, Cells):
            x, y, left, right = y, x, right, left
        size = dict(zip([*left, *right], [*_shape(x), *_shape(y)], strict=True))
        shared = [c for c in left if c in right and c in out]
        inner = [c for c in left if c in right and c not in out]
        rows = [c for c in left if c not in right]
        columns = [c for c in right if c not in left]
        if any(c not in out for c in rows + columns) or len({*left}) < len(left):
            raise NotImplementedError("Sum over the other axes before the product.")
        n_shared, n_rows, n_inner, n_columns = (
            math.prod(size[c] for c in letters) for letters in (shared, rows, inner, columns)
        )
        a = x.at.transpose([left.index(c) for c in shared + rows + inner])
        a = a.reshape(n_shared, n_rows, n_inner)
        b = y.at if isinstance(y, Cells) else _numbers(y)
        b = b.transpose([right.index(c) for c in shared + inner + columns])
        b = b.reshape(n_shared, n_inner, n_columns)
        if isinstance(y, Cells):
            found = self.products_of_variables(a, b, dtype)
        elif n_shared > 1 and n_columns <= _NARROW:
            found = self.element_products(a, self.program.constant(b, self.scope, "kernel"), dtype)
        else:
            zeros, pairs = np.zeros((n_rows, n_columns), "int32"), zip(a, b, strict=True)
            found = np.stack(
                [self.add("product", "", zeros.shape, dtype, [zeros, x], [m]) for x, m in pairs]
            )
        found = found.reshape([size[c] for c in shared + rows + columns])
        return found.transpose([(shared + rows + columns).index(c) for c in out])

    def products_of_variables(self, a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
        if b.shape[2] <= _NARROW or a.shape[0] * a.shape[1] > _MOST_ROWS:
            return self.element_products(a, b, dtype)
        found = [
            self.add("dot", "", b.shape[2:], dtype, [np.broadcast_to(row[:, None], y.shape), y])
            for x, y in zip(a, b, strict=True)
            for row in x
        ]
        return np.stack(found)

    def element_products(self, a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
        """Adds all sums at once: (shared, row, inner) by (shared, inner, column)."""
        a, b = np.broadcast_arrays(a[:, :, None], b.transpose(0, 2, 1)[:, None])
        terms = a.shape[-1]
        a, b = (np.moveaxis(z, -1, 0).reshape(terms, -1) for z in (a, b))
        return self.add("dot", "", a.shape[1:], dtype, [a, b])

    # Composites

    def inlined(self, call: Callable, node: Any, args: list, kwargs: dict) -> Any:
        """Traces a function of tensors with new symbols in place of a node's, and lowers it."""
        fresh: dict[int, tuple[keras.KerasTensor, Cells]] = {}

        def symbol(value, old):
            if not isinstance(value, Cells):
                return value
            if id(value) not in fresh:
                fresh[id(value)] = keras.KerasTensor(old.shape, old.dtype), value
            return fresh[id(value)][0]

        old = list(node.arguments.args), dict(node.arguments.kwargs)
        args, kwargs = keras.tree.map_structure(symbol, (args, kwargs), old)
        with recorded() as nodes:
            outputs = call(*args, **kwargs)
        self.env.update((id(symbol), value) for symbol, value in fresh.values())
        self.run([(node, self.scope) for node, _ in nodes])
        self.kept += [args, kwargs, nodes, outputs]
        return keras.tree.map_structure(lambda y: self.cells(self.value(y)), outputs)


_NARROW = 4  # columns; fewer are computed for all shared axes at once
_MOST_ROWS = 64  # of separate products of variables


def _numbers(value):
    if isinstance(value, (bool, int, float)):
        return np.asarray(value)  # Keras would round a float to 32 bits
    return np.asarray(ops.convert_to_numpy(value))


def _shape(value):
    return value.at.shape if isinstance(value, Cells) else np.shape(_numbers(value))


def _letters(subscripts, left_shape, right_shape):
    """Returns the letters of two operands and of the output, without an ellipsis."""
    operands, out = subscripts.replace(" ", "").split("->")
    parts = operands.split(",")
    if len(parts) != 2:
        raise NotImplementedError("An einsum must have two operands.")
    unused = [c for c in "ZYXWVUTSRQ" if c not in subscripts]
    counts = [
        len(shape) - len(part.replace("...", ""))
        for part, shape in zip(parts, (left_shape, right_shape), strict=True)
    ]
    more = unused[: max(counts)]

    def expanded(part, count):
        return part.replace("...", "".join(more[len(more) - count :]))

    parts = [expanded(part, count) for part, count in zip(parts, counts, strict=True)]
    return [list(part) for part in parts], list(expanded(out, len(more)))


def _matmul_subscripts(o, left, right):
    """Returns the subscripts of a matmul of operands of these ranks."""
    rows, columns = "...y" * (left > 1), "z" * (right > 1)
    batch = "..." if max(left, right) > 1 else ""
    return f"{rows}x,{'...' * (right > 1)}x{columns}->{batch}{rows[3:]}{columns}"


def _tensordot_subscripts(o, left, right):
    """Returns the subscripts of a tensordot of operands of these ranks."""
    axes = o.axes
    if isinstance(axes, int):
        axes = range(left - axes, left), range(axes)
    a, b = list("abcdefgh"[:left]), list("ijklmnop"[:right])
    for i, j in zip(*map(np.ravel, axes), strict=True):
        b[j] = a[i]
    out = [c for c in a + b if (a + b).count(c) == 1]
    return f"{''.join(a)},{''.join(b)}->{''.join(out)}"


_PRODUCTS = {
    "Matmul": _matmul_subscripts,
    "Dot": _matmul_subscripts,
    "Einsum": lambda o, left, right: o.subscripts,
    "Tensordot": _tensordot_subscripts,
}


def _padded_args(lowering, node, x):
    """Returns the arguments of `ops.pad` for addresses, with that of the padding's number."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    value = args[1] if len(args) > 1 else kwargs.get("constant_values")
    if value is None or _numbers(value) == 0:
        return [x], {}
    dtype = lowering.program.element_type(node.outputs[0].dtype)
    return [x, int(lowering.constant(np.full(1, _numbers(value), dtype))[0])], {}


# Composites: operations in terms of others. Each takes the operation, for its options.


def _average(x, axes, keepdims=True):
    axes = range(len(x.shape)) if axes is None else [int(a) for a in np.atleast_1d(axes)]
    share = float(1 / math.prod(x.shape[a] for a in axes))
    return ops.sum(x, tuple(axes), keepdims=keepdims) * share


def _variance(x, axes, keepdims=True):
    return _average(ops.square(x - _average(x, axes)), axes, keepdims)


def _along(o, x, parameter):
    """Returns a parameter that broadcasts along the axes of a normalization."""
    if parameter is None:
        return None
    axes = [a % len(x.shape) for a in np.atleast_1d(o.axis)]
    return ops.reshape(parameter, [n if a in axes else 1 for a, n in enumerate(x.shape)])


def _scaled(x, scale, offset):
    x = x if scale is None else x * scale
    return x if offset is None else x + offset


def _layer_norm(o, x, gamma=None, beta=None):
    centered = x if o.rms_scaling else x - _average(x, o.axis)
    y = centered * ops.rsqrt(_variance(x, o.axis) + _epsilon(o))
    return _scaled(y, _along(o, x, gamma), _along(o, x, beta))


def _rms_norm(o, x, scale=None):
    y = x * ops.rsqrt(_average(ops.square(x), o.axis) + _epsilon(o))
    return _scaled(y, _along(o, x, scale), None)


def _normalize(o, x):
    if o.order != 2:
        raise NotImplementedError("Use order=2.")
    length = ops.sqrt(ops.sum(ops.square(x), o.axis, keepdims=True))
    return x / ops.maximum(length, _epsilon(o))


def _epsilon(o):
    return keras.config.epsilon() if o.epsilon is None else o.epsilon


def _batch_norm(o, x, mean, variance, offset=None, scale=None):
    factor = ops.rsqrt(variance + o.epsilon)
    factor = factor if scale is None else factor * scale
    moved = -mean * factor if offset is None else offset - mean * factor
    return x * _along(o, x, factor) + _along(o, x, moved)


def _relu(o, x):
    y = ops.where(x > o.threshold, x, 0.0) if o.threshold else ops.maximum(x, 0.0)
    if o.negative_slope:
        y = ops.where(x >= o.threshold, y, o.negative_slope * (x - o.threshold))
    return y if o.max_value is None else ops.minimum(y, o.max_value)


def _softmax(o, x):
    e = ops.exp(x - ops.max(x, o.axis, keepdims=True))
    return e / ops.sum(e, o.axis, keepdims=True)


def _log_softmax(o, x):
    x = x - ops.max(x, o.axis, keepdims=True)
    return x - ops.log(ops.sum(ops.exp(x), o.axis, keepdims=True))


def _logsumexp(o, x):
    largest = ops.max(x, o.axis, keepdims=True)
    largest = ops.where(ops.absolute(largest) < math.inf, largest, 0.0)
    y = ops.log(ops.sum(ops.exp(x - largest), o.axis, keepdims=True)) + largest
    return y if o.keepdims else ops.squeeze(y, o.axis)


def _softplus(o, x):
    return ops.maximum(x, 0.0) + ops.log1p(ops.exp(-ops.absolute(x)))


def _elu(o, x, alpha=None):
    alpha = o.alpha if alpha is None else alpha
    return ops.where(x > 0, x, alpha * ops.expm1(ops.minimum(x, 0.0)))


def _hard_sigmoid(o, x):
    return ops.minimum(ops.maximum(x / 6.0 + 0.5, 0.0), 1.0)


def _gelu(o, x):
    if o.approximate:
        return x * ops.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + ops.erf(x * math.sqrt(0.5)))


def _cumsum(o, x):
    if o.axis is None:
        raise NotImplementedError("Choose an axis.")
    total, sums = None, []
    for part in ops.split(x, x.shape[o.axis], o.axis):
        total = part if total is None else total + part
        sums.append(total)
    return ops.concatenate(sums, o.axis)


def _glu(o, x):
    a, gate = ops.split(x, 2, o.axis)
    return a * ops.sigmoid(gate)


def _sign(o, x):
    rest = ops.minimum(x, 0.0)  # 0, or NaN
    return ops.where(x > 0, 1.0, ops.where(x < 0, -1.0, rest))


def _windows(o, x, size):
    """Returns the windows that `o` reads, (batch, *outputs, *taps, channels)."""
    rank, order = len(x.shape) - 2, [0]
    fill = -math.inf if type(o).__name__ == "MaxPool" else 0.0
    options = size, o.strides or size, getattr(o, "dilation_rate", 1)
    each = zip(*(per_axis(numbers, rank) for numbers in options), strict=True)
    for i, (k, s, d) in enumerate(each):
        axis, span = 1 + 2 * i, (k - 1) * d + 1
        sides = padding_of(x.shape[axis], span, s, o.padding)
        if any(sides):
            widths = [sides if a == axis else (0, 0) for a in range(len(x.shape))]
            x = ops.pad(x, widths, constant_values=fill)
        outputs = (x.shape[axis] - span) // s + 1
        x = ops.take(x, s * np.arange(outputs)[:, None] + d * np.arange(k), axis)
        order.append(axis)
    return ops.transpose(x, [*order, *(axis + 1 for axis in order[1:]), 2 * rank + 1])


def _conv(o, x, kernel):
    *taps, width, filters = kernel.shape
    seen = _windows(o, x, taps)
    outputs, groups = seen.shape[: len(taps) + 1], x.shape[-1] // width
    seen = ops.reshape(seen, (*outputs, math.prod(taps), groups, width))
    kernel = ops.reshape(kernel, (math.prod(taps), width, groups, filters // groups))
    y = ops.einsum("...kgc,kcgf->...gf", seen, kernel)
    return ops.reshape(y, (*outputs, filters))


def _conv_transpose(o, x, kernel):
    """A convolution, with the taps in reverse, of x with zeros between its elements."""
    strides = per_axis(o.strides, len(x.shape) - 2)
    options = strides, o.padding, o.output_padding, o.dilation_rate
    sides = compute_conv_transpose_padding_args_for_jax(x.shape, kernel.shape, *options)
    for axis, (stride, widths) in enumerate(zip(strides, sides, strict=True), 1):
        x = spread(x, axis, stride, widths)
    return reversed_conv(x, kernel, dilation_rate=o.dilation_rate)


def _depthwise_conv(o, x, kernel):
    *taps, width, multiplier = kernel.shape
    return _conv(o, x, ops.reshape(kernel, (*taps, 1, width * multiplier)))


def _separable_conv(o, x, depthwise_kernel, pointwise_kernel):
    y = _depthwise_conv(o, x, depthwise_kernel)
    return ops.matmul(y, ops.reshape(pointwise_kernel, pointwise_kernel.shape[-2:]))


def _pooled(o, x, reduce):
    rank = len(x.shape) - 2
    return reduce(_windows(o, x, o.pool_size), axis=tuple(range(rank + 1, 2 * rank + 1)))


def _average_pool(o, x):
    counts = _pooled(o, ops.ones(x.shape, x.dtype), ops.sum)  # of samples, without padding
    return _pooled(o, x, ops.sum) / _numbers(counts)


def _rfft(o, x):
    real, imaginary = map(_numbers, o.call(np.eye(x.shape[-1], dtype=x.dtype)))
    return ops.matmul(x, real), ops.matmul(x, imaginary)


def _irfft(o, x):
    one, (real, imaginary) = np.eye(x[0].shape[-1], dtype=x[0].dtype), x
    of_real, of_imaginary = o.call((one, 0 * one)), o.call((0 * one, one))
    return ops.matmul(real, _numbers(of_real)) + ops.matmul(imaginary, _numbers(of_imaginary))


def _dot_product_attention(o, query, key, value, bias=None, mask=None, scale=None):
    if o.attn_logits_soft_cap is not None:
        raise NotImplementedError("Use attn_logits_soft_cap=None.")
    heads = query.shape[2] // key.shape[2]  # for each of the keys
    key, value = (ops.repeat(x, heads, axis=2) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = ops.einsum("btnh,bsnh->bnts", query * scale, key)
    scores = scores if bias is None else scores + bias
    causal = np.tri(*scores.shape[-2:], dtype=bool) if o.is_causal else None
    for allowed in (mask, causal):
        scores = scores if allowed is None else ops.where(allowed, scores, -1e30)
    return ops.einsum("bnts,bsnh->btnh", ops.softmax(scores), value)


def _digitize(o, x, bins):
    is_above = ops.logical_not(ops.expand_dims(x, -1) < _numbers(bins))  # also of NaN
    return ops.sum(ops.cast(is_above, "int32"), axis=-1)


def _one_hot(o, x):
    is_number = ops.equal(x, x)
    if keras.backend.backend() != "jax":  # where fractions belong to no category
        x = ops.cast(x, "int32")
    y = ops.equal(ops.expand_dims(x, -1), np.arange(o.num_classes))
    y = ops.logical_and(y, ops.expand_dims(is_number, -1))
    return ops.cast(ops.moveaxis(y, -1, o.axis), o.dtype)


def _floor_divide(o, a, b):
    if keras.backend.backend() == "jax":  # by the remainder: 1 // 0.1 is 9
        return ops.round((a - ops.mod(a, b)) / b)
    return ops.floor(a / b)


def _logaddexp(o, a, b):
    distance = ops.where(ops.equal(a, b), 0.0, ops.absolute(a - b))  # also of infinities
    return ops.maximum(a, b) + ops.log1p(ops.exp(-distance))


def _argmax(o, x, compare=ops.greater):
    """Finds the first largest element."""
    axis = o.axis
    if axis is None:
        x, axis = ops.reshape(x, (-1,)), 0
    # On JAX NaN is the extremum.
    finds_nan = keras.backend.backend() == "jax" and keras.backend.is_float_dtype(x.dtype)
    best, at = None, None
    for i, part in enumerate(ops.split(x, x.shape[axis], axis)):
        if best is None:
            best, at = part, ops.zeros_like(part, dtype="int32")
        else:
            better = compare(part, best)
            if finds_nan:
                is_first = ops.logical_and(ops.isnan(part), ops.logical_not(ops.isnan(best)))
                better = ops.logical_or(better, is_first)
            best, at = ops.where(better, part, best), ops.where(better, i, at)
    return at if o.keepdims else ops.squeeze(at, axis)


COMPOSITES: dict[str, Callable] = {
    "Argmax": _argmax,
    "Argmin": lambda o, x: _argmax(o, x, ops.less),
    "AveragePool": _average_pool,
    "BatchNorm": _batch_norm,
    "Celu": lambda o, x: ops.where(x > 0, x, o.alpha * ops.expm1(ops.minimum(x, 0.0) / o.alpha)),
    "Clip": lambda o, x, *limits: ops.minimum(ops.maximum(x, o.x_min), o.x_max),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Cumsum": _cumsum,
    "DepthwiseConv": _depthwise_conv,
    "Digitize": _digitize,
    "DotProductAttention": _dot_product_attention,
    "Elu": _elu,
    "FloorDivide": _floor_divide,
    "Gelu": _gelu,
    "Glu": _glu,
    "HardSigmoid": _hard_sigmoid,
    "HardSilu": lambda o, x: x * _hard_sigmoid(o, x),
    "HardTanh": lambda o, x: ops.minimum(ops.maximum(x, -1.0), 1.0),
    "IRFFT": _irfft,
    "LayerNorm": _layer_norm,
    "LeakyRelu": lambda o, x: ops.where(x > 0, x, o.negative_slope * x),
    "Log10": lambda o, x: ops.log(x) * (1 / math.log(10)),
    "Log2": lambda o, x: ops.log(x) * (1 / math.log(2)),
    "LogSigmoid": lambda o, x: -_softplus(o, -x),
    "LogSoftmax": _log_softmax,
    "Logaddexp": _logaddexp,
    "Logsumexp": _logsumexp,
    "MaxPool": lambda o, x: _pooled(o, x, ops.max),
    "Mean": lambda o, x: _average(x, o.axis, o.keepdims),
    "Moments": lambda o, x: (_average(x, o.axes, o.keepdims), _variance(x, o.axes, o.keepdims)),
    "Normalize": _normalize,
    "OneHot": _one_hot,
    "RFFT": _rfft,
    "RMSNorm": _rms_norm,
    "ReLU": _relu,
    "Relu": lambda o, x: ops.maximum(x, 0.0),
    "Relu6": lambda o, x: ops.minimum(ops.maximum(x, 0.0), 6.0),
    "Selu": lambda o, x: 1.0507009873554805 * _elu(o, x, 1.6732632423543772),
    "SeparableConv": _separable_conv,
    "Sign": _sign,
    "Silu": lambda o, x: x * ops.sigmoid(x),
    "Softmax": _softmax,
    "Softplus": _softplus,
    "Softsign": lambda o, x: x / (1.0 + ops.absolute(x)),
    "Squareplus": lambda o, x: 0.5 * (x + ops.sqrt(x * x + o.b)),
    "Std": lambda o, x: ops.sqrt(_variance(x, o.axis, o.keepdims)),
    "TanhShrink": lambda o, x: x - ops.tanh(x),
    "Threshold": lambda o, x: ops.where(x > o.threshold, x, o.default_value),
    "Var": lambda o, x: _variance(x, o.axis, o.keepdims),
}
