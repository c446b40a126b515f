"""Carried states: several batch sizes under compiled functions, half precision, names."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import assert_close, randomize
from tests.support.parameters import SLOW_ON_JAX
from trellis_keras.layers import LRU, StackedRNN, TrellisLayer

pytestmark = pytest.mark.both_backends

TENSORFLOW = keras.backend.backend() == "tensorflow"
CHANNELS = 4


def gru(dtype=None, stateful=True):
    layer = keras.layers.GRU(CHANNELS, return_sequences=True, return_state=True, dtype=dtype)
    return StackedRNN([layer], stateful=stateful, dtype=dtype)


def trellis(dtype=None, stateful=True):
    return TrellisLayer(CHANNELS, 2, stateful=stateful, dtype=dtype)


def lattice(dtype=None, stateful=True):
    return LRU(CHANNELS, return_sequences=True, stateful=stateful, dtype=dtype)


def model_of(*layers):
    for layer in layers:
        layer.build((None, None, CHANNELS))
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=not TENSORFLOW)
    return model


def inputs(rows):
    return np.random.default_rng(0).normal(size=(8, 5, CHANNELS)).astype("float32")[:rows]


def predict(model, rows):
    return model.predict(inputs(rows), batch_size=rows, verbose=0)


@pytest.mark.parametrize("make", [gru, trellis, lattice])
def test_biases_are_not_rounded_to_half_precision(make):
    """As within a model, where Keras leaves the variables of the layer uncast."""
    layer = make("mixed_bfloat16", stateful=False)
    layer.return_state = True
    layer.build((None, None, CHANNELS))
    randomize(layer)
    x = ops.convert_to_tensor(inputs(2))
    for found, state in zip(layer(x)[1:], layer.call(x)[1:], strict=True):
        np.testing.assert_allclose(found, state, atol=1e-6)


@pytest.mark.parametrize("make", [gru, trellis, pytest.param(lattice, marks=SLOW_ON_JAX)])
def test_batches_continue_each_other(make):
    """As with `initial_state`, in training and evaluation apart, and without a gradient between."""
    layer, plain = make(), make(stateful=False)
    plain.return_state = True
    for each_layer in (layer, plain):
        each_layer.build((None, None, CHANNELS))
        randomize(each_layer)
    assert len(layer.weights) == len(plain.weights)
    first, second = inputs(2), inputs(4)[2:]
    y, *states = plain(first)
    expected = [np.asarray(y), np.asarray(plain(second, initial_state=states)[0])]
    from_zeros = np.asarray(plain(second)[0])
    with pytest.raises(ValueError, match="needs a fixed batch size"):
        layer(first)
    with pytest.raises(ValueError, match="stateful=True"):
        plain.reset_state()
    layer.reset_state(2)
    for _ in range(2):
        assert_close(layer(first), expected[0])
        assert_close(layer(second, training=True), from_zeros)
        assert_close(layer(second), expected[1])
        layer.reset_state()

    def loss(first, second):
        layer(first)
        return ops.sum(ops.square(layer(second))), ()

    _, _, (by_first, by_second) = value_and_gradients(loss, [], first, second)
    by_first, by_second = map(ops.convert_to_numpy, (by_first, by_second))
    assert not np.any(by_first) and np.any(by_second)


@pytest.mark.both_backends(slow=True)
def test_a_compiled_model_goes_back_to_an_earlier_batch_size():
    layer = trellis()
    model, found = model_of(layer), []
    for rows in (4, 2, 4):
        layer.reset_state(rows)
        found.append(predict(model, rows))
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_allclose(found[0][:2], found[1], atol=1e-6)
    assert not np.allclose(predict(model, 4), found[0], atol=1e-6)  # carried on


@pytest.mark.skipif(not TENSORFLOW, reason="JAX compiles for each batch size anew")
def test_a_function_for_any_batch_size_refuses_states_of_another():
    layer, rows = gru(), 3
    model = model_of(layer)
    for known in (4, 2):  # from two on TensorFlow compiles for any number
        layer.reset_state(known)
        predict(model, known)
    layer.reset_state(rows)
    with pytest.raises(Exception, match="carried_states_are_for_another_batch_size"):
        predict(model, rows)
    model.make_predict_function(force=True)
    assert predict(model, rows).shape == (rows, 5, CHANNELS)


@pytest.mark.both_backends(slow=True)
def test_variables_of_a_model_have_paths_of_their_own():
    layers = [trellis(), lattice(), trellis()]
    model = model_of(*layers)
    for rows in (2, 3):
        for layer in layers:
            layer.reset_state(rows)
    paths = [variable.path for variable in model.variables]
    assert len(set(paths)) == len(paths)
    predict(model, 3)
    assert model.get_state_tree()
