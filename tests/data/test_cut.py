"""Which part of a text is used for what: the options `split`, `first` and `train_fraction`."""

import hashlib
import json

import numpy as np
import pytest

from trellis_keras.data import corpora, load, sources
from trellis_keras.data.cut import Cut

TEXT = "abcdefghij" * 10
LRU_SPLIT = [0.9, 0.05, 0.05]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tiny(tiny_ptb, monkeypatch):
    """A folder with small copies of all texts; returned with their contents."""
    sizes = {"train": 28, "valid": 13, "test": 15, "vocabulary": 14}
    monkeypatch.setattr(corpora, "PTB_CHARACTERS", sizes)
    contents = {"char_ptb": "the cat sat \nthe <unk> ran \nthe cat ran \nthe <unk> sat \n"}
    for name, constant, paths in (
        ("text8", "TEXT8_CHARACTERS", corpora.TEXT8_FILES),
        ("enwik8", "ENWIK8_BYTES", corpora.ENWIK8_FILES),
        ("war_and_peace", "WAR_AND_PEACE_CHARACTERS", corpora.WAR_AND_PEACE_FILES),
    ):
        contents[name] = TEXT
        file = tiny_ptb / paths["whole"]
        file.parent.mkdir()
        file.write_text(TEXT)
        published = {"train": 90, "valid": 5, "test": 5, "vocabulary": 10}
        monkeypatch.setattr(corpora, constant, published)
    return tiny_ptb, contents


def parts(corpus):
    return [corpus.vocabulary.decode(getattr(corpus, split)) for split in sources.SPLITS]


CORPORA = ["char_ptb", "text8", "enwik8", "war_and_peace"]


@pytest.mark.parametrize("name", CORPORA)
def test_the_same_options_of_every_text(tiny, name):
    folder, contents = tiny
    whole = contents[name]
    usual = load(name, folder)
    assert "".join(parts(usual)) == whole
    split = load(name, folder, split=[0.5, 0.3, 0.2])
    n = len(whole)
    ends = [0, n // 2, round(n * 0.8), n]
    assert parts(split) == [whole[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    first = load(name, folder, first=40)
    assert parts(first) == [whole[:36], whole[36:38], whole[38:40]]
    less = load(name, folder, train_fraction=0.5)
    train, valid, test = parts(usual)
    assert parts(less) == [train[: len(train) // 2], valid, test]
    both = load(name, folder, first=40, split=(0.5, 0.25, 0.25), train_fraction=0.2)
    assert parts(both) == [whole[:4], whole[20:30], whole[30:40]]
    loaded = [usual, split, first, less, both]
    assert len({corpus.checksum for corpus in loaded}) == 5
    assert all(corpus.vocabulary == usual.vocabulary for corpus in loaded)
    assert load(name, folder, first=40).checksum == first.checksum
    with pytest.raises(ValueError, match=rf"at most the number of .*{n}\. Received: first={n + 1}"):
        load(name, folder, first=n + 1)


@pytest.mark.parametrize("name", ["text8", "enwik8", "war_and_peace"])
def test_the_usual_parts_by_other_words_are_the_usual_data(tiny, name):
    folder, contents = tiny
    options = {"split": LRU_SPLIT, "first": len(contents[name]), "train_fraction": 1}
    checksum = hashlib.sha256(contents[name].encode()).hexdigest()
    assert load(name, folder, **options).checksum == load(name, folder).checksum == checksum


def test_the_penn_treebank_of_the_lattice_recurrent_unit_paper(data_dir):
    published, joined = load("char_ptb", data_dir), load("char_ptb", data_dir, split=LRU_SPLIT)
    sizes = [len(getattr(joined, split)) for split in sources.SPLITS]
    assert sizes == [5_311_931, 295_108, 295_107]
    whole = np.concatenate([getattr(published, split) for split in sources.SPLITS])
    np.testing.assert_array_equal(joined.train, whole[: sizes[0]])
    np.testing.assert_array_equal(joined.test, whole[-sizes[2] :])


def test_options_of_a_text_by_words_count_words(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("one two three four\n" * 10)
    corpus = load("text", path=path, unit="word", first=20, split=(0.5, 0.25, 0.25))
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [10, 5, 5]
    by_characters = load("text", path=path)
    assert load("text", path=path, unit="word").checksum != by_characters.checksum
    # Of ASCII the bytes are the characters, but the vocabulary is another.
    assert load("text", path=path, unit="byte").checksum != by_characters.checksum


def test_pydoc_has_the_options():
    usual, small = load("pydoc"), load("pydoc", first=1_000, train_fraction=0.2)
    np.testing.assert_array_equal(small.train, usual.train[:180])
    assert (len(small.valid), len(small.test)) == (50, 50)


def test_symbols_that_the_training_part_lacks(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("aaaabbccdd")
    corpus = load("text", path=path, first=8, split=(0.5, 0.25, 0.25))
    assert parts(corpus) == ["aaaa", "bb", "cc"]
    assert corpus.vocabulary.tokens == ("a", "b", "c", "d")


def test_options_may_come_from_json(path):
    options = json.loads('{"split": [0.5, 0.25, 0.25], "first": 20, "train_fraction": 1}')
    assert parts(load("text", path=path, **options)) == [TEXT[:10], TEXT[10:15], TEXT[15:20]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": [0.9, 0.1]}, r"`split` must be three positive.*split=\(0.9, 0.1\)"),
        ({"split": [0.9, 0.2, 0.1]}, "add up to 1"),
        ({"split": [90, 5, 5]}, "add up to 1"),
        ({"split": [1.0, 0.0, 0.0]}, "positive"),
        ({"split": [float("nan")] * 3}, "positive"),
        ({"split": 0.9}, "split=0.9"),
        ({"split": "0.9"}, "split='0.9'"),
        ({"split": ["0.9", "0.05", "0.05"]}, "'0.05'"),
        ({"first": 0}, "`first` must be an integer >= 1. Received: first=0"),
        ({"first": 50.0}, "first=50.0"),
        ({"train_fraction": 0}, r"`train_fraction` must be a number in \(0, 1\].*_fraction=0"),
        ({"train_fraction": 1.5}, "train_fraction=1.5"),
        ({"train_fraction": 20}, "train_fraction=20"),
        ({"train_fraction": float("nan")}, "train_fraction=nan"),
        ({"train_fraction": True}, "train_fraction=True"),
        ({"train_fraction": "20%"}, "train_fraction='20%'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        Cut(**options)
    for name in (*CORPORA, "text", "pydoc"):
        path = {"path": "nowhere.txt"} if name == "text" else {}
        with pytest.raises(ValueError, match=message):
            load(name, "/nowhere", **path, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"first": 101}, "number of characters of .*my.txt, 100. Received: first=101"),
        ({"first": 30}, r"my.txt is too short to split.*: 30 characters, .*gives \[27, 2, 1\]"),
        ({"train_fraction": 0.01}, r"train_fraction=0.01, which gives \[1, 5, 5\]"),
        ({"split": (0.98, 0.01, 0.01)}, r"split=\(0.98, 0.01, 0.01\).*gives \[98, 1, 1\]"),
    ],
)
def test_parts_too_short_or_texts_too_short(path, options, message):
    with pytest.raises(ValueError, match=message):
        load("text", path=path, **options)
