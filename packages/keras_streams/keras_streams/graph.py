"""The graph of a Keras model as a list of calls, nested models included."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams._keras_internals import (
    Functional,
    all_layers,
    autocast,
    functional_of_sequential,
    nn_ops,
    numpy_ops,
    ordered_nodes,
    without_new_calls,
)
from keras_streams.protocol import streams_itself
from keras_streams.trace import symbolic_weights
from keras_streams.types import Tensor


def of_any_rank(*names: str) -> tuple[type, ...]:
    """Returns the layers of Keras for one to three axes, such as those of "Conv{}D"."""
    found = [name.format(rank) for name in names for rank in (1, 2, 3)]
    return tuple(getattr(keras.layers, name) for name in found if hasattr(keras.layers, name))


# Layers of Keras that are taken as the operations of their `call`, too.
_OF_OPERATIONS = (
    *of_any_rank("ZeroPadding{}D", "Cropping{}D", "UpSampling{}D"),
    keras.layers.Permute,
    keras.layers.STFTSpectrogram,
)
WITHOUT_INPUTS = "{} has an output that depends on none of its inputs. Remove the output."
CONCATENATIONS = keras.layers.Concatenate, numpy_ops.Concatenate


class DoesNotStream(ValueError):
    """An operation does not stream: that of `call`."""

    def __init__(self, message: str, call: "Call"):
        super().__init__(message)
        self.call = call


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor that depends on no input, and if it is constant, on no weights either."""

    function: Callable[[], Tensor]
    is_constant: bool = True

    def __call__(self) -> Tensor:
        return self.function()


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """The options of `to_stream`, and what it finds out about a model."""

    time_axis: Any = None
    window: int | None = None
    ignore_masks: bool = False
    max_context: int | None = None
    # Whether layers that are not Keras' own are replaced by the operations of their `call`, if it
    # can be traced with symbolic tensors.
    traced: bool = True
    joined: frozenset[int] = frozenset()  # outputs of calls that get each window as a whole


