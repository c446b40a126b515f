"""SavedModels of every kind of model give Keras' numbers.

`test_c_api.py` asks one in a process that has neither Python nor Keras.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_streams import to_stream
from tests.support.parameters import slow_but
from tests.support.served import LANGUAGE, MODELS, WITH_TEXT, inputs, scores, scores_so_far
from trellis_keras.export import export
from trellis_keras.export.endpoints import endpoints_of

SHAPES = [(1, 1), (3, 17)]
STEPS = 40  # several times around every buffer of a stream
SOME = [1, 2, 7, STEPS]
TEXTS = ["a", "a cab", "bad  ", "a\nb a"]


@pytest.fixture(scope="module")
def served(exported):
    """`served(name)`: a model, and a function that asks an endpoint of its SavedModel."""
    loaded = {}

    def get(name):
        model, path = exported(name)
        if name not in loaded:
            loaded[name] = tf.saved_model.load(str(path)).signatures

        def ask(endpoint, **inputs):
            tensors = {key: tf.constant(value) for key, value in inputs.items()}
            answer = loaded[name][endpoint](**tensors)
            return {key: tensor.numpy() for key, tensor in answer.items()}

        return model, ask

    return get


def stream(ask, name, array, read=0):
    """The scores of a stream after `read` steps at once, by a client that sends the cache."""
    if read:
        answer = ask("prefill", **{name: array[:, :read]})
    else:
        answer = ask("initial_cache", batch_size=len(array))
    found = []
    for t in range(read, array.shape[1]):
        cache = {key: value for key, value in answer.items() if key.startswith("cache_")}
        answer = ask("step", **{name: array[:, t]}, **cache)
        found += [value for key, value in answer.items() if not key.startswith("cache_")]
    return np.stack(found, axis=1)


def assert_equal(answer, expected):
    assert answer.dtype == "float32"
    np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(MODELS, "trellisnet", "classifier"))
def test_any_batch_of_any_length(served, name):
    model, ask = served(name)
    for shape in SHAPES:
        what, array = inputs(model, *shape)
        ((found_name, found),) = ask("serving_default", **{what: array}).items()
        expected_name, expected = scores(model, array)
        assert found_name == expected_name
        assert_equal(found, expected)


@pytest.mark.parametrize("name", slow_but(MODELS, "trellisnet", "regressor"))
def test_a_stream_of_steps_equals_one_request(served, name):
    model, ask = served(name)
    what, array = inputs(model, 2, STEPS)
    found = stream(ask, what, array)[:, [time - 1 for time in SOME]]
    assert_equal(found, scores_so_far(model, array, SOME))


@pytest.mark.parametrize("name", slow_but(LANGUAGE, "trellisnet"))
def test_a_stream_continues_from_prefill(served, name):
    model, ask = served(name)
    what, array = inputs(model, 2, 12)
    assert_equal(stream(ask, what, array, read=5), scores(model, array)[1][:, 5:])


@pytest.mark.parametrize("name", slow_but(LANGUAGE, "trellisnet"))
def test_generate(served, name):
    model, ask = served(name)
    prompts = inputs(model, 3, 4)[1]

    def generate(temperature, seed):
        asked = {"max_length": 12, "temperature": temperature, "seed": seed}
        return ask("generate", tokens=prompts, **asked)["tokens"]

    greedy, first, again, other = (
        generate(t, s) for t, s in ((0.0, 7), (1.0, 7), (1.0, 7), (1.0, 8))
    )
    for tokens in (greedy, first):
        assert (tokens.dtype, tokens.shape) == ("int32", (3, 12))
        np.testing.assert_array_equal(tokens[:, :4], prompts)
    best = scores(model, greedy)[1].argmax(axis=-1)
    np.testing.assert_array_equal(greedy[:, 4:], best[:, 3:-1])
    assert first.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize("name", slow_but(WITH_TEXT, "trellisnet"))
def test_score_text(served, name):
    model, ask = served(name)
    answer = ask("score_text", text=[*TEXTS, ""])
    rows = [model.vocabulary.encode(text, final_eos=False) for text in TEXTS]
    log_p = [scores(model, row[None])[1][0] for row in rows]
    sums = [p[range(len(row) - 1), row[1:]].sum() for p, row in zip(log_p, rows, strict=True)]
    assert_equal(answer["log_probability"], [*sums, 0])
    assert answer["num_tokens"].tolist() == [*(len(row) - 1 for row in rows), 0]


@pytest.mark.parametrize("name", slow_but(WITH_TEXT, "trellisnet"))
def test_generate_text_continues_texts_of_any_length(served, name):
    model, ask = served(name)
    answers = ask("generate_text", text=TEXTS, max_new_tokens=6, temperature=0.0, seed=0)["text"]
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = model.vocabulary.encode(text, final_eos=False)
        for _ in range(6):
            ids = np.append(ids, scores(model, ids[None])[1][0, -1].argmax())
        assert answer.decode() == model.vocabulary.decode(ids)


def test_a_keras_model_with_a_delay_and_a_rate(tmp_path):
    layers = keras.layers
    parts = [layers.Conv1D(4, 3, padding="same"), layers.MaxPooling1D(2)]
    model = keras.Sequential([keras.Input((None, 2)), *parts, layers.GRU(3, return_sequences=True)])
    stream, x = to_stream(model), np.random.default_rng(0).normal(size=(1, 9, 2)).astype("float32")
    signatures = tf.saved_model.load(export(model, tmp_path)).signatures
    cache, found = signatures["initial_cache"](batch_size=tf.constant(1)), []
    for t in range(9):
        cache = signatures["step"](inputs=tf.constant(x[:, t]), **cache)
        found.append(cache.pop("outputs"))
    wanted = stream.prefill(x)[0][0]
    assert np.sum(np.isfinite(wanted[:, 0])) == 4  # steps 2, 4, 6 and 8
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-4, atol=1e-5)


def test_whole_sequences_have_the_time_axis_of_the_model():
    x, gate = keras.Input((4, None, 2), name="x"), keras.Input((3,), name="gate")
    y = keras.layers.Conv2D(2, (1, 3))(x) * keras.layers.Dense(2)(gate)[:, None, None]
    graph = to_stream(keras.Model([x, gate], y, name="net"), time_axis=[2, None])
    whole, _, step = endpoints_of(graph)
    assert [f.shape for f in whole.inputs.values()] == [("batch", 4, "time", 2), ("batch", 3)]
    assert [f.shape for f in whole.outputs.values()] == [("batch", 4, "steps", 2)]
    assert [step.inputs[name].shape for name in whole.inputs] == [("batch", 4, 2), ("batch", 3)]
