"""Streaming: one time step at a time, equal to the forward pass.

A causal layer that streams has three methods:

- `initial_cache(batch_size)` returns the cache before the first step: a structure (dicts, lists)
  of tensors, each with the batch as its first axis;
- `step(x, cache)` returns `(y, cache)` for one step x (batch, channels). Its work and the shapes
  of the cache do not depend on the number of steps before;
- `prefill(x, cache=None)` returns `(y, cache)` for a segment x (batch, time, channels), with the
  cache after its last step. None starts from the initial cache.

With y = layer(x), step t returns y[:, t], and `prefill` returns y. The methods are pure: nothing is
stored in the layer, so that a server can hand the cache to its client and a beam search can reorder
its rows. Streaming is inference: dropout is inactive, and only the main output is computed. The
layer must be built.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trellis_keras.layers.base import check_shape, shapes_match
from trellis_keras.types import Cache, Tensor


class StreamingMixin:
    """The streaming protocol, with a `prefill` that loops over steps.

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

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first step of `batch_size` rows."""
        raise NotImplementedError(f"{type(self).__name__} must define `initial_cache(batch_size)`.")

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Advances one step: x (batch, channels) to y (batch, filters)."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(x, cache)`.")

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Advances all steps of x (batch, time, channels) to y (batch, time, filters)."""
        return step_through(self, x, cache)


# Keras layers whose output at a step depends on that step only, at least in inference. Those with
# an `axis` must have the last one.
_POINTWISE = (
    keras.layers.Activation,
    keras.layers.ActivityRegularization,
    keras.layers.AlphaDropout,
    keras.layers.BatchNormalization,
    keras.layers.Dense,
    keras.layers.Dropout,
    keras.layers.ELU,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    keras.layers.LayerNormalization,
    keras.layers.LeakyReLU,
    keras.layers.Normalization,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.RMSNormalization,
    keras.layers.SpatialDropout1D,
)


def as_stream(layer: keras.Layer) -> Any:
    """Returns an object that follows the streaming protocol for a layer.

    Args:
        layer: Layer with the methods of the protocol, or a `keras.Sequential` of such layers and of
            Keras layers that treat each step by itself, such as `Normalization` and `Dense`.

    Returns:
        The layer itself, or a stream through the layers of the stack.

    Raises:
        ValueError: If the layer, or one of a stack, does not stream.

    Example:

    >>> stack = keras.Sequential([keras.layers.Dense(4), trellis_keras.layers.TCN(4, 3, depth=2)])
    >>> stack.build((None, None, 2))
    >>> stream = as_stream(stack)
    >>> y, cache = stream.step(np.zeros((1, 2)), stream.initial_cache(1))
    >>> tuple(y.shape)
    (1, 4)
    """
    if isinstance(layer, keras.Sequential) and not _has_protocol(layer):
        return _Stack(layer)
    check_streams(layer)
    return layer


class _Stack(StreamingMixin):
    """A stream through the layers of a `keras.Sequential`."""

    def __init__(self, stack):
        self._parts = []  # (stream or pointwise layer, whether it streams, whether it has no time)
        has_time = True
        for layer in stack.layers:
            if is_pointwise(layer):
                self._parts.append((layer, False, has_time))
            elif has_time:
                self._parts.append((as_stream(layer), True, True))
                has_time = _returns_sequences(layer)
            else:
                raise ValueError(
                    f"{layer.name} follows a layer with return_sequences=False in {stack.name}, so "
                    "the stack cannot be streamed."
                )

    def initial_cache(self, batch_size):
        return [part.initial_cache(batch_size) for part, streams, _ in self._parts if streams]

    def step(self, x, cache):
        caches, after = iter(cache), []
        for part, streams, has_time in self._parts:
            if streams:
                x, new = part.step(x, next(caches))
                after.append(new)
            else:
                # Some layers are built for the rank that they have in the forward pass.
                x = part(x[:, None])[:, 0] if has_time else part(x)
        return x, after

    def prefill(self, x, cache=None):
        x = ops.convert_to_tensor(x)
        cache = self.initial_cache(ops.shape(x)[0]) if cache is None else cache
        caches, after = iter(cache), []
        for part, streams, has_time in self._parts:
            if streams:
                x, new = part.prefill(x, next(caches))
                after.append(new)
            elif has_time:
                x = part(x)
            else:
                shape = ops.shape(x)
                y = part(ops.reshape(x, (-1, shape[-1])))
                x = ops.reshape(y, (shape[0], shape[1], y.shape[-1]))
        return x, after


