"""Streaming: one time step at a time, equal to the forward pass."""

import contextlib
import inspect
import numbers
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_streams._keras_internals import all_layers
from keras_streams.types import Cache, Shape, Tensor


class StreamingMixin:
    """The streaming protocol of a causal layer, with a `prefill` that loops over steps.

    With y = layer(x), step t returns y[:, t], and `prefill` returns y. A cache is a structure
    (dicts, lists) of tensors with the batch as their first axis. Neither its shapes nor the work of
    a step depend on the number of previous steps. The methods are pure: the layer stores nothing,
    so a server can return the cache to its client and beam search can reorder its rows. Streaming
    is inference: dropout is inactive, and only the main output is computed.

    Attributes:
        delay: Number of steps by which outputs come later than their inputs, or a structure of
            numbers like the outputs. Defaults to `0`.
        rate: Number of steps per output, like `delay`. Defaults to `1`.

    Example: a running sum.

    >>> class RunningSum(StreamingMixin, keras.layers.Layer):
    ...     def call(self, x):
    ...         return ops.cumsum(x, axis=1)
    ...
    ...     def initial_cache(self, batch_size):
    ...         return ops.zeros((batch_size, 1))
    ...
    ...     def step(self, x, cache):
    ...         return x + cache, x + cache
    ...
    >>> y, cache = RunningSum().prefill(np.ones((1, 3, 1), "float32"), ops.zeros((1, 1)))
    >>> np.asarray(y)[0, :, 0].tolist()
    [1.0, 2.0, 3.0]
    """

    delay: Any = 0
    rate: Any = 1

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first step of `batch_size` rows.

        A counter of steps is int32: it is exact, and stays an integer in C.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `initial_cache(batch_size)`.")

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Advances one step: x (batch, channels) to y (batch, filters)."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(x, cache)`.")

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Advances all steps of x (batch, time, channels), by default from the initial cache."""
        return step_through(self, x, cache)


def has_protocol(layer: Any) -> bool:
    """Returns whether a layer has the methods of the streaming protocol."""
    return all(
        callable(getattr(layer, name, None)) for name in ("initial_cache", "step", "prefill")
    )


def streams_itself(layer: Any) -> bool:
    """Returns whether a layer streams by the protocol, or raises an error of its own if it can't.

    A layer that looks ahead (`is_causal` is False) streams through the operations of its `call`,
    with a delay.
    """
    looks_ahead = not getattr(layer, "is_causal", True) and not getattr(
        layer, "go_backwards", False
    )
    return has_protocol(layer) and not looks_ahead


def step_through(layer: Any, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
    """Feeds x (batch, time, channels) to `layer.step` in a loop that is compiled once.

    Returns:
        y (batch, time, filters) and the cache after the last step.
    """
    each = keras.tree.map_structure
    steps = each(lambda x: ops.moveaxis(ops.convert_to_tensor(x), 1, 0), x)
    time, rows = ops.shape(keras.tree.flatten(steps)[0])[:2]
    cache = layer.initial_cache(rows) if cache is None else cache
    if keras.tree.flatten(steps)[0].shape[0] == 0:
        one = each(lambda x: ops.zeros((rows, 1, *x.shape[2:]), x.dtype), steps)
        return each(lambda y: y[:, :0], step_through(layer, one, cache)[0]), cache
    # The first step, outside the loop, shows the shape and dtype of y.
    y, cache = layer.step(each(lambda x: x[0], steps), cache)

    def room(y):
        rest = ops.zeros((time - 1, *ops.shape(y)), dtype=y.dtype)
        return ops.concatenate([y[None], rest], axis=0)

    def body(t, carried):
        ys, cache = carried
        y, cache = layer.step(each(lambda x: x[t], steps), cache)
        return each(lambda ys, y: replace_row(ys, t, y), ys, y), cache

    ys, cache = ops.fori_loop(1, time, body, (each(room, y), cache))
    return each(lambda ys: ops.moveaxis(ys, 0, 1), ys), cache


def replace_row(rows: Tensor, index: Tensor, row: Tensor) -> Tensor:
    """Returns `rows` (n, ...) with the row at a scalar tensor's index replaced.

    It avoids `slice_update`, which on TensorFlow is an XLA operation that a server may lack.
    """
    return ops.scatter_update(rows, ops.reshape(index, (1, 1)), row[None])


# Checks


def check_causal(layer: Any) -> None:
    """Raises ValueError unless a streaming layer is causal."""
    if not getattr(layer, "is_causal", True):
        raise ValueError(
            "Streaming and generation need a causal layer: go_backwards=False and, for a TCN, "
            'padding="causal" (to_stream streams padding="same" with a delay). Received: '
            f"{layer.name} with go_backwards={getattr(layer, 'go_backwards', False)}, "
            f"padding={getattr(layer, 'padding', 'causal')!r}"
        )


def check_built(layer: keras.Layer) -> None:
    """Raises ValueError unless a layer or model is built."""
    if not layer.built:
        raise ValueError(
            f"{layer.name} is not built, so it has no weights yet. Call it once, call "
            "`build(input_shape)`, or load it from a file first."
        )


def check_start(layer: Any, batch_size: int | Tensor) -> None:
    """Raises ValueError unless a layer can stream `batch_size` rows, an integer or a tensor."""
    check_causal(layer)
    check_built(layer)
    is_integer = isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool)
    is_tensor = not isinstance(batch_size, (numbers.Number, str, type(None)))
    if not is_tensor and not (is_integer and batch_size >= 1):
        raise ValueError(
            f"`batch_size` must be a positive integer. Received: batch_size={batch_size!r}"
        )


def check_stream(layer: keras.Layer, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
    """Returns the arguments of `prefill`: x in the compute dtype, and the initial cache for `None`.

    The layer has `input_channels`, and `cache_shapes(batch_size)` as `check_cache` takes.

    Raises:
        ValueError: The layer is not built, x has the wrong shape, or the cache belongs to another
            batch size or layer.
    """
    check_built(layer)
    x = ops.cast(x, layer.compute_dtype)
    check_shape("x", x, (None, None, layer.input_channels))
    cache = layer.initial_cache(ops.shape(x)[0]) if cache is None else cache
    check_cache(layer, cache, layer.cache_shapes(x.shape[0]))
    return x, cache


def check_cache(layer: keras.Layer, cache: Cache, expected: Any) -> None:
    """Raises ValueError unless a cache has the expected structure of shapes.

    They are lists, with `None` for an unknown size.
    """
    # (Keras would take an empty list for the shape of a scalar.)
    wanted = expected and keras.tree.map_shape_structure(lambda s: keras.KerasTensor(s), expected)

    def shape_of(leaf):
        return tuple(getattr(leaf, "shape", ()))

    found, sizes = (
        {path: shape_of(leaf) for path, leaf in keras.tree.flatten_with_path(tree)}
        for tree in (cache, wanted)
    )
    fits = found.keys() == sizes.keys() and all(
        shapes_match(found[path], sizes[path]) for path in sizes
    )
    if not fits:
        raise ValueError(
            f"The cache does not fit {layer.name}: it belongs to another batch size or another "
            "layer, or to a compiled step (pass `cache.unpack()`). Expected tensors of shapes: "
            f"{keras.tree.map_structure(shape_of, wanted)}. "
            f"Received: {keras.tree.map_structure(shape_of, cache)}"
        )


def shapes_match(shape: Shape, expected: Shape) -> bool:
    """Returns whether two static shapes can be equal. `None` matches any size."""
    return len(shape) == len(expected) and all(
        a == b or a is None or b is None for a, b in zip(shape, expected, strict=True)
    )


def check_shape(name: str, tensor: Tensor, shape: Shape) -> None:
    """Raises ValueError unless the static shape of `tensor` can be `shape`."""
    if not shapes_match(tensor.shape, shape):
        raise ValueError(
            f"`{name}` must have shape {tuple(shape)}. Received: shape {tuple(tensor.shape)}"
        )


def flatten_inputs(x: Any, inputs: Any) -> list[Tensor]:
    """Returns the tensors of x, which must have the structure of a model's inputs.

    The tensors of a dict come in the order of its sorted keys, so it must not stand for a list.
    """
    if not keras.tree.is_nested(inputs):
        return [x]
    xs = keras.tree.flatten(x)
    if keys_of(x) != keys_of(inputs) or len(xs) != len(keras.tree.flatten(inputs)):
        expected = keras.tree.map_structure(lambda tensor: tensor.name, inputs)
        received = keras.tree.map_structure(lambda tensor: tuple(ops.shape(tensor)), x)
        raise ValueError(
            f"`x` must have one tensor per input of the model, with the structure {expected}. "
            f"Received: tensors of shapes {received}"
        )
    return xs


def keys_of(structure: Any) -> Any:
    """Returns the keys of a dict, `None` for another structure."""
    return structure.keys() if isinstance(structure, dict) else None


# Layers, precision and states


def at_least_float32(dtype: str) -> str:
    """Returns float32 for the half precisions, else `dtype`: the dtype of states and losses.

    Except on TensorFlow, `keras.backend.result_type(dtype, "float32")` is float32 for float64 too.
    """
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a + b and its rounding error (Knuth)."""
    total = a + b
    seen = total - a
    return total, (a - (total - seen)) + (b - seen)


