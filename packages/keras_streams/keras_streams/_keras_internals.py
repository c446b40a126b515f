"""Keras internals that the package uses, each with the public name that is missing."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

# Missing: symbolic calls of any layer; `trace.py` replaces functions of the backend meanwhile.
from keras.src import backend

# Missing: `keras.layers.Conv1DTranspose.padding`, as the steps that it adds on both sides.
from keras.src.backend.common.backend_utils import compute_conv_transpose_padding_args_for_jax

# Missing: the class of `keras.Model(inputs, outputs)`.
from keras.src.models.functional import Functional

# Missing: the classes of the operations in a graph, such as `keras.ops.Add`.
from keras.src.ops import math as math_ops
from keras.src.ops import nn as nn_ops
from keras.src.ops import numpy as numpy_ops

# Missing: the class of the calls in a graph.
from keras.src.ops.node import Node

# Missing: the backend of preprocessing layers, which is not always Keras' own.
from keras.src.utils.backend_utils import DynamicBackend

__all__ = [
    "DynamicBackend",
    "Functional",
    "Node",
    "backend",
    "compute_conv_transpose_padding_args_for_jax",
    "math_ops",
    "nn_ops",
    "numpy_ops",
]


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns a layer and all layers within it. Missing: `keras.Layer.flatten_layers`."""
    return list(layer._flatten_layers())


def functional_of_sequential(model: keras.Sequential) -> Functional:
    """Returns the graph of a built model. Missing: `keras.Sequential.functional`."""
    return model._functional


def ordered_nodes(function: keras.Function) -> list[Node]:
    """Returns the calls in the order of computation. Missing: `keras.Function.nodes`."""
    nodes = function._nodes_by_depth
    return [node for depth in sorted(nodes, reverse=True) for node in nodes[depth]]


@contextlib.contextmanager
def without_new_calls(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Makes layers forget the calls in a block. Missing: a way to call them without a record."""
    counts = [len(layer._inbound_nodes) for layer in layers]
    try:
        yield
    finally:
        for layer, count in zip(layers, counts, strict=True):
            del layer._inbound_nodes[count:]


def sliding_window(layer: keras.layers.MultiHeadAttention) -> int | None:
    """Returns the steps that a layer attends to. Missing: an attribute, as of other options."""
    return layer._sliding_window


def autocast(layer: keras.Layer) -> Any:
    """Context in which weights have a layer's compute dtype. Missing: `keras.AutocastScope`."""
    is_cast = layer.autocast and backend.is_float_dtype(layer.compute_dtype)
    return backend.AutocastScope(layer.compute_dtype if is_cast else None)


def keras_mask(x: keras.KerasTensor) -> Any:
    """Returns the mask of a tensor, or `None`. Missing: `keras.KerasTensor.mask`."""
    return backend.get_keras_mask(x)


def attention_layers(layer: keras.Layer) -> list[Any]:
    """Returns the layers of queries, keys, values, outputs and gate. Missing: attributes."""
    names = "query", "key", "value", "output", "gate"
    return [getattr(layer, f"_{name}_dense", None) for name in names]
