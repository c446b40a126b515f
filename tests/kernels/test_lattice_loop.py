"""The loop over a lattice's steps. `tests/layers/test_lru.py` compares it with the cell."""

import keras
import pytest

from trellis_keras.kernels.lattice_loop import lattice_loop
from trellis_keras.layers import LRUCell

UNITS = 4


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
                z_keeps=False,
                compute_dtype=keras.config.floatx(),
            )
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, [w.value for w in cell.weights])

    graph = gradients.get_concrete_function().graph.as_graph_def()
    bodies = [f for f in graph.library.function if "_body_" in f.signature.name]
    products = [sum(node.op == "MatMul" for node in f.node_def) for f in bodies]
    assert products == [2, 2]