@dataclasses.dataclass
class Call:
    """A call of a layer or operation.

    `sources` maps the id of a symbolic tensor to its number in the graph, or to what is `Computed`.
    """

    operation: Any
    arguments: tuple[Sequence, dict[str, Any]]  # positional and named, with symbolic tensors
    sources: dict[int, Any]
    specs: list[keras.KerasTensor]  # the symbolic outputs
    model: str  # path of the model that makes the call
    outputs: list[int] = dataclasses.field(default_factory=list)  # their numbers
    place: str = ""  # in the graph, for error messages
    axes: Sequence[int] = ()  # the time axes of the inputs, where they are not 1
    output_axes: Sequence[int] = ()

    @property
    def tensors(self) -> list[keras.KerasTensor]:
        """The symbolic inputs."""
        leaves = keras.tree.flatten(self.arguments)
        return [x for x in leaves if isinstance(self.sources.get(id(x)), int)]

    @property
    def inputs(self) -> list[int]:
        """The numbers of the inputs."""
        return [self.sources[id(x)] for x in self.tensors]

    @property
    def given(self) -> list:
        """The arguments that are not a default of Keras' (`None` or `False`), as a flat list."""
        return [x for x in keras.tree.flatten(self.arguments) if not _is_default(x)]

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the outputs of the operation for a list of inputs with time on axis 1."""
        values = [to_axis(x, axis) for x, axis in itertools.zip_longest(values, self.axes)]
        ys = self.of_model(values)
        return [from_axis(y, axis) for y, axis in itertools.zip_longest(ys, self.output_axes)]

    def of_model(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the outputs of the operation for a list of inputs as in the model."""
        if isinstance(self.operation, numpy_ops.Add) and len(values) == 2:
            # On TensorFlow `ops.add` takes (n, 1, 1) as a bias of n channels (Keras 3.15).
            a, b = (ops.cast(x, self.specs[0].dtype) for x in values)
            return [a + b]
        shape = getattr(self.operation, "newshape", None)  # of a reshape
        if isinstance(shape, tuple) and None in shape:  # sizes that were unknown when it was traced
            sizes = [-1 if n is None else n for n in shape[1:]]
            return [ops.reshape(values[0], (ops.shape(values[0])[0], *sizes))]
        known = dict(zip(map(id, self.tensors), values, strict=True))

        def value(x):
            return known[id(x)] if id(x) in known else self.computed(x)

        arguments, named = keras.tree.map_structure(value, self.arguments)
        if values and isinstance(self.operation, CONCATENATIONS):  # no part of one row is broadcast
            parts, *others = arguments
            rows = ops.shape(values[0])[0]
            parts = [x if x.shape[0] != 1 else ops.repeat(x, rows, axis=0) for x in parts]
            arguments = [parts, *others]
        function = self.operation
        if isinstance(function, nn_ops.ConvTranspose):  # Keras 3.15 takes one padding for the other
            names = "strides", "padding", "output_padding", "data_format", "dilation_rate"
            options = {name: getattr(function, name) for name in names}
            function = functools.partial(ops.conv_transpose, **options)
        return keras.tree.flatten(function(*arguments, **named))

    @property
    def is_constant(self) -> bool:
        """Whether the outputs of a call without inputs depend on no weights."""
        is_weighted = bool(getattr(self.operation, "weights", None))
        return not is_weighted and all(map(self._is_constant, keras.tree.flatten(self.arguments)))

    def _is_constant(self, x):
        source = self.sources.get(id(x))
        is_weight = isinstance(source, Computed) and not source.is_constant
        return not is_weight and not isinstance(x, keras.Variable)

    def constant(self, x: Any) -> Any:
        """Returns an argument that a stream reads only once: a number, or a constant tensor."""
        if not all(map(self._is_constant, keras.tree.flatten(x))):
            raise self.refusal(
                "it pads, masks or slices by a weight, which may change. Use a constant."
            )
        return self.computed(x)

    def computed(self, x: Any) -> Any:
        """Returns an argument that is not an input: a number, or a tensor computed from weights."""
        source = self.sources.get(id(x))
        return source() if callable(source) else x

    def argument(self, position: int, name: str) -> Any:
        """Returns an argument, or `None`."""
        arguments, named = self.arguments
        return arguments[position] if position < len(arguments) else named.get(name)

    @property
    def starts_with_zeros(self) -> bool:
        """Whether a recurrent layer gets zeros as its initial state, as it has without one."""
        state = keras.tree.flatten(self.arguments[1].get("initial_state"))
        return (
            isinstance(self.operation, keras.layers.RNN)
            and not any(x is None or isinstance(x, keras.KerasTensor) for x in state)
            and all(map(self._is_constant, state))
            and not any(np.any(ops.convert_to_numpy(x)) for x in state)
        )

    @property
    def is_of_keras(self) -> bool:
        """Whether the operation is one of Keras' that computes what its class says."""
        kinds = keras.layers.Lambda, keras.layers.Wrapper, keras.Model
        given = [*vars(self.operation).values(), *keras.tree.flatten(self.arguments)]
        calls_others = any(inspect.isfunction(x) and not is_in_keras(x) for x in given)
        is_known = is_in_keras(type(self.operation)) and not isinstance(self.operation, kinds)
        return is_known and not calls_others

    def with_input(self, leaf: Any, number: int, tensor: keras.KerasTensor) -> "Call":
        """Returns the call with a tensor of the graph in place of an argument."""
        arguments = keras.tree.map_structure(lambda x: tensor if x is leaf else x, self.arguments)
        sources = {**self.sources, id(tensor): number}
        return dataclasses.replace(self, arguments=arguments, sources=sources)

    def with_sources(self, change: Callable[[Any], Any]) -> "Call":
        """Returns the call with `change(source)` in place of the source of each of its tensors."""
        sources = {id(x): change(self.sources[id(x)]) for x in self.tensors}
        return dataclasses.replace(self, sources=self.sources | sources)

    def specs_for(self, shapes: Sequence[tuple]) -> list[keras.KerasTensor]:
        """Returns the symbolic outputs for inputs of other shapes."""
        pairs = zip(self.tensors, shapes, strict=True)
        others = {id(x): keras.KerasTensor(shape, x.dtype) for x, shape in pairs}
        args, named = keras.tree.map_structure(lambda x: others.get(id(x), x), self.arguments)
        return keras.tree.flatten(self.operation.compute_output_spec(*args, **named))

    def refusal(self, reason: str) -> DoesNotStream:
        """Returns the error for an operation that does not stream."""
        return DoesNotStream(f"{self.place} does not stream: {reason}", self)


