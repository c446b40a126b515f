import gzip
import hashlib
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

from trellis_keras.data import corpora, list_datasets, load, sources


def test_registered_names():
    assert {"ptb", "char_ptb", "text", "pydoc"} <= set(list_datasets())
    with pytest.raises(ValueError, match="Received: 'ptb_word'; known: .*'ptb'"):
        load("ptb_word")


@pytest.mark.parametrize("name", ["ptb", "pydoc"])
def test_unknown_options_are_named(name):
    with pytest.raises(ValueError, match=r"Received: \['unti'\]; known: "):
        load(name, unti="word")


def test_missing_option_is_named():
    with pytest.raises(ValueError, match=r"needs the options \['path'\]"):
        load("text")


def test_ptb_words(data_dir):
    corpus = load("ptb", data_dir=data_dir)
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [929_589, 73_760, 82_430]
    assert len(corpus.vocabulary) == 10_000
    assert corpus.unit == "word"
    assert corpus.train.dtype == np.int32
    # Frequency order: the counts never rise.
    assert np.all(np.diff(np.bincount(corpus.train)) <= 0)
    text = corpus.vocabulary.decode(corpus.train[:100])
    assert text.startswith("aer banknote berlitz calloway")
    assert "pierre <unk> N years old will join the board" in text


def test_ptb_characters(data_dir):
    corpus = load("char_ptb", data_dir=data_dir)
    sizes = [len(corpus.train), len(corpus.valid), len(corpus.test)]
    assert sizes == [5_059_550, 396_412, 446_184]
    assert len(corpus.vocabulary) == 50
    assert "\n" in corpus.vocabulary.tokens
    assert corpus.unit == "character"
    text = corpus.vocabulary.decode(corpus.valid[:400])
    assert text.startswith("consumers may want to move their telephones a ")
    assert " \n" in text and "\n " not in text
    digest = hashlib.sha256()
    for split in sources.SPLITS:
        digest.update(gzip.decompress((data_dir / f"ptb/ptb.{split}.txt.gz").read_bytes()))
    assert corpus.checksum == digest.hexdigest()


def test_wrong_sizes_name_file_expected_and_found(tiny_ptb):
    with pytest.raises(
        ValueError, match=r"ptb\.train\.txt is not the published file: expected 50 .*, found 14"
    ):
        load("char_ptb", data_dir=tiny_ptb)
    with open(tiny_ptb / "ptb" / "ptb.valid.txt", "a") as file:
        file.write(" the \n")
    with pytest.raises(ValueError, match=r"ptb\.valid\.txt.*expected 4 words, found 6"):
        load("ptb", data_dir=tiny_ptb)


def compress(folder):
    for path in list(folder.glob("ptb/*.txt")):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def test_compressed_and_plain_files_are_the_same(tiny_ptb):
    plain = load("ptb", data_dir=tiny_ptb)
    compress(tiny_ptb)
    packed = load("ptb", data_dir=str(tiny_ptb))
    assert plain.vocabulary.tokens == ("<eos>", "the", "<unk>", "cat", "ran", "sat")
    assert plain.vocabulary == packed.vocabulary
    assert plain.checksum == packed.checksum
    np.testing.assert_array_equal(plain.train, packed.train)


def test_environment_variable_and_argument(tiny_ptb, tmp_path_factory, monkeypatch):
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, str(tiny_ptb))
    assert len(load("ptb").train) == 8
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(FileNotFoundError, match=r"Neither .*other.*ptb\.train\.txt nor"):
        load("ptb", data_dir=other)
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, str(other / "typo"))
    with pytest.raises(FileNotFoundError, match="TRELLIS_KERAS_DATA is not a folder.*typo"):
        load("ptb")


