import contextlib
import gzip
import hashlib
import pathlib
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras import files
from trellis_keras.data import Vocabulary
from trellis_keras.zoo.datasets import last_word_examples, load, texts
from trellis_keras.zoo.datasets.registry import SPLITS

WHOLE = "abcdefghij" * 10
LRU_SPLIT = [0.9, 0.05, 0.05]


def parts(dataset):
    return [dataset.vocabulary.decode(getattr(dataset, split)) for split in SPLITS]


def write(folder, source, *contents):
    for path, content in zip(source.paths, contents, strict=True):
        path = folder / (path if isinstance(path, str) else path[0])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


# The published files


@pytest.mark.parametrize(
    "name, folder, sizes, vocabulary_size, checksum",
    [
        ("ptb", "ptb", [929_589, 73_760, 82_430], 10_000, "0b6c7d63ba3b5066"),
        ("char_ptb", "ptb", [5_059_550, 396_412, 446_184], 50, "0b6c7d63ba3b5066"),
        ("wt2", "wikitext2", [2_088_628, 217_646, 245_569], 33_278, "e1752075abd6c0b5"),
        ("war_and_peace", "war_and_peace", [2_876_590, 159_810, 159_811], 82, "b0fc81c399971eaf"),
    ],
)
def test_real_texts(real_data, name, folder, sizes, vocabulary_size, checksum):
    dataset = load(name, data_dir=real_data(folder))
    assert list(dataset.sizes.values()) == sizes
    assert len(dataset.vocabulary) == vocabulary_size
    assert dataset.checksum.startswith(checksum)
    assert {getattr(dataset, split).dtype for split in SPLITS} == {np.dtype("int32")}
    start = {
        "ptb": "aer banknote berlitz calloway",
        "char_ptb": "aer banknote berlitz calloway",
        "wt2": "\n= ",
        "war_and_peace": '"Well, Prince, so Genoa and Lucca',
    }[name]
    assert dataset.vocabulary.decode(dataset.train[:100]).startswith(start)
    if dataset.vocabulary.unit == "word":  # the order of frequency: the counts never rise
        assert np.all(np.diff(np.bincount(dataset.train)) <= 0)


def test_penn_treebank_of_the_lattice_recurrent_unit_paper(real_data):
    folder = real_data("ptb")
    published, joined = load("char_ptb", folder), load("char_ptb", folder, split=LRU_SPLIT)
    assert list(joined.sizes.values()) == [5_311_931, 295_108, 295_107]
    whole = np.concatenate([getattr(published, split) for split in SPLITS])
    np.testing.assert_array_equal(joined.train, whole[:5_311_931])
    np.testing.assert_array_equal(joined.test, whole[-295_107:])
    # Zoo runs depend on it.
    assert joined.checksum.startswith("de5c82b896007878")
    alone = load("char_ptb", folder, split=LRU_SPLIT, files="train")
    assert list(alone.sizes.values()) == [4_553_595, 252_977, 252_978]
    np.testing.assert_array_equal(alone.test, published.train[-252_978:])


def small_texts(folder, monkeypatch):
    """Writes small texts in the layout of the published ones, and sets the sizes to match."""
    ptb = [" the cat sat \n the <unk> ran \n", " the cat ran \n", " the <unk> sat \n"]
    write(folder, texts.PTB, *ptb)
    monkeypatch.setitem(texts.SIZES, "ptb", (8, 4, 4, 6))
    monkeypatch.setitem(texts.SIZES, "char_ptb", (28, 13, 15, 14))
    for name in ("text8", "enwik8", "war_and_peace"):
        write(folder, getattr(texts, name.upper()), WHOLE)
        monkeypatch.setitem(texts.SIZES, name, (90, 5, 5, 10))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    small_texts(tmp_path, monkeypatch)
    return tmp_path


def test_sizes_are_checked(tiny, monkeypatch):
    monkeypatch.setitem(texts.SIZES, "char_ptb", (28, 13, 15, 50))
    with pytest.raises(ValueError, match=r"ptb\.train\.txt is not .*: expected 50 .*, found 14"):
        load("char_ptb", tiny)
    path = tiny / "ptb/ptb.valid.txt"
    path.write_bytes(path.read_bytes() + b" the \n")
    with pytest.raises(ValueError, match=r"ptb\.valid\.txt.*expected 4 words, found 6"):
        load("ptb", tiny)


