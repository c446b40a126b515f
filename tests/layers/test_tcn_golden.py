"""TCN against the authors' program: the output of every block, and gradients."""

import pytest
from keras import ops

from tests.support.golden import family, tcn_layer, to_keras_time
from tests.support.gradients import value_and_gradients
from trellis_keras.interop import parameters

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]


@pytest.mark.parametrize("case", ["k2", "k3_widen", "k7_deep"])
def test_core(case, golden, assert_close):
    arrays = golden(f"tcn_core_{case}")
    layer = tcn_layer(arrays)
    variables = parameters(layer)

    def loss(x):
        y = layer(x)
        blocks = [x]
        for block in layer.blocks:
            blocks.append(block(blocks[-1]))
        return ops.sum(ops.square(y)), (y, blocks[1:])

    (value, (y, blocks)), by_variable, (by_x,) = value_and_gradients(
        loss, [variable for variable, _ in variables.values()], to_keras_time(arrays["in.x"])
    )
    assert_close(y, to_keras_time(arrays["out.y_f64"]), "output", "y")
    for i, block in enumerate(blocks):
        assert_close(block, to_keras_time(arrays[f"out.block{i}_f64"]), "output", f"block {i}")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    reference = family(arrays, "grad")
    assert_close(by_x, to_keras_time(reference["x"]), "gradient", "x")
    for (name, (_, convert)), gradient in zip(variables.items(), by_variable, strict=True):
        assert_close(gradient, convert(reference[name]), "gradient", name)
