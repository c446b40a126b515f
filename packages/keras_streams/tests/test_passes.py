"""From a traced step to operations: what vanishes, merges, folds, and when it runs."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_streams import passes
from keras_streams.c_export import step_program
from keras_streams.exported_stream import exported_stream

pytestmark = pytest.mark.both_backends


def program_of(function, shape=(None, 3)):
    """A model's step after all passes: the program and its groups."""
    x = keras.Input(shape)
    program = step_program(exported_stream(keras.Model(x, function(x))))
    return program, passes.optimize(program)


def kinds(groups):
    return [group[0].kind for group in groups]


def test_moves_vanish():
    def moves(x):
        y = ops.flip(x, axis=-1)
        return ops.concatenate([y, ops.squeeze(y[..., None], -1)[..., 1:]], axis=-1)

    program, groups = program_of(moves)
    assert groups == []
    start = program.inputs[0].base
    assert (program.output - start).tolist() == [2, 1, 0, 1, 0]


def test_what_depends_on_weights_alone_is_folded():
    table = np.arange(3, dtype="float32")
    program, groups = program_of(lambda x: x * ops.exp(ops.zeros_like(x) + table))
    assert kinds(groups) == ["map"] and len(groups[0]) == 1
    np.testing.assert_allclose(program.values(groups[0][0].args[1]), np.exp(table))


def test_biases_and_batch_normalization_become_part_of_a_product():
    def net(x):
        y = layers.Dense(4, bias_initializer="ones")(x)
        return layers.BatchNormalization(gamma_initializer="ones")(y + layers.Dense(4)(x))

    _, groups = program_of(net)
    assert kinds(groups) == ["product"]
    (op,) = groups[0]
    assert len(op.matrices) == 2 and np.any(op.args[0])


def test_a_scale_becomes_part_of_a_product():
    _, groups = program_of(lambda x: 3.0 * layers.Dense(4, kernel_initializer="ones")(x))
    ((op,),) = groups
    np.testing.assert_array_equal(op.matrices[0], 3)


def test_equal_operations_are_computed_once():
    _, groups = program_of(lambda x: ops.exp(x) + ops.log(ops.exp(x)))
    assert [op.name for op in groups[0]] == ["Exp", "Log", "Add"]


def test_maps_fuse_unless_one_reads_other_elements():
    _, groups = program_of(lambda x: ops.exp(ops.sin(x)) * 2.0)
    assert [len(group) for group in groups] == [3]
    _, groups = program_of(lambda x: ops.flip(ops.sin(x), axis=-1) * 2.0)
    assert [len(group) for group in groups] == [1, 1]


def test_a_shifting_state_is_a_ring():
    program, groups = program_of(layers.Conv1D(4, 3, dilation_rate=2, padding="causal"))
    (state,) = program.states
    assert (state.ring.rows, state.ring.width) == (4, 3)
    assert kinds(groups) == ["product", "store"]  # the oldest row is read before it is replaced


def test_rings_that_move_together_share_a_head():
    def net(x):
        y = layers.Conv1D(4, 3, padding="causal")(x)
        return layers.Conv1D(4, 3, padding="causal")(y)

    program, _ = program_of(net)
    assert len(program.states) == 2 and len({b.ring.head for b in program.states}) == 1


def test_layers_after_strides_run_when_they_are_due():
    def net(x):
        y = layers.Conv1D(4, 2, strides=2, activation="relu")(x)
        return layers.Dense(5)(layers.LSTM(3, return_sequences=True)(y))

    program, groups = program_of(net)
    products = [group[0] for group in groups if group[0].kind == "product"]
    assert products and all(op.guard for op in products)
    for address in products[0].guard:
        assert program.owner(address).dtype == "bool"


def test_counters_are_integers():
    program, _ = program_of(layers.MaxPooling1D(3))
    assert "int64" in {b.dtype for b in program.states}
    program, groups = program_of(lambda x: layers.GlobalAveragePooling1D()(x))
    (division,) = (op for group in groups for op in group if op.name == "Divide")
    assert program.owner(int(division.args[1][0])).dtype == "int64"
    program, _ = program_of(layers.SimpleRNN(3))  # zeros at first, but no counter
    assert {b.dtype for b in program.states} == {"float32"}


@pytest.mark.parametrize("strides", (1, 2))  # at every step, or only at some
def test_integers_are_stored_as_integers(strides):
    down = layers.Conv1D(2, 2, strides=strides, padding="causal")
    program, _ = program_of(lambda x: layers.GlobalMaxPooling1D()(down(x)))
    stores = [op for op in program.stores if op.buffer.dtype == "int64"]
    assert stores  # whether there was a sample
    assert {b.dtype for op in stores for b in program.owners(op.args[0])} == {"int64"}


def test_memory_is_shared_over_time():
    def deep(x):
        for _ in range(20):
            x = layers.Dense(16, activation="tanh")(x)
        return x

    program, groups = program_of(deep)
    offsets, sizes = passes.allocate(program, groups)
    assert sizes["float32"] <= 3 * 16 and len(offsets) >= 20


def test_rows_of_a_step_are_one_product():
    _, groups = program_of(layers.Dense(4), (None, 10, 3))
    (op,) = groups[0]
    assert op.kind == "product" and op.args[1].shape == (10, 3)


def test_the_operations_of_a_layer_carry_its_name():
    _, groups = program_of(layers.Dense(3, activation="tanh", name="hidden"))
    assert {op.scope for group in groups for op in group} == {"hidden"}