@contextlib.contextmanager
def without_carried_states(model: keras.Model) -> Iterator[None]:
    """Context in which stateful layers start from zero states and leave theirs unchanged."""
    layers = [layer for layer in all_layers(model) if getattr(layer, "stateful", False)]
    try:
        for layer in layers:
            layer.stateful = False
        yield
    finally:
        for layer in layers:
            layer.stateful = True


# Keras' cells


# Held while the dropout rates of cells are set to 0 or used in training, because layers and threads
# may share the cells.
RATES_LOCK = threading.RLock()


def pack_states(state_size: Any, states: Iterator[Tensor]) -> Any:
    """Returns the next states of an iterator, in the structure of a layer's `state_size`."""
    if isinstance(state_size, (list, tuple)):
        # A plain list: JAX does not support Keras' own list type.
        return [pack_states(size, states) for size in state_size]
    return next(states)


def cell_step(cell: Any, x: Tensor, states: Any) -> tuple[Tensor, Any]:
    """Calls a cell as `keras.layers.RNN` does in inference."""
    states = keras.tree.map_structure(lambda state: ops.cast(state, cell.compute_dtype), states)
    takes_training = "training" in inspect.signature(cell.call).parameters
    return cell(x, states, **({"training": False} if takes_training else {}))


@contextlib.contextmanager
def without_dropout(cells: Sequence[Any]) -> Iterator[None]:
    """Context in which Keras' cells draw no dropout masks, which inference would not use."""
    cells = [part for cell in cells for part in _dropout_cells(cell)]
    with RATES_LOCK:
        rates = [(cell, cell.dropout, cell.recurrent_dropout) for cell in cells]
        for cell in cells:
            cell.dropout = cell.recurrent_dropout = 0.0
        try:
            yield
        finally:
            for cell, dropout, recurrent_dropout in rates:
                cell.dropout, cell.recurrent_dropout = dropout, recurrent_dropout


def _dropout_cells(cell):
    """Keras' own cells with dropout rates in a cell. Others may draw no masks in inference."""
    if isinstance(cell, keras.layers.StackedRNNCells):
        return [part for inner in cell.cells for part in _dropout_cells(inner)]
    return [cell] if isinstance(cell, _DROPOUT_CELLS) else []


_DROPOUT_CELLS = keras.layers.SimpleRNNCell, keras.layers.LSTMCell, keras.layers.GRUCell
