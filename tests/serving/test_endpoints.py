"""SavedModels of every kind of model give Keras' numbers, in a process without Keras."""

import numpy as np
import pytest

from tests.support.served import (
    LANGUAGE,
    MODELS,
    WITH_TEXT,
    ask,
    inputs,
    scores,
    scores_so_far,
)

pytestmark = pytest.mark.slow  # the other files of this folder ask the same of some models

SHAPES = [(1, 1), (3, 17)]
STEPS = 40  # several times around every buffer of a stream
SOME = [1, 2, 7, STEPS]
TEXTS = ["a", "a cab", "bad  ", "a\nb a"]


def requests(model, name):
    """{what is asked: (endpoint, inputs)}"""
    what, array = inputs(model, 2, STEPS)
    asked = {shape: ("serving_default", dict([inputs(model, *shape)])) for shape in SHAPES}
    asked["stream"] = "stream", {"name": what, "array": array}
    if name in LANGUAGE:
        asked["prefill and stream"] = "stream", {"name": what, "array": array[:, :12], "read": 5}
        prompts = {"tokens": inputs(model, 3, 4)[1], "max_length": 12}
        asked["greedy"] = "generate", {**prompts, "temperature": 0.0, "seed": 7}
        for again, seed in enumerate((7, 7, 8)):
            asked["drawn", again] = "generate", {**prompts, "temperature": 1.0, "seed": seed}
    if name in WITH_TEXT:
        asked["score_text"] = "score_text", {"text": [*TEXTS, ""]}
        options = {"max_new_tokens": 6, "temperature": 0.0, "seed": 0}
        asked["generate_text"] = "generate_text", {"text": TEXTS, **options}
    return asked


@pytest.fixture(scope="module")
def answers(exported, tmp_path_factory):
    """{model: {what was asked: the answer}}"""
    asked = {name: requests(exported(name)[0], name) for name in MODELS}
    flat = [(exported(name)[1], *of) for name in asked for of in asked[name].values()]
    found = iter(ask(flat, tmp_path_factory.mktemp("asked")))
    return {name: dict(zip(of, found, strict=False)) for name, of in asked.items()}


def assert_equal(answer, expected):
    assert answer.dtype == "float32"
    np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_any_batch_of_any_length(exported, answers, name):
    model = exported(name)[0]
    for shape in SHAPES:
        expected_name, expected = scores(model, inputs(model, *shape)[1])
        assert list(answers[name][shape]) == [expected_name]
        assert_equal(answers[name][shape][expected_name], expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_of_steps_equals_one_request(exported, answers, name):
    model, stream = exported(name)[0], answers[name]["stream"]
    expected = scores_so_far(model, inputs(model, 2, STEPS)[1], SOME)
    assert_equal(stream[:, [time - 1 for time in SOME]], expected)


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_stream_continues_from_prefill(exported, answers, name):
    model = exported(name)[0]
    whole = scores(model, inputs(model, 2, STEPS)[1])[1]
    assert_equal(answers[name]["prefill and stream"], whole[:, 5:12])


@pytest.mark.parametrize("name", LANGUAGE)
def test_generate(exported, answers, name):
    model, of = exported(name)[0], answers[name]
    prompts = inputs(model, 3, 4)[1]
    for what in ("greedy", ("drawn", 0)):
        assert of[what]["tokens"].dtype == "int32"
        assert of[what]["tokens"].shape == (3, 12)
        np.testing.assert_array_equal(of[what]["tokens"][:, :4], prompts)
    best = scores(model, of["greedy"]["tokens"])[1].argmax(axis=-1)
    np.testing.assert_array_equal(of["greedy"]["tokens"][:, 4:], best[:, 3:-1])
    first, again, other = (of["drawn", i]["tokens"].tolist() for i in range(3))
    assert first == again != other


@pytest.mark.parametrize("name", WITH_TEXT)
def test_score_text(exported, answers, name):
    model, answer = exported(name)[0], answers[name]["score_text"]
    rows = [model.vocabulary.encode(text, final_eos=False) for text in TEXTS]
    log_p = [scores(model, row[None])[1][0] for row in rows]
    sums = [p[range(len(row) - 1), row[1:]].sum() for p, row in zip(log_p, rows, strict=True)]
    assert_equal(answer["log_probability"], [*sums, 0])
    assert answer["num_tokens"].tolist() == [*(len(row) - 1 for row in rows), 0]


@pytest.mark.parametrize("name", WITH_TEXT)
def test_generate_text_continues_texts_of_any_length(exported, answers, name):
    model = exported(name)[0]
    for text, answer in zip(TEXTS, answers[name]["generate_text"]["text"], strict=True):
        ids = model.vocabulary.encode(text, final_eos=False)
        for _ in range(6):
            ids = np.append(ids, scores(model, ids[None])[1][0, -1].argmax())
        assert answer.decode() == model.vocabulary.decode(ids)
