"""Requests that a served stream answers."""

import keras
from keras import layers

from keras_streams import to_stream
from keras_streams.endpoints import graph_endpoints


def test_whole_sequences_have_the_time_axis_of_the_model():
    x, gate = keras.Input((4, None, 2), name="x"), keras.Input((3,), name="gate")
    y = layers.Conv2D(2, (1, 3))(x) * layers.Dense(2)(gate)[:, None, None]
    stream = to_stream(keras.Model([x, gate], y, name="net"), time_axis=[2, None])
    whole, _, step = graph_endpoints(stream)
    assert [f.shape for f in whole.inputs.values()] == [("batch", 4, "time", 2), ("batch", 3)]
    assert [f.shape for f in whole.outputs.values()] == [("batch", 4, "steps", 2)]
    assert [step.inputs[name].shape for name in whole.inputs] == [("batch", 4, 2), ("batch", 3)]