def test_a_tilde_is_the_home_folder(tiny_ptb, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny_ptb.parent))
    folder = f"~/{tiny_ptb.name}"
    assert len(load("ptb", data_dir=folder).train) == 8
    text = load("text", path=f"{folder}/ptb/ptb.train.txt", split=(0.5, 0.25, 0.25))
    assert text.unit == "character"
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, folder)
    assert len(load("ptb").train) == 8


def test_download_only_without_a_local_copy(tiny_ptb, tmp_path_factory, monkeypatch):
    downloads = []

    def read_files(name):
        downloads.append(name)
        return {s: (tiny_ptb / corpora.PTB_FILES[s]).read_bytes() for s in sources.SPLITS}

    builders = types.SimpleNamespace(PtbText="PtbText", read_files=read_files)
    monkeypatch.setattr(sources, "import_builders", lambda: builders)
    load("ptb", data_dir=tiny_ptb)
    assert downloads == []
    load("ptb")
    # A folder of other data sets is no reason not to download this one.
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, str(tmp_path_factory.mktemp("others")))
    load("ptb")
    assert downloads == ["PtbText", "PtbText"]


def test_a_missing_file_of_a_local_copy_is_an_error(tiny_ptb, monkeypatch):
    (tiny_ptb / "ptb" / "ptb.test.txt").unlink()
    monkeypatch.setenv(sources.ENVIRONMENT_VARIABLE, str(tiny_ptb))
    with pytest.raises(FileNotFoundError, match=r"ptb\.test\.txt.*data_dir.*TRELLIS_KERAS_DATA"):
        load("ptb")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content[:-12], "is truncated"),
        (lambda content: content[:30], "is truncated"),
        (lambda content: b"no gzip" + content, "is not a sound gzip file"),
        (lambda content: content[:10] + b"\xff" * 20 + content[30:], "is not a sound gzip file"),
        (lambda content: gzip.compress(b""), "is empty"),
    ],
)
def test_damaged_gzip_files(tmp_path, change, message):
    path = tmp_path / "some.txt.gz"
    path.write_bytes(change(gzip.compress(bytes(range(128)) * 10)))
    with pytest.raises(ValueError, match=f"some.txt.gz {message}"):
        load("text", path=path)


def test_text_by_characters(tmp_path):
    path = tmp_path / "my.txt"
    content = "Grüße an\r\nalle. " * 20
    path.write_bytes(content.encode())
    corpus = load("text", path=path)
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [288, 16, 16]
    ids = np.concatenate([corpus.train, corpus.valid, corpus.test])
    assert corpus.vocabulary.decode(ids) == content
    assert corpus.checksum == hashlib.sha256(content.encode()).hexdigest()
    assert corpus.name == "text"


@pytest.mark.parametrize("unit", ["character", "word", "byte"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, unit):
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + b"the cat\nthe cat\n" * 9)
    plain, marked = (load("text", path=tmp_path / n, unit=unit) for n in ("plain", "marked"))
    assert (plain.vocabulary == marked.vocabulary) == (unit != "byte")
    assert (len(plain.train) == len(marked.train)) == (unit != "byte")


