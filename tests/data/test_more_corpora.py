"""WikiText-2, text8, enwik8, War and Peace: from local copies and by their builders."""

import hashlib
import zipfile

import numpy as np
import pytest

from trellis_keras.data import corpora, load, sources

WIKITEXT2 = {
    "train": b" \n = Cat = \n the <unk> sat \n",
    "valid": b" the cat = \n",
    "test": b" = sat = \n",
}
TEXT8 = b" cat sat on mat"
ENWIK8 = b"<a>\xc3\xa4\xff\x00 cat sat on "
WAR_AND_PEACE = "Well,\n\nPrince, émigrés"


@pytest.fixture
def tiny_sizes(monkeypatch):
    """The sizes of the small files of this test."""
    words = {"train": 9, "valid": 4, "test": 4, "vocabulary": 6}
    monkeypatch.setattr(corpora, "WIKITEXT2_WORDS", words)
    characters = {"train": 9, "valid": 3, "test": 3, "vocabulary": 8}
    monkeypatch.setattr(corpora, "TEXT8_CHARACTERS", characters)
    sizes = {"train": 11, "valid": 4, "test": 4, "vocabulary": 13}
    monkeypatch.setattr(corpora, "ENWIK8_BYTES", sizes)
    sizes = {"train": 14, "valid": 4, "test": 4, "vocabulary": 15}
    monkeypatch.setattr(corpora, "WAR_AND_PEACE_CHARACTERS", sizes)
    monkeypatch.delenv(sources.ENVIRONMENT_VARIABLE, raising=False)


def test_real_wikitext2(local_data):
    corpus = load("wt2", data_dir=local_data("wikitext2"))
    sizes = [len(corpus.train), len(corpus.valid), len(corpus.test)]
    assert sizes == [2_088_628, 217_646, 245_569]
    assert len(corpus.vocabulary) == 33_278
    assert corpus.vocabulary.decode(corpus.test[:6]).split() == ["=", "Robert", "<unk>", "="]


@pytest.mark.parametrize("name", ["wiki.train.tokens", "wiki.train.articles_reordered.tokens"])
def test_wikitext2_by_words(tmp_path, tiny_sizes, name):
    (tmp_path / "wikitext2").mkdir()
    for split, content in WIKITEXT2.items():
        file = name if split == "train" else f"wiki.{split}.tokens"
        (tmp_path / "wikitext2" / file).write_bytes(content)
    corpus = load("wt2", data_dir=tmp_path)
    assert corpus.vocabulary.decode(corpus.train) == "\n= Cat =\nthe <unk> sat\n"
    assert corpus.vocabulary.decode(corpus.valid) == "the <unk> =\n"
    (tmp_path / "wikitext2/wiki.test.tokens").write_bytes(b"= \n")
    with pytest.raises(ValueError, match="wiki.test.tokens.*expected 4 words, found 2"):
        load("wt2", data_dir=tmp_path)


def test_text8_by_characters(tmp_path, tiny_sizes):
    (tmp_path / "text8").mkdir()
    (tmp_path / "text8/text8").write_bytes(TEXT8)
    corpus = load("text8", data_dir=tmp_path)
    parts = [corpus.vocabulary.decode(getattr(corpus, split)) for split in sources.SPLITS]
    assert parts == [" cat sat ", "on ", "mat"]
    assert corpus.checksum == hashlib.sha256(TEXT8).hexdigest()
    assert corpus.train.dtype == np.int32
    (tmp_path / "text8/text8").write_bytes(TEXT8[:-1])
    with pytest.raises(ValueError, match="text8 is not the published file: expected 15 ch.* 14"):
        load("text8", data_dir=tmp_path)
    (tmp_path / "text8/text8").write_bytes(TEXT8.replace(b"m", b"x").replace(b"o", b"x"))
    with pytest.raises(ValueError, match="expected 8 distinct characters, found 7"):
        load("text8", data_dir=tmp_path)


