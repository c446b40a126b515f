"""The graph of a Keras model as a list of calls, nested models included."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops
from keras.src.models.functional import Functional
from keras.src.ops.function import Function
from keras.src.ops.numpy import Add

from keras_streams.protocol import has_protocol
from keras_streams.types import Tensor


@dataclasses.dataclass
class Call:
    """A call of a layer or operation.

    Attributes:
        operation: The layer or operation.
        inputs, outputs: Lists of numbers of tensors.
        specs: List of the symbolic outputs.
        arguments: The positional and the named arguments, with symbolic tensors.
        fill: Function from a list of inputs to the arguments.
        model: Path of the model that makes the call.
        place: Its place in the graph, for error messages.
    """

    operation: Any
    inputs: list[int]
    outputs: list[int]
    specs: list[keras.KerasTensor]
    arguments: tuple[Sequence, dict[str, Any]]
    fill: Callable[[list], tuple[Sequence, dict[str, Any]]]
    model: str
    place: str = ""

    @property
    def given(self) -> list:
        """The arguments that are not a default of Keras' (`None` or `False`), as a flat list."""
        return [x for x in keras.tree.flatten(self.arguments) if not _is_default(x)]

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the outputs of the operation for a list of inputs."""
        if isinstance(self.operation, Add) and len(values) == 2:
            # On TensorFlow `ops.add` takes (n, 1, 1) as a bias of n channels (Keras 3.15).
            return [ops.subtract(values[0], ops.negative(values[1]))]
        arguments, named = self.fill(values)
        return keras.tree.flatten(self.operation(*arguments, **named))

    @property
    def is_of_keras(self) -> bool:
        """Whether the operation is one of Keras' that computes what its class says."""
        kinds = keras.layers.Lambda, keras.layers.Wrapper, keras.Model
        is_own = not type(self.operation).__module__.startswith("keras.")
        return not is_own and not isinstance(self.operation, kinds)

    def without_mask(self) -> "Call":
        """Returns the call without its argument `mask`."""
        args, named = self.arguments
        if named.get("mask") is None:
            return self
        tensors = [
            x for x in keras.tree.flatten(self.arguments) if isinstance(x, keras.KerasTensor)
        ]
        masks = {id(x) for x in keras.tree.flatten(named["mask"])}
        kept = [i for i, x in enumerate(tensors) if id(x) not in masks]

        def fill(values):
            all_values = [values[0]] * len(tensors)
            for i, value in zip(kept, values, strict=True):
                all_values[i] = value
            args, named = self.fill(all_values)
            return args, {**named, "mask": None}

        return dataclasses.replace(
            self,
            inputs=[self.inputs[i] for i in kept],
            arguments=(args, {**named, "mask": None}),
            fill=fill,
        )

    def refusal(self, reason: str) -> ValueError:
        """Returns the error for an operation that does not stream."""
        if hasattr(self.operation, "nb_filters"):
            reason = (
                "layers of keras-tcn do not. trellis_keras.interop.from_keras_tcn converts them, "
                "with their weights, to layers that do."
            )
        return ValueError(f"{self.place} does not stream: {reason}")


@dataclasses.dataclass
class Graph:
    """The calls of a model, each after those that it depends on.

    Attributes:
        name: Name of the model.
        inputs: Structure of the symbolic inputs, whose numbers are 0, 1, ...
        outputs: Structure of the numbers of the outputs.
        calls: List of `Call`s.
    """

    name: str
    inputs: Any
    outputs: Any
    calls: list[Call]


def graph_of(model: keras.Layer, traced: bool = True) -> Graph:
    """Returns the graph of a built functional model, `keras.Sequential` or layer.

    Args:
        model: The model.
        traced: Whether layers that are not Keras' own become the operations of their `call`, where
            it can be traced with symbolic tensors.

    Raises:
        ValueError: If a layer was built for several inputs; wrap it in a model first.
    """
    numbers = itertools.count()
    functional = functional_of(model)
    if functional is None:
        graph = _graph_of_layer(model)
        functional = _traced(graph.calls[0]) if traced else None
        inputs = graph.inputs
    else:
        inputs = functional._inputs_struct
    if functional is not None:
        calls: list[Call] = []
        first = [next(numbers) for _ in functional.inputs]
        outputs = _walk(functional, first, model.name, numbers, calls, traced)
        outputs = keras.tree.pack_sequence_as(functional._outputs_struct, outputs)
        graph = Graph(model.name, inputs, outputs, calls)
    for i, call in enumerate(graph.calls, 1):
        operation = call.operation
        call.place = f"{operation.name} ({type(operation).__name__})"
        if operation is not model:
            call.place += f", operation {i} of {len(graph.calls)}, in {call.model},"
        if isinstance(operation, keras.layers.SpectralNormalization):
            # In inference it is its layer, unless it rounds an embedding to the dtype of tokens.
            if not isinstance(operation.layer, keras.layers.Embedding):
                call.operation = operation.layer
    return graph


