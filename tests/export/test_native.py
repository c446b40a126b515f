"""Compiled steps in Python: streams that can be reset, cloned, pickled and run in threads."""

import functools
import pickle
import threading

import keras
import numpy as np
import pytest
from keras import ops

from keras_streams.c_export import keras_steps
from tests.export.nets import CHANNELS, classifier, language_model
from trellis_keras.export import native
from trellis_keras.layers import TCN

X = np.random.default_rng(0).normal(size=(300, CHANNELS)).astype("float32")


@pytest.fixture(scope="module")
def model():
    return classifier()


@pytest.fixture
def stream(model):
    return native(model)


def steps(stream, x=X):
    return np.stack([stream.step(row) for row in x])


def test_a_stream_resets_and_has_clones_of_its_state(model, stream):
    wanted = keras_steps(model, X)
    np.testing.assert_allclose(steps(stream, X[:100]), wanted[:100], rtol=0, atol=1e-6)
    others = [stream.clone(), pickle.loads(pickle.dumps(stream))]
    for one in (stream, *others):  # each continues from there, independently
        np.testing.assert_allclose(steps(one, X[100:]), wanted[100:], rtol=0, atol=1e-6)
    stream.reset()
    np.testing.assert_allclose(steps(stream), wanted, rtol=0, atol=1e-6)


def run_in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_step_their_own_streams(stream):
    wanted, found = steps(stream.clone()), []
    run_in_threads(*[lambda: found.append(steps(stream.clone()))] * 8)
    assert len(found) == 8 and all(np.array_equal(one, wanted) for one in found)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_wrong_inputs_are_refused(model, quantization):
    tokens, data = np.arange(9).repeat(3), X
    if quantization is None:
        tokens = data = None
    stream = native(model, quantization=quantization, representative_data=data)
    for x in ([1.0], 1.0, np.ones((1, CHANNELS)), [None] * CHANNELS):
        with pytest.raises(ValueError, match="must be an array of numbers of shape"):
            stream.step(x)
    stream = native(language_model(), quantization=quantization, representative_data=tokens)
    for token in (-1, 9, 2**32 + 1, 1.9, 1.0, "1", None, [1]):
        with pytest.raises(ValueError, match="token id"):
            stream.step(token)
    first, second = stream, stream.clone()
    assert np.array_equal(first.step(3), second.step(np.uint8(3)))


def test_missing_values_reach_the_outputs_that_depend_on_them():
    x = keras.Input((None, 2))
    a, b = x[..., :1], x[..., 1:]
    y = [ops.maximum(a, b), ops.minimum(a, b), ops.maximum(0.5, x), ops.sign(x)]
    y.append(keras.layers.ReLU(negative_slope=0.2, threshold=0.5)(x))
    model = keras.Model(x, [*y, keras.layers.GlobalMaxPooling1D()(x)])
    x = np.array([[1, 2], [3, np.nan], [np.nan, 4], [5, 1]], "float32")
    np.testing.assert_array_equal(steps(native(model), x), keras_steps(model, x))


def test_a_missing_compiler_is_named(model, monkeypatch):
    monkeypatch.setattr("keras_streams.c_export.find_compiler", lambda: None)
    with pytest.raises(ImportError, match="pip install ziglang, or use .*compiled_step"):
        native(model)


def test_threads_trace_side_by_side_with_other_work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a cold cache
    models = [
        keras.Sequential([keras.Input((None, 2)), TCN(4, 2, depth=1, seed=n)]) for n in range(3)
    ]
    x = np.ones((1, 5, 2), "float32")
    expected = [model.predict(x, verbose=0)[0, -1] for model in models]
    found = {}

    def stream(n):
        found[n] = steps(native(models[n]), x[0])[-1]

    def build():
        for _ in range(20):
            keras.Sequential([keras.Input((None, 2)), keras.layers.LSTM(3)])(x)
        found["built"] = True

    run_in_threads(*(functools.partial(stream, n) for n in range(3)), build)
    assert found["built"]
    for n in range(3):
        np.testing.assert_allclose(found[n], expected[n], rtol=1e-5, atol=1e-6)
