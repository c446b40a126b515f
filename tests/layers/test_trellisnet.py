"""TrellisLayer."""

import functools

import pytest

from tests.support.layer_checks import check_layer
from trellis_keras.layers import TrellisLayer

VARIANTS = {
    "lstm": {"output_units": 3, "dropout": 0.3, "weight_dropout": 0.4, "seed": 5},
    "gru": {"cell": "gru", "kernel_size": 3, "dilation_rate": [1, 2], "weight_norm": True},
}


@pytest.mark.both_backends
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer(variant):
    check_layer(functools.partial(TrellisLayer, 8, 5, **VARIANTS[variant]), (2, 9, 4))
