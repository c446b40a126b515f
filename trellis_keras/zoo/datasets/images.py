"""Images as sequences of pixels: MNIST, also permuted, and CIFAR-10.

The last 5,000 images of the published training set are for validation. Images are in the order of
the SHA-256 of their pixels and label, so that every source, in whatever order, gives the same
arrays. Pixels are normalized as in the code of the TrellisNet and TCN authors.
"""

import contextlib
import dataclasses
import io
import math
from typing import Any

import numpy as np

from trellis_keras.files import checksum, read_file, read_npz
from trellis_keras.zoo.datasets.registry import SPLITS, DataDir, Dataset, register
from trellis_keras.zoo.datasets.sources import Source, read_tfds

MNIST = Source(
    tuple(
        f"mnist/{split}-{kind}-ubyte"
        for split in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
)
# Each PNG file has 1,000 vertically stacked images.
CIFAR10 = Source(
    (
        "cifar10/labels.npz",
        *(f"cifar10/train_{i:02}.png" for i in range(50)),
        *(f"cifar10/test_{i:02}.png" for i in range(10)),
    )
)
_MAX_STRIP = 1_000


@dataclasses.dataclass(frozen=True)
class PublishedImages:
    """Shape of an image, numbers of images, and normalization of a data set."""

    shape: tuple[int, int, int]
    train: int
    test: int
    mean: float
    deviation: float
    validation: int = 5_000


PUBLISHED = {
    "seq_mnist": PublishedImages((28, 28, 1), 60_000, 10_000, 0.1307, 0.3081),
    "seq_cifar10": PublishedImages((32, 32, 3), 50_000, 10_000, 0.5, 0.5),
}

_MNIST_TERMS: dict[str, Any] = {
    "citation": "MNIST by LeCun, Cortes and Burges (1998)",
    "license": "commonly given as CC BY-SA 3.0",
    "batch_options": ("shift",),
}


@register(**_MNIST_TERMS, source=MNIST)
def seq_mnist(data_dir: DataDir) -> Dataset:
    """MNIST row by row: x (images, 784, 1), y the digit; 55,000, 5,000 and 10,000 images."""

    def read(paths):
        train, train_labels, test, test_labels = map(_read_idx, paths)
        return {"train": (train[..., None], train_labels), "test": (test[..., None], test_labels)}

    return _pixel_dataset("seq_mnist", MNIST.find(data_dir), read)


@register(**_MNIST_TERMS, source=MNIST)
def permuted_mnist(data_dir: DataDir) -> Dataset:
    """MNIST with the 784 pixels of every image in the order of `pixel_permutation()`."""
    dataset = seq_mnist(data_dir)
    order = pixel_permutation()
    splits = {split: getattr(dataset, split) for split in SPLITS}
    splits = {split: (x[:, order], y) for split, (x, y) in splits.items()}
    digest = checksum([dataset.checksum.encode(), order.astype("<i8")])
    return dataclasses.replace(dataset, name="permuted_mnist", checksum=digest, **splits)


@register(
    citation="CIFAR-10 by Krizhevsky (2009), who asks for citation",
    license="no license is stated",
    batch_options=("shift", "flip"),
    source=CIFAR10,
)
def seq_cifar10(data_dir: DataDir) -> Dataset:
    """CIFAR-10 row by row: x (images, 1024, 3), y the class; 45,000, 5,000 and 10,000 images.

    A local copy consists of PNG files with 1,000 images one below the other, and of
    `cifar10/labels.npz` with the arrays `y_train` and `y_test`.
    """

    def read(paths):
        labels_path, *strips = paths
        with _refuse_damage(labels_path):
            arrays = read_npz(io.BytesIO(read_file(labels_path)))
            labels = {split: arrays[f"y_{split}"] for split in ("train", "test")}
        images = {}
        for split in labels:
            parts = [_read_strip(path) for path in strips if path.name.startswith(split)]
            images[split] = np.concatenate(parts), labels[split]
        return images

    return _pixel_dataset("seq_cifar10", CIFAR10.find(data_dir), read)


def pixel_permutation() -> np.ndarray:
    """Returns the order in which `permuted_mnist` reads the pixels of an image.

    The papers do not publish theirs. This is the first permutation of
    `numpy.random.RandomState(92916)`, whose numbers NumPy promises never to change.

    Returns:
        Integer array of shape (784,): step t reads pixel `pixel_permutation()[t]`.

    Example:

    >>> pixel_permutation()[:4]
    array([319, 576, 323, 107])
    """
    return np.random.RandomState(92916).permutation(28 * 28)


def _pixel_sequences(images, mean, deviation):
    """images (images, height, width, channels) as normalized sequences, from the top left."""
    count, height, width, channels = images.shape
    x = images.reshape(count, height * width, channels).astype("float32")
    x /= 255
    x -= mean
    x /= deviation
    return x


def augment_images(
    name: str, x: np.ndarray, generator: np.random.Generator, shift: int = 0, flip: float = 0.0
) -> np.ndarray:
    """Shifts images randomly along each axis, padding with black, and mirrors some of them.

    Args:
        name: String, the data set: `"seq_mnist"`, `"permuted_mnist"` or `"seq_cifar10"`.
        x: Float array of shape (images, pixels, channels), as the data set has them.
        generator: `numpy.random.Generator`, draws shifts and mirroring of each image.
        shift: Nonnegative integer, the largest shift. Defaults to `0`.
        flip: Float in [0, 1], the probability of mirroring an image, left to right. Defaults to
            `0`.

    Returns:
        Array of the shape of `x`.
    """
    published = PUBLISHED["seq_mnist" if name == "permuted_mnist" else name]
    height, width, _ = published.shape
    order = pixel_permutation() if name == "permuted_mnist" else np.arange(height * width)
    images = x[:, np.argsort(order)].reshape(len(x), *published.shape)
    black = -published.mean / published.deviation
    edge = (shift, shift)
    padded = np.pad(images, ((0, 0), edge, edge, (0, 0)), constant_values=black)
    starts = generator.integers(0, 2 * shift + 1, (len(x), 2))
    moved = np.stack(
        [
            image[top : top + height, left : left + width]
            for image, (top, left) in zip(padded, starts, strict=True)
        ]
    )
    mirrored = generator.random(len(x)) < flip
    moved[mirrored] = moved[mirrored, :, ::-1]
    return moved.reshape(x.shape)[:, order]


def _pixel_dataset(name, paths, read):
    """Reads, checks, sorts and splits images: {"train" or "test": (images, labels)}."""
    published = PUBLISHED[name]
    if paths:
        images = read(paths)
    else:
        found = read_tfds(name.removeprefix("seq_"))
        images = {split: (arrays["image"], arrays["label"]) for split, arrays in found.items()}
    ordered = {}
    for split, (pixels, labels) in images.items():
        _check_images(name, split, pixels, labels)
        pairs = zip(pixels, labels.tolist(), strict=True)
        contents = [checksum([image.tobytes(), bytes([label])]) for image, label in pairs]
        order = np.argsort(contents, kind="stable")
        ordered[split] = pixels[order], labels[order].astype("uint8")
    digest = checksum(array for pair in ordered.values() for array in pair)
    pixels, labels = ordered.pop("train")
    cut = len(pixels) - published.validation
    splits = {"train": (pixels[:cut], labels[:cut]), "valid": (pixels[cut:], labels[cut:])}
    sequences = {
        split: (_pixel_sequences(x, published.mean, published.deviation), y.astype("int32"))
        for split, (x, y) in (splits | ordered).items()
    }
    return Dataset(name, **sequences, checksum=digest)


def _check_images(name, split, images, labels):
    published = PUBLISHED[name]
    count = getattr(published, split)
    shapes = (count, *published.shape), (count,)
    if (images.shape, labels.shape) != shapes or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{name} {split} is not the published set: expected images {shapes[0]} and integer "
            f"labels {shapes[1]}, found {images.shape} and {labels.dtype} {labels.shape}"
        )
    if not 0 <= labels.min() <= labels.max() < 10:
        raise ValueError(
            f"{name} {split}: labels must lie in [0, 10). "
            f"Received: {labels.min()} to {labels.max()}"
        )