def test_text_by_words_with_other_shares(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("b a a\n" * 10)
    corpus = load("text", path=str(path), unit="word", split=(0.8, 0.1, 0.1))
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [32, 4, 4]
    assert corpus.vocabulary.tokens == ("a", "<eos>", "b")
    assert corpus.vocabulary.decode(corpus.valid) == "b a a\n"


@pytest.mark.parametrize(("word", "place"), [("<unk>", 3), ("b", 2)])
def test_a_word_that_stands_for_those_of_other_texts(tmp_path, word, place):
    path = tmp_path / "my.txt"
    path.write_text("b a a\n" * 10)
    vocabulary = load("text", path=path, unit="word", unknown=word).vocabulary
    assert vocabulary.tokens[place] == word
    assert vocabulary.encode("a dog", final_eos=False).tolist() == [0, place]


def test_corpora_are_compared_by_their_checksum():
    one, other = load("pydoc"), load("pydoc")
    assert one != other and len({one, other}) == 2 and one.checksum == other.checksum


@pytest.mark.parametrize(
    "content, options, error, message",
    [
        (None, {}, FileNotFoundError, "There is no file .*my.txt. If it has moved"),
        (b"", {}, ValueError, "my.txt is empty"),
        (b"abc\xff" * 90, {}, ValueError, 'my.txt is not UTF-8.*0xff at offset 3.*unit="byte"'),
        (b"abcdefghi", {}, ValueError, r"my.txt is too short to split.*Received: 9 characters"),
        (b"  ", {"unit": "word"}, ValueError, "my.txt has no words"),
        (b"abc" * 90, {"unit": "letter"}, ValueError, "unit='letter'"),
        (b"abc" * 90, {"unknown": "?"}, ValueError, '`unknown` is for unit="word"'),
        (b"abc" * 90, {"split": (0.9, 0.1)}, ValueError, r"split=\(0.9, 0.1\)"),
        (b"abc" * 90, {"split": (0.9, 0.2, 0.1)}, ValueError, "add up to 1"),
        (b"abc" * 90, {"split": (1.0, 0.1, -0.1)}, ValueError, "positive"),
    ],
)
def test_bad_texts(tmp_path, content, options, error, message):
    path = tmp_path / "my.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        load("text", path=path, **options)


def test_pydoc():
    corpus = load("pydoc")
    sizes = np.array([len(corpus.train), len(corpus.valid), len(corpus.test)])
    assert sizes.sum() > 300_000
    np.testing.assert_allclose(sizes / sizes.sum(), [0.9, 0.05, 0.05], atol=1e-4)
    assert corpus.unit == "character"
    assert load("pydoc").checksum == corpus.checksum
    assert len(load("pydoc", split=(0.8, 0.1, 0.1)).train) < sizes[0]


def test_package_needs_neither_tensorflow_nor_tfds():
    script = """
        import sys
        for name in ("tensorflow", "tensorflow_datasets", "keras_nlp"):
            sys.modules[name] = None
        from trellis_keras import data
        corpus = data.load("pydoc")
        stream = data.TokenStream(corpus.train, 4, 16, 4)
        assert stream[0][0].shape == (4, 16)
        try:
            data.load("ptb")
        except ImportError as error:
            assert "TRELLIS_KERAS_DATA" in str(error)
        else:
            raise AssertionError("no error without tensorflow-datasets")
    """
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    environment.pop(sources.ENVIRONMENT_VARIABLE, None)
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)


def test_a_compressed_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"ab" * 50_000))
    assert len(load("text", path=tmp_path / "text").train) == 90_000
    monkeypatch.setattr(sources, "_UNPACKED", 1_000)
    with pytest.raises(ValueError, match="text.gz would unpack to more than .* bytes"):
        load("text", path=tmp_path / "text")


def test_a_text_with_a_character_of_its_own_is_named(tiny_ptb, monkeypatch):
    sizes = {"train": 28, "valid": 13, "test": 15, "vocabulary": 14}
    monkeypatch.setattr(corpora, "PTB_CHARACTERS", sizes)
    assert len(load("char_ptb", data_dir=tiny_ptb).valid) == 13
    path = tiny_ptb / "ptb/ptb.valid.txt"
    path.write_bytes(path.read_bytes().replace(b"cat", b"czt"))
    with pytest.raises(ValueError, match="valid.* has another text: .*unknown"):
        load("char_ptb", data_dir=tiny_ptb)


@pytest.mark.parametrize("content, message", [(b" the cat \n", "`unknown`"), (b" \n", "`unknown`")])
def test_a_text_of_which_no_vocabulary_can_be_made_is_named(tiny_ptb, content, message):
    (tiny_ptb / "ptb/ptb.train.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"ptb.train.txt has another text: .*{message}"):
        load("ptb", data_dir=tiny_ptb)