@pytest.mark.parametrize(
    "path",
    [
        "wikitext2/wiki.train.tokens",
        "wikitext2/wiki.train.articles_reordered.tokens",
        "wikitext-2/wiki.train.tokens",
    ],
)
def test_wikitext_by_words(tmp_path, monkeypatch, path):
    contents = [" \n = Cat = \n the <unk> sat \n", " the cat = \n", " = sat = \n"]
    write(tmp_path, texts.WIKITEXT2, *contents)
    monkeypatch.setitem(texts.SIZES, "wt2", (9, 4, 4, 6))
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / "wikitext2/wiki.train.tokens").rename(tmp_path / path)
    told = pytest.warns(UserWarning, match="in another order")
    with told if "reordered" in path else contextlib.nullcontext():
        dataset = load("wt2", tmp_path)
    assert parts(dataset) == ["\n= Cat =\nthe <unk> sat\n", "the <unk> =\n", "= sat =\n"]
    assert dataset.vocabulary == Vocabulary.from_text(contents[0], "word", unknown="<unk>")
    assert dataset.train.dtype == np.int32
    assert dataset.checksum == hashlib.sha256("".join(contents).encode()).hexdigest()


def test_enwik8_by_bytes(tmp_path, monkeypatch):
    content = b"<a>\xc3\xa4\xff\x00 cat sat on "
    write(tmp_path, texts.ENWIK8, content)
    monkeypatch.setitem(texts.SIZES, "enwik8", (11, 4, 4, 13))
    dataset = load("enwik8", tmp_path)
    ids = np.concatenate([getattr(dataset, split) for split in SPLITS])
    assert bytes(ord(dataset.vocabulary.tokens[i]) for i in ids) == content
    assert dataset.checksum == hashlib.sha256(content).hexdigest()
    write(tmp_path, texts.ENWIK8, content[:-2])
    message = r"expected 19 bytes, found 17.*another text.*load\(\"text\", .*unit=\"byte\"\)"
    with pytest.raises(ValueError, match=message):
        load("enwik8", tmp_path)
    # What the message advises.
    path = tmp_path / "enwik8/enwik8"
    assert load("text", path=path, unit="byte", split=(0.6, 0.2, 0.2)).sizes["train"] == 10
    write(tmp_path, texts.ENWIK8, content.replace(b"\xff", b"\x00"))
    with pytest.raises(ValueError, match="expected 13 distinct bytes, found 12"):
        load("enwik8", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: "\ufeff" + text.replace("\n", "\r\n") + "\r\n\r\n",
        lambda text: text.replace("\n", " \n") + " ",
    ],
    ids=["plain", "char-rnn", "spaces"],
)
def test_copies_of_war_and_peace_give_the_same_text(tmp_path, monkeypatch, change):
    novel = "Well,\n\nPrince, émigrés"
    write(tmp_path, texts.WAR_AND_PEACE, change(novel))
    monkeypatch.setitem(texts.SIZES, "war_and_peace", (14, 4, 4, 15))
    dataset = load("war_and_peace", data_dir=tmp_path)
    assert parts(dataset) == [novel[:14], novel[14:18], novel[18:]]
    assert dataset.checksum == hashlib.sha256(novel.encode()).hexdigest()


# The options `split`, `first` and `train_fraction`

CUT = ["char_ptb", "text8", "enwik8", "war_and_peace"]


