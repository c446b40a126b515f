import hashlib
import io

import numpy as np
import pytest
import scipy.io

from trellis_keras.data import load, music
from trellis_keras.data.sources import Source


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
    return music.parse_piano_rolls(Source("some.mat", content))


@pytest.mark.parametrize("name", ["jsb", "nottingham"])
def test_real_music(name, local_data):
    splits = load(name, data_dir=local_data("poly_music"))
    sizes = {
        "jsb": [(229, 13_807), (76, 4_602), (77, 4_725)],
        "nottingham": [(694, 176_561), (173, 45_513), (170, 44_463)],
    }[name]
    for split, (pieces, frames) in zip(("train", "valid", "test"), sizes, strict=True):
        part = getattr(splits, split)
        assert (len(part), sum(map(len, part.rolls))) == (pieces, frames)
        assert {roll.dtype for roll in part.rolls} == {np.dtype("uint8")}
        stream = splits.stream(split, 16, buckets=3)
        assert stream.frames_counted == frames - pieces
    # Some four voices, on the keys in the middle.
    train = np.concatenate(splits.train.rolls)
    assert 3 < train.sum(axis=1).mean() < 4.5
    assert 40 < (train.sum(axis=0) @ np.arange(88)) / train.sum() < 55


def test_local_copy(tmp_path, monkeypatch):
    (tmp_path / "poly_music").mkdir()
    content = mat_file()
    (tmp_path / "poly_music" / "JSB_Chorales.mat").write_bytes(content)
    published = {"JSB_Chorales": hashlib.sha256(content).hexdigest()}
    monkeypatch.setattr(music, "CHECKSUMS", published)
    with pytest.raises(ValueError, match="not the published file: expected 229 train pieces, fo"):
        load("jsb", data_dir=tmp_path)
    sizes = {"train": (3, 15), "valid": (1, 4), "test": (1, 4)}
    monkeypatch.setattr(music, "JSB_SIZES", sizes)
    splits = load("jsb", data_dir=tmp_path)
    np.testing.assert_array_equal(splits.train.rolls[2], np.eye(6, 88))
    x, _, weight = splits.stream("train", 3, buckets=1)[0]
    assert x.shape == (3, 5, 88) and sorted(weight.sum(axis=1)) == [3, 4, 5]
    monkeypatch.setattr(music, "JSB_SIZES", {**sizes, "valid": (1, 5)})
    with pytest.raises(ValueError, match="expected 5 valid frames, found 4"):
        load("jsb", data_dir=tmp_path)


def test_a_file_cut_off_anywhere_is_named():
    content = mat_file()
    for end in range(len(content)):
        with pytest.raises(ValueError, match="some.mat (is no MATLAB file, or|is) cut off"):
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
    """Its reader ends the process on some files that were tampered with."""
    (tmp_path / "poly_music").mkdir()
    (tmp_path / "poly_music" / "Nottingham.mat").write_bytes(mat_file())
    monkeypatch.setattr(music, "parse_piano_rolls", None)
    with pytest.raises(ValueError, match="Nottingham.mat is not the published .* sha256 d154f7ca"):
        load("nottingham", data_dir=tmp_path)
