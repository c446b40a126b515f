"""Images as sequences of pixels: MNIST, also permuted, and CIFAR-10.

The last part of the published training set, 5,000 images, is for validation. Images stand in the
order of the sha256 of their pixels and label: every source gives the same arrays and so the same
validation images, in whatever order it keeps them.

Pixels are normalised as in the TrellisNet and TCN authors' programs.
"""

import contextlib
import dataclasses
import hashlib
import io
import math

import numpy as np

from trellis_keras.data.registry import register
from trellis_keras.data.sources import SPLITS, checksum, import_builders, local_sources
from trellis_keras.data.splits import Examples, Splits
from trellis_keras.files import read_npz

_CLASSES = 10
_IDX_FILES = {
    "train images": "mnist/train-images-idx3-ubyte",
    "train labels": "mnist/train-labels-idx1-ubyte",
    "test images": "mnist/t10k-images-idx3-ubyte",
    "test labels": "mnist/t10k-labels-idx1-ubyte",
}
_STRIPS = {"train": 50, "test": 10}
_STRIP = 1_000  # images in one of these files
_CIFAR10_FILES = {"labels": "cifar10/labels.npz"} | {
    f"{split} {i}": f"cifar10/{split}_{i:02}.png" for split, n in _STRIPS.items() for i in range(n)
}


@dataclasses.dataclass(frozen=True)
class _Published:
    """What is known of a data set of images; `shape` is that of one."""

    name: str
    shape: tuple
    train: int
    test: int
    validation: int
    mean: float
    deviation: float


MNIST = _Published("seq_mnist", (28, 28, 1), 60_000, 10_000, 5_000, 0.1307, 0.3081)
CIFAR10 = _Published("seq_cifar10", (32, 32, 3), 50_000, 10_000, 5_000, 0.5, 0.5)


@register
def seq_mnist(data_dir):
    """MNIST row by row: x (images, 784, 1), y the digit; 55,000, 5,000 and 10,000 images."""
    return _image_splits(MNIST, _read_mnist(data_dir))


@register
def permuted_mnist(data_dir):
    """MNIST with the 784 pixels of every image in one other order, `pixel_permutation()`."""
    splits = seq_mnist(data_dir)
    order = pixel_permutation()
    parts = {split: getattr(splits, split) for split in SPLITS}
    parts = {split: Examples(part.x[:, order], part.y) for split, part in parts.items()}
    digest = checksum([splits.checksum.encode(), order.astype("<i8")])
    return Splits("permuted_mnist", checksum=digest, **parts)


@register
def seq_cifar10(data_dir):
    """CIFAR-10 row by row: x (images, 1024, 3), y the class; 45,000, 5,000 and 10,000 images.

    A local copy is 50 and 10 PNG files of 1,000 images one under another,
    `cifar10/train_00.png` to `cifar10/test_09.png`, and the labels `y_train` and `y_test` in
    `cifar10/labels.npz`.
    """
    return _image_splits(CIFAR10, _read_cifar10(data_dir))


def pixel_permutation():
    """The order in which `permuted_mnist` reads an image's pixels.

    The papers do not publish theirs. This one is the first permutation of
    `numpy.random.RandomState(92916)`, whose numbers NumPy promises never to change.

    Returns:
        An integer array of shape (784,): step t reads pixel `pixel_permutation()[t]`.

    Example:

    >>> pixel_permutation()[:4]
    array([319, 576, 323, 107])
    """
    return np.random.RandomState(92916).permutation(28 * 28)


def pixel_sequences(images, mean, deviation):
    """Images as sequences of pixels, row by row from the top left.

    Args:
        images: uint8 array of shape (images, height, width, channels).
        mean: What is subtracted once the pixels lie in [0, 1].
        deviation: What they are then divided by.

    Returns:
        A float32 array of shape (images, height * width, channels).

    Raises:
        ValueError: If `images` has another number of axes.

    Example:

    >>> pixel_sequences(np.full((1, 2, 2, 1), 255, "uint8"), 0.5, 0.5).tolist()
    [[[1.0], [1.0], [1.0], [1.0]]]
    """
    if images.ndim != 4:
        raise ValueError(
            "`images` must have the shape (images, height, width, channels). "
            f"Received: shape {images.shape}"
        )
    count, height, width, channels = images.shape
    x = images.reshape(count, height * width, channels).astype("float32")
    x /= 255
    x -= mean
    x /= deviation
    return x


