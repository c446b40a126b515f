import dataclasses
import gzip
import hashlib

import numpy as np
import PIL.Image
import pytest

from trellis_keras.data import images, load, pixel_permutation, pixel_sequences, sources


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype("uint8").tobytes()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with 6 + 2 images in the layout of each data set, and the sizes to match."""
    generator = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "cifar10").mkdir()
    labels = {"train": np.array([3, 1, 4, 1, 5, 9]), "test": np.array([2, 6])}
    for split, stem in (("train", "train"), ("test", "t10k")):
        pixels = generator.integers(0, 256, (len(labels[split]), 28, 28))
        (tmp_path / f"mnist/{stem}-images-idx3-ubyte").write_bytes(idx(pixels))
        (tmp_path / f"mnist/{stem}-labels-idx1-ubyte").write_bytes(idx(labels[split]))
        for i in range(2):
            count = len(labels[split]) // 2
            strip = generator.integers(0, 256, (count * 32, 32, 3)).astype("uint8")
            PIL.Image.fromarray(strip).save(tmp_path / f"cifar10/{split}_{i:02}.png")
    np.savez(tmp_path / "cifar10/labels.npz", y_train=labels["train"], y_test=labels["test"])
    sizes = {"train": 6, "test": 2, "validation": 2}
    for name in ("MNIST", "CIFAR10"):
        published = dataclasses.replace(getattr(images, name), **sizes)
        monkeypatch.setattr(images, name, published)
    monkeypatch.setattr(images, "_STRIPS", {"train": 2, "test": 2})
    files = {"labels": "cifar10/labels.npz"} | {
        f"{split} {i}": f"cifar10/{split}_{i:02}.png" for split in ("train", "test") for i in (0, 1)
    }
    monkeypatch.setattr(images, "_CIFAR10_FILES", files)
    monkeypatch.delenv(sources.ENVIRONMENT_VARIABLE, raising=False)
    return tmp_path


def test_real_mnist(local_data):
    splits = load("seq_mnist", data_dir=local_data("mnist"))
    shapes = [getattr(splits, split).x.shape for split in sources.SPLITS]
    assert shapes == [(55_000, 784, 1), (5_000, 784, 1), (10_000, 784, 1)]
    assert splits.train.x.dtype == np.float32
    assert abs(splits.train.x.mean()) < 2e-3 and abs(splits.train.x.std() - 1) < 2e-3
    labels = np.concatenate([splits.train.y, splits.valid.y])
    assert np.bincount(labels).tolist() == [
        *(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    ]
    assert np.bincount(splits.valid.y).min() > 400
    assert splits.checksum.startswith("1f08e55ef5861652")


def test_real_cifar10(local_data):
    folder = local_data("cifar10")
    splits = load("seq_cifar10", data_dir=folder)
    shapes = [getattr(splits, split).x.shape for split in sources.SPLITS]
    assert shapes == [(45_000, 1024, 3), (5_000, 1024, 3), (10_000, 1024, 3)]
    labels = np.concatenate([splits.train.y, splits.valid.y])
    assert np.bincount(labels).tolist() == [5_000] * 10
    assert np.bincount(splits.test.y).tolist() == [1_000] * 10
    assert splits.checksum.startswith("efca13b0f75a7ac4")
    # Pixels are those of the files: the published test set's mean, over channels.
    assert splits.test.x.mean() / 2 + 0.5 == pytest.approx(0.4766, abs=2e-3)


@pytest.mark.parametrize("name, shape", [("seq_mnist", (784, 1)), ("seq_cifar10", (1024, 3))])
def test_tiny_local_copies(tiny, name, shape):
    splits = load(name, data_dir=tiny)
    for split, count in (("train", 4), ("valid", 2), ("test", 2)):
        part = getattr(splits, split)
        assert part.x.shape == (count, *shape) and part.y.shape == (count,)
        assert part.y.dtype == np.int32
    assert sorted([*splits.train.y, *splits.valid.y]) == [1, 1, 3, 4, 5, 9]
    x, y, weight = splits.stream("train", 3, shuffle=False)[1]
    assert x.shape == (3, *shape) and weight.tolist() == [1, 0, 0]


def test_rows_of_pixels_in_order():
    image = np.arange(2 * 3 * 2, dtype="uint8").reshape(1, 2, 3, 2)
    x = pixel_sequences(image, mean=0.0, deviation=1 / 255)
    np.testing.assert_allclose(x[0], np.arange(12).reshape(6, 2), rtol=1e-6)
    assert x.dtype == np.float32
    with pytest.raises(ValueError, match=r"Received: shape \(2, 3, 2\)"):
        pixel_sequences(image[0], 0.0, 1.0)


def test_arrays_do_not_depend_on_the_order_of_the_source(tiny):
    first = load("seq_mnist", data_dir=tiny)
    for kind, axes in (("images-idx3", 3), ("labels-idx1", 1)):
        path = tiny / f"mnist/train-{kind}-ubyte"
        parsed = np.frombuffer(path.read_bytes()[4 + 4 * axes :], "uint8").reshape(6, -1)
        path.write_bytes(path.read_bytes()[: 4 + 4 * axes] + parsed[::-1].tobytes())
    second = load("seq_mnist", data_dir=tiny)
    assert first.checksum == second.checksum
    for split in sources.SPLITS:
        np.testing.assert_array_equal(getattr(first, split).x, getattr(second, split).x)
        np.testing.assert_array_equal(getattr(first, split).y, getattr(second, split).y)


def test_permutation_is_recorded(tiny):
    order = pixel_permutation()
    assert sorted(order) == list(range(784))
    digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
    assert digest == "96240fe27409981c3ed3e92c20d995f7103a94c2282307bc776923030113be74"
    plain, permuted = load("seq_mnist", data_dir=tiny), load("permuted_mnist", data_dir=tiny)
    for split in sources.SPLITS:
        expected = getattr(plain, split).x[:, order]
        np.testing.assert_array_equal(getattr(permuted, split).x, expected)
        np.testing.assert_array_equal(getattr(permuted, split).y, getattr(plain, split).y)
    assert permuted.name == "permuted_mnist"
    assert permuted.checksum != plain.checksum


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("train-images-idx3", lambda c: c[:-1], "is cut off or too long: .* 4,720 bytes, found 4,"),
        ("train-images-idx3", lambda c: c[:9], "not an idx file of bytes .* or its header is cut"),
        ("train-images-idx3", lambda c: c[:2], "not an idx file"),
        ("train-images-idx3", lambda c: idx(np.zeros((6, 784))), "with 1 or 3 axes"),
        ("train-images-idx3", lambda c: b"\0\0\x08\xff" + bytes(2000), "with 1 or 3 axes"),
        # Whose product is 0 in 64 bits.
        (
            "train-images-idx3",
            lambda c: b"\0\0\x08\x03" + b"\x80\0\0\0" * 2 + b"\0\0\0\4",
            "promises 18,446,744,073,709,551,632 bytes",
        ),
        ("t10k-labels-idx1", lambda c: idx(np.zeros((2, 1, 1))), r"of shape \(images,\). Received"),
        ("t10k-labels-idx1", lambda c: b"\0\0\x0d" + c[3:], "not an idx file"),
        (
            "train-images-idx3",
            lambda c: idx(np.zeros((6, 27, 28))),
            r"seq_mnist train: images must have the shape \(28, 28, 1\). Received: \(27, 28, 1\)",
        ),
        ("t10k-labels-idx1", lambda c: idx(np.zeros(3)), "expected 2 images and labels, found 2 "),
        ("t10k-labels-idx1", lambda c: idx(np.array([2, 10])), r"in \[0, 10\). Received: 2 to 10"),
    ],
)
def test_bad_mnist_files(tiny, file, change, message):
    rewrite(tiny / f"mnist/{file}-ubyte", change)
    with pytest.raises(ValueError, match=message):
        load("seq_mnist", data_dir=tiny)


def test_compressed_mnist_files(tiny):
    expected = load("seq_mnist", data_dir=tiny).checksum
    for path in list((tiny / "mnist").iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert load("seq_mnist", data_dir=tiny).checksum == expected


def test_bad_cifar10_files(tiny):
    path = tiny / "cifar10/train_01.png"
    whole = path.read_bytes()
    for end in (10, len(whole) // 2):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="train_01.png is not sound, or cut off"):
            load("seq_cifar10", data_dir=tiny)
    PIL.Image.fromarray(np.zeros((96, 31, 3), "uint8")).save(path)
    with pytest.raises(ValueError, match="must be 32 x 32 pixels.*Received: 31 x 96 pixels"):
        load("seq_cifar10", data_dir=tiny)
    PIL.Image.fromarray(np.zeros((32, 32, 3), "uint8")).save(path)
    with pytest.raises(ValueError, match="expected 6 images and labels, found 4 and 6"):
        load("seq_cifar10", data_dir=tiny)
    path.write_bytes(whole)
    rewrite(tiny / "cifar10/labels.npz", lambda content: content[:100])
    with pytest.raises(ValueError, match="labels.npz is not sound, or cut off"):
        load("seq_cifar10", data_dir=tiny)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_downloaded_arrays(tiny, name, monkeypatch):
    local = load(f"seq_{name}", data_dir=tiny)
    reader = {"mnist": images._read_mnist, "cifar10": images._read_cifar10}[name]
    arrays = {
        split: {"image": pixels[::-1], "label": labels[::-1].astype("int64")}
        for split, (pixels, labels) in reader(tiny).items()
    }
    asked = []

    class Builders:
        @staticmethod
        def read_arrays(name):
            asked.append(name)
            return arrays

    monkeypatch.setattr(images, "import_builders", lambda: Builders)
    downloaded = load(f"seq_{name}")
    assert asked == [name]
    assert downloaded.checksum == local.checksum
    np.testing.assert_array_equal(downloaded.valid.x, local.valid.x)


@pytest.mark.parametrize(
    "labels, message",
    [
        ({"y_train": np.zeros((6, 1), "int64")}, r"shape \(6, 1\), int64"),
        ({"y_train": np.zeros(6)}, "Received: shape .* float64"),
        ({"y_train": np.array(list("abcdef"))}, "labels must be integers"),
        ({"y_train": np.array([{}] * 6, dtype=object)}, "labels.npz is not sound"),
        ({"other": np.zeros(6)}, "labels.npz is not sound, .*y_train"),
    ],
)
def test_labels_that_are_none(tiny, labels, message):
    np.savez(tiny / "cifar10/labels.npz", **{"y_test": np.array([2, 6]), **labels})
    with pytest.raises(ValueError, match=message):
        load("seq_cifar10", data_dir=tiny)


@pytest.mark.parametrize("kind", ["EPS", "GIF", "TIFF", "JPEG"])
def test_no_format_but_png_is_read(tiny, kind):
    """Pillow has PostScript in such a file run by another program."""
    path = tiny / "cifar10/train_01.png"
    PIL.Image.new("RGB", (32, 32)).save(path, kind)
    with pytest.raises(ValueError, match="train_01.png is not sound, or cut off"):
        load("seq_cifar10", data_dir=tiny)


@pytest.mark.parametrize(
    "size, mode, message",
    [
        ((32, 1_024), "1", "at most 31 one under another. Received: 32 x 1024 pixels"),
        ((300, 400), "1", "train_01.png is not sound, or cut off: .* bomb"),
        ((32, 96), "L", "it must have 3 channels. Received: mode 'L'"),
    ],
)
def test_sizes_are_checked_before_an_image_is_unpacked(tiny, monkeypatch, size, mode, message):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 50_000)
    monkeypatch.setattr(images, "_STRIP", 31)
    path = tiny / "cifar10/train_01.png"
    PIL.Image.new(mode, size).save(path)
    with pytest.raises(ValueError, match=message):
        load("seq_cifar10", data_dir=tiny)