def test_enwik8_by_bytes(tmp_path, tiny_sizes):
    (tmp_path / "enwik8").mkdir()
    path = tmp_path / "enwik8/enwik8"
    path.write_bytes(ENWIK8)
    corpus = load("enwik8", data_dir=tmp_path)
    assert corpus.unit == "byte"
    sizes = [len(getattr(corpus, split)) for split in sources.SPLITS]
    assert sizes == [11, 4, 4]
    ids = np.concatenate([getattr(corpus, split) for split in sources.SPLITS])
    assert bytes(ord(corpus.vocabulary.tokens[i]) for i in ids) == ENWIK8
    assert corpus.checksum == hashlib.sha256(ENWIK8).hexdigest()
    assert corpus.train.dtype == np.int32
    path.write_bytes(ENWIK8[:-2])
    message = r"expected 19 bytes, found 17. Another text.*load\(\"text\", .*unit=\"byte\"\)"
    with pytest.raises(ValueError, match=message):
        load("enwik8", data_dir=tmp_path)
    # What the message advises.
    part = load("text", path=path, unit="byte", split=(0.6, 0.2, 0.2))
    assert len(part.train) == 10
    path.write_bytes(ENWIK8.replace(b"\xff", b"\x00"))
    with pytest.raises(ValueError, match="expected 13 distinct bytes, found 12"):
        load("enwik8", data_dir=tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: "\ufeff" + text.replace("\n", "\r\n") + "\r\n\r\n",
        lambda text: text.replace("\n", " \n") + " ",
    ],
    ids=["plain", "as_char-rnn", "spaces"],
)
def test_war_and_peace_in_the_copies_that_go_round(tmp_path, tiny_sizes, change):
    (tmp_path / "war_and_peace").mkdir()
    path = tmp_path / "war_and_peace/warpeace_input.txt"
    path.write_bytes(change(WAR_AND_PEACE).encode())
    corpus = load("war_and_peace", data_dir=tmp_path)
    parts = [corpus.vocabulary.decode(getattr(corpus, split)) for split in sources.SPLITS]
    assert "".join(parts) == WAR_AND_PEACE
    assert [len(part) for part in parts] == [14, 4, 4]
    assert corpus.checksum == hashlib.sha256(WAR_AND_PEACE.encode()).hexdigest()
    path.write_bytes(WAR_AND_PEACE.replace("Well", "Hello").encode())
    with pytest.raises(ValueError, match="expected 22 characters, found 23"):
        load("war_and_peace", data_dir=tmp_path)


def test_real_war_and_peace(local_data):
    corpus = load("war_and_peace", data_dir=local_data("war_and_peace"))
    sizes = [len(getattr(corpus, split)) for split in sources.SPLITS]
    assert sizes == [2_876_590, 159_810, 159_811]
    assert len(corpus.vocabulary) == 82
    assert corpus.checksum.startswith("b0fc81c399971eaf")
    assert corpus.vocabulary.decode(corpus.test[-10:]) == "conscious."


def builders():
    pytest.importorskip("tensorflow_datasets")
    from trellis_keras.data import builders

    return builders


@pytest.fixture
def download(web_site, tmp_path, monkeypatch):
    """`download(builder_class, file)`: what the builder makes of a file of the local site."""
    folder, url = web_site

    def read(builder_class, file):
        monkeypatch.setattr(builder_class, "URL", f"{url}/{file}")
        return builders().read_files(builder_class, tmp_path / "cache")

    read.folder = folder
    return read


def write_zip(path, contents):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path.read_bytes()


def test_wikitext2_builder_verifies_the_archive(download, monkeypatch):
    builder_class = builders().Wikitext2
    members = {f"wikitext-2/wiki.{split}.tokens": WIKITEXT2[split] for split in WIKITEXT2}
    archive = write_zip(download.folder / "wiki.zip", members)
    with pytest.raises(ValueError, match="not the published file: expected md5 542cce.*data_dir"):
        download(builder_class, "wiki.zip")
    monkeypatch.setattr(builder_class, "CHECKSUM", hashlib.md5(archive).hexdigest())
    assert download(builder_class, "wiki.zip") == WIKITEXT2


