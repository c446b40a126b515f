"""A stream as exporters write it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.graph_stream import GraphStream, to_stream
from keras_streams.proof import inputs_of, random_examples
from keras_streams.protocol import check_built


@dataclasses.dataclass
class ExportedStream:
    """A stream from a row of numbers, or a token, to the values that a user reads.

    A model that is more than its stream (it standardizes its inputs, or returns probabilities) has
    a method `export_stream` that returns one.

    Attributes:
        whole: Function from x (1, steps, inputs), or tokens (1, steps), to the outputs at all steps
            (1, steps, ...) or a structure of them, computed another way than by `step`.
        symbols: Structure of symbolic inputs that `step` takes, with the channels of x in order.
            Defaults to one tensor.
        example: Function from a random generator and a number to random inputs (steps, inputs).
            Defaults to normal numbers, or tokens.
    """

    model: keras.Layer
    initial_cache: Callable
    step: Callable
    whole: Callable
    inputs: int  # input channels, or the size of the vocabulary
    takes_token: bool = False  # whether the input is a token id
    delay: Any = 0
    rate: Any = 1
    receptive_field: int | None = None
    longest: int | None = None  # steps after which there are no more outputs
    symbols: Any = None
    example: Callable[[np.random.Generator, int], np.ndarray] | None = None
    names: Sequence[str] = ()  # of the outputs; may be empty
    notes: Sequence[str] = ()  # lines that describe inputs and outputs
    fills_missing_values: bool = False  # whether the model replaces NaN in its inputs

    def __post_init__(self) -> None:
        if self.symbols is None and self.takes_token:
            self.symbols = keras.KerasTensor((1,), "int32")
        elif self.symbols is None:
            self.symbols = keras.KerasTensor((1, self.inputs), self.model.compute_dtype)

    def random_inputs(self, steps: int) -> np.ndarray:
        """Returns random inputs (steps, inputs), or tokens (steps,)."""
        rng = np.random.default_rng(0)
        if self.example is not None:
            return self.example(rng, steps)
        if self.takes_token:
            return rng.integers(0, self.inputs, steps).astype("int32")
        return rng.normal(size=(steps, self.inputs)).astype(self.model.compute_dtype)


def exported_stream(model: Any) -> ExportedStream:
    """Returns a model, a layer that streams, or a stream, as an exporter writes it.

    Raises:
        ValueError: The model is not built, does not stream, or has inputs of other kinds.
    """
    if isinstance(model, ExportedStream):
        return model
    if not isinstance(model, (keras.Layer, GraphStream)):
        raise ValueError(f"`model` must be a layer or model that streams. Received: {model!r}")
    check_built(model)
    export_stream = getattr(model, "export_stream", None)
    if export_stream is not None:
        return export_stream()
    stream = to_stream(model)
    if isinstance(stream, GraphStream):
        return _of_graph(stream)
    return ExportedStream(
        stream,
        stream.initial_cache,
        stream.step,
        lambda x: stream.prefill(x)[0],
        inputs=stream.get_build_config()["input_shape"][-1],
        delay=getattr(stream, "delay", 0),
        rate=getattr(stream, "rate", 1),
        receptive_field=getattr(stream, "receptive_field", None),
    )


def _of_graph(stream):
    graph, signals = stream.graph, stream.plan.inputs
    readers = [call.operation for call in graph.calls if 0 in call.inputs]
    is_embedded = readers != [] and all(isinstance(r, keras.layers.Embedding) for r in readers)
    is_output = 0 in keras.tree.flatten(graph.outputs)
    takes_token = is_embedded and not is_output and len(signals) == 1 and signals[0].shape == ()
    ends = np.cumsum([math.prod(signal.shape) for signal in signals])
    inputs = min(layer.input_dim for layer in readers) if takes_token else int(ends[-1])

    def whole(x):
        xs = [x] if takes_token else [x[..., a:b] for a, b in itertools.pairwise([0, *ends])]
        for n, signal in enumerate(signals):
            xs[n] = ops.reshape(xs[n], (*ops.shape(x)[:2], *signal.shape))
            xs[n] = xs[n][:, 0] if signal.is_static else xs[n]
        return stream.prefill(keras.tree.pack_sequence_as(stream.inputs, xs))[0]

    def example(rng, steps):
        given = stream.example
        given = next(random_examples(stream, steps, rng)) if given is None else given
        xs = [ops.convert_to_numpy(x)[0] for x in inputs_of(stream, given, steps)]
        if takes_token:
            return xs[0].astype("int32")
        x = np.concatenate([x.reshape(steps, -1) for x in xs], axis=-1)
        return x.astype(stream.compute_dtype)

    # Other integers are floats in C, like the channels beside them.
    dtype = "int32" if takes_token else stream.compute_dtype
    symbols = [keras.KerasTensor((1, *signal.shape), dtype) for signal in signals]
    return ExportedStream(
        stream.model,
        stream.initial_cache,
        stream.step,
        whole,
        inputs=inputs,
        takes_token=takes_token,
        delay=stream.delay,
        rate=stream.rate,
        receptive_field=stream.receptive_field,
        longest=stream.plan.longest,
        symbols=keras.tree.pack_sequence_as(stream.inputs, symbols),
        example=example,
    )
