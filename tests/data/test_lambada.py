import types

import numpy as np
import pytest

from trellis_keras.data import (
    Passages,
    Vocabulary,
    lambada,
    last_word_examples,
    load,
    sources,
)

WORDS = ("<eos>", "<unk>", "the", "cat", "sat", "on", "mat")
KNOWING = Vocabulary(WORDS, unknown="<unk>")
PASSAGES = ("the cat sat on the mat", "the dog sat", "the cat dog", "on the mat")


def test_real_passages(local_data):
    splits = load("lambada", data_dir=local_data("lambada"))
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [0, 4_869, 5_153]
    assert sum(len(text.split()) for text in splits.valid.texts) == 360_944
    assert sum(len(text.split()) for text in splits.test.texts) == 379_883
    vocabulary = Vocabulary.from_text("\n".join(splits.test.texts), "word")
    stream = splits.stream("test", 64, vocabulary=vocabulary)
    counted = 0
    for (x, y, weight), start in zip(stream, range(0, 128, 64), strict=False):
        for b, text in enumerate(splits.test.texts[start : start + 64]):
            place = int(weight[b].argmax())
            words = vocabulary.decode(x[b, : place + 1]).split()
            assert [*words, vocabulary.tokens[y[b, place]]] == text.split()
            counted += weight[b].sum()
    assert counted == 128
    with pytest.raises(ValueError, match="no passages for training"):
        splits.stream("train", 64, vocabulary=vocabulary)


def test_last_word_from_the_words_before():
    examples = last_word_examples(PASSAGES, KNOWING)
    # The third passage's last word is unknown: it is left out.
    np.testing.assert_array_equal(examples.x, [[2, 3, 4, 5, 2], [2, 1, 0, 0, 0], [5, 2, 0, 0, 0]])
    np.testing.assert_array_equal(examples.weight.argmax(axis=1), [4, 1, 1])
    np.testing.assert_array_equal(examples.weight.sum(axis=1), 1)
    assert [examples.y[i, place] for i, place in enumerate((4, 1, 1))] == [6, 4, 6]
    assert (examples.x.dtype, examples.y.dtype, examples.weight.dtype) == (
        "int32",
        "int32",
        "float32",
    )


def test_the_last_word_is_never_read():
    other = [text.rsplit(" ", 1)[0] + " cat" for text in PASSAGES]
    known = [0, 1, 3]
    examples = last_word_examples(PASSAGES, KNOWING)
    changed = last_word_examples([other[i] for i in known], KNOWING)
    np.testing.assert_array_equal(examples.x, changed.x)


def test_the_authors_protocol_reads_the_target():
    examples = last_word_examples(PASSAGES, KNOWING, protocol="authors")
    np.testing.assert_array_equal(
        examples.x,
        [[2, 3, 4, 5, 2, 6], [0, 0, 0, 0, 2, 4], [0, 0, 0, 0, 2, 3], [0, 0, 0, 5, 2, 6]],
    )
    np.testing.assert_array_equal(examples.y[:, -1], examples.x[:, -1])
    np.testing.assert_array_equal(examples.weight, np.eye(6)[[5] * 4])


def test_bad_arguments():
    with pytest.raises(ValueError, match="'words_before', 'authors'.*Received: 'exact'"):
        last_word_examples(PASSAGES, KNOWING, protocol="exact")
    with pytest.raises(ValueError, match="vocabulary of words"):
        last_word_examples(PASSAGES, Vocabulary("abc", unit="character"))
    with pytest.raises(ValueError, match="unknown to the vocabulary.*'dog'"):
        last_word_examples(PASSAGES, Vocabulary(WORDS))
    with pytest.raises(ValueError, match="No passage is left"):
        last_word_examples(["mat", "a dog"], KNOWING)


def test_there_are_no_passages_for_training():
    with pytest.raises(ValueError, match='no passages for training.*unknown="<unk>"'):
        Passages(()).stream(2, vocabulary=KNOWING)


def test_local_copy_and_download(tmp_path, monkeypatch):
    monkeypatch.delenv(sources.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(lambada, "PASSAGES", {"valid": 2, "test": 2})
    (tmp_path / "lambada").mkdir()
    for name, texts in (("development", PASSAGES[:2]), ("test", PASSAGES[2:])):
        path = tmp_path / f"lambada/lambada_{name}_plain_text.txt"
        path.write_text("".join(f"{text} \n" for text in texts))
    local = load("lambada", data_dir=tmp_path)
    assert (local.valid.texts, local.test.texts) == (PASSAGES[:2], PASSAGES[2:])

    def read_arrays(name):
        assert name == "lambada"
        split = {"train": PASSAGES[1::-1], "test": PASSAGES[:1:-1]}
        return {
            key: {"passage": np.array([text.encode() + b" \n" for text in texts], dtype=object)}
            for key, texts in split.items()
        }

    builders = types.SimpleNamespace(read_arrays=read_arrays)
    monkeypatch.setattr(lambada, "import_builders", lambda: builders)
    assert load("lambada").checksum == local.checksum
    monkeypatch.setattr(lambada, "PASSAGES", {"valid": 3, "test": 2})
    with pytest.raises(ValueError, match="expected 3 passages, found 2"):
        load("lambada", data_dir=tmp_path)
