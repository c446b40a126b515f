"""Texts that exceed the memory: words are encoded line by line, by one process, once."""

import concurrent.futures
import errno
import gzip
import hashlib
import os
import pathlib
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis_keras import files
from trellis_keras.data import TokenStream, Vocabulary
from trellis_keras.zoo.datasets import texts
from trellis_keras.zoo.datasets.texts import word_ids

TEXT = " = Katze = \n die <unk> Katze saß \n\n auf der Matte , auf der \n die"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tokens"
    path.write_text(TEXT, encoding="utf-8")
    return path


def encode(path):
    digest = hashlib.sha256(b"".join(files.read_blocks(path, ""))).hexdigest()
    return word_ids(path, digest)


def check_ids(ids, words, content):
    vocabulary = Vocabulary.from_text(content, "word")
    assert words == list(vocabulary.tokens)
    assert isinstance(ids, np.memmap) and ids.dtype == np.int32 and not ids.flags.writeable
    np.testing.assert_array_equal(ids, vocabulary.encode(content))


@settings(max_examples=40, deadline=None)
@given(
    # Characters of several bytes, and white space that is not a place to cut at.
    content=st.text("abéß \n\t\r\u00a0\u2028\x85", min_size=1, max_size=60).map(lambda t: t + "a"),
    ending=st.sampled_from(["", " ", "\n", "\n \n", "\u00a0"]),
    block=st.integers(1, 20),
)
def test_ids_are_those_of_the_whole_text(content, ending, block):
    content += ending
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_HOME", folder)
        patch.setattr(files, "_BLOCK", block)
        path = pathlib.Path(folder, "text")
        path.write_bytes(content.encode())
        check_ids(*encode(path), content)


def test_neither_text_nor_ids_are_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "long.tokens"
    path.write_text("some words and \n" * 100_000)
    monkeypatch.setattr(files, "_BLOCK", 2**12)
    tracemalloc.start()
    try:
        ids, _ = word_ids(path, "0")
        stream = TokenStream(ids, batch_size=4, sequence_length=10, context_length=3)
        assert stream.token_range == (0, 3)
        assert [stream[i][0].shape for i in (0, 7, len(stream) - 1)] == [(4, 10)] * 3
        assert tracemalloc.get_traced_memory()[1] < ids.nbytes / 5
    finally:
        tracemalloc.stop()


def test_of_two_at_the_same_time_one_does_the_work(path, monkeypatch):
    worked, write = [], texts._write_word_ids
    monkeypatch.setattr(texts, "_write_word_ids", lambda *args: worked.append(write(*args)))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for found in [pool.submit(word_ids, path, "0") for _ in range(2)]:
            check_ids(*found.result(), TEXT)
    assert len(worked) == 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a", b"", "has no words"),
        ("a", b" " * 9, "has no words"),
        ("a", b"ab cd \xff e", "not UTF-8 text: the byte 0xff at offset 6 cannot"),
        ("a.gz", gzip.compress(b"one two" * 9, mtime=0)[:-9], "is truncated"),
        ("a.gz", b"no gzip", "not a valid gzip file"),
        ("a", b"a" * 90, "a is not word-level text"),
    ],
)
def test_bad_files(tmp_path, cache, monkeypatch, name, content, message):
    monkeypatch.setattr(files, "_BLOCK", 4)
    monkeypatch.setattr(texts, "_MAX_LINE", 80)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        word_ids(tmp_path / name, "0")
    assert not list(cache.rglob("ids.npy"))


def test_where_nothing_can_be_stored(path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="a.tokens .*words-.*No space left .*KERAS_HOME"):
            encode(path)
    check_ids(*encode(path), TEXT)
    monkeypatch.setenv("KERAS_HOME", str(path))  # a file
    with pytest.raises(OSError, match="a.tokens .*KERAS_HOME"):
        encode(path)
