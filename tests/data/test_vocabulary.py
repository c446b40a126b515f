import json
import stat

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.data import Vocabulary, vocabulary


def words():
    return Vocabulary(["the", "<eos>", "<unk>", "cat"], unit="word", unknown="<unk>")


def test_words_end_each_line_with_eos():
    ids = words().encode("the  cat\n\n cat the ")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 3, 1, 1, 3, 0, 1]


@pytest.mark.parametrize(
    "text, expected",
    [("the", [0]), ("the\n", [0, 1]), ("the\ncat", [0, 1, 3]), ("", []), (" \n ", [1])],
)
def test_prompt_keeps_only_the_eos_that_is_written(text, expected):
    assert words().encode(text, final_eos=False).tolist() == expected


def test_unknown_symbols_without_a_token_for_them():
    vocabulary = Vocabulary(["<eos>", "a"])
    with pytest.raises(ValueError, match=r"'x', 'y' \(2 distinct, 3 in total\)"):
        vocabulary.encode("a x y x")
    vocabulary = Vocabulary("abc", unit="character")
    with pytest.raises(ValueError, match=r"'1', '2', '3', '4', '5', \.\.\. \(7 distinct, 7 in"):
        vocabulary.encode("a1234567")


def test_characters():
    vocabulary = Vocabulary(["b", "\n", "a", "\U0001f600"], unit="character")
    ids = vocabulary.encode("ab\n\U0001f600")
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 0, 1, 3]
    assert vocabulary.decode(ids) == "ab\n\U0001f600"
    assert vocabulary.encode("").shape == (0,)
    with pytest.raises(ValueError, match=r"'\\ud800'"):
        vocabulary.encode("a\ud800")


def test_bytes():
    content = "häß\U0001f600\n".encode() + b"\xff\x00"
    vocabulary = Vocabulary.from_text(content, "byte")
    assert vocabulary.unit == "byte"
    assert [ord(token) for token in vocabulary.tokens] == sorted(set(content))
    ids = vocabulary.encode(content)
    assert ids.dtype == np.int32
    assert [ord(vocabulary.tokens[i]) for i in ids] == list(content)
    np.testing.assert_array_equal(vocabulary.encode("hä"), ids[:3])
    assert vocabulary.decode(ids[:9]) == "häß\U0001f600"
    # Half a character, and bytes that are not UTF-8.
    assert vocabulary.decode(ids[:2]) == "h\ufffd"
    assert vocabulary.decode(ids[-2:]) == "\ufffd\x00"
    assert vocabulary.encode("").shape == (0,)
    packed = json.loads(json.dumps(keras.saving.serialize_keras_object(vocabulary)))
    assert keras.saving.deserialize_keras_object(packed) == vocabulary
    with pytest.raises(ValueError, match=r"b'a', b'\\xc3' \(2 distinct, 2 in total\)"):
        Vocabulary(["h", "\xa4"], "byte").encode("haä")


@pytest.mark.parametrize("unit", ["word", "character"])
def test_bytes_need_a_byte_vocabulary(unit):
    with pytest.raises(ValueError, match="`text`.*bytes"):
        Vocabulary(["<eos>"] if unit == "word" else "abc", unit).encode(b"abc")
    with pytest.raises(ValueError, match="`text`.*bytes"):
        Vocabulary.from_text(b"abc", unit)
    with pytest.raises(ValueError, match="`text` must be a string or bytes. Received: a bytearray"):
        Vocabulary.from_text(bytearray(b"abc"), unit)


def test_long_texts_are_encoded_piece_by_piece(monkeypatch):
    monkeypatch.setattr(vocabulary, "_CHUNK", 3)
    for unit in ("character", "byte"):
        for text in ("abcab", "ab\U0001f600abc"):
            known = Vocabulary.from_text(text, unit)
            assert known.decode(known.encode(text)) == text
            with pytest.raises(ValueError, match="'x'.*1 distinct, 2 in total"):
                known.encode("ax" + text + "x")


def test_order_is_frequency_then_alphabet_for_words_and_code_point_for_characters():
    assert Vocabulary.from_text("b a c c\nb a\nc\n").tokens == ("<eos>", "c", "a", "b")
    assert Vocabulary.from_text("ba\nB", "character").tokens == ("\n", "B", "a", "b")


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_characters_round_trip(text):
    if text:
        vocabulary = Vocabulary.from_text(text, "character")
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_config_round_trip_through_json_and_keras():
    vocabulary = words()
    config = json.loads(json.dumps(vocabulary.get_config()))
    assert Vocabulary.from_config(config) == vocabulary
    packed = json.loads(json.dumps(keras.saving.serialize_keras_object(vocabulary)))
    assert keras.saving.deserialize_keras_object(packed) == vocabulary
    assert hash(Vocabulary.from_config(config)) == hash(vocabulary)
    assert Vocabulary.from_config({**config, "unknown": None}) != vocabulary


def test_save_and_load(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text("old")
    vocabulary = Vocabulary.from_text("häßlich \n\u2028", "character")
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & stat.S_IRUSR


@pytest.mark.parametrize(
    "content",
    [
        *(b'{"tokens": ["<eos>", "a', b"[]", b'{"words": []}', b'{"tokens": []}'),
        *(b"[" * 100_000, b"\xff\xfe"),
    ],
)
def test_load_of_a_damaged_file_names_it(tmp_path, content):
    path = tmp_path / "vocabulary.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="vocabulary.json is not (a vocabulary|UTF-8 text)"):
        Vocabulary.load(path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokens": ["a"], "unit": "letter"}, "`unit`"),
        ({"tokens": ["<eos>", "a", "a"]}, r"twice: \['a'\]"),
        ({"tokens": ["<eos>", 3]}, "strings. Received: 3"),
        ({"tokens": ["<eos>", "a b"]}, "white space"),
        ({"tokens": ["a"]}, "<eos>"),
        ({"tokens": ["ab"], "unit": "character"}, "one character"),
        ({"tokens": ["\u0100"], "unit": "byte"}, "unit='byte'"),
        ({"tokens": ["<eos>"], "unknown": "<unk>"}, "unknown='<unk>'"),
    ],
)
def test_bad_vocabularies(arguments, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(**arguments)


@pytest.mark.parametrize(
    "ids, message", [([0, 4], "4"), ([-1], "-1"), ([0.0], "float64"), ([[0]], "rank 1")]
)
def test_decode_refuses_bad_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        words().decode(ids)


def test_words_are_those_of_split():
    text = " a\tb\x0bc\x85d\u2028e \r\n\n  f\x1cg<eos> \n  "
    words = [word for line in text.split("\n") for word in [*line.split(), "<eos>"]][:-1]
    vocabulary = Vocabulary.from_text(text)
    assert [vocabulary.tokens[i] for i in vocabulary.encode(text)] == words
    assert set(vocabulary.tokens) == set(words)


def test_a_last_word_that_looks_like_the_end_of_a_line():
    vocabulary = Vocabulary(["<eos>", "a"])
    assert vocabulary.encode("a <eos>").tolist() == [1, 0, 0]
    assert vocabulary.encode("a <eos>", final_eos=False).tolist() == [1, 0]
