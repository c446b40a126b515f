"""Own layers: their operations are traced, and carry their names."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_streams.c_export import c_source, proven_source
from keras_streams.exported_stream import exported_stream
from keras_streams.native_stream import find_compiler

pytestmark = pytest.mark.both_backends


class Scaled(layers.Layer):
    """Computes with its weights and with arrays by Python's operators."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], shape[-1]))
        self.scale = self.add_weight((shape[-1],), initializer="ones")

    def call(self, x):
        kernel = self.kernel / ops.sqrt(ops.sum(self.kernel**2, axis=0))
        y = x @ (kernel * self.scale)
        return np.arange(3, dtype="float32") * y + (1 - self.scale.value[0]) * y - self.kernel[0]


class Named(layers.Layer):
    def call(self, x):
        return ops.erfinv(ops.tanh(x))


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
def test_weights_outside_of_operations_are_traced():
    net = keras.Sequential([keras.Input((None, 3)), layers.GRU(3, return_sequences=True), Scaled()])
    proven_source(net, "net")  # raises unless the C equals Keras


def test_states_and_weights_carry_the_names_of_their_layers():
    first = layers.Conv1D(3, 3, padding="causal", name="first")
    inner = keras.Sequential([layers.Conv1D(2, 3, padding="causal", name="second")], name="inner")
    code = c_source(
        exported_stream(keras.Sequential([keras.Input((None, 3)), first, inner])), "net"
    )
    for name in ("first_ring", "first_kernel", "second_ring", "/* inner/second */"):
        assert name in code.code


def test_operations_of_own_layers_carry_their_names():
    inner = keras.Sequential([layers.Dense(3), Named(name="own")], name="inner")
    net = keras.Sequential([keras.Input((None, 3)), inner])
    with pytest.raises(ValueError, match="inner/own: the operation Erfinv has no C code"):
        c_source(exported_stream(net), "net")


class Powers(layers.Layer):
    """A loop whose counter is a number of Python, which Keras takes for arrays alone."""

    def call(self, x):
        return ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, x * y), (0, x))[1]


def test_a_layer_that_takes_no_symbolic_tensors_is_named():
    net = keras.Sequential([keras.Input((None, 3)), Powers(name="powers")])
    with pytest.raises(ValueError, match="powers.*cannot be exported.*raised AttributeError"):
        c_source(exported_stream(net), "net")
