"""The graphs that turn text into ids and back agree with `Vocabulary`."""

import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras.data import Vocabulary
from trellis_keras.export.endpoints import TextCodec, is_utf8_vocabulary

WHITE = "".join(c for c in map(chr, range(sys.maxunicode)) if c.isspace())
# Of one to four bytes, with all kinds of white space, and what only looks like it.
ALPHABET = f"{WHITE}\x00ab<>eosé߀\u0301\u200b\ud7ff\ue000\ufeff\ufffd\uffff😀\U0010ffff"
VOCABULARIES = {
    "word": Vocabulary(["b", "<eos>", "a", "é", "ab", "<unk>", "😀"], unknown="<unk>"),
    "character": Vocabulary("?" + ALPHABET.replace("ß", ""), "character", unknown="?"),
    "byte": Vocabulary([chr(i) for i in range(255, -1, -1) if i != 0x9F], "byte", unknown="a"),
}
TEXTS = st.lists(st.text(st.sampled_from(ALPHABET)) | st.text(), min_size=1, max_size=4)


def encoder(vocabulary):
    return tf.function(
        TextCodec(vocabulary).encode, [tf.TensorSpec([None], "string")], autograph=False
    )


def decoder(vocabulary):
    specs = tf.TensorSpec([None, None], "int32"), tf.TensorSpec([None], "int32")
    return tf.function(TextCodec(vocabulary).decode, specs, autograph=False)


ENCODERS = {unit: encoder(vocabulary) for unit, vocabulary in VOCABULARIES.items()}
DECODERS = {unit: decoder(vocabulary) for unit, vocabulary in VOCABULARIES.items()}


@pytest.mark.parametrize("unit", VOCABULARIES)
@settings(deadline=None)
@given(texts=TEXTS)
def test_encode(unit, texts):
    ids, lengths = ENCODERS[unit](tf.constant(texts))
    assert ids.dtype == lengths.dtype == tf.int32
    for one, row, length in zip(texts, ids.numpy(), lengths.numpy(), strict=True):
        expected = VOCABULARIES[unit].encode(one, final_eos=False)
        assert row[:length].tolist() == expected.tolist()
        assert not row[length:].any()


@pytest.mark.parametrize("unit", VOCABULARIES)
@settings(deadline=None)
@given(data=st.data())
def test_decode(unit, data):
    vocabulary = VOCABULARIES[unit]
    # Among the bytes, runs that are UTF-8 and runs that are not.
    token = st.integers(0, len(vocabulary) - 1)
    rows = data.draw(st.lists(st.lists(token, max_size=12), min_size=1, max_size=4))
    ids = np.zeros((len(rows), max(map(len, rows))), "int32")
    for row, numbers in zip(ids, rows, strict=True):
        row[: len(numbers)] = numbers
    lengths = np.array([len(numbers) for numbers in rows], "int32")
    texts = DECODERS[unit](ids, lengths).numpy()
    assert [one.decode() for one in texts] == [vocabulary.decode(numbers) for numbers in rows]


@pytest.mark.parametrize("unit", VOCABULARIES)
def test_text_that_is_not_utf8(unit):
    """Bytes stay what they are; elsewhere they become U+FFFD, as in Python's `"replace"`."""
    content = b"a\xff b"
    ids, lengths = ENCODERS[unit](tf.constant([content]))
    one = content if unit == "byte" else content.decode("utf-8", "replace")
    assert ids[0].numpy().tolist() == VOCABULARIES[unit].encode(one, False).tolist()


@pytest.mark.parametrize(
    ("vocabulary", "known", "strange", "named"),
    [
        (Vocabulary("abé", "character"), "aéb", "a😀b", "😀"),
        (Vocabulary("ab", "byte"), "aba", "abc", "c"),
        (Vocabulary(["<eos>", "a"]), "a \n a", "a zebra", "zebra"),
    ],
)
def test_unknown_symbols_are_named(vocabulary, known, strange, named):
    encode = encoder(vocabulary)
    assert encode(tf.constant([known, ""]))[1].numpy().tolist() == [3, 0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"unknown symbols.*{named}"):
        encode(tf.constant([known, strange]))


def test_padding_is_bounded():
    encode = encoder(VOCABULARIES["byte"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="too much padding: send long ones"):
        encode(tf.constant(["a" * 2**12, *["a"] * 2**9]))
    assert encode(tf.constant(["a" * 2**21]))[1] == 2**21


def test_vocabularies_that_utf8_cannot_write():
    assert not is_utf8_vocabulary(None)
    assert not is_utf8_vocabulary(Vocabulary(["a", "\ud800"], "character"))
    assert all(map(is_utf8_vocabulary, VOCABULARIES.values()))
