import dataclasses
import hashlib

import numpy as np
import PIL.Image
import pytest

from trellis_keras.zoo.datasets import augment_images, images, load, pixel_permutation
from trellis_keras.zoo.datasets.registry import SPLITS
from trellis_keras.zoo.datasets.sources import Source


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype("uint8").tobytes()


def small_images(folder, monkeypatch):
    """Writes 6 + 2 images in the layout of each data set, and sets the sizes to match."""
    generator = np.random.default_rng(0)
    (folder / "mnist").mkdir()
    (folder / "cifar10").mkdir()
    labels = {"train": np.array([3, 1, 4, 1, 5, 9]), "test": np.array([2, 6])}
    for split, stem in (("train", "train"), ("test", "t10k")):
        pixels = generator.integers(0, 256, (len(labels[split]), 28, 28))
        (folder / f"mnist/{stem}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"mnist/{stem}-labels-idx1-ubyte").write_bytes(idx(labels[split]))
        for i in range(2):
            count = len(labels[split]) // 2
            strip = generator.integers(0, 256, (count * 32, 32, 3)).astype("uint8")
            PIL.Image.fromarray(strip).save(folder / f"cifar10/{split}_{i:02}.png")
    np.savez(folder / "cifar10/labels.npz", y_train=labels["train"], y_test=labels["test"])
    sizes = {"train": 6, "test": 2, "validation": 2}
    for name, published in images.PUBLISHED.items():
        monkeypatch.setitem(images.PUBLISHED, name, dataclasses.replace(published, **sizes))
    strips = [f"cifar10/{split}_{i:02}.png" for split in ("train", "test") for i in (0, 1)]
    monkeypatch.setattr(images, "CIFAR10", Source(("cifar10/labels.npz", *strips)))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    small_images(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("name", ["seq_mnist", "permuted_mnist", "seq_cifar10"])
def test_images_are_shifted(name):
    published = images.PUBLISHED["seq_cifar10" if name == "seq_cifar10" else "seq_mnist"]
    shape, black = published.shape, -published.mean / published.deviation
    order = np.arange(shape[0] * shape[1])
    order = pixel_permutation() if name == "permuted_mnist" else order
    pictures = np.full((200, *shape), black, dtype="float32")
    pictures[:, 0, 5] = 1.0  # at the upper edge: some leave the picture
    pictures[:, 20, 12] = 2.0
    sequences = pictures.reshape(200, -1, shape[2])[:, order]
    moved = augment_images(name, sequences, np.random.default_rng(0), shift=2)
    pictures = np.empty_like(moved)
    pictures[:, order] = moved
    shifts = set()
    for picture in pictures.reshape(200, *shape)[..., 0]:
        ((row, column),) = np.argwhere(picture == 2)
        shifts.add((row - 20, column - 12))
        expected = [[row - 20, column - 7]] if row >= 20 else []
        assert np.argwhere(picture == 1).tolist() == expected
        assert np.sum(picture != np.float32(black)) == 1 + len(expected)
    assert shifts == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}


def test_images_are_mirrored():
    pictures = np.random.default_rng(1).normal(size=(400, 32, 32, 3)).astype("float32")
    sequences = pictures.reshape(400, -1, 3)
    moved = augment_images("seq_cifar10", sequences, np.random.default_rng(0), flip=0.25)
    mirrored = [not np.array_equal(a, b) for a, b in zip(moved, sequences, strict=True)]
    assert 0.15 < np.mean(mirrored) < 0.35
    pictures[mirrored] = pictures[mirrored, :, ::-1]
    np.testing.assert_array_equal(moved, pictures.reshape(400, -1, 3))


def test_real_mnist(real_data):
    dataset = load("seq_mnist", data_dir=real_data("mnist"))
    shapes = [getattr(dataset, split)[0].shape for split in SPLITS]
    assert shapes == [(55_000, 784, 1), (5_000, 784, 1), (10_000, 784, 1)]
    x, _ = dataset.train
    assert x.dtype == np.float32
    assert abs(x.mean()) < 2e-3 and abs(x.std() - 1) < 2e-3
    labels = np.concatenate([dataset.train[1], dataset.valid[1]])
    counts = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    assert tuple(np.bincount(labels)) == counts
    assert np.bincount(dataset.valid[1]).min() > 400
    assert dataset.checksum.startswith("1f08e55ef5861652")


@pytest.mark.slow
def test_real_cifar10(real_data):
    dataset = load("seq_cifar10", data_dir=real_data("cifar10"))
    shapes = [getattr(dataset, split)[0].shape for split in SPLITS]
    assert shapes == [(45_000, 1024, 3), (5_000, 1024, 3), (10_000, 1024, 3)]
    labels = np.concatenate([dataset.train[1], dataset.valid[1]])
    assert np.bincount(labels).tolist() == [5_000] * 10
    assert np.bincount(dataset.test[1]).tolist() == [1_000] * 10
    assert dataset.checksum.startswith("efca13b0f75a7ac4")
    # Pixels are those of the files: the mean of the published test set, over channels.
    assert dataset.test[0].mean() / 2 + 0.5 == pytest.approx(0.4766, abs=2e-3)


@pytest.mark.parametrize("name, shape", [("seq_mnist", (784, 1)), ("seq_cifar10", (1024, 3))])
def test_tiny_local_copies(tiny, name, shape):
    dataset = load(name, data_dir=tiny)
    for split, count in (("train", 4), ("valid", 2), ("test", 2)):
        x, y = getattr(dataset, split)
        assert x.shape == (count, *shape) and y.shape == (count,)
        assert y.dtype == np.int32
    assert sorted([*dataset.train[1], *dataset.valid[1]]) == [1, 1, 3, 4, 5, 9]


def test_permutation_is_recorded(tiny):
    order = pixel_permutation()
    assert sorted(order) == list(range(784))
    digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
    assert digest == "96240fe27409981c3ed3e92c20d995f7103a94c2282307bc776923030113be74"
    plain, permuted = load("seq_mnist", data_dir=tiny), load("permuted_mnist", data_dir=tiny)
    for split in SPLITS:
        (x, y), (expected, labels) = getattr(permuted, split), getattr(plain, split)
        np.testing.assert_array_equal(x, expected[:, order])
        np.testing.assert_array_equal(y, labels)
    assert permuted.name == "permuted_mnist"
    assert permuted.checksum != plain.checksum


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("train-images-idx3", lambda c: c[:-1], "is truncated or too long: .* 4,720 bytes"),
        ("train-images-idx3", lambda c: c[:9], "not an idx file of bytes .* truncated"),
        ("train-images-idx3", lambda c: idx(np.zeros((6, 784))), "with 1 or 3 axes"),
        # Whose product is 0 in 64 bits.
        (
            "train-images-idx3",
            lambda c: b"\0\0\x08\x03" + b"\x80\0\0\0" * 2 + b"\0\0\0\4",
            "states 18,446,744,073,709,551,632 bytes",
        ),
        ("train-images-idx3", lambda c: idx(np.zeros((6, 27, 28))), "seq_mnist train is not"),
        ("t10k-labels-idx1", lambda c: idx(np.zeros(3)), r"labels \(2,\), found .*\(3,\)"),
        ("t10k-labels-idx1", lambda c: idx(np.array([2, 10])), r"in \[0, 10\). Received: 2 to 10"),
    ],
)
def test_bad_mnist_files(tiny, file, change, message):
    rewrite(tiny / f"mnist/{file}-ubyte", change)
    with pytest.raises(ValueError, match=message):
        load("seq_mnist", data_dir=tiny)


