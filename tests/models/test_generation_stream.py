"""Text that is handed out while it grows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.generation import make
from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.generation import kept, text

samplers = pytest.importorskip("keras_nlp").samplers
both_backends = pytest.mark.both_backends


@pytest.fixture(scope="module")
def speller():
    return make(Vocabulary.from_text("abcdefgh \n", unit="character"))


@both_backends
@pytest.mark.parametrize(
    "sampler",
    [
        "random",
        pytest.param(
            samplers.TopPSampler(p=0.9, temperature=2.0), marks=pytest.mark.slow_elsewhere
        ),
    ],
)
def test_joined_pieces_are_the_generated_text(speller, sampler):
    arguments = {"prompt": "ab", "max_length": 24, "sampler": sampler, "seed": 1}
    whole = speller.generate("ab", 24, sampler=sampler, seed=1)
    pieces = list(speller.generate_stream(**arguments))
    assert "".join(pieces) == whole
    assert len(pieces) == 24
    stopped = "".join(speller.generate_stream(**arguments, stop_tokens=whole[7]))
    assert stopped == whole[: whole.index(whole[7], 2) + 1]


@both_backends
def test_streams_do_not_disturb_each_other(speller):
    whole = [speller.generate("ab", 24, sampler="random", seed=seed) for seed in (1, 2)]
    streams = [speller.generate_stream("ab", 24, sampler="random", seed=seed) for seed in (1, 2)]
    pairs = list(zip(*streams, strict=True))
    assert ["".join(pieces) for pieces in zip(*pairs, strict=True)] == whole


def test_a_sampler_object_goes_on_from_where_it_is(speller):
    fresh = [samplers.RandomSampler(seed=5) for _ in range(2)]
    expected = [speller.generate("ab", 24, sampler=fresh[0]) for _ in range(2)]
    left = speller.generate_stream("ab", 24, sampler=fresh[1])
    streamed = ["".join(left), "".join(speller.generate_stream("ab", 24, sampler=fresh[1]))]
    assert streamed == expected
    assert expected[0] != expected[1]


def test_the_length_compiles_nothing():
    model = make()
    first = list(model.generate_stream([3, 4], 30, sampler="greedy"))
    assert list(model.generate_stream([3, 4], 8, sampler="greedy")) == first[:8]
    assert all(type(token) is int for token in first)
    steps = [value for key, value in model._generation_functions.items() if key[0] != "cache"]
    assert len(steps) == 1
    assert steps[0][0].experimental_get_tracing_count() == 1


def test_whole_texts_come_at_their_end(speller):
    sampler = samplers.BeamSampler(num_beams=2)
    stream = speller.generate_stream("ab", 9, sampler=sampler)
    assert list(itertools.islice(stream, 2)) == ["a", "b"]
    assert "ab" + "".join(stream) == speller.generate("ab", 9, sampler=sampler)


def test_errors_come_before_the_first_piece(speller):
    for arguments, message in [
        ({"prompt": ""}, "none empty"),
        ({"prompt": ["a", "b"]}, "integers"),
        ({"max_length": 2}, "greater than its 2 tokens"),
        ({"sampler": "best"}, "`sampler` must be"),
        ({"stop_tokens": "ab"}, "single tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            speller.generate_stream(**({"prompt": "ab", "max_length": 6} | arguments))


VOCABULARIES = {
    "word": Vocabulary.from_text("the cat\n sat on\n\nthe mat\n", unit="word"),
    "character": Vocabulary.from_text("aé\n 語🙂", unit="character"),
    "byte": Vocabulary.from_text("aé\n 語🙂", unit="byte"),
}


@pytest.mark.parametrize("unit", VOCABULARIES)
@given(data=st.data())
def test_pieces_of_any_tokens(unit, data):
    vocabulary = VOCABULARIES[unit]
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1)))
    pieces = list(text.pieces(vocabulary, tokens))
    assert "".join(pieces) == vocabulary.decode(tokens)
    assert all(pieces)


def test_characters_of_several_bytes_are_whole():
    vocabulary = VOCABULARIES["byte"]
    assert list(text.pieces(vocabulary, vocabulary.encode("a語🙂é"))) == ["a", "語", "🙂", "é"]


def test_words_appear_one_by_one():
    vocabulary = VOCABULARIES["word"]
    pieces = text.pieces(vocabulary, vocabulary.encode("the cat\nsat\n"))
    assert list(pieces) == ["the", " cat", "\n", "sat", "\n"]


def test_the_last_used_functions_are_kept():
    model = type("Model", (), {})()
    made = []
    for key in (*range(16), 0, 16, 0, 1):
        kept.kept(model, key, lambda key=key: made.append(key))
    assert made == [*range(17), 1]


def test_stop_tokens_within_a_prompt_end_nothing():
    given = np.array([[1, 2, -1, -1], [1, -1, -1, -1]])
    ids = np.array([[1, 2, 3, 2], [1, 2, 3, 2]])
    np.testing.assert_array_equal(text.lengths(ids, given, (2,)), [4, 2])