class Graph:
    """The calls of a model, each after those that it depends on.

    The inputs, a structure of symbolic tensors, have the numbers 0, 1, ...; `outputs` is a
    structure of the numbers of the outputs.

    Args:
        model: Built functional model, `keras.Sequential` or layer.
        options: Those of the stream. Layers that cannot be traced with an unknown number of steps
            are traced with `max_context`.
    """

    def __init__(self, model: keras.Layer, options: StreamOptions):
        functional = functional_of(model) or _function_of(model)
        self.name, self._options = model.name, options
        self._numbers: Iterator[int] = itertools.count()
        self.calls: list[Call] = []
        numbers = [next(self._numbers) for _ in functional.inputs]
        outputs = self._add(functional, numbers, model.name)
        if any(map(callable, outputs)):
            raise ValueError(WITHOUT_INPUTS.format(model.name))
        self.inputs = functional.input
        self.outputs = keras.tree.pack_sequence_as(functional.output, outputs)
        needed, calls = set(outputs), self.calls
        self.calls = []
        for call in reversed(calls):
            if options.ignore_masks:
                call.arguments[1].pop("mask", None)
            if call.starts_with_zeros:
                call.arguments[1].pop("initial_state")
            if needed & {*call.outputs}:
                needed |= {*call.inputs}
                self.calls.insert(0, call)
        for i, call in enumerate(self.calls, 1):
            operation = call.operation
            call.place = f"{operation.name} ({type(operation).__name__})"
            if operation is not model:
                call.place += f", operation {i} of {len(self.calls)}, in {call.model},"
            if isinstance(operation, keras.layers.SpectralNormalization):
                # In inference it is its layer, unless it rounds an embedding to tokens' dtype.
                if not isinstance(operation.layer, keras.layers.Embedding):
                    call.operation = operation.layer

    def takes_tokens(self, n: int) -> bool:
        """Returns whether an input consists of tokens."""
        readers = [call.operation for call in self.calls if n in call.inputs]
        is_int = keras.backend.is_int_dtype(keras.tree.flatten(self.inputs)[n].dtype)
        return is_int or any(isinstance(reader, keras.layers.Embedding) for reader in readers)

    def _add(self, functional, inputs, path):
        """Adds the calls of a functional model.

        It takes and returns the sources of its inputs and outputs, as `Call.sources` has them.
        """
        known = dict(zip(map(id, functional.inputs), inputs, strict=True))
        for node in ordered_nodes(functional):
            if node.is_input or any(id(x) not in known for x in node.input_tensors):
                continue
            operation = node.operation
            inner = functional_of(operation)
            given = None if inner is None else _given(inner, node)
            if given is not None:
                inputs = [known[id(x)] for x in given]
            else:
                args, named = node.arguments.args, dict(node.arguments.kwargs)
                if isinstance(operation, CONCATENATIONS) and not args:
                    args = [named.pop("inputs")]
                arguments = args, named
                sources = {id(x): known[id(x)] for x in node.input_tensors}
                call = Call(operation, arguments, sources, node.outputs, path)
                inner, values = self._operations_of(call)
                inputs = [*(known[id(x)] for x in node.input_tensors), *values]
            if inner is not None:
                outputs = self._add(inner, inputs, f"{path}/{operation.name}")
            elif call.inputs:
                call.outputs = outputs = [next(self._numbers) for _ in node.outputs]
                self.calls.append(call)
            else:
                outputs = [
                    Computed(lambda c=call, i=i: c.of_model([])[i], call.is_constant)
                    for i in range(len(node.outputs))
                ]
            known.update(zip(map(id, node.outputs), outputs, strict=True))
        return [known[id(x)] for x in functional.outputs]

    def _operations_of(self, call):
        """Returns the `Function` of the operations of a layer's `call`, or `None`.

        Its inputs are those of the call, then the layer's weights and constants, of which it
        returns the functions, too.
        """
        layer = call.operation
        is_own = isinstance(layer, keras.Layer) and not call.is_of_keras
        is_wrapper = isinstance(layer, keras.layers.Wrapper) and is_in_keras(type(layer))
        if not (is_own and self._options.traced or isinstance(layer, _OF_OPERATIONS)) or (
            call.arguments[1].get("training") or streams_itself(layer) or is_wrapper
        ):
            return None, []
        layers = all_layers(layer)
        if not all(x.built for x in layers):
            return None, []
        function, values = _trace_call(call, layers, None)
        if function is None and self._options.max_context is not None:
            function, values = _trace_call(call, layers, self._options.max_context)
        return function, values


def functional_of(model: keras.Layer) -> Functional | None:
    """Returns the functional model that a layer computes, or `None`."""
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        return functional_of_sequential(model)
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    return None


