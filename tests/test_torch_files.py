"""Checkpoints of PyTorch are read without PyTorch, and nothing in them is run.

The files `golden/torch_*.pt` were written by PyTorch 2.13: numbers that count up, one form of it
before PyTorch 1.6.
"""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from trellis_keras.interop import load_torch_state_dict
from trellis_keras.layers import TrellisLayer
from trellis_keras.torch_files import read_state_dict

GOLDEN = Path(__file__).parent / "golden"


def trellis():
    layer = TrellisLayer(units=3, depth=2)
    layer.build((None, None, 2))
    return layer


def test_all_kinds_of_tensors():
    arrays = read_state_dict(GOLDEN / "torch_kinds.pt")
    count = np.arange(24, dtype="float32")
    expected = {
        "a": count.reshape(2, 3, 4),
        "transposed": count.reshape(4, 6).T,
        "part": count[5:9],
        "parameter": np.arange(3.0),
        "scalar": np.array(7),
        "half": np.ones(2, "float16"),
        "flag": np.array([True, False]),
        "empty": np.zeros((0, 4), "float32"),
    }
    assert list(arrays) == list(expected)
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


@pytest.mark.parametrize("name", ["torch_trellis.pt", "torch_trellis_old.pt"])
def test_weights_of_a_layer(name):
    count, layer = np.arange(120, dtype="float32"), trellis()
    load_torch_state_dict(layer, GOLDEN / name)
    weights = {
        "weight1": count[:48].reshape(2, 2, 12).transpose(2, 1, 0),
        "weight2": count[48:].reshape(12, 3, 2),
        "bias2": np.arange(12),
    }
    same = trellis()
    load_torch_state_dict(same, weights)
    for ours, theirs in zip(layer.get_weights(), same.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("a checkpoint ran this",)


def write(path, program, **contents):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/data.pkl", program)
        for name, content in contents.items():
            archive.writestr(f"weights/data/{name}", content)


def tensor(shape, strides, size=4, offset=0, dtype="FloatStorage"):
    """The program of a mapping with one tensor, `x`, whose storage is called `a`."""
    file = io.BytesIO()
    file.write(b"\x80\x02}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n((")
    file.write(b"X\x07\x00\x00\x00storagectorch\n" + dtype.encode() + b"\n")
    file.write(b"X\x01\x00\x00\x00aX\x03\x00\x00\x00cpu" + pickle.dumps(size, 2)[2:-1] + b"tQ")
    for value in (offset, shape, strides, False, ()):
        file.write(pickle.dumps(value, 2)[2:-1])
    file.write(b"tRs.")
    return file.getvalue()


def test_the_programs_of_these_tests(tmp_path):
    write(tmp_path / "w.pt", tensor((2, 1), (2, 10**9)), a=np.arange(4, dtype="<f4").tobytes())
    np.testing.assert_array_equal(read_state_dict(tmp_path / "w.pt")["x"], [[0], [2]])


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("old", [False, True])
def test_nothing_in_a_checkpoint_is_run(tmp_path, monkeypatch, protocol, old):
    monkeypatch.chdir(tmp_path)
    for number, value in enumerate([Hostile(), {"weight1": Hostile()}]):
        path, program = tmp_path / f"{number}.pt", pickle.dumps(value, protocol)
        path.write_bytes(program) if old else write(path, program)
        with pytest.raises(ValueError, match=f"{number}.pt: it does not hold a state dict"):
            load_torch_state_dict(trellis(), path)
    assert not Path("a checkpoint ran this").exists()


NUMBERS = bytes(16)


@pytest.mark.parametrize(
    "program, message",
    [
        (tensor((10**12,), (0,)), "does not fit into its 4 numbers"),
        (tensor((5,), (1,)), "does not fit into its 4 numbers"),
        (tensor((2,), (4,)), "does not fit into its 4 numbers"),
        (tensor((1,), (1,), offset=4), "does not fit into its 4 numbers"),
        (tensor((-1,), (1,)), "calls 'torch._utils _rebuild_tensor_v2'"),
        (tensor((0, 10**30), (1, 1)), "calls 'torch._utils _rebuild_tensor_v2'"),
        (tensor((2, 2), (1,)), "calls 'torch._utils _rebuild_tensor_v2'"),
        (tensor((1,), (1,), size=10**12), "1,000,000,000,000 numbers .* there are 16 bytes"),
        (tensor((1,), (1,), size=5), "5 numbers of type float32 are announced"),
        (tensor((1,), (1,), dtype="BFloat16Storage"), "no numbers that NumPy knows"),
        (pickle.dumps({"x": 3}, 2), "no mapping of names to tensors"),
        (pickle.dumps({("x",): 3}, 2), "other keys than texts"),
        (pickle.dumps([1], 2), "no mapping of names to tensors"),
        (b"\x80\x02" + b")\x85" * 5 + b"\x85" * 100_000 + b".", "no mapping of names"),
        (b"\x80\x02X\xff\xff\xff\xffx.", "expected .* bytes"),
        (b"\x80\x02h\x05.", "makes no sense"),
        (b"\x80\x02t.", "makes no sense"),
        (b"", "makes no sense|exhausted"),
    ],
)
def test_claims_that_a_file_cannot_keep(tmp_path, program, message):
    write(tmp_path / "w.pt", program, a=NUMBERS)
    with pytest.raises(ValueError, match=message):
        read_state_dict(tmp_path / "w.pt")


def test_archives_that_are_none_of_pytorch(tmp_path):
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", tensor((1,), (1,)))
    with pytest.raises(ValueError, match="it is compressed"):
        read_state_dict(path)
    write(path, tensor((1,), (1,)))
    with pytest.raises(ValueError, match="it lacks the numbers data/a"):
        read_state_dict(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/other", b"")
    with pytest.raises(ValueError, match="without a file data.pkl"):
        read_state_dict(path)


@pytest.mark.parametrize("name", ["torch_trellis.pt", "torch_trellis_old.pt"])
def test_a_file_cut_off_anywhere_is_refused(tmp_path, name):
    content = (GOLDEN / name).read_bytes()
    for end in range(0, len(content), 7):
        (tmp_path / "w.pt").write_bytes(content[:end])
        with pytest.raises(ValueError):
            read_state_dict(tmp_path / "w.pt")


@pytest.mark.parametrize("field", ["file_size", "compress_size"])
def test_a_member_that_claims_to_be_larger_than_the_file(tmp_path, field):
    path = tmp_path / "w.pt"
    write(path, tensor((1,), (1,)), a=NUMBERS)
    with zipfile.ZipFile(path, "a") as archive:
        setattr(archive.getinfo("weights/data/a"), field, 2**31)
        archive._didModify = True  # the list of members is written again
    with pytest.raises(ValueError, match="declared larger|would unpack"):
        read_state_dict(path)
