"""The lattice loop equals the cell's equations, one step after the other; so do its gradients."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import assert_all_close, noise, randomize
from trellis_keras.kernels.lattice_loop import lattice_loop
from trellis_keras.layers import LRUCell

TIME, BATCH, UNITS = 5, 3, 4
VALID = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]], bool)[..., None]

CASES = {
    "ug": {"variant": "ug"},
    "rg": {"variant": "rg"},
    "ps": {"variant": "ps", "convention": "authors"},
    "ug, valid, masks": {"variant": "ug", "valid": VALID, "dropout": True},
    "ps, valid, masks": {"variant": "ps", "valid": VALID, "dropout": True},
    "ug, last step": {"variant": "ug", "last_only": True},
    "rg, last step, masks": {"variant": "rg", "last_only": True, "dropout": True},
}


def stepwise(cell, h1, h2, valid, masks):
    """h1' of all steps and the last h2, by the cell."""
    outputs = []
    for t in range(TIME):
        y, new = cell.advance(h1[t], h2, masks)
        h2 = new if valid is None else ops.where(valid[t], new, h2)
        outputs.append(y)
    return ops.stack(outputs), h2


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if "masks" in case else pytest.mark.slow_elsewhere)
        for case in CASES
    ],
)
def test_equals_the_cell(case):
    options = dict(CASES[case])
    valid, last_only = options.pop("valid", None), options.pop("last_only", False)
    masks = (None, None)
    if options.pop("dropout", False):
        masks = tuple(2.0 * (noise(BATCH, UNITS, seed=seed) > 0) for seed in (5, 6))
    cell = LRUCell(UNITS, **options)
    cell.build((None, UNITS))
    randomize(cell)

    def by_loop(h1, h2):
        return lattice_loop(
            h1,
            h2,
            *cell.weights_of(0, h2.dtype),
            gates=cell.gates,
            update_gate_keeps=cell.update_gate_keeps,
            compute_dtype=keras.config.floatx(),
            valid=None if valid is None else ops.convert_to_tensor(valid),
            masks=masks,
            last_only=last_only,
        )

    def by_steps(h1, h2):
        y, last = stepwise(cell, h1, h2, valid, masks)
        return (y[-1:] if last_only else y), last

    # The outputs of masked steps are anything.
    counted = np.ones((TIME, BATCH, 1)) if valid is None else valid
    counted = counted[-1:].astype(keras.config.floatx()) if last_only else counted
    counted = np.asarray(counted, keras.config.floatx())

    def results(function):
        def loss(h1, h2):
            y, last = function(h1, h2)
            y = y * counted
            return ops.sum(ops.sin(3 * y)) + ops.sum(ops.sin(2 * last)), (y, last)

        inputs = noise(TIME, BATCH, UNITS), noise(BATCH, UNITS, seed=1)
        (_, outputs), by_weight, by_input = value_and_gradients(loss, cell.weights, *inputs)
        return [*outputs, *by_weight, *by_input]

    assert_all_close(results(by_loop), results(by_steps))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads a TensorFlow graph")
def test_a_step_has_two_products_and_its_gradient_two():
    """So the gradients of the weights are not added up step by step."""
    import tensorflow as tf

    cell = LRUCell(UNITS)
    cell.build((None, UNITS))
    shapes = [(None, None, UNITS), (None, UNITS)]

    @tf.function(input_signature=[tf.TensorSpec(shape) for shape in shapes])
    def gradients(h1, h2):
        with tf.GradientTape() as tape:
            y, _ = lattice_loop(
                h1,
                h2,
                *cell.weights_of(0, "float32"),
                gates=cell.gates,
                update_gate_keeps=False,
                compute_dtype=keras.config.floatx(),
            )
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, [w.value for w in cell.weights])

    graph = gradients.get_concrete_function().graph.as_graph_def()
    bodies = [f for f in graph.library.function if "_body_" in f.signature.name]
    products = [sum(node.op == "MatMul" for node in f.node_def) for f in bodies]
    assert products == [2, 2]