def is_pointwise(layer: keras.Layer) -> bool:
    """Returns whether a Keras layer treats each step by itself."""
    if not isinstance(layer, _POINTWISE):
        return False
    return getattr(layer, "axis", -1) in (-1, [-1], (-1,))


def _returns_sequences(layer):
    if isinstance(layer, keras.Sequential):
        return all(_returns_sequences(part) for part in layer.layers)
    return getattr(layer, "return_sequences", True)


def step_through(layer: Any, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
    """Feeds x (batch, time, channels) to `layer.step` in a loop that compiles once.

    Returns:
        y (batch, time, filters) and the cache after the last step.
    """
    x = ops.convert_to_tensor(x)
    cache = layer.initial_cache(ops.shape(x)[0]) if cache is None else cache
    steps = ops.moveaxis(x, 1, 0)
    # The first step, outside the loop, shows the shape and dtype of y.
    y, cache = layer.step(steps[0], cache)
    rest = ops.zeros((ops.shape(steps)[0] - 1, *ops.shape(y)), dtype=y.dtype)
    ys = ops.concatenate([y[None], rest], axis=0)

    def body(t, carried):
        ys, cache = carried
        y, cache = layer.step(steps[t], cache)
        return replace_row(ys, t, y), cache

    ys, cache = ops.fori_loop(1, ops.shape(steps)[0], body, (ys, cache))
    return ops.moveaxis(ys, 0, 1), cache


def replace_row(rows: Tensor, index: Tensor, row: Tensor) -> Tensor:
    """Returns `rows` (n, ...) with the row at a scalar tensor's index replaced.

    Not by `slice_update`: on TensorFlow that is an XLA operation, which a server may lack.
    """
    return ops.scatter_update(rows, ops.reshape(index, (1, 1)), row[None])


class PackedCache:
    """The cache between the calls of a compiled step: one tensor (batch, size) for each dtype.

    A call takes time for each tensor that it passes, and the cache of a deep net has dozens.
    """

    def __init__(self, tensors: Sequence[Tensor], layout: "_Layout"):
        self.tensors, self.layout = tensors, layout

    def unpack(self) -> Cache:
        """Returns the cache that the methods of the layer take."""
        return self.layout.unpack(self.tensors)


class _Layout:
    """Which tensors of a cache a `PackedCache` holds, and where."""

    def __init__(self, cache):
        self._specs = keras.tree.map_structure(
            lambda leaf: keras.InputSpec(leaf.dtype, (None, *leaf.shape[1:])), cache
        )
        self._key = repr(self._specs)
        self._leaves = keras.tree.flatten(self._specs)
        self._dtypes = list(dict.fromkeys(spec.dtype for spec in self._leaves))

    def __eq__(self, other):
        return self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def pack(self, cache):
        rows: dict[str, list] = {dtype: [] for dtype in self._dtypes}
        for spec, leaf in zip(self._leaves, keras.tree.flatten(cache), strict=True):
            rows[spec.dtype].append(ops.reshape(leaf, (ops.shape(leaf)[0], _size(spec))))
        return [ops.concatenate(parts, axis=1) for parts in rows.values()]

    def unpack(self, tensors):
        packed, starts = (
            dict(zip(self._dtypes, tensors, strict=True)),
            dict.fromkeys(self._dtypes, 0),
        )
        leaves = []
        for spec in self._leaves:
            tensor, start = packed[spec.dtype], starts[spec.dtype]
            starts[spec.dtype] = end = start + _size(spec)
            shape = (ops.shape(tensor)[0], *spec.shape[1:])
            leaves.append(ops.reshape(tensor[:, start:end], shape))
        return keras.tree.pack_sequence_as(self._specs, leaves)


def _size(spec):
    return math.prod(spec.shape[1:])


def compiled_step(
    layer: Any, frozen: bool = False
) -> Callable[[Tensor, Cache], tuple[Tensor, PackedCache]]:
    """Returns `layer.step` compiled by XLA, once per batch size.

    It always uses the layer's current weights, where a plain `jax.jit` would keep those of its
    first call. Outside of compiled functions a step may compile again each time.

    Args:
        layer: Built layer or model that streams, or a built `keras.Sequential` of such, whose cache
            starts with `as_stream(layer).initial_cache`.
        frozen: Boolean, whether to keep the weights of this moment, as constants of the program.
            Weight normalization is then computed once, which makes the steps of a TCN faster.
            Millions of weights take long to compile. Defaults to `False`.

    Returns:
        A function of x and cache, tensors or arrays. The cache is that of `initial_cache` or
        `prefill`, or a `PackedCache` that the function returned; its `unpack()` is for `prefill`.

    Raises:
        ValueError: `layer` does not stream or is not built.

    Example:

    >>> layer = trellis_keras.layers.TCN(4, kernel_size=3, depth=2)
    >>> layer.build((None, None, 3))
    >>> step, cache = compiled_step(layer), layer.initial_cache(1)
    >>> for x in np.zeros((5, 1, 3), "float32"):
    ...     y, cache = step(x, cache)
    """
    stream = as_stream(layer)
    check_built(layer)
    compiled = {}
    weights = [ops.convert_to_numpy(v) for v in layer.variables] if frozen else None

    def compile_for(layout):
        def step(x, *tensors):
            y, cache = stream.step(x, layout.unpack(tensors))
            return [y, *layout.pack(cache)]

        def frozen_step(*arguments):
            values = map(ops.convert_to_tensor, weights)
            mapping = list(zip(layer.variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return step(*arguments)

        function = frozen_step if frozen else step
        if keras.backend.backend() == "tensorflow":
            return _compile_tensorflow(function)
        return compile_xla(function, [] if frozen else layer.variables)

    def call(x, cache):
        if not isinstance(cache, PackedCache):
            layout = _Layout(cache)
            cache = PackedCache(layout.pack(cache), layout)
        layout = cache.layout
        if layout not in compiled:
            compiled[layout] = compile_for(layout)
        y, *tensors = compiled[layout](x, *cache.tensors)
        return y, PackedCache(tensors, layout)

    return call


def _compile_tensorflow(function):
    """Compiles a function of tensors that returns a list of them, to be called in little time.

    What takes most of a call of a `tf.function` is left out: structures, and its gradient.
    """
    import tensorflow as tf

    compiled = tf.function(function, jit_compile=True, autograph=False)
    traced: dict[tuple, tuple] = {}

    def call(*arguments):
        arguments = [tf.convert_to_tensor(argument) for argument in arguments]
        key = tuple((argument.dtype, argument.shape) for argument in arguments)
        if key not in traced:
            concrete = compiled.get_concrete_function(*arguments)
            traced[key] = concrete.inference_fn, concrete.captured_inputs
        inference, captured = traced[key]
        return inference.call_flat(*arguments, *captured)

    return call


def compile_xla(
    function: Callable,
    variables: Sequence[keras.Variable],
    updated: Sequence[keras.Variable] = (),
    any_shape: bool = False,
) -> Callable:
    """Compiles a function of tensors by XLA that always uses the current values of variables.

    Several threads may call it at once, if it updates no variables.

    Args:
        function: Function of tensors.
        variables: Variables that it reads.
        updated: Variables that it reads and assigns.
        any_shape: Whether to make one graph for all shapes on TensorFlow, without XLA, which
            compiles each shape anew.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(
            function, jit_compile=not any_shape, reduce_retracing=any_shape, autograph=False
        )
    if keras.backend.backend() == "jax":
        return _compile_jax(function, [*variables, *updated], updated)
    return function


def _compile_jax(function, variables, updated):
    import jax

    @jax.jit
    def pure(values, *arguments):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = function(*arguments)
        return result, [scope.get_current_value(variable) for variable in updated]

    def call(*arguments):
        result, values = pure([variable.value for variable in variables], *arguments)
        for variable, value in zip(updated, values, strict=True):
            variable.assign(value)
        return result

    return call


# Checks


def check_streams(layer: Any) -> None:
    """Raises ValueError unless `layer` has the methods of the protocol and is causal."""
    if not _has_protocol(layer):
        raise ValueError(
            "Streaming and generation need a layer with the protocol of "
            "trellis_keras.layers.streaming (initial_cache, step, prefill), or a keras.Sequential "
            "of such layers and of Keras layers that treat each step by itself, such as "
            "Normalization and Dense. (Put Keras' recurrent layers into a StackedRNN.) "
            f"Received: {layer!r}"
        )
    if not getattr(layer, "is_causal", True):
        raise ValueError(
            "Streaming and generation need a layer whose outputs depend on no later inputs: "
            'go_backwards=False and, of a TCN, padding="causal". Received: '
            f"{layer.name} with go_backwards={getattr(layer, 'go_backwards', False)}, "
            f"padding={getattr(layer, 'padding', 'causal')!r}"
        )


def _has_protocol(layer):
    return all(
        callable(getattr(layer, name, None)) for name in ("initial_cache", "step", "prefill")
    )


def check_built(layer: keras.Layer) -> None:
    """Raises ValueError unless a layer or model is built."""
    if not layer.built:
        raise ValueError(
            f"{layer.name} is not built, so it has no weights to stream with. Call it once, call "
            "`build(input_shape)`, or load it from a file first."
        )


def check_start(layer: Any, batch_size: int | Tensor) -> None:
    """Raises ValueError unless a layer can stream `batch_size` rows, an integer or a tensor."""
    check_streams(layer)
    check_built(layer)
    if batch_size is None or (isinstance(batch_size, int) and batch_size < 1):
        raise ValueError(
            f"`batch_size` must be a positive integer. Received: batch_size={batch_size}"
        )


def check_stream(layer: keras.Layer, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
    """Returns the arguments of `prefill`: x in the compute dtype, and the initial cache for None.

    Args:
        layer: Layer with `input_channels`, and `cache_shapes(batch_size)` as `check_cache` takes.
        x: Tensor (batch, time, channels).
        cache: Cache of the layer, or None.

    Raises:
        ValueError: The layer is not built, x has the wrong shape, or the cache is of another batch
            size or another layer.
    """
    check_built(layer)
    x = ops.cast(x, layer.compute_dtype)
    check_shape("x", x, (None, None, layer.input_channels))
    cache = layer.initial_cache(ops.shape(x)[0]) if cache is None else cache
    check_cache(layer, cache, layer.cache_shapes(x.shape[0]))
    return x, cache


def check_cache(layer: keras.Layer, cache: Cache, expected: Any) -> None:
    """Raises ValueError unless a cache has the expected structure and shapes.

    Args:
        layer: The layer, named in the message.
        cache: Structure of tensors.
        expected: Structure of shapes (lists, None for an unknown size).
    """
    # Shapes are lists too. Wrapped, the structures of tensors and of shapes can be compared.
    received = keras.tree.map_structure(lambda tensor: _Shape(tensor.shape), cache)
    wanted = keras.tree.map_shape_structure(_Shape, expected)
    pairs = zip(keras.tree.flatten(received), keras.tree.flatten(wanted), strict=False)
    fits = _same_structure(received, wanted) and all(shapes_match(a.size, b.size) for a, b in pairs)
    if not fits:
        raise ValueError(
            f"The cache does not fit {layer.name}: it is of another batch size or of another "
            f"layer. Expected tensors of shapes: {wanted}. Received: {received}"
        )


class _Shape:
    """A shape as a leaf of `keras.tree`."""

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
