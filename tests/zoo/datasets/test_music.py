import hashlib
import io

import numpy as np
import pytest
import scipy.io

from trellis_keras.zoo.datasets import load, music
from trellis_keras.zoo.datasets.registry import SPLITS


def mat_file():
    """The bytes of a .mat file with 3, 1 and 1 short pieces."""
    variables = {}
    for name, count in (("traindata", 3), ("validdata", 1), ("testdata", 1)):
        cells = np.empty((1, count), dtype=object)
        for i in range(count):
            cells[0, i] = np.eye(4 + i, 88, dtype="uint8")
        variables[name] = cells
    file = io.BytesIO()
    scipy.io.savemat(file, variables, do_compression=True)
    return file.getvalue()


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("jsb", [(229, 13_807), (76, 4_602), (77, 4_725)]),
        ("nottingham", [(694, 176_561), (173, 45_513), (170, 44_463)]),
    ],
)
def test_real_music(name, sizes, real_data):
    dataset = load(name, data_dir=real_data("poly_music"))
    for split, (pieces, frames) in zip(SPLITS, sizes, strict=True):
        rolls = getattr(dataset, split)
        assert (len(rolls), sum(map(len, rolls))) == (pieces, frames)
        assert {roll.dtype for roll in rolls} == {np.dtype("uint8")}
    # About four voices, on the keys in the middle.
    train = np.concatenate(dataset.train)
    assert 3 < train.sum(axis=1).mean() < 4.5
    assert 40 < (train.sum(axis=0) @ np.arange(88)) / train.sum() < 55


def small_music(folder, monkeypatch):
    """Writes the file of a data set, and sets the checksum to match."""
    (folder / "poly_music").mkdir()
    content = mat_file()
    (folder / "poly_music" / "JSB_Chorales.mat").write_bytes(content)
    monkeypatch.setitem(music.CHECKSUMS, "jsb", hashlib.sha256(content).hexdigest())


def test_local_copy(tmp_path, monkeypatch):
    small_music(tmp_path, monkeypatch)
    dataset = load("jsb", data_dir=tmp_path)
    assert dataset.sizes == {"train": 3, "valid": 1, "test": 1}
    np.testing.assert_array_equal(dataset.train[2], np.eye(6, 88))


def test_only_the_published_file_reaches_scipy(tmp_path, monkeypatch):
    """Some files that were tampered with crash its reader."""
    (tmp_path / "poly_music").mkdir()
    (tmp_path / "poly_music" / "Nottingham.mat").write_bytes(mat_file())
    monkeypatch.setattr(scipy.io, "loadmat", None)
    with pytest.raises(ValueError, match="Nottingham.mat is not the published .* sha256 d154f7ca"):
        load("nottingham", data_dir=tmp_path)
