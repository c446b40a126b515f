"""`.npz` files that are not what they claim to be."""

import io
import zipfile

import numpy as np
import pytest

from trellis_keras import array_files
from trellis_keras.array_files import read_npz


def test_arrays_of_all_kinds(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.array(3), "c": np.zeros((0, 2), "int8")}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        for file in (tmp_path / "a.npz", io.BytesIO((tmp_path / "a.npz").read_bytes())):
            read = read_npz(file)
            assert list(read) == list(arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(read[name], array)


def npz(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file


def claiming(shape, content=b"", descr="<f8"):
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


@pytest.mark.parametrize(
    "member, message",
    [
        (claiming((10**12,)), r"claims \(1000000000000,\) numbers of type float64"),
        (claiming((2,), bytes(17)), r"claims \(2,\) numbers"),
        (claiming((1,), bytes(8), "|O"), "claims .* of type object"),
        (claiming((2**62, 4), b""), "claims"),
        (claiming((1,)).replace(b"{", b"("), "no sound .npz file"),
        (b"no array", "no sound .npz file"),
    ],
)
def test_what_an_array_claims_is_checked_before_it_is_made(member, message):
    with pytest.raises(ValueError, match=message):
        read_npz(npz(("a.npy", member)))


def test_an_archive_that_unpacks_to_far_more_than_it_is(monkeypatch):
    file = npz(*((f"{i}.npy", claiming((1000,), bytes(8000))) for i in range(10)))
    assert len(read_npz(file)) == 10
    monkeypatch.setattr(array_files, "_UNPACKED", 80_000)
    monkeypatch.setattr(array_files, "_EXPANSION", 10)
    with pytest.raises(ValueError, match="would unpack to 81,280"):
        read_npz(file)


def test_members_that_lie_over_each_other(monkeypatch):
    file = npz(("a.npy", claiming((1000,), bytes(8000))))
    with zipfile.ZipFile(file, "a") as archive:
        archive.filelist *= 100
        archive._didModify = True  # the list of members is written again
    monkeypatch.setattr(array_files, "_UNPACKED", 80_000)
    with pytest.raises(ValueError, match="would unpack to 812,800"):
        read_npz(file)


def test_an_array_alone_is_no_archive():
    file = io.BytesIO()
    np.save(file, np.arange(3))
    with pytest.raises(ValueError, match="no sound .npz file"):
        read_npz(file)