def _read_idx(path):
    """Reads an idx file: two zeros, type 8 (uint8), number of axes, sizes, then the numbers."""
    content = read_file(path)
    axes = content[3] if len(content) > 3 else 0
    header = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or axes not in (1, 3) or len(content) < header:
        raise ValueError(f"{path} is not an idx file of bytes with 1 or 3 axes, or is truncated")
    shape = np.frombuffer(content, ">u4", axes, 4).tolist()
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise ValueError(
            f"{path} is truncated or too long: its header states {expected:,} bytes, "
            f"found {len(content):,}"
        )
    return np.frombuffer(content, "uint8", offset=header).reshape(shape)


def _read_strip(path):
    """Reads a PNG file of vertically stacked images."""
    height, width, channels = PUBLISHED["seq_cifar10"].shape
    import PIL.Image

    bomb = PIL.Image.DecompressionBombError
    # From memory, because from a file Pillow would read as many bytes as a chunk claims. PNG only,
    # because Pillow runs other programs for some formats.
    file = io.BytesIO(read_file(path))
    with _refuse_damage(path, bomb), PIL.Image.open(file, formats=["PNG"]) as image:
        # The size is known before any pixel is decoded.
        if image.width != width or image.height % height or image.height > _MAX_STRIP * height:
            raise ValueError(
                f"it must hold up to {_MAX_STRIP} images of {width} x {height} pixels, one below "
                f"the other. Received: {image.width} x {image.height} pixels"
            )
        pixels = np.asarray(image)
        if pixels.shape[2:] != (channels,):
            raise ValueError(f"it must have {channels} channels. Received: mode {image.mode!r}")
    return pixels.reshape(-1, height, width, channels)


@contextlib.contextmanager
def _refuse_damage(path, *others):
    """Names the file that a library cannot read, for usual errors and `others`."""
    try:
        yield
    except (OSError, EOFError, KeyError, ValueError, SyntaxError, *others) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
