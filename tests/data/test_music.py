import hashlib
import io

import numpy as np
import pytest
import scipy.io

from trellis_keras.data import load, music
from trellis_keras.data.registry import SPLITS


def mat_file(**changes):
    """The bytes of a .mat file with 3, 1 and 1 short pieces."""
    variables = {}
    for name, count in (("traindata", 3), ("validdata", 1), ("testdata", 1)):
        cells = np.empty((1, count), dtype=object)
        for i in range(count):
            cells[0, i] = np.eye(4 + i, 88, dtype="uint8")
        variables[name] = cells
    file = io.BytesIO()
    variables = {key: value for key, value in (variables | changes).items() if value is not None}
    scipy.io.savemat(file, variables, do_compression=True)
    return file.getvalue()


def parse(content):
    return music.parse_piano_rolls(content, "some.mat")


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
        assert dataset.stream(split, 16, buckets=3).frames_counted == frames - pieces
    # About four voices, on the keys in the middle.
    train = np.concatenate(dataset.train)
    assert 3 < train.sum(axis=1).mean() < 4.5
    assert 40 < (train.sum(axis=0) @ np.arange(88)) / train.sum() < 55


def test_local_copy(tmp_path, monkeypatch):
    (tmp_path / "poly_music").mkdir()
    content = mat_file()
    (tmp_path / "poly_music" / "JSB_Chorales.mat").write_bytes(content)
    monkeypatch.setitem(music.CHECKSUMS, "jsb", hashlib.sha256(content).hexdigest())
    with pytest.raises(ValueError, match="not the published file: expected 229 train pieces, fo"):
        load("jsb", data_dir=tmp_path)
    sizes = {"train": (3, 15), "valid": (1, 4), "test": (1, 4)}
    monkeypatch.setitem(music.SIZES, "jsb", sizes)
    dataset = load("jsb", data_dir=tmp_path)
    np.testing.assert_array_equal(dataset.train[2], np.eye(6, 88))
    x, _, weight = dataset.stream("train", 3, buckets=1)[0]
    assert x.shape == (3, 5, 88) and sorted(weight.sum(axis=1)) == [3, 4, 5]
    monkeypatch.setitem(music.SIZES, "jsb", {**sizes, "valid": (1, 5)})
    with pytest.raises(ValueError, match="expected 5 valid frames, found 4"):
        load("jsb", data_dir=tmp_path)


def test_a_file_truncated_anywhere_is_named():
    content = mat_file()
    for end in range(len(content)):
        with pytest.raises(ValueError, match="some.mat is (not a MATLAB file, or )?truncated"):
            parse(content[:end])
    assert len(parse(content)["train"]) == 3


def cells(*rolls):
    array = np.empty((1, len(rolls)), dtype=object)
    array[0, :] = rolls
    return array


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"testdata": None}, "lacks the variable 'testdata'. Received: .'traindata', 'validdata'"),
        ({"validdata": cells(np.zeros((5, 80)))}, r"validdata 0, must have .*\(5, 80\)"),
        ({"validdata": cells(np.full((5, 88), 3))}, "only 0 and 1. Received: 3"),
        ({"testdata": cells(np.zeros((1, 88)))}, "testdata 0, needs at least 2 frames"),
        ({"testdata": np.eye(88)}, "testdata 0, must have"),
    ],
)
def test_bad_contents(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(mat_file(**changes))


def test_only_the_published_file_reaches_scipy(tmp_path, monkeypatch):
    """Some files that were tampered with crash its reader."""
    (tmp_path / "poly_music").mkdir()
    (tmp_path / "poly_music" / "Nottingham.mat").write_bytes(mat_file())
    monkeypatch.setattr(music, "parse_piano_rolls", None)
    with pytest.raises(ValueError, match="Nottingham.mat is not the published .* sha256 d154f7ca"):
        load("nottingham", data_dir=tmp_path)