@pytest.mark.parametrize("name", CUT)
def test_the_same_options_of_every_text(tiny, name):
    usual = load(name, tiny)
    whole = WHOLE
    if name == "char_ptb":
        whole = "the cat sat \nthe <unk> ran \nthe cat ran \nthe <unk> sat \n"
    assert "".join(parts(usual)) == whole
    n = len(whole)
    split = load(name, tiny, split=[0.5, 0.3, 0.2])
    ends = [0, n // 2, round(n * 0.8), n]
    assert parts(split) == [whole[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    first = load(name, tiny, first=40)
    assert parts(first) == [whole[:36], whole[36:38], whole[38:40]]
    less = load(name, tiny, train_fraction=0.5)
    train, valid, test = parts(usual)
    assert parts(less) == [train[: len(train) // 2], valid, test]
    both = load(name, tiny, first=40, split=(0.5, 0.25, 0.25), train_fraction=0.2)
    assert parts(both) == [whole[:4], whole[20:30], whole[30:40]]
    loaded = [usual, split, first, less, both]
    assert len({dataset.checksum for dataset in loaded}) == 5
    assert all(dataset.vocabulary == usual.vocabulary for dataset in loaded)
    if name != "char_ptb":  # options that change nothing
        whole = load(name, tiny, split=LRU_SPLIT, first=n, train_fraction=1)
        assert whole.checksum == usual.checksum == hashlib.sha256(WHOLE.encode()).hexdigest()
    with pytest.raises(ValueError, match=rf"at most the number of .*{n}\. Received: first={n + 1}"):
        load(name, tiny, first=n + 1)


def test_the_training_file_of_penn_treebank_alone(tiny):
    joined = load("char_ptb", tiny, split=LRU_SPLIT)
    alone = load("char_ptb", tiny, split=[0.5, 0.3, 0.2], files="train")
    assert "".join(parts(alone)) == "the cat sat \nthe <unk> ran \n"
    assert alone.vocabulary == joined.vocabulary and alone.checksum != joined.checksum
    with pytest.raises(ValueError, match="files='train' needs `split`"):
        load("char_ptb", tiny, files="train")
    with pytest.raises(ValueError, match="`files` must be"):
        load("char_ptb", tiny, files="test")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": [0.9, 0.1]}, r"`split` must be three positive.*split=\[0.9, 0.1\]"),
        ({"split": [0.9, 0.2, 0.1]}, "sum to 1"),
        ({"split": [1.0, 0.1, -0.1]}, "positive"),
        ({"split": 0.9}, "split=0.9"),
        ({"first": 0}, "`first` must be a positive integer. Received: first=0"),
        ({"train_fraction": 0}, r"`train_fraction` must be a number in \(0, 1\].*_fraction=0"),
        ({"train_fraction": 1.5}, "train_fraction=1.5"),
        ({"train_fraction": "20%"}, "train_fraction='20%'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, message):
    for name in (*CUT, "text", "pydoc"):
        path = {"path": "nowhere.txt"} if name == "text" else {}
        with pytest.raises(ValueError, match=message):
            load(name, "/nowhere", **path, **options)


# A user's own text


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text(WHOLE)
    return path


def test_own_text_by_characters(path):
    content = "Grüße an\r\nalle. " * 20
    path.write_bytes(content.encode())
    dataset = load("text", path=path)
    assert list(dataset.sizes.values()) == [288, 16, 16]
    assert "".join(parts(dataset)) == content
    assert dataset.checksum == hashlib.sha256(content.encode()).hexdigest()
    moved = load("text", data_dir=path.parent, path="elsewhere/my.txt")
    assert moved.checksum == dataset.checksum


def test_own_text_by_words(path):
    path.write_text("b a a\n" * 10)
    dataset = load("text", path=str(path), unit="word", first=20, split=(0.6, 0.2, 0.2))
    assert dataset.vocabulary.tokens == ("a", "<eos>", "b")
    assert parts(dataset) == ["b a a\nb a a\nb a a\n", "b a a\n", "b a a\n"]


@pytest.mark.parametrize(("word", "place"), [("<unk>", 3), ("b", 2)])
def test_an_unknown_word_for_other_texts(path, word, place):
    path.write_text("b a a\n" * 10)
    vocabulary = load("text", path=path, unit="word", unknown=word).vocabulary
    assert vocabulary.tokens[place] == word
    assert vocabulary.encode("a dog", final_eos=False).tolist() == [0, place]


@pytest.mark.parametrize(
    "content, options, error, message",
    [
        (None, {}, FileNotFoundError, "There is no file .*my.txt. Check its name; if it has moved"),
        (b"", {}, ValueError, "my.txt is empty"),
        (b"abc\xff" * 90, {}, ValueError, 'my.txt is not UTF-8.*0xff at offset 3.*unit="byte"'),
        (b"  ", {"unit": "word"}, ValueError, "my.txt has no words"),
        (b"abc" * 90, {"unit": "letter"}, ValueError, "`unit`"),
        (b"abc" * 90, {"unknown": "?"}, ValueError, '`unknown` must be .* unit="word"'),
        (WHOLE.encode(), {"first": 101}, ValueError, "characters of .*my.txt, 100. .*first=101"),
        (WHOLE.encode(), {"first": 30}, ValueError, r"my.txt is too short .*gives \[27, 2, 1\]"),
        (WHOLE.encode(), {"train_fraction": 0.01}, ValueError, r"=0.01, which gives \[1, 5, 5\]"),
    ],
)
def test_bad_texts(path, content, options, error, message):
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        load("text", path=path, **options)


# LAMBADA

KNOWING = Vocabulary(("<eos>", "<unk>", "the", "cat", "sat", "on", "mat"), unknown="<unk>")
PASSAGES = ("the cat sat on the mat", "the dog sat", "the cat dog", "on the mat")


def test_real_passages(real_data):
    dataset = load("lambada", data_dir=real_data("lambada"))
    assert dataset.sizes == {"train": 0, "valid": 4_869, "test": 5_153}
    assert sum(len(passage.split()) for passage in dataset.valid) == 360_944
    assert sum(len(passage.split()) for passage in dataset.test) == 379_883
    assert dataset.checksum.startswith("26df3874fc09b309")
    vocabulary = Vocabulary.from_text("\n".join(dataset.test), "word")
    x, y, weight = last_word_examples(dataset.test[:64], vocabulary)
    for b, passage in enumerate(dataset.test[:64]):
        (place,) = np.flatnonzero(weight[b])
        words = vocabulary.decode(x[b, : place + 1]).split()
        assert [*words, vocabulary.tokens[y[b, place]]] == passage.split()


def test_last_words_from_the_words_before():
    x, y, weight = last_word_examples(PASSAGES, KNOWING)
    # The last word of the third passage is unknown: it is left out.
    np.testing.assert_array_equal(x, [[2, 3, 4, 5, 2], [2, 1, 0, 0, 0], [5, 2, 0, 0, 0]])
    np.testing.assert_array_equal(weight, np.eye(5)[[4, 1, 1]])
    np.testing.assert_array_equal(y[weight == 1], [6, 4, 6])
    assert (x.dtype, y.dtype, weight.dtype) == ("int32", "int32", "float32")


def test_original_examples_read_the_target():
    x, y, weight = last_word_examples(PASSAGES, KNOWING, original=True)
    rows = [[2, 3, 4, 5, 2, 6], [0, 0, 0, 0, 2, 4], [0, 0, 0, 0, 2, 3], [0, 0, 0, 5, 2, 6]]
    np.testing.assert_array_equal(x, rows)
    np.testing.assert_array_equal(y[:, -1], x[:, -1])
    np.testing.assert_array_equal(weight, np.eye(6)[[5] * 4])
    with pytest.raises(ValueError, match="unknown to the vocabulary.*'dog'"):
        last_word_examples(PASSAGES, Vocabulary(KNOWING.tokens))
    with pytest.raises(ValueError, match="No passage remains"):
        last_word_examples(["mat", "a dog"], KNOWING)


def test_passages_of_a_local_copy_and_of_tensorflow_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LAMBADA_PASSAGES", (2, 2))
    halves = PASSAGES[:2], PASSAGES[2:]
    write(tmp_path, texts.LAMBADA, *("".join(f"{p} \n" for p in half) for half in halves))
    local = load("lambada", data_dir=tmp_path)
    assert (local.valid, local.test) == (list(halves[0]), list(halves[1]))
    arrays = {
        split: {"passage": np.array([p.encode() for p in reversed(half)], dtype=object)}
        for split, half in zip(("train", "test"), halves, strict=True)
    }
    monkeypatch.setattr(texts, "read_tfds", lambda name: {"lambada": arrays}[name])
    assert load("lambada").checksum == local.checksum
    monkeypatch.setattr(texts, "LAMBADA_PASSAGES", (3, 2))
    with pytest.raises(ValueError, match="development_plain.*expected 3 passages, found 2"):
        load("lambada", data_dir=tmp_path)


# Line by line


@settings(max_examples=40, deadline=None)
@given(
    # Characters of several bytes, and white space at which no line ends.
    content=st.text("abéß \n\t\r\u00a0\u2028\x85", min_size=1, max_size=60),
    block=st.integers(1, 20),
)
def test_large_texts_are_encoded_by_lines(content, block):
    content += "a\n \n"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK", block)
        path = pathlib.Path(folder, "text")
        for text in (content, content.rstrip()):
            path.write_bytes(text.encode())
            vocabulary = Vocabulary.from_text(text, "word")
            ids = [vocabulary.encode(lines, False) for lines in texts._lines(path, None)]
            np.testing.assert_array_equal(np.concatenate(ids), vocabulary.encode(text))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a", b"ab\ncd \xff e", "/a is not UTF-8 text: .* 0xff"),
        ("a.gz", gzip.compress(b"one two" * 9, mtime=0)[:-9], "^[^:]*/a.gz is truncated"),
        ("a", b"a" * 90, "/a is not word-level text: 80 characters without a newline"),
    ],
)
def test_large_texts_that_are_refused(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(files, "_BLOCK", 4)
    monkeypatch.setattr(texts, "_MAX_LINE", 80)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(texts._lines(tmp_path / name, None))
