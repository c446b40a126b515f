"""The endpoints of an exported stream: pure functions of named tensors.

The cache of a stream is part of the requests.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import at_least_float32

if keras.backend.backend() == "tensorflow":  # `export` refuses the other backends
    import tensorflow as tf

_MAX_CACHE_ROWS = 2**12  # of one request, which bounds its memory


@dataclasses.dataclass(frozen=True)
class Field:
    """An input or output of an endpoint."""

    dtype: str
    shape: tuple  # sizes; a name, such as "batch", means any size
    example: Any = 0  # fill value for warm-up requests

    def spec(self, name: str, rows: int | None = None) -> "tf.TensorSpec":
        """Returns the specification of its tensor, for any number of rows or the given one."""
        sizes = [rows if size == "batch" else size for size in self.shape]
        sizes = [None if isinstance(size, str) else size for size in sizes]
        return tf.TensorSpec(sizes, self.dtype, name)

    def filled(self) -> np.ndarray:
        """Returns a tensor of the fill value, with one row and one step."""
        sizes = [1 if isinstance(size, str) else size for size in self.shape]
        return np.full(sizes, self.example, object if self.dtype == "string" else self.dtype)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A request that a served model answers.

    The function takes the inputs as keyword arguments and returns a dict of outputs. Its name and
    docstring become the endpoint's name and description.
    """

    function: Callable
    inputs: dict[str, Field]
    outputs: dict[str, Field]
    draws: bool = False  # random numbers, which must depend only on the inputs
    tables: tuple = ()  # lookup tables that it reads

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def input_specs(self, rows: int | None = None) -> dict:
        """Returns the specifications of the inputs, for any number of rows or the given one."""
        return {name: field.spec(name, rows) for name, field in self.inputs.items()}

    def served(self, **inputs):
        """Checks shapes, which TensorFlow Serving does not, and calls the function."""
        placeholder = tf.compat.v1.placeholder_with_default
        # Without a static shape, or TensorFlow would trust the signature and drop the check.
        unknown = {name: placeholder(value, None, name) for name, value in inputs.items()}
        specs = self.input_specs()
        return self.checked(
            **{name: tf.ensure_shape(value, specs[name].shape) for name, value in unknown.items()}
        )

    def checked(self, **inputs):
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
            if field.dtype != "string"
            else outputs[name]
            for name, field in self.outputs.items()
        }

    def describe(self):
        """Returns the endpoint's entry in `signatures.json`."""

        def fields(of):
            return {name: {"dtype": f.dtype, "shape": f.shape} for name, f in of.items()}

        return {
            "description": " ".join(self.function.__doc__.split()),
            "inputs": fields(self.inputs),
            "outputs": fields(self.outputs),
        }


def require(tensor: Any, condition: Any, message: str, *values: Any) -> Any:
    """Returns `tensor` if all of `condition` is true; otherwise the request fails."""
    check = tf.debugging.Assert(tf.reduce_all(condition), [message, *values], summarize=8)
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


class StreamCache:
    """The cache of a backbone as a flat dict of tensors.

    Tensors are named by their path in the cache, such as `cache_inputs` or `cache_states_0_1`. Half
    precision becomes float32, which every client can send.
    """

    def __init__(self, model):
        self._model = model
        # For its structure and dtypes.
        self._like = model.initial_cache(1)
        self.fields = {
            name: Field(
                at_least_float32(keras.backend.standardize_dtype(leaf.dtype)),
                ("batch", *leaf.shape[1:]),
            )
            for name, leaf in self.flatten(self._like).items()
        }

    def flatten(self, cache: Any) -> dict:
        """Returns the tensors of a cache by their names."""
        leaves = keras.tree.flatten_with_path(cache)
        return {"_".join(["cache", *map(str, path)]): leaf for path, leaf in leaves}

    def pack(self, tensors: dict) -> Any:
        """Returns the cache of named tensors."""
        leaves = [
            ops.cast(tensors[name], leaf.dtype) for name, leaf in self.flatten(self._like).items()
        ]
        return keras.tree.pack_sequence_as(self._like, leaves)

    def endpoint(self) -> Endpoint:
        """Returns the endpoint of the cache before the first step."""

        def initial_cache(batch_size):
            """Returns the cache before the first step, for `batch_size` rows."""
            batch_size = require(
                batch_size,
                (batch_size >= 1) & (batch_size <= _MAX_CACHE_ROWS),
                f"`batch_size` must be in [1, {_MAX_CACHE_ROWS}]. Received:",
                batch_size,
            )
            return self.flatten(self._model.initial_cache(batch_size))

        return Endpoint(initial_cache, {"batch_size": Field("int32", (), 1)}, self.fields)


