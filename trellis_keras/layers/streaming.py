"""Streaming: one time step at a time, equal to the forward pass.

The protocol of a causal layer that streams, in three methods:

- `initial_cache(batch_size)` returns the cache before the first step: a structure (dicts, lists)
  of plain tensors, each with the batch as its first axis;
- `step(x_t, cache)` returns `(y_t, cache)` for one step x_t (batch, channels). Its work and the
  cache's shapes do not depend on how many steps came before;
- `prefill(x, cache=None)` returns `(y, cache)` for a whole piece x (batch, time, channels), and
  the cache that stepping through it would have left. None stands for the initial cache.

With y = layer(x), the t-th step returns y[:, t], and so does `prefill`. The functions are pure:
nothing is stored in the layer, so that a server can hand the cache to its client, a beam search can
reorder its rows, and all of it compiles. Streaming is inference: no dropout is active, and only the
layer's main output is made. A layer must have been built before.
"""

import keras
from keras import ops

from trellis_keras.layers.arguments import compatible
from trellis_keras.layers.compiled import compile_xla


class Streaming:
    """Base class of layers that stream: the protocol above, and `prefill` made of steps.

    Example: a running sum.

    >>> class RunningSum(Streaming, keras.layers.Layer):
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

    def initial_cache(self, batch_size):
        """Returns the cache before the first step of `batch_size` rows."""
        raise NotImplementedError(f"{type(self).__name__} must define `initial_cache(batch_size)`.")

    def step(self, x, cache):
        """Advances one step: x (batch, channels) and a cache to (y (batch, filters), cache)."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(x, cache)`.")

    def prefill(self, x, cache=None):
        """Advances x.shape[1] steps; returns `(y, cache)`, y (batch, time, filters)."""
        return step_through(self, x, cache)


def step_through(layer, x, cache=None):
    """Feeds x (batch, time, channels) to `layer.step` in a loop that compiles once.

    Returns:
        y (batch, time, filters) and the cache after the last step.
    """
    x = ops.convert_to_tensor(x)
    cache = layer.initial_cache(ops.shape(x)[0]) if cache is None else cache
    steps = ops.moveaxis(x, 1, 0)
    # The first step is outside the loop: it tells the shape and dtype of y.
    y, cache = layer.step(steps[0], cache)
    rest = ops.zeros((ops.shape(steps)[0] - 1, *ops.shape(y)), dtype=y.dtype)
    ys = ops.concatenate([y[None], rest], axis=0)

    def body(t, carried):
        ys, cache = carried
        y, cache = layer.step(steps[t], cache)
        return replace_row(ys, t, y), cache

    ys, cache = ops.fori_loop(1, ops.shape(steps)[0], body, (ys, cache))
    return ops.moveaxis(ys, 0, 1), cache


def compiled_step(layer):
    """Returns `layer.step` compiled by XLA once for each batch size, whatever the weights are then.

    On JAX prefer it to a `jax.jit` of your own, which keeps the weights that it was compiled with
    where they are no argument; outside of compiled functions a step may compile anew each time.

    Args:
        layer: A built layer or model that streams.

    Returns:
        A function of x and cache, tensors or arrays.

    Raises:
        ValueError: It does not stream or is not built.

    Example:

    >>> layer = trellis_keras.layers.TCN(4, kernel_size=3, depth=2)
    >>> layer.build((None, None, 3))
    >>> step, cache = compiled_step(layer), layer.initial_cache(1)
    >>> for x in np.zeros((5, 1, 3), "float32"):
    ...     y, cache = step(x, cache)
    """
    check_streams(layer)
    check_built(layer)
    return compile_xla(layer.step, layer.variables)


def replace_row(rows, index, row):
    """Returns a tensor (n, ...) with another row at a scalar tensor's index.

    Not `slice_update`: TensorFlow has only XLA's operation for it, which a server may lack.
    """
    return ops.scatter_update(rows, ops.reshape(index, (1, 1)), row[None])


def check_streams(layer):
    """Refuses a layer that does not follow the protocol.

    Raises:
        ValueError: A method of the protocol is missing.
    """
    missing = [
        name
        for name in ("initial_cache", "step", "prefill")
        if not callable(getattr(layer, name, None))
    ]
    if missing:
        raise ValueError(
            "Streaming and generation need a layer that follows the protocol of "
            "trellis_keras.layers.streaming (initial_cache, step, prefill). "
            f"Received: {layer!r}, which lacks {missing}"
        )


def check_built(layer):
    """Refuses a layer or model without weights.

    Raises:
        ValueError: It is not built.
    """
    if not layer.built:
        raise ValueError(
            f"{layer.name} is not built, so it has no weights to stream with. Call it once, call "
            "`build(input_shape)`, or load it from a file first."
        )


def check_batch_size(batch_size):
    """Refuses a batch size that is neither a positive integer nor a tensor.

    Raises:
        ValueError: It is an integer below 1, or None.
    """
    if batch_size is None or (isinstance(batch_size, int) and batch_size < 1):
        raise ValueError(
            f"`batch_size` must be a positive integer. Received: batch_size={batch_size}"
        )


def check_shape(name, tensor, shape):
    """Refuses a tensor whose static shape cannot be `shape` (None stands for any size).

    Raises:
        ValueError: Wrong rank or size.
    """
    if not compatible(tensor.shape, shape):
        raise ValueError(
            f"`{name}` must have shape {tuple(shape)}. Received: shape {tuple(tensor.shape)}"
        )


def check_cache(layer, cache, expected):
    """Refuses a cache of another layer or batch size.

    Args:
        layer: The layer, named in the message.
        cache: Structure of tensors.
        expected: The structure of shapes (lists, None for an unknown size) that it must have.

    Raises:
        ValueError: Structure or shapes differ; the message names both.
    """
    # A shape is a list too; wrapped, the structures of tensors and of shapes can be compared.
    received = keras.tree.map_structure(lambda tensor: _Shape(tensor.shape), cache)
    wanted = keras.tree.map_shape_structure(_Shape, expected)
    pairs = zip(keras.tree.flatten(received), keras.tree.flatten(wanted), strict=False)
    right = _same_structure(received, wanted) and all(compatible(a.size, b.size) for a, b in pairs)
    if not right:
        raise ValueError(
            f"The cache does not fit {layer.name}: it is of another batch size or of another "
            f"layer. Expected tensors of shapes: {wanted}. Received: {received}"
        )


class _Shape:
    """A shape that `keras.tree` takes for a leaf."""

    def __init__(self, size):
        self.size = tuple(size)

    def __repr__(self):
        return repr(self.size)


def _same_structure(a, b):
    try:
        keras.tree.assert_same_structure(a, b)
    except (ValueError, TypeError):
        return False
    return True