def test_text8_builder_verifies_the_file(download, monkeypatch):
    builder_class = builders().Text8
    write_zip(download.folder / "text8.zip", {"text8": TEXT8})
    with pytest.raises(ValueError, match="text8 of .* expected md5 3bea19"):
        download(builder_class, "text8.zip")
    files = {"whole": ("text8", hashlib.md5(TEXT8).hexdigest())}
    monkeypatch.setattr(builder_class, "FILES", files)
    assert download(builder_class, "text8.zip") == {"whole": TEXT8}
    (download.folder / "text8.zip").write_bytes(b"no archive")
    monkeypatch.setattr(builder_class, "VERSION", "1.0.1")
    with pytest.raises(OSError, match="Could not download .*text8.zip"):
        download(builder_class, "text8.zip?again")


def test_enwik8_builder_verifies_the_file(download, monkeypatch):
    builder_class = builders().Enwik8
    write_zip(download.folder / "enwik8.zip", {"enwik8": ENWIK8})
    with pytest.raises(ValueError, match="enwik8 of .* expected md5 a1fa5f"):
        download(builder_class, "enwik8.zip")
    files = {"whole": ("enwik8", hashlib.md5(ENWIK8).hexdigest())}
    monkeypatch.setattr(builder_class, "FILES", files)
    assert download(builder_class, "enwik8.zip") == {"whole": ENWIK8}


def test_war_and_peace_builder_verifies_what_all_copies_have(download, monkeypatch):
    builder_class = builders().WarAndPeace
    assert builder_class.URL.endswith("/char-rnn/warpeace_input.txt")
    file = ("\ufeff" + WAR_AND_PEACE.replace("\n", "\r\n") + "\r\n").encode()
    (download.folder / "input.txt").write_bytes(file)
    with pytest.raises(ValueError, match="warpeace_input.txt of .* expected sha256 b0fc81c3"):
        download(builder_class, "input.txt")
    digest = hashlib.sha256(WAR_AND_PEACE.encode()).hexdigest()
    monkeypatch.setattr(builder_class, "FILES", {"whole": ("warpeace_input.txt", digest)})
    assert download(builder_class, "input.txt") == {"whole": file}
    (download.folder / "input.txt").write_bytes(b"\xff" + file)
    monkeypatch.setattr(builder_class, "VERSION", "1.0.1")
    with pytest.raises(ValueError, match="is not the published file"):
        download(builder_class, "input.txt?again")


@pytest.mark.parametrize(
    "name, file, digest",
    [("Jsb", "JSB_Chorales.mat", "ac0e6085"), ("Nottingham", "Nottingham.mat", "d154f7ca")],
)
def test_music_builders_verify_the_file(download, monkeypatch, name, file, digest):
    builder_class = getattr(builders(), name)
    assert builder_class.URL.endswith(f"/{file}")
    (download.folder / "music.mat").write_bytes(b"piano")
    with pytest.raises(ValueError, match=f"{file} of .* expected sha256 {digest}"):
        download(builder_class, "music.mat")
    files = {"whole": (file, hashlib.sha256(b"piano").hexdigest())}
    monkeypatch.setattr(builder_class, "FILES", files)
    assert download(builder_class, "music.mat") == {"whole": b"piano"}


def test_data_sets_of_tensorflow_datasets_come_as_arrays(tmp_path):
    read_arrays = builders().read_arrays
    import tensorflow_datasets as tfds
    from etils import epath

    class TinyDigits(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = epath.Path(__file__)

        def _info(self):
            features = {"image": tfds.features.Image(shape=(2, 3, 1)), "label": np.int64}
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(4), "test": self._generate_examples(1)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"image": np.full((2, 3, 1), 10 * i, "uint8"), "label": i}

    arrays = read_arrays("tiny_digits", tmp_path)
    assert set(arrays) == {"train", "test"}
    images, labels = arrays["train"]["image"], arrays["train"]["label"]
    assert (images.shape, images.dtype) == ((4, 2, 3, 1), "uint8")
    assert sorted(labels) == [0, 1, 2, 3]
    np.testing.assert_array_equal(images[:, 0, 0, 0], 10 * labels)
