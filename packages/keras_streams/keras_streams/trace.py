"""Records one step of a stream as Keras operations, by calling it once with symbolic tensors."""

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams._keras_internals import DynamicBackend, Node, backend, nn_ops

_ONE_AT_A_TIME = threading.RLock()  # the threads that trace


class Scoped:
    """Base class of objects whose methods compute a call in a graph of layers.

    Operations within the methods carry the name of the call's layer, and errors name it.
    """

    call: Any = None


@dataclasses.dataclass
class Trace:
    """One step of a stream, for a batch of one row."""

    inputs: list[keras.KerasTensor]
    states: list[keras.KerasTensor]
    outputs: list[Any]  # symbolic or constant
    following: list[Any]  # the next states, symbolic or constant
    initial: list[np.ndarray]  # the states before the first step
    nodes: list[tuple[Node, str]]  # in order, with the path of the layer that made each


def trace(stream: Any, inputs: Any) -> Trace:
    """Traces `stream.step` for symbolic inputs of batch size 1.

    Raises:
        ValueError: An operation takes no symbolic tensors. The message names it or its layer.
    """
    cache = stream.initial_cache(1)
    initial = [np.asarray(ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(cache)]
    states = [keras.KerasTensor(leaf.shape, str(leaf.dtype)) for leaf in initial]
    with recorded(outer=stream) as nodes:
        try:
            outputs, following = stream.step(inputs, keras.tree.pack_sequence_as(cache, states))
        except Exception as error:  # whatever code that needs numbers raises for symbolic tensors
            call = raising_call(error)
            raise ValueError(
                f"{stream.model.name if call is None else call.place} cannot be exported. Use "
                "other operations of keras.ops. For symbolic tensors it raised "
                f"{error_summary(error)}"
            ) from error
    flat = keras.tree.flatten
    return Trace(flat(inputs), states, flat(outputs), flat(following), initial, nodes)


def raising_call(error: BaseException) -> Any:
    """Returns the call in a graph of layers that raised an error, or `None`."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((owner.call for owner in owners if isinstance(owner, Scoped) and owner.call), None)


def error_summary(error: BaseException) -> str:
    """Returns the type and the first words of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def recorded(outer: Any = None) -> Iterator[list[tuple[Node, str]]]:
    """Context that records this thread's calls of Keras operations with symbolic tensors.

    Layers are traced through their `call`; methods of `outer` belong to no layer. Keras is patched
    meanwhile; other threads see it as it is, and wait to trace.
    """
    nodes: list[tuple[Node, str]] = []
    create, whole = Node.__init__, keras.Layer.__call__

    def create_node(node, *args, **kwargs):
        create(node, *args, **kwargs)
        nodes.append((node, _scope(outer)))

    def call(layer, *args, **kwargs):
        if not any(map(_is_symbolic, keras.tree.flatten((args, kwargs)))):
            return whole(layer, *args, **kwargs)
        if "training" not in inspect.signature(layer.call).parameters:
            kwargs.pop("training", None)
        return layer.call(*args, **kwargs)

    with (
        _symbolic_backend(),
        _patch(backend, "rnn", _unrolled_rnn),
        _patch(backend, "lstm", _not_fused),
        _patch(backend, "gru", _not_fused),
        _patch(Node, "__init__", create_node),
        _patch(keras.Layer, "__call__", call),
        _patch(DynamicBackend, "__getattr__", _operations_of),
        # `Discretization` passes a list.
        _patch(ops.numpy, "digitize", lambda x, bins: ops.digitize(x, np.asarray(bins))),
        _patch(ops, "scan", _unrolled_scan),
        _patch(ops, "fori_loop", _unrolled_loop),
    ):
        yield nodes


class SymbolicWeights(keras.StatelessScope):
    """Scope in which variables are symbolic; `symbols` maps the ids of those that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols: dict[int, tuple[keras.Variable, keras.KerasTensor]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self.state_mapping:  # assigned
            return self.state_mapping[id(variable)]
        if id(variable) not in self.symbols:
            symbol = keras.Input(batch_shape=variable.shape, dtype=variable.dtype)
            self.symbols[id(variable)] = variable, symbol
        return self.symbols[id(variable)][1]


@contextlib.contextmanager
def symbolic_weights() -> Iterator[SymbolicWeights]:
    """Context in which variables are symbolic, and symbolic tensors have one row.

    Calls of layers and operations then show what depends on which weights, also of other layers
    that a function such as that of a `Lambda` reads.
    """
    shape = ops.shape

    def shape_of_one_row(x):
        rows, *others = shape(x) or [()]
        return (1, *others) if rows is None else shape(x)

    with _symbolic_backend(), _patch(ops, "shape", shape_of_one_row), SymbolicWeights() as weights:
        yield weights


@contextlib.contextmanager
def _symbolic_backend():
    """Context in which this thread's calls of the backend take symbolic tensors.

    Arrays beside them, such as weights that a layer multiplies by itself, leave operators to Keras.
    """
    get, to_jax = keras.KerasTensor.__getitem__, keras.KerasTensor.__jax_array__
    thread = threading.get_ident()

    def get_item(x, key):  # Keras fails for keys such as x[:1] and x[None]
        return get(x, key if isinstance(key, tuple) else (key,))

    def like_x(operation, x, *others):  # Keras 3.15 fails for an offset without a scale
        return keras.KerasTensor(x.shape, x.dtype)

    def as_jax_array(x):
        if threading.get_ident() == thread:
            raise AttributeError("__jax_array__")  # then JAX leaves `array * x` to Keras
        return functools.partial(to_jax, x)

    patch = unittest.mock.patch.object
    namespace, core = _Namespace(backend), _Namespace(backend.core)
    with (
        _ONE_AT_A_TIME,
        # For all threads: these recognize symbolic tensors themselves.
        patch(backend, "numpy", _Namespace(backend.numpy)),
        patch(backend, "nn", _Namespace(backend.nn)),
        patch(backend, "math", _Namespace(backend.math)),
        _patch(backend, "cast", namespace.cast),
        _patch(backend, "convert_to_tensor", namespace.convert_to_tensor),
        _patch(backend.core, "cast", core.cast),
        _patch(backend.core, "convert_to_tensor", core.convert_to_tensor),
        _patch(backend.core, "slice", core.slice),
        _patch(backend.core, "stop_gradient", core.stop_gradient),
        _patch(keras.KerasTensor, "__getitem__", get_item),
        _patch(nn_ops.BatchNorm, "compute_output_spec", like_x),
        patch(keras.KerasTensor, "__jax_array__", property(as_jax_array)),
        patch(keras.KerasTensor, "__array_ufunc__", None, create=True),
    ):
        yield


def _patch(owner, name, replacement):
    """Replaces a function for this thread."""
    original, thread = getattr(owner, name), threading.get_ident()

    def here(*args, **kwargs):
        function = replacement if threading.get_ident() == thread else original
        return function(*args, **kwargs)

    return unittest.mock.patch.object(owner, name, here)


class _Namespace:
    """Functions of a backend that some layers call directly, also for symbolic tensors."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if not callable(function) or not hasattr(ops, name):
            return function

        def call(*args, **kwargs):
            values = keras.tree.map_structure(_current, (args, kwargs))
            if any(map(_is_symbolic, keras.tree.flatten(values))):
                return getattr(ops, name)(*values[0], **values[1])
            return function(*args, **kwargs)

        return call


def _operations_of(backend, name):
    """Returns what a preprocessing layer calls its backend's `numpy`, `nn`, or `cast`."""
    return getattr(ops, name, ops)


def _is_symbolic(value):
    return isinstance(value, keras.KerasTensor)


def _current(value):
    """Returns the value of a variable, which can be symbolic."""
    return value.value if isinstance(value, keras.Variable) else value


def _scope(outer):
    """Returns the path of the layers whose methods are running."""
    names: dict[int, str] = {}  # by id, from the innermost
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        for owner in (frame.f_locals.get("self"), frame.f_locals.get("layer")):
            call = owner.call if isinstance(owner, Scoped) else None
            layer = owner if call is None else call.operation
            if isinstance(layer, keras.Layer) and layer is not outer:
                names.setdefault(id(layer), layer.name)
            if call is not None:
                names.setdefault(id(call), call.model.partition("/")[2])
    return "/".join(filter(None, reversed(names.values())))


def _unrolled_scan(
    f: Callable, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Computes `ops.scan` in a loop of Python."""
    steps: Any = length if xs is None else keras.tree.flatten(xs)[0].shape[0]
    carry, ys = init, []
    for i in reversed(range(steps)) if reverse else range(steps):
        x = None if xs is None else keras.tree.map_structure(lambda x, i=i: x[i], xs)
        carry, y = f(carry, x)
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    return carry, keras.tree.map_structure(lambda *parts: ops.stack(parts), *ys)


def _unrolled_rnn(
    step_function: Callable,
    inputs: Any,
    initial_states: Any,
    go_backwards: bool = False,
    mask: Any = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Computes the recurrence of Keras' recurrent layers in a loop of Python."""
    if mask is not None:
        raise NotImplementedError("A stream has no masked steps.")
    steps, states, outputs = range(inputs.shape[1]), initial_states, []
    for t in reversed(steps) if go_backwards else steps:
        y, states = step_function(inputs[:, t], states)
        outputs.append(y)
    return outputs[-1], ops.stack(outputs, axis=1), states


def _not_fused(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError  # Keras then calls `backend.rnn`


def _unrolled_loop(lower: int, upper: int, body_fun: Callable, init_val: Any) -> Any:
    """Computes `ops.fori_loop` in a loop of Python."""
    for i in range(lower, upper):
        init_val = body_fun(i, init_val)
    return init_val
