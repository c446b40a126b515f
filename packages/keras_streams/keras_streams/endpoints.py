"""One step of a stream as a pure function of named tensors, the cache among them."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.graph_stream import GraphStream, to_stream
from keras_streams.protocol import at_least_float32
from keras_streams.statements import free_name
from keras_streams.types import Cache, Tensor

if keras.backend.backend() == "tensorflow":  # `export` refuses the other backends
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Field:
    """An input or output of an endpoint."""

    dtype: str
    shape: tuple  # sizes; a name, such as "batch", means any size
    example: Any = 0  # value of all elements of an example

    def spec(self, name: str, rows: int | None = None) -> "tf.TensorSpec":
        """Returns the specification of its tensor, for any number of rows or the given one."""
        sizes = [rows if size == "batch" else size for size in self.shape]
        sizes = [None if isinstance(size, str) else size for size in sizes]
        return tf.TensorSpec(sizes, self.dtype, name)

    def filled(self) -> np.ndarray:
        """Returns an example, with one row and one step."""
        sizes = [1 if isinstance(size, str) else size for size in self.shape]
        return np.full(sizes, self.example, object if self.dtype == "string" else self.dtype)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A function of named tensors, which it takes as keyword arguments, to a dict of tensors."""

    function: Callable
    inputs: dict[str, Field]
    outputs: dict[str, Field]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def input_specs(self, rows: int | None = None) -> dict[str, "tf.TensorSpec"]:
        """Returns the specifications of the inputs, for any number of rows or the given one."""
        return {name: field.spec(name, rows) for name, field in self.inputs.items()}

    def checked(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Calls the function after checking that all inputs have the same number of rows."""
        batched = [name for name, field in self.inputs.items() if "batch" in field.shape]
        if len(batched) > 1:
            # Otherwise, some layers would broadcast a single row.
            rows = tf.stack([tf.shape(inputs[name])[0] for name in batched])
            message = "All inputs must have the same number of rows. Received:"
            first = batched[0]
            inputs[first] = require(inputs[first], rows == rows[0], message, rows)
        outputs = self.function(**inputs)
        # Restores the sizes that TensorFlow does not infer.
        return {
            name: tf.ensure_shape(ops.cast(outputs[name], field.dtype), field.spec(name).shape)
            for name, field in self.outputs.items()
        }


def require(tensor: Tensor, condition: Tensor, message: str, *values: Tensor) -> Tensor:
    """Returns `tensor` if all of `condition` is true; otherwise the call fails."""
    check = tf.debugging.Assert(tf.reduce_all(condition), [message, *values], summarize=8)
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


class StreamCache:
    """The cache of a stream as a flat dict of tensors.

    Tensors are named by their path in the cache, such as `cache_inputs` or `cache_states_0_1`. Half
    precision becomes float32, which every client can send.

    Attributes:
        fields: Dict from the name of each tensor to its `Field`.
    """

    def __init__(self, stream: Any):
        self._like = stream.initial_cache(1)  # for its structure and dtypes
        self.fields = {}
        for name, leaf in self.flatten(self._like).items():
            dtype = at_least_float32(keras.backend.standardize_dtype(leaf.dtype))
            self.fields[name] = Field(dtype, ("batch", *leaf.shape[1:]))

    def flatten(self, cache: Cache) -> dict[str, Tensor]:
        """Returns the tensors of a cache by their names."""
        leaves = keras.tree.flatten_with_path(cache)
        return {"_".join(["cache", *map(str, path)]): leaf for path, leaf in leaves}

    def pack(self, tensors: dict[str, Tensor]) -> Cache:
        """Returns the cache of named tensors."""
        named = self.flatten(self._like)
        leaves = [ops.cast(tensors[name], leaf.dtype) for name, leaf in named.items()]
        return keras.tree.pack_sequence_as(self._like, leaves)


def model_stream(model: Any) -> GraphStream:
    """Returns the stream of a model as a graph, or raises ValueError for a layer that streams."""
    stream = to_stream(model)
    if not isinstance(stream, GraphStream):
        raise ValueError(
            f"`model` must be a model: wrap a layer in keras.Sequential. Received: {model!r}"
        )
    return stream


def step_endpoint(stream: GraphStream) -> Endpoint:
    """Returns the step of a stream as an endpoint."""
    cache = StreamCache(stream)
    names = _names("inputs", stream.inputs, [*cache.fields])
    inputs = {name: _field(s) for name, s in zip(names, stream.plan.inputs, strict=True)}
    names = _names("outputs", stream.plan.outputs, [*names, *cache.fields])
    outputs = {name: _field(s) for name, s in zip(names, stream.output_signals, strict=True)}

    def step(**tensors):
        """Reads one step of each row. Outputs are NaN at steps that have none."""
        x = keras.tree.pack_sequence_as(stream.inputs, [tensors[name] for name in inputs])
        y, after = stream.step(x, cache.pack(tensors))
        return dict(zip(outputs, keras.tree.flatten(y), strict=True)) | cache.flatten(after)

    return Endpoint(step, inputs | cache.fields, outputs | cache.fields)


def _field(signal):
    """Returns the field of a step's signal."""
    shape = signal.shape if signal.block == 1 else (signal.block, *signal.shape)
    is_integer = keras.backend.is_int_dtype(signal.dtype)
    dtype = "int32" if is_integer else at_least_float32(signal.dtype)
    return Field(dtype, ("batch", *shape))


def _names(name, structure, taken):
    """Returns names for the leaves of a structure: their keys or indices.

    TensorFlow renames an argument whose name is not an identifier.
    """
    found: list[str] = []
    for path, leaf in keras.tree.flatten_with_path(structure):
        is_input = path and isinstance(leaf, keras.KerasTensor)
        key = (leaf.name if is_input else "_".join(map(str, path))) or name
        key = re.sub("[^A-Za-z0-9_]", "_", key)
        key = key if key[0].isalpha() and key not in taken else f"{name}_{key}"
        found.append(free_name(key, found))
    return found


def add_endpoint(
    archive: keras.export.ExportArchive,
    name: str,
    function: Callable,
    specs: dict[str, "tf.TensorSpec"],
) -> None:
    """Adds a function of named tensors, which may draw random numbers only from a `seed`.

    Raises:
        ValueError: If it is not a pure function of its inputs.
    """
    compiled = tf.function(function, autograph=False)
    graph = compiled.get_concrete_function(**specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    found = {
        node.op
        for node in nodes
        if re.search("Assign|Random|Multinomial|^Stateful[A-Z]", node.op)
        and node.op != "StatefulPartitionedCall"  # only calls one of these functions
        and not ("seed" in specs and node.op.startswith("Stateless"))
    }
    if found:
        raise ValueError(
            f"The endpoint `{name}` is not a pure function of its inputs: its graph has "
            f"{', '.join(sorted(found))}. A layer draws random numbers or assigns variables at "
            "inference, as Keras' recurrent layers with dropout do: build them without dropout, "
            "and load the weights."
        )
    archive.add_endpoint(name, compiled)