def _function_of(layer):
    """Returns a layer as a functional model."""
    shape = (layer.get_build_config() or {}).get("input_shape")
    if shape is None or not all(size is None or isinstance(size, int) for size in shape):
        raise ValueError(
            f"{layer.name} was not built for one input (batch, time, ...). Call it in a functional "
            "model: keras.Model(inputs, outputs)."
        )
    dtype = "int32" if isinstance(layer, keras.layers.Embedding) else layer.compute_dtype
    x = keras.Input(batch_shape=(None, None, *shape[2:])[: len(shape)], dtype=dtype)
    with without_new_calls([layer]):
        return keras.Model(x, layer(x), name=layer.name)


def _trace_call(call, layers, length):
    """Returns the `Function` of a layer's `call`, with a number of steps if it is unknown."""
    layer, inputs = call.operation, []
    attributes = [dict(vars(each)) for each in layers]

    def symbol(x):
        if not isinstance(x, keras.KerasTensor):
            return x
        shape = [x.shape[0], *(length if size is None else size for size in x.shape[1:])]
        inputs.append(keras.Input(batch_shape=shape, dtype=x.dtype))
        return inputs[-1]

    def converted(x):
        if not isinstance(x, keras.KerasTensor):
            return x
        return layer.dtype_policy.convert_input(x, layer.autocast, layer.input_dtype)

    args, named = keras.tree.map_structure(symbol, call.arguments)
    if "training" in inspect.signature(layer.call).parameters:
        named = {**named, "training": False}
    try:
        with without_new_calls(layers), symbolic_weights() as weights:
            with autocast(layer):
                args, named = keras.tree.map_structure(converted, (args, named))
                outputs = layer.call(*args, **named)
            flat = keras.tree.flatten(outputs)
            constants = [y for y in flat if not isinstance(y, keras.KerasTensor)]
            symbols = [keras.Input(batch_shape=y.shape, dtype=y.dtype) for y in constants]
            rest = iter(symbols)
            flat = [y if isinstance(y, keras.KerasTensor) else next(rest) for y in flat]
            outputs = keras.tree.pack_sequence_as(outputs, flat)
            read = [symbol for _, symbol in weights.symbols.values()]
            for number, each in enumerate(layers):  # a `Function` refuses equal names
                vars(each)["name"] = f"{number}_{each.name}"
            function = keras.Function([*inputs, *read, *symbols], outputs)
    except Exception:  # whatever code that needs numbers raises for symbolic tensors
        return None, []
    finally:
        for each, values in zip(layers, attributes, strict=True):
            for name in vars(each).keys() - values.keys():  # what `call` has stored
                del vars(each)[name]
            vars(each).update(values)
    for operation in function.operations:
        if isinstance(operation, (numpy_ops.Reshape, numpy_ops.BroadcastTo)):
            _take_any_rows(operation)
    read = [variable for variable, _ in weights.symbols.values()]
    values = [Computed(lambda v=v: v.value, is_constant=False) for v in read]
    return function, [*values, *(Computed(lambda value=value: value) for value in constants)]


def _take_any_rows(operation):
    """Makes an operation that was traced for one row take any number of rows."""
    name = "newshape" if isinstance(operation, numpy_ops.Reshape) else "shape"
    rows, *shape = getattr(operation, name)
    if rows == 1 and operation.input.shape[0] is None and -1 not in shape:
        setattr(operation, name, (-1, *shape))


def to_axis(x: Tensor, axis: int | None) -> Tensor:
    """Returns x (batch, time, ...) with time on another axis; 0 stands for its first step."""
    if axis == 0:
        return x[:, 0]
    return x if axis in (None, 1) else ops.moveaxis(x, 1, axis)


def from_axis(x: Tensor, axis: int | None) -> Tensor:
    """Returns a tensor with time moved from an axis to axis 1."""
    return x if axis in (None, 0, 1) else ops.moveaxis(x, axis, 1)


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
    if isinstance(inputs, dict) and not isinstance(functional.input, dict):
        return [inputs[x.name] for x in functional.inputs]  # as Keras matches them
    return keras.tree.flatten(inputs)


def _is_default(value):
    return value is None or value is False


def is_in_keras(defined: Any) -> bool:
    """Returns whether Keras defines a class or a function."""
    return (defined.__module__ or "").startswith("keras.")  # None: made by `exec`
