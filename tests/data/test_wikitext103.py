"""WikiText-103: from local copies and by its builder."""

import gzip
import hashlib
import shutil
import zipfile

import numpy as np
import pytest

from trellis_keras.data import Vocabulary, corpora, load, sources

TEXTS = {
    "train": " \n = Cat = \n the <unk> sat , the <unk> \n",
    "valid": " the dog = \n",
    "test": " = sat = \n",
}


@pytest.fixture(autouse=True)
def tiny_sizes(tmp_path, monkeypatch):
    words = {"train": 12, "valid": 4, "test": 4, "vocabulary": 7}
    monkeypatch.setattr(corpora, "WIKITEXT103_WORDS", words)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "stored"))
    monkeypatch.delenv(sources.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def local_copy(tmp_path):
    folder = tmp_path / "wikitext103"
    folder.mkdir()
    for split, text in TEXTS.items():
        (folder / f"wiki.{split}.tokens").write_bytes(text.encode())
    return folder


def test_ids_are_those_of_the_whole_text(tmp_path, local_copy):
    corpus = load("wt103", data_dir=tmp_path)
    assert corpus.vocabulary == Vocabulary.from_text(TEXTS["train"], "word", unknown="<unk>")
    assert isinstance(corpus.train, np.memmap)
    for split, text in TEXTS.items():
        ids = getattr(corpus, split)
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, corpus.vocabulary.encode(text))
    assert corpus.vocabulary.decode(corpus.valid) == "the <unk> =\n"
    assert corpus.checksum == hashlib.sha256("".join(TEXTS.values()).encode()).hexdigest()


def test_compressed_and_in_the_folder_of_the_archive(tmp_path, local_copy):
    expected = load("wt103", data_dir=tmp_path).checksum
    path = local_copy / "wiki.train.tokens"
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    local_copy.rename(tmp_path / "wikitext-103")
    assert load("wt103", data_dir=tmp_path).checksum == expected


@pytest.mark.parametrize(
    "split, change, message",
    [
        ("train", lambda text: text + " the \n", "expected 12 words, found 14"),
        ("train", lambda text: text.replace(",", "sat"), "expected 7 distinct words, found 6"),
        ("valid", lambda text: text + "\n", "expected 4 words, found 5"),
    ],
)
def test_other_files_name_expected_and_found(tmp_path, local_copy, split, change, message):
    path = local_copy / f"wiki.{split}.tokens"
    path.write_text(change(TEXTS[split]))
    with pytest.raises(ValueError, match=f"wiki.{split}.tokens is not the pub.*: {message}"):
        load("wt103", data_dir=tmp_path)


def test_missing_files(tmp_path, local_copy):
    (local_copy / "wiki.test.tokens").unlink()
    with pytest.raises(FileNotFoundError, match="wikitext103/wiki.test.tokens nor .*data_dir"):
        load("wt103", data_dir=tmp_path)
    assert not (tmp_path / "stored").exists(), "nothing was begun"


def test_the_archive_is_unpacked_to_files(tmp_path, web_site, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    from trellis_keras.data import builders

    site, url = web_site
    with zipfile.ZipFile(site / "wiki.zip", "w") as archive:
        for split, text in TEXTS.items():
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", text)
    assert builders.Wikitext103.URL.endswith("/wikitext-103-v1.zip")
    monkeypatch.setattr(builders.Wikitext103, "URL", f"{url}/wiki.zip")
    with pytest.raises(ValueError, match="not the published file: expected md5 9ddaac.*data_dir"):
        builders.unpack_files(builders.Wikitext103, tmp_path / "stored")
    digest = hashlib.md5((site / "wiki.zip").read_bytes()).hexdigest()
    monkeypatch.setattr(builders.Wikitext103, "CHECKSUM", digest)
    paths = builders.unpack_files(builders.Wikitext103, tmp_path / "stored")
    assert {split: path.read_text() for split, path in paths.items()} == TEXTS
    shutil.rmtree(site)  # from now on there is nothing to download
    assert builders.unpack_files(builders.Wikitext103, tmp_path / "stored") == paths
    monkeypatch.setattr(builders, "unpack_files", lambda builder_class: paths)
    assert len(load("wt103").train) == 12
