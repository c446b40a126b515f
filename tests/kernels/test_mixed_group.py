"""The product group by group, against the product with a kernel whose other entries are zero."""

import numpy as np
import pytest

from trellis_keras.kernels.mixed_group import GroupedProduct

pytestmark = pytest.mark.both_backends

BLOCKS = 2


def mixed_kernel(groups, past_taps, current_taps, random):
    """A kernel (tap, units, BLOCKS * units) with the connections of Eq. (5)."""
    units, taps = sum(groups), past_taps + current_taps
    group = np.repeat(np.arange(len(groups)), groups)
    feeds = np.stack([group] * past_taps + [group + 1] * current_taps)
    connected = feeds[:, :, None] == np.tile(group, BLOCKS)
    return np.where(connected, random.normal(size=(taps, units, BLOCKS * units)), 0)


@pytest.mark.parametrize("groups", [[4], [2, 3], [1, 3, 2]])
@pytest.mark.parametrize("past_taps, current_taps", [(1, 1), (2, 1), (2, 0), (0, 1)])
def test_equals_the_product_with_the_zeros(past_taps, current_taps, groups):
    random = np.random.default_rng(0)
    kernel = mixed_kernel(groups, past_taps, current_taps, random)
    taps, units, filters = kernel.shape
    seen = random.normal(size=(3, 5, taps * units))
    multiply = GroupedProduct(kernel.astype("float32"), past_taps, groups, "float32")
    found = multiply(seen.astype("float32"))
    np.testing.assert_allclose(found, seen @ kernel.reshape(-1, filters), atol=1e-5)
