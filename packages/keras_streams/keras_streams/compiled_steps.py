"""Compiled steps: XLA, and one packed tensor for the whole cache."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_streams._keras_internals import all_layers
from keras_streams.graph_stream import to_stream
from keras_streams.protocol import check_built, flatten_inputs
from keras_streams.types import Cache, Tensor
from keras_streams.xla import compile_flat, compile_xla


class PackedCache:
    """The cache between the calls of a compiled step: one tensor (batch, size) for each dtype.

    Each tensor adds to the overhead of a call, and the cache of a deep network has dozens.

    Args:
        tensors: The tensors.
        specs: Structure of the `keras.InputSpec`s of the cache.
        key: `specs` as a string, which takes a while to make.
    """

    def __init__(self, tensors: Sequence[Tensor], specs: Any, key: str = ""):
        self.tensors, self.specs, self.key = tensors, specs, key or repr(specs)

    @classmethod
    def pack(cls, cache: Cache, specs: Any = None) -> "PackedCache":
        """Packs a cache, in the layout of its own tensors unless another is given."""
        if not all(hasattr(leaf, "dtype") for leaf in keras.tree.flatten(cache)):
            raise ValueError(
                "`cache` must be a structure of tensors: start with the `initial_cache` of the "
                f"stream. Received: {cache!r}"
            )
        specs = specs or keras.tree.map_structure(
            lambda leaf: keras.InputSpec(leaf.dtype, (None, *leaf.shape[1:])), cache
        )
        rows: dict[str, list] = {}
        leaves = zip(keras.tree.flatten(specs), keras.tree.flatten(cache), strict=True)
        for spec, leaf in leaves:
            row = ops.reshape(leaf, (ops.shape(leaf)[0], math.prod(spec.shape[1:])))
            rows.setdefault(spec.dtype, []).append(row)
        return cls([ops.concatenate(parts, axis=1) for parts in rows.values()], specs)

    def unpack(self) -> Cache:
        """Returns the cache in the structure that the layer's methods take."""
        specs, leaves = keras.tree.flatten(self.specs), []
        starts = dict.fromkeys((spec.dtype for spec in specs), 0)
        packed = dict(zip(starts, self.tensors, strict=True))
        for spec in specs:
            tensor, start = packed[spec.dtype], starts[spec.dtype]
            starts[spec.dtype] = end = start + math.prod(spec.shape[1:])
            shape = (ops.shape(tensor)[0], *spec.shape[1:])
            leaves.append(ops.reshape(tensor[:, start:end], shape))
        return keras.tree.pack_sequence_as(self.specs, leaves)


def compiled_step(
    layer: Any, frozen: bool = False
) -> Callable[[Tensor, Cache], tuple[Tensor, PackedCache]]:
    """Returns `layer.step` compiled by XLA, once per batch size.

    It always uses the layer's current weights, whereas a plain `jax.jit` would keep those of its
    first call. Without it, a step may be recompiled on each call. After `quantize` or
    `enable_lora`, which give layers other weights, compile it again.

    Args:
        layer: Stream, or built layer or model that `to_stream` supports. Start with the
            `initial_cache` of the stream.
        frozen: Boolean, whether to compile the current weights into the program as constants.
            Weight normalization is then computed once. On TensorFlow, small steps may become
            slower, because XLA spreads the many operations of a `TrellisLayer` over threads:
            `tf.config.threading.set_intra_op_parallelism_threads(1)` prevents it. Millions of
            weights take long to compile. Defaults to `False`.

    Returns:
        A function of x and cache, tensors or arrays. The cache comes from `initial_cache` or
        `prefill`, or is a `PackedCache` returned by the function; call its `unpack()` before
        passing it to `prefill`.

    Raises:
        ValueError: `layer` does not stream or is not built.

    Example:

    >>> model = keras.Sequential([keras.Input((None, 3)), keras.layers.GRU(4)])
    >>> stream = to_stream(model)
    >>> step, cache = compiled_step(stream), stream.initial_cache(1)
    >>> for x in np.zeros((5, 1, 3), "float32"):
    ...     y, cache = step(x, cache)
    """
    stream = to_stream(layer)
    check_built(layer)
    compiled = {}
    # Both may be structures for a graph's stream. Other streams have a single input and output.
    inputs, outputs = getattr(stream, "inputs", None), getattr(stream, "delay", 0)
    flat, count = keras.tree.flatten(inputs), len(keras.tree.flatten(outputs))
    variables = [] if frozen else layer.variables
    model = getattr(stream, "model", stream)
    parts = all_layers(model) if isinstance(model, keras.Layer) else []
    # XLA has no tables of strings and integers; recurrent layers use their cells.
    is_xla = all(part.supports_jit or isinstance(part, keras.layers.RNN) for part in parts)
    # It keeps tensors that it computes from its weights, new ones when these are loaded.
    normalizations = [p for p in parts if isinstance(p, keras.layers.Normalization) and not frozen]
    weights = [(v, ops.convert_to_numpy(v)) for v in layer.variables] if frozen else []

    def compile_for(specs):
        def step(*arguments):
            xs, cache = arguments[: len(flat)], PackedCache(arguments[len(flat) :], specs)
            constants = [(v, ops.convert_to_tensor(value)) for v, value in weights]
            with keras.StatelessScope(constants) if frozen else contextlib.nullcontext():
                y, cache = stream.step(keras.tree.pack_sequence_as(inputs, xs), cache.unpack())
            return [*keras.tree.flatten(y), *PackedCache.pack(cache, specs).tensors]

        is_flat = keras.backend.backend() == "tensorflow"
        return compile_flat(step, is_xla) if is_flat else compile_xla(step, variables)

    def call(x, cache):
        cache = cache if isinstance(cache, PackedCache) else PackedCache.pack(cache)
        means = [layer.mean for layer in normalizations]
        key = cache.key, *map(id, means)
        if key not in compiled:
            compiled[key] = compile_for(cache.specs), means  # which keep their ids
        tensors = compiled[key][0](*flatten_inputs(x, inputs), *cache.tensors)
        y = keras.tree.pack_sequence_as(outputs, tensors[:count])
        return y, PackedCache(tensors[count:], cache.specs, cache.key)

    return call
