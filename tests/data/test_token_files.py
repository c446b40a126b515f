"""Texts that are too large for memory: their words numbered in a stream, by one process, once."""

import contextlib
import errno
import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.processes import ROOT, child_environment, script_command
from trellis_keras.data import TokenStream, Vocabulary, sources, token_files
from trellis_keras.data.sources import LargeSource
from trellis_keras.data.token_files import word_ids

TEXT = " = Katze = \n die <unk> Katze saß \n\n auf der Matte , auf der \n die"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder that the ids are kept in."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "stored"))
    return token_files.cache_folder()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tokens"
    path.write_text(TEXT, encoding="utf-8")
    return path


def number(path, check=lambda tokens, words: None):
    source = LargeSource(path)
    return word_ids(source, sources.checksum(block for block, _ in source.blocks()), check)


def check_ids(ids, words, text):
    vocabulary = Vocabulary.from_text(text, "word")
    assert words == list(vocabulary.tokens)
    assert isinstance(ids, np.memmap) and ids.dtype == np.int32 and not ids.flags.writeable
    np.testing.assert_array_equal(ids, vocabulary.encode(text))


@settings(max_examples=40, deadline=None)
@given(
    # Of several bytes, and white space that is no place to cut at.
    text=st.text("abéß \n\t\r\u00a0\u2028\x85", min_size=1, max_size=60).map(lambda t: t + "a"),
    ending=st.sampled_from(["", " ", "\n", "\n \n", "\u00a0"]),
    block=st.integers(1, 20),
)
def test_ids_are_those_of_the_whole_text(text, ending, block):
    text += ending
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", folder)
        patch.setattr(sources, "_BLOCK", block)
        path = pathlib.Path(folder, "text")
        path.write_bytes(text.encode())
        check_ids(*number(path), text)


def test_compressed_text(path, cache):
    compressed = path.with_name("b.tokens.gz")
    compressed.write_bytes(gzip.compress(TEXT.encode()))
    check_ids(*number(compressed), TEXT)
    check_ids(*number(path), TEXT)
    assert len(list(cache.iterdir())) == 1, "the same text, the same ids"


def test_real_text(local_data):
    path = local_data("wikitext2") / "wikitext2/wiki.valid.tokens.gz"
    if not path.exists():
        path = path.with_suffix("")
    check_ids(*number(path), sources.read_file(path).content.decode())


def test_ids_are_made_once(path, monkeypatch):
    number(path)
    monkeypatch.setattr(token_files, "_number", None)
    check_ids(*number(path), TEXT)
    path.write_text("another text")
    with pytest.raises(TypeError):
        number(path)


def test_memory_is_that_of_a_block(tmp_path, monkeypatch):
    path = tmp_path / "long.tokens"
    path.write_text("one line of very many words " * 30_000)  # 0.8 MB
    monkeypatch.setattr(sources, "_BLOCK", 2**12)
    with _allocations() as peak:
        ids, _ = number(path)
    assert len(ids) == 180_001
    assert peak() < 2**18


def test_streams_read_the_file_without_a_copy(tmp_path):
    path = tmp_path / "long.tokens"
    path.write_text("some words and \n" * 100_000)
    ids, words = number(path)
    options = dict(batch_size=4, sequence_length=10, context_length=3)
    with _allocations() as peak:
        stream = TokenStream(ids, **options)
        assert stream.token_range == (0, 3)
        batches = [stream[i] for i in (0, 7, len(stream) - 1)]
    assert peak() < ids.nbytes / 8
    stream = TokenStream(np.array(ids), **options)
    for batch, i in zip(batches, (0, 7, len(stream) - 1), strict=True):
        for found, expected in zip(batch, stream[i], strict=True):
            np.testing.assert_array_equal(found, expected)


@contextlib.contextmanager
def _allocations():
    """Yields a function that tells how many bytes were held at most."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Numbers a text, but stops in the middle of writing the ids.
_STOPS = """
import pathlib, sys
from trellis_keras.data import sources, token_files
sources._BLOCK = 8
encode, pieces = token_files.Vocabulary.encode, []
def slow(vocabulary, text, final_eos):
    pieces.append(text)
    if len(pieces) == 4:
        print("in the middle", flush=True)
        sys.stdin.read()
    return encode(vocabulary, text, final_eos)
