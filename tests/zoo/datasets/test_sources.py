"""Local copies, and downloads: verified, whole or absent, by one process at a time."""

import concurrent.futures
import dataclasses
import errno
import gzip
import hashlib
import io
import multiprocessing
import os
import shutil
import time
import zipfile

import numpy as np
import pytest

from trellis_keras import files
from trellis_keras.files import read_blocks, read_file
from trellis_keras.zoo.datasets import load, music, sources, texts
from trellis_keras.zoo.datasets.sources import Download, Source

TEXTS = {
    "train": b" the cat sat \n the <unk> ran \n",
    "valid": b" the cat ran \n",
    "test": b" the <unk> sat \n",
}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with a small Penn Treebank."""
    monkeypatch.setitem(texts.SIZES, "ptb", (8, 4, 4, 6))
    (tmp_path / "ptb").mkdir()
    for split, content in TEXTS.items():
        (tmp_path / f"ptb/ptb.{split}.txt").write_bytes(content)
    return tmp_path


# Local copies


def test_compressed_and_plain_files_are_the_same(copy):
    plain = load("ptb", data_dir=copy)
    for path in list(copy.glob("ptb/*.txt")):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = load("ptb", data_dir=str(copy))
    assert plain.vocabulary.tokens == ("<eos>", "the", "<unk>", "cat", "ran", "sat")
    assert (packed.vocabulary, packed.checksum) == (plain.vocabulary, plain.checksum)
    np.testing.assert_array_equal(plain.train, packed.train)


def test_environment_variable_and_argument(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(copy.parent))
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, f"~/{copy.name}")
    assert len(load("ptb").train) == 8
    other = tmp_path / "other"
    with pytest.raises(FileNotFoundError, match="`data_dir` is not a folder. Received: .*other"):
        load("ptb", data_dir=other)
    other.mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"Neither .*other.*ptb\.train\.txt nor .*data_dir.*_DATA"
    ):
        load("ptb", data_dir=other)
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, str(other / "typo"))
    with pytest.raises(FileNotFoundError, match="TRELLIS_KERAS_DATA is not a folder.*typo"):
        load("ptb")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content[:-12], "is truncated"),
        (lambda content: b"no gzip" + content, "is not a valid gzip file"),
        (lambda content: content[:10] + b"\xff" * 20 + content[30:], "is not a valid gzip file"),
        (lambda content: gzip.compress(b""), "is empty"),
    ],
)
def test_damaged_gzip_files(tmp_path, change, message):
    path = tmp_path / "some.txt.gz"
    path.write_bytes(change(gzip.compress(bytes(range(128)) * 10)))
    with pytest.raises(ValueError, match=f"some.txt.gz {message}"):
        read_file(path)
    if message != "is empty":
        with pytest.raises(ValueError, match=f"some.txt.gz {message}"):
            list(read_blocks(path, ""))


def test_a_compressed_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"ab" * 50_000))
    assert len(read_file(path)) == 100_000
    monkeypatch.setattr(files, "MAX_UNPACKED", 1_000)
    with pytest.raises(ValueError, match="text.gz would unpack to more than .* bytes"):
        read_file(path)


# Downloads


@pytest.fixture
def site(tmp_path):
    """The folder of a web site without a server."""
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def zipped(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


MEMBERS = {f"data/{split}": content for split, content in TEXTS.items()}
FILES = {f"some/{split}.txt": f"data/{split}" for split in TEXTS}


def publish(site, content, checksum=None):
    """Puts an archive on the site, and returns the data set's `Source`."""
    path = site / "some.zip"
    path.write_bytes(content)
    checksum = checksum or hashlib.sha256(content).hexdigest()
    return Source(tuple(FILES), (Download(path.as_uri(), FILES, checksum),))


def contents(paths):
    return [path.read_bytes() for path in paths]


def test_download_verify_cache(site, cache, capsys, monkeypatch):
    source = publish(site, zipped(MEMBERS | {"README": b"passed over"}))
    assert contents(source.find(None)) == list(TEXTS.values())
    (site / "some.zip").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(sources, "locked", None)  # as in a read-only folder
        assert contents(source.find(None)) == list(TEXTS.values())
    files = {path.name for path in cache.rglob("*") if path.is_file()}
    assert files - {".lock"} == {"train.txt", "valid.txt", "test.txt"}
    assert capsys.readouterr().out == "", "stdout is for commands that print JSON"


