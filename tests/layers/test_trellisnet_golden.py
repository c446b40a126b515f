"""TrellisLayer against the authors' program: outputs, states and gradients."""

import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    check_gradients,
    core_layer,
    family,
    floats,
    gradients_of_run,
    matched_variables,
    to_keras_time,
)
from tests.support.gradients import value_and_gradients

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

PLAIN = ["k2_d1", "k2_d124", "k2_d1_wnorm", "k3_d1"]
HISTORY = ["hist", "k2_d124_hist", "k3_d12_wnorm_hist"]
AUX = {"all_levels": 1, "aux": 2, "aux_last": 3}
REPACK = ["repack", "repack_k3_d13_wnorm"]


def initial_state(arrays):
    return [floats(arrays[f"in.{name}"][:, :, 0]) for name in ("h0", "c0")]


@pytest.mark.parametrize("case", PLAIN + HISTORY)
def test_core(case, golden, assert_close):
    arrays = golden(f"trellis_core_{case}")
    layer = core_layer(arrays)
    history = case in HISTORY

    def loss(x, *states):
        y, h, c = layer(x, initial_state=list(states) or None)
        return ops.sum(ops.square(y)), (y, h, c)

    (value, (y, h, c)), by_variable, by_input = value_and_gradients(
        loss,
        matched_variables(layer),
        to_keras_time(arrays["in.x"]),
        *(initial_state(arrays) if history else []),
    )
    assert_close(y, arrays["out.y_f64"], "output", "y")
    assert_close(h, arrays["out.h_f64"][:, :, 0], "output", "h")
    assert_close(c, arrays["out.c_f64"][:, :, 0], "output", "c")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    reference = family(arrays, "grad")
    check_gradients(layer, by_variable, reference, assert_close)
    assert_close(by_input[0], reference["x"].transpose(0, 2, 1), "gradient", "x")
    for name, gradient in zip(("h0", "c0"), by_input[1:], strict=False):
        assert_close(gradient, reference[name][:, :, 0], "gradient", name)


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("case", AUX)
def test_auxiliary_outputs(case, golden, assert_close):
    arrays = golden(f"trellis_core_{case}")
    layer = core_layer(arrays, aux_every=AUX[case], return_aux=True)
    states = initial_state(arrays) if arrays["meta"]["config"]["hist"] else None

    def loss(x):
        y, aux, _, _ = layer(x, initial_state=states)
        return ops.sum(ops.square(y)) + ops.sum(ops.square(aux)), (y, aux)

    (_, (y, aux)), by_variable, (by_x,) = value_and_gradients(
        loss, matched_variables(layer), to_keras_time(arrays["in.x"])
    )
    assert_close(y, arrays["out.y_f64"], "output", "y")
    assert_close(aux, arrays["out.aux_f64"], "output", "aux")
    reference = family(arrays, "gradaux")
    check_gradients(layer, by_variable, reference, assert_close)
    assert_close(by_x, reference["x"].transpose(0, 2, 1), "gradient", "x")


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("how", ["initial_state", "stateful"])
@pytest.mark.parametrize("case", REPACK)
def test_consecutive_segments(case, how, golden, assert_close):
    arrays = golden(f"trellis_core_{case}")
    layer = core_layer(arrays, stateful=how == "stateful")
    start = initial_state(arrays) if "h0" in family(arrays, "grad") else None
    if how == "stateful":
        layer.reset_state(batch_size=len(arrays["in.h0"]))
        layer.carry_states(start or [np.zeros_like(s) for s in initial_state(arrays)], False)
    states = start
    for segment in ("seg1", "seg2"):
        given = None if how == "stateful" else states

        def loss(x, given=given):
            y, *states = layer(x, initial_state=given)
            return ops.sum(ops.square(y)), (y, states)

        x = to_keras_time(arrays[f"in.x_{segment}"])
        (_, (y, states)), by_variable, (by_x,) = value_and_gradients(
            loss, matched_variables(layer), x
        )
        if how == "stateful":
            layer.carry_states(states, False)  # on JAX a gradient's side effects are dropped
        assert_close(y, arrays[f"out.y_{segment}_f64"], "output", segment)
        assert_close(states[0], arrays[f"out.h_{segment}_f64"][:, :, 0], "output", segment)
        reference = gradients_of_run(arrays, f"_{segment}")
        check_gradients(layer, by_variable, reference, assert_close)
        assert_close(by_x, reference["x"].transpose(0, 2, 1), "gradient", f"x {segment}")
