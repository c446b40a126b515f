"""Records one step of a stream as Keras operations, by calling it once with symbolic tensors."""

import contextlib
import dataclasses
import sys
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend
from keras.src.ops.node import Node
from keras.src.utils.backend_utils import DynamicBackend

_ONE_AT_A_TIME = threading.RLock()  # the threads that trace


@dataclasses.dataclass
class Trace:
    """One step of a stream, for a batch of one row.

    Attributes:
        inputs, states: Lists of symbolic tensors.
        outputs, following: Lists of the outputs and of the next states, symbolic or constant.
        initial: List of arrays, the states before the first step.
        nodes: List of (node, path of the layer that made it), in order.
    """

    inputs: list[keras.KerasTensor]
    states: list[keras.KerasTensor]
    outputs: list[Any]
    following: list[Any]
    initial: list[np.ndarray]
    nodes: list[tuple[Node, str]]


def trace(stream: Any, inputs: Any) -> Trace:
    """Traces `stream.step`.

    Args:
        stream: Object with `initial_cache` and `step`.
        inputs: Structure of symbolic tensors of batch size 1, as `step` takes.
    """
    cache = stream.initial_cache(1)
    initial = [np.asarray(ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(cache)]
    states = [keras.KerasTensor(leaf.shape, str(leaf.dtype)) for leaf in initial]
    with recorded(outer=stream) as nodes:
        outputs, following = stream.step(inputs, keras.tree.pack_sequence_as(cache, states))
    flat = keras.tree.flatten
    return Trace(flat(inputs), states, flat(outputs), flat(following), initial, nodes)


@contextlib.contextmanager
def recorded(outer: Any = None) -> Iterator[list[tuple[Node, str]]]:
    """Context that records this thread's calls of Keras operations with symbolic tensors.

    Layers are traced through their `call`. Keras is patched meanwhile; other threads see it as it
    is, and wait to trace.

    Args:
        outer: Object whose methods belong to no layer.
    """
    thread = threading.get_ident()
    nodes: list[tuple[Node, str]] = []
    create, whole, get = Node.__init__, keras.Layer.__call__, keras.KerasTensor.__getitem__

    def create_node(node, *args, **kwargs):
        create(node, *args, **kwargs)
        nodes.append((node, _scope(outer)))

    def call(layer, *args, **kwargs):
        symbolic = any(map(_is_symbolic, keras.tree.flatten((args, kwargs))))
        return layer.call(*args, **kwargs) if symbolic else whole(layer, *args, **kwargs)

    def get_item(x, key):  # Keras fails for keys such as x[:1] and x[None]
        return get(x, key if isinstance(key, tuple) else (key,))

    def patch(owner, name, replacement):
        original = getattr(owner, name)
        if isinstance(replacement, _Namespace):
            return unittest.mock.patch.object(owner, name, replacement)

        def here(*args, **kwargs):
            function = replacement if threading.get_ident() == thread else original
            return function(*args, **kwargs)

        return unittest.mock.patch.object(owner, name, here)

    with (
        _ONE_AT_A_TIME,
        patch(backend, "numpy", _Namespace(backend.numpy)),
        patch(backend, "nn", _Namespace(backend.nn)),
        patch(backend, "math", _Namespace(backend.math)),
        patch(backend, "cast", _Namespace(backend).cast),
        patch(backend, "convert_to_tensor", _Namespace(backend).convert_to_tensor),
        patch(backend, "rnn", _unrolled_rnn),
        patch(backend, "lstm", _not_fused),
        patch(backend, "gru", _not_fused),
        patch(Node, "__init__", create_node),
        patch(keras.Layer, "__call__", call),
        patch(keras.KerasTensor, "__getitem__", get_item),
        patch(DynamicBackend, "__getattr__", _operations_of),
        patch(ops, "scan", _unrolled_scan),
        patch(ops, "fori_loop", _unrolled_loop),
    ):
        yield nodes


class _Namespace:
    """Functions of a backend that some layers call directly, also for symbolic tensors."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if not callable(function) or not hasattr(ops, name):
            return function

        def call(*args, **kwargs):
            symbolic = any(map(_is_symbolic, keras.tree.flatten((args, kwargs))))
            return (getattr(ops, name) if symbolic else function)(*args, **kwargs)

        return call


def _operations_of(backend, name):
    """Returns what a preprocessing layer calls its backend's `numpy`, `nn`, or `cast`."""
    return getattr(ops, name, ops)


def _is_symbolic(value):
    return isinstance(value, keras.KerasTensor)


def _scope(outer):
    """Returns the path of the layers whose methods are running."""
    layers: list[keras.Layer] = []
    frame = sys._getframe(2)
    while frame is not None:
        for name in ("self", "layer"):
            owner = frame.f_locals.get(name)
            if isinstance(owner, keras.Layer) and owner is not outer and owner not in layers:
                layers.append(owner)
        frame = frame.f_back
    return "/".join(layer.name for layer in reversed(layers))


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