def _image_splits(published, arrays):
    """Checks, orders and cuts what `_read_...` returned: {split: (images, labels)}."""
    ordered = {}
    for split, (images, labels) in arrays.items():
        _check_images(published, split, images, labels)
        order = _content_order(images, labels)
        ordered[split] = images[order], labels[order].astype("uint8")
    digest = checksum(array for split in ("train", "test") for array in ordered[split])
    images, labels = ordered["train"]
    cut = len(images) - published.validation
    parts = {
        "train": (images[:cut], labels[:cut]),
        "valid": (images[cut:], labels[cut:]),
        "test": ordered["test"],
    }
    examples = {
        split: Examples(
            pixel_sequences(images, published.mean, published.deviation), labels.astype("int32")
        )
        for split, (images, labels) in parts.items()
    }
    return Splits(published.name, checksum=digest, **examples)


def _content_order(images, labels):
    pairs = zip(images, labels.tolist(), strict=True)
    return np.argsort(
        [hashlib.sha256(image.tobytes() + bytes([label])).hexdigest() for image, label in pairs],
        kind="stable",
    )


def _check_images(published, split, images, labels):
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{published.name} {split}: labels must be integers of shape (images,). "
            f"Received: shape {labels.shape}, {labels.dtype}"
        )
    if images.shape[1:] != published.shape:
        raise ValueError(
            f"{published.name} {split}: images must have the shape {published.shape}. "
            f"Received: {images.shape[1:]}"
        )
    expected = getattr(published, split)
    if not len(images) == len(labels) == expected:
        raise ValueError(
            f"{published.name} {split} is not the published set: expected {expected:,} images "
            f"and labels, found {len(images):,} and {len(labels):,}"
        )
    if not 0 <= labels.min() <= labels.max() < _CLASSES:
        raise ValueError(
            f"{published.name} {split}: labels must lie in [0, {_CLASSES}). "
            f"Received: {labels.min()} to {labels.max()}"
        )


def _read_mnist(data_dir):
    sources = local_sources(_IDX_FILES, data_dir)
    if sources is None:
        return _downloaded("mnist")
    files = {part: _parse_idx(source) for part, source in zip(_IDX_FILES, sources, strict=True)}
    return {
        split: (files[f"{split} images"][..., None], files[f"{split} labels"])
        for split in ("train", "test")
    }


def _parse_idx(source):
    """An idx file: two zeros, type 8 (uint8), number of axes, sizes, then the numbers."""
    content = source.content
    axes = content[3] if len(content) > 3 else 0
    header = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or axes not in (1, 3) or len(content) < header:
        raise ValueError(
            f"{source.label} is not an idx file of bytes with 1 or 3 axes, or its header is cut off"
        )
    shape = np.frombuffer(content, ">u4", axes, 4).tolist()
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise ValueError(
            f"{source.label} is cut off or too long: its header promises {expected:,} bytes, "
            f"found {len(content):,}"
        )
    return np.frombuffer(content, "uint8", offset=header).reshape(shape)


def _read_cifar10(data_dir):
    sources = local_sources(_CIFAR10_FILES, data_dir)
    if sources is None:
        return _downloaded("cifar10")
    files = dict(zip(_CIFAR10_FILES, sources, strict=True))
    with _naming(files["labels"]):
        arrays = read_npz(io.BytesIO(files["labels"].content))
        labels = {split: arrays[f"y_{split}"] for split in _STRIPS}
    images = {
        split: np.concatenate([_parse_strip(files[f"{split} {i}"]) for i in range(count)])
        for split, count in _STRIPS.items()
    }
    return {split: (images[split], labels[split]) for split in _STRIPS}


def _parse_strip(source):
    import PIL.Image

    height, width, channels = CIFAR10.shape
    file, too_large = io.BytesIO(source.content), PIL.Image.DecompressionBombError
    # No other format: Pillow gives some of them to other programs.
    with _naming(source, too_large), PIL.Image.open(file, formats=["PNG"]) as image:
        # Known before any pixel is unpacked.
        if image.width != width or image.height % height or image.height > _STRIP * height:
            raise ValueError(
                f"its images must be {width} x {height} pixels, at most {_STRIP} one under "
                f"another. Received: {image.width} x {image.height} pixels"
            )
        pixels = np.asarray(image)
        if pixels.shape[2:] != (channels,):
            raise ValueError(f"it must have {channels} channels. Received: mode {image.mode!r}")
    return pixels.reshape(-1, *CIFAR10.shape)


@contextlib.contextmanager
def _naming(source, *others):
    """Names the file that a library cannot read; `others` are its own errors."""
    try:
        yield
    except (OSError, EOFError, KeyError, ValueError, SyntaxError, *others) as error:
        raise ValueError(f"{source.label} is not sound, or cut off: {error}") from error


def _downloaded(name):
    arrays = import_builders().read_arrays(name)
    return {split: (arrays[split]["image"], arrays[split]["label"]) for split in ("train", "test")}
