"""What is left of a model that was trained and deleted."""

import gc
import weakref

import keras
import numpy as np

from trellis_keras.layers import TCN, StackedRNN
from trellis_keras.models import SequenceClassifier


def trained(backbone):
    model = SequenceClassifier(backbone, num_classes=3)
    model.compile("adam", metrics=["accuracy"])
    x, y = np.ones((4, 8, 2), "float32"), np.arange(4) % 3
    model.fit(x, y, validation_data=(x, y), batch_size=2, verbose=0)
    return model


def graphs(known=()):
    """The numbers of the TensorFlow graphs that are alive."""
    gc.collect()
    return {id(x) for x in gc.get_objects() if type(x).__name__ == "FuncGraph"} - set(known)


def test_no_graph_outlives_its_model():
    before = graphs()
    model = trained(TCN(3, kernel_size=2, depth=1, return_sequences=False))
    assert graphs(before)
    del model
    keras.utils.clear_session()
    assert not graphs(before)


def test_no_recurrent_layer_outlives_its_model():
    layer = keras.layers.GRU(3, return_sequences=True, return_state=True)
    model = trained(StackedRNN([layer], return_sequences=False))
    kernel = weakref.ref(layer.cell.recurrent_kernel)
    del model, layer
    keras.utils.clear_session()
    gc.collect()
    assert kernel() is None