def functional_of(model: keras.Layer) -> Functional | None:
    """Returns the functional model that a layer computes, or `None`.

    A layer that streams as a graph of other layers returns the graph from `stream_graph`.
    """
    if callable(getattr(model, "stream_graph", None)):
        return model.stream_graph()
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        return model._functional
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    return None


def _graph_of_layer(layer):
    shape = (layer.get_build_config() or {}).get("input_shape")
    if shape is None or not all(size is None or isinstance(size, int) for size in shape):
        raise ValueError(
            f"{layer.name} was not built for one input (batch, time, ...). Call it in a functional "
            "model: keras.Model(inputs, outputs)."
        )
    dtype = "int32" if isinstance(layer, keras.layers.Embedding) else layer.compute_dtype
    x = keras.KerasTensor((None, None, *shape[2:]) if len(shape) > 1 else shape, dtype)
    specs = keras.tree.flatten(layer.compute_output_spec(x))
    outputs = list(range(1, 1 + len(specs)))
    call = Call(layer, [0], outputs, specs, ((x,), {}), lambda xs: ((xs[0],), {}), layer.name)
    return Graph(layer.name, x, outputs if len(outputs) > 1 else outputs[0], [call])


def _traced(call):
    """Returns the `Function` of the operations of a layer's `call`, or `None`.

    A layer that computes with its weights by itself has `None`: the results would be constants.
    """
    layer = call.operation
    if call.is_of_keras or not isinstance(layer, keras.Layer) or has_protocol(layer):
        return None
    if hasattr(layer, "nb_filters"):  # of keras-tcn, which `refusal` knows
        return None
    layers = [layer, *layer._flatten_layers()]
    dtypes = {each.compute_dtype for each in layers} | {each.variable_dtype for each in layers}
    if (
        isinstance(layer, keras.layers.Wrapper)
        or len(dtypes) > 1
        or not all(x.built for x in layers)
    ):
        return None
    counts = [len(each._inbound_nodes) for each in layers]
    inputs: list[keras.KerasTensor] = []

    def symbol(x):
        if isinstance(x, keras.KerasTensor):
            inputs.append(keras.Input(batch_shape=x.shape, dtype=x.dtype))
            return inputs[-1]
        return x

    args, named = keras.tree.map_structure(symbol, call.arguments)
    if "training" in inspect.signature(layer.call).parameters:
        named = {**named, "training": False}
    try:
        function = Function(inputs, layer.call(*args, **named))
    except Exception:  # whatever code that needs numbers raises for symbolic tensors
        return None
    finally:
        for each, count in zip(layers, counts, strict=True):
            del each._inbound_nodes[count:]
    nodes = [node for of_depth in function._nodes_by_depth.values() for node in of_depth]
    values = [x for node in nodes for x in keras.tree.flatten(node.arguments._flat_arguments)]
    is_constant = [
        ops.is_tensor(x) and not isinstance(x, keras.KerasTensor | keras.Variable) for x in values
    ]
    return None if any(is_constant) else function


def _walk(
    functional, inputs, path, numbers: Iterator[int], calls: list[Call], traced: bool
) -> list[int]:
    """Adds the calls of a functional model and returns the numbers of its outputs."""
    known = dict(zip(map(id, functional.inputs), inputs, strict=True))
    # As in `keras.Function`, from the deepest nodes to the outputs.
    by_depth = functional._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    for node in nodes:
        if node.is_input or any(id(x) not in known for x in node.input_tensors):
            continue
        operation = node.operation
        inputs = [known[id(x)] for x in node.input_tensors]
        inner = functional_of(operation)
        given = None if inner is None else _given(inner, node)
        if given is not None:
            inputs = [known[id(x)] for x in given]
        else:
            arguments = node.arguments.args, node.arguments.kwargs
            call = Call(operation, inputs, [], node.outputs, arguments, _filler(node), path)
            inner = _traced(call) if traced else None
        if inner is not None:
            outputs = _walk(inner, inputs, f"{path}/{operation.name}", numbers, calls, traced)
        else:
            call.outputs = outputs = [next(numbers) for _ in node.outputs]
            calls.append(call)
        known.update(zip(map(id, node.outputs), outputs, strict=True))
    return [known[id(x)] for x in functional.outputs]


def _given(functional, node):
    """Returns the tensors that a call of a model passes to its inputs, in their order.

    Returns `None` if the call has other arguments, such as a mask, that its graph does not show.
    """
    arguments = [*node.arguments.args, *node.arguments.kwargs.values()]
    # Keras adds the masks of its inputs, a structure of `None`, and training=False is inference.
    given = [x for x in arguments if any(not _is_default(leaf) for leaf in keras.tree.flatten(x))]
    if len(given) != 1:
        return None
    (inputs,) = given
    if isinstance(inputs, dict) and not isinstance(functional._inputs_struct, dict):
        return [inputs[x.name] for x in functional.inputs]  # as Keras matches them
    return keras.tree.flatten(inputs)


def _is_default(value):
    return value is None or value is False


def _filler(node):
    tensors = [id(x) for x in node.input_tensors]
    return lambda values: node.arguments.fill_in(dict(zip(tensors, values, strict=True)))
