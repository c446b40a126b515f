"""Any causal Keras model, one sample at a time."""

from keras_streams.c_export import native
from keras_streams.compiled_steps import PackedCache, compiled_step
from keras_streams.exporter import export
from keras_streams.graph_stream import GraphStream, to_stream
from keras_streams.protocol import StreamingMixin

__version__ = "0.1.0"

__all__ = [
    "GraphStream",
    "PackedCache",
    "StreamingMixin",
    "compiled_step",
    "export",
    "native",
    "to_stream",
]