token_files.Vocabulary.encode = slow
token_files.word_ids(sources.LargeSource(pathlib.Path(sys.argv[1])), "0", print)
"""


def test_a_killed_process_leaves_no_trace(path, cache):
    command, environment = script_command(_STOPS, path, backend="jax")
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline().split() == ["19", "10"]
        assert child.stdout.readline() == "in the middle\n"
        folder = cache / "words-0"
        assert [file.name for file in folder.glob(".writing-*")], "a half-written file"
        assert not (folder / "ids.npy").exists()
        # It waits for the other process as long as that lives.
        found = []
        waiting = threading.Thread(
            target=lambda: found.extend(word_ids(LargeSource(path), "0", lambda *_: None))
        )
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        child.kill()
        waiting.join()
    check_ids(*found, TEXT)
    assert not list(folder.glob(".writing-*"))


def test_of_two_at_the_same_time_one_does_the_work(path):
    both, worked, found = threading.Barrier(2), [], []

    def work():
        both.wait()
        found.append(word_ids(LargeSource(path), "0", lambda *_: worked.append(1)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worked == [1]
    for ids, words in found:
        check_ids(ids, words, TEXT)


def test_checked_before_ids_are_written(path, cache):
    def check(tokens, words):
        raise ValueError(f"{tokens} tokens, {words} words")

    with pytest.raises(ValueError, match="^19 tokens, 10 words"):
        number(path, check)
    assert not list(cache.rglob("ids.npy")) and not list(cache.rglob("words.txt"))
    check_ids(*number(path), TEXT)


def test_a_text_that_changes_meanwhile(path, cache):
    def change(tokens, words):
        path.write_text(f"{TEXT} die\n", encoding="utf-8")

    with pytest.raises(ValueError, match="a.tokens has changed while it was read"):
        number(path, change)
    assert not list(cache.rglob("ids.npy"))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a", b"", "has no words"),
        ("a", b" " * 9, "has no words"),
        ("a", b"ab cd \xff e", "not UTF-8 text: the byte 0xff at offset 6 cannot"),
        ("a.gz", gzip.compress(b"one two" * 9)[:-9], "is truncated"),
        ("a.gz", b"no gzip", "not a sound gzip file"),
    ],
)
def test_bad_files(tmp_path, cache, monkeypatch, name, content, message):
    monkeypatch.setattr(sources, "_BLOCK", 4)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        word_ids(LargeSource(tmp_path / name), "0", lambda *_: None)
    assert not list(cache.rglob("ids.npy"))


def test_where_nothing_can_be_stored(path, cache, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="a.tokens .*words-.*No space left .*TFDS_DATA_DIR"):
            number(path)
    check_ids(*number(path), TEXT)
    monkeypatch.setenv("TFDS_DATA_DIR", str(path))  # a file, no folder
    with pytest.raises(OSError, match="a.tokens .*TFDS_DATA_DIR"):
        number(path)


def test_progress_is_shown_on_a_terminal_only(path, monkeypatch, capsys):
    word_ids(LargeSource(path), "0", lambda *_: None)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    word_ids(LargeSource(path), "1", lambda *_: None)
    shown = capsys.readouterr().out
    assert "numbering the words of" in shown and "1/1" in shown


def test_the_benchmark_measures_a_random_text(tmp_path):
    command = [sys.executable, "-m", "benchmarks.wikitext103_ids", "--folder", tmp_path]
    done = subprocess.run(
        [*command, "--tokens", "20000", "--words", "300"],
        cwd=ROOT,
        env=child_environment("jax"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens"] == 20_000 and 250 < figures["distinct_words"] <= 301
    assert figures["peak_gib"] >= figures["peak_gib_before"] > 0
    assert not list(tmp_path.iterdir())


def test_a_text_without_any_space_is_refused(tmp_path, monkeypatch):
    """What has no end has to be in memory as a whole."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "stored"))
    monkeypatch.setattr(sources, "_BLOCK", 100)
    monkeypatch.setattr(token_files, "_LONGEST_WORD", 1_000)
    path = tmp_path / "text"
    path.write_bytes(b"a" * 10_000)
    with pytest.raises(ValueError, match="text is no text of words: it has 1,000 bytes without"):
        word_ids(LargeSource(path), "0", lambda tokens, words: None)
