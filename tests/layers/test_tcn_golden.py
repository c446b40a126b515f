"""TCN against the authors' program: the output of every block, and gradients."""

import pytest
from keras import ops

from tests.support.golden import family, tcn_layer, to_keras_time, variables_and_references
from tests.support.gradients import value_and_gradients

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]


@pytest.mark.parametrize("case", ["k2", "k3_widen", "k7_deep"])
def test_core(case, golden, assert_close):
    arrays = golden(f"tcn_core_{case}")
    layer = tcn_layer(arrays)
    reference = family(arrays, "grad")
    gradients = variables_and_references(layer, reference)

    def loss(x):
        y = layer(x)
        blocks = [x]
        for block in layer.blocks:
            blocks.append(block(blocks[-1]))
        return ops.sum(ops.square(y)), (y, blocks[1:])

    (value, (y, blocks)), by_variable, (by_x,) = value_and_gradients(
        loss, [variable for _, variable, _ in gradients], to_keras_time(arrays["in.x"])
    )
    assert_close(y, to_keras_time(arrays["out.y_f64"]), "output", "y")
    for i, block in enumerate(blocks):
        assert_close(block, to_keras_time(arrays[f"out.block{i}_f64"]), "output", f"block {i}")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    assert_close(by_x, to_keras_time(reference["x"]), "gradient", "x")
    for (name, _, wanted), gradient in zip(gradients, by_variable, strict=True):
        assert_close(gradient, wanted, "gradient", name)