def graph_endpoints(stream: Any) -> list[Endpoint]:
    """Returns the endpoints of a `GraphStream`: of sequences, of the first cache, and of a step."""
    cache, names = StreamCache(stream), _names("inputs", stream.inputs, {})
    inputs = dict(zip(names, stream.plan.inputs, strict=True))
    names = _names("outputs", stream.graph.outputs, inputs)
    outputs = dict(zip(names, stream.output_signals, strict=True))

    def fields(signals, time=None):
        """Returns the fields of a step, or those of whole sequences with a name of their time."""
        found = {}
        for name, signal in signals.items():
            shape = [*([signal.block] if time is None and signal.block > 1 else []), *signal.shape]
            if time is not None and signal.has_time:
                shape.insert(signal.axis - 1, time)
            is_integer = keras.backend.is_int_dtype(signal.dtype)
            dtype = "int32" if is_integer else at_least_float32(signal.dtype)
            found[name] = Field(dtype, ("batch", *shape))
        return found

    def read(tensors):
        xs = [ops.cast(tensors[name], signal.dtype) for name, signal in inputs.items()]
        return keras.tree.pack_sequence_as(stream.inputs, xs)

    def named(y):
        return dict(zip(outputs, keras.tree.flatten(y), strict=True))

    def serving_default(**tensors):
        """Returns the outputs for whole sequences."""
        return named(stream.model(read(tensors), training=False))

    def step(**tensors):
        """Reads one step of each row. Outputs are NaN at steps that have none."""
        y, after = stream.step(read(tensors), cache.pack(tensors))
        return named(y) | cache.flatten(after)

    whole = Endpoint(serving_default, fields(inputs, "time"), fields(outputs, "steps"))
    one = Endpoint(step, fields(inputs) | cache.fields, fields(outputs) | cache.fields)
    return [whole, cache.endpoint(), one]


def _names(name, structure, taken):
    """Returns names for the leaves of a structure: their keys or indices."""
    found = []
    for path, leaf in keras.tree.flatten_with_path(structure):
        key = (
            leaf.name if path and isinstance(leaf, keras.KerasTensor) else "_".join(map(str, path))
        )
        key = key or name
        found.append(f"{name}_{key}" if key in taken or key.isdecimal() else key)
    return found


def write_archive(
    endpoints: list[Endpoint], folder: str | os.PathLike, rows: int | None = None
) -> None:
    """Writes endpoints as a SavedModel, for any number of rows or the given number."""
    archive = keras.export.ExportArchive()
    for endpoint in endpoints:
        for table in endpoint.tables:
            archive.track(table)
        answer = endpoint.served if rows is None else endpoint.checked
        function = tf.function(answer, autograph=False)
        _check_pure(endpoint, function.get_concrete_function(**endpoint.input_specs(rows)))
        archive.add_endpoint(endpoint.name, function)
    # A served model needs no gradients.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    archive.write_out(str(folder), options=options, verbose=False)


def _check_pure(endpoint, function):
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    found = {
        node.op
        for node in nodes
        if re.search("Assign|Random|Multinomial|^Stateful[A-Z]", node.op)
        and node.op != "StatefulPartitionedCall"  # only calls one of these functions
        and not (endpoint.draws and node.op.startswith("Stateless"))
    }
    if found:
        raise ValueError(
            f"The endpoint `{endpoint.name}` is not a pure function of the request: its graph has "
            f"{', '.join(sorted(found))}. A layer draws random numbers or assigns variables at "
            "inference, as Keras' recurrent layers with dropout do: build them without, and load "
            "the weights."
        )