def test_bad_cifar10_files(tiny):
    path = tiny / "cifar10/train_01.png"
    whole = path.read_bytes()
    for end in (10, len(whole) // 2):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="train_01.png is damaged"):
            load("seq_cifar10", data_dir=tiny)
    PIL.Image.fromarray(np.zeros((96, 31, 3), "uint8")).save(path)
    with pytest.raises(ValueError, match="of 32 x 32 pixels.*Received: 31 x 96 pixels"):
        load("seq_cifar10", data_dir=tiny)
    PIL.Image.fromarray(np.zeros((32, 32, 3), "uint8")).save(path)
    with pytest.raises(ValueError, match=r"expected images \(6, 32, 32, 3\).*found \(4, 32"):
        load("seq_cifar10", data_dir=tiny)
    path.write_bytes(whole)
    rewrite(tiny / "cifar10/labels.npz", lambda content: content[:100])
    with pytest.raises(ValueError, match="labels.npz is damaged"):
        load("seq_cifar10", data_dir=tiny)


@pytest.mark.parametrize("kind", ["EPS", "GIF"])
def test_only_png_is_read(tiny, kind):
    """Pillow has PostScript in such a file run by another program."""
    path = tiny / "cifar10/train_01.png"
    PIL.Image.new("RGB", (32, 32)).save(path, kind)
    with pytest.raises(ValueError, match="train_01.png is damaged"):
        load("seq_cifar10", data_dir=tiny)


@pytest.mark.parametrize(
    "size, mode, message",
    [
        ((32, 1_024), "1", "up to 31 images .* Received: 32 x 1024 pixels"),
        ((300, 400), "1", "train_01.png is damaged: .* bomb"),
        ((32, 96), "L", "it must have 3 channels. Received: mode 'L'"),
    ],
)
def test_sizes_are_checked_before_an_image_is_unpacked(tiny, monkeypatch, size, mode, message):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 50_000)
    monkeypatch.setattr(images, "_MAX_STRIP", 31)
    path = tiny / "cifar10/train_01.png"
    PIL.Image.new(mode, size).save(path)
    with pytest.raises(ValueError, match=message):
        load("seq_cifar10", data_dir=tiny)


def test_images_of_tensorflow_datasets(tiny, monkeypatch):
    local = load("seq_mnist", data_dir=tiny)
    files = [images._read_idx(tiny / path) for path in images.MNIST.paths]
    arrays = {
        split: {"image": pixels[::-1, ..., None], "label": labels[::-1].astype("int64")}
        for split, pixels, labels in (("train", *files[:2]), ("test", *files[2:]))
    }
    monkeypatch.setattr(images, "read_tfds", lambda name: {"mnist": arrays}[name])
    downloaded = load("seq_mnist")
    assert downloaded.checksum == local.checksum
    np.testing.assert_array_equal(downloaded.valid[0], local.valid[0])
    assert load("permuted_mnist").checksum != local.checksum
