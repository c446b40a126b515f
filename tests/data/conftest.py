"""What the data tests share."""

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def data_dir():
    """The folder of the real data sets, or a skip where there is none."""
    beside_checkout = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = pathlib.Path(os.environ.get("TRELLIS_KERAS_DATA") or beside_checkout)
    if not (folder / "ptb").is_dir():
        pytest.skip("no local copy of the Penn Treebank: set TRELLIS_KERAS_DATA to its folder")
    return folder


@pytest.fixture
def tiny_ptb(tmp_path, monkeypatch):
    """A folder with three small files in PTB's layout, and the sizes to match them."""
    from trellis_keras.data import corpora

    texts = {
        "train": " the cat sat \n the <unk> ran \n",
        "valid": " the cat ran \n",
        "test": " the <unk> sat \n",
    }
    (tmp_path / "ptb").mkdir()
    for split, text in texts.items():
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_bytes(text.encode())
    sizes = {"train": 8, "valid": 4, "test": 4, "vocabulary": 6}
    monkeypatch.setattr(corpora, "PTB_WORDS", sizes)
    monkeypatch.delenv(corpora.ENVIRONMENT_VARIABLE, raising=False)
    return tmp_path
