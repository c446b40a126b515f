import hashlib

import numpy as np
import pytest

from trellis_keras.zoo.datasets import adding_examples, copy_memory_examples, load


def test_adding_layout():
    x, y = adding_examples(T=7, count=500, seed=3)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((500, 7, 2), "float32", (500, 1), "float32")
    assert x[:, :, 0].min() >= 0 and x[:, :, 0].max() < 1
    assert set(np.unique(x[:, :, 1])) == {0, 1}
    np.testing.assert_array_equal(x[:, :, 1].sum(axis=1), 2)
    np.testing.assert_allclose((x[:, :, 0] * x[:, :, 1]).sum(axis=1), y[:, 0], rtol=1e-6)


@pytest.mark.parametrize("T", [1, 2, 30])
def test_copy_memory_layout(T):
    x, y = copy_memory_examples(T, count=50, seed=3)
    assert (x.shape, x.dtype, y.shape, y.dtype) == (
        (50, T + 20, 1),
        "float32",
        (50, T + 20),
        "int32",
    )
    digits = x[:, :10, 0]
    assert set(np.unique(digits)) == set(range(1, 9))
    assert np.all(x[:, 10 : T + 9] == 0)
    assert np.all(x[:, T + 9 :] == 9) and x[:, T + 9 :].shape[1] == 11
    assert np.all(y[:, :-10] == 0)
    np.testing.assert_array_equal(y[:, -10:], digits)


@pytest.mark.parametrize(
    "name, checksum", [("adding", "ba2c468db2262473"), ("copy_memory", "78c3322c04eca486")]
)
def test_generated_numbers_are_pinned(name, checksum):
    dataset = load(name, T=6, train=20, valid=5, test=5)
    digest = hashlib.sha256()
    for x, y in (dataset.train, dataset.valid, dataset.test):
        digest.update(x.tobytes() + y.tobytes())
    assert dataset.checksum == digest.hexdigest()
    assert dataset.checksum[:16] == checksum


@pytest.mark.parametrize("name", ["adding", "copy_memory"])
def test_splits_share_no_numbers(name):
    dataset = load(name, T=10, train=30, valid=30, test=30)
    splits = [dataset.train, dataset.valid, dataset.test, load(name, T=10, seed=1, train=30).train]
    assert len({row.tobytes() for x, _ in splits for row in x}) == 120
    longer = load(name, T=10, train=50, valid=30, test=30)
    np.testing.assert_array_equal(longer.test[0], dataset.test[0])


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("adding", {"T": 1}, r"`T` must be an integer >= 2. Received: T=1"),
        ("copy_memory", {"T": 0}, r"`T` must be a positive integer. Received: T=0"),
        ("adding", {"T": 2.5}, r"Received: T=2.5"),
        ("adding", {"T": 9, "valid": 0}, "`valid` must be a positive integer"),
        ("copy_memory", {"T": 9, "seed": -1}, "`seed` must be an integer >= 0"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)