def test_another_file_is_refused_and_not_kept(site, cache):
    source = publish(site, zipped(MEMBERS), checksum="0" * 64)
    with pytest.raises(ValueError, match="some.zip is not the published file: .*data_dir"):
        source.find(None)
    assert {path.name for path in cache.rglob("*") if path.is_file()} == {".lock"}
    assert contents(publish(site, zipped(MEMBERS)).find(None)) == list(TEXTS.values())


def test_a_page_in_place_of_war_and_peace_is_not_kept(site, cache):
    (download,) = texts.WAR_AND_PEACE.downloads
    text = b"\xef\xbb\xbfWell, Prince\r\n"
    path, checksum = site / "novel.txt", hashlib.sha256(b"Well, Prince").hexdigest()
    own = dataclasses.replace(download, url=path.as_uri(), checksum=checksum)
    source = Source(texts.WAR_AND_PEACE.paths, (own,))
    path.write_bytes(b"<html>Try again later.</html>")
    with pytest.raises(ValueError, match="novel.txt is not the published file"):
        source.find(None)
    path.write_bytes(text)
    assert contents(source.find(None)) == [text]


def test_failed_download_points_to_local_copies(site):
    source = publish(site, b"")
    (site / "some.zip").unlink()
    with pytest.raises(OSError, match="Could not download .*some.zip .*`data_dir`.*KERAS_DATA"):
        source.find(None)


def test_a_full_disk_is_not_blamed_on_the_archive(site, cache, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = publish(site, zipped(MEMBERS))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="some/.*.txt could not be written: No space left"):
            source.find(None)
    assert not list(cache.rglob("*.txt"))
    assert contents(source.find(None)) == list(TEXTS.values())


def stop_while_unpacking(url, stopped):
    copy = shutil.copyfileobj

    def stop(content, file):
        copy(content, file)
        if "train" in file.name:
            file.flush()
            stopped.set()
            time.sleep(600)

    shutil.copyfileobj = stop
    Download(url, FILES, None).fetch(sources.cache_folder())


def test_a_killed_process_leaves_no_file_and_no_lock(site, cache):
    source = publish(site, zipped(MEMBERS))
    fork = multiprocessing.get_context("fork")
    arguments = (site / "some.zip").as_uri(), (stopped := fork.Event())
    child = fork.Process(target=stop_while_unpacking, args=arguments)
    child.start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            assert stopped.wait(60)
            assert list(cache.rglob("downloading/some.zip")), "half of the work"
            assert not list(cache.rglob("train.txt"))
            waiting = pool.submit(source.find, None)
            with pytest.raises(concurrent.futures.TimeoutError):
                waiting.result(timeout=0.3)
        finally:
            child.kill()
        assert contents(waiting.result()) == list(TEXTS.values())
    assert not [path for path in cache.rglob("*") if path.name.startswith((".writing", "down"))]


def test_downloads_are_the_published_files():
    """By addresses of which nobody on the way can change the answer, and SHA-256."""
    of_texts = (texts.PTB, texts.WIKITEXT2, texts.WIKITEXT103, texts.TEXT8, texts.ENWIK8)
    for source in (*of_texts, texts.WAR_AND_PEACE, music.JSB, music.NOTTINGHAM):
        for download in source.downloads:
            assert download.url.startswith("https://")
            assert len(download.checksum) == 64
        provided = [path for download in source.downloads for path in download.files]
        firsts = [path if isinstance(path, str) else path[0] for path in source.paths]
        assert sorted(provided) == sorted(firsts)


def test_data_sets_of_tensorflow_datasets_come_as_arrays(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    made = tfds.testing.DummyMnist(data_dir=tmp_path)
    monkeypatch.setattr(tfds, "builder", lambda name: {"mnist": made}[name])
    # Nobody listens there; with a connection, tensorflow-datasets would download.
    monkeypatch.setitem(sources._SERVERS, "mnist", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="tensorflow-datasets' 'mnist' .*refused.*TRELLIS_KERAS_DATA"):
        sources.read_tfds("mnist")
    assert not list(tmp_path.iterdir())
    made.download_and_prepare()
    arrays = sources.read_tfds("mnist")
    assert set(arrays) == {"train", "test"}
    images, labels = arrays["train"]["image"], arrays["train"]["label"]
    assert (images.shape, images.dtype) == ((20, 28, 28, 1), "uint8")
    assert sorted(labels) == sorted([*range(10)] * 2)
    with pytest.raises(OSError, match="tensorflow-datasets' 'cifar10' .*TRELLIS_KERAS_DATA"):
        sources.read_tfds("cifar10")
